"""Causal attention under context parallelism (rules.context_parallel).

Queries stay on their rank; keys and values of other ranks are sent to it. A query's outputs over
the blocks of keys are merged by their log-sum-exp, in fp32; backward hands every block the merged
output and log-sum-exp, so that the block's part of the gradients is exact without a second pass
(Liu et al., arXiv 2310.01889).

Shapes: B batch, S sequence of this rank (an early and a late chunk), H query heads, G key heads, D
head dim, V value head dim; a block's keys and values lie side by side, kv [B,S,G,D+V].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from moewright.engine.comm.autograd_collectives import AllGatherRows, all_to_all
from moewright.engine.comm.collectives import Group, RingShift, all_gather_rows, reduce_scatter_rows
from moewright.engine.kernels.attention import AttentionState, Segments
from moewright.engine.model.attention_blocks import (
    AttentionBlock,
    BlockPlanner,
    BlocksBySource,
    add_at,
    pack_rows,
    take_ranges,
    write_at,
)
from moewright.engine.model.autograd import (
    CausalAttention,
    CountedFunction,
    apply_sinks,
    compute_sinks_grad,
)
from moewright.engine.runtime import Runtime
from moewright.spec.layout import CpComm
from moewright.spec.model import PositionKind


def plan_attention_blocks(
    runtime: Runtime, segments: Segments | None, window: int = 0
) -> BlocksBySource:
    """Plan the attention blocks of this rank's queries in a micro-batch, by the keys' source.

    The rank's own keys come first. Then, in a ring, come the keys of each other rank in the order
    of their arrival; where keys are gathered, those of all lower ranks and those of all higher
    ones.
    """
    group = runtime.mesh.group("cp_kv")
    rank, cp = group.index, group.size
    planner = BlockPlanner(
        seq_len=runtime.workload.seq_len,
        cp=cp,
        rank=rank,
        gathered_ranks=cp if _gathers_keys(runtime) else 1,
        segments=segments,
        window=window if cp > 1 else 0,  # without CP, CausalAttention applies the window
        device=runtime.device if runtime.model.position is PositionKind.ALIBI else None,
    )
    if _gathers_keys(runtime):
        lower = planner.blocks_from(range(rank))
        higher = planner.blocks_from(range(rank + 1, cp))
        return planner.own_blocks(), lower, higher
    # The ring hands on to the next rank: after `step` shifts these are the keys that are here.
    sources = ((rank - step) % cp for step in range(1, cp))
    from_others = (planner.blocks_from(range(source, source + 1)) for source in sources)
    return planner.own_blocks(), *from_others


def add_slopes(runtime: Runtime, blocks: BlocksBySource, slopes: torch.Tensor) -> BlocksBySource:
    """Return the blocks with biases that fall with distance, of this rank's part of the heads.

    `slopes` [heads] cover the heads of all ranks that exchange heads.
    """
    group = runtime.mesh.group("cp_a2a")
    own = slopes.unflatten(0, (group.size, -1))[group.index]
    return tuple(tuple(block.with_slopes(own) for block in of_source) for of_source in blocks)


def _gathers_keys(runtime: Runtime) -> bool:
    return runtime.mesh.layout.cp_comm is CpComm.ALL_GATHER


def attend(
    runtime: Runtime,
    blocks: BlocksBySource,
    q_BSHD: torch.Tensor,
    k_BSGD: torch.Tensor,
    v_BSGD: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    window: int = 0,
) -> torch.Tensor:
    """Attend causally over whole sequences, of which each CP rank holds its part.

    [B,S,H,D] -> [B,S,H,V]. `sinks` [heads] cover the heads of all ranks that exchange heads. Where
    keys travel, the masks of `blocks` apply the window, and `window` is not read.
    """
    kv_group = runtime.mesh.group("cp_kv")
    heads_group = runtime.mesh.group("cp_a2a")
    if sinks is not None:
        sinks = sinks.unflatten(0, (heads_group.size, -1))[heads_group.index]
    if kv_group.size == 1:
        mask = replace(blocks[0][0].mask, window=window)
        return CausalAttention.apply(q_BSHD, k_BSGD, v_BSGD, sinks, mask, runtime.counters)
    function = AllGatherAttention if _gathers_keys(runtime) else RingAttention
    return function.apply(q_BSHD, k_BSGD, v_BSGD, sinks, blocks, kv_group)


def join_sequences(runtime: Runtime, x_T: torch.Tensor) -> torch.Tensor:
    """Gather rows [T,...] of the tokens of a CP group's ranks, in the order of the sequences.

    Each rank's are those of whole sequences, cut as rules.context_parallel says: [B S / cp,...] ->
    [B S,...].
    """
    group = runtime.mesh.group("cp")
    if group.size == 1:
        return x_T
    gathered = AllGatherRows.apply(x_T, group)
    chunk = runtime.workload.seq_len // (2 * group.size)
    parts = gathered.unflatten(0, (group.size, -1, 2, chunk))
    # Rank r has the chunks r and 2 cp - 1 - r, so that late ones lie in the reverse order.
    early, late = parts.unbind(2)
    return torch.cat((early, late.flip(0))).transpose(0, 1).flatten(0, 2)


def sum_and_split_sequences(runtime: Runtime, x: torch.Tensor) -> torch.Tensor:
    """Sum rows over a CP group, and return those of this rank's tokens: [B S,...] -> [T,...]."""
    group = runtime.mesh.group("cp")
    if group.size == 1:
        return x
    chunk = runtime.workload.seq_len // (2 * group.size)
    early, late = x.unflatten(0, (-1, 2 * group.size, chunk)).transpose(0, 1).chunk(2)
    return reduce_scatter_rows(torch.stack((early, late.flip(0)), 2).flatten(0, 3), group)


