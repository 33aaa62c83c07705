"""One training step: micro-batches through the timetable, gradients reduced, one update.

The held-out loss is here too, since it runs the same micro-batches forward.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import isfinite

import torch

from moewright.engine.comm.collectives import all_reduce, await_release
from moewright.engine.model.micro_batch import MicroBatch
from moewright.engine.model.preferences import compute_pair_losses
from moewright.engine.model.router import list_routers, load_rows
from moewright.engine.model.transformer import ModelOutput
from moewright.engine.observe.phase_clock import HostStamps, PhaseClock, build_phase_clock
from moewright.engine.pipeline.executor import Key
from moewright.engine.pipeline.run_batch import evaluate_batch
from moewright.engine.run.corpus_loader import BatchSource
from moewright.engine.run.micro_batch_passes import (
    MicroBatchPasses,
    PassSteps,
    count_attended_pairs,
    run_as_is,
    zero_sums,
)
from moewright.engine.run.step_graph import GraphTensors
from moewright.engine.run.train_state import TrainState
from moewright.engine.runtime import Runtime
from moewright.spec.ledger import StepPhase, TimeRow
from moewright.spec.run import PairRewards
from moewright.spec.workload import Objective, Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardResult:
    """The result of a step once its gradients are reduced.

    expert_counts [micro-batches, MoE layers, E] are the token rows of this rank for each expert, 0
    in layers of other ranks. Where copies are counted (rules.routing), the last dim goes on with
    this rank's copies to each EP rank, then to each node. router_losses [MoE layers, 4] fp64 are
    the auxiliary losses of each layer as a Router returns them; `aux_loss` is their sum plus the
    loss of the MTP depths.

    attended_pairs and window_pairs are `attended` and `near` of a Selection, for this rank; 0 where
    documents do not bound attention.
    """

    loss: float
    aux_loss: float
    grad_norm: float  # before clipping
    is_finite: bool
    stop_agreed: bool  # some rank was asked to stop
    local_nll: float  # summed over this rank's own targets
    rewards: PairRewards
    attended_pairs: int
    window_pairs: int
    expert_counts: torch.Tensor
    router_losses: torch.Tensor  # on the CPU
    counts_all_tokens: bool  # False where padding and masked tokens are left out of statistics
    is_repeated: bool  # run again, since some rank had more rows than its budget


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The result of one step: that of its passes, and what its end adds.

    expert_loads [MoE layers, E] are the rows of tokens that count, summed over micro-batches and
    all ranks.
    """

    backward: BackwardResult
    expert_loads: torch.Tensor
    phases: tuple[TimeRow, ...]

    @property
    def skipped(self) -> bool:
        """Whether nothing was updated, since a gradient was not finite."""
        return not self.backward.is_finite


def train_step(
    state: TrainState,
    *,
    step: int,
    lr: float,
    stop_requested: bool,
    count_ledger: bool,
    before_update: Callable[[BackwardResult], None] = lambda backward: None,
) -> StepResult:
    """Do update number `step` (from 1); `count_ledger` counts this step for the ledger.

    `before_update` is called when the gradients are reduced, and nothing has been updated.

    The loss is the sum of token losses over the number of valid targets of the global batch, so
    gradients are summed, never averaged. When a gradient of any rank is not finite, all ranks skip
    the update.
    """
    if count_ledger:
        await_release()  # or the census would count what the step before has sent
    with state.runtime.counters.counting() if count_ledger else nullcontext():
        return _train_step(state, step, lr, stop_requested, before_update)


