#!/usr/bin/env python3
"""peers.py [--layers N] [--directory DIR] [--hotplane PROGRAM] [--only NAME,NAME] [--out FILE] ...

Loads the same number of bytes onto a GPU by hotplane, by the reference system's ways, which are
re-implemented from their description, and by public loaders, in one run: seconds, GB/s, share of
what pinned memory gives, ratio to hotplane. Each loader runs in a process of its own and all it
landed is checked; one that is not installed or fails has that for a row. Files are made and removed
one kind after the other, so DIR holds one of them at a time. README.md beside this says how it is
run."""
import argparse
import glob
import importlib.util
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date

import store

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))
from result_file import result_file  # noqa: E402

WHAT = {
    "hotplane-ring": "hotplane, making its pinned ring counted too",
    "hotplane": "hotplane, every byte verified",
    "hotplane-unverified": "hotplane, `--verify none`",
    "instanttensor": "InstantTensor",
    "instanttensor-register": "InstantTensor, registered mapping",
    "instanttensor-cached": "InstantTensor, host buffer kept between loads",
    "runai": "Run:ai Model Streamer",
    "runai-ring": "Run:ai Model Streamer, ring of 4 GB",
    "runai-uring": "Run:ai Model Streamer, ring of 4 GB, io_uring",
    "fastsafetensors": "fastsafetensors",
    "fastsafetensors-buffers": "fastsafetensors, 512 MiB of bounce buffers",
    "safetensors-open": "safetensors, `safe_open`",
    "safetensors-load": "safetensors, `load_file`",
    "reference-workers": "reference, 4 workers in batches of 12",
    "reference-serial": "reference, serial",
    "reference-fp4": "reference, serial, FP4 read too",
}
HOTPLANE = [name for name in WHAT if name.startswith("hotplane")]
REFERENCE = [name for name in WHAT if name.startswith("reference")]
PUBLIC = [name for name in WHAT if name not in HOTPLANE + REFERENCE]
BASIS = "hotplane-ring"  # what ratios are to: like the loaders, with all that its load needs

BUFFERED = {"FASTSAFETENSORS_ODIRECT": "0"}  # or it would go past the page cache
SMALL_RING = {"RUNAI_STREAMER_MEMORY_LIMIT": "4000000000"}
SETTINGS = {
    "fastsafetensors": BUFFERED, "fastsafetensors-buffers": BUFFERED, "runai-ring": SMALL_RING,
    "runai-uring": {**SMALL_RING, "RUNAI_STREAMER_FS_STRATEGY": "io_uring_buffered,sync_buffered"},
    "instanttensor-register": {"INSTANTTENSOR_USE_INTERNAL_MEMORY_REGISTER": "1"},
    "instanttensor-cached": {"INSTANTTENSOR_CACHE_BUFFER": "1"},
}


def parse(words):
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--layers", type=int, help="of DeepSeek-V4-Flash geometry; 16")
    parser.add_argument("--fp4-layers", type=int,
                        help="of these, how many with FP4 parts, for reference-fp4; all")
    parser.add_argument("--repetitions", type=int, help="beside the first run; 3")
    parser.add_argument("--directory", help="for the files; a temporary one")
    parser.add_argument("--hotplane", help="the program, to be in the table")
    parser.add_argument("--device", help="cuda:0, or cpu with --smoke")
    parser.add_argument("--only", help="names or beginnings of them: " + ", ".join(WHAT))
    parser.add_argument("--cold", action="store_true", help="drop the page cache before each load")
    parser.add_argument("--limit-seconds", type=float, default=0,
                        help="start nothing after so many, stop what runs; 0: none")
    parser.add_argument("--merge", help="a result file: rows that are not measured now stay")
    parser.add_argument("--out", type=result_file, help="result file")
    parser.add_argument("--smoke", action="store_true", help="a small size, on the CPU")
    options = parser.parse_args(words)
    shape = store.SMOKE if options.smoke else store.FULL
    options.shape = shape._replace(layers=options.layers or shape.layers)
    options.fp4_layers = min(options.fp4_layers or options.shape.layers, options.shape.layers)
    options.repetitions = options.repetitions or (1 if options.smoke else 3)
    options.device = options.device or ("cpu" if options.smoke else "cuda:0")
    prefixes = tuple(options.only.split(",")) if options.only else ("",)
    options.names = [name for name in WHAT if name.startswith(prefixes)]
    if not options.names:
        parser.error("--only names nothing: " + ", ".join(WHAT))
    return options


def machine():
    with open("/proc/cpuinfo") as file:
        model = re.search(r"model name\s*:\s*(.+)", file.read())
    with open("/proc/meminfo") as file:
        kib = int(re.search(r"MemTotal:\s*(\d+)", file.read()).group(1))
    return {"cpu": model.group(1) if model else platform.machine(),
            "cores": len(os.sched_getaffinity(0)), "memory_gib": round(kib / 2**20, 1),
            "kernel": os.uname().release}


