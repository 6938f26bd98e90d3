"""json_keys_test.py HOTPLANE [FAKE]: every key that a command prints with --json is named where
docs/cli.md speaks of that command's keys. FAKE is the folder of the driver that stands in for a
GPU's."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

SOURCE = os.path.realpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../.."))
MODEL = os.path.join(SOURCE, "models", "tinymoe-mxfp4")
sys.path.insert(0, os.path.join(SOURCE, "tests", "cli"))
import command  # noqa: E402

HOTPLANE = ""
FAKE = ""
COMMANDS = ("build", "boot", "boot --dry-run", "warm", "verify", "inspect", "export", "gc", "synth",
            "doctor", "report", "fidelity", "import", "A failure")
# Objects that the page describes once.
OF_OTHERS = {"boot": ("boot --dry-run", "build")}


def documented():
    """{command: words in its text that can be keys} of the section on JSON keys."""
    with open(os.path.join(SOURCE, "docs", "cli.md"), encoding="utf-8") as file:
        section = file.read().split("\n## JSON keys\n")[1].split("\n## ")[0]
    names = "|".join(map(re.escape, sorted(COMMANDS[:-1], key=len, reverse=True)))
    parts = re.split(rf"(?:^|(?<=[\s]))(?:`({names})`: |(A failure) prints )", section)
    keys = {}
    for ticked, failure, text in zip(parts[1::3], parts[2::3], parts[3::3]):
        words = set(re.findall(r"`([a-z0-9_-]+)`", text))
        keys[ticked or failure] = keys.get(ticked or failure, set()) | words
    return keys


def keys_of(value):
    """All keys of the objects in it, at any depth."""
    if isinstance(value, dict):
        return set(value).union(*map(keys_of, value.values()))
    if isinstance(value, list):
        return set().union(*map(keys_of, value))
    return set()


class JsonKeys(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.root = tempfile.mkdtemp(prefix="hotplane-keys-")
        cls.addClassCleanup(shutil.rmtree, cls.root)
        cls.documented = documented()

    @classmethod
    def place(cls, name):
        return os.path.join(cls.root, name)

    def run_it(self, name, *words, code=0, fake=False, save=None):
        """The report; its keys are among those of `name`."""
        environment = {**os.environ, "LD_LIBRARY_PATH": FAKE} if fake else None
        done = subprocess.run([HOTPLANE, *words, "--json"], capture_output=True, text=True,
                              check=False, timeout=300, env=environment)
        self.assertEqual(done.returncode, code, (words, done.stdout, done.stderr))
        if save is not None:
            with open(save, "w", encoding="utf-8") as out:
                out.write(done.stdout)
        report = json.loads(done.stdout)
        keys = keys_of(report)
        self.assertGreater(len(keys), 0)
        known = self.documented[name].union(
            *(self.documented[other] for other in OF_OTHERS.get(name, ())))
        self.assertEqual(sorted(keys - known), [], f"docs/cli.md, `{name}`: {words}")
        return report

    def test_the_section_is_found(self):
        self.assertEqual(sorted(self.documented), sorted(COMMANDS))
        for name, keys in self.documented.items():
            self.assertGreater(len(keys), 0, name)

    def test_a_store_from_build_to_gc(self):
        store, other = self.place("store"), self.place("other")
        self.run_it("build", "build", MODEL, "--store", store)
        self.run_it("boot --dry-run", "boot", store, "--dry-run")
        self.run_it("boot", "boot", store, "--pin-delta", "1M", save=self.place("run.json"))
        self.run_it("boot", "boot", other, "--checkpoint", MODEL)
        self.run_it("warm", "warm", store)
        self.run_it("report", "report", self.place("run.json"), "-o", self.place("run.html"))
        self.run_it("fidelity", "fidelity", MODEL, "--store", store)
        self.run_it("fidelity", "fidelity", MODEL, "--store", store, "--layers", "0")
        self.run_it("doctor", "doctor", "--store", store)
        self.run_it("verify", "verify", store, "--source", MODEL)
        generation = os.path.join(other, os.listdir(other)[0])
        for folder, _, names in os.walk(generation):
            for each in names:
                self.run_it("inspect", "inspect", os.path.join(folder, each))
        base = os.path.join(generation, "layer-0001.base")
        with open(base, "r+b") as file:
            file.truncate(os.path.getsize(base) - 1)
        os.remove(os.path.join(generation, "layer-0002.base"))
        damaged = self.run_it("verify", "verify", other, code=3)
        self.assertTrue(damaged["findings"])
        os.remove(os.path.join(generation, "manifest"))
        self.assertTrue(self.run_it("gc", "gc", other)["kept_without_manifest"])
        self.run_it("gc", "gc", store, "--dry-run")

    def test_inspect(self):
        store = self.place("inspected")
        self.run_it("build", "build", MODEL, "--store", store, "--tiers", "base")
        bad = self.place("bad")
        tensors = command.mxfp4_tensors()
        command.write_checkpoint(bad, {name: tensors[name] for name in tensors
                                       if ".1.w2" not in name})
        for path in (store, MODEL, os.path.join(MODEL, "model-00001-of-00001.safetensors")):
            self.run_it("inspect", "inspect", path)
        done = subprocess.run([HOTPLANE, "inspect", bad, "--json"], capture_output=True,
                              text=True, check=False)
        report = json.loads(done.stdout)
        self.assertEqual(sorted(keys_of(report) - self.documented["inspect"] -
                                self.documented["A failure"]), [], done.stdout)

    def test_exports_and_an_import(self):
        store, cache = self.place("exported"), self.place("cache")
        self.run_it("build", "build", MODEL, "--store", store)
        self.run_it("export", "export", store, "--layer", "0", "--part", "sc2", "--out",
                    self.place("part"))
        self.run_it("export", "export", store, "--planes-cache", cache, "--checkpoint-id", "a")
        self.run_it("export", "export", store, "--hf", self.place("hf"), "--checkpoint", MODEL,
                    "--precision", "fp4")
        shape = self.run_it("inspect", "inspect", MODEL)["layers"][0]["geometry"]
        geometry = ",".join(str(shape[key]) for key in ("experts", "hidden", "intermediate"))
        self.run_it("import", "import", "--planes-cache", cache, "--layers-geometry", geometry,
                    self.place("imported"))
        self.run_it("inspect", "inspect", self.place("imported"))

    def test_synth(self):
        shape = ("--geometry", "4,64,64", "--layers", "1")
        self.run_it("synth", "synth", self.place("synthetic"), *shape)
        self.run_it("synth", "synth", self.place("checkpoint"), *shape, "--checkpoint", "bf16")

    def test_failures(self):
        self.run_it("A failure", "boot", self.place("nothing"), code=2)
        broken = self.place("broken")
        self.run_it("build", "build", MODEL, "--store", broken, "--tiers", "base")
        generation = os.path.join(broken, os.listdir(broken)[0])
        command.flip(os.path.join(generation, "layer-0000.base"), -5000)
        self.run_it("A failure", "boot", broken, code=3)

    def test_on_a_device(self):
        if not FAKE:
            self.skipTest("no stand-in for a driver in this build")
        store = self.place("on-device")
        self.run_it("build", "build", MODEL, "--store", store, "--device", "cuda", fake=True)
        report = self.run_it("boot", "boot", store, "--device", "cuda", fake=True)
        self.assertIn("peak_device_bytes", report)
        self.run_it("boot --dry-run", "boot", store, "--device", "cuda", "--dry-run", fake=True)
        self.run_it("doctor", "doctor", "--store", store, "--device", "cuda", fake=True)


if __name__ == "__main__":
    HOTPLANE = sys.argv[1]
    FAKE = sys.argv[2] if len(sys.argv) > 2 else ""
    unittest.main(argv=[sys.argv[0], "-v"])
