#!/usr/bin/env python3
"""Style as a test: `style.py ROOT` prints every breach as path:line: [rule] what, and exits 1.

Rules work on the text of the tree, without a compiler: of a checkout's tracked files, elsewhere of
all there are. self_test.py has a bad
sample for each of them. Words that a rule looks for are spelled in pieces here, so that this file
does not breach its own rules.
"""
import bisect
import os
import re
import subprocess
import sys
from pathlib import Path

COLUMNS_MAX = 100
FUNCTION_LINES_MAX = 70

SKIPPED_DIRS = {".git", "build", "out", ".cache", "__pycache__", "models", "corpus", "results"}
CPP = {".h", ".hpp", ".cc", ".c", ".cpp", ".inc", ".cu", ".cuh"}
HEADERS = {".h", ".hpp", ".cuh"}
SOURCES = {".cc", ".c", ".cpp", ".cu"}
SCRIPTS = {".py", ".sh", ".bash"}
BINARY = {".safetensors", ".png", ".bin", ".gz", ".hpl", ".zst"}

# What each folder of src/ may include and link, beside itself. One way, as in docs/ARCHITECTURE.md.
BELOW_BOOT = {"base", "io", "format", "device", "checkpoint", "quant", "store"}
LAYERS = {
    "base": set(),
    "io": {"base"},
    "format": {"base"},
    "device": {"base", "format"},
    "checkpoint": {"base", "io", "format"},
    "quant": {"base", "format"},
    "moe": {"base", "format", "quant", "device"},
    "store": {"base", "io", "format"},
    "boot": BELOW_BOOT,
    "engine": BELOW_BOOT | {"moe", "boot"},
    "capi": BELOW_BOOT | {"moe", "boot", "engine"},
    "cli": BELOW_BOOT | {"moe", "boot", "engine"},
}
# Tests and benchmarks compose freely, but never reach up.
RANK = {"base": 0, "io": 1, "format": 1, "device": 1, "checkpoint": 2, "quant": 2, "store": 2,
        "moe": 3, "boot": 3, "engine": 4, "capi": 5, "cli": 5}

MARKERS = re.compile(r"\b(" + "|".join(["TO" "DO", "FIX" "ME", "XX" "X", "HA" "CK"]) + r")\b")
BANNED_NAMES = re.compile(
    r"\b\w*(Man" r"ager|Hel" r"per|Ut" r"ils)\w*|\b(\w+_)?(man" r"ager|hel" r"pers?|ut" r"ils?)"
    r"(_\w+)?\b")
MACHINE_PATHS = re.compile(r"(?<![\w.*$}{-])/(wo" r"rk|ho" r"me|ro" r"ot|Us" r"ers)/")
SWITCHED_OFF = re.compile(r"\bDIS" r"ABLED_\w+")
IF_ZERO = re.compile(r"^\s*#\s*if\s+(0|false)\b")
COMMENTED_TEST = re.compile(
    r"^\s*(//+|#|/?\*)\s*(TEST|TEST_F|TEST_P|TYPED_TEST|RC_GTEST_PROP|RC_GTEST_FIXTURE_PROP|"
    r"BENCHMARK|hp_test|hp_bench|hp_fuzz|add_test)\s*\(")
SKIP = re.compile(r"\bGTEST_" r"SKIP\s*\(\s*\)\s*(<<\s*\"[^\"]{8,}|<<\s*[A-Za-z_])?")
# Raw strings, comments, strings, characters. A quote between digits is a separator.
LEXEMES = re.compile(
    r'R"(?P<d>[^()\\ ]{0,16})\((?:.|\n)*?\)(?P=d)"|//[^\n]*|/\*(?:.|\n)*?\*/|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'")


def tracked_files(root):
    """Paths below `root` as git has them, as a set; None where that is no checkout."""
    if not Path(root, ".git").exists():
        return None
    try:
        listed = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], check=True,
                                capture_output=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return {Path(os.fsdecode(name)) for name in listed.split(b"\0") if name}


