"""Which implementation of an operation runs: the caller says so, or the tensors' device does."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Backend = Literal["auto", "torch", "triton"]


def held_whole(*widths: int) -> bool:
    """Whether a kernel can hold rows of these widths whole: powers of two from 16, as Triton's products want them."""
    return all(n >= 16 and not n & (n - 1) for n in widths)


def use_triton(backend: Backend, tensor: Tensor, *widths: int) -> bool:
    """True for the Triton kernel. "auto" takes it for bf16 on a GPU; "triton" insists (on a CPU that needs Triton's interpreter).

    fp32 on a GPU is how a deployment is checked against the CPU: it runs the references. So do `widths` that a kernel cannot hold whole
    (K3's it can).
    """
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"backend: {backend!r}, expected 'auto', 'torch' or 'triton'")
    fits = tensor.is_cuda and tensor.dtype == torch.bfloat16 and held_whole(*widths)
    return backend == "triton" or (backend == "auto" and fits)
