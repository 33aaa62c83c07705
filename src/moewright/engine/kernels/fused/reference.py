"""The reference kernels: operations of torch, on any device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from moewright.engine.graph_nodes import ReleasingFunction
from moewright.engine.kernels.fused.router_losses import SCORE_SUM_EPS
from moewright.engine.torch_private import SOFTMAX_BACKWARD
from moewright.rules.row_blocks import MAX_LOSS_ROWS, rows_per_block
from moewright.spec.model import RouterSpec, ScoreFunction

# The sparse mixer: experts chosen one after the other, each weighed by a softmax of its own.
#
# The form of Phi-3.5-MoE's inference (Liu et al., arXiv 2409.12136, without its sampling). Shapes:
# T tokens, E experts, k choices.


class SparseMixer(ReleasingFunction):
    """Logits [T,E] -> experts [T,k] int64, their weights [T,k] and the softmax of all [T,E].

    A choice is the highest logit that is left, or the forced one; its weight is its part of the
    softmax over those left that lie less than 2 eps below the highest, relative to the larger of
    their size and the highest. Keeps logits, experts and the softmax.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_TE: torch.Tensor,
        top_k: int,
        eps: float,
        forced_Tk: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.eps = eps
        left = logits_TE.clone()
        experts, weights = [], []
        for choice in range(top_k):
            chosen = left.argmax(-1, keepdim=True)
            if forced_Tk is not None:
                chosen = forced_Tk[:, choice : choice + 1]
            weights.append(_weigh(logits_TE, left, chosen, eps).gather(1, chosen))
            experts.append(chosen)
            left.scatter_(1, chosen, -torch.inf)
        scores = torch.softmax(logits_TE, -1)
        experts_Tk = torch.cat(experts, 1) if forced_Tk is None else forced_Tk
        ctx.mark_non_differentiable(experts_Tk)
        ctx.save_for_backward(logits_TE, experts_Tk, scores)
        return experts_Tk, torch.cat(weights, 1), scores

    @staticmethod
    def backward(
        ctx: Any, _: torch.Tensor, grad_weights: torch.Tensor, grad_scores: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None]:
        logits_TE, experts_Tk, scores = ctx.saved_tensors
        grad = SOFTMAX_BACKWARD(grad_scores, scores, -1, scores.dtype)
        left = logits_TE.clone()
        for chosen, grad_weight in zip(
            experts_Tk.split(1, 1), grad_weights.split(1, 1), strict=True
        ):
            shares = _weigh(logits_TE, left, chosen, ctx.eps)
            slope = grad_weight * shares.gather(1, chosen)
            grad.sub_(shares.mul_(slope)).scatter_add_(1, chosen, slope)
            left.scatter_(1, chosen, -torch.inf)
        return grad, None, None, None


