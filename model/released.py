"""The released models as their config.json has them: for planning without a checkpoint, and for tests of published figures. Torch-free."""

from __future__ import annotations

from model.config import ModelConfig

FULL_ATTENTION = (*range(3, 92, 4), 92)  # every fourth layer, and the last

# Moonshot's config.json of Kimi K3; a test holds it against the bytes of the released checkpoint.
K3 = ModelConfig(
    vocab_size=163_840,
    hidden_size=7168,
    num_layers=93,
    max_position_embeddings=1_048_576,
    bos_token_id=163_584,
    eos_token_id=163_586,
    pad_token_id=163_839,
    rms_norm_eps=1e-5,
    attn_res_block_size=12,
    kda_layers=tuple(layer for layer in range(93) if layer not in FULL_ATTENTION),
    kda_heads=96,
    kda_head_dim=128,
    conv_size=4,
    gate_lower_bound=-5.0,
    mla_heads=96,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=33_792,
    first_k_dense_replace=1,
    moe_layer_freq=1,
    num_experts=896,
    num_experts_per_token=16,
    num_shared_experts=2,
    moe_intermediate_size=3072,
    routed_expert_hidden_size=3584,
    moe_renormalize=True,
    routed_scaling_factor=1.0,
    situ_beta=4.0,
    situ_linear_beta=25.0,
)

# Moonshot's config.json of Kimi-Linear-48B-A3B: one node's worth of the same layers. Sizes are held against the published bytes by a test.
KIMI_LINEAR_48B = ModelConfig(
    family="kimi_linear",
    vocab_size=163_840,
    hidden_size=2304,
    num_layers=27,
    max_position_embeddings=1_048_576,
    bos_token_id=163_584,
    eos_token_id=163_586,
    pad_token_id=163_839,
    rms_norm_eps=1e-5,
    attn_res_block_size=None,
    kda_layers=tuple(layer for layer in range(27) if layer not in (*range(3, 26, 4), 26)),
    kda_heads=32,
    kda_head_dim=128,
    conv_size=4,
    gate_lower_bound=None,
    mla_heads=32,
    q_lora_rank=None,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=9216,
    first_k_dense_replace=1,
    moe_layer_freq=1,
    num_experts=256,
    num_experts_per_token=8,
    num_shared_experts=1,
    moe_intermediate_size=1024,
    routed_expert_hidden_size=None,
    moe_renormalize=True,
    routed_scaling_factor=2.446,
    situ_beta=None,
    situ_linear_beta=None,
)

RELEASED = {"kimi-k3": K3, "kimi-linear-48b": KIMI_LINEAR_48B}
