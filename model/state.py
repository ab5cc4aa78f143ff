"""The device pools that hold sessions: pages of MLA latents and slots of KDA state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.layers import copy_layers
from model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class StatePools:
    """Everything a session is, on this process. Latents are whole on every rank of a TP group; KDA state is of the local heads."""

    latents: Tensor  # [MLA layers, pages, page_size, kv_lora_rank + qk_rope_head_dim], compute dtype
    kda: Tensor  # [KDA layers, slots, local heads, K, V], fp32
    conv: Tensor  # [KDA layers, slots, conv_size - 1, 3 * local heads * head_dim (q | k | v)], compute dtype; oldest column first

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        *,
        tp_size: int,
        page_size: int,
        num_pages: int,
        num_slots: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> StatePools:
        layers, heads, d = len(config.kda_layers), config.kda_heads // tp_size, config.kda_head_dim
        return cls(
            latents=torch.zeros(len(config.mla_layers), num_pages, page_size, config.latent_dim, device=device, dtype=dtype),
            kda=torch.zeros(layers, num_slots, heads, d, d, device=device, dtype=torch.float32),
            conv=torch.zeros(layers, num_slots, config.conv_size - 1, 3 * heads * d, device=device, dtype=dtype),
        )

    @property
    def page_size(self) -> int:
        return self.latents.shape[2]

    def copy_slot(self, src: int, dst: int) -> None:
        copy_layers(self.kda[:, src], self.kda[:, dst])
        copy_layers(self.conv[:, src], self.conv[:, dst])

    def copy_page(self, src: int, dst: int) -> None:
        copy_layers(self.latents[:, src], self.latents[:, dst])
