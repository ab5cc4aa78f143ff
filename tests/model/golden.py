"""The golden checkpoints: what the reference implementation gave for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

DATA = Path(__file__).resolve().parent.parent / "data" / "k3"
SETS = ("tiny-a", "tiny-b", "tiny-c")
PROMPTS = ("p1", "r5", "r33", "r64", "r65", "p70", "p200")
LOGITS_TOLERANCE = 2e-3  # on logits of standard deviation 2.5
STATE_TOLERANCE = 2e-4


@dataclass(frozen=True)
class Golden:
    """One set: its model directory and its expected tensors by `<prompt>.<item>`."""

    name: str
    model: Path
    expected: dict[str, Tensor]

    def prompt(self, name: str) -> tuple[int, ...]:
        return tuple(self.expected[f"{name}.input_ids"].flatten().tolist())

    def greedy(self, name: str) -> list[int]:
        return self.expected[f"{name}.greedy_ids"].tolist()

    def logits(self, name: str) -> Tensor:
        return self.expected[f"{name}.logits"]

    def kda(self, prompt: str, layer: int) -> tuple[Tensor, Tensor]:
        """Recurrent state [heads, K, V] and conv state [columns, q|k|v] as the pools hold them."""
        at = f"{prompt}.layer.{layer}."
        conv = torch.cat([self.expected[f"{at}conv_{n}"] for n in "qkv"]).T
        return self.expected[at + "kda_state"], conv


def golden(name: str) -> Golden:
    return Golden(name, DATA / name / "model", load_file(DATA / name / "expected.safetensors"))
