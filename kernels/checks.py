"""What every operation's wrapper checks before it touches memory: shapes that belong together, one device, contiguous pools."""

from __future__ import annotations

import torch
from torch import Tensor


def check_shape(name: str, tensor: Tensor, *shape: int | None) -> None:
    """Raise `ValueError` unless `tensor` has this shape; None stands for any size."""
    if tensor.ndim != len(shape) or any(want is not None and have != want for have, want in zip(tensor.shape, shape, strict=True)):
        wanted = ", ".join("*" if n is None else str(n) for n in shape)
        raise ValueError(f"{name}: shape {list(tensor.shape)}, expected [{wanted}]")


def check_kda(tokens: int, heads: int, width: int, f: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor) -> None:
    """What KDA's step and prefill take in common: gates of `tokens` rows, their parameters, states in fp32."""
    check_shape("f", f, tokens, heads * width)
    check_shape("b", b, tokens, heads)
    check_shape("a_log", a_log, heads)
    check_shape("dt_bias", dt_bias, heads * width)
    check_shape("state", state, None, heads, width, width)
    if state.dtype != torch.float32:
        raise ValueError(f"state: {state.dtype}, expected torch.float32")


def check_device(first: Tensor, **others: Tensor) -> None:
    """Raise `ValueError` when a tensor lies on another device than the first."""
    for name, tensor in others.items():
        if tensor.device != first.device:
            raise ValueError(f"{name}: on {tensor.device}, expected {first.device}")
