"""MXFP4 bytes, nibble by nibble."""

from __future__ import annotations

import pytest
import torch

from kernels.mxfp4 import E2M1, dequantise, quantise, scale_values


def test_every_byte_low_nibble_first() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scale = torch.full((16, 1), 127, dtype=torch.uint8)
    expected = torch.tensor([[E2M1[b & 15], E2M1[b >> 4]] for b in range(256)]).view(16, 32)
    assert torch.equal(dequantise(packed, scale), expected)


def test_one_scale_per_32_input_columns() -> None:
    packed = torch.full((2, 32), 0x22, dtype=torch.uint8)  # all ones
    scale = torch.tensor([[127, 130], [120, 110]], dtype=torch.uint8)
    found = dequantise(packed, scale)
    assert found.shape == (2, 64)
    assert found[:, 0].tolist() == [1.0, 2.0**-7]
    assert found[:, 31].tolist() == [1.0, 2.0**-7]
    assert found[:, 32].tolist() == [8.0, 2.0**-17]


def test_scales_are_exact_powers_of_two() -> None:
    found = scale_values(torch.arange(256, dtype=torch.uint8))
    assert found[:255].double().tolist() == [2.0 ** (b - 127) for b in range(255)]
    assert found[255].isnan()


def test_exact_in_bf16() -> None:
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (3, 8, 32), generator=generator, dtype=torch.uint8)
    scale = torch.randint(100, 140, (3, 8, 2), generator=generator, dtype=torch.uint8)
    assert torch.equal(dequantise(packed, scale, torch.bfloat16).float(), dequantise(packed, scale))


def test_quantise_gives_back_what_fits() -> None:
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (8, 32), generator=generator, dtype=torch.uint8)
    packed[:, ::16] = 0x77  # each block has its largest magnitude, so its scale is determined
    packed[packed & 0x0F == 0x08] = 0x11  # no negative zeros
    packed[packed >> 4 == 0x08] = 0x11
    scale = torch.randint(100, 140, (8, 2), generator=generator, dtype=torch.uint8)
    again, same = quantise(dequantise(packed, scale))
    assert torch.equal(same, scale)
    assert torch.equal(again, packed)


def test_quantise_takes_the_nearest_and_of_ties_the_even() -> None:
    row = [0.24, 0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.9, -0.25, -2.6, 4.0] + [0.0] * 19
    packed, scale = quantise(torch.tensor([row]))
    assert scale.tolist() == [[127]]
    expected = [0.0, 0.0, 0.5, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -0.0, -3.0, 4.0] + [0.0] * 19
    assert dequantise(packed, scale).tolist() == [expected]


def test_misfits_are_named() -> None:
    with pytest.raises(ValueError, match=r"scale: shape \[2, 1\], expected \[2, 2\]"):
        dequantise(torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match="33 columns, expected a multiple of 32"):
        quantise(torch.zeros(1, 33))
