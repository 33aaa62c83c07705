"""Triton kernels of the router, forward and backward.

They compute scores, each token's best groups of experts, the best experts of these and their
weights, and the gradient of the logits. A program holds some tokens with the scores of all experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl

from moewright.engine.graph_nodes import ReleasingFunction
from moewright.engine.kernels.fused import reference
from moewright.engine.kernels.fused.router_losses import SCORE_SUM_EPS
from moewright.engine.kernels.fused.triton_rows import pointer_or
from moewright.spec.model import RouterSpec, ScoreFunction

_PROGRAM_SCORES = 4096  # scores that a program holds
_SCORE: Mapping[ScoreFunction, int] = MappingProxyType(
    {ScoreFunction.SOFTMAX: 0, ScoreFunction.SIGMOID: 1, ScoreFunction.SQRT_SOFTPLUS: 2}
)


@triton.jit
def _softplus(x):
    """Return log(1 + exp(x)), accurate also where 1 + exp(x) rounds to 1."""
    exp_neg = tl.exp(-tl.abs(x))
    one_plus_exp = 1.0 + exp_neg
    log1p = tl.where(
        one_plus_exp == 1.0,
        exp_neg,
        tl.log(one_plus_exp) * exp_neg / tl.where(one_plus_exp == 1.0, 1.0, one_plus_exp - 1.0),
    )
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def _keep_best_groups(
    ranked, expert,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_SCORES: tl.constexpr,
    GROUP_SIZE: tl.constexpr, GROUP_SLOTS: tl.constexpr,
):  # fmt: skip
    """Return the scores [tokens, experts] with -inf outside of each token's best groups.

    A group's score is the sum of its GROUP_SCORES best.
    """
    group = expert // GROUP_SIZE
    group_slot = tl.arange(0, GROUP_SLOTS)
    none = tl.zeros_like(tl.max(ranked, 1))
    # -inf everywhere, in the shape that is needed: no slot is below 0.
    group_scores = tl.where((group_slot < 0)[None, :], none[:, None], float("-inf"))
    for number in tl.static_range(GROUPS):
        members = tl.where((group == number)[None, :], ranked, float("-inf"))
        total = tl.zeros_like(none)
        for _ in tl.static_range(GROUP_SCORES):
            is_best = expert[None, :] == tl.argmax(members, 1)[:, None]
            total += tl.sum(tl.where(is_best, members, 0.0), 1)
            members = tl.where(is_best, float("-inf"), members)
        group_scores = tl.where((group_slot == number)[None, :], total[:, None], group_scores)
    # As above: no expert is below 0.
    kept = tl.where((expert < 0)[None, :], ranked, float("-inf"))
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.argmax(group_scores, 1)
        kept = tl.where(group[None, :] == best[:, None], ranked, kept)
        group_scores = tl.where(group_slot[None, :] == best[:, None], float("-inf"), group_scores)
    return kept


@triton.jit
def _route(
    logits, bias, forced, experts, weights, totals, scores, count,
    factor: tl.constexpr, sum_eps: tl.constexpr,
    EXPERTS: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr,
    BIASED: tl.constexpr, FORCED: tl.constexpr, RENORMALIZED: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_SCORES: tl.constexpr,
    TOKENS: tl.constexpr, WIDE: tl.constexpr, SLOTS: tl.constexpr, GROUP_SLOTS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, WIDE)
    slot = tl.arange(0, SLOTS)
    inside = (token < count)[:, None] & (expert < EXPERTS)[None, :]
    address = token[:, None] * EXPERTS + expert[None, :]
    x = tl.load(logits + address, inside, 0.0)
    if SCORE == 0:
        # What is no expert adds exp(-inf) = 0.
        x = tl.where((expert < EXPERTS)[None, :], x, float("-inf"))
        powers = tl.exp(x - tl.max(x, 1)[:, None])
        score = powers / tl.sum(powers, 1)[:, None]
    elif SCORE == 1:
        score = 1.0 / (1.0 + tl.exp(-x))
    else:
        score = tl.sqrt(_softplus(x))
    tl.store(scores + address, score, inside)
    ranked = score
    if BIASED:
        ranked = score + tl.load(bias + expert, expert < EXPERTS, 0.0)[None, :]
    # A score that is no number compares with nothing: it comes last, before what is no expert.
    ranked = tl.where(ranked == ranked, tl.maximum(ranked, -3.0e38), -3.0e38)
    ranked = tl.where((expert < EXPERTS)[None, :], ranked, float("-inf"))
    if TOP_GROUPS < GROUPS:
        ranked = _keep_best_groups(
            ranked, expert, GROUPS, TOP_GROUPS, GROUP_SCORES, EXPERTS // GROUPS, GROUP_SLOTS
        )
    chosen = tl.zeros((TOKENS, SLOTS), tl.int64)
    chosen_scores = tl.zeros((TOKENS, SLOTS), x.dtype)
    for number in tl.static_range(K):
        if FORCED:
            best = tl.load(forced + token * K + number, token < count, 0)
        else:
            best = tl.argmax(ranked, 1).to(tl.int64)
        is_best = expert[None, :] == best[:, None]
        ranked = tl.where(is_best, float("-inf"), ranked)
        is_slot = (slot == number)[None, :]
        chosen = tl.where(is_slot, best[:, None], chosen)
        chosen_scores = tl.where(
            is_slot, tl.sum(tl.where(is_best, score, 0.0), 1)[:, None], chosen_scores
        )
    if RENORMALIZED:
        total = tl.sum(chosen_scores, 1) + sum_eps
        tl.store(totals + token, total, token < count)
        chosen_scores = chosen_scores / total[:, None]
    slot_address = token[:, None] * K + slot[None, :]
    filled = (token < count)[:, None] & (slot < K)[None, :]
    tl.store(experts + slot_address, chosen, filled)
    tl.store(weights + slot_address, chosen_scores * factor, filled)


@triton.jit
def _route_backward(
    grad_weights, grad_scores, logits, scores, experts, weights, totals, grad_logits, count,
    factor: tl.constexpr,
    EXPERTS: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr,
    SCORED: tl.constexpr, RENORMALIZED: tl.constexpr,
    TOKENS: tl.constexpr, WIDE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, WIDE)
    slot = tl.arange(0, SLOTS)
    inside = (token < count)[:, None] & (expert < EXPERTS)[None, :]
    address = token[:, None] * EXPERTS + expert[None, :]
    score = tl.load(scores + address, inside, 0.0)
    slot_address = token[:, None] * K + slot[None, :]
    filled = (token < count)[:, None] & (slot < K)[None, :]
    grad = tl.load(grad_weights + slot_address, filled, 0.0) * factor
    if RENORMALIZED:
        # The gradient through w = factor s / sum(s) is (factor g - sum(g w)) / sum(s).
        shared = tl.sum(grad * tl.load(weights + slot_address, filled, 0.0), 1) / factor
        grad = (grad - shared[:, None]) / tl.load(totals + token, token < count, 1.0)[:, None]
    grad_score = tl.zeros((TOKENS, WIDE), score.dtype)
    if SCORED:
        grad_score = tl.load(grad_scores + address, inside, 0.0)
    for number in tl.static_range(K):
        best = tl.load(experts + token * K + number, token < count, 0)
        slot_grad = tl.sum(tl.where((slot == number)[None, :], grad, 0.0), 1)
        grad_score += tl.where(expert[None, :] == best[:, None], slot_grad[:, None], 0.0)
    if SCORE == 0:
        grad_logit = score * (grad_score - tl.sum(grad_score * score, 1)[:, None])
    elif SCORE == 1:
        grad_logit = grad_score * score * (1.0 - score)
    else:
        x = tl.load(logits + address, inside, 0.0)
        # softplus has the slope sigmoid(x), and its root 1 / (2 root) times that.
        grad_logit = grad_score / (1.0 + tl.exp(-x)) / (2.0 * tl.where(inside, score, 1.0))
    tl.store(grad_logits + address, grad_logit, inside)


class RouteTokens(ReleasingFunction):
    """The autograd function of KernelSet.route_tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_TE: torch.Tensor,
        spec: RouterSpec,
        bias_E: torch.Tensor | None,
        forced_Tk: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = logits_TE.contiguous()
        tokens, num_experts = logits_TE.shape
        experts = torch.empty((tokens, spec.top_k), dtype=torch.int64, device=logits.device)
        weights = logits.new_empty((tokens, spec.top_k))
        totals = logits.new_empty(tokens)
        scores = torch.empty_like(logits)
        sum_eps = 0.0 if spec.score is ScoreFunction.SOFTMAX else SCORE_SUM_EPS
        if tokens:
            _route[program_grid(tokens, num_experts)](
                logits,
                pointer_or(bias_E, logits),
                pointer_or(forced_Tk, experts),
                experts,
                weights,
                totals,
                scores,
                tokens,
                factor=spec.scaling_factor,
                sum_eps=sum_eps,
                EXPERTS=num_experts,
                K=spec.top_k,
                SCORE=_SCORE[spec.score],
                BIASED=bias_E is not None,
                FORCED=forced_Tk is not None,
                RENORMALIZED=spec.renormalize,
                GROUPS=spec.groups,
                TOP_GROUPS=spec.groups if forced_Tk is not None else spec.top_groups,
                GROUP_SCORES=spec.scores_per_group if spec.groups > 1 else 1,
                GROUP_SLOTS=triton.next_power_of_2(spec.groups),
                **_blocks(num_experts, spec.top_k),
            )
        chosen = experts if forced_Tk is None else forced_Tk
        ctx.mark_non_differentiable(experts)
        # No zeros for scores that no loss reads.
        ctx.set_materialize_grads(False)
        ctx.spec = spec
        ctx.save_for_backward(
            scores,
            chosen,
            *((weights, totals) if spec.renormalize else (None, None)),
            # Softmax and sigmoid have slopes that their scores tell.
            logits if spec.score is ScoreFunction.SQRT_SOFTPLUS else None,
        )
        return chosen, weights, scores

    @staticmethod
    def backward(
        ctx: Any, _: None, grad_weights: torch.Tensor | None, grad_scores: torch.Tensor | None
    ) -> tuple[torch.Tensor, None, None, None]:
        scores, experts, weights, totals, logits = ctx.saved_tensors
        spec = ctx.spec
        tokens, num_experts = scores.shape
        out = torch.empty_like(scores)
        if grad_weights is None:
            grad_weights = scores.new_zeros(experts.shape)
        if tokens:
            _route_backward[program_grid(tokens, num_experts)](
                grad_weights.contiguous(),
                pointer_or(grad_scores, scores),
                pointer_or(logits, scores),
                scores,
                experts.contiguous(),
                pointer_or(weights, scores),
                pointer_or(totals, scores),
                out,
                tokens,
                factor=spec.scaling_factor,
                EXPERTS=num_experts,
                K=spec.top_k,
                SCORE=_SCORE[spec.score],
                SCORED=grad_scores is not None,
                RENORMALIZED=spec.renormalize,
                **_blocks(num_experts, spec.top_k),
            )
        return out, None, None, None


def route_tokens(
    logits_TE: torch.Tensor,
    spec: RouterSpec,
    bias_E: torch.Tensor | None,
    forced_Tk: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute KernelSet.route_tokens; the sparse mixer is the reference's."""
    if spec.score is ScoreFunction.SPARSE_MIXER:
        return reference.route_tokens(logits_TE, spec, bias_E, forced_Tk)
    experts, weights, scores = RouteTokens.apply(logits_TE, spec, bias_E, forced_Tk)
    return experts, weights, scores


def program_grid(tokens: int, experts: int) -> tuple[int]:
    """Return the programs that the scores of tokens take."""
    return (triton.cdiv(tokens, tokens_per_program(experts)),)


def tokens_per_program(experts: int) -> int:
    """Return how many tokens a program holds, with the scores of all experts."""
    return max(1, _PROGRAM_SCORES // triton.next_power_of_2(experts))


def _blocks(experts: int, top_k: int) -> dict[str, int]:
    return {
        "TOKENS": tokens_per_program(experts),
        "WIDE": triton.next_power_of_2(experts),
        "SLOTS": triton.next_power_of_2(top_k),
    }
