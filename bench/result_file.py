"""Names of result files, looked at before anything is measured."""

import argparse
import os


def result_file(path):
    """For add_argument(type=): the path, if a file can be made or replaced there. A file that is
    there stays as it is, and where there is none, none is left: what is measured may fail."""
    there = os.path.exists(path)
    try:
        with open(path, "a"):
            pass
        if not there:
            os.remove(os.path.realpath(path))  # not the link that led there
        return path
    except OSError as error:
        folder = os.path.dirname(path) or "."
        raise argparse.ArgumentTypeError(
            f"{path} cannot be written: {error.strerror}; expected the name of a file in a folder "
            f"that is there ({folder}); name another, or make the folder first") from None
