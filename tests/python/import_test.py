"""import_planes_cache: a store of imported planes is read, and computes, like the one built."""

import os
import shutil
import unittest

import package
from package import EXPERTS, HIDDEN, INTERMEDIATE, LAYERS, MODEL, PART_BYTES, WithStore, command

import hotplane

GEOMETRY = f"{EXPERTS},{HIDDEN},{INTERMEDIATE}"


class Import(WithStore):
    def setUp(self):
        self.cache = os.path.join(self.root, "cache")
        self.store = os.path.join(self.root, "imported")
        command("export", self.store_path, "--planes-cache", self.cache, "--checkpoint-id", "tiny",
                "-q")
        for path in (self.cache, self.store):
            self.addCleanup(shutil.rmtree, path, ignore_errors=True)

    def test_the_same_planes_records_and_results(self):
        report = hotplane.import_planes_cache(self.cache, self.store, GEOMETRY, config=MODEL)
        self.assertEqual((report["layers_imported"], report["warnings"]), (LAYERS, []))
        x, ids, weights = package.inputs(5)
        with hotplane.boot(self.store_path) as built, hotplane.boot(self.store) as imported:
            for layer in range(LAYERS):
                for part in PART_BYTES:
                    for expert in (0, EXPERTS - 1):
                        self.assertEqual(bytes(getattr(imported.layers[layer], part)[expert]),
                                         bytes(getattr(built.layers[layer], part)[expert]))
                self.assertEqual(bytes(imported.delta(layer, 7)), bytes(built.delta(layer, 7)))
                for precision in ("base", "fp4"):
                    results = [bytes(memoryview(engine.moe_forward(layer, x, ids, weights,
                                                                   precision=precision)))
                               for engine in (built, imported)]
                    self.assertEqual(*results)

    def test_move(self):
        report = hotplane.import_planes_cache(self.cache, self.store, GEOMETRY, move=True,
                                              workers=2, progress=False)
        self.assertEqual(report["layers_imported"], LAYERS)
        # The lock that exports to a folder take turns by stays.
        self.assertEqual(os.listdir(self.cache), [".hotplane-lock"])
        with self.assertRaises(hotplane.UsageError):
            hotplane.import_planes_cache(self.cache, self.store, GEOMETRY)

    def test_errors_by_kind(self):
        with self.assertRaises(hotplane.DataError) as refused:
            hotplane.import_planes_cache(self.cache, self.store, "16,256,128")
        self.assertTrue(refused.exception.file.endswith("layer0.planes13.bin"))
        for options in ({"rank": 1}, {"key": "zz"}, {"mtp_layers": "x"}, {"rank": -1},
                        {"move": True, "base_only": True}):
            with self.assertRaises(hotplane.UsageError):
                hotplane.import_planes_cache(self.cache, self.store, GEOMETRY, **options)
        self.assertFalse(os.path.exists(self.store))


if __name__ == "__main__":
    package.main()