def _weigh(
    logits_TE: torch.Tensor, left_TE: torch.Tensor, chosen_T1: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return the softmax [T,E] of the logits that are left and near enough to the highest.

    The chosen one always counts.
    """
    highest = left_TE.amax(-1, keepdim=True)
    size = torch.maximum(logits_TE.abs(), highest)
    is_low = ((highest - logits_TE) / size > 2 * eps).scatter_(1, chosen_T1, False)
    return torch.softmax(left_TE.masked_fill(is_low, -torch.inf), -1)


# gpt-oss (its modeling code in transformers): the slope of the sigmoid, and what gate and up are
# clamped to.
SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0


# The kernels by operations of torch. Those of chains do all that they do to about `block_numel`
# numbers of a tensor, which lie in a core's cache, before they go on to the next ones; 0 takes all
# at once.


def _row_blocks(block_numel: int, rows: int, width: int, *, max_rows: int = 0) -> Iterator[slice]:
    """Yield blocks of `rows` rows of `width`; `max_rows` a block where `block_numel` is 0."""
    step = max_rows or max(1, rows)
    if block_numel:
        step = rows_per_block(width, block_numel)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def permute(x_TH: torch.Tensor, tokens_R: torch.Tensor) -> torch.Tensor:
    """Compute KernelSet.permute."""
    return x_TH.index_select(0, tokens_R)


def unpermute(rows_RH: torch.Tensor, rows_Tk: torch.Tensor, is_complete: bool) -> torch.Tensor:
    """Compute KernelSet.unpermute by embedding_bag: a scatter-add is not deterministic."""
    if not is_complete:
        # Slots without a row point at row R, which is one of zeros.
        rows_RH = torch.cat((rows_RH, rows_RH.new_zeros((1, *rows_RH.shape[1:]))))
    return F.embedding_bag(rows_Tk, rows_RH, mode="sum")


def swiglu(
    x_R2F: torch.Tensor, weight_R: torch.Tensor | None, clamped: bool, *, block_numel: int = 0
) -> torch.Tensor:
    """Compute KernelSet.swiglu."""
    out = x_R2F.new_empty((len(x_R2F), x_R2F.shape[1] // 2))
    for block in _row_blocks(block_numel, *x_R2F.shape):
        gate, up = x_R2F[block].float().chunk(2, -1)
        if clamped:
            gate = gate.clamp(max=SWIGLU_LIMIT)
            up = up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1
            act = torch.sigmoid(SWIGLU_ALPHA * gate).mul_(gate).mul_(up)
        else:
            act = F.silu(gate).mul_(up)
        out[block] = act if weight_R is None else act.mul_(weight_R[block, None])
    return out


def swiglu_backward(
    grad_RF: torch.Tensor,
    x_R2F: torch.Tensor,
    weight_R: torch.Tensor | None,
    clamped: bool,
    *,
    block_numel: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute KernelSet.swiglu_backward."""
    grad_x = torch.empty_like(x_R2F)
    grad_weight = None if weight_R is None else torch.empty_like(weight_R)
    for block in _row_blocks(block_numel, *x_R2F.shape):
        raw_gate, raw_up = x_R2F[block].float().chunk(2, -1)
        gate, up = raw_gate, raw_up
        grad = grad_RF[block].float()
        if clamped:
            gate = raw_gate.clamp(max=SWIGLU_LIMIT)
            up = raw_up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1
            sigmoid = torch.sigmoid(SWIGLU_ALPHA * gate)
            act = sigmoid * gate
        else:
            act = F.silu(gate)
        grad_act = grad * up
        if weight_R is not None and grad_weight is not None:
            grad_weight[block] = (grad_act * act).sum(-1)
            grad_act.mul_(weight_R[block, None])
            act.mul_(weight_R[block, None])
        grad_gate, grad_up = grad_x[block].chunk(2, -1)
        if clamped:
            slope = (1 - sigmoid).mul_(gate).mul_(SWIGLU_ALPHA).add_(1).mul_(sigmoid)
            grad_gate.copy_(slope.mul_(grad_act).mul_(raw_gate <= SWIGLU_LIMIT))
            grad_up.copy_(act.mul_(grad).mul_(raw_up.abs() <= SWIGLU_LIMIT))
        else:
            grad_gate.copy_(torch.ops.aten.silu_backward(grad_act, gate))
            torch.mul(act, grad, out=grad_up)
    return grad_x, grad_weight


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, block_numel: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute KernelSet.rms_norm."""
    x_NK = x.flatten(0, -2)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out_NK = out.flatten(0, -2)
    scale = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    for block in _row_blocks(block_numel, *x_NK.shape):
        wide = x_NK[block].float()
        block_scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        scale.view(-1, 1)[block] = block_scale
        # Rounded before the weight, as transformers' RMSNorm does.
        torch.mul((wide * block_scale).to(x.dtype), weight, out=out_NK[block])
    return out, scale


def rms_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor | None,
    weight_rows: slice,
    *,
    block_numel: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute KernelSet.rms_norm_backward."""
    x_NK = x.flatten(0, -2)
    grad_NK = grad.flatten(0, -2)
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    start, stop, _ = weight_rows.indices(len(x_NK))
    wide_weight = weight.float()
    grad_weight = weight.new_zeros(weight.shape, dtype=torch.float32)
    for block in _row_blocks(block_numel, *x_NK.shape):
        normed = x_NK[block].float()
        wide = grad_NK[block].float()
        if scale is None:
            block_scale = torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps)
        else:
            block_scale = scale.view(-1, 1)[block]
        normed = normed * block_scale
        product = wide * normed
        first = max(block.start, start)
        last = min(block.stop, stop)
        if first < last:
            grad_weight += product[first - block.start : last - block.start].sum(0)
        mean = product.mul_(wide_weight).mean(-1, keepdim=True)
        torch.mul(wide, wide_weight, out=product)
        product.sub_(normed.mul_(mean)).mul_(block_scale)
        grad_x.flatten(0, -2)[block] = product
    return grad_x, grad_weight.to(weight.dtype)


def rotate(
    x_BSHD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, block_numel: int = 0
) -> torch.Tensor:
    """Compute KernelSet.rotate."""
    out = torch.empty_like(x_BSHD, memory_format=torch.contiguous_format)
    cos, sin = (x.expand(len(x_BSHD), *x.shape[-2:]).unsqueeze(-2) for x in (cos, sin))
    for x_SHD, out_SHD, c, s in zip(x_BSHD, out, cos, sin, strict=True):
        for block in _row_blocks(block_numel, len(x_SHD), x_SHD.shape[1:].numel()):
            first, second = x_SHD[block].float().chunk(2, -1)
            out_first, out_second = out_SHD[block].chunk(2, -1)
            out_first.copy_((first * c[block]).addcmul_(second, s[block], value=-1))
            out_second.copy_((second * c[block]).addcmul_(first, s[block]))
    return out


