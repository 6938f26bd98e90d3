"""examples/tinylm from the outside: losses as recorded, generation with and without its cache, and
checkpoints that are not what they say.

The bundled model's losses on tests/data/eval.txt are in tests/data/eval.json. HOTPLANE_SHARED names
a folder with more models, a longer text and what it must give (golden/golden.json).
"""

import json
import math
import os
import re
import shutil
import struct
import subprocess
import tempfile
import unittest

import command

TINYLM = os.environ.get("TINYLM", "tinylm")
HERE = os.path.dirname(os.path.abspath(__file__))
SOURCE = os.path.dirname(os.path.dirname(HERE))
DATA = os.path.join(SOURCE, "tests", "data")
BUNDLED = os.path.join(SOURCE, "models", "tinymoe-mxfp4")
TEXT = os.path.join(DATA, "eval.txt")
SHARED = os.environ.get("HOTPLANE_SHARED", os.path.join(os.path.dirname(SOURCE), "shared"))
EXACT_TOLERANCE = 1e-4
FAST_TOLERANCE = 0.01


def run(*arguments):
    return subprocess.run([TINYLM, *map(str, arguments)], capture_output=True, timeout=300,
                          check=False)


def must_json(*arguments):
    done = run(*arguments, "--json")
    if done.returncode != 0:
        raise AssertionError(f"{arguments} exited {done.returncode}\n{done.stderr.decode()}")
    return json.loads(done.stdout)


def loss(model, store, precision, *options):
    row = must_json("eval", model, "--store", store, "--precision", precision, *options)
    assert row["precision"] == precision and row["rows"][0]["loss"] == row["loss"], row
    return row["loss"]


class Stores(unittest.TestCase):
    """The bundled model's store, with its FP4 as quintals, and as nibbles."""

    @classmethod
    def setUpClass(cls):
        cls.root = tempfile.mkdtemp(prefix="hotplane-tinylm-")
        cls.addClassCleanup(shutil.rmtree, cls.root)
        cls.stores = {}
        for encoding in ("quintal", "nibble"):
            cls.stores[encoding] = os.path.join(cls.root, encoding)
            command.must("build", BUNDLED, "--store", cls.stores[encoding], "--delta", encoding,
                         "-q")
        cls.store = cls.stores["quintal"]
        cls.short = os.path.join(cls.root, "short.txt")
        with open(TEXT, "rb") as text, open(cls.short, "wb") as out:
            out.write(text.read(2048))


class Loss(Stores):
    def setUp(self):
        with open(os.path.join(DATA, "eval.json")) as file:
            self.recorded = json.load(file)

    def test_recorded(self):
        for precision, arithmetic, tolerance in (("source", "exact", EXACT_TOLERANCE),
                                                 ("fp4", "exact", EXACT_TOLERANCE),
                                                 ("base", "exact", EXACT_TOLERANCE),
                                                 ("fp4", "fast", FAST_TOLERANCE),
                                                 ("base", "fast", FAST_TOLERANCE)):
            found = loss(BUNDLED, self.store, precision, "--arithmetic", arithmetic, "--text", TEXT)
            self.assertAlmostEqual(found, self.recorded[precision], delta=tolerance,
                                   msg=(precision, arithmetic))

    def test_quintals_and_nibbles_are_the_same_fp4(self):
        for arithmetic in ("exact", "fast"):
            a, b = (loss(BUNDLED, store, "fp4", "--arithmetic", arithmetic, "--text",
                         self.short) for store in self.stores.values())
            self.assertEqual(a, b, arithmetic)

    def test_threads_change_nothing(self):
        for precision in ("source", "base"):
            a, b = (must_json("eval", BUNDLED, "--store", self.store, "--precision", precision,
                              "--threads", threads, "--text", self.short)
                    for threads in (1, 3))
            self.assertEqual(a, b)

    def test_table(self):
        table = must_json("eval", BUNDLED, "--store", self.store, "--text", TEXT)
        rows = table["rows"]
        self.assertEqual([(row["precision"], row["share"]) for row in rows],
                         [("source", 0), ("fp4", 1), ("mixed", 0.9), ("mixed", 0.75),
                          ("mixed", 0.5), ("mixed", 0.25), ("base", 0)])
        self.assertEqual((table["command"], table["model"], table["loss"]),
                         ("tinylm eval", BUNDLED, rows[0]["loss"]))
        self.assertNotIn("precision", table)
        for row in rows:
            self.assertEqual(row["bytes_scored"], self.recorded["bytes_scored"])
        at_fp4 = [row["experts_fp4"] for row in rows[1:]]
        self.assertEqual(at_fp4[0], 1)
        self.assertEqual(at_fp4[-1], 0)
        self.assertEqual(at_fp4, sorted(set(at_fp4), reverse=True))
        for better, worse in zip(rows[1:], rows[2:]):
            self.assertLess(better["loss"], worse["loss"] + 0.003, (better, worse))
            self.assertGreater(better["top1_agreement"], worse["top1_agreement"] - 0.01)
        self.assertLess(rows[1]["loss"] + 0.02, rows[-1]["loss"])

    def test_one_mixed_row_is_that_of_the_table(self):
        found = must_json("eval", BUNDLED, "--store", self.store, "--precision", "mixed",
                          "--share", "0.5", "--text", self.short)["rows"]
        table = must_json("eval", BUNDLED, "--store", self.store, "--text", self.short)["rows"]
        self.assertEqual(found, [row for row in table if row["share"] == 0.5])

    def test_missing_layers_are_built(self):
        store = os.path.join(self.root, "made")
        self.assertEqual(loss(BUNDLED, store, "fp4", "--text", self.short),
                         loss(BUNDLED, self.store, "fp4", "--text", self.short))


