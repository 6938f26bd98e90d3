"""Store, Engine and what they hand out."""

from __future__ import annotations

import ctypes
import json
import queue
import threading
import weakref
from ctypes import byref, c_char_p, c_size_t, c_uint32, c_void_p
from typing import (TYPE_CHECKING, Any, Callable, Dict, Iterator, List, NamedTuple, Optional,
                    Sequence, Set, Tuple, Union)

from . import _device, _library
from ._arrays import Matrix, Output, Owner, Part, matrix_of, memory_at
from ._handle import Handle
from ._library import (ACTIVATIONS, ARITHMETICS, ENCODINGS, OK, PARTS, PRECISIONS, PRESENCES,
                       RECORD_KINDS, check, last_error, library, text)
from ._options import (DEVICE, LAYERS, boot_options, flag, known_options, number, refusal, string,
                       tells_options, whole, word)
from ._options import path as path_of
from ._progress import Display
from ._threads import join
from .errors import Error, UsageError

if TYPE_CHECKING:
    from os import PathLike

    from typing_extensions import Unpack

    from ._options import Options

    StrPath = Union[str, "PathLike[str]"]

ENCODING_NAMES = {value: name for name, value in ENCODINGS.items()}
_kind = word("kind", RECORD_KINDS)
_expert = number("expert", 32)
_layer = number("layer", 32)


def _experts(values: Any) -> List[int]:
    try:
        experts = list(values)
    except TypeError:
        raise refusal("experts", "whole numbers, one for each expert", values) from None
    return [_expert(expert) for expert in experts]


class LayerInfo(NamedTuple):
    """One layer of the model and its files, by their headers alone."""

    ordinal: int
    model_index: int
    mtp: bool
    experts: int  # E
    hidden: int  # H
    intermediate: int  # I; of a sharded store the rank's share
    base: str  # "absent", "present", "damaged", "unreadable"
    delta: str
    delta_encoding: Optional[str]  # "quintal", "nibble", None