def cross_entropy(
    logits_TV: torch.Tensor, targets_T: torch.Tensor, *, block_numel: int = 0
) -> torch.Tensor:
    """Compute KernelSet.cross_entropy."""
    losses = torch.empty(len(targets_T), device=targets_T.device)
    for block in _row_blocks(block_numel, *logits_TV.shape, max_rows=MAX_LOSS_ROWS):
        log_probs = torch.log_softmax(logits_TV[block].float(), -1)
        # Any column for a negative target, whose loss the caller sets to 0.
        columns = targets_T[block].clamp(min=0)[:, None]
        losses[block] = log_probs.gather(1, columns)[:, 0].neg_()
    return losses


def sum_exp(logits_TV: torch.Tensor, max_T: torch.Tensor, *, block_numel: int = 0) -> torch.Tensor:
    """Compute KernelSet.sum_exp."""
    sums = torch.empty_like(max_T)
    for block in _row_blocks(block_numel, *logits_TV.shape, max_rows=MAX_LOSS_ROWS):
        sums[block] = (logits_TV[block].float() - max_T[block, None]).exp_().sum(-1)
    return sums


def cross_entropy_backward(
    grad_T: torch.Tensor,
    logits_TV: torch.Tensor,
    columns_T: torch.Tensor,
    log_sum_T: torch.Tensor | None,
    size: int,
    *,
    block_numel: int = 0,
) -> torch.Tensor:
    """Compute KernelSet.cross_entropy_backward."""
    out = torch.empty_like(logits_TV)
    columns = columns_T.clamp(min=0)[:, None]
    minus_one = -(columns_T >= 0).float()[:, None]
    for block in _row_blocks(block_numel, *logits_TV.shape, max_rows=MAX_LOSS_ROWS):
        wide = logits_TV[block].float()
        if log_sum_T is None:
            probs = torch.softmax(wide, -1)
        else:
            probs = (wide - log_sum_T[block, None]).exp_()
        probs[:, size:] = 0.0
        # The slope is the probability, less 1 at the target; a negative one takes off nothing.
        probs.scatter_add_(1, columns[block], minus_one[block])
        out[block] = probs.mul_(grad_T[block, None])
    return out


def route_tokens(
    logits_TE: torch.Tensor,
    spec: RouterSpec,
    bias_E: torch.Tensor | None,
    forced_Tk: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute KernelSet.route_tokens."""
    if spec.score is ScoreFunction.SPARSE_MIXER:
        experts, weights, scores = SparseMixer.apply(
            logits_TE, spec.top_k, spec.mixer_eps, forced_Tk
        )
    else:
        scores = compute_scores(logits_TE, spec.score)
        experts = choose_experts(scores, spec, bias_E) if forced_Tk is None else forced_Tk
        weights = scores.gather(1, experts)
    if spec.renormalize:
        total = weights.sum(-1, keepdim=True)
        # Parts of a softmax never sum to 0.
        if not spec.score.is_distribution:
            total = total + SCORE_SUM_EPS
        weights = weights / total
    if spec.scaling_factor != 1.0:
        weights = weights * spec.scaling_factor
    return experts, weights, scores


def compute_scores(logits_TE: torch.Tensor, score: ScoreFunction) -> torch.Tensor:
    """Compute the scores [T,E] of all experts together (softmax), or of each alone."""
    if score.is_distribution:
        return torch.softmax(logits_TE, -1)
    if score is ScoreFunction.SIGMOID:
        return torch.sigmoid(logits_TE)
    return F.softplus(logits_TE).sqrt()


@torch.no_grad()
def choose_experts(
    scores_TE: torch.Tensor, spec: RouterSpec, bias_E: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the ids [T,k] of the experts with the highest scores plus bias.

    They are chosen inside each token's best groups of experts.
    """
    biased = scores_TE if bias_E is None else scores_TE + bias_E
    if spec.top_groups < spec.groups:
        grouped = biased.unflatten(1, (spec.groups, -1))
        group_scores = grouped.topk(spec.scores_per_group, -1).values.sum(-1)
        best_groups = group_scores.topk(spec.top_groups, -1).indices
        excluded = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best_groups, False)
        biased = grouped.masked_fill(excluded[:, :, None], float("-inf")).flatten(1)
    return biased.topk(spec.top_k, -1).indices
