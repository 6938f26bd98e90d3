#!/usr/bin/env python3
"""The benchmark of peers at a small size, without a GPU: its files, its table, and that a loader
which is missing, fails or crashes has that for a row and stops no other."""
import argparse
import array
import json
import os
import struct
import subprocess
import sys
import tempfile
import unittest

import loaders
import peers
import store

HOTPLANE = os.environ.get("HOTPLANE")
HERE = os.path.dirname(os.path.abspath(__file__))


def installed(*names):
    done = subprocess.run([sys.executable, "-c", "import " + ", ".join(names)], check=False,
                          capture_output=True)
    return done.returncode == 0


def smoke(folder, *words, path=None):
    """(result, exit code) of a run whose processes find the packages in `path` first."""
    out = os.path.join(folder, "result.json")
    own = {**os.environ, "PYTHONPATH": path} if path else None
    done = subprocess.run([sys.executable, os.path.join(HERE, "peers.py"), "--smoke", "--out", out,
                           "--directory", folder, *words], capture_output=True, text=True,
                          env=own, check=False, timeout=300)
    if done.returncode not in (0, 1):
        raise AssertionError(done.stderr)
    with open(out) as file:
        result = json.load(file)
    if json.loads(done.stdout.splitlines()[0]) != result:
        raise AssertionError("the first line of the output is not the result")
    if os.listdir(folder) != ["result.json"]:
        raise AssertionError(f"files are left: {os.listdir(folder)}")
    return result, done.returncode


