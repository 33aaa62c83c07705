"""Causal attention under context parallelism: queries stay, keys and values of other ranks come by
(rules.context).

What each block of keys gives a query is merged by its log-sum-exp, in fp32; backward hands every
block the merged output and log-sum, so that its part of the gradients is exact without a second
pass (Liu et al., arXiv 2310.01889).

Shapes: B batch, S sequence of this rank (an early and a late chunk), H query heads, G key heads, D
head dim; a block of keys and values lies side by side, kv [B,S,G,D+V].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from moewright.engine.comm.collectives import (
    Group,
    RingShift,
    all_gather_rows,
    all_to_all,
    reduce_scatter_rows,
)
from moewright.engine.kernels.attention import Segments
from moewright.engine.model.attention_blocks import (
    AttentionBlock,
    AttentionState,
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
from moewright.engine.observe.counters import Counters
from moewright.engine.runtime import Runtime
from moewright.spec.layout import CpComm


def plan_attention_blocks(run: Runtime, runs: Segments | None, window: int = 0) -> BlocksBySource:
    """What the queries of a micro-batch that consists of `runs` meet on this rank: its own tokens,
    then those of the other ranks in the order in which they come round the ring, or of all lower
    and of all higher ranks where keys are gathered.
    """
    group, gathers = run.mesh.group("cp_kv"), _gathers(run)
    here, size = group.index, group.size
    together = size if gathers else 1
    window = window if size > 1 else 0  # else CausalAttention's
    host = BlockPlanner(
        seq_len=run.workload.seq_len,
        cp=size,
        rank=here,
        gathered_ranks=together,
        segments=runs,
        window=window,
    )
    if gathers:
        return (
            host.own_blocks(),
            host.blocks_from(range(here)),
            host.blocks_from(range(here + 1, size)),
        )
    coming = ((here - step) % size for step in range(1, size))
    return (host.own_blocks(), *(host.blocks_from(range(source, source + 1)) for source in coming))


def _gathers(run: Runtime) -> bool:
    return run.mesh.layout.cp_comm is CpComm.ALL_GATHER


def attend(
    run: Runtime,
    met: BlocksBySource,
    q_BSHD: torch.Tensor,
    k_BSGD: torch.Tensor,
    v_BSGD: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    window: int = 0,
) -> torch.Tensor:
    """Causal attention over whole sequences, of which each rank of a group holds its part:
    [B,S,H,D] -> [B,S,H,V].

    `sinks`: of all heads of the ranks that exchange them. `met` knows of the `window` where keys
    travel.
    """
    group, apart = run.mesh.group("cp_kv"), run.mesh.group("cp_a2a")
    if sinks is not None:
        sinks = sinks.unflatten(0, (apart.size, -1))[apart.index]
    if group.size == 1:
        return CausalAttention.apply(
            q_BSHD, k_BSGD, v_BSGD, sinks, met[0][0].query_segments, window, run.counters
        )
    kind = AllGatherAttention if _gathers(run) else RingAttention
    return kind.apply(q_BSHD, k_BSGD, v_BSGD, sinks, met, group, run.counters)


def scatter_heads(run: Runtime, x_BSHD: torch.Tensor) -> torch.Tensor:
    """A part of the heads for the tokens of all ranks that exchange them: [B,S,H,D] ->
    [B,S*n,H/n,D].

    All tokens together have an early and a late chunk as those of one rank have (rules.context).
    Where n ranks share fewer heads, each gets a copy of its one: H is then the next multiple of n.
    """
    group = run.mesh.group("cp_a2a")
    n = group.size
    if n == 1:
        return x_BSHD
    if x_BSHD.shape[2] < n:
        x_BSHD = x_BSHD.unsqueeze(3).expand(-1, -1, -1, n // x_BSHD.shape[2], -1).flatten(2, 3)
    parts = x_BSHD.unflatten(2, (n, -1)).permute(2, 0, 1, 3, 4)
    early, late = all_to_all(parts, group, send=[1] * n, receive=[1] * n).chunk(2, 2)
    return torch.cat((early, late.flip(0))).permute(1, 0, 2, 3, 4).flatten(1, 2)


def gather_heads(run: Runtime, x_BSHD: torch.Tensor) -> torch.Tensor:
    """The way back of `to_heads`: [B,S*n,H/n,D] -> [B,S,H,D]."""
    group = run.mesh.group("cp_a2a")
    n = group.size
    if n == 1:
        return x_BSHD
    early, late = x_BSHD.unflatten(1, (2 * n, -1)).transpose(0, 1).chunk(2)
    parts = torch.cat((early, late.flip(0)), 2)
    return (
        all_to_all(parts, group, send=[1] * n, receive=[1] * n).permute(1, 2, 0, 3, 4).flatten(2, 3)
    )


class _Forward:
    """One rank's queries [B,S,H,D], and what the keys met so far give them. The own tokens come
    first."""

    def __init__(self, q_BSHD: torch.Tensor, met: BlocksBySource) -> None:
        self._shape, self._met = q_BSHD.shape[:2], met
        self._q = pack_rows(q_BSHD, self._met)
        self._out, self._lse = torch.empty(0), torch.empty(0)
        self._random: AttentionState = ()

    def meet(self, kv: torch.Tensor, block: tuple[AttentionBlock, ...]) -> None:
        for meeting in block:
            self._merge(meeting, *meeting.attend(self._q, pack_rows(kv, self._met)))

    def _merge(self, meeting: AttentionBlock, out: torch.Tensor, rest: AttentionState) -> None:
        lse, *random = rest
        if not self._lse.numel():
            self._random = tuple(random)
            if out.shape[1] == self._q.shape[1]:  # all queries meet their own tokens at once
                self._out, self._lse = out.float(), lse
                return
            self._out = out.new_zeros((*self._q.shape[:3], out.shape[3]), dtype=torch.float32)
            self._lse = lse.new_full((*lse.shape[:2], self._q.shape[1]), float("-inf"))
        seen, sofar = (
            take_ranges(self._lse, meeting.queries, 2),
            take_ranges(self._out, meeting.queries),
        )
        both = torch.logaddexp(seen, lse)
        old, new = (torch.exp(part - both).transpose(1, 2)[..., None] for part in (seen, lse))
        write_at(self._out, meeting.queries, sofar * old + out.float() * new)
        write_at(self._lse, meeting.queries, both, 2)

    def result(self) -> tuple[torch.Tensor, AttentionState]:
        """The output [B,S,H,V]; its log-sum and the random state of the device."""
        return self._out.to(self._q.dtype).view(*self._shape, *self._out.shape[2:]), (
            self._lse,
            *self._random,
        )


class _Backward:
    """Gradients of one rank's queries, in fp32 until all keys have been met, and of each block of
    keys."""

    def __init__(
        self,
        q_BSHD: torch.Tensor,
        out: torch.Tensor,
        rest: AttentionState,
        grad_BSHD: torch.Tensor,
        met: BlocksBySource,
    ) -> None:
        self._met, self._whole = met, q_BSHD
        self._q, self._out, self._grad = (pack_rows(x, self._met) for x in (q_BSHD, out, grad_BSHD))
        self._lse, *self._random = rest
        self._grad_q = torch.zeros_like(self._q, dtype=torch.float32)

    def meet(self, kv: torch.Tensor, block: tuple[AttentionBlock, ...]) -> list[torch.Tensor]:
        """This rank's part of the gradient of the keys and values of a block, for each meeting."""
        kv, parts = pack_rows(kv, self._met), []
        for meeting in block:
            grad_q, part = meeting.backward(
                self._grad, self._q, kv, self._out, self._lse, tuple(self._random)
            )
            add_at(self._grad_q, meeting.queries, grad_q)
            parts.append(part)
        return parts

    def add(
        self, sums: torch.Tensor, block: tuple[AttentionBlock, ...], parts: list[torch.Tensor]
    ) -> None:
        """Add what `meet` gave to the sums of all of a block."""
        for meeting, part in zip(block, parts, strict=True):
            add_at(pack_rows(sums, self._met), meeting.keys, part)

    def result(self, grad_kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        like, width = self._whole, self._whole.shape[-1]
        grad_k, grad_v = grad_kv.to(like.dtype).split((width, grad_kv.shape[-1] - width), -1)
        return self._grad_q.to(like.dtype).view(like.shape), grad_k, grad_v


class RingAttention(CountedFunction):
    """Blocks of keys and values go round the ranks of `group`, each under way while the one before
    is attended.

    In backward the fp32 sums of a block's gradients follow it, a step behind, and go home last.
    Keeps q, k, v, the output and LSE.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        met: BlocksBySource,
        group: Group,
        books: Counters,
    ) -> torch.Tensor:
        CountedFunction.save_scope(ctx, books)
        ctx.group, ctx.met = group, met
        found = _Forward(q, met)
        for block, kv in _round(torch.cat((k, v), -1), met, group):
            found.meet(kv, block)
        out, rest = apply_sinks(*found.result(), sinks)
        ctx.save_for_backward(q, k, v, sinks, out, *rest)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, *rest = ctx.saved_tensors
        found = _Backward(q, out, tuple(rest), grad, ctx.met)
        of_sinks = compute_sinks_grad(grad, out, rest[0], sinks)
        following: RingShift | None = None
        with ctx.books.within(ctx.where):
            kv = torch.cat((k, v), -1)
            sums = torch.zeros_like(kv, dtype=torch.float32)
            for block, visitor in _round(kv, ctx.met, ctx.group):
                parts = found.meet(visitor, block)
                if following is not None:
                    sums = following.wait()
                found.add(sums, block, parts)
                following = RingShift(sums, ctx.group)
            assert following is not None  # a ring has ranks
            return *found.result(following.wait()), of_sinks, None, None, None


def _round(
    kv: torch.Tensor, met: BlocksBySource, group: Group
) -> Iterator[tuple[tuple[AttentionBlock, ...], torch.Tensor]]:
    """The blocks of all ranks as they come by, the own one first, the next one asked for before
    this one is used."""
    for step, block in enumerate(met, 1):
        coming = RingShift(kv, group) if step < group.size else None
        yield block, kv
        if coming is not None:
            kv = coming.wait()


class AllGatherAttention(CountedFunction):
    """Every rank gathers all blocks of keys and values, in backward once more; the gradients of all
    blocks are summed and scattered in fp32. Keeps q, k, v, the output and LSE, not the gathered.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        met: BlocksBySource,
        group: Group,
        books: Counters,
    ) -> torch.Tensor:
        CountedFunction.save_scope(ctx, books)
        ctx.group, ctx.met = group, met
        found, gathered = _Forward(q, met), _gathered(torch.cat((k, v), -1), group)
        for block in met:
            found.meet(gathered, block)
        out, rest = apply_sinks(*found.result(), sinks)
        ctx.save_for_backward(q, k, v, sinks, out, *rest)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, *rest = ctx.saved_tensors
        found = _Backward(q, out, tuple(rest), grad, ctx.met)
        of_sinks = compute_sinks_grad(grad, out, rest[0], sinks)
        with ctx.books.within(ctx.where):
            gathered = _gathered(torch.cat((k, v), -1), ctx.group)
            sums = torch.zeros_like(gathered, dtype=torch.float32)
            for block in ctx.met:
                found.add(sums, block, found.meet(gathered, block))
            by_rank = sums.unflatten(1, (ctx.group.size, -1)).transpose(0, 1).flatten(0, 1)
            return (
                *found.result(reduce_scatter_rows(by_rank, ctx.group)),
                of_sinks,
                None,
                None,
                None,
            )


def _gathered(kv: torch.Tensor, group: Group) -> torch.Tensor:
    """Every rank's block, side by side in each row: [B,S,G,D+V] -> [B,ranks*S,G,D+V]."""
    return all_gather_rows(kv, group).unflatten(0, (group.size, -1)).transpose(0, 1).flatten(1, 2)
