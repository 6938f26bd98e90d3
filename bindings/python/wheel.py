#!/usr/bin/env python3
"""Makes the wheel and the source distribution of the hotplane package, offline, with nothing but
Python and binutils.

    wheel.py --build-dir build/package --out DIR    # from a build that is there
    pip wheel .                                     # builds by CMake first (PEP 517)

The wheel holds library and program, which need nothing but glibc 2.35 or newer; that is checked.
HOTPLANE_BUILD_DIR names a build that is there to PEP 517 frontends.
"""

import argparse
import base64
import csv
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(__file__).resolve().parent / "hotplane"
GLIBC_MAX = (2, 35)
TAG = f"py3-none-manylinux_{GLIBC_MAX[0]}_{GLIBC_MAX[1]}_x86_64"
# Parts of glibc; everything else is linked in.
NEEDED = {"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2", "libpthread.so.0", "libdl.so.2",
          "librt.so.1"}
SOURCE_FOLDERS = ("bindings", "cmake", "include", "src")
SOURCE_FILES = ("CMakeLists.txt", "LICENSE", "README.md", "VERSION", "pyproject.toml",
                "docs/python.md", "docs/man/hotplane.1", "tools/completion/hotplane.bash")
ENTRY_POINTS = """[console_scripts]
hotplane = hotplane.__main__:main

[vllm.general_plugins]
hotplane = hotplane.integrations.vllm:register
hotplane_moet = hotplane.integrations.vllm_moet:install
"""
# Zip has no dates before; the same tree makes the same file.
DATE = (1980, 1, 1, 0, 0, 0)


def version():
    return (ROOT / "VERSION").read_text().strip()


def metadata():
    return f"""Metadata-Version: 2.1
Name: hotplane
Version: {version()}
Summary: Warm boots for huge Mixture-of-Experts models
License: Apache-2.0
Classifier: Operating System :: POSIX :: Linux
Classifier: Programming Language :: Python :: 3
Requires-Python: >=3.9
Provides-Extra: progress
Requires-Dist: tqdm; extra == "progress"
Description-Content-Type: text/markdown

""" + (ROOT / "docs" / "python.md").read_text()


def check_binary(path):
    """Exits where the file needs what a machine may not have."""
    headers = subprocess.run(["objdump", "-p", "-T", path], capture_output=True, text=True,
                             check=True).stdout
    needed = set(re.findall(r"NEEDED +(\S+)", headers))
    if needed - NEEDED:
        sys.exit(f"{path} needs {sorted(needed - NEEDED)}; expected parts of glibc only")
    newer = {symbol for major, minor, symbol in
             re.findall(r"\(GLIBC_(\d+)\.(\d+)[^)]*\) +(\S+)", headers)
             if (int(major), int(minor)) > GLIBC_MAX}
    if newer:
        sys.exit(f"{path} needs symbols newer than glibc {GLIBC_MAX}: {sorted(newer)}")


def built(build_dir):
    """Library and program of a build; makes one where `build_dir` is None."""
    if build_dir is None:
        build_dir = ROOT / "build" / "wheel"
        subprocess.run(["cmake", "-S", ROOT, "-B", build_dir, "-DCMAKE_BUILD_TYPE=Release",
                        "-DHOTPLANE_BUILD_TESTS=OFF", "-DHOTPLANE_BUILD_BENCH=OFF"], check=True)
        cpus = str(len(os.sched_getaffinity(0)))
        subprocess.run(["cmake", "--build", build_dir, "--parallel", cpus, "--target",
                        "hotplane_shared", "hotplane_cli"], check=True)
    return Path(build_dir, "lib", "libhotplane.so"), Path(build_dir, "bin", "hotplane")


def stripped(path):
    """The file's bytes without symbols for debuggers, which are most of some builds."""
    with tempfile.NamedTemporaryFile() as out:
        subprocess.run(["strip", "--strip-unneeded", "-o", out.name, path], check=True)
        return Path(out.name).read_bytes()


def package_files(folder):
    return sorted(path for path in Path(folder).rglob("*")
                  if path.is_file() and "__pycache__" not in path.parts)


def digest(data):
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def make_wheel(out, build_dir):
    """Writes the wheel into `out`; its name."""
    library, program = built(build_dir)
    for path in (library, program):
        check_binary(path)
    info = f"hotplane-{version()}.dist-info"
    files = {f"hotplane/{path.relative_to(PACKAGE).as_posix()}": (path.read_bytes(), 0o644)
             for path in package_files(PACKAGE)}
    files["hotplane/lib/libhotplane.so"] = (stripped(library), 0o755)
    files["hotplane/bin/hotplane"] = (stripped(program), 0o755)
    files[f"{info}/METADATA"] = (metadata().encode(), 0o644)
    files[f"{info}/LICENSE"] = ((ROOT / "LICENSE").read_bytes(), 0o644)
    files[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: hotplane\nRoot-Is-Purelib: false\nTag: {TAG}\n".encode(),
        0o644)
    files[f"{info}/entry_points.txt"] = (ENTRY_POINTS.encode(), 0o644)
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    for name, (data, _) in files.items():
        rows.writerow([name, digest(data), len(data)])
    rows.writerow([f"{info}/RECORD", "", ""])
    files[f"{info}/RECORD"] = (record.getvalue().encode(), 0o644)

    name = f"hotplane-{version()}-{TAG}.whl"
    with zipfile.ZipFile(Path(out, name), "w", zipfile.ZIP_DEFLATED) as archive:
        for path, (data, mode) in files.items():
            entry = zipfile.ZipInfo(path, DATE)
            entry.external_attr = (0o100000 | mode) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return name


def make_sdist(out):
    """Writes the source distribution into `out`: what it takes to build the wheel."""
    base = f"hotplane-{version()}"
    sources = [ROOT / name for name in SOURCE_FILES]
    for folder in SOURCE_FOLDERS:
        sources += package_files(ROOT / folder)
    with tarfile.open(Path(out, base + ".tar.gz"), "w:gz", format=tarfile.PAX_FORMAT) as archive:
        contents = [(path.relative_to(ROOT).as_posix(), path.read_bytes(),
                     path.stat().st_mode & 0o755) for path in sources]
        contents.append(("PKG-INFO", metadata().encode(), 0o644))
        for name, data, mode in contents:
            entry = tarfile.TarInfo(f"{base}/{name}")
            entry.size, entry.mode = len(data), mode
            archive.addfile(entry, io.BytesIO(data))
    return base + ".tar.gz"


def get_requires_for_build_wheel(config_settings=None):  # PEP 517
    return []


def get_requires_for_build_sdist(config_settings=None):  # PEP 517
    return []


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):  # PEP 517
    return make_wheel(wheel_directory, os.environ.get("HOTPLANE_BUILD_DIR"))


def build_sdist(sdist_directory, config_settings=None):  # PEP 517
    return make_sdist(sdist_directory)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--build-dir", help="a build that is there; default: builds one")
    parser.add_argument("--out", default=".", help="where to write (default: here)")
    parser.add_argument("--sdist", action="store_true", help="also the source distribution")
    arguments = parser.parse_args()
    os.makedirs(arguments.out, exist_ok=True)
    print(Path(arguments.out, make_wheel(arguments.out, arguments.build_dir)))
    if arguments.sdist:
        print(Path(arguments.out, make_sdist(arguments.out)))


if __name__ == "__main__":
    main()
