"""What is measured: cases of work with a size, each set up as the engine does that work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate, zip_longest

import torch
import torch.distributed as dist
from torch.optim.adamw import adamw

from moewright.bench.elementwise_passes import HEAD_DIM, build_passes, count_pass_bytes
from moewright.bench.tiny_steps import TINY_SHAPES, TinyShape, build_tiny_step
from moewright.engine.kernels import matmul
from moewright.engine.kernels.attention import attention, attention_backward
from moewright.rules.legality import divisors
from moewright.spec.hardware import Collective, DeviceKind, Op
from moewright.spec.units import KIB, MIB
from moewright.spec.workload import Dtype

TORCH_DTYPES = ((Dtype.BF16, torch.bfloat16), (Dtype.FP32, torch.float32))

# Linear layers of small models on a CPU and of large ones on a GPU, m x n x k; the widest n is a
# vocabulary head.
CPU_GEMMS = (
    (256, 128, 128),
    (256, 256, 256),
    (1024, 256, 256),
    (1024, 512, 384),
    (2048, 1024, 384),
    (2048, 4096, 256),
)
CUDA_GEMMS = (
    (256, 1024, 1024),
    (1024, 1024, 1024),
    (4096, 2048, 2048),
    (8192, 4096, 4096),
    (8192, 16384, 4096),
)
CPU_ROWS, CUDA_ROWS = (8, 32, 128, 384, 1024), (16, 64, 256, 1024, 4096)
CPU_SEQ_LENS, CUDA_SEQ_LENS = (128, 256, 512, 1024, 2048), (1024, 2048, 4096, 8192)
CPU_TOKENS, CUDA_TOKENS = (64, 256, 1024, 4096), (256, 1024, 4096, 16384)  # of a layer's passes
COPY_BYTES = 64 * MIB
UPDATE_SIZES = (1 << 16, 1 << 20, 1 << 23)
PAYLOAD_BYTES = (64, KIB, 16 * KIB, 128 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
MAX_GATHERED_BYTES = 128 * MIB  # an all-gather's result is held to this
LINK_BYTES = 4 * MIB
INPUT_SETS = (
    4  # of inputs of a product: a training step finds few of its operands in the nearest cache
)
STEP_SLICES = (
    4  # steps of tiny models are told apart by their differences, which takes many repeats
)
LOAD_DEVIATION = (
    0.4  # deviation of experts' loads; trained routers with a balance loss lie about there
)
FEW_ROWS, FEW_COLUMNS = (
    8,
    32,
)  # of a call that costs its launch alone, by the kernels that larger ones take

Call = Callable[[], object]


class Probe(StrEnum):
    """What is measured beside the rates and collectives of the hardware file."""

    COPY = "copy"  # x: bytes read and written; y: bytes/s
    STEP = "step"  # x: which of tiny.SHAPES, from 1; y: steps/s
    LINK = (
        "link"  # x: the round, from 1, in which a rank has partners(x)[rank]; y: bytes/s each way
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchContext:
    """Where a rank measures. `groups` holds its block of each size smaller than the world; None is
    all of them."""

    device: torch.device
    rank: int = 0
    groups: Mapping[int, dist.ProcessGroup | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One point of a curve at `x`. `work` is what one call does, in the unit of the curve's y times
    seconds; 0 where it does next to nothing, so that it takes what every call of its curve takes
    before it works.

    Of a collective, `ranks` are those of a group; the groups of a size, neighbours each, work at
    the same time.
    """

    op: Op | Collective | Probe
    dtype: Dtype
    x: float
    work: float
    setup: Callable[[BenchContext], Call]
    ranks: int = 1
    input_sets: int = 1  # of inputs, taken in turn
    time_slices: int = 1  # of the time that a case may take

    @property
    def curve_key(self) -> tuple[Op | Collective | Probe, Dtype, int]:
        return self.op, self.dtype, self.ranks

    @property
    def is_communication(self) -> bool:
        """Whether it is communication, which is timed by the wall."""
        return isinstance(self.op, Collective) or self.op is Probe.LINK


