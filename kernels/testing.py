"""How kernels are judged: one error measure, one timer, one poison. For tests and benchmarks."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor


def relative_error(result: Tensor, reference: Tensor) -> float:
    """|result - reference| / |reference| (Frobenius norms, float64). A NaN anywhere gives infinity."""
    a, b = result.double(), reference.double()
    if a.shape != b.shape:
        raise ValueError(f"result: shape {list(a.shape)}, expected {list(b.shape)}")
    error = ((a - b).norm() / b.norm().clamp(min=1e-300)).item() if b.numel() else 0.0
    return error if error == error else float("inf")


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A tensor whose every element is NaN (integers: the largest value): what an unwritten or out-of-bounds read would see."""
    return torch.full(shape, float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max, dtype=dtype, device=device)


def fenced(tensor: Tensor, fence: int = 4096, beyond: float = float("nan")) -> Tensor:
    """The same values in the middle of a larger buffer filled with `beyond`, so that a read past either end shows.

    NaN shows in sums, but a maximum passes over it: those need neighbours that are huge.
    """
    buffer = torch.full((tensor.numel() + 2 * fence,), beyond, dtype=tensor.dtype, device=tensor.device)
    inside = buffer[fence : fence + tensor.numel()].view(tensor.shape)
    inside.copy_(tensor)
    return inside


def time_graph(run: Callable[[], object], repeats: int = 20, inner: int = 1, flush: bool = True) -> float:
    """Median milliseconds of `run` as a replayed CUDA graph, with the L2 cache overwritten before each replay unless `flush` is off.

    `inner` calls are captured back to back and the time divided: for kernels near the resolution of the events (use with flush off).
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            run()
    scratch = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(repeats + 2):
        if flush:
            scratch.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:]) / inner
