"""The router's choice in Triton: sigmoid, bias, the top k one after the other, weights. As `kernels.moe.route`, ties to the lower id."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FEW = 528  # tokens up to which one's rounds are the time: more warps for it


@triton.jit
def _route(p_logits, p_bias, p_ids, p_weights, factor, E: tl.constexpr, EP: tl.constexpr, TOP_K: tl.constexpr, RENORMALISE: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    o_e = tl.arange(0, EP)
    score = tl.sigmoid(tl.load(p_logits + t * E + o_e, mask=o_e < E, other=0.0).to(tl.float32))
    rank = tl.where(o_e < E, score + tl.load(p_bias + o_e, mask=o_e < E, other=0.0), -float("inf"))
    chosen = tl.zeros((EP,), tl.int32)  # 1 + place among the chosen
    for j in tl.static_range(TOP_K):
        best = tl.argmax(rank, 0, tie_break_left=True)
        tl.store(p_ids + t * TOP_K + j, best.to(tl.int32))
        rank = tl.where(o_e == best, -float("inf"), rank)
        chosen = tl.where(o_e == best, j + 1, chosen)
    if RENORMALISE:
        factor = factor / (tl.sum(tl.where(chosen > 0, score, 0.0)) + 1e-20)
    tl.store(p_weights + t * TOP_K + chosen - 1, score * factor, mask=chosen > 0)


def launch(
    logits: Tensor, bias: Tensor, top_k: int, renormalise: bool, factor: float, num_warps: int | None = None
) -> tuple[Tensor, Tensor]:
    """As `kernels.moe.route`, which has checked the shapes: (ids [T, k] int32, best first, weights [T, k] fp32)."""
    tokens, experts = logits.shape
    if not 0 < top_k <= experts or not logits.is_contiguous():
        raise ValueError(f"top_k: {top_k} of {experts} experts, logits contiguous: {logits.is_contiguous()}")
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    if tokens:
        _route[(tokens,)](
            logits,
            bias,
            ids,
            weights,
            factor,
            E=experts,
            EP=triton.next_power_of_2(experts),
            TOP_K=top_k,
            RENORMALISE=renormalise,
            num_warps=num_warps or (8 if tokens < FEW else 1),
        )
    return ids, weights
