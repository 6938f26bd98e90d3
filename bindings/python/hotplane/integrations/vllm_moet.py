"""vLLM-MoET boots from a hotplane store: HOTPLANE_STORE=DIR switches it on.

Replaces what vLLM-MoET's modules moe_w2_planes_cache and moe_w2_store answer, and nothing else of
them. vLLM calls `install` by the entry point vllm.general_plugins of this package; elsewhere call
it before those modules are used. Built by `hotplane build`; a layer that the store lacks, or has
with another geometry, is a miss, and vLLM-MoET goes its own way.

    HOTPLANE_STORE   directory of the store
    HOTPLANE_DEVICE  where planes land: "cpu", "cuda", "cuda:N"; default: torch's current CUDA
                     device, else the page cache of the host

Planes are keyed by the model's layer number, MTP layers after all others; packs by ordinal. Of
several tensor-parallel ranks each reads its shard: the store must be built with --tp.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
import threading
import time
from typing import Any, Dict, List, Optional, Sequence, Tuple

from .. import Engine, Error, LayerInfo, Store, open
from .._library import logger

BASE_PARTS = ("planes13", "sc13", "planes2", "sc2")
MODULES = {"moe_w2_planes_cache": ("enabled", "expected_sizes", "cache_has_layer", "try_load",
                                   "store", "shutdown"),
           "moe_w2_store": ("pack_has_layer", "make_store")}


class _Torch:
    """Tensors as vLLM-MoET has them."""

    def __init__(self) -> None:
        import torch  # type: ignore[import-not-found, unused-ignore]
        self.torch: Any = torch

    def device(self) -> Optional[str]:
        cuda = self.torch.cuda
        return f"cuda:{cuda.current_device()}" if cuda.is_available() else None

    def empty(self, rows: int, columns: int, pinned: bool) -> Any:
        return self.torch.empty(rows, columns, dtype=self.torch.uint8,
                                pin_memory=pinned and self.torch.cuda.is_available())

    def flat(self, part: Any) -> Any:
        return self.torch.from_dlpack(part).reshape(-1)

    @staticmethod
    def columns(rows: Any, begin: int, end: int) -> Any:
        return rows[:, begin:end].contiguous().reshape(-1)

    @staticmethod
    def buffer(rows: Any) -> memoryview:
        return memoryview(rows.numpy())

    @staticmethod
    def copy(destination: Any, source: Any) -> None:
        destination.copy_(source)


class _Numpy:
    """Arrays, where there is no torch."""

    def __init__(self) -> None:
        import numpy
        self.numpy = numpy

    @staticmethod
    def device() -> Optional[str]:
        return None

    def empty(self, rows: int, columns: int, pinned: bool) -> Any:
        return self.numpy.empty((rows, columns), self.numpy.uint8)

    @staticmethod
    def flat(part: Any) -> Any:
        return part.numpy().reshape(-1)

    def columns(self, rows: Any, begin: int, end: int) -> Any:
        return self.numpy.ascontiguousarray(rows[:, begin:end]).reshape(-1)

    @staticmethod
    def buffer(rows: Any) -> memoryview:
        return memoryview(rows)

    @staticmethod
    def copy(destination: Any, source: Any) -> None:
        destination[...] = source


def _arrays() -> Any:
    try:
        return _Torch()
    except ImportError:
        return _Numpy()


def _rank() -> Dict[str, Any]:
    """vLLM's tensor-parallel place; {} where there is one rank, or no vLLM."""
    try:
        from vllm.distributed import (  # type: ignore[import-not-found, unused-ignore]
            get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size)
        world = int(get_tensor_model_parallel_world_size())
        return {"rank": int(get_tensor_model_parallel_rank()), "world": world} if world > 1 else {}
    except Exception:  # not initialized, in many ways
        return {}


def expected_sizes(E: int, N13: int, K13: int, N2: int, K2: int,  # the reference's names
                   want_fp4: bool) -> Dict[str, int]:
    """Bytes of each part of a layer; FP4 as vLLM-MoET's moe_w2_delta wants it."""
    elements = {"13": E * N13 * K13, "2": E * N2 * K2}
    sizes = {name: elements[name.lstrip("planesc")] // (4 if name[0] == "p" else 32)
             for name in BASE_PARTS}
    if want_fp4:
        for suffix, count in elements.items():
            sizes["fp" + suffix] = count * 5 // 16 if _split() else count // 2
    return sizes


def _split() -> bool:
    """Whether vLLM-MoET keeps FP4 as base and refinement (quintals)."""
    for name, module in list(sys.modules.items()):
        if name.rpartition(".")[2] == "moe_w2_delta":
            return bool(module.split_enabled())
    return False