class Larger(unittest.TestCase):
    def check(self, name, expected):
        model = os.path.join(SHARED, "models", "tinymoe-" + name)
        if not os.path.isdir(model):
            self.skipTest(f"no {model}; HOTPLANE_SHARED names the folder of the larger test data")
        with open(os.path.join(SHARED, "golden", "golden.json")) as file:
            golden = json.load(file)["mean_nll_nats_per_byte_ctx512"]
        text = os.path.join(SHARED, "eval", "eval.txt")
        with tempfile.TemporaryDirectory(prefix="hotplane-tinylm-") as store:
            command.must("build", model, "--store", store, "-q")
            for precision, key in expected.items():
                for arithmetic, tolerance in (("exact", 0.001), ("fast", 0.01)):
                    if (precision, arithmetic) == ("source", "fast"):
                        continue
                    found = loss(model, store, precision, "--text", text, "--arithmetic",
                                 arithmetic)
                    self.assertAlmostEqual(found, golden[key], delta=tolerance,
                                           msg=(name, precision, arithmetic))

    def test_mxfp4(self):
        self.check("mxfp4", {"source": "mxfp4 native", "fp4": "mxfp4 native", "base": "mxfp4 2bit"})

    def test_bf16(self):
        self.check("bf16", {"source": "bf16 native", "fp4": "bf16 requant-fp4",
                            "base": "bf16 2bit"})

    def test_nvfp4(self):
        self.check("nvfp4", {"source": "nvfp4 native", "fp4": "nvfp4 requant-fp4",
                             "base": "nvfp4 2bit"})


class OnDevice(Stores):
    """Experts on cuda:0: all of the recorded text where HOTPLANE_GPU is 1, else a short one: the
    fake driver takes its time."""

    TOLERANCE = 0.002

    def test_loss(self):
        for precision in ("base", "fp4"):
            if os.environ.get("HOTPLANE_GPU") == "1":
                text = TEXT
                with open(os.path.join(DATA, "eval.json")) as file:
                    expected = json.load(file)[precision]
            else:
                text = os.path.join(self.root, "window.txt")
                with open(TEXT, "rb") as file, open(text, "wb") as out:
                    out.write(file.read(512))
                expected = loss(BUNDLED, self.store, precision, "--arithmetic", "exact", "--text",
                                text)
            for encoding, store in self.stores.items():
                if precision == "base" and encoding == "nibble":
                    continue
                found = loss(BUNDLED, store, precision, "--device", "cuda:0", "--text", text)
                print(f"{precision} from {encoding}s: {found:.6f}, to be {expected:.6f}")
                self.assertAlmostEqual(found, expected, delta=self.TOLERANCE,
                                       msg=(precision, encoding))

    def test_generate(self):
        report = must_json("generate", BUNDLED, "--store", self.store, "--precision", "mixed",
                           "--share", 0.5, "--tokens", 8, "--device", "cuda:0", "--text",
                           self.short)
        self.assertEqual((len(report["text"]), report["tokens"]), (8, 8))

    def test_there_is_no_such_device(self):
        done = run("generate", BUNDLED, "--store", self.store, "--device", "tpu")
        self.assertEqual(done.returncode, 2)
        self.assertIn(b"tpu", done.stderr)


