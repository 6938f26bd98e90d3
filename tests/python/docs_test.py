"""The examples of docs/python.md run, those of the pages for torch and transformers where these are
installed, and every word of their tables exists."""

import importlib.util
import inspect
import os
import pydoc
import re
import unittest

import package

import hotplane
from hotplane._options import FIELDS


def page(name):
    with open(os.path.join(package.SOURCE, "docs", name), encoding="utf-8") as file:
        return file.read()


class Examples(package.WithStore):
    def run_them(self, name, model):
        """Each block by itself, in the order of the page, with a store that they share."""
        blocks = re.findall(r"^```python\n(.*?)^```", page(name), re.M | re.S)
        self.assertGreaterEqual(len(blocks), 2)
        store = os.path.join(self.root, "documented." + name)
        for block in blocks:
            done = package.python(f"MODEL, STORE = {model!r}, {store!r}\n{block}")
            self.assertEqual(done.returncode, 0, block + done.stderr)
            self.assertTrue(done.stdout or "wait_layer" in block, block)
        for word in re.findall(r"hotplane\.([A-Z]\w+)", page(name)):
            self.assertTrue(hasattr(hotplane, word), word)

    def needs(self, *modules):
        absent = [module for module in modules if importlib.util.find_spec(module) is None]
        if absent:
            self.skipTest(f"no {', '.join(absent)} in this Python")

    def test_python(self):
        self.run_them("python.md", package.MODEL)

    def test_pytorch(self):
        self.needs("torch")
        package.command("build", package.MODEL, "--store",
                        os.path.join(self.root, "documented.pytorch.md"), "-q")
        self.run_them("pytorch.md", package.MODEL)

    def test_transformers(self):
        self.needs("torch", "transformers", "safetensors")
        import small_models
        self.run_them("transformers.md", small_models.make_checkpoint(
            "qwen3_moe", os.path.join(self.root, "checkpoint")))


class Names(unittest.TestCase):
    def test_everything_public_is_there_and_documented(self):
        for name in hotplane.__all__:
            self.assertTrue(getattr(hotplane, name).__doc__, name)

    def test_help_has_every_option(self):
        boots = {*FIELDS, "experts"}
        builds = set(inspect.signature(hotplane.build).parameters) - {"checkpoint", "store"}
        for call, names in ((hotplane.Store.boot, boots), (hotplane.Store.plan, boots),
                            (hotplane.boot, boots), (hotplane.build, builds)):
            told = pydoc.render_doc(call, renderer=pydoc.plaintext)
            for name in names:
                self.assertRegex(told, rf"(?m)^ *{name}  +\S", call)


if __name__ == "__main__":
    package.main()
