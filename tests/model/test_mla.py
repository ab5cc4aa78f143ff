"""The two forms of MLA's prefill give the same."""

from __future__ import annotations

import pytest
import torch

from model.batch import Segment, build_batch
from model.mla import MLA
from model.runner import ModelRunner


@pytest.mark.parametrize("held", [1 << 30, 1])
def test_expanded_is_absorbed(runner: ModelRunner, held: int) -> None:
    """Ragged rows behind longer histories, one of them decoding; all heads at once, and one at a time."""
    config, generator = runner.model.config, torch.Generator().manual_seed(1)
    layer = runner.model.get_submodule(f"layers.{config.mla_layers[0]}.self_attn")
    assert isinstance(layer, MLA)
    segments = [
        Segment(tokens=[1], start=30, slot=0, pages=(0, 1)),
        Segment(tokens=[1] * 5, start=40, slot=1, pages=(2, 5, 3)),
        Segment(tokens=[1] * 33, start=0, slot=2, pages=(4, 6, 7)),
    ]
    batch = build_batch(segments, [39], 16, "cpu")
    latents = torch.randn(8, 16, config.latent_dim, generator=generator)
    q = torch.randn(38, layer.heads, layer.nope + layer.rope, generator=generator)
    with torch.inference_mode():
        expanded, absorbed = (layer.prefill(q, batch, latents, expanded=form, held=held) for form in (True, False))
    torch.testing.assert_close(expanded, absorbed, atol=1e-4, rtol=1e-4)
