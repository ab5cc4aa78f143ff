"""`k3`, also `python -m app`. Each command parses its words here and does its work elsewhere."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from app import doctor_command, plan_command, serve_modes, sessions_command
from app.config import ServiceConfig
from app.options import URL, ConfigFile, Json, Key, Settings, Url, authorization, read_config, read_key
from app.terminal import clear_errors, hold_conversation, print_reply, print_table, refuse, stderr

cli = typer.Typer(
    name="k3",
    help="""Kimi K3 on your own accelerators, behind Ray Serve.

    First steps: `k3 serve` in one terminal (without arguments it serves a tiny K3 whose answers are noise), `k3 chat Hello` in another.
    `k3 config` lists all that `k3 serve KEY=VALUE …` understands.""",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
cli.add_typer(plan_command.commands)  # plan, cost
cli.add_typer(doctor_command.commands)
cli.add_typer(sessions_command.commands)

TokenizerDir = Annotated[Path | None, typer.Option(help="directory with tiktoken.model and tokenizer_config.json; none = the tiny one")]
CaseFile = Annotated[str, typer.Argument(help="a JSON object, a list of them, or JSON lines; `-` reads standard input", metavar="FILE")]


class Mode(StrEnum):
    """Serve's data paths; see `app.serve_modes`."""

    HAPROXY = "haproxy"
    THROUGHPUT = "throughput"
    DEFAULT = "default"


@cli.command()
def config(as_json: Json = False) -> None:
    """List every field of the configuration: name, default, meaning."""
    rows = [
        (name, str(field.get_default(call_default_factory=True)), field.description or "")
        for name, field in ServiceConfig.model_fields.items()
    ]
    print_table(
        "ServiceConfig: `k3 serve KEY=VALUE …`, `serve run app:deployment KEY=VALUE …`, or `args:` of ray_config.yaml",
        ("field", "default", "meaning"),
        rows,
        as_json=as_json,
    )


