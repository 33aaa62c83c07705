"""Causal attention under context parallelism: queries stay, keys and values of other ranks come by (rules.context).

What each block of keys gives a query is merged by its log-sum-exp, in fp32; backward hands every block the merged
output and log-sum, so that its part of the gradients is exact without a second pass (Liu et al., arXiv 2310.01889).

Shapes: B batch, S sequence of this rank (an early and a late chunk), H query heads, G key heads, D head dim; a block of
keys and values lies side by side, kv [B,S,G,D+V].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moewright.engine.books import Books
from moewright.engine.collectives import Group, Shift, all_to_all, gather, scatter_sum
from moewright.engine.kernels import Runs, attention, attention_backward
from moewright.engine.model.functions import Booked, CausalAttention
from moewright.engine.runtime import Runtime
from moewright.spec.layout import CpComm

_Rest = tuple[torch.Tensor, ...]


def attend(
    run: Runtime, runs: Runs | None, q_BSHD: torch.Tensor, k_BSGD: torch.Tensor, v_BSGD: torch.Tensor
) -> torch.Tensor:
    """Causal attention over whole sequences, of which each rank of a group holds its part: [B,S,H,D] -> [B,S,H,V].

    `runs` of tokens are attended each alone; they are whole on every rank, for keys then do not travel
    (rules.exclusions).
    """
    group = run.mesh.group("cp_kv")
    if group.size == 1:
        return CausalAttention.apply(q_BSHD, k_BSGD, v_BSGD, runs, run.books)
    kind = GatheredAttention if run.mesh.layout.cp_comm is CpComm.ALL_GATHER else RingAttention
    return kind.apply(q_BSHD, k_BSGD, v_BSGD, group, run.books)


def to_heads(run: Runtime, x_BSHD: torch.Tensor) -> torch.Tensor:
    """A part of the heads for the tokens of all ranks that exchange them: [B,S,H,D] -> [B,S*n,H/n,D].

    All tokens together have an early and a late chunk as those of one rank have (rules.context). Where n ranks share
    fewer heads, each gets a copy of its one: H is then the next multiple of n.
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


def to_tokens(run: Runtime, x_BSHD: torch.Tensor) -> torch.Tensor:
    """The way back of `to_heads`: [B,S*n,H/n,D] -> [B,S,H,D]."""
    group = run.mesh.group("cp_a2a")
    n = group.size
    if n == 1:
        return x_BSHD
    early, late = x_BSHD.unflatten(1, (2 * n, -1)).transpose(0, 1).chunk(2)
    parts = torch.cat((early, late.flip(0)), 2)
    return all_to_all(parts, group, send=[1] * n, receive=[1] * n).permute(1, 2, 0, 3, 4).flatten(2, 3)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Meeting:
    """Which of this rank's queries attend which keys of some rank's block; `causal` in the own block alone.

    The early chunk comes before every late one: queries of both chunks see the early keys of lower ranks and none of
    their late ones; the late chunk alone sees the keys of higher ranks, all of them.
    """

    queries: slice
    keys: slice
    causal: bool


