"""What commands say of a store: what is missing from it, which generation is meant, what its files
are, what was mended."""

import fcntl
import glob
import json
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

    def test_warm_tells_what_is_missing_of_the_tiers_that_it_reads(self):
        self.remove("layer-0001.base", *self.DELTAS)
        report = command.must_json("warm", self.store)
        self.assertEqual(report["warnings"], ["layer 1 has no base tier"])
        report = command.must_json("warm", self.store, "--tiers", "base,delta")
        self.assertEqual(report["warnings"], ["layer 1 has no base tier",
                                              "no delta tier of layers 2-3"])
        for quiet in ((), ("-q",)):
            done = command.must("warm", self.store, *quiet)
            self.assertEqual(done.stderr.count("warning: layer 1 has no base tier\n"), 1)
            self.assertNotIn("warning", done.stdout)

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
        for arguments in ([], ["--complete"], ["--complete", "--layers", "2-3"],
                          ["--complete", "--layers", "0", "--tiers", "base"]):
            done = self.refused(3, "verify", self.store, *arguments)
            self.assertIn(self.file("layer-0001.source"), done.stdout)
            self.assertIn("none of layer 1", done.stderr)
        done = command.run("verify", self.store, "--complete", "--layers", "2", "--json")
        self.assertIn('"layers_without_record": [\n    1\n  ]', done.stdout)
        self.assertIn('"complete": false', done.stdout)
        self.remove("layer-0001.base", "layer-0001.delta-quintal")
        command.must("build", self.model, "--store", self.store, "-q")
        command.must("verify", self.store, "--complete")

    def test_a_synthetic_store_has_no_source_records(self):
        store = os.path.join(self.root, "synthetic")
        command.must("synth", store, "--geometry", "2,64,64", "--layers", "2", "-q")
        command.must("verify", store, "--complete", "--tiers", "base")

    def test_random_experts_are_not_put_beside_a_model(self):
        synth = ("--geometry", "2,64,64", "--layers", "2", "-q")
        there = command.files_below(self.store)
        done = self.refused(2, "synth", self.store, *synth)
        for word in (self.store, "there is a model's store here",
                     "generation " + os.path.basename(self.generation), "nothing was written"):
            self.assertIn(word, done.stderr)
        # A model whose manifest is damaged, or was lost, is one as well.
        command.flip(self.file("manifest"), 40)
        self.assertIn("cannot be read", self.refused(2, "synth", self.store, *synth).stderr)
        os.rename(self.file("manifest"), os.path.join(self.root, "manifest"))
        self.assertIn("manifest", self.refused(2, "synth", self.store, *synth).stderr)
        there.remove(self.file("manifest"))
        self.assertEqual(command.files_below(self.store), there)
        # Beside other random experts they are welcome.
        store = os.path.join(self.root, "synthetic")
        command.must("synth", store, *synth)
        command.must("synth", store, *synth, "--seed", "2")
        self.assertEqual(len(command.must_json("inspect", store)["generations"]), 2)

    def test_a_damaged_file_of_random_experts_is_made_again_with_a_warning(self):
        store = os.path.join(self.root, "synthetic")
        synth = ("synth", store, "--geometry", "2,64,64", "--layers", "2", "-q")
        command.must(*synth)
        base, = (file for file in command.files_below(store) if file.endswith("layer-0001.base"))
        with open(base, "rb") as file:
            whole = file.read()
        command.flip(base, 100)
        done = command.must(*synth)
        self.assertEqual(done.stderr.count("warning: layer 1 (base) is damaged"), 1)
        with open(base, "rb") as file:
            self.assertEqual(file.read(), whole)

    def test_a_damaged_file_is_not_missing(self):
        command.flip(self.file("layer-0000.base"), 100)
        done = self.refused(3, "verify", self.store)
        self.assertIn("BAD   base 3 of 4: layer 0 unusable; delta 4 of 4", done.stdout)
        self.assertIn(self.file("layer-0000.base"), done.stdout)
        for untrue in ("WARN", "all that was built", "a boot needs --checkpoint"):
            self.assertNotIn(untrue, done.stdout)
        self.refused(3, "verify", self.store, "--complete")
        # Of the delta tier alone, all files of which are bad.
        self.remove(*(f"layer-000{layer}.delta-quintal" for layer in range(3)))
        command.must("build", self.model, "--store", self.store, "-q", "--tiers", "base")
        command.flip(self.file("layer-0003.delta-quintal"), 100)
        done = self.refused(3, "verify", self.store)
        self.assertIn("BAD   base 4 of 4; delta 0 of 4: layers 0-2 missing, layer 3 unusable",
                      done.stdout)
        # With one missing beside it that is told, too.
        self.remove("layer-0001.base")
        done = self.refused(3, "verify", self.store)
        self.assertIn(self.file("layer-0001.base"), done.stdout)
        self.assertIn("that may be all that was built so far", done.stdout)

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


