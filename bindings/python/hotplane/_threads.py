"""Waiting for threads that may not be left behind."""

from __future__ import annotations

import threading
from typing import Optional


def join(thread: threading.Thread) -> None:
    """Until it has ended, however often the wait is interrupted: the library calls back into Python
    from it. The first KeyboardInterrupt is raised then."""
    interrupt: Optional[KeyboardInterrupt] = None
    while thread.is_alive():
        try:
            thread.join()
        except KeyboardInterrupt as error:
            interrupt = interrupt or error
    if interrupt is not None:
        raise interrupt
