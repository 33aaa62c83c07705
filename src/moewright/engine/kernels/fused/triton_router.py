"""The Triton kernel of the router: scores, the best experts, their weights; and back to the logits.

A program holds some tokens with all of their experts. Groups of experts that shut others out are
not chosen among here: such a choice comes in.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl

from moewright.engine.kernels.fused.reference import SCORE_SUM_EPS
from moewright.spec.model import RouterSpec, ScoreFunction

_HELD = 4096  # scores that a program holds
_SCORE: Mapping[ScoreFunction, int] = MappingProxyType(
    {ScoreFunction.SOFTMAX: 0, ScoreFunction.SIGMOID: 1, ScoreFunction.SQRT_SOFTPLUS: 2}
)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), to the last digits also where exp(x) vanishes beside 1."""
    small = tl.exp(-tl.abs(x))
    more = 1.0 + small
    log1p = tl.where(
        more == 1.0, small, tl.log(more) * small / tl.where(more == 1.0, 1.0, more - 1.0)
    )
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def _route(
    logits, bias, forced, experts, weights, totals, scores, count, factor: tl.constexpr, tiny: tl.constexpr,
    EXPERTS: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, BIASED: tl.constexpr, FORCED: tl.constexpr,
    RENORMALIZED: tl.constexpr, TOKENS: tl.constexpr, WIDE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    expert, slot = tl.arange(0, WIDE), tl.arange(0, SLOTS)
    there = (token < count)[:, None] & (expert < EXPERTS)[None, :]
    at = token[:, None] * EXPERTS + expert[None, :]
    x = tl.load(logits + at, there, 0.0)
    if SCORE == 0:
        x = tl.where((expert < EXPERTS)[None, :], x, float("-inf"))
        powers = tl.exp(x - tl.max(x, 1)[:, None])
        score = powers / tl.sum(powers, 1)[:, None]
    elif SCORE == 1:
        score = 1.0 / (1.0 + tl.exp(-x))
    else:
        score = tl.sqrt(_softplus(x))
    tl.store(scores + at, score, there)
    wanted = score
    if BIASED:
        wanted = score + tl.load(bias + expert, expert < EXPERTS, 0.0)[None, :]
    wanted = tl.where((expert < EXPERTS)[None, :], wanted, float("-inf"))
    chosen = tl.zeros((TOKENS, SLOTS), tl.int64)
    taken = tl.zeros((TOKENS, SLOTS), x.dtype)
    for number in tl.static_range(K):
        if FORCED:
            best = tl.load(forced + token * K + number, token < count, 0)
        else:
            best = tl.argmax(wanted, 1).to(tl.int64)
        is_best = expert[None, :] == best[:, None]
        wanted = tl.where(is_best, float("-inf"), wanted)
        here = (slot == number)[None, :]
        chosen = tl.where(here, best[:, None], chosen)
        taken = tl.where(here, tl.sum(tl.where(is_best, score, 0.0), 1)[:, None], taken)
    if RENORMALIZED:
        total = tl.sum(taken, 1) + tiny
        tl.store(totals + token, total, token < count)
        taken = taken / total[:, None]
    place = token[:, None] * K + slot[None, :]
    filled = (token < count)[:, None] & (slot < K)[None, :]
    tl.store(experts + place, chosen, filled)
    tl.store(weights + place, taken * factor, filled)


@triton.jit
def _route_backward(
    grad_weights, grad_scores, logits, scores, experts, weights, totals, grad_logits, count, factor: tl.constexpr,
    EXPERTS: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, SCORED: tl.constexpr, RENORMALIZED: tl.constexpr,
    TOKENS: tl.constexpr, WIDE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    expert, slot = tl.arange(0, WIDE), tl.arange(0, SLOTS)
    there = (token < count)[:, None] & (expert < EXPERTS)[None, :]
    at = token[:, None] * EXPERTS + expert[None, :]
    score = tl.load(scores + at, there, 0.0)
    place = token[:, None] * K + slot[None, :]
    filled = (token < count)[:, None] & (slot < K)[None, :]
    grad = tl.load(grad_weights + place, filled, 0.0) * factor
    if RENORMALIZED:
        # of w = factor s / sum(s): (factor g - sum(g w)) / sum(s)
        shared = tl.sum(grad * tl.load(weights + place, filled, 0.0), 1) / factor
        grad = (grad - shared[:, None]) / tl.load(totals + token, token < count, 1.0)[:, None]
    grad_score = tl.zeros((TOKENS, WIDE), score.dtype)
    if SCORED:
        grad_score = tl.load(grad_scores + at, there, 0.0)
    for number in tl.static_range(K):
        best = tl.load(experts + token * K + number, token < count, 0)
        of_best = tl.sum(tl.where((slot == number)[None, :], grad, 0.0), 1)
        grad_score += tl.where(expert[None, :] == best[:, None], of_best[:, None], 0.0)
    if SCORE == 0:
        back = score * (grad_score - tl.sum(grad_score * score, 1)[:, None])
    elif SCORE == 1:
        back = grad_score * score * (1.0 - score)
    else:
        x = tl.load(logits + at, there, 0.0)
        back = grad_score / (1.0 + tl.exp(-x)) / (2.0 * tl.where(there, score, 1.0))
    tl.store(grad_logits + at, back, there)


class RouteTokens(torch.autograd.Function):
    """seam.Kernels.weigh; `forced` may be None where experts have no groups that shut others
    out."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_TE: torch.Tensor,
        spec: RouterSpec,
        bias_E: torch.Tensor | None,
        forced_Tk: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits, (tokens, extent) = logits_TE.contiguous(), logits_TE.shape
        experts = torch.empty((tokens, spec.top_k), dtype=torch.int64, device=logits.device)
        weights, totals = logits.new_empty((tokens, spec.top_k)), logits.new_empty(tokens)
        scores = torch.empty_like(logits)
        tiny = 0.0 if spec.score is ScoreFunction.SOFTMAX else SCORE_SUM_EPS
        if tokens:
            _route[_grid(tokens, extent)](
                logits,
                logits if bias_E is None else bias_E.contiguous(),
                experts if forced_Tk is None else forced_Tk.contiguous(),
                experts,
                weights,
                totals,
                scores,
                tokens,
                factor=spec.scaling_factor,
                tiny=tiny,
                EXPERTS=extent,
                K=spec.top_k,
                SCORE=_SCORE[spec.score],
                BIASED=bias_E is not None,
                FORCED=forced_Tk is not None,
                RENORMALIZED=spec.renormalize,
                **_blocks(extent, spec.top_k),
            )
        ctx.mark_non_differentiable(experts)
        ctx.set_materialize_grads(False)
        ctx.spec = spec
        ctx.save_for_backward(
            scores,
            experts if forced_Tk is None else forced_Tk,
            *((weights, totals) if spec.renormalize else (None, None)),
            logits if spec.score is ScoreFunction.SQRT_SOFTPLUS else None,
        )
        return experts if forced_Tk is None else forced_Tk, weights, scores

    @staticmethod
    def backward(
        ctx: Any, _: None, grad_weights: torch.Tensor | None, grad_scores: torch.Tensor | None
    ) -> tuple[torch.Tensor, None, None, None]:
        scores, experts, weights, totals, logits = ctx.saved_tensors
        spec, (tokens, extent), out = ctx.spec, scores.shape, torch.empty_like(scores)
        if grad_weights is None:
            grad_weights = scores.new_zeros(experts.shape)
        if tokens:
            _route_backward[_grid(tokens, extent)](
                grad_weights.contiguous(),
                scores if grad_scores is None else grad_scores.contiguous(),
                scores if logits is None else logits,
                scores,
                experts.contiguous(),
                scores if weights is None else weights,
                scores if totals is None else totals,
                out,
                tokens,
                factor=spec.scaling_factor,
                EXPERTS=extent,
                K=spec.top_k,
                SCORE=_SCORE[spec.score],
                SCORED=grad_scores is not None,
                RENORMALIZED=spec.renormalize,
                **_blocks(extent, spec.top_k),
            )
        return out, None, None, None


def _grid(tokens: int, experts: int) -> tuple[int]:
    return (triton.cdiv(tokens, _tokens(experts)),)


def _tokens(experts: int) -> int:
    return max(1, _HELD // triton.next_power_of_2(experts))


def _blocks(experts: int, top_k: int) -> dict[str, int]:
    return {
        "TOKENS": _tokens(experts),
        "WIDE": triton.next_power_of_2(experts),
        "SLOTS": triton.next_power_of_2(top_k),
    }
