"""Which expert is computed at which precision: the map of `hotplane export --hf`, checked."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence

from .._engine import LayerInfo
from ..errors import UsageError

FP4 = "fp4"
WORDS = ("base", FP4)  # what also layers on the CPU have
# Of delta records, where nothing else is said: all of a small model, a share of a large one.
DELTA_CACHE_BYTES_MAX = 4 << 30


def _word(value: Any, where: str) -> str:
    if not isinstance(value, str) or value not in WORDS:
        raise UsageError(f"the precision of {where} cannot be", expected=" or ".join(WORDS),
                         found=repr(value))
    return value


def _number(key: Any, count: int, where: str) -> int:
    """A key of the map; JSON has them as strings."""
    try:
        number = int(key)
    except (TypeError, ValueError):
        number = -1
    if not 0 <= number < count or str(number) != str(key):
        raise UsageError(f"the precision map names {where} that there are not",
                         expected=f"numbers below {count}", found=repr(key))
    return number


def _layer(value: Any, default: str, info: LayerInfo) -> List[str]:
    where = f"layer {info.ordinal}"
    if not isinstance(value, Mapping):
        return [_word(value, where)] * info.experts
    value = dict(value)
    table = [_word(value.pop("default", default), where)] * info.experts
    for key, word in value.items():
        expert = _number(key, info.experts, f"experts of {where}")
        table[expert] = _word(word, f"expert {expert} of {where}")
    return table


def precisions_of(precision: Any, infos: Sequence[LayerInfo]) -> Dict[int, List[str]]:
    """ordinal: precision of each expert. `precision` is a word, or {"default": word, "layers":
    {ordinal: word, or {"default": word, expert: word}}}. UsageError for anything else in it."""
    if not isinstance(precision, Mapping):
        word = _word(precision, "the experts")
        return {info.ordinal: [word] * info.experts for info in infos}
    unknown = sorted(set(precision) - {"default", "layers"})
    if unknown or "default" not in precision:
        raise UsageError("the precision map has other keys than it can have",
                         expected="default, and layers where some differ",
                         found=", ".join(map(repr, precision)))
    default = _word(precision["default"], "the experts")
    layers = {_number(key, len(infos), "layers"): value
              for key, value in precision.get("layers", {}).items()}
    return {info.ordinal: _layer(layers.get(info.ordinal, default), default, info)
            for info in infos}


def joined(table: Sequence[str]) -> str:
    """As the ops of torch take it: one word where all are the same."""
    return table[0] if len(set(table)) == 1 else ",".join(table)


def options_for_fp4(precision: Any, infos: Sequence[LayerInfo],
                    device: Optional[str]) -> Dict[str, Any]:
    """Of a boot: the delta tier is wanted where an expert is at FP4, and its records are kept in
    memory of the host, but on a GPU, which they are read for once."""
    tables = precisions_of(precision, infos)
    record_bytes = sum(tables[info.ordinal].count(FP4) * 3 * info.intermediate * info.hidden // 2
                       for info in infos)  # as nibbles, the larger encoding
    if not record_bytes:
        return {}
    if device not in (None, "cpu"):
        return {"delta": True}
    return {"delta": True, "delta_cache_bytes": min(record_bytes, DELTA_CACHE_BYTES_MAX)}
