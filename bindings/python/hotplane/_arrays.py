"""Memory of the library as arrays of Python, and arrays of Python as memory for the library."""

from __future__ import annotations

import array
import ctypes
import sys
from ctypes import (CFUNCTYPE, POINTER, Structure, byref, c_int32, c_int64, c_uint8, c_uint16,
                    c_uint32, c_uint64, c_void_p)
from typing import TYPE_CHECKING, Any, Optional, Tuple

from ._library import OWNED, PARTS, check, library
from .errors import UsageError

if TYPE_CHECKING:
    from ._handle import Handle

DL_CPU, DL_CUDA = 1, 2
DELETER = CFUNCTYPE(None, c_void_p)


class DlTensor(Structure):
    _fields_ = [("data", c_void_p), ("device_type", c_int32), ("device_id", c_int32),
                ("dimensions", c_int32), ("type_code", c_uint8), ("type_bits", c_uint8),
                ("type_lanes", c_uint16), ("shape", POINTER(c_int64)),
                ("strides", POINTER(c_int64)), ("byte_offset", c_uint64)]


class DlManaged(Structure):
    _fields_ = [("tensor", DlTensor), ("context", c_void_p), ("deleter", DELETER)]


class DlManagedVersioned(Structure):
    _fields_ = [("major", c_uint32), ("minor", c_uint32), ("context", c_void_p),
                ("deleter", DELETER), ("flags", c_uint64), ("tensor", DlTensor)]


CAPSULES = {b"dltensor": DlManaged, b"dltensor_versioned": DlManagedVersioned}
NAME = b"dltensor"

_get_pointer = ctypes.PYFUNCTYPE(c_void_p, c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi))


class Owner:
    """What the library puts into `place` is freed with the last array that stands on this. A
    capsule does it, in C: a signal handler can come neither between the library's call and this,
    nor into the release, where what it raises would be lost.

    what    "tensor", "tensor_versioned" or "record"
    place   pointer for the library to fill, valid as long as this
    """

    def __init__(self, what: str) -> None:
        self.capsule = library().owner_new(OWNED[what])
        self.place = c_void_p.from_address(_get_pointer(id(self.capsule), b"hotplane_owner"))


def memory_at(address: int, count: int, owner: Any) -> memoryview:
    """Read-only bytes that keep `owner` alive."""
    exporter: Any = (c_uint8 * count).from_address(address)
    exporter.owner = owner
    return memoryview(exporter).cast("B").toreadonly()


class Part:
    """One part of all experts of a booted layer: [E, bytes of one expert] uint8, or float32 for
    biases, in the plane order of docs/format/planes.md.

    On the CPU it is a zero-copy, read-only buffer: `memoryview()`, `numpy()`, `part[expert]`,
    `numpy.asarray(part)`. On the CPU and on CUDA devices it is a DLPack tensor:
    `torch.from_dlpack(part)`, `numpy.from_dlpack(part)`. Consumers that speak DLPack 1.0 are told
    that it is read-only; for older ones DLPack has no word for it, and they must not write.

    Arrays that were made from it stay valid after `Engine.close()`: the memory is freed when the
    last of them is gone. New ones cannot be made then: UsageError.
    """

    dtype: str  # "uint8" or "float32"
    shape: Tuple[int, int]
    nbytes: int
    device: str  # "cpu" or "cuda:N"
    readonly = True

    def __init__(self, handle: Handle, index: int, name: str, shape: Tuple[int, int],
                 dtype: str, device: int, address: int) -> None:
        self._handle, self._index, self._address = handle, index, address
        self._device = (DL_CPU, 0) if device < 0 else (DL_CUDA, device)
        self.name, self.shape, self.dtype = name, shape, dtype
        self.nbytes = shape[0] * shape[1] * (1 if dtype == "uint8" else 4)
        self.device = "cpu" if device < 0 else f"cuda:{device}"

    def __repr__(self) -> str:
        return f"<hotplane.Part {self.name} {list(self.shape)} {self.dtype} on {self.device}>"

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, expert: int) -> memoryview:
        """The bytes of one expert, on the CPU."""
        if not -self.shape[0] <= expert < self.shape[0]:
            raise IndexError(f"expert {expert} of {self.shape[0]}")
        expert %= self.shape[0]
        stride = self.nbytes // self.shape[0]
        return self._bytes()[expert * stride:(expert + 1) * stride]

    @property
    def pointer(self) -> int:
        """Address in the memory of `device`, for kernels; valid until Engine.close()."""
        with self._handle.call():
            return self._address

    def _managed(self, versioned: bool) -> Owner:
        """Of a new DLManagedTensor(Versioned)."""
        owner = Owner("tensor_versioned" if versioned else "tensor")
        with self._handle.call() as engine:
            check(library().layer_dlpack(engine, self._index, PARTS[self.name], int(versioned),
                                         byref(owner.place)))
        return owner

    def _bytes(self) -> memoryview:
        if self._device[0] != DL_CPU:
            raise UsageError(f"{self.name} is on {self.device}, the host cannot read it",
                             advice="use DLPack: torch.from_dlpack(part)")
        return memory_at(self._address, self.nbytes, self._managed(False))

    def memoryview(self) -> Any:
        """A read-only memoryview of `shape`; UsageError where the layer is on a device."""
        return self._bytes().cast("B" if self.dtype == "uint8" else "f", self.shape)

    def __buffer__(self, flags: int) -> Any:  # the buffer protocol from Python 3.12 on
        return self.memoryview()

    def tobytes(self) -> bytes:
        """A copy."""
        return self._bytes().tobytes()

    def numpy(self) -> Any:
        """A read-only numpy array of `shape` on the same memory."""
        import numpy
        return numpy.asarray(self.memoryview())

    def __array__(self, dtype: Any = None, copy: Optional[bool] = None) -> Any:
        whole = self.numpy()
        if dtype is not None and dtype != whole.dtype:
            if copy is False:
                raise ValueError(f"{self.dtype} cannot become {dtype} without a copy")
            return whole.astype(dtype)
        return whole.copy() if copy else whole

    def __dlpack_device__(self) -> Tuple[int, int]:
        return self._device

    def __dlpack__(self, *, stream: Any = None, max_version: Optional[Tuple[int, int]] = None,
                   dl_device: Optional[Tuple[int, int]] = None,
                   copy: Optional[bool] = None) -> Any:
        """A capsule. No stream has to wait: all bytes of a published layer are there."""
        if copy or (dl_device is not None and tuple(dl_device) != self._device):
            raise BufferError(f"{self.name} on {self.device} is handed out where it lies, without "
                              "a copy")
        versioned = max_version is not None and max_version[0] >= 1
        capsule = self._managed(versioned).capsule
        library().owner_to_dlpack(capsule)
        return capsule


