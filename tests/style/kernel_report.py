"""kernel_report.py FOLDER: what ptxas said of the kernels below FOLDER (*.ptxas, written by
hp_kernel_image). Exits 1 where a kernel spills registers, or where the compiler had to give up on
what the kernel was written for (remarks C7508 to C7599), 77 where there are no reports."""

import pathlib
import re
import sys


def findings(report):
    """The lines of one report that a kernel must not have, each with the kernel's name."""
    kernel = "?"
    for line in report.splitlines():
        named = re.search(r"Compiling entry function '([^']+)' for '([^']+)'", line)
        if named:
            kernel = f"{named[1]} ({named[2]})"
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line)
        if spills and (int(spills[1]) or int(spills[2])):
            yield f"{kernel}: {line.strip()}"
        if re.search(r"\(C75\d\d\)", line):
            yield line.strip()


def main(folder):
    reports = sorted(pathlib.Path(folder).rglob("*.ptxas"))
    if not reports:
        print("skipped: this build has no CUDA kernels")
        return 77
    kernels = 0
    bad = []
    for path in reports:
        text = path.read_text()
        found = len(re.findall("Compiling entry function", text))
        if not found:
            bad.append(f"{path.name}: no kernel in it")
        kernels += found
        bad += [f"{path.name}: {line}" for line in findings(text)]
    print("\n".join(bad))
    print(f"{kernels} kernels in {len(reports)} reports, {len(bad)} findings")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
