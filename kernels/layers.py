"""States between a pool and a buffer: what lies at one place of every layer. On a GPU a stream of bytes, whatever the strides."""

from __future__ import annotations

from torch import Tensor

from kernels.backend import Backend
from kernels.checks import check_device, check_shape


def copy_layers(source: Tensor, target: Tensor, backend: Backend = "auto") -> None:
    """target = source, both [layers, ...] of one dtype, whose layers are contiguous and may lie apart; they do not overlap."""
    check_shape("target", target, *source.shape)
    check_device(source, target=target)
    if source.dtype != target.dtype:
        raise ValueError(f"target: {target.dtype}, expected {source.dtype}")
    if source.numel() and not (source[0].is_contiguous() and target[0].is_contiguous()):
        raise ValueError("source and target need contiguous layers")
    if backend == "triton" or (backend == "auto" and source.is_cuda):  # bytes are bytes: no dtype is exempt
        from kernels.layers_triton import launch

        if source.numel():
            launch(source, target)
    else:
        target.copy_(source)
