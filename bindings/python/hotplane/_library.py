"""The C API by ctypes: structs and functions of hotplane.h, errors as exceptions, logs to logging.

Calls release the GIL. What each function does is said in hotplane.h; a test holds the structs and
enums here to it.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import threading
from ctypes import (CFUNCTYPE, POINTER, byref, c_char_p, c_double, c_int, c_int32, c_size_t,
                    c_uint32, c_uint64, c_void_p, py_object)
from typing import Any, Optional

from .errors import KINDS, Error, SystemFailure, UsageError

logger = logging.getLogger("hotplane")

OK, SYSTEM, USAGE = 0, 1, 2
PARTS = {"planes13": 1, "sc13": 2, "planes2": 3, "sc2": 4, "bias13": 5, "bias2": 6}
RECORD_KINDS = {"delta": 1, "full": 2, "base": 3}
ENCODINGS = {"planes": 1, "quintal": 2, "nibble": 3}
PRESENCES = {1: "absent", 2: "present", 3: "damaged", 4: "unreadable"}
PRECISIONS = {"base": 1, "fp4": 2, "fp4_or_base": 3}
ARITHMETICS = {"fast": 1, "exact": 2, "fp8": 3}
ACTIVATIONS = {1: "silu", 2: "silu_clamped", 3: "swiglu_oai"}
RESIDENCIES = {"auto": 0, "device": 1, "host": 2}
CACHES = {"auto": 0, "keep": 1, "bypass": 2}
ZERO_MODES = {"auto": 0, "sign": 1, "alt": 2}
LOG_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}


class Struct(ctypes.Structure):
    """A struct that knows its size."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(struct_bytes=ctypes.sizeof(self), **fields)


LOG_CALLBACK = CFUNCTYPE(None, c_void_p, c_int, c_char_p)


class ErrorFields(Struct):
    _fields_ = [("struct_bytes", c_size_t), ("code", c_int), ("error_number", c_int),
                ("has_offset", c_int), ("offset", c_uint64), ("what", c_char_p),
                ("file", c_char_p), ("expected", c_char_p), ("found", c_char_p),
                ("advice", c_char_p)]


class Layer(Struct):
    _fields_ = [("struct_bytes", c_size_t), ("ordinal", c_uint32), ("model_index", c_uint32),
                ("experts", c_uint32), ("hidden", c_uint32), ("intermediate", c_uint32),
                ("planes13", c_void_p), ("planes13_bytes", c_size_t),
                ("sc13", c_void_p), ("sc13_bytes", c_size_t),
                ("planes2", c_void_p), ("planes2_bytes", c_size_t),
                ("sc2", c_void_p), ("sc2_bytes", c_size_t),
                ("planes13_stride", c_size_t), ("sc13_stride", c_size_t),
                ("planes2_stride", c_size_t), ("sc2_stride", c_size_t),
                ("sc13_offset", c_size_t), ("planes2_offset", c_size_t),
                ("sc2_offset", c_size_t), ("device", c_int),
                ("bias13", c_void_p), ("bias13_bytes", c_size_t),
                ("bias2", c_void_p), ("bias2_bytes", c_size_t)]


LAYER_CALLBACK = CFUNCTYPE(None, c_void_p, POINTER(Layer))


class BootOptions(Struct):
    _fields_ = [("struct_bytes", c_size_t), ("generation", c_char_p), ("layers", c_char_p),
                ("map", c_int), ("verify", c_int), ("workers", c_uint32),
                ("on_layer", LAYER_CALLBACK), ("user", c_void_p),
                ("delta_cache_bytes", c_uint64), ("full_cache_bytes", c_uint64),
                ("base_cache_bytes", c_uint64),
                ("checkpoint", c_char_p), ("no_build", c_int), ("want_delta", c_int),
                ("delta_layers", c_char_p), ("no_delta_layers", c_char_p),
                ("delta_encoding", c_int), ("batch", c_uint32), ("pin_delta_bytes", c_uint64),
                ("staging_limit_bytes", c_uint64),
                ("first_expert", c_uint32), ("expert_count", c_uint32),
                ("base_residency", c_int), ("memory_bytes", c_uint64),
                ("reserve_bytes", c_uint64), ("cache", c_int),
                ("rank", c_int32), ("world", c_uint32), ("device", c_char_p)]

    def __init__(self, **fields: Any) -> None:
        super().__init__(**{"verify": 1, "rank": -1, **fields})


