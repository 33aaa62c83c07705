"""Training, top to bottom: a Plan comes in, a run directory comes out.

`run` is called once a job. It refuses what the engine cannot do, then starts one process a rank (or
joins those of torchrun); each calls `_train_rank`, which builds its part of the model, restores the
last checkpoint, and steps.
"""

from __future__ import annotations

import datetime
import gc
import shutil
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import moewright
from moewright.codec import from_data, read_json, to_data, write_json
from moewright.engine.checkpoint import (
    CheckpointSaver,
    Coordinator,
    require_space,
)
from moewright.engine.comm import collectives
from moewright.engine.data.build_corpus import read_corpus
from moewright.engine.data.corpus_loader import CorpusLoader
from moewright.engine.data.indexed import open_indexed
from moewright.engine.data.preflight import check_data
from moewright.engine.data.sampler import SampleOrder, build_sampler, count_whole_batches
from moewright.engine.kernels.fused.select import implementation_name, unavailable_reasons
from moewright.engine.kernels.matmul import has_native_bf16
from moewright.engine.model.transformer import draw_initial_value
from moewright.engine.observe.profile import ProfilerWindow, merge_traces
from moewright.engine.observe.record import (
    ConsoleWriter,
    JsonLinesWriter,
    Recorder,
    RecordWriter,
    TensorBoardWriter,
    build_layer_loads,
    clamp_to_finite,
    write_ledger,
    write_paces,
)
from moewright.engine.observe.step_timing import StepTimer, add_links, sample_device
from moewright.engine.optim.lr_schedule import learning_rate
from moewright.engine.run.build_state import build_train_state, init_distributed
from moewright.engine.run.env import read_shared_settings, read_torchrun_env
from moewright.engine.run.launch import launch
from moewright.engine.run.nonfinite import report_nonfinite
from moewright.engine.run.restore import build_identity, read_steps_done, restore
from moewright.engine.run.step import StepResult, TrainState, compute_heldout_loss, train_step
from moewright.engine.run.worker import ExitCode, RankContext, RankOutcome
from moewright.rules.batch_rampup import workload_at_step
from moewright.rules.engine_limits import require_runnable
from moewright.rules.expert_placement import slot_experts
from moewright.rules.flops import model_flops_per_token
from moewright.rules.parameters import count_parameters
from moewright.rules.routing import counts_copies, dispatch_nodes
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import DeviceKind
from moewright.spec.ledger import Selection
from moewright.spec.plan import Plan
from moewright.spec.run import (
    SESSION_WARMUP_STEPS,
    EvalRecord,
    LayerLoad,
    RankTiming,
    Session,
    StepRecord,
)
from moewright.spec.units import TERA
from moewright.spec.workload import DocumentMasking, Dtype, Workload

PLAN_FILE = "plan.json"


def train(plan: Plan, run_dir: Path, *, extend: bool = False) -> ExitCode:
    """Train `plan` in `run_dir`, continuing from its last checkpoint; returns the exit code of the
    job.

    A run that has reached its steps is done at once, unless `extend` asks for as many again. Raises
    BadInput, before anything is written or started, when the plan is not legal, asks for what the
    engine or this machine cannot run, or the data or the checkpoint are not those of this job.
    plan.json is written once the folder is this job's.
    """
    require_runnable(plan.model, plan.workload, plan.layout)
    kind = plan.hardware.device.kind
    if missing := (
        *_missing_devices(plan),
        *unavailable_reasons(plan.workload.fused_kernels, kind),
    ):
        raise BadInput(*missing)
    done = read_steps_done(
        plan, run_dir, build_identity(plan, check_data(plan.model, plan.workload))
    )
    last_step = _find_last_step(plan.workload, done, extend)
    if done >= last_step:
        print(f"{run_dir}: all {last_step} steps are done", flush=True)
        return ExitCode.DONE
    state_bytes = (
        4 + 2 * plan.workload.optimizer.moment_dtype.nbytes
    )  # of a checkpoint, a parameter: master, moments
    require_space(run_dir, state_bytes * count_parameters(plan.model).total)
    return launch(
        partial(_train_rank, plan, run_dir, last_step),
        nproc=plan.layout.world_size,
        run_dir=run_dir,
        device=plan.hardware.device.kind,
        before_start=partial(_write_plan, plan, run_dir),
    )


