"""Training steps so small that the host's work is all that they cost.

The differences between them are the host's work for a layer and for an expert; the rest is that
for a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from moewright.engine.model.micro_batch import MicroBatch, build_micro_batch
from moewright.engine.model.transformer import draw_initial_value
from moewright.engine.run.build_state import build_train_state
from moewright.engine.run.step import train_step
from moewright.engine.runtime import Runtime
from moewright.rules.job import Job
from moewright.spec.layout import Layout
from moewright.spec.model import (
    AttentionKind,
    AttentionSpec,
    ModelSpec,
    MoeSpec,
    QkNorm,
    RouterSpec,
)
from moewright.spec.workload import Dtype, LossSpec, OptimizerSpec, Workload

MICRO_BATCHES = 2  # the least that tells the fixed cost of a step from a micro-batch's
# No narrower: oneDNN leaves products of up to 16^3 to a simpler kernel.
_WIDTH = 32
_SEQ_LEN = 8
_VOCAB = 32
_MORE_LAYERS = 4
_FEW_EXPERTS = 4
_MANY_EXPERTS = 36


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyShape:
    """A model of `dense` layers without experts, then of `moe` layers with `experts` each."""

    dense: int
    moe: int
    experts: int


BASE_SHAPE = TinyShape(dense=0, moe=1, experts=_FEW_EXPERTS)
# The base, and what it is compared with: more layers, more layers without experts, more experts.
TINY_SHAPES = (
    BASE_SHAPE,
    TinyShape(dense=0, moe=1 + _MORE_LAYERS, experts=_FEW_EXPERTS),
    TinyShape(dense=_MORE_LAYERS, moe=1, experts=_FEW_EXPERTS),
    TinyShape(dense=0, moe=1, experts=_MANY_EXPERTS),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostWork:
    """Seconds of the host's work."""

    layer_s: float  # of a layer and micro-batch, without its experts
    expert_s: float  # of each expert and micro-batch
    step_s: float  # of a step besides its layers
    dense_share: float  # of layer_s that a layer without experts takes


def solve_host_work(step_s: Sequence[float]) -> HostWork:
    """Solve the host's work from the seconds of a step of each of TINY_SHAPES."""
    base_s, more_layers_s, more_dense_s, more_experts_s = step_s

    def per_micro_batch(longer_s: float) -> float:
        return max(0.0, longer_s - base_s) / MICRO_BATCHES

    moe_layer_s = per_micro_batch(more_layers_s) / _MORE_LAYERS
    dense_layer_s = per_micro_batch(more_dense_s) / _MORE_LAYERS
    expert_s = per_micro_batch(more_experts_s) / (_MANY_EXPERTS - _FEW_EXPERTS)
    layer_s = max(moe_layer_s - _FEW_EXPERTS * expert_s, 0.1 * moe_layer_s)
    return HostWork(
        layer_s=layer_s,
        expert_s=expert_s,
        step_s=max(0.0, base_s - MICRO_BATCHES * moe_layer_s),
        dense_share=min(1.0, dense_layer_s / layer_s) if layer_s else 1.0,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedTokens:
    """A source of batches that are the same in every step."""

    ids: torch.Tensor

    def micro_batch(self, run: Runtime, step: int, micro_batch: int) -> MicroBatch:
        """Return the micro-batch, which is of one sequence."""
        return build_micro_batch(run, self.ids[:, :-1], self.ids[:, 1:], None)


def build_tiny_step(shape: TinyShape, device: torch.device) -> Callable[[], object]:
    """Build a call that trains a model of this shape for a step, alone on its rank."""
    workload = Workload(
        seq_len=_SEQ_LEN,
        global_batch=MICRO_BATCHES,
        precision=Dtype.BF16,
        optimizer=OptimizerSpec(lr=1e-3, clip_norm=1.0),
        loss=LossSpec(aux_coeff=0.01),
    )
    ids = torch.arange(_SEQ_LEN + 1, device=device)[None] % _VOCAB
    state = build_train_state(
        Job(model=_build_model(shape), workload=workload, layout=Layout(world_size=1)),
        FixedTokens(ids=ids),
        rank=0,
        device=device,
        initial_value=draw_initial_value,
    )
    return lambda: train_step(state, step=1, lr=1e-3, stop_requested=False, count_ledger=False)


def _build_model(shape: TinyShape) -> ModelSpec:
    return ModelSpec(
        name="tiny",
        family="qwen3_moe",
        hidden_size=_WIDTH,
        layers=shape.dense + shape.moe,
        vocab_size=_VOCAB,
        attention=AttentionSpec(
            kind=AttentionKind.GQA,
            heads=2,
            kv_heads=1,
            head_dim=16,
            v_head_dim=16,
            qk_norm=QkNorm.PER_HEAD,
        ),
        dense_ffn_size=_WIDTH,
        moe=MoeSpec(experts=shape.experts, ffn_size=_WIDTH, router=RouterSpec(top_k=2)),
        moe_layers=(False,) * shape.dense + (True,) * shape.moe,
    )
