"""The embedded default: a tiny random K3 in the released layout, made once and kept under the user's cache folder."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from model.config import ModelConfig

SEED = 3


def ensure_default_model(cache: Path | None = None) -> Path:
    """Directory of the tiny checkpoint; deterministic, so every machine makes the same bytes. Safe against concurrent makers."""
    config = ModelConfig.tiny()
    root = cache or Path.home() / ".cache" / "k3-serve"
    target = root / f"tiny-{config.fingerprint()[:12]}-{SEED}"
    if not (target / "config.json").exists():
        from model.checkpoint import write_random_checkpoint  # torch, which the edge does without

        root.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix="making-", dir=root))
        write_random_checkpoint(made, config, SEED)
        try:
            os.rename(made, target)
        except OSError:  # somebody else was first; theirs is the same
            for file in made.iterdir():
                file.unlink()
            made.rmdir()
    return target