class Matrix:
    """Contiguous [rows, columns] of 4-byte items that the library may use while this lives."""

    def __init__(self, address: int, shape: Tuple[int, int], owner: Any) -> None:
        self.address, self.shape, self.owner = address, shape, owner

    def overlaps(self, other: Matrix) -> bool:
        ends = [m.address + 4 * m.shape[0] * m.shape[1] for m in (self, other)]
        return self.address < ends[1] and other.address < ends[0]


INT32_MIN, INT32_MAX = -2**31, 2**31 - 1


def _wrong(name: str, expected: str, found: Any) -> UsageError:
    return UsageError(f"{name} is not what moe_forward takes", expected=expected,
                      found=str(found))


def _two(name: str, shape: Any) -> Tuple[int, int]:
    if len(shape) != 2:
        raise _wrong(name, "two dimensions", f"shape {list(shape)}")
    return int(shape[0]), int(shape[1])


def is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _of_torch(value: Any, name: str, floats: bool) -> Matrix:
    import torch  # type: ignore[import-not-found, unused-ignore]
    if value.device.type != "cpu":
        raise _wrong(name, "a tensor on the CPU", f"on {value.device}")
    shape = _two(name, value.shape)
    value = value.detach()
    if floats:
        if not value.dtype.is_floating_point:
            raise _wrong(name, "floating point", value.dtype)
        value = value.to(torch.float32).contiguous()
    else:
        if value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool:
            raise _wrong(name, "integers", value.dtype)
        if value.dtype != torch.int32 and value.numel():
            _check_range(name, int(value.min()), int(value.max()))
        value = value.to(torch.int32).contiguous()
    return Matrix(value.data_ptr(), shape, value)


def _of_numpy(value: Any, name: str, floats: bool) -> Matrix:
    import numpy
    shape = _two(name, value.shape)
    # "V": bfloat16 and its like, which other packages add
    if value.dtype.kind not in ("fV" if floats else "iu"):
        raise _wrong(name, "floating point" if floats else "integers", value.dtype)
    if not floats and value.size:
        _check_range(name, int(value.min()), int(value.max()))
    value = numpy.ascontiguousarray(value, numpy.float32 if floats else numpy.int32)
    return Matrix(value.ctypes.data, shape, value)


def _check_range(name: str, lowest: int, highest: int) -> None:
    if lowest < INT32_MIN or highest > INT32_MAX:
        raise _wrong(name, "expert numbers", f"{lowest} to {highest}")


