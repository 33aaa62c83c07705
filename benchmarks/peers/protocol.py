"""The code that contestants share: the request, the tokens, and the turns they take."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch

from benchmarks.workloads import CONTEST_MODEL, CONTEST_WORKLOAD
from moewright.rules.shapes.flops import model_flops_per_token
from moewright.spec.workload import Dtype

# Distinct batches, which the steps take in a circle.
_BATCHES = 8

# Runs the work that is timed, and returns a number to be compared.
TimedWork = Callable[[], float]
# Prepares the turn of this number: its inputs are made before the clock starts.
Turn = Callable[[int], TimedWork]


class ContestPart(StrEnum):
    """The part that is timed: a training step, or forward and backward of one MoE layer."""

    STEP = "step"
    LAYER = "layer"


@dataclass(frozen=True, kw_only=True, slots=True)
class ContestRequest:
    """The request that a contestant is started with.

    `dtype` is that of the compute; states of the optimizer are fp32 in any case.
    """

    part: ContestPart
    dtype: Dtype
    threads: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype is Dtype.BF16 else torch.float32


def parse_request() -> ContestRequest:
    """Read part, dtype and threads from the command line, and set the threads."""
    part, dtype, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    return ContestRequest(part=ContestPart(part), dtype=Dtype(dtype), threads=int(threads))


def model_flops(part: ContestPart) -> int:
    """Return the model FLOPs of one turn, forward and backward."""
    model = CONTEST_MODEL
    workload = CONTEST_WORKLOAD
    if part is ContestPart.STEP or model.moe is None:
        return model_flops_per_token(model, workload.seq_len) * workload.tokens_per_step
    expert_weights = 3 * model.hidden_size * model.moe.ffn_size
    router_weights = model.hidden_size * model.moe.experts
    weights = model.moe.router.top_k * expert_weights + router_weights
    return 6 * weights * workload.tokens_per_step


def draw_tokens(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and targets [4,512] of a step, which every contestant has alike."""
    generator = torch.Generator().manual_seed(step % _BATCHES)
    shape = (CONTEST_WORKLOAD.global_batch, CONTEST_WORKLOAD.seq_len + 1)
    tokens = torch.randint(0, CONTEST_MODEL.vocab_size, shape, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def draw_hidden(number: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a layer's input [2048,512] and the gradient of its output.

    They are new in every turn, and so is the routing.
    """
    generator = torch.Generator().manual_seed(number)
    shape = (CONTEST_WORKLOAD.tokens_per_step, CONTEST_MODEL.hidden_size)
    x = torch.randn(shape, generator=generator).to(dtype)
    grad = torch.randn(shape, generator=generator).to(dtype)
    return x, grad


def take_turns(
    turn: Turn, profile: Callable[[TimedWork], Mapping[str, float]] | None = None
) -> None:
    """Take one turn for every line of standard input, and answer each with a line of JSON.

    The answer to "go" is the turn's wall and CPU seconds and the number that it returned. The
    answer to "split", which a contestant with a `profile` understands, is the turn's seconds by
    kind of work.
    """
    for number, line in enumerate(sys.stdin):
        work = turn(number)
        if profile is not None and line.strip() == "split":
            print(json.dumps(profile(work)), flush=True)
            continue
        wall_started = time.perf_counter()
        cpu_started = time.process_time()
        value = work()
        answer = {
            "wall_s": time.perf_counter() - wall_started,
            "cpu_s": time.process_time() - cpu_started,
            "value": value,
        }
        print(json.dumps(answer), flush=True)
