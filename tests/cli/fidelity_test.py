"""Fidelity and exported models from the outside: figures of the bundled model computed again from
its files, and every exported weight."""

import json
import math
import os
import shutil
import struct
import tempfile
import unittest

import command

HERE = os.path.dirname(os.path.abspath(__file__))
BUNDLED = os.path.join(os.path.dirname(os.path.dirname(HERE)), "models", "tinymoe-mxfp4")
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
NIBBLES = E2M1 + [-value for value in E2M1]
CODES = [math.copysign(4.0 if i % 8 >= 5 else 1.0, -1 if i >= 8 else 1) for i in range(16)]


def read_tensors(path):
    """name -> (dtype, shape, bytes) of a folder's safetensors files."""
    tensors = {}
    for name in sorted(os.listdir(path)):
        if not name.endswith(".safetensors"):
            continue
        with open(os.path.join(path, name), "rb") as file:
            data = file.read()
        length = struct.unpack("<Q", data[:8])[0]
        for tensor, entry in json.loads(data[8:8 + length]).items():
            if tensor != "__metadata__":
                begin, end = entry["data_offsets"]
                tensors[tensor] = (entry["dtype"], entry["shape"],
                                   data[8 + length + begin:8 + length + end])
    return tensors


def nibbles_and_scales(tensors, name):
    """One nibble per weight, and the power of two of each."""
    nibbles = [half for byte in tensors[name + ".weight"][2] for half in (byte & 15, byte >> 4)]
    return nibbles, [math.ldexp(1.0, byte - 127) for byte in tensors[name + ".scale"][2]]


def bf16_bits(value):
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    assert bits & 0xffff == 0, value
    return bits >> 16