def scatter_heads(
    runtime: Runtime, x_BSHD: torch.Tensor, group_name: str = "cp_a2a"
) -> torch.Tensor:
    """Exchange heads for tokens: each of n ranks gets 1/n of the heads, for all ranks' tokens.

    [B,S,H,D] -> [B,S*n,H/n,D]. The tokens of all n ranks form an early and a late chunk, as those
    of one rank do (rules.context_parallel). Where there are fewer than n heads, each rank gets a
    copy of the one that it needs: H is then the next multiple of n.
    """
    group = runtime.mesh.group(group_name)
    n = group.size
    if n == 1:
        return x_BSHD
    heads = x_BSHD.shape[2]
    if heads < n:
        x_BSHD = x_BSHD.unsqueeze(3).expand(-1, -1, -1, n // heads, -1).flatten(2, 3)
    parts = x_BSHD.unflatten(2, (n, -1)).permute(2, 0, 1, 3, 4)
    # By the ranks: late chunks lie in the reverse order (see join_sequences).
    early, late = all_to_all(parts, group, send=[1] * n, receive=[1] * n).chunk(2, 2)
    return torch.cat((early, late.flip(0))).permute(1, 0, 2, 3, 4).flatten(1, 2)


def gather_heads(
    runtime: Runtime, x_BSHD: torch.Tensor, group_name: str = "cp_a2a"
) -> torch.Tensor:
    """Undo `scatter_heads`: [B,S*n,H/n,D] -> [B,S,H,D]."""
    group = runtime.mesh.group(group_name)
    n = group.size
    if n == 1:
        return x_BSHD
    early, late = x_BSHD.unflatten(1, (2 * n, -1)).transpose(0, 1).chunk(2)
    parts = torch.cat((early, late.flip(0)), 2)
    parts = all_to_all(parts, group, send=[1] * n, receive=[1] * n)
    return parts.permute(1, 2, 0, 3, 4).flatten(2, 3)


class _MergedAttention:
    """The output and log-sum-exp of one rank's queries [B,S,H,D] over the keys attended so far.

    The rank's own keys must be attended first.
    """

    def __init__(self, q_BSHD: torch.Tensor, blocks: BlocksBySource) -> None:
        self._shape = q_BSHD.shape[:2]
        self._blocks = blocks
        self._q = pack_rows(q_BSHD, blocks)
        self._out = torch.empty(0)
        self._lse = torch.empty(0)
        self._random_state: AttentionState = ()

    def attend(self, kv: torch.Tensor, blocks: tuple[AttentionBlock, ...]) -> None:
        for block in blocks:
            self._merge(block, *block.attend(self._q, pack_rows(kv, self._blocks)))

    def _merge(self, block: AttentionBlock, out: torch.Tensor, state: AttentionState) -> None:
        lse, *random_state = state
        if not self._lse.numel():
            self._random_state = tuple(random_state)
            if out.shape[1] == self._q.shape[1]:  # all queries attend their own tokens at once
                self._out = out.float()
                self._lse = lse
                return
            # A query that has met no key has the log-sum-exp -inf, which weighs 0 in a merge.
            self._out = out.new_zeros((*self._q.shape[:3], out.shape[3]), dtype=torch.float32)
            self._lse = lse.new_full((*lse.shape[:2], self._q.shape[1]), float("-inf"))
        old_lse = take_ranges(self._lse, block.queries, 2)
        old_out = take_ranges(self._out, block.queries)
        new_lse = torch.logaddexp(old_lse, lse)
        old_share, new_share = (
            torch.exp(part - new_lse).transpose(1, 2)[..., None] for part in (old_lse, lse)
        )
        write_at(self._out, block.queries, old_out * old_share + out.float() * new_share)
        write_at(self._lse, block.queries, new_lse, 2)

    def result(self) -> tuple[torch.Tensor, AttentionState]:
        """Return the output [B,S,H,V] and its state."""
        out = self._out.to(self._q.dtype).view(*self._shape, *self._out.shape[2:])
        return out, (self._lse, *self._random_state)


class _BlockGradients:
    """The gradients of one rank's queries, and of each block of keys.

    The queries' gradients are summed in fp32 until all keys have been attended.
    """

    def __init__(
        self,
        q_BSHD: torch.Tensor,
        out: torch.Tensor,
        state: AttentionState,
        grad_BSHD: torch.Tensor,
        blocks: BlocksBySource,
    ) -> None:
        self._blocks = blocks
        self._q_BSHD = q_BSHD
        self._q, self._out, self._grad = (pack_rows(x, blocks) for x in (q_BSHD, out, grad_BSHD))
        self._state = state
        self._grad_q = torch.zeros_like(self._q, dtype=torch.float32)

    def compute_kv_grads(
        self, kv: torch.Tensor, blocks: tuple[AttentionBlock, ...]
    ) -> list[torch.Tensor]:
        """Return this rank's part of the gradient of the keys and values of each block."""
        kv = pack_rows(kv, self._blocks)
        kv_grads = []
        for block in blocks:
            grad_q, kv_grad = block.backward(self._grad, self._q, kv, self._out, self._state)
            add_at(self._grad_q, block.queries, grad_q)
            kv_grads.append(kv_grad)
        return kv_grads

    def add_kv_grads(
        self,
        sums: torch.Tensor,
        blocks: tuple[AttentionBlock, ...],
        kv_grads: list[torch.Tensor],
    ) -> None:
        """Add the gradients that `compute_kv_grads` returned to the sums over all ranks."""
        for block, kv_grad in zip(blocks, kv_grads, strict=True):
            add_at(pack_rows(sums, self._blocks), block.keys, kv_grad)

    def result(self, grad_kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of q, k and v in their dtype."""
        dtype = self._q_BSHD.dtype
        k_width = self._q_BSHD.shape[-1]
        grad_k, grad_v = grad_kv.to(dtype).split((k_width, grad_kv.shape[-1] - k_width), -1)
        # As a view, a gradient that weight gradients wait with would keep that of the keys too.
        return self._grad_q.to(dtype).view(self._q_BSHD.shape), grad_k, grad_v.contiguous()


class RingAttention(CountedFunction):
    """Attention whose keys and values go round the ranks of `group`.

    Each block travels while the one before is attended. In backward the fp32 sums of a block's
    gradients travel one step behind the block, and the last step brings them to the rank that owns
    it. Keeps q, k, v, the output and the log-sum-exp.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        blocks: BlocksBySource,
        group: Group,
    ) -> torch.Tensor:
        CountedFunction.save_scope(ctx, group.counters)
        ctx.group = group
        ctx.blocks = blocks
        merged = _MergedAttention(q, blocks)
        for source_blocks, kv in _ring(torch.cat((k, v), -1), blocks, group):
            merged.attend(kv, source_blocks)
        out, state = apply_sinks(*merged.result(), sinks)
        ctx.save_for_backward(q, k, v, sinks, out, *state)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, *state = ctx.saved_tensors
        grads = _BlockGradients(q, out, tuple(state), grad, ctx.blocks)
        grad_sinks = compute_sinks_grad(grad, out, state[0], sinks)
        sums_shift: RingShift | None = None
        with ctx.counters.scopes.enter(ctx.scope):
            own_kv = torch.cat((k, v), -1)
            sums = torch.zeros_like(own_kv, dtype=torch.float32)
            for source_blocks, kv in _ring(own_kv, ctx.blocks, ctx.group):
                kv_grads = grads.compute_kv_grads(kv, source_blocks)
                # Only now: the sums have travelled while the gradients were computed.
                if sums_shift is not None:
                    sums = sums_shift.wait()
                grads.add_kv_grads(sums, source_blocks, kv_grads)
                sums_shift = RingShift(sums, ctx.group)
            assert sums_shift is not None  # a ring has at least one step
            return *grads.result(sums_shift.wait()), grad_sinks, None, None


def _ring(
    kv: torch.Tensor, blocks: BlocksBySource, group: Group
) -> Iterator[tuple[tuple[AttentionBlock, ...], torch.Tensor]]:
    """Yield each rank's blocks with its keys and values, the own ones first, then as they arrive.

    The exchange of the next ones starts before these are used.
    """
    for step, source_blocks in enumerate(blocks, 1):
        # The last block goes no further, for its owner kept a copy.
        shift = RingShift(kv, group) if step < group.size else None
        yield source_blocks, kv
        if shift is not None:
            kv = shift.wait()


class AllGatherAttention(CountedFunction):
    """Attention for which every rank gathers all keys and values, and again in backward.

    The gradients of all blocks are summed and scattered in fp32. Keeps q, k, v, the output and the
    log-sum-exp, not what was gathered.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        blocks: BlocksBySource,
        group: Group,
    ) -> torch.Tensor:
        CountedFunction.save_scope(ctx, group.counters)
        ctx.group = group
        ctx.blocks = blocks
        merged = _MergedAttention(q, blocks)
        gathered = _gather_kv(torch.cat((k, v), -1), group)
        for source_blocks in blocks:
            merged.attend(gathered, source_blocks)
        out, state = apply_sinks(*merged.result(), sinks)
        ctx.save_for_backward(q, k, v, sinks, out, *state)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, *state = ctx.saved_tensors
        grads = _BlockGradients(q, out, tuple(state), grad, ctx.blocks)
        grad_sinks = compute_sinks_grad(grad, out, state[0], sinks)
        with ctx.counters.scopes.enter(ctx.scope):
            gathered = _gather_kv(torch.cat((k, v), -1), ctx.group)
            sums = torch.zeros_like(gathered, dtype=torch.float32)
            for source_blocks in ctx.blocks:
                kv_grads = grads.compute_kv_grads(gathered, source_blocks)
                grads.add_kv_grads(sums, source_blocks, kv_grads)
            # A reduce-scatter cuts the first dim, and the keys of a rank lie in each row.
            by_rank = sums.unflatten(1, (ctx.group.size, -1)).transpose(0, 1).flatten(0, 1)
            own_sums = reduce_scatter_rows(by_rank, ctx.group)
            return *grads.result(own_sums), grad_sinks, None, None


def _gather_kv(kv: torch.Tensor, group: Group) -> torch.Tensor:
    """Gather every rank's block, side by side in each row: [B,S,G,D+V] -> [B,ranks*S,G,D+V]."""
    return all_gather_rows(kv, group).unflatten(0, (group.size, -1)).transpose(0, 1).flatten(1, 2)
