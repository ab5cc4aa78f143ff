"""Every kernel compiled for AMD's MI300 and MI350 without a card: `python -m benchmarks.compile_amd [gfx942 gfx950]`.

The kernels' own wrappers run at K3's shapes on tensors without memory, under a driver that compiles as the real one would and launches
nothing. The table: shared memory (LDS) asked for against what a workgroup may have, and registers as the compiler reports them. It shows
that the source compiles and would be accepted; neither results nor speed. The exit status is 1 when a kernel fails.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from benchmarks.report import Row, publish
from kernels.attn_res_norm import attn_res_norm
from kernels.experts import PackedExperts
from kernels.experts_triton import TILES, Tile
from kernels.experts_triton import launch as experts
from kernels.kda_prefill import kda_prefill
from kernels.kda_step import kda_step
from kernels.layers import copy_layers
from kernels.linear import linear
from kernels.mla import mla_decode, mla_prefill_expanded
from kernels.moe import route, situ
from kernels.norms import gated_rms_norm, rms_norm
from kernels.short_conv import short_conv

LDS_BYTES: Mapping[str, int] = {"gfx942": 64 << 10, "gfx950": 160 << 10}
HEADS, WIDTH, HIDDEN, LATENT, INNER, EXPERTS, TOP_K = 96, 128, 7168, 3584, 3072, 896, 16


class CompileOnly(DriverBase):
    """Triton's view of a card that is not there: kernels are compiled and checked against its limits, launches do nothing."""

    def __init__(self, device: int, arch: str) -> None:
        self.device, self.target = device, GPUTarget("hip", arch, 64)
        self.utils = SimpleNamespace(
            get_device_properties=lambda _: {"max_shared_mem": LDS_BYTES[arch]},
            load_binary=lambda *_: (None, None, 0, 0, 1024),
            unload_module=lambda _: None,
        )

    def launcher_cls(self, _source: object, _metadata: object) -> Callable[..., None]:
        return lambda *_: None

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.device  # Triton keeps what it compiled by this number

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("nothing runs here")


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def fp32(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.float32)


def index(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.int64)


