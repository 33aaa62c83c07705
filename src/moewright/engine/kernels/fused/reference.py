"""The seam's reference: operations of torch, on any device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from moewright.rules.row_blocks import MAX_LOSS_ROWS, rows_per_block
from moewright.spec.model import RouterSpec, ScoreFunction

# Of gpt-oss (its modeling code in transformers): the slope of the sigmoid, and what gate and up are
# clamped to.
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
SCORE_SUM_EPS = 1e-20  # under a sum of independent scores, all of which may be zero


class TorchKernels:
    """See seam.Kernels. A function does all that it does to about `at_a_time` numbers of a tensor
    before it goes on to the next ones; 0 takes all at once.
    """

    def __init__(self, at_a_time: int = 0) -> None:
        self._at_a_time = at_a_time

    def _parts(self, count: int, width: int, *, most: int = 0) -> Iterator[slice]:
        """Of `count` rows of `width`; `most` rows where all would be taken."""
        step = rows_per_block(width, self._at_a_time) if self._at_a_time else most or max(1, count)
        return (slice(start, min(start + step, count)) for start in range(0, count, step))

    def permute(self, x_TH: torch.Tensor, tokens_R: torch.Tensor) -> torch.Tensor:
        return x_TH.index_select(0, tokens_R)

    def unpermute(self, rows_RH: torch.Tensor, rows_Tk: torch.Tensor, full: bool) -> torch.Tensor:
        """Deterministic, unlike a scatter-add."""
        if not full:
            rows_RH = torch.cat((rows_RH, rows_RH.new_zeros((1, *rows_RH.shape[1:]))))
        return F.embedding_bag(rows_Tk, rows_RH, mode="sum")

    def swiglu(
        self, x_R2F: torch.Tensor, weight_R: torch.Tensor | None, clamped: bool
    ) -> torch.Tensor:
        out = x_R2F.new_empty((len(x_R2F), x_R2F.shape[1] // 2))
        for part in self._parts(*x_R2F.shape):
            gate, up = x_R2F[part].float().chunk(2, -1)
            if clamped:
                gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1
                act = torch.sigmoid(SWIGLU_ALPHA * gate).mul_(gate).mul_(up)
            else:
                act = F.silu(gate).mul_(up)
            out[part] = act if weight_R is None else act.mul_(weight_R[part, None])
        return out

    def swiglu_backward(
        self,
        grad_RF: torch.Tensor,
        x_R2F: torch.Tensor,
        weight_R: torch.Tensor | None,
        clamped: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        grad_x = torch.empty_like(x_R2F)
        grad_weight = None if weight_R is None else torch.empty_like(weight_R)
        for part in self._parts(*x_R2F.shape):
            gate, up = whole_gate, whole_up = x_R2F[part].float().chunk(2, -1)
            wide = grad_RF[part].float()
            if clamped:
                gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1
                opened = torch.sigmoid(SWIGLU_ALPHA * gate)
                act = opened * gate
            else:
                act = F.silu(gate)
            of_act = wide * up
            if weight_R is not None and grad_weight is not None:
                grad_weight[part] = (of_act * act).sum(-1)
                of_act.mul_(weight_R[part, None])
                act.mul_(weight_R[part, None])
            of_gate, of_up = grad_x[part].chunk(2, -1)
            if clamped:
                slope = (1 - opened).mul_(gate).mul_(SWIGLU_ALPHA).add_(1).mul_(opened)
                of_gate.copy_(slope.mul_(of_act).mul_(whole_gate <= SWIGLU_LIMIT))
                of_up.copy_(act.mul_(wide).mul_(whole_up.abs() <= SWIGLU_LIMIT))
            else:
                of_gate.copy_(torch.ops.aten.silu_backward(of_act, gate))
                torch.mul(act, wide, out=of_up)
        return grad_x, grad_weight

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, out = x.flatten(0, -2), torch.empty_like(x, memory_format=torch.contiguous_format)
        scale = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        for part in self._parts(*rows.shape):
            wide = rows[part].float()
            found = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
            scale.view(-1, 1)[part] = found
            torch.mul((wide * found).to(x.dtype), weight, out=out.flatten(0, -2)[part])
        return out, scale

    def rms_norm_backward(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        scale: torch.Tensor | None,
        mine: slice,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, grads = x.flatten(0, -2), grad.flatten(0, -2)
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        start, stop, _ = mine.indices(len(rows))
        wide_weight, grad_weight = (
            weight.float(),
            weight.new_zeros(weight.shape, dtype=torch.float32),
        )
        for part in self._parts(*rows.shape):
            normed, wide = rows[part].float(), grads[part].float()
            if scale is None:
                found = torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps)
            else:
                found = scale.view(-1, 1)[part]
            normed = normed * found
            product = wide * normed
            first, last = max(part.start, start), min(part.stop, stop)
            if first < last:
                grad_weight += product[first - part.start : last - part.start].sum(0)
            mean = product.mul_(wide_weight).mean(-1, keepdim=True)
            torch.mul(wide, wide_weight, out=product)
            product.sub_(normed.mul_(mean)).mul_(found)
            grad_x.flatten(0, -2)[part] = product
        return grad_x, grad_weight.to(weight.dtype)

    def rotate(self, x_BSHD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x_BSHD, memory_format=torch.contiguous_format)
        cos, sin = (x.expand(len(x_BSHD), *x.shape[-2:]).unsqueeze(-2) for x in (cos, sin))
        for sequence, turned, c, s in zip(x_BSHD, out, cos, sin, strict=True):
            for part in self._parts(len(sequence), sequence[0].numel()):
                first, second = sequence[part].float().chunk(2, -1)
                low, high = turned[part].chunk(2, -1)
                low.copy_((first * c[part]).addcmul_(second, s[part], value=-1))
                high.copy_((second * c[part]).addcmul_(first, s[part]))
        return out

    def cross_entropy(self, logits_TV: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
        found = torch.empty(len(targets_T), device=targets_T.device)
        for part in self._parts(*logits_TV.shape, most=MAX_LOSS_ROWS):
            log_probs = torch.log_softmax(logits_TV[part].float(), -1)
            found[part] = log_probs.gather(1, targets_T[part].clamp(min=0)[:, None])[:, 0].neg_()
        return found

    def sum_exp(self, logits_TV: torch.Tensor, top_T: torch.Tensor) -> torch.Tensor:
        found = torch.empty_like(top_T)
        for part in self._parts(*logits_TV.shape, most=MAX_LOSS_ROWS):
            found[part] = (logits_TV[part].float() - top_T[part, None]).exp_().sum(-1)
        return found

    def cross_entropy_backward(
        self,
        grad_T: torch.Tensor,
        logits_TV: torch.Tensor,
        columns_T: torch.Tensor,
        log_sum_T: torch.Tensor | None,
        size: int,
    ) -> torch.Tensor:
        out = torch.empty_like(logits_TV)
        columns, minus = columns_T.clamp(min=0)[:, None], -(columns_T >= 0).float()[:, None]
        for part in self._parts(*logits_TV.shape, most=MAX_LOSS_ROWS):
            wide = logits_TV[part].float()
            probs = (
                torch.softmax(wide, -1)
                if log_sum_T is None
                else (wide - log_sum_T[part, None]).exp_()
            )
            probs[:, size:] = 0.0
            out[part] = probs.scatter_add_(1, columns[part], minus[part]).mul_(grad_T[part, None])
        return out

    def route_tokens(
        self,
        logits_TE: torch.Tensor,
        spec: RouterSpec,
        bias_E: torch.Tensor | None,
        forced_Tk: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores = compute_scores(logits_TE, spec.score)
        experts = choose_experts(scores, spec, bias_E) if forced_Tk is None else forced_Tk
        weights = scores.gather(1, experts)
        if spec.renormalize:
            total = weights.sum(-1, keepdim=True)
            weights = weights / (
                total if spec.score is ScoreFunction.SOFTMAX else total + SCORE_SUM_EPS
            )
        if spec.scaling_factor != 1.0:
            weights = weights * spec.scaling_factor
        return experts, weights, scores


def compute_scores(logits_TE: torch.Tensor, score: ScoreFunction) -> torch.Tensor:
    """Scores [T,E]: of all experts together (softmax), or of each alone."""
    if score is ScoreFunction.SOFTMAX:
        return torch.softmax(logits_TE, -1)
    if score is ScoreFunction.SIGMOID:
        return torch.sigmoid(logits_TE)
    return F.softplus(logits_TE).sqrt()


@torch.no_grad()
def choose_experts(
    scores_TE: torch.Tensor, spec: RouterSpec, bias_E: torch.Tensor | None = None
) -> torch.Tensor:
    """Ids [T,k] of the experts with the highest scores plus bias, inside each token's best groups
    of experts."""
    wanted = scores_TE if bias_E is None else scores_TE + bias_E
    if spec.top_groups < spec.groups:
        of_group = wanted.unflatten(1, (spec.groups, -1))
        best = (
            of_group.topk(spec.scores_per_group, -1)
            .values.sum(-1)
            .topk(spec.top_groups, -1)
            .indices
        )
        shut = torch.ones_like(of_group[:, :, 0], dtype=torch.bool).scatter_(1, best, False)
        wanted = of_group.masked_fill(shut[:, :, None], float("-inf")).flatten(1)
    return wanted.topk(spec.top_k, -1).indices
