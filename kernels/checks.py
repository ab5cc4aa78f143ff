"""What every operation's wrapper checks before it touches memory: shapes that belong together, one device, contiguous pools."""

from __future__ import annotations

from torch import Tensor


def check_shape(name: str, tensor: Tensor, *shape: int | None) -> None:
    """Raise `ValueError` unless `tensor` has this shape; None stands for any size."""
    if tensor.ndim != len(shape) or any(want is not None and have != want for have, want in zip(tensor.shape, shape, strict=True)):
        wanted = ", ".join("*" if n is None else str(n) for n in shape)
        raise ValueError(f"{name}: shape {list(tensor.shape)}, expected [{wanted}]")


def check_device(first: Tensor, **others: Tensor) -> None:
    """Raise `ValueError` when a tensor lies on another device than the first."""
    for name, tensor in others.items():
        if tensor.device != first.device:
            raise ValueError(f"{name}: on {tensor.device}, expected {first.device}")
