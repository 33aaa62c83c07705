"""The router: scores, one selection of experts, and auxiliary losses.

The one selection feeds dispatch, auxiliary losses, expert bias and statistics.

Formulas: docs/formulas.md 4. Shapes: T tokens of this rank, E experts in all, k experts a token, B
sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from moewright.engine.checkpoint import LocalShard, whole_shard
from moewright.engine.comm.collectives import Group, all_gather_rows, all_reduce
from moewright.engine.dispatch.rows import count_ids
from moewright.engine.kernels.fused import reference
from moewright.engine.kernels.fused.interface import KernelSet
from moewright.engine.memory.saved_tensors import RoutingDecisions
from moewright.engine.model.adapters import add_router_adapter
from moewright.engine.model.layers import Vector, Weight
from moewright.engine.model.micro_batch import CountedTokens
from moewright.engine.model.parallel_linear import RouterLinear
from moewright.engine.model.router_losses import count_counted, loss_terms
from moewright.engine.model.routes import LayerRoutes
from moewright.engine.runtime import Runtime, router_dtype
from moewright.rules.context_parallel import rank_positions
from moewright.rules.shapes.parameters import expert_table_name, selection_bias_name
from moewright.spec.ledger import Module
from moewright.spec.model import ModelSpec, RouterSpec
from moewright.spec.workload import (
    DropPolicy,
    FrozenPart,
    RouterAssignment,
    RouterForce,
)

# Random noise whose values depend on a token's number, not on where or when they are drawn.
#
# So the noise is the same in any layout and in any recomputation.

# Odd 64-bit constants of SplitMix64 (Steele, Lea, Flood 2014, Fast splittable pseudorandom number
# generators), signed.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_MASK = (1 << 64) - 1
_SIGN = 1 << 63
_BITS = 24  # significant bits of an fp32 number


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Apply SplitMix64's finalizer to int64, which wraps around like the unsigned one."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        x = (x ^ _shift_right(x, shift)) * factor
    return x ^ _shift_right(x, 31)


def _mix_number(x: int) -> int:
    """Apply it to a number of the host, which need not be copied to the device then."""
    bits = x & _MASK
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        bits = (bits ^ (bits >> shift)) * factor & _MASK
    return _to_signed(bits ^ (bits >> 31))


def _to_signed(bits: int) -> int:
    """Return the int64 of these 64 bits."""
    return (bits & _MASK) - ((bits & _SIGN) << 1)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift with zeros coming in, which torch's shift of a signed number does not do."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@torch.no_grad()
def uniform_noise(numbers_T: torch.Tensor, width: int, *, seed: int, stream: int) -> torch.Tensor:
    """Draw uniform fp32 [T,width] in [0, 1); row t depends on numbers[t], seed and stream alone.

    `numbers_T` [T] int64 tells the tokens apart.
    """
    key = _to_signed(_mix_number(_mix_number(seed) ^ stream) + _GOLDEN)
    rows_T = _mix(_mix(numbers_T + key) ^ key)
    columns = torch.arange(1, width + 1, device=numbers_T.device) * _GOLDEN
    bits = _shift_right(_mix(rows_T[:, None] + columns), 64 - _BITS)
    return bits.float() * 2.0**-_BITS


_MIN_COLUMN_SUM = 1e-290  # added to sums of fp64 exponentials, which may all have underflowed
_SINKHORN_TOLERANCE = 1e-4  # mean relative change of converged scales (Megatron-LM)
# A bound: an expert that no token prefers keeps the scales moving, by less and less.
_MAX_ITERATIONS = 10_000
_HOST = torch.device("cpu")
# Tokens whose experts are drawn at a time.
_TABLE_ROWS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertChoice:
    """The experts of every token.

    `experts` [T,k] int64 are their ids, `weights` [T,k] are in the logits' dtype, and `counts` [E]
    int64 are the rows of each expert.
    """

    experts: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor

    def drop_over_capacity(self, rows: int, policy: DropPolicy) -> torch.Tensor:
        """Return the ids [T,k] with E in place of each row beyond an expert's first `rows` rows.

        DropPolicy.PROBS keeps the rows of the highest weights, otherwise those of the first slots.
        The weights of the kept rows do not change.
        """
        flat = self.experts.flatten()
        dropped_id = len(self.counts)
        slots = torch.arange(len(flat), device=flat.device)
        preferred = slots
        if policy is DropPolicy.PROBS:
            preferred = self.weights.detach().flatten().argsort(descending=True, stable=True)
        # By expert, then by what the policy prefers.
        order = preferred[flat[preferred].argsort(stable=True)]
        starts = self.counts.cumsum(0) - self.counts
        is_over = slots - starts[flat[order]] >= rows
        # A mask: the host need not know how many are dropped.
        is_dropped = torch.empty_like(is_over).scatter_(0, order, is_over)
        return flat.masked_fill(is_dropped, dropped_id).view_as(self.experts)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSelection(ExpertChoice):
    """A choice of experts with the scores [T,E] that led to it, in the logits' dtype."""

    scores: torch.Tensor


