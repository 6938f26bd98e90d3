#!/usr/bin/env python3
"""loaders.py NAME PLAN.json OUT.json: one way of loading, in a process of its own, so that a loader
that cannot be imported, fails or crashes takes no other with it. peers.py starts it.

A loader is given the entries of store.py and adds to a Landed what it has on the device: of each
part of each layer the tensors in order. What is timed ends when the device is idle. Then every byte
is checked: the sum of all 64-bit words of each part, and samples of each tensor byte by byte."""
import gc
import importlib.metadata
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import store

SAMPLE_BYTES = 4096
REFERENCE_WORKERS = 4
REFERENCE_BATCH_LAYERS = 12


class Landed:
    """Tensors by layer and part, and when the first layer was whole."""

    def __init__(self, plan):
        self.plan = plan
        self.tensors = {}
        self.first_layer_bytes = sum(entry["bytes"] for entry in plan["entries"]
                                     if entry["layer"] == 0 and entry["part"] in store.BASE_PARTS)
        self.start = time.perf_counter()
        self.seconds_first_layer = None
        self.close = lambda: None

    def add(self, layer, part, piece, tensor):
        self.tensors.setdefault((layer, part), {})[piece] = tensor
        if layer == 0:
            self.first_layer_bytes -= tensor.numel()
            if self.first_layer_bytes == 0:
                synchronize(self.plan)
                self.seconds_first_layer = time.perf_counter() - self.start

    def add_named(self, name, tensor):
        _, layer, part, piece = name.split(".")
        self.add(int(layer), part, int(piece), tensor)


def synchronize(plan):
    if plan["device"] != "cpu":
        import torch
        torch.cuda.synchronize()


def paths(plan):
    return sorted({entry["path"] for entry in plan["entries"]})


def read_part(entry, device):
    """As the reference does: the whole file into fresh memory, from there to the device."""
    import numpy
    import torch
    return torch.from_numpy(numpy.fromfile(entry["path"], dtype=numpy.uint8)).to(device)


def by_layer(plan, parts):
    layers = {}
    for entry in plan["entries"]:
        if entry["part"] in parts:
            layers.setdefault(entry["layer"], []).append(entry)
    return sorted(layers.items())


def reference_serial(plan, landed):
    for layer, entries in by_layer(plan, store.BASE_PARTS):
        for entry in entries:
            landed.add(layer, entry["part"], 0, read_part(entry, plan["device"]))


def reference_fp4(plan, landed):
    """The FP4 parts are read and staged like the others, and dropped."""
    fp4 = dict(by_layer(plan, store.FP4_PARTS))
    for layer, entries in by_layer(plan, store.BASE_PARTS):
        if layer not in fp4:
            break
        for entry in entries:
            landed.add(layer, entry["part"], 0, read_part(entry, plan["device"]))
        for entry in fp4[layer]:
            read_part(entry, plan["device"])


def reference_workers(plan, landed):
    def load(entries):
        return [(entry["part"], read_part(entry, plan["device"])) for entry in entries]

    layers = by_layer(plan, store.BASE_PARTS)
    with ThreadPoolExecutor(REFERENCE_WORKERS) as pool:
        for begin in range(0, len(layers), REFERENCE_BATCH_LAYERS):
            batch = [(layer, pool.submit(load, entries))
                     for layer, entries in layers[begin:begin + REFERENCE_BATCH_LAYERS]]
            for layer, future in batch:
                for part, tensor in future.result():
                    landed.add(layer, part, 0, tensor)


def safetensors_open(plan, landed):
    from safetensors import safe_open
    for path in paths(plan):
        with safe_open(path, framework="pt", device=plan["device"]) as file:
            for name in file.keys():
                landed.add_named(name, file.get_tensor(name))


def safetensors_load(plan, landed):
    from safetensors.torch import load_file
    for path in paths(plan):
        for name, tensor in load_file(path, device=plan["device"]).items():
            landed.add_named(name, tensor)


def fast_load(plan, landed, **settings):
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup
    loader = SafeTensorsFileLoader(SingleGroup(), plan["device"], nogds=True, **settings)
    loader.add_filenames({0: paths(plan)})
    buffers = loader.copy_files_to_device()
    for name in loader.get_keys():
        landed.add_named(name, buffers.get_tensor(name))

    def close():
        buffers.close()
        loader.close()
    landed.close = close


def fastsafetensors(plan, landed):
    fast_load(plan, landed)


def fastsafetensors_buffers(plan, landed):
    """Its documentation's example of larger bounce buffers: slots of 16 MiB, two per thread."""
    fast_load(plan, landed, max_threads=16, bbuf_size_kb=2 * 16 * 16 * 1024)


def runai(plan, landed):
    from runai_model_streamer import SafetensorsStreamer
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(paths(plan), device=plan["device"])
        for name, tensor in streamer.get_tensors():
            landed.add_named(name, tensor)