class Progress(Struct):
    _fields_ = [("struct_bytes", c_size_t), ("phase", c_char_p), ("bytes_done", c_uint64),
                ("bytes_total", c_uint64)]


PROGRESS_CALLBACK = CFUNCTYPE(c_int, c_void_p, POINTER(Progress))


class BuildOptions(Struct):
    _fields_ = [("struct_bytes", c_size_t), ("layers", c_char_p), ("base_only", c_int),
                ("delta_encoding", c_int), ("zero_mode", c_int), ("world", c_uint32),
                ("workers", c_uint32), ("batch", c_uint32), ("staging_limit_bytes", c_uint64),
                ("on_progress", PROGRESS_CALLBACK), ("user", c_void_p), ("device", c_char_p)]


class ImportOptions(Struct):
    _fields_ = [("struct_bytes", c_size_t), ("layers_geometry", c_char_p),
                ("mtp_layers", c_char_p), ("config", c_char_p), ("key", c_char_p),
                ("rank", c_int32), ("base_only", c_int), ("move", c_int), ("workers", c_uint32),
                ("on_progress", PROGRESS_CALLBACK), ("user", c_void_p)]


class Store(Struct):
    _fields_ = [("struct_bytes", c_size_t), ("generation", c_char_p), ("directory", c_char_p),
                ("layer_count", c_uint32), ("top_k", c_uint32), ("rank", c_uint32),
                ("world", c_uint32), ("activation", c_int), ("activation_limit", c_double),
                ("activation_alpha", c_double)]


class LayerInfo(Struct):
    _fields_ = [("struct_bytes", c_size_t), ("ordinal", c_uint32), ("model_index", c_uint32),
                ("mtp", c_int), ("experts", c_uint32), ("hidden", c_uint32),
                ("intermediate", c_uint32), ("base", c_int), ("delta", c_int),
                ("delta_encoding", c_int)]


class RecordView(Struct):
    _fields_ = [("struct_bytes", c_size_t), ("kind", c_int), ("encoding", c_int),
                ("layer", c_uint32), ("expert", c_uint32), ("part_count", c_uint32),
                ("parts", c_void_p * 4), ("part_bytes", c_size_t * 4)]


class CacheStats(Struct):
    _fields_ = [("struct_bytes", c_size_t), ("hits", c_uint64), ("misses", c_uint64),
                ("evictions", c_uint64), ("uncached", c_uint64), ("prefetched", c_uint64),
                ("failures", c_uint64), ("slot_count", c_uint64), ("slots_used", c_uint64),
                ("bytes_used", c_uint64), ("bytes_max", c_uint64)]


class Moe(Struct):
    _fields_ = [("struct_bytes", c_size_t), ("layer", c_uint32), ("token_count", c_uint32),
                ("top_k", c_uint32), ("arithmetic", c_int), ("precision", c_int),
                ("precisions", c_void_p), ("x", c_void_p), ("ids", c_void_p),
                ("weights", c_void_p), ("y", c_void_p)]


class DeviceMoe(Struct):
    _fields_ = [("struct_bytes", c_size_t), ("layer", c_uint32), ("token_count", c_uint32),
                ("top_k", c_uint32), ("arithmetic", c_int), ("precision", c_int),
                ("precisions", c_void_p), ("x", c_void_p), ("ids", c_void_p),
                ("weights", c_void_p), ("y", c_void_p), ("workspace", c_void_p),
                ("workspace_bytes", c_size_t), ("stream", c_void_p)]


