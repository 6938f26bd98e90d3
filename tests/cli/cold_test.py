"""What a boot reads of a store that is not in the page cache, seen from outside: the kernel's own
counts and mincore."""

import ctypes
import json
import mmap
import os
import resource
import shutil
import subprocess
import tempfile
import unittest

import command

PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)


def drop(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def resident_pages(path):
    """Indexes of the file's pages that are in the page cache, without touching them."""
    size = os.path.getsize(path)
    count = (size + PAGE - 1) // PAGE
    fd = os.open(path, os.O_RDONLY)
    LIBC.mmap.restype = ctypes.c_void_p
    LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int,
                          ctypes.c_int, ctypes.c_long]
    LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    address = LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    os.close(fd)
    answer = ctypes.create_string_buffer(count)
    failed = LIBC.mincore(address, size, answer)
    LIBC.munmap(address, size)
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return [i for i in range(count) if answer.raw[i] & 1]


def read_bytes_of(*arguments, env=None):
    """The finished command's JSON, and the bytes that the kernel fetched from disk for it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_inblock
    done = subprocess.run([command.HOTPLANE, *map(str, arguments), "--json"], capture_output=True,
                          text=True, timeout=300, env={**os.environ, **(env or {})})
    if done.returncode != 0:
        raise AssertionError(done.stderr)
    blocks = resource.getrusage(resource.RUSAGE_CHILDREN).ru_inblock - before
    return json.loads(done.stdout), blocks * 512


class Cold(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.root = tempfile.mkdtemp(prefix="hotplane-cold-")
        cls.store = os.path.join(cls.root, "store")
        # 4 layers of 13.5 MiB base and 15 MiB delta.
        command.must("synth", cls.store, "--geometry", "8,1024,2048", "--layers", "4", "--tiers",
                     "base,delta", "-q")
        cls.files = [f for f in command.files_below(cls.store) if "/layer-" in f]
        cls.delta = [f for f in cls.files if ".delta" in f]
        command.must("boot", cls.store, "-q")

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.root)

    def setUp(self):
        for path in self.files:
            drop(path)
        if any(len(resident_pages(path)) > 16 for path in self.files):
            self.skipTest("the page cache cannot be dropped here")

    def boot(self, cache, env=None):
        report, fetched = read_bytes_of("boot", self.store, "--cache", cache, env=env)
        self.assertEqual(report["bytes_read"], report["bytes_needed"])
        self.assertEqual(report["bytes_verified"], report["bytes_needed"])
        for path in self.delta:
            beyond = [page for page in resident_pages(path) if page > 0]
            self.assertEqual(beyond, [], f"{path} was read beyond its header")
        return report, fetched

    def test_a_cold_boot_fetches_the_plans_bytes_and_no_more(self):
        for cache in ("keep", "bypass"):
            for env in ({}, {"HOTPLANE_NO_IO_URING": "1"}):
                with self.subTest(cache=cache, env=env):
                    for path in self.files:
                        drop(path)
                    report, fetched = self.boot(cache, env)
                    wanted = report["bytes_needed"] + report["bytes_metadata"]
                    self.assertEqual(report["bytes_read_disk"], report["bytes_needed"])
                    self.assertGreaterEqual(fetched, report["bytes_needed"])
                    self.assertLess(fetched, 1.01 * wanted)

    def test_keep_leaves_the_next_boot_warm(self):
        self.boot("keep")
        report, fetched = self.boot("keep")
        self.assertEqual({s["source"] for s in report["source_by_layer"]}, {"page cache"})
        self.assertEqual(report["bytes_read_disk"], 0)
        self.assertLess(fetched, 0.01 * report["bytes_needed"])

    def test_half_cached_fetches_the_other_half(self):
        dropped = 0
        for path in self.files:
            if path in self.delta:
                continue
            with open(path, "rb") as file:
                file.read()
            size = os.path.getsize(path)
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, size // 2 // PAGE * PAGE, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
            dropped += size - len(resident_pages(path)) * PAGE
        report, fetched = self.boot("bypass")
        self.assertEqual({s["source"] for s in report["source_by_layer"]}, {"both"})
        # A unit of 4 MiB that the cut goes through may count as not cached, whole.
        self.assertLess(abs(fetched - dropped), 4 * (4 << 20))
        self.assertLess(fetched, report["bytes_needed"])

    def test_the_path_is_told(self):
        report, _ = self.boot("bypass", {"HOTPLANE_NO_IO_URING": "1"})
        self.assertIn("pread threads", report["read_path"])
        self.assertIn("HOTPLANE_NO_IO_URING", report["read_path"])


if __name__ == "__main__":
    command.main(unittest)
