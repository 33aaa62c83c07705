"""Triton kernels of a router's auxiliary losses: all four in one pass, forward and backward.

A program holds some tokens with the scores of all experts, and leaves its part of each loss.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from moewright.engine.graph_nodes import ReleasingFunction
from moewright.engine.kernels.fused import router_losses as reference
from moewright.engine.kernels.fused.router_losses import SCORE_SUM_EPS, RouterLossTerms
from moewright.engine.kernels.fused.triton_router import program_grid, tokens_per_program
from moewright.engine.kernels.fused.triton_rows import pointer_or

_LOSSES = 4  # sums that the kernel writes a block of rows


@triton.jit
def _router_losses(
    logits, scores, share, sequence_share, global_share, mask, sequence_weights,
    parts, score_sums, log_sums, count,
    sum_eps: tl.constexpr, EXPERTS: tl.constexpr,
    BATCH: tl.constexpr, SEQUENCE: tl.constexpr, GLOBAL: tl.constexpr, Z: tl.constexpr,
    NORMALIZED: tl.constexpr, MASKED: tl.constexpr, TOKENS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    token = program * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, WIDE)
    inside = (token < count)[:, None] & (expert < EXPERTS)[None, :]
    address = token[:, None] * EXPERTS + expert[None, :]
    score = tl.load(scores + address, inside, 0.0)
    weight = tl.where(token < count, 1.0, 0.0).to(score.dtype)
    sequence_weight = weight
    if MASKED:
        weight = tl.load(mask + token, token < count, 0.0).to(score.dtype)
        sequence_weight = tl.load(sequence_weights + token, token < count, 0.0).to(score.dtype)
    if NORMALIZED:
        total = tl.sum(score, 1) + sum_eps
        tl.store(score_sums + token, total, token < count)
        score = score / total[:, None]
    if BATCH:
        load = tl.load(share + expert, expert < EXPERTS, 0.0).to(score.dtype)
        tl.store(parts + program * 4, tl.sum(tl.sum(score * load[None, :], 1) * weight, 0))
    if SEQUENCE:
        loads = tl.load(sequence_share + address, inside, 0.0).to(score.dtype)
        part = tl.sum(tl.sum(score * loads, 1) * sequence_weight, 0)
        tl.store(parts + program * 4 + 1, part)
    if GLOBAL:
        load = tl.load(global_share + expert, expert < EXPERTS, 0.0).to(score.dtype)
        tl.store(parts + program * 4 + 2, tl.sum(tl.sum(score * load[None, :], 1) * weight, 0))
    if Z:
        x = tl.load(logits + address, inside, 0.0)
        x = tl.where((expert < EXPERTS)[None, :], x, float("-inf"))
        high = tl.max(x, 1)
        log_sum = high + tl.log(tl.sum(tl.exp(x - high[:, None]), 1))
        tl.store(log_sums + token, log_sum, token < count)
        tl.store(parts + program * 4 + 3, tl.sum(log_sum * log_sum * weight, 0))


@triton.jit
def _router_losses_backward(
    grads, logits, scores, share, sequence_share, global_share, mask, sequence_weights,
    score_sums, log_sums, grad_scores, grad_logits, count,
    EXPERTS: tl.constexpr,
    BATCH: tl.constexpr, SEQUENCE: tl.constexpr, GLOBAL: tl.constexpr, Z: tl.constexpr,
    NORMALIZED: tl.constexpr, MASKED: tl.constexpr, TOKENS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, WIDE)
    inside = (token < count)[:, None] & (expert < EXPERTS)[None, :]
    address = token[:, None] * EXPERTS + expert[None, :]
    score = tl.load(scores + address, inside, 0.0)
    weight = tl.where(token < count, 1.0, 0.0).to(score.dtype)
    sequence_weight = weight
    if MASKED:
        weight = tl.load(mask + token, token < count, 0.0).to(score.dtype)
        sequence_weight = tl.load(sequence_weights + token, token < count, 0.0).to(score.dtype)
    if BATCH or SEQUENCE or GLOBAL:
        pull = tl.zeros((TOKENS, WIDE), score.dtype)
        if BATCH:
            load = tl.load(share + expert, expert < EXPERTS, 0.0).to(score.dtype)
            pull += (tl.load(grads) * weight)[:, None] * load[None, :]
        if SEQUENCE:
            loads = tl.load(sequence_share + address, inside, 0.0).to(score.dtype)
            pull += (tl.load(grads + 1) * sequence_weight)[:, None] * loads
        if GLOBAL:
            load = tl.load(global_share + expert, expert < EXPERTS, 0.0).to(score.dtype)
            pull += (tl.load(grads + 2) * weight)[:, None] * load[None, :]
        if NORMALIZED:
            # The gradient through n = s / sum(s) is (g - sum(g n)) / sum(s).
            total = tl.load(score_sums + token, token < count, 1.0)
            shared = tl.sum(pull * score, 1) / total
            pull = (pull - shared[:, None]) / total[:, None]
        tl.store(grad_scores + address, pull, inside)
    if Z:
        x = tl.load(logits + address, inside, 0.0)
        log_sum = tl.load(log_sums + token, token < count, 0.0)
        slope = 2.0 * tl.load(grads + 3) * log_sum * weight
        tl.store(grad_logits + address, slope[:, None] * tl.exp(x - log_sum[:, None]), inside)


class RouterLosses(ReleasingFunction):
    """The autograd function of KernelSet.router_losses."""

    @staticmethod
    def forward(
        ctx: Any, logits_TE: torch.Tensor, scores_TE: torch.Tensor, terms: RouterLossTerms
    ) -> torch.Tensor:
        logits, scores = logits_TE.contiguous(), scores_TE.contiguous()
        tokens, experts = scores.shape
        grid = program_grid(tokens, experts)
        has_z = bool(terms.coefficients[-1])
        has_balance = any(share is not None for share in terms.shares)
        # Zeros, because a loss that is off writes none.
        parts = scores.new_zeros((*grid, _LOSSES))
        score_sums = scores.new_empty(tokens) if terms.is_normalized and has_balance else None
        log_sums = scores.new_empty(tokens) if has_z else None
        if tokens:
            _router_losses[grid](
                logits,
                scores,
                *(pointer_or(share, scores) for share in terms.shares),
                pointer_or(terms.mask, scores),
                pointer_or(terms.sequence_weights, scores),
                parts,
                pointer_or(score_sums, scores),
                pointer_or(log_sums, scores),
                tokens,
                sum_eps=SCORE_SUM_EPS,
                **_choices(terms, experts),
            )
        ctx.terms = terms
        ctx.shape = scores.shape
        ctx.dtype = scores.dtype
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            # Without a norm the slope is of the shares alone.
            scores if score_sums is not None else None,
            *terms.shares,
            score_sums,
            logits if has_z else None,
            log_sums,
        )
        sums = parts.sum(0)
        factors = _factors(terms, tokens, experts)
        return torch.stack([x * y for x, y in zip(sums, factors, strict=True)]).float()

    @staticmethod
    def backward(
        ctx: Any, grad_4: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        scores, *shares, score_sums, logits, log_sums = ctx.saved_tensors
        if grad_4 is None:
            return None, None, None
        tokens, experts = ctx.shape
        has_balance = any(share is not None for share in shares)
        factors = _factors(ctx.terms, tokens, experts)
        grads = torch.stack([x * y for x, y in zip(grad_4.to(ctx.dtype), factors, strict=True)])
        grad_scores = grads.new_empty(ctx.shape) if has_balance else None
        grad_logits = None if logits is None else grads.new_empty(ctx.shape)
        if tokens:
            _router_losses_backward[program_grid(tokens, experts)](
                grads,
                pointer_or(logits, grads),
                pointer_or(scores, grads),
                *(pointer_or(share, grads) for share in shares),
                pointer_or(ctx.terms.mask, grads),
                pointer_or(ctx.terms.sequence_weights, grads),
                pointer_or(score_sums, grads),
                pointer_or(log_sums, grads),
                pointer_or(grad_scores, grads),
                pointer_or(grad_logits, grads),
                tokens,
                **_choices(ctx.terms, experts),
            )
        return grad_logits, grad_scores, None


def router_losses(
    logits_TE: torch.Tensor, scores_TE: torch.Tensor, terms: RouterLossTerms
) -> torch.Tensor:
    """Return this rank's parts of the four losses, fp32, in the order of their coefficients."""
    if not any(terms.coefficients):
        return reference.router_losses(logits_TE, scores_TE, terms)
    return RouterLosses.apply(logits_TE, scores_TE, terms)


def _factors(terms: RouterLossTerms, tokens: int, experts: int) -> tuple[float, ...]:
    """Return what the sums over this rank's tokens are multiplied by."""
    # Not 0, for a rank without tokens.
    batch = sequence = max(1, tokens) * terms.ranks
    if terms.mask is not None:
        batch, sequence = terms.total, terms.sequences
    first, second, third, z = terms.coefficients
    return (
        first * experts / batch,
        second * experts / sequence,
        third * experts / batch,
        z / batch,
    )


def _choices(terms: RouterLossTerms, experts: int) -> dict[str, int | bool]:
    is_on = dict(zip(("BATCH", "SEQUENCE", "GLOBAL"), terms.shares, strict=True))
    return {
        **{name: share is not None for name, share in is_on.items()},
        "Z": bool(terms.coefficients[-1]),
        "NORMALIZED": terms.is_normalized and any(x is not None for x in terms.shares),
        "MASKED": terms.mask is not None,
        "EXPERTS": experts,
        "TOKENS": tokens_per_program(experts),
        "WIDE": triton.next_power_of_2(experts),
    }
