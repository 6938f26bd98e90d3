"""torch.ops.hotplane: the custom ops, and torch.compile over them."""

import gc
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


if __name__ == "__main__":
    package.main()
