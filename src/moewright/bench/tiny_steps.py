"""Training steps so small that they cost nothing but the host's work: what a layer, an expert and a
step each cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from moewright.engine.data.micro_batch import MicroBatch, build_micro_batch
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

MICRO_BATCHES = 2
_WIDTH, _SEQ_LEN, _VOCAB = (
    32,
    8,
    32,
)  # no narrower: oneDNN leaves products of up to 16^3 to a simpler kernel
_MORE = 4  # layers than one
_FEW, _MANY = 4, 36  # experts


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyShape:
    """Layers without experts, layers with `experts` each."""

    dense: int
    moe: int
    experts: int


BASE_SHAPE = TinyShape(dense=0, moe=1, experts=_FEW)
# Beside ONE: more layers, more layers without experts, more experts.
TINY_SHAPES = (
    BASE_SHAPE,
    TinyShape(dense=0, moe=1 + _MORE, experts=_FEW),
    TinyShape(dense=_MORE, moe=1, experts=_FEW),
    TinyShape(dense=0, moe=1, experts=_MANY),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostWork:
    """Seconds of a layer and micro-batch but for its experts, of each expert, and of a step
    besides; of the first, a layer without experts takes `dense_share`.
    """

    layer_s: float
    expert_s: float
    step_s: float
    dense_share: float


def solve_host_work(step_s: Sequence[float]) -> HostWork:
    """From the seconds of a step of each of SHAPES."""
    one, *others = step_s
    whole_s, dense_s, more_s = (max(0.0, other - one) / MICRO_BATCHES for other in others)
    whole_s, dense_s, expert_s = whole_s / _MORE, dense_s / _MORE, more_s / (_MANY - _FEW)
    layer_s = max(whole_s - _FEW * expert_s, 0.1 * whole_s)
    return HostWork(
        layer_s=layer_s,
        expert_s=expert_s,
        step_s=max(0.0, one - MICRO_BATCHES * whole_s),
        dense_share=min(1.0, dense_s / layer_s) if layer_s else 1.0,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedTokens:
    """The same tokens in every step."""

    ids: torch.Tensor

    def micro_batch(self, run: Runtime, step: int, micro_batch: int) -> MicroBatch:
        return build_micro_batch(run, self.ids[:, :-1], self.ids[:, 1:], None)


def build_tiny_step(shape: TinyShape, device: torch.device) -> Callable[[], object]:
    """A step of a model of this shape, alone on its rank."""
    layers = shape.dense + shape.moe
    model = ModelSpec(
        name="tiny",
        family="qwen3_moe",
        hidden_size=_WIDTH,
        layers=layers,
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
    work = Workload(
        seq_len=_SEQ_LEN,
        global_batch=MICRO_BATCHES,
        precision=Dtype.BF16,
        optimizer=OptimizerSpec(lr=1e-3, clip_norm=1.0),
        loss=LossSpec(aux_coeff=0.01),
    )
    ids = torch.arange(_SEQ_LEN + 1, device=device)[None] % _VOCAB
    job = build_train_state(
        Job(model=model, workload=work, layout=Layout(world_size=1)),
        FixedTokens(ids=ids),
        rank=0,
        device=device,
        initial_value=draw_initial_value,
    )
    return lambda: train_step(job, step=1, lr=1e-3, stop_requested=False, count_ledger=False)