class Generation(Stores):
    def generate(self, *options):
        return must_json("generate", BUNDLED, "--store", self.store, *options)

    def test_the_cache_changes_nothing(self):
        for precision in ("source", "base", "fp4"):
            options = ("--precision", precision, "--tokens", 70, "--temperature", 0.9)
            self.assertEqual(self.generate(*options)["text"],
                             self.generate(*options, "--no-cache")["text"], precision)

    def test_seed(self):
        texts = [self.generate("--temperature", 0.8, "--seed", seed)["text"]
                 for seed in (7, 7, 8)]
        self.assertEqual(texts[0], texts[1])
        self.assertNotEqual(texts[0], texts[2])
        greedy = [self.generate("--seed", seed)["text"] for seed in (7, 8)]
        self.assertEqual(greedy[0], greedy[1])

    def test_report_and_plain_text(self):
        options = ("--precision", "mixed", "--share", 0.5, "--tokens", 40, "--prompt", "import ")
        report = self.generate(*options)
        self.assertEqual((report["precision"], report["prompt"]), ("mixed", "import "))
        self.assertEqual(len(report["text"]), report["tokens"])
        self.assertGreater(report["tokens_per_second"], 0)
        plain = run("generate", BUNDLED, "--store", self.store, *options)
        self.assertEqual(plain.stdout.decode(), "import " + report["text"] + "\n")
        self.assertIn(b"tokens per second", plain.stderr)

    def test_longer_than_the_model_can_take(self):
        done = run("generate", BUNDLED, "--store", self.store, "--prompt", "x" * 12, "--tokens",
                   1013)
        self.assertEqual(done.returncode, 2)
        self.assertIn(b"1024 bytes or less", done.stderr)


def floats(count, seed):
    """BF16 values between -0.1 and 0.1."""
    values = (0.1 * math.sin(1.7 * i + seed) for i in range(count))
    return b"".join(struct.pack("<f", value)[2:] for value in values)


CONFIG = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2,
          "num_key_value_heads": 1, "head_dim": 32, "num_experts": 3, "num_experts_per_tok": 2,
          "moe_intermediate_size": 64, "max_position_embeddings": 512, "rope_theta": 10000.0,
          "rms_norm_eps": 1e-6, "vocab_size": 256, "hidden_act": "silu"}


def tiny_model():
    """A checkpoint of one layer with DeepSeek names."""
    shapes = {"embed.weight": [256, 64], "head.weight": [256, 64], "norm.weight": [64],
              "layers.0.attn_norm.weight": [64], "layers.0.ffn_norm.weight": [64],
              "layers.0.attn.wq.weight": [64, 64], "layers.0.attn.wk.weight": [32, 64],
              "layers.0.attn.wv.weight": [32, 64], "layers.0.attn.wo.weight": [64, 64],
              "layers.0.attn.q_norm.weight": [32], "layers.0.attn.k_norm.weight": [32],
              "layers.0.ffn.gate.weight": [3, 64]}
    tensors = {name: ("BF16", shape, floats(math.prod(shape), seed))
               for seed, (name, shape) in enumerate(shapes.items())}
    for name, (dtype, shape, data) in command.mxfp4_tensors(layers=1).items():
        tensors[name] = (dtype, shape, bytes([120] * len(data)) if "scale" in name else data)
    return tensors


