"""The loop of a rank, top to bottom: its part of the model, the last checkpoint, the steps."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from moewright.codec import from_data, to_data
from moewright.engine.checkpoint import (
    CheckpointSaver,
)
from moewright.engine.comm import collectives
from moewright.engine.comm.connections import list_connections, shut_connections
from moewright.engine.data.corpus_rows import CorpusBlend, blend_entropy, open_corpora
from moewright.engine.data.sampler import SampleOrder, count_whole_batches
from moewright.engine.model.layers import NamedParameter, list_parameters
from moewright.engine.model.transformer import draw_initial_value
from moewright.engine.observe.phase_clock import DeviceMeter
from moewright.engine.observe.profile import ProfilerWindow, merge_traces
from moewright.engine.observe.record import clamp_to_finite, write_rank_timings
from moewright.engine.observe.step_timing import StepTimer, WaitClock, add_links
from moewright.engine.optim.fsdp import local_weight
from moewright.engine.optim.update_rules import learning_rate
from moewright.engine.run.build_state import (
    build_coordinator,
    build_train_state,
    gather_and_note,
    init_distributed,
)
from moewright.engine.run.corpus_loader import (
    CorpusLoader,
    HeldoutData,
    NoBatches,
    PrefetchedBatches,
)
from moewright.engine.run.corruption import StateGuard
from moewright.engine.run.expert_mover import ExpertMover
from moewright.engine.run.ledger_record import record_ledger
from moewright.engine.run.peer_copies import PeerCopies, run_in_sessions
from moewright.engine.run.rank_checks import (
    refuse_different_ranks,
)
from moewright.engine.run.reference_pass import attach_references
from moewright.engine.run.restore import (
    build_identity,
    restore,
)
from moewright.engine.run.run_records import (
    build_session,
    build_step_record,
    count_repeated_steps,
    note_copy_failure,
    note_restart,
    note_way_on,
    open_recorder,
)
from moewright.engine.run.step import StepResult, compute_heldout_loss, train_step
from moewright.engine.run.stragglers import StragglerWatch
from moewright.engine.run.train_state import TrainState
from moewright.engine.run.worker import (
    RankContext,
    RankOutcome,
)
from moewright.engine.runtime import Runtime
from moewright.rules.job import plan_job
from moewright.spec.layout import Overlap
from moewright.spec.plan import Plan
from moewright.spec.run import SESSION_WARMUP_STEPS, CopyRecord, EvalRecord, RankTiming
from moewright.spec.workload import Objective

# More than a dynamic loss scale takes to come down from its start.
_MAX_CONSECUTIVE_SKIPS = 50


def train_rank(
    plan: Plan,
    run_dir: Path,
    last_step: int,
    falls_back: bool,
    prints_steps: bool,
    context: RankContext,
) -> RankOutcome:
    """Train as one rank, in as many sessions as it takes; copies of the state outlive them."""
    copies = PeerCopies(
        rank=context.rank,
        world_size=context.world_size,
        every=plan.workload.checkpoint.peer_every_steps,
    )
    worker = partial(_train_session, plan, run_dir, last_step, falls_back, prints_steps, copies)
    return run_in_sessions(worker, context)


def _train_session(
    plan: Plan,
    run_dir: Path,
    last_step: int,
    falls_back: bool,
    prints_steps: bool,
    copies: PeerCopies,
    context: RankContext,
) -> RankOutcome:
    """Train as one rank of those that have met, from its first tensor to its last checkpoint."""
    workload = plan.workload
    rank = context.rank
    # Connections that are open before the ranks meet stay open where one of them is lost.
    connections = list_connections()
    device = init_distributed(context)
    comm = build_coordinator(context)
    refuse_different_ranks(plan, comm)
    corpora = open_corpora(workload.data.train, workload, SampleOrder.SHUFFLED)
    heldout = _open_heldout(plan, corpora)
    fresh = build_train_state(
        plan_job(plan),
        NoBatches(),
        rank=rank,
        device=device,
        initial_value=partial(_draw_initial_value, context),
    )
    fresh.runtime.counters.note = context.note
    identity = build_identity(plan, corpora.fingerprint)
    # Before the restore, which may take this rank's state from another's memory.
    copies.allocate(fresh.local_shards(), comm)
    mover = ExpertMover(plan, fresh)
    steps_done = restore(
        fresh,
        run_dir,
        identity,
        comm,
        falls_back=falls_back,
        copies=copies,
        take_extra=mover.take_saved,
    )
    first_step = steps_done + 1
    if workload.loss.objective is Objective.DPO:
        blends = [corpora, *([heldout.loader.data] if heldout else [])]
        corpora, *others = attach_references(fresh, blends, run_dir, context, steps_done=steps_done)
        if heldout:
            heldout = replace(heldout, loader=replace(heldout.loader, data=others[0]))
    train_data = CorpusLoader(data=corpora, follows_rampup=True)
    batches = PrefetchedBatches(
        train_data,
        stop=last_step if workload.data.prefetch else 0,
        step_size=train_data.step_size,
    )
    context.close_on_loss(batches.close)
    saver = CheckpointSaver(
        run_dir / "checkpoints",
        spec=workload.checkpoint,
        extra={**identity, **mover.extra},
        comm=comm,
        build_background_comm=partial(build_coordinator, context, in_background=True),
    )
    context.close_on_loss(saver.abandon)
    saver.allocate(fresh.local_shards())
    state = replace(
        fresh,
        train_data=batches,
        step_size=train_data.step_size,
        host_copies=(*copies.buffers, saver.host_copy),
    )
    # Once more, because copies on the host count as state from here on.
    state.runtime.counters.census.list_states = state.state_tensors
    connections = list_connections() - connections
    if copies.is_active:
        copies.take(steps_done, state.local_shards(), state.runtime.mesh.group("world"))
    repeated = count_repeated_steps(run_dir, first_step) if rank == 0 else None
    if rank == 0 and context.attempt:
        note_restart(run_dir, plan.layout, "torchrun")
    recorder = open_recorder(plan, run_dir, rank, first_step, last_step, prints_steps=prints_steps)
    context.close_on_loss(recorder.close)
    recorder.write_session(build_session(plan, first_step, device))
    timer = StepTimer(rank=rank)
    context.close_on_loss(timer.close)
    device_meter = DeviceMeter(device)
    profiler = ProfilerWindow(
        workload.profile,
        run_dir,
        rank=rank,
        device=device,
        module=state.model,
        note=context.note,
        watches_all_threads=Overlap.EP in state.runtime.mesh.layout.overlap,
    )
    context.close_on_loss(profiler.close)
    # First of all, since threads may wait for the rank that is lost.
    context.close_on_loss(partial(shut_connections, connections))
    if workload.gc_every_steps:
        _disable_automatic_gc()
    wait_clock = state.runtime.counters.wait_clock
    gather = partial(_gather_and_wait, wait_clock, context)
    guard = StateGuard(state, every=workload.check_every, rank=rank, gather=gather)
    verify_saved = partial(guard.verify_state, only_saved=True)
    straggler_watch = StragglerWatch(plan_job(plan), state, mover.placement)
    # The one step of this session that is counted for the ledger.
    counted_step = min(first_step + workload.ledger_step, last_step)
    stopped = False
    consecutive_skips = 0
    for step in range(first_step, last_step + 1):
        context.beat(step)
        saver.raise_failure()
        lr = learning_rate(workload.optimizer, steps=workload.steps, step=step)
        is_counted = step == counted_step
        guard.begin_step()
        timer.begin_step(wait_clock)
        device_meter.begin_step()
        with profiler.step(step):
            result = train_step(
                state,
                step=step,
                lr=lr,
                stop_requested=context.stop.requested,
                count_ledger=is_counted,
                before_update=partial(guard.verify, step, lr=lr, is_counted=is_counted),
            )
        waits, wait_calls = wait_clock.take()
        host = timer.end_step(waits)
        sample = device_meter.end_step()
        guard.note(step)
        if step >= first_step + SESSION_WARMUP_STEPS and not is_counted:
            timer.add_steady_step(result.phases, waits, wait_calls, host, sample)
            straggler_watch.add_step(result.expert_loads, host)
        record = build_step_record(plan, step, lr, result, mover.placement)
        moves = mover.moves_before(step)
        record = replace(record, waits=waits, host=host, device=sample, moves=moves)
        recorder.write_step(replace(record, copied_step=saver.copied_step))
        if step == first_step and repeated is not None:
            note_way_on(run_dir, plan.layout, first_step, repeated)
        straggler_watch.report(run_dir, step)
        _note_copy_failures(saver, run_dir, plan, step)
        if result.skipped:
            consecutive_skips += 1
            report_nonfinite(
                state, result, step=step, rank=rank, consecutive_skips=consecutive_skips
            )
        else:
            consecutive_skips = 0
        # Before experts move: the ledger is of where they were in this step.
        if is_counted:
            record_ledger(state, run_dir, step, result, context, slots=mover.moved_slots)
        if mover.add_step(step, result.expert_loads):
            straggler_watch.place(mover.placement)
            saver.plan_anew({**identity, **mover.extra})
            guard.note(step)
        stopped = result.backward.stop_agreed and step < last_step
        is_last = stopped or step == last_step
        # A run that is asked to stop saves at once, without an evaluation before.
        is_evaluated = is_last or _is_due(step, workload.eval_every_steps)
        if heldout is not None and is_evaluated and not stopped:
            recorder.write_evaluation(_evaluate(state, heldout, step, context))
        if is_last or _is_due(step, workload.checkpoint.every_steps):
            recorder.sync()  # a checkpoint without the records of its steps would hide them
            saver.save(step, state.local_shards(), verify=verify_saved)
        if copies.is_due(step) and not is_last:
            copies.take(step, state.local_shards(), state.runtime.mesh.group("world"))
        if stopped:
            break
    batches.close()
    saver.close()
    _note_copy_failures(saver, run_dir, plan, step)
    if saver.copied_step >= 0:
        recorder.write_copy(CopyRecord(step=step, copied_step=saver.copied_step))
    profiler.close()
    timer.close()
    recorder.write_timings(step, _write_rank_timings(plan, run_dir, timer, context))
    recorder.close()
    state.optimizer.finish_pending()
    collectives.leave_world()
    return RankOutcome.STOPPED if stopped else RankOutcome.DONE


def _note_copy_failures(saver: CheckpointSaver, run_dir: Path, plan: Plan, step: int) -> None:
    for message in saver.take_copy_failures():
        note_copy_failure(run_dir, plan.layout, step=step, message=message)


def _gather_and_wait(wait_clock: WaitClock, context: RankContext, value: Any) -> list[Any]:
    """Gather a value of every rank; waiting for them is no work of this step's."""
    with wait_clock.measure("world"):
        return gather_and_note(context, value)