def _elements(info: LayerInfo) -> Tuple[int, int]:
    """Of one expert's w13 and w2."""
    return (2 * info.intermediate * info.hidden, info.hidden * info.intermediate)


def _base_bytes(info: LayerInfo) -> Dict[str, int]:
    """Of one expert."""
    w13, w2 = _elements(info)
    return {"planes13": w13 // 4, "sc13": w13 // 32, "planes2": w2 // 4, "sc2": w2 // 32}


def _fp4(info: LayerInfo, fp13_bytes: int, fp2_bytes: int) -> Optional[Tuple[str, List[int]]]:
    """Which records have these bytes of one expert: ("delta" or "full", of each part)."""
    if info.delta != "present":
        return None
    w13, w2 = _elements(info)
    if (fp13_bytes, fp2_bytes) == (w13 * 5 // 16, w2 * 5 // 16):
        return ("delta", [fp13_bytes, fp2_bytes]) if info.delta_encoding == "quintal" else None
    if (fp13_bytes, fp2_bytes) == (w13 // 2, w2 // 2):
        return "full", [fp13_bytes, fp2_bytes]
    return None


def _is_about_device(error: Error, device: str) -> bool:
    """What fails for the device's sake quotes its name, or advises another."""
    return f'"{device}"' in f"{error.what} {error.found}" or "--device" in error.advice


class Planes:
    """The store as vLLM-MoET's planes cache. From any thread; nothing here raises."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._store: Optional[Store] = None
        self._engine: Optional[Engine] = None
        self._infos: Dict[int, LayerInfo] = {}
        self._failed = False

    def _open(self) -> Store:
        with self._lock:
            if self._store is None:
                store = open(self._path, **_rank())
                infos = store.describe_layers()
                main = {info.model_index: info for info in infos if not info.mtp}
                after = max(main, default=-1) + 1
                mtp = {after + i: info for i, info in enumerate(i for i in infos if i.mtp)}
                self._infos = {**main, **mtp}
                self._store = store
            return self._store

    def _boot(self) -> Engine:
        """All layers, in the background: whoever asks for one finds the next ones on their way."""
        store = self._open()
        with self._lock:
            if self._engine is None:
                named = os.environ.get("HOTPLANE_DEVICE")
                device = named or _arrays().device() or "cpu"
                try:
                    self._engine = store.boot(device, map=device == "cpu", wait=False)
                except Error as error:
                    if named and _is_about_device(error, named):
                        error.args = (f"HOTPLANE_DEVICE={named}: {error}",)
                    raise
            return self._engine

    def _info(self, layer: int, sizes: Dict[str, int]) -> Optional[LayerInfo]:
        """The layer, if it has exactly these parts."""
        if self._failed:
            return None
        self._open()
        info = self._infos.get(layer)
        if info is None or info.base != "present":
            return None
        base = {name: info.experts * size for name, size in _base_bytes(info).items()}
        if {name: sizes.get(name) for name in base} != base:
            return None
        rest = {name: size for name, size in sizes.items() if name not in base}
        if not rest:
            return info
        if set(rest) != {"fp13", "fp2"} or any(size % info.experts for size in rest.values()):
            return None
        return info if self._records(info, rest) else None

    @staticmethod
    def _records(info: LayerInfo, sizes: Dict[str, int]) -> Optional[Tuple[str, List[int]]]:
        return _fp4(info, sizes["fp13"] // info.experts, sizes["fp2"] // info.experts)

    def has(self, layer: int, sizes: Dict[str, int]) -> bool:
        try:
            return self._info(layer, sizes) is not None
        except Exception as error:
            self._complain("the store that HOTPLANE_STORE names cannot be used", error)
            return False

    def load(self, layer: int, sizes: Dict[str, int]) -> Optional[Dict[str, Any]]:
        try:
            info = self._info(layer, sizes)
            if info is None:
                return None
            engine = self._boot()
            booted = engine.wait_layer(info.ordinal)
            arrays = _arrays()
            parts = {name: arrays.flat(getattr(booted, name)) for name in BASE_PARTS}
            if "fp13" in sizes:
                parts.update(self._load_fp4(engine, info, sizes, arrays))
            return {name: parts[name] for name in sizes}
        except Exception as error:
            self._complain(f"layer {layer} of HOTPLANE_STORE={self._path} cannot be loaded", error)
            return None

    def _load_fp4(self, engine: Engine, info: LayerInfo, sizes: Dict[str, int],
                  arrays: Any) -> Dict[str, Any]:
        found = self._records(info, sizes)
        assert found is not None  # _info looked
        kind, (first, second) = found
        rows = arrays.empty(info.experts, first + second, False)
        buffer = arrays.buffer(rows)
        engine.read_many(kind, info.ordinal, range(info.experts),
                         [_row(buffer, e) for e in range(info.experts)])
        return {"fp13": arrays.columns(rows, 0, first),
                "fp2": arrays.columns(rows, first, first + second)}

    def _complain(self, what: str, error: Exception) -> None:
        logger.warning("vLLM-MoET: %s, it goes its own way: %s", what, error)
        if not isinstance(error, Error):
            self._failed = True

    def keep(self, layer: int, tensors: Dict[str, Any]) -> None:
        logger.warning("vLLM-MoET built layer %s itself and %s does not keep it: make it with "
                       "`hotplane build CHECKPOINT --store %s`", layer, self._path, self._path)

    def close(self) -> None:
        """Tensors that were handed out stay valid."""
        with self._lock:
            for opened in (self._engine, self._store):
                if opened is not None:
                    opened.close()
            self._engine = self._store = None
            self._failed = False


def _row(buffer: memoryview, row: int) -> memoryview:
    """Of a buffer of two dimensions, flat."""
    flat = buffer.cast("B")
    columns = flat.nbytes // (buffer.shape or (1,))[0]
    return flat[row * columns:(row + 1) * columns]


def _composition(info: LayerInfo, tag: str, slot_bytes: int) -> Optional[Tuple[str, List[int]]]:
    """What a slot of this size is made of: ("base", "delta", "full" or "full with scales", bytes of
    each part in the slot)."""
    base = _base_bytes(info)
    if tag == "base":
        sizes = list(base.values())
        return ("base", sizes) if info.base == "present" and sum(sizes) == slot_bytes else None
    w13, w2 = _elements(info)
    for first, second in ((w13 * 5 // 16, w2 * 5 // 16), (w13 // 2, w2 // 2)):
        if first + second == slot_bytes:
            return _fp4(info, first, second)
    # over the base tier nibbles come with the scales they share with it
    with_scales = [w13 // 2, base["sc13"], w2 // 2, base["sc2"]]
    if sum(with_scales) == slot_bytes and info.base == info.delta == "present":
        return "full with scales", with_scales
    return None


class Rows:
    """The store as one of vLLM-MoET's expert stores: rows of `slot_bytes`, one for each expert.
    Layers that it lacks are kept in memory when they are added. Rows that were handed out stay
    valid."""

    resident = False

    def __init__(self, store: Optional[Store], tag: str, n_layers: int, n_experts: int,
                 slot_bytes: int, pinned: bool) -> None:
        self.slot_bytes, self.E, self.n_layers = slot_bytes, n_experts, n_layers
        self._store, self._pinned, self._arrays = store, pinned, _arrays()
        self._kinds: Dict[int, Tuple[str, List[int]]] = {}
        self._added: Dict[int, Any] = {}
        self._reads, self._read_s = 0, 0.0
        for info in store.describe_layers() if store is not None else ():
            found = _composition(info, tag, slot_bytes)
            if found is not None and info.experts == n_experts and info.ordinal < n_layers:
                self._kinds[info.ordinal] = found

    def __contains__(self, key: int) -> bool:
        return key in self._kinds or key in self._added

    def __len__(self) -> int:
        return len(self._kinds) + len(self._added)

    def add_layer(self, key: int, parts: Sequence[Any]) -> None:
        """Nothing where the layer is there. parts: uint8 [E, b], b adding up to slot_bytes."""
        if key in self:
            return
        widths = [part.shape[1] for part in parts]
        if sum(widths) != self.slot_bytes or any(part.shape[0] != self.E for part in parts):
            raise ValueError(f"parts of layer {key} are {widths} wide, slots {self.slot_bytes}")
        rows = self._arrays.empty(self.E, self.slot_bytes, self._pinned)
        begin = 0
        for part, width in zip(parts, widths):
            self._arrays.copy(rows[:, begin:begin + width], part)
            begin += width
        self._added[key] = rows

    def rows_for(self, pairs: Sequence[Tuple[int, int]], scan: bool = False) -> List[Any]:
        """Rows of [(layer, expert), ...], each verified in this read. DataError for damage,
        KeyError for a layer that is not there."""
        begin = time.perf_counter()
        stage = self._arrays.empty(len(pairs), self.slot_bytes, self._pinned)
        buffer = self._arrays.buffer(stage)
        by_layer: Dict[int, List[int]] = {}
        for place, (layer, _) in enumerate(pairs):
            if layer not in self._added:
                by_layer.setdefault(layer, []).append(place)
        for layer, places in by_layer.items():
            self._read(layer, [pairs[place][1] for place in places],
                       [_row(buffer, place) for place in places])
            self._reads += len(places)
        self._read_s += time.perf_counter() - begin
        return [self._added[layer][expert] if layer in self._added else stage[place]
                for place, (layer, expert) in enumerate(pairs)]

    def _read(self, layer: int, experts: List[int], rows: List[memoryview]) -> None:
        kind, sizes = self._kinds[layer]
        store = self._store
        assert store is not None  # or there would be no kinds
        if kind != "full with scales":
            store.read_many(kind, layer, experts, rows)
            return
        full = store.read_many("full", layer, experts)
        base = store.read_many("base", layer, experts)
        fp13, sc13, fp2, sc2 = sizes
        planes13 = 8 * sc13
        for row, weights, planes in zip(rows, full, base):
            row[:fp13] = weights[:fp13]
            row[fp13:fp13 + sc13] = planes[planes13:planes13 + sc13]
            row[fp13 + sc13:fp13 + sc13 + fp2] = weights[fp13:]
            row[fp13 + sc13 + fp2:] = planes[len(planes) - sc2:]

    def stats(self) -> Dict[str, Any]:
        return {"reads": self._reads, "read_bytes": self._reads * self.slot_bytes,
                "read_s": self._read_s}

    def release(self) -> None:
        if self._store is not None:
            self._store.close()
        self._kinds, self._added = {}, {}


_planes: Optional[Planes] = None
_planes_lock = threading.Lock()


def _cache() -> Planes:
    global _planes
    with _planes_lock:
        if _planes is None:
            _planes = Planes(os.environ["HOTPLANE_STORE"])
        return _planes


def enabled() -> bool:
    return bool(os.environ.get("HOTPLANE_STORE"))


def cache_has_layer(layer_idx: int, sizes: Dict[str, int]) -> bool:
    """Whether try_load would find it; headers are read, no planes. Never raises."""
    return enabled() and _cache().has(layer_idx, sizes)


def try_load(layer_idx: int, sizes: Dict[str, int]) -> Optional[Dict[str, Any]]:
    """Flat uint8 tensors of exactly these sizes, experts in order, verified; or None. They must not
    be written to. Never raises."""
    return _cache().load(layer_idx, sizes) if enabled() else None


def store(layer_idx: int, tensors: Dict[str, Any]) -> None:
    """Keeps nothing, and says so: a store is made by `hotplane build`. Never raises."""
    if enabled():
        _cache().keep(layer_idx, tensors)


def shutdown() -> None:
    global _planes
    with _planes_lock:
        planes, _planes = _planes, None
    if planes is not None:
        planes.close()


def _opened() -> Optional[Store]:
    try:
        return open(os.environ["HOTPLANE_STORE"], **_rank())
    except (Error, KeyError) as error:
        logger.warning("vLLM-MoET: the store that HOTPLANE_STORE names cannot be used, it goes its "
                       "own way: %s", error)
        return None


def pack_has_layer(tag: str, layer_key: int, n_layers: int, n_experts: int,
                   slot_bytes: int) -> bool:
    """Whether make_store's store would have the layer; headers are read. Never raises."""
    try:
        with open(os.environ["HOTPLANE_STORE"], **_rank()) as opened:
            infos = opened.describe_layers()
        return 0 <= layer_key < min(len(infos), n_layers) and \
            infos[layer_key].experts == n_experts and \
            _composition(infos[layer_key], tag, slot_bytes) is not None
    except Exception as error:
        logger.warning("vLLM-MoET: the store that HOTPLANE_STORE names cannot be used, it goes its "
                       "own way: %s", error)
        return False


def make_store(tag: str, n_layers: int, n_experts: int, slot_bytes: int, pinned: bool) -> Rows:
    return Rows(_opened(), tag, n_layers, n_experts, slot_bytes, pinned)


def _replace(module: Any) -> None:
    for name in MODULES[module.__name__.rpartition(".")[2]]:
        setattr(module, name, globals()[name])
    logger.info("vLLM-MoET: %s answers from %s", module.__name__, os.environ["HOTPLANE_STORE"])


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._loader.exec_module(module)
        _replace(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Replaces the functions of the modules when they are imported."""

    def __init__(self) -> None:
        self._looking = threading.local()

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.rpartition(".")[2] not in MODULES or getattr(self._looking, "now", False):
            return None
        self._looking.now = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking.now = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


_finder = _Finder()


def install() -> bool:
    """Switches it on where HOTPLANE_STORE is set, for modules that are imported already and those
    that will be. Once more does nothing. Whether it is on."""
    if not enabled():
        return False
    for name, module in list(sys.modules.items()):
        if name.rpartition(".")[2] in MODULES and module is not None:
            _replace(module)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    return True
