#!/usr/bin/env python3
"""Every rule of style.py is quiet on a good tree and fires on a bad sample, at the right place."""
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import kernel_report
import style

GOOD = {
    "CMakeLists.txt": "add_subdirectory(src/base)\nadd_subdirectory(src/store)\n",
    "README.md": "# Title here\n\n[store](src/store/store.h) [up](#title-here)\n",
    "src/base/CMakeLists.txt": "hp_library(base SOURCES base.cc DEPS)\n"
                               "hp_test(base SOURCES base_test.cc)\n",
    "src/base/base.h": "#pragma once\n\nint Base();\n",
    "src/base/base.cc": '#include "base/base.h"\n\nint Base() { return 1\'000; }\n',
    "src/base/base_test.cc": '#include "base/base.h"\n\nTEST(Base, One) {\n'
                             '  if (!Base()) GTEST_' 'SKIP() << "needs a base of one";\n}\n',
    "src/store/CMakeLists.txt": "hp_library(store SOURCES store.cc DEPS base)\n",
    "src/store/store.h": "#pragma once\n",
    "src/store/store.cc": '#include "base/base.h"\n#include "store/store.h"\n',
}

LONG_BODY = "  Call();\n" * 70


def bad_function(head):
    return f"namespace a {{\n{head} {{\n{LONG_BODY}}}\n}}  // namespace a\n"


# rule: [(file, content, line), ...], each put alone into the good tree.
BAD = {
    "columns": [("src/base/base.cc", "\n// " + "x" * 98 + "\n", 2)],
    "space": [("src/base/base.cc", "int\ta;\n", 1), ("README.md", "text \n", 1),
              ("src/base/base.cc", "int a;", 1), ("README.md", "text\r\n", 1)],
    "markers": [("src/base/base.cc", "// TO" "DO: later\n", 1),
                ("CMakeLists.txt", "# FIX" "ME\nadd_subdirectory(src/base)\n", 1)],
    "machine_paths": [("README.md", "see /ho" "me/someone/x\n", 1),
                      ("src/base/base.cc", 'auto p = "/wo' 'rk/a";\n', 1)],
    "names": [("src/base/base.cc", "class BaseMan" "ager;\n", 1),
              ("src/base/base.cc", "int open_hel" "per();\n", 1),
              ("src/base/file_ut" "ils.h", "#pragma once\n", 1),
              ("scripts/go", "#!/bin/sh\nhel" "per() {\n:\n}\n", 2)],
    "pragma_once": [("src/base/base.h", "int Base();\n", 1)],
    "if_zero": [("src/base/base.cc", "\n#if" " 0\n#endif\n", 2)],
    "tests_off": [("src/base/base_test.cc", "// TEST(Base, Two) {}\n", 1),
                  ("src/base/base_test.cc", "TEST(Base, DIS" "ABLED_Two) {}\n", 1),
                  ("src/base/CMakeLists.txt", "hp_library(base SOURCES base.cc)\n"
                   "# hp_test(base SOURCES base_test.cc)\n", 2)],
    "skip_reason": [("src/base/base_test.cc", "TEST(A, B) { GTEST_" "SKIP(); }\n", 1),
                    ("src/base/base_test.cc", "TEST(A, B) { GTEST_" 'SKIP() << ""; }\n', 1)],
    "sanitizers": [("src/base/base.cc", "#ifdef __SANITIZE_THREAD__\n#endif\n", 1)],
    "layers": [("src/base/base.cc", '#include "store/store.h"\n', 1),
               ("src/store/store.cc", '\n#include "quant/quantize.h"\n', 2),
               ("src/base/base_test.cc", '#include "store/store.h"\n', 1),
               ("src/base/CMakeLists.txt", "hp_library(base SOURCES base.cc DEPS store)\n", 1),
               ("src/odd/odd.h", "#pragma once\n", 1)],
    "function_length": [
        ("src/base/base.cc", bad_function("int Long(int a = 1)"), 2),
        ("src/base/base.cc", bad_function("bool operator==(const A& a) const"), 2),
        ("src/base/base.cc", bad_function("A::A() : b_{1}, c_(2)"), 2),
        ("src/base/base.cc", bad_function("template <class T>\nstruct B Long(T t)"), 3),
        ("src/base/base.cc", "class A {\n  void F() {\n" + LONG_BODY + "  }\n};\n", 2),
        ("src/base/base.cc", "void F() {\n  // a brace {\n" + LONG_BODY + "}\n", 1),
        ("src/base/base.cc", "int F() {\n  return {\n    1,\n  };\n" + LONG_BODY + "}\n", 1),
        ("src/base/base.cc", "auto F() {\n  auto g = [] {\n" + LONG_BODY + "  };\n}\n", 1),
        ("src/base/base_test.cc", "TEST(A, B) {\n" + LONG_BODY + "}\n", 1),
        ("tools/long.py", "def long():\n" + "    call()\n" * 70, 1)],
    "dead_files": [("src/base/lost.cc", "int a;\n", 1), ("src/base/lost.h", "#pragma once\n", 1),
                   ("tools/lost.py", "pass\n", 1)],
    "unregistered_tests": [("src/base/lost_test.cc", "int a;\n", 1)],
    "links": [("README.md", "[a](docs/none.md)\n", 1), ("README.md", "# A\n[a](#b)\n", 2)],
}