class SeveralGenerations(StoreTest):
    """The store of a model, and in it what a build of another one left."""

    COMMANDS = (("boot",), ("warm",), ("verify",), ("doctor", "--store"))

    def setUp(self):
        super().setUp()
        self.other = command.write_checkpoint(os.path.join(self.root, "other"),
                                              command.bf16_tensors(layers=2))
        self.name = os.path.basename(self.generation)

    def begin(self, *layers):
        command.must("build", self.other, "--store", self.store, "-q", "--tiers", "base",
                     *(("--layers", ",".join(layers)) if layers else ()))
        [second] = [name for name in os.listdir(self.store) if name != self.name]
        return second

    def all_use(self, generation, passed_over):
        said = f"of 2 generations {generation} is used: {passed_over} (bf16, 2 MoE layers"
        for arguments in self.COMMANDS:
            done = command.must(*arguments, self.store, "--json")
            report = json.loads(done.stdout)
            self.assertEqual(report["generation"], generation, arguments)
            self.assertIn("warning: " + said, done.stderr)
            told = [f["text"] for f in report["findings"] if not f["ok"]] \
                if arguments[0] == "doctor" else report["warnings"]
            self.assertTrue(any(text.startswith(said) for text in told), told)
            text = command.must(*arguments, self.store, "-q")
            self.assertEqual((text.stdout + text.stderr).count(said), 1, arguments)
        out = os.path.join(self.root, "part")
        report = command.must_json("export", self.store, "--layer", "0", "--part", "planes13",
                                   "--out", out)
        self.assertTrue(report["warnings"][0].startswith(said))
        report = command.must_json("boot", self.store, "--dry-run")
        self.assertTrue(report["warnings"][0].startswith(said))

    def all_refuse(self, *there):
        for arguments in (*self.COMMANDS, ("boot", "--no-build"),
                          ("export", "--layer", "0", "--part", "planes13", "--out",
                           os.path.join(self.root, "part"))):
            done = self.refused(2, *arguments, self.store)
            for name, layers in there:
                self.assertRegex(done.stderr, f"--generation {name[:8]}  .*, {layers} layers there")

    def test_the_build_that_makes_the_second_says_so(self):
        for options in (("--layers", "0"), ()):
            done = command.must("build", self.other, "--store", self.store, "--tiers", "base",
                                "--json", *options)
            report = json.loads(done.stdout)
            said = [line for line in done.stderr.splitlines() if "now holds 2 generations" in line]
            self.assertEqual(len(said), 1, done.stderr)
            self.assertTrue(said[0].startswith("warning: "), said)
            self.assertIn(said[0][len("warning: "):], report["warnings"])
            name = report["generation"][:8]
            self.assertIn(f"--generation PREFIX ({name} is this one's)", said[0])
            command.must("boot", self.store, "--generation", name, "--checkpoint", self.other)
            command.must("boot", self.store, "--checkpoint", self.other)
            self.refused(2, "boot", self.store)
        done = command.must("build", self.other, "--store", os.path.join(self.root, "alone"))
        self.assertNotIn("generations", done.stderr)

    def test_one_that_has_no_layers_is_passed_over(self):
        second = self.begin("0")
        for path in glob.glob(os.path.join(self.store, second, "layer-*")):
            os.remove(path)
        self.all_use(self.name, second)
        before = command.files_below(self.store)
        plan = command.must_json("boot", self.store, "--checkpoint", self.other, "--dry-run")
        self.assertEqual(plan["generation"], second)
        self.assertEqual(command.files_below(self.store), before)
        command.must("boot", self.store, "--generation", self.name[:8])

    def test_an_interrupted_build_that_made_no_layer_is_passed_over(self):
        second = self.begin("0")
        for name in ("layer-0000.base", "locks/layer-0000"):  # between record and file
            os.remove(os.path.join(self.store, second, name))
        with open(os.path.join(self.store, second, ".tmp-layer-0000.base-77-0123abcd"), "wb"):
            pass
        self.all_use(self.name, second)

    def test_a_file_of_no_layer_is_no_layer(self):
        second = self.begin("0")
        for path in glob.glob(os.path.join(self.store, second, "layer-*")):
            os.remove(path)
        for name in ("layer-0007.base", "layer-0002.base", "layer-0000.rank0.base",
                     "layer-0.base", "layer-0002.source"):
            with open(os.path.join(self.store, second, name), "wb"):
                pass
        self.all_use(self.name, second)
        # One of a layer is, whatever is in it.
        with open(os.path.join(self.store, second, "layer-0001.base"), "wb"):
            pass
        self.all_refuse((self.name, "4 of 4"), (second, "1 of 2"))

    def test_the_rest_of_a_build_looks_like_a_store_that_lost_files(self):
        second = self.begin("1")
        self.all_refuse((self.name, "4 of 4"), (second, "1 of 2"))

    def test_a_store_that_lost_a_file_is_not_passed_over(self):
        second = self.begin()
        for layer in range(3):
            os.remove(self.file(f"layer-000{layer}.base"))
            self.all_refuse((self.name, f"{3 - layer} of 4"), (second, "2 of 2"))
        # Nor where only the source records are left.
        for path in glob.glob(self.file("layer-*.base")) + glob.glob(self.file("layer-*.delta*")):
            os.remove(path)
        self.all_refuse((self.name, "0 of 4"), (second, "2 of 2"))

    def test_a_damaged_store_is_not_passed_over(self):
        second = self.begin("1")
        command.flip(self.file("layer-0001.base"), 100)
        self.all_refuse((self.name, "4 of 4"), (second, "1 of 2"))
        os.remove(self.file("layer-0001.base"))
        done = self.refused(2, "boot", self.store)
        self.assertIn(f"--generation {self.name[:8]}  mxfp4, 4 MoE layers, E=2 H=64 I=64, "
                      "3 of 4 layers there, manifest of 20", done.stderr)
        self.assertIn(f"--generation {second[:8]}  bf16, 2 MoE layers", done.stderr)

    def test_where_both_are_whole_they_are_told_apart(self):
        second = self.begin()
        for arguments in self.COMMANDS:
            done = self.refused(2, *arguments, self.store)
            for name, what in ((self.name, "mxfp4, 4 MoE layers, E=2 H=64 I=64, 4 of 4 layers"),
                               (second, "bf16, 2 MoE layers, E=2 H=64 I=64, 2 of 2 layers")):
                self.assertRegex(done.stderr, f"--generation {name[:8]}  {what} there, manifest of "
                                 r"\d{4}-\d\d-\d\d \d\d:\d\d UTC")
        os.utime(self.file("manifest"), (86400, 86400))  # as a copy may leave it
        error = json.loads(command.run("warm", self.store, "--json").stdout)["error"]
        self.assertEqual(len(error["choices"]), 2)
        [old] = [choice for choice in error["choices"] if self.name[:8] in choice]
        self.assertTrue(old.endswith(", manifest of 1970-01-02 00:00 UTC"), old)
        for choice in error["choices"]:
            command.must("warm", self.store, *choice.split()[:2])

    def test_a_lost_manifest_is_told(self):
        os.remove(self.file("manifest"))
        for name in ("boot", "verify", "warm"):
            done = self.refused(3, name, self.store)
            self.assertIn("manifest of a generation is missing", done.stderr)
            self.assertIn(self.file("manifest"), done.stderr)
        self.begin()
        self.assertIn(f"{self.generation} is not used: it has layer files and no manifest",
                      command.must("boot", self.store).stderr)
        command.must("build", self.model, "--store", self.store, "-q")
        command.must("verify", self.store, "--complete", "--generation", self.name)


