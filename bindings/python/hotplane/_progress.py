"""How far a boot or a build is: a bar by tqdm where that is installed, plain lines otherwise."""

from __future__ import annotations

import sys
import time
from typing import Any, Optional

LINE_SECONDS = 1.0


def _tqdm() -> Any:
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        return None
    return tqdm


class Display:
    """`show` as often as one likes; bytes. `enabled` False: nothing is printed."""

    def __init__(self, what: str, enabled: bool) -> None:
        self._what, self._enabled = what, enabled
        self._bar: Any = None
        self._tqdm = _tqdm() if enabled else None
        self._last: Optional[float] = None
        self._line = ""

    def show(self, done: int, total: int, note: str) -> None:
        if not self._enabled:
            return
        if self._tqdm is not None:
            if self._bar is None:
                self._bar = self._tqdm(desc=self._what, unit="B", unit_scale=True,
                                       unit_divisor=1024)
            self._bar.total = total or None
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.n = done
            self._bar.refresh()
            return
        gib = 1 << 30
        self._line = f"{self._what}: {note}"
        if total:
            self._line += f", {done / gib:.2f} of {total / gib:.2f} GiB"
        now = time.monotonic()
        if self._last is None or now - self._last >= LINE_SECONDS:
            self._last = now
            self._print()

    def _print(self) -> None:
        if self._line:
            print(self._line, file=sys.stderr, flush=True)
            self._line = ""

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._enabled:
            self._print()