def package(folder, name, text):
    """A package as pip would have installed it."""
    with open(os.path.join(folder, name.replace("-", "_") + ".py"), "w") as file:
        file.write(text)
    info = os.path.join(folder, f"{name.replace('-', '_')}-1.dist-info")
    os.mkdir(info)
    with open(os.path.join(info, "METADATA"), "w") as file:
        file.write(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")


class Files(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def check(self, entry):
        with open(entry["path"], "rb") as file:
            file.seek(entry["offset"])
            data = file.read(entry["bytes"])
        self.assertEqual(len(data), entry["bytes"])
        self.assertEqual(sum(array.array("q", data)) & store.WORD_MASK, entry["sum"])
        return data

    def test_parts_are_the_same_in_both_kinds_and_sums_are_true(self):
        raw = store.write_raw(self.folder.name, store.SMOKE, 2)
        safe = store.write_safetensors(self.folder.name, store.SMOKE)
        self.assertEqual(len(raw), 3 * 4 + 2 * 2)
        parts = {(entry["layer"], entry["part"]): self.check(entry) for entry in raw}
        self.assertEqual(len(set(parts.values())), len(parts), "two parts are alike")
        self.assertEqual(len(safe), 3 * 4)
        for entry in safe:
            self.assertEqual(self.check(entry), parts[entry["layer"], entry["part"]])

    def test_safetensors_headers_describe_the_files(self):
        for entry in store.write_safetensors(self.folder.name, store.SMOKE):
            with open(entry["path"], "rb") as file:
                size = struct.unpack("<Q", file.read(8))[0]
                header = json.loads(file.read(size))
            spans = sorted(tensor["data_offsets"] for tensor in header.values())
            self.assertEqual(spans[0][0], 0)
            self.assertTrue(all(one[1] == two[0] for one, two in zip(spans, spans[1:])))
            self.assertEqual(8 + size + spans[-1][1], os.path.getsize(entry["path"]))
            first = header[f"layers.{entry['layer']}.{entry['part']}.0"]
            self.assertEqual(8 + size + first["data_offsets"][0], entry["offset"])

    def test_full_size_is_that_of_the_model(self):
        self.assertEqual(store.FULL.geometry.base_bytes(), 1811939328)
        self.assertEqual(store.FULL.geometry.fp4_bytes(), 3 * 2**30)

    def test_a_full_folder_is_refused_with_the_numbers(self):
        with self.assertRaisesRegex(OSError, r"need 1228800\.0 GiB .* are free"):
            store.write_raw(self.folder.name, store.FULL._replace(layers=2**18), 2**18)


class ResultFiles(unittest.TestCase):
    """The names that --json and --out take, here and in the benches beside."""

    def test_a_look_leaves_nothing_behind_and_keeps_what_is_there(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "result.json")
            self.assertEqual(peers.result_file(path), path)
            self.assertEqual(os.listdir(folder), [])
            with open(path, "w") as old:
                old.write("old")
            self.assertEqual(peers.result_file(path), path)
            with open(path) as there:
                self.assertEqual(there.read(), "old")

    def test_a_name_that_cannot_be_is_refused(self):
        with self.assertRaisesRegex(argparse.ArgumentTypeError, "folder that is there"):
            peers.result_file(os.path.join(tempfile.gettempdir(), "none", "of", "these"))


class Rows(unittest.TestCase):
    def row(self, name, seconds, size=2 * 10**9):
        runs = [{"seconds": each, "seconds_first_layer": each / 2, "bytes": size, "layers": 2}
                for each in seconds]
        return {**peers.figures(name, runs, {}, {}), "limit_gigabytes_per_second": 50}

    def test_the_first_run_is_apart_and_ratios_are_of_equal_bytes(self):
        ours = self.row("hotplane-ring", [9, 1, 3, 2])
        other = self.row("reference-fp4", [8, 4, 4, 4], 10**9)
        self.assertEqual((ours["seconds_first_run"], ours["seconds"]), (9, 2))
        self.assertEqual(ours["gigabytes_per_second"], 1)
        self.assertEqual(ours["seconds_first_layer"], 1)
        self.assertEqual(peers.ratio(other, [ours, other]), 4)
        self.assertIn("4.0", peers.line({**other, "times_hotplane": 4}))
        self.assertIsNone(peers.ratio(other, [other]))

    def test_every_loader_has_a_name_and_a_package(self):
        self.assertEqual(set(loaders.LOADERS), set(peers.PUBLIC + peers.REFERENCE))
        self.assertLessEqual(set(peers.SETTINGS), set(loaders.LOADERS))
        self.assertLessEqual({name.split("-")[0] for name in loaders.LOADERS},
                             set(loaders.PACKAGES))


class Runs(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.packages = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.addCleanup(self.packages.cleanup)

    def test_failing_loaders_stop_no_other(self):
        package(self.packages.name, "torch", "")
        package(self.packages.name, "numpy", "")
        package(self.packages.name, "fastsafetensors", "import os\nos.abort()\n")
        package(self.packages.name, "instanttensor", "raise RuntimeError('needs something')\n")
        result, _ = smoke(self.folder.name, "--only", "fastsafetensors-,instanttensor",
                          path=self.packages.name)
        rows = {row["name"]: row for row in result["rows"]}
        self.assertEqual(len(rows), 4)
        self.assertIn("exit code -6", rows["fastsafetensors-buffers"]["failed"])
        self.assertIn("RuntimeError: needs something", rows["instanttensor-cached"]["failed"])
        self.assertEqual(rows["instanttensor-cached"]["settings"],
                         {"INSTANTTENSOR_CACHE_BUFFER": "1"})

    def test_no_time_left_is_said_and_older_rows_stay(self):
        old = os.path.join(self.packages.name, "old.json")
        with open(old, "w") as file:
            json.dump({"rows": [{"name": "reference-serial", "what": "x", "failed": "kept"},
                                {"name": "runai", "what": "x", "failed": "replaced"}]}, file)
        result, _ = smoke(self.folder.name, "--only", "runai", "--merge", old,
                          "--limit-seconds", "0.5")
        found = {row["name"]: row.get("failed", "") for row in result["rows"]}
        self.assertEqual(found.pop("reference-serial"), "kept")
        self.assertEqual(set(found), {"runai", "runai-ring", "runai-uring"})
        self.assertTrue(all("no time was left" in why for why in found.values()), found)

    def test_files_that_cannot_be_made_are_a_row(self):
        result, code = smoke(self.folder.name, "--only", "safetensors-load", "--layers", "999999")
        self.assertEqual(code, 1)
        self.assertIn("fewer --layers", result["rows"][0]["failed"])

    @unittest.skipUnless(HOTPLANE, "HOTPLANE names no program")
    def test_hotplane_is_a_row_and_its_failure_the_exit_code(self):
        result, code = smoke(self.folder.name, "--only", "hotplane", "--hotplane", HOTPLANE)
        self.assertEqual(code, 0)
        self.assertEqual([row["name"] for row in result["rows"]], peers.HOTPLANE)
        for row in result["rows"]:
            self.assertEqual((row["bytes"], row["layers"]),
                             (3 * store.SMOKE.geometry.base_bytes(), 3))
            self.assertGreater(row["gigabytes_per_second"], 0)
            self.assertGreater(row["times_hotplane"], 0)
            self.assertEqual(len(row["seconds_of_runs"]), 2)
        os.remove(os.path.join(self.folder.name, "result.json"))
        result, code = smoke(self.folder.name, "--only", "hotplane", "--hotplane", "/bin/false")
        self.assertEqual(code, 1)
        self.assertTrue(all("exit code 1" in row["failed"] for row in result["rows"]))

    @unittest.skipUnless(installed("numpy", "torch"), "numpy or torch is not installed")
    def test_the_references_land_every_byte(self):
        result, _ = smoke(self.folder.name, "--only", "reference", "--fp4-layers", "2")
        rows = {row["name"]: row for row in result["rows"]}
        layer = store.SMOKE.geometry.base_bytes()
        self.assertEqual([rows[name]["bytes"] // layer for name in peers.REFERENCE], [3, 3, 2])

    @unittest.skipUnless(installed("numpy", "torch"), "numpy or torch is not installed")
    def test_wrong_bytes_are_found(self):
        entries = store.write_raw(self.folder.name, store.SMOKE, 0)
        plan = {"entries": entries, "device": "cpu"}
        landed = loaders.Landed(plan)
        loaders.reference_workers(plan, landed)
        self.assertEqual(loaders.check(plan, landed), 3 * store.SMOKE.geometry.base_bytes())
        landed.tensors[1, "sc2"][0][77] ^= 1
        with self.assertRaisesRegex(ValueError, "layer 1 sc2: its words sum to"):
            loaders.check(plan, landed)

    @unittest.skipUnless(installed("numpy", "torch", "safetensors"),
                         "numpy, torch or safetensors is not installed")
    def test_public_loaders_land_every_byte_where_they_are_installed(self):
        result, _ = smoke(self.folder.name, "--only", "safetensors,fastsafetensors,runai")
        for row in result["rows"]:
            if "missing" not in row:
                self.assertEqual(row.get("bytes"), 3 * store.SMOKE.geometry.base_bytes(), row)


if __name__ == "__main__":
    unittest.main()
