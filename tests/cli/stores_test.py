"""What commands say of a store: what is missing from it, which generation is meant, what its files
are, what was mended."""

import glob
import os
import shutil
import tempfile
import unittest

import command


class StoreTest(unittest.TestCase):
    """A model of four layers and its store; `built` is made once and copied."""

    @classmethod
    def setUpClass(cls):
        cls.shared = tempfile.mkdtemp(prefix="hotplane-stores-")
        cls.model = command.write_checkpoint(os.path.join(cls.shared, "model"),
                                             command.mxfp4_tensors(layers=4, experts=2))
        cls.built = os.path.join(cls.shared, "built")
        command.must("build", cls.model, "--store", cls.built, "-q")

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.shared)

    def setUp(self):
        self.root = tempfile.mkdtemp(prefix="hotplane-stores-")
        self.addCleanup(shutil.rmtree, self.root)
        self.store = os.path.join(self.root, "store")
        shutil.copytree(self.built, self.store)
        self.generation = glob.glob(os.path.join(self.store, "*"))[0]

    def file(self, name):
        return os.path.join(self.generation, name)

    def remove(self, *names):
        for name in names:
            os.remove(self.file(name))

    def refused(self, code, *arguments):
        done = command.run(*arguments)
        self.assertEqual(done.returncode, code, (arguments, done.stdout, done.stderr))
        return done


class Completeness(StoreTest):
    DELTAS = ("layer-0002.delta-quintal", "layer-0003.delta-quintal")

    def test_a_whole_store_says_so(self):
        self.assertIn("OK    base 4 of 4, delta 4 of 4", command.must("verify", self.store).stdout)
        report = command.must_json("verify", self.store, "--complete")
        self.assertTrue(report["complete"])
        self.assertEqual(report["generation"], os.path.basename(self.generation))
        self.assertEqual([t["files_present"] for t in report["tiers"]], [4, 4])

    def test_missing_files_of_a_tier_are_named(self):
        self.remove(*self.DELTAS)
        done = command.must("verify", self.store)
        self.assertIn("WARN  base 4 of 4; delta 2 of 4: layers 2-3 missing", done.stdout)
        self.assertIn("--complete", done.stdout)
        strict = self.refused(3, "verify", self.store, "--complete")
        for name in self.DELTAS:
            self.assertIn(self.file(name), done.stdout)
            self.assertIn(self.file(name), strict.stdout)
        self.assertIn("BAD   base 4 of 4; delta 2 of 4: layers 2-3 missing", strict.stdout)
        self.assertIn("the store is not complete", strict.stderr)
        report = command.must_json("verify", self.store)
        self.assertFalse(report["complete"])
        delta = report["tiers"][1]
        self.assertEqual((delta["tier"], delta["files_total"], delta["files_present"]),
                         ("delta", 4, 2))
        self.assertEqual(delta["layers_missing"], [2, 3])
        self.assertEqual(delta["files_missing"], [self.file(name) for name in self.DELTAS])

    def test_what_should_be_there_can_be_less(self):
        self.remove(*self.DELTAS)
        command.must("verify", self.store, "--complete", "--tiers", "base")
        command.must("verify", self.store, "--complete", "--layers", "0-1")
        self.refused(3, "verify", self.store, "--complete", "--layers", "1-2")
        self.refused(2, "verify", self.store, "--complete", "--layers", "4")
        self.refused(2, "verify", self.store, "--layers", "0-1")
        self.refused(2, "verify", self.store, "--tiers", "base")

    def test_a_base_alone_is_no_fault(self):
        self.remove(*(f"layer-000{layer}.delta-quintal" for layer in range(4)))
        self.assertIn("OK    base 4 of 4, no delta", command.must("verify", self.store).stdout)
        self.refused(3, "verify", self.store, "--complete")
        command.must("verify", self.store, "--complete", "--tiers", "base")

    def test_a_layer_that_is_gone(self):
        self.remove("layer-0002.base", "layer-0002.delta-quintal", "layer-0002.source")
        done = command.must("verify", self.store)
        self.assertIn("base 3 of 4: layer 2 missing; delta 3 of 4: layer 2 missing", done.stdout)
        self.assertIn("a boot needs --checkpoint", done.stdout)
        self.refused(3, "verify", self.store, "--complete")
        command.must("build", self.model, "--store", self.store, "-q")
        command.must("verify", self.store, "--complete")

    def test_a_layer_without_its_source_record_is_a_fault(self):
        self.remove("layer-0001.source")
        for arguments in ([], ["--complete"]):
            done = self.refused(3, "verify", self.store, *arguments)
            self.assertIn(self.file("layer-0001.source"), done.stdout)
            self.assertIn("none of layer 1", done.stderr)
        done = command.run("verify", self.store, "--json")
        self.assertIn('"layers_without_record": [\n    1\n  ]', done.stdout)
        self.remove("layer-0001.base", "layer-0001.delta-quintal")
        command.must("build", self.model, "--store", self.store, "-q")
        command.must("verify", self.store, "--complete")

    def test_a_synthetic_store_has_no_source_records(self):
        store = os.path.join(self.root, "synthetic")
        command.must("synth", store, "--geometry", "2,64,64", "--layers", "2", "-q")
        command.must("verify", store, "--complete", "--tiers", "base")

    def test_a_damaged_file_is_not_missing(self):
        command.flip(self.file("layer-0000.base"), 100)
        done = self.refused(3, "verify", self.store)
        self.assertIn("base 3 of 4: layer 0 damaged", done.stdout)
        self.assertIn(self.file("layer-0000.base"), done.stdout)

    def test_the_other_encoding_is_there_too(self):
        store = os.path.join(self.root, "nibbles")
        command.must("build", self.model, "--store", store, "--delta", "nibble", "-q")
        gone = glob.glob(os.path.join(store, "*", "layer-0003.delta-nibble"))[0]
        os.remove(gone)
        report = command.must_json("verify", store)
        self.assertEqual(report["tiers"][1]["files_missing"], [gone])
        command.must("build", self.model, "--store", store, "-q", "--delta", "quintal",
                     "--layers", "3")
        command.must("verify", store, "--complete")

    def test_a_rank_that_lacks_a_file(self):
        model = command.write_checkpoint(os.path.join(self.root, "wide"),
                                         command.mxfp4_tensors(layers=2, intermediate=128))
        store = os.path.join(self.root, "ranks")
        command.must("build", model, "--store", store, "--tp", "2", "-q")
        command.must("verify", store, "--complete")
        gone = glob.glob(os.path.join(store, "*", "layer-0001.rank1.base"))[0]
        os.remove(gone)
        done = self.refused(3, "verify", store, "--complete")
        self.assertIn("base 3 of 4 files: layer 1 missing", done.stdout)
        self.assertIn(gone, done.stdout)


if __name__ == "__main__":
    command.main(unittest)
