"""How far a layer's experts may be from float64, derived from the roundings of docs/operator.md.

A module of transformers gives the weights; they are taken as exact. Needs torch.
"""

import torch

UNIT = 2.0**-24  # of float32
SLOPE_MAX = 1.1  # of g * sigmoid(a g), whatever a: its derivative is at most 1.0999
# Roundings of an activation: a sigmoid of few units, and the products around it.
ACTIVATION_ROUNDINGS = 32
# Steps of int8: half of one is 1/254 of the block's largest.
HALF_STEP = 1 / 254
BLOCK = 32


def _gamma(count):
    return count * UNIT / (1 - count * UNIT)


def _half_steps(x):
    """[rows, K]: the most that quantizing to int8 moves each element."""
    blocks = x.abs().reshape(x.shape[0], -1, BLOCK)
    most = blocks.amax(-1, keepdim=True).expand_as(blocks).reshape(x.shape)
    return most * HALF_STEP * (1 + _gamma(4))


def _product(matrix, bias, x, x_error, exact):
    """Result and bound of bias + matrix x, x [rows, K] known to within x_error."""
    if not exact:
        x_error = x_error + _half_steps(x.abs() + x_error)
    columns = matrix.shape[1]
    sums = (x.abs() + x_error) @ matrix.abs().T + bias.abs()
    # One more: the bias is added. Of int8 sums are exact within a block.
    return x @ matrix.T + bias, x_error @ matrix.abs().T + _gamma(18 + columns / BLOCK) * sums


def _parts(module, expert):
    """w13 [2I, H] with gate first, its bias, w2 [H, I], its bias; float64."""
    w13, w2 = module.gate_up_proj[expert].double(), module.down_proj[expert].double()
    if getattr(module, "is_transposed", False):
        w13, w2 = w13.T, w2.T
    zeros = w13.new_zeros(())
    biases = [getattr(module, name)[expert].double() if module.has_bias else zeros
              for name in ("gate_up_proj_bias", "down_proj_bias")]
    if not getattr(module, "is_concatenated", True):
        w13 = torch.cat([w13[0::2], w13[1::2]])
        if module.has_bias:
            biases[0] = torch.cat([biases[0][0::2], biases[0][1::2]])
    return w13, biases[0], w2, biases[1]


def _expert(module, expert, x, exact):
    """Result and bound of one expert on x [rows, H]."""
    w13, bias13, w2, bias2 = _parts(module, expert)
    both, error = _product(w13, bias13, x, torch.zeros_like(x), exact)
    (gate, up), (gate_error, up_error) = both.chunk(2, -1), error.chunk(2, -1)
    plus = 0.0
    limit = getattr(module, "limit", None)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    slope = 1.0
    if hasattr(module, "alpha"):
        slope, plus = module.alpha, 1.0
    bent = gate * torch.sigmoid(slope * gate)
    activated = bent * (up + plus)
    activated_error = (SLOPE_MAX * gate_error * ((up + plus).abs() + up_error)
                       + bent.abs() * up_error
                       + _gamma(ACTIVATION_ROUNDINGS) * (gate.abs() + gate_error)
                       * ((up + plus).abs() + up_error))
    return _product(w2, bias2, activated, activated_error, exact)


def bound_of(module, x, ids, weights, exact):
    """(bound, result) [T, H] in float64 of the module's experts on x [T, H], ids and weights
    [T, k]."""
    result, bound, magnitude = (torch.zeros_like(x) for _ in range(3))
    for expert in ids.unique().tolist():
        rows, slots = torch.where(ids == expert)
        y, error = _expert(module, expert, x[rows], exact)
        share = weights[rows, slots, None]
        result.index_add_(0, rows, share * y)
        bound.index_add_(0, rows, share.abs() * error)
        magnitude.index_add_(0, rows, share.abs() * (y.abs() + error))
    return bound + _gamma(ids.shape[1] + 1) * magnitude, result