def _of_dlpack(value: Any, name: str, floats: bool) -> Matrix:
    """Borrowed: the capsule is not taken, so that its producer frees it."""
    if tuple(value.__dlpack_device__())[0] != DL_CPU:
        raise _wrong(name, "an array on the CPU", f"device {tuple(value.__dlpack_device__())}")
    capsule = value.__dlpack__()
    tensor = DlManaged.from_address(_get_pointer(id(capsule), NAME)).tensor
    shape = _two(name, [tensor.shape[i] for i in range(tensor.dimensions)])
    strides = [tensor.strides[i] for i in range(2)] if tensor.strides else [shape[1], 1]
    if (tensor.type_code, tensor.type_bits, tensor.type_lanes) != (2 if floats else 0, 32, 1):
        raise _wrong(name, "float32" if floats else "int32",
                     f"DLPack type {tensor.type_code} of {tensor.type_bits} bits")
    if strides != [shape[1], 1]:
        raise _wrong(name, "contiguous rows", f"strides {strides}")
    return Matrix((tensor.data or 0) + tensor.byte_offset, shape, (capsule, value))


def _of_buffer(value: Any, name: str, floats: bool) -> Matrix:
    view = memoryview(value)
    shape = _two(name, view.shape)
    code = view.format.lstrip("@=<")
    wanted, allowed = ("f", "fd") if floats else ("i", "bBhHiIlLqQ")
    if code not in allowed or len(code) != 1 or not view.c_contiguous:
        raise _wrong(name, f"a contiguous buffer of {'float32' if floats else 'int32'}",
                     f"format {view.format}")
    if code == wanted and not view.readonly:
        return Matrix(ctypes.addressof((c_uint8 * view.nbytes).from_buffer(view)), shape, view)
    try:
        flat: Any = view.cast("B")
        items = array.array(wanted, flat.cast(code).tolist() if view.nbytes else [])
    except OverflowError:
        raise _wrong(name, "numbers that fit in 32 bits", "a larger one") from None
    return Matrix(items.buffer_info()[0], shape, items)


def matrix_of(value: Any, name: str, floats: bool) -> Matrix:
    """The array as float32 or int32, converted where it is of another type. UsageError for what is
    no array on the CPU of two dimensions, and for numbers that do not fit."""
    if is_torch(value):
        return _of_torch(value, name, floats)
    if is_numpy(value):
        return _of_numpy(value, name, floats)
    try:
        return _of_buffer(value, name, floats)
    except TypeError:
        pass
    if hasattr(value, "__dlpack__"):
        return _of_dlpack(value, name, floats)
    raise _wrong(name, "a numpy array, a torch tensor, a buffer or DLPack", type(value).__name__)


class Output:
    """Where a result of [rows, columns] float32 goes, and how it gets there."""

    def __init__(self, out: Any, like: Any, shape: Tuple[int, int]) -> None:
        self._out, self._like, self._shape = out, like, shape
        if out is not None:
            self._check()
            self._direct = self._is_float32(out)
        target = out if out is not None and self._direct else self._fresh()
        self._target = target
        self.matrix = matrix_of(target, "out", True)

    def _check(self) -> None:
        out = self._out
        if is_torch(out):
            if out.device.type != "cpu" or not out.dtype.is_floating_point:
                raise _wrong("out", "floating point on the CPU", f"{out.dtype} on {out.device}")
            shape = tuple(out.shape)
        elif is_numpy(out):
            if not out.flags.writeable or out.dtype.kind not in "fV":
                raise _wrong("out", "a floating point array that can be written", out.dtype)
            shape = tuple(out.shape)
        else:
            try:
                view = memoryview(out)
            except TypeError:
                raise _wrong("out", "a numpy array, a torch tensor or a buffer",
                             type(out).__name__) from None
            if view.readonly or not view.c_contiguous or view.format.lstrip("@=<") != "f":
                raise _wrong("out", "a contiguous buffer of float32 that can be written",
                             f"format {view.format}")
            shape = tuple(view.shape or ())
        if shape != self._shape:
            raise _wrong("out", f"shape {list(self._shape)}", list(shape))

    @staticmethod
    def _is_float32(out: Any) -> bool:
        """Whether the library can write into it: float32 and contiguous."""
        if is_torch(out):
            import torch
            return out.dtype == torch.float32 and bool(out.is_contiguous())
        if is_numpy(out):
            return out.dtype.str == "<f4" and bool(out.flags.c_contiguous)
        return True

    def _fresh(self) -> Any:
        kind = self._like if self._out is None else self._out
        if is_torch(kind):
            import torch
            return torch.empty(self._shape, dtype=torch.float32)
        if is_numpy(kind):
            import numpy
            return numpy.empty(self._shape, numpy.float32)
        rows, columns = self._shape
        if rows == 0:
            raise _wrong("x", "one row or more in a buffer", list(self._shape))
        return memoryview(bytearray(4 * rows * columns)).cast("f", self._shape)

    def result(self) -> Any:
        """`out`, or a new array of x's kind and type."""
        if self._out is None:
            if is_torch(self._target):
                return self._target.to(self._like.dtype)
            if is_numpy(self._target):
                return self._target.astype(self._like.dtype, copy=False)
            return self._target
        if not self._direct:
            if is_torch(self._out):
                self._out.copy_(self._target)
            else:
                self._out[...] = self._target
        return self._out
