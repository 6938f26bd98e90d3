"""vLLM-MoET's modules answered by hotplane: a stand-in package with its functions is imported, and
used in its order: a probe for each layer when it is created, then four threads that consume."""

import os
import sys
import textwrap
import threading
import unittest
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import package
from package import EXPERTS, HIDDEN, INTERMEDIATE, LAYERS, WithStore, command

import hotplane
from hotplane.integrations import vllm_moet

SHAPE = (EXPERTS, 2 * INTERMEDIATE, HIDDEN, HIDDEN, INTERMEDIATE)
BASE = ("planes13", "sc13", "planes2", "sc2")
ELEMENTS = (2 * INTERMEDIATE * HIDDEN, HIDDEN * INTERMEDIATE)
# The modules as the program has them: they answer nothing by themselves.
STAND_IN = {
    "__init__.py": "",
    "moe_w2_delta.py": "split = False\ndef split_enabled(): return split\n",
    "moe_w2_planes_cache.py": """
        kept = "as it was"
        def _none(*arguments, **options): raise AssertionError("was not replaced")
        enabled = expected_sizes = cache_has_layer = try_load = store = shutdown = _none
        """,
    "moe_w2_store.py": """
        kept = "as it was"
        def _none(*arguments, **options): raise AssertionError("was not replaced")
        pack_has_layer = make_store = _none
        """,
}


def tensors():
    for name in ("torch", "numpy"):
        try:
            return __import__(name)
        except ImportError:
            pass
    raise unittest.SkipTest("neither torch nor numpy in this Python")


def raw(tensor):
    return bytes(memoryview(tensor.numpy() if hasattr(tensor, "numpy") else tensor).cast("B"))


