"""Training in a layout beside training in one process: the same job, a few steps, all compared.

Compared are losses, auxiliary losses and gradient norms of every step, the gradients of the first,
and how far every weight has moved after the last. What the two may differ by is measured: one
process trains again from weights that are off by a unit in the last place of their format, and its
distance from itself says what rounding does to each figure. In formats of 16 bits or fewer all runs
take the experts that the first one chose, for rounding would choose others.

In fp32 one process trains once more with each micro-batch twice in a row. Losses and gradients are
means over targets and micro-batches, so that nothing may change: a division that is left out, which
every layout leaves out alike, shows there. And it trains with more of each loss, decay and bias of
the job: something must change, or the setting is lost on its way.

Rounding is across a gradient, and a fault is often along it: one expert's that is too small, a
reduction that leaves a part out. So the size of each gradient's part along the reference is
compared too, of each expert by itself: of n errors about 1/sqrt(n) of their size is left there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from pathlib import Path
from statistics import NormalDist, fmean, median

import torch

from moewright.codec import parse_layout
from moewright.engine.checkpoint import (
    LocalShard,
    load_checkpoint,
    read_index,
    save_checkpoint,
    single_process,
    whole_shard,
)
from moewright.engine.checkpoint.local_shard import SAFETENSORS_DTYPES
from moewright.engine.comm import collectives
from moewright.engine.data.corpus_rows import open_corpora
from moewright.engine.data.preflight import check_data
from moewright.engine.data.sampler import SampleOrder
from moewright.engine.model.micro_batch import MicroBatch
from moewright.engine.model.routes import prepare_routes
from moewright.engine.model.transformer import draw_initial_value
from moewright.engine.run.build_state import (
    build_coordinator,
    build_train_state,
    init_distributed,
)
from moewright.engine.run.corpus_loader import CorpusLoader
from moewright.engine.run.launch import launch
from moewright.engine.run.restore import describe_job, restore
from moewright.engine.run.step import BackwardResult, train_step
from moewright.engine.run.train_state import TrainState
from moewright.engine.run.worker import ExitCode, RankContext, RankOutcome
from moewright.engine.runtime import Runtime
from moewright.rules.adapters import trains_indexer, trains_module
from moewright.rules.job import Job
from moewright.rules.limits.engine_limits import require_runnable
from moewright.rules.shapes.param import name_in_layer
from moewright.spec.errors import BadInput, Reason
from moewright.spec.ledger import Module
from moewright.spec.record import copy_with
from moewright.spec.training_check import (
    CheckedRun,
    ComparedKind,
    SettingLine,
    TrainingCheck,
    TrainingLine,
)
from moewright.spec.workload import Dtype, Objective, RoutesSpec, Workload

# How often the distance that rounding makes may be exceeded: a layout rounds in other places, and
# a few distances of one process say only roughly how large theirs are.
_TIMES_ROUNDING = 6.0
# In 8 and 4 bits the formats of products round far more than all else, and the most that a layout
# does is to round every operand anew. Two roundings of a number are apart by a sixth of its squared
# step. Of the noisy runs it is a twenty-fifth where a unit of bf16 moves weights over the edges of
# steps, and nearly a sixth behind the first products, whose errors move all that follows: 1.25
# times their distance is the most measured, of six layouts and formats. The distance of a tensor,
# of many numbers, hardly varies.
_TIMES_IN_NARROW = {ComparedKind.GRADIENT: 2.5, ComparedKind.WEIGHT: 2.5}
# How often sizes of gradients may say what is not, all of a comparison together. They are means of
# many errors, and so nearly normal; the root mean square of the larger of two is 1.28 deviations.
_FALSE_ALARMS = 1e-3
_LARGER_OF_TWO = 1.28
_NOISE_SEEDS = (1, 2)
# In fp32 sums of another order differ by more than a unit of the weights makes them: the least
# bounds, as the proofs of layouts have them.
_LEAST_OF_TENSORS = 3e-5
_LEAST_OF_FIGURES = 1e-5
# A unit in the last place over the number, by the format in which weights are stored.
_UNITS = {Dtype.FP32: 2.0**-23, Dtype.FP16: 2.0**-10, Dtype.BF16: 2.0**-7}
_FIGURES = (ComparedKind.LOSS, ComparedKind.AUX_LOSS, ComparedKind.NORM)
# What a setting is raised by: in any job, with any value, more than rounding.
_MORE = 0.1
# Parameters that have an expert in each row of their first dim.
_EXPERTS = "moe.experts."

_FigureKey = tuple[ComparedKind, str]
_Figures = dict[_FigureKey, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedSteps:
    """What some steps left: (loss, aux loss, gradient norm) of each, and tensors by their names.

    `moved` are weights after the last step less those before the first.
    """

    figures: tuple[tuple[float, float, float], ...]
    gradients: Mapping[str, torch.Tensor]
    moved: Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """A run of some steps: weights off by a share of `noise`, each micro-batch `copies` times."""

    job: Job
    noise: float = 0.0
    seed: int = 0
    copies: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class _RepeatedBatches:
    """A source that hands out each micro-batch of another several times in a row."""

    loader: CorpusLoader
    workload: Workload
    copies: int

    def micro_batch(self, runtime: Runtime, step: int, micro_batch: int) -> MicroBatch:
        own = replace(runtime, job=replace(runtime.job, workload=self.workload))
        return self.loader.micro_batch(own, step, micro_batch // self.copies)


def check_training(job: Job, folder: Path, *, steps: int) -> TrainingCheck | ExitCode:
    """Train a job in its layout and in one process, and return how they compare.

    What the runs leave goes to `folder`. An exit code is returned where a rank failed.

    Raises:
        BadInput: the job cannot be trained, or no one process computes the same.
    """
    _refuse_layout_dependent(job)
    require_runnable(job)
    fingerprint = check_data(job.model, job.workload)
    # With the same micro-batches, because balance losses are those of a micro-batch.
    alone = replace(job, layout=parse_layout(f"mbs{job.layout.mbs}", world_size=1))
    require_runnable(alone)
    precision = job.workload.precision
    routes = folder / "routes"
    chooses_once = (
        precision is not Dtype.FP32 and job.model.moe is not None and not job.layout.graphs
    )
    unit = _UNITS[precision.wide]
    runs: list[TrainedSteps] = []
    # In this order the results are taken apart below.
    plans = [_Run(job=alone), *(_Run(job=alone, noise=unit, seed=seed) for seed in _NOISE_SEEDS)]
    plans.append(_Run(job=job))
    has_double = precision is Dtype.FP32 and _is_mean_over_micro_batches(job.workload)
    if has_double:
        plans.append(_Run(job=alone, copies=2))
    changed = _list_settings(alone) if precision is Dtype.FP32 else {}
    plans += [_Run(job=other) for other in changed.values()]
    for number, run in enumerate(plans):
        if chooses_once:
            taken = RoutesSpec(replay_routes=str(routes))
            if number == 0:
                taken = RoutesSpec(record_routes=str(routes))
            run = replace(
                run, job=replace(run.job, workload=replace(run.job.workload, routes=taken))
            )
        prepare_routes(run.job.model, run.job.workload, fingerprint)
        out = folder / f"run{number}"
        shutil.rmtree(out, ignore_errors=True)
        code = launch(
            partial(_train_rank, run, out, steps), nproc=run.job.layout.world_size, run_dir=out
        )
        if code is not ExitCode.DONE:
            return code
        runs.append(_read_steps(out))
        shutil.rmtree(out)
    shutil.rmtree(routes, ignore_errors=True)
    reference, *others = runs
    noisy, compared = others[: len(_NOISE_SEEDS)], others[len(_NOISE_SEEDS) :]
    first_setting = 1 + has_double
    allowed = _bound_figures(reference, noisy, is_narrow=precision.is_narrow)
    lines = [
        line
        # Not strict: without the doubled run there is one kind less.
        for run, trained in zip(CheckedRun, compared[:first_setting], strict=False)
        for line in _compare(run, allowed, trained)
    ]
    settings = [
        _count_changes(name, list(_compare(CheckedRun.LAYOUT, allowed, trained)))
        for name, trained in zip(changed, compared[first_setting:], strict=True)
    ]
    clip = job.workload.optimizer.clip_norm
    return TrainingCheck(
        precision=precision,
        steps=steps,
        clipped_steps=sum(0 < clip < norm for _, _, norm in reference.figures),
        lines=tuple(lines),
        settings=tuple(settings),
    )


def _list_settings(alone: Job) -> dict[str, Job]:
    """Return the job with more of each of its settings that must change something."""
    workload, model = alone.workload, alone.model
    fine_tuning, loss = workload.fine_tuning, workload.loss
    has_losses = model.moe is not None and trains_module(fine_tuning, Module.ROUTER)
    has_bias = has_losses and model.moe is not None and model.moe.router.selection_bias
    has_depths = model.mtp_layers > 0 and trains_module(fine_tuning, Module.MTP)
    has_indexer = model.attention.indexer is not None and trains_indexer(workload)
    applies = {
        **dict.fromkeys(("aux_coeff", "seq_aux_coeff", "global_aux_coeff", "z_coeff"), has_losses),
        "mtp_coeff": has_depths,
        "indexer_coeff": has_indexer,
    }
    changed = {
        name: replace(workload, loss=copy_with(loss, **{name: getattr(loss, name) + _MORE}))
        for name, is_read in applies.items()
        if is_read and getattr(loss, name)
    }
    rate, decay = workload.router.bias_update_rate, workload.optimizer.weight_decay
    if has_bias and rate:
        router = replace(workload.router, bias_update_rate=rate + _MORE)
        changed["bias_update_rate"] = replace(workload, router=router)
    if decay:
        optimizer = replace(workload.optimizer, weight_decay=decay + _MORE)
        changed["weight_decay"] = replace(workload, optimizer=optimizer)
    return {f"train.{name}": replace(alone, workload=other) for name, other in changed.items()}


def _count_changes(name: str, lines: Sequence[TrainingLine]) -> SettingLine:
    return SettingLine(
        name=name, compared=len(lines), changed=sum(not line.holds for line in lines)
    )


def _refuse_layout_dependent(job: Job) -> None:
    """Raise BadInput for what one process computes otherwise, or what is not compared."""
    layout, workload = job.layout, job.workload
    if layout.capacity:
        rule = "drops rows by the tokens of a rank: no one process computes the same"
        field, value, nearest = "layout.capacity", f"{layout.capacity:g}", "0"
    elif workload.loss.objective is Objective.DPO:
        rule = "verify compares training on tokens, not on pairs of answers"
        field, value, nearest = "train.objective", Objective.DPO.value, "a job of tokens"
    else:
        return
    raise BadInput(Reason(field=field, value=value, rule=rule, nearest=nearest))


def _is_mean_over_micro_batches(workload: Workload) -> bool:
    """Tell whether losses are means over micro-batches, whatever their order and number.

    A loss with the counts of the batch so far depends on the order, noise on a token's number.
    """
    is_steady = not workload.ramp.ramp_start and not workload.batch_samples
    return is_steady and not workload.loss.global_aux_coeff and not workload.router.jitter_eps


def _train_rank(run: _Run, out: Path, steps: int, context: RankContext) -> RankOutcome:
    """Train some steps at a constant rate as training does, and write what they leave."""
    workload = run.job.workload
    device = init_distributed(context)
    comm = build_coordinator(context)
    corpora = open_corpora(workload.data.train, workload, SampleOrder.SHUFFLED)
    loader = CorpusLoader(data=corpora, follows_rampup=True)
    larger = replace(workload, global_batch=run.copies * workload.global_batch)
    built = build_train_state(
        replace(run.job, workload=larger),
        _RepeatedBatches(loader=loader, workload=workload, copies=run.copies),
        rank=context.rank,
        device=device,
        initial_value=draw_initial_value,
    )
    state = replace(built, step_size=loader.step_size)
    identity = describe_job(run.job.model, workload, corpora.fingerprint)
    restore(state, out, identity, comm)
    if run.noise:
        _move_weights(state, run.noise, run.seed)
    before = [_copy(shard, "before/") for shard in _weights(state)]
    gradients: list[LocalShard] = []

    def keep_gradients(backward: BackwardResult) -> None:
        if not gradients:
            gradients.extend(_copy(shard) for shard in state.optimizer.gradient_shards())

    figures = []
    for step in range(1, steps + 1):
        context.beat(step)
        result = train_step(
            state,
            step=step,
            lr=workload.optimizer.lr,
            stop_requested=False,
            count_ledger=False,
            before_update=keep_gradients,
        )
        passes = result.backward
        figures.append((passes.loss, passes.aux_loss, passes.grad_norm))
    state.optimizer.finish_pending()
    after = [_copy(shard, "after/") for shard in _weights(state)]
    shards = [*gradients, *before, *after]
    save_checkpoint(out / "tensors", step=steps, shards=shards, extra={}, keep=1, comm=comm)
    if context.rank == 0:
        (out / "figures.json").write_text(json.dumps(figures), "utf-8")
    collectives.leave_world()
    return RankOutcome.DONE


def _weights(state: TrainState) -> list[LocalShard]:
    """Return what trains, and what routers hold, as a checkpoint has it."""
    return [shard for shard in state.local_shards() if not shard.name.startswith("optim/")]


def _copy(shard: LocalShard, prefix: str = "") -> LocalShard:
    return replace(shard, name=prefix + shard.name, tensor=shard.tensor.clone())


def _move_weights(state: TrainState, unit: float, seed: int) -> None:
    """Move every master weight of one process by up to a unit in the last place of its format."""
    generator = torch.Generator().manual_seed(seed)
    for shard in _weights(state):
        if shard.tensor.is_floating_point():
            noise = torch.rand(shard.tensor.shape, generator=generator) * 2 - 1
            shard.tensor.mul_(1 + unit * noise.to(shard.tensor))
    state.optimizer.all_gather_params()


def _read_steps(out: Path) -> TrainedSteps:
    """Read what the ranks of a run left, as whole tensors."""
    (gathered,) = (out / "tensors").glob("step-*")
    tensors = {
        entry.name: torch.empty(entry.shape, dtype=SAFETENSORS_DTYPES[entry.dtype])
        for entry in read_index(gathered).tensors
    }
    shards = [whole_shard(name, tensor) for name, tensor in tensors.items()]
    load_checkpoint(gathered, shards=shards, comm=single_process())
    names = [name.removeprefix("after/") for name in tensors if name.startswith("after/")]
    return TrainedSteps(
        figures=tuple(map(tuple, json.loads((out / "figures.json").read_text("utf-8")))),
        gradients={
            name.removeprefix("grad/"): tensor
            for name, tensor in tensors.items()
            if name.startswith("grad/")
        },
        moved={
            name: tensors[f"after/{name}"].double() - tensors[f"before/{name}"].double()
            for name in names
        },
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Allowed:
    """What one process computes for a figure, how far rounding moves it, and how far it may be."""

    reference: torch.Tensor
    rounding: float
    bound: float


def _bound_figures(
    reference: TrainedSteps, noisy: Sequence[TrainedSteps], *, is_narrow: bool
) -> dict[_FigureKey, _Allowed]:
    """Return what is allowed for each figure, of which one kind has one least bound.

    A kind of few figures says more of what rounding does than any of its figures alone.
    """
    references = _list_figures(reference)
    others = [_list_figures(run) for run in noisy]
    rounding = {
        key: max(_measure(key, other[key], value) for other in others)
        for key, value in references.items()
    }
    typical = _find_typical(references, others, rounding)
    times_by_kind = _choose_times(references) if is_narrow else {}
    allowed = {}
    for key, value in references.items():
        kind, _ = key
        least = _LEAST_OF_FIGURES if kind in _FIGURES else _LEAST_OF_TENSORS
        times = times_by_kind.get(kind, _TIMES_ROUNDING)
        bound = max(least, times * max(rounding[key], typical[key]))
        allowed[key] = _Allowed(reference=value, rounding=rounding[key], bound=bound)
    return allowed


def _compare(
    run: CheckedRun, allowed: Mapping[_FigureKey, _Allowed], trained: TrainedSteps
) -> Iterator[TrainingLine]:
    """Yield a line for each figure."""
    own = _list_figures(trained)
    for key, figure in allowed.items():
        kind, name = key
        difference = _measure(key, own[key], figure.reference) if key in own else float("inf")
        yield TrainingLine(
            run=run,
            kind=kind,
            name=name,
            difference=difference,
            rounding=figure.rounding,
            bound=figure.bound,
            holds=difference <= figure.bound,
        )


def _choose_times(references: _Figures) -> dict[ComparedKind, float]:
    """Return how often the distance that rounding makes may be exceeded in 8 and 4 bits."""
    sizes = sum(kind is ComparedKind.GRADIENT_SIZE for kind, _ in references)
    # On both sides, and shared by all sizes, so that all together are wrong no more often.
    deviations = NormalDist().inv_cdf(1 - _FALSE_ALARMS / 2 / max(1, sizes))
    return {**_TIMES_IN_NARROW, ComparedKind.GRADIENT_SIZE: deviations / _LARGER_OF_TWO}


def _find_typical(
    references: _Figures, others: Sequence[_Figures], rounding: Mapping[_FigureKey, float]
) -> dict[_FigureKey, float]:
    """Return what rounding does to each figure by what it does to all of its kind.

    Of the sizes of gradients, it is a share of how far rounding moves the gradient itself.
    """
    apart = {
        key: max(_distance(other[key], value) for other in others)
        for key, value in references.items()
        if key[0] is ComparedKind.GRADIENT_SIZE
    }
    squares = [(rounding[key] / distance) ** 2 for key, distance in apart.items() if distance]
    share = sqrt(fmean(squares)) if squares else 0.0
    by_kind: dict[ComparedKind, list[float]] = {}
    for (kind, _), size in rounding.items():
        by_kind.setdefault(kind, []).append(size)
    medians = {kind: median(sizes) for kind, sizes in by_kind.items()}
    return {key: share * apart[key] if key in apart else medians[key[0]] for key in references}


def _list_figures(run: TrainedSteps) -> _Figures:
    figures = {
        (kind, str(step)): torch.tensor(value, dtype=torch.float64)
        for step, values in enumerate(run.figures, 1)
        for kind, value in zip(_FIGURES, values, strict=True)
    }
    tensors = {
        (kind, name): tensor
        for kind, group in (
            (ComparedKind.GRADIENT, run.gradients),
            (ComparedKind.GRADIENT_SIZE, dict(_split_experts(run.gradients))),
            (ComparedKind.WEIGHT, run.moved),
        )
        for name, tensor in group.items()
    }
    return figures | tensors


def _split_experts(gradients: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the gradient of each parameter, that of experts by expert."""
    for name, gradient in gradients.items():
        if name_in_layer(name).startswith(_EXPERTS) and gradient.dim() > 1:
            for expert, part in enumerate(gradient):
                yield f"{name}[{expert}]", part
        else:
            yield name, gradient


def _measure(key: _FigureKey, value: torch.Tensor, reference: torch.Tensor) -> float:
    if key[0] is ComparedKind.GRADIENT_SIZE:
        return _distance_along(value, reference)
    return _distance(value, reference)


def _distance_along(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return how far a tensor's part along its reference is from that, over the size of that."""
    own, other = value.double().flatten(), reference.double().flatten()
    square = float(other @ other)
    if square == 0:
        return _distance(value, reference)
    return abs(float(own @ other) / square - 1)


def _distance(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return how far a tensor is from its reference, over the size of that."""
    scale = float(reference.double().norm())
    difference = float((value.double() - reference.double()).norm())
    if scale == 0:
        return 0.0 if difference == 0 else float("inf")
    return difference / scale
