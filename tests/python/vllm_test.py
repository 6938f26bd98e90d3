"""--load-format hotplane: its options; and with vLLM, registered by the wheel's entry point, models
made and loaded on the CPU, as far as that goes without a GPU: attention is not run.

vLLM's own wheel is for GPUs: the platform of the CPU is set by hand, as its build for CPUs does."""

import importlib
import os
import re
import sys
import types
import unittest
from unittest import mock

import package
from package import WithStore

import hotplane
from hotplane.integrations._vllm_options import options_of

try:
    import torch
    import vllm
    import vllm.platforms
except ImportError:
    vllm = None

needs_vllm = unittest.skipIf(vllm is None, "no vllm in this Python")
SERIAL_TOLERANCE = 1e-6  # of the largest value: two routers in float32, in another order of sums
WHEEL = os.path.join(package.SOURCE, "bindings", "python", "wheel.py")


class Options(unittest.TestCase):
    def test_defaults_and_those_of_a_boot(self):
        self.assertEqual(options_of({"store": "/s"}),
                         {"store": "/s", "precision": "base", "arithmetic": "fast"})
        given = {"store": "/s", "workers": 3, "generation": "ab", "precision": {"default": "fp4"}}
        self.assertEqual(options_of(given), {**given, "arithmetic": "fast"})

    def test_refusals(self):
        for extra, word in (({}, "names no store"), (None, "names no store"),
                            ({"store": 7}, "names no store"),
                            ({"store": "/s", "num_threads": 4}, "num_threads"),
                            ({"store": "/s", "experts": [0, 4]}, "experts"),
                            ({"store": "/s", "arithmetic": "slow"}, "arithmetic")):
            with self.assertRaises(hotplane.UsageError) as caught:
                options_of(extra)
            self.assertIn(word, str(caught.exception))


class Precisions(WithStore):
    def test_words_that_every_layer_has(self):
        from hotplane.integrations._precisions import options_for_fp4, precisions_of
        with hotplane.open(self.store_path) as store:
            infos = store.describe_layers()
        self.assertEqual(precisions_of({"default": "base", "layers": {"1": "fp4"}}, infos)[1],
                         ["fp4"] * package.EXPERTS)
        for precision in ("fp4_or_base", {"default": "fp4_or_base"},
                          {"default": "base", "layers": {"1": {"3": "fp4_or_base"}}}):
            with self.assertRaisesRegex(hotplane.UsageError, "fp4_or_base",
                                        msg=precision) as caught:
                precisions_of(precision, infos)
            self.assertEqual(caught.exception.expected, "base or fp4")
        self.assertEqual(options_for_fp4("base", infos, None), {})
        self.assertEqual(options_for_fp4("fp4", infos, "cuda:0"), {"delta": True})
        for device in (None, "cpu"):
            self.assertGreater(options_for_fp4("fp4", infos, device)["delta_cache_bytes"], 0)


class Boots(WithStore):
    """The loader's boot, with stand-ins for what it imports."""

    def loader(self):
        def module(name, **values):
            made = types.ModuleType(name)
            vars(made).update(values)
            return made

        class BaseModelLoader:
            def __init__(self, load_config):
                self.load_config = load_config

        prefix = "vllm.model_executor"
        modules = [
            module("torch", cuda=types.SimpleNamespace(current_device=lambda: 3)),
            module("safetensors"), module("vllm"), module(prefix),
            module("vllm.distributed", get_tensor_model_parallel_rank=lambda: 0,
                   get_tensor_model_parallel_world_size=lambda: 1),
            module(prefix + ".model_loader", BaseModelLoader=BaseModelLoader,
                   register_model_loader=None),
            module(prefix + ".model_loader.weight_utils", download_weights_from_hf=None)]
        with mock.patch.dict(sys.modules, {made.__name__: made for made in modules}):
            sys.modules.pop("hotplane.integrations.vllm", None)
            return importlib.import_module("hotplane.integrations.vllm")

    def booted_with(self, loader, **extra):
        made = loader.Loader(types.SimpleNamespace(model_loader_extra_config={
            "store": self.store_path, **extra}))
        config = types.SimpleNamespace(
            device_config=types.SimpleNamespace(device_type="cuda"))
        model = types.SimpleNamespace(enforce_eager=True, model=package.MODEL)
        with mock.patch.object(hotplane.Store, "boot", autospec=True) as boot:
            made._boot(config, model)
        return {name: value for name, value in boot.call_args.kwargs.items() if name != "wait"}

    def test_each_rank_boots_onto_its_gpu(self):
        loader = self.loader()
        self.addCleanup(delattr, hotplane.integrations, "vllm")
        self.assertEqual(self.booted_with(loader, device="cuda", precision="fp4"),
                         {"device": "cuda:3", "delta": True})
        self.assertEqual(self.booted_with(loader, device="cuda:1"), {"device": "cuda:1"})
        self.assertEqual(self.booted_with(loader, device="cpu"), {"device": "cpu"})
        self.assertEqual(set(self.booted_with(loader, precision="fp4")),
                         {"delta", "delta_cache_bytes"})


