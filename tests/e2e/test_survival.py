"""Kills under streams on real Ray: whoever dies, readers get the tokens of an unbroken run. The short form of `benchmarks.chaos`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster

from app import ServiceConfig, deployment
from app.default_model import ensure_default_model
from benchmarks.chaos import REPLICA, SETTINGS, SHARD, STORE, Chaos, Outcome, Request, requests
from deployments.client import RoutedEngineClient
from engine.types import GenerateRequest, SamplingParams
from tests.compare import Reference
from tests.e2e.serving import Server, served

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
GREEDY = SamplingParams(temperature=0)


def assert_unbroken(outcome: Outcome) -> None:
    """Nobody saw an error; tokens are equal, or part where two logits are closer than float noise."""
    assert outcome.lost == []
    assert outcome.wrong_usage == 0
    reference = Reference(Path(ensure_default_model()))
    for request, expected, got in outcome.wrong:
        assert len(got) == len(expected)
        at = next(i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b)
        assert request.sampling.temperature == 0, f"a sampled stream parts at {at}"
        assert reference.near_tie(request.prompt, expected, at) is not None, f"parts at {at}"


def test_sessions_are_there_after_a_restart_of_the_whole_cluster(tmp_path: Path) -> None:
    settings = {**SETTINGS, "durable_url": f"file://{tmp_path}"}
    ask = {"model": "kimi-k3", "messages": [{"role": "user", "content": "Tell a long story. " * 20}], "max_tokens": 40, "temperature": 0}
    with served(**settings) as first:
        answer = first.post("/v1/chat/completions", ask, headers={"x-session-id": "book"}).json()
        holders = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["name"].startswith("k3-")]
        for name in holders:
            ray.get(ray.get_actor(name, namespace="serve").flush.remote())
    more = {**ask, "messages": [*ask["messages"], answer["choices"][0]["message"], {"role": "user", "content": "Go on."}]}  # type: ignore[misc]
    with served(**settings) as second:
        again = second.post("/v1/chat/completions", more, headers={"x-session-id": "book"}).json()
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= answer["usage"]["prompt_tokens"] - 1, "nothing of the first turn is computed again"
        metrics = second.get("/metrics").text
        assert "k3_state_imports_total{replica=" in metrics
        assert 'source="durable"' in metrics


@pytest.fixture
def three_nodes(tmp_path: Path) -> Iterator[Cluster]:
    """A head that has room for the ingress alone; two nodes that hold one replica each, started after the ingress."""
    quick = {
        "health_check_initial_delay_ms": 500,
        "health_check_period_ms": 500,
        "health_check_timeout_ms": 2000,
        "health_check_failure_threshold": 4,
    }
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "object_store_memory": 128 << 20, "_system_config": quick, "include_dashboard": False},
    )
    ray.init(address=cluster.address, namespace="serve", log_to_driver=False)
    try:
        yield cluster
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


async def test_a_node_is_lost(three_nodes: Cluster, tmp_path: Path) -> None:
    """The worker node with the replica, its shards, its objects and its holder goes at once; the stream goes on on the other one."""
    config = ServiceConfig.model_validate({**SETTINGS, "shard_num_cpus": 2, "durable_url": f"file://{tmp_path}"})
    serve.start(proxy_location="Disabled")
    serve._run(deployment(config), name="k3", route_prefix=None, _blocking=False)
    first = three_nodes.add_node(num_cpus=5, object_store_memory=128 << 20)
    chaos = Chaos("k3", [Request(tuple(range(7, 150)), 300, GREEDY)], seed=1)
    await chaos.reference(1)
    three_nodes.add_node(num_cpus=5, object_store_memory=128 << 20)
    three_nodes.wait_for_nodes()
    got: list[int] = []
    killed = False
    async for chunk in chaos.stream(chaos.work[0]):
        got += chunk.token_ids
        if len(got) >= 200 and not killed:
            killed = True
            three_nodes.remove_node(first, allow_graceful=False)
    assert got == chaos.expected[0]
    assert (await report(chaos.engine)).bundles.imports.get("durable", 0) == 1


async def test_a_pinned_sessions_states_have_a_mirror_on_another_node(three_nodes: Cluster) -> None:
    """Without a durable tier: the node with the replica, its states and their holder goes between two turns."""
    config = ServiceConfig.model_validate({**SETTINGS, "shard_num_cpus": 2, "mirror": True})
    serve.start(proxy_location="Disabled")
    serve._run(deployment(config), name="k3", route_prefix=None, _blocking=False)
    first = three_nodes.add_node(num_cpus=5, object_store_memory=128 << 20)
    handle = serve.get_app_handle("k3")
    ask = {"messages": [{"role": "user", "content": "Tell a long story. " * 20}], "max_tokens": 80, "temperature": 0}
    said = await handle.chat.remote(ask, session_id="book")
    async with asyncio.timeout(60):
        while (await handle.session.remote("book"))["position"] < said["usage"]["prompt_tokens"] - 1:  # noqa: ASYNC110  # another process
            await asyncio.sleep(0.1)
    three_nodes.add_node(num_cpus=5, object_store_memory=128 << 20)
    three_nodes.wait_for_nodes()
    await handle.pin.remote("book", pinned=True)
    three_nodes.remove_node(first, allow_graceful=False)
    more = {**ask, "messages": [{"role": "user", "content": "Go on."}], "max_tokens": 8}
    again = await handle.chat.remote(more, session_id="book", session_mode="append")
    assert again["usage"]["cached_tokens"] >= said["usage"]["prompt_tokens"] - 1
    assert again["usage"]["resume_source"] == "store"


async def test_scaling_down_hands_the_streams_over() -> None:
    """Serve takes one of two replicas away: what ran there goes on at the other one behind its last token."""
    with served(**SETTINGS, replicas=2) as two:
        engine = serve.get_deployment_handle("engine", "k3")
        client = RoutedEngineClient(engine, "127.0.0.1")

        async def read(name: str, i: int) -> list[int]:
            ask = GenerateRequest(request_id=f"{name}-{i}", prompt=tuple(range(7 + i, 150 + i)), max_tokens=200, sampling=GREEDY)
            return [t async for chunk in client.stream(ask) for t in chunk.token_ids]

        expected = await asyncio.gather(*(read("alone", i) for i in range(6)))
        running = [asyncio.create_task(read("moved", i)) for i in range(6)]
        while not all(r.stats.running for r in await engine.broadcast("report").results_async()):  # noqa: ASYNC110  # other processes
            await asyncio.sleep(0.05)
        before = {r.replica: r.stats.tokens_recomputed for r in await engine.broadcast("report").results_async()}
        assert len(before) == 2
        smaller = deployment(two.config.model_copy(update={"replicas": 1}))
        await asyncio.to_thread(lambda: serve._run(smaller, name="k3", route_prefix="/", _blocking=False))
        assert await asyncio.gather(*running) == expected
        await client.close()
        assert client.moved >= 1
        left = await report(engine)
        assert sum(left.bundles.imports.values()) >= 1, "states came from the one that left"
        assert left.stats.tokens_recomputed - before.get(left.replica, 0) <= client.moved, "each went on behind its last token"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(**SETTINGS, durable_url=f"file://{tmp_path_factory.mktemp('durable')}") as running:
        yield running


async def report(handle: Any) -> Any:
    for _ in range(120):
        reports = await handle.broadcast("report").results_async()
        if reports:
            return reports[0]
        await asyncio.sleep(0.5)
    raise AssertionError("no engine replica answers")


async def test_three_kinds_of_kill(server: Server) -> None:
    chaos = Chaos("k3", requests(8, seed=3, vocab=700, tokens=(80, 160)), seed=3)
    await chaos.reference(4)
    outcome = await chaos.run(4, (SHARD, REPLICA, STORE))
    assert_unbroken(outcome)
    assert outcome.kills == {SHARD: 1, REPLICA: 1, STORE: 1}
    assert outcome.counters["imports"] >= 1, "streams went on from stored states, not from the beginning"
    assert outcome.counters["recoveries"] >= 1 or outcome.counters["shards_replaced"] == 0


async def test_a_reader_whose_ingress_died_gets_the_rest_of_the_answer(server: Server) -> None:
    """Sampled without a seed: what was drawn for the first attempt is kept with the session."""
    body = {"messages": [{"role": "user", "content": "A story. " * 20}], "max_tokens": 150, "stream": True, "session_id": "torn"}
    chaos = Chaos("k3", [], seed=1)
    text, place, killed = "", 0, False
    with suppress(httpx.RemoteProtocolError, httpx.ReadError):  # a stream that only pauses is waited for
        async with httpx.AsyncClient(timeout=240) as http, http.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                text, place = read_line(line, text, place)
                if place >= 60 and not killed:
                    killed = True
                    await chaos.kill_actors("SERVE_REPLICA::k3#ingress#")
    assert 60 <= place < 150, "it broke off"
    received, rest = text, ""
    async with httpx.AsyncClient(timeout=120) as http:
        for _ in range(60):
            response = await http.get(f"{server.url}/v1/sessions/torn/answer", headers={"last-event-id": str(place)})
            if response.status_code == 200:
                break
            await asyncio.sleep(1)  # Serve starts another ingress
        for line in response.text.splitlines():
            rest, place = read_line(line, rest, place)
        session = (await http.get(f"{server.url}/v1/sessions/torn")).json()
    assert place == 150
    assert received + rest == session["messages"][-1]["reasoning_content"] + session["messages"][-1]["content"]
    assert (session["turns"], session["open_answer"]) == (1, False)


def read_line(line: str, text: str, place: int) -> tuple[str, int]:
    """A line of a chat stream added to what was read before it."""
    if line.startswith("id: "):
        return text, int(line[4:])
    if line.startswith("data: {"):
        for choice in json.loads(line[6:])["choices"]:
            text += (choice["delta"].get("reasoning_content") or "") + (choice["delta"].get("content") or "")
    return text, place


async def test_a_dead_holders_states_come_from_the_durable_tier(server: Server) -> None:
    chaos = Chaos("k3", [Request(tuple(range(7, 150)), 400, GREEDY)], seed=1)
    await chaos.reference(1)
    [expected] = chaos.expected
    got: list[int] = []
    killed = False
    async for chunk in chaos.stream(chaos.work[0]):
        got += chunk.token_ids
        if len(got) >= 250 and not killed:
            killed = True
            for holder in [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["name"].startswith("k3-holder-")]:
                actor = ray.get_actor(holder, namespace="serve")
                await actor.flush.remote()
                await chaos.kill_actors("k3-holder-")
            [pid, *_] = await chaos.engine.shard_pids.remote()
            os.kill(pid, signal.SIGKILL)
    assert got == expected
    bundles = (await report(chaos.engine)).bundles
    assert bundles.imports.get("durable", 0) >= 1
    assert bundles.import_misses == {}


async def test_only_the_dead_shard_is_replaced(server: Server) -> None:
    chaos = Chaos("k3", [Request((1, 2, 3), 60, GREEDY)], seed=1)
    await chaos.reference(1)
    before = (await report(chaos.engine)).bundles
    os.kill((await chaos.engine.shard_pids.remote())[1], signal.SIGKILL)
    assert [t async for chunk in chaos.stream(chaos.work[0]) for t in chunk.token_ids] == chaos.expected[0]
    after = (await report(chaos.engine)).bundles
    assert (after.recoveries - before.recoveries, after.shards_replaced - before.shards_replaced) == (1, 1)
