"""The package from the outside: build, plan, boot, planes, records, the operator, errors.

MOE_FORWARD is the C program of tests/capi/moe_forward.c.
"""

import array
import ctypes
import functools
import gc
import io
import json
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import unittest
from contextlib import redirect_stderr
from unittest import mock

import package
from package import (EXPERTS, HIDDEN, LAYERS, MODEL, PART_BYTES, WithStore, command, inputs,
                     mapped_bytes, matrix)

import hotplane
from hotplane import _arrays, _library

MOE_FORWARD = os.environ.get("MOE_FORWARD")


def module(name):
    try:
        return __import__(name)
    except ImportError:
        raise unittest.SkipTest(f"no {name} in this Python") from None


class ElsewhereThan:
    """Exports a part as if it were on a device: numpy refuses that in C, and drops the capsule with
    its exception pending."""

    def __init__(self, part):
        self.part = part

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, **options):
        capsule = self.part.__dlpack__(**options)
        name = b"dltensor_versioned" if options.get("max_version", (0,))[0] else b"dltensor"
        _arrays.CAPSULES[name].from_address(
            _arrays._get_pointer(id(capsule), name)).tensor.device_type = 2
        return capsule


class Build(WithStore):
    def test_the_same_store_as_the_command_line(self):
        path = os.path.join(self.root, "built")
        report = hotplane.build(MODEL, path)
        self.assertEqual((report["layers_total"], report["layers_built"]), (LAYERS, LAYERS))
        self.assertEqual(hotplane.build(MODEL, path)["layers_attached"], LAYERS)
        with hotplane.open(path) as made, hotplane.open(self.store_path) as store:
            self.assertEqual(made.generation, store.generation)
            for layer, expert in ((0, 0), (3, 31)):
                for kind in ("base", "delta"):
                    self.assertEqual(made.read(kind, layer, expert),
                                     store.read(kind, layer, expert))

    def test_options(self):
        path = os.path.join(self.root, "options")
        report = hotplane.build(MODEL, path, layers="1-2", delta=None, workers=1, world=2,
                                zero_mode="sign", batch=1, staging_limit_bytes=64 << 20)
        self.assertEqual((report["layers_total"], report["world"]), (2, 2))
        with hotplane.open(path, rank=1, world=2) as store:
            infos = store.describe_layers()
            self.assertEqual([info.base for info in infos],
                             ["absent", "present", "present", "absent"])
            self.assertEqual({info.delta for info in infos}, {"absent"})
            self.assertEqual((store.rank, infos[0].intermediate), (1, 64))
        for wrong in ({"delta": "octal"}, {"zero_mode": "x"}, {"workers": -1}, {"world": "2"}):
            with self.assertRaises(hotplane.UsageError, msg=wrong):
                hotplane.build(MODEL, path, **wrong)

    def test_errors(self):
        with self.assertRaises(hotplane.UsageError) as caught:
            hotplane.build(os.path.join(self.root, "nothing"), os.path.join(self.root, "n"))
        self.assertIn("nothing", str(caught.exception))


