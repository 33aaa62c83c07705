"""What is measured: shapes for a card of 80 GB or more, and tiny ones that rehearse it on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from benchmarks.workloads import QUICKSTART_MODEL
from moewright.codec import parse_layout
from moewright.engine.model.micro_batch import MicroBatch, build_micro_batch
from moewright.engine.model.transformer import draw_initial_value
from moewright.engine.run.build_state import build_train_state
from moewright.engine.run.train_state import TrainState
from moewright.engine.runtime import Runtime
from moewright.intake import catalogue
from moewright.rules.job import Job
from moewright.spec.model import ModelSpec
from moewright.spec.workload import Dtype, LossSpec, OptimizerSpec, TensorScaling, Workload

# Models of which layers and steps are measured, with the layers of a step.
_CARD_MODELS = (("Mixtral-8x7B-v0.1", 2), ("Qwen3-30B-A3B", 4))
# Recipes of 8 and 4 bits, of which casts and products are measured.
RECIPES = (
    ("fp8, a scale a tensor", Dtype.FP8, TensorScaling.CURRENT),
    ("fp8, blocks of 128", Dtype.FP8, TensorScaling.BLOCKWISE),
    ("mxfp8", Dtype.MXFP8, TensorScaling.CURRENT),
    ("nvfp4", Dtype.NVFP4, TensorScaling.CURRENT),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredModel:
    """A model whose layer is measured, and whose step with so many layers is."""

    model: ModelSpec
    step_layers: int

    def cut(self, layers: int) -> ModelSpec:
        """Return the model with its first layers alone."""
        return replace(catalogue.cut_layers(self.model, layers), name=self.model.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSizes:
    """The device, the models and the sizes of everything that is measured on it."""

    device: torch.device
    models: tuple[MeasuredModel, ...]
    seq_len: int
    layer_sequences: int
    gemm_side: int
    rows: int  # of tensors that kernels are compared on
    repeats: int
    bench_budget_s: float

    @property
    def workload(self) -> Workload:
        """The workload of a measured step: one micro-batch of `layer_sequences` sequences."""
        return Workload(
            seq_len=self.seq_len,
            global_batch=self.layer_sequences,
            optimizer=OptimizerSpec(lr=1e-4, clip_norm=1.0),
            loss=LossSpec(aux_coeff=0.01),
        )

    @property
    def layer_tokens(self) -> int:
        return self.seq_len * self.layer_sequences


def card_sizes() -> GpuSizes:
    """Return the sizes for a card."""
    return GpuSizes(
        device=torch.device("cuda", 0),
        models=tuple(
            MeasuredModel(model=catalogue.model(name), step_layers=layers)
            for name, layers in _CARD_MODELS
        ),
        seq_len=4096,
        # Four sequences would fill a card of 80 GB: 78 GiB for Qwen3-30B-A3B (see expected.py).
        layer_sequences=2,
        gemm_side=8192,
        rows=16384,
        repeats=20,
        bench_budget_s=90.0,
    )


def rehearsal_sizes() -> GpuSizes:
    """Return sizes at which a CPU goes through all parts in seconds."""
    return GpuSizes(
        device=torch.device("cpu"),
        models=(MeasuredModel(model=QUICKSTART_MODEL, step_layers=1),),
        seq_len=64,
        layer_sequences=2,
        gemm_side=128,
        rows=256,
        repeats=2,
        bench_budget_s=0.0,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnTokens:
    """A source of tokens on the device, the same in every step."""

    tokens_BS: torch.Tensor

    def micro_batch(self, runtime: Runtime, step: int, micro_batch: int) -> MicroBatch:
        """Return the batch, which is one micro-batch."""
        return build_micro_batch(runtime, self.tokens_BS[:, :-1], self.tokens_BS[:, 1:], None)


def build_job(sizes: GpuSizes, model: ModelSpec, features: str = "") -> Job:
    """Build the job of a measured step: one device, and the features of a layout text."""
    layout = parse_layout(features, world_size=1)
    layout = replace(layout, mbs=sizes.layer_sequences)
    return Job(model=model, workload=sizes.workload, layout=layout)


def draw_tokens(sizes: GpuSizes, model: ModelSpec) -> torch.Tensor:
    """Draw the tokens [sequences, seq_len + 1] of every step."""
    generator = torch.Generator().manual_seed(5)
    shape = (sizes.layer_sequences, sizes.seq_len + 1)
    return torch.randint(0, model.vocab_size, shape, generator=generator).to(sizes.device)


def build_engine_state(sizes: GpuSizes, model: ModelSpec, features: str = "") -> TrainState:
    """Build the engine's model and optimizer on the device."""
    return build_train_state(
        build_job(sizes, model, features),
        DrawnTokens(tokens_BS=draw_tokens(sizes, model)),
        rank=0,
        device=sizes.device,
        initial_value=draw_initial_value,
    )


def time_call(sizes: GpuSizes, call: Callable[[], object]) -> float:
    """Return the median seconds of a call after two of warm-up, by the device's own clock."""
    for _ in range(2):
        call()
    seconds = []
    for _ in range(sizes.repeats):
        if sizes.device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            stop.synchronize()
            seconds.append(1e-3 * float(start.elapsed_time(stop)))
        else:
            started = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def best_gemm_rate(sizes: GpuSizes) -> float:
    """Return the FLOP/s of torch's bf16 product of two squares."""
    side = sizes.gemm_side
    a, b = (torch.randn(side, side, device=sizes.device).bfloat16() for _ in range(2))
    return 2 * side**3 / time_call(sizes, lambda: a @ b)
