"""Options of a boot, as Python has them and as the C API has them."""

from __future__ import annotations

import os
from functools import wraps
from inspect import cleandoc
from operator import index
from typing import (TYPE_CHECKING, Any, Callable, Dict, Iterable, Mapping, Optional, Tuple, TypeVar,
                    cast)

from ._library import CACHES, ENCODINGS, RESIDENCIES, BootOptions, encode
from .errors import UsageError

if TYPE_CHECKING:
    from typing import TypedDict

    class Options(TypedDict, total=False):
        """Options of `Store.plan` and `Store.boot`; what they are: OPTIONS_TEXT."""

        layers: Optional[str]
        map: bool
        verify: bool
        workers: int
        experts: Tuple[int, int]
        residency: str
        memory_bytes: int
        reserve_bytes: int
        cache: str
        delta_cache_bytes: int
        full_cache_bytes: int
        base_cache_bytes: int
        delta: bool
        delta_layers: Optional[str]
        no_delta_layers: Optional[str]
        delta_encoding: Optional[str]
        pin_delta_bytes: int
        no_build: bool
        batch: int
        staging_limit_bytes: int
        checkpoint: Optional[str]
        generation: Optional[str]
        rank: Optional[int]
        world: int


OPTIONS_TEXT = """
Options of a boot; sizes are bytes, and 0 or None is the default:

device               "cpu" (default), "cuda", "cuda:N"
layers               "3-9", "main", "mtp"; None: all
map                  True: serve from the page cache; False: land in own memory
verify               every byte (default)
workers              threads; 0: the CPUs this process may use
experts              of each layer, (first, one past the last)
residency            of the base: "auto" (default), "device", "host"
memory_bytes         of the device, to use; 0: what is available
reserve_bytes        of it, how much stays free
cache                what reading leaves in the page cache: "auto" (default), "keep", "bypass"
delta_cache_bytes    memory for records of the delta tier that are kept
full_cache_bytes     the same, of experts at FP4
base_cache_bytes     the same, of experts at base
delta                True: the delta tier is wanted, and built where it is absent
delta_layers         of which layers; None: all
no_delta_layers      of which not
delta_encoding       "quintal", "nibble"; None: either
pin_delta_bytes      of delta records that the boot reads into their cache
no_build             True: refuse what is missing instead of building it
batch                layers that begin to be built together; 0: 12
staging_limit_bytes  of tensors in flight; 0: a quarter of the available memory
checkpoint           what may be built from
generation           prefix; None: the only one there is
rank                 of a sharded store; None: the launcher's
world                number of ranks that the store must have; 0: any"""


F = TypeVar("F", bound=Callable[..., Any])


def refusal(name: str, expected: str, value: Any) -> UsageError:
    return UsageError(f"{name} has a value that it does not take", expected=expected,
                      found=repr(value))


def word(name: str, table: Mapping[str, int]) -> Callable[[Any], int]:
    """A converter of one of the table's words."""
    def convert(value: Any) -> int:
        if not isinstance(value, str) or value not in table:
            raise refusal(name, " or ".join(map(repr, table)), value)
        return table[value]
    return convert


def number(name: str, bits: int) -> Callable[[Any], int]:
    def convert(value: Any) -> int:
        found = whole(value)
        if found is None or not 0 <= found < 1 << bits:
            raise refusal(name, f"a whole number of 0 to {(1 << bits) - 1}", value)
        return found
    return convert


def whole(value: Any) -> Optional[int]:
    """An int, or what stands for one, as numpy's do; True and False do not."""
    if isinstance(value, bool):
        return None
    try:
        return index(value)
    except TypeError:
        return None


def string(name: str, expected: str) -> Callable[[Any], Optional[bytes]]:
    """A converter of a word; None is NULL."""
    def convert(value: Any) -> Optional[bytes]:
        if value is not None and not isinstance(value, str):
            raise refusal(name, expected, value)
        return _encoded(name, expected, value)
    return convert


def path(name: str) -> Callable[[Any], Optional[bytes]]:
    """A converter of a path; None is NULL."""
    expected = "a path: str, bytes or os.PathLike"

    def convert(value: Any) -> Optional[bytes]:
        if value is not None and not isinstance(value, (str, bytes, os.PathLike)):
            raise refusal(name, expected, value)
        return _encoded(name, expected, value)
    return convert


def _encoded(name: str, expected: str, value: Any) -> Optional[bytes]:
    try:
        return encode(value)
    except UnicodeEncodeError:
        raise refusal(name, expected + ", that the file system's encoding has", value) from None
    except UsageError:
        raise refusal(name, expected + ", without a zero byte", value) from None