class Bundled(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.temporary.cleanup)
        cls.store = os.path.join(cls.temporary.name, "store")
        command.must("build", BUNDLED, "--store", cls.store, "-q")
        cls.source = read_tensors(BUNDLED)

    def test_figures_against_the_files(self):
        report = command.must_json("fidelity", BUNDLED, "--store", self.store)
        self.assertEqual(len(report["layers"]), 4)
        self.assertEqual(report["fp4"]["relative_rms"], 0)
        self.assertEqual(report["fp4"]["clipped_share"], 0)
        squares = errors = error_squares = 0.0
        for expert in range(32):
            nibbles, scales = nibbles_and_scales(self.source, f"layers.3.ffn.experts.{expert}.w2")
            for i, nibble in enumerate(nibbles):
                scale = scales[i // 32]
                error = (CODES[nibble] - NIBBLES[nibble]) * scale
                squares += (NIBBLES[nibble] * scale) ** 2
                error_squares += error * error
                errors += error
        count = 32 * 256 * 128
        found = report["layers"][3]["base"]["down"]
        self.assertAlmostEqual(found["relative_rms"], math.sqrt(error_squares / squares), 12)
        self.assertAlmostEqual(found["signed_bias"], errors / count / math.sqrt(squares / count),
                               12)

    def test_table_quiet_layers_and_workers(self):
        table = command.must("fidelity", BUNDLED, "--store", self.store, "--layers", "1-2").stdout
        self.assertEqual(len([line for line in table.splitlines() if " mxfp4 " in line]), 4)
        self.assertEqual(command.must("fidelity", BUNDLED, "--store", self.store, "-q").stdout, "")
        reports = [command.must_json("fidelity", BUNDLED, "--store", self.store, "--workers", count)
                   for count in (1, 3)]
        self.assertEqual(reports[0]["layers"], reports[1]["layers"])

    def test_another_checkpoint_is_refused(self):
        other = command.write_checkpoint(os.path.join(self.temporary.name, "other"),
                                         command.mxfp4_tensors())
        out = os.path.join(self.temporary.name, "refused")
        for arguments in (("fidelity", other, "--store", self.store),
                          ("export", self.store, "--hf", out, "--checkpoint", other,
                           "--precision", "base")):
            done = command.run(*arguments)
            self.assertEqual(done.returncode, 3, done.stderr)
            self.assertIn("was not built from", done.stderr)
        self.assertFalse(os.path.exists(out))

    def check_export(self, precision, is_fp4, *options):
        out = os.path.join(self.temporary.name, "out-" + precision.split("/")[-1].replace(":", "-"))
        report = command.must_json("export", self.store, "--hf", out, "--checkpoint", BUNDLED,
                                   "--precision", precision, *options)
        found = read_tensors(out)
        values = {fp4: [[bf16_bits(value * math.ldexp(1.0, byte - 127))
                         for value in (NIBBLES if fp4 else CODES)] for byte in range(100, 140)]
                  for fp4 in (False, True)}
        experts = 0
        for name, (dtype, shape, data) in self.source.items():
            if ".experts." not in name:
                self.assertEqual(found[name], (dtype, shape, data), name)
            elif name.endswith(".weight"):
                experts += 1
                layer, expert = int(name.split(".")[1]), int(name.split(".")[4])
                table = values[is_fp4(layer, expert)]
                scales = self.source[name[:-len("weight")] + "scale"][2]
                expected = bytearray()
                for i, byte in enumerate(data):
                    row = table[scales[i // 16] - 100]
                    expected += struct.pack("<HH", row[byte & 15], row[byte >> 4])
                self.assertEqual(found[name][:2], ("BF16", [shape[0], 2 * shape[1]]))
                self.assertEqual(found[name][2], bytes(expected), name)
        self.assertEqual(experts, 4 * 32 * 3)
        self.assertFalse([name for name in found if name.endswith(".scale")])
        self.assertEqual(report["tensors_dropped"], experts)
        with open(os.path.join(out, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        self.assertNotIn("quantization_config", config)
        self.assertEqual(config["num_experts_per_tok"], 4)
        with open(os.path.join(out, "model.safetensors.index.json"), encoding="utf-8") as file:
            index = json.load(file)
        self.assertEqual(set(index["weight_map"]), set(found))
        self.assertEqual(set(index["weight_map"].values()),
                         {name for name in os.listdir(out) if name.endswith(".safetensors")})
        return report

    def test_export_base(self):
        report = self.check_export("base", lambda layer, expert: False, "--shard-size", "4M")
        self.assertEqual((report["experts_base"], report["experts_fp4"]), (128, 0))

    def test_export_of_a_map(self):
        path = os.path.join(self.temporary.name, "map.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"default": "base", "layers": {
                "1": "fp4", "3": {str(expert): "fp4" for expert in range(0, 32, 3)}}}, file)
        report = self.check_export("mixed:" + path, lambda layer, expert:
                                   layer == 1 or (layer == 3 and expert % 3 == 0))
        self.assertEqual(report["experts_fp4"], 32 + 11)

    def test_export_of_one_file_leaves_its_neighbours(self):
        folder = os.path.join(self.temporary.name, "downloads")
        os.mkdir(folder)
        single = os.path.join(folder, "m.safetensors")
        shutil.copy(os.path.join(BUNDLED, "model-00001-of-00001.safetensors"), single)
        with open(os.path.join(folder, "private_key.pem"), "w", encoding="utf-8") as file:
            file.write("mine")
        out = os.path.join(self.temporary.name, "of-one-file")
        command.must("export", self.store, "--hf", out, "--checkpoint", single, "--precision",
                     "base", "-q")
        self.assertNotIn("private_key.pem", os.listdir(out))

    def test_wrong_usage_of_export(self):
        folder = self.temporary.name
        hf = ["--hf", os.path.join(folder, "new"), "--checkpoint", BUNDLED]
        for arguments, word in (([], "what to write"),
                                (["--layer", 0, "--part", "sc2"], "what to write"),
                                (["--hf", os.path.join(folder, "new")], "--checkpoint"),
                                ([*hf, "--precision", "fp8"], "base, fp4, or mixed:MAP.json"),
                                ([*hf, "--precision", "mixed:"], "base, fp4, or mixed:MAP.json"),
                                ([*hf, "--precision", "base", "--layer", 1], "--layer"),
                                ([*hf, "--precision", "base", "--shard-size", "0"], "above 0"),
                                (["--hf", os.path.join(self.store, "new"), "--checkpoint", BUNDLED,
                                  "--precision", "base"], "inside the store"),
                                (["--hf", folder, "--checkpoint", BUNDLED, "--precision", "base"],
                                 "an empty one")):
            done = command.run("export", self.store, *arguments)
            self.assertEqual(done.returncode, 2, (arguments, done.stderr))
            self.assertIn(word, done.stderr)
        self.assertFalse(os.path.exists(os.path.join(folder, "new")))
        done = command.run("export", self.store, *hf, "--precision", "mixed:/none/map.json")
        self.assertEqual(done.returncode, 1)
        self.assertIn("/none/map.json", done.stderr)


if __name__ == "__main__":
    command.main(unittest)
