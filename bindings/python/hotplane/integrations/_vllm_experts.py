"""The routed experts of vLLM's models, computed by an engine: a quantization method without weights
for vLLM's RoutedExperts."""

from __future__ import annotations

import contextlib
import re
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch  # type: ignore[import-not-found, unused-ignore]
from vllm.model_executor.layers.fused_moe import (  # type: ignore[import-not-found, unused-ignore]
    FusedMoEMethodBase, RoutedExperts)
from vllm.model_executor.layers.linear import (  # type: ignore[import-not-found, unused-ignore]
    LinearBase, UnquantizedLinearMethod)
from vllm.model_executor.layers.quantization.base_config import (  # type: ignore
    QuantizationConfig)

from .. import DataError, Engine, LayerInfo, UsageError
from . import torch as hotplane_torch
from ._precisions import FP4, joined, precisions_of

# What vLLM's kernels take for swigluoai where the model says nothing.
OAI_LIMIT, OAI_ALPHA = 7.0, 1.702


class Method(FusedMoEMethodBase):  # type: ignore[misc, unused-ignore]
    """One layer's experts. Makes no parameters."""

    def __init__(self, moe: Any, number: int, ordinal: int, precision: str,
                 arithmetic: str) -> None:
        super().__init__(moe)
        self.choice = (number, ordinal, precision, arithmetic)

    def create_weights(self, layer: Any, *_sizes: Any, **_attributes: Any) -> None:
        return

    def maybe_roundup_sizes(self, hidden_size: int, intermediate_size_per_partition: int,
                            *_arguments: Any, **_options: Any) -> Tuple[int, int]:
        return hidden_size, intermediate_size_per_partition

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None

    def apply(self, layer: Any, x: Any, topk_weights: Any, topk_ids: Any,
              *_shared: Any, **_options: Any) -> Any:
        return torch.ops.hotplane.moe_forward(x, topk_ids, topk_weights, *self.choice)


class Unquantized(QuantizationConfig):  # type: ignore[misc, unused-ignore]
    """Of a model that has none: everything but the routed experts stays as it is."""

    def get_name(self) -> str:
        return "hotplane"

    def get_supported_act_dtypes(self) -> List[Any]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> List[str]:
        return []

    @classmethod
    def from_config(cls, config: Dict[str, Any]) -> Unquantized:
        return cls()

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


def _activation(layer: Any) -> Tuple[str, float, float]:
    """Kind, limit and alpha as a store has them."""
    kind = str(getattr(layer.activation, "value", layer.activation))
    limit, alpha = (float(getattr(layer, name, None) or 0)
                    for name in ("swiglu_limit", "swiglu_alpha"))
    if kind == "silu":
        return ("silu_clamped", limit, 0.0) if limit else ("silu", 0.0, 0.0)
    if kind in ("swigluoai", "swigluoai_uninterleave"):
        return "swiglu_oai", limit or OAI_LIMIT, alpha or OAI_ALPHA
    return kind, limit, alpha


class Experts:
    """An engine, and the layers of a vLLM model that it computes.

    layers  name of vLLM's module: the store's layer
    """

    def __init__(self, engine: Engine, precision: Any, arithmetic: str) -> None:
        self.engine, self.arithmetic = engine, arithmetic
        infos = engine.describe_layers()
        self.tables = precisions_of(precision, infos)
        # MTP layers of some models are numbered from 0 again; the main layers are meant then.
        self.infos = {info.model_index: info for info in reversed(infos)}
        self.layers: Dict[str, LayerInfo] = {}
        self._biased: Dict[str, bool] = {}
        self._number = hotplane_torch.register(engine)

    def _differs(self, name: str, expected: str, found: str) -> DataError:
        return DataError(f"{name} of vLLM is not that of the store", file=str(self.engine.path),
                         expected=f"{expected} (store)", found=f"{found} (vLLM)",
                         advice="use the store that was built from this model's checkpoint")

    def _check(self, layer: Any, name: str, info: LayerInfo) -> None:
        moe = layer.moe_config
        parallel = moe.moe_parallel_config
        if parallel.use_ep or parallel.enable_eplb or layer.apply_router_weight_on_input:
            raise UsageError(f"{name} is run in a way that hotplane does not know",
                             expected="tensor parallelism alone",
                             found="expert parallelism" if parallel.use_ep else
                             "balanced experts" if parallel.enable_eplb else
                             "router weights on the input")
        shape = (info.experts, info.hidden, info.intermediate)
        found = (moe.num_experts, moe.hidden_dim, moe.intermediate_size_per_partition)
        if shape != found:
            raise self._differs(name, "E={} H={} I={}".format(*shape), "E={} H={} I={}".format(
                *found))
        store = self.engine
        kinds = ((store.activation, store.activation_limit, store.activation_alpha),
                 _activation(layer))
        if kinds[0] != kinds[1]:
            raise self._differs(f"the activation of {name}", *(
                "{} limit {:g} alpha {:g}".format(*kind) for kind in kinds))
        if store.top_k not in (0, moe.experts_per_token):
            raise self._differs(f"the number of experts per token of {name}", str(store.top_k),
                                str(moe.experts_per_token))
        if FP4 in self.tables[info.ordinal] and info.delta in ("damaged", "unreadable"):
            raise DataError(f"layer {info.ordinal} is wanted at FP4 and cannot be had",
                            file=str(store.path), found=f"a delta tier that is {info.delta}")

    def method(self, layer: Any, name: str) -> Method:
        """DataError where layer and store differ, naming both."""
        numbers = re.findall(r"(?:^|\.)(\d+)(?=\.)", name)
        info: Optional[LayerInfo] = self.infos.get(int(numbers[-1])) if numbers else None
        if info is None:
            raise self._differs(name, f"layers {sorted(self.infos)}", "another layer")
        self._check(layer, name, info)
        self.layers[name] = info
        self._biased[name] = bool(layer.moe_config.has_bias)
        return Method(layer.moe_config, self._number, info.ordinal,
                      joined(self.tables[info.ordinal]), self.arithmetic)

    def check_booted(self) -> None:
        """DataError where the engine lacks a layer, or has other biases than the model."""
        booted = {layer.ordinal: layer for layer in self.engine.layers}
        words = ("without biases", "with biases")
        for name, info in self.layers.items():
            layer = booted.get(info.ordinal)
            if layer is None:
                raise DataError("the engine has not booted every layer of the model",
                                file=str(self.engine.path), expected=f"layer {info.ordinal}",
                                found=name, advice="boot without layers")
            if (layer.bias13 is not None) != self._biased[name]:
                raise self._differs(name, words[layer.bias13 is not None],
                                    words[self._biased[name]])

    @contextlib.contextmanager
    def given_to(self, vllm_config: Any) -> Iterator[None]:
        """Models that are made within get their routed experts from here, and all else from the
        quantization that they have."""
        own = vllm_config.quant_config
        config: Any = Unquantized() if own is None else own
        others = config.get_quant_method

        def get_quant_method(layer: Any, prefix: str) -> Any:
            if isinstance(layer, RoutedExperts):
                return self.method(layer, prefix)
            return others(layer, prefix)

        config.get_quant_method = get_quant_method
        vllm_config.quant_config = config
        try:
            yield
        finally:
            del config.get_quant_method
            vllm_config.quant_config = own
