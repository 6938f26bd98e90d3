#!/usr/bin/env python3
"""build_memory.py HOTPLANE FOLDER [--geometry G] [--checkpoint FORMAT] [--layers N] [--workers N]
[--staging-limit SIZE] [--smoke] [--json FILE]

Builds a synthetic checkpoint that is not in the page cache under a staging limit, and samples the
build's anonymous resident memory (RssAnon) every 5 ms. Prints the peak beside the limit, and the
rate beside what the disk reads."""
import argparse
import concurrent.futures
import ctypes
import json
import mmap
import os
import queue
import re
import shutil
import subprocess
import sys
import time

from result_file import result_file

SAMPLE_SECONDS = 0.005
PIECE_BYTES = 4 * 2**20


def anonymous_bytes(pid):
    try:
        with open(f"/proc/{pid}/status") as file:
            found = re.search(r"RssAnon:\s+(\d+) kB", file.read())
    except OSError:
        return 0
    return int(found.group(1)) * 1024 if found else 0


def size_bytes(text):
    return int(float(text[:-1]) * {"K": 2**10, "M": 2**20, "G": 2**30}[text[-1]])


def shards(folder):
    return sorted(entry.path for entry in os.scandir(folder) if entry.path.endswith(".safetensors"))


def drop_cache(paths):
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def huge_buffer(size):
    """Touched huge pages: into single pages this disk gives a third of its rate."""
    huge = 2 * 2**20
    memory = mmap.mmap(-1, size + huge, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % huge
    view = memoryview(memory)[begin:begin + size]
    view[:] = bytes(size)
    return view


def disk_rate(paths):
    """Bytes per second of direct reads of 4 MiB, 8 at a time, over at most 4 GiB; 0 where the file
    system refuses them."""
    pieces = [(path, offset) for path in paths
              for offset in range(0, os.path.getsize(path) - PIECE_BYTES + 1, PIECE_BYTES)]
    pieces = pieces[:4 * 2**30 // PIECE_BYTES]
    if not pieces:
        return 0
    try:
        open_files = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path, _ in pieces}
    except OSError:
        return 0
    buffers = queue.SimpleQueue()
    for _ in range(8):
        buffers.put(huge_buffer(PIECE_BYTES))

    def read(piece):
        buffer = buffers.get()
        try:
            return os.preadv(open_files[piece[0]], [buffer], piece[1])
        finally:
            buffers.put(buffer)

    start = time.monotonic()
    try:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            done = sum(pool.map(read, pieces))
    except OSError:
        done = 0
    seconds = time.monotonic() - start
    for fd in open_files.values():
        os.close(fd)
    return done / seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program")
    parser.add_argument("folder", help="gets a checkpoint and a store, both removed at the end")
    parser.add_argument("--geometry", default="ds4-flash")
    parser.add_argument("--checkpoint", default="mxfp4", help="mxfp4, nvfp4, fp8 or bf16")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--workers", default="0")
    parser.add_argument("--staging-limit", default="1G")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", type=result_file)
    arguments = parser.parse_args()
    model = os.path.join(arguments.folder, "bench-model")
    store = os.path.join(arguments.folder, "bench-store")
    geometry = "8,512,256" if arguments.smoke else arguments.geometry
    try:
        subprocess.run([arguments.program, "synth", model, "--geometry", geometry, "--layers",
                        str(arguments.layers), "--checkpoint", arguments.checkpoint, "-q"],
                       check=True)
        drop_cache(shards(model))
        disk = disk_rate(shards(model))
        drop_cache(shards(model))
        build = subprocess.Popen([arguments.program, "build", model, "--store", store, "--json",
                                  "--workers", arguments.workers, "--staging-limit",
                                  arguments.staging_limit],
                                 stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        peak = 0
        while build.poll() is None:
            peak = max(peak, anonymous_bytes(build.pid))
            time.sleep(SAMPLE_SECONDS)
        report = json.loads(build.stdout.read())
        if build.returncode != 0:
            print(report, file=sys.stderr)
            return build.returncode
    finally:
        for folder in (model, store):
            shutil.rmtree(folder, ignore_errors=True)
    limit = size_bytes(arguments.staging_limit)
    allowed = limit + 64 * 2**20
    result = {"layers": arguments.layers, "geometry": geometry, "checkpoint": arguments.checkpoint,
              "workers": report["workers"], "bytes_read": report["bytes_read"],
              "bytes_built": report["bytes_built"], "seconds": report["seconds"],
              "seconds_by_phase": report["seconds_by_phase"],
              "gigabytes_per_second": report["gigabytes_per_second"],
              "disk_gigabytes_per_second": disk / 1e9, "staging_limit_bytes": limit,
              "peak_staging_bytes": report["peak_staging_bytes"], "peak_anonymous_bytes": peak,
              "allowed_bytes": allowed}
    written = report["bytes_built"] / report["bytes_read"] * report["gigabytes_per_second"]
    result["written_gigabytes_per_second"] = written
    share = ""
    if disk:
        percent = 100e9 * (report["gigabytes_per_second"] + written) / disk
        share = f", together {percent:.0f}% of the {disk / 1e9:.2f} GB/s that the disk reads"
    print(f"build of {report['bytes_read'] / 2**30:.2f} GiB {arguments.checkpoint}, cold: "
          f"{report['seconds']:.1f} s, {report['gigabytes_per_second']:.2f} GB/s of source read "
          f"and {written:.2f} GB/s written{share}, peak RssAnon {peak / 2**20:.0f} MiB of "
          f"{allowed / 2**20:.0f} MiB allowed")
    if arguments.json:
        with open(arguments.json, "w") as out:
            json.dump(result, out, indent=2)
    return 0 if peak <= allowed else 1


if __name__ == "__main__":
    sys.exit(main())