def _open_heldout(plan: Plan, train: CorpusBlend) -> HeldoutData | None:
    """Open the held-out corpora; None where the job names none."""
    text = plan.workload.data.heldout
    if not text:
        return None
    whole = replace(plan.workload, batch_samples=0)
    data = open_corpora(text, whole, SampleOrder.SEQUENTIAL, field="data.heldout")
    entropy = blend_entropy(train, data, plan.model.vocab_size)
    loader = CorpusLoader(data=data, follows_rampup=False)
    return HeldoutData(loader=loader, unigram_entropy=entropy)


def _disable_automatic_gc() -> None:
    """Leave garbage collection to `train_step`."""
    gc.collect()
    gc.disable()


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _evaluate(
    state: TrainState, heldout: HeldoutData, step: int, context: RankContext
) -> EvalRecord:
    workload = state.runtime.workload
    batches = count_whole_batches(
        heldout.loader.data.order.samples,
        global_batch=workload.global_batch,
        limit=workload.eval_batches,
    )
    beat = partial(context.beat, step)
    heldout_loss = compute_heldout_loss(state, heldout.loader, batches, beat)
    return EvalRecord(
        step=step,
        heldout_loss=clamp_to_finite(heldout_loss.loss),
        unigram_entropy=heldout.unigram_entropy,
        tokens=heldout_loss.terms,
        rewards=heldout_loss.rewards,
    )