class Tree:
    """The files of a source tree, read once."""

    def __init__(self, root):
        self.root = Path(root)
        self.texts = {}
        self.paths = []
        tracked = tracked_files(root)
        for folder, dirs, files in os.walk(self.root):
            dirs[:] = sorted(d for d in dirs if d not in SKIPPED_DIRS)
            for name in sorted(files):
                if name in SKIPPED_DIRS:  # .git of a linked worktree is a file
                    continue
                path = Path(folder, name)
                relative = path.relative_to(self.root)
                if tracked is not None and relative not in tracked:
                    continue
                self.paths.append(relative)
                if path.suffix in BINARY or path.is_symlink():
                    continue
                try:
                    self.texts[relative] = path.read_bytes().decode("utf-8")
                except UnicodeDecodeError:
                    continue

    def of(self, *suffix_sets):
        suffixes = set().union(*suffix_sets)
        return [(p, t) for p, t in self.texts.items() if p.suffix in suffixes]

    def scripts(self):
        """Scripts by suffix or by their first line."""
        return [(p, t) for p, t in self.texts.items()
                if p.suffix in SCRIPTS or (not p.suffix and t.startswith("#!"))]

    def cmake(self):
        return [(p, t) for p, t in self.texts.items()
                if p.name == "CMakeLists.txt" or p.suffix == ".cmake"]

    def code(self):
        return self.of(CPP) + self.scripts() + self.cmake()


def line_of(text, position):
    return text.count("\n", 0, position) + 1


def blank(match):
    return re.sub(r"[^\n]", " ", match.group(0))


def bare_code(text):
    """The text without comments, strings and preprocessor lines, at the same positions."""
    text = LEXEMES.sub(blank, text)
    return re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", blank, text, flags=re.M)


def without_comments(text):
    return LEXEMES.sub(lambda m: blank(m) if m.group(0).startswith("/") else m.group(0), text)


def rule_columns(tree):
    for path, text in tree.code():
        for number, line in enumerate(text.split("\n"), 1):
            if len(line) > COLUMNS_MAX:
                yield path, number, f"{len(line)} columns, at most {COLUMNS_MAX}"


def rule_space(tree):
    for path, text in tree.texts.items():
        if path.name == "LICENSE" or path.suffix in {".json", ".txt"} and path.name != \
                "CMakeLists.txt":
            continue
        for number, line in enumerate(text.split("\n"), 1):
            # A document may quote bytes that are separated by tabs.
            if "\t" in line and path.suffix != ".md":
                yield path, number, "a tab"
            if line != line.rstrip():
                yield path, number, "trailing white space"
        if text and not text.endswith("\n"):
            yield path, text.count("\n") + 1, "no line end at the end of the file"


def rule_markers(tree):
    for path, text in tree.code():
        for match in MARKERS.finditer(text):
            yield path, line_of(text, match.start()), f"{match.group(0)} left in the tree"


def rule_machine_paths(tree):
    for path, text in tree.texts.items():
        for match in MACHINE_PATHS.finditer(text):
            yield path, line_of(text, match.start()), f"path of a machine: {match.group(0)}..."


def rule_names(tree):
    for path in tree.paths:
        if BANNED_NAMES.search(path.name.replace(".", " ")):
            yield path, 1, f"says nothing as a name: {path.name}"
    for path, text in tree.of(CPP):
        code = bare_code(text)
        for match in BANNED_NAMES.finditer(code):
            yield path, line_of(code, match.start()), f"says nothing as a name: {match.group(0)}"
    for path, text in tree.scripts():
        for match in re.finditer(r"^[ \t]*(?:def|class|function)\s+(\w+)|^(\w+)\(\)\s*\{", text,
                                 re.M):
            name = match.group(1) or match.group(2)
            if BANNED_NAMES.search(name):
                yield path, line_of(text, match.start()), f"says nothing as a name: {name}"


def rule_pragma_once(tree):
    for path, text in tree.of(HEADERS):
        guarded = re.search(r"#ifndef (\w+_H_)\n#define \1\n", text)
        public_c = path.parts[0] == "include" and path.suffix == ".h"
        if "#pragma once" not in text and not (public_c and guarded):
            yield path, 1, "a header without #pragma once"


def rule_if_zero(tree):
    for path, text in tree.of(CPP):
        for number, line in enumerate(text.split("\n"), 1):
            if IF_ZERO.match(line):
                yield path, number, "code switched off"


def rule_tests_off(tree):
    for path, text in tree.of(CPP) + tree.cmake():
        for number, line in enumerate(text.split("\n"), 1):
            if COMMENTED_TEST.match(line) and not line.rstrip().endswith((":", ".", ";")):
                if path.suffix in CPP or not re.match(r"#\s*hp_\w+\(<", line):
                    yield path, number, "a test that is commented out"
            if SWITCHED_OFF.search(line):
                yield path, number, "a test that is switched off"