class Values(WithStore):
    """A value of another type, or one that is not taken: the error names the option, what it takes
    and what it got."""

    NUMBERS = ("workers", "batch", "rank", "world", "memory_bytes", "reserve_bytes",
               "delta_cache_bytes", "full_cache_bytes", "base_cache_bytes", "pin_delta_bytes",
               "staging_limit_bytes")
    FLAGS = ("map", "verify", "delta", "no_build")
    WORDS = {"residency": "'host'", "cache": "'bypass'", "delta_encoding": "'nibble'",
             "device": "cuda:N", "layers": "mtp", "delta_layers": "mtp", "no_delta_layers": "mtp",
             "generation": "digits", "checkpoint": "a path"}

    def refused(self, name, expected, value, call):
        with self.assertRaises(hotplane.UsageError, msg=(name, value)) as caught:
            call()
        error = caught.exception
        self.assertTrue(error.what.startswith(name + " "), error)
        self.assertIn(expected, error.expected)
        self.assertEqual(error.found, repr(value))

    def wrong_values(self):
        for name in self.NUMBERS:
            for value in ("2", 1.5, -1, True, [1], 1 << 64):
                yield name, "a whole number of 0 to", value
        for name in self.FLAGS:
            for value in ("no", "", 2, [], object):
                yield name, "True or False", value
        for name, expected in self.WORDS.items():
            for value in (5, ["x"], 1.5, "a\0b"):
                yield name, expected, value
        for value in (5, (1,), (1, 2, 3), ("a", "b"), (1.5, 3), (3, 3), (True, 3), "ab"):
            yield "experts", "(first, one past the last)", value

    def test_options_of_a_boot(self):
        with hotplane.open(self.store_path) as store:
            for name, expected, value in self.wrong_values():
                for call in (store.boot, store.plan):
                    self.refused(name, expected, value, lambda: call(**{name: value}))
            self.refused("on_layer", "a function", 5, lambda: store.boot(on_layer=5))
            for flag in (True, 1, False, 0):
                store.plan(map=flag)

    def test_options_of_the_other_calls(self):
        build = functools.partial(hotplane.build, MODEL, os.path.join(self.root, "unmade"))
        take = functools.partial(hotplane.import_planes_cache, "cache", "store")
        for name, expected, value in self.wrong_values():
            if name in ("workers", "batch", "world", "staging_limit_bytes", "layers", "device"):
                self.refused(name, expected, value, lambda: build(**{name: value}))
            if name in ("rank", "world", "generation", "checkpoint"):
                self.refused(name, expected, value,
                             lambda: hotplane.open(self.store_path, **{name: value}))
        for name, expected, value in (("delta", "'nibble'", 5), ("zero_mode", "'sign'", 1)):
            self.refused(name, expected, value, lambda: build(**{name: value}))
        for name, expected, value in (("mtp_layers", "43-44", 43), ("config", "a path", 5),
                                      ("key", "characters", 5), ("rank", "a whole number", "x"),
                                      ("base_only", "True or False", "x"),
                                      ("move", "True or False", "no")):
            self.refused(name, expected, value, lambda: take("4,64,64", **{name: value}))
        self.refused("layers_geometry", "ds4-flash", 5, lambda: take(5))
        for value in (None, 5, ["x"]):
            self.refused("path", "", value, lambda: hotplane.open(value))
        self.refused("checkpoint", "a path", 5, lambda: hotplane.build(5, self.store_path))
        with hotplane.boot(self.store_path) as engine:
            self.refused("experts", "whole numbers", 5, lambda: engine.prefetch("full", 0, 5))
            self.refused("experts", "whole numbers", 5, lambda: engine.load_fp4(0, 5))
            self.refused("expert", "a whole number", "a", lambda: engine.read_many("base", 0, "a"))
            self.refused("layer", "a whole number", "x", lambda: engine.wait_layer("x"))
            with self.assertRaisesRegex(TypeError, "whole number or a slice, not 'x'"):
                engine.layers["x"]

    def test_an_option_that_there_is_not(self):
        for call, name, meant in ((functools.partial(hotplane.build, MODEL, "s"), "tp", "world"),
                                  (functools.partial(hotplane.build, MODEL, "s"), "worker",
                                   "workers"),
                                  (functools.partial(hotplane.open, self.store_path), "ranks",
                                   "rank"),
                                  (functools.partial(hotplane.boot, self.store_path), "pin_delta",
                                   "pin_delta_bytes")):
            with self.assertRaises(hotplane.UsageError) as caught:
                call(**{name: 1})
            self.assertIn(f"has no option {name}", caught.exception.what)
            self.assertIn(meant, caught.exception.expected)
            self.assertEqual(caught.exception.advice, f"is {meant} meant?")


