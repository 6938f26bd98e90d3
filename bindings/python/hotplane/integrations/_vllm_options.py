"""What vLLM's --model-loader-extra-config may say to hotplane."""

from __future__ import annotations

from typing import Any, Dict, Mapping

from .._library import ARITHMETICS
from .._options import FIELDS, word
from ..errors import UsageError

OPENING = ("generation", "checkpoint", "rank", "world")
OWN = ("store", "precision", "arithmetic")
KEYS = frozenset(OWN) | frozenset(FIELDS)


def options_of(extra: Any) -> Dict[str, Any]:
    """What --model-loader-extra-config says: `store` (required), `precision` (as of
    transformers.attach), `arithmetic`, and options of `Store.boot` and `open`. UsageError for
    unknown keys."""
    given = dict(extra) if isinstance(extra, Mapping) else {}
    unknown = sorted(set(given) - KEYS)
    if unknown:
        raise UsageError("model_loader_extra_config has keys that there are not",
                         expected=", ".join(sorted(KEYS)), found=", ".join(unknown))
    if not isinstance(given.get("store"), str):
        raise UsageError("model_loader_extra_config names no store",
                         expected='{"store": "/path"}', found=repr(extra))
    given.setdefault("precision", "base")
    word("arithmetic", ARITHMETICS)(given.setdefault("arithmetic", "fast"))
    return given