def _train_step(
    state: TrainState,
    step: int,
    lr: float,
    stop_requested: bool,
    before_update: Callable[[BackwardResult], None],
) -> StepResult:
    runtime = state.runtime
    clock = build_phase_clock(runtime.device)
    backward = forward_backward(state, clock, step=step, stop_requested=stop_requested)
    before_update(backward)
    apply_update(state, clock, backward, lr=lr)
    expert_loads = _sum_expert_loads(state, backward)
    # Layers of other stages are 0 here, so that the sum over the world has all of them.
    if expert_loads.numel():
        all_reduce(expert_loads, runtime.mesh.group("world"))
    if backward.is_finite:
        _update_scales(runtime)
        for router in list_routers(state.model):
            # Row by row: the indices of a list would be copied to the device, which waits for it.
            loads = [expert_loads[row] for row in load_rows(runtime.model, router)]
            router.update_selection_bias(torch.stack(loads).sum(0))
    gc_every = runtime.workload.gc_every_steps
    if gc_every and step % gc_every == 0:
        gc.collect()
    return StepResult(backward=backward, expert_loads=expert_loads, phases=clock.time_rows())


def _update_scales(runtime: Runtime) -> None:
    """Set the delayed scales of the next step, by what all ranks of the stage saw in this one."""
    scaling = runtime.delayed_scaling
    if scaling is None:
        return
    amaxes = scaling.step_amaxes()
    if len(amaxes):  # a stage may have no linears
        stage_group = runtime.mesh.group("tp_cp_dp")
        scaling.update(all_reduce(amaxes, stage_group, maximum=True))


def _sum_expert_loads(state: TrainState, backward: BackwardResult) -> torch.Tensor:
    """Return this rank's rows to each expert in the step [MoE layers, E], of tokens that count."""
    runtime = state.runtime
    experts = runtime.model.expert_count
    loads = backward.expert_counts[:, :, :experts].sum(0)
    if backward.counts_all_tokens:
        return loads
    loads.zero_()
    for router in list_routers(state.model):
        first, *others = load_rows(runtime.model, router)
        # MTP depths with the same weights have counted together: each gets an even part.
        part = router.counted_loads // (1 + len(others))
        for row in others:
            loads[row] = part
        loads[first] = router.counted_loads - part * len(others)
    return loads


def forward_backward(
    state: TrainState,
    clock: PhaseClock,
    *,
    step: int,
    stop_requested: bool = False,
    wrap: Callable[[MicroBatchPasses], PassSteps] = run_as_is,
) -> BackwardResult:
    """Run every micro-batch of step `step` (from 1) forward and backward; reduce the gradients.

    Weights are untouched. `wrap` as in MicroBatchPasses.
    """
    runtime = state.runtime
    mesh = runtime.mesh
    size = state.step_size(runtime, step - 1)
    count = size.sequences // (mesh.layout.dp * mesh.layout.mbs)
    with clock.phase(StepPhase.DATA):
        batches = [
            state.train_data.micro_batch(runtime, step - 1, number).to(runtime.device)
            for number in range(count)
        ]
        is_first = mesh.coordinate("cp") == 0
        local_targets = torch.stack(
            [_count_loss_terms(batch, is_first=is_first) for batch in batches]
        ).sum()
        # A step without a target has no loss to divide; its gradients are those of other losses.
        valid_targets = max(1, int(all_reduce(local_targets[None], mesh.group("dp_cp"))))
    passes = MicroBatchPasses(
        state=state,
        clock=clock,
        batches=batches,
        step=step,
        size=size,
        valid_targets=valid_targets,
        sums=zero_sums(runtime, count),
        wrap=wrap,
    )
    if runtime.row_budget is not None:
        # What a try over the budget has counted is taken back.
        mark = runtime.counters.mark()
        with runtime.row_budget.enforce():
            result = _run_passes(state, passes, stop_requested)
        if result is not None:
            return result
        runtime.counters.note("the step again, with all rows")
        runtime.counters.return_to(mark)
        passes = replace(passes, sums=zero_sums(runtime, count), is_repeated=True)
    result = _run_passes(state, passes, stop_requested)
    assert result is not None  # nothing was over a budget
    return result


