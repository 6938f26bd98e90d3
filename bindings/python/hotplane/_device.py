"""The operator on torch tensors that are on the layer's own GPU: on the current stream, without a
copy to the host. Nothing here runs where there is no torch."""

from __future__ import annotations

import functools
from ctypes import byref, c_size_t
from typing import Any, NamedTuple, Optional, Sequence, Tuple, Union

from . import _library
from ._arrays import is_torch
from ._handle import Handle
from ._library import PRECISIONS, check, library
from ._options import word
from .errors import UsageError

ALIGNMENT = 16  # of every array, bytes
WORKSPACE_ZEROS = 256  # HOTPLANE_WORKSPACE_ZEROS
ID_MAX = 2**31 - 1

_chosen = word("precision", PRECISIONS)


class Place(NamedTuple):
    """A layer and where it is."""

    layer: int  # ordinal
    device: str  # "cuda:N"
    experts: int
    hidden: int


class Choice(NamedTuple):
    """How a layer is computed."""

    precision: Union[int, Tuple[int, ...]]  # of PRECISIONS: of all experts, or of each
    arithmetic: int  # of ARITHMETICS


def is_on_cuda(value: Any) -> bool:
    return is_torch(value) and value.device.type == "cuda"


@functools.lru_cache(maxsize=None)
def _table(precisions: Tuple[int, ...], device: str) -> Any:
    """A precision for each expert, on the device; made once, kept for ever."""
    import torch  # type: ignore[import-not-found, unused-ignore]
    return torch.tensor(precisions, dtype=torch.uint8, device=device)


def wanted(precision: Union[str, Sequence[str]]) -> Union[int, Tuple[int, ...]]:
    return _chosen(precision) if isinstance(precision, str) else tuple(map(_chosen, precision))


def _input(value: Any, name: str, shape: Tuple[int, int], dtype: Any, device: str) -> Any:
    """The tensor as the kernels read it: converted and copied on the current stream where it is of
    another type, not contiguous, or not aligned."""
    if not is_torch(value) or str(value.device) != device:
        raise UsageError(f"{name} is not where x is", expected=f"a tensor on {device}",
                         found=str(value.device) if is_torch(value) else type(value).__name__)
    if tuple(value.shape) != shape:
        raise UsageError(f"{name} has a wrong shape", expected=str(list(shape)),
                         found=str(list(value.shape)))
    if value.dtype.is_floating_point != dtype.is_floating_point or value.dtype.is_complex or str(
            value.dtype) == "torch.bool":
        raise UsageError(f"{name} is not what moe_forward takes", found=str(value.dtype),
                         expected="floating point" if dtype.is_floating_point else "integers")
    value = value.detach()
    if not dtype.is_floating_point and value.element_size() > 4:
        # Their low bits may be an expert's number: those that int32 does not have are none.
        import torch
        value = value.to(torch.int64).clamp(-1, ID_MAX)
    value = value.to(dtype).contiguous()
    return value.clone() if value.data_ptr() % ALIGNMENT else value


def _overlaps(a: Any, b: Any) -> bool:
    ends = [t.data_ptr() + t.numel() * t.element_size() for t in (a, b)]
    return bool(a.data_ptr() < ends[1] and b.data_ptr() < ends[0])


def _check_out(out: Any, x: Any, place: Place) -> None:
    if not is_torch(out) or str(out.device) != place.device or not out.dtype.is_floating_point:
        raise UsageError("out is not what moe_forward takes",
                         expected=f"floating point on {place.device}",
                         found=f"{out.dtype} on {out.device}" if is_torch(out)
                         else type(out).__name__)
    if tuple(out.shape) != (x.shape[0], place.hidden):
        raise UsageError("out has a wrong shape", expected=str([x.shape[0], place.hidden]),
                         found=str(list(out.shape)))
    if x.numel() and _overlaps(out, x):
        raise UsageError("out overlaps x", advice="give out memory of its own")


def _workspace(handle: Handle, place: Place, rows: int, top_k: int) -> Any:
    import torch
    size = c_size_t()
    with handle.call() as engine:
        check(library().moe_workspace_bytes(engine, place.layer, rows, top_k, byref(size)))
    # Of this call alone: a captured graph keeps its own.
    memory = torch.empty(size.value, dtype=torch.uint8, device=place.device)
    memory[:WORKSPACE_ZEROS].zero_()
    return memory


