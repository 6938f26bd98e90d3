"""The wheel and the source distribution: what is in them, and that both install and work without a
compiler. HOTPLANE_BUILD_DIR is a build that is there."""

import base64
import csv
import hashlib
import io
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import unittest
import zipfile

import package

SCRIPT = os.path.join(package.SOURCE, "bindings", "python", "wheel.py")
BUILD = os.environ.get("HOTPLANE_BUILD_DIR", "")

USE = """
import sys, hotplane
report = hotplane.build(sys.argv[1], sys.argv[2])
with hotplane.boot(sys.argv[2]) as engine:
    print(hotplane.__version__, report["layers_built"], len(engine.layers), hotplane.__file__)
"""


def clean_environment():
    return {name: value for name, value in os.environ.items()
            if not name.startswith(("HOTPLANE", "PYTHON", "LD_"))}


def run(*words, **options):
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=300,
                          check=False, cwd="/", **{"env": clean_environment(), **options})
    if done.returncode != 0:
        raise AssertionError(f"{words} exited {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


class Wheel(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.root = tempfile.mkdtemp(prefix="hotplane-wheel-")
        cls.addClassCleanup(shutil.rmtree, cls.root)
        cls.wheel, cls.sdist = run(sys.executable, SCRIPT, "--build-dir", BUILD, "--out", cls.root,
                                   "--sdist").split()
        with open(os.path.join(package.SOURCE, "VERSION")) as file:
            cls.version = file.read().strip()

    def environment(self, name):
        """The programs of a fresh virtual environment."""
        path = os.path.join(self.root, name)
        done = subprocess.run([sys.executable, "-m", "venv", path], capture_output=True,
                              text=True, check=False, env=clean_environment())
        if done.returncode != 0:
            self.skipTest("python3 -m venv does not work here (Debian: python3-venv)")
        return os.path.join(path, "bin")

    def check_installed(self, programs):
        store = os.path.join(self.root, "store-" + os.path.basename(os.path.dirname(programs)))
        version, built, booted, file = run(os.path.join(programs, "python"), "-c", USE,
                                           package.MODEL, store).split()
        self.assertEqual((version, built, booted), (self.version, "4", "4"))
        self.assertTrue(file.startswith(os.path.dirname(programs)), file)
        for words in ([os.path.join(programs, "python"), "-m", "hotplane"],
                      [os.path.join(programs, "hotplane")]):
            self.assertEqual(run(*words, "--version"), f"hotplane {self.version}\n")
            self.assertIn('"layers_total"', run(*words, "boot", store, "--json"))

    def test_contents(self):
        self.assertEqual(os.path.basename(self.wheel),
                         f"hotplane-{self.version}-py3-none-manylinux_2_35_x86_64.whl")
        info = f"hotplane-{self.version}.dist-info/"
        with zipfile.ZipFile(self.wheel) as archive:
            self.assertIsNone(archive.testzip())
            names = archive.namelist()
            self.assertEqual(len(names), len(set(names)))
            rows = {name: (digest, size) for name, digest, size in
                    csv.reader(io.StringIO(archive.read(info + "RECORD").decode()))}
            self.assertEqual(set(rows), set(names))
            for name in names:
                data = archive.read(name)
                if name != info + "RECORD":
                    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
                    self.assertEqual(rows[name],
                                     ("sha256=" + digest.rstrip("="), str(len(data))))
            for name in ("hotplane/py.typed", "hotplane/__main__.py",
                         "hotplane/integrations/vllm_moet.py", info + "LICENSE"):
                self.assertIn(name, names)
            mode = archive.getinfo("hotplane/bin/hotplane").external_attr >> 16
            self.assertEqual(stat.S_IMODE(mode), 0o755)
            self.assertIn(f"Version: {self.version}\n", archive.read(info + "METADATA").decode())

    def test_the_same_tree_makes_the_same_wheel(self):
        again = os.path.join(self.root, "again")
        run(sys.executable, SCRIPT, "--build-dir", BUILD, "--out", again)
        with open(self.wheel, "rb") as first, \
                open(os.path.join(again, os.path.basename(self.wheel)), "rb") as second:
            self.assertEqual(first.read(), second.read())

    def test_a_binary_that_needs_more_is_refused(self):
        other = os.path.join(self.root, "other")
        os.makedirs(os.path.join(other, "lib"))
        shutil.copy(os.path.realpath(sys.executable), os.path.join(other, "lib",
                                                                   "libhotplane.so"))
        done = subprocess.run([sys.executable, SCRIPT, "--build-dir", other, "--out", self.root],
                              capture_output=True, text=True, check=False)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("expected parts of glibc only", done.stderr)

    def test_it_installs_and_works(self):
        programs = self.environment("from-wheel")
        pip = [os.path.join(programs, "python"), "-m", "pip", "--disable-pip-version-check", "-q"]
        run(*pip, "install", "--no-index", self.wheel)
        self.check_installed(programs)
        run(*pip, "check")
        run(*pip, "uninstall", "-y", "hotplane")
        left = [os.path.join(folder, name) for folder, _, names in os.walk(
            os.path.dirname(programs)) for name in names if "hotplane" in name]
        self.assertEqual(left, [])

    def test_the_source_distribution_installs_too(self):
        with tarfile.open(self.sdist) as archive:
            names = archive.getnames()
        base = f"hotplane-{self.version}/"
        for name in ("PKG-INFO", "pyproject.toml", "CMakeLists.txt", "include/hotplane/hotplane.h",
                     "src/capi/capi.cc", "bindings/python/wheel.py",
                     "bindings/python/hotplane/__init__.py"):
            self.assertIn(base + name, names)
        programs = self.environment("from-sdist")
        run(os.path.join(programs, "python"), "-m", "pip", "--disable-pip-version-check", "-q",
            "install", "--no-index", self.sdist,
            env={**clean_environment(), "HOTPLANE_BUILD_DIR": BUILD})
        self.check_installed(programs)


if __name__ == "__main__":
    package.main()
