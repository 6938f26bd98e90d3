#!/usr/bin/env python3
"""demo_steps.py HOTPLANE TINYLM CHECKPOINT [--smoke]: builds a store, boots it cold and warm,
verifies it, and prints what each step read, skipped and took. Fails when a boot reads a byte that
it does not need. A larger store of random bytes at the headline geometry is what the figures of
DeepSeek-V4-Flash are extrapolated from. At the end the model writes a text with the store's
experts, at 2 bits and at FP4."""
import argparse
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GIB = 1 << 30
# 44 layers of 256 experts of 6.75 MiB: codes and scales at H=4096, I=2048.
HEADLINE_BYTES = 44 * 256 * 6.75 * (1 << 20)
EXPERT_BYTES = 6.75 * (1 << 20)
# Below this a boot measures its fixed costs, and a share of a rate means nothing.
SECONDS_MIN = 0.02
PROMPT = "class Store:\n    def read(self, layer):\n"
TEXT_COLUMNS = 48


class Step(Exception):
    """A step that did not do what it should."""


def run(program, *arguments):
    """The command's JSON object; `wall_seconds` is added."""
    print("$", Path(program).name, shlex.join(arguments), flush=True)
    start = time.monotonic()
    done = subprocess.run([program, *arguments, "--json"], stdout=subprocess.PIPE, text=True,
                          check=False)
    if done.returncode != 0:
        raise Step(f"exit code {done.returncode}")
    report = json.loads(done.stdout)
    report["wall_seconds"] = time.monotonic() - start
    return report


def drop_from_cache(folder):
    """Asks the kernel to forget the files' pages; needs no privilege for one's own files."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def disk_rate(folder):
    """Bytes per second of one sequential cold read of the folder's files."""
    drop_from_cache(folder)
    buffer = memoryview(bytearray(8 << 20))
    read_bytes = 0
    start = time.monotonic()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    read_bytes += count
    return read_bytes / (time.monotonic() - start)


def boot(program, store, cold):
    if cold:
        drop_from_cache(store)
    report = run(program, "boot", str(store))
    cached = sum(layer["bytes_cached"] for layer in report["source_by_layer"])
    report["share_cached"] = cached / max(report["bytes_read"], 1)
    for key, wanted in (("bytes_read", report["bytes_needed"]), ("bytes_read_delta", 0),
                        ("bytes_verified", report["bytes_read"])):
        if report[key] != wanted:
            raise Step(f"boot: expected {key} {wanted}, found {report[key]}")
    return report


def size(count):
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count} B"
        count /= 1024
    return f"{count:.2f} GiB"


def row(name, layers, read, skipped, seconds, rate, share):
    return f"{name:<10}{layers:<9}{read:<10}{skipped:<19}{seconds:<10}{rate:<7}{share}"


def boot_row(name, report, limit):
    rate = report["bytes_read"] / report["seconds"] / 1e9
    skipped = "delta: present" if report["bytes_skipped"] else "-"
    share = f"{100 * rate / limit:.0f}%" if report["seconds"] >= SECONDS_MIN else "too short"
    return row(name, report["layers_total"], size(report["bytes_read"]), skipped,
               f"{report['seconds']:.3f}", f"{rate:.2f}", share)


def small_model(program, checkpoint, folder):
    """The bundled model's way through hotplane: the report of each step."""
    store = folder / "store"
    steps = {"build": run(program, "build", checkpoint, "--store", str(store)),
             "cold": boot(program, store, cold=True),
             "warm": boot(program, store, cold=False),
             "verify": run(program, "verify", str(store))}
    if steps["warm"]["bytes_skipped"] == 0:
        raise Step("boot: the delta tier is present, expected bytes_skipped above 0, found 0")
    if steps["verify"]["findings"]:
        raise Step(f"verify: expected no findings, found {steps['verify']['findings']}")
    return steps


def large_store(program, folder, smoke):
    """Boots of random bytes at the headline geometry, long enough to measure, and the rate at which
    the disk gives the same files."""
    experts, layers = (8, 1) if smoke else (64, 2)
    bytes_wanted = int(experts * layers * EXPERT_BYTES)
    if shutil.disk_usage(folder).free < 2 * bytes_wanted:
        raise Step(f"no room for {size(bytes_wanted)} of random experts in {folder}")
    store = folder / "synth"
    run(program, "synth", str(store), "--geometry", f"{experts},4096,2048", "--layers",
        str(layers))
    disk = disk_rate(store) / 1e9
    cold = boot(program, store, cold=True)
    boot(program, store, cold=False)
    return {"cold": cold, "warm": boot(program, store, cold=False), "disk": disk}


