"""The ways to start it: Ray's own `serve run`, by words and by file, good and bad; and a Python program that talks to the handle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import ray
import yaml
from ray import serve
from ray.serve.context import _set_global_client
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from tests.e2e.serving import free_port, local_cluster

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ROOT = Path(__file__).resolve().parent.parent.parent
TINY = ROOT / "tests" / "data" / "k3" / "tiny-a" / "model"
SERVE = Path(sys.executable).with_name("serve")


@dataclass(frozen=True)
class Cluster:
    address: str
    url: str


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with local_cluster() as port:
        yield Cluster(ray.get_runtime_context().gcs_address, f"http://127.0.0.1:{port}")


@contextmanager
def serve_run(*words: str, ray_address: str) -> Iterator[subprocess.Popen[str]]:
    """`serve run` in a process of its own, interrupted at the end as by Ctrl-C."""
    process = subprocess.Popen(
        [SERVE, "run", *words],
        cwd=ROOT,
        env={**os.environ, "RAY_ADDRESS": ray_address},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise


def healthy(url: str, process: subprocess.Popen[str]) -> dict[str, object]:
    """The health report, once it is good."""
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"serve run ended with {process.returncode}: {process.stdout and process.stdout.read()}")
        try:
            answer = httpx.get(f"{url}/health", timeout=5)
            if answer.status_code == 200 and answer.headers["content-type"] == "application/json":
                return answer.json()
        except httpx.HTTPError:
            pass
        time.sleep(0.3)
    raise AssertionError(f"{url}/health did not become good")


def test_words_on_the_command_line(cluster: Cluster) -> None:
    words = (f"model={TINY}", "tp=2", "ep=2", "shard_num_cpus=0.1", "served_model_name=my-kimi-k3", "max_running=4")
    with serve_run("app:deployment", *words, "--name", "k3", ray_address=cluster.address) as process:
        assert healthy(cluster.url, process)["model"] == "my-kimi-k3"
        body = {"model": "my-kimi-k3", "prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True, "return_token_ids": True}
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60).json()
        assert len(answer["choices"][0]["token_ids"]) == 5


def test_the_file_of_the_repository_and_the_example(cluster: Cluster, tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / "ray_config.yaml").read_text())
    port = config["http_options"]["port"] = free_port()
    file = tmp_path / "ray_config.yaml"
    file.write_text(yaml.safe_dump(config))
    with serve_run(str(file), ray_address=cluster.address) as process:
        assert healthy(f"http://127.0.0.1:{port}", process)["status"] == "ok"
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 8
        example = [sys.executable, ROOT / "examples" / "handle.py", "--address", cluster.address]
        said = subprocess.run(example, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "chat: {'role': 'assistant'" in said
    assert "16 tokens" in said
    assert "chat_stream: " in said
    assert said.count("generate: ") >= 8, "a chunk a token, and one at admission"
    assert "completion_tokens=8" in said
    assert process.returncode is not None
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/health", timeout=5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("modle=x",), "unknown configuration key 'modle'; did you mean model"),
        ((f"model={TINY}", "tp=3"), "tp 3 must divide both head counts"),
        (("model={truncated}",), "model-00001-of-000003.safetensors"),
    ],
    ids=["unknown key", "tp does not divide the heads", "a shard is truncated"],
)
def test_what_cannot_run_is_said_at_start(cluster: Cluster, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    """Further faults, through `k3 serve`: tests/app/test_cli.py."""
    for file in TINY.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    cut = tmp_path / "model-00001-of-000003.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1000])
    with serve_run("app:deployment", *[word.format(truncated=tmp_path) for word in words], ray_address=cluster.address) as process:
        said, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert message in said


def application() -> ApplicationStatusOverview | None:
    """As `serve status` has it; None while there is none, or only the dead controller that this process knew before."""
    try:
        return serve.status().applications.get("k3")
    except ray.exceptions.RayActorError:
        _set_global_client(None)
        return None


def test_a_file_with_an_unknown_key_fails_to_deploy_and_says_which(cluster: Cluster, tmp_path: Path) -> None:
    """`serve run FILE` itself stays, as Ray has it; the message is in its output and in `serve status`."""
    config = yaml.safe_load((ROOT / "ray_config.yaml").read_text())
    config["http_options"]["port"] = free_port()
    config["applications"][0]["args"]["max_runing"] = 3
    file = tmp_path / "ray_config.yaml"
    file.write_text(yaml.safe_dump(config))
    with serve_run(str(file), ray_address=cluster.address):
        deadline = time.monotonic() + 120
        while (app := application()) is None or app.status != ApplicationStatus.DEPLOY_FAILED:
            assert time.monotonic() < deadline, app
            time.sleep(0.3)
        assert "unknown configuration key 'max_runing'; did you mean max_running" in app.message
