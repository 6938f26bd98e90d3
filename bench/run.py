#!/usr/bin/env python3
"""run.py [NAME] [--layers N] [--warm-layers N] [--folder DIR] [--smoke]: every benchmark of the
CPU path, one after the other, into one result file with the machine, the commit, the commands and
the figures. With --only the others' figures stay as they are in the file, with their commits."""
import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from datetime import date

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BUILD = os.path.join(ROOT, "build", "release")


def machine():
    with open("/proc/cpuinfo") as file:
        model = re.search(r"model name\s*:\s*(.+)", file.read()).group(1)
    with open("/proc/meminfo") as file:
        kib = int(re.search(r"MemTotal:\s*(\d+)", file.read()).group(1))
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(kib / 2**20, 1), "kernel": os.uname().release}


def commit():
    done = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True,
                          text=True, check=False)
    return done.stdout.strip() or "unknown"


def folder_there(path):
    if os.path.isdir(path):
        return path
    raise argparse.ArgumentTypeError(f"{path} is not there, or no folder: name one on the disk to "
                                     "measure, or make it first")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="?")
    parser.add_argument("--layers", type=int, default=4, help="of the boot and build benchmarks")
    parser.add_argument("--warm-layers", type=int, default=0,
                        help="of the warm boot benchmark; 0: as many as memory allows, 4 at most")
    parser.add_argument("--folder", type=folder_there, default=BUILD,
                        help="for stores and checkpoints; on a disk")
    parser.add_argument("--only", help="some of quantize,moe,boot,warm_boot,build,build_nvfp4,"
                        "build_overlap")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    smoke = ["--smoke"] if arguments.smoke else []
    words = [os.path.relpath(word) if word.startswith("/") else word for word in sys.argv[1:]]
    result = {"machine": machine(), "commit": commit(), "date": str(date.today()),
              "command": " ".join(["scripts/bench", *words]), "commits": {}, "commands": {},
              "figures": {}}
    with tempfile.TemporaryDirectory(prefix="bench-", dir=arguments.folder) as folder:
        warm_layers = ["--layers", str(arguments.warm_layers)] if arguments.warm_layers else []
        steps = {
            "quantize": [os.path.join(BUILD, "src/quant/quant_bench"), *smoke],
            "moe": [os.path.join(BUILD, "src/moe/moe_bench"), *smoke],
            "boot": [os.path.join(BUILD, "src/engine/boot_bench"), "--store",
                     os.path.join(folder, "store"), "--layers", str(arguments.layers), *smoke],
            "warm_boot": [os.path.join(BUILD, "src/engine/warm_boot_bench"), *smoke, "--store",
                          os.path.join(folder, "warm-store"), *warm_layers],
            "build": [sys.executable, os.path.join(ROOT, "bench/build_memory.py"),
                      os.path.join(BUILD, "bin/hotplane"), folder, "--layers",
                      str(arguments.layers), *smoke],
            "build_nvfp4": [sys.executable, os.path.join(ROOT, "bench/build_memory.py"),
                            os.path.join(BUILD, "bin/hotplane"), folder, "--geometry", "glm-5.2",
                            "--checkpoint", "nvfp4", "--layers", "2", *smoke],
            "build_overlap": [sys.executable, os.path.join(ROOT, "bench/build_overlap.py"),
                              os.path.join(BUILD, "bin/hotplane"), folder, *smoke],
        }
        for name, command in steps.items():
            if arguments.only and name not in arguments.only.split(","):
                continue
            figures = os.path.join(folder, name + ".json")
            print(f"== {name}", flush=True)
            subprocess.run([*command, "--json", figures], check=True)
            with open(figures) as file:
                result["figures"][name] = json.load(file)
            result["commits"][name] = result["commit"]
            result["commands"][name] = " ".join(
                os.path.relpath(word, ROOT) if word.startswith(ROOT) else word
                for word in command).replace(os.path.relpath(folder, ROOT), "DIR").replace(
                    sys.executable, "python3")
            for store in ("store", "warm-store"):
                shutil.rmtree(os.path.join(folder, store), ignore_errors=True)
    if arguments.smoke:
        return 0
    name = arguments.name or re.sub(r"[^a-z0-9]+", "-", result["machine"]["cpu"].lower()).strip("-")
    path = os.path.join(ROOT, "bench", "results", name + ".json")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if arguments.only and os.path.exists(path):
        with open(path) as file:
            earlier = json.load(file)
        before = earlier.get("commits") or dict.fromkeys(earlier["figures"], earlier["commit"])
        for key, kept in (("commits", before), ("commands", earlier["commands"]),
                          ("figures", earlier["figures"])):
            result[key] = {**kept, **result[key]}
        result["command"] = earlier["command"]
    with open(path, "w") as out:
        json.dump(result, out, indent=2)
        out.write("\n")
    print("wrote", os.path.relpath(path, ROOT))
    return subprocess.run([sys.executable, os.path.join(ROOT, "tools", "readme_numbers.py")],
                          check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
