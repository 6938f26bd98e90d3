"""Options of a boot, as Python has them and as the C API has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Dict, Mapping, Tuple

from ._library import CACHES, ENCODINGS, RESIDENCIES, BootOptions, encode
from .errors import UsageError

if TYPE_CHECKING:
    from typing import Optional, TypedDict

    class Options(TypedDict, total=False):
        """Options of `Store.plan` and `Store.boot`; sizes are bytes, 0 or None the default."""

        layers: Optional[str]  # "3-9", "main", "mtp"; None: all
        map: bool  # serve from the page cache; False: land in own memory
        verify: bool  # every byte (default)
        workers: int  # threads; 0: the CPUs this process may use
        experts: Tuple[int, int]  # of each layer, first and one past the last
        residency: str  # of the base: "auto", "device", "host"
        memory_bytes: int  # of the device, to use; 0: what is available
        reserve_bytes: int  # of it, how much stays free
        cache: str  # what reading leaves in the page cache: "auto", "keep", "bypass"
        delta_cache_bytes: int  # memory for records that are kept, by kind
        full_cache_bytes: int
        base_cache_bytes: int
        delta: bool  # the delta tier is wanted: built where it is absent
        delta_layers: Optional[str]
        no_delta_layers: Optional[str]
        delta_encoding: Optional[str]  # "quintal", "nibble"; None: either
        pin_delta_bytes: int  # of delta records that the boot reads into their cache
        no_build: bool  # refuse what is missing instead of building it
        batch: int  # layers that begin to be built together; 0: 12
        staging_limit_bytes: int  # of tensors in flight; 0: a quarter of the available memory
        checkpoint: Optional[str]  # what may be built from
        generation: Optional[str]  # prefix; None: the only one there is
        rank: Optional[int]  # of a sharded store; None: the launcher's
        world: int  # number of ranks that the store must have; 0: any


def word(name: str, table: Mapping[str, int]) -> Callable[[Any], int]:
    """A converter of one of the table's words."""
    def convert(value: Any) -> int:
        if value not in table:
            raise UsageError(f"{name} has an unknown value", expected=" or ".join(table),
                             found=repr(value))
        return table[value]
    return convert


def number(name: str, bits: int) -> Callable[[Any], int]:
    def convert(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << bits:
            raise UsageError(f"{name} has a value that cannot be",
                             expected=f"a number of 0 to {(1 << bits) - 1}", found=repr(value))
        return value
    return convert


def _path(value: Any) -> Any:
    return encode(value)


# Python's name: (field, converter). None always is the default.
FIELDS: Dict[str, Tuple[str, Callable[[Any], Any]]] = {
    "layers": ("layers", _path), "map": ("map", bool), "verify": ("verify", bool),
    "workers": ("workers", number("workers", 32)), "device": ("device", _path),
    "residency": ("base_residency", word("residency", RESIDENCIES)),
    "cache": ("cache", word("cache", CACHES)), "delta": ("want_delta", bool),
    "delta_layers": ("delta_layers", _path), "no_delta_layers": ("no_delta_layers", _path),
    "delta_encoding": ("delta_encoding",
                       word("delta_encoding", {k: ENCODINGS[k] for k in ("quintal", "nibble")})),
    "no_build": ("no_build", bool), "batch": ("batch", number("batch", 32)),
    "checkpoint": ("checkpoint", _path), "generation": ("generation", _path),
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
            first, end = value
            if not 0 <= first < end < 1 << 32:
                raise UsageError("experts has a value that cannot be",
                                 expected="(first, one past the last)", found=repr(value))
            fields["first_expert"], fields["expert_count"] = first, end - first
            continue
        if name not in FIELDS:
            raise UsageError(f"there is no option {name}",
                             expected=", ".join(sorted([*FIELDS, "experts"])), found=name)
        field, convert = FIELDS[name]
        fields[field] = convert(value)
    return BootOptions(**fields)
