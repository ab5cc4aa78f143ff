"""`ModelRunner`: executes step plans on one process, in lockstep with the other processes of its mesh."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.errors import Unsupported
from engine.plan import GroupPlan, GroupResult, Output, RowResult, RowStep, StepPlan, StepResult
from engine.types import TokenLogprob
from model.batch import Segment, build_batch
from model.kimi_k3 import KimiK3
from model.parallel import Mesh
from model.rows import Matchers, RowTable
from model.sampler import logprobs, sample
from model.state import StatePools


class ModelRunner:
    """Every process of the mesh gets the same plans in the same order; the results of all groups come out on rank 0."""

    def __init__(self, model: KimiK3, mesh: Mesh, pools: StatePools, matchers: Matchers | None = None) -> None:
        self.model = model
        self.mesh = mesh
        self.pools = pools
        self.device = pools.latents.device
        self.table = RowTable(model.config.vocab_size, self.device, matchers)

    def reset(self) -> None:
        """Forget every row and state; keep the weights."""
        self.table.rows.clear()
        for pool in (self.pools.latents, self.pools.kda, self.pools.conv):
            pool.zero_()

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Execute one step. Rank 0 returns every group's results, other ranks their own group's at most.

        Raises `ValueError` when the plan breaks the contract of `engine.plan`; a transport error when a peer is gone.
        """
        began = time.perf_counter()
        if len(plan.groups) != self.mesh.groups:
            raise ValueError(f"step {plan.step}: {len(plan.groups)} groups planned, the mesh has {self.mesh.groups}")
        own = plan.groups[self.mesh.group]
        self._prepare(own)
        results = [GroupResult()] * self.mesh.groups
        if any(g.rows for g in plan.groups):
            results[self.mesh.group] = self._step(own, [g.num_tokens for g in plan.groups])
            if self.mesh.groups > 1 and any(_speaks(g) for g in plan.groups):
                results = self._collect(results)
        return StepResult(step=plan.step, groups=tuple(results), seconds=time.perf_counter() - began)

    def _prepare(self, own: GroupPlan) -> None:
        self.table.drop(own)
        for copy in own.copies:
            if copy.kind == "slot":
                self.pools.copy_slot(copy.src, copy.dst)
            elif copy.kind == "page":
                self.pools.copy_page(copy.src, copy.dst)
            else:
                raise ValueError(f"copy of kind {copy.kind!r}, expected 'slot' or 'page'")
        if self.mesh.tp_rank == 0 and self.table.matchers is None and any(new.constraint is not None for new in own.new_rows):
            raise Unsupported("constrained decoding needs a tokenizer, and this engine was started without one", "response_format")
        self.table.add(own)

    def _step(self, own: GroupPlan, counts: Sequence[int]) -> GroupResult:
        steps = self.table.ordered(own)
        segments = [self.table.rows[s.row].segment(s) for s in steps]
        logits = self.model(build_batch(segments, counts, self.pools.page_size, self.device), self.pools)
        return self._finish(steps, segments, logits)

    def _finish(self, steps: Sequence[RowStep], segments: Sequence[Segment], logits: Tensor) -> GroupResult:
        """Draw tokens (TP rank 0 for its group), advance the rows, say what was asked for."""
        parts = dict(zip((s.row for s in steps), logits.split([len(s.logits) for s in segments]), strict=True))
        sampling = [s.row for s in steps if s.output is Output.SAMPLE]
        last = torch.stack([parts[row][-1] for row in sampling]) if sampling else logits[:0]
        tokens = self._draw(sampling, last)
        results = []
        if self.mesh.tp_rank == 0:
            said = self._logprobs(sampling, last, tokens)
            drawn = dict(zip(sampling, tokens.tolist(), strict=True))
            for step in steps:
                result = RowResult(
                    row=step.row,
                    token=drawn.get(step.row),
                    logprob=said.get(step.row),
                    prompt_logprobs=self._prompt_logprobs(step, parts[step.row]),
                    logits=parts[step.row].cpu().numpy().tobytes() if step.output is Output.LOGITS else None,
                )
                if result != RowResult(row=step.row):
                    results.append(result)
        for row, token in zip(sampling, tokens.tolist(), strict=True):
            self.table.rows[row].append(token)
        return GroupResult(rows=tuple(results))

    def _draw(self, rows: Sequence[int], logits: Tensor) -> Tensor:
        if not rows:
            return torch.empty(0, dtype=torch.int64, device=self.device)
        if self.mesh.tp_rank == 0:
            tokens = sample(logits, [self.table.rows[row].draw() for row in rows])
        else:
            tokens = torch.empty(len(rows), dtype=torch.int64, device=self.device)
        return self.mesh.broadcast_tp(tokens)

    def _logprobs(self, rows: Sequence[int], logits: Tensor, tokens: Tensor) -> dict[int, TokenLogprob]:
        wanted = [(i, row, k) for i, row in enumerate(rows) if (k := self.table.rows[row].sampling.logprobs) is not None]
        if not wanted:
            return {}
        index = [i for i, _, _ in wanted]
        values = logprobs(logits[index], tokens[index], max(k for _, _, k in wanted))
        return {row: _shortened(value, k) for (_, row, k), value in zip(wanted, values, strict=True)}

    def _prompt_logprobs(self, step: RowStep, logits: Tensor) -> tuple[TokenLogprob, ...]:
        """Of the tokens at positions start + 1 … start + count that lie inside the prompt."""
        row = self.table.rows[step.row]
        following = row.tokens[step.start + 1 : min(step.start + step.count + 1, row.prompt_len)]
        if not step.prompt_logprobs or not following:
            return ()
        tokens = torch.tensor(following, dtype=torch.int64, device=self.device)
        return tuple(logprobs(logits[: len(following)], tokens, row.sampling.prompt_logprobs or 0))

    def _collect(self, results: list[GroupResult]) -> list[GroupResult]:
        """Each group's result from its TP rank 0, on world rank 0."""
        gathered = self.mesh.gather_objects(results[self.mesh.group] if self.mesh.tp_rank == 0 else None)
        return results if gathered is None else gathered[:: self.mesh.tp]


def _speaks(group: GroupPlan) -> bool:
    return any(step.output is not Output.NONE or step.prompt_logprobs for step in group.rows)


def _shortened(value: TokenLogprob, top: int) -> TokenLogprob:
    return TokenLogprob(value.token_id, value.logprob, value.top[:top])
