"""transformers models on hotplane: the bundled model's loss and text, random models of every class
against their own dequantized selves, what is refused, and what detaching leaves.

HOTPLANE_SHARED names a folder with a Qwen3-MoE checkpoint and the longer text."""

import gc
import logging
import os
import unittest

import package
from package import WithStore, command

import hotplane

try:
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
except ImportError:
    torch = None

SHARED = os.environ.get("HOTPLANE_SHARED",
                        os.path.join(os.path.dirname(package.SOURCE), "shared"))
TEXT = os.path.join(package.SOURCE, "tests", "data", "eval.txt")
WINDOW_BYTES = 512
LOSS_TOLERANCE = 0.002  # nats per byte
# The bundled model has DeepSeek's names, and is a Qwen3-MoE otherwise.
KEYS = {r"^embed\.": "model.embed_tokens.", r"^head\.": "lm_head.", r"^norm\.": "model.norm.",
        r"^layers\.": "model.layers.", r"\.ffn\.": ".mlp.",
        r"\.attn\.(q|k)_norm\.": r".self_attn.\1_norm.", r"\.attn\.w(q|k|v|o)\.":
        r".self_attn.\1_proj.", r"\.attn_norm\.": ".input_layernorm.",
        r"\.ffn_norm\.": ".post_attention_layernorm."}

if torch is not None:
    import small_models
    from operator_bound import bound_of
    from hotplane.integrations import transformers as hotplane_transformers
    from hotplane.integrations.transformers import attach, from_pretrained
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

needs_transformers = unittest.skipIf(torch is None, "no torch, transformers or safetensors here")


def bundled_config():
    given = transformers.PretrainedConfig.get_config_dict(package.MODEL)[0]
    unlike = ("model_type", "expert_dtype", "quantization_config")
    return transformers.Qwen3MoeConfig(**{k: v for k, v in given.items() if k not in unlike})


def bundled(store, **options):
    return from_pretrained(package.MODEL, store, config=bundled_config(), key_mapping=KEYS,
                           **options)