@needs_vllm
class Plugin(WithStore):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        from vllm.platforms.cpu import CpuPlatform
        vllm.platforms._current_platform = CpuPlatform()
        import small_models
        from vllm.distributed import (ensure_model_parallel_initialized,
                                      init_distributed_environment)
        from vllm.engine.arg_utils import EngineArgs
        cls.models, cls.arguments = small_models, EngineArgs
        cls.register_by_entry_point()
        config = cls.config("qwen3_moe")
        with vllm.config.set_current_vllm_config(config):
            init_distributed_environment(1, 0, f"file://{cls.root}/rendezvous", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)

    @classmethod
    def register_by_entry_point(cls):
        """As in a process of vLLM with the wheel installed."""
        from vllm.plugins import load_general_plugins
        with open(WHEEL, encoding="utf-8") as file:
            points = re.search(r"(\[vllm\.general_plugins\].*?)\"\"\"", file.read(), re.S).group(1)
        folder = os.path.join(cls.root, "site", "hotplane-0.dist-info")
        os.makedirs(folder)
        for name, text in (("METADATA", "Metadata-Version: 2.1\nName: hotplane\nVersion: 0\n"),
                           ("entry_points.txt", points)):
            with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                file.write(text)
        sys.path.insert(0, os.path.dirname(folder))
        load_general_plugins()

    @classmethod
    def config(cls, kind, **extra):
        folder = os.path.join(cls.root, kind)
        if not os.path.exists(folder):
            cls.models.make_checkpoint(kind, folder)
        dtype = "bfloat16" if kind == "gpt_oss" else "float32"  # what vLLM has for its MXFP4
        extra = {"store": folder + ".store", "precision": "fp4", "arithmetic": "exact", **extra}
        return cls.arguments(
            model=folder, load_format="hotplane", model_loader_extra_config=extra, dtype=dtype,
            enforce_eager=True, skip_tokenizer_init=True, max_model_len=128).create_engine_config()

    @staticmethod
    def load(config):
        from vllm.model_executor.model_loader import get_model
        with vllm.config.set_current_vllm_config(config):
            return get_model(vllm_config=config)

    def check(self, kind):
        from hotplane.integrations.transformers import from_pretrained
        from vllm.forward_context import set_forward_context
        config = self.config(kind)
        model = self.load(config)
        self.addCleanup(model.hotplane.engine.close)
        self.assertFalse([name for name, _ in model.named_parameters()
                          if re.search(r"routed_experts|\.experts\.", name)])
        other = from_pretrained(config.model_config.model, model.hotplane.engine, precision="fp4",
                                arithmetic="exact", dtype=config.model_config.dtype)
        self.assertEqual(len(model.hotplane.layers), len(other.hotplane.names))
        x = torch.randn(7, self.models.HIDDEN, generator=torch.Generator().manual_seed(3)).to(
            config.model_config.dtype)
        for ours, theirs in zip(model.hotplane.layers, other.hotplane.names):
            blocks = [part.get_submodule(name.rpartition(".")[0])
                      for part, name in ((model, ours), (other, theirs))]
            with vllm.config.set_current_vllm_config(config), torch.no_grad(), \
                    set_forward_context(None, config):
                found, expected = blocks[0](x.clone()), blocks[1](x[None])
            if isinstance(expected, tuple):  # gpt-oss: with the router's scores
                expected = expected[0]
            error = (found - expected.reshape(found.shape)).abs().max()
            self.assertLessEqual(float(error), SERIAL_TOLERANCE * float(expected.abs().max()))

    def test_qwen3_moe(self):
        self.check("qwen3_moe")

    def test_mixtral(self):
        self.check("mixtral")

    def test_deepseek_v3(self):
        self.check("deepseek_v3")

    def test_glm4_moe(self):
        self.check("glm4_moe")

    def test_gpt_oss(self):
        self.check("gpt_oss")

    def test_what_is_refused(self):
        from vllm.model_executor.model_loader import get_model_loader
        with self.assertRaisesRegex(hotplane.UsageError, "color"):
            get_model_loader(self.config("qwen3_moe", color=1).load_config)
        self.load(self.config("qwen3_moe")).hotplane.engine.close()
        store = os.path.join(self.root, "qwen3_moe.store")
        with self.assertRaisesRegex(hotplane.DataError, "(?s)of vLLM is not that of the store.*"
                                    r"qwen3_moe\.store"):
            self.load(self.config("gpt_oss", store=store, generation=self.generation(store)))
        mixtral = self.config("mixtral", store=store, generation=self.generation(store),
                              checkpoint=os.path.join(self.root, "qwen3_moe"))
        mixtral.model_config.hf_text_config.num_experts_per_tok = 3
        mixtral.model_config.hf_config.num_experts_per_tok = 3
        with self.assertRaisesRegex(hotplane.DataError, "(?s)experts per token.*3 .vLLM"):
            self.load(mixtral)

    @staticmethod
    def generation(store):
        with hotplane.open(store) as opened:
            return opened.generation

    def test_graphs_and_ranks(self):
        from hotplane.integrations import vllm as loader
        config = self.config("qwen3_moe")
        self.load(config).hotplane.engine.close()
        made = loader.Loader(config.load_config)
        on_gpu = types.SimpleNamespace(device_config=types.SimpleNamespace(device_type="cuda"))
        graphs = types.SimpleNamespace(enforce_eager=False, model=config.model_config.model)
        with self.assertRaisesRegex(hotplane.UsageError, "enforce-eager"):
            made._boot(on_gpu, graphs)
        ranks = os.path.join(self.root, "ranks")
        package.command("build", package.MODEL, "--store", ranks, "--tp", "2", "-q")
        made = loader.Loader(types.SimpleNamespace(model_loader_extra_config={"store": ranks}))
        eager = types.SimpleNamespace(enforce_eager=True, model=package.MODEL)
        with mock.patch.multiple(loader, get_tensor_model_parallel_rank=lambda: 1,
                                 get_tensor_model_parallel_world_size=lambda: 2):
            made._boot(on_gpu, eager)
        with made.engine as engine:
            engine.wait()
            self.assertEqual((engine.rank, engine.world), (1, 2))


if __name__ == "__main__":
    package.main()
