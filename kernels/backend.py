"""Which implementation of an operation runs: the caller says so, or the tensors' device does."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Backend = Literal["auto", "torch", "triton"]


def use_triton(backend: Backend, tensor: Tensor) -> bool:
    """True for the Triton kernel. "auto" takes it on a GPU; "triton" insists (on a CPU that needs Triton's interpreter)."""
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"backend: {backend!r}, expected 'auto', 'torch' or 'triton'")
    return backend == "triton" or (backend == "auto" and tensor.is_cuda)
