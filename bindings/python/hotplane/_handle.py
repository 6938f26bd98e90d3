"""The C engine behind Store and Engine: who uses it, and when it may be freed."""

from __future__ import annotations

import os
import threading
from ctypes import byref, c_void_p
from os import PathLike
from typing import Dict, Optional, Union

from ._library import BootOptions, check, encode, library
from .errors import UsageError


class Handle:
    """`with handle as engine:` is a call on it; UsageError after close()."""

    def __init__(self) -> None:
        self._pointer: Optional[c_void_p] = c_void_p()
        self._changed = threading.Condition()
        self._callers: Dict[int, int] = {}  # thread: calls it is in
        self._closed = False
        self._process = os.getpid()

    def open(self, store: Union[str, PathLike[str]],
             options: Optional[BootOptions] = None) -> None:
        """Once, by the thread that made this, which has seen to it that close() is called: a signal
        may come before this returns."""
        if self._pointer is not None:
            check(library().open(encode(store), options, byref(self._pointer)))

    @property
    def closed(self) -> bool:
        return self._closed

    def __enter__(self) -> c_void_p:
        with self._changed:
            if self._closed or not self._pointer:
                raise UsageError("it was closed before",
                                 advice="open the store, or boot it, again")
            thread = threading.get_ident()
            self._callers[thread] = self._callers.get(thread, 0) + 1
            return self._pointer

    def __exit__(self, *_exception: object) -> None:
        with self._changed:
            thread = threading.get_ident()
            self._callers[thread] -= 1
            if self._callers[thread] == 0:
                del self._callers[thread]
                self._changed.notify_all()

    def cancel(self) -> None:
        with self._changed:
            if self._pointer:
                library().cancel(self._pointer)

    def close(self) -> None:
        """Once more does nothing. Ends a boot that runs; waits for the calls of other threads. In a
        forked child the parent's engine is let go of, not freed: its threads are not there."""
        if os.getpid() != self._process:
            self._closed, self._pointer = True, None
            return
        with self._changed:
            self._closed = True
            if not self._pointer:
                return
            library().cancel(self._pointer)
            own = threading.get_ident()
            while any(thread != own for thread in self._callers):
                self._changed.wait()
            pointer = self._pointer
        library().close_at(byref(pointer))