class OtherEncoding(StoreTest):
    """--delta nibble, where the store has quintals."""

    def test_a_boot_says_what_there_is(self):
        done = self.refused(3, "boot", self.store, "--tiers", "base,delta", "--delta", "nibble")
        self.assertIn("the delta tier as quintals, not as nibbles, of layers 0-3", done.stderr)
        self.assertIn("leave out --delta", done.stderr)
        self.assertNotIn("no usable", done.stderr)
        plan = command.must_json("boot", self.store, "--checkpoint", self.model, "--delta",
                                 "nibble", "--dry-run")
        self.assertEqual(plan["bytes_skipped"], sum(os.path.getsize(self.file(
            f"layer-000{layer}.delta-quintal")) for layer in range(4)))
        self.assertEqual({a["reason"] for a in plan["actions"] if a["tier"] == "delta"},
                         {"absent; there are quintals, not nibbles"})

    def test_a_build_says_that_it_makes_a_second_delta_tier(self):
        said = "there is a delta tier as quintals of layers 0-3: one as nibbles is built beside it"
        done = command.must("build", self.model, "--store", self.store, "--delta", "nibble")
        self.assertIn(said, done.stderr)
        again = command.must("build", self.model, "--store", self.store, "--delta", "nibble")
        self.assertNotIn("beside", again.stderr)
        os.remove(self.file("layer-0001.base"))
        both = command.must("build", self.model, "--store", self.store)
        self.assertNotIn("beside", both.stderr)


