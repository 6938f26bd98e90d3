#!/usr/bin/env python3
"""count_tests.py JUNIT: the failures and the reasons of skips in ctest's report, then one line
`PASSED FAILED SKIPPED`."""
import sys
import xml.etree.ElementTree as xml

SHOWN_LINES_MAX = 60


def main():
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for case in xml.parse(sys.argv[1]).getroot().iter("testcase"):
        status = case.get("status")
        kind = {"run": "passed", "fail": "failed"}.get(status, "skipped")
        counts[kind] += 1
        if kind == "passed":
            continue
        print(f"{kind}: {case.get('name')}")
        output = (case.findtext("system-out") or "").rstrip().split("\n")
        for line in output[-SHOWN_LINES_MAX:] if kind == "failed" else skip_reason(output):
            print(f"  {line}")
    print(*counts.values())


def skip_reason(output):
    """The lines that tell why, of a GoogleTest skip or of a program that exited 77."""
    for index, line in enumerate(output):
        if line.endswith(": Skipped"):
            return output[index + 1:index + 2]
    return output[-1:]


if __name__ == "__main__":
    main()
