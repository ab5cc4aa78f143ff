"""Whatever is wrong with a stored state, it is not used: the reason is counted and the tokens are computed again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster.bundle_index import Found
from cluster.holder import Fetched
from deployments.bundle_stats import BundleCounters
from deployments.exports import Exporter
from deployments.imports import Importer
from deployments.spec import EngineSpec, StateSpec
from engine.bundle import ExportPart, ObjectRef, RecurrentPart, Schema, Segment, StateBundle
from engine.errors import DurableError, EngineFailure, ShardLost, StoreFull
from engine.lineage import Lineage
from engine.loop import EngineLoop
from engine.retention import Written
from engine.session import BundleAt
from engine.types import Admission, GenerateRequest, TokenChunk
from tests.engine.driver import GREEDY
from tests.fake_executor import FakeExecutor, FakeGroup, Stored, toy_stream
from tests.specs import engine_spec

SCHEMA = Schema(kda_layers=1, heads=2, head_dim=4, conv_taps=4, mla_layers=1, latent_dim=8, state_dtype="float32", cache_dtype="float32")
STATE = StateSpec(
    schema=SCHEMA,
    segment_tokens=8,
    stake_tokens=8,
    export_concurrency=2,
    import_timeout_s=5.0,
    store_bytes=1 << 20,
    ttl_s=60.0,
    durable_url=None,
    durable_endpoint_url=None,
    mirror=False,
)
PROMPT = tuple(range(1, 42))


def spec(engine: dict[str, Any], **changes: Any) -> EngineSpec:
    return engine_spec(shards=2, engine={"checkpoint_decode_interval": 8, **engine}, state=replace(STATE, **changes))


class Remote:
    """A method called as Ray calls it."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    async def remote(self, *args: Any) -> Any:
        await asyncio.sleep(0)
        return self._method(*args)


class ToyShards:
    """Two shards over one toy group: each holds half of the heads, both hold the latents. Stored objects are what the toy model exports."""

    def __init__(self, group: FakeGroup) -> None:
        self.group = group
        self.epoch = 0
        self.faults: list[str | None] = [None, None]  # what `restore` of each shard answers
        self.restored = 0

    def actors_of(self, group: int) -> list[Any]:
        return [type("Actor", (), {"restore": Remote(self.restore(rank)), "rank": rank})() for rank in range(2)]

    def restore(self, rank: int) -> Callable[..., str | None]:
        def restore(
            epoch: int, bundle: StateBundle, refs: dict[str, list[Stored]], slot: int, pages: tuple[int, ...], timeout_s: float
        ) -> str | None:
            if self.faults[rank] is None and rank == 0:
                self.group.restore(slot, pages, refs[bundle.recurrent[0].object.name][0])
            self.restored += 1
            return self.faults[rank]

        return restore


