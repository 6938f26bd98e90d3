"""The same bytes for every loader: parts of MoE layers as raw files, one file per part, or as
safetensors, one file per layer. Standard library only; `bytes` below means bytes of file.

A store is written in chunks that are slices of one seeded pool, each at a place of its own in the
pool. So the sum of a part's 64-bit words is known from prefix sums of the pool, without reading the
part: what a loader has landed is compared with that, all of it."""
import array
import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

BASE_PARTS = ("planes13", "sc13", "planes2", "sc2")
FP4_PARTS = ("fp13", "fp2")
PAGE_BYTES = 4096
WORD_MASK = 2**64 - 1
SEED = 20
# Left free in the folder, so that a full tmpfs does not take the machine's last memory.
RESERVE_BYTES = 2 * 2**30


class Geometry(NamedTuple):
    experts: int
    hidden: int
    intermediate: int

    def part_bytes(self):
        """Of one layer: 2-bit codes and a scale byte per 32 for [2I, H] and [H, I], FP4 nibbles."""
        w13 = self.experts * 2 * self.intermediate * self.hidden
        w2 = self.experts * self.hidden * self.intermediate
        return {"planes13": w13 // 4, "sc13": w13 // 32, "planes2": w2 // 4, "sc2": w2 // 32,
                "fp13": w13 // 2, "fp2": w2 // 2}

    def base_bytes(self):
        sizes = self.part_bytes()
        return sum(sizes[part] for part in BASE_PARTS)

    def fp4_bytes(self):
        sizes = self.part_bytes()
        return sum(sizes[part] for part in FP4_PARTS)


class Shape(NamedTuple):
    """What a store holds, and the sizes it is written in."""
    geometry: Geometry
    layers: int
    chunk_bytes: int
    pool_pages: int    # places in the pool; a power of two, so that an odd step visits all of them
    tensor_bytes: int  # safetensors: parts that are larger become several tensors


FULL = Shape(Geometry(256, 4096, 2048), 16, 16 * 2**20, 2**14, 64 * 2**20)
SMOKE = Shape(Geometry(8, 1024, 512), 3, 2**18, 2**9, 2**20)
POOL_STEP = 40503


class Pool:
    def __init__(self, shape):
        self.shape = shape
        data = random.Random(SEED).randbytes(shape.pool_pages * PAGE_BYTES + shape.chunk_bytes)
        self.data = memoryview(data)
        words = array.array("q", data)
        per_page = PAGE_BYTES // 8
        self.sums = [0]
        for begin in range(0, len(words), per_page):
            self.sums.append(self.sums[-1] + sum(words[begin:begin + per_page]))

    def chunk(self, index, count):
        """(bytes, sum of words) of the chunk `index` of the store."""
        page = index * POOL_STEP % self.shape.pool_pages
        begin = page * PAGE_BYTES
        return (self.data[begin:begin + count],
                self.sums[page + count // PAGE_BYTES] - self.sums[page])

    def part(self, layer, part):
        """Chunks of a part in order. A chunk's index says layer, part and position."""
        before = 0
        for name, size in self.shape.geometry.part_bytes().items():
            chunks = -(-size // self.shape.chunk_bytes)
            if name == part:
                break
            before += chunks
        per_layer = sum(-(-other // self.shape.chunk_bytes)
                        for other in self.shape.geometry.part_bytes().values())
        for chunk in range(chunks):
            count = min(self.shape.chunk_bytes, size - chunk * self.shape.chunk_bytes)
            yield self.chunk(layer * per_layer + before + chunk, count)


def write_pieces(fd, pieces):
    """Writes them one after the other; the sum of their words, modulo 2^64."""
    total = 0
    for data, words in pieces:
        total += words
        while data:
            data = data[os.write(fd, data):]
    return total & WORD_MASK


def in_memory(folder):
    """Whether the folder is in a tmpfs: nothing to flush there, nothing to drop."""
    best, kind = "", ""
    with open("/proc/mounts") as mounts:
        for line in mounts:
            _, point, file_system = line.split()[:3]
            path = os.path.realpath(folder) + "/"
            if path.startswith(point.rstrip("/") + "/") and len(point) >= len(best):
                best, kind = point, file_system
    return kind in ("tmpfs", "ramfs")


def check_space(folder, need_bytes):
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    if need_bytes + RESERVE_BYTES > free:
        raise OSError(f"{folder}: the files need {need_bytes / 2**30:.1f} GiB beside "
                      f"{RESERVE_BYTES / 2**30:.0f} GiB of reserve, {free / 2**30:.1f} are free; "
                      "fewer --layers, or another --directory")


def write_raw(folder, shape, fp4_layers):
    """One file per part and layer, FP4 parts for the first `fp4_layers`. Returns the entries."""
    check_space(folder, shape.layers * shape.geometry.base_bytes()
                + fp4_layers * shape.geometry.fp4_bytes())
    pool = Pool(shape)
    sizes = shape.geometry.part_bytes()

    def write(layer, part):
        path = os.path.join(folder, f"layer{layer:03d}.{part}")
        with open(path, "wb", buffering=0) as file:
            total = write_pieces(file.fileno(), pool.part(layer, part))
            os.fsync(file.fileno())
        return {"layer": layer, "part": part, "path": path, "offset": 0, "bytes": sizes[part],
                "sum": total}

    wanted = [(layer, part) for layer in range(shape.layers)
              for part in BASE_PARTS + (FP4_PARTS if layer < fp4_layers else ())]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as workers:
        return list(workers.map(lambda each: write(*each), wanted))


def safetensors_header(shape, layer):
    """The header's bytes, and where each part begins behind it."""
    tensors, begins, offset = {}, {}, 0
    sizes = shape.geometry.part_bytes()
    for part in BASE_PARTS:
        begins[part] = offset
        for piece, begin in enumerate(range(0, sizes[part], shape.tensor_bytes)):
            count = min(shape.tensor_bytes, sizes[part] - begin)
            tensors[f"layers.{layer}.{part}.{piece}"] = {
                "dtype": "U8", "shape": [count], "data_offsets": [offset, offset + count]}
            offset += count
    text = json.dumps(tensors).encode()
    # Data on a page boundary, which direct reads and word sums on the device want.
    text += b" " * (-(8 + len(text)) % PAGE_BYTES)
    return len(text).to_bytes(8, "little") + text, begins


def write_safetensors(folder, shape):
    """The base parts once more, one file per layer. Returns the entries."""
    check_space(folder, shape.layers * shape.geometry.base_bytes())
    pool = Pool(shape)
    sizes = shape.geometry.part_bytes()

    def write(layer):
        path = os.path.join(folder, f"layer{layer:03d}.safetensors")
        header, begins = safetensors_header(shape, layer)
        entries = []
        with open(path, "wb", buffering=0) as file:
            write_pieces(file.fileno(), [(memoryview(header), 0)])
            for part in BASE_PARTS:
                total = write_pieces(file.fileno(), pool.part(layer, part))
                entries.append({"layer": layer, "part": part, "path": path,
                                "offset": len(header) + begins[part], "bytes": sizes[part],
                                "sum": total})
            os.fsync(file.fileno())
        return entries

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as workers:
        return [entry for entries in workers.map(write, range(shape.layers)) for entry in entries]


def drop_cache(entries):
    """The next read of these files comes from the disk."""
    for path in sorted({entry["path"] for entry in entries}):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def fill_cache(entries):
    """Reads the files once, in case the system has dropped some of their pages."""
    def read(path):
        buffer = bytearray(2**20)
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as workers:
        list(workers.map(read, sorted({entry["path"] for entry in entries})))