def packed(inputs: int, outputs: int) -> PackedExperts:
    return PackedExperts(
        empty(EXPERTS, inputs // 64, outputs, 16, dtype=torch.int16), empty(EXPERTS, inputs // 128, outputs, dtype=torch.int32)
    )


def kda_prompt(segment: int) -> object:
    tokens, c = 8192, HEADS * WIDTH
    q, k, v = empty(tokens, 3, HEADS, WIDTH).unbind(1)
    rows = (empty(tokens, c), empty(tokens, HEADS), fp32(HEADS), fp32(c), fp32(4, HEADS, WIDTH, WIDTH))
    return kda_prefill(q, k, v, *rows, index(2), index(2), index(3), -5.0, segment, "triton")


def kda_decode(steps: int) -> object:
    c = HEADS * WIDTH
    rows = (empty(steps, 3 * c), empty(steps, c), empty(steps, HEADS), empty(steps, c))
    weights = (fp32(3 * c, 1, 4), fp32(HEADS), fp32(c), fp32(WIDTH))
    pools = (empty(8, 3, 3 * c), fp32(8, HEADS, WIDTH, WIDTH))
    return kda_step(*rows, *weights, *pools, index(1), index(1, steps), -5.0, 1e-5, "triton")


def moe(tile: Tile) -> object:
    tokens = 64
    choice = (empty(tokens, TOP_K, dtype=torch.int32), fp32(tokens, TOP_K))
    return experts(empty(tokens, LATENT), *choice, packed(LATENT, 2 * INNER), packed(INNER, LATENT), 0, EXPERTS, 4.0, 25.0, tile)


def mla_step(heads: int) -> object:
    return mla_decode(empty(8, heads, 576), empty(512, 64, 576), index(8, 16), index(8), 512, 192**-0.5, "triton")


def mla_prompt() -> object:
    tokens = 8192
    keys = (empty(tokens, HEADS, 256), empty(tokens, 64), index(2), index(2))
    return mla_prefill_expanded(empty(tokens, HEADS, 192), *keys, 128, 192**-0.5, "triton")


def residual(tokens: int) -> object:
    rows = (empty(8, tokens, HIDDEN), empty(tokens, HIDDEN), empty(tokens, HIDDEN))
    return attn_res_norm(*rows, empty(HIDDEN), empty(1, HIDDEN), empty(HIDDEN), 1e-5, "triton")


def convolve() -> object:
    c = 3 * HEADS * WIDTH
    return short_conv(empty(8192, c), fp32(c, 1, 4), empty(4, 3, c), index(2), index(2), index(3), "triton")


CASES: dict[str, Callable[[], object]] = {
    "KDA prefill": lambda: kda_prompt(0),
    "KDA prefill in segments": lambda: kda_prompt(512),
    "KDA decode": lambda: kda_decode(1),
    "KDA decode, 4 drafted tokens": lambda: kda_decode(4),
    **{f"experts, tiles of {tile.bn} + {tile.more}": lambda tile=tile: moe(tile) for _, tile in TILES},
    "MLA decode, 96 heads": lambda: mla_step(96),
    "MLA decode, 12 heads": lambda: mla_step(12),
    "MLA prefill": mla_prompt,
    "attention residual, 64 tokens": lambda: residual(64),
    "attention residual, 8192 tokens": lambda: residual(8192),
    "routing, 64 tokens": lambda: route(fp32(64, EXPERTS), fp32(EXPERTS), TOP_K, True, 1.0, "triton"),
    "routing, 8192 tokens": lambda: route(fp32(8192, EXPERTS), fp32(EXPERTS), TOP_K, True, 1.0, "triton"),
    "short conv": convolve,
    "RMSNorm": lambda: rms_norm(empty(64, HIDDEN), empty(HIDDEN), 1e-5, "triton"),
    "gated RMSNorm": lambda: gated_rms_norm(empty(64, HEADS, WIDTH), empty(64, HEADS, WIDTH), fp32(WIDTH), 1e-5, "triton"),
    "SiTU": lambda: situ(empty(64, INNER), empty(64, INNER), 4.0, 25.0, "triton"),
    "one row": lambda: linear(empty(1, HIDDEN), empty(LATENT, HIDDEN), "triton"),
    "state copy": lambda: copy_layers(fp32(69, 3, HEADS, WIDTH, WIDTH)[:, 1], fp32(69, HEADS, WIDTH, WIDTH), "triton"),
}


def compiled(case: Callable[[], object]) -> tuple[int, int, int]:
    """Compile what the case launches: the most LDS bytes, vector registers and spilled registers that one of its kernels takes."""
    found: list[tuple[int, int, int]] = []

    def listen(*, metadata: dict[str, Any], metadata_group: dict[str, str], **_: object) -> None:
        assembly = next(Path(path).read_text() for path in metadata_group.values() if path.endswith(".amdgcn"))
        registers, spilled = (int(match) for match in re.findall(r"\.(?:vgpr_count|vgpr_spill_count): +(\d+)", assembly))
        found.append((metadata["shared"], registers, spilled))

    knobs.compilation.listener = listen
    try:
        case()
    finally:
        knobs.compilation.listener = None
    lds, registers, spilled = (max(column) for column in zip(*found, strict=True))
    return lds, registers, spilled


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", default=list(LDS_BYTES), help=f"some of {', '.join(LDS_BYTES)}")
    targets = parser.parse_args().targets
    rows: list[Row] = []
    failed = 0
    for device, arch in enumerate(targets):
        triton.runtime.driver.set_active(CompileOnly(device, arch))
        for work, case in CASES.items():
            try:
                lds, registers, spilled = compiled(case)
            except (CompilationError, OutOfResources, RuntimeError) as error:
                failed += 1
                print(f"{arch} {work}: {type(error).__name__}: {str(error).strip().splitlines()[-1]}", flush=True)
                continue
            peers = {"vector registers": registers, "spilled": spilled}
            rows.append(Row(work=f"{arch} {work}", ours=lds / 1024, unit="KiB", target=LDS_BYTES[arch] / 1024, peers=peers))
            print(f"{arch} {work}: {lds / 1024:.1f} KiB, {registers} registers, {spilled} spilled", flush=True)
    publish("compile_amd", rows, packages=("torch", "triton"), notes=f"{len(rows)} compile, {failed} do not; nothing was run")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