def _enqueue(handle: Handle, place: Place, given: Tuple[Any, Any, Any], out: Any,
             choice: Choice) -> Any:
    import torch
    x, ids, weights = given
    for value, name in ((x, "x"), (ids, "ids")):
        if not is_torch(value) or value.dim() != 2:
            raise UsageError(f"{name} is not what moe_forward takes",
                             expected="a tensor of two dimensions",
                             found=str(getattr(value, "shape", type(value).__name__)))
    rows, top_k = int(x.shape[0]), int(ids.shape[1])
    if out is not None:
        _check_out(out, x, place)
    bf16 = torch.bfloat16
    inputs = (_input(x, "x", (rows, place.hidden), bf16, place.device),
              _input(ids, "ids", (rows, top_k), torch.int32, place.device),
              _input(weights, "weights", (rows, top_k), torch.float32, place.device))
    direct = (out is not None and out.dtype == bf16 and out.is_contiguous()
              and out.data_ptr() % ALIGNMENT == 0)
    y = out if direct else torch.empty((rows, place.hidden), dtype=bf16, device=place.device)
    if rows and top_k:
        workspace = _workspace(handle, place, rows, top_k)
        call = _library.DeviceMoe(
            layer=place.layer, token_count=rows, top_k=top_k, arithmetic=choice.arithmetic,
            precision=PRECISIONS["base"], x=inputs[0].data_ptr(), ids=inputs[1].data_ptr(),
            weights=inputs[2].data_ptr(), y=y.data_ptr(), workspace=workspace.data_ptr(),
            workspace_bytes=workspace.numel(),
            stream=torch.cuda.current_stream(place.device).cuda_stream)
        if isinstance(choice.precision, int):
            call.precision = choice.precision
        else:
            call.precisions = _table(choice.precision, place.device).data_ptr()
        with handle.call() as engine:
            check(library().moe_forward_on_device(engine, byref(call)))
    else:
        y.zero_()
    if out is None:
        return y.to(x.dtype)
    return out if direct else out.copy_(y)


def forward(handle: Handle, place: Place, given: Tuple[Any, Any, Any], out: Any, choice: Choice,
            stream: Optional[Any]) -> Any:
    """As Engine.moe_forward, of (x, ids, weights) on place.device. stream: None, a
    torch.cuda.Stream, or the number of a CUDA stream."""
    import torch
    x, precision = given[0], choice.precision
    if str(x.device) != place.device:
        raise UsageError(f"layer {place.layer} is not where x is", expected=place.device,
                         found=str(x.device),
                         advice="move x there" if place.device != "cpu" else
                         "boot with device=, or give tensors on the CPU")
    if not isinstance(precision, int) and len(precision) != place.experts:
        raise UsageError("precision has another length than the layer has experts",
                         expected=str(place.experts), found=str(len(precision)))
    if isinstance(stream, int):
        stream = torch.cuda.ExternalStream(stream, device=place.device)
    with torch.cuda.device(place.device), torch.cuda.stream(stream):
        return _enqueue(handle, place, given, out, choice)


def stream_of(device: str, stream: Any) -> int:
    """The number of a CUDA stream: of a torch.cuda.Stream, or itself; None: torch's current stream
    of the device, the default stream where torch is not there."""
    import sys
    if stream is None:
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available():
            return 0
        stream = torch.cuda.current_stream(device)
    number = getattr(stream, "cuda_stream", stream)
    if not isinstance(number, int):
        raise UsageError("this is no CUDA stream", expected="a torch.cuda.Stream or its number",
                         found=type(stream).__name__)
    return number


def wait_for_all(device: str) -> None:
    """Before what may not run beside a call; UsageError while a graph is captured."""
    import sys
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return
    if torch.cuda.is_current_stream_capturing():
        raise UsageError("FP4 cannot be loaded while a graph is captured",
                         advice="call Engine.load_fp4, or the operator once, before")
    torch.cuda.synchronize(device)