def _write_plan(plan: Plan, run_dir: Path) -> None:
    """Write plan.json; ledgers that were counted under another plan go, for they are predicted from
    this file."""
    path = run_dir / PLAN_FILE
    if path.exists() and read_json(Plan, path) == plan:
        return
    shutil.rmtree(run_dir / "ledger", ignore_errors=True)
    write_json(path, plan)


def _missing_devices(plan: Plan) -> tuple[Reason, ...]:
    """A plan for GPUs needs one here for every rank that starts here."""
    if plan.hardware.device.kind is not DeviceKind.CUDA:
        return ()
    env = read_torchrun_env()
    here = plan.layout.world_size if env is None else env.local_world_size or env.local_rank + 1
    wanted, found = here, torch.cuda.device_count()
    if found >= wanted:
        return ()
    rule = f"needs {wanted} CUDA devices on this machine, which has {found}"
    near = str(found) if found else "the .toml of `moewright bench machine`"
    return (
        Reason(
            field="train.nproc" if found else "train.hardware",
            value=plan.hardware.name,
            rule=rule,
            nearest=near,
        ),
    )


def _find_last_step(workload: Workload, done: int, extend: bool) -> int:
    """The step to stop at. A run whose last recipe is finished goes on by another one when asked
    to."""
    recipes = -(-done // workload.steps)
    return workload.steps * max(
        1, recipes + (1 if extend and done == recipes * workload.steps and done else 0)
    )


def _train_rank(plan: Plan, run_dir: Path, last_step: int, seat: RankContext) -> RankOutcome:
    """One rank, from its first tensor to its last checkpoint."""
    work = plan.workload
    device = init_distributed(seat)
    comm = Coordinator(rank=seat.rank, world_size=seat.world_size, gather=collectives.gather_json)
    _refuse_different_plans(plan, comm)
    train, heldout = _open_data(plan)
    job = build_train_state(
        plan.model,
        work,
        plan.layout,
        train,
        rank=seat.rank,
        device=device,
        initial_value=draw_initial_value,
    )
    identity = build_identity(plan, train.dataset.fingerprint)
    first_step = restore(job, run_dir, identity, comm) + 1
    saver = CheckpointSaver(
        run_dir / "checkpoints",
        spec=work.checkpoint,
        extra=identity,
        comm=comm,
        build_background_comm=partial(_build_background_coordinator, seat),
    )
    recorder = _build_recorder(run_dir, seat, first_step, last_step)
    recorder.write_session(_build_session(plan, first_step, device))
    pace = StepTimer(rank=seat.rank)
    window = ProfilerWindow(work.profile, run_dir, rank=seat.rank, device=device, module=job.model)
    if work.gc_every_steps:
        gc.collect()
        gc.freeze()  # what the set-up made lives as long as the run: not to be walked again
        gc.disable()
    counted_step = min(first_step + work.ledger_step, last_step)
    stopped, skips = False, 0
    for step in range(first_step, last_step + 1):
        seat.beat(step)
        saver.raise_failure()
        lr = learning_rate(work.optimizer, steps=work.steps, step=step)
        pace.begin_step(job.runtime.counters.wait_clock)
        with window.step(step):
            result = train_step(
                job,
                step=step,
                lr=lr,
                stop_requested=seat.stop.requested,
                count_ledger=step == counted_step,
            )
        waits, calls = job.runtime.counters.wait_clock.take()
        host = pace.end_step(result.phases, waits)
        if step >= first_step + SESSION_WARMUP_STEPS and step != counted_step:
            pace.add_steady_step(result.phases, waits, calls, host)
        record = _build_step_record(plan, step, lr, result)
        recorder.write_step(replace(record, waits=waits, host=host, device=sample_device(device)))
        skips = skips + 1 if result.skipped else 0
        if skips:
            report_nonfinite(job, result, step=step, rank=seat.rank, consecutive_skips=skips)
        if step == counted_step:
            _record_ledger(job, run_dir, step, result, seat)
        stopped = result.stop_agreed and step < last_step
        if not stopped and (step == last_step or _is_due(step, work.eval_every_steps)):
            recorder.write_evaluation(_evaluate_heldout(job, heldout, step, seat))
        if stopped or step == last_step or _is_due(step, work.checkpoint.every_steps):
            saver.save(step, job.local_shards())
        if stopped:
            break
    saver.wait()
    recorder.close()
    window.close()
    pace.close()
    everyone = collectives.gather_json(
        {"pace": to_data(pace.build_rank_pace()), "calls": pace.recent_calls}
    )
    if seat.rank == 0:
        paces = [
            from_data(RankTiming, each["pace"], where=f"pace of rank {rank}")
            for rank, each in enumerate(everyone)
        ]
        write_paces(run_dir, add_links(plan.layout, paces, [each["calls"] for each in everyone]))
        merge_traces(run_dir)
    job.optimizer.finish_pending()
    collectives.leave_world()
    return RankOutcome.STOPPED if stopped else RankOutcome.DONE


def _build_background_coordinator(seat: RankContext) -> Coordinator:
    group = collectives.new_control_group()
    return Coordinator(
        rank=seat.rank,
        world_size=seat.world_size,
        gather=lambda value: collectives.gather_json(value, group),
    )


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _evaluate_heldout(
    job: TrainState, heldout: CorpusLoader, step: int, seat: RankContext
) -> EvalRecord:
    work = job.runtime.workload
    batches = count_whole_batches(
        heldout.sampler, global_batch=work.global_batch, limit=work.eval_batches
    )
    loss, targets = compute_heldout_loss(job, heldout, batches, partial(seat.beat, step))
    entropy = read_corpus(Path(work.data.heldout).parent).unigram_entropy
    return EvalRecord(
        step=step, heldout_loss=clamp_to_finite(loss), unigram_entropy=entropy, tokens=targets
    )


def _open_data(plan: Plan) -> tuple[CorpusLoader, CorpusLoader]:
    """Training and held-out data."""
    train, heldout = (
        CorpusLoader(
            dataset=dataset,
            sampler=build_sampler(
                dataset,
                seq_len=plan.workload.seq_len,
                global_batch=plan.workload.global_batch,
                seed=plan.workload.seed,
                order=order,
            ),
            follows_rampup=order is SampleOrder.SHUFFLED,
        )
        for dataset, order in (
            (open_indexed(Path(plan.workload.data.train)), SampleOrder.SHUFFLED),
            (open_indexed(Path(plan.workload.data.heldout)), SampleOrder.SEQUENTIAL),
        )
    )
    return train, heldout


def _refuse_different_plans(plan: Plan, comm: Coordinator) -> None:
    """Refuse a job whose ranks have different plans, code or settings: they would train different
    models."""
    code = {
        "plan": plan.fingerprint,
        "moewright": moewright.__version__,
        "torch": torch.__version__,
    }
    kernels = implementation_name(plan.workload.fused_kernels, plan.hardware.device.kind)
    mine = {**code, "fused_kernels": kernels, **read_shared_settings()}
    for rank, theirs in enumerate(comm.gather(mine)):
        for field in sorted({*mine, *theirs}, key=[*mine, *theirs].index):
            here, there = (each.get(field, "none") for each in (mine, theirs))
            if here != there:
                rule = (
                    f"rank {rank} has {there}, rank {comm.rank} has {here}; all ranks need the same"
                )
                raise BadInput(Reason(field=field, rule=rule))


def _build_recorder(run_dir: Path, seat: RankContext, first_step: int, last_step: int) -> Recorder:
    if seat.rank != 0:
        return Recorder(writers=())
    sinks: list[RecordWriter] = [
        JsonLinesWriter(run_dir, first_step=first_step),
        ConsoleWriter(first_step=first_step, last_step=last_step, stream=sys.stdout),
    ]
    with suppress(ImportError):  # TensorBoard is optional
        sinks.append(TensorBoardWriter(run_dir, first_step=first_step))
    return Recorder(writers=tuple(sinks))


def _build_session(plan: Plan, first_step: int, device: torch.device) -> Session:
    return Session(
        first_step=first_step,
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        world_size=plan.layout.world_size,
        torch_version=torch.__version__,
        device_name=torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else plan.hardware.device.name,
        threads_per_rank=torch.get_num_threads(),
        routing=plan.workload.router.force,
    )


def _build_step_record(plan: Plan, step: int, lr: float, result: StepResult) -> StepRecord:
    step_s = sum(row.seconds for row in result.phases)
    tokens = workload_at_step(plan.workload, step - 1).tokens_per_step
    rank_tokens_per_s = tokens / plan.layout.world_size / step_s
    share = plan.workload.data.attended_share
    per_token = model_flops_per_token(plan.model, plan.workload.seq_len, attended_share=share)
    flops_per_s = rank_tokens_per_s * per_token
    peak = next(
        (p.rate.value for p in plan.hardware.device.peaks if p.dtype is plan.workload.precision),
        0.0,
    )
    return StepRecord(
        step=step,
        loss=clamp_to_finite(result.loss),
        aux_loss=clamp_to_finite(result.aux_loss),
        lr=lr,
        grad_norm=clamp_to_finite(result.grad_norm),
        tokens=tokens,
        step_s=step_s,
        tokens_per_s_per_rank=rank_tokens_per_s,
        tflops_per_rank=flops_per_s / TERA,
        mfu=flops_per_s / peak if peak else 0.0,
        samples_per_s=tokens / plan.workload.seq_len / step_s,
        hfu=flops_per_s / peak * _hfu_over_mfu(plan) if peak else 0.0,
        skipped=result.skipped,
        phases=result.phases,
        loads=_build_loads(plan, result, tokens=tokens)
        if _is_due(step, plan.workload.router_log_every_steps)
        else (),
    )


def _hfu_over_mfu(plan: Plan) -> float:
    """FLOPs with the planned replays over those without."""
    return plan.estimate.hfu / plan.estimate.mfu if plan.estimate.mfu else 1.0


def _build_loads(plan: Plan, result: StepResult, *, tokens: int) -> tuple[LayerLoad, ...]:
    moe = plan.model.moe
    if moe is None:
        return ()
    chosen = tokens * moe.router.top_k
    slots = {
        n: slot_experts(plan.model, plan.workload, plan.layout, n) for n in plan.model.routed_layers
    }
    return build_layer_loads(
        result.expert_loads, result.router_losses, slots, ep=plan.layout.ep, chosen_rows=chosen
    )


def _to_tuples(value: Any) -> Any:
    """Nested lists as nested tuples."""
    return tuple(map(_to_tuples, value)) if isinstance(value, list) else value


def _record_ledger(
    job: TrainState, run_dir: Path, step: int, result: StepResult, seat: RankContext
) -> None:
    """Write what this rank counted on this step, and (rank 0) the selection that explains its
    routed rows."""
    run = job.runtime
    # [pipeline rank, rank of its stage, micro-batch, layer, expert]; a layer's counts are 0 on all
    # stages but its own.
    shape = run.mesh.layout.pp, seat.world_size // run.mesh.layout.pp, *result.expert_counts.shape
    every = torch.tensor(collectives.gather_json(result.expert_counts.tolist())).view(shape)
    of_source = every.sum(0).permute(1, 2, 0, 3)
    experts, ranks = run.model.moe.experts if run.model.moe else 0, run.mesh.layout.ep
    copied = counts_copies(run.mesh.layout)
    bounded = run.workload.data.documents is not DocumentMasking.JOINED
    selection = Selection(
        step=step,
        counts=_to_tuples(of_source[..., :experts].tolist()),
        copies=_to_tuples(of_source[..., experts : experts + ranks].tolist()) if copied else (),
        nodes=_to_tuples(of_source[..., experts + ranks :].tolist())
        if dispatch_nodes(run.mesh.layout)
        else (),
        attended=tuple(collectives.gather_json(result.attended_pairs)) if bounded else (),
        near=tuple(collectives.gather_json(result.window_pairs))
        if bounded and run.model.max_window
        else (),
    )
    notes: tuple[str, ...] = ()
    precision = run.workload.precision
    if run.device.type == "cpu" and (precision is Dtype.FP16 or not has_native_bf16()):
        missing = Dtype.FP16 if precision is Dtype.FP16 else Dtype.BF16
        notes = (
            f"this CPU has no {missing} dot product: GEMM operands are widened to fp32 while they multiply, not kept",
        )
    ledger = run.counters.build_ledger(
        rank=seat.rank,
        pp_rank=run.mesh.coordinate("pp"),
        state=job.optimizer.memory_rows(),
        time=result.phases,
        notes=notes,
    )
    write_ledger(run_dir, ledger, selection if seat.rank == 0 else None)
