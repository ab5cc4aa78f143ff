"""One decode step of a KDA layer in a single launch: short conv, L2 norms, gates, delta rule, output norm and gate.

Between the layer's input projection and its output projection nothing else runs. Each state is read once and written once, so the
floor of a step is 2 * 4 * K * V bytes per head and sequence over the memory bandwidth. Source: facts on K3's architecture, section 6.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import Backend, use_triton
from kernels.checks import check_device, check_kda, check_shape
from kernels.kda import kda_gate, kda_recurrent
from kernels.norms import gated_rms_norm
from kernels.short_conv import short_conv


def kda_step(
    qkv: Tensor,
    f: Tensor,
    b: Tensor,
    gate: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    conv_state: Tensor,
    state: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    lower_bound: float | None,
    eps: float,
    backend: Backend = "auto",
) -> Tensor:
    """S tokens for each of N sequences (S = 1: plain decode; S > 1: verification of drafted tokens) -> y [N * S, heads * D] in qkv's dtype.

    qkv [N * S, 3 * heads * D] (q | k | v, before the conv), f [N * S, heads * D] (gate before bias), b [N * S, heads] (before sigmoid),
    gate [N * S, heads * D] (before sigmoid): rows of one sequence together, any row stride. conv_weight [3 * heads * D, 1, 4], a_log
    [heads], dt_bias [heads * D], norm_weight [D]: fp32. conv_state [slots, 3, 3 * heads * D] and state [slots, heads, D, D] fp32 are
    updated in place: sequence i starts from slot read_slots[i] (-1: zeros) and leaves what it is after token s in slot
    write_slots[i, s] (-1: not kept). Write slots are distinct; no sequence may write a slot that another one reads.
    """
    slots = write_slots.shape
    check_shape("write_slots", write_slots, read_slots.shape[0], None)
    tokens, (heads,), width = slots[0] * slots[1], a_log.shape, norm_weight.shape[0]
    check_shape("qkv", qkv, tokens, 3 * heads * width)
    check_kda(tokens, heads, width, f, b, a_log, dt_bias, state)
    check_shape("gate", gate, tokens, heads * width)
    check_shape("conv_weight", conv_weight, 3 * heads * width, 1, None)
    check_shape("conv_state", conv_state, None, conv_weight.shape[-1] - 1, 3 * heads * width)
    check_device(qkv, f=f, b=b, gate=gate, conv_state=conv_state, state=state, read_slots=read_slots, write_slots=write_slots)
    check_device(qkv, conv_weight=conv_weight, a_log=a_log, dt_bias=dt_bias, norm_weight=norm_weight)
    inputs = (qkv, f, b, gate, conv_weight, a_log, dt_bias, norm_weight, conv_state, state, read_slots, write_slots)
    if lower_bound is not None and use_triton(backend, qkv, width):
        from kernels.kda_step_triton import launch

        return launch(*inputs, lower_bound, eps)
    return _reference(*inputs, lower_bound, eps)


def _reference(
    qkv: Tensor,
    f: Tensor,
    b: Tensor,
    gate: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    conv_state: Tensor,
    state: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    lower_bound: float | None,
    eps: float,
) -> Tensor:
    (sequences, steps), heads, width = write_slots.shape, a_log.shape[0], norm_weight.shape[0]
    fresh = read_slots < 0
    conv_now = conv_state[read_slots.clamp(min=0)].masked_fill(fresh[:, None, None], 0)
    now = state[read_slots.clamp(min=0)].masked_fill(fresh[:, None, None, None], 0)
    own = torch.arange(sequences, device=qkv.device)
    each = torch.arange(sequences + 1, device=qkv.device)
    y = torch.empty(sequences, steps, heads * width, dtype=qkv.dtype, device=qkv.device)
    kept = []
    for s in range(steps):
        x, f_s, b_s, gate_s = (t.unflatten(0, (sequences, steps))[:, s] for t in (qkv, f, b, gate))
        q, k, v = short_conv(x, conv_weight, conv_now, own, own, each, "torch").view(-1, 3, heads, width).unbind(1)
        o = kda_recurrent(q, k, v, kda_gate(f_s, a_log, dt_bias, lower_bound), torch.sigmoid(b_s.float()), now, own, own, each)
        y[:, s] = gated_rms_norm(o, gate_s.unflatten(1, (heads, width)), norm_weight, eps, "torch").flatten(1).to(y.dtype)
        kept.append((conv_now.clone(), now.clone()))
    for s, (conv_s, now_s) in enumerate(kept):
        wanted = write_slots[:, s] >= 0
        conv_state[write_slots[wanted, s]] = conv_s[wanted]
        state[write_slots[wanted, s]] = now_s[wanted]
    return y.flatten(0, 1)
