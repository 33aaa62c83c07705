"""Cases of compute: each is set up as the engine does that work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch.optim.adamw import adamw

from moewright.bench.case import BenchContext, Call, Case, Probe, draw_normal
from moewright.bench.elementwise_passes import HEAD_DIM, build_passes, count_pass_bytes
from moewright.bench.tiny_steps import TINY_SHAPES, TinyShape, build_tiny_step
from moewright.engine.kernels import matmul
from moewright.engine.kernels.attention import attention, attention_backward
from moewright.spec.hardware import DeviceKind, Op
from moewright.spec.units import MIB
from moewright.spec.workload import Dtype

COPY_BYTES = 64 * MIB
# Parameters of an optimizer update.
UPDATE_SIZES = (1 << 16, 1 << 20, 1 << 23)
# Sets of inputs of a product: a training step finds few of its operands in the nearest cache.
INPUT_SETS = 4
# Only the differences between steps of tiny models are used, which takes many repeats.
STEP_SLICES = 4
# Deviation of the experts' loads; routers trained with a balance loss lie about there.
LOAD_DEVIATION = 0.4
# The smallest sizes for which the kernels of larger calls still run: they cost the launch alone.
LAUNCH_ROWS = 8
LAUNCH_COLUMNS = 32
_TORCH_DTYPES = ((Dtype.BF16, torch.bfloat16), (Dtype.FP32, torch.float32))


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    """The shape of a batch of sequences in grouped-query attention."""

    batch: int
    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeSizes:
    """The sizes that are measured on a kind of device: small models on a CPU, large on a GPU."""

    gemms: tuple[tuple[int, int, int], ...]  # m, n, k; the widest n is a vocabulary head
    pass_tokens: tuple[int, ...]
    pass_width: int
    experts: int
    expert_linear: tuple[int, int]  # n, k
    expert_rows: tuple[int, ...]  # mean rows of an expert
    seq_lens: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    grouped_dtypes: tuple[Dtype, ...]  # of grouped GEMMs and attention

    def attention_shapes(self) -> Iterator[AttentionShape]:
        """Yield the shapes by sequence length; short sequences come as a batch of 1024 tokens."""
        for seq_len in self.seq_lens:
            yield AttentionShape(
                batch=max(1024 // seq_len, 1),
                seq_len=seq_len,
                heads=self.heads,
                kv_heads=self.kv_heads,
                head_dim=self.head_dim,
            )


CPU_SIZES = ComputeSizes(
    gemms=(
        (256, 128, 128),
        (256, 256, 256),
        (1024, 256, 256),
        (1024, 512, 384),
        (2048, 1024, 384),
        (2048, 4096, 256),
    ),
    pass_tokens=(64, 256, 1024, 4096),
    pass_width=256,
    experts=16,
    expert_linear=(512, 256),
    expert_rows=(8, 32, 128, 384, 1024),
    seq_lens=(128, 256, 512, 1024, 2048),
    heads=8,
    kv_heads=2,
    head_dim=HEAD_DIM,
    grouped_dtypes=(Dtype.BF16, Dtype.FP32),
)
CUDA_SIZES = ComputeSizes(
    gemms=(
        (256, 1024, 1024),
        (1024, 1024, 1024),
        (4096, 2048, 2048),
        (8192, 4096, 4096),
        (8192, 16384, 4096),
    ),
    pass_tokens=(256, 1024, 4096, 16384),
    pass_width=4096,
    experts=16,
    expert_linear=(1536, 2048),
    expert_rows=(16, 64, 256, 1024, 4096),
    seq_lens=(1024, 2048, 4096, 8192),
    heads=32,
    kv_heads=8,
    head_dim=128,
    # Flash attention and grouped GEMM of CUDA devices are for half precision.
    grouped_dtypes=(Dtype.BF16,),
)


def build_compute_cases(kind: DeviceKind) -> Iterator[Case]:
    """Yield the cases of compute on a kind of device."""
    is_cpu = kind is DeviceKind.CPU
    sizes = CPU_SIZES if is_cpu else CUDA_SIZES
    for dtype, torch_dtype in _TORCH_DTYPES:
        for m, n, k in sizes.gemms:
            yield _gemm_case(dtype, torch_dtype, m, n, k)
        for tokens in sizes.pass_tokens:
            yield _passes_case(kind, dtype, tokens, sizes.pass_width)
        if is_cpu:
            yield from _launch_cases(dtype, torch_dtype)
        if dtype not in sizes.grouped_dtypes:
            continue
        for rows in sizes.expert_rows:
            shape = (sizes.experts, *sizes.expert_linear)
            yield _grouped_case(dtype, torch_dtype, rows, shape)
        for attention_shape in sizes.attention_shapes():
            yield from _attention_cases(dtype, torch_dtype, attention_shape)
    for parameters in UPDATE_SIZES:
        yield _update_case(parameters)
    yield _copy_case(COPY_BYTES)
    for number, tiny_shape in enumerate(TINY_SHAPES, 1):
        yield _step_case(number, tiny_shape)


def _launch_cases(dtype: Dtype, torch_dtype: torch.dtype) -> Iterator[Case]:
    """Yield calls that do next to nothing.

    On a CPU the thread that launches also works. The launch belongs to the host's time, which is
    solved from whole steps, so it is subtracted from the other cases.
    """
    shape = AttentionShape(batch=1, seq_len=LAUNCH_ROWS, heads=8, kv_heads=2, head_dim=HEAD_DIM)
    cases = (
        _gemm_case(dtype, torch_dtype, LAUNCH_ROWS, LAUNCH_COLUMNS, LAUNCH_COLUMNS),
        _grouped_case(dtype, torch_dtype, LAUNCH_ROWS, (16, LAUNCH_COLUMNS, LAUNCH_COLUMNS)),
        _passes_case(DeviceKind.CPU, dtype, LAUNCH_ROWS, HEAD_DIM),
        *_attention_cases(dtype, torch_dtype, shape),
    )
    for case in cases:
        yield replace(case, x=0.0, work=0.0, input_sets=1)


def _gemm_case(dtype: Dtype, torch_dtype: torch.dtype, m: int, n: int, k: int) -> Case:
    """Build a linear layer's forward and both products of its backward; x is the FLOPs of one."""

    def setup(context: BenchContext) -> Call:
        x = draw_normal((m, k), torch_dtype, context.device)
        w = draw_normal((n, k), torch_dtype, context.device)
        grad = draw_normal((m, n), torch_dtype, context.device)

        def call() -> None:
            matmul.matmul(x, w.t())
            matmul.matmul(grad, w)
            matmul.matmul(grad.t(), x)

        return call

    flops = 2 * m * n * k
    return Case(
        op=Op.GEMM, dtype=dtype, x=flops, work=3 * flops, setup=setup, input_sets=INPUT_SETS
    )