def rule_skip_reason(tree):
    for path, text in tree.of(CPP):
        for match in SKIP.finditer(without_comments(text)):
            if not match.group(1):
                yield path, line_of(text, match.start()), "a skipped test without a reason text"


def rule_sanitizers(tree):
    """g++ alone defines these itself: without the header a build by clang is another one."""
    for path, text in tree.of(CPP):
        used = re.search(r"\b__SANITIZE_\w+", text)
        if used and path.name != "sanitizers.h" and '#include "base/sanitizers.h"' not in text:
            yield path, line_of(text, used.start()), f"{used.group()} without base/sanitizers.h"


def allowed_includes(folder, path):
    stem = path.stem
    if stem.endswith(("_test", "_bench", "_fuzz")) or "test" in stem.split("_"):
        return {f for f, rank in RANK.items() if rank <= RANK[folder]}
    return LAYERS[folder] | {folder}


def rule_layers(tree):
    for path, text in tree.of(CPP):
        if path.parts[0] != "src" or len(path.parts) < 3:
            continue
        folder = path.parts[1]
        if folder not in LAYERS:
            yield path, 1, f"src/{folder} is not in the table of layers in tests/style/style.py"
            continue
        allowed = allowed_includes(folder, path)
        for match in re.finditer(r'^[ \t]*#\s*include "([^"]+)"', text, re.M):
            target = match.group(1).split("/")[0]
            if "/" in match.group(1) and target in LAYERS and target not in allowed:
                yield path, line_of(text, match.start()), f"{folder} includes {match.group(1)}"
    for path, text in tree.cmake():
        for match in re.finditer(r"\bhp_library\(\s*(\w+)([^)]*)\)", text):
            deps = re.search(r"\bDEPS\b([^)]*)", match.group(2))
            for dep in deps.group(1).split() if deps else []:
                if dep not in LAYERS.get(match.group(1), set()):
                    yield path, line_of(text, match.start()), f"{match.group(1)} links {dep}"


TRANSPARENT = re.compile(
    r"\b(namespace|class|struct|union|enum|extern)\b[^()]*(\([^()]*\)[^()]*)*$")


def is_initializer(head):
    flat = head
    while True:
        flatter = re.sub(r"\([^()]*\)", "", flat)
        if flatter == flat:
            break
        flat = flatter
    return "=" in re.sub(r"operator\s*[=!<>]=?=?|operator\s*\(\)|[-+*/|&^]=", "", flat)


def is_transparent(head):
    """True for the brace of a namespace or a type, whose members are looked at one by one."""
    head = re.sub(r"\btemplate\s*<[^{]*?>\s*(?=class|struct|union|inline|constexpr|\w)", "", head)
    head = re.sub(r"alignas\s*\([^()]*\)|__attribute__\s*\(\(.*?\)\)|\[\[.*?\]\]", "", head)
    return bool(TRANSPARENT.search(head)) and "(" not in head


def function_blocks(text):
    """Yields (first line, lines) of every brace block that is a function's body. A table in it, the
    braces after `return` or `=`, counts as one line: cases are data."""
    code = bare_code(text)
    starts = [0] + [m.end() for m in re.finditer("\n", code)]

    def line(position):
        return bisect.bisect_right(starts, position)

    head_start, opened, depth, first, table_lines = 0, [], 0, 0, 0
    for match in re.finditer(r"[{};]", code):
        position, mark = match.start(), match.group(0)
        head = code[head_start:position]
        if mark == "{":
            if depth == 0 and is_transparent(head):
                opened.append(("type", position))
            else:
                if depth == 0:
                    first = None if is_initializer(head) else line(position)
                    table_lines = 0
                in_table = any(kind == "table" for kind, _ in opened)
                is_table = depth > 0 and not in_table and re.search(r"(\breturn|=)\s*$", head)
                depth += 1
                opened.append(("table" if is_table else "block", position))
        elif mark == "}" and opened:
            kind, start = opened.pop()
            if kind == "table":
                table_lines += line(position) - line(start)
            if kind != "type":
                depth -= 1
                if depth == 0 and first is not None:
                    yield first, line(position) - first + 1 - table_lines
        head_start = position + 1