# name of hotplane.h: (struct here, its _init)
STRUCTS = {"error": ErrorFields, "layer": Layer, "boot_options": BootOptions,
           "progress": Progress, "build_options": BuildOptions,
           "import_options": ImportOptions, "store": Store,
           "layer_info": LayerInfo, "record_view": RecordView, "cache_stats": CacheStats,
           "moe": Moe, "device_moe": DeviceMoe}

# name: (result, arguments)
FUNCTIONS = {
    "version": (c_char_p, []),
    "last_error": (c_char_p, []),
    "get_last_error": (c_int, [POINTER(ErrorFields)]),
    "set_log": (None, [LOG_CALLBACK, c_void_p]),
    "build": (c_int, [c_char_p, c_char_p, POINTER(BuildOptions), POINTER(c_char_p)]),
    "import_planes_cache": (c_int, [c_char_p, c_char_p, POINTER(ImportOptions),
                                    POINTER(c_char_p)]),
    "open": (c_int, [c_char_p, POINTER(BootOptions), POINTER(c_void_p)]),
    "plan_json": (c_int, [c_void_p, POINTER(c_char_p)]),
    "start": (c_int, [c_void_p]),
    "wait": (c_int, [c_void_p]),
    "wait_layer": (c_int, [c_void_p, c_uint32, POINTER(Layer)]),
    "cancel": (None, [c_void_p]),
    "layer_count": (c_uint32, [c_void_p]),
    "get_layer": (c_int, [c_void_p, c_uint32, POINTER(Layer)]),
    "layer_dlpack": (c_int, [c_void_p, c_uint32, c_int, c_int, POINTER(c_void_p)]),
    "stats_json": (c_char_p, [c_void_p]),
    "describe": (c_int, [c_void_p, POINTER(Store)]),
    "describe_layer": (c_int, [c_void_p, c_uint32, POINTER(LayerInfo)]),
    "record_bytes": (c_int, [c_void_p, c_int, c_uint32, POINTER(c_size_t)]),
    "read_record": (c_int, [c_void_p, c_int, c_uint32, c_uint32, c_void_p, c_size_t]),
    "read_records": (c_int, [c_void_p, c_int, c_uint32, POINTER(c_uint32), POINTER(c_void_p),
                             c_size_t, c_size_t]),
    "record_get": (c_int, [c_void_p, c_int, c_uint32, c_uint32, c_int, POINTER(c_void_p)]),
    "record_look": (c_int, [c_void_p, POINTER(RecordView)]),
    "record_release": (None, [c_void_p]),
    "prefetch": (c_int, [c_void_p, c_int, c_uint32, POINTER(c_uint32), c_size_t,
                         POINTER(c_size_t)]),
    "get_cache_stats": (c_int, [c_void_p, c_int, POINTER(CacheStats)]),
    "moe_forward": (c_int, [c_void_p, POINTER(Moe)]),
    "stream_wait_layer": (c_int, [c_void_p, c_uint32, c_void_p]),
    "moe_workspace_bytes": (c_int, [c_void_p, c_uint32, c_uint32, c_uint32, POINTER(c_size_t)]),
    "moe_forward_on_device": (c_int, [c_void_p, POINTER(DeviceMoe)]),
    "moe_refusal": (c_int, [c_void_p, c_uint32]),
    "moe_load_fp4": (c_int, [c_void_p, c_uint32, POINTER(c_uint32), c_size_t]),
    "close": (None, [c_void_p]),
    "close_at": (None, [POINTER(c_void_p)]),
}
# The same of those that use objects of Python: called with the GIL held.
PYTHON_FUNCTIONS = {
    "owner_new": (py_object, [c_int]),
    "owner_to_dlpack": (c_int, [py_object]),
}
OWNED = {"tensor": 1, "tensor_versioned": 2, "record": 3}
STRUCT_BYTES_MAX = 4096
SONAME = "libhotplane.so"


