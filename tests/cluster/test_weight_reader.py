"""Weights from a folder and from a real S3 server: the same model, each byte once, by the server's own log."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from cluster.checkpoint import read_checkpoint
from cluster.weight_memory import Memory, SlotBook
from cluster.weight_plan import plan_node
from cluster.weight_reader import LoadSettings, Progress, WeightReader, sole_reader
from model.kimi_k3 import KimiK3
from model.loader import load
from model.parallel import Mesh
from tests.cluster.s3 import Store, running_store
from tests.model.golden import DATA

TP, SHARDS = 2, 4


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with running_store() as running:
        yield running


def model_of(reader: WeightReader, checkpoint: object, rank: int = 0, tp: int = 1, shards: int = 1) -> KimiK3:
    mesh = Mesh(rank=rank, world=shards, tp=tp)
    return load(checkpoint.config, mesh, reader, device="cpu", dtype=torch.float32)  # type: ignore[attr-defined]


def assert_same(first: KimiK3, second: KimiK3) -> None:
    expected = dict(second.named_parameters())
    for name, value in first.named_parameters():
        assert torch.equal(value, expected.pop(name)), name
    assert not expected


class SharedDesk:
    """A node's book for threads in the place of processes."""

    def __init__(self, book: SlotBook, lock: threading.Lock, rank: int) -> None:
        self._book, self._lock, self._rank = book, lock, rank

    def turn(self, read: list[int], taken: list[int], want: int) -> list[object]:
        with self._lock:
            return self._book.turn(self._rank, read, taken, want)  # type: ignore[return-value]


@pytest.mark.parametrize("name", ["tiny-a", "tiny-b", "tiny-c"])
def test_the_same_model_from_disk_and_from_s3(name: str, store: Store) -> None:
    folder = DATA / name / "model"
    url = store.upload(folder, name)
    local, remote = read_checkpoint(str(folder)), read_checkpoint(url, store.proxy.url)
    assert (local.config, local.fingerprint, local.places) == (remote.config, remote.fingerprint, remote.places)
    assert_same(model_of(sole_reader(remote, LoadSettings()), remote), model_of(sole_reader(local, LoadSettings()), local))


@pytest.mark.parametrize("buffer_bytes", [2 << 30, 1 << 19], ids=["roomy", "cramped"])
def test_a_node_reads_what_its_shards_need_once(buffer_bytes: int, store: Store) -> None:
    folder = DATA / "tiny-a" / "model"
    checkpoint = read_checkpoint(store.upload(folder, "node"), store.proxy.url)
    settings = LoadSettings(buffer_bytes=buffer_bytes, threads=2)
    plan = plan_node(checkpoint, range(SHARDS), tp=TP, shards=SHARDS, block_bytes=settings.block_bytes)
    memory = Memory.create(budget=buffer_bytes, blocks=len(plan.ranges), largest=plan.largest)
    book = SlotBook({rank: [b.number for b in blocks] for rank, blocks in plan.blocks.items()}, memory.slots)
    lock, models = threading.Lock(), {}
    store.proxy.log.clear()

    def shard(rank: int) -> None:
        desk = SharedDesk(book, lock, rank)
        reader = WeightReader(checkpoint, plan.blocks[rank], memory, desk, settings, Progress())  # type: ignore[arg-type]
        models[rank] = model_of(reader, checkpoint, rank, TP, SHARDS)

    threads = [threading.Thread(target=shard, args=(rank,)) for rank in range(SHARDS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(models) == list(range(SHARDS))
    assert store.proxy.log.nbytes() == plan.nbytes <= 1.02 * plan.union
    assert memory.slots * memory.slot_bytes <= buffer_bytes
    local = read_checkpoint(str(folder))
    for rank, model in models.items():
        assert_same(model, model_of(sole_reader(local, LoadSettings(), rank=rank, tp=TP, shards=SHARDS), local, rank, TP, SHARDS))
