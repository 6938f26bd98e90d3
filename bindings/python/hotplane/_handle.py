"""The C engine behind Store and Engine: who uses it, and when it may be freed."""

from __future__ import annotations

import os
import threading
import time
from ctypes import byref, c_void_p
from os import PathLike
from typing import Dict, Optional, Union
from weakref import ref

from ._library import BootOptions, check, library
from ._options import path, refusal
from .errors import UsageError

# A close that waits looks again after this, and after twice as much each time, up to the other.
LOOK_AGAIN_SECONDS = 0.0005
LOOK_AGAIN_SECONDS_MAX = 0.05


class Handle:
    """`with handle.call() as engine:` is a call on it; UsageError after close().

    Nothing here takes a lock: a KeyboardInterrupt may come between any two instructions, also where
    a lock would be let go of. Each step is one operation on a dict or an attribute, which other
    threads see whole. Who enters tells so before looking whether this is closed; who closes tells
    so before looking who is in."""

    def __init__(self) -> None:
        self._pointer: Optional[c_void_p] = c_void_p()
        # Held by those who are in them alone: one that an exception took its thread out of is gone.
        self._calls: Dict[int, ref[_Call]] = {}
        self._closed = False
        self._freeing = False
        self._process = os.getpid()

    def open(self, store: Union[str, PathLike[str]],
             options: Optional[BootOptions] = None) -> None:
        """Once, by the thread that made this, which has seen to it that close() is called: a signal
        may come before this returns."""
        if store is None:
            raise refusal("path", "the store's directory", store)
        if self._pointer is not None:
            check(library().open(path("path")(store), options, byref(self._pointer)))

    @property
    def closed(self) -> bool:
        return self._closed

    def call(self) -> _Call:
        return _Call(self)

    def cancel(self) -> None:
        call = _Call(self)
        call.begin()
        try:
            if self._pointer and not self._freeing:
                library().cancel(self._pointer)
        finally:
            call.end()

    def close(self) -> None:
        """Once more does nothing. Ends a boot that runs; waits for the calls of other threads. In a
        forked child the parent's engine is let go of, not freed: its threads are not there."""
        if os.getpid() != self._process:
            self._closed, self._pointer = True, None
            return
        self._closed = True
        self.cancel()
        self._freeing = True
        seconds = LOOK_AGAIN_SECONDS
        while self._is_used_by_others():
            time.sleep(seconds)
            seconds = min(2 * seconds, LOOK_AGAIN_SECONDS_MAX)
        if self._pointer:
            library().close_at(byref(self._pointer))

    def _is_used_by_others(self) -> bool:
        own = threading.get_ident()
        calls = [call() for call in list(self._calls.values())]
        return any(call is not None and call.thread != own for call in calls)


class _Call:
    """One call, in the thread that makes it."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self.thread = threading.get_ident()

    def begin(self) -> None:
        self._handle._calls[id(self)] = ref(self)

    def end(self) -> None:
        self._handle._calls.pop(id(self), None)

    def __enter__(self) -> c_void_p:
        self.begin()
        handle = self._handle
        if handle._closed or not handle._pointer:
            self.end()
            raise UsageError("it was closed before", advice="open the store, or boot it, again")
        return handle._pointer

    def __exit__(self, *_exception: object) -> None:
        self.end()
