#!/usr/bin/env python3
"""build_overlap.py HOTPLANE FOLDER [--geometry G] [--checkpoint FORMAT] [--layers N]
[--store-folder DIR] [--rounds N] [--device D] [--smoke] [--json FILE]

How a build scales, and whether it reads while it quantizes. One synthetic checkpoint is built from
the page cache with one worker and with all, and from the disk with all; the store goes to memory
(tmpfs), so that its writes do not take the disk from the reads. Were reading and quantizing one
after the other, the build from the disk would take the sum of both; side by side it takes the
larger."""
import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

from build_memory import drop_cache, shards
from result_file import result_file

PIECE_BYTES = 8 * 2**20


def read_all(paths):
    """Seconds to read the files once, in order."""
    start = time.monotonic()
    buffer = bytearray(PIECE_BYTES)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.monotonic() - start


def build(program, model, store_folder, workers, device):
    """Seconds of one build into a fresh store, and how many workers it had."""
    with tempfile.TemporaryDirectory(prefix="bench-store-", dir=store_folder) as folder:
        done = subprocess.run([program, "build", model, "--store", os.path.join(folder, "store"),
                               "--json", "--workers", str(workers), "--device", device],
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                              check=True)
    report = json.loads(done.stdout)
    return report["seconds"], report["workers"]


def measure(program, model, store_folder, rounds, device):
    paths = shards(model)
    seconds = {"one_worker": [], "all_workers": [], "read_disk": [], "from_disk": []}
    workers = 0
    for _ in range(rounds):
        read_all(paths)
        seconds["one_worker"].append(build(program, model, store_folder, 1, device)[0])
        elapsed, workers = build(program, model, store_folder, 0, device)
        seconds["all_workers"].append(elapsed)
        drop_cache(paths)
        seconds["read_disk"].append(read_all(paths))
        drop_cache(paths)
        seconds["from_disk"].append(build(program, model, store_folder, 0, device)[0])
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    larger = max(medians["all_workers"], medians["read_disk"])
    return {"workers": workers, "rounds": rounds, "bytes": sum(map(os.path.getsize, paths)),
            "seconds": medians, "scaling": medians["one_worker"] / medians["all_workers"],
            "seconds_larger": larger,
            "seconds_sum": medians["all_workers"] + medians["read_disk"],
            "from_disk_over_larger": medians["from_disk"] / larger}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program")
    parser.add_argument("folder", help="gets a checkpoint, removed at the end; on a disk")
    parser.add_argument("--geometry", default="glm-5.2")
    parser.add_argument("--checkpoint", default="nvfp4", help="mxfp4, nvfp4, fp8 or bf16")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--store-folder", default="/dev/shm")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N: who quantizes")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", type=result_file)
    arguments = parser.parse_args()
    geometry = "8,512,256" if arguments.smoke else arguments.geometry
    model = os.path.join(arguments.folder, "overlap-model")
    try:
        subprocess.run([arguments.program, "synth", model, "--geometry", geometry, "--layers",
                        str(arguments.layers), "--checkpoint", arguments.checkpoint, "-q"],
                       check=True)
        result = measure(arguments.program, model, arguments.store_folder,
                         1 if arguments.smoke else arguments.rounds, arguments.device)
    finally:
        shutil.rmtree(model, ignore_errors=True)
    result.update(geometry=geometry, checkpoint=arguments.checkpoint, layers=arguments.layers,
                  device=arguments.device)
    seconds, size = result["seconds"], result["bytes"]
    print(f"build of {size / 2**30:.2f} GiB {arguments.checkpoint} into memory: page cache, one "
          f"worker {seconds['one_worker']:.2f} s; page cache, {result['workers']} workers "
          f"{seconds['all_workers']:.2f} s ({result['scaling']:.2f} times as fast); from the disk "
          f"{seconds['from_disk']:.2f} s, where reading alone takes {seconds['read_disk']:.2f} s: "
          f"{result['from_disk_over_larger']:.2f} times the larger of the two, whose sum is "
          f"{result['seconds_sum']:.2f} s")
    if arguments.json:
        with open(arguments.json, "w") as out:
            json.dump(result, out, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
