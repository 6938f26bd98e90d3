"""The experts of transformers' Mixture-of-Experts models: found, compared with a store, replaced.

transformers 5 keeps a layer's routed experts in one module: parameters gate_up_proj and down_proj
of three dimensions, forward(hidden_states [T, H], top_k_index [T, k], top_k_weights [T, k]).
"""

from __future__ import annotations

import inspect
import re
from typing import Any, Dict, List, NamedTuple, Optional

import torch  # type: ignore[import-not-found, unused-ignore]

from .. import DataError, Engine, LayerInfo, UsageError

GATES = (-20.0, -3.0, -1.0, -0.25, 0.0, 0.5, 1.0, 2.5, 6.5, 7.5, 9.5, 10.5, 30.0)
UPS = (-30.0, -10.5, -7.5, -1.0, 0.0, 0.75, 1.0, 6.5, 9.5, 10.5, 30.0)
# Of a float32 sigmoid and its product; activations that differ do so in the second digit.
ACTIVATION_TOLERANCE = 1e-5
NAMES_OF_TOP_K = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")


class Place(NamedTuple):
    """Where a model has a layer's experts."""

    name: str  # "model.layers.3.mlp.experts"
    layer: int  # the model's number of it
    module: Any
    experts: int  # E
    hidden: int  # H
    intermediate: int  # I


