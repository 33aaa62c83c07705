"""Model shapes for tests of rules.

They are a small MoE to vary, and the published shapes that legality is checked on.
"""

from __future__ import annotations

from dataclasses import replace

from moewright.spec.model import AttentionKind, AttentionSpec, ModelSpec, MoeSpec, RouterSpec


def moe_model(
    *,
    layers: int = 4,
    heads: int = 8,
    kv_heads: int = 4,
    experts: int = 16,
    ffn: int = 64,
    shared: int = 0,
    mtp: int = 0,
) -> ModelSpec:
    """Build a decoder with experts in every layer."""
    return ModelSpec(
        name="shape",
        family="",
        hidden_size=heads * 16,
        layers=layers,
        vocab_size=1024,
        attention=AttentionSpec(
            kind=AttentionKind.GQA, heads=heads, kv_heads=kv_heads, head_dim=16, v_head_dim=16
        ),
        dense_ffn_size=256,
        moe=MoeSpec(
            experts=experts, ffn_size=ffn, router=RouterSpec(top_k=2), shared_ffn_size=shared
        ),
        moe_layers=(True,) * layers,
        mtp_layers=mtp,
    )


def dense_model(*, layers: int = 4) -> ModelSpec:
    """Build the same decoder without experts."""
    return replace(moe_model(layers=layers), moe=None, moe_layers=(False,) * layers)


def qwen3_235b() -> ModelSpec:
    """Build Qwen3-235B-A22B as far as legality looks.

    It has 94 layers, 64 heads over 4 kv heads, 128 experts of width 1536.
    """
    return moe_model(layers=94, heads=64, kv_heads=4, experts=128, ffn=1536)
