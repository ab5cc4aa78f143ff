"""The served application under the real OpenAI client, strangers in the batch, and clients that leave. Two shard actors on real Ray."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI
from typer.testing import CliRunner

from app.cli import cli
from app.default_model import ensure_default_model
from tests.compare import Reference, assert_same_tokens
from tests.e2e.serving import Server, served

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # A small pool, so that 32 streams must preempt one another.
    with served(tp=2, page_size=16, num_pages=34, num_slots=24, max_running=16, max_model_len=512, max_queued=64) as running:
        yield running


def idle(server: Server) -> dict[str, float]:
    """Metrics once nothing runs any more; every page and slot is then free or cached."""
    deadline = time.monotonic() + 30
    while True:
        m = server.metrics()
        if m["k3_running"] == m["k3_waiting"] == m["k3_paused"] == 0:
            break
        assert time.monotonic() < deadline, m
        time.sleep(0.1)
    assert m["k3_pages_leased"] == 0, m
    assert m["k3_slots_free"] + m["k3_slots_cached"] == m["k3_slots_total"], m
    return m


def test_health_says_which_mode_runs(server: Server) -> None:
    answer = server.get("/health")
    assert answer.status_code == 200
    assert answer.json() == {"status": "ok", "model": "kimi-k3", "serve_mode": "default", "replicas": 1, "reason": None}


def test_a_request_keeps_its_id(server: Server) -> None:
    sent = httpx.get(f"{server.url}/v1/models", headers={"x-request-id": "trace-7"})
    made = httpx.get(f"{server.url}/v1/models")
    assert sent.headers.get_list("x-request-id") == ["trace-7"]
    assert len(made.headers.get_list("x-request-id")) == 1


def test_the_openai_client_streams(server: Server) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    ask = dict(model="kimi-k3", messages=[{"role": "user", "content": "Say hello."}], max_tokens=24, temperature=0, seed=1)
    whole = client.chat.completions.create(**ask)
    frames = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    reasoning = "".join(getattr(c.delta, "reasoning_content", None) or "" for f in frames for c in f.choices)
    content = "".join(c.delta.content or "" for f in frames for c in f.choices)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    assert reasoning == (whole.choices[0].message.model_extra or {})["reasoning_content"]
    assert content == (whole.choices[0].message.content or "")
    usage = frames[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, 24)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1, "the second time, all but the last prompt token is cached"
    assert [m.id for m in client.models.list()] == ["kimi-k3"]


def test_whether_the_thinking_came_back_is_a_metric(server: Server) -> None:
    def missing() -> float:
        lines = [line for line in server.get("/metrics").text.splitlines() if line.startswith('k3_thinking_history_total{state="missing"}')]
        return float(lines[0].rpartition(" ")[2]) if lines else 0.0

    before = missing()
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    answer = server.post("/v1/chat/completions", {"messages": history, "max_tokens": 2})
    assert answer.headers["x-thinking-history"].startswith("missing")
    assert missing() == before + 1


def test_seeded_sampling_repeats_and_choices_differ(server: Server) -> None:
    body = {"model": "kimi-k3", "prompt": [5, 6, 7], "max_tokens": 12, "temperature": 1.0, "seed": 7, "n": 3, "return_token_ids": True}
    first, second = (server.post("/v1/completions", body).json() for _ in range(2))
    ids = [c["token_ids"] for c in first["choices"]]
    assert ids == [c["token_ids"] for c in second["choices"]]
    assert len({tuple(i) for i in ids}) == 3


@pytest.mark.timeout(900)
async def test_32_streams_of_mixed_lengths_are_as_alone(server: Server) -> None:
    rng = random.Random(5)
    prompts = [[rng.randrange(700) for _ in range(rng.choice((1, 15, 16, 17, 40, 64)))] for _ in range(32)]
    budgets = [rng.choice((20, 30, 40)) for _ in prompts]  # long enough for all to meet
    before = server.metrics()
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=180) as client:

        async def tokens(prompt: list[int], budget: int) -> list[int]:
            stream = await client.completions.create(
                model="kimi-k3",
                prompt=prompt,
                max_tokens=budget,
                temperature=0,
                stream=True,
                extra_body={"return_token_ids": True, "ignore_eos": True},
            )
            return [t async for frame in stream for choice in frame.choices for t in (choice.model_extra or {}).get("token_ids") or ()]

        together = await asyncio.gather(*(tokens(p, n) for p, n in zip(prompts, budgets, strict=True)))
        after = server.metrics()
        alone = [await tokens(p, n) for p, n in zip(prompts, budgets, strict=True)]
    assert [len(t) for t in together] == budgets
    assert after["k3_preemptions_total"] > before["k3_preemptions_total"], "the pool was made too small for this"
    reference = Reference(Path(ensure_default_model()))
    assert_same_tokens(reference, list(zip(prompts, alone, together, strict=True)))
    idle(server)


async def test_500_disconnects_leave_nothing_behind(server: Server) -> None:
    rng = random.Random(11)
    before = idle(server)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=httpx.Limits(max_connections=24)) as client:
        gate = asyncio.Semaphore(24)

        async def leave(i: int) -> None:
            """Streams are left after some frames, whole answers after some time: before, in and behind the queue."""
            prompt = [rng.randrange(700) for _ in range(rng.randrange(1, 60))]
            body = {"prompt": prompt, "max_tokens": 400, "stream": bool(i % 2), "ignore_eos": True}
            frames = rng.randrange(4) if i % 2 else 10**6
            async with gate:
                try:
                    async with asyncio.timeout(60 if i % 2 else rng.uniform(0.0, 0.4)):
                        async with client.stream("POST", "/v1/completions", json=body) as response:
                            async for _ in response.aiter_lines():
                                frames -= 1
                                if frames < 0:
                                    return
                except TimeoutError:
                    pass

        await asyncio.gather(*(leave(i) for i in range(500)))
    after = idle(server)
    cancelled = 'k3_finished_total{reason="cancelled"}'
    assert after[cancelled] - before.get(cancelled, 0) >= 200, "too few of the 500 reached the engine for this to say anything"
    answer = server.post("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == 4


def test_a_disconnect_cancels_within_a_step_or_two(server: Server) -> None:
    """Non-streaming too: the client hangs up and the engine stops long before the budget."""
    before = idle(server)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json={"prompt": [9, 9], "max_tokens": 480, "ignore_eos": True}, timeout=1.0)
    after = idle(server)
    assert after["k3_tokens_generated_total"] - before["k3_tokens_generated_total"] < 300


async def test_a_full_queue_answers_429_with_retry_after(server: Server) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=180, limits=httpx.Limits(max_connections=200)) as client:
        body = {"prompt": list(range(1, 30)), "max_tokens": 4, "ignore_eos": True}
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(120)))
    codes = [a.status_code for a in answers]
    assert set(codes) == {200, 429}, set(codes)
    refused = next(a for a in answers if a.status_code == 429)
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error" or refused.json()["error"]["message"]
    idle(server)


def test_usage_is_the_sum_of_metrics(server: Server) -> None:
    before = idle(server)
    totals = {"prompt": 0, "cached": 0, "completion": 0}
    for i in range(6):
        answer = server.post("/v1/completions", {"prompt": [3] * (20 + i), "max_tokens": 5, "ignore_eos": True}).json()["usage"]
        totals["prompt"] += answer["prompt_tokens"]
        totals["cached"] += answer["prompt_tokens_details"]["cached_tokens"]
        totals["completion"] += answer["completion_tokens"]
    after = idle(server)
    assert totals["cached"] > 0
    assert after["k3_tokens_cached_total"] - before["k3_tokens_cached_total"] == totals["cached"]
    assert after["k3_tokens_generated_total"] - before["k3_tokens_generated_total"] == totals["completion"]
    assert after["k3_tokens_prefilled_total"] - before["k3_tokens_prefilled_total"] == totals["prompt"] - totals["cached"]


def test_the_doctor_finds_a_running_server_well(server: Server) -> None:
    """The golden tokens of the embedded model, asked over HTTP."""
    words = ["doctor", "--url", f"{server.url}/v1", "--address", "local", "--skip", "links", "--json"]
    result = CliRunner().invoke(cli, words, catch_exceptions=False)
    found = {finding["check"]: finding["status"] for finding in map(json.loads, result.stdout.splitlines())}
    assert (found["server"], found["golden"], result.exit_code) == ("ok", "ok", 0), result.stdout


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": [1, 2000]}, 400),
        ({"prompt": list(range(700)) * 2}, 400),
        ({"prompt": [1], "max_tokens": 0}, 400),
        ({"prompt": [1], "model": "gpt-7"}, 404),
        ({"prompt": []}, 400),
        ({}, 400),
    ],
    ids=["token outside the vocabulary", "longer than the context", "no budget", "unknown model", "empty prompt", "no prompt"],
)
def test_bad_requests(server: Server, body: dict[str, object], status: int) -> None:
    answer = server.post("/v1/completions", body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]
    assert "Traceback" not in answer.text