class ToyTier:
    """Holder and store in one process."""

    def __init__(self) -> None:
        self.bundles: dict[str, Fetched] = {}
        self.index: list[StateBundle] = []  # as registered
        self.sessions: dict[str, list[BundleAt]] = {}
        self.find_error: Exception | None = None
        self.fetch_error: Exception | None = None
        self.take_error: Exception | None = None
        self.exporting = asyncio.Semaphore(1000)
        self.shards: ToyShards | None = None
        self.parts: list[list[ExportPart]] = []
        self.pinned: set[str] = set()
        self.mirrored: list[str] = []

    async def take(self, draft: StateBundle, jobs: list[tuple[Any, ExportPart]]) -> StateBundle:
        await self.exporting.acquire()
        if self.take_error is not None:
            raise self.take_error
        assert self.shards is not None
        self.parts.append([part for _, part in jobs])
        slot = next(part.slot for _, part in jobs if part.heads)
        pages = [page for _, part in jobs if not part.heads for page in part.pages]
        stored = self.shards.group.export(slot, pages, draft.position)
        refs = {part.name: ObjectRef(name=part.name, digest="", nbytes=part.nbytes) for _, part in jobs}
        bundle = replace(
            draft,
            recurrent=tuple(RecurrentPart(first=p.heads[0], last=p.heads[1], object=refs[p.name]) for _, p in jobs if p.heads),
            segments=tuple(Segment(start=p.start, stop=p.stop, object=refs[p.name]) for _, p in jobs if not p.heads),
        )
        self.bundles[bundle.lineage] = Fetched(bundle, {name: [stored] for name in refs}, "store")
        return bundle

    async def announce(self, bundle: StateBundle, tenant: str, session: str | None) -> bool:
        self.index.append(bundle)
        if session is not None:
            self.sessions.setdefault(session, []).append(BundleAt(position=bundle.position, lineage=bundle.lineage))
        return session in self.pinned

    async def mirror(self, bundle: StateBundle) -> None:
        self.mirrored.append(bundle.lineage)

    async def find(self, anchors: list[str], tenant: str, session: str | None) -> list[Found]:
        if self.find_error is not None:
            raise self.find_error
        near = [Found(BundleAt(position=b.position, lineage=b.lineage), ("h",)) for b in self.index if b.anchor in anchors]
        return sorted(near, key=lambda f: -f.at.position)

    async def fetch(self, found: Found, timeout_s: float) -> tuple[Fetched, str] | None:
        if self.fetch_error is not None:
            raise self.fetch_error
        got = self.bundles.get(found.at.lineage)
        return None if got is None else (got, "h")


class Engine:
    """A loop over the toy model, with exports and imports."""

    def __init__(self, tier: ToyTier, engine: dict[str, Any] | None = None, **changes: Any) -> None:
        made = spec(engine or {}, **changes)
        executor = FakeExecutor(num_pages=128, num_slots=32, page_size=4)
        self.shards = ToyShards(executor.groups[0])
        self.counters = BundleCounters()
        assert made.state is not None
        self.tier = tier
        self.exporter = Exporter(made, made.state, self.shards, tier, self.counters)
        self.importer = Importer(made, made.state, self.shards, tier, self.counters)
        self.loop = EngineLoop(made.engine, executor, deliver=self.deliver, on_written=self.hear, fingerprint="toy", check_after_s=0.0)
        self.loop.start()
        self.chunks: list[TokenChunk] = []

    def hear(self, group: int, written: list[Written]) -> None:
        for checkpoint in written:
            self.exporter.offer(self.loop, group, checkpoint)

    def deliver(self, chunks: list[TokenChunk], failures: dict[str, Any]) -> None:
        self.chunks += chunks

    async def run(self, request: GenerateRequest) -> tuple[list[int], TokenChunk]:
        """To its end, its exports included."""
        self.tier.shards = self.shards
        lineage = self.loop.lineage(request)
        group = self.loop.submit(request, lineage, held=True)
        outcome = await self.importer.bring(self.loop, group, request, lineage)
        self.loop.release(request.request_id, outcome if isinstance(outcome, str) else None)
        async with asyncio.timeout(10):
            await until(lambda: any(c.request_id == request.request_id and c.finish for c in self.chunks))
            await self.exporter.flush()
        self.loop.schedulers[0].check()
        return [t for c in self.chunks if c.request_id == request.request_id for t in c.token_ids], self.chunks[-1]


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come to that")


def ask(name: str = "r", max_tokens: int = 20, **fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"request_id": name, "prompt": PROMPT, "max_tokens": max_tokens, "sampling": GREEDY, **fields})


EXPECTED = toy_stream(PROMPT, 20, sampling=GREEDY)


async def test_another_engine_goes_on_from_what_the_first_one_stored() -> None:
    tier = ToyTier()
    first = Engine(tier)
    assert (await first.run(ask()))[0] == EXPECTED
    positions = sorted(f.bundle.position for f in tier.bundles.values())
    assert positions == [40, 48, 56], "the prompt's end, and every eight generated tokens"
    assert all(f.bundle.fault("toy", SCHEMA) is None for f in tier.bundles.values())
    second = Engine(tier)
    tokens, last = await second.run(ask())
    assert tokens == EXPECTED
    assert last.usage is not None
    assert (last.usage.cached_tokens, last.usage.resume_source) == (40, "store")
    moved = await Engine(tier).run(ask(generated=tuple(EXPECTED[:18]), admitted=Admission(cached_tokens=3)))
    assert moved[0] == EXPECTED[18:]
    third = Engine(tier)
    await third.run(ask(generated=tuple(EXPECTED[:18]), admitted=Admission(cached_tokens=3)))
    assert third.loop.stats().tokens_recomputed == 41 + 18 - 56
    assert third.counters.imports == {"store": 1}