class Layer:
    """One booted layer: `planes13` [E, 2I*H/4], `sc13` [E, 2I*H/32], `planes2` [E, H*I/4], `sc2`
    [E, H*I/32], all uint8; of layers with biases also `bias13` [E, 2I] and `bias2` [E, H],
    float32, else None. Each is a `Part`."""

    planes13: Part
    sc13: Part
    planes2: Part
    sc2: Part
    bias13: Optional[Part]
    bias2: Optional[Part]

    def __init__(self, handle: Handle, index: int) -> None:
        layer = _library.Layer()
        with handle.call() as engine:
            check(library().get_layer(engine, index, byref(layer)))
        self.ordinal: int = layer.ordinal
        self.model_index: int = layer.model_index
        self.experts: int = layer.experts
        self.hidden: int = layer.hidden
        self.intermediate: int = layer.intermediate
        self.device: str = "cpu" if layer.device < 0 else f"cuda:{layer.device}"
        self.nbytes = 0
        for name in PARTS:
            address = getattr(layer, name)
            part = None
            if address:
                dtype = "float32" if name.startswith("bias") else "uint8"
                items = getattr(layer, name + "_bytes") // (4 if dtype == "float32" else 1)
                part = Part(handle, index, name, (layer.experts, items // layer.experts), dtype,
                            layer.device, address)
                self.nbytes += part.nbytes
            setattr(self, name, part)

    def __repr__(self) -> str:
        return (f"<hotplane.Layer {self.ordinal}: {self.experts} experts of {self.hidden} x "
                f"{self.intermediate} on {self.device}>")


HOST_PRECISIONS = {name: value for name, value in PRECISIONS.items() if name != "fp4_or_base"}


def _host_precision(value: Any) -> int:
    if isinstance(value, str) and value == "fp4_or_base":
        raise UsageError("precision is one of arrays on the layer's GPU",
                         expected=" or ".join(map(repr, HOST_PRECISIONS)), found=repr(value),
                         advice="give x on the GPU that the layer lies on, or take one of these")
    return word("precision", HOST_PRECISIONS)(value)


class Layers(Sequence[Layer]):
    """The layers published so far, in order."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._layers: Dict[int, Layer] = {}

    def __len__(self) -> int:
        with self._handle.call() as engine:
            return int(library().layer_count(engine))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        ordinal = whole(index)
        if ordinal is None:
            raise TypeError(f"a layer's index is a whole number or a slice, not {index!r}")
        index = ordinal
        count = len(self)
        if not -count <= index < count:
            raise IndexError(f"layer {index} of {count}")
        index %= count
        if index not in self._layers:
            self._layers[index] = Layer(self._handle, index)
        return self._layers[index]


class Record:
    """One expert's record, pinned: its bytes stay what and where they are while it, or a view of
    its parts, lives; after Engine.close() too.

    parts     read-only memoryviews, in the order of docs: fp13, fp2; of "base" planes13, sc13,
              planes2, sc2
    encoding  "quintal", "nibble" or "planes"
    """

    def __init__(self, owner: Owner) -> None:
        view = _library.RecordView()
        check(library().record_look(owner.place, byref(view)))
        self.layer: int = view.layer
        self.expert: int = view.expert
        self.encoding: str = ENCODING_NAMES[view.encoding]
        self.parts: Tuple[memoryview, ...] = tuple(
            memory_at(view.parts[i], view.part_bytes[i], owner) for i in range(view.part_count))


class _Opened:
    """What an open store can do, booted or not."""

    def __init__(self, path: StrPath, options: Dict[str, Any]) -> None:
        self.path = path
        self._handle = handle = Handle()
        self._infos: Optional[List[LayerInfo]] = None
        self._finalizer = weakref.finalize(self, handle.close)
        handle.open(path, boot_options(options))
        about = _library.Store()
        with handle.call() as engine:
            check(library().describe(engine, byref(about)))
            self.generation = text(about.generation)  # 32 hexadecimal digits
            self.directory = text(about.directory)  # of the generation
        self.layer_count: int = about.layer_count  # MoE layers of the model, MTP included
        self.top_k: int = about.top_k  # experts per token; 0: not told
        self.rank: int = about.rank
        self.world: int = about.world
        self.activation = ACTIVATIONS.get(about.activation, str(about.activation))
        self.activation_limit: float = about.activation_limit
        self.activation_alpha: float = about.activation_alpha

    @property
    def closed(self) -> bool:
        return self._handle.closed

    def close(self) -> None:
        """Ends the use of it: later calls are UsageError; a boot that runs ends. Arrays and records
        that were made before stay valid, and their memory is freed with the last of them. Waits
        for calls of other threads. Once more does nothing."""
        self._handle.close()

    def __enter__(self) -> Any:
        with self._handle.call():  # UsageError when it was closed
            return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def describe_layers(self) -> List[LayerInfo]:
        """All MoE layers of the model; index = ordinal."""
        infos = []
        with self._handle.call() as engine:
            for ordinal in range(self.layer_count):
                info = _library.LayerInfo()
                check(library().describe_layer(engine, ordinal, byref(info)))
                infos.append(LayerInfo(
                    info.ordinal, info.model_index, bool(info.mtp), info.experts, info.hidden,
                    info.intermediate, PRESENCES[info.base], PRESENCES[info.delta],
                    ENCODING_NAMES.get(info.delta_encoding)))
        return infos

    def record_bytes(self, kind: str, layer: int) -> int:
        """Bytes of each record of this layer. DataError: a delta tier that is not there."""
        size = c_size_t()
        with self._handle.call() as engine:
            check(library().record_bytes(engine, _kind(kind), _layer(layer), byref(size)))
        return size.value

    def read(self, kind: str, layer: int, expert: int, out: Any = None) -> Any:
        """The record of one expert, verified in this read: a new bytearray, or `out`, a writable
        buffer of exactly record_bytes. kind: "delta" (fp13, fp2 as the store has them), "full"
        (the same as FP4 nibbles), "base" (planes13, sc13, planes2, sc2), one after the other.
        layer is an ordinal. DataError names what is damaged; the engine stays usable."""
        return self.read_many(kind, layer, [expert], None if out is None else [out])[0]

    def delta(self, layer: int, expert: int) -> bytearray:
        """The delta record of one expert, as `read`."""
        record: bytearray = self.read("delta", layer, expert)
        return record

    def read_many(self, kind: str, layer: int, experts: Sequence[int],
                  outs: Optional[Sequence[Any]] = None) -> List[Any]:
        """As `read`, for several experts of one layer in parallel."""
        size = self.record_bytes(kind, layer)
        experts = _experts(experts)
        if outs is None:
            outs = [bytearray(size) for _ in experts]
        if len(outs) != len(experts):
            raise UsageError("read_many needs one place for each expert",
                             expected=str(len(experts)), found=str(len(outs)))
        places = []
        for out in outs:
            view = memoryview(out)
            if view.readonly or not view.c_contiguous or view.nbytes != size:
                raise UsageError("a record does not fit where it is to be read to",
                                 expected=f"a writable buffer of {size} bytes",
                                 found=f"{view.nbytes} bytes, readonly={view.readonly}")
            places.append((ctypes.c_char * size).from_buffer(view))
        count = len(places)
        numbers = (c_uint32 * count)(*experts)
        addresses = (c_void_p * count)(*map(ctypes.addressof, places))
        ordered = sorted(map(ctypes.addressof, places))
        if any(after - before < size for before, after in zip(ordered, ordered[1:])):
            raise UsageError("two records would be read to one place",
                             expected="buffers that do not overlap", found="some that do")
        if count:
            with self._handle.call() as engine:
                check(library().read_records(engine, _kind(kind), layer, numbers, addresses,
                                             count, size))
        return list(outs)

    def record(self, kind: str, layer: int, expert: int, bulk: bool = False) -> Record:
        """A record through its kind's cache (`delta_cache_bytes` and its like), pinned. bulk: a
        pass over many records, which replaces nothing in the cache."""
        owner = Owner("record")
        with self._handle.call() as engine:
            check(library().record_get(engine, _kind(kind), _layer(layer), _expert(expert),
                                       int(bulk), byref(owner.place)))
        return Record(owner)

    def prefetch(self, kind: str, layer: int, experts: Sequence[int]) -> int:
        """Reads the records of these experts into free places of the cache, in parallel; replaces
        nothing. How many of them are in the cache then."""
        cached = c_size_t()
        wanted = _experts(experts)
        numbers = (c_uint32 * len(wanted))(*wanted)
        with self._handle.call() as engine:
            check(library().prefetch(engine, _kind(kind), _layer(layer), numbers, len(wanted),
                                     byref(cached)))
        return cached.value

    def cache_stats(self, kind: str) -> Dict[str, int]:
        """Counts since it was opened: hits, misses, evictions, uncached, prefetched, failures,
        slot_count, slots_used, bytes_used, bytes_max."""
        stats = _library.CacheStats()
        with self._handle.call() as engine:
            check(library().get_cache_stats(engine, _kind(kind), byref(stats)))
        return {name: getattr(stats, name) for name, *_ in stats._fields_[1:]}


class Store(_Opened):
    """An open store: its manifest was read, nothing else. Context manager."""

    def __init__(self, path: StrPath, options: Dict[str, Any]) -> None:
        self._options = options
        super().__init__(path, options)

    def __repr__(self) -> str:
        return f"<hotplane.Store {self.path} {self.generation[:8]}, {self.layer_count} layers>"

    @tells_options
    def plan(self, device: Optional[str] = None, **options: Unpack[Options]) -> Dict[str, Any]:
        """What a boot with these options would do, and why, with the keys of `hotplane boot
        --dry-run --json`. Reads headers, builds nothing. DataError where layers are missing that
        nothing can be built from, CapacityError where the planes do not fit."""
        with self._engine({"device": device, **options}) as engine:
            plan: Dict[str, Any] = engine.plan()
            return plan

    @tells_options
    def boot(self, device: Optional[str] = None, *,
             on_layer: Optional[Callable[[Layer], Any]] = None, progress: bool = False,
             wait: bool = True, **options: Unpack[Options]) -> Engine:
        """Boots it: the base tier lands on `device` ("cpu", "cuda", "cuda:N"), every byte verified.

        on_layer  called by this thread for each layer in order, as soon as it is verified, while
                  the next ones are on their way; what it raises ends the boot
        progress  a bar by tqdm where that is installed, else lines on stderr
        wait      False: returns at once; the boot runs in the background, `Engine.wait()` and
                  `Engine.wait_layer()` tell
        options   below, those of `plan`

        KeyboardInterrupt ends the boot and frees everything. Errors: as of `plan`; DataError that
        names the chunk for damage, SystemFailure for I/O and devices."""
        if on_layer is not None and not callable(on_layer):
            raise refusal("on_layer", "a function of one layer", on_layer)
        engine = self._engine({"device": device, **options})
        try:
            if wait:
                engine._boot(on_layer, progress)
            elif on_layer is not None or progress:
                raise UsageError("on_layer and progress need wait=True",
                                 advice="use Engine.wait_layer(index)")
            else:
                engine._start()
        except BaseException:
            engine.close()
            raise
        return engine

    def _engine(self, options: Any) -> Engine:
        if self.closed:
            raise UsageError("the store was closed before", file=str(self.path))
        pinned = {"generation": self.generation} if "generation" not in self._options else {}
        return Engine(self.path, {**self._options, **pinned, **options})


class Engine(_Opened):
    """A booted store. Made by `Store.boot`. Context manager. From any thread."""

    def __init__(self, path: StrPath, options: Dict[str, Any]) -> None:
        super().__init__(path, options)
        self.options = dict(options)  # of the boot, as they were given
        self.layers: Sequence[Layer] = Layers(self._handle)
        self._devices: Dict[int, str] = {}  # by ordinal
        self._fp4: Dict[int, Optional[Set[int]]] = {}  # on devices, by ordinal; None: all
        # No call may be enqueued while FP4 is loaded. Again by the thread that has it.
        self._device_order = threading.RLock()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self.layers)} layers"
        return f"<hotplane.Engine {self.path} {self.generation[:8]}, {state}>"

    def plan(self) -> Dict[str, Any]:
        """What this boot is to do; as Store.plan. UsageError after a boot without a plan."""
        out = c_char_p()
        with self._handle.call() as engine:
            check(library().plan_json(engine, byref(out)))
            return dict(json.loads(text(out.value)))

    def _start(self) -> None:
        with self._handle.call() as engine:
            check(library().start(engine))

    def _boot(self, on_layer: Optional[Callable[[Layer], Any]], progress: bool) -> None:
        display = Display("boot", progress)
        total, count = 0, 0
        if progress:
            plan = self.plan()
            total, count = plan["bytes_device"] + plan["bytes_host"], plan["layers_total"]
        self._start()
        done = 0
        try:
            for layer in self._published():
                done += layer.nbytes
                display.show(done, total, f"layer {layer.ordinal + 1} of {count}")
                if on_layer is not None:
                    on_layer(layer)
        finally:
            display.close()

    def _published(self) -> Iterator[Layer]:
        """The layers as they come. Another thread waits in the library, so that this one can be
        interrupted by signals."""
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        thread = threading.Thread(target=self._follow, args=(events,), name="hotplane-boot",
                                  daemon=True)
        thread.start()
        try:
            while True:
                event = events.get()
                if event is None:
                    break
                if isinstance(event, BaseException):
                    raise event
                yield self.layers[event]
        except BaseException:
            self._handle.cancel()
            raise
        finally:
            join(thread)

    def _follow(self, events: queue.SimpleQueue[Any]) -> None:
        layer = _library.Layer()
        index = 0
        try:
            with self._handle.call() as engine:
                while library().wait_layer(engine, index, byref(layer)) == OK:
                    events.put(index)
                    index += 1
                check(library().wait(engine))
            events.put(None)
        except Error as error:
            events.put(error)

    def wait(self) -> None:
        """Until the boot has ended; its failure is raised. Interrupting this wait leaves the boot
        running."""
        self._wait_in_thread(lambda engine: library().wait(engine))

    def wait_layer(self, index: int) -> Layer:
        """The index-th layer once it is published; the boot's failure when it fails first,
        UsageError when the boot has no such layer."""
        layer = _library.Layer()
        self._wait_in_thread(
            lambda engine: library().wait_layer(engine, _layer(index), byref(layer)))
        return self.layers[index]

    def _wait_in_thread(self, call: Callable[[c_void_p], int]) -> None:
        ended: queue.SimpleQueue[Optional[BaseException]] = queue.SimpleQueue()

        def run() -> None:
            try:
                with self._handle.call() as engine:
                    check(call(engine))
                ended.put(None)
            except BaseException as error:  # raised again by the thread that waits
                ended.put(error)

        threading.Thread(target=run, name="hotplane-wait", daemon=True).start()
        failure = ended.get()
        if failure is not None:
            raise failure

    def stream_wait_layer(self, layer: int, stream: Any = None) -> None:
        """What is enqueued on the stream after this call runs on the GPU once the boot has
        published the layer, an ordinal; Python does not wait. stream: a torch.cuda.Stream or the
        number of a CUDA stream; None: the current one. So `moe_forward` on tensors of the GPU can
        be called for layers that are still on their way. After a boot that failed, and after
        close, the stream goes on: rows are NaN, and `moe_refusal` tells the failure. While a
        stream waits, neither synchronize nor free memory of the GPU in what the boot calls, and
        copy nothing behind it to memory that is not pinned (`y.cpu()`): wait for the stream first.
        UsageError without a GPU, for a layer that this boot does not publish, for a stream that is
        captured, and where four others wait."""
        number = _device.stream_of(self._promised_device(), stream)
        with self._handle.call() as engine:
            check(library().stream_wait_layer(engine, _layer(layer), number))

    def _promised_device(self) -> str:
        """What the boot was asked for."""
        device = str(self.options.get("device") or "cpu")
        return device + ":0" if device == "cuda" else device

    def _place(self, layer: int, info: LayerInfo) -> _device.Place:
        """Of a layer that is published, or else where it is to come."""
        try:
            device = self.layer_device(layer)
        except UsageError:
            device = self._promised_device()
            if self.closed or device == "cpu":
                raise
        return _device.Place(layer, device, info.experts, info.hidden)

    def layer_device(self, layer: int) -> str:
        """Where the base of this layer, an ordinal, lies: "cpu" or "cuda:N". UsageError while it is
        not published."""
        with self._handle.call():
            pass  # UsageError when it was closed
        if layer not in self._devices:
            self._devices = {booted.ordinal: booted.device for booted in self.layers}
        if layer not in self._devices:
            raise UsageError(f"layer {layer} is not there", expected="a layer that was booted",
                             found=f"{len(self._devices)} layers, not this one")
        return self._devices[layer]

    def stats(self) -> Dict[str, Any]:
        """The report of the boot, with the keys of `hotplane boot --json`; {} before a boot has
        succeeded."""
        with self._handle.call() as engine:
            return dict(json.loads(text(library().stats_json(engine))))

    def moe_forward(self, layer: int, x: Any, ids: Any, weights: Any, out: Any = None, *,
                    precision: Union[str, Sequence[str]] = "base",
                    arithmetic: str = "fast", stream: Any = None) -> Any:
        """The operator of one MoE layer, straight from the planes, where they are:
        y[t] = sum over s of weights[t, s] * (w2[e] act(w13[e] x[t] + bias13[e]) + bias2[e]),
        e = ids[t, s].

        layer       ordinal; published, or on a GPU what a stream waits for: `stream_wait_layer`
        x           [T, H] float32, finite; other floating types are converted
        ids         [T, k] int32, each in [0, E); other integer types are converted
        weights     [T, k] float32, finite; converted as x
        out         [T, H] that is written and returned; None: a new array of x's kind and type.
                    Must not overlap x
        precision   "base", "fp4" (from the delta tier), or one of them for each of E experts;
                    on a GPU also "fp4_or_base": FP4 where `load_fp4` has left it there
        arithmetic  "fast": activations as int8 with one scale per token and 32 of them; "exact":
                    float32; on a GPU both are bfloat16. "fp8": rounded to e4m3 with one power of
                    two per token and 128 of them, as models are served with FP8 activations
        stream      of tensors on a GPU: a torch.cuda.Stream or the number of a CUDA stream; None:
                    the current one

        x, ids, weights: numpy arrays, torch tensors on the CPU, contiguous buffers, or DLPack; for
        a layer on a GPU also torch tensors on that GPU: then the call is enqueued and nothing
        waits. It can be captured in a CUDA graph after one call of this layer and precision. What
        only the GPU sees becomes NaN: `moe_refusal`. FP4 that is asked for there is loaded by the
        first call that needs it, which waits.

        On the CPU results are the same to the bit for every number of threads. Of a sharded store
        this rank's part of the sum. UsageError for wrong shapes and types, ids out of range, values
        that are not finite; DataError for a delta record that is absent or damaged."""
        if precision is None:
            raise UsageError("precision has an unknown value", expected=" or ".join(PRECISIONS),
                             found="None")
        if _device.is_on_cuda(x):
            return self._forward_on_device(layer, (x, ids, weights), out, precision, arithmetic,
                                           stream)
        if stream is not None:
            raise UsageError("a stream is given, and x is not on a GPU", found=type(x).__name__)
        info = self._info(layer)
        inputs = self._inputs(info, x, ids, weights)
        rows, top_k = inputs[1].shape
        call = _library.Moe(layer=layer, token_count=rows, top_k=top_k,
                            arithmetic=word("arithmetic", ARITHMETICS)(arithmetic),
                            precision=PRECISIONS["base"])
        if isinstance(precision, str):
            call.precision = _host_precision(precision)
        else:
            if not hasattr(precision, "__len__"):
                words = " or ".join(map(repr, HOST_PRECISIONS))
                raise refusal("precision", f"{words}, or a sequence of these, one for each expert",
                              precision)
            if len(precision) != info.experts:
                raise UsageError("precision has another length than the layer has experts",
                                 expected=str(info.experts), found=str(len(precision)))
            table = (ctypes.c_uint8 * info.experts)(*map(_host_precision, precision))
            call.precisions = ctypes.addressof(table)
        result = Output(out, x, (rows, info.hidden))
        if rows and result.matrix.overlaps(inputs[0]):
            raise UsageError("out overlaps x", advice="give out memory of its own")
        call.x, call.ids, call.weights = (matrix.address for matrix in inputs)
        call.y = result.matrix.address
        with self._handle.call() as engine:
            if rows:
                check(library().moe_forward(engine, byref(call)))
        return result.result()

    def _forward_on_device(self, layer: int, inputs: Tuple[Any, Any, Any], out: Any,
                           precision: Union[str, Sequence[str]], arithmetic: str,
                           stream: Any) -> Any:
        info = self._info(layer)
        place = self._place(layer, info)
        choice = _device.Choice(_device.wanted(precision),
                                word("arithmetic", ARITHMETICS)(arithmetic))
        with self._device_order:
            if place.device == str(inputs[0].device):
                self._load_wanted(layer, choice.precision)
            return _device.forward(self._handle, place, inputs, out, choice, stream)

    def _load_wanted(self, layer: int, chosen: Union[int, Tuple[int, ...]]) -> None:
        """What is asked for at FP4, and may not be base, to the device."""
        fp4 = PRECISIONS["fp4"]
        if chosen == fp4:
            self.load_fp4(layer)
        elif not isinstance(chosen, int) and fp4 in chosen:
            self.load_fp4(layer, [e for e, one in enumerate(chosen) if one == fp4])

    def load_fp4(self, layer: int, experts: Optional[Sequence[int]] = None) -> None:
        """Copies the FP4 of these experts, or of all that were booted, to the GPU that the layer
        lies on, where it stays until close; what is there already is not copied again. Waits for
        the GPU, and calls of other threads on tensors of it wait meanwhile. UsageError for a layer
        on the CPU; DataError for a delta record that is absent or damaged; CapacityError where the
        GPU's memory ends: those before are there."""
        wanted = None if experts is None else _experts(experts)
        with self._device_order:
            loaded = self._fp4.setdefault(_layer(layer), set())
            if loaded is None or (wanted is not None and loaded.issuperset(wanted)):
                return
            _device.wait_for_all(self.layer_device(layer))
            count = 0 if wanted is None else len(wanted)
            table = None if wanted is None else (c_uint32 * count)(*wanted)
            with self._handle.call() as engine:
                check(library().moe_load_fp4(engine, _layer(layer), table, count))
            self._fp4[layer] = None if wanted is None else loaded.union(wanted)

    def moe_refusal(self, layer: int) -> None:
        """Raises what calls on a GPU could not compute of this layer since this was last asked:
        DataError naming an expert, UsageError for an id that is none; the rows of their tokens are
        NaN. Of calls that have ended: synchronize first."""
        with self._handle.call() as engine:
            check(library().moe_refusal(engine, _layer(layer)))

    def _info(self, layer: int) -> LayerInfo:
        if self._infos is None:
            self._infos = self.describe_layers()
        if _layer(layer) >= len(self._infos):
            raise UsageError(f"there is no layer {layer}",
                             expected=f"an ordinal below {len(self._infos)}", found=str(layer))
        return self._infos[layer]

    @staticmethod
    def _inputs(info: LayerInfo, x: Any, ids: Any, weights: Any) -> List[Matrix]:
        found = [matrix_of(x, "x", True), matrix_of(ids, "ids", False),
                 matrix_of(weights, "weights", True)]
        rows = found[0].shape[0]
        expected = [(rows, info.hidden), (rows, found[1].shape[1]), found[1].shape]
        for name, matrix, shape in zip(("x", "ids", "weights"), found, expected):
            if matrix.shape != shape:
                raise UsageError(f"{name} has a wrong shape", expected=str(list(shape)),
                                 found=str(list(matrix.shape)))
        return found


class _Build:
    """One build, or import: its thread, and what it tells."""

    def __init__(self, call: str, source: StrPath, store: StrPath, options: Dict[str, Any]) -> None:
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.stop = False
        callback = _library.PROGRESS_CALLBACK(self._progress)
        kind = _library.BuildOptions if call == "build" else _library.ImportOptions
        self._call = call
        self._options = kind(on_progress=callback, **options)
        self._arguments = (path_of("checkpoint" if call == "build" else "planes_cache")(source),
                           path_of("store")(store), byref(self._options))
        self.thread = threading.Thread(target=self._run, name="hotplane-build", daemon=True)

    def _progress(self, _user: Any, progress: Any) -> int:
        now = progress[0]
        self.events.put((now.bytes_done, now.bytes_total, text(now.phase)))
        return int(self.stop)

    def _run(self) -> None:
        report = c_char_p()
        try:
            if getattr(library(), self._call)(*self._arguments, byref(report)) != OK:
                raise last_error()
            self.events.put(dict(json.loads(text(report.value))))
        except Exception as error:  # raised again by the thread that waits
            self.events.put(error)

    def wait(self, what: str, progress: bool) -> Dict[str, Any]:
        """The report, or its exception; a KeyboardInterrupt ends it."""
        display = Display(what, progress)
        self.thread.start()
        try:
            while True:
                event = self.events.get()
                if isinstance(event, dict):
                    return event
                if isinstance(event, BaseException):
                    raise event
                display.show(*event)
        finally:
            self.stop = True
            try:
                join(self.thread)
            finally:
                display.close()


GEOMETRY = '"E,H,I", a name such as "ds4-flash", or "0-2:E,H,I;3-43:E,H,I"'


@known_options
def build(checkpoint: StrPath, store: StrPath, *, layers: Optional[str] = None,
          delta: Optional[str] = "quintal", zero_mode: str = "auto", world: int = 1,
          workers: int = 0, batch: int = 0, staging_limit_bytes: int = 0,
          device: Optional[str] = None, progress: bool = False) -> Dict[str, Any]:
    """Quantizes the routed experts of `checkpoint` (safetensors: directory or file) into the store.
    What is there stays, and nothing half-done is left whatever happens: run it again to go on.
    Returns the report, with the keys of `hotplane build --json`.

    layers               "3-9", "main", "mtp"; None: all
    delta                "quintal", "nibble", or None: the base tier only
    zero_mode            sign of exact zeros in the base: "auto", "sign", "alt"
    world                ranks to cut the experts for
    workers              threads; 0: the CPUs this process may use
    batch                layers that begin to be built together; 0: 12
    staging_limit_bytes  of tensors in flight; 0: a quarter of the available memory
    device               "cpu", "cuda" or "cuda:N": what quantizes; the store is the same
    progress             a bar by tqdm where that is installed, else lines on stderr

    KeyboardInterrupt ends it. Errors: UsageError, DataError naming tensor and offset, CapacityError
    before anything is written, SystemFailure."""
    encoding = {} if delta is None else {
        "delta_encoding": word("delta", {k: ENCODINGS[k] for k in ("quintal", "nibble")})(delta)}
    return _Build("build", checkpoint, store, {
        "layers": string("layers", LAYERS)(layers), "base_only": int(delta is None), **encoding,
        "zero_mode": word("zero_mode", _library.ZERO_MODES)(zero_mode),
        "world": number("world", 32)(world), "workers": number("workers", 32)(workers),
        "batch": number("batch", 32)(batch),
        "staging_limit_bytes": number("staging_limit_bytes", 64)(staging_limit_bytes),
        "device": string("device", DEVICE)(device)}).wait("build", progress)


@known_options
def import_planes_cache(planes_cache: StrPath, store: StrPath, layers_geometry: str, *,
                        mtp_layers: Optional[str] = None, config: Optional[StrPath] = None,
                        key: Optional[str] = None, rank: Optional[int] = None,
                        base_only: bool = False, move: bool = False, workers: int = 0,
                        progress: bool = False) -> Dict[str, Any]:
    """Takes the planes that vLLM-MoET cached in `planes_cache` into the store, without their
    checkpoint; all is checked. What is there stays: run it again to go on. Returns the report, with
    the keys of `hotplane import --json`.

    layers_geometry  "E,H,I" of the whole layer, a name such as "ds4-flash", or
                     "0-2:E,H,I;3-43:E,H,I" by the numbers in the file names
    mtp_layers       their numbers: "43", "43-44"; None: there are none
    config           the model's config.json or its folder: activation, top-k, and a shape to
                     compare with; None: silu(gate) * up
    key              prefix, where the cache has several models or configurations
    rank             this rank's folder alone; None: all, which must be there
    base_only        leave the FP4 files where they are
    move             remove from the cache what the store was proved to have
    workers          threads; 0: the CPUs this process may use
    progress         a bar by tqdm where that is installed, else lines on stderr

    KeyboardInterrupt ends it. Errors: UsageError, DataError naming the file, CapacityError before
    anything is written, SystemFailure."""
    return _Build("import_planes_cache", planes_cache, store, {
        "layers_geometry": string("layers_geometry", GEOMETRY)(layers_geometry),
        "mtp_layers": string("mtp_layers", 'numbers such as "43" or "43-44"')(mtp_layers),
        "config": path_of("config")(config),
        "key": string("key", "the first characters of a key")(key),
        "rank": -1 if rank is None else number("rank", 31)(rank),
        "base_only": flag("base_only")(base_only), "move": flag("move")(move),
        "workers": number("workers", 32)(workers)}).wait("import", progress)


@known_options
def open(path: StrPath, *, generation: Optional[str] = None, checkpoint: Optional[StrPath] = None,
         rank: Optional[int] = None, world: int = 0) -> Store:
    """Opens the store in directory `path`: its manifest is read, nothing else.

    generation  prefix; None: the only one there is
    checkpoint  what boots may build from; makes the generation where the store has none yet
    rank        of a sharded store; None: what torchrun, Open MPI, PMI or Slurm left in the
                environment, where their world is the store's
    world       number of ranks that the store must have been built for; 0: any

    UsageError where there is no store, or where it is not clear what is meant; DataError for a
    manifest that is not as it should be."""
    given = {"generation": generation, "checkpoint": checkpoint, "rank": rank, "world": world}
    return Store(path, {name: value for name, value in given.items() if value is not None})


@tells_options
def boot(path: StrPath, device: Optional[str] = None, **options: Any) -> Engine:
    """Opens and boots it: as `open(path).boot(device, ...)`, whose options it takes."""
    opening = {name: options.pop(name) for name in ("generation", "checkpoint", "rank", "world")
               if name in options}
    store = open(path, **opening)
    try:
        return store.boot(device, **options)
    finally:
        store.close()


