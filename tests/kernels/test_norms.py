"""RMSNorm and KDA's gated norm against their definitions."""

from __future__ import annotations

import pytest
import torch

from kernels.norms import gated_rms_norm, rms_norm


def test_rms_norm() -> None:
    x, weight = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)), torch.linspace(0.5, 2, 16)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 0.1).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 0.1).double(), expected, atol=1e-6, rtol=1e-6)
    assert rms_norm(x.bfloat16(), weight.bfloat16(), 0.1).dtype == torch.bfloat16


def test_gate_comes_after_the_norm() -> None:
    generator = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(3, 2, 16, generator=generator) for _ in range(2))
    weight = torch.linspace(0.5, 2, 16)
    expected = rms_norm(x, weight, 1e-5) / (1 + (-gate).exp())
    torch.testing.assert_close(gated_rms_norm(x, gate, weight, 1e-5), expected)
    assert gated_rms_norm(x, gate.bfloat16(), weight, 1e-5).dtype == torch.bfloat16


def test_misfits_are_named() -> None:
    with pytest.raises(ValueError, match=r"weight: shape \[15\], expected \[16\]"):
        rms_norm(torch.zeros(2, 16), torch.ones(15), 1e-5)