def build_cases(kind: DeviceKind, ranks: int) -> tuple[Case, ...]:
    """Every case: what a hardware file cannot be without (launches, tiny steps, the smallest point
    of each curve), then all of the collectives, then the other rates by rounds.

    When time runs out, what is missing are the largest points of the rates.
    """
    curves: dict[tuple[str, str, int], list[Case]] = {}
    for case in (
        *_compute(kind),
        *(case for size in group_sizes(ranks) for case in _collectives(size)),
        *_links(ranks),
    ):
        curves.setdefault(case.curve_key, []).append(case)
    ordered = [sorted(curve, key=lambda case: case.x) for curve in curves.values()]
    cut = [(curve, _needed(curve)) for curve in ordered]
    rates = [curve[needed:] for curve, needed in cut if not curve[0].is_communication]
    return (
        *(case for curve, needed in cut for case in curve[:needed]),
        *(case for curve, needed in cut if curve[0].is_communication for case in curve[needed:]),
        *(case for cases in zip_longest(*rates) for case in cases if case is not None),
    )


def _needed(curve: Sequence[Case]) -> int:
    """How many of a curve's first points must be measured."""
    if curve[0].op is Probe.STEP:
        return len(curve)
    return 1 if curve[0].work else 2


def _compute(kind: DeviceKind) -> Iterable[Case]:
    cpu = kind is DeviceKind.CPU
    for dtype, torch_dtype in TORCH_DTYPES:
        for m, n, k in CPU_GEMMS if cpu else CUDA_GEMMS:
            yield _gemm(dtype, torch_dtype, m, n, k)
        for tokens in CPU_TOKENS if cpu else CUDA_TOKENS:
            yield _passes(kind, dtype, tokens, 256 if cpu else 4096)
        if cpu:
            yield from _launches(dtype, torch_dtype)
        if not cpu and dtype is Dtype.FP32:
            continue  # flash attention and grouped GEMM of CUDA devices are for half precision
        experts, n, k = (16, 512, 256) if cpu else (16, 1536, 2048)
        for rows in CPU_ROWS if cpu else CUDA_ROWS:
            yield _grouped(dtype, torch_dtype, rows, experts, n, k)
        for seq_len in CPU_SEQ_LENS if cpu else CUDA_SEQ_LENS:
            batch = max(1024 // seq_len, 1)
            shape = (batch, seq_len, 8, 2, 32) if cpu else (batch, seq_len, 32, 8, 128)
            yield from _attention(dtype, torch_dtype, shape)
    for parameters in UPDATE_SIZES:
        yield _update(parameters)
    yield _copy(COPY_BYTES)
    yield from (_step(number, shape) for number, shape in enumerate(TINY_SHAPES, 1))


def _launches(dtype: Dtype, torch_dtype: torch.dtype) -> Iterable[Case]:
    """Calls that do next to nothing. On a CPU the thread that launches also works: what a call
    takes before it works is of the host's time, which whole steps tell, and is taken off the others
    here.
    """
    every = (
        _gemm(dtype, torch_dtype, FEW_ROWS, FEW_COLUMNS, FEW_COLUMNS),
        _grouped(dtype, torch_dtype, FEW_ROWS, 16, FEW_COLUMNS, FEW_COLUMNS),
        _passes(DeviceKind.CPU, dtype, FEW_ROWS, HEAD_DIM),
        *_attention(dtype, torch_dtype, (1, FEW_ROWS, 8, 2, HEAD_DIM)),
    )
    yield from (replace(case, x=0.0, work=0.0, input_sets=1) for case in every)


def _gemm(dtype: Dtype, torch_dtype: torch.dtype, m: int, n: int, k: int) -> Case:
    """A linear layer's forward and both products of its backward; x is the FLOPs of one."""

    def setup(place: BenchContext) -> Call:
        x, w, g = (_random(shape, torch_dtype, place.device) for shape in ((m, k), (n, k), (m, n)))

        def call() -> None:
            matmul.matmul(x, w.t())
            matmul.matmul(g, w)
            matmul.matmul(g.t(), x)

        return call

    flops = 2 * m * n * k
    return Case(
        op=Op.GEMM, dtype=dtype, x=flops, work=3 * flops, setup=setup, input_sets=INPUT_SETS
    )


def _grouped(
    dtype: Dtype, torch_dtype: torch.dtype, rows: int, experts: int, n: int, k: int
) -> Case:
    """Experts' linear [n, k], forward and both products of backward, with `rows` an expert in the
    mean: routers load experts unevenly, and otherwise in every call."""

    def setup(place: BenchContext) -> Call:
        counts = draw_expert_rows(rows, experts)
        shapes = ((experts * rows, k), (experts, n, k), (experts * rows, n))
        x, w, g = (_random(shape, torch_dtype, place.device) for shape in shapes)
        ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=place.device)

        def call() -> None:
            matmul.grouped_matmul(x, w.mT, ends)
            matmul.grouped_matmul(g, w, ends)
            matmul.grouped_matmul(g.t(), x, ends)

        return call

    flops = 3 * 2 * experts * rows * n * k
    return Case(
        op=Op.GROUPED_GEMM, dtype=dtype, x=rows, work=flops, setup=setup, input_sets=INPUT_SETS
    )