class Experts(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """The routed experts of one layer, computed by an engine; without parameters.

    forward(hidden_states [..., H] floating, top_k_index [..., k] integer, top_k_weights [..., k]
    floating) -> [..., H] of hidden_states' dtype and device."""

    def __init__(self, place: Place, engine: Engine, number: int, ordinal: int, precision: str,
                 arithmetic: str) -> None:
        super().__init__()
        self.num_experts = place.experts
        self.hidden_dim = self.hidden_size = place.hidden
        self.intermediate_dim = self.intermediate_size = place.intermediate
        self.engine, self.number, self.ordinal = engine, number, ordinal
        self.precision, self.arithmetic = precision, arithmetic
        self.training = place.module.training

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        if self.training:
            raise UsageError("hotplane's experts cannot be trained", found="a model in training",
                             advice="call model.eval()")
        rows = hidden_states.reshape(-1, self.hidden_dim)
        top_k = top_k_index.shape[-1]
        y = torch.ops.hotplane.moe_forward(
            rows, top_k_index.reshape(-1, top_k), top_k_weights.reshape(-1, top_k), self.number,
            self.ordinal, self.precision, self.arithmetic)
        return y.reshape(hidden_states.shape)

    def extra_repr(self) -> str:
        same = "," not in self.precision
        return (f"layer={self.ordinal}, num_experts={self.num_experts}, hidden={self.hidden_dim}, "
                f"intermediate={self.intermediate_dim}, "
                f"precision={self.precision if same else 'mixed'}, arithmetic={self.arithmetic}")


def _is_experts(module: Any) -> bool:
    parameters = dict(module.named_parameters(recurse=False))
    return all(name in parameters and parameters[name].dim() == 3
               for name in ("gate_up_proj", "down_proj"))


def _place(name: str, module: Any) -> Place:
    if len(inspect.signature(module.forward).parameters) < 3:
        raise UsageError(f"{name} has an interface that hotplane does not know",
                         expected="forward(hidden_states, top_k_index, top_k_weights)",
                         found=f"{type(module).__name__}{inspect.signature(module.forward)}")
    if not getattr(module, "has_gate", True) or getattr(module, "has_post_expert_norm", False):
        raise UsageError(f"{name} is of a kind that hotplane does not compute",
                         expected="gate, up and down, without a norm of their own",
                         found=type(module).__name__)
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.)", name)
    if not numbers:
        raise UsageError(f"{name} does not say which layer it is",
                         expected="a module under layers.N", found=name)
    experts, rows, columns = module.gate_up_proj.shape
    if getattr(module, "is_transposed", False):
        rows, columns = columns, rows
    return Place(name, int(numbers[-1]), module, experts, columns, rows // 2)


def find(model: Any) -> List[Place]:
    """The experts of every MoE layer, in the order of the model. UsageError where there are none,
    or where some are of an interface that is not known."""
    places: List[Place] = []
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            raise UsageError("the model runs on hotplane already", found=name,
                             advice="call model.hotplane.detach() first")
        if _is_experts(module):
            places.append(_place(name, module))
        elif name.split(".")[-1] == "experts":
            raise UsageError(f"{name} has an interface that hotplane does not know",
                             expected="parameters gate_up_proj and down_proj of three dimensions",
                             found=type(module).__name__,
                             advice="load the model by hotplane.integrations.transformers."
                             "from_pretrained, which keeps quantizers from the experts")
    if not places:
        raise UsageError("the model has no routed experts", expected="a Mixture-of-Experts model",
                         found=type(model).__name__)
    indices = [place.layer for place in places]
    if len(set(indices)) != len(indices):
        raise UsageError("the model has several layers of one number",
                         found=", ".join(place.name for place in places),
                         advice="attach to the part that the store is of")
    return places


def _ranges(numbers: Any) -> str:
    found: List[List[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] + 1 == number:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found) or "none"


def _differs(what: str, store: Any, model: Any, expected: str, found: str,
             advice: str = "use the store that was built from this model's checkpoint"
             ) -> DataError:
    """Both are named: the store by its file, the model by its class."""
    return DataError(f"{what} of the model {type(model).__name__} is not that of the store",
                     file=str(store.path), expected=f"{expected} (store)", found=f"{found} (model)",
                     advice=advice)


def _activated(module: Any) -> Optional[Any]:
    """The module's activation of every pair of GATES and UPS; None where it cannot be told."""
    gate, up = (column.reshape(-1) for column in torch.meshgrid(
        torch.tensor(GATES, dtype=torch.float32, device="cpu"),
        torch.tensor(UPS, dtype=torch.float32, device="cpu"), indexing="ij"))
    both = (gate, up)
    joined = (torch.stack(both, -1).reshape(1, -1) if not getattr(module, "is_concatenated", True)
              else torch.cat(both).reshape(1, -1))
    try:
        if hasattr(module, "_apply_gate"):
            result = module._apply_gate(joined)
        else:
            result = (module.act_fn(gate) * up).reshape(1, -1)
    except (AttributeError, RuntimeError):
        return None
    return None if result.is_meta else result.reshape(-1).detach().double()


def _expected_activation(store: Any) -> Any:
    gate, up = (column.reshape(-1) for column in torch.meshgrid(
        torch.tensor(GATES, dtype=torch.float64, device="cpu"),
        torch.tensor(UPS, dtype=torch.float64, device="cpu"), indexing="ij"))
    if store.activation == "silu":
        return gate * torch.sigmoid(gate) * up
    limit = store.activation_limit
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if store.activation == "silu_clamped":
        return gate * torch.sigmoid(gate) * up
    return (up + 1) * gate * torch.sigmoid(store.activation_alpha * gate)


def _activation_words(source: Any, kind: str) -> str:
    values = [f"{name} {value:g}" for name, value in (
        ("limit", getattr(source, "activation_limit", getattr(source, "limit", 0))),
        ("alpha", getattr(source, "activation_alpha", getattr(source, "alpha", 0)))) if value]
    return " ".join([kind, *values])


def _check_activation(place: Place, store: Any, model: Any) -> None:
    found = _activated(place.module)
    expected = _expected_activation(store)
    if found is not None and found.shape == expected.shape:
        error = (found - expected).abs() / (1 + expected.abs())
        if bool((error <= ACTIVATION_TOLERANCE).all()):
            return
    kind = type(getattr(place.module, "act_fn", place.module)).__name__
    raise _differs(f"the activation of layer {place.layer}", store, model,
                   _activation_words(store, store.activation),
                   _activation_words(place.module, kind))


def _top_k(model: Any) -> int:
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in NAMES_OF_TOP_K:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return 0


def pair(places: List[Place], store: Any, model: Any) -> Dict[str, LayerInfo]:
    """Module name: the store's layer that is it. `store`: a Store or an Engine. DataError where
    the two are not of one model, naming both; UsageError for a shard of a store."""
    if store.world != 1:
        raise UsageError("the store is cut for tensor-parallel ranks", file=str(store.path),
                         expected="one that holds whole experts", found=f"world {store.world}",
                         advice="build it without --tp")
    infos = {info.model_index: info for info in store.describe_layers() if not info.mtp}
    indices = {place.layer for place in places}
    if set(infos) != indices:
        raise _differs("the list of MoE layers", store, model, f"layers {_ranges(infos)}",
                       f"layers {_ranges(indices)}")
    for place in places:
        info = infos[place.layer]
        shape = (info.experts, info.hidden, info.intermediate)
        if (place.experts, place.hidden, place.intermediate) != shape:
            raise _differs(f"layer {place.layer}", store, model,
                           "E={} H={} I={}".format(*shape),
                           f"E={place.experts} H={place.hidden} I={place.intermediate}")
        _check_activation(place, store, model)
    if 0 not in (store.top_k, _top_k(model)) and store.top_k != _top_k(model):
        raise _differs("the number of experts per token", store, model, str(store.top_k),
                       str(_top_k(model)))
    return {place.name: infos[place.layer] for place in places}


def check_booted(places: List[Place], pairs: Dict[str, LayerInfo], engine: Engine,
                 model: Any) -> None:
    """DataError where the engine lacks a layer or its biases, or has biases that the model has
    not."""
    booted = {layer.ordinal: layer for layer in engine.layers}
    absent = [pairs[place.name].ordinal for place in places
              if pairs[place.name].ordinal not in booted]
    if absent:
        raise DataError("the engine has not booted every layer of the model",
                        file=str(engine.path), expected=f"layers 0-{len(places) - 1}",
                        found=f"not {_ranges(absent)}", advice="boot without layers=")
    for place in places:
        biased = booted[pairs[place.name].ordinal].bias13 is not None
        words = ("without biases", "with biases")
        if biased != bool(getattr(place.module, "has_bias", False)):
            raise _differs(f"layer {place.layer}", engine, model, words[biased],
                           words[not biased])


def replace(model: Any, name: str, module: Any) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)
