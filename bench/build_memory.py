#!/usr/bin/env python3
"""build_memory.py HOTPLANE FOLDER [--layers N] [--staging-limit SIZE] [--smoke] [--json FILE]

Builds a synthetic MXFP4 checkpoint of DeepSeek-V4-Flash geometry under a staging limit and samples
the build's anonymous resident memory (RssAnon) every 5 ms. Prints the peak beside the limit, and
the rate."""
import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time

SAMPLE_SECONDS = 0.005


def anonymous_bytes(pid):
    try:
        with open(f"/proc/{pid}/status") as file:
            found = re.search(r"RssAnon:\s+(\d+) kB", file.read())
    except OSError:
        return 0
    return int(found.group(1)) * 1024 if found else 0


def size_bytes(text):
    return int(float(text[:-1]) * {"K": 2**10, "M": 2**20, "G": 2**30}[text[-1]])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program")
    parser.add_argument("folder", help="gets a checkpoint and a store, both removed at the end")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--staging-limit", default="1G")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    model = os.path.join(arguments.folder, "bench-model")
    store = os.path.join(arguments.folder, "bench-store")
    geometry = "8,512,256" if arguments.smoke else "ds4-flash"
    try:
        subprocess.run([arguments.program, "synth", model, "--geometry", geometry, "--layers",
                        str(arguments.layers), "--checkpoint", "mxfp4", "-q"], check=True)
        build = subprocess.Popen([arguments.program, "build", model, "--store", store, "--json",
                                  "--staging-limit", arguments.staging_limit],
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
    result = {"layers": arguments.layers, "geometry": geometry, "bytes_read": report["bytes_read"],
              "bytes_built": report["bytes_built"], "seconds": report["seconds"],
              "gigabytes_per_second": report["gigabytes_per_second"], "staging_limit_bytes": limit,
              "peak_staging_bytes": report["peak_staging_bytes"], "peak_anonymous_bytes": peak,
              "allowed_bytes": allowed}
    print(f"build of {report['bytes_read'] / 2**30:.2f} GiB: {report['seconds']:.1f} s, "
          f"{report['gigabytes_per_second']:.2f} GB/s of source, peak RssAnon "
          f"{peak / 2**20:.0f} MiB of {allowed / 2**20:.0f} MiB allowed")
    if arguments.json:
        with open(arguments.json, "w") as out:
            json.dump(result, out, indent=2)
    return 0 if peak <= allowed else 1


if __name__ == "__main__":
    sys.exit(main())
