from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat.image_grid import MAX_PATCHES, MERGED, image_grid
from chat.segments import SegmentWriter
from chat.tokenizer import Tokenizer
from chat.types import ImageSize
from tests.chat.conftest import goldens


@pytest.mark.parametrize("case", goldens("images"))
def test_grid(case: dict[str, Any]) -> None:
    grid = image_grid(case["width"], case["height"])
    assert (grid.new_width, grid.new_height) == (case["new_width"], case["new_height"])
    assert (grid.pad_width, grid.pad_height) == (case["pad_width"], case["pad_height"])
    assert list(grid.thw) == case["grid_thw"]
    assert grid.pads == case["num_tokens"]


@pytest.mark.parametrize("case", goldens("images"))
def test_prompt(case: dict[str, Any], tiny: Tokenizer) -> None:
    writer = SegmentWriter(tiny)
    start = writer.image(ImageSize(case["width"], case["height"], 1))
    assert writer.ids == case["ids_tiny_one_pad"]
    assert writer.segments[0].text == case["image_prompt_one_pad"]
    assert writer.ids[start] == tiny.media_pad


@pytest.mark.parametrize("case", goldens("images"))
def test_prompt_in_the_published_vocabulary(case: dict[str, Any], published: Tokenizer) -> None:
    writer = SegmentWriter(published)
    writer.image(image_grid(case["width"], case["height"]).size)
    pads = case["num_tokens"]
    assert writer.ids == [*case["ids_real_one_pad"][:-2], *[published.media_pad] * pads, published.media_end]
    assert len(writer.ids) == case["prompt_tokens_for_image"]


@given(st.integers(1, 20_000), st.integers(1, 20_000))
def test_limits(width: int, height: int) -> None:
    grid = image_grid(width, height)
    assert (grid.new_width + grid.pad_width) % MERGED == 0
    assert (grid.new_height + grid.pad_height) % MERGED == 0
    assert 1 <= grid.pads <= MAX_PATCHES // 3  # the padding may add a little to a quarter of the patches
