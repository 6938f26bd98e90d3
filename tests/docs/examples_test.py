#!/usr/bin/env python3
"""examples_test.py COMPILER HOTPLANE ROOT: the C++ blocks of the documents compile, the commands
they show exist, inspect prints what they say, and the README's figures are those of
bench/results."""
import re
import subprocess
import sys
import tempfile
from pathlib import Path


def cpp_blocks(path):
    return re.findall(r"^```cpp\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def main():
    compiler, hotplane, root = sys.argv[1], Path(sys.argv[2]).resolve(), Path(sys.argv[3])
    documents = [root / "README.md", root / "HACKING.md", *sorted((root / "docs").rglob("*.md"))]
    failures = []
    blocks = 0
    for path in documents:
        for block in cpp_blocks(path):
            blocks += 1
            with tempfile.NamedTemporaryFile("w", suffix=".cc") as file:
                file.write(block)
                file.flush()
                done = subprocess.run([compiler, "-std=c++17", "-Wall", "-fsyntax-only",
                                       f"-I{root / 'include'}", file.name],
                                      capture_output=True, text=True, check=False)
            if done.returncode != 0:
                failures.append(f"{path}: a C++ block does not compile\n{done.stderr}")
        for name in re.findall(r"^\$ hotplane (\S+)", path.read_text(), re.MULTILINE):
            done = subprocess.run([hotplane, name, "--help"], capture_output=True, check=False)
            if done.returncode != 0:
                failures.append(f"{path}: there is no command `hotplane {name}`")
    bundled = subprocess.run([hotplane, "inspect", "tinymoe-mxfp4"], cwd=root / "models",
                             capture_output=True, text=True, check=False).stdout
    if not bundled or bundled not in (root / "docs/checkpoints.md").read_text():
        failures.append(f"docs/checkpoints.md: inspect prints\n{bundled}")
    if blocks == 0:
        failures.append("no C++ block was found: the documents or this test have changed")
    figures = subprocess.run([sys.executable, root / "tools/readme_numbers.py", "--check"],
                             check=False)
    if figures.returncode != 0:
        failures.append("README.md: figures")
    print("\n".join(failures) or f"{blocks} blocks compile")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