def select_experts(
    logits_TE: torch.Tensor,
    spec: RouterSpec,
    kernels: KernelSet,
    bias_E: torch.Tensor | None = None,
    forced_Tk: torch.Tensor | None = None,
) -> ExpertSelection:
    """Choose by score plus bias (or take the forced experts); weigh by the scores alone.

    Softmax renormalised over the chosen is the softmax over the chosen alone. Gradients reach the
    logits through the weights and the scores, never through the choice.
    """
    experts, weights, scores = kernels.route_tokens(logits_TE, spec, bias_E, forced_Tk)
    counts = count_ids(experts, logits_TE.shape[1])
    return ExpertSelection(experts=experts, weights=weights, scores=scores, counts=counts)


@torch.no_grad()
def sinkhorn(logits_TE: torch.Tensor, iterations: int) -> torch.Tensor:
    """Scale rows and columns of exp(logits) [T,E] fp64 to sums of 1 and of T / E.

    They are scaled by turns `iterations` times, or until the scales converge where that is 0
    (docs/formulas.md 4). Each row's maximum is subtracted from its logits first, so that nothing
    overflows; the row's scale makes up for it.
    """
    wide = logits_TE.double()
    kernel = (wide - wide.amax(1, keepdim=True)).exp()
    tokens, experts = kernel.shape
    expert_scales = kernel.new_ones(experts)
    for _ in range(iterations or _MAX_ITERATIONS):
        token_scales = 1.0 / (kernel @ expert_scales)
        old_scales = expert_scales
        expert_scales = tokens / experts / (kernel.T @ token_scales + _MIN_COLUMN_SUM)
        moved = (expert_scales / old_scales - 1.0).abs().mean()
        # In this order: with a fixed count the host reads nothing of the device.
        if not iterations and bool(moved <= _SINKHORN_TOLERANCE):
            break
    # Rows are scaled last, so that the parts of a token sum to 1 exactly.
    return kernel * expert_scales / (kernel @ expert_scales)[:, None]