async def test_segments_are_shared_and_only_the_tail_is_new() -> None:
    tier = ToyTier()
    await Engine(tier).run(ask(max_tokens=3))
    await Engine(tier).run(ask(name="longer", prompt=(*PROMPT, 7, 8, 9, 10, 11, 12, 13, 14, 15), max_tokens=3))
    first, second = sorted((f.bundle for f in tier.bundles.values()), key=lambda b: b.position)[:2]
    shared = {s.object.name for s in first.segments} & {s.object.name for s in second.segments}
    assert (first.position, second.position) == (40, 49)
    assert [(s.start, s.stop) for s in second.segments if s.object.name not in shared] == [(40, 48), (48, 49)]
    assert {part.heads for part in tier.parts[0] if part.heads} == {(0, 1), (1, 2)}


def damage_fingerprint(f: Fetched) -> Fetched:
    return replace(f, bundle=replace(f.bundle, fingerprint="other"))


def damage_schema(f: Fetched) -> Fetched:
    return replace(f, bundle=replace(f.bundle, schema=replace(SCHEMA, layout="k3-0")))


def damage_latents_short(f: Fetched) -> Fetched:
    return replace(f, bundle=replace(f.bundle, segments=f.bundle.segments[:-1]))


def damage_latents_past_the_state(f: Fetched) -> Fetched:
    last = f.bundle.segments[-1]
    return replace(f, bundle=replace(f.bundle, segments=(*f.bundle.segments[:-1], replace(last, stop=last.stop + 1))))


def damage_heads(f: Fetched) -> Fetched:
    return replace(f, bundle=replace(f.bundle, recurrent=f.bundle.recurrent[:1]))


def damage_objects(f: Fetched) -> Fetched:
    return replace(f, refs=dict(list(f.refs.items())[1:]))


def damage_position(f: Fetched) -> Fetched:
    return replace(f, bundle=replace(f.bundle, position=f.bundle.position - 1))


def damage_lineage(f: Fetched) -> Fetched:
    return replace(f, bundle=replace(f.bundle, lineage="00" * 32))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_fingerprint, "wrong_fingerprint"),
        (damage_schema, "wrong_schema"),
        (damage_latents_short, "incomplete"),
        (damage_latents_past_the_state, "incomplete"),
        (damage_heads, "incomplete"),
        (damage_objects, "incomplete"),
        (damage_position, "wrong_lineage"),
        (damage_lineage, "wrong_lineage"),
    ],
)
async def test_a_bundle_that_is_not_what_it_should_be(damage: Callable[[Fetched], Fetched], reason: str) -> None:
    tier = ToyTier()
    await Engine(tier).run(ask(max_tokens=2))
    assert len(tier.bundles) == 1
    tier.bundles = {lineage: damage(f) for lineage, f in tier.bundles.items()}
    engine = Engine(tier)
    tokens, last = await engine.run(ask())
    assert tokens == EXPECTED
    assert engine.shards.restored == 0
    assert engine.counters.import_misses == {reason: 1}
    assert last.usage is not None
    assert (last.usage.cached_tokens, last.usage.miss_reason) == (0, reason)


@pytest.mark.parametrize("reason", ["digest", "lost", "wrong_schema", "stale"])
@pytest.mark.parametrize("shard", [0, 1])
async def test_one_shard_that_cannot_restore_spoils_the_import(shard: int, reason: str) -> None:
    tier = ToyTier()
    await Engine(tier).run(ask(max_tokens=2))
    engine = Engine(tier)
    engine.shards.faults[shard] = reason
    tokens, last = await engine.run(ask())
    assert tokens == EXPECTED
    assert engine.counters.import_misses == {reason: 1}
    assert last.usage is not None
    assert last.usage.miss_reason == reason


