"""What can go wrong, one class for each kind of the command line's exit codes."""

from __future__ import annotations

from typing import Any, Dict, Optional


class Error(Exception):
    """A call that failed. str() is the whole text: what, file, offset, expected, found, advice.

    code          exit code of the command line: 1, 2, 3, 4, 130, 143
    kind          "system", "usage", "data", "capacity" or "interrupted"
    what          one sentence
    file          path, "" where there is none
    offset        bytes in `file`, or None
    expected, found, advice   "" where there is nothing to say
    error_number  errno, or 0
    """

    code = 0
    kind = ""

    def __init__(self, what: str, *, text: Optional[str] = None, code: Optional[int] = None,
                 file: str = "", offset: Optional[int] = None, expected: str = "",
                 found: str = "", advice: str = "", error_number: int = 0) -> None:
        self.what = what
        self.file = file
        self.offset = offset
        self.expected = expected
        self.found = found
        self.advice = advice
        self.error_number = error_number
        if code is not None:
            self.code = code
        if text is None:
            text = what + "".join(f"\n  {name:<9} {value}" for name, value in (
                ("file", file), ("expected", expected), ("found", found), ("to fix", advice))
                if value)
        self.text = text
        super().__init__(text)

    def __reduce__(self) -> Any:
        fields: Dict[str, Any] = dict(self.__dict__)
        return _restore, (type(self), fields)


def _restore(kind: type, fields: Dict[str, Any]) -> Error:
    error: Error = kind(**fields)
    return error


class SystemFailure(Error):
    """The system failed us: I/O, permission, device."""

    code = 1
    kind = "system"


class UsageError(Error):
    """Wrong usage, or ambiguous."""

    code = 2
    kind = "usage"


class DataError(Error):
    """Data is corrupt, malformed or does not match."""

    code = 3
    kind = "data"


class CapacityError(Error):
    """Does not fit: memory, space."""

    code = 4
    kind = "capacity"


class Interrupted(Error):
    """Ended because it was asked to: a boot whose engine was closed or cancelled meanwhile."""

    code = 130
    kind = "interrupted"


KINDS = {1: SystemFailure, 2: UsageError, 3: DataError, 4: CapacityError, 130: Interrupted,
         143: Interrupted}
