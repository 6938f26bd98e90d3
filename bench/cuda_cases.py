#!/usr/bin/env python3
"""cuda_cases.py HOTPLANE FOLDER [--layers N] [--rounds N] [--smoke] [--json FILE]

Boots onto a GPU other than the plain warm one (cuda_boot_bench measures that): half of the planes
on the host, a range of layers, one rank of two, nothing cached, half cached, and the next boot
after a cold one. Beside them what the disk reads in the same run, directly and buffered, and the
peak of the device's memory. FOLDER is on a disk; it gets stores and a checkpoint, removed at the
end."""
import argparse
import concurrent.futures
import json
import mmap
import os
import queue
import shutil
import statistics
import subprocess
import sys
import threading
import time

from result_file import result_file

PIECE_BYTES = 4 * 2**20
POLL_SECONDS = 0.02


class DeviceMemory(threading.Thread):
    """The most bytes of device memory that were used while it ran, polled."""

    def __init__(self):
        super().__init__(daemon=True)
        self.peak = 0
        self.ended = threading.Event()

    def run(self):
        while not self.ended.wait(POLL_SECONDS):
            self.peak = max(self.peak, device_bytes())

    def stop(self):
        self.ended.set()
        self.join()
        return self.peak


def device_bytes():
    done = subprocess.run(["nvidia-smi", "-i", "0", "--query-gpu=memory.used",
                           "--format=csv,noheader,nounits"], capture_output=True, text=True,
                          check=False)
    return int(done.stdout.split()[0]) * 2**20 if done.returncode == 0 else 0


def layer_files(store):
    found = []
    for folder, _, names in os.walk(store):
        found += [os.path.join(folder, name) for name in names if ".base" in name]
    return sorted(found)


def advise(paths, advice):
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, advice)
        os.close(fd)


def drop(paths):
    advise(paths, os.POSIX_FADV_DONTNEED)


