"""MXFP4: two E2M1 codes a byte (low nibble = even column), one E8M0 scale (2^(byte - 127)) per 32 consecutive input columns.

Source: OCP Microscaling Formats v1.0; nibble order from compressed-tensors' packer (facts on K3's architecture, section 9).
Dequantised values are exact in bf16.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kernels.checks import check_shape

BLOCK = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def dequantise(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """packed [..., in/2] uint8, scale [..., in/32] uint8 -> [..., in] in `dtype`. Scale byte 255 is NaN."""
    check_shape("scale", scale, *packed.shape[:-1], packed.shape[-1] * 2 // BLOCK)
    pairs = _pairs(packed.device).index_select(0, packed.flatten().int()).view(torch.float32)
    blocks = pairs.view(*scale.shape, BLOCK) * scale_values(scale).unsqueeze(-1)
    return blocks.view(*packed.shape[:-1], packed.shape[-1] * 2).to(dtype)


def scale_values(scale: Tensor) -> Tensor:
    """E8M0 bytes -> fp32 multipliers of the same shape."""
    return _scales(scale.device).index_select(0, scale.flatten().int()).view(scale.shape)


@functools.cache
def _pairs(device: torch.device) -> Tensor:
    """[256] int64: the fp32 bits of a byte's two values, low nibble first; one look-up a byte. A constant, made once a device."""
    table = torch.tensor(E2M1, dtype=torch.float32, device=device)
    return torch.stack((table.repeat(16), table.repeat_interleave(16)), 1).view(torch.int64).flatten()


@functools.cache
def _scales(device: torch.device) -> Tensor:
    """[256] fp32: powers of two, NaN for byte 255. A constant, made once a device."""
    return torch.tensor([*(2.0 ** (byte - 127) for byte in range(255)), float("nan")], dtype=torch.float32, device=device)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [..., in] -> (packed [..., in/2] uint8, scale [..., in/32] uint8): nearest code, ties to the even mantissa.

    The scale is the OCP rule 2^(floor(log2(max)) - 2), so values above 6 * scale saturate.
    """
    if weight.shape[-1] % BLOCK:
        raise ValueError(f"weight: {weight.shape[-1]} columns, expected a multiple of {BLOCK}")
    blocks = weight.float().reshape(*weight.shape[:-1], -1, BLOCK)
    largest = blocks.abs().amax(-1)
    exponents = torch.frexp(largest).exponent - 1 - 2  # E2M1's largest exponent is 2
    scale = (exponents + 127).clamp(0, 254).masked_fill(largest == 0, 127).to(torch.uint8)
    scaled = blocks / scale_values(scale).unsqueeze(-1)
    # midpoints between neighbouring magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6; a tie goes to the code with mantissa bit 0 (even code)
    bounds = torch.tensor((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), device=weight.device)
    magnitude = scaled.abs()
    low = torch.bucketize(magnitude, bounds)  # ties to the lower code
    high = torch.bucketize(magnitude, bounds, right=True)  # ties to the upper code
    code = torch.where(low % 2 == 0, low, high) + 8 * (scaled < 0)
    code = code.reshape(*weight.shape[:-1], -1, 2)
    return (code[..., 0] + 16 * code[..., 1]).to(torch.uint8), scale