class Program(WithStore):
    @classmethod
    def setUpClass(cls):
        tensors()
        super().setUpClass()
        folder = os.path.join(cls.root, "moet_program")
        os.makedirs(folder)
        for name, text in STAND_IN.items():
            with open(os.path.join(folder, name), "w") as file:
                file.write(textwrap.dedent(text))

    def setUp(self):
        self.environment = mock.patch.dict(os.environ, {"HOTPLANE_STORE": self.store_path,
                                                        "HOTPLANE_DEVICE": "cpu"})
        self.environment.start()
        self.addCleanup(self.environment.stop)
        path = mock.patch.object(sys, "path", [self.root, *sys.path])
        path.start()
        self.addCleanup(path.stop)
        self.addCleanup(vllm_moet.shutdown)
        self.addCleanup(self.forget)

    @staticmethod
    def forget():
        for name in [name for name in sys.modules if name.startswith("moet_program")]:
            del sys.modules[name]
        if vllm_moet._finder in sys.meta_path:
            sys.meta_path.remove(vllm_moet._finder)

    def modules(self, early=False):
        """The two modules; `early`: they were imported before the plugin was called."""
        def load():
            from moet_program import moe_w2_delta, moe_w2_planes_cache, moe_w2_store
            return moe_w2_planes_cache, moe_w2_store, moe_w2_delta

        if early:
            load()
        self.assertTrue(vllm_moet.install())
        self.assertTrue(vllm_moet.install())
        cache, store, delta = load()
        self.assertEqual((cache.kept, store.kept), ("as it was", "as it was"))
        return cache, store, delta

    def boot(self, cache, sizes):
        """As the program: probes at creation, four threads at the end of loading."""
        hits = [cache.cache_has_layer(layer, sizes) for layer in range(LAYERS)]
        self.assertEqual(hits, [True] * LAYERS)
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(lambda layer: cache.try_load(layer, sizes), range(LAYERS)))

    def test_planes(self):
        for early in (False, True):
            cache, _, _ = self.modules(early)
            self.assertTrue(cache.enabled())
            sizes = cache.expected_sizes(*SHAPE, want_fp4=False)
            self.assertEqual(list(sizes), list(BASE))
            loaded = self.boot(cache, sizes)
            cache.shutdown()  # what was handed out stays
            for layer, parts in enumerate(loaded):
                self.assertEqual(list(parts), list(BASE))
                for name, tensor in parts.items():
                    self.assertEqual(tuple(tensor.shape), (sizes[name],))
                    self.assertEqual(raw(tensor), self.export(layer, name))
            self.assertTrue(cache.cache_has_layer(0, sizes))  # it opens again
            self.forget()

    def test_planes_on_a_gpu(self):
        library = tensors()
        if not hasattr(library, "cuda") or not library.cuda.is_available():
            self.skipTest("no torch that finds a CUDA device")
        del os.environ["HOTPLANE_DEVICE"]
        cache, _, _ = self.modules()
        sizes = cache.expected_sizes(*SHAPE, want_fp4=False)
        for layer, parts in enumerate(self.boot(cache, sizes)):
            for name, tensor in parts.items():
                self.assertEqual(tensor.device.type, "cuda")
                self.assertEqual(raw(tensor.cpu()), self.export(layer, name))

    def test_planes_with_fp4(self):
        cache, _, delta = self.modules()
        for split, options in ((False, ()), (True, ("--encoded",))):
            delta.split = split
            sizes = cache.expected_sizes(*SHAPE, want_fp4=True)
            self.assertEqual(sizes["fp2"], EXPERTS * ELEMENTS[1] * (5 if split else 8) // 16)
            for layer, parts in enumerate(self.boot(cache, sizes)):
                for name in ("fp13", "fp2"):
                    self.assertEqual(raw(parts[name]), self.export(layer, name, *options))

    def test_misses(self):
        cache, _, _ = self.modules()
        sizes = cache.expected_sizes(*SHAPE, want_fp4=True)
        wrong = [(LAYERS, sizes), (-1, sizes), (0, {}), (0, {**sizes, "fp8u13": 4}),
                 (0, {**sizes, "sc2": sizes["sc2"] + 1}), (0, {**sizes, "fp13": 7}),
                 (0, {name: size for name, size in sizes.items() if name != "fp2"})]
        for layer, other in wrong:
            self.assertFalse(cache.cache_has_layer(layer, other), (layer, other))
            self.assertIsNone(cache.try_load(layer, other))
        with self.assertLogs("hotplane", "WARNING"):
            cache.store(0, {"planes13": None})
        for path in (os.path.join(self.root, "none"), package.MODEL):
            cache.shutdown()
            with mock.patch.dict(os.environ, {"HOTPLANE_STORE": path}), \
                    self.assertLogs("hotplane", "WARNING"):
                self.assertFalse(cache.cache_has_layer(0, sizes))
                self.assertIsNone(cache.try_load(0, sizes))
                cache.shutdown()

    def test_what_a_variable_got_wrong_is_told_by_its_name(self):
        cache, _, _ = self.modules()
        sizes = cache.expected_sizes(*SHAPE, want_fp4=False)
        for variable, value in (("HOTPLANE_DEVICE", "gpu"),
                                ("HOTPLANE_STORE", os.path.join(self.root, "none"))):
            cache.shutdown()
            with mock.patch.dict(os.environ, {variable: value}), \
                    self.assertLogs("hotplane", "WARNING") as told:
                self.assertIsNone(cache.try_load(0, sizes))
            self.assertIn(variable, told.output[0])
            self.assertIn(value, told.output[0])

    def test_an_innocent_variable_is_not_blamed(self):
        cache, _, _ = self.modules()
        sizes = cache.expected_sizes(*SHAPE, want_fp4=False)
        path = os.path.join(self.root, "gone")
        hotplane.build(package.MODEL, path, delta=None)
        with hotplane.open(path) as store:
            name = os.path.join(store.directory, "manifest")
        cache.shutdown()
        with mock.patch.dict(os.environ, {"HOTPLANE_STORE": path, "HOTPLANE_DEVICE": "cpu"}):
            self.assertTrue(cache.cache_has_layer(0, sizes))
            os.truncate(name, 100)
            with self.assertLogs("hotplane", "WARNING") as told:
                self.assertIsNone(cache.try_load(0, sizes))
            self.assertIn(name, told.output[0])
            self.assertNotIn("HOTPLANE_DEVICE", told.output[0])
            cache.shutdown()

    def test_damage_is_a_miss(self):
        path = os.path.join(self.root, "damaged")
        hotplane.build(package.MODEL, path, delta=None)
        with hotplane.open(path) as store:
            name = os.path.join(store.directory, "layer-0002.base")
        with open(name, "r+b") as file:
            file.seek(8192)
            there = file.read(64)
            file.seek(8192)
            file.write(bytes(255 - byte for byte in there))
        with mock.patch.dict(os.environ, {"HOTPLANE_STORE": path}), \
                self.assertLogs("hotplane", "WARNING"):
            cache, _, _ = self.modules()
            sizes = cache.expected_sizes(*SHAPE, want_fp4=False)
            loaded = [cache.try_load(layer, sizes) is not None for layer in range(LAYERS)]
            self.assertEqual(loaded, [True, True, False, False])
            cache.shutdown()

    def test_rows(self):
        _, stores, _ = self.modules()
        w13, w2 = ELEMENTS
        pairs = [(3, 31), (0, 0), (3, 5), (3, 31), (1, 7)]
        cases = {
            ("base", (w13 + w2) * 9 // 32): [(name, ()) for name in BASE],
            ("fp4q", (w13 + w2) * 5 // 16): [("fp13", ("--encoded",)), ("fp2", ("--encoded",))],
            ("delta", (w13 + w2) // 2): [("fp13", ()), ("fp2", ())],
            ("fp4", (w13 + w2) * 17 // 32): [("fp13", ()), ("sc13", ()), ("fp2", ()),
                                             ("sc2", ())],
        }
        for (tag, slot_bytes), parts in cases.items():
            for layer in (-1, 0, 3, LAYERS):
                self.assertEqual(
                    stores.pack_has_layer(tag, layer, LAYERS, EXPERTS, slot_bytes),
                    0 <= layer < LAYERS, (tag, layer))
            self.assertFalse(stores.pack_has_layer(tag, 0, LAYERS, EXPERTS, slot_bytes + 1))
            self.assertFalse(stores.pack_has_layer(tag, 0, LAYERS, EXPERTS + 1, slot_bytes))
            rows = stores.make_store(tag, LAYERS, EXPERTS, slot_bytes, pinned=True)
            self.assertEqual((len(rows), 3 in rows, LAYERS in rows), (LAYERS, True, False))
            found = rows.rows_for(pairs, scan=True)
            self.assertEqual(rows.rows_for([]), [])
            for (layer, expert), row in zip(pairs, found):
                self.assertEqual(raw(row), b"".join(
                    self.export(layer, name, "--expert", expert, *options)
                    for name, options in parts), (tag, layer, expert))
            self.assertEqual(rows.stats()["read_bytes"], len(pairs) * slot_bytes)
            rows.release()
            self.assertEqual(len(rows), 0)

    def test_layers_that_are_added(self):
        _, stores, _ = self.modules()
        library = tensors()
        rows = stores.make_store("base", LAYERS, EXPERTS, 12, pinned=False)
        self.assertEqual(len(rows), 0)
        left = library.full((EXPERTS, 8), 1, dtype=library.uint8)
        right = library.full((EXPERTS, 4), 2, dtype=library.uint8)
        rows.add_layer(2, [left, right])
        rows.add_layer(2, [right, left])  # it is there already
        self.assertEqual(raw(rows.rows_for([(2, 3)])[0]), bytes([1] * 8 + [2] * 4))
        with self.assertRaises(ValueError):
            rows.add_layer(1, [left])
        with self.assertRaises(KeyError):
            rows.rows_for([(0, 0)])
        slot_bytes = sum(ELEMENTS) * 9 // 32
        stored = stores.make_store("base", LAYERS, EXPERTS, slot_bytes, pinned=False)
        before = raw(stored.rows_for([(1, 1)])[0])
        stored.add_layer(1, [library.zeros((EXPERTS, slot_bytes), dtype=library.uint8)])
        self.assertEqual(raw(stored.rows_for([(1, 1)])[0]), before)

    def test_from_several_threads(self):
        cache, _, _ = self.modules()
        sizes = cache.expected_sizes(*SHAPE, want_fp4=False)
        found = []
        threads = [threading.Thread(target=lambda: found.append(raw(
            cache.try_load(1, sizes)["sc2"]))) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(set(found), {self.export(1, "sc2")})
        self.assertEqual(len(found), 6)

    def test_shards(self):
        path = os.path.join(self.root, "shards")
        command("build", package.MODEL, "--store", path, "--tp", 2, "-q")
        with mock.patch.dict(os.environ, {"HOTPLANE_STORE": path}), \
                mock.patch.object(vllm_moet, "_rank", return_value={"rank": 1, "world": 2}):
            cache, _, _ = self.modules()
            sizes = cache.expected_sizes(EXPERTS, INTERMEDIATE, HIDDEN, HIDDEN,
                                         INTERMEDIATE // 2, want_fp4=False)
            out = os.path.join(self.root, "rank1")
            command("export", path, "--layer", 2, "--part", "planes2", "--rank", 1, "--out", out,
                    "-q")
            with open(out, "rb") as file:
                self.assertEqual(raw(cache.try_load(2, sizes)["planes2"]), file.read())
            cache.shutdown()

    def test_it_is_off_without_a_store(self):
        with mock.patch.dict(os.environ):
            del os.environ["HOTPLANE_STORE"]
            self.assertFalse(vllm_moet.install())
            self.assertFalse(vllm_moet.enabled())
            self.assertFalse(vllm_moet.cache_has_layer(0, {}))
            self.assertIsNone(vllm_moet.try_load(0, {}))
            vllm_moet.store(0, {})


if __name__ == "__main__":
    package.main()
