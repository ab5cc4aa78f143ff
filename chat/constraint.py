"""What travels with a request to the rank that samples."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Constraint:
    """Serialised as JSON in `GenerateRequest.constraint`."""

    grammar: str  # llguidance lark, control tokens by name
    trigger: Literal["think_left", "now"]  # think_left: the first id that leaves the think channel belongs to the grammar
    prefix: str = ""  # text of the answer that the prompt already holds (a message to be continued)

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Constraint:
        return cls(**json.loads(text))
