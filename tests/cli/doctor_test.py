"""What doctor says of this machine and a store: measured, and what a boot would take. With a GPU
where there is one; ctest runs that on the fake CUDA driver."""

import os
import tempfile
import unittest

import command

RATES = ("pinned_copy_4mib", "pinned_copy_16mib", "verify", "register", "release")


class Doctor(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.store = os.path.join(folder.name, "store")
        command.must("synth", self.store, "--geometry", "4,256,128", "--layers", "2")

    def check(self, report, threads):
        self.assertEqual([rate["threads"] for rate in report["page_cache_copy"]], threads)
        for rate in report["page_cache_copy"]:
            self.assertGreater(rate["gigabytes_per_second"], 0)
        self.assertIn(report["boot"]["source"],
                      ("page cache", "both", "disk, buffered", "disk, direct"))
        self.assertTrue(report["boot"]["why"])
        subjects = [finding["subject"] for finding in report["findings"]]
        for subject in ("isa", "memory", "speed", "io", "store", "cache", "copy", "disk", "boot"):
            self.assertIn(subject, subjects)
        return subjects

    def test_on_the_cpu(self):
        report = command.must_json("doctor", "--store", self.store, "--workers", 3)
        subjects = self.check(report, [1, 2, 3])
        self.assertNotIn("device", report)
        self.assertNotIn("register", subjects)
        self.assertNotIn("onto", report["findings"][-1]["text"])
        without = command.must_json("doctor", "--workers", 1)
        self.assertNotIn("boot", without)
        self.assertNotIn("disk_direct_gigabytes_per_second", without)
        self.assertEqual(len(without["page_cache_copy"]), 1)


class OnDevice(Doctor):
    def test_on_a_gpu(self):
        report = command.must_json("doctor", "--store", self.store, "--device", "cuda",
                                   "--workers", 2)
        if "device" not in report:
            self.skipTest(report["findings"][-1]["text"])
        subjects = self.check(report, [1, 2])
        for rate in RATES:
            self.assertGreater(report[rate + "_gigabytes_per_second"], 0, rate)
        for subject in ("device", "link", "register"):
            self.assertIn(subject, subjects)
        if report["boot"]["source"] == "page cache":
            self.assertIn("copied, not registered", report["boot"]["why"])
        text = command.must("doctor", "--store", self.store, "--device", "cuda").stdout
        self.assertRegex(text, r"OK +boot .* onto cuda:0")


if __name__ == "__main__":
    unittest.main()