class Malformed(unittest.TestCase):
    def setUp(self):
        self.root = tempfile.mkdtemp(prefix="hotplane-tinylm-")
        self.addCleanup(shutil.rmtree, self.root)
        self.model = os.path.join(self.root, "model")
        self.file = os.path.join(self.model, "model-00001-of-00001.safetensors")
        self.write(tiny_model())

    def write(self, tensors, config=None, edit=None):
        command.write_checkpoint(self.model, tensors, config=config or CONFIG)
        if edit is not None:
            with open(self.file, "wb") as out:
                out.write(command.safetensors_bytes(tensors, edit))

    def refuse(self, *words, code=3, precision="source"):
        done = run("eval", self.model, "--store", os.path.join(self.root, "store"), "--precision",
                   precision)
        self.assertEqual(done.returncode, code, done.stderr)
        for word in words:
            self.assertIn(word.encode(), done.stderr)
        self.assertEqual(done.stdout, b"")

    def test_the_model_itself_is_good(self):
        rows = must_json("eval", self.model, "--store", os.path.join(self.root, "store"),
                         "--arithmetic", "exact")["rows"]
        self.assertTrue(all(abs(row["loss"] - math.log(256)) < 0.5 for row in rows), rows)
        self.assertAlmostEqual(rows[0]["loss"], rows[1]["loss"], delta=1e-5)

    def test_what_is_built_and_repaired_is_told(self):
        store = os.path.join(self.root, "store")
        command_line = ("generate", self.model, "--store", store, "--precision", "base", "--tokens",
                        2)
        done = run(*command_line)
        self.assertEqual(done.returncode, 0, done.stderr)
        built = f"the store lacks base of layer 0: built from {self.model}".encode()
        self.assertIn(built, done.stderr)
        complete = run(*command_line)
        self.assertIn(b"the store is complete", complete.stderr)
        self.assertNotIn(b"built from " + self.model.encode(), complete.stderr)
        base, = (file for file in command.files_below(store) if file.endswith(".base"))
        for quiet in ((), ("-q",), ("--quiet",)):
            command.flip(base, 100)
            done = run(*command_line, *quiet)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(done.stdout, complete.stdout)
            self.assertIn(b"warning: layer 0 (base) is damaged and is built again", done.stderr)
            self.assertEqual(done.stderr.count(b"warning: "), 1)
            self.assertEqual(built in done.stderr, not quiet)
        # Its header is right: found out while it is read.
        command.flip(base, os.path.getsize(base) - 4096 + 5)
        done = run(*command_line, "-q")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(b"warning: layer 0 is built again from the checkpoint", done.stderr)
        self.assertNotIn(b"warning", run(*command_line, "-q").stderr)

    def test_the_page_names_the_keys_and_the_exit_codes(self):
        with open(os.path.join(SOURCE, "docs", "tinylm.md"), encoding="utf-8") as file:
            page = file.read()
        evaluated = must_json("eval", self.model, "--store", os.path.join(self.root, "store"),
                              "--precision", "base")
        generated = must_json("generate", self.model, "--precision", "source", "--tokens", 2)
        for keys in (evaluated, evaluated["rows"][0], generated):
            self.assertEqual([key for key in keys if f"`{key}`" not in page], [])
        codes = page.split("\nExit codes are")[1].split("\n\n")[0]
        self.assertEqual(re.findall(r"\b(\d) [a-z]", codes), ["0", "1", "2", "3", "4"])
        missing = ["eval", self.model, "--precision", "source", "--text", self.file + "x"]
        broken = os.path.join(self.root, "broken")
        shutil.copytree(self.model, broken)
        with open(os.path.join(broken, os.path.basename(self.file)), "r+b") as file:
            file.truncate(1000)
        for code, arguments in ((0, ["--help"]), (1, missing), (2, ["eval", "--what"]),
                                (1, ["eval", os.path.join(self.root, "none"), *missing[2:4]]),
                                (3, ["eval", broken, *missing[2:4]])):
            done = run(*arguments)
            self.assertEqual(done.returncode, code, (arguments, done.stderr))

    def test_truncated(self):
        with open(self.file, "rb") as file:
            whole = file.read()
        header = 8 + struct.unpack("<Q", whole[:8])[0]
        for length, words in ((0, "has no header"), (5, "has no header"), (8, "does not fit"),
                              (header - 1, "does not fit"), (header, "lies outside its file"),
                              (len(whole) - 1, "lies outside its file")):
            with open(self.file, "wb") as file:
                file.write(whole[:length])
            self.refuse(words, self.file)

    def test_missing_tensor(self):
        for name in tiny_model():
            tensors = tiny_model()
            del tensors[name]
            self.write(tensors)
            self.refuse(name.rsplit(".", 1)[0])

    def test_wrong_shape_or_type(self):
        for name, (dtype, shape, data) in tiny_model().items():
            halved = shape if dtype == "BF16" else [*shape[:-1], shape[-1] // 2]
            for other in ((dtype, [1, *shape], data), ("I16", halved, data)):
                self.write({**tiny_model(), name: other})
                self.refuse(name, "is not as the config says")

    def test_malformed_headers(self):
        edits = {
            "lies outside": lambda h: h["norm.weight"].update(data_offsets=[0, 1 << 62]),
            "malformed header entry": lambda h: h["norm.weight"].update(data_offsets=[-1, 128]),
            "has another size": lambda h: h["norm.weight"].update(shape=[1 << 40, 1 << 40]),
        }
        for words, edit in edits.items():
            self.write(tiny_model(), edit=edit)
            self.refuse(words, "norm.weight")
        for entry in (None, 7, [], {}, {"dtype": 3, "shape": [], "data_offsets": []},
                      {"dtype": "BF16", "shape": ["a"], "data_offsets": [0, 0]}):
            self.write(tiny_model(), edit=lambda h: h.update({"norm.weight": entry}))
            self.refuse("malformed header entry", "norm.weight")
        nested = b'{"a":' + b"[" * 200000 + b"]" * 200000 + b"}"
        for text in (b"[]", b"{", b"\xff\xfe", b"[" * 100000, nested):
            with open(self.file, "wb") as out:
                out.write(struct.pack("<Q", len(text)) + text)
            self.refuse("is not JSON")
        with open(self.file, "wb") as out:
            out.write(struct.pack("<Q", 1 << 63) + b"{}")
        self.refuse("does not fit in its file")

    def test_the_same_tensor_twice(self):
        shutil.copy(self.file, os.path.join(self.model, "other.safetensors"))
        self.refuse("is in two files")

    def test_config(self):
        for key, value in (("hidden_size", 65), ("hidden_size", 0), ("hidden_size", "64"),
                           ("hidden_size", 1 << 40), ("head_dim", 8), ("num_hidden_layers", -1),
                           ("num_key_value_heads", 3), ("num_experts_per_tok", 4),
                           ("rope_theta", None), ("rms_norm_eps", -1), ("vocab_size", 512),
                           ("hidden_act", "gelu"), ("tie_word_embeddings", True),
                           ("rope_scaling", {"factor": 4}), ("rope_parameters", {}),
                           ("rope_parameters", {"rope_theta": 1e4, "rope_type": "yarn"})):
            self.write(tiny_model(), {**CONFIG, key: value})
            self.refuse("rope" if key == "rope_parameters" else key, "config.json")
        self.write(tiny_model(), {**CONFIG, "num_hidden_layers": 2})
        self.refuse("layers.1.attn_norm.weight")
        for text in ("", "[1]", "{"):
            with open(os.path.join(self.model, "config.json"), "w") as out:
                out.write(text)
            self.refuse("is not JSON")
        os.remove(os.path.join(self.model, "config.json"))
        self.refuse("config.json", code=1)

    def test_values(self):
        for name, byte, words in (("layers.0.ffn.experts.1.w3.scale", 255, "is not a number"),
                                  ("norm.weight", 255, "loss is not a number"),
                                  ("layers.0.ffn.gate.weight", 255,
                                   "routing weight is not a number")):
            dtype, shape, data = tiny_model()[name]
            self.write({**tiny_model(), name: (dtype, shape, bytes([byte]) * len(data))})
            self.refuse(words)

    def test_command_line(self):
        store = os.path.join(self.root, "store")
        for arguments in ([], ["eval"], ["evil", self.model], ["eval", self.model],
                          ["eval", self.model, "--store", store, "--precision", "fp8"],
                          ["eval", self.model, "--store", store, "--share", "1.5"],
                          ["eval", self.model, "--store", store, "--threads", "0"],
                          ["eval", self.model, "--store", store, "--store", store],
                          ["eval", self.model, "--store"], ["eval", self.model, "--what"],
                          ["eval", self.model, store],
                          ["eval", self.model, "--precision", "source", "--text", self.file + "x"],
                          ["generate", self.model, "--precision", "source", "--prompt", ""]):
            done = run(*arguments)
            self.assertEqual(done.returncode, 1 if self.file + "x" in arguments else 2, arguments)
            self.assertEqual(done.stderr[:8], b"tinylm: ")
        short = os.path.join(self.root, "short")
        with open(short, "w") as out:
            out.write("x" * 511)
        done = run("eval", self.model, "--precision", "source", "--text", short)
        self.assertEqual((done.returncode, b"512 bytes or more" in done.stderr), (2, True))
        self.assertEqual(run("--help").returncode, 0)


if __name__ == "__main__":
    command.main(unittest)
