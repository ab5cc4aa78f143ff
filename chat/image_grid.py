"""How many pads an image takes in the prompt. Arithmetic only; pixels are the business of whoever decodes the image.

Source: K3's image processor (patch 14, merge 2, at most 65,536 patches an image and 512 patches a side).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from chat.types import ImageSize

PATCH = 14
MERGED = 2 * PATCH
MAX_PATCHES = 65_536
MAX_SIDE = 512 * PATCH


@dataclass(frozen=True, slots=True)
class ImageGrid:
    """Sizes in pixels: `new_*` after the resize, `pad_*` the zero padding at the right and the bottom."""

    width: int
    height: int
    new_width: int
    new_height: int
    pad_width: int
    pad_height: int

    @property
    def thw(self) -> tuple[int, int, int]:
        """(frames, patch rows, patch columns), before merging 2 × 2."""
        return 1, (self.new_height + self.pad_height) // PATCH, (self.new_width + self.pad_width) // PATCH

    @property
    def pads(self) -> int:
        _, rows, columns = self.thw
        return rows * columns // 4

    @property
    def size(self) -> ImageSize:
        return ImageSize(self.width, self.height, self.pads)


def image_grid(width: int, height: int) -> ImageGrid:
    """The grid of an image of `width` × `height` pixels, both at least 1."""
    patches = max(1, width // PATCH) * max(1, height // PATCH)
    scale = min(1.0, math.sqrt(MAX_PATCHES / patches), MAX_SIDE / width, MAX_SIDE / height)
    new_width = min(MAX_SIDE, max(1, int(width * scale)))
    new_height = min(MAX_SIDE, max(1, int(height * scale)))
    return ImageGrid(width, height, new_width, new_height, -new_width % MERGED, -new_height % MERGED)