@cli.command()
def serve(
    settings: Settings = None,
    file: ConfigFile = None,
    host: Annotated[str, typer.Option(help="address to listen on; 0.0.0.0 = every interface")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on", min=1, max=65535)] = 8000,
    mode: Annotated[Mode, typer.Option(help="Serve's data path; haproxy is the fastest")] = Mode.HAPROXY,
) -> None:
    """Serve the model on this machine's Ray (started if none runs). Stop with Ctrl-C.

    Examples: `k3 serve` · `k3 serve model=/data/kimi-k3 tp=8 ep=64 cache_bytes=20GiB` · `k3 serve --config ray_config.yaml --port 9000`
    """
    settled = read_config(settings or [], file)
    from app.resolve import find_checkpoint, resolve

    with clear_errors():  # what can be refused is refused before Ray is started, or even imported
        checkpoint = find_checkpoint(settled)
        resolve(settled, gpus=settled.shards * settled.replicas, checkpoint=checkpoint)
        serve_modes.check_free(host, port)
    serve_modes.switch_on(mode.value)
    from app.serving import run

    with clear_errors():
        run(settled, checkpoint, host=host, port=port)


@cli.command()
def chat(
    message: Annotated[list[str] | None, typer.Argument(help="what to say; none = a conversation, or standard input if piped")] = None,
    url: Url = URL,
    model: Annotated[str | None, typer.Option(help="model name; none = the server's own")] = None,
    system: Annotated[str | None, typer.Option(help="system prompt")] = None,
    session: Annotated[str | None, typer.Option(help="session id: the server keeps the conversation, also between calls")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="token budget of a reply")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 = greedy")] = None,
    effort: Annotated[str | None, typer.Option(help="reasoning effort: low | high | max")] = None,
    thinking: Annotated[bool, typer.Option(help="let the model think first")] = True,
    api_key: Key = None,
) -> None:
    """Talk to a running server: one message, or a conversation until Ctrl-D.

    Examples: `k3 chat Hello` · `k3 chat --session trip "Where were we?"` · `git diff | k3 chat --system "Review this."` · `k3 chat`
    """
    import httpx

    from app.talk import TIMEOUT, Talk

    options = {"max_tokens": max_tokens, "temperature": temperature, "reasoning_effort": effort}
    body: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if not thinking:
        body["thinking"] = {"type": "disabled"}

    async def converse() -> None:
        async with httpx.AsyncClient(base_url=url, headers=authorization(api_key), timeout=TIMEOUT) as client:
            talk = Talk(client=client, model=model, system=system, session=session, options=body)
            if message:
                await print_reply(talk, " ".join(message))
            elif not sys.stdin.isatty():
                await print_reply(talk, sys.stdin.read())
            else:
                await hold_conversation(talk, _line)

    with clear_errors():
        asyncio.run(converse())


@cli.command()
def bench(
    url: Url = URL,
    model: Annotated[str, typer.Option(help="model name")] = "kimi-k3",
    streams: Annotated[
        list[int] | None, typer.Option(min=1, help="concurrent streams; repeat for several rows [default: 1, 8, 32]")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="requests for each stream")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="tokens of a prompt (random ids)")] = 128,
    max_tokens: Annotated[int, typer.Option(min=1, help="tokens of a reply")] = 64,
    vocab_size: Annotated[int, typer.Option(min=2, help="prompts are random ids below half of it")] = 1024,
    through_chat: Annotated[
        bool, typer.Option("--chat", help="measure /chat/completions with texts instead of /completions with ids")
    ] = False,
    seed: Annotated[int, typer.Option(help="of the prompts")] = 0,
    out: Annotated[Path | None, typer.Option(help="also write the rows to this JSON file")] = None,
    as_json: Json = False,
    api_key: Key = None,
) -> None:
    """Measure a running server: time to first token, gaps between tokens, tokens a second.

    Example: `k3 bench --streams 1 --streams 64 --prompt-tokens 2000 --max-tokens 200`
    """
    from app.bench import Load, run_load

    rows: list[dict[str, Any]] = []
    key = read_key(api_key)
    for count in streams or [1, 8, 32]:
        load = Load(
            url=url.rstrip("/"),
            model=model,
            streams=count,
            requests=count * requests,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            vocab_size=vocab_size,
            chat=through_chat,
            api_key=key,
            seed=seed,
        )
        outcome = asyncio.run(run_load(load))
        if not outcome.streams:
            refuse(f"all {len(outcome.failures)} requests failed, the first with {outcome.failures[0]}")
        if outcome.failures:
            stderr.print(f"{len(outcome.failures)} of {load.requests} requests failed, the first with {outcome.failures[0]}", markup=False)
        rows.append({"streams": count, **outcome.figures()})
    title = f"{url}: {prompt_tokens} prompt + {max_tokens} new tokens"
    print_table(title, list(rows[0]), [list(row.values()) for row in rows], as_json=as_json)
    if out is not None:
        with clear_errors():
            out.write_text(
                json.dumps({"url": url, "prompt_tokens": prompt_tokens, "max_tokens": max_tokens, "rows": rows}, indent=2) + "\n"
            )
    if any(row["failures"] for row in rows):
        raise typer.Exit(1)


@cli.command()
def render(file: CaseFile, tokenizer: TokenizerDir = None, as_json: Json = False) -> None:
    """Show what the model sees of a chat request: the text with its control tokens, and the ids.

    FILE holds a request as a client sends it (messages, tools, tool_choice, response_format, …). With --json, each line also has the
    segments (control or not) and the boundaries that the prefix cache uses.
    """
    from chat.cases import render_case

    def show(result: Mapping[str, Any]) -> str:
        return f"{result['text']}\n\n{len(result['ids'])} ids: {' '.join(map(str, result['ids']))}"

    _each_case(file, tokenizer, render_case, show, as_json)


