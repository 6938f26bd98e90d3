"""torch.ops.hotplane: the custom ops, and torch.compile over them."""

import gc
import os
import unittest

import package
from package import EXPERTS, HIDDEN, WithStore, inputs

import hotplane

try:
    import torch
except ImportError:
    torch = None


@unittest.skipIf(torch is None, "no torch in this Python")
class Ops(WithStore):
    def setUp(self):
        from hotplane.integrations import torch as hotplane_torch
        self.engine = hotplane.boot(self.store_path)
        self.addCleanup(self.engine.close)
        self.register = hotplane_torch.register
        self.number = self.register(self.engine)
        self.x, self.ids, self.weights = (torch.tensor(a.tolist()) for a in inputs(7))
        self.expected = self.engine.moe_forward(1, self.x, self.ids, self.weights)

    def test_they_are_the_operator(self):
        ops = torch.ops.hotplane
        found = ops.moe_forward(self.x, self.ids, self.weights, self.number, 1)
        self.assertTrue(torch.equal(found, self.expected))
        half = ops.moe_forward(self.x.bfloat16(), self.ids, self.weights, self.number, 1, "fp4",
                               "exact")
        self.assertEqual(half.dtype, torch.bfloat16)
        self.assertTrue(torch.equal(half, self.engine.moe_forward(
            1, self.x.bfloat16(), self.ids, self.weights, precision="fp4", arithmetic="exact")))
        words = ["fp4", "base"] * (EXPERTS // 2)
        mixed = ops.moe_forward(self.x, self.ids, self.weights, self.number, 1, ",".join(words))
        self.assertTrue(torch.equal(mixed, self.engine.moe_forward(
            1, self.x, self.ids, self.weights, precision=words)))
        self.assertFalse(torch.equal(mixed, self.expected))
        out = torch.zeros(7, HIDDEN)
        ops.moe_forward_out(self.x, self.ids, self.weights, out, self.number, 1)
        self.assertTrue(torch.equal(out, self.expected))

    def test_torch_approves_of_them(self):
        torch.library.opcheck(torch.ops.hotplane.moe_forward,
                              (self.x, self.ids, self.weights, self.number, 1))
        torch.library.opcheck(torch.ops.hotplane.moe_forward_out,
                              (self.x, self.ids, self.weights, torch.zeros(7, HIDDEN),
                               self.number, 1))

    def test_compile_in_one_graph(self):
        def model(x, ids, weights):
            y = torch.ops.hotplane.moe_forward(x * 2, ids, weights, self.number, 1)
            out = torch.empty_like(y)
            torch.ops.hotplane.moe_forward_out(y, ids, weights, out, self.number, 2)
            return out + x

        expected = model(self.x, self.ids, self.weights)
        for backend in ("aot_eager", "inductor"):
            compiled = torch.compile(model, fullgraph=True, backend=backend)
            self.assertTrue(torch.equal(compiled(self.x, self.ids, self.weights), expected))

    def test_errors(self):
        with self.assertRaises(hotplane.UsageError):
            torch.ops.hotplane.moe_forward(self.x, self.ids, self.weights, self.number + 1, 1)
        with self.assertRaises(hotplane.UsageError):
            torch.ops.hotplane.moe_forward(self.x, self.ids + 100, self.weights, self.number, 1)
        other = hotplane.boot(self.store_path)
        number = self.register(other)
        del other
        gc.collect()
        with self.assertRaises(hotplane.UsageError):
            torch.ops.hotplane.moe_forward(self.x, self.ids, self.weights, number, 1)


@unittest.skipIf(torch is None or not torch.cuda.is_available(), "no torch with a CUDA device")
class OnGpu(WithStore):
    """Layers on the GPU that the tensors are on."""

    def setUp(self):
        from hotplane.integrations import torch as hotplane_torch
        self.engine = hotplane.boot(self.store_path, "cuda:0")
        self.addCleanup(self.engine.close)
        self.number = hotplane_torch.register(self.engine)
        x, self.ids, self.weights = (torch.tensor(a.tolist(), device="cuda:0") for a in inputs(7))
        self.x = x.bfloat16()

    def reference(self, precision):
        with hotplane.boot(self.store_path) as cpu:
            return cpu.moe_forward(1, self.x.float().cpu(), self.ids.cpu(), self.weights.cpu(),
                                   precision=precision, arithmetic="exact")

    def op(self, x, precision="base"):
        return torch.ops.hotplane.moe_forward(x, self.ids, self.weights, self.number, 1, precision)

    def assert_close(self, found, expected):
        error = (found.float().cpu() - expected).norm() / expected.norm()
        self.assertLess(float(error), 2 ** -7)

    def test_it_is_the_operator(self):
        mixed = ",".join(["fp4", "base"] * (EXPERTS // 2))
        for precision in ("base", "fp4", mixed):
            expected = self.reference(precision.split(",") if "," in precision else precision)
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                y = self.op(self.x.to(dtype), precision)
                self.assertEqual((y.dtype, y.device), (dtype, self.x.device))
                self.assert_close(y, expected)
            host = self.engine.moe_forward(
                1, self.x.float().cpu(), self.ids.cpu(), self.weights.cpu(),
                precision=precision.split(",") if "," in precision else precision)
            self.assertTrue(torch.equal(host, self.op(self.x.float(), precision).cpu()), precision)
        torch.cuda.synchronize()
        self.engine.moe_refusal(1)

    def test_out_and_streams(self):
        expected = self.op(self.x)
        out = torch.empty_like(self.x)
        torch.ops.hotplane.moe_forward_out(self.x, self.ids, self.weights, out, self.number, 1)
        self.assertTrue(torch.equal(out, expected))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        for given in (stream, stream.cuda_stream):
            y = self.engine.moe_forward(1, self.x, self.ids, self.weights, stream=given)
            stream.synchronize()
            self.assertTrue(torch.equal(y, expected))

    def test_graph_replay_equals_eager(self):
        for precision in ("base", "fp4"):
            x = self.x.clone()
            self.op(x, precision)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = self.op(x, precision)
            for factor in (1.0, -0.5, 2.0):
                x.copy_(self.x * factor)
                graph.replay()
                self.assertTrue(torch.equal(y, self.op(x, precision)), (precision, factor))

    def test_compile_with_graphs(self):
        def model(x):
            return self.op(x * 2) + x

        expected = model(self.x)
        compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
        for _ in range(4):
            self.assertTrue(torch.equal(compiled(self.x), expected))

    def test_what_cannot_be_computed_is_told(self):
        bad = torch.full_like(self.ids, EXPERTS)
        y = torch.ops.hotplane.moe_forward(self.x, bad, self.weights, self.number, 1)
        torch.cuda.synchronize()
        self.assertTrue(bool(y.isnan().all()))
        with self.assertRaises(hotplane.UsageError):
            self.engine.moe_refusal(1)
        self.engine.moe_refusal(1)

    def test_build_on_the_gpu(self):
        path = os.path.join(self.root, "on-gpu")
        report = hotplane.build(package.MODEL, path, device="cuda:0")
        self.assertGreater(report["bytes_quantized_on_device"], 0)


if __name__ == "__main__":
    package.main()