def written(tinylm, checkpoint, store):
    """What the model writes, and its loss, with the store's experts at each precision."""
    return {precision: {
        "text": run(tinylm, "generate", checkpoint, "--store", str(store), "--precision", precision,
                    "--prompt", PROMPT, "--tokens", "200", "--temperature", "0.6", "--seed", "2"),
        "loss": run(tinylm, "eval", checkpoint, "--store", str(store), "--precision", precision),
    } for precision in ("base", "fp4")}


def side_by_side(texts):
    """The texts in columns, their losses above."""
    columns = []
    for name, precision in (("2-bit base", "base"), ("FP4", "fp4")):
        text, loss = texts[precision]["text"], texts[precision]["loss"]
        lines = [f"{name}: loss {loss['loss']:.4f} nats per byte",
                 f"{text['tokens']} bytes, {text['tokens_per_second']:.0f} per second", ""]
        for line in (PROMPT + text["text"]).split("\n"):
            lines += [line[at:at + TEXT_COLUMNS] for at in range(0, max(len(line), 1),
                                                                 TEXT_COLUMNS)]
        columns.append(lines)
    return ["", "the same model, the same seed; the loss is over "
            f"{texts['base']['loss']['bytes_scored']} bytes of another text:", ""] + [
                f"{left:<{TEXT_COLUMNS}} | {right}".rstrip()
                for left, right in itertools.zip_longest(*columns, fillvalue="")]


def table(steps, large):
    built, checked = steps["build"], steps["verify"]
    build_rate = built["bytes_read"] / built["seconds"] / 1e9
    check_rate = checked["bytes_checked"] / checked["wall_seconds"] / 1e9
    layers = f"{built['layers_total']}/{built['layers_total']} ok"
    warm_limit = large["warm"]["limit_gigabytes_per_second"]
    return [
        row("", "layers", "read", "skipped", "seconds", "GB/s", "of limit"),
        row("build", built["layers_total"], size(built["bytes_read"]), "-",
            f"{built['seconds']:.3f}", f"{build_rate:.2f}", "-"),
        boot_row("cold", steps["cold"], large["disk"]),
        boot_row("warm", steps["warm"], warm_limit),
        row("verify", layers, size(checked["bytes_checked"]), "base, delta",
            f"{checked['wall_seconds']:.3f}", f"{check_rate:.2f}", "-"),
        "random experts at DeepSeek-V4-Flash geometry:",
        boot_row("cold", large["cold"], large["disk"]),
        boot_row("warm", large["warm"], warm_limit),
    ]


def headline(large):
    cold = large["cold"]
    rates = {name: large[name]["bytes_read"] / large[name]["seconds"] for name in ("warm", "cold")}
    lines = [f"limits measured here: memory {large['warm']['limit_gigabytes_per_second']:.2f} GB/s "
             f"(warm), disk {large['disk']:.2f} GB/s (cold)"]
    if cold["share_cached"] > 0.01:
        lines.append(f"The cold boot found {100 * cold['share_cached']:.0f}% in the page cache: "
                     "this file system keeps its pages.")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lacking = "" if memory > 1.1 * HEADLINE_BYTES else \
        f", had it the memory (it has {memory / GIB:.0f} GiB)"
    lines.append(f"On this machine DeepSeek-V4-Flash ({HEADLINE_BYTES / GIB:.2f} GiB base) would "
                 f"boot in about {HEADLINE_BYTES / rates['warm']:.0f} s warm, "
                 f"{HEADLINE_BYTES / rates['cold']:.0f} s cold{lacking}.")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program")
    parser.add_argument("tinylm")
    parser.add_argument("checkpoint")
    parser.add_argument("--smoke", action="store_true", help="a small store to extrapolate from")
    arguments = parser.parse_args()
    program = str(Path(arguments.program).resolve())
    tinylm = str(Path(arguments.tinylm).resolve())
    # Beside the program, which is on a disk; a temporary directory may be in memory.
    with tempfile.TemporaryDirectory(prefix="demo-", dir=Path(program).parent) as folder:
        try:
            steps = small_model(program, arguments.checkpoint, Path(folder))
            large = large_store(program, Path(folder), arguments.smoke)
            texts = written(tinylm, arguments.checkpoint, Path(folder) / "store")
        except Step as error:
            print(f"demo: {error}", file=sys.stderr)
            return 1
    print()
    print("\n".join(table(steps, large) + headline(large) + side_by_side(texts)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
