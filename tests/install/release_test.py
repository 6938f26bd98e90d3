"""release_test.py BUILD_DIR CC: what tools/release makes is the same twice, needs nothing newer
than glibc 2.35, and works where there is nothing but glibc: in a root folder of its own for root,
else in an empty environment."""

import hashlib
import importlib.machinery
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import unittest
import zipfile

SOURCE = os.path.realpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../.."))
RELEASE = os.path.join(SOURCE, "tools", "release")
MODEL = os.path.join(SOURCE, "models", "tinymoe-mxfp4")
EPOCH = 1767225600
BUILD, CC = "", "cc"
NOT_NEEDED = shutil.ignore_patterns("__pycache__", "site-packages", "dist-packages", "test",
                                    "idlelib", "tkinter", "lib2to3", "ensurepip", "config-*",
                                    "turtledemo", "pydoc_data", "distutils")
PYTHON_USE = """
import sys
sys.path.insert(0, sys.argv[1])
import hotplane
report = hotplane.build(sys.argv[2], sys.argv[3])
with hotplane.boot(sys.argv[3]) as engine:
    print(hotplane.__version__, report["layers_built"], len(engine.layers),
          len(bytes(engine.layers[0].planes13[31])))
"""


def run(*words, **options):
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False,
                          timeout=300, **options)
    if done.returncode != 0:
        raise AssertionError(f"{words} exited {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def load_release():
    loader = importlib.machinery.SourceFileLoader("release", RELEASE)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("release", loader))
    loader.exec_module(module)
    return module


def make(out, umask=0o022):
    return run(sys.executable, RELEASE, "--build-dir", BUILD, "--out", out,
               env={**os.environ, "SOURCE_DATE_EPOCH": str(EPOCH)},
               preexec_fn=lambda: os.umask(umask)).split()


def libraries(*paths):
    """What the loader takes to run them, by full path."""
    done = subprocess.run(["ldd", *paths], capture_output=True, text=True, check=False)
    return set(re.findall(r"(?:=> |^\s+)(/\S+) \(0x", done.stdout, re.M))


class CleanRoot:
    """A folder with the given programs and their libraries, at their places, and nothing else."""

    def __init__(self, path):
        self.path = path
        self.is_root = os.geteuid() == 0

    def inside(self, path):
        """Where a program that `run` starts sees what is below this folder."""
        return "/" + os.path.relpath(path, self.path) if self.is_root else path

    def add(self, source, target=None):
        """Copies a file with its libraries."""
        for path in [source, *libraries(source)]:
            place = self.path + (target if target and path == source else path)
            os.makedirs(os.path.dirname(place), exist_ok=True)
            if not os.path.exists(place):
                shutil.copy(path, place)

    def run(self, program, *words):
        command = [program, *words] if not self.is_root else \
            [shutil.which("chroot") or "/usr/sbin/chroot", self.path, program, *words]
        return run(*command, env={}, cwd="/")


