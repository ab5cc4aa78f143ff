"""Random interleavings of everything that can happen to a group of requests: each stream is that of an unbroken run, nothing leaks."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.cache import Taken
from engine.lineage import Lineage
from engine.prefix import Checkpoint
from engine.retention import Written
from engine.types import GenerateRequest, SamplingParams
from tests.engine.driver import Driver, config
from tests.fake_executor import Stored, toy_stream

VOCAB = 13  # small, so that stop tokens are hit
# Prompts that share beginnings, some of them equal.
PREFIXES = st.sampled_from([(), (1, 2, 3), tuple(range(1, 9)), tuple(range(1, 20)), (7,) * 12])
PROMPTS = st.builds(lambda prefix, rest: (*prefix, *rest), PREFIXES, st.lists(st.integers(0, 3), min_size=1, max_size=6))


@st.composite
def requests(draw: st.DrawFn, name: str) -> GenerateRequest:
    prompt = draw(PROMPTS)
    max_tokens = draw(st.integers(0, 9))
    stops = tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=2)))
    choice = draw(st.integers(0, 2))
    sampling = SamplingParams(
        seed=draw(st.integers(0, 1)),
        temperature=draw(st.sampled_from([0.0, 1.0])),
        logprobs=draw(st.sampled_from([None, None, 1])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 1])),
    )
    whole = toy_stream(prompt, max_tokens, stop_token_ids=stops, sampling=sampling, choice=choice, vocab=VOCAB)
    moved = draw(st.sampled_from([0, 0, 0, 2, 9]))
    return GenerateRequest(
        request_id=name,
        prompt=prompt,
        generated=tuple(whole[:moved]),
        sampling=sampling,
        choice=choice,
        max_tokens=max_tokens,
        stop_token_ids=stops,
        tenant=draw(st.sampled_from(["", "", "other"])),
        priority=draw(st.integers(0, 2)),
        boundaries=tuple(draw(st.lists(st.integers(1, 30), max_size=2))),
        constraint=draw(st.sampled_from([None, None, "grammar"])),
    )


class Streams(RuleBasedStateMachine):
    """Up to three results are awaited at once: more than the loop's two. States are exported and imported while steps are on their way."""

    driver: Driver

    @initialize(
        page_size=st.integers(1, 5),
        block_size=st.integers(1, 6),
        spare_pages=st.integers(0, 30),
        num_slots=st.integers(1, 8),
        max_running=st.integers(1, 5),
        max_batched_tokens=st.integers(1, 12),
        prefix_cache=st.sampled_from([True, True, True, False]),
        checkpoint_interval=st.integers(1, 9),
        checkpoint_decode_interval=st.integers(1, 9),
        max_model_len=st.sampled_from([36, 64]),
    )
    def begin(self, page_size: int, spare_pages: int, **changes: int) -> None:
        num_pages = -(-26 // page_size) + spare_pages  # at least the longest prompt and a token
        self.driver = Driver(config(page_size=page_size, num_pages=num_pages, run_ahead=1, **changes), vocab=VOCAB)
        self.count = 0
        self.written: list[Written] = []  # of this engine
        self.exporting: list[tuple[Written, Checkpoint]] = []  # pinned
        self.stored: dict[bytes, Stored] = {}  # by lineage: outlives engines
        self.importing: list[tuple[Lineage, Taken]] = []

    @rule(data=st.data(), copies=st.sampled_from([1, 1, 1, 3]))
    def arrive(self, data: st.DataObject, copies: int) -> None:
        request = data.draw(requests(""))
        for choice in range(copies):  # the choices of one prompt
            self.count += 1
            changes = {"request_id": f"r{self.count}"} | ({"choice": choice, "generated": ()} if copies > 1 else {})
            fields = {name: getattr(request, name) for name in request.__slots__}
            self.driver.add(GenerateRequest(**(fields | changes)))

    @precondition(lambda self: len(self.driver.awaited) < 3)
    @rule()
    def plan(self) -> None:
        self.driver.plan()

    @precondition(lambda self: self.driver.awaited)
    @rule()
    def land(self) -> None:
        self.driver.land()

    @rule(steps=st.integers(1, 8))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.driver.step()

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.driver.cancel(f"r{data.draw(st.integers(1, self.count + 1))}")

    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        self.driver.scheduler.pause(f"r{data.draw(st.integers(1, self.count + 1))}")

    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        self.driver.scheduler.resume(f"r{data.draw(st.integers(1, self.count + 1))}")

    @rule()
    def evict(self) -> None:
        self.driver.scheduler.cache.clear()

    @precondition(lambda self: self.driver.scheduler.cache.enabled)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        self.written += self.driver.scheduler.take_written()
        if self.written:
            written = self.written.pop(data.draw(st.integers(0, len(self.written) - 1)))
            if checkpoint := self.driver.scheduler.cache.pin(written.lineage.at(written.position)):
                self.exporting.append((written, checkpoint))

    @precondition(lambda self: self.exporting)
    @rule()
    def export(self) -> None:
        written, checkpoint = self.exporting.pop(0)
        self.stored[checkpoint.lineage] = self.driver.shards.export(checkpoint.slot, checkpoint.pages, written.position)
        self.driver.scheduler.cache.unpin(checkpoint)

    @precondition(lambda self: self.stored)
    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        scheduler = self.driver.scheduler
        fitting = [
            (lineage, position)
            for lineage in map(scheduler.lineage, scheduler.open_requests())
            for position in range(1, len(lineage))
            if lineage.at(position) in self.stored
        ]
        if fitting:
            lineage, position = data.draw(st.sampled_from(fitting))
            if taken := scheduler.cache.reserve_import(position):
                self.importing.append((lineage, taken))

    @precondition(lambda self: self.importing)
    @rule(whole=st.booleans())
    def finish_import(self, whole: bool) -> None:
        lineage, taken = self.importing.pop(0)
        cache = self.driver.scheduler.cache
        if whole:
            self.driver.shards.restore(taken.slot, taken.pages, self.stored[lineage.at(taken.position)])
            cache.commit(taken, lineage, "store")
        else:
            cache.discard(taken)

    @rule()
    def crash(self) -> None:
        """What was pinned or reserved is gone with the engine; what was stored is not."""
        self.driver.crash()
        self.written, self.exporting, self.importing = [], [], []

    @invariant()
    def books(self) -> None:
        if hasattr(self, "driver"):
            self.driver.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        while self.exporting:
            self.export()
        while self.importing:
            self.finish_import(whole=True)
        for name in self.driver.requests:
            self.driver.scheduler.resume(name)
        self.driver.run()
        self.driver.verify()


TestStreams = Streams.TestCase
TestStreams.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
