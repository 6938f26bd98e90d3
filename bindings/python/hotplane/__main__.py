"""python3 -m hotplane: the command line."""

import os
import shutil
import sys
from typing import Optional

from ._library import library_path


def program() -> Optional[str]:
    """The one in the package, else beside the library (lib/ and bin/), else in PATH."""
    inside = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "hotplane")
    beside = os.path.join(os.path.dirname(os.path.abspath(library_path())), os.pardir, "bin",
                          "hotplane")
    for path in (inside, os.path.normpath(beside)):
        if os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    return shutil.which("hotplane")


def main() -> int:
    path = program()
    # A script that was installed for this very function is not the program.
    if path is None or os.path.realpath(path) == os.path.realpath(sys.argv[0]):
        print("error: the hotplane program is neither in the package, nor beside the library, nor "
              "in PATH", file=sys.stderr)
        return 1
    os.execv(path, ["hotplane", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
