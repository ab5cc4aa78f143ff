"""Options that several commands share, and how they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import ValidationError

from app.config import ServiceConfig
from app.terminal import clear_errors, refuse

URL = "http://127.0.0.1:8000/v1"

Settings = Annotated[
    list[str] | None, typer.Argument(help="ServiceConfig fields as key=value; `k3 config` lists them", metavar="[KEY=VALUE]...")
]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML of the same fields; key=value words win over it")]
Json = Annotated[bool, typer.Option("--json", help="print JSON, one object a line")]
Url = Annotated[str, typer.Option(help="base URL of the server's OpenAI API")]
Key = Annotated[str | None, typer.Option(help="API key, or `file:PATH` to read it from a file")]


def read_config(settings: list[str], file: Path | None) -> ServiceConfig:
    """`key=value` words over a YAML file of the same keys (a bare mapping, or Serve's config file with applications[0].args)."""
    values: dict[str, Any] = {}
    if file is not None:
        try:
            loaded = yaml.safe_load(file.read_text()) or {}
            values = loaded["applications"][0].get("args", {}) if "applications" in loaded else loaded
        except OSError as error:
            refuse(f"{file}: {error.strerror}")
        except (yaml.YAMLError, LookupError, TypeError, AttributeError) as error:
            refuse(f"{file}: expected a mapping of configuration keys, or Serve's config file with applications[0].args: {error}")
        if not isinstance(values, dict):
            refuse(f"{file}: expected a mapping of configuration keys, got {type(values).__name__}")
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


def read_key(value: str | None) -> str | None:
    """Secrets by reference: `file:PATH` keeps them out of the shell's history and the process list."""
    if value is None or not value.startswith("file:"):
        return value
    with clear_errors():
        return Path(value.removeprefix("file:")).read_text().strip()


def authorization(value: str | None) -> dict[str, str]:
    key = read_key(value)
    return {"authorization": f"Bearer {key}"} if key else {}
