"""The digests of every part of every layer, for every instruction set, and the identity of a model.

The bundled model's digests are in tests/data/golden.json. HOTPLANE_SHARED names a folder with more
models (models/tinymoe-bf16, -nvfp4) whose digests are in the same file.
"""

import hashlib
import json
import os
import shutil
import tempfile
import unittest

import command

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCE = os.path.dirname(os.path.dirname(HERE))
BUNDLED = os.path.join(SOURCE, "models", "tinymoe-mxfp4")
SHARED = os.environ.get("HOTPLANE_SHARED", os.path.join(os.path.dirname(SOURCE), "shared"))
PARTS = {"q13": ["--part", "fp13", "--encoded"], "q2": ["--part", "fp2", "--encoded"]}


def isas():
    return command.must_json("doctor")["isa_available"]


class Golden(unittest.TestCase):
    def setUp(self):
        self.root = tempfile.mkdtemp(prefix="hotplane-golden-")
        self.addCleanup(shutil.rmtree, self.root)
        with open(os.path.join(SOURCE, "tests", "data", "golden.json")) as file:
            self.golden = json.load(file)["planes_sha256_per_layer"]

    def check(self, model, name, isa, encoding):
        store = os.path.join(self.root, f"{name}-{isa}-{encoding}")
        command.must("build", model, "--store", store, "--delta", encoding, "--isa", isa, "-q")
        out = os.path.join(self.root, "part.bin")
        checked = 0
        for layer, parts in enumerate(self.golden[name]):
            for part, digest in parts.items():
                if part in PARTS and encoding != "quintal":
                    continue
                command.must("export", store, "--layer", layer, "--isa", isa, "--out", out, "-q",
                             *PARTS.get(part, ["--part", part]))
                with open(out, "rb") as file:
                    found = hashlib.sha256(file.read()).hexdigest()
                self.assertEqual(found, digest, (name, isa, layer, part))
                checked += 1
        self.assertEqual(checked, len(self.golden[name]) * (8 if encoding == "quintal" else 6))

    def test_bundled_mxfp4(self):
        for isa in isas():
            self.check(BUNDLED, "mxfp4", isa, "quintal")
        self.check(BUNDLED, "mxfp4", isas()[0], "nibble")

    def check_shared(self, name):
        model = os.path.join(SHARED, "models", "tinymoe-" + name)
        if not os.path.isdir(model):
            self.skipTest(f"no {model}; HOTPLANE_SHARED names the folder of the larger test data")
        for isa in isas():
            self.check(model, name, isa, "quintal")

    def test_bf16(self):
        self.check_shared("bf16")

    def test_nvfp4(self):
        self.check_shared("nvfp4")

    def test_one_expert_is_a_slice_of_all(self):
        store = os.path.join(self.root, "store")
        command.must("build", BUNDLED, "--store", store, "-q")
        every, one = os.path.join(self.root, "all"), os.path.join(self.root, "one")
        for part in ("planes13", "sc2", "fp13"):
            command.must("export", store, "--layer", 2, "--part", part, "--out", every, "-q")
            command.must("export", store, "--layer", 2, "--part", part, "--expert", 5, "--out", one,
                         "-q")
            with open(every, "rb") as a, open(one, "rb") as b:
                whole, piece = a.read(), b.read()
            self.assertEqual(len(whole), 32 * len(piece))
            self.assertEqual(whole[5 * len(piece):6 * len(piece)], piece)


class Identity(unittest.TestCase):
    def setUp(self):
        self.root = tempfile.mkdtemp(prefix="hotplane-identity-")
        self.addCleanup(shutil.rmtree, self.root)
        self.tensors = command.bf16_tensors(layers=2, experts=4, hidden=128, intermediate=64)
        self.model = self.write("model", self.tensors)

    def write(self, name, tensors, **options):
        return command.write_checkpoint(os.path.join(self.root, name), tensors, **options)

    @staticmethod
    def generation(model):
        return command.must_json("inspect", model)["generation"]

    def test_kept_by_everything_that_does_not_touch_the_weights(self):
        same = self.generation(self.model)
        copy = os.path.join(self.root, "copy")
        shutil.copytree(self.model, copy)
        self.assertEqual(self.generation(copy), same)
        self.assertEqual(self.generation(self.write("sharded", self.tensors, shards=5)), same)
        other_order = dict(reversed(list(self.tensors.items())))
        self.assertEqual(self.generation(self.write("reordered", other_order, shards=2)), same)
        config = {"num_experts_per_tok": 2, "rope_theta": 5e6, "rope_scaling": {"factor": 4}}
        self.assertEqual(self.generation(self.write("config", self.tensors, config=config)), same)
        extra = {**self.tensors, "lm_head.weight": ("BF16", [4, 4], bytes(32))}
        self.assertEqual(self.generation(self.write("extra", extra)), same)
        # As a hub keeps it: names that are links into a folder of blobs.
        linked = os.path.join(self.root, "snapshot")
        os.makedirs(linked)
        for name in os.listdir(self.model):
            os.symlink(os.path.join(self.model, name), os.path.join(linked, name))
        self.assertEqual(self.generation(linked), same)

    def test_changed_by_everything_that_does(self):
        same = self.generation(self.model)
        name = "model.layers.1.mlp.experts.2.up_proj.weight"
        dtype, shape, data = self.tensors[name]
        changed = bytes([data[0] ^ 1]) + data[1:]
        variants = {
            "byte": {**self.tensors, name: (dtype, shape, changed)},
            "dtype": {n: ("F16" if ".experts." in n else d, s, b)
                      for n, (d, s, b) in self.tensors.items()},
            "shape": command.bf16_tensors(layers=2, experts=4, hidden=64, intermediate=128),
            "fewer": command.bf16_tensors(layers=2, experts=3, hidden=128, intermediate=64),
        }
        for kind, tensors in variants.items():
            self.assertNotEqual(self.generation(self.write(kind, tensors)), same, kind)

    def test_a_swapped_shard_changes_it(self):
        same = self.generation(self.model)
        sharded = self.write("sharded", self.tensors, shards=8)
        other = {n: (d, s, bytes(b ^ 1 for b in data)) for n, (d, s, data) in self.tensors.items()}
        swapped = self.write("other", other, shards=8)
        shutil.copy(os.path.join(swapped, "model-00003-of-00008.safetensors"), sharded)
        self.assertNotEqual(self.generation(sharded), same)

    def test_verify_source_finds_any_changed_byte(self):
        store = os.path.join(self.root, "store")
        command.must("build", self.model, "--store", store, "-q")
        command.must("verify", store, "--source", self.model)
        file = os.path.join(self.model, "model-00001-of-00001.safetensors")
        size = os.path.getsize(file)
        data = sum(len(b) for _, _, b in self.tensors.values())
        for position in range(size - data, size, data // 40):
            with open(file, "r+b") as opened:
                opened.seek(position)
                byte = opened.read(1)[0]
                opened.seek(position)
                opened.write(bytes([byte ^ 1]))
            done = command.run("verify", store, "--source", self.model)
            self.assertEqual(done.returncode, 3, position)
            self.assertIn(".experts.", done.stderr)
            with open(file, "r+b") as opened:
                opened.seek(position)
                opened.write(bytes([byte]))
        command.must("verify", store, "--source", self.model)


if __name__ == "__main__":
    command.main(unittest)