def _run_passes(
    state: TrainState, passes: MicroBatchPasses, stop_requested: bool
) -> BackwardResult | None:
    """Run the micro-batches of a step and reduce its gradients.

    Return None where some rank had more rows for another than an enforced budget.
    """
    runtime = state.runtime
    mesh = runtime.mesh
    clock = passes.clock
    batches = passes.batches
    valid_targets = passes.valid_targets
    runtime.products.begin_step(passes.step)
    runtime.weight_copies.begin_step(len(batches))
    if runtime.delayed_scaling is not None:
        runtime.delayed_scaling.begin_step()
    runtime.part_graphs.begin_step(is_counting=runtime.counters.is_counting)
    state.optimizer.begin_step(len(batches))
    for router in list_routers(state.model):
        router.begin_step()
    _run_micro_batches(state, passes)
    runtime.weight_copies.end_passes()
    sums = passes.sums
    runtime.counters.note_gradients_ready()
    with clock.phase(StepPhase.GRAD_REDUCE):
        squared_norm = state.optimizer.reduce_gradients()
        # The ranks of a TP group have the same losses: one of them adds them up.
        adds_up = float(mesh.coordinate("tp") == 0)
        stop_flag = torch.full_like(squared_norm, float(stop_requested))
        # All sums over the world go in one collective, since each waits for the slowest rank. They
        # are unpacked below in the order in which they stand here: four numbers, the rewards, of
        # which there are always as many, and the flag that only a budget adds.
        world_sums = [squared_norm, stop_flag, sums.nll * adds_up, sums.mtp_loss * adds_up]
        world_sums += sums.rewards * adds_up
        if runtime.row_budget is not None and not passes.is_repeated:
            world_sums.append(runtime.row_budget.flag())
        local = torch.cat((torch.stack(world_sums), sums.router_losses.flatten()))
        # The last is this rank's own, and comes to the host with the others.
        reduced = torch.cat((all_reduce(local, mesh.group("world")), sums.nll[None])).cpu()
        squares, stops, nll, mtp_loss, *others = reduced[: len(world_sums)].tolist()
        rewards, excess = others[: len(sums.rewards)], others[len(sums.rewards) :]
        local_nll = float(reduced[-1])
        router_losses = reduced[len(world_sums) : -1].view_as(sums.router_losses)
    runtime.counters.note_gradients_reduced()
    # A rank over its budget adds 2; a dry run reads 1 for every number (RowBudget.flag).
    if sum(excess) > 1:
        return None
    grad_norm = squares**0.5 / state.optimizer.loss_scale
    attended_pairs, window_pairs = count_attended_pairs(runtime, batches)
    return BackwardResult(
        loss=nll / valid_targets,
        aux_loss=mtp_loss + float(router_losses.sum()),
        grad_norm=grad_norm,
        is_finite=isfinite(grad_norm) and isfinite(nll),
        stop_agreed=stops > 0,
        local_nll=local_nll,
        rewards=_average_rewards(rewards, valid_targets),
        attended_pairs=attended_pairs,
        window_pairs=window_pairs,
        expert_counts=sums.expert_counts,
        router_losses=router_losses,
        counts_all_tokens=all(batch.counted is None for batch in batches),
        is_repeated=passes.is_repeated,
    )


def _run_micro_batches(state: TrainState, passes: MicroBatchPasses) -> None:
    """Run the micro-batches of a step, by its graph where the layout captures one.

    A step that is counted for the ledger runs as it is, as does one that is run again.
    """
    graph = state.graph
    count = len(passes.batches)
    is_plain = passes.is_repeated or state.runtime.counters.is_counting
    if graph is None or is_plain or not graph.is_warm(count):
        passes.run()
        return

    def build() -> tuple[GraphTensors, Callable[[], frozenset[str]]]:
        own = replace(
            passes,
            clock=PhaseClock(HostStamps()),  # a graph has no moments inside
            batches=[batch.clone() for batch in passes.batches],
            valid_targets=_to_tensor(passes.valid_targets, state.runtime.device),
            sums=zero_sums(state.runtime, count),
        )

        def body() -> frozenset[str]:
            own.run()
            return state.optimizer.unwritten_gradients

        return own.graph_tensors(), body

    with passes.clock.phase(StepPhase.BACKWARD):
        outer = replace(
            passes, valid_targets=_to_tensor(passes.valid_targets, state.runtime.device)
        )
        state.optimizer.unwritten_gradients = graph.run(count, outer.graph_tensors(), build)


