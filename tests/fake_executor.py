"""A deterministic toy model behind the `Executor` protocol that keeps slots, pages and rows as shards do, and raises on any
misuse.

The next token is a hash of the whole prefix, so a stream is right only if every earlier token was consumed exactly once, in
order. Each page cell and each slot remembers the digest of the prefix that it stands for; a step verifies all of a row's cells
and its state before it goes on. Wrong page tables, unwritten or stale slots, double advances, missing copies, shared pages that
somebody wrote over: all raise `Misuse`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from engine.plan import Copy, GroupPlan, GroupResult, NewRow, Output, RowResult, RowStep, StepPlan, StepResult
from engine.types import SamplingParams, TokenLogprob

ZERO = b"\0" * 8


class Misuse(AssertionError):
    """The plan breaks the contract of `engine.plan`."""


def digest(previous: bytes, token: int) -> bytes:
    """The state of the toy model after one more token."""
    return blake2b(previous + token.to_bytes(4, "little"), digest_size=8).digest()


def next_token(state: bytes, sampling: SamplingParams, choice: int, vocab: int) -> int:
    seed = b"" if sampling.temperature == 0 else sampling.seed.to_bytes(8, "little") + choice.to_bytes(4, "little")
    return int.from_bytes(blake2b(state + seed, digest_size=8).digest(), "little") % vocab


def logprob(state: bytes, token: int) -> TokenLogprob:
    """Some number that depends on the prefix and the token."""
    return TokenLogprob(token, -int.from_bytes(digest(state, token)[:2], "little") / 4096)


def toy_stream(
    prompt: Sequence[int],
    max_tokens: int,
    *,
    stop_token_ids: Sequence[int] = (),
    sampling: SamplingParams | None = None,
    choice: int = 0,
    vocab: int = 1024,
) -> list[int]:
    """What an unbroken run of the toy model generates."""
    state, out = ZERO, []
    for token in prompt:
        state = digest(state, token)
    while len(out) < max_tokens:
        out.append(next_token(state, sampling or SamplingParams(), choice, vocab))
        if out[-1] in stop_token_ids:
            break
        state = digest(state, out[-1])
    return out


@dataclass
class _Row:
    new: NewRow
    tokens: list[int]
    pages: list[int]
    consumed: int | None = None  # None: the first step says where the row starts


class FakeGroup:
    """One data-parallel group's shards."""

    def __init__(self, *, num_pages: int, num_slots: int, page_size: int, vocab: int = 1024) -> None:
        self.page_size = page_size
        self.vocab = vocab
        self.pages: list[list[bytes | None]] = [[None] * page_size for _ in range(num_pages)]
        self.slots: list[tuple[int, bytes] | None] = [None] * num_slots  # (position, state)
        self.rows: dict[int, _Row] = {}
        self.max_rows = 0  # most rows in one step
        self.copied_pages = 0
        self.copied_slots = 0
        self.consumed_tokens = 0

    def execute(self, plan: GroupPlan) -> GroupResult:
        """Runs one plan; raises Misuse."""
        for row in plan.dropped:
            _require(row in self.rows, f"row {row} is dropped but was never introduced")
            del self.rows[row]
        for copy in plan.copies:
            self._copy(copy)
        for new in plan.new_rows:
            self._introduce(new)
        stepping = [step.row for step in plan.rows]
        _require(len(stepping) == len(set(stepping)), f"a row steps twice: {stepping}")
        _require({new.row for new in plan.new_rows} <= set(stepping), "a new row does not step")
        self._check_targets(plan)
        self.max_rows = max(self.max_rows, len(stepping))
        results = [self._step(step) for step in plan.rows]
        return GroupResult(rows=tuple(r for r in results if r is not None))

    def export(self, slot: int, pages: Sequence[int], position: int) -> Stored:
        """A checkpoint's state and cells; raises Misuse when they are not of that position."""
        written = self.slots[slot]
        _require(written is not None and written[0] == position, f"slot {slot} holds {written}, not the state at {position}")
        cells = [cell for page in pages for cell in self.pages[page]][:position]
        _require(len(cells) == position, f"{len(pages)} pages do not cover {position} tokens")
        _require(all(cell is not None for cell in cells), f"pages {pages} were never written up to {position}")
        _require(written is not None and cells[-1] == written[1], f"pages {pages} and slot {slot} are of different prefixes")
        return Stored(position, written[1], tuple(cells))  # type: ignore[index, arg-type]

    def restore(self, slot: int, pages: Sequence[int], stored: Stored) -> None:
        """Into a reservation; raises Misuse when a live row owns any of it."""
        owners = [r.new.slot for r in self.rows.values()]
        _require(slot not in owners, f"slot {slot} of a live row is restored over")
        used = {page for r in self.rows.values() for page in r.pages}
        _require(not used & set(pages), f"pages {sorted(used & set(pages))} of a live row are restored over")
        self.slots[slot] = (stored.position, stored.state)
        for position, cell in enumerate(stored.cells):
            self.pages[pages[position // self.page_size]][position % self.page_size] = cell

    def _copy(self, copy: Copy) -> None:
        if copy.kind == "slot":
            _require(self.slots[copy.src] is not None, f"slot {copy.src} is copied but was never written")
            owners = [r.new.slot for r in self.rows.values()]
            _require(copy.dst not in owners, f"slot {copy.dst} of a live row is copied over")
            self.slots[copy.dst] = self.slots[copy.src]
            self.copied_slots += 1
        else:
            _require(copy.kind == "page", f"copy of kind {copy.kind!r}")
            _require(self.pages[copy.src][0] is not None, f"page {copy.src} is copied but was never written")
            _require(copy.src != copy.dst, f"page {copy.src} is copied to itself")
            self.pages[copy.dst] = list(self.pages[copy.src])
            self.copied_pages += 1

    def _introduce(self, new: NewRow) -> None:
        _require(new.row not in self.rows, f"row {new.row} is introduced twice")
        _require(0 <= new.slot < len(self.slots), f"slot {new.slot} does not exist")
        _require(new.slot not in [r.new.slot for r in self.rows.values()], f"slot {new.slot} is given to two rows")
        _require(1 <= new.prompt_len <= len(new.tokens), f"prompt of {new.prompt_len} among {len(new.tokens)} tokens")
        self.rows[new.row] = _Row(new, list(new.tokens), list(new.pages))

    def _check_targets(self, plan: GroupPlan) -> None:
        targets = [slot for step in plan.rows for _, slot in step.checkpoints]
        owners = [r.new.slot for r in self.rows.values()]
        _require(len(targets) == len(set(targets)), f"two checkpoints go to one slot: {targets}")
        _require(not set(targets) & set(owners), f"a checkpoint goes to the slot of a live row: {targets}")

    def _step(self, step: RowStep) -> RowResult | None:
        _require(step.row in self.rows, f"row {step.row} steps but was never introduced")
        row = self.rows[step.row]
        _require(step.count >= 1, f"row {step.row} steps {step.count} tokens")
        first = row.consumed is None
        _require(first or row.consumed == step.start, f"row {step.row} consumed {row.consumed} tokens and steps from {step.start}")
        if first:
            covered = -(-step.start // self.page_size)
            _require(len(row.pages) == covered, f"row {step.row} starts at {step.start} with {len(row.pages)} pages")
        stop = step.start + step.count
        _require(stop <= len(row.tokens), f"row {step.row} consumes {stop} tokens, {len(row.tokens)} are known")
        row.pages += step.new_pages
        _require(len(set(row.pages)) == len(row.pages), f"row {step.row} lists a page twice: {row.pages}")
        _require(len(row.pages) * self.page_size >= stop, f"row {step.row} has {len(row.pages)} pages for {stop} tokens")
        state = self._restore(row, step.start)
        self._verify_pages(row, step.start)
        writes = dict(step.checkpoints)
        _require(len(writes) == len(step.checkpoints), f"row {step.row} has two checkpoints at one position")
        logprobs = []
        for position in range(step.start, stop):
            state = digest(state, row.tokens[position])
            self.pages[row.pages[position // self.page_size]][position % self.page_size] = state
            if (slot := writes.pop(position + 1, None)) is not None:
                self.slots[slot] = (position + 1, state)
            if step.prompt_logprobs and position + 1 < row.new.prompt_len:
                logprobs.append(logprob(state, row.tokens[position + 1]))
        _require(not writes, f"row {step.row} has checkpoints outside of ({step.start}, {stop}]: {writes}")
        self.slots[row.new.slot] = (stop, state)
        row.consumed = stop
        self.consumed_tokens += step.count
        return self._result(row, step, state, tuple(logprobs))

    def _result(self, row: _Row, step: RowStep, state: bytes, logprobs: tuple[TokenLogprob, ...]) -> RowResult | None:
        if step.output is not Output.SAMPLE:
            return RowResult(row=step.row, prompt_logprobs=logprobs) if logprobs else None
        _require(step.start + step.count == len(row.tokens), f"row {step.row} samples before its last token")
        token = next_token(state, row.new.sampling, row.new.choice, self.vocab)
        row.tokens.append(token)
        wants = row.new.sampling.logprobs is not None
        return RowResult(row=step.row, token=token, logprob=logprob(state, token) if wants else None, prompt_logprobs=logprobs)

    def _restore(self, row: _Row, start: int) -> bytes:
        state = ZERO
        for token in row.tokens[:start]:
            state = digest(state, token)
        if start:
            _require(self.slots[row.new.slot] == (start, state), f"slot {row.new.slot} does not hold the row's state at {start}")
        return state

    def _verify_pages(self, row: _Row, start: int) -> None:
        state = ZERO
        for position, token in enumerate(row.tokens[:start]):
            state = digest(state, token)
            cell = self.pages[row.pages[position // self.page_size]][position % self.page_size]
            _require(cell == state, f"page {row.pages[position // self.page_size]} does not hold the row's position {position}")


@dataclass(frozen=True)
class Stored:
    """What the toy model exports of one prefix."""

    position: int
    state: bytes
    cells: tuple[bytes, ...]


class FakeExecutor:
    """`groups` data-parallel groups. `gate`, when given, is awaited before each step; `fail_at` raises `error` at that step."""

    def __init__(
        self,
        *,
        num_pages: int,
        num_slots: int,
        page_size: int,
        groups: int = 1,
        vocab: int = 1024,
        gate: asyncio.Semaphore | None = None,
        fail_at: int | None = None,
        error: Exception | None = None,
    ) -> None:
        self.groups = [FakeGroup(num_pages=num_pages, num_slots=num_slots, page_size=page_size, vocab=vocab) for _ in range(groups)]
        self.steps = 0
        self.max_outstanding = 0
        self._outstanding: list[StepPlan] = []
        self._lock = asyncio.Lock()  # fair: steps run in the order submitted
        self._gate = gate
        self._fail_at = fail_at
        self._error = error
        self._constrained: list[set[int]] = [set() for _ in range(groups)]

    async def run(self, plan: StepPlan) -> StepResult:
        _require(len(plan.groups) == len(self.groups), f"{len(plan.groups)} plans for {len(self.groups)} groups")
        self._check_constrained(plan)
        self._outstanding.append(plan)
        self.max_outstanding = max(self.max_outstanding, len(self._outstanding))
        async with self._lock:
            if self._gate is not None:
                await self._gate.acquire()
            else:
                await asyncio.sleep(0)
            _require(plan.step == self.steps, f"step {plan.step} comes after step {self.steps - 1}")
            if self._fail_at == plan.step and self._error is not None:
                raise self._error
            self.steps += 1
            results = tuple(group.execute(part) for group, part in zip(self.groups, plan.groups, strict=True))
        self._outstanding.remove(plan)
        return StepResult(step=plan.step, groups=results)

    def _check_constrained(self, plan: StepPlan) -> None:
        for i, part in enumerate(plan.groups):
            rows = self._constrained[i]
            rows -= set(part.dropped)
            rows |= {new.row for new in part.new_rows if new.constraint is not None}
            sampling = {s.row for other in self._outstanding for s in other.groups[i].rows if s.output is Output.SAMPLE}
            ahead = rows & sampling & {s.row for s in part.rows} - {new.row for new in part.new_rows}
            _require(not ahead, f"constrained rows {sorted(ahead)} run ahead of their mask")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise Misuse(message)