def flag(name: str) -> Callable[[Any], int]:
    """A converter of True or False, also as 1 and 0 and as numpy has them. A text is none: any that
    is not empty would be True."""
    def convert(value: Any) -> int:
        if isinstance(value, (bool, int)) or type(value).__module__ == "numpy":
            if value in (0, 1):
                return int(value)
        raise refusal(name, "True or False", value)
    return convert


def expert_range(value: Any) -> Tuple[int, int]:
    expected = "(first, one past the last), whole numbers, the first below the other"
    try:
        first, end = value
    except (TypeError, ValueError):
        raise refusal("experts", expected, value) from None
    bounds = whole(first), whole(end)
    if bounds[0] is None or bounds[1] is None or not 0 <= bounds[0] < bounds[1] < 1 << 32:
        raise refusal("experts", expected, value)
    return bounds[0], bounds[1]


# What the command line, and others, call an option.
OTHER_NAMES = {"tp": "world", "threads": "workers", "pin_delta": "pin_delta_bytes",
               "staging_limit": "staging_limit_bytes", "memory": "memory_bytes",
               "reserve": "reserve_bytes", "base": "residency", "path": "store"}


def unknown(call: str, name: str, known: Iterable[str]) -> UsageError:
    from difflib import get_close_matches  # slow to import, for what is rare

    near = [other for other in [OTHER_NAMES.get(name, "")] if other in known]
    near += get_close_matches(name, known, 1)
    return UsageError(f"{call} has no option {name}", expected=", ".join(sorted(known)), found=name,
                      advice=f"is {near[0]} meant?" if near else "")


def tells_options(function: F) -> F:
    """The function, with OPTIONS_TEXT at the end of what help() shows."""
    if function.__doc__ is not None:  # as with -OO
        function.__doc__ = cleandoc(function.__doc__) + "\n" + OPTIONS_TEXT
    return function


def known_options(function: F) -> F:
    """The function, that refuses keywords it does not have as boots do: with those it has."""
    code: Any = function.__code__
    names = code.co_varnames[:code.co_argcount + code.co_kwonlyargcount]

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        for name in options:
            if name not in names:
                raise unknown(function.__name__, name, names)
        return function(*arguments, **options)
    return cast("F", call)


LAYERS = 'layers such as "3-9" or "0,4-7", "main", or "mtp"'
DEVICE = '"cpu", "cuda", or "cuda:N"'


# Python's name: (field, converter). None always is the default.
FIELDS: Dict[str, Tuple[str, Callable[[Any], Any]]] = {
    "layers": ("layers", string("layers", LAYERS)), "map": ("map", flag("map")),
    "verify": ("verify", flag("verify")), "workers": ("workers", number("workers", 32)),
    "device": ("device", string("device", DEVICE)),
    "residency": ("base_residency", word("residency", RESIDENCIES)),
    "cache": ("cache", word("cache", CACHES)), "delta": ("want_delta", flag("delta")),
    "delta_layers": ("delta_layers", string("delta_layers", LAYERS)),
    "no_delta_layers": ("no_delta_layers", string("no_delta_layers", LAYERS)),
    "delta_encoding": ("delta_encoding",
                       word("delta_encoding", {k: ENCODINGS[k] for k in ("quintal", "nibble")})),
    "no_build": ("no_build", flag("no_build")), "batch": ("batch", number("batch", 32)),
    "checkpoint": ("checkpoint", path("checkpoint")),
    "generation": ("generation", string("generation", "the first digits of a generation's name")),
    "rank": ("rank", number("rank", 31)), "world": ("world", number("world", 32)),
}
for _name in ("memory_bytes", "reserve_bytes", "delta_cache_bytes", "full_cache_bytes",
              "base_cache_bytes", "pin_delta_bytes", "staging_limit_bytes"):
    FIELDS[_name] = (_name, number(_name, 64))


def boot_options(options: Mapping[str, Any]) -> BootOptions:
    """UsageError for an option that does not exist, or a value that cannot be."""
    fields: Dict[str, Any] = {}
    for name, value in options.items():
        if value is None:
            continue
        if name == "experts":
            first, end = expert_range(value)
            fields["first_expert"], fields["expert_count"] = first, end - first
            continue
        if name not in FIELDS:
            raise unknown("a boot", name, [*FIELDS, "experts"])
        field, convert = FIELDS[name]
        fields[field] = convert(value)
    return BootOptions(**fields)