def loss_of(model, path):
    """Mean nats per byte over windows that know nothing of each other, as tinylm has it."""
    with open(path, "rb") as file:
        data = bytearray(file.read())
    windows = torch.frombuffer(data, dtype=torch.uint8).long()
    windows = windows[:len(data) // WINDOW_BYTES * WINDOW_BYTES].reshape(-1, WINDOW_BYTES)
    total = 0.0
    with torch.no_grad():
        for batch in windows.to(model.device).split(8):
            scores = model(batch).logits[:, :-1].double().log_softmax(-1)
            total -= float(scores.gather(-1, batch[:, 1:, None]).sum())
    return total / (windows.shape[0] * (WINDOW_BYTES - 1))


def text_of(model, prompt, count=40):
    tokens = torch.tensor([list(prompt)]).to(model.device)
    return bytes(model.generate(tokens, max_new_tokens=count, do_sample=False)[0].tolist())


@needs_transformers
class Bundled(WithStore):
    LOSSES = {"base": 0.989929, "fp4": 0.912881}  # tests/data/eval.json

    def test_loss_and_text(self):
        for precision, expected in self.LOSSES.items():
            for dtype, arithmetic in ((torch.float32, "exact"), (torch.bfloat16, "fast")):
                model = bundled(self.store_path, precision=precision, dtype=dtype,
                                arithmetic=arithmetic)
                with model.hotplane:
                    self.assertEqual(model.dtype, dtype)
                    self.assertAlmostEqual(loss_of(model, TEXT), expected, delta=LOSS_TOLERANCE,
                                           msg=(precision, arithmetic))
                    text = text_of(model, b"class Store:\n    def ")
                    self.assertRegex(text.decode(), r"^class Store:\n    def \w+\(")

    def test_text_without_its_cache_is_the_same(self):
        model = bundled(self.store_path, precision="fp4", dtype=torch.float32)
        with model.hotplane:
            prompt = torch.tensor([list(b"import os\n")])
            texts = [model.generate(prompt, max_new_tokens=24, do_sample=False, use_cache=cache)
                     for cache in (True, False)]
        self.assertTrue(torch.equal(*texts))

    def test_a_map_of_precisions_is_between(self):
        names = {str(expert): "fp4" for expert in range(package.EXPERTS)}
        everything = {"default": "base", "layers": {n: "fp4" for n in range(package.LAYERS - 1)}}
        everything["layers"]["3"] = {"default": "base", **names}
        losses = {}
        for key, precision in (("mixed", {"default": "base", "layers": {0: "fp4", 1: "fp4"}}),
                               ("all", everything)):
            model = bundled(self.store_path, precision=precision, dtype=torch.float32,
                            arithmetic="exact")
            with model.hotplane:
                losses[key] = loss_of(model, TEXT)
        self.assertLess(losses["mixed"], self.LOSSES["base"] - 0.01)
        self.assertGreater(losses["mixed"], self.LOSSES["fp4"] + 0.01)
        self.assertAlmostEqual(losses["all"], self.LOSSES["fp4"], delta=1e-4)

    def test_in_one_graph(self):
        model = bundled(self.store_path, precision={"default": "base", "layers": {1: {3: "fp4"}}},
                        dtype=torch.float32)
        with model.hotplane, torch.no_grad():
            tokens = torch.tensor([list(b"def read(self):")])
            expected = model(tokens, use_cache=False).logits
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
            found = compiled(tokens, use_cache=False).logits
        # Fused or not, the dense part may round otherwise.
        self.assertLess(float((found - expected).abs().max()), 1e-3)

    @unittest.skipIf(torch is None or not torch.cuda.is_available(), "no CUDA device")
    def test_on_a_gpu(self):
        for device in ("cpu", "cuda"):
            for precision, expected in self.LOSSES.items():
                model = bundled(self.store_path, precision=precision, device=device).to("cuda")
                with self.subTest(experts=device, precision=precision), model.hotplane:
                    loss = loss_of(model, TEXT)
                    print(f"experts on {device} at {precision}: {loss:.6f}, to be {expected}")
                    self.assertAlmostEqual(loss, expected, delta=LOSS_TOLERANCE)
                    self.assertEqual(len(text_of(model, b"import ")), 47)


@needs_transformers
class Golden(WithStore):
    """The longer text. Its losses are those of docs/tinylm.md."""

    LOSSES = {"base": 1.6953, "fp4": 1.6162}

    def setUp(self):
        self.text = os.path.join(SHARED, "eval", "eval.txt")
        if not os.path.exists(self.text):
            self.skipTest(f"no {self.text}; HOTPLANE_SHARED names the folder of larger test data")

    def test_mxfp4(self):
        for precision, expected in self.LOSSES.items():
            model = bundled(self.store_path, precision=precision)
            with model.hotplane:
                self.assertAlmostEqual(loss_of(model, self.text), expected, delta=LOSS_TOLERANCE)

    def test_bf16(self):
        checkpoint = os.path.join(SHARED, "models", "tinymoe-bf16")
        store = os.path.join(self.root, "bf16")
        for precision, expected in self.LOSSES.items():
            model = from_pretrained(checkpoint, store, precision=precision)  # builds it, once
            with model.hotplane:
                self.assertIs(type(model), transformers.Qwen3MoeForCausalLM)
                self.assertAlmostEqual(loss_of(model, self.text), expected, delta=LOSS_TOLERANCE)


@needs_transformers
class Classes(WithStore):
    """One random model of each class, beside the same model of transformers with the experts that
    `hotplane export --hf` wrote."""

    def check_layers(self, ours, stock, exact, tokens):
        """Every layer's experts on the inputs that they get in the stock model, against float64."""
        inputs = {}
        hooks = [stock.get_submodule(name).register_forward_pre_hook(
            lambda _module, given, name=name: inputs.update({name: given}))
            for name in ours.hotplane.names]
        stock(tokens)
        for hook in hooks:
            hook.remove()
        self.assertEqual(len(inputs), len(ours.hotplane.names))
        for name, (x, ids, weights) in inputs.items():
            experts = ours.get_submodule(name)
            experts.arithmetic = "exact" if exact else "fast"
            found = experts(x.float(), ids, weights.float())
            bound, expected = bound_of(stock.get_submodule(name), x.float().double(), ids,
                                       weights.float().double(), exact)
            error = (found.double() - expected).abs()
            self.assertTrue(bool((error <= bound).all()), (name, float((error / bound).max())))
            self.assertGreater(float(error.max()), 0)  # it was computed by another way
            if not exact:
                # Half steps bound the worst case, far from the usual one. Of normal activations
                # int8 costs 0.5% of each product (docs/operator.md): three of them, of gate, up
                # and down, whose activations have longer tails.
                self.assertLess(float(error.pow(2).mean() / expected.pow(2).mean())**0.5, 0.02)

    def check(self, kind):
        checkpoint = small_models.make_checkpoint(kind, os.path.join(self.root, kind))
        store = os.path.join(self.root, kind + ".store")
        tokens = small_models.tokens()
        for precision in ("base", "fp4"):
            exported = f"{checkpoint}.{precision}"
            ours = from_pretrained(checkpoint, store, precision=precision, arithmetic="exact",
                                   dtype=torch.float32, experts_implementation="eager")
            command("export", store, "--hf", exported, "--checkpoint", checkpoint, "--precision",
                    precision, "-q")
            stock = type(ours).from_pretrained(exported, dtype=torch.float32,
                                               experts_implementation="eager")
            with ours.hotplane, torch.no_grad():
                found, single = ours(tokens).logits, stock(tokens).logits
                text, same = (model.generate(tokens, max_new_tokens=8, do_sample=False)
                              for model in (ours, stock))
                self.assertTrue(torch.equal(text, same))
                stock.double()
                double = stock(tokens).logits
                # Both are float32 with as many roundings in each sum, in another order: what
                # float32 costs the stock model is the measure, and it varies from model to model
                # by less than this.
                cost = float((single.double() - double).abs().max())
                self.assertLess(float((found.double() - double).abs().max()), 4 * cost)
                for exact in (True, False):
                    self.check_layers(ours, stock, exact, tokens)

    def test_qwen3_moe(self):
        self.check("qwen3_moe")

    def test_mixtral(self):
        self.check("mixtral")

    def test_deepseek_v3(self):
        self.check("deepseek_v3")

    def test_deepseek_v4(self):
        self.check("deepseek_v4")

    def test_glm4_moe(self):
        self.check("glm4_moe")

    def test_glm_moe_dsa(self):
        self.check("glm_moe_dsa")

    def test_gpt_oss(self):
        self.check("gpt_oss")


@needs_transformers
class WithModel(WithStore):
    """A random Qwen3-MoE, its checkpoint and its store."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.checkpoint = small_models.make_checkpoint("qwen3_moe",
                                                      os.path.join(cls.root, "checkpoint"))
        cls.store = os.path.join(cls.root, "qwen.store")
        command("build", cls.checkpoint, "--store", cls.store, "-q")
        cls.tokens = small_models.tokens()

    def stock(self, **changes):
        return small_models.model_of(small_models.config_of("qwen3_moe", **changes))

    def refused(self, kind, model, store=None, **options):
        """What the refusal says; the model is left as it was."""
        before = [type(module) for module in model.modules()]
        with self.assertRaises(kind) as caught:
            attach(model, store or self.store, **options)
        self.assertEqual([type(module) for module in model.modules()], before)
        self.assertFalse(hasattr(model, "hotplane"))
        return str(caught.exception)


class Mismatches(WithModel):
    def differs(self, model, store, *words):
        text = self.refused(hotplane.DataError, model, store)
        for word in (*words, type(model).__name__, str(store or self.store)):
            self.assertIn(word, text)

    def test_sizes(self):
        self.differs(self.stock(num_hidden_layers=3), None, "layers 0-1 (store)",
                     "layers 0-2 (model)")
        self.differs(self.stock(mlp_only_layers=[0]), None, "layers 1 (model)")
        self.differs(self.stock(num_experts=16), None, "E=8 H=128 I=64 (store)", "E=16")
        self.differs(self.stock(hidden_size=64, head_dim=16), None, "H=64")
        self.differs(self.stock(moe_intermediate_size=128), None, "I=128 (model)")
        self.differs(self.stock(num_experts_per_tok=3), None, "2 (store)", "3 (model)")

    def test_activations(self):
        self.differs(self.stock(hidden_act="gelu"), None, "silu (store)", "GELU")
        model = small_models.model_of(small_models.config_of("deepseek_v4"))
        self.differs(model, None, "silu (store)", "limit 1")

    def test_biases(self):
        gpt = small_models.make_checkpoint("gpt_oss", os.path.join(self.root, "gpt"))
        store = os.path.join(self.root, "gpt.store")
        command("build", gpt, "--store", store, "-q")
        self.differs(self.stock(), store, "swiglu_oai limit 7 alpha 1.702 (store)")
        model = small_models.model_of(small_models.config_of("gpt_oss"))
        for name in ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts"):
            model.get_submodule(name).has_bias = False
        self.differs(model, store, "with biases (store)", "without biases (model)")

    def test_stores_that_will_not_do(self):
        ranks = os.path.join(self.root, "ranks")
        small = {"moe_intermediate_size": 128}
        checkpoint = small_models.make_checkpoint("qwen3_moe", os.path.join(self.root, "wide"),
                                                  **small)
        command("build", checkpoint, "--store", ranks, "--tp", "2", "-q")
        self.assertIn("--tp", self.refused(hotplane.UsageError, self.stock(**small), ranks,
                                           rank=0))
        base = os.path.join(self.root, "base-only")
        command("build", self.checkpoint, "--store", base, "--tiers", "base", "-q")
        self.refused(hotplane.DataError, self.stock(), base, precision="fp4")
        with hotplane.boot(base) as engine:
            text = self.refused(hotplane.DataError, self.stock(), engine, precision="fp4")
            self.assertIn("layer 0 is wanted at FP4", text)
        with hotplane.boot(self.store, layers="1") as engine:
            self.assertIn("not 0", self.refused(hotplane.DataError, self.stock(), engine))

    def test_models_that_will_not_do(self):
        config = transformers.LlamaConfig(hidden_size=64, intermediate_size=64, vocab_size=8,
                                          num_hidden_layers=1, num_attention_heads=2)
        llama = transformers.LlamaForCausalLM(config).eval()
        self.assertIn("no routed experts", self.refused(hotplane.UsageError, llama))
        model = self.stock()
        model.model.layers[1].mlp.experts = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
        self.assertIn("model.layers.1.mlp.experts has an interface",
                      self.refused(hotplane.UsageError, model))
        model = self.stock()
        model.model.layers[0].mlp.experts.forward = lambda hidden_states: hidden_states
        self.assertIn("forward(hidden_states, top_k_index, top_k_weights)",
                      self.refused(hotplane.UsageError, model))
        both = torch.nn.ModuleDict({"a": self.stock(), "b": self.stock()}).eval()
        self.assertIn("several layers of one number", self.refused(hotplane.UsageError, both))
        self.assertIn("in training", self.refused(hotplane.UsageError, self.stock().train()))

    def test_options_that_cannot_be(self):
        for options in ({"precision": "fp8"}, {"arithmetic": "float"}, {"colour": 3},
                        {"precision": {"layers": {}}},
                        {"precision": {"default": "base", "layers": {2: "fp4"}}},
                        {"precision": {"default": "base", "layers": {"0": {"8": "fp4"}}}},
                        {"precision": {"default": "base", "layer": {}}},
                        {"precision": {"default": "base", "layers": {"00": "fp4"}}}):
            self.refused(hotplane.UsageError, self.stock(), **options)
        with hotplane.boot(self.store) as engine:
            self.refused(hotplane.UsageError, self.stock(), engine, workers=2)
            self.refused(hotplane.UsageError, self.stock(), engine, device="cpu")

    def test_checkpoints_that_will_not_do(self):
        with self.assertRaises(hotplane.UsageError):
            from_pretrained("Qwen/Qwen3-30B-A3B", self.store)
        other = small_models.make_checkpoint("qwen3_moe", os.path.join(self.root, "unpaired"),
                                             initializer_range=0.3)
        with self.assertRaises(hotplane.Error):
            from_pretrained(other, self.store, boot={"no_build": True})
        path = os.path.join(other, "model.safetensors")
        save_file({name: tensor for name, tensor in load_file(path).items()
                   if "layers.1.self_attn.k_proj" not in name}, path, {"format": "pt"})
        threads = package.settled()
        with hotplane.open(self.store) as store, \
                self.assertRaises(hotplane.DataError) as caught:
            from_pretrained(other, store)
        self.assertIn("model.layers.1.self_attn.k_proj", str(caught.exception))
        gc.collect()
        self.assertLessEqual(package.settled(threads), threads)


class Life(WithModel):
    def logits(self, model):
        with torch.no_grad():
            return model(self.tokens.to(model.device)).logits

    def test_detaching_gives_the_model_back(self):
        model = self.stock()
        before = self.logits(model)
        names = [name for name, _ in model.named_parameters()]
        attachment = attach(model, self.store, keep=True)
        self.assertIs(model.hotplane, attachment)
        self.assertEqual(len(attachment.names), 2)
        self.assertFalse([name for name, _ in model.named_parameters() if "experts" in name])
        self.assertFalse(torch.equal(self.logits(model), before))
        attachment.detach()
        attachment.detach()
        self.assertTrue(attachment.engine.closed)
        self.assertEqual([name for name, _ in model.named_parameters()], names)
        self.assertTrue(torch.equal(self.logits(model), before))
        self.assertFalse(hasattr(model, "hotplane"))
        model.save_pretrained(os.path.join(self.root, "saved"))

    def test_without_keep_the_experts_are_freed(self):
        model = self.stock()
        experts = model.model.layers[0].mlp.experts
        with attach(model, self.store):
            self.assertEqual(experts.gate_up_proj.device.type, "meta")
        self.assertIs(model.model.layers[0].mlp.experts, experts)

    def test_a_model_on_the_meta_device(self):
        with torch.device("meta"):
            model = transformers.Qwen3MoeForCausalLM(
                small_models.config_of("qwen3_moe")).to(torch.bfloat16).eval()
        with attach(model, self.store, keep=True) as attachment:
            model.to_empty(device="cpu")
            self.assertEqual(len(attachment.names), 2)
            self.assertFalse([name for name, _ in model.named_parameters() if "experts" in name])
            dense = self.stock().state_dict()
            model.load_state_dict({name: tensor for name, tensor in dense.items()
                                   if "experts" not in name})
            model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
            with from_pretrained(self.checkpoint, self.store).hotplane as other:
                self.assertTrue(torch.equal(self.logits(model), self.logits(other.model)))

    def test_no_expert_is_read_from_the_checkpoint(self):
        other = os.path.join(self.root, "without")
        command("export", self.store, "--hf", other, "--checkpoint", self.checkpoint,
                "--precision", "base", "-q")
        expected = from_pretrained(self.checkpoint, self.store)
        path = os.path.join(other, [name for name in os.listdir(other)
                                    if name.endswith(".safetensors")][0])
        save_file({name: tensor for name, tensor in load_file(path).items()
                   if ".experts." not in name}, path, {"format": "pt"})
        for name in os.listdir(other):
            if name.endswith("index.json"):
                os.remove(os.path.join(other, name))
        if os.path.basename(path) != "model.safetensors":
            os.rename(path, os.path.join(other, "model.safetensors"))
        with hotplane.open(self.store) as store:
            found, info = from_pretrained(other, store, output_loading_info=True)
        self.assertFalse(info["missing_keys"])
        alone = from_pretrained(other, self.store, boot={"checkpoint": None})
        for model in (found, alone):
            self.assertTrue(torch.equal(self.logits(model), self.logits(expected)))
        for model in (found, alone, expected):
            model.hotplane.detach()

    def test_engines_stay_their_owners(self):
        with hotplane.boot(self.store) as engine:
            first, second = self.stock(), self.stock()
            with attach(first, engine), attach(second, engine, arithmetic="exact"):
                a, b = self.logits(first), self.logits(second)
                self.assertFalse(torch.equal(a, b))
            self.assertFalse(engine.closed)
            with attach(first, engine):
                pass
            third = self.stock()
            with self.assertLogs("hotplane", "WARNING") as logged:
                attach(third, engine, precision="fp4")
            self.assertIn("delta_cache_bytes", logged.output[0])
        fourth = self.stock()
        with self.assertLogs("hotplane") as logged, attach(fourth, self.store, precision="fp4"):
            logging.getLogger("hotplane").info("nothing else")
            self.logits(fourth)
            self.assertGreater(fourth.hotplane.engine.cache_stats("delta")["slots_used"], 0)
        self.assertNotIn("delta_cache_bytes", " ".join(logged.output))
        with self.assertRaises(hotplane.UsageError):
            self.logits(third)

    def test_training_saving_and_attaching_twice(self):
        model = self.stock()
        with attach(model, self.store):
            model.train()
            with self.assertRaises(hotplane.UsageError):
                self.logits(model)
            model.eval()
            with self.assertRaises(hotplane.UsageError):
                model.save_pretrained(os.path.join(self.root, "never"))
            with self.assertRaises(hotplane.UsageError):
                attach(model, self.store)
            loss = model(self.tokens, labels=self.tokens).loss
            with self.assertRaises(RuntimeError):  # torch: the op has no gradient
                loss.backward()

    def test_hidden_states_of_every_dtype(self):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            model = self.stock().to(dtype)
            with attach(model, self.store):
                logits = self.logits(model)
            self.assertEqual(logits.dtype, dtype)
            self.assertTrue(bool(logits.isfinite().all()))

    def test_padding_on_the_left(self):
        model = self.stock().float()
        with attach(model, self.store), torch.no_grad():
            alone = model(self.tokens[:1, :9]).logits[0, -1]
            padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), self.tokens[:1, :9]], 1)
            mask = (torch.arange(13) >= 4).long()[None]
            places = (torch.arange(13) - 4).clamp(min=0)[None]
            found = model(padded, attention_mask=mask, position_ids=places).logits[0, -1]
        self.assertLess(float((found - alone).abs().max()), 1e-3)


@needs_transformers
class Documented(unittest.TestCase):
    def test_what_is_public_says_what_it_does(self):
        for name in ("attach", "from_pretrained", "Attachment"):
            self.assertTrue(getattr(hotplane_transformers, name).__doc__, name)


if __name__ == "__main__":
    package.main()