def draw_expert_rows(rows: int, experts: int) -> tuple[int, ...]:
    """Rows of each expert, drawn with a deviation of UNEVEN of the mean; together as many as even
    ones."""
    weights = torch.randn(experts, dtype=torch.float64).mul_(LOAD_DEVIATION).exp_()
    ends = (weights.cumsum(0) / weights.sum() * rows * experts).round().int().tolist()
    return tuple(after - before for before, after in zip([0, *ends], ends, strict=False))


def _attention(
    dtype: Dtype, torch_dtype: torch.dtype, shape: tuple[int, int, int, int, int]
) -> tuple[Case, Case]:
    """Causal attention of shape (batch, sequence, heads, key heads, head size): the forward case
    and the backward."""
    batch, seq_len, heads, kv_heads, width = shape

    def inputs(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q = _random((batch, seq_len, heads, width), torch_dtype, device)
        k, v = (_random((batch, seq_len, kv_heads, width), torch_dtype, device) for _ in range(2))
        return q, k, v

    def forward(place: BenchContext) -> Call:
        q, k, v = inputs(place.device)
        return lambda: attention(q, k, v)

    def backward(place: BenchContext) -> Call:
        q, k, v = inputs(place.device)
        out, rest = attention(q, k, v)
        grad = torch.randn_like(out)
        return lambda: attention_backward(grad, q, k, v, out, rest)

    flops = 2 * batch * heads * seq_len * seq_len * width
    return (
        Case(
            op=Op.ATTENTION,
            dtype=dtype,
            x=seq_len,
            work=flops,
            setup=forward,
            input_sets=INPUT_SETS,
        ),
        Case(
            op=Op.ATTENTION_BACKWARD,
            dtype=dtype,
            x=seq_len,
            work=2 * flops,
            setup=backward,
            input_sets=INPUT_SETS,
        ),
    )


def _passes(kind: DeviceKind, dtype: Dtype, tokens: int, width: int) -> Case:
    """Everything of a layer that is neither product nor attention. x is the mean bytes of a
    pass."""
    moved_bytes, each = count_pass_bytes(kind, dtype, tokens, width)

    def setup(place: BenchContext) -> Call:
        return build_passes(dtype, tokens, width, place.device)

    return Case(
        op=Op.ELEMENTWISE, dtype=dtype, x=each, work=moved_bytes, setup=setup, input_sets=INPUT_SETS
    )


def _update(parameters: int) -> Case:
    """Fused AdamW over flat fp32 buffers: master weights, gradients and two moments."""

    def setup(place: BenchContext) -> Call:
        master, grad = (_random((parameters,), torch.float32, place.device) for _ in range(2))
        first, second = torch.zeros_like(master), torch.zeros_like(master)
        step = torch.zeros((), device=place.device)

        def call() -> None:
            adamw(
                [master],
                [grad],
                [first],
                [second],
                [],
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


def _copy(size_bytes: int) -> Case:
    """A plain copy between two buffers far larger than any cache."""

    def setup(place: BenchContext) -> Call:
        source = torch.ones(size_bytes, dtype=torch.uint8, device=place.device)
        target = torch.zeros_like(source)
        return lambda: target.copy_(source)

    return Case(op=Probe.COPY, dtype=Dtype.FP32, x=2 * size_bytes, work=2 * size_bytes, setup=setup)


def _step(number: int, shape: TinyShape) -> Case:
    """Training steps too small to cost anything but the host's work."""

    def setup(place: BenchContext) -> Call:
        return build_tiny_step(shape, place.device)

    return Case(
        op=Probe.STEP, dtype=Dtype.BF16, x=number, work=1, setup=setup, time_slices=STEP_SLICES
    )


def group_sizes(ranks: int) -> tuple[int, ...]:
    """Of groups that a world splits into; none for one rank."""
    return tuple(size for size in divisors(ranks) if size > 1)


def _collectives(ranks: int) -> Iterable[Case]:
    makers: Sequence[tuple[Collective, Callable[[torch.Tensor, int, BenchContext], Call]]] = (
        (Collective.ALL_REDUCE, _sum),
        (Collective.ALL_GATHER, _gather),
        (Collective.REDUCE_SCATTER, _scatter),
        (Collective.ALL_TO_ALL, _exchange),
        (Collective.BROADCAST, _spread),
        (Collective.P2P, _shift),
    )
    for op, maker in makers:
        for payload_bytes in PAYLOAD_BYTES:
            elements = max(payload_bytes // 4 // ranks, 1) * ranks
            if op is Collective.ALL_GATHER and elements * 4 * ranks > MAX_GATHERED_BYTES:
                continue
            yield _collective(op, elements, ranks, maker)


def _collective(
    op: Collective,
    elements: int,
    ranks: int,
    maker: Callable[[torch.Tensor, int, BenchContext], Call],
) -> Case:
    """x is the bytes a rank hands in, its own part included; the curve's y is seconds, a call one
    unit of work."""

    def setup(place: BenchContext) -> Call:
        return maker(torch.zeros(elements, device=place.device), ranks, place)

    return Case(op=op, dtype=Dtype.FP32, x=4 * elements, work=1, setup=setup, ranks=ranks)


def _sum(data: torch.Tensor, ranks: int, place: BenchContext) -> Call:
    group = place.groups.get(ranks)
    return lambda: dist.all_reduce(data, group=group)


def _gather(data: torch.Tensor, ranks: int, place: BenchContext) -> Call:
    whole, group = data.new_empty(data.numel() * ranks), place.groups.get(ranks)
    return lambda: dist.all_gather_into_tensor(whole, data, group=group)


def _scatter(data: torch.Tensor, ranks: int, place: BenchContext) -> Call:
    part, group = data.new_empty(data.numel() // ranks), place.groups.get(ranks)
    return lambda: dist.reduce_scatter_tensor(part, data, group=group)


def _exchange(data: torch.Tensor, ranks: int, place: BenchContext) -> Call:
    received, group = torch.empty_like(data), place.groups.get(ranks)
    return lambda: dist.all_to_all_single(received, data, group=group)


def _spread(data: torch.Tensor, ranks: int, place: BenchContext) -> Call:
    group, first = place.groups.get(ranks), place.rank // ranks * ranks
    return lambda: dist.broadcast(data, src=first, group=group)


def _shift(data: torch.Tensor, ranks: int, place: BenchContext) -> Call:
    """Every rank sends to the next of its group and receives from the one before."""
    first = place.rank // ranks * ranks
    after, before = ((place.rank - first + step) % ranks + first for step in (1, -1))
    return _sent(data, after, before, place.groups.get(ranks))


def _sent(data: torch.Tensor, to: int, source: int, group: dist.ProcessGroup | None) -> Call:
    received = torch.empty_like(data)

    def call() -> None:
        sends = dist.P2POp(dist.isend, data, to, group)
        receives = dist.P2POp(dist.irecv, received, source, group)
        for work in dist.batch_isend_irecv([sends, receives]):
            work.wait()

    return call


def _links(ranks: int) -> Iterable[Case]:
    """Every pair of more than two ranks, in rounds in which all ranks have a partner (but one,
    where they are odd)."""
    for turn in range(len(pairing_rounds(ranks)) if ranks > 2 else 0):
        yield _link(turn, ranks)


def _link(turn: int, ranks: int) -> Case:
    def setup(place: BenchContext) -> Call:
        partner = pairing_rounds(ranks)[turn].get(place.rank)
        data = torch.zeros(LINK_BYTES // 4, device=place.device)
        return _sent(data, partner, partner, None) if partner is not None else lambda: None

    return Case(
        op=Probe.LINK, dtype=Dtype.FP32, x=turn + 1, work=LINK_BYTES, setup=setup, ranks=ranks
    )


def pairing_rounds(ranks: int) -> tuple[Mapping[int, int], ...]:
    """Everybody's partner in each round of a tournament, by the circle method: one stays, the
    others move on."""
    seats = [*range(ranks), *([] if ranks % 2 == 0 else [-1])]
    found = []
    for _ in range(len(seats) - 1):
        pairs = [(seats[place], seats[-1 - place]) for place in range(len(seats) // 2)]
        found.append(
            {one: other for pair in pairs if -1 not in pair for one, other in (pair, pair[::-1])}
        )
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return tuple(found)


def _random(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float32, device=device).to(dtype)
