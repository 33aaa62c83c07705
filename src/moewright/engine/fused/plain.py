"""The seam's reference: operations of torch, on any device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from moewright.spec.model import RouterSpec, ScoreFunction

TINY = 1e-20  # under a sum of independent scores, all of which may be zero


class Plain:
    """See seam.Kernels."""

    def spread(self, x_TH: torch.Tensor, tokens_R: torch.Tensor) -> torch.Tensor:
        return x_TH.index_select(0, tokens_R)

    def sum_slots(self, rows_RH: torch.Tensor, rows_Tk: torch.Tensor, full: bool) -> torch.Tensor:
        """Deterministic, unlike a scatter-add."""
        if not full:
            rows_RH = torch.cat((rows_RH, rows_RH.new_zeros((1, *rows_RH.shape[1:]))))
        return F.embedding_bag(rows_Tk, rows_RH, mode="sum")

    def swiglu(self, x_R2F: torch.Tensor, weight_R: torch.Tensor | None) -> torch.Tensor:
        out = x_R2F.new_empty((len(x_R2F), x_R2F.shape[1] // 2))
        for part in _parts(x_R2F):
            gate, up = x_R2F[part].float().chunk(2, -1)
            act = F.silu(gate).mul_(up)
            if weight_R is not None:
                act.mul_(weight_R[part, None])
            out[part] = act
        return out

    def swiglu_backward(
        self, grad_RF: torch.Tensor, x_R2F: torch.Tensor, weight_R: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        grad_x = torch.empty_like(x_R2F)
        grad_weight = None if weight_R is None else torch.empty_like(weight_R)
        for part in _parts(x_R2F):
            gate, up = x_R2F[part].float().chunk(2, -1)
            wide, act = grad_RF[part].float(), F.silu(gate)
            if weight_R is not None and grad_weight is not None:
                grad_weight[part] = (wide * act).mul_(up).sum(-1)
                wide = wide * weight_R[part, None]
            grad_gate, grad_up = grad_x[part].chunk(2, -1)
            grad_up.copy_(act.mul_(wide))
            grad_gate.copy_(torch.ops.aten.silu_backward(wide * up, gate))
        return grad_x, grad_weight

    def weigh(
        self, logits_TE: torch.Tensor, spec: RouterSpec, bias_E: torch.Tensor | None, forced_Tk: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores = scores_of(logits_TE, spec.score)
        experts = choose(scores, spec, bias_E) if forced_Tk is None else forced_Tk
        weights = scores.gather(1, experts)
        if spec.renormalize:
            total = weights.sum(-1, keepdim=True)
            weights = weights / (total if spec.score is ScoreFunction.SOFTMAX else total + TINY)
        if spec.scaling_factor != 1.0:
            weights = weights * spec.scaling_factor
        return experts, weights, scores


def scores_of(logits_TE: torch.Tensor, score: ScoreFunction) -> torch.Tensor:
    """Scores [T,E]: of all experts together (softmax), or of each alone."""
    if score is ScoreFunction.SOFTMAX:
        return torch.softmax(logits_TE, -1)
    if score is ScoreFunction.SIGMOID:
        return torch.sigmoid(logits_TE)
    return F.softplus(logits_TE).sqrt()


@torch.no_grad()
def choose(scores_TE: torch.Tensor, spec: RouterSpec, bias_E: torch.Tensor | None = None) -> torch.Tensor:
    """Ids [T,k] of the experts with the highest scores plus bias, inside each token's best groups of experts."""
    wanted = scores_TE if bias_E is None else scores_TE + bias_E
    if spec.top_groups < spec.groups:
        of_group = wanted.unflatten(1, (spec.groups, -1))
        best = of_group.topk(spec.counted_in_group, -1).values.sum(-1).topk(spec.top_groups, -1).indices
        shut = torch.ones_like(of_group[:, :, 0], dtype=torch.bool).scatter_(1, best, False)
        wanted = of_group.masked_fill(shut[:, :, None], float("-inf")).flatten(1)
    return wanted.topk(spec.top_k, -1).indices


def _parts(x: torch.Tensor) -> Iterator[slice]:
    """Rows to work on at a time: on a CPU so many as stay in its cache from one operation to the next, in few parts."""
    step = max(512, -(-len(x) // 32)) if x.device.type == "cpu" else max(1, len(x))
    return (slice(start, start + step) for start in range(0, len(x), step))
