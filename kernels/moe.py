"""Mixture of experts: SiTU, the router's top-k, and the packed MLPs of the local experts.

Source: facts on K3's architecture, section 8. Activations stay unquantised (W4A16).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.backend import Backend, use_triton
from kernels.checks import check_device, check_shape
from kernels.mxfp4 import dequantise

BLOCK_ELEMENTS = 1 << 22  # bytes or values of gate and up weights that are held at once


def situ(gate: Tensor, up: Tensor, beta: float | None, linear_beta: float | None, backend: Backend = "auto") -> Tensor:
    """[beta tanh(gate / beta) sigmoid(gate)] * [linear_beta tanh(up / linear_beta)], fp32 inside, in gate's dtype; any one shape.

    Without a beta SiLU: gate sigmoid(gate) up.
    """
    check_shape("up", up, *gate.shape)
    if beta is None:
        return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)
    if gate.ndim == 2 and use_triton(backend, gate):
        from kernels import rows_triton

        return rows_triton.situ(gate, up, beta, linear_beta)
    g, u = gate.float(), up.float()
    if linear_beta is not None:
        u = linear_beta * torch.tanh(u / linear_beta)
    return (beta * torch.tanh(g / beta) * torch.sigmoid(g) * u).to(gate.dtype)


def route(logits: Tensor, bias: Tensor, top_k: int, renormalise: bool, factor: float, backend: Backend = "torch") -> tuple[Tensor, Tensor]:
    """logits [T, E] fp32, bias [E] -> (ids [T, k] int32, weights [T, k] fp32).

    Selection by sigmoid(logits) + bias; weights from the sigmoid alone, divided by their sum when `renormalise`, times `factor`.
    """
    check_shape("bias", bias, logits.shape[-1])
    if use_triton(backend, logits):
        from kernels.route_triton import launch

        return launch(logits, bias, top_k, renormalise, factor)
    scores = torch.sigmoid(logits.float())
    ids = torch.topk(scores + bias, top_k, dim=-1).indices
    weights = scores.gather(-1, ids)
    if renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids.int(), weights * factor


Weights = Callable[[Tensor], Tensor]  # numbers of local experts [n] -> their matrices [n, out, in] in the compute dtype


def grouped_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13_packed: Tensor,
    w13_scale: Tensor,
    w2_packed: Tensor,
    w2_scale: Tensor,
    first_expert: int,
    beta: float | None,
    linear_beta: float | None,
    block_elements: int = BLOCK_ELEMENTS,
) -> Tensor:
    """The local experts' part of sum_e w_e W2_e situ(W1_e x, W3_e x), in fp32.

    x [T, D]; ids, weights [T, k] over all experts; w13_packed [E, 2F, D/2], w13_scale [E, 2F, D/32] (gate rows, then up rows),
    w2_packed [E, D, F/2], w2_scale [E, D, F/32]: experts first_expert ... first_expert + E - 1 -> [T, D] fp32.
    """
    experts, twice, _ = w13_packed.shape
    _check_choices(x, ids, weights)
    check_shape("w13_packed", w13_packed, None, twice, x.shape[1] // 2)
    check_shape("w2_packed", w2_packed, experts, x.shape[1], twice // 4)
    check_device(x, w13_packed=w13_packed, w2_packed=w2_packed)
    each = max(1, block_elements // max(1, w13_packed[:1].numel()))

    def w13(block: Tensor) -> Tensor:
        return dequantise(w13_packed[block], w13_scale[block], x.dtype)

    def w2(block: Tensor) -> Tensor:
        return dequantise(w2_packed[block], w2_scale[block], x.dtype)

    return _grouped(x, ids, weights, w13, w2, experts, first_expert, beta, linear_beta, each)


def plain_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    first_expert: int,
    beta: float | None,
    linear_beta: float | None,
    block_elements: int = BLOCK_ELEMENTS,
) -> Tensor:
    """The same with matrices that are not packed: w13 [E, 2F, D] (gate rows, then up rows), w2 [E, D, F], in x's dtype."""
    experts, twice, _ = w13.shape
    _check_choices(x, ids, weights)
    check_shape("w13", w13, None, twice, x.shape[1])
    check_shape("w2", w2, experts, x.shape[1], twice // 2)
    check_device(x, w13=w13, w2=w2)
    each = max(1, block_elements // max(1, w13[:1].numel()))
    return _grouped(x, ids, weights, lambda block: w13[block], lambda block: w2[block], experts, first_expert, beta, linear_beta, each)


def _check_choices(x: Tensor, ids: Tensor, weights: Tensor) -> None:
    check_shape("weights", weights, x.shape[0], None)
    check_shape("ids", ids, *weights.shape)
    check_device(x, ids=ids, weights=weights)


def _grouped(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Weights,
    w2: Weights,
    experts: int,
    first_expert: int,
    beta: float | None,
    linear_beta: float | None,
    each: int,
) -> Tensor:
    """`each`: experts whose matrices are held at once."""
    top_k = ids.shape[1]
    local = ids.flatten().long() - first_expert
    local = torch.where((local < 0) | (local >= experts), experts, local)  # elsewhere: sorted to the end
    order = torch.argsort(local, stable=True)  # (token, choice) pairs by expert
    counts = torch.bincount(local, minlength=experts + 1)[:experts]
    begins = counts.cumsum(0) - counts
    contributions = torch.zeros(ids.numel(), x.shape[1], dtype=torch.float32, device=x.device)
    hit = counts.nonzero().flatten()
    for block in hit.split(each) if len(hit) else ():
        lane = torch.arange(int(counts[block].max()), device=x.device)
        valid = lane < counts[block, None]  # [n, m]: experts of this block by their tokens
        pairs = order[(begins[block, None] + lane).masked_fill(~valid, 0)]
        hidden = x[pairs // top_k] @ w13(block).transpose(1, 2)  # [n, m, 2F]
        gate, up = hidden.chunk(2, -1)
        hidden = situ(gate, up, beta, linear_beta, "torch")
        y = hidden @ w2(block).transpose(1, 2)
        contributions[pairs[valid]] = y[valid].float()
    # One place per (token, choice) and one fixed order of addition: the same on every device.
    return (contributions.view(x.shape[0], top_k, x.shape[1]) * weights.float().unsqueeze(-1)).sum(1)