QUIET = {
    "function_length": [
        "A F() {\n  return {\n" + "    {1, [] { return 2; }},\n" * 90 + "  };\n}\n",
        "constexpr int kTable[] = {\n" + "  1,\n" * 90 + "};\n",
        "struct A {\n" + "  int a;\n" * 90 + "};\n",
        "namespace a {\n" + "int F();\n" * 90 + "}  // namespace a\n",
        "enum class K : int {\n" + "  kA,\n" * 90 + "};\n"],
    "names": ["// a helpful word in a comment: hel" "per\n"],
    "machine_paths": ["// see https://example.com/ho" "me/page\n"],
}


def reports(files):
    with tempfile.TemporaryDirectory() as root:
        for name, text in files.items():
            path = Path(root, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
        return [(rule, str(path), line) for path, line, rule, _ in style.breaches(root)]


class StyleTest(unittest.TestCase):
    def test_good_tree_is_quiet(self):
        self.assertEqual(reports(GOOD), [])

    def test_every_rule_has_a_bad_sample(self):
        self.assertEqual(set(BAD), set(style.RULES))

    def test_bad_samples_fire(self):
        for rule, samples in BAD.items():
            for name, text, line in samples:
                with self.subTest(rule=rule, name=name, text=text[:60]):
                    self.assertIn((rule, name, line), reports({**GOOD, name: text}))

    @unittest.skipUnless(shutil.which("git"), "there is no git")
    def test_of_a_checkout_what_is_tracked_counts(self):
        with tempfile.TemporaryDirectory() as root:
            def git(*arguments):
                subprocess.run(["git", "-C", root, *arguments], check=True, capture_output=True)
            Path(root, "venv").mkdir()
            for name in ("tracked.py", "venv/other.py"):
                Path(root, name).write_text("a = 1 \n", encoding="utf-8")
            git("init", "-q")
            git("add", "tracked.py")
            self.assertEqual({str(path) for path, *_ in style.breaches(root)}, {"tracked.py"})
            git("rm", "-q", "-f", "tracked.py")
            self.assertEqual(list(style.breaches(root)), [])
            shutil.rmtree(Path(root, ".git"))
            self.assertEqual({str(path) for path, *_ in style.breaches(root)}, {"venv/other.py"})

    def test_lookalikes_are_quiet(self):
        for rule, samples in QUIET.items():
            for text in samples:
                with self.subTest(rule=rule, text=text[:60]):
                    found = reports({**GOOD, "src/base/base.cc": text})
                    self.assertNotIn(rule, [r for r, _, _ in found])


class KernelReportTest(unittest.TestCase):
    REPORT = """ptxas info    : Compiling entry function 'good' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function 'bad' for 'sm_90a'
    8 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads
"""
    SERIAL = "ptxas info    : (C7512) Potential Performance Loss: wgmma is serialized\n"

    def test_spills_and_remarks_are_found(self):
        found = list(kernel_report.findings(self.REPORT + self.SERIAL))
        self.assertEqual(len(found), 2)
        self.assertTrue(found[0].startswith("bad (sm_90a)"))
        self.assertIn("C7512", found[1])


if __name__ == "__main__":
    unittest.main(argv=sys.argv)
