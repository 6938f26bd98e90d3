"""hotplane: the routed experts of a Mixture-of-Experts model, booted at the speed of the copy.

    hotplane.build("/models/M", "/store")
    with hotplane.open("/store") as store, store.boot() as engine:
        planes = engine.layers[0].planes13.numpy()           # [E, 2I*H/4] uint8, zero-copy
        y = engine.moe_forward(0, x, ids, weights)           # [T, H] float32

Errors are exceptions by kind, subclasses of hotplane.Error. Logs go to logging's "hotplane".
"""

from __future__ import annotations

from typing import Any

from ._arrays import Part
from ._engine import (Engine, Layer, LayerInfo, Record, Store, boot, build, import_planes_cache,
                      open)
from .errors import (CapacityError, DataError, Error, Interrupted, SystemFailure, UsageError)

__all__ = ["CapacityError", "DataError", "Engine", "Error", "Interrupted", "Layer", "LayerInfo",
           "Part", "Record", "Store", "SystemFailure", "UsageError", "boot", "build",
           "import_planes_cache", "open"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from ._library import library, text
        return text(library().version())
    raise AttributeError(f"module 'hotplane' has no attribute {name!r}")
