"""Accelerators as the planner knows them: public figures, each row with its source, every one of them the operator's to override."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One device. Bytes, bytes a second, dense FLOP/s; links count both directions, as vendors quote them."""

    memory: float
    bandwidth: float
    bf16_flops: float
    link: float  # scale-up link inside a node
    source: str

    def __post_init__(self) -> None:
        for name in ("memory", "bandwidth", "bf16_flops", "link"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
                raise ConfigError(f"{name}: a positive number was expected, found {value!r}")
        if not isinstance(self.source, str) or not self.source:
            raise ConfigError("source: where the figures come from was expected")


ACCELERATORS: Mapping[str, Accelerator] = MappingProxyType(
    {
        "A100-80": Accelerator(memory=80e9, bandwidth=2.04e12, bf16_flops=312e12, link=600e9, source="vendor datasheet, SXM"),
        "H100-80": Accelerator(memory=80e9, bandwidth=3.35e12, bf16_flops=989e12, link=900e9, source="vendor datasheet, SXM"),
        "H200": Accelerator(memory=141e9, bandwidth=4.8e12, bf16_flops=989e12, link=900e9, source="vendor datasheet, SXM"),
        "B200": Accelerator(
            memory=180e9, bandwidth=8e12, bf16_flops=2250e12, link=1800e9, source="vendor; docs.vultr.com inference cookbook"
        ),
        "B300": Accelerator(
            memory=288e9, bandwidth=8e12, bf16_flops=2250e12, link=1800e9, source="glennklockwood.com/garden/processors/B300"
        ),
        "GB300": Accelerator(
            memory=288e9, bandwidth=8e12, bf16_flops=2250e12, link=1800e9, source="acecloud.ai HGX B300; the same GPU as B300"
        ),
        "MI300X": Accelerator(memory=192e9, bandwidth=5.3e12, bf16_flops=1307e12, link=896e9, source="vendor datasheet"),
        "MI325X": Accelerator(memory=256e9, bandwidth=6e12, bf16_flops=1307e12, link=896e9, source="vendor datasheet"),
        "MI355X": Accelerator(
            memory=288e9, bandwidth=8e12, bf16_flops=2500e12, link=1075e9, source="vendor; boston.co.uk, 2025-08 (about)"
        ),
    }
)


def read_accelerators(path: str | Path) -> dict[str, Accelerator]:
    """The table with the rows of a YAML or JSON file over it: name → fields; a known name may give only what differs, and its source.

    Raises `ConfigError` naming file, row and field.
    """
    try:
        rows = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    if not isinstance(rows, dict):
        raise ConfigError(f"{path}: a mapping from accelerator name to its figures was expected, found {type(rows).__name__}")
    table = dict(ACCELERATORS)
    for name, row in rows.items():
        table[str(name)] = _row(f"{path}: {name}", row, table.get(str(name)))
    return table


def _row(where: str, row: Any, known: Accelerator | None) -> Accelerator:
    fields = [f.name for f in dataclasses.fields(Accelerator)]
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: a mapping of {', '.join(fields)} was expected")
    if unknown := [str(k) for k in row if k not in fields]:
        raise ConfigError(f"{where}: unknown {', '.join(unknown)}; expected {', '.join(fields)}")
    needed = ["source"] if known else fields
    if missing := [f for f in needed if f not in row]:
        raise ConfigError(f"{where}: {', '.join(missing)} is missing")
    try:
        return dataclasses.replace(known, **row) if known else Accelerator(**row)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