def library_path() -> str:
    """HOTPLANE_LIBRARY, else the library inside the package, else what the loader finds."""
    named = os.environ.get("HOTPLANE_LIBRARY")
    if named:
        return named
    inside = os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib", SONAME)
    return inside if os.path.exists(inside) else SONAME


class Library:
    """The functions of the loaded library, without their prefix."""

    def __init__(self, path: str) -> None:
        try:
            self.dll = ctypes.CDLL(path)
        except OSError as error:
            named = os.environ.get("HOTPLANE_LIBRARY") == path
            raise SystemFailure(
                f"the hotplane library{', which HOTPLANE_LIBRARY names,' if named else ''} cannot "
                "be loaded", file=path, expected=f"the path of {SONAME}, of this package's version",
                found=str(error),
                advice="correct HOTPLANE_LIBRARY, or unset it where the package has its own library"
                if named else f"set HOTPLANE_LIBRARY to {SONAME}") from None
        with_gil = ctypes.PyDLL(path, handle=self.dll._handle)
        for dll, functions in ((self.dll, FUNCTIONS), (with_gil, PYTHON_FUNCTIONS)):
            for name, (result, arguments) in functions.items():
                try:
                    function = getattr(dll, "hotplane_" + name)
                except AttributeError:
                    raise self._other_version(path, f"no hotplane_{name}") from None
                function.restype, function.argtypes = result, arguments
                setattr(self, name, function)
        self.path = path
        for name, struct in STRUCTS.items():
            self._compare_size(name, struct)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    @staticmethod
    def _other_version(path: str, found: str) -> SystemFailure:
        return SystemFailure("the hotplane library is of another version than this package",
                             file=path, found=found,
                             advice="install both from one release, or unset HOTPLANE_LIBRARY")

    def _compare_size(self, name: str, struct: type) -> None:
        init = getattr(self.dll, f"hotplane_{name}_init", None)
        if init is None:
            return
        init.restype, init.argtypes = None, [c_void_p]
        room = (c_size_t * (STRUCT_BYTES_MAX // ctypes.sizeof(c_size_t)))()
        init(room)
        if room[0] != ctypes.sizeof(struct):
            raise self._other_version(
                self.path, f"hotplane_{name} of {room[0]} bytes, {ctypes.sizeof(struct)} expected")


_lock = threading.Lock()
_loaded: Optional[Library] = None


def _forward(_user: Any, level: int, line: bytes) -> None:
    logger.log(LOG_LEVELS.get(level, logging.ERROR), "%s", text(line))


_log = LOG_CALLBACK(_forward)


def library() -> Library:
    """The library, loaded at the first call. SystemFailure where it cannot be."""
    global _loaded
    if _loaded is None:
        with _lock:
            if _loaded is None:
                loaded = Library(library_path())
                loaded.set_log(_log, None)
                # The library must not call into an interpreter that is gone.
                atexit.register(loaded.set_log, LOG_CALLBACK(), None)
                _loaded = loaded
    return _loaded


def text(value: Optional[bytes]) -> str:
    return (value or b"").decode("utf-8", "surrogateescape")


def encode(value: Any) -> Optional[bytes]:
    """A path or a word as the C API takes it; None is NULL. UsageError for one with a zero byte,
    where C would end it."""
    if value is None:
        return None
    encoded = os.fsencode(value)
    if b"\0" in encoded:
        raise UsageError("a path or a word has a zero byte in it", expected="none",
                         found=repr(value))
    return encoded


def last_error() -> Error:
    """This thread's last failure."""
    fields = ErrorFields()
    library().get_last_error(byref(fields))
    kind = KINDS.get(fields.code, SystemFailure)
    return kind(text(fields.what), text=text(library().last_error()), code=fields.code,
                file=text(fields.file), offset=fields.offset if fields.has_offset else None,
                expected=text(fields.expected), found=text(fields.found),
                advice=text(fields.advice), error_number=fields.error_number)


def check(code: int) -> None:
    if code != OK:
        raise last_error()
