"""The examples of docs/python.md run, and every word of its tables exists."""

import os
import re
import unittest

import package

import hotplane


class Examples(package.WithStore):
    def test_they_run(self):
        with open(os.path.join(package.SOURCE, "docs", "python.md"), encoding="utf-8") as file:
            text = file.read()
        blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
        self.assertGreaterEqual(len(blocks), 4)
        store = os.path.join(self.root, "documented")
        for block in blocks:
            done = package.python(f"MODEL, STORE = {package.MODEL!r}, {store!r}\n{block}")
            self.assertEqual(done.returncode, 0, block + done.stderr)
            self.assertTrue(done.stdout or "wait_layer" in block, block)
        for name in re.findall(r"hotplane\.([A-Z]\w+)", text):
            self.assertTrue(hasattr(hotplane, name), name)


class Names(unittest.TestCase):
    def test_everything_public_is_there_and_documented(self):
        for name in hotplane.__all__:
            self.assertTrue(getattr(hotplane, name).__doc__, name)


if __name__ == "__main__":
    package.main()