def instanttensor(plan, landed):
    """On a disk its buffered policy, which its documentation has for models that are loaded
    repeatedly; the default would bypass the page cache."""
    from instanttensor import BackendPolicy, safe_open
    warm_disk = not plan["in_memory"] and not plan["cold"]
    settings = {"backend": BackendPolicy.BUFFERED} if warm_disk else {}
    with safe_open(paths(plan), framework="pt", device=plan["device"], **settings) as file:
        for name, tensor in file.tensors():
            landed.add_named(name, tensor)


LOADERS = {"reference-fp4": reference_fp4, "reference-serial": reference_serial,
           "reference-workers": reference_workers, "safetensors-open": safetensors_open,
           "safetensors-load": safetensors_load, "fastsafetensors": fastsafetensors,
           "fastsafetensors-buffers": fastsafetensors_buffers, "runai": runai,
           "runai-ring": runai, "runai-uring": runai, "instanttensor": instanttensor,
           "instanttensor-register": instanttensor, "instanttensor-cached": instanttensor}


def word_sum(tensor):
    import torch
    if tensor.data_ptr() % 8 != 0:
        tensor = tensor.clone()
    return tensor.flatten().view(torch.int64).sum().item()


def check(plan, landed):
    """Raises unless the device has the bytes of the files. Returns how many it compared."""
    total = 0
    layers = {layer for layer, _ in landed.tensors}
    for entry in plan["entries"]:
        if entry["layer"] not in layers or entry["part"] not in store.BASE_PARTS:
            continue
        where = f"layer {entry['layer']} {entry['part']}"
        pieces = landed.tensors[(entry["layer"], entry["part"])]
        ordered = [pieces[piece].flatten() for piece in sorted(pieces)]
        if any(tensor.device.type != plan["device"].split(":")[0] for tensor in ordered):
            raise ValueError(f"{where}: not on {plan['device']}")
        count = sum(tensor.numel() for tensor in ordered)
        if count != entry["bytes"]:
            raise ValueError(f"{where}: {count} bytes instead of {entry['bytes']}")
        found = sum(word_sum(tensor) for tensor in ordered) & store.WORD_MASK
        if found != entry["sum"]:
            raise ValueError(f"{where}: its words sum to {found} instead of {entry['sum']}")
        with open(entry["path"], "rb") as file:
            begin = 0
            for tensor in ordered:
                for offset in {0, tensor.numel() // 2 // 8 * 8, tensor.numel() - SAMPLE_BYTES}:
                    file.seek(entry["offset"] + begin + offset)
                    sample = tensor[offset:offset + SAMPLE_BYTES].cpu().numpy().tobytes()
                    if sample != file.read(len(sample)):
                        raise ValueError(f"{where}: other bytes at {begin + offset}")
                begin += tensor.numel()
        total += count
    return total


def measure(name, plan):
    rows = []
    for _ in range(plan["repetitions"] + 1):
        if plan["cold"]:
            store.drop_cache(plan["entries"])
        gc.collect()
        synchronize(plan)
        landed = Landed(plan)
        LOADERS[name](plan, landed)
        synchronize(plan)
        seconds = time.perf_counter() - landed.start
        checked = check(plan, landed)
        rows.append({"seconds": seconds, "seconds_first_layer": landed.seconds_first_layer,
                     "bytes": checked, "layers": len({layer for layer, _ in landed.tensors})})
        landed.tensors.clear()
        landed.close()
    return {"runs": rows}


def pinned(plan):
    """What the link gives: 256 MiB of pinned memory, copied in pieces of 16 MiB."""
    import torch
    piece, pieces = 2**24, 16
    source = torch.empty(piece * pieces, dtype=torch.uint8, pin_memory=True).random_()
    target = torch.empty(piece * pieces, dtype=torch.uint8, device=plan["device"])
    seconds = []
    for _ in range(21):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for index in range(pieces):
            part = slice(index * piece, (index + 1) * piece)
            target[part].copy_(source[part], non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    if not torch.equal(target.cpu(), source):
        raise ValueError("the copy differs")
    return {"gigabytes_per_second": piece * pieces / sorted(seconds)[10] / 1e9,
            "gpu": torch.cuda.get_device_name()}


PACKAGES = {"reference": "numpy", "pinned": "torch", "safetensors": "safetensors",
            "fastsafetensors": "fastsafetensors", "runai": "runai-model-streamer",
            "instanttensor": "instanttensor"}


def main():
    name, plan_path, out_path = sys.argv[1:]
    with open(plan_path) as file:
        plan = json.load(file)
    package = PACKAGES[name.split("-")[0]]
    try:
        versions = {each: importlib.metadata.version(each) for each in ("torch", "numpy", package)}
    except importlib.metadata.PackageNotFoundError as error:
        result = {"missing": f"{error.name} is not installed"}
    else:
        import torch
        if plan["device"] != "cpu":
            torch.zeros(1, device=plan["device"])  # the context is nobody's time
        result = pinned(plan) if name == "pinned" else measure(name, plan)
        result["versions"] = versions
    with open(out_path, "w") as file:
        json.dump(result, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
