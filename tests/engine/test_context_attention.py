"""Attention over a ring, or over gathered keys, is as exact as one process and one more rounding.

The kernel rounds the result of each block to the dtype of its inputs; sums of blocks are kept in
fp32 and round once.
"""

from __future__ import annotations

import multiprocessing
from itertools import accumulate
from math import hypot
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moewright.engine.comm.collectives import Group
from moewright.engine.kernels.attention import AttentionMask, LinearBias, Segments
from moewright.engine.model.attention import alibi_slopes
from moewright.engine.model.attention_blocks import BlockPlanner
from moewright.engine.model.autograd import CausalAttention
from moewright.engine.model.context_parallel import AllGatherAttention, RingAttention
from moewright.engine.observe.counters import Counters
from moewright.rules.context_parallel import rank_positions
from selection import thorough

CP, SEQ_LEN = 4, 256
DOCUMENTS = (40, 1, 200, 15, 100, 156)
SLOPES = torch.tensor(alibi_slopes(4))
Tensors = list[torch.Tensor]


def make_inputs(dtype: torch.dtype) -> Tensors:
    """Make q, k, v, sinks and the gradient of the output, two query heads a key head."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(2, SEQ_LEN, heads, 32, generator=generator).to(dtype) for heads in (4, 2, 2, 4)
    )
    sinks = torch.randn(4, generator=generator).add(3).to(dtype)
    return [q, k, v, sinks, grad]


def run_attention(function: type, inputs: Tensors, *arguments: object) -> Tensors:
    """Return the output, and the gradients of q, k, v and the sinks."""
    *leaves, grad = (x.clone().requires_grad_(index < 4) for index, x in enumerate(inputs))
    out = function.apply(*leaves, *arguments)  # type: ignore[attr-defined]
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def own_positions(rank: int) -> torch.Tensor:
    parts = rank_positions(SEQ_LEN, CP, rank)
    return torch.cat([torch.arange(part.start, part.stop) for part in parts])


def run_rank(
    rank: int,
    store: Path,
    function: type,
    dtype: torch.dtype,
    segments: Segments | None,
    is_biased: bool,
    results: Connection,
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=CP)
    group = Group(
        name="cp_kv", ranks=tuple(range(CP)), index=rank, handle=None, counters=Counters()
    )
    gathers = function is AllGatherAttention
    planner = BlockPlanner(
        seq_len=SEQ_LEN,
        cp=CP,
        rank=rank,
        gathered_ranks=CP if gathers else 1,
        segments=segments,
        device=torch.device("cpu"),
    )
    if gathers:
        sources = [range(rank), range(rank + 1, CP)]
    else:
        sources = [range(n % CP, n % CP + 1) for n in range(rank - 1, rank - CP, -1)]
    blocks = (planner.own_blocks(), *map(planner.blocks_from, sources))
    if is_biased:
        blocks = tuple(tuple(block.with_slopes(SLOPES) for block in part) for part in blocks)
    positions = own_positions(rank)
    inputs = [x[:, positions] if x.dim() > 1 else x for x in make_inputs(dtype)]
    tensors = run_attention(function, inputs, blocks, group)
    results.send([x.float().numpy() for x in tensors])
    dist.destroy_process_group()


@pytest.mark.spawn
@pytest.mark.parametrize("function", [RingAttention, AllGatherAttention])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("lengths", "is_biased"),
    [(None, False), (DOCUMENTS, False), (DOCUMENTS, True), thorough(None, True)],
)
def test_as_exact_as_one_process_and_one_rounding(
    function: type,
    dtype: torch.dtype,
    lengths: tuple[int, ...] | None,
    is_biased: bool,
    tmp_path: Path,
) -> None:
    """Over whole sequences, and inside documents; with biases that fall with distance too."""
    segments = None
    if lengths is not None:
        cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        segments = Segments(lengths=lengths, cu_seqlens=cu_seqlens)
    bias = None
    if is_biased:
        positions = torch.arange(SEQ_LEN).repeat(1 if segments is None else 2)
        bias = LinearBias(slopes=SLOPES, positions=positions)
    mask = AttentionMask(segments=segments, bias=bias)
    exact_inputs = [x.float() for x in make_inputs(dtype)]
    exact = run_attention(CausalAttention, exact_inputs, mask, Counters())
    alone = run_attention(CausalAttention, make_inputs(dtype), mask, Counters())
    gathered = [torch.zeros_like(x) for x in exact]
    context = multiprocessing.get_context("fork")
    ranks = []
    for rank in range(CP):
        receiver, sender = context.Pipe()
        process = context.Process(
            target=run_rank,
            args=(rank, tmp_path / "store", function, dtype, segments, is_biased, sender),
        )
        process.start()
        ranks.append((rank, process, receiver))
    for rank, process, receiver in ranks:
        positions = own_positions(rank)
        for whole, part in zip(gathered, receiver.recv(), strict=True):
            if whole.dim() > 1:
                whole[:, positions] = torch.from_numpy(part)
            else:  # each rank has the part of the sinks' gradient that comes of its queries
                whole += torch.from_numpy(part)
        process.join()
    # Sinks do not go with a bias (rules.limits.engine_features).
    compared = slice(4 if is_biased else 5)
    for result, reference, expected in zip(
        gathered[compared], alone[compared], exact[compared], strict=True
    ):
        error, error_alone, rounding = (
            float((x.float() - expected).norm() / expected.norm())
            for x in (result, reference, expected.to(dtype))
        )
        # Scores with a bias are sums as large as slope times position, here 64 at most.
        floor = 4e-6 if is_biased else 1e-6
        # Where a CPU's kernel computes in fp32, one process errs by the rounding alone.
        assert error <= max(1.25 * hypot(error_alone, rounding), floor)