@pytest.mark.parametrize(
    ("where", "error", "reason"),
    [
        ("find", EngineFailure("down"), "store_down"),
        ("fetch", DurableError("s3://b/objects/x: get failed: 503"), "durable_failed"),
        ("fetch", DurableError("objects/x: its bytes do not match the digest in the manifest"), "digest"),
        ("fetch", StoreFull("full"), "store_full"),
        ("fetch", ValueError("Object missing required field"), "unreadable"),
    ],
)
async def test_a_tier_that_fails(where: str, error: Exception, reason: str) -> None:
    tier = ToyTier()
    await Engine(tier).run(ask(max_tokens=2))
    setattr(tier, f"{where}_error", error)
    engine = Engine(tier)
    tokens, last = await engine.run(ask())
    assert tokens == EXPECTED
    assert engine.counters.import_misses == {reason: 1}
    assert last.usage is not None
    assert last.usage.miss_reason == reason


async def test_what_waits_to_leave_when_the_group_is_lost_never_leaves() -> None:
    """The next group has the same slots and pages, with others' states in them."""
    tier = ToyTier()
    tier.exporting = asyncio.Semaphore(0)
    engine = Engine(tier, export_concurrency=1)
    tier.shards = engine.shards
    engine.loop.submit(ask())
    await until(lambda: any(chunk.finish for chunk in engine.chunks))
    engine.loop.abort(ShardLost("killed"))
    engine.shards.epoch = 1
    for _ in range(3):
        tier.exporting.release()
    await engine.exporter.flush()
    assert {part.epoch for parts in tier.parts for part in parts} == {0}, "what was on its way: refused by its shards"
    assert engine.counters.exports_failed == {"stale": 1}


async def test_what_comes_in_when_the_group_is_lost_is_not_written_anywhere() -> None:
    tier = ToyTier()
    await Engine(tier).run(ask(max_tokens=2))
    engine = Engine(tier)
    request = ask()
    lineage = engine.loop.lineage(request)
    engine.loop.abort(ShardLost("killed"))
    assert await engine.importer.bring(engine.loop, 0, request, lineage) == "stale"
    assert engine.shards.restored == 0


async def test_a_bundle_of_another_tenant_is_never_found() -> None:
    tier = ToyTier()
    await Engine(tier).run(ask(max_tokens=2, tenant="a"))
    engine = Engine(tier)
    _, last = await engine.run(ask(tenant="b"))
    assert last.usage is not None
    assert (last.usage.cached_tokens, engine.counters.imports) == (0, {})


async def test_an_older_bundle_is_tried_when_the_newest_is_lost() -> None:
    tier = ToyTier()
    await Engine(tier).run(ask())
    newest = max(tier.bundles.values(), key=lambda f: f.bundle.position)
    tier.bundles[newest.bundle.lineage] = damage_objects(newest)
    engine = Engine(tier)
    tokens, _ = await engine.run(ask(generated=tuple(EXPECTED[:19]), admitted=Admission(cached_tokens=0)))
    assert tokens == EXPECTED[19:]
    assert (engine.counters.imports, engine.counters.import_misses) == ({"store": 1}, {"incomplete": 1})
    assert engine.loop.stats().tokens_resumed == 48


async def test_decode_does_not_wait_for_exports_and_newer_ones_take_the_place_of_older() -> None:
    tier = ToyTier()
    tier.exporting = asyncio.Semaphore(0)  # the store takes nothing for now
    engine = Engine(tier)
    running = asyncio.ensure_future(engine.run(ask(max_tokens=60)))
    async with asyncio.timeout(10):
        await until(lambda: any(c.finish for c in engine.chunks))
    assert engine.counters.exports == 0
    assert engine.counters.exports_superseded >= 3
    for _ in range(100):
        tier.exporting.release()
    tokens, _ = await running
    assert tokens == toy_stream(PROMPT, 60, sampling=GREEDY)
    assert engine.counters.exports == 3, "two that were on their way, and the newest"
    assert max(f.bundle.position for f in tier.bundles.values()) == 100


