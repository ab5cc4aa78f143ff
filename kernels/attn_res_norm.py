"""What stands between two sub-layers in one launch: add the last output to the running sum, mix the block sums, RMS-norm the mix.

Every source is read once: scores, softmax and mix run online over the sources. Source: facts on K3's architecture, sections 3 to 5.
"""

from __future__ import annotations

from torch import Tensor

from kernels.attn_res import attn_res
from kernels.backend import Backend, use_triton
from kernels.checks import check_device, check_shape
from kernels.norms import rms_norm


def attn_res_norm(
    blocks: Tensor,
    run: Tensor,
    added: Tensor | None,
    norm: Tensor,
    query: Tensor,
    out_norm: Tensor,
    eps: float,
    backend: Backend = "auto",
) -> Tensor:
    """run += added, in place (None: run is complete); -> RMSNorm(attn_res(blocks, run), out_norm) [T, D] in run's dtype.

    blocks [n, T, D] sealed block sums (n may be 0: no mix), run, added [T, D], norm, out_norm [D], query [1, D].
    """
    check_shape("blocks", blocks, None, *run.shape)
    check_shape("norm", norm, run.shape[-1])
    check_shape("query", query, 1, run.shape[-1])
    check_shape("out_norm", out_norm, run.shape[-1])
    check_device(run, blocks=blocks, norm=norm, query=query, out_norm=out_norm)
    if added is not None:
        check_shape("added", added, *run.shape)
        check_device(run, added=added)
    if use_triton(backend, run):
        from kernels.attn_res_norm_triton import launch

        return launch(blocks, run, added, norm, query, out_norm, eps)
    if added is not None:
        run += added
    mix = attn_res(blocks, run, norm, query, eps) if blocks.shape[0] else run
    return rms_norm(mix, out_norm, eps, "torch")