class Clock:
    """How much of --limit-seconds is left."""

    def __init__(self, limit_seconds):
        self.start = time.monotonic()
        self.limit_seconds = limit_seconds

    def left(self):
        if not self.limit_seconds:
            return None
        return max(self.limit_seconds - (time.monotonic() - self.start), 0.001)

    def expired(self):
        return bool(self.limit_seconds) and self.left() < 1


def run(command, clock, **options):
    """(stdout, None), or (None, why not)."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=clock.left(),
                              check=False, **options)
    except subprocess.TimeoutExpired:
        return None, f"stopped after {clock.limit_seconds:.0f} s of the whole run"
    except OSError as error:
        return None, str(error)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return None, f"exit code {done.returncode}: {lines[-1][:300] if lines else 'no message'}"
    return done.stdout, None


def runtime_folder(folder):
    """fastsafetensors opens `libcudart.so`, which torch brings under its versioned name only."""
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(glob.glob(os.path.join(place, "*/lib/libcudart.so.*"))):
            link = os.path.join(folder, "libcudart.so")
            if not os.path.lexists(link):
                os.symlink(path, link)
            return folder
    return "/usr/local/cuda/lib64"


def environment(name, options, folder):
    settings = {} if options.cold and SETTINGS.get(name) is BUFFERED else SETTINGS.get(name, {})
    own = {**os.environ, **settings}
    if name.startswith("fastsafetensors"):
        places = [own.get("LD_LIBRARY_PATH", ""), runtime_folder(folder)]
        own["LD_LIBRARY_PATH"] = ":".join(place for place in places if place)
    return own, settings


def start_loader(name, entries, options, clock, folder):
    """What loaders.py wrote, and the settings it had; {"failed": why} where it wrote nothing."""
    plan_path, out_path = (os.path.join(folder, f"{name}.{end}") for end in ("plan", "out"))
    with open(plan_path, "w") as file:
        json.dump({"entries": entries, "device": options.device, "cold": options.cold,
                   "repetitions": options.repetitions,
                   "in_memory": store.in_memory(folder)}, file)
    own, settings = environment(name, options, folder)
    _, failure = run([sys.executable, os.path.join(HERE, "loaders.py"), name, plan_path, out_path],
                     clock, env=own)
    if failure:
        return {"failed": failure}, settings
    with open(out_path) as file:
        return json.load(file), settings


def figures(name, runs, settings, more):
    """A row: the first run apart, medians of the others."""
    later = runs[1:] or runs
    seconds = statistics.median(each["seconds"] for each in later)
    firsts = [each["seconds_first_layer"] for each in later if each["seconds_first_layer"]]
    return {"name": name, "what": WHAT[name], "layers": runs[0]["layers"],
            "bytes": runs[0]["bytes"], "seconds_first_run": runs[0]["seconds"],
            "seconds": seconds, "gigabytes_per_second": runs[0]["bytes"] / seconds / 1e9,
            "seconds_first_layer": statistics.median(firsts) if firsts else None,
            "seconds_of_runs": [each["seconds"] for each in runs], "settings": settings, **more}


def load_rows(names, entries, options, clock, folder):
    for name in names:
        if clock.expired():
            yield {"name": name, "what": WHAT[name], "failed": "not run: no time was left"}
            continue
        if options.files == "page cache":
            store.fill_cache(entries)
        result, settings = start_loader(name, entries, options, clock, folder)
        if "runs" in result:
            yield figures(name, result["runs"], settings, {"versions": result["versions"]})
        else:
            yield {"name": name, "what": WHAT[name], "settings": settings, **result}


def boot(options, clock, folder, verify):
    """Figures of one boot in a process of its own, or {"failed": why}."""
    if options.cold:
        files = [os.path.join(place, name) for place, _, names in os.walk(folder) for name in names]
        store.drop_cache([{"path": path} for path in files])
    text, failure = run([options.hotplane, "boot", folder, "--json", "--base", "device", "--tiers",
                         "base", "--verify", verify, "--device", options.device], clock)
    if failure:
        return {"failed": failure}
    report = json.loads(text)
    read, wanted = report["bytes_read"], options.shape.layers * options.shape.geometry.base_bytes()
    if read != wanted or report["bytes_verified"] != (read if verify == "all" else 0):
        return {"failed": f"read {read} and verified {report['bytes_verified']} of {wanted} bytes"}
    return {"seconds": report["seconds"], "seconds_first_layer": report["seconds_first_layer"],
            "seconds_ring": report.get("seconds_device_ring", 0), "bytes": read,
            "seconds_device": report["seconds_by_phase"].get("device", 0),
            "layers": report["layers_total"], "device": report["device"]}


def hotplane_rows(options, clock, folder):
    """Boots of a store that `hotplane synth` made."""
    geometry = ",".join(str(size) for size in options.shape.geometry)
    _, failure = run([options.hotplane, "synth", folder, "--geometry", geometry, "--layers",
                      str(options.shape.layers), "--json"], clock)
    for verify, names in (("all", HOTPLANE[:2]), ("none", HOTPLANE[2:])):
        names = [name for name in names if name in options.names]
        runs = []
        for _ in range(options.repetitions + 1 if names else 0):
            if failure:
                break
            result = boot(options, clock, folder, verify)
            failure = result.get("failed")
            runs.append(result)
        for name in names:
            if failure:
                yield {"name": name, "what": WHAT[name], "failed": failure}
                continue
            ring = "seconds_ring" if name == "hotplane-ring" else None
            counted = [{**each, "seconds": each["seconds"] + each.get(ring, 0)} for each in runs]
            opened = statistics.median(each["seconds_device"] for each in runs)
            yield figures(name, counted, {},
                          {"device": runs[0]["device"], "seconds_device_opened": opened})


def add(options, rows, row):
    rows.append(row)
    # In the row, so that it stays true where results are merged.
    row.update(limit_gigabytes_per_second=options.limit, command=options.command,
               times_hotplane=ratio(row, rows))
    save(options, rows)
    print(line(row), file=sys.stderr, flush=True)


def measure(options, clock, folder, rows):
    """Appends the rows one by one. One kind of files is in the folder at a time."""
    def kind(names, make, load):
        names = [name for name in names if name in options.names]
        if not names:
            return
        place = os.path.join(folder, "files")
        os.mkdir(place)
        try:
            for row in load(names, make(place), place):
                add(options, rows, row)
        except OSError as error:
            for name in names:
                if all(row["name"] != name for row in rows):
                    add(options, rows, {"name": name, "what": WHAT[name], "failed": str(error)})
        finally:
            shutil.rmtree(place)

    if options.hotplane:
        kind(HOTPLANE, lambda place: None,
             lambda names, made, place: hotplane_rows(options, clock, place))
    kind(PUBLIC, lambda place: store.write_safetensors(place, options.shape),
         lambda names, made, place: load_rows(names, made, options, clock, place))
    fp4_layers = options.fp4_layers if "reference-fp4" in options.names else 0
    kind(REFERENCE, lambda place: store.write_raw(place, options.shape, fp4_layers),
         lambda names, made, place: load_rows(names, made, options, clock, place))


def result_of(options, rows):
    known = {row["name"] for row in rows}
    older = []
    if options.merge and os.path.exists(options.merge):
        with open(options.merge) as file:
            older = [row for row in json.load(file)["rows"] if row["name"] not in known]
    order = list(WHAT)
    return {"machine": options.machine, "date": str(date.today()), "command": options.command,
            "layers": options.shape.layers, "repetitions": options.repetitions,
            "files": options.files, "pinned_copy_16mib_gigabytes_per_second": options.limit,
            "rows": sorted(older + rows, key=lambda row: order.index(row["name"]))}


def save(options, rows):
    if options.out:
        with open(options.out, "w") as file:
            json.dump(result_of(options, rows), file, indent=2)
            file.write("\n")


def ratio(row, rows):
    """How many times as long as hotplane took for the same bytes in the same run, or None."""
    basis = [other for other in rows if other["name"] == BASIS and "seconds" in other]
    if not basis or "seconds" not in row:
        return None
    return row["seconds"] / row["bytes"] / (basis[0]["seconds"] / basis[0]["bytes"])


def line(row):
    if "seconds" not in row:
        why = row.get("missing") or row.get("failed")
        return f"{row['what']:46} {why}"
    limit = row["limit_gigabytes_per_second"]
    share = f"{100 * row['gigabytes_per_second'] / limit:3.0f}%" if limit else "   -"
    times = row["times_hotplane"]
    return (f"{row['what']:46} {row['layers']:6} {row['seconds_first_run']:9.3f} "
            f"{row['seconds']:9.3f} {row['gigabytes_per_second']:7.2f} {share:>7} "
            f"{f'{times:.1f}' if times else '-':>8}")


def table(result):
    head = (f"{'':46} {'layers':>6} {'first':>9} {'seconds':>9} {'GB/s':>7} {'of link':>7} "
            f"{'hotplane':>8}")
    return "\n".join([head, *(line(row) for row in result["rows"])])


def main():
    options = parse(sys.argv[1:])
    options.command = "peers.py " + " ".join(sys.argv[1:])
    options.machine, options.limit = machine(), None
    clock, rows = Clock(options.limit_seconds), []
    with tempfile.TemporaryDirectory(prefix="peers-", dir=options.directory) as folder:
        in_memory = store.in_memory(folder)
        if options.cold and in_memory:
            print("--cold: there is no page cache to drop in a tmpfs", file=sys.stderr)
            return 2
        options.files = "tmpfs" if in_memory else "cold" if options.cold else "page cache"
        if options.device != "cpu":
            link, _ = start_loader("pinned", [], options, clock, folder)
            options.limit = link.get("gigabytes_per_second")
            options.machine["gpu"] = link.get("gpu")
            if options.limit is None:
                print("pinned copy:", link.get("missing") or link.get("failed"), file=sys.stderr)
        measure(options, clock, folder, rows)
    save(options, rows)
    result = result_of(options, rows)
    print(json.dumps(result))
    print(table(result))
    wanted = [row for row in rows if row["name"] in HOTPLANE] or rows
    return 0 if all("failed" not in row for row in wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
