"""Where NVIDIA's and AMD's GPUs want different numbers from one source: shared memory, and how fp32 is multiplied."""

from __future__ import annotations

import triton

AMD_STAGES = 2  # what fits the 64 KiB that a workgroup may have on gfx942


def is_amd() -> bool:
    """Whether kernels are compiled for an AMD GPU; the interpreter has no target."""
    return not triton.knobs.runtime.interpret and triton.runtime.driver.active.get_current_target().backend == "hip"


def fitting_stages(stages: int) -> int:
    """How many tiles a loop may hold at once, of `stages` wanted."""
    return min(stages, AMD_STAGES) if is_amd() else stages


def fp32_precision() -> str:
    """The input precision of a product that keeps fp32's accuracy."""
    return "ieee" if is_amd() else "tf32x3"
