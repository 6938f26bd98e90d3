"""Layers on a GPU from Python, on the fake CUDA driver: arrays of the host, and tensors of a
stand-in for torch. With torch and a GPU: torch_test.py."""

import ctypes
import os
import sys
import threading
import unittest
from unittest import mock

import package
from package import EXPERTS, HIDDEN, MODEL, WithStore, command, inputs

import hotplane
import standin_torch as torch

GPU = "cuda:0"


def fake_driver():
    try:
        return hasattr(ctypes.CDLL("libcuda.so.1"), "fake_cuda_live")
    except OSError:
        return False


@unittest.skipUnless(fake_driver(), "libcuda.so.1 is not the fake one")
class Device(WithStore):
    def setUp(self):
        sys.modules["torch"] = torch
        self.addCleanup(sys.modules.pop, "torch")
        self.engine = hotplane.boot(self.store_path, GPU)
        self.addCleanup(self.engine.close)
        x, ids, weights = inputs(5)
        self.host = x, ids, weights
        flat = [[v for row in m.tolist() for v in row] for m in (x, ids, weights)]
        self.top_k = ids.shape[1]
        self.x = torch.tensor(flat[0], torch.bfloat16, GPU, (5, HIDDEN))
        self.ids = torch.tensor(flat[1], torch.int64, GPU, ids.shape)
        self.weights = torch.tensor(flat[2], torch.float32, GPU, ids.shape)
        self.rounded = package.matrix("f", 5, HIDDEN, self.x.values())

    def on_device(self, *arguments, **options):
        return self.engine.moe_forward(1, self.x, self.ids, self.weights, *arguments, **options)

    def on_host(self, precision):
        y = self.engine.moe_forward(1, self.rounded, *self.host[1:], precision=precision)
        return [v for row in y.tolist() for v in row]

    def test_host_arrays_are_computed_on_the_device(self):
        with hotplane.boot(self.store_path) as cpu:
            for precision in ("base", "fp4"):
                found = self.on_host(precision)
                expected = cpu.moe_forward(1, self.rounded, *self.host[1:], precision=precision,
                                           arithmetic="exact")
                flat = [v for row in expected.tolist() for v in row]
                error = sum((a - b) ** 2 for a, b in zip(found, flat)) ** 0.5
                self.assertLess(error, 2 ** -7 * sum(v * v for v in flat) ** 0.5, precision)
                self.assertNotEqual(found, flat)

    def test_tensors_of_the_device(self):
        words = ["fp4", "base"] * (EXPERTS // 2)
        for precision in ("base", "fp4", words):
            y = self.on_device(precision=precision)
            self.assertEqual((y.shape, y.dtype, str(y.device)), ((5, HIDDEN), torch.bfloat16, GPU))
            self.assertEqual(y.values(), self.on_host(precision), precision)
        self.engine.moe_refusal(1)
        self.assertNotEqual(self.on_device(precision="fp4").values(), self.on_device().values())

    def test_fp8_activations(self):
        y = self.on_device(arithmetic="fp8").values()
        rounded = self.engine.moe_forward(1, self.rounded, *self.host[1:], arithmetic="fp8")
        self.assertEqual(y, [v for row in rounded.tolist() for v in row])
        plain = self.on_device().values()
        change = sum((a - b) ** 2 for a, b in zip(y, plain)) / sum(v * v for v in plain)
        self.assertGreater(change ** 0.5, 0.01)
        self.assertLess(change ** 0.5, 0.1)
        with hotplane.boot(self.store_path) as cpu:
            there = cpu.moe_forward(1, self.rounded, *self.host[1:], arithmetic="fp8")
            flat = [v for row in there.tolist() for v in row]
            error = sum((a - b) ** 2 for a, b in zip(y, flat)) ** 0.5
            self.assertLess(error, 2 ** -6 * sum(v * v for v in flat) ** 0.5)
        for arithmetic in ("FP8", "int8", None):
            with self.assertRaises(hotplane.UsageError):
                self.on_device(arithmetic=arithmetic)

    def test_out_types_and_streams(self):
        expected = self.on_device().values()
        out = torch.empty((5, HIDDEN), torch.bfloat16, GPU)
        self.assertIs(self.on_device(out), out)
        self.assertEqual(out.values(), expected)
        wide = torch.empty((5, HIDDEN), torch.float32, GPU)
        self.assertIs(self.on_device(wide), wide)
        self.assertEqual(wide.values(), expected)
        unaligned = torch.tensor(self.x.values(), torch.float32, GPU, self.x.shape, offset=4)
        y = self.engine.moe_forward(1, unaligned, self.ids, self.weights)
        self.assertEqual((y.dtype, y.values()), (torch.float32, expected))
        driver, stream = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        context = ctypes.c_void_p()
        self.assertEqual(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), 0)
        self.assertEqual(driver.cuCtxPushCurrent_v2(context), 0)
        self.assertEqual(driver.cuStreamCreate(ctypes.byref(stream), 1), 0)
        self.assertEqual(self.on_device(stream=stream.value).values(), expected)
        driver.cuStreamDestroy_v2(stream)

    def test_fp4_that_is_not_there(self):
        base = self.on_device().values()
        self.assertEqual(self.on_device(precision="fp4_or_base").values(), base)
        torch.cuda.capturing = True
        self.addCleanup(setattr, torch.cuda, "capturing", False)
        with self.assertRaises(hotplane.UsageError):
            self.on_device(precision="fp4")
        torch.cuda.capturing = False
        self.engine.load_fp4(1, range(EXPERTS))
        torch.cuda.capturing = True
        self.assertEqual(self.on_device(precision=["fp4"] * EXPERTS).values(),
                         self.on_device(precision="fp4_or_base").values())

    def test_no_call_is_enqueued_while_fp4_is_loaded(self):
        expected = self.on_host("fp4")
        self.on_device()
        alone, found = [], []
        other = threading.Thread(target=lambda: found.append(
            self.on_device(precision="fp4_or_base")))

        def wait_for_all(_device):
            other.start()
            other.join(0.3)
            alone.append(other.is_alive())

        with mock.patch("hotplane._device.wait_for_all", wait_for_all):
            self.engine.load_fp4(1)
        other.join()
        self.assertEqual((alone, found[0].values()), ([True], expected))

    def test_streams_wait_for_layers_of_a_boot_that_runs(self):
        expected = self.on_device().values()
        with hotplane.open(self.store_path) as store, store.boot(GPU, wait=False) as engine:
            for stream in (None, 0):
                engine.stream_wait_layer(1, stream)
            y = engine.moe_forward(1, self.x, self.ids, self.weights)
            self.assertEqual(y.values(), expected)
            engine.moe_refusal(1)
            for layer, stream in ((99, None), (1, "stream")):
                with self.assertRaises(hotplane.UsageError):
                    engine.stream_wait_layer(layer, stream)
            engine.wait()
            engine.stream_wait_layer(1)
        with hotplane.boot(self.store_path) as cpu, self.assertRaises(hotplane.UsageError):
            cpu.stream_wait_layer(1)

    def test_wrong_use(self):
        wrong = torch.tensor([EXPERTS] * (5 * self.top_k), torch.int32, GPU, self.ids.shape)
        y = self.engine.moe_forward(1, self.x, wrong, self.weights).values()
        self.assertTrue(all(v != v for v in y))
        with self.assertRaises(hotplane.UsageError):
            self.engine.moe_refusal(1)
        self.engine.moe_refusal(1)
        other = torch.tensor(self.x.values(), torch.bfloat16, "cuda:1", self.x.shape)
        flat = torch.tensor(self.x.values(), torch.bfloat16, GPU)
        short = torch.empty((4, HIDDEN), torch.bfloat16, GPU)
        for arguments in ((other, self.ids, self.weights), (flat, self.ids, self.weights),
                          (self.x, self.weights, self.weights), (short, self.ids, self.weights),
                          (self.x, self.ids, self.weights, short),
                          (self.x, self.ids, self.weights, self.x),
                          (self.x, self.host[1], self.weights)):
            with self.assertRaises(hotplane.UsageError):
                self.engine.moe_forward(1, *arguments)
        for options in ({"precision": "fp5"}, {"precision": ["base"]}):
            with self.assertRaises(hotplane.UsageError):
                self.on_device(**options)
        with self.assertRaises(hotplane.UsageError):
            self.engine.moe_forward(1, *self.host, stream=1)
        with hotplane.boot(self.store_path) as cpu:
            for call in (lambda: cpu.moe_forward(1, self.x, self.ids, self.weights),
                         lambda: cpu.load_fp4(1), lambda: cpu.moe_refusal(1)):
                with self.assertRaises(hotplane.UsageError):
                    call()
        self.engine.close()
        for call in (self.on_device, lambda: self.engine.load_fp4(1),
                     lambda: self.engine.moe_refusal(1)):
            with self.assertRaises(hotplane.UsageError):
                call()

    def test_ids_that_int32_does_not_have(self):
        for wide in (2**32 + 1, 1 - 2**32, 2**31 + 1, -2**63, 2**63 - 1):
            ids = self.ids.values()
            ids[self.top_k] = wide
            ids = torch.tensor(ids, torch.int64, GPU, self.ids.shape)
            y = self.engine.moe_forward(1, self.x, ids, self.weights).values()
            self.assertEqual([v != v for v in y], [i // HIDDEN == 1 for i in range(5 * HIDDEN)])
            with self.assertRaisesRegex(hotplane.UsageError, f"assignment {self.top_k} "):
                self.engine.moe_refusal(1)

    def test_builds_quantize_on_the_device(self):
        path = os.path.join(self.root, "on-device")
        report = hotplane.build(MODEL, path, device=GPU)
        self.assertGreater(report["bytes_quantized_on_device"], 0)
        command("verify", path, "-q")
        with hotplane.open(path) as made, hotplane.open(self.store_path) as other:
            self.assertEqual(made.generation, other.generation)
            for kind in ("base", "delta"):
                self.assertEqual(made.read(kind, 2, 7), other.read(kind, 2, 7))
        with self.assertRaises(hotplane.UsageError):
            hotplane.build(MODEL, path, device="tpu")


if __name__ == "__main__":
    package.main()