def rule_function_length(tree):
    for path, text in tree.of(CPP - {".cu", ".cuh"}):
        for first, lines in function_blocks(text):
            if lines > FUNCTION_LINES_MAX:
                yield path, first, f"a function of {lines} lines, at most {FUNCTION_LINES_MAX}"
    for path, text in tree.scripts():
        if path.suffix != ".py":
            continue
        lines = text.split("\n")
        for start, line in enumerate(lines):
            found = re.match(r"(\s*)def \w+", line)
            if not found:
                continue
            last = start
            for end in range(start + 1, len(lines)):
                if lines[end].strip():
                    if len(lines[end]) - len(lines[end].lstrip()) <= len(found.group(1)) and \
                            not lines[end].lstrip().startswith(")"):
                        break
                    last = end
            if last - start + 1 > FUNCTION_LINES_MAX:
                yield path, start + 1, f"a function of {last - start + 1} lines"


def registered_sources(tree):
    """(folder, word) of every word in a CMakeLists.txt, comments left out."""
    words = set()
    for path, text in tree.cmake():
        for word in re.findall(r"[\w./-]+\.\w+", re.sub(r"#[^\n]*", "", text)):
            words.add(Path(os.path.normpath(path.parent / word.lstrip("/"))))
    return words


def rule_dead_files(tree):
    registered = registered_sources(tree)
    included = set()
    for _, text in tree.of(CPP):
        included |= {Path(m) for m in re.findall(r'#\s*include [<"]([^">]+)[">]', text)}
    names = {p.name for p in included}
    scripts = "\n".join(t for _, t in tree.scripts())
    for path, _ in tree.of(SOURCES):
        if path not in registered and path.name not in names and str(path) not in scripts:
            yield path, 1, "in no CMakeLists.txt: a dead file"
    for path, _ in tree.of(CPP - SOURCES):
        if path.name not in names and path not in registered:
            yield path, 1, "included nowhere: a dead file"
    for path, text in tree.scripts():
        if path.parts[0] in {"scripts", ".ci"} and not path.suffix:
            continue
        pattern = re.compile(r"(?<![\w])" + re.escape(path.stem) + r"\b")
        if not any(pattern.search(t) for p, t in tree.texts.items() if p != path):
            yield path, 1, "named nowhere: a dead script"


def rule_unregistered_tests(tree):
    calls = set()
    for path, text in tree.cmake():
        for match in re.finditer(r"\b(hp_test|hp_bench|hp_fuzz|add_executable)\(([^)]*)\)",
                                 re.sub(r"#[^\n]*", "", text)):
            calls |= {path.parent / word for word in match.group(2).split() if "." in word}
    for path, _ in tree.of(SOURCES):
        if path.stem.endswith(("_test", "_bench", "_fuzz")) and path not in calls:
            yield path, 1, "not in an hp_test, hp_bench or hp_fuzz: never run"


def slug(heading):
    heading = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")


def headings(text):
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return {slug(m) for m in re.findall(r"^#+ +(.*)$", text, re.M)}


def rule_links(tree):
    for path, text in tree.of({".md"}):
        prose = re.sub(r"^```.*?^```|`[^`\n]*`", blank, text, flags=re.M | re.S)
        for match in re.finditer(r"\]\(([^)\s]+)\)|^\[[^\]]+\]:\s*(\S+)", prose, re.M):
            target = match.group(1) or match.group(2)
            if re.match(r"[a-z]+:", target):
                continue
            file, _, fragment = target.partition("#")
            where = Path(os.path.normpath(path.parent / file)) if file else path
            if not (tree.root / where).exists():
                yield path, line_of(text, match.start()), f"broken link: {target}"
            elif fragment and where in tree.texts and \
                    fragment not in headings(tree.texts[where]):
                yield path, line_of(text, match.start()), f"no such heading: {target}"


RULES = {name[len("rule_"):]: rule for name, rule in globals().items() if name.startswith("rule_")}


def breaches(root):
    tree = Tree(root)
    return [(path, line, name, what) for name, rule in RULES.items()
            for path, line, what in rule(tree)]


def main():
    if len(sys.argv) != 2:
        print("usage: style.py ROOT", file=sys.stderr)
        return 2
    found = breaches(sys.argv[1])
    for path, line, rule, what in sorted(found):
        print(f"{path}:{line}: [{rule}] {what}")
    print(f"{len(RULES)} rules, {len(found)} breaches")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