class Inspect(StoreTest):
    def test_a_store_with_damaged_files_is_not_good(self):
        done = command.must("inspect", self.store)
        self.assertIn("headers were looked at: `hotplane verify` checks every byte", done.stdout)
        self.assertEqual(done.stderr, "")
        # Data is nothing that inspect looks at, and it says so.
        path = self.file("layer-0003.base")
        command.flip(path, os.path.getsize(path) - 4096 + 5)
        self.assertIn("`hotplane verify`", command.must("inspect", self.store).stdout)
        command.flip(self.file("layer-0001.base"), 100)
        os.truncate(self.file("layer-0002.delta-quintal"), 5000)
        done = self.refused(3, "inspect", self.store)
        for word in ("damaged", self.file("layer-0001.base"),
                     self.file("layer-0002.delta-quintal")):
            self.assertIn(word, done.stdout)
        self.assertNotIn("were looked at", done.stdout)
        self.assertIn("error: 2 layer files of the store damaged", done.stderr)
        for word in ("hotplane build", "hotplane verify"):
            self.assertIn(word, done.stderr)
        report = json.loads(self.refused(3, "inspect", self.store, "--json").stdout)
        layers = report["generations"][0]["layers"]
        self.assertEqual([layer["tiers"]["base"] for layer in layers],
                         ["present", "damaged", "present", "present"])
        self.assertEqual(layers[2]["tiers"]["delta-quintal"], "damaged")
        command.must("build", self.model, "--store", self.store, "-q")
        command.must("inspect", self.store)

    def inspect(self, name):
        """What --json says; the text begins with the same kind."""
        found = command.must_json("inspect", self.file(name))
        text = command.must("inspect", self.file(name)).stdout
        self.assertTrue(text.startswith(found["kind"] + "  "), text)
        return found

    def test_every_file_of_a_store_is_known(self):
        command.must("warm", self.store, "-q")  # makes locks/users
        kinds = {"manifest": "manifest", "source-stamp": "source stamp", "users": "lock file",
                 "generation": "lock file", "base": "layer file", "delta-quintal": "layer file",
                 "source": "source record"}
        names = [os.path.relpath(os.path.join(folder, name), self.generation)
                 for folder, _, files in os.walk(self.generation) for name in files]
        self.assertIn("locks/users", names)
        self.assertIn("locks/layer-0000", names)
        for name in names:
            found = self.inspect(name)
            last = os.path.basename(name)
            kind = kinds.get(last) or kinds.get(last.split(".")[-1]) or "lock file"
            self.assertEqual(found["kind"], kind, name)
            self.assertTrue(found["good"], name)
            self.assertEqual((found["generation"], found["file_bytes"]),
                             (os.path.basename(self.generation),
                              os.path.getsize(self.file(name))), name)

    def test_what_it_tells(self):
        name = os.path.basename(self.generation)
        manifest = self.inspect("manifest")
        self.assertEqual(manifest["generation"], name)
        self.assertEqual(manifest["layers_total"], 4)
        self.assertNotIn("checkpoint_id", manifest)  # of imports only
        record = self.inspect("layer-0002.source")
        self.assertEqual((record["generation"], record["layer"], record["tensors"]), (name, 2, 12))
        with open(self.file("layer-0002.source"), encoding="utf-8") as file:
            self.assertIn(f"xxh3-128={record['seal']} ", file.readline())
        base = self.inspect("layer-0001.base")
        self.assertEqual(base["manifest_digest"], manifest["digest"])
        with open(self.file("layer-0001.base"), "rb") as file:
            file.seek(4088)
            checksum = int.from_bytes(file.read(8), "little")
        self.assertEqual(base["header_checksum"], f"{checksum:016x}")
        [shard] = self.inspect("source-stamp")["shards"]
        self.assertEqual(shard["name"], "model-00001-of-00001.safetensors")
        lock = self.inspect("locks/layer-0003")
        self.assertEqual((lock["layer"], lock["held"]), (3, False))
        self.assertNotIn("rank", lock)

    def test_locks_tell_whether_they_are_held(self):
        with open(self.file("locks/layer-0001"), "r", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self.assertTrue(self.inspect("locks/layer-0001")["held"])
            temporary = ".tmp-layer-0001.base-77-0123abcd"
            shutil.copy(self.file("layer-0001.base"), self.file(temporary))
            self.assertTrue(self.inspect(temporary)["held"])
        self.assertFalse(self.inspect(temporary)["held"])
        command.must("warm", self.store, "-q")
        with open(self.file("locks/users"), "r", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            self.assertTrue(self.inspect("locks/users")["held"])
        self.assertFalse(self.inspect("locks/users")["held"])

    def test_temporaries(self):
        for name in ("manifest", "source-stamp", "layer-0000.source", "layer-0000.delta-quintal"):
            temporary = f".tmp-{name}-4321-89abcdef"
            shutil.copy(self.file(name), self.file(temporary))
            found = self.inspect(temporary)
            self.assertEqual((found["kind"], found["of"], found["process"], found["whole"]),
                             ("temporary", name, 4321, True))
            self.assertEqual((found["generation"], found["file_bytes"]),
                             (os.path.basename(self.generation),
                              os.path.getsize(self.file(name))))
            self.assertNotIn("good", found)
            with open(self.file(temporary), "r+b") as file:
                file.write(bytes(100))
            self.assertFalse(self.inspect(temporary)["whole"], name)
            os.remove(self.file(temporary))

    def test_bad_files_are_called_what_they_are(self):
        for name, words in (("manifest", "hotplane-manifest refused"),
                            ("layer-0000.source", "hotplane-source refused"),
                            ("source-stamp", "source stamp refused"),
                            ("layer-0000.base", "layer file refused")):
            path = self.file(name)
            whole = os.path.getsize(path)
            for damage in (lambda: command.flip(path, 0), lambda: command.flip(path, 40),
                           lambda: command.flip(path, 4000 if whole > 4096 else -2),
                           lambda: os.truncate(path, 0), lambda: os.truncate(path, whole - 1)):
                shutil.copy(path, self.root)
                damage()
                done = command.run("inspect", path)
                # A stamp has no checksum.
                if name != "source-stamp" or "well-formed" not in done.stdout:
                    self.assertEqual(done.returncode, 3, done.stdout)
                    self.assertNotIn("safetensors file", done.stderr)
                    if os.path.getsize(path) == whole:
                        self.assertIn(words, done.stderr)
                shutil.copy(os.path.join(self.root, name), path)

    def test_files_in_the_wrong_place(self):
        shutil.copy(self.file("layer-0001.base"), self.file("layer-0000.base"))
        shutil.copy(self.file("layer-0001.source"), self.file("layer-0000.source"))
        for name in ("layer-0000.base", "layer-0000.source"):
            self.refused(3, "inspect", self.file(name))
        other = os.path.join(self.root, "0" * 32)
        os.makedirs(other)
        for name in ("manifest", "layer-0001.base", "layer-0001.source"):
            shutil.copy(self.file(name), other)
            done = self.refused(3, "inspect", os.path.join(other, name))
            self.assertIn("another generation", done.stderr)
            shutil.copy(self.file(name), self.root)
            command.must("inspect", os.path.join(self.root, name))  # a copy of its own
        with open(self.file("notes.txt"), "w", encoding="utf-8") as file:
            file.write("mine")
        self.assertIn("no file of a store",
                      self.refused(2, "inspect", self.file("notes.txt")).stderr)
        self.assertIn(f"give {self.store}", self.refused(2, "inspect", self.file("locks")).stderr)

    def test_a_name_is_compared_also_without_the_manifest(self):
        copy = os.path.join(self.root, "copy")
        shutil.copytree(self.generation, copy)
        self.remove("manifest")
        for place in (self.generation, copy):
            for name in ("layer-0000.base", "layer-0003.source"):
                command.must("inspect", os.path.join(place, name))
            for name, of in (("layer-0000.base", "layer-0001.base"),
                             ("layer-0000.base", "layer-0002.delta-quintal"),
                             ("layer-0000.base", "layer-0001.rank0.base"),
                             ("layer-0000.source", "layer-0001.source"),
                             ("layer-0000.source", "layer-0001.base")):
                shutil.copy(os.path.join(place, name), os.path.join(place, of))
                done = self.refused(3, "inspect", os.path.join(place, of))
                self.assertIn("belongs to another name", done.stderr)
                self.assertIn(name, done.stderr)
            for name, of in (("layer-0000.base", "layer-0003.source"),
                             ("layer-0000.source", "manifest"),
                             ("source-stamp", "layer-0002.source"),
                             ("layer-0000.base", "source-stamp")):
                shutil.copy(os.path.join(place, name), os.path.join(place, of))
                self.refused(3, "inspect", os.path.join(place, of))
            command.must("inspect", os.path.join(place, "layer-0000.base"))

    def test_the_rank_of_a_name_is_compared(self):
        model = command.write_checkpoint(os.path.join(self.root, "wide"),
                                         command.mxfp4_tensors(layers=2, intermediate=128))
        store = os.path.join(self.root, "ranks")
        command.must("build", model, "--store", store, "--tp", "2", "-q")
        [folder] = glob.glob(os.path.join(store, "*"))
        os.remove(os.path.join(folder, "manifest"))
        shutil.copy(os.path.join(folder, "layer-0000.rank0.base"),
                    os.path.join(folder, "layer-0000.rank1.base"))
        command.must("inspect", os.path.join(folder, "layer-0000.rank0.base"))
        lock = command.must_json("inspect", os.path.join(folder, "locks", "layer-0000.rank1"))
        self.assertEqual((lock["layer"], lock["rank"]), (0, 1))
        self.assertIn("layer-0000.rank0.base", self.refused(
            3, "inspect", os.path.join(folder, "layer-0000.rank1.base")).stderr)

    def test_it_writes_nothing(self):
        before = {path: os.stat(path).st_mtime_ns for path in command.files_below(self.store)}
        os.chmod(self.file("locks"), 0o555)
        for path in before:
            command.must("inspect", path)
        os.chmod(self.file("locks"), 0o755)
        self.assertEqual({path: os.stat(path).st_mtime_ns
                          for path in command.files_below(self.store)}, before)


class Repair(StoreTest):
    def damage_header(self, layer):
        command.flip(self.file(f"layer-000{layer}.base"), 100)

    def damage_data(self, layer):
        path = self.file(f"layer-000{layer}.base")
        command.flip(path, os.path.getsize(path) - 4096 + 5)

    def assert_no_advice(self, text):
        """Nothing is left to be done about what was mended."""
        self.assertNotIn("to fix", text)
        self.assertNotIn("remove this file", text)

    def test_a_build_tells_built_rebuilt_and_were_there(self):
        self.damage_header(1)
        self.remove("layer-0002.base", "layer-0002.delta-quintal")
        done = command.must("build", self.model, "--store", self.store)
        self.assertIn("built 2 of 4 layers (1 rebuilt, damaged before; 2 were there)", done.stdout)
        self.assertIn("a damaged file is replaced", done.stderr)
        self.assertIn(self.file("layer-0001.base"), done.stderr)
        self.assert_no_advice(done.stderr)
        again = command.must("build", self.model, "--store", self.store)
        self.assertIn("built 0 of 4 layers (4 were there)", again.stdout)
        self.assertIn("`hotplane verify` checks every byte", again.stdout)
        self.damage_header(3)
        report = command.must_json("build", self.model, "--store", self.store)
        self.assertEqual((report["layers_built"], report["layers_rebuilt"],
                          report["layers_attached"]), (1, 1, 3))
        command.must("verify", self.store, "--complete", "--source", self.model)

    def test_a_boot_that_mends_a_file_says_so_and_advises_nothing(self):
        for damage in (self.damage_header, self.damage_data):
            damage(1)
            done = command.must("boot", self.store, "--checkpoint", self.model)
            warnings = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
            self.assertEqual(len(warnings), 1, done.stderr)
            self.assertRegex(warnings[0], "layer 1 .*is built again")
            self.assertNotIn("warning", done.stdout)
            self.assertIn("built 1 layer (1 rebuilt, damaged before)", done.stdout)
            self.assertIn("a damaged file is replaced", done.stderr)
            self.assert_no_advice(done.stdout + done.stderr)
            damage(2)
            report = command.must_json("boot", self.store, "--checkpoint", self.model)
            self.assertEqual((report["layers_built"], report["layers_rebuilt"]), (1, 1))
            command.must("verify", self.store, "--complete", "--source", self.model)

    def test_without_a_checkpoint_the_advice_stays(self):
        self.damage_data(1)
        self.assertIn("to fix", self.refused(3, "boot", self.store).stderr)

    def test_what_was_only_missing_is_not_called_rebuilt(self):
        self.remove("layer-0001.base")
        done = command.must("boot", self.store, "--checkpoint", self.model)
        self.assertIn("built 1 layer: read", done.stdout)
        self.assertEqual(command.must_json("build", self.model, "--store", self.store)
                         ["layers_rebuilt"], 0)


class DoctorOfAStore(StoreTest):
    def fails(self, code, *words, store=None, arguments=()):
        """Doctor says that a boot would fail, as the same boot does."""
        store = store or self.store
        done = command.must("doctor", "--store", store, *arguments)
        [boot] = [line for line in done.stdout.splitlines() if line.split()[1] == "boot"]
        self.assertTrue(boot.startswith(f"FAIL  boot     would fail with exit code {code}: "), boot)
        for word in words:
            self.assertIn(word, boot)
        self.assertNotIn("a boot takes about", done.stdout)
        report = command.must_json("doctor", "--store", store, *arguments)
        self.assertIsNone(report["boot"]["seconds"])
        self.assertEqual(report["boot"]["fails"]["code"], code)
        self.assertFalse([f["ok"] for f in report["findings"] if f["subject"] == "boot"][0])
        return report["boot"]["fails"]

    def boot_fails_so(self, failure, *arguments):
        error = json.loads(command.run("boot", self.store, "--json", *arguments).stdout)["error"]
        self.assertEqual(error, failure)

    def test_a_whole_store_would_boot(self):
        report = command.must_json("doctor", "--store", self.store)
        self.assertNotIn("fails", report["boot"])
        self.assertTrue(all(f["ok"] for f in report["findings"]
                            if f["subject"] in ("store", "boot")))
        # The base is what a boot wants.
        self.remove("layer-0000.delta-quintal")
        self.assertNotIn("fails", command.must_json("doctor", "--store", self.store)["boot"])

    def test_a_layer_is_missing(self):
        self.remove("layer-0002.base")
        failure = self.fails(3, "no usable base tier of layer 2", "--checkpoint")
        self.boot_fails_so(failure)
        self.assertIn("WARN  store    base 3 of 4: layer 2 missing",
                      command.must("doctor", "--store", self.store).stdout)

    def test_a_layer_is_damaged(self):
        command.flip(self.file("layer-0001.base"), 100)
        failure = self.fails(3, self.file("layer-0001.base"), "checksum")
        self.boot_fails_so(failure)

    def test_no_layer_at_all(self):
        self.remove(*(f"layer-000{layer}.base" for layer in range(4)))
        self.boot_fails_so(self.fails(3, "layers 0-3"))

    def test_a_device_that_is_not_there(self):
        failure = self.fails(1, "device", arguments=("--device", "cuda:99"))
        self.assertEqual(failure["kind"], "system")

    def test_one_rank_lacks_a_file(self):
        model = command.write_checkpoint(os.path.join(self.root, "wide"),
                                         command.mxfp4_tensors(layers=2, intermediate=128))
        store = os.path.join(self.root, "ranks")
        command.must("build", model, "--store", store, "--tp", "2", "-q")
        self.assertNotIn("fails", command.must_json("doctor", "--store", store)["boot"])
        os.remove(glob.glob(os.path.join(store, "*", "layer-0001.rank1.base"))[0])
        self.fails(3, "rank 1: ", "layer 1", store=store)


if __name__ == "__main__":
    command.main(unittest)
