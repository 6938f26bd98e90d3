"""torch.ops.hotplane.moe_forward: the operator as a custom op, so that torch.compile passes it.

    import hotplane.integrations.torch as hotplane_torch
    number = hotplane_torch.register(engine)
    y = torch.ops.hotplane.moe_forward(x, ids, weights, number, layer, "base", "fast")
    torch.ops.hotplane.moe_forward_out(x, ids, weights, out, number, layer, "base", "fast")

Arguments and errors are those of `Engine.moe_forward`; tensors are on the CPU. The result has x's
dtype. There is no gradient.
"""

from __future__ import annotations

import itertools
import weakref

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


# torch leaves out arguments that have the schema's default.
def _moe_forward(x, ids, weights, engine, layer, precision="base",  # type: ignore
                 arithmetic="fast"):
    return _engine(engine).moe_forward(layer, x, ids, weights, precision=precision,
                                       arithmetic=arithmetic)


def _moe_forward_out(x, ids, weights, out, engine, layer, precision="base",  # type: ignore
                     arithmetic="fast"):
    _engine(engine).moe_forward(layer, x, ids, weights, out, precision=precision,
                                arithmetic=arithmetic)


_TENSORS = "Tensor x, Tensor ids, Tensor weights"
_CHOICE = "int engine, int layer, str precision='base', str arithmetic='fast'"
moe_forward = torch.library.custom_op(
    "hotplane::moe_forward", _moe_forward, mutates_args=(), device_types="cpu",
    schema=f"({_TENSORS}, {_CHOICE}) -> Tensor")
moe_forward_out = torch.library.custom_op(
    "hotplane::moe_forward_out", _moe_forward_out, mutates_args=("out",), device_types="cpu",
    schema=f"({_TENSORS}, Tensor(a!) out, {_CHOICE}) -> ()")


@moe_forward.register_fake
def _(x, ids, weights, engine, layer, precision="base", arithmetic="fast"):  # type: ignore
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@moe_forward_out.register_fake
def _(x, ids, weights, out, engine, layer, precision="base",  # type: ignore
      arithmetic="fast"):
    return None
