"""Planes caches of vLLM-MoET: written here by this file's own code from parts whose digests are
golden, imported, verified and compared; moved; refused when something is wrong with them."""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
import unittest

import command
from shards_test import expected_slice

SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../..")
MODEL = os.path.join(SOURCE, "models", "tinymoe-mxfp4")
EXPERTS, HIDDEN, INTERMEDIATE, LAYERS = 32, 256, 128, 4
GEOMETRY = f"{EXPERTS},{HIDDEN},{INTERMEDIATE}"
BASE = ("planes13", "sc13", "planes2", "sc2")
FP4 = ("fp13", "fp2")
LOCK = ".hotplane-lock"
ABI = "tsym4-e8m0-fragmajor-a32-v2"
TILE_BYTES = {"planes": 256, "sc": 32, "fp": 512, "q": 320}


def read(path):
    with open(path, "rb") as file:
        return file.read()


def write(path, data):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)


def meta_of(world, rank, split, **changes):
    meta = {"version": 3, "quantizer_abi": ABI, "ckpt_id": "tinymoe of the tests", "world": world,
            "rank": rank, "zero_mode": "auto", "fp4_split": "w4q" if split else False}
    meta.update(changes)
    return {name: value for name, value in meta.items() if value is not None}


def key_of(meta):
    text = json.dumps(meta, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def part_bytes(part, world=1, split=True):
    """Of all experts, from the shape alone."""
    elements = EXPERTS * HIDDEN * INTERMEDIATE // world * (2 if part.endswith("13") else 1)
    if part.startswith("planes"):
        return elements // 4
    if part.startswith("sc"):
        return elements // 32
    return elements * 5 // 16 if split else elements // 2


class WithParts(unittest.TestCase):
    """`parts[layer][name]`: golden bytes of the bundled model; fp13 and fp2 are nibbles, q13 and q2
    quintals."""

    @classmethod
    def setUpClass(cls):
        cls.root = tempfile.mkdtemp(prefix="hotplane-planes-")
        cls.addClassCleanup(shutil.rmtree, cls.root)
        os.environ.pop("HOTPLANE_RANK", None)
        store = os.path.join(cls.root, "built")
        command.must("build", MODEL, "--store", store, "-q")
        with open(os.path.join(SOURCE, "tests", "data", "golden.json")) as file:
            cls.golden = json.load(file)["planes_sha256_per_layer"]["mxfp4"]
        cls.parts = []
        for layer, digests in enumerate(cls.golden):
            cls.parts.append({})
            for name, digest in digests.items():
                data = cls.exported(store, layer, name.replace("q", "fp"), "--encoded"
                                    if name[0] == "q" else "-q")
                assert hashlib.sha256(data).hexdigest() == digest, (layer, name)
                cls.parts[layer][name] = data
        cls.built = store

    def setUp(self):
        self.folder = tempfile.mkdtemp(dir=self.root)
        self.cache = os.path.join(self.folder, "cache")
        self.store = os.path.join(self.folder, "store")

    @classmethod
    def exported(cls, store, layer, part, *options):
        out = os.path.join(cls.root, "part.bin")
        command.must("export", store, "--layer", layer, "--part", part, "--out", out, "-q",
                     *[option for option in options if option != "-q"])
        return read(out)

    def data_of(self, layer, part, world, rank, split):
        name = part.replace("fp", "q") if split else part
        whole = self.parts[layer][name]
        if world == 1:
            return whole
        size = len(whole) // EXPERTS
        experts = [whole[e * size:(e + 1) * size] for e in range(EXPERTS)]
        if name[0] != "q":
            return b"".join(expected_slice(part, data, rank, world) for data in experts)
        # Tiles of quintals are cut like tiles of codes, which are 256 bytes.
        heads = [b"".join(data[i:i + 256] for i in range(0, len(data), 320)) for data in experts]
        tails = [b"".join(data[i + 256:i + 320] + bytes(192) for i in range(0, len(data), 320))
                 for data in experts]
        like = "planes13" if part == "fp13" else "planes2"
        out = []
        for head, tail in zip(heads, tails):
            head = expected_slice(like, head, rank, world)
            tail = expected_slice(like, tail, rank, world)
            out += [head[i:i + 256] + tail[i:i + 64] for i in range(0, len(head), 256)]
        return b"".join(out)

    def rank_folder(self, meta, key=None):
        return os.path.join(self.cache, "v2", key or key_of(meta),
                            f"tp{meta.get('world', 1)}-rank{meta.get('rank', 0)}")

    def write_rank(self, world=1, rank=0, split=True, layers=range(LAYERS), fp4=True, digests=True,
                   first=0, key=None, **changes):
        """One rank's folder, with the numbers of its layers from `first` on."""
        meta = meta_of(world, rank, split, **changes)
        folder = self.rank_folder({**meta, "world": world, "rank": rank}, key or key_of(meta))
        write(os.path.join(folder, "meta.json"), json.dumps(meta).encode())
        for layer in layers:
            for part in BASE + (FP4 if fp4 else ()):
                data = self.data_of(layer, part, world, rank, split)
                self.assertEqual(len(data), part_bytes(part, world, split))
                path = os.path.join(folder, f"layer{layer + first}.{part}.bin")
                write(path, data)
                if digests:
                    write(path + ".sha256", hashlib.sha256(data).hexdigest().encode() + b"\n")
        return folder

    def import_cache(self, *options, geometry=GEOMETRY):
        return command.must_json("import", "--planes-cache", self.cache, "--layers-geometry",
                                 geometry, *options, self.store)

    def refused(self, code, *options, geometry=GEOMETRY, store=None):
        done = command.run("import", "--planes-cache", self.cache, "--layers-geometry", geometry,
                           *options, store or self.store)
        self.assertEqual(done.returncode, code, done.stderr)
        return done.stderr

    def check_parts(self, split=True, layers=LAYERS, fp4=True):
        """The store's parts are the golden ones."""
        self.assertEqual(command.must_json("verify", self.store)["findings"], [])
        for layer in range(layers):
            for part in BASE + (FP4 if fp4 else ()):
                found = self.exported(self.store, layer, part)
                self.assertEqual(hashlib.sha256(found).hexdigest(), self.golden[layer][part])
                if split and part in FP4:
                    stored = self.exported(self.store, layer, part, "--encoded")
                    self.assertEqual(stored, self.parts[layer][part.replace("fp", "q")])

    def files(self):
        """Without the lock of exports."""
        return sorted(os.path.join(folder, name) for folder, _, names in os.walk(self.cache)
                      for name in names if name != LOCK)


class Import(WithParts):
    def test_quintals(self):
        self.write_rank()
        report = self.import_cache("--config", MODEL)
        self.assertEqual((report["layers_total"], report["layers_imported"]), (LAYERS, LAYERS))
        self.assertEqual(report["warnings"], [])
        self.assertEqual(report["bytes_read"], LAYERS * sum(map(part_bytes, BASE + FP4)))
        self.check_parts()
        again = self.import_cache("--config", MODEL)
        self.assertEqual((again["layers_imported"], again["layers_attached"]), (0, LAYERS))

    def test_nibbles_into_the_same_generation(self):
        """What the cache calls its checkpoint is the identity: both encodings, one base."""
        self.write_rank(split=True)
        first = self.import_cache()
        shutil.rmtree(self.cache)
        self.write_rank(split=False, digests=False)
        second = self.import_cache()
        self.assertEqual(first["generation"], second["generation"])
        self.assertEqual(second["layers_imported"], LAYERS)
        self.check_parts(split=False)
        kinds = command.must_json("inspect", self.store)["generations"][0]["layers"][0]["tiers"]
        self.assertEqual(set(kinds.values()), {"present"})

    def test_base_files_are_the_ones_that_a_build_writes(self):
        """Data regions to the byte; headers differ in generation and manifest."""
        self.write_rank(split=False)
        self.import_cache()
        nibbles = os.path.join(self.folder, "nibbles")
        command.must("build", MODEL, "--store", nibbles, "--delta", "nibble", "-q")
        for name in ("layer-0000.base", "layer-0003.delta-nibble"):
            [mine], [built] = ([path for path in command.files_below(store) if path.endswith(name)]
                               for store in (self.store, nibbles))
            self.assertEqual(read(mine)[4096:], read(built)[4096:], name)

    def test_a_plain_meta_is_enough(self):
        """fp4_split alone, under any key; true stands for quintals."""
        for split, value in ((False, False), (True, True), (True, "w4q")):
            shutil.rmtree(self.cache, ignore_errors=True)
            shutil.rmtree(self.store, ignore_errors=True)
            self.write_rank(split=split, digests=False, key="anything", version=None, world=1,
                            quantizer_abi=None, ckpt_id=None, zero_mode=None, fp4_split=value)
            report = self.import_cache()
            self.assertTrue(any("does not name" in text for text in report["warnings"]))
            self.check_parts(split=split)

    def test_base_only(self):
        self.write_rank(fp4=False)
        self.import_cache()
        self.check_parts(fp4=False)
        # The program makes the FP4 files later; they join the base that is there.
        self.write_rank()
        self.assertEqual(self.import_cache()["layers_imported"], LAYERS)
        self.check_parts()

    def test_tiers_base_leaves_fp4_of_another_kind(self):
        folder = self.write_rank(fp4_split=True)
        for layer in range(LAYERS):  # the old refinement of two bits
            for part in FP4:
                write(os.path.join(folder, f"layer{layer}.{part}.bin"),
                      bytes(part_bytes(part, split=False) // 2))
        text = self.refused(3)
        self.assertIn("layer0.fp13.bin", text)
        self.assertIn("--tiers base", text)
        self.import_cache("--tiers", "base")
        self.check_parts(fp4=False)

    def test_layer_numbers_and_mtp(self):
        self.write_rank(first=3)
        self.import_cache("--mtp-layers", 6, "--config", MODEL)
        [generation] = command.must_json("inspect", self.store)["generations"]
        self.assertEqual([(layer["layer"], layer["model_index"], layer["mtp"])
                          for layer in generation["layers"]],
                         [(0, 3, False), (1, 4, False), (2, 5, False), (3, 6, True)])
        self.assertEqual(generation["checkpoint_id"], "tinymoe of the tests")
        self.assertEqual(generation["scheme"], "moe-w2-planes-cache")
        self.assertIn("tinymoe of the tests", command.must("inspect", self.store).stdout)
        manifest = os.path.join(self.store, generation["generation"], "manifest")
        self.assertEqual(command.must_json("inspect", manifest)["checkpoint_id"],
                         "tinymoe of the tests")
        self.assertIn("tinymoe of the tests", command.must("inspect", manifest).stdout)
        self.check_parts()

    def test_layers_that_the_cache_does_not_have_yet(self):
        self.write_rank(layers=[0, 2])
        geometry = f"0-2:{GEOMETRY};3:{GEOMETRY}"
        report = self.import_cache(geometry=geometry)
        self.assertEqual((report["layers_total"], report["layers_imported"]), (2, 2))
        shutil.rmtree(self.cache)
        self.write_rank()
        report = self.import_cache(geometry=geometry)
        self.assertEqual((report["layers_total"], report["layers_imported"]), (4, 2))
        self.check_parts()

    def test_a_cache_that_has_grown_needs_the_geometry_of_all(self):
        self.write_rank(layers=[0])
        self.import_cache()
        self.write_rank()
        text = self.refused(3)
        self.assertIn("has grown", text)

    def test_boots(self):
        self.write_rank()
        self.import_cache("--config", MODEL)
        booted = command.must_json("boot", self.store, "--tiers", "base,delta")
        self.assertEqual(booted["layers_read"], LAYERS)
        self.assertEqual(booted["bytes_read_delta"], 0)
        self.assertEqual(booted["bytes_verified"], booted["bytes_read"])

    def test_ranks(self):
        for rank in range(2):
            self.write_rank(world=2, rank=rank)
        report = self.import_cache()
        self.assertEqual((report["world"], report["layers_imported"]), (2, LAYERS))
        self.assertEqual(command.must_json("verify", self.store)["findings"], [])
        built = os.path.join(self.folder, "built")
        command.must("build", MODEL, "--store", built, "--tp", 2, "-q")
        for layer in range(LAYERS):
            for rank in range(2):
                for part in BASE + FP4:
                    options = ("--rank", rank, "--encoded") if part in FP4 else ("--rank", rank)
                    mine = self.exported(self.store, layer, part, *options)
                    self.assertEqual(mine, self.exported(built, layer, part, *options))

    def test_one_rank_at_a_time(self):
        self.write_rank(world=2, rank=0)
        text = self.refused(3)
        self.assertIn("no folder of rank 1", text)
        self.assertIn("--rank R", text)
        self.import_cache("--rank", 0)
        shutil.rmtree(self.cache)
        self.write_rank(world=2, rank=1)
        self.import_cache("--rank", 1)
        booted = command.must_json("boot", self.store, "--rank", 1)
        self.assertEqual(booted["layers_read"], LAYERS)
        self.refused(2, "--rank", 2)


class Export(WithParts):
    def export_cache(self, store, *options, env=None):
        return command.must_json("export", store, "--planes-cache", self.cache, *options, env=env)

    def check_files(self, split, world=1, fp4=True, checkpoint="mine"):
        """All files, where the program looks for them, with the digests that it wants; nothing
        else."""
        expected = []
        for rank in range(world):
            meta = meta_of(world, rank, split, ckpt_id=checkpoint)
            folder = self.rank_folder(meta)
            self.assertEqual(json.loads(read(os.path.join(folder, "meta.json"))), meta)
            expected.append(os.path.join(folder, "meta.json"))
            for layer in range(LAYERS):
                for part in BASE + (FP4 if fp4 else ()):
                    path = os.path.join(folder, f"layer{layer}.{part}.bin")
                    data = read(path)
                    self.assertEqual(data, self.data_of(layer, part, world, rank, split))
                    digest = hashlib.sha256(data).hexdigest() + "\n"
                    self.assertEqual(read(path + ".sha256").decode(), digest)
                    expected += [path, path + ".sha256"]
        self.assertEqual(self.files(), sorted(expected))

    def test_both_encodings_from_both(self):
        nibbles = os.path.join(self.folder, "nibbles")
        command.must("build", MODEL, "--store", nibbles, "--delta", "nibble", "-q")
        for store in (self.built, nibbles):
            for split in (True, False):
                report = self.export_cache(store, "--checkpoint-id", "mine", "--delta",
                                           "quintal" if split else "nibble")
                self.assertEqual((report["files_written"], report["layers"]), (24, LAYERS))
                self.check_files(split)
                shutil.rmtree(self.cache)
            self.assertEqual(self.export_cache(store, "--checkpoint-id", "mine")["fp4"],
                             "quintal" if store == self.built else "nibble")
            self.check_files(store == self.built)
            shutil.rmtree(self.cache)

    def test_ranks_and_back(self):
        built = os.path.join(self.folder, "built")
        command.must("build", MODEL, "--store", built, "--tp", 2, "-q")
        self.export_cache(built, "--checkpoint-id", "mine")
        self.check_files(True, world=2)
        self.import_cache("--move")
        self.assertEqual(command.must_json("verify", self.store)["findings"], [])
        self.export_cache(self.store)  # under the name that it came with
        self.check_files(True, world=2)
        shutil.rmtree(self.cache)
        report = self.export_cache(built, "--checkpoint-id", "mine", "--rank", 1)
        self.assertEqual([os.path.basename(path) for path in report["folders"]], ["tp2-rank1"])

    def test_a_cache_survives_import_and_export(self):
        self.write_rank(split=False, first=5)
        before = {path: read(path) for path in self.files() if not path.endswith(".json")}
        self.import_cache("--mtp-layers", 8, "--move")
        self.export_cache(self.store)
        after = {path: read(path) for path in self.files() if not path.endswith(".json")}
        self.assertEqual(after, before)

    def test_base_only(self):
        self.export_cache(self.built, "--checkpoint-id", "mine", "--tiers", "base")
        self.check_files(True, fp4=False)
        base = os.path.join(self.folder, "base")
        command.must("build", MODEL, "--store", base, "--tiers", "base", "-q")
        shutil.rmtree(self.cache)
        self.export_cache(base, "--checkpoint-id", "mine")
        self.check_files(True, fp4=False)

    def test_again_writes_what_is_missing_or_differs(self):
        self.export_cache(self.built, "--checkpoint-id", "mine")
        folder = self.rank_folder(meta_of(1, 0, True, ckpt_id="mine"))
        os.remove(os.path.join(folder, "layer1.sc13.bin"))
        write(os.path.join(folder, "layer2.fp2.bin"), b"short")
        path = os.path.join(folder, "layer3.planes2.bin")
        write(path, read(path)[:-1] + b"\0")
        write(os.path.join(folder, "layer0.sc2.bin.sha256"), b"wrong")
        write(os.path.join(folder, ".tmp-layer0.sc2.bin-1-2"), b"left behind")
        report = self.export_cache(self.built, "--checkpoint-id", "mine")
        self.assertEqual((report["files_written"], report["files_kept"]), (3, 21))
        self.check_files(True)

    def test_the_name_of_the_checkpoint(self):
        def refused(*options):
            done = command.run("export", self.built, "--planes-cache", self.cache, *options)
            self.assertEqual(done.returncode, 2, done.stderr)
            return done.stderr

        self.assertIn("VLLM_MOE_W2_CKPT_ID", refused())
        self.assertIn("ASCII", refused("--checkpoint-id", "m\u00e9in"))
        self.assertFalse(os.path.exists(self.cache))
        self.export_cache(self.built, env={"VLLM_MOE_W2_CKPT_ID": "mine"})
        self.check_files(True)
        done = command.run("export", self.built, "--layer", 0, "--part", "sc2", "--out",
                           os.path.join(self.folder, "x"), "--checkpoint-id", "mine")
        self.assertEqual(done.returncode, 2)

    def test_refused(self):
        for options in (["--layer", "0"], ["--hf", "x", "--checkpoint", "y", "--precision", "base"],
                        ["--tiers", "delta"], ["--delta", "half"], ["--rank", "1"]):
            done = command.run("export", self.built, "--planes-cache", self.cache,
                               "--checkpoint-id", "mine", *options)
            self.assertEqual(done.returncode, 2, done.stderr)
        for place in (self.built, os.path.join(self.built, "cache")):
            done = command.run("export", self.built, "--planes-cache", place, "--checkpoint-id",
                               "mine")
            self.assertEqual(done.returncode, 2, done.stderr)
        write(self.cache, b"a file")
        done = command.run("export", self.built, "--planes-cache", self.cache, "--checkpoint-id",
                           "mine")
        self.assertEqual(done.returncode, 2, done.stderr)

    def test_one_at_a_time_into_one_folder(self):
        """Several at once all succeed, and one waits for the lock of another."""
        arguments = ["export", self.built, "--planes-cache", self.cache, "--checkpoint-id", "mine",
                     "-q"]
        for _ in range(3):
            for process in [command.start(*arguments) for _ in range(3)]:
                self.assertEqual(process.wait(60), 0)
            self.check_files(split=True)
            shutil.rmtree(os.path.join(self.cache, "v2"))
        with open(os.path.join(self.cache, LOCK), "r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            waiting = command.start(*arguments)
            time.sleep(0.5)
            self.assertIsNone(waiting.poll())
            self.assertEqual(self.files(), [])
        self.assertEqual(waiting.wait(60), 0)
        self.check_files(split=True)

    def test_damage_is_not_exported(self):
        broken = os.path.join(self.folder, "broken")
        shutil.copytree(self.built, broken)
        [path] = [name for name in command.files_below(broken) if name.endswith("layer-0002.base")]
        command.flip(path, 9000)
        done = command.run("export", broken, "--planes-cache", self.cache, "--checkpoint-id", "m")
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertFalse(any(name.endswith("meta.json") for name in self.files()))
        self.assertFalse(any("layer2.planes13.bin" in name for name in self.files()))


class Move(WithParts):
    def test_moves_all_and_removes_the_folders(self):
        self.write_rank()
        report = self.import_cache("--move")
        self.assertEqual(report["files_removed"], LAYERS * 6 * 2 + 1)
        self.assertEqual(report["bytes_removed"], LAYERS * sum(map(part_bytes, BASE + FP4)))
        self.assertGreaterEqual(report["bytes_compared"], report["bytes_removed"])
        self.assertEqual(os.listdir(self.cache), [])
        self.check_parts()

    def test_after_an_import(self):
        self.write_rank(world=2, rank=0)
        self.write_rank(world=2, rank=1)
        self.import_cache()
        report = self.import_cache("--move")
        self.assertEqual(report["layers_imported"], 0)
        self.assertEqual(self.files(), [])

    def test_goes_on_where_it_stopped(self):
        """Whatever files of the first layers are gone, in the order in which they are removed."""
        order = [f"layer{layer}.{part}.bin{suffix}" for layer in range(2) for part in BASE + FP4
                 for suffix in (".sha256", "")]
        self.write_rank()
        self.import_cache()
        for gone in range(0, len(order) + 1, 5):
            folder = self.write_rank()
            for name in order[:gone]:
                os.remove(os.path.join(folder, name))
            if gone % 2:
                self.import_cache()
            self.import_cache("--move")
            self.assertEqual(self.files(), [], gone)
        # and with nothing but meta.json left
        write(os.path.join(folder, "meta.json"), json.dumps(meta_of(1, 0, True)).encode())
        self.import_cache("--move")
        self.assertEqual(os.listdir(self.cache), [])
        self.check_parts()

    def test_files_of_others_stay(self):
        folder = self.write_rank()
        write(os.path.join(folder, "notes.txt"), b"mine")
        report = self.import_cache("--move")
        self.assertTrue(any("notes.txt" in text for text in report["warnings"]))
        self.assertEqual([os.path.basename(path) for path in self.files()],
                         ["meta.json", "notes.txt"])

    def test_once_more_when_all_was_moved(self):
        self.write_rank()
        moved = self.import_cache("--move")
        again = self.import_cache("--move")
        self.assertEqual((again["moved_before"], again["generation"], again["files_removed"]),
                         (True, moved["generation"], 0))
        self.assertFalse(moved["moved_before"])
        self.assertIn("no planes cache", self.refused(2))
        self.assertIn("no planes cache", self.refused(2, "--move", store=self.store + "-other"))
        write(os.path.join(self.cache, "notes.txt"), b"mine")
        self.assertIn("no planes cache", self.refused(2, "--move"))

    def test_folders_that_a_kill_left_are_removed(self):
        folder = self.write_rank()
        key = os.path.dirname(folder)
        self.import_cache("--move")
        for left in (folder, key, os.path.dirname(key)):
            os.makedirs(left)
            self.assertTrue(self.import_cache("--move")["moved_before"])
            self.assertEqual(os.listdir(self.cache), [])
        os.makedirs(folder)
        os.symlink("/nowhere", os.path.join(key, "tp2-rank1"))
        self.refused(3, "--move")
        self.assertTrue(os.path.islink(os.path.join(key, "tp2-rank1")))

    def test_a_damaged_file_of_the_store_is_imported_again(self):
        self.write_rank()
        self.import_cache()
        [path] = [name for name in command.files_below(self.store)
                  if name.endswith("layer-0000.base")]
        command.flip(path, 9000)
        text = self.refused(3)
        self.assertIn(path, text)
        self.assertIn("remove this file and import again", text)
        self.assertNotIn("build", text)
        os.remove(path)
        self.assertEqual(self.import_cache()["layers_imported"], 1)
        self.check_parts()

    def test_nothing_is_removed_that_the_store_has_otherwise(self):
        folder = self.write_rank()
        self.import_cache()
        path = os.path.join(folder, "layer2.sc2.bin")
        data = bytearray(read(path))
        data[len(data) // 2 + 5] ^= 1
        write(path, data)
        os.remove(path + ".sha256")
        text = self.refused(3, "--move")
        self.assertIn("layer2.sc2.bin", text)
        names = {os.path.basename(name) for name in self.files()}
        self.assertNotIn("layer1.sc2.bin", names)
        self.assertEqual(sum(name.startswith("layer2.") for name in names), 11)
        self.assertIn("layer3.fp2.bin", names)

    def test_nothing_is_removed_when_the_store_is_damaged(self):
        self.write_rank()
        self.import_cache()
        [path] = [name for name in command.files_below(self.store)
                  if name.endswith("layer-0001.delta-quintal")]
        command.flip(path, 9000)
        text = self.refused(3, "--move")
        self.assertIn("layer-0001.delta-quintal", text)
        self.assertIn("layer1.fp13.bin", {os.path.basename(name) for name in self.files()})
        os.remove(path)
        self.import_cache("--move")
        self.check_parts()

    def test_the_only_copy_is_never_to_be_removed(self):
        """A damaged store file whose layer the cache has in part alone."""
        folder = self.write_rank()
        self.import_cache()
        for name in ("layer1.planes13.bin", "layer1.planes13.bin.sha256"):
            os.remove(os.path.join(folder, name))
        [path] = [name for name in command.files_below(self.store)
                  if name.endswith("layer-0001.base")]
        command.flip(path, -1)
        text = self.refused(3, "--move")
        self.assertIn("keep this file", text)
        self.assertNotIn("remove this file", text)

    def test_a_slash_at_the_end_is_the_same_folder(self):
        self.write_rank()
        plain, self.cache = self.cache, self.cache + "/"
        self.import_cache("--move")
        self.assertEqual(os.listdir(plain), [])

    def test_needs_both_tiers(self):
        self.write_rank()
        self.assertIn("would lose", self.refused(2, "--move", "--tiers", "base"))


class Refused(WithParts):
    def check(self, code, *texts, options=(), geometry=GEOMETRY):
        """Refused with all of the texts; nothing published, no temporary left."""
        error = self.refused(code, *options, geometry=geometry)
        for text in texts:
            self.assertIn(text, error)
        if os.path.isdir(self.store):
            self.assertEqual([name for name in command.files_below(self.store)
                              if not name.endswith("/manifest")], [])

    def test_sizes(self):
        folder = self.write_rank()
        for part in BASE + FP4:
            path = os.path.join(folder, f"layer1.{part}.bin")
            data = read(path)
            for other in (b"", data[:-1], data + b"\0", data * 2):
                write(path, other)
                self.check(3, f"layer1.{part}.bin", f"{len(data)} bytes", f"{len(other)} bytes")
            write(path, data)

    def test_geometry(self):
        self.write_rank()
        self.check(3, "layer0.planes13.bin", geometry="64,256,128")
        self.check(3, geometry="32,512,128")
        for geometry in ("0,256,128", "32,256", "32,250,128", "65537,256,128", "32,256,100",
                         "4294967296,4294967296,4294967296", "1-0:32,256,128", "nonsense",
                         "0-3:32,256,128;3:32,256,128", "0-3:"):
            self.check(2, geometry=geometry)
        self.check(3, "no geometry", geometry="0-2:32,256,128")
        self.check(2, "MTP", options=("--mtp-layers", "9"))
        self.check(2, options=("--mtp-layers", "9-"))

    def test_config_that_disagrees(self):
        self.write_rank()
        config = os.path.join(self.folder, "config.json")
        write(config, b'{"hidden_size": 128, "num_experts": 64}')
        self.check(3, "disagree", "E=64 H=128", options=("--config", config))

    def test_ranks_too_narrow(self):
        self.write_rank(world=4, rank=0, layers=())
        folder = self.rank_folder(meta_of(4, 0, True))
        write(os.path.join(folder, "layer0.sc2.bin"), b"")
        self.check(2, "multiple of 256", options=("--rank", 0))

    def test_missing_files(self):
        folder = self.write_rank()
        for part in BASE + FP4:
            path = os.path.join(folder, f"layer2.{part}.bin")
            data = read(path)
            os.remove(path)
            self.check(3, f"layer2.{part}.bin", "lacks a part")
            write(path, data)

    def test_a_layer_that_one_rank_lacks(self):
        self.write_rank(world=2, rank=0)
        self.write_rank(world=2, rank=1, layers=[0, 1, 3])
        self.check(3, "tp2-rank1", "layer2.planes13.bin", "nothing of this layer")

    def test_ranks_twice_and_missing(self):
        self.write_rank(world=2, rank=1)
        self.check(3, "no folder of rank 0")
        self.write_rank(world=2, rank=0)
        self.write_rank(world=2, rank=0, key="copy")
        self.check(2, "two folders are rank 0 of 2", "copy")
        self.import_cache("--key", "copy")

    def test_several_models(self):
        self.write_rank()
        self.write_rank(ckpt_id="another")
        self.check(2, "several models", "another", "tinymoe of the tests", "--key")
        self.check(2, "no KEY", options=("--key", "zz"))
        self.import_cache("--key", key_of(meta_of(1, 0, True))[:8])
        self.check_parts()

    def test_meta(self):
        for changes, text in (({"quantizer_abi": "other"}, "tsym4-e8m0-fragmajor-a32-v2"),
                              ({"zero_mode": "some"}, "zero_mode"), ({"version": 4}, "version"),
                              ({"fp4_split": "w5"}, "fp4_split"), ({"ckpt_id": 7}, "ckpt_id"),
                              ({"ckpt_id": "a\tb"}, "ckpt_id"), ({"world": 2}, "rank 0 of 2"),
                              ({"rank": 1}, "another rank"), ({"fp4_split": None}, "fp4_split"),
                              ({"rank": {"a": 1}}, "rank"), ({"world": []}, "world")):
            shutil.rmtree(self.cache, ignore_errors=True)
            meta = meta_of(1, 0, True)
            meta.update(changes)
            folder = self.rank_folder(meta_of(1, 0, True))
            self.write_rank(layers=[0])
            write(os.path.join(folder, "meta.json"),
                  json.dumps({k: v for k, v in meta.items() if v is not None}).encode())
            self.check(3, "meta.json", text)
        for text in (b"", b"{", b"[]", b"7", b'{"world": 1, "world": 1}', b"\xff", b"[" * 100000,
                     b'{"fp4_split": false} x'):
            write(os.path.join(folder, "meta.json"), text)
            self.check(3, "meta.json")
        os.remove(os.path.join(folder, "meta.json"))
        self.check(3, "without their meta.json")

    def test_no_cache(self):
        self.check(2, "no planes cache here")
        os.makedirs(self.cache)
        self.check(2, "no planes cache here", "no folder v2")
        os.makedirs(os.path.join(self.cache, "v2", "k", "tp1-rank0"))
        self.check(2, "no planes cache here")
        self.write_rank(layers=())
        self.check(3, "has no layers")
        self.check(3, "has no layers", options=("--move",))

    def test_links(self):
        folder = self.write_rank()
        path = os.path.join(folder, "layer1.planes2.bin")
        os.rename(path, os.path.join(self.folder, "elsewhere"))
        os.symlink(os.path.join(self.folder, "elsewhere"), path)
        self.check(3, "layer1.planes2.bin", "symbolic link", options=("--move",))
        os.remove(path)
        os.mkdir(path)
        self.check(3, "layer1.planes2.bin", "a folder")
        os.rmdir(path)
        os.rename(os.path.join(self.folder, "elsewhere"), path)
        moved = os.path.join(self.folder, "moved")
        os.rename(folder, moved)
        os.symlink(moved, folder)
        self.check(3, "tp1-rank0", "symbolic link", options=("--move",))

    def test_digests(self):
        folder = self.write_rank()
        path = os.path.join(folder, "layer0.sc13.bin")
        digest = read(path + ".sha256")
        write(path + ".sha256", b"0" * 64)
        self.check(3, "layer0.sc13.bin", "does not match its digest", digest.decode().strip())
        for text in (b"", b"0" * 63, b"0" * 65, b"X" * 64, b"\0" * 64):
            write(path + ".sha256", text)
            self.check(3, "layer0.sc13.bin.sha256", "malformed")

    def test_what_no_packer_writes(self):
        folder = self.write_rank(digests=False)
        path = os.path.join(folder, "layer0.sc2.bin")
        data = read(path)
        write(path, data[:777] + b"\xff" + data[778:])
        self.check(3, "layer0.sc2.bin", "777", "255")
        write(path, data)
        path = os.path.join(folder, "layer0.fp2.bin")
        data = read(path)
        write(path, data[:5] + b"\xff\xff\xff" + data[8:])
        self.check(3, "layer0.fp2.bin", "does not fit its base codes")

    def test_nibbles_of_another_base(self):
        folder = self.write_rank(split=False, digests=False)
        write(os.path.join(folder, "layer0.fp13.bin"), self.parts[1]["fp13"])
        self.check(3, "layer0.fp13.bin", "does not fit its base codes")

    def test_a_store_made_of_another_cache_of_that_name(self):
        self.write_rank(fp4=False, digests=False)
        self.import_cache()
        folder = self.rank_folder(meta_of(1, 0, True))
        for part in BASE:
            write(os.path.join(folder, f"layer0.{part}.bin"), self.parts[1][part])
        self.assertIn("other bytes", self.refused(3))

    def test_places(self):
        self.write_rank()
        self.refused(2, store=self.cache)
        self.refused(2, store=os.path.join(self.cache, "store"))
        self.refused(2, store=self.folder)
        error = command.run("import", "--planes-cashe", self.cache).stderr
        self.assertIn("is --planes-cache meant?", error)


if __name__ == "__main__":
    command.main(unittest)
