"""Attention over a ring of ranks, or over gathered keys, is as exact as one process: sums of blocks
round once."""

from __future__ import annotations

import multiprocessing
from itertools import accumulate
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moewright.engine.comm.collectives import Group
from moewright.engine.kernels.attention import Segments
from moewright.engine.model.attention_blocks import BlockPlanner
from moewright.engine.model.autograd import CausalAttention
from moewright.engine.model.context_parallel import AllGatherAttention, RingAttention
from moewright.engine.observe.counters import Counters
from moewright.rules.context_parallel import rank_positions

CP, LENGTH = 4, 256
Tensors = list[torch.Tensor]


def make_inputs(dtype: torch.dtype) -> Tensors:
    """q, k, v, sinks and the gradient of the output, two query heads a key head."""
    dice = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(2, LENGTH, heads, 32, generator=dice).to(dtype) for heads in (4, 2, 2, 4)
    )
    return [q, k, v, torch.randn(4, generator=dice).add(3).to(dtype), grad]


def run_attention(attend: type, inputs: Tensors, *more: object) -> Tensors:
    """The output, and the gradients of q, k, v and the sinks."""
    *leaves, grad = (x.clone().requires_grad_(place < 4) for place, x in enumerate(inputs))
    out = attend.apply(*leaves, *more)  # type: ignore[attr-defined]
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def run_rank(
    rank: int,
    store: Path,
    kind: type,
    dtype: torch.dtype,
    runs: Segments | None,
    answer: Connection,
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=CP)
    group = Group(
        name="cp_kv", ranks=tuple(range(CP)), index=rank, handle=None, counters=Counters()
    )
    gathers = kind is AllGatherAttention
    host = BlockPlanner(
        seq_len=LENGTH, cp=CP, rank=rank, gathered_ranks=CP if gathers else 1, segments=runs
    )
    blocks = (
        [range(rank), range(rank + 1, CP)]
        if gathers
        else [range(n % CP, n % CP + 1) for n in range(rank - 1, rank - CP, -1)]
    )
    met = (host.own_blocks(), *(host.blocks_from(block) for block in blocks))
    here = torch.cat(
        [torch.arange(part.start, part.stop) for part in rank_positions(LENGTH, CP, rank)]
    )
    mine = [x[:, here] if x.dim() > 1 else x for x in make_inputs(dtype)]
    answer.send([x.float().numpy() for x in run_attention(kind, mine, met, group, group.counters)])
    dist.destroy_process_group()


@pytest.mark.spawn
@pytest.mark.parametrize("kind", [RingAttention, AllGatherAttention])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [None, (40, 1, 200, 15, 100, 156)])
def test_as_exact_as_one_process(
    kind: type, dtype: torch.dtype, lengths: tuple[int, ...] | None, tmp_path: Path
) -> None:
    """Over whole sequences, and inside documents."""
    runs = None
    if lengths is not None:
        runs = Segments(
            lengths=lengths, cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        )
    exact = run_attention(
        CausalAttention, [x.float() for x in make_inputs(dtype)], runs, 0, Counters()
    )
    alone = run_attention(CausalAttention, make_inputs(dtype), runs, 0, Counters())
    context, found = multiprocessing.get_context("fork"), [torch.zeros_like(x) for x in exact]
    ranks = []
    for rank in range(CP):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=run_rank, args=(rank, tmp_path / "store", kind, dtype, runs, theirs)
        )
        process.start()
        ranks.append((rank, process, ours))
    for rank, process, answer in ranks:
        here = torch.cat(
            [torch.arange(part.start, part.stop) for part in rank_positions(LENGTH, CP, rank)]
        )
        for whole, part in zip(found, answer.recv(), strict=True):
            if whole.dim() > 1:
                whole[:, here] = torch.from_numpy(part)
            else:  # of the sinks each rank has the part of its queries
                whole += torch.from_numpy(part)
        process.join()
    for ours, theirs, wanted in zip(found, alone, exact, strict=True):
        error, bound = (float((x.float() - wanted).norm() / wanted.norm()) for x in (ours, theirs))
        assert error <= max(1.25 * bound, 1e-6)