async def test_a_store_that_takes_nothing_costs_nothing_but_a_count() -> None:
    tier = ToyTier()
    tier.take_error = StoreFull("full")
    engine = Engine(tier)
    tokens, _ = await engine.run(ask())
    assert tokens == EXPECTED
    assert set(engine.counters.exports_failed) == {"StoreFull"}
    assert engine.loop.schedulers[0].cache.index.get(Lineage(engine.loop.lineage(ask()).block(0), 4, PROMPT).at(40)) is not None


async def test_the_end_of_a_sessions_turn_is_always_kept() -> None:
    tier = ToyTier()
    engine = Engine(tier, stake_tokens=1000)
    await engine.run(ask(name="no session", max_tokens=6))
    assert tier.bundles == {}
    await engine.run(ask(name="turn", max_tokens=6, session="s"))
    assert [at.position for at in tier.sessions["s"]] == [46]


async def test_the_last_state_of_a_stream_that_leaves_is_stored_to_the_last_token() -> None:
    tier = ToyTier()
    engine = Engine(tier, stake_tokens=1000)
    tier.shards = engine.shards
    engine.exporter.leaving = True
    engine.loop.submit(ask())
    await until(lambda: sum(len(c.token_ids) for c in engine.chunks) > 10)
    engine.loop.pause("r")
    await engine.loop.land()
    passed = [t for c in engine.chunks for t in c.token_ids]
    engine.loop.cancel("r")
    await engine.exporter.flush()
    assert [b.position for b in tier.index] == [len(PROMPT) + len(passed) - 1], "but for the last one, which no step has consumed"
    tokens, _ = await Engine(tier).run(ask(generated=tuple(passed), admitted=Admission(cached_tokens=0)))
    assert [*passed, *tokens] == EXPECTED


async def test_only_pinned_sessions_are_mirrored_and_only_where_that_is_on() -> None:
    for mirror, pinned, expected in ((True, {"s"}, True), (True, set(), False), (False, {"s"}, False)):
        tier = ToyTier()
        tier.pinned = pinned
        await Engine(tier, mirror=mirror).run(ask(session="s"))
        assert bool(tier.mirrored) == expected
        assert set(tier.mirrored) <= set(tier.bundles)


async def test_the_end_of_a_shared_prefix_is_stored_for_everybody_and_what_is_behind_it_is_not() -> None:
    tier = ToyTier()
    shared = {"shared_prefixes": (np.asarray(PROMPT[:34], "<u4").tobytes(),)}
    await Engine(tier, engine=shared).run(ask(tenant="a"))
    assert {(b.position, b.tenant) for b in tier.index if b.position <= 40} == {(32, ""), (40, "a")}
    other = Engine(tier, engine=shared)
    _, last = await other.run(ask(tenant="b"))
    assert last.usage is not None
    assert (last.usage.cached_tokens, last.usage.resume_source) == (32, "store")
    _, last = await Engine(tier).run(ask(tenant="c"))
    assert last.usage is not None
    assert last.usage.cached_tokens == 0, "nothing is shared where nothing was marked"


async def test_a_moved_stream_finds_its_states_by_rule_when_nobody_knows_of_them() -> None:
    tier = ToyTier()
    await Engine(tier).run(ask())
    tier.index = []  # the holder, the store and their node are gone; the durable tier is not
    engine = Engine(tier, durable_url="s3://bucket/k3")
    tokens, _ = await engine.run(ask(generated=tuple(EXPECTED[:18]), admitted=Admission(cached_tokens=0)))
    assert tokens == EXPECTED[18:]
    assert (engine.counters.imports, engine.counters.import_misses) == ({"store": 1}, {})
    assert engine.loop.stats().tokens_resumed == 56
    empty = Engine(ToyTier(), durable_url="s3://bucket/k3")
    tokens, _ = await empty.run(ask(generated=tuple(EXPECTED[:18]), admitted=Admission(cached_tokens=0)))
    assert (tokens, empty.counters.import_misses) == (EXPECTED[18:], {})
