"""KDA over whole prompts: ragged sequences in chunks of 32 tokens, fp32 states in and out of slots.

Source: facts on K3's architecture, section 6 (chunked form); Kimi Linear, arXiv 2510.26692.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import Backend, use_triton
from kernels.checks import check_device, check_kda, check_shape
from kernels.kda import kda_chunk, kda_gate


def kda_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    cu_seqlens: Tensor,
    lower_bound: float | None,
    segment: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """q, k, v [T, heads, D] after the conv (not normalised), f [T, heads * D], b [T, heads] before gate and sigmoid -> o [T, heads, D].

    a_log [heads], dt_bias [heads * D] fp32. `state` [slots, heads, D, D] fp32 is updated in place: sequence i is tokens
    [cu_seqlens[i], cu_seqlens[i+1]) (none: its state is copied), starts from slot read_slots[i] (-1: zeros) and ends in write_slots[i].
    Write slots are distinct; no sequence may write a slot that another one reads. o has v's dtype.

    `segment` (tokens, a multiple of 32; 0: none) cuts sequences into pieces that run at the same time: first what each piece does to any
    incoming state (an affine map), then the states at the cuts, then the outputs. It costs about twice the work of the serial part, so
    it pays for few heads and long prompts; None decides by how many programs the serial form would have.
    """
    tokens, heads, width = q.shape
    sequences = cu_seqlens.shape[0] - 1
    check_shape("k", k, tokens, heads, width)
    check_shape("v", v, tokens, heads, width)
    check_kda(tokens, heads, width, f, b, a_log, dt_bias, state)
    check_shape("read_slots", read_slots, sequences)
    check_shape("write_slots", write_slots, sequences)
    check_device(q, k=k, v=v, f=f, b=b, a_log=a_log, dt_bias=dt_bias, state=state)
    check_device(q, read_slots=read_slots, write_slots=write_slots, cu_seqlens=cu_seqlens)
    if lower_bound is not None and use_triton(backend, q, width):
        from kernels.kda_prefill_triton import launch

        return launch(q, k, v, f, b, a_log, dt_bias, state, read_slots, write_slots, cu_seqlens, lower_bound, segment)
    g = kda_gate(f, a_log, dt_bias, lower_bound)
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    some = cu_seqlens.diff() > 0
    reads = state[read_slots[~some].clamp(min=0)].masked_fill((read_slots[~some] < 0)[:, None, None, None], 0)
    ends = torch.cat((cu_seqlens[:1], cu_seqlens[1:][some]))
    o[:] = kda_chunk(q, k, v, g, torch.sigmoid(b.float()), state, read_slots[some], write_slots[some], ends).to(v.dtype)
    state[write_slots[~some]] = reads
    return o