def _grouped_case(
    dtype: Dtype, torch_dtype: torch.dtype, rows: int, shape: tuple[int, int, int]
) -> Case:
    """Build the experts' linear [experts, n, k], forward and both products of its backward.

    x is the mean rows of an expert. Routers load experts unevenly, and differently in every step;
    so does every set of inputs.
    """
    experts, n, k = shape

    def setup(context: BenchContext) -> Call:
        counts = draw_expert_rows(rows, experts)
        x = draw_normal((experts * rows, k), torch_dtype, context.device)
        w = draw_normal((experts, n, k), torch_dtype, context.device)
        grad = draw_normal((experts * rows, n), torch_dtype, context.device)
        ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=context.device)

        def call() -> None:
            matmul.grouped_matmul(x, w.mT, ends)
            matmul.grouped_matmul(grad, w, ends)
            matmul.grouped_matmul(grad.t(), x, ends)

        return call

    flops = 3 * 2 * experts * rows * n * k
    return Case(
        op=Op.GROUPED_GEMM, dtype=dtype, x=rows, work=flops, setup=setup, input_sets=INPUT_SETS
    )


def draw_expert_rows(rows: int, experts: int) -> tuple[int, ...]:
    """Draw the rows of each expert, with a deviation of LOAD_DEVIATION of the mean.

    Together they are `rows` times the experts.
    """
    weights = torch.randn(experts, dtype=torch.float64).mul_(LOAD_DEVIATION).exp_()
    ends = (weights.cumsum(0) / weights.sum() * rows * experts).round().int().tolist()
    starts = [0, *ends[:-1]]
    return tuple(end - start for start, end in zip(starts, ends, strict=True))