def _meeting(source: int, here: int, length: int) -> _Meeting:
    if source == here:
        return _Meeting(queries=slice(None), keys=slice(None), causal=True)
    if source < here:
        return _Meeting(queries=slice(None), keys=slice(length // 2), causal=False)
    return _Meeting(queries=slice(length // 2, None), keys=slice(None), causal=False)


class _Forward:
    """One rank's queries [B,S,H,D], and what the keys met so far give them. The own block comes first."""

    def __init__(self, q_BSHD: torch.Tensor, width: int) -> None:
        self._q, self._width = q_BSHD, width
        self._out, self._lse = torch.empty(0), torch.empty(0)
        self._random: _Rest = ()

    def meet(self, kv: torch.Tensor, queries: slice, *, causal: bool) -> None:
        k, v = kv.split((self._width, kv.shape[-1] - self._width), -1)
        out, (lse, *random) = attention(self._q[:, queries], k, v, causal=causal)
        if causal:
            self._out, self._lse, self._random = out.float(), lse, tuple(random)
            return
        seen, both = self._lse[:, :, queries], torch.logaddexp(self._lse[:, :, queries], lse)
        old, new = (torch.exp(part - both).transpose(1, 2)[..., None] for part in (seen, lse))
        self._out[:, queries] = self._out[:, queries] * old + out.float() * new
        self._lse[:, :, queries] = both

    def result(self) -> tuple[torch.Tensor, _Rest]:
        return self._out.to(self._q.dtype), (self._lse, *self._random)


class _Backward:
    """Gradients of one rank's queries, in fp32 until all keys have been met, and of each block of keys."""

    def __init__(self, q_BSHD: torch.Tensor, merged: Sequence[torch.Tensor], grad_BSHD: torch.Tensor) -> None:
        """`merged`: the output, its log-sum, and the random state of the device."""
        self._q, (self._out, self._lse, *self._random) = q_BSHD, merged
        self._grad, self._width = grad_BSHD, q_BSHD.shape[-1]
        self.grad_q = torch.zeros_like(self._q, dtype=torch.float32)

    def meet(self, kv: torch.Tensor, queries: slice, *, causal: bool) -> torch.Tensor:
        """This rank's part of the block's gradient, like kv."""
        k, v = kv.split((self._width, kv.shape[-1] - self._width), -1)
        rest = (self._lse[:, :, queries].contiguous(), *self._random)
        grad_q, grad_k, grad_v = attention_backward(
            self._grad[:, queries], self._q[:, queries], k, v, self._out[:, queries], rest, causal=causal
        )
        self.grad_q[:, queries] += grad_q
        return torch.cat((grad_k, grad_v), -1)

    def result(self, grad_kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        dtype = self._q.dtype
        grad_k, grad_v = grad_kv.to(dtype).split((self._width, grad_kv.shape[-1] - self._width), -1)
        return self.grad_q.to(dtype), grad_k, grad_v, None, None


class RingAttention(Booked):
    """Blocks of keys and values go round the ranks of `group`, each under way while the one before is attended.

    In backward the fp32 sums of a block's gradients follow it, a step behind, and go home last. Keeps q, k, v, the
    output and LSE.
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Group, books: Books
    ) -> torch.Tensor:
        Booked.remember(ctx, books)
        ctx.group = group
        found = _Forward(q, k.shape[-1])
        for meeting, kv in _round(torch.cat((k, v), -1), group):
            found.meet(kv[:, meeting.keys], meeting.queries, causal=meeting.causal)
        out, rest = found.result()
        ctx.save_for_backward(q, k, v, out, *rest)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        q, k, v, *rest = ctx.saved_tensors
        found = _Backward(q, rest, grad)
        following: Shift | None = None
        with ctx.books.within(ctx.module):
            kv = torch.cat((k, v), -1)
            sums = torch.zeros_like(kv, dtype=torch.float32)
            for meeting, block in _round(kv, ctx.group):
                part = found.meet(block[:, meeting.keys], meeting.queries, causal=meeting.causal)
                if following is not None:
                    sums = following.wait()
                sums[:, meeting.keys] += part
                following = Shift(sums, ctx.group)
            assert following is not None  # a ring has ranks
            return found.result(following.wait())


def _round(kv: torch.Tensor, group: Group) -> Iterator[tuple[_Meeting, torch.Tensor]]:
    """The blocks of all ranks as they come by, the own one first, the next one asked for before this one is used."""
    for step in range(group.size):
        coming = Shift(kv, group) if step + 1 < group.size else None
        yield _meeting((group.index - step) % group.size, group.index, kv.shape[1]), kv
        if coming is not None:
            kv = coming.wait()


class GatheredAttention(Booked):
    """Every rank gathers all blocks of keys and values, in backward once more; the gradients of all blocks are summed
    and scattered in fp32. Keeps q, k, v, the output and LSE, not the gathered.
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Group, books: Books
    ) -> torch.Tensor:
        Booked.remember(ctx, books)
        ctx.group = group
        found, blocks = _Forward(q, k.shape[-1]), _gathered(torch.cat((k, v), -1), group)
        for ranks, meeting in _meetings(group, k.shape[1]):
            found.meet(
                blocks[ranks, :, meeting.keys].transpose(0, 1).flatten(1, 2), meeting.queries, causal=meeting.causal
            )
        out, rest = found.result()
        ctx.save_for_backward(q, k, v, out, *rest)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        q, k, v, *rest = ctx.saved_tensors
        found = _Backward(q, rest, grad)
        with ctx.books.within(ctx.module):
            blocks = _gathered(torch.cat((k, v), -1), ctx.group)
            sums = torch.zeros_like(blocks, dtype=torch.float32)
            for ranks, meeting in _meetings(ctx.group, k.shape[1]):
                met = blocks[ranks, :, meeting.keys]
                part = found.meet(met.transpose(0, 1).flatten(1, 2), meeting.queries, causal=meeting.causal)
                sums[ranks, :, meeting.keys] = part.unflatten(1, (met.shape[0], -1)).transpose(0, 1).float()
            return found.result(scatter_sum(sums.flatten(0, 1), ctx.group))


def _gathered(kv: torch.Tensor, group: Group) -> torch.Tensor:
    """Every rank's block: [B,S,G,D+V] -> [ranks,B,S,G,D+V]."""
    return gather(kv, group).unflatten(0, (group.size, -1))


def _meetings(group: Group, length: int) -> Iterator[tuple[slice, _Meeting]]:
    """The own block, then all lower ranks' and all higher ranks' at once: what they meet is the same."""
    here = group.index
    for first, stop in ((here, here + 1), (0, here), (here + 1, group.size)):
        if first < stop:
            yield slice(first, stop), _meeting(first, here, length)
