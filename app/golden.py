"""Golden prompts: token ids and the ids that a greedy reply must have, asked of a running server or of the shards themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from app.config import ServiceConfig
from app.score import score, score_spec
from cluster.doctor import Finding, Status, fail, ok
from deployments.shard_group import ShardGroup
from engine.errors import InvalidRequest

OTHER_MODEL = "if another model is served there, say which (model=…) and give its --golden FILE; if not, "
FIX = "compare files, dtype, versions and drivers with the machine that made the golden tokens; `k3 score` shows the logits"
# How far below the best one an expected token's logit may be, by compute dtype: near-ties fall differently in another batch or sharding.
SLACK = {"float32": 1e-3, "bfloat16": 0.25}
CHUNK = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    name: str
    ids: tuple[int, ...]  # the prompt
    tokens: tuple[int, ...]  # what follows it, greedily


# Of the embedded model in float32 by the reference kernels; at each of these tokens the best logit leads by 0.4 or more.
EMBEDDED = Golden(
    name="embedded",
    ids=(541, 365, 599, 28, 234, 30, 398, 373, 66, 434, 313, 349, 96, 598, 523, 158, 98, 280, 355, 625, 1, 158, 536, 88),
    tokens=(915, 207, 201, 45, 132, 834, 4, 730),
)


def read_golden(path: Path) -> list[Golden]:
    """`{name: {"ids": [prompt], "tokens": [reply]}}`. Raises InvalidRequest naming the entry and what is wrong with it."""
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{path}: not a readable JSON file: {error}") from None
    if not isinstance(raw, dict) or not raw:
        raise InvalidRequest(f'{path}: expected {{name: {{"ids": [prompt], "tokens": [reply]}}}} with at least one entry')
    found = []
    for name, value in raw.items():
        for key in ("ids", "tokens"):
            ids = value.get(key) if isinstance(value, dict) else None
            if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
                raise InvalidRequest(f"{path}: {name!r}: {key}: expected a non-empty list of token ids", param=name)
        found.append(Golden(name=name, ids=tuple(value["ids"]), tokens=tuple(value["tokens"])))
    return found


def golden_of_server(url: str, headers: Mapping[str, str], goldens: Sequence[Golden], timeout_s: float) -> list[Finding]:
    """Asks /completions greedily, by token ids."""
    findings = []
    with httpx.Client(base_url=url, headers=dict(headers), timeout=httpx.Timeout(timeout_s, connect=5)) as client:
        model = client.get("models").raise_for_status().json()["data"][0]["id"]
        for golden in goldens:
            body = {
                "model": model,
                "prompt": list(golden.ids),
                "max_tokens": len(golden.tokens),
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            answer = client.post("completions", json=body)
            if answer.status_code != 200:
                what = f"{golden.name}: the server answered {answer.status_code}: {answer.text[:200]}"
                findings.append(fail("golden", what, "see the server's logs", url))
                continue
            found = judge_tokens(golden, answer.json()["choices"][0]["token_ids"], url)
            embedded = golden is EMBEDDED and found.status is Status.FAIL
            findings.append(replace(found, fix=OTHER_MODEL + found.fix) if embedded else found)
    return findings


def judge_tokens(golden: Golden, got: Sequence[int], where: str) -> Finding:
    wrong = next((i for i, (a, b) in enumerate(zip(golden.tokens, got, strict=False)) if a != b), min(len(got), len(golden.tokens)))
    if wrong == len(golden.tokens):
        return ok("golden", f"{golden.name}: all {wrong} tokens", where, tokens=wrong)
    found = got[wrong] if wrong < len(got) else "nothing"
    what = f"{golden.name}: token {wrong} of {len(golden.tokens)} is {found}, expected {golden.tokens[wrong]}"
    return fail("golden", what, FIX, where, tokens=wrong)


async def golden_of_shards(config: ServiceConfig, goldens: Sequence[Golden]) -> list[Finding]:
    """Loads the model as it would be served, on the Ray that this process has joined. Each reply is one teacher-forced pass.

    Raises K3Error for what the shards refuse.
    """
    from app.resolve import resolve

    base = resolve(config).engine.shards
    for golden in goldens:
        if (wrong := max(*golden.ids, *golden.tokens)) >= base.vocab_size:
            return [
                fail("golden", f"{golden.name}: id {wrong} is outside the vocabulary of {base.vocab_size}", "name the model's own file")
            ]
    prompts = {g.name: (*g.ids, *g.tokens[:-1]) for g in goldens}
    spec = score_spec(base, prompts)
    group = await ShardGroup.start(spec)
    try:
        logits = await score(group, prompts, groups=spec.num_groups, page_size=spec.page_size, chunk=CHUNK)
    finally:
        await group.close()
    where = f"{spec.shards} shards, {spec.device}, {spec.dtype}"
    findings = []
    for golden in goldens:
        rows = logits[golden.name][len(golden.ids) - 1 :]
        best = rows.argmax(axis=1)
        got = [
            expected if row[expected] >= row[top] - SLACK[spec.dtype] else int(top)
            for row, top, expected in zip(rows, best, golden.tokens, strict=True)
        ]
        findings.append(judge_tokens(golden, got, where))
    return findings