def _write_rank_timings(
    plan: Plan, run_dir: Path, timer: StepTimer, context: RankContext
) -> tuple[RankTiming, ...]:
    """Gather the timings of all ranks; rank 0 writes paces.json and the merged trace.

    It returns them; other ranks return ().
    """
    own = {"pace": to_data(timer.build_rank_timing()), "calls": timer.recent_calls}
    gathered = gather_and_note(context, own)
    if context.rank != 0:
        return ()
    timings = [
        from_data(RankTiming, data["pace"], where=f"pace of rank {number}")
        for number, data in enumerate(gathered)
    ]
    calls = [data["calls"] for data in gathered]
    linked = add_links(plan.layout, timings, calls)
    write_rank_timings(run_dir, plan.layout, linked)
    merge_traces(run_dir, context.note)
    return linked


def _draw_initial_value(
    context: RankContext, parameter: NamedParameter, runtime: Runtime
) -> torch.Tensor:
    context.note(f"draws {parameter.name}")
    return draw_initial_value(parameter, runtime)


def report_nonfinite(
    state: TrainState, result: StepResult, *, step: int, rank: int, consecutive_skips: int
) -> None:
    """Report (on rank 0) what was not finite in a step that was skipped.

    Every rank of the world calls this.

    Raises:
        FloatingPointError: on the rank that it began with, where skipping cannot help: a weight or
            the loss is not finite, or too many steps were skipped in a row.
    """
    state.optimizer.finish_pending()
    # What comes first is nearer to the cause: gradients of bad losses reach the ranks that hold the
    # experts.
    own_suspects = [
        next(_find_bad_weights(state), ""),
        "" if isfinite(result.backward.local_nll) else "the loss",
        next(_find_bad_gradients(state), ""),
    ]
    # Before any rank raises, because all have to take part.
    suspects = collectives.gather_json(own_suspects)
    culprit, name = _find_first_suspect(suspects)
    has_bad_weight = any(names[0] for names in suspects)
    has_skips_left = consecutive_skips < _MAX_CONSECUTIVE_SKIPS
    if isfinite(result.backward.loss) and has_skips_left and not has_bad_weight:
        if rank == 0:
            message = f"step {step} is skipped: {name} of rank {culprit} is not finite"
            print(message, file=sys.stderr, flush=True)
    elif rank == culprit:  # the launcher ends the others, which wait in their next collective
        after = "" if has_skips_left else f" after {consecutive_skips} skipped steps in a row"
        raise FloatingPointError(f"{name} is not finite{after}")


def _find_first_suspect(suspects: list[list[str]]) -> tuple[int, str]:
    """Return the rank and the name of the tensor that the trouble began with.

    `suspects` [rank][kind] are names, or "" where all is finite; kinds nearer to the cause come
    first.
    """
    for kind in range(len(suspects[0])):
        for rank, names in enumerate(suspects):
            if names[kind]:
                return rank, names[kind]
    return 0, "a reduced gradient"


def _find_bad_weights(state: TrainState) -> Iterator[str]:
    for parameter in list_parameters(state.model):
        if not torch.isfinite(local_weight(parameter)).all():
            yield f"weight {parameter.name}"


def _find_bad_gradients(state: TrainState) -> Iterator[str]:
    """Look at the sums of this rank's own micro-batches, where the reduction leaves them."""
    for bucket in state.optimizer.buckets:
        for parameter, gradient in bucket.grad_views:
            if not torch.isfinite(gradient).all():
                yield f"gradient of {parameter.name}"