class Release(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.root = tempfile.mkdtemp(prefix="hotplane-release-")
        cls.addClassCleanup(shutil.rmtree, cls.root)
        cls.tarball, cls.wheel, cls.sums = make(os.path.join(cls.root, "first"))
        with open(os.path.join(SOURCE, "VERSION"), encoding="utf-8") as file:
            cls.version = file.read().strip()

    def clean_root(self, name):
        return CleanRoot(os.path.join(self.root, name))

    def unpacked(self, folder):
        """The tarball's folder, below `folder`."""
        os.makedirs(folder, exist_ok=True)
        with tarfile.open(self.tarball) as archive:
            archive.extractall(folder)
        return os.path.join(folder, f"hotplane-{self.version}-linux-x86_64")

    def test_the_same_build_makes_the_same_bytes(self):
        again = make(os.path.join(self.root, "again"), umask=0o077)
        for first, second in zip((self.tarball, self.wheel, self.sums), again):
            with open(first, "rb") as one, open(second, "rb") as other:
                self.assertEqual(one.read(), other.read(), first)

    def test_sums(self):
        with open(self.sums, encoding="utf-8") as file:
            lines = file.read().split("\n")
        for path, line in zip((self.tarball, self.wheel), lines):
            with open(path, "rb") as file:
                digest = hashlib.sha256(file.read()).hexdigest()
            self.assertEqual(line, f"{digest}  {os.path.basename(path)}")

    def test_tarball(self):
        with tarfile.open(self.tarball) as archive:
            entries = archive.getmembers()
        top = f"hotplane-{self.version}-linux-x86_64"
        names = [entry.name for entry in entries]
        self.assertEqual([name.split("/") for name in names],
                         sorted(name.split("/") for name in names))
        for name in ("bin/hotplane", "lib/libhotplane.so", "lib/libhotplane.a",
                     "include/hotplane/hotplane.h", "include/hotplane/engine.hpp",
                     "lib/cmake/hotplane/hotplaneConfig.cmake", "lib/pkgconfig/hotplane.pc",
                     "share/man/man1/hotplane.1", "share/bash-completion/completions/hotplane",
                     "LICENSE", "README.md", "docs/cli.md", "docs/format/layer-file.md",
                     "examples/boot.c"):
            self.assertTrue({f"{top}/{name}", f"{top}/{name.replace('lib/', 'lib64/')}"} &
                            set(names), name)
        for entry in entries:
            self.assertEqual((entry.uid, entry.gid, entry.uname, entry.mtime),
                             (0, 0, "root", EPOCH), entry.name)
            self.assertTrue(entry.name == top or entry.name.startswith(top + "/"))
            self.assertTrue(entry.isfile() or entry.isdir() or entry.issym())
            if not entry.issym():
                self.assertIn(stat.S_IMODE(entry.mode), (0o644, 0o755))
            self.assertFalse(entry.name.endswith((".pyc", ".py.orig")) or "/build/" in entry.name)

    def test_symbols_of_others_are_refused(self):
        release = load_release()
        program = os.path.join(self.unpacked(os.path.join(self.root, "symbols")), "bin", "hotplane")
        release.check_versions(program, (2, 35))
        with self.assertRaises(SystemExit) as refused:
            release.check_versions(program, (2, 4))
        self.assertIn("expected GLIBC_2.4 at most", str(refused.exception))
        other = shutil.which("cmake")
        if other is None or "libstdc++" not in "".join(libraries(other)):
            self.skipTest("no program here needs the system's libstdc++")
        with self.assertRaises(SystemExit) as refused:
            release.check_versions(os.path.realpath(other), (2, 99))
        self.assertRegex(str(refused.exception), "needs (GLIBCXX|CXXABI|GCC)_")

    def check_program(self, root, program):
        model = os.path.join(root.path, "model")
        shutil.copytree(MODEL, model, dirs_exist_ok=True)
        store = root.inside(os.path.join(root.path, "store"))
        self.assertEqual(root.run(program, "--version"), f"hotplane {self.version}\n")
        root.run(program, "build", root.inside(model), "--store", store, "-q")
        self.assertIn('"layers_read": 4', root.run(program, "boot", store, "--json"))
        self.assertIn('"findings": []', root.run(program, "verify", store, "--json"))
        root.run(program, "doctor", "--store", store)
        return store

    def test_tarball_where_there_is_nothing_else(self):
        root = self.clean_root("tarball-root")
        folder = self.unpacked(os.path.join(root.path, "opt"))
        program = os.path.join(folder, "bin", "hotplane")
        for path in libraries(program):
            root.add(path)
        store = self.check_program(root, root.inside(program))
        # A program of somebody else's, made with the headers and the library of the tarball.
        [library] = {os.path.dirname(os.path.join(at, name)) for at, _, names in os.walk(folder)
                     for name in names if name == "libhotplane.a"}
        mine = os.path.join(root.path, "boot")
        run(CC, "-std=c99", "-o", mine, os.path.join(folder, "examples", "boot.c"),
            "-I", os.path.join(folder, "include"), "-L", library, "-lhotplane",
            f"-Wl,-rpath,{root.inside(library)}")
        for path in libraries(mine):
            if not path.startswith(root.path):
                root.add(path)
        self.assertIn("layer 3", root.run(root.inside(mine), store))

    def test_wheel_where_there_is_nothing_but_python(self):
        root = self.clean_root("wheel-root")
        site = os.path.join(root.path, "site")
        with zipfile.ZipFile(self.wheel) as archive:
            for entry in archive.infolist():
                path = archive.extract(entry, site)
                os.chmod(path, stat.S_IMODE(entry.external_attr >> 16))
        program = os.path.join(site, "hotplane", "bin", "hotplane")
        python = os.path.realpath(sys.executable)
        stdlib = sysconfig.get_path("stdlib", vars={"base": sys.base_prefix,
                                                    "installed_base": sys.base_prefix})
        for path in (python, *libraries(program), *libraries(python)):
            root.add(path)
        if root.is_root:
            shutil.copytree(stdlib, root.path + stdlib, ignore=NOT_NEEDED, dirs_exist_ok=True)
            modules = os.path.join(stdlib, "lib-dynload")
            for path in libraries(*(os.path.join(modules, name) for name in os.listdir(modules))):
                root.add(path)
        self.check_program(root, root.inside(program))
        model = root.inside(os.path.join(root.path, "model"))
        store = root.inside(os.path.join(root.path, "from-python"))
        out = root.run(python, "-c", PYTHON_USE, root.inside(site), model, store).split()
        self.assertEqual(out, [self.version, "4", "4", str(2 * 128 * 256 // 4)])


if __name__ == "__main__":
    BUILD, CC = sys.argv[1:3]
    unittest.main(argv=[sys.argv[0], "-v", *sys.argv[3:]])