class Plans(WithStore):
    def test_the_plan_of_the_command_line(self):
        expected = json.loads(command("boot", self.store_path, "--dry-run", "--json"))
        with hotplane.open(self.store_path) as store:
            found = store.plan()
            for changing in ("device_limit_bytes",):
                del expected[changing], found[changing]
            self.assertEqual(found, expected)
            self.assertEqual(store.plan(layers="2-3")["layers_total"], 2)

    def test_errors_are_exceptions_with_fields(self):
        with hotplane.open(self.store_path) as store:
            with self.assertRaises(hotplane.CapacityError) as caught:
                store.plan(residency="device", memory_bytes=1000)
            error = caught.exception
            self.assertEqual((error.code, error.kind), (4, "capacity"))
            self.assertTrue(error.expected and error.found and error.advice)
            self.assertIn(error.what, str(error))
            again = pickle.loads(pickle.dumps(error))
            self.assertEqual((type(again), vars(again)), (type(error), vars(error)))
            for wrong in ({"layer": 3}, {"workers": -1}, {"residency": "moon"}, {"rank": True},
                          {"experts": (3, 3)}, {"memory_bytes": 1 << 64},
                          {"delta_encoding": "planes"}, {"pin_delta_bytes": 5}):
                with self.assertRaises(hotplane.UsageError, msg=wrong):
                    store.plan(**wrong)
            self.assertEqual(store.plan(layers=None)["layers_total"], LAYERS)
        with self.assertRaises(hotplane.UsageError):
            store.plan()
        with self.assertRaises(hotplane.UsageError) as caught:
            hotplane.open(os.path.join(self.root, "none"))
        self.assertEqual(caught.exception.file, os.path.join(self.root, "none"))

    def test_damage_names_file_and_offset(self):
        path = os.path.join(self.root, "damaged")
        hotplane.build(MODEL, path, layers="0", delta=None)
        with hotplane.open(path) as store:
            name = next(os.path.join(store.directory, n) for n in os.listdir(store.directory)
                        if n.startswith("layer-0000") and n.endswith("base"))
            with open(name, "r+b") as file:
                file.seek(8192)
                bytes_there = file.read(64)
                file.seek(8192)
                file.write(bytes(255 - b for b in bytes_there))
            with self.assertRaises(hotplane.DataError) as caught:
                store.boot(layers="0")
            error = caught.exception
            self.assertEqual((error.code, error.kind, error.file), (3, "data", name))
            self.assertIsNotNone(error.offset)
            with self.assertRaises(hotplane.DataError):
                store.read("base", 0, 0)

    def test_system_failures(self):
        with self.assertRaises(hotplane.SystemFailure) as caught:
            hotplane.boot(self.store_path, "cuda:63")
        self.assertEqual(caught.exception.code, 1)
        done = package.python("import os; os.environ['HOTPLANE_LIBRARY'] = '/none.so'\n"
                              "import hotplane\n"
                              "try: hotplane.open('x')\n"
                              "except hotplane.SystemFailure as error:\n"
                              "    print(error.file, error.what, error.advice, sep='|')")
        file, what, advice = done.stdout.rstrip("\n").split("|")
        self.assertEqual(file, "/none.so", done.stderr)
        self.assertIn("HOTPLANE_LIBRARY names", what)
        self.assertIn("correct HOTPLANE_LIBRARY, or unset it", advice)


class Boot(WithStore):
    def test_planes_are_those_of_export(self):
        with hotplane.open(self.store_path) as store:
            for options in ({}, {"map": True}):
                with store.boot(**options) as engine:
                    self.assertEqual(len(engine.layers), LAYERS)
                    for layer in engine.layers:
                        self.assertEqual((layer.experts, layer.device, layer.bias13),
                                         (EXPERTS, "cpu", None))
                        for name, size in PART_BYTES.items():
                            part = getattr(layer, name)
                            self.assertEqual((part.shape, part.dtype), ((EXPERTS, size), "uint8"))
                            self.assertEqual(part.tobytes(), self.export(layer.ordinal, name))

    def test_as_the_layers_come(self):
        seen = []
        with hotplane.boot(self.store_path, on_layer=lambda layer: seen.append(
                (layer.ordinal, bytes(layer.sc2[7]), threading.current_thread()))) as engine:
            self.assertEqual([ordinal for ordinal, _, _ in seen], list(range(LAYERS)))
            self.assertEqual({thread for _, _, thread in seen}, {threading.main_thread()})
            for ordinal, scales, _ in seen:
                self.assertEqual(scales, bytes(engine.layers[ordinal].sc2[7]))
            stats = engine.stats()
            self.assertEqual(stats["layers_read"], LAYERS)
            self.assertEqual(engine.generation, stats["generation"])

    def test_in_the_background(self):
        with hotplane.open(self.store_path) as store:
            with store.boot(wait=False, layers="1-2") as engine:
                self.assertEqual(engine.wait_layer(1).ordinal, 2)
                engine.wait()
                self.assertEqual([layer.ordinal for layer in engine.layers[-2:]], [1, 2])
                for call in (lambda: engine.wait_layer(2), engine.plan):
                    with self.assertRaises(hotplane.UsageError):
                        call()
                with self.assertRaises(IndexError):
                    engine.layers[2]
            with self.assertRaises(hotplane.UsageError):
                store.boot(wait=False, progress=True)

    def test_from_the_checkpoint(self):
        path = os.path.join(self.root, "first")
        with hotplane.open(path, checkpoint=MODEL) as store:
            with store.boot(delta=True, experts=(3, 5)) as engine:
                self.assertEqual(engine.stats()["layers_built"], LAYERS)
                self.assertEqual(engine.layers[0].sc2.shape, (2, PART_BYTES["sc2"]))
                self.assertEqual(engine.layers[0].sc2.tobytes(),
                                 self.export(0, "sc2")[3 * PART_BYTES["sc2"]:][:2 * PART_BYTES[
                                     "sc2"]])

    def test_logs(self):
        path = os.path.join(self.root, "logged")
        with self.assertLogs("hotplane", logging.DEBUG) as logs:
            hotplane.build(MODEL, path)
            hotplane.boot(path).close()
        self.assertTrue(all(record.name == "hotplane" for record in logs.records))

    def test_progress(self):
        with mock.patch("hotplane._progress._tqdm", return_value=None):
            text = io.StringIO()
            with redirect_stderr(text):
                hotplane.boot(self.store_path, progress=True).close()
            self.assertIn(f"boot: layer {LAYERS} of {LAYERS}", text.getvalue())
        bar = mock.MagicMock()
        with mock.patch("hotplane._progress._tqdm", return_value=bar):
            hotplane.boot(self.store_path, progress=True).close()
            hotplane.build(MODEL, os.path.join(self.root, "bar"), progress=True)
        total = LAYERS * EXPERTS * sum(PART_BYTES.values())
        self.assertGreaterEqual(bar.return_value.n, 0)
        self.assertEqual(bar.call_count, 2)
        self.assertEqual(bar.return_value.close.call_count, 2)
        self.assertGreater(total, 0)


