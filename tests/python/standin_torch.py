"""As much of torch as hotplane's calls on a GPU need, over host memory: what the fake CUDA driver
of src/device/fake takes for memory of its device. For tests where there is no torch."""

import contextlib
import ctypes
import struct
import types

PAGE = 256
# Of torch, memory that is given back is used again in the order of its stream; here it is kept.
KEPT = []


class Dtype:
    def __init__(self, name, code, size):
        self.name, self.code, self.size = name, code, size
        self.is_floating_point = code in "fdB"
        self.is_complex = False

    def __repr__(self):
        return "torch." + self.name


# "B": the upper half of a float32
float32, bfloat16 = Dtype("float32", "f", 4), Dtype("bfloat16", "B", 2)
int32, int64, uint8 = Dtype("int32", "i", 4), Dtype("int64", "q", 8), Dtype("uint8", "b", 1)


def to_bfloat16(value):
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


class Tensor:
    def __init__(self, dtype, device, shape, offset=0):
        self.dtype, self.shape = dtype, tuple(shape)
        self.device = Place(device)
        self.memory = ctypes.create_string_buffer(self.numel() * dtype.size + 2 * PAGE)
        KEPT.append(self.memory)
        self.offset = -ctypes.addressof(self.memory) % PAGE + offset

    def numel(self):
        count = 1
        for size in self.shape:
            count *= size
        return count

    def dim(self):
        return len(self.shape)

    def element_size(self):
        return self.dtype.size

    def data_ptr(self):
        return ctypes.addressof(self.memory) + self.offset

    def is_contiguous(self):
        return True

    def detach(self):
        return self

    def contiguous(self):
        return self

    def values(self):
        """What is there when all work is done."""
        synchronize()
        raw = ctypes.string_at(self.data_ptr(), self.numel() * self.dtype.size)
        if self.dtype is bfloat16:
            return [struct.unpack("<f", struct.pack("<I", bits << 16))[0]
                    for bits in struct.unpack(f"<{self.numel()}H", raw)]
        return list(struct.unpack(f"<{self.numel()}{self.dtype.code}", raw))

    def fill(self, values):
        if self.dtype is bfloat16:
            raw = struct.pack(f"<{self.numel()}H", *map(to_bfloat16, values))
        elif self.dtype is int32:  # its low bits, of what is wider
            raw = struct.pack(f"<{self.numel()}I", *(v & 0xFFFFFFFF for v in values))
        else:
            raw = struct.pack(f"<{self.numel()}{self.dtype.code}", *values)
        ctypes.memmove(self.data_ptr(), raw, len(raw))
        return self

    def to(self, dtype):
        return self if dtype is self.dtype else empty(self.shape, dtype, str(self.device)).fill(
            self.values())

    def clamp(self, low, high):
        return self.clone().fill([min(max(v, low), high) for v in self.values()])

    def clone(self):
        return empty(self.shape, self.dtype, str(self.device)).fill(self.values())

    def copy_(self, other):
        return self.fill(other.values())

    def zero_(self):
        ctypes.memset(self.data_ptr(), 0, self.numel() * self.dtype.size)
        return self

    def __getitem__(self, part):
        head = object.__new__(Tensor)
        head.__dict__.update(self.__dict__, shape=(part.stop,))
        return head


class Place:
    def __init__(self, name):
        self.name, self.type = name, name.split(":", maxsplit=1)[0]

    def __str__(self):
        return self.name


def empty(shape, dtype, device):
    shape = (shape,) if isinstance(shape, int) else shape
    return Tensor(dtype, device, shape).fill([3] * Tensor(dtype, device, shape).numel())


def tensor(values, dtype, device, shape=None, offset=0):
    return Tensor(dtype, device, shape or (len(values),), offset).fill(values)


def synchronize(_device=None):
    driver = ctypes.CDLL("libcuda.so.1")
    assert driver.cuStreamSynchronize(ctypes.c_void_p(cuda.number)) == 0


@contextlib.contextmanager
def on_device(_device):
    yield


@contextlib.contextmanager
def on_stream(stream):
    before = cuda.number
    cuda.number = before if stream is None else stream.cuda_stream
    yield
    synchronize()
    cuda.number = before


cuda = types.SimpleNamespace(
    number=0, capturing=False, is_available=lambda: True, synchronize=synchronize,
    is_current_stream_capturing=lambda: cuda.capturing, device=on_device, stream=on_stream,
    current_stream=lambda _device: types.SimpleNamespace(cuda_stream=cuda.number),
    ExternalStream=lambda number, device: types.SimpleNamespace(cuda_stream=number))
