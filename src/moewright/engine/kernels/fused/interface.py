"""The kernels between the model's products and attention, as a set that a job runs.

Implementations give the same numbers up to rounding, and the model keeps the same tensors for
backward with each, so the ledger does not ask which one ran. But for those of the router, nothing
here is differentiated: the model's autograd functions call one kernel forward and one backward, and
the products of 8 and 4 bits convert their operands by one.
None has FLOPs of the ledger, which counts products (docs/formulas.md 6).

Shapes: T tokens, k experts a token, E experts, R routed rows, H hidden, F expert width, K any
width, V vocabulary, B batch, S sequence, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from moewright.engine.kernels.columns import ConvertColumns, ConvertGradient
from moewright.engine.kernels.fused.router_losses import RouterLossTerms
from moewright.engine.kernels.fused.scans import ScanKernels
from moewright.engine.kernels.low_precision import Convert, ConvertWeight
from moewright.spec.model import RouterSpec
from moewright.spec.workload import FusedKernels


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSet:
    """The kernels that a job runs, by one implementation; `scans` are those of recurrent mixers.

    Kernels are called by position; `KERNELS` of `table.py` says which functions implement each.
    """

    implementation: FusedKernels
    scans: ScanKernels

    # (x_TH, tokens_R): copy tokens to their rows: row i is x[tokens[i]], [R,H].
    permute: Callable[[Tensor, Tensor], Tensor]

    # (rows_RH, rows_Tk, is_complete): sum each token's own rows in their fixed order, in fp32:
    # [T,H]. rows_Tk holds R for a slot without a row; where `is_complete` every slot has one.
    unpermute: Callable[[Tensor, Tensor, bool], Tensor]

    # (x_R2F, weight_R, clamped): silu(gate) * up * weight for x = (gate, up), in fp32: [R,F].
    # `weight` is fp32, or None for ones. `clamped` is gpt-oss's: g * sigmoid(1.702 g) * (u + 1) *
    # weight, g = min(gate, 7) and u = up within -7..7.
    swiglu: Callable[[Tensor, Tensor | None, bool], Tensor]

    # (grad_RF, x_R2F, weight_R, clamped): the gradients of x and, where there is one, of weight.
    swiglu_backward: Callable[[Tensor, Tensor, Tensor | None, bool], tuple[Tensor, Tensor | None]]

    # (x, weight, eps): norm x [...,K] and return it with its scale. The result is x times its scale
    # 1 / sqrt(mean(x^2) + eps), rounded, times weight [K]; the scale is [...,1] fp32.
    rms_norm: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]

    # (grad, x, weight, eps, scale, weight_rows): the gradients of x and of weight, the latter from
    # `weight_rows` of all rows [N,K]. The scale is computed again where it is None.
    rms_norm_backward: Callable[
        [Tensor, Tensor, Tensor, float, Tensor | None, slice], tuple[Tensor, Tensor]
    ]

    # (x_BSHD, cos, sin): rotate x by position, in fp32. Its halves (first, second) become
    # first * cos - second * sin and second * cos + first * sin; cos and sin are [S, D/2] or
    # [B, S, D/2] fp32. With -sin it is its own backward.
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]

    # (logits_TV, targets_T): the negative log-likelihood [T] fp32 of targets; anything finite where
    # a target is negative.
    cross_entropy: Callable[[Tensor, Tensor], Tensor]

    # (logits_TV, max_T): the sum over V of exp(logit - max): [T] fp32.
    sum_exp: Callable[[Tensor, Tensor], Tensor]

    # (grad_T, logits_TV, columns_T, log_sum_T, size): (exp(logit - log_sum) - 1 at the target's
    # column) * grad: [T,V], 0 from column `size` on. A column of -1 stands for a target outside
    # these columns. Where log_sum [T] fp32 is None, it is computed over all V columns.
    cross_entropy_backward: Callable[[Tensor, Tensor, Tensor, Tensor | None, int], Tensor]

    # (logits_TE, spec, bias_E, forced_Tk): choose experts by score plus bias, or take the forced
    # ones, and weigh them. Returns experts [T,k] int64, their weights [T,k] and all scores [T,E],
    # the last two differentiable. Kept for backward are scores and experts, two numbers a weight
    # and sum where weights are renormalised, and the logits of a score that needs them
    # (rules.saved.recompute).
    route_tokens: Callable[
        [Tensor, RouterSpec, Tensor | None, Tensor | None], tuple[Tensor, Tensor, Tensor]
    ]

    # (logits_TE, scores_TE, terms): this rank's parts of a router's four losses, fp32 [4],
    # differentiable. Kept for backward are what rules.saved.recompute says: scores, shares, sums of
    # scores where they are divided by them, and for the z loss logits with their log-sum-exp.
    router_losses: Callable[[Tensor, Tensor, RouterLossTerms], Tensor]

    # (x_RK, operand, groups, generator): convert a tensor to 8 or 4 bits with its scales, to the
    # same bits with each implementation (kernels.low_precision).
    convert: Convert

    # (w, operand): convert a weight [N,K] or [E,N,K] along its columns and along its rows, to the
    # bits of `convert` of both.
    convert_weight: ConvertWeight

    # (x_RK, form, generator): convert a tensor along its rows, whose blocks `form` lays out: [K,P],
    # to the same bits with each implementation (kernels.columns).
    convert_columns: ConvertColumns

    # (g_RN, form): convert a gradient along its columns and as `convert_columns` does, at once;
    # None where an implementation has no way that reads it once.
    convert_gradient: ConvertGradient