def _to_tensor(number: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(number, dtype=torch.float64, device=device)


def clipping_factor(workload: Workload, grad_norm: float) -> float:
    """Return what gradients are multiplied by so that their norm is not over the limit."""
    clip_norm = workload.optimizer.clip_norm
    # 1e-6 as in torch's clip_grad_norm_.
    return min(1.0, clip_norm / (grad_norm + 1e-6)) if clip_norm else 1.0


def apply_update(
    state: TrainState, clock: PhaseClock, backward: BackwardResult, *, lr: float
) -> None:
    """Clip, update, and bring the new weights to every rank.

    Nothing is updated when a gradient is not finite.
    """
    if backward.is_finite:
        state.runtime.counters.note("update of the weights")
        with clock.phase(StepPhase.OPTIMIZER):
            scale = clipping_factor(state.runtime.workload, backward.grad_norm)
            state.optimizer.update(lr=lr, scale=scale)
    # After the update, which divides gradients by the scale that they were made with.
    state.optimizer.update_loss_scale(finite=backward.is_finite)
    with clock.phase(StepPhase.PARAM_GATHER):
        state.optimizer.all_gather_params()


def _count_loss_terms(batch: MicroBatch, *, is_first: bool) -> torch.Tensor:
    """Return how many losses this rank adds to a mean: those of its targets, or of pairs.

    All CP ranks have the losses of pairs; the first counts them.
    """
    if batch.answers is None:
        return (batch.targets >= 0).sum()
    return batch.targets.new_tensor(batch.answers.pairs * is_first)


def _average_rewards(sums: Sequence[float], pairs: float | torch.Tensor) -> PairRewards:
    """Return the means over `pairs` pairs of what MicroBatchPasses has summed."""
    if not sums:
        return PairRewards()
    count = float(pairs)
    return PairRewards(pairs=int(count), accuracy=sums[0] / count, margin=sums[1] / count)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldoutLoss:
    """The mean loss over held-out data, nats per target or of pairs, and of how many of them."""

    loss: float
    terms: int
    rewards: PairRewards


def compute_heldout_loss(
    state: TrainState, data: BatchSource, batches: int, beat: Callable[[], None]
) -> HeldoutLoss:
    """Return the mean loss over `batches` global batches.

    `beat` is called once a batch, so that a long evaluation is not taken for a hang.
    """
    runtime = state.runtime
    mesh = runtime.mesh
    count = runtime.job.micro_batches
    # The ranks of a TP group have the same nll: one of them adds it up.
    adds_up = mesh.coordinate("tp") == 0
    is_first = mesh.coordinate("cp") == 0
    # The number of targets or pairs, their nll or loss, and of pairs what StepSums has.
    sums = torch.zeros(4, dtype=torch.float64, device=runtime.device)
    for step in range(batches):
        beat()
        batch = [
            data.micro_batch(runtime, step, number).to(runtime.device) for number in range(count)
        ]

        def add_losses(key: Key, out: ModelOutput, batch: Sequence[MicroBatch] = batch) -> None:
            micro_batch, chunk = key
            if not state.model.chunks[chunk].has_loss:
                return
            answers = batch[micro_batch].answers
            if answers is None:
                sums[1] += out.nll.sum() * adds_up
            else:
                pairs = compute_pair_losses(runtime, answers, out.nll)
                sums[1:] += pairs.sums * (adds_up and is_first)
            sums[0] += _count_loss_terms(batch[micro_batch], is_first=is_first) * adds_up

        evaluate_batch(runtime, state.model, batch, add_losses)
    terms, loss, *rewards = all_reduce(sums, mesh.group("world")).tolist()
    holds_pairs = runtime.workload.loss.objective is Objective.DPO
    return HeldoutLoss(
        loss=loss / max(1.0, terms),
        terms=int(terms),
        rewards=_average_rewards(rewards if holds_pairs else (), max(1.0, terms)),
    )
