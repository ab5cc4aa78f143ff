"""KDA's short causal convolution: depthwise, no bias, SiLU after; over ragged sequences with a slot pool of past inputs.

y_t[c] = silu( sum_n weight[c, n] * x_{t-W+1+n}[c] ), x before the first token taken from the state (zeros for a new sequence).
The state is the last W - 1 raw inputs, oldest first. Source: facts on K3's architecture, section 6.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import Backend, use_triton
from kernels.checks import check_device, check_shape


def short_conv(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    cu_seqlens: Tensor,
    backend: Backend = "auto",
) -> Tensor:
    """x [T, C], weight [C, 1, W] -> y [T, C], fp32 (the kernel: x's dtype); `state` [slots, W - 1, C] is read and written in place.

    cu_seqlens [N + 1]: sequence i is x[cu_seqlens[i]:cu_seqlens[i+1]], at least one token; it starts from slot read_slots[i] (-1: zeros)
    and leaves its state in write_slots[i]. All reads happen before all writes; write slots are distinct.
    """
    channels, width = weight.shape[0], weight.shape[-1]
    sequences = cu_seqlens.shape[0] - 1
    check_shape("x", x, None, channels)
    check_shape("weight", weight, channels, 1, None)
    check_shape("state", state, None, width - 1, channels)
    check_shape("read_slots", read_slots, sequences)
    check_shape("write_slots", write_slots, sequences)
    check_device(x, weight=weight, state=state, read_slots=read_slots, write_slots=write_slots, cu_seqlens=cu_seqlens)
    if use_triton(backend, x):
        from kernels.short_conv_triton import launch

        return launch(x, weight, state, read_slots, write_slots, cu_seqlens)
    past = state[read_slots.clamp(min=0)].masked_fill((read_slots < 0)[:, None, None], 0)  # [N, W - 1, C]
    if x.shape[0] == sequences:  # one token each
        window = torch.cat((past.to(x.dtype), x.unsqueeze(1)), 1)  # [N, W, C]
        state[write_slots] = window[:, 1:].to(state.dtype)
        return torch.nn.functional.silu((window.float() * weight[:, 0].float().T).sum(1))
    sequence = torch.repeat_interleave(torch.arange(sequences, device=x.device), cu_seqlens.diff(), output_size=x.shape[0])
    token = torch.arange(x.shape[0], device=x.device) + (width - 1) * (sequence + 1)  # place of each token among past and new inputs
    before = torch.arange(width - 1, device=x.device) - (width - 1)
    ends = cu_seqlens[1:] + (width - 1) * torch.arange(1, sequences + 1, device=x.device)
    starts = cu_seqlens[:-1] + (width - 1) * torch.arange(1, sequences + 1, device=x.device)
    inputs = x.new_empty(x.shape[0] + (width - 1) * sequences, channels)
    inputs[token] = x
    inputs[starts[:, None] + before] = past.to(x.dtype)
    state[write_slots] = inputs[ends[:, None] + before].to(state.dtype)
    taps = weight[:, 0].float().unbind(1)
    y = sum(tap * inputs[token - (width - 1) + n].float() for n, tap in enumerate(taps))
    return torch.nn.functional.silu(torch.as_tensor(y))
