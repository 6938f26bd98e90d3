"""torch.ops.hotplane.moe_forward: the operator as a custom op, so that torch.compile passes it.

    import hotplane.integrations.torch as hotplane_torch
    number = hotplane_torch.register(engine)
    y = torch.ops.hotplane.moe_forward(x, ids, weights, number, layer, "base", "fast")
    torch.ops.hotplane.moe_forward_out(x, ids, weights, out, number, layer, "base", "fast")

Arguments and errors are those of `Engine.moe_forward`; a precision for each expert is the words
with commas between them. The result has x's dtype and device. On tensors of the GPU that the layer
lies on the op is enqueued on the current stream, and passes CUDA graphs. Tensors on a GPU whose
layer lies on the host are copied there and back, and the stream waits. There is no gradient.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any, Dict, Sequence, Union

import torch  # type: ignore[import-not-found, unused-ignore]

from .. import Engine, UsageError

_engines: weakref.WeakValueDictionary[int, Engine] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def register(engine: Engine) -> int:
    """The number that the ops know the engine by, while someone else holds it."""
    number = next(_numbers)
    _engines[number] = engine
    return number


def _engine(number: int) -> Engine:
    engine = _engines.get(number)
    if engine is None:
        raise UsageError(f"there is no registered engine {number}",
                         advice="keep the engine that register() was called with")
    return engine


@functools.lru_cache(maxsize=None)
def _precision(words: str) -> Union[str, Sequence[str]]:
    return words.split(",") if "," in words else words


def _compute(x: Any, ids: Any, weights: Any, out: Any, number: int, layer: int, precision: str,
             arithmetic: str) -> Any:
    engine = _engine(number)
    choice: Dict[str, Any] = {"precision": _precision(precision), "arithmetic": arithmetic}
    place = "cpu" if x.device.type == "cpu" else engine.layer_device(layer)
    if place == str(x.device):
        return engine.moe_forward(layer, x, ids, weights, out, **choice)
    if place != "cpu":
        raise UsageError(f"layer {layer} lies on another GPU than x", expected=place,
                         found=str(x.device), advice="move x there")
    host = engine.moe_forward(layer, x.cpu(), ids.cpu(), weights.cpu(), **choice)
    return host.to(x.device) if out is None else out.copy_(host)


# torch leaves out arguments that have the schema's default.
def _moe_forward(x, ids, weights, engine, layer, precision="base",  # type: ignore
                 arithmetic="fast"):
    return _compute(x, ids, weights, None, engine, layer, precision, arithmetic)


def _moe_forward_out(x, ids, weights, out, engine, layer, precision="base",  # type: ignore
                     arithmetic="fast"):
    _compute(x, ids, weights, out, engine, layer, precision, arithmetic)


_TENSORS = "Tensor x, Tensor ids, Tensor weights"
_CHOICE = "int engine, int layer, str precision='base', str arithmetic='fast'"
_DEVICES = ("cpu", "cuda")
moe_forward = torch.library.custom_op(
    "hotplane::moe_forward", _moe_forward, mutates_args=(), device_types=_DEVICES,
    schema=f"({_TENSORS}, {_CHOICE}) -> Tensor")
moe_forward_out = torch.library.custom_op(
    "hotplane::moe_forward_out", _moe_forward_out, mutates_args=("out",), device_types=_DEVICES,
    schema=f"({_TENSORS}, Tensor(a!) out, {_CHOICE}) -> ()")


@moe_forward.register_fake
def _(x, ids, weights, engine, layer, precision="base", arithmetic="fast"):  # type: ignore
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@moe_forward_out.register_fake
def _(x, ids, weights, out, engine, layer, precision="base",  # type: ignore
      arithmetic="fast"):
    return None
