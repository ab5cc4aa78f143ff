"""`k3`, also `python -m app`. Each command parses its words here and does its work elsewhere."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import yaml
from pydantic import ValidationError
from rich.console import Console

from app import serve_modes
from app.config import ServiceConfig
from engine.errors import K3Error

cli = typer.Typer(
    name="k3",
    help="Kimi K3 on your own accelerators, behind Ray Serve.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console(stderr=True)


def refuse(message: str) -> NoReturn:
    console.print(f"[red]k3: {message}[/red]", highlight=False, markup=True, soft_wrap=True)
    raise typer.Exit(2)


def read_config(settings: list[str], file: Path | None) -> ServiceConfig:
    """`key=value` words over a YAML file of the same keys (a bare mapping, or Serve's config file with applications[0].args)."""
    values: dict[str, Any] = {}
    if file is not None:
        try:
            loaded = yaml.safe_load(file.read_text()) or {}
        except (OSError, yaml.YAMLError) as error:
            refuse(f"{file}: {error}")
        values = loaded.get("applications", [{}])[0].get("args", {}) if "applications" in loaded else loaded
    for word in settings:
        key, equals, value = word.partition("=")
        if not equals:
            refuse(f"expected key=value, got {word!r} (for example: model=/data/kimi-k3 tp=8 ep=64)")
        values[key] = value
    try:
        return ServiceConfig.model_validate(values)
    except ValidationError as error:
        refuse(
            "; ".join(
                f"{'.'.join(str(p) for p in e['loc']) or 'configuration'}: {e['msg'].removeprefix('Value error, ')}" for e in error.errors()
            )
        )


Settings = Annotated[
    list[str] | None, typer.Argument(help="ServiceConfig fields as key=value; `k3 config` lists them", metavar="[KEY=VALUE]...")
]


@cli.command()
def config(as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """List every field of the configuration: name, default, meaning."""
    from rich.table import Table

    fields = ServiceConfig.model_fields
    if as_json:
        print(
            json.dumps(
                {name: {"default": str(f.get_default(call_default_factory=True)), "help": f.description} for name, f in fields.items()}
            )
        )
        return
    table = Table("field", "default", "meaning", title="ServiceConfig: `k3 serve KEY=VALUE …`, or `args:` of ray_config.yaml")
    for name, field in fields.items():
        table.add_row(name, str(field.get_default(call_default_factory=True)), field.description or "")
    Console().print(table)


@cli.command()
def serve(
    settings: Settings = None,
    file: Annotated[Path | None, typer.Option("--config", help="YAML of the same fields")] = None,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on")] = 8000,
    mode: Annotated[str, typer.Option(help="Serve's data path: haproxy | throughput | default")] = "haproxy",
) -> None:
    """Serve the model on this machine's Ray (started if none runs). Stop with Ctrl-C."""
    from app.serving import run

    if mode not in serve_modes.MODES:
        refuse(f"--mode {mode!r}: expected one of {', '.join(serve_modes.MODES)}")
    serve_modes.switch_on(mode)
    try:
        run(read_config(settings or [], file), host=host, port=port)
    except K3Error as error:
        refuse(str(error))


@cli.command()
def score(
    model: Annotated[Path, typer.Option(help="checkpoint directory")],
    prompts: Annotated[Path, typer.Option(help="JSON: name → token ids")],
    out: Annotated[Path, typer.Option(help="safetensors file to write: logits.<name> [T, vocab] float32")],
    tp: Annotated[int, typer.Option(min=1, help="shards that split the heads")] = 1,
    ep: Annotated[int | None, typer.Option(min=1, help="shards in all, a multiple of tp")] = None,
    chunk: Annotated[int, typer.Option(min=1, help="tokens a step")] = 512,
    device: Annotated[str, typer.Option(help="auto | cpu | cuda")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto | float32 | bfloat16")] = "auto",
) -> None:
    """Logits of whole prompts, by the same shards that serve."""
    from app.serving import score_prompts

    serve_modes.switch_on("default")
    words = [f"model={model}", f"tp={tp}", f"device={device}", f"dtype={dtype}", *([f"ep={ep}"] if ep else [])]
    try:
        asyncio.run(score_prompts(read_config(words, None), prompts, out, chunk))
    except K3Error as error:
        refuse(str(error))


def main() -> None:
    cli()


if __name__ == "__main__":
    sys.exit(main())
