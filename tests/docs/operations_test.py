"""operations_test.py HOTPLANE: the commands of docs/operations.md and of README.md run, in their
order, over the bundled model; the page's units are accepted by systemd; what it says of limits
happens."""

import ctypes
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

SOURCE = os.path.realpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../.."))
MODEL = os.path.join(SOURCE, "models", "tinymoe-mxfp4")
HOTPLANE = ""
IO_URING_SETUP = 425
CGROUP = "/sys/fs/cgroup"


def page(name="docs/operations.md"):
    with open(os.path.join(SOURCE, name), encoding="utf-8") as file:
        return file.read()


def blocks(kind, name="docs/operations.md"):
    return re.findall(rf"^```{kind}\n(.*?)^```", page(name), re.M | re.S)


def deny_io_uring():
    """In a child: io_uring_setup fails with EPERM, as a container's seccomp profile makes it."""
    def statement(code, true, false, value):
        return struct.pack("HBBI", code, true, false, value)

    code = b"".join([statement(0x20, 0, 0, 0),                     # the system call's number
                     statement(0x15, 0, 1, IO_URING_SETUP),
                     statement(0x06, 0, 0, 0x00050000 | 1),        # an error: EPERM
                     statement(0x06, 0, 0, 0x7fff0000)])           # allowed
    text = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(text))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, seccomp, filtered = 38, 22, 2
    if libc.prctl(no_new_privileges, 1, 0, 0, 0) != 0 or \
            libc.prctl(seccomp, filtered, ctypes.create_string_buffer(program), 0, 0) != 0:
        os._exit(99)


class Operations(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.root = tempfile.mkdtemp(prefix="hotplane-operations-")
        cls.addClassCleanup(shutil.rmtree, cls.root)
        programs = os.path.join(cls.root, "bin")
        os.makedirs(programs)
        os.symlink(HOTPLANE, os.path.join(programs, "hotplane"))
        cls.environment = {"PATH": programs + os.pathsep + os.environ["PATH"]}
        cls.store = os.path.join(cls.root, "a-store")
        cls.run_command("hotplane", "build", MODEL, "--store", cls.store, "-q")

    @classmethod
    def run_command(cls, *words, **options):
        done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False,
                              timeout=300, cwd=cls.root, env=cls.environment, **options)
        if done.returncode != 0:
            raise AssertionError(f"{words} exited {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def test_commands(self):
        self.run_blocks("docs/operations.md", 15)

    def test_the_first_hour(self):
        self.run_blocks("README.md", 9)

    def run_blocks(self, name, commands_min):
        """In one shell, so that variables last; the page's places become ours."""
        folder = tempfile.mkdtemp(prefix="page-", dir=self.root)
        places = {"/models/DeepSeek-V4-Flash": MODEL, "/store": os.path.join(folder, "store"),
                  "/backup": os.path.join(folder, "backup")}
        script = "".join(blocks("sh", name))
        self.assertGreater(script.count("hotplane "), commands_min)
        for path, place in places.items():
            script = re.sub(rf"(?<![\w.-]){path}(?![\w-])", place, script)
        self.assertNotIn(" /", script.replace(" " + self.root, "").replace(" " + MODEL, ""))
        self.run_command("bash", "-euxo", "pipefail", "-c", script)

    def test_units(self):
        analyze = shutil.which("systemd-analyze")
        if analyze is None:
            self.skipTest("no systemd-analyze here")
        units = {}
        for block in blocks("ini"):
            name = re.match(r"# /etc/systemd/system/(\S+)\n", block).group(1)
            for program in ("hotplane", "moe-server"):
                block = block.replace(f"/usr/local/bin/{program}", HOTPLANE)
            units[name] = os.path.join(self.root, name)
            with open(units[name], "w", encoding="utf-8") as file:
                file.write(block)
        self.assertEqual(len(units), 4)
        done = subprocess.run([analyze, "verify", "--man=no", *units.values()],
                              capture_output=True, text=True, check=False)
        told = [line for line in done.stderr.splitlines()
                if any(name in line for name in units)]
        self.assertEqual(told, [], done.stderr)

    def test_seccomp_without_io_uring(self):
        report = self.run_command("hotplane", "doctor", "--store", self.store,
                                  preexec_fn=deny_io_uring)
        self.assertRegex(report, r"WARN +io .*threads")
        self.run_command("hotplane", "boot", self.store, "--cache", "bypass",
                         preexec_fn=deny_io_uring)

    def test_memory_of_a_cgroup(self):
        name = f"hotplane-test-{os.getpid()}"
        for folder, limit in ((f"{CGROUP}/memory/{name}", "memory.limit_in_bytes"),
                              (f"{CGROUP}/{name}", "memory.max")):
            try:
                os.mkdir(folder)
            except OSError:
                continue
            self.addCleanup(os.rmdir, folder)
            try:
                with open(os.path.join(folder, limit), "w", encoding="ascii") as file:
                    file.write(str(256 << 20))
            except OSError:
                continue

            def enter(place=folder):
                with open(os.path.join(place, "cgroup.procs"), "w", encoding="ascii") as file:
                    file.write(str(os.getpid()))

            report = self.run_command("hotplane", "doctor", preexec_fn=enter)
            self.assertRegex(report, r"OK +memory .* of 256 MiB \(cgroup limit\)")
            self.run_command("hotplane", "boot", self.store, preexec_fn=enter)
            return
        self.skipTest("this user may make no cgroup with a memory limit here")


if __name__ == "__main__":
    HOTPLANE = os.path.realpath(sys.argv[1])
    unittest.main(argv=[sys.argv[0], "-v", *sys.argv[2:]])
