"""The router: scores, the one selection that feeds dispatch, auxiliary losses, expert bias and
statistics, and losses.

Formulas: docs/formulas.md 4. Shapes: T tokens of this rank, E experts in all, k experts a token, B
sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from moewright.engine.checkpoint import LocalShard
from moewright.engine.comm.collectives import Group, all_gather_rows, all_reduce
from moewright.engine.kernels.fused import reference
from moewright.engine.kernels.fused.interface import KernelSet
from moewright.engine.memory.saved_tensors import RoutingDecisions
from moewright.engine.model.autograd import count_ids
from moewright.engine.model.layers import Vector, Weight
from moewright.engine.model.parallel_linear import RouterLinear
from moewright.engine.model.router_jitter import uniform_noise
from moewright.engine.runtime import Runtime
from moewright.rules.parameters import selection_bias_name
from moewright.spec.ledger import Module
from moewright.spec.model import RouterSpec, ScoreFunction
from moewright.spec.workload import DropPolicy, LossSpec, RouterAssignment, RouterDtype, RouterForce

_NOBODY = 1e-290  # under a column sum of exponentials in fp64, all of which may have vanished
_SETTLED = 1e-4  # Sinkhorn's scales move by less, on average (Megatron-LM)
_MOST_ITERATIONS = (
    10_000  # beyond, an expert that nobody wants keeps the scales moving by less and less
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSelection:
    """The experts of every token: ids [T,k] int64, weights [T,k] and scores [T,E] in the logits'
    dtype, counts [E] int64.
    """

    experts: torch.Tensor
    weights: torch.Tensor
    scores: torch.Tensor
    counts: torch.Tensor

    def drop_over_capacity(self, rows: int, policy: DropPolicy) -> torch.Tensor:
        """The ids [T,k] with E where an expert already has `rows` rows; weights of the others stay
        as they are."""
        flat, extent = self.experts.flatten(), len(self.counts)
        first = torch.arange(len(flat), device=flat.device)
        if policy is DropPolicy.PROBS:
            first = self.weights.detach().flatten().argsort(descending=True, stable=True)
        order = first[
            flat[first].argsort(stable=True)
        ]  # by expert, then by what the policy prefers
        starts = self.counts.cumsum(0) - self.counts
        late = torch.arange(len(flat), device=flat.device) - starts[flat[order]] >= rows
        dropped = torch.empty_like(late).scatter_(
            0, order, late
        )  # a mask: the host need not know how many
        return flat.masked_fill(dropped, extent).view_as(self.experts)


def select_experts(
    logits_TE: torch.Tensor,
    spec: RouterSpec,
    kernels: KernelSet,
    bias_E: torch.Tensor | None = None,
    forced_Tk: torch.Tensor | None = None,
) -> ExpertSelection:
    """Choose by score plus bias (or take the `forced` experts); weigh by the scores alone.

    Softmax renormalised over the chosen is the softmax over the chosen alone. Gradients reach the
    logits through the weights and the scores, never through the choice.
    """
    experts, weights, scores = kernels.route_tokens(logits_TE, spec, bias_E, forced_Tk)
    counts = count_ids(experts, logits_TE.shape[1])
    return ExpertSelection(experts=experts, weights=weights, scores=scores, counts=counts)


@torch.no_grad()
def sinkhorn(logits_TE: torch.Tensor, iterations: int) -> torch.Tensor:
    """exp(logits) [T,E] fp64 with rows and columns scaled so that each row sums to 1 and each
    column to T / E, by turns `iterations` times, or until the scales settle where that is 0
    (docs/formulas.md 4).

    A row's maximum is taken off its logits first, which its scale makes up for, so that nothing
    overflows.
    """
    wide = logits_TE.double()
    kernel = (wide - wide.amax(1, keepdim=True)).exp()
    tokens, experts = kernel.shape
    of_experts = kernel.new_ones(experts)
    for _ in range(iterations or _MOST_ITERATIONS):
        of_tokens = 1.0 / (kernel @ of_experts)
        before, of_experts = of_experts, tokens / experts / (kernel.T @ of_tokens + _NOBODY)
        if not iterations and bool((of_experts / before - 1.0).abs().mean() <= _SETTLED):
            break
    return kernel * of_experts / (kernel @ of_experts)[:, None]


def balance_loss(share: torch.Tensor, scores_TE: torch.Tensor, sharers: Group) -> torch.Tensor:
    """This rank's part of E * sum_i f_i P_i (docs/formulas.md 4), whose tokens the `sharers` hold
    in equal numbers.

    f is the `share` of routed rows, of all tokens together [E] or of each token's sequence [T,E]; P
    the mean score.
    """
    tokens, experts = scores_TE.shape
    if share.dim() == 1:
        return experts * (share * scores_TE.mean(0)).sum() / sharers.size
    return experts * (share * scores_TE).sum() / (tokens * sharers.size)


def z_loss(logits_TE: torch.Tensor, sharers: Group) -> torch.Tensor:
    """This rank's part of the mean squared log-sum-exp of the router logits (docs/formulas.md
    4)."""
    return torch.logsumexp(logits_TE, -1).square().mean() / sharers.size


def aux_loss_coefficients(loss: LossSpec) -> tuple[float, float, float, float]:
    """Of the auxiliary losses of a router, as it returns them: over micro-batch, sequences, global
    batch; z."""
    return loss.aux_coeff, loss.seq_aux_coeff, loss.global_aux_coeff, loss.z_coeff


class Router(Weight):
    """Tokens [T,H] -> the selection, and this rank's part of each auxiliary loss, coefficients
    applied: [4] in the order of `coefficients_of`.

    `number` is the layer's. The selection bias, where the model has one, is no parameter: no
    gradient reaches it.
    """

    ledger_module = Module.ROUTER

    def __init__(self, run: Runtime, experts: int, number: int) -> None:
        if run.model.moe is None:
            raise ValueError("a router needs model.moe")
        super().__init__(run, experts, run.model.hidden_size)
        self._run, self._spec, self.layer_number = run, run.model.moe.router, number
        self.bias = Vector(run, experts) if self._spec.logit_bias else None
        self._training = run.workload.router
        self._dtype = (
            torch.float64 if self._training.router_dtype is RouterDtype.FP64 else torch.float32
        )
        self._routed = torch.zeros(
            experts, dtype=torch.int64, device=run.device
        )  # in this step, on all ranks
        self._passes = 0
        self.selection_bias = (
            torch.zeros(experts, device=run.device) if self._spec.selection_bias else None
        )

    def forward(
        self, x_TH: torch.Tensor, decided: RoutingDecisions | None = None, first: int | None = None
    ) -> tuple[ExpertSelection, torch.Tensor]:
        """`decided`: of the replayed block that this is part of, None outside of one. `first` as in
        Sequences."""
        noise = None
        if first is not None and self._training.jitter_eps:
            noise = partial(self._noise, first, *x_TH.shape)
        logits = self.add_bias(
            RouterLinear.apply(x_TH, self.weight, self._run.counters, self._dtype, noise)
        )
        experts = decided.experts if decided else None
        if experts is None:
            experts = self._forced(*logits.shape)
        if (
            experts is None
            and first is not None
            and self._training.assignment is RouterAssignment.SINKHORN
        ):
            experts = self._evened(logits)
        selected = select_experts(
            logits, self._spec, self._run.kernels, self.selection_bias, experts
        )
        shares = decided.shares if decided else None
        if shares is None:
            shares = self._shares(selected)
            if decided is not None:
                decided.experts = self._run.saved_tensors.count_saved(selected.experts)
                decided.shares = tuple(map(self._run.saved_tensors.count_saved, shares))
        return selected, self._losses(logits, selected, shares)

    def _noise(self, first: int, tokens: int, width: int) -> torch.Tensor:
        """Factors [T,H] fp32 of the router's input in training, by the number of the token over all
        of training."""
        run, eps = self._run, self._training.jitter_eps
        layout, places = run.mesh.layout, run.positions
        listed = tokens * (layout.tp if layout.sp else 1)  # a TP group shares a list of tokens
        start = run.mesh.coordinate("tp") * tokens if layout.sp else 0
        numbers = (first + torch.arange(listed // len(places)))[
            :, None
        ] * run.workload.seq_len + places
        here = numbers.flatten()[start : start + tokens].to(run.device)
        return (
            uniform_noise(here, width, seed=run.workload.seed, stream=self.layer_number)
            .mul_(2 * eps)
            .add_(1 - eps)
        )

    @torch.no_grad()
    def _evened(self, logits: torch.Tensor) -> torch.Tensor:
        """The experts [t,k] that Sinkhorn gives this rank's tokens, over all of the micro-batch:
        every rank that shares it finds the same scales.
        """
        sharers, tokens = self._run.mesh.group("tp_cp"), len(logits)
        scaled = sinkhorn(all_gather_rows(logits, sharers), self._training.sinkhorn_iterations)
        return reference.choose_experts(
            scaled[sharers.index * tokens : (sharers.index + 1) * tokens], self._spec
        )

    def begin_step(self) -> None:
        """Forget the counts of the last global batch."""
        self._routed.zero_()
        self._passes = 0

    @torch.no_grad()
    def update_selection_bias(self, counts_E: torch.Tensor) -> None:
        """Move the selection bias towards an even load, given everyone's counts of a global batch
        (docs/formulas.md 4).
        """
        if self.selection_bias is not None:
            load = counts_E.to(self.selection_bias)
            self.selection_bias += self._training.bias_update_rate * (load.mean() - load).sign()

    def _losses(
        self, logits: torch.Tensor, selected: ExpertSelection, shares: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        loss, sharers = self._run.workload.loss, self._run.mesh.group("tp_cp")
        coefficients, known, scores = aux_loss_coefficients(loss), iter(shares), selected.scores
        if shares and self._spec.score is not ScoreFunction.SOFTMAX:
            scores = scores / (scores.sum(-1, keepdim=True) + reference.SCORE_SUM_EPS)
        parts = [
            c * balance_loss(next(known), scores, sharers) if c else None for c in coefficients[:-1]
        ]
        parts.append(loss.z_coeff * z_loss(logits, sharers) if loss.z_coeff else None)
        return torch.stack(
            [logits.new_zeros(()) if part is None else part for part in parts]
        ).float()

    @torch.no_grad()
    def _shares(self, selected: ExpertSelection) -> tuple[torch.Tensor, ...]:
        """The share of routed rows that each expert got, for each balance loss that is on: of the
        micro-batch [E], of each token's sequence [T,E], of the global batch so far [E].
        """
        loss, mesh, rows = self._run.workload.loss, self._run.mesh, selected.experts.numel()
        sharers, everyone, found = mesh.group("tp_cp"), mesh.group("tp_cp_dp"), []
        if loss.aux_coeff:
            found.append(all_reduce(selected.counts.clone(), sharers) / (rows * sharers.size))
        if loss.seq_aux_coeff:
            found.append(self._sequence_shares(selected, sharers))
        if loss.global_aux_coeff:
            self._routed += all_reduce(selected.counts.clone(), everyone)
            self._passes += 1
            found.append(self._routed / (rows * everyone.size * self._passes))
        return tuple(found)

    def _sequence_shares(self, selected: ExpertSelection, sharers: Group) -> torch.Tensor:
        """A TP group shares a list of tokens, sequence after sequence; each CP rank has a part of
        every sequence."""
        layout, (tokens, experts) = self._run.mesh.layout, selected.scores.shape
        here = self._run.workload.seq_len // layout.cp
        first = self._run.mesh.coordinate("tp") * tokens if layout.sp else 0
        sequence = (torch.arange(tokens, device=selected.scores.device) + first) // here
        sequences = tokens * (layout.tp if layout.sp else 1) // here
        places = sequence[:, None] * experts + selected.experts
        counts = all_reduce(count_ids(places, sequences * experts), sharers)
        return (counts.view(sequences, experts) / (here * layout.cp * selected.experts.shape[1]))[
            sequence
        ]

    @torch.no_grad()
    def _forced(self, tokens: int, experts: int) -> torch.Tensor | None:
        """The experts that a benchmark gives its tokens, [T,k]: in turn, or by a noisy fixed
        preference."""
        training, top_k = self._training, self._spec.top_k
        if training.force is RouterForce.NONE:
            return None
        if training.force is RouterForce.BALANCED:
            # The dispatcher counts on this order where it does not look at the counts.
            return (torch.arange(tokens * top_k, device=self._run.device) % experts).view(
                tokens, top_k
            )
        dice = torch.Generator().manual_seed(self._run.workload.seed + self.layer_number)
        liking = training.force_std * torch.randn(experts, generator=dice)
        noise = -torch.empty(tokens, experts).exponential_(generator=dice).log()
        return (liking + noise).topk(top_k, -1).indices.to(self._run.device)


def list_routers(model: torch.nn.Module) -> tuple[Router, ...]:
    """The routers of a model, by layer."""
    return tuple(module for module in model.modules() if isinstance(module, Router))


def selection_bias_pieces(model: torch.nn.Module) -> list[LocalShard]:
    """The selection biases of a model, as what a checkpoint holds of them."""
    return [
        LocalShard(
            name=selection_bias_name(router.layer_number),
            global_shape=tuple(bias.shape),
            offsets=(0,),
            tensor=bias,
        )
        for router in list_routers(model)
        if (bias := router.selection_bias) is not None
    ]
