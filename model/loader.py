"""A checkpoint's tensors into the model: build on meta, copy each block's rows where they belong, assign. Experts stay packed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from engine.errors import CheckpointError, ConfigError
from model.config import ModelConfig
from model.feed import Arrived, Feed, Fill
from model.kimi_k3 import KimiK3
from model.moe import LatentMoE
from model.parallel import Mesh

COMPUTE_DTYPES = (torch.float32, torch.bfloat16)  # both hold every bf16 value of the files: nothing is narrowed
STORED_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}
IN_FLIGHT = 4  # blocks being copied to their place while the next is prepared
COPYING_THREADS = 2


def load(config: ModelConfig, mesh: Mesh, feed: Feed, *, device: torch.device | str, dtype: torch.dtype) -> KimiK3:
    """This process' part of a checkpoint. fp32 tensors of the files stay fp32, experts stay packed, the rest is `dtype`.

    Raises `ConfigError` for another dtype, `CheckpointError` when the blocks do not fill the model; and what the feed raises.
    """
    check_dtype(dtype)
    model = KimiK3(config, mesh, dtype)
    parameters = dict(model.named_parameters())
    values = {name: torch.empty(p.shape, dtype=p.dtype, device=device) for name, p in parameters.items()}
    filled = dict.fromkeys(values, 0)
    with _pinned(feed.memory(), torch.device(device)), _copier(torch.device(device)) as copier:
        flying: deque[tuple[Copying, Arrived]] = deque()
        for arrived in feed.arrivals():
            while flying and (arrived is None or len(flying) >= IN_FLIGHT or flying[0][0].ready()):
                copying, landed = flying.popleft()
                copying.wait()
                landed.release()
            if arrived is None:
                continue
            work = []
            for fill in arrived.block.fills:
                source = _rows(arrived.data, fill)
                work.append((_place(values[fill.piece.parameter], fill, source), source))
                filled[fill.piece.parameter] += source.numel()
            flying.append((copier(work), arrived))
    for name in parameters:
        value = values.pop(name)  # nobody else holds it: a layer that lays its weights out anew frees the old ones
        if filled[name] != value.numel():
            raise CheckpointError(f"parameter {name}: {filled[name]} of {value.numel()} values were given")
        _assign(model, name, value)
    del value
    for module in model.modules():
        if isinstance(module, LatentMoE):
            module.pack()
    return model.eval()


def check_dtype(dtype: torch.dtype) -> None:
    if dtype not in COMPUTE_DTYPES:
        raise ConfigError(f"compute dtype {dtype}: expected one of {', '.join(map(str, COMPUTE_DTYPES))}")


def _rows(data: memoryview, fill: Fill) -> Tensor:
    """What the piece takes of the tensor's rows in a block, as a view of the block."""
    piece = fill.piece
    shape = (fill.rows,) if piece.padded else (fill.rows, *piece.shape[1:])
    count = 1
    for n in shape:
        count *= n
    rows = torch.frombuffer(data, dtype=STORED_DTYPES[piece.dtype], count=count, offset=fill.offset).view(shape)
    return rows if piece.dim in (None, 0) else rows.narrow(piece.dim, piece.start, piece.stop - piece.start)


def _place(parameter: Tensor, fill: Fill, source: Tensor) -> Tensor:
    """Where these rows belong, as a view of the parameter. Raises `CheckpointError` when they do not fit."""
    piece = fill.piece
    target = parameter if piece.expert is None else parameter[piece.expert]
    offset = piece.offset + fill.first - (piece.start if piece.dim == 0 else 0)
    rows = target[offset : offset + fill.rows]
    if rows.shape != source.shape or torch.promote_types(rows.dtype, source.dtype) != rows.dtype:
        raise CheckpointError(
            f"tensor {piece.name}: {source.dtype} {list(source.shape)} does not fit {rows.dtype} {list(rows.shape)} of {piece.parameter}"
        )
    return rows


class Copying(Protocol):
    """One block's copies, under way."""

    def ready(self) -> bool: ...
    def wait(self) -> None: ...


Copier = Callable[[Sequence[tuple[Tensor, Tensor]]], Copying]  # (target, source) of one block


@contextmanager
def _copier(device: torch.device) -> Iterator[Copier]:
    """On a GPU copies are enqueued and an event tells their end; into host memory threads do them, since writing fresh pages is slow."""
    if device.type == "cuda":
        yield _enqueued
        return
    with ThreadPoolExecutor(COPYING_THREADS, thread_name_prefix="copy") as pool:
        yield lambda work: _Threaded(pool.submit(_copy_all, work))


def _copy_all(work: Sequence[tuple[Tensor, Tensor]]) -> None:
    for rows, source in work:
        if rows.device.type == "cuda" and rows.dtype != source.dtype:
            source = source.to(rows.device, non_blocking=True)  # widened there
        rows.copy_(source, non_blocking=True)


def _enqueued(work: Sequence[tuple[Tensor, Tensor]]) -> Copying:
    _copy_all(work)
    event = torch.cuda.Event()
    event.record()
    return _Enqueued(event)


@dataclass(frozen=True, slots=True)
class _Enqueued:
    event: torch.cuda.Event

    def ready(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()


@dataclass(frozen=True, slots=True)
class _Threaded:
    future: Future[None]

    def ready(self) -> bool:
        return self.future.done()

    def wait(self) -> None:
        self.future.result()


@contextmanager
def _pinned(memory: memoryview, device: torch.device) -> Iterator[None]:
    """Page-locks the memory while weights are copied to an accelerator: the copies then run beside the reading."""
    if device.type != "cuda" or not memory.nbytes:
        yield
        return
    runtime, address = torch.cuda.cudart(), torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    torch.cuda.check_error(runtime.cudaHostRegister(address, memory.nbytes, 0))
    try:
        yield
    finally:
        torch.cuda.check_error(runtime.cudaHostUnregister(address))


def _assign(model: nn.Module, name: str, value: Tensor) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, nn.Parameter(value, requires_grad=False))