class Router(Weight):
    """The router of a layer: tokens [T,H] -> the selection and the auxiliary losses.

    The losses [4] are this rank's part of each, coefficients applied, in the order of
    `aux_loss_coefficients`. The selection bias, where the model has one, is no parameter: no
    gradient reaches it.
    """

    ledger_module = Module.ROUTER

    def __init__(self, runtime: Runtime, experts: int, layer_number: int) -> None:
        if runtime.model.moe is None:
            raise ValueError("a router needs model.moe")
        super().__init__(runtime, experts, runtime.model.hidden_size)
        device = runtime.device
        self._runtime = runtime
        self._spec = runtime.model.moe.router
        self._training = runtime.workload.router
        self.layer_number = layer_number
        self.bias = Vector(runtime, experts) if self._spec.logit_bias else None
        self._dtype = router_dtype(self._training.router_dtype)
        # The rows to each expert so far in this step, on all ranks.
        self._step_counts = torch.zeros(experts, dtype=torch.int64, device=device)
        # The rows of this rank's tokens that count, where not all do, in this step.
        self.counted_loads = torch.zeros(experts, dtype=torch.int64, device=device)
        self._recorded = self._open_routes(runtime.workload.routes.record_routes, experts)
        self._replayed = self._open_routes(runtime.workload.routes.replay_routes, experts)
        self.selection_bias: torch.Tensor | None = None
        self.expert_table: torch.Tensor | None = None
        if layer_number < self._spec.hash_layers:
            self.expert_table = draw_expert_table(
                runtime.workload.seed,
                layer_number,
                shape=(runtime.model.vocab_size, self._spec.top_k),
                experts=experts,
            ).to(device)
        elif self._spec.selection_bias:
            self.selection_bias = torch.zeros(experts, device=device)

    def _open_routes(self, folder: str, experts: int) -> LayerRoutes | None:
        """Return this layer's routes in a folder; None where that is not given."""
        if not folder:
            return None
        top_k = self._spec.top_k
        return LayerRoutes(Path(folder), self.layer_number, experts=experts, top_k=top_k)

    def forward(
        self,
        x_TH: torch.Tensor,
        decisions: RoutingDecisions | None = None,
        first_sequence: int | None = None,
        counted: CountedTokens | None = None,
        ids: torch.Tensor | None = None,
    ) -> tuple[ExpertSelection, torch.Tensor]:
        """Select experts and compute the auxiliary losses.

        `decisions` belong to the checkpointed block around this layer; None where there is none.
        `first_sequence`, `counted` and `ids` as in MicroBatchContext.
        """
        runtime = self._runtime
        noise = None
        if first_sequence is not None and self._training.jitter_eps:
            noise = partial(self._draw_noise, first_sequence, *x_TH.shape)
        logits = RouterLinear.apply(x_TH, self.weight, runtime.counters, self._dtype, noise)
        logits = add_router_adapter(runtime, self, logits, x_TH, noise)
        logits = self.add_bias(logits)
        experts = decisions.experts if decisions else None
        is_first = experts is None and first_sequence is not None
        if experts is None:
            experts = self._force_experts(first_sequence, *logits.shape)
        if is_first and first_sequence is not None and self._replayed is not None:
            numbers = self._number_tokens(first_sequence, len(x_TH))
            experts = self._replayed.read(numbers).to(x_TH.device)
        if experts is None and self.expert_table is not None and ids is not None:
            experts = self.expert_table[ids]
        is_sinkhorn = self._training.assignment is RouterAssignment.SINKHORN
        if experts is None and is_sinkhorn and first_sequence is not None:
            experts = self._assign_by_sinkhorn(logits)
        selection = select_experts(
            logits, self._spec, runtime.kernels, self.selection_bias, experts
        )
        if is_first and first_sequence is not None and self._recorded is not None:
            self._recorded.write(self._number_tokens(first_sequence, len(x_TH)), selection.experts)
        shares = decisions.shares if decisions else None
        if shares is None:
            shares = self._compute_shares(selection, counted)
            if decisions is not None:
                count_saved = runtime.saved_tensors.count_saved
                decisions.experts = count_saved(selection.experts)
                decisions.shares = tuple(map(count_saved, shares))
        return selection, self._compute_losses(logits, selection, shares, counted)

    def _draw_noise(self, first_sequence: int, tokens: int, width: int) -> torch.Tensor:
        """Draw factors [T,H] fp32 of the router's input in training.

        A token's factors depend on its number over all of training, not on the layout.
        """
        runtime = self._runtime
        eps = self._training.jitter_eps
        numbers = self._number_tokens(first_sequence, tokens, runtime.device)
        noise = uniform_noise(numbers, width, seed=runtime.workload.seed, stream=self.layer_number)
        return noise.mul_(2 * eps).add_(1 - eps)

    def _number_tokens(
        self, first_sequence: int, tokens: int, device: torch.device = _HOST
    ) -> torch.Tensor:
        """Return the numbers [tokens] of this rank's tokens over all of training."""
        runtime = self._runtime
        layout = runtime.mesh.layout
        positions = self._rank_positions(device)
        # With sequence parallelism the ranks of a TP group split one list of tokens.
        group_tokens = tokens * (layout.sp_degree)
        start = 0
        if layout.sp:
            start = runtime.mesh.coordinate("tp") * tokens
        sequences = first_sequence + torch.arange(group_tokens // len(positions), device=device)
        numbers = sequences[:, None] * runtime.workload.seq_len + positions
        return numbers.flatten()[start : start + tokens]

    def _rank_positions(self, device: torch.device) -> torch.Tensor:
        """Return the positions of this CP rank's tokens in every sequence, made on the device."""
        mesh = self._runtime.mesh
        seq_len = self._runtime.workload.seq_len
        parts = rank_positions(seq_len, mesh.layout.cp, mesh.coordinate("cp"))
        return torch.cat([torch.arange(p.start, p.stop, device=device) for p in parts])

    def _token_positions(self, tokens: int) -> torch.Tensor:
        """Return the positions [tokens] of this rank's tokens in their sequences, on the device."""
        runtime = self._runtime
        layout = runtime.mesh.layout
        positions = self._rank_positions(runtime.device)
        start = 0
        if layout.sp:
            start = runtime.mesh.coordinate("tp") * tokens
        # Rounded up: a rank's part may end inside of a sequence.
        sequences = -(-(start + tokens) // len(positions))
        return positions.repeat(sequences)[start : start + tokens]

    @torch.no_grad()
    def _assign_by_sinkhorn(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the experts [t,k] that Sinkhorn gives this rank's tokens.

        It runs over the whole micro-batch: every rank that holds a part computes the same scales.
        """
        token_group = self._runtime.mesh.group("tp_cp")
        gathered = all_gather_rows(logits, token_group)
        scaled = sinkhorn(gathered, self._training.sinkhorn_iterations)
        own = scaled.view(token_group.size, len(logits), -1)[token_group.index]
        return reference.choose_experts(own, self._spec)

    def begin_step(self) -> None:
        """Forget the counts of the last global batch."""
        self._step_counts.zero_()
        self.counted_loads.zero_()

    @torch.no_grad()
    def update_selection_bias(self, counts_E: torch.Tensor) -> None:
        """Move the selection bias towards an even load (docs/formulas.md 4).

        `counts_E` [E] are the rows of each expert on all ranks in a global batch. The bias of a
        frozen router stays.
        """
        is_frozen = FrozenPart.ROUTER in self._runtime.workload.fine_tuning.freeze
        if self.selection_bias is not None and not is_frozen:
            load = counts_E.to(self.selection_bias)
            self.selection_bias += self._training.bias_update_rate * (load.mean() - load).sign()

    def _compute_losses(
        self,
        logits: torch.Tensor,
        selection: ExpertSelection,
        shares: tuple[torch.Tensor, ...],
        counted: CountedTokens | None,
    ) -> torch.Tensor:
        runtime = self._runtime
        terms = loss_terms(
            runtime.workload.loss,
            self._spec.score,
            shares,
            ranks=runtime.mesh.group("tp_cp").size,
            counted=counted,
        )
        return runtime.kernels.router_losses(logits, selection.scores, terms)

    @torch.no_grad()
    def _compute_shares(
        self, selection: ExpertSelection, counted: CountedTokens | None
    ) -> tuple[torch.Tensor, ...]:
        """Return the share of routed rows that each expert got, for each balance loss that is on.

        The shares are those of the micro-batch [E], of each token's sequence [T,E] and of the
        global batch so far [E].
        """
        loss = self._runtime.workload.loss
        mesh = self._runtime.mesh
        token_group = mesh.group("tp_cp")
        batch_group = mesh.group("tp_cp_dp")
        tokens, top_k = selection.experts.shape
        counts = selection.counts
        rows = tokens * top_k * token_group.size
        if counted is not None:
            counts = count_counted(selection.experts, len(counts), counted)
            self.counted_loads += counts
            rows = counted.total * top_k
        shares = []
        if loss.aux_coeff:
            # A copy: the sum is made in place, and the rank's own counts are read again.
            shares.append(all_reduce(counts.clone(), token_group) / rows)
        if loss.seq_aux_coeff:
            shares.append(self._compute_sequence_shares(selection, token_group, counted))
        if loss.global_aux_coeff:
            self._step_counts += all_reduce(counts.clone(), batch_group)
            # No token may have counted so far.
            shares.append(self._step_counts / self._step_counts.sum().clamp(min=1))
        if self.expert_table is not None:
            # No gradient of a score moves a choice that is fixed.
            return tuple(map(torch.zeros_like, shares))
        return tuple(shares)

    def _compute_sequence_shares(
        self, selection: ExpertSelection, token_group: Group, counted: CountedTokens | None
    ) -> torch.Tensor:
        """Return the experts' shares over each token's sequence: [T,E].

        With sequence parallelism the ranks of a TP group split one list of tokens, sequence after
        sequence; each CP rank has a part of every sequence.
        """
        runtime = self._runtime
        layout = runtime.mesh.layout
        tokens, experts = selection.scores.shape
        top_k = selection.experts.shape[1]
        rank_length = runtime.workload.seq_len // layout.cp
        first = 0
        if layout.sp:
            first = runtime.mesh.coordinate("tp") * tokens
        token_numbers = torch.arange(tokens, device=selection.scores.device) + first
        sequence_of_token = token_numbers // rank_length
        sequences = tokens * (layout.sp_degree) // rank_length
        # One id for each pair of a sequence and an expert: they are counted at once.
        ids = sequence_of_token[:, None] * experts + selection.experts
        if counted is None:
            counts = count_ids(ids, sequences * experts)
        else:
            counts = count_counted(ids, sequences * experts, counted)
        counts = all_reduce(counts, token_group).view(sequences, experts)
        if counted is None:
            return (counts / (rank_length * layout.cp * top_k))[sequence_of_token]
        totals = counts.sum(1, keepdim=True).clamp(min=1)
        return (counts / totals)[sequence_of_token]

    @torch.no_grad()
    def _force_experts(
        self, first_sequence: int | None, tokens: int, experts: int
    ) -> torch.Tensor | None:
        """Return the forced experts [T,k] of a benchmark, None where routing is not forced.

        They are taken in turn along each sequence, or by a fixed preference with noise. A token's
        noise depends on its number, in an evaluation on its position, and not on the layout.
        """
        training = self._training
        top_k = self._spec.top_k
        device = self._runtime.device
        if training.force is RouterForce.NONE:
            return None
        if training.force is RouterForce.BALANCED:
            # ForcedCounts relies on this order: the host then knows the counts by itself.
            first_slots = self._token_positions(tokens)[:, None] * top_k
            return (first_slots + torch.arange(top_k, device=device)) % experts
        seed = self._runtime.workload.seed
        # On the host, for a GPU's generator draws other numbers from a seed.
        generator = torch.Generator().manual_seed(seed + self.layer_number)
        preference = training.force_std * torch.randn(experts, generator=generator)
        if first_sequence is None:
            numbers = self._token_positions(tokens)
        else:
            numbers = self._number_tokens(first_sequence, tokens, device)
        # Jitter has the streams from 0 on.
        uniform = uniform_noise(numbers, experts, seed=seed, stream=-1 - self.layer_number)
        # Gumbel noise: the chosen experts are then drawn in proportion to exp(preference).
        gumbel = uniform.log_().neg_().log_().neg_()
        return gumbel.add_(preference.to(device)).topk(top_k, -1).indices


def list_routers(model: torch.nn.Module) -> tuple[Router, ...]:
    """List the routers of a model, by layer."""
    return tuple(module for module in model.modules() if isinstance(module, Router))


def load_rows(model: ModelSpec, router: Router) -> list[int]:
    """Return the places among the routed layers of those that pass through a router.

    They are its own, and of MTP depths with the same weights those of all depths.
    """
    layers = model.routed_layers
    if model.mtp_shared and router.layer_number > model.layers:
        return [row for row, layer in enumerate(layers) if layer > model.layers]
    return [layers.index(router.layer_number)]


def draw_expert_table(
    seed: int, layer_number: int, *, shape: tuple[int, int], experts: int
) -> torch.Tensor:
    """Draw the experts [V,k] int64 of every token of the vocabulary, for a layer that routes so.

    A token's are different, and all experts have nearly equally many tokens.
    """
    tokens, top_k = shape
    generator = torch.Generator().manual_seed(seed * 1_000_003 + layer_number)
    table = torch.empty(tokens, top_k, dtype=torch.int64)
    for rows in torch.arange(tokens).split(_TABLE_ROWS):
        table[rows] = torch.rand(len(rows), experts, generator=generator).topk(top_k).indices
    return table


def router_states(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what routers hold that no gradient reaches, by name: biases, and tables of experts."""
    for router in list_routers(model):
        if router.selection_bias is not None:
            yield selection_bias_name(router.layer_number), router.selection_bias
        if router.expert_table is not None:
            yield expert_table_name(router.layer_number), router.expert_table


def router_state_shards(model: torch.nn.Module) -> list[LocalShard]:
    """Return what the routers of a model hold as the shards that a checkpoint stores."""
    return [whole_shard(name, state) for name, state in router_states(model)]
