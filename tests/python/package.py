"""What the tests in this folder share: the package from the tree, a store of the bundled model.

HOTPLANE is the command line, HOTPLANE_LIBRARY the library that the package loads.
"""

import array
import os
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCE = os.path.dirname(os.path.dirname(HERE))
PACKAGE = os.environ.get("HOTPLANE_PACKAGE", os.path.join(SOURCE, "bindings", "python"))
sys.path.insert(0, PACKAGE)
PATH = os.pathsep.join([PACKAGE, HERE])
HOTPLANE = os.environ.get("HOTPLANE", "hotplane")
MODEL = os.path.join(SOURCE, "models", "tinymoe-mxfp4")
LAYERS, EXPERTS, HIDDEN, INTERMEDIATE = 4, 32, 256, 128
PART_BYTES = {"planes13": 2 * INTERMEDIATE * HIDDEN // 4, "sc13": 2 * INTERMEDIATE * HIDDEN // 32,
              "planes2": HIDDEN * INTERMEDIATE // 4, "sc2": HIDDEN * INTERMEDIATE // 32}


def command(*arguments):
    """stdout of the command line; another exit code than 0 fails the test."""
    done = subprocess.run([HOTPLANE, *map(str, arguments)], capture_output=True, timeout=300,
                          check=False)
    if done.returncode != 0:
        raise AssertionError(f"{arguments} exited {done.returncode}\n{done.stderr.decode()}")
    return done.stdout


def python(code, *arguments, **options):
    """The finished process of this Python with the package, running `code`."""
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True,
                          text=True, timeout=300, check=False,
                          env={**os.environ, "PYTHONPATH": PATH}, **options)


def mapped_bytes():
    """What this process can read; without what malloc reserved for its threads."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        ranges = [line.split()[0].split("-") for line in file if line.split()[1].startswith("r")]
    return sum(int(end, 16) - int(begin, 16) for begin, end in ranges)


def settled(expected=None):
    """Threads of this process. One that Python has joined is in /proc for a moment longer, so
    `expected` are waited for."""
    for _ in range(500 if expected else 10):
        count = len(os.listdir("/proc/self/task"))
        if count == expected:
            break
        time.sleep(0.01)
    return count


class WithStore(unittest.TestCase):
    """`self.store_path`: the bundled model, both tiers. `self.root`: a folder for the tests."""

    @classmethod
    def setUpClass(cls):
        cls.root = tempfile.mkdtemp(prefix="hotplane-python-")
        cls.addClassCleanup(shutil.rmtree, cls.root)
        cls.store_path = os.path.join(cls.root, "store")
        command("build", MODEL, "--store", cls.store_path, "-q")

    def export(self, layer, part, *options):
        out = os.path.join(self.root, f"{layer}.{part}")
        command("export", self.store_path, "--layer", layer, "--part", part, "--out", out, "-q",
                *options)
        with open(out, "rb") as file:
            return file.read()


def matrix(code, rows, columns, items):
    """A writable buffer of two dimensions, as array.array's `code`."""
    return memoryview(array.array(code, items)).cast("B").cast(code, (rows, columns))


def inputs(tokens, hidden=HIDDEN, experts=EXPERTS):
    """x, ids, weights of tests/capi/moe_forward.c."""
    return (matrix("f", tokens, hidden,
                   [(i * 37 % 201 - 100) / 128 for i in range(tokens * hidden)]),
            matrix("i", tokens, 2, [i * 5 % experts for i in range(tokens * 2)]),
            matrix("f", tokens, 2, [0.625, 0.375] * tokens))


def main():
    """Runs the tests of the calling module; exit code 77 when all there was to run was skipped."""
    result = unittest.main(module="__main__", argv=[sys.argv[0], "-v", *sys.argv[1:]],
                           exit=False).result
    if not result.wasSuccessful():
        sys.exit(1)
    sys.exit(77 if result.skipped and len(result.skipped) >= result.testsRun else 0)
