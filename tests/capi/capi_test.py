#!/usr/bin/env python3
"""capi_test.py HOTPLANE MODEL CHECK BOOT RECORDS [DEVICE_MOE]: builds a store of the model, exports
it, and runs the C program CHECK against the exports; runs the examples BOOT, RECORDS and DEVICE_MOE
and looks at what they print."""
import subprocess
import sys
import tempfile
from pathlib import Path

LAYERS = 4


def run(*command, code=0):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True,
                          check=False)
    if done.returncode != code:
        sys.exit(f"{command[0]}: exit code {done.returncode}, expected {code}\n"
                 f"{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def export(hotplane, store, directory):
    for layer in range(LAYERS):
        for part in ("planes13", "sc13", "planes2", "sc2", "fp13", "fp2"):
            run(hotplane, "export", store, "--layer", layer, "--part", part, "-q",
                "--out", directory / f"{layer}.{part}")
        for part in ("fp13", "fp2"):
            run(hotplane, "export", store, "--layer", layer, "--part", part, "--encoded", "-q",
                "--out", directory / f"{layer}.{part}.encoded")


def main():
    hotplane, model, check, boot, records, *device_moe = sys.argv[1:]
    with tempfile.TemporaryDirectory() as work:
        store = Path(work) / "store"
        run(hotplane, "build", model, "--store", store, "-q")
        exported = Path(work) / "exported"
        exported.mkdir()
        export(hotplane, store, exported)
        print(run(check, store, exported), end="")

        text = run(boot, store)
        for layer in range(LAYERS):
            assert f"layer {layer} (model layer {layer}): 32 experts of 256 x 128" in text, text
        assert '"bytes_read"' in text, text
        text = run(boot, Path(work) / "none", code=2)
        assert "none" in text and "to fix" in text, text

        text = run(records, store)
        assert text.count("delta tier present") == LAYERS, text
        assert f"cache: {LAYERS} hits, {LAYERS} misses" in text, text
        for program in filter(None, device_moe):
            text = run(program, store)
            assert "layer 0 on cuda:0" in text and "the same from arrays of the host" in text, text
        print("the examples work")


if __name__ == "__main__":
    main()
