"""The contest: one model, its tokens, and the turns that every contestant takes in a process of its
own.

The workload is the one at which MoE trainers were compared on a CPU before: 4 layers of 32 experts,
4 of them for a token, 2,048 tokens a step, 175 GFLOP.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch

from moewright.rules.flops import model_flops_per_token
from moewright.spec.model import (
    AttentionKind,
    AttentionSpec,
    ModelSpec,
    MoeSpec,
    QkNorm,
    RouterSpec,
)
from moewright.spec.workload import Dtype, LossSpec, OptimizerSpec, Workload

MODEL = ModelSpec(
    name="contest",
    family="qwen3_moe",
    hidden_size=512,
    layers=4,
    vocab_size=8192,
    attention=AttentionSpec(
        kind=AttentionKind.GQA,
        heads=8,
        kv_heads=2,
        head_dim=64,
        v_head_dim=64,
        qk_norm=QkNorm.PER_HEAD,
    ),
    dense_ffn_size=1024,
    moe=MoeSpec(experts=32, ffn_size=256, router=RouterSpec(top_k=4)),
    moe_layers=(True,) * 4,
)
WORKLOAD = Workload(
    seq_len=512,
    global_batch=4,
    optimizer=OptimizerSpec(
        lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, clip_norm=0.0
    ),
    loss=LossSpec(),
)
_BATCHES = 8
Turn = Callable[[int], Callable[[], float]]  # of its number, what is timed: inputs are made before


class ContestPart(StrEnum):
    """What is timed: the whole training step, or forward and backward of one MoE layer."""

    STEP = "step"
    LAYER = "layer"


@dataclass(frozen=True, kw_only=True, slots=True)
class ContestRequest:
    """What a contestant is started for; `dtype` is of the compute, states of the optimizer are fp32
    in any case."""

    part: ContestPart
    dtype: Dtype
    threads: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype is Dtype.BF16 else torch.float32


def model_flops(part: ContestPart) -> int:
    """Model FLOPs of one turn, forward and backward."""
    moe = MODEL.moe
    if part is ContestPart.STEP or moe is None:
        return model_flops_per_token(MODEL, WORKLOAD.seq_len) * WORKLOAD.tokens_per_step
    weights = MODEL.hidden_size * (moe.router.top_k * 3 * moe.ffn_size + moe.experts)
    return 6 * weights * WORKLOAD.tokens_per_step


def parse_request() -> ContestRequest:
    """From the command line: part, dtype, threads. Sets the threads."""
    part, dtype, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    return ContestRequest(part=ContestPart(part), dtype=Dtype(dtype), threads=int(threads))


def draw_tokens(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets [4,512] of a step; every contestant has the same."""
    dice = torch.Generator().manual_seed(step % _BATCHES)
    rows = torch.randint(
        0, MODEL.vocab_size, (WORKLOAD.global_batch, WORKLOAD.seq_len + 1), generator=dice
    )
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def draw_hidden(number: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Input of a layer [2048,512] and the gradient of its output; new ones, and so another routing,
    in every turn."""
    dice = torch.Generator().manual_seed(number)
    shape = (WORKLOAD.tokens_per_step, MODEL.hidden_size)
    x, grad = (torch.randn(shape, generator=dice).to(dtype) for _ in range(2))
    return x, grad


def take_turns(
    turn: Turn, split: Callable[[Callable[[], float]], Mapping[str, float]] | None = None
) -> None:
    """Make `turn(number)` ready, run it, and answer with its wall and CPU seconds and the number
    that it returns to be compared, once for every line that comes. The line "split" asks for a
    turn's seconds by kind of work instead.
    """
    for number, line in enumerate(sys.stdin):
        run = turn(number)
        if split is not None and line.strip() == "split":
            print(json.dumps(split(run)), flush=True)
            continue
        wall, cpu = time.perf_counter(), time.process_time()
        value = run()
        answer = {
            "wall_s": time.perf_counter() - wall,
            "cpu_s": time.process_time() - cpu,
            "value": value,
        }
        print(json.dumps(answer), flush=True)
