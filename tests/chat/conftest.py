from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from chat.tokenizer import TINY_TOKENIZER_DIR, Tokenizer

# A shared machine has slow moments: no test may fail for the time it took.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

DATA = Path(__file__).resolve().parent.parent / "data" / "chat"
PUBLISHED = DATA.parents[3] / "shared" / "goldens" / "chat" / "real_vocabulary" / "tiktoken.model"


def goldens(name: str) -> list[Any]:
    """The cases of one golden file as pytest parameters named after them."""
    lines = (DATA / f"golden_{name}.jsonl").read_text(encoding="utf-8").strip().split("\n")
    cases = [json.loads(line) for line in lines]
    return [pytest.param(case, id=case.get("name", f"{case.get('width')}x{case.get('height')}")) for case in cases]


@pytest.fixture(scope="session")
def tiny() -> Tokenizer:
    return Tokenizer.tiny()


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The published ranks with the special slots at their offsets, as in a checkpoint's directory."""
    if not PUBLISHED.exists():
        pytest.skip("needs the published vocabulary (163,584 ranks), which is not part of this project")
    directory = tmp_path_factory.mktemp("published")
    (directory / "tiktoken.model").symlink_to(PUBLISHED)
    config = json.loads((TINY_TOKENIZER_DIR / "tokenizer_config.json").read_text())
    moved = {str(int(i) - 768 + 163_584): entry for i, entry in config["added_tokens_decoder"].items()}
    (directory / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": moved}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 163_586, "max_length": 1_048_576}))
    return Tokenizer.from_dir(directory)
