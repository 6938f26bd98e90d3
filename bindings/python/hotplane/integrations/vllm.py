"""vLLM with its routed experts from a hotplane store. Experimental.

    vllm serve /models/Qwen3-30B-A3B --load-format hotplane --enforce-eager \\
        --model-loader-extra-config '{"store": "/store", "precision": "fp4"}'

vLLM calls `register` by the entry point vllm.general_plugins of this package. Routed experts get no
tensors in vLLM and none is read from the checkpoint; everything else is loaded as vLLM wants it.
"""

from __future__ import annotations

import glob
import json
import os
from typing import Any, Iterator, Tuple

import safetensors  # type: ignore[import-not-found, unused-ignore]
import torch  # type: ignore[import-not-found, unused-ignore]
from vllm.distributed import (  # type: ignore[import-not-found, unused-ignore]
    get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size)
from vllm.model_executor.model_loader import (  # type: ignore[import-not-found, unused-ignore]
    BaseModelLoader, register_model_loader)
from vllm.model_executor.model_loader.weight_utils import (  # type: ignore
    download_weights_from_hf)

from .. import DataError, UsageError, open as open_store
from .._library import logger
from ._precisions import options_for_fp4
from ._vllm_options import OPENING, OWN, options_of

LOAD_FORMAT = "hotplane"


def _dense_tensors(folder: str) -> Iterator[Tuple[str, Any]]:
    """Every tensor of the checkpoint but those of routed experts, which are not read."""
    index = os.path.join(folder, "model.safetensors.index.json")
    if os.path.exists(index):
        with open(index, encoding="utf-8") as file:
            names = sorted(set(json.load(file)["weight_map"].values()))
        paths = [os.path.join(folder, name) for name in names]
    else:
        paths = sorted(glob.glob(os.path.join(glob.escape(folder), "*.safetensors")))
    if not paths:
        raise UsageError("the checkpoint has no safetensors files", file=folder)
    for path in paths:
        with safetensors.safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():
                if ".experts." not in name:
                    yield name, tensors.get_tensor(name)


def _check_loaded(model: Any, loaded: Any, folder: str) -> None:
    """As vLLM's own loader has it: models that are not quantized tell what they loaded."""
    if loaded is None:
        return
    absent = sorted({name for name, _ in model.named_parameters()} - set(loaded))
    if absent:
        raise DataError("the checkpoint does not have what the model needs", file=folder,
                        expected="every tensor but those of routed experts",
                        found=f"not {', '.join(absent[:4])} ({len(absent)} in all)")


class Loader(BaseModelLoader):  # type: ignore[misc, unused-ignore]
    """`--load-format hotplane`."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self.options = options_of(load_config.model_loader_extra_config)
        self.engine: Any = None
        self.quantized = False

    def _folder(self, model_config: Any) -> str:
        if os.path.isdir(model_config.model):
            return str(model_config.model)
        return str(download_weights_from_hf(
            model_config.model, self.load_config.download_dir, ["*.safetensors"],
            model_config.revision, ignore_patterns=self.load_config.ignore_patterns))

    def download_model(self, model_config: Any) -> None:
        self._folder(model_config)

    def _boot(self, vllm_config: Any, model_config: Any) -> None:
        """Starts it; load_weights waits."""
        if (vllm_config.device_config.device_type == "cuda" and not model_config.enforce_eager
                and self.options.get("device") in (None, "cpu")):
            raise UsageError("experts on the host cannot be captured in CUDA graphs",
                             advice="give --enforce-eager")
        options = {name: value for name, value in self.options.items() if name not in OWN}
        if options.get("device") == "cuda":  # of several ranks each has a GPU
            options["device"] = f"cuda:{torch.cuda.current_device()}"
        opening = {"checkpoint": self._folder(model_config),
                   "rank": get_tensor_model_parallel_rank(),
                   "world": get_tensor_model_parallel_world_size()}
        opening.update({name: options.pop(name) for name in OPENING if name in options})
        with open_store(self.options["store"], **opening) as store:
            wanted = options_for_fp4(self.options["precision"], store.describe_layers(),
                                     options.get("device"))
            self.engine = store.boot(wait=False, **{**wanted, **options})

    def create_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        from . import _vllm_experts
        self._boot(vllm_config, model_config)
        try:
            experts = _vllm_experts.Experts(self.engine, self.options["precision"],
                                            self.options["arithmetic"])
            self.quantized = vllm_config.quant_config is not None
            with experts.given_to(vllm_config):
                model = super().create_model(vllm_config, model_config, prefix)
            if not experts.layers:
                raise UsageError("the model has no routed experts", found=type(model).__name__)
        except BaseException:
            self.engine.close()
            raise
        model.hotplane = experts
        return model

    def load_weights(self, model: Any, model_config: Any) -> None:
        experts = getattr(model, "hotplane", None)
        if experts is None:
            raise UsageError("the model was not made by this loader",
                             advice="weights cannot be loaded into it in place")
        folder = self._folder(model_config)
        loaded = model.load_weights(_dense_tensors(folder))
        if not self.quantized:
            _check_loaded(model, loaded, folder)
        experts.engine.wait()
        experts.check_booted()


def register() -> None:
    """Makes vLLM know the load format. Once more does nothing."""
    from vllm.model_executor import model_loader  # type: ignore
    formats = getattr(model_loader, "_LOAD_FORMAT_TO_MODEL_LOADER", {})
    if formats.get(LOAD_FORMAT) is not Loader:
        register_model_loader(LOAD_FORMAT)(Loader)
        logger.debug("vLLM knows --load-format %s", LOAD_FORMAT)
