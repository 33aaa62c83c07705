"""The two jobs that benchmarks train: the quickstart's, and a larger one for contests."""

from __future__ import annotations

from moewright.spec.model import (
    AttentionKind,
    AttentionSpec,
    ModelSpec,
    MoeSpec,
    QkNorm,
    RouterSpec,
)
from moewright.spec.workload import Dtype, LossSpec, OptimizerSpec, Workload

_LAYERS = 4
_TOP_K = 4


def build_model(
    name: str,
    *,
    hidden_size: int,
    vocab_size: int,
    head_dim: int,
    dense_ffn_size: int,
    experts: int,
    expert_ffn_size: int,
) -> ModelSpec:
    """Build a Qwen3-MoE of four MoE layers that routes each token to four experts."""
    return ModelSpec(
        name=name,
        family="qwen3_moe",
        hidden_size=hidden_size,
        layers=_LAYERS,
        vocab_size=vocab_size,
        attention=AttentionSpec(
            kind=AttentionKind.GQA,
            heads=8,
            kv_heads=2,
            head_dim=head_dim,
            v_head_dim=head_dim,
            qk_norm=QkNorm.PER_HEAD,
        ),
        dense_ffn_size=dense_ffn_size,
        moe=MoeSpec(experts=experts, ffn_size=expert_ffn_size, router=RouterSpec(top_k=_TOP_K)),
        moe_layers=(True,) * _LAYERS,
    )


QUICKSTART_MODEL = build_model(
    "quickstart",
    hidden_size=256,
    vocab_size=4096,
    head_dim=32,
    dense_ffn_size=768,
    experts=16,
    expert_ffn_size=256,
)
QUICKSTART_WORKLOAD = Workload(
    seq_len=256,
    global_batch=4,
    precision=Dtype.FP32,
    optimizer=OptimizerSpec(lr=1e-3, clip_norm=1.0),
    loss=LossSpec(aux_coeff=0.01),
)

# The workload at which MoE trainers were compared on a CPU before: 2,048 tokens a step, 175 GFLOP.
CONTEST_MODEL = build_model(
    "contest",
    hidden_size=512,
    vocab_size=8192,
    head_dim=64,
    dense_ffn_size=1024,
    experts=32,
    expert_ffn_size=256,
)
CONTEST_WORKLOAD = Workload(
    seq_len=512,
    global_batch=4,
    optimizer=OptimizerSpec(
        lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, clip_norm=0.0
    ),
    loss=LossSpec(),
)
