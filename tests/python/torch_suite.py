#!/usr/bin/env python3
"""torch_suite.py --build-dir BUILD [TEST...]: every Python test, in a Python that has torch and
transformers; what CI, which installs neither, skips. The last line counts.

BUILD holds bin/hotplane and lib/libhotplane.so. TEST is a file, class or method, as
transformers_test.Classes. HOTPLANE_SHARED names the folder of larger test data.
"""

import argparse
import importlib.util
import os
import sys
import unittest

FILES = ("torch_test", "transformers_test", "docs_test", "engine_test", "vllm_moet_test",
         "vllm_test")  # the last one changes vLLM's platform for good
NEEDED = ("torch", "transformers", "safetensors")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--build-dir", required=True)
    parser.add_argument("tests", nargs="*", default=FILES, metavar="TEST")
    options = parser.parse_args()
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        sys.exit(f"{sys.executable} has no {', '.join(absent)}: pip install {' '.join(absent)}")
    build = os.path.abspath(options.build_dir)
    os.environ["HOTPLANE"] = os.path.join(build, "bin", "hotplane")
    os.environ["HOTPLANE_LIBRARY"] = os.path.join(build, "lib", "libhotplane.so")
    os.environ["HOTPLANE_BUILD_DIR"] = build
    os.environ.setdefault("MOE_FORWARD", os.path.join(build, "tests", "moe_forward"))
    for name in ("HOTPLANE", "HOTPLANE_LIBRARY"):
        if not os.path.exists(os.environ[name]):
            sys.exit(f"no {os.environ[name]}: build the targets hotplane_cli and hotplane_shared")
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path.insert(0, here)
    for name in NEEDED:
        print(name, importlib.import_module(name).__version__)
    result = unittest.TextTestRunner(verbosity=2).run(
        unittest.defaultTestLoader.loadTestsFromNames(options.tests))
    failed = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses)
    skipped = len(result.skipped)
    print(f"{result.testsRun - failed - skipped} passed, {failed} failed, {skipped} skipped")
    sys.exit(0 if result.wasSuccessful() and result.testsRun > skipped else 1)


if __name__ == "__main__":
    main()