class Arrays(WithStore):
    def setUp(self):
        self.engine = hotplane.boot(self.store_path)
        self.addCleanup(self.engine.close)
        self.part = self.engine.layers[2].planes2
        self.expected = self.export(2, "planes2")

    def test_buffers_are_read_only_and_shaped(self):
        view = self.part.memoryview()
        self.assertEqual((view.shape, view.format, view.readonly), (self.part.shape, "B", True))
        self.assertEqual(bytes(self.part[5]), self.expected[5 * view.shape[1]:][:view.shape[1]])
        self.assertEqual(bytes(self.part[-1]), self.expected[-view.shape[1]:])
        for wrong in (EXPERTS, -EXPERTS - 1):
            with self.assertRaises(IndexError):
                self.part[wrong]
        if sys.version_info >= (3, 12):
            self.assertEqual(memoryview(self.part).tobytes(), self.expected)
            with self.assertRaises((BufferError, TypeError)):
                (ctypes.c_char * 4).from_buffer(self.part)

    def test_memory_outlives_the_engine_and_new_views_are_refused(self):
        view = self.part.memoryview()
        expert = self.part[3]
        record = self.engine.record("full", 1, 2)
        parts = record.parts
        del record
        self.engine.close()
        self.engine.close()
        self.assertEqual(view.tobytes(), self.expected)
        self.assertEqual(bytes(expert), self.expected[3 * view.shape[1]:][:view.shape[1]])
        self.assertEqual(b"".join(parts),
                         b"".join(self.export(1, part, "--expert", 2) for part in ("fp13", "fp2")))
        x, ids, weights = inputs(1)
        calls = (self.part.memoryview, self.part.tobytes, self.part.__dlpack__,
                 lambda: self.part.pointer, lambda: self.part[0], lambda: self.engine.layers[0],
                 lambda: len(self.engine.layers), self.engine.stats, self.engine.plan,
                 self.engine.wait, lambda: self.engine.read("base", 0, 0),
                 lambda: self.engine.delta(0, 0), lambda: self.engine.record("base", 0, 0),
                 lambda: self.engine.prefetch("delta", 0, [1]), self.engine.describe_layers,
                 lambda: self.engine.cache_stats("delta"), self.engine.__enter__,
                 lambda: self.engine.layer_device(0),
                 lambda: self.engine.moe_forward(0, x, ids, weights))
        for number, call in enumerate(calls):
            with self.assertRaises(hotplane.UsageError, msg=number) as caught:
                call()
            self.assertIn("closed", str(caught.exception))
        self.assertTrue(self.engine.closed)

    def test_memory_is_freed_with_the_last_view(self):
        path = os.path.join(self.root, "large")
        command("synth", path, "--geometry", "64,1024,1024", "--layers", 2, "-q")
        hotplane.boot(path).close()
        before = mapped_bytes()
        engine = hotplane.boot(path)
        size = sum(layer.nbytes for layer in engine.layers)
        self.assertGreater(size, 64 << 20)
        views = [engine.layers[0].sc13.memoryview(), engine.layers[1].planes2[3]]
        capsule = engine.layers[1].sc2.__dlpack__()
        engine.close()
        while views:
            self.assertGreater(mapped_bytes(), before + size // 2)
            views.pop()
        self.assertGreater(mapped_bytes(), before + size // 2)
        del capsule
        gc.collect()
        self.assertLess(mapped_bytes(), before + size // 2)

    def take(self, capsule, name):
        """As a consumer of DLPack does: the tensor is taken and the capsule renamed."""
        managed = _arrays.CAPSULES[name].from_address(_arrays._get_pointer(id(capsule), name))
        rename = ctypes.pythonapi.PyCapsule_SetName
        rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
        rename(capsule, b"used_" + name)
        return managed

    def test_dlpack(self):
        self.assertEqual(self.part.__dlpack_device__(), (1, 0))
        for options, name in (({}, b"dltensor"), ({"max_version": (0, 8)}, b"dltensor"),
                              ({"max_version": (1, 1), "stream": None, "copy": False,
                                "dl_device": (1, 0)}, b"dltensor_versioned")):
            managed = self.take(self.part.__dlpack__(**options), name)
            tensor = managed.tensor
            self.assertEqual((tensor.device_type, tensor.dimensions, tensor.type_code,
                              tensor.type_bits, tensor.type_lanes), (1, 2, 1, 8, 1))
            self.assertEqual(tuple(tensor.shape[:2]), self.part.shape)
            self.assertEqual(tuple(tensor.strides[:2]), (self.part.shape[1], 1))
            if name == b"dltensor_versioned":
                self.assertEqual((managed.major, managed.flags), (1, 1))
            self.engine.stats()
            self.assertEqual(ctypes.string_at(tensor.data, self.part.nbytes), self.expected)
            managed.deleter(ctypes.addressof(managed))
        for wrong in ({"copy": True}, {"dl_device": (2, 0)}):
            with self.assertRaises(BufferError):
                self.part.__dlpack__(**wrong)
        for _ in range(100):  # nobody takes them: freed by their capsules
            self.part.__dlpack__(max_version=(1, 0))

    def test_numpy(self):
        numpy = module("numpy")
        for found in (self.part.numpy(), numpy.asarray(self.part), numpy.array(self.part),
                      numpy.from_dlpack(self.part)):
            self.assertEqual((found.shape, found.dtype), (self.part.shape, numpy.uint8))
            self.assertEqual(found.tobytes(), self.expected)
        self.assertEqual(self.part.numpy().ctypes.data, self.part.pointer)
        self.assertFalse(numpy.asarray(self.part).flags.writeable)
        self.assertEqual(numpy.asarray(self.part, dtype=numpy.int16).dtype, numpy.int16)
        with self.assertRaises((RuntimeError, BufferError)):
            numpy.from_dlpack(ElsewhereThan(self.part))
        view = self.part.numpy()
        self.engine.close()
        self.assertEqual(view.tobytes(), self.expected)
        with self.assertRaises(hotplane.UsageError):
            self.part.numpy()

    def test_torch(self):
        torch = module("torch")
        tensor = torch.from_dlpack(self.part)
        self.assertEqual((tuple(tensor.shape), tensor.dtype), (self.part.shape, torch.uint8))
        self.assertEqual(tensor.data_ptr(), self.part.pointer)
        self.engine.close()
        self.assertEqual(bytes(tensor.flatten().tolist()), self.expected)


class Records(WithStore):
    def test_records(self):
        with hotplane.open(self.store_path) as store:
            delta = store.delta(1, 30)
            self.assertEqual(bytes(delta), b"".join(
                self.export(1, part, "--expert", 30, "--encoded") for part in ("fp13", "fp2")))
            self.assertEqual(len(delta), store.record_bytes("delta", 1))
            place = bytearray(store.record_bytes("base", 2))
            self.assertIs(store.read("base", 2, 9, place), place)
            self.assertEqual(bytes(place), b"".join(self.export(2, part, "--expert", 9)
                                                    for part in PART_BYTES))
            several = store.read_many("delta", 1, [0, 30, 0])
            self.assertEqual((several[1], several[0] == several[2]), (delta, True))
            self.assertEqual(store.read_many("delta", 1, []), [])

    def test_caches(self):
        with hotplane.boot(self.store_path, delta_cache_bytes=1 << 20) as engine:
            self.assertEqual(engine.prefetch("delta", 0, [1, 2, 3]), 3)
            record = engine.record("delta", 0, 2)
            self.assertEqual((record.layer, record.expert, record.encoding, len(record.parts)),
                             (0, 2, "quintal", 2))
            self.assertEqual(b"".join(record.parts), engine.delta(0, 2))
            self.assertTrue(all(part.readonly for part in record.parts))
            stats = engine.cache_stats("delta")
            self.assertEqual((stats["hits"], stats["prefetched"]), (1, 3))

    def test_wrong_use(self):
        with hotplane.open(self.store_path) as store:
            size = store.record_bytes("base", 0)
            for call in (lambda: store.read("half", 0, 0), lambda: store.read("base", LAYERS, 0),
                         lambda: store.read("base", 0, EXPERTS),
                         lambda: store.read("base", 0, -1), lambda: store.read("base", 0, "1"),
                         lambda: store.read("base", 0, 0, bytes(size)),
                         lambda: store.read("base", 0, 0, bytearray(size - 1)),
                         lambda: store.read_many("base", 0, [1, 2], [bytearray(size)]),
                         lambda: store.read_many("base", 0, [1, 2], [bytearray(size)] * 2),
                         lambda: hotplane.open(self.store_path + "\0/elsewhere"),
                         lambda: store.record("base", 0, EXPERTS)):
                with self.assertRaises(hotplane.UsageError):
                    call()


class Operator(WithStore):
    def setUp(self):
        self.engine = hotplane.boot(self.store_path)
        self.addCleanup(self.engine.close)

    def test_the_bits_of_a_c_program(self):
        if not MOE_FORWARD:
            self.skipTest("MOE_FORWARD does not name the C program to compare with")
        for tokens in (1, 13):
            for precision in ("base", "fp4"):
                for arithmetic in ("fast", "exact", "fp8"):
                    expected = subprocess.run(
                        [MOE_FORWARD, self.store_path, "1", str(tokens),
                         str(_library.PRECISIONS[precision]),
                         str(_library.ARITHMETICS[arithmetic])],
                        stdout=subprocess.PIPE, check=True, timeout=60).stdout
                    self.assertEqual(len(expected), tokens * HIDDEN * 4)
                    found = self.engine.moe_forward(1, *inputs(tokens), precision=precision,
                                                    arithmetic=arithmetic)
                    self.assertEqual(found.tobytes(), expected, (tokens, precision, arithmetic))

    def test_threads_change_nothing(self):
        x, ids, weights = inputs(9)
        with hotplane.boot(self.store_path, workers=3) as other:
            self.assertEqual(other.moe_forward(0, x, ids, weights).tobytes(),
                             self.engine.moe_forward(0, x, ids, weights).tobytes())
        found = [None] * 4

        def run(place):
            found[place] = self.engine.moe_forward(0, x, ids, weights).tobytes()

        threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(len(set(found)), 1)

    def test_out_and_conversions(self):
        x, ids, weights = inputs(5)
        expected = self.engine.moe_forward(2, x, ids, weights).tobytes()
        out = matrix("f", 5, HIDDEN, [0.0] * 5 * HIDDEN)
        self.assertIs(self.engine.moe_forward(2, x, ids, weights, out), out)
        self.assertEqual(out.tobytes(), expected)
        flat = [value for row in x.tolist() for value in row]
        numbers = [number for row in ids.tolist() for number in row]
        for other in ((matrix("d", 5, HIDDEN, flat), matrix("q", 5, 2, numbers)),
                      (x.toreadonly(), matrix("B", 5, 2, numbers))):
            self.assertEqual(self.engine.moe_forward(2, *other, weights).tobytes(), expected)
        mixed = self.engine.moe_forward(2, x, ids, weights, precision=["fp4"] * EXPERTS)
        self.assertEqual(mixed.tobytes(),
                         self.engine.moe_forward(2, x, ids, weights, precision="fp4").tobytes())
        self.assertNotEqual(mixed.tobytes(), expected)

    def test_a_producer_of_dlpack(self):
        class Tensor:
            def __init__(self, values):
                self.matrix = _arrays.matrix_of(values, "x", True)
                self.shape = (ctypes.c_int64 * 2)(*self.matrix.shape)
                self.managed = _arrays.DlManaged()
                tensor = self.managed.tensor
                tensor.data, tensor.device_type, tensor.dimensions = self.matrix.address, 1, 2
                tensor.type_code, tensor.type_bits, tensor.type_lanes = 2, 32, 1
                tensor.shape = self.shape

            def __dlpack_device__(self):
                return 1, 0

            def __dlpack__(self):
                new = ctypes.pythonapi.PyCapsule_New
                new.restype = ctypes.py_object
                return new(ctypes.c_void_p(ctypes.addressof(self.managed)),
                           ctypes.c_char_p(_arrays.NAME), None)

        x, ids, weights = inputs(3)
        self.assertEqual(
            self.engine.moe_forward(0, Tensor(x), ids, Tensor(weights),
                                    out=matrix("f", 3, HIDDEN, [0.0] * 3 * HIDDEN)).tobytes(),
            self.engine.moe_forward(0, x, ids, weights).tobytes())
        wrong = Tensor(x)
        wrong.managed.tensor.type_bits = 16
        with self.assertRaises(hotplane.UsageError):
            self.engine.moe_forward(0, wrong, ids, weights)

    def test_wrong_use(self):
        x, ids, weights = inputs(2)
        high = matrix("i", 2, 2, [0, 1, EXPERTS, 0])
        for arguments, options in (
                ((9, x, ids, weights), {}), ((-1, x, ids, weights), {}),
                ((0, inputs(3)[0], ids, weights), {}), ((0, x, ids, inputs(3)[2]), {}),
                ((0, matrix("f", 4, HIDDEN // 2, [0.0] * 2 * HIDDEN), ids, weights), {}),
                ((0, x, weights, weights), {}), ((0, ids, ids, weights), {}),
                ((0, x, high, weights), {}),
                ((0, x, matrix("q", 2, 2, [1 << 32] * 4), weights), {}),
                ((0, [[0.0]], ids, weights), {}), ((0, array.array("f", [1.0]), ids, weights), {}),
                ((0, matrix("f", 2, HIDDEN, [float("nan")] * 2 * HIDDEN), ids, weights), {}),
                ((0, x, ids, weights, x), {}), ((0, x, ids, weights, inputs(3)[0]), {}),
                ((0, x, ids, weights, x.toreadonly()), {}), ((0, x, ids, weights, 3), {}),
                ((0, x, ids, weights, ids), {}),
                ((0, x, ids, weights), {"precision": "fp8"}),
                ((0, x, ids, weights), {"precision": ["base"]}),
                ((0, x, ids, weights), {"arithmetic": "rough"})):
            with self.assertRaises(hotplane.UsageError, msg=(arguments, options)):
                self.engine.moe_forward(*arguments, **options)
        for precision in ("fp4_or_base", ["base"] * (EXPERTS - 1) + ["fp4_or_base"]):
            with self.assertRaises(hotplane.UsageError) as raised:
                self.engine.moe_forward(0, x, ids, weights, precision=precision)
            self.assertEqual((raised.exception.expected, raised.exception.found),
                             ("'base' or 'fp4'", "'fp4_or_base'"))
            self.assertIn("GPU", raised.exception.advice)

    def test_errors_advise_arguments_not_options_of_the_command_line(self):
        with tempfile.TemporaryDirectory() as nothing:
            with self.assertRaises(hotplane.DataError) as raised:
                hotplane.boot(nothing)
        self.assertEqual(raised.exception.advice, "build one: build(CHECKPOINT, DIR)")
        with self.assertRaises(hotplane.CapacityError) as raised:
            hotplane.boot(self.store_path, residency="device", memory_bytes=1)
        self.assertIn("boot fewer `layers`", raised.exception.advice)
        self.assertNotIn("--", str(raised.exception))

    def test_numpy(self):
        numpy = module("numpy")
        x, ids, weights = (numpy.array(a) for a in inputs(6))
        expected = self.engine.moe_forward(1, *inputs(6)).tobytes()
        found = self.engine.moe_forward(1, x, ids, weights)
        self.assertEqual((found.shape, found.dtype), ((6, HIDDEN), numpy.float32))
        self.assertEqual(found.tobytes(), expected)
        for other in (x.astype(numpy.float64), x.astype(numpy.float16), numpy.asfortranarray(x)):
            found = self.engine.moe_forward(1, other, ids.astype(numpy.int64), weights)
            self.assertEqual(found.dtype, other.dtype)
            self.assertEqual(found.astype(numpy.float16).tobytes(),
                             numpy.frombuffer(expected, numpy.float32).astype(
                                 numpy.float16).tobytes())
        out = numpy.zeros((6, 2 * HIDDEN), numpy.float32)[:, ::2]
        self.assertIs(self.engine.moe_forward(1, x, ids, weights, out), out)
        self.assertEqual(out.tobytes(), expected)
        self.assertEqual(self.engine.moe_forward(1, x[:0], ids[:0], weights[:0]).shape,
                         (0, HIDDEN))
        for wrong in (x.astype(numpy.int32), x[0], x.astype(complex)):
            with self.assertRaises(hotplane.UsageError):
                self.engine.moe_forward(1, wrong, ids, weights)

    def test_torch(self):
        torch = module("torch")
        x, ids, weights = (torch.tensor(a.tolist()) for a in inputs(6))
        expected = self.engine.moe_forward(1, *inputs(6)).tobytes()
        found = self.engine.moe_forward(1, x, ids, weights)  # ids are int64
        self.assertEqual((found.dtype, tuple(found.shape)), (torch.float32, (6, HIDDEN)))
        self.assertEqual(array.array("f", found.flatten().tolist()).tobytes(), expected)
        whole = torch.frombuffer(bytearray(expected), dtype=torch.float32).reshape(6, HIDDEN)
        for dtype in (torch.bfloat16, torch.float16):
            found = self.engine.moe_forward(1, x.to(dtype), ids, weights.to(dtype))
            self.assertEqual(found.dtype, dtype)
            self.assertTrue(torch.equal(found, whole.to(dtype)))
        for out in (torch.empty(6, HIDDEN), torch.empty(6, HIDDEN, dtype=torch.bfloat16),
                    torch.empty(HIDDEN, 6).t()):
            self.assertIs(self.engine.moe_forward(1, x, ids.int(), weights, out), out)
            self.assertTrue(torch.equal(out, whole.to(out.dtype)))
        for wrong in (x.int(), x[0], x.to("meta")):
            with self.assertRaises(hotplane.UsageError):
                self.engine.moe_forward(1, wrong, ids, weights)


class Gpu(WithStore):
    """On a CUDA device, by torch."""

    def setUp(self):
        self.torch = module("torch")
        if not self.torch.cuda.is_available():
            self.skipTest("torch finds no CUDA device")

    def test_planes(self):
        engine = hotplane.boot(self.store_path, "cuda:0")
        self.addCleanup(engine.close)
        part = engine.layers[3].planes13
        self.assertEqual((part.device, part.__dlpack_device__()), ("cuda:0", (2, 0)))
        with self.assertRaises(hotplane.UsageError):
            part.memoryview()
        tensors = {name: self.torch.from_dlpack(getattr(engine.layers[3], name))
                   for name in PART_BYTES}
        self.assertEqual(tensors["planes13"].data_ptr(), part.pointer)
        engine.close()
        for name, tensor in tensors.items():
            self.assertEqual((tensor.device.type, tuple(tensor.shape)),
                             ("cuda", (EXPERTS, PART_BYTES[name])))
            self.assertEqual(bytes(tensor.cpu().numpy()), self.export(3, name))

    def test_memory_is_freed_with_the_last_tensor(self):
        path = os.path.join(self.root, "large")
        command("synth", path, "--geometry", "64,2048,2048", "--layers", 2, "-q")
        hotplane.boot(path, "cuda:0").close()
        free = self.torch.cuda.mem_get_info()[0]
        engine = hotplane.boot(path, "cuda:0")
        size = sum(layer.nbytes for layer in engine.layers)
        tensor = self.torch.from_dlpack(engine.layers[1].sc2)
        engine.close()
        self.assertLess(self.torch.cuda.mem_get_info()[0], free - size // 2)
        del tensor
        self.assertGreater(self.torch.cuda.mem_get_info()[0], free - size // 2)


class Overhead(WithStore):
    def test_it_is_measured(self):
        done = package.python(
            "import time; t = time.perf_counter()\n"
            "import hotplane; i = time.perf_counter()\n"
            "import sys; e = hotplane.boot(sys.argv[1]); b = time.perf_counter()\n"
            "print(i - t, b - i, e.stats()['seconds'])", self.store_path)
        self.assertEqual(done.returncode, 0, done.stderr)
        imported, booted, boot = map(float, done.stdout.split())
        self.assertGreater(booted, boot)
        print(f"import {imported * 1e3:.1f} ms; open and boot {booted * 1e3:.1f} ms, of which the "
              f"boot itself {boot * 1e3:.1f} ms; over it {(imported + booted - boot) * 1e3:.1f} ms")


if __name__ == "__main__":
    package.main()