@cli.command()
def parse(file: CaseFile, tokenizer: TokenizerDir = None, as_json: Json = False) -> None:
    """Show what the client gets of a model's reply: reasoning, content, tool calls, finish reason.

    FILE holds `{"ids": […]}`, with `"request": {"generation_prefix": "response"}` when the prompt left that channel open.
    """
    from chat.cases import parse_case

    def show(result: Mapping[str, Any]) -> str:
        calls = [f"tool call: {call['name']} {call['arguments']}" for call in result["tool_calls"]]
        return "\n".join(
            [f"reasoning: {result['reasoning']}", f"content: {result['content']}", *calls, f"finish: {result['finish_reason']}"]
        )

    _each_case(file, tokenizer, parse_case, show, as_json)


@cli.command()
def score(
    model: Annotated[Path, typer.Option(help="checkpoint directory")],
    prompts: Annotated[Path, typer.Option(help="JSON: name → token ids")],
    out: Annotated[Path, typer.Option(help="safetensors file to write: logits.<name> [T, vocab] float32")],
    tp: Annotated[int, typer.Option(min=1, help="shards that split the heads")] = 1,
    ep: Annotated[int | None, typer.Option(min=1, help="shards in all, a multiple of tp; none = tp")] = None,
    chunk: Annotated[int, typer.Option(min=1, help="tokens a step")] = 512,
    device: Annotated[str, typer.Option(help="auto | cpu | cuda")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto | float32 | bfloat16")] = "auto",
) -> None:
    """Write the logits of whole prompts, computed by the same shards that serve: to compare checkpoints, shardings, machines.

    Example: `k3 score --model /data/kimi-k3 --prompts prompts.json --out logits.safetensors --tp 8 --ep 64`
    """
    words = [f"model={model}", f"tp={tp}", f"device={device}", f"dtype={dtype}", *([f"ep={ep}"] if ep else [])]
    settled = read_config(words, None)
    from app.resolve import find_checkpoint, resolve
    from app.score import read_prompts

    with clear_errors():
        checkpoint = find_checkpoint(settled)
        named = read_prompts(prompts, resolve(settled, gpus=settled.shards, checkpoint=checkpoint).served.vocab_size)
    serve_modes.switch_on(Mode.DEFAULT.value)
    from app.serving import score_prompts

    with clear_errors():
        asyncio.run(score_prompts(settled, checkpoint, named, out, chunk))


def _each_case(
    file: str, tokenizer_dir: Path | None, work: Callable[..., dict[str, Any]], show: Callable[[Mapping[str, Any]], str], as_json: bool
) -> None:
    """Every case of the file; one that is refused is told in its place, and the exit code is then 1."""
    from chat.cases import read_cases
    from chat.tokenizer import Tokenizer
    from chat.types import ChatError

    with clear_errors():
        tokenizer = Tokenizer.from_dir(tokenizer_dir) if tokenizer_dir else Tokenizer.tiny()
        cases = read_cases(sys.stdin.read() if file == "-" else Path(file).read_text())
    refused = 0
    for number, case in enumerate(cases, start=1):
        try:
            result = work(case, tokenizer)
        except ChatError as error:
            refused += 1
            result = {"error": {"message": str(error), "param": error.param}}
        if as_json:
            print(json.dumps(result))
            continue
        if len(cases) > 1:
            print(f"--- case {number}{': ' + str(case['name']) if 'name' in case else ''}")
        if "error" in result:
            stderr.print(f"k3: {result['error']['param'] or 'case'}: {result['error']['message']}", markup=False, soft_wrap=True)
        else:
            print(show(result))
    if refused:
        raise typer.Exit(1)


def _line() -> str | None:
    """What the user types; None at the end of input."""
    try:
        return input("> ").strip()
    except EOFError:
        return None


def main() -> None:
    try:
        cli()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