def _attention_cases(
    dtype: Dtype, torch_dtype: torch.dtype, shape: AttentionShape
) -> tuple[Case, Case]:
    """Build the forward case and the backward case of causal attention."""

    def draw_inputs(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q_shape = (shape.batch, shape.seq_len, shape.heads, shape.head_dim)
        kv_shape = (shape.batch, shape.seq_len, shape.kv_heads, shape.head_dim)
        q = draw_normal(q_shape, torch_dtype, device)
        k = draw_normal(kv_shape, torch_dtype, device)
        v = draw_normal(kv_shape, torch_dtype, device)
        return q, k, v

    def setup_forward(context: BenchContext) -> Call:
        q, k, v = draw_inputs(context.device)
        return lambda: attention(q, k, v)

    def setup_backward(context: BenchContext) -> Call:
        q, k, v = draw_inputs(context.device)
        out, statistics = attention(q, k, v)
        grad = torch.randn_like(out)
        return lambda: attention_backward(grad, q, k, v, out, statistics)

    flops = 2 * shape.batch * shape.heads * shape.seq_len * shape.seq_len * shape.head_dim
    forward = Case(
        op=Op.ATTENTION,
        dtype=dtype,
        x=shape.seq_len,
        work=flops,
        setup=setup_forward,
        input_sets=INPUT_SETS,
    )
    backward = replace(forward, op=Op.ATTENTION_BACKWARD, work=2 * flops, setup=setup_backward)
    return forward, backward


def _passes_case(kind: DeviceKind, dtype: Dtype, tokens: int, width: int) -> Case:
    """Build the memory-bound passes of a layer as one case; x is the mean bytes of a pass."""
    moved_bytes, mean_pass_bytes = count_pass_bytes(kind, dtype, tokens, width)

    def setup(context: BenchContext) -> Call:
        return build_passes(dtype, tokens, width, context.device)

    return Case(
        op=Op.ELEMENTWISE,
        dtype=dtype,
        x=mean_pass_bytes,
        work=moved_bytes,
        setup=setup,
        input_sets=INPUT_SETS,
    )


def _update_case(parameters: int) -> Case:
    """Build a fused AdamW over flat fp32 buffers: master weights, gradients and two moments."""

    def setup(context: BenchContext) -> Call:
        master = draw_normal((parameters,), torch.float32, context.device)
        grad = draw_normal((parameters,), torch.float32, context.device)
        first_moment = torch.zeros_like(master)
        second_moment = torch.zeros_like(master)
        step = torch.zeros((), device=context.device)

        def call() -> None:
            adamw(
                [master],
                [grad],
                [first_moment],
                [second_moment],
                [],  # max_exp_avg_sqs, which only amsgrad has
                [step],
                fused=True,
                amsgrad=False,
                beta1=0.9,
                beta2=0.95,
                lr=1e-3,
                weight_decay=0.1,
                eps=1e-8,
                maximize=False,
            )

        return call

    return Case(op=Op.OPTIMIZER, dtype=Dtype.FP32, x=parameters, work=parameters, setup=setup)


def _copy_case(size_bytes: int) -> Case:
    """Build a plain copy between two buffers far larger than any cache."""

    def setup(context: BenchContext) -> Call:
        source = torch.ones(size_bytes, dtype=torch.uint8, device=context.device)
        target = torch.zeros_like(source)
        return lambda: target.copy_(source)

    moved_bytes = 2 * size_bytes
    return Case(op=Probe.COPY, dtype=Dtype.FP32, x=moved_bytes, work=moved_bytes, setup=setup)


def _step_case(number: int, shape: TinyShape) -> Case:
    """Build training steps too small to cost anything but the host's work."""

    def setup(context: BenchContext) -> Call:
        return build_tiny_step(shape, context.device)

    return Case(
        op=Probe.STEP, dtype=Dtype.BF16, x=number, work=1, setup=setup, time_slices=STEP_SLICES
    )