def disk_rate(paths, direct):
    """Bytes per second of reads of 4 MiB, 8 at a time, over at most 8 GiB that are not cached."""
    drop(paths)
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    pieces = [(path, offset) for path in paths
              for offset in range(0, os.path.getsize(path) - PIECE_BYTES + 1, PIECE_BYTES)]
    pieces = pieces[:8 * 2**30 // PIECE_BYTES]
    buffers = queue.SimpleQueue()
    for _ in range(8):
        buffers.put(mmap.mmap(-1, PIECE_BYTES))
    try:
        files = {path: os.open(path, flags) for path, _ in pieces}
    except OSError:
        return 0.0

    def read(piece):
        buffer = buffers.get()
        try:
            return os.preadv(files[piece[0]], [buffer], piece[1])
        finally:
            buffers.put(buffer)

    start = time.monotonic()
    try:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            done = sum(pool.map(read, pieces))
    except OSError:
        done = 0
    seconds = time.monotonic() - start
    for fd in files.values():
        os.close(fd)
    return done / seconds


def boot(program, store, *options):
    done = subprocess.run([program, "boot", store, "--device", "cuda", "--json", *options],
                          capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"boot {' '.join(options)}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


class Cases:
    def __init__(self, program, rounds):
        self.program = program
        self.rounds = rounds
        self.rows = []

    def run(self, name, store, *options, before=lambda: None):
        reports = []
        for _ in range(self.rounds):
            before()
            reports.append(boot(self.program, store, *options))
        seconds = statistics.median(report["seconds"] for report in reports)
        last = reports[-1]
        row = {"case": name, "options": list(options), "bytes": last["bytes_read"],
               "seconds": seconds, "gigabytes_per_second": last["bytes_read"] / seconds / 1e9,
               "bytes_read_over_needed": last["bytes_read"] / last["bytes_needed"],
               "bytes_verified": last["bytes_verified"],
               "limit_gigabytes_per_second": last["limit_gigabytes_per_second"],
               "seconds_by_phase": last["seconds_by_phase"]}
        self.rows.append(row)
        print(f"{name:34} {row['bytes'] / 2**30:7.2f} GiB {seconds:8.3f} s "
              f"{row['gigabytes_per_second']:7.2f} GB/s", flush=True)
        return row


def half_planes(store):
    return sum(map(os.path.getsize, layer_files(store))) // 2


def cold_cases(cases, store):
    files = layer_files(store)
    raw = {"direct": disk_rate(files, True) / 1e9, "buffered": disk_rate(files, False) / 1e9}
    cases.run("cold, kept in the page cache", store, "--cache", "keep", before=lambda: drop(files))
    cases.run("the next boot", store)
    cases.run("cold, past the page cache", store, "--cache", "bypass", before=lambda: drop(files))
    half = files[::2]

    def half_cached():
        advise(files, os.POSIX_FADV_WILLNEED)
        for path in files:
            with open(path, "rb") as file:
                while file.read(PIECE_BYTES):
                    pass
        drop(half)

    cases.run("half cached", store, "--cache", "bypass", before=half_cached)
    raw["direct after"] = disk_rate(files, True) / 1e9
    return raw


def warm_cases(cases, store, layers):
    cases.run("warm", store)
    cases.run("warm, not verified", store, "--verify", "none")
    cases.run("warm, half of it to the host beside it", store, "--base", "auto", "--memory",
              str(half_planes(store)))
    cases.run("warm, a range of layers", store, "--layers", f"{layers // 4}-{layers // 2 - 1}")


def rank_cases(cases, folder, geometry, layers):
    model, store = os.path.join(folder, "cases-model"), os.path.join(folder, "cases-shards")
    try:
        run = [cases.program, "synth", model, "--geometry", geometry, "--layers", str(layers),
               "--checkpoint", "mxfp4", "-q"]
        subprocess.run(run, check=True)
        subprocess.run([cases.program, "build", model, "--store", store, "--tp", "2", "--tiers",
                        "base", "-q"], check=True)
        cases.run("warm, rank 1 of 2, 2 layers", store, "--rank", "1", "--world", "2")
    finally:
        shutil.rmtree(model, ignore_errors=True)
        shutil.rmtree(store, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program")
    parser.add_argument("folder")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", type=result_file)
    arguments = parser.parse_args()
    if shutil.which("nvidia-smi") is None:
        print("skipped: no nvidia-smi, so no GPU to boot onto")
        return 0
    geometry = "8,1024,512" if arguments.smoke else "ds4-flash"
    store = os.path.join(arguments.folder, "cases-store")
    cases = Cases(arguments.program, 1 if arguments.smoke else arguments.rounds)
    before = device_bytes()
    memory = DeviceMemory()
    try:
        subprocess.run([arguments.program, "synth", store, "--geometry", geometry, "--layers",
                        str(arguments.layers), "-q"], check=True)
        memory.start()
        warm_cases(cases, store, arguments.layers)
        peak = memory.stop()
        raw = cold_cases(cases, store)
        rank_cases(cases, arguments.folder, geometry, 2)
    finally:
        shutil.rmtree(store, ignore_errors=True)
    planes = sum(row["bytes"] for row in cases.rows[:1])
    result = {"layers": arguments.layers, "rounds": cases.rounds, "rows": cases.rows,
              "disk_gigabytes_per_second": raw, "device_bytes_before": before,
              "device_bytes_peak": peak, "device_bytes_beyond_planes": peak - before - planes}
    print("disk, GB/s:", ", ".join(f"{name} {rate:.2f}" for name, rate in raw.items()))
    print(f"device memory: {before / 2**20:.0f} MiB before, {peak / 2**20:.0f} MiB at its peak, "
          f"{(peak - before - planes) / 2**20:.0f} MiB beyond the planes (the context included)")
    if arguments.json:
        with open(arguments.json, "w") as out:
            json.dump(result, out, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
