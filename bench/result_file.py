"""Names of result files, looked at before anything is measured."""

import argparse
import os


def result_file(path):
    """For add_argument(type=): the path, if a file can be made or replaced there; one that is not
    there yet is made, empty."""
    try:
        with open(path, "a"):
            return path
    except OSError as error:
        folder = os.path.dirname(path) or "."
        raise argparse.ArgumentTypeError(
            f"{path} cannot be written: {error.strerror}; expected the name of a file in a folder "
            f"that is there ({folder}); name another, or make the folder first") from None
