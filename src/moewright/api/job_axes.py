"""The verb `plan`, and what of the job itself it may choose: precision, global batch, switches.

Formats are compared at the largest batch, batches in the format that is chosen, both with all the
switches that the user allows; the chosen job is then compared with the one without them. A format
is chosen by what layouts are ranked by, the bound of a step, among those that somebody ran on the
part. How much a sequence teaches is the user's to say: all batches of the range are taken to teach
as much a token, so that its upper end is the critical batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, TypedDict, Unpack

from moewright.api.planning import (
    Plans,
    build_objections,
    explain_empty_search,
    file_name,
    search_request,
)
from moewright.api.requests import PlanRequest, read_axes, read_plan_request
from moewright.api.workload_choices import (
    LengthChoices,
    check_keywords,
    select_keywords,
    workload_options,
)
from moewright.cost.evidence import count_runs_in
from moewright.rules.limits.legality import check_precision
from moewright.rules.limits.trainers import TargetTrainer, job_refusals
from moewright.search.ranking import bound_s
from moewright.search.search import find_best_plan
from moewright.search.switches import set_switches
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Hardware
from moewright.spec.model import ModelSpec
from moewright.spec.names import closest_match
from moewright.spec.options import JobAxes, JobSwitchKind, SearchOptions
from moewright.spec.plan import JobChoice, RankingRule
from moewright.spec.workload import NARROW_FORMATS, Dtype

_MOST_BATCHES = 6  # that are searched of a range
# A larger batch is taken where a sequence takes so much less time: it costs steps of the optimizer.
_WORTH_A_LARGER_BATCH = 0.01


class LayoutChoices(TypedDict, total=False):
    """The keywords of `plan` that choose among layouts."""

    layout: str
    fit_probability: float
    risk: float
    fewest: bool
    runs_on: str


class PlanChoices(LayoutChoices, LengthChoices, total=False):
    """The keywords of `plan` that choose among layouts, and that say the job or vary it."""

    switches: Sequence[JobSwitchKind | str]


def plan(
    model: str | Path | ModelSpec,
    *,
    on: str | Hardware = "",
    seq_len: int | None = None,
    global_batch: int | str | None = None,
    precision: Dtype | str | None = None,
    load: Path | str | float | None = None,
    top: int = 5,
    **choices: Unpack[PlanChoices],
) -> Plans:
    """Rank the layouts of a model, or of a job file, on some hardware by predicted step time.

    Layouts that fit with a probability of `fit_probability` come first, ranked by the seconds that
    a step exceeds with a probability of `risk`.

    Args:
        model: a name, a config.json or its folder, a job .toml, or a ModelSpec.
        on: count x device, such as "256xH800", or a Hardware; a job brings its own.
        seq_len: tokens a sequence; 4096 when neither this nor a job says it.
        global_batch: sequences a step; 16 a device when neither this nor a job says it. A range
            such as "512..4096" lets the plan choose, up to a critical batch.
        precision: "bf16" when neither this nor a job says it; "any" lets the plan choose.
        load: "balanced", the hottest expert rank's rows over the mean, or a file of measured
            tokens by expert; published runs when neither this nor a job says it.
        top: how many layouts to return.
        **choices: `layout`, layout text whose keys are pinned; `fewest`, to plan for the fewest
            devices, up to those of `on`, on which a layout is safe; `fit_probability` (0.9) and
            `risk` (0.1) of the ranking; `runs_on`, "engine", "megatron" or "torchtitan", to take
            layouts that this trainer starts; `switches` that the plan may set ("bf16-gradients",
            "bf16-moments", "fused-experts", "narrow-head"); and, as `estimate` takes them,
            `from_trace`, `network`, `task`, `lora_rank`, `quantize_base`, `rampup_batch_size`,
            `lengths`, `steps`, `tokens`.

    Raises:
        BadInput: something cannot be used, or no layout is legal and fits.

    Example:
        >>> import moewright as mw
        >>> plans = mw.plan("Qwen3-30B-A3B", on="8xH100", top=2)
        >>> len(plans), plans.best.layout.world_size
        (2, 8)
    """
    dtype, most, axes = read_axes(precision, global_batch)
    check_keywords("plan", choices, PlanChoices)
    axes = replace(axes, switches=_read_switches(choices.get("switches", ())))
    request = read_plan_request(model, on, workload_options(seq_len, most, dtype, load, choices))
    search_options = SearchOptions(top=top, **select_keywords(choices, LayoutChoices))
    result = search_axes(request, Path(file_name(model)), axes, search_options)
    if result.best is None:
        raise explain_empty_search(
            result.request, result.search, Path(file_name(model)), layout=search_options.layout
        )
    return result


def _read_switches(names: Sequence[JobSwitchKind | str]) -> tuple[JobSwitchKind, ...]:
    """Return switches by their names, each once.

    Raises:
        BadInput: there is no switch of a name.
    """
    for name in names:
        if name not in tuple(JobSwitchKind):
            rule = f"must be among {', '.join(JobSwitchKind)}"
            nearest = closest_match(name, list(JobSwitchKind))
            raise BadInput(Reason(field="switches", value=name, rule=rule, nearest=nearest))
    return tuple(dict.fromkeys(JobSwitchKind(name) for name in names))


def list_batches(low: int, high: int) -> tuple[int, ...]:
    """Return the batches of a range that are searched: `low` times powers of two, then `high`."""
    doublings = (high // low).bit_length() - 1
    stride = doublings // _MOST_BATCHES + 1
    batches = {low << step for step in range(0, doublings + 1, stride)}
    return tuple(sorted(batches | {high}))


def search_axes(request: PlanRequest, job: Path, axes: JobAxes, options: SearchOptions) -> Plans:
    """Search the formats and batches that the user lets vary, then the layouts of the best.

    The request has the largest of the batches. `choices` of the answer are the best layout of each
    format and batch; `job` is the file that refusals name.

    Raises:
        BadInput: something cannot be used.
    """
    if axes == JobAxes():
        return search_request(request, job, options)
    formats: tuple[Dtype, ...] = (request.workload.precision,)
    if axes.any_precision:
        formats = _list_formats(request, options.runs_on)
    tried = [_change(request, precision=dtype) for dtype in formats]
    choices = [_try_choice(changed, options, axes.switches) for changed in tried]
    best = _pick(choices)
    request = _change(request, precision=best.precision)
    if axes.batches is not None:
        # The largest is tried already, in all formats.
        smaller = [_change(request, batch=batch) for batch in list_batches(*axes.batches)[:-1]]
        others = [_try_choice(changed, options, axes.switches) for changed in smaller]
        choices += others
        # In ascending order: of batches that are as good the smallest is taken.
        best = _pick([*others, best])
    request = _change(request, batch=best.global_batch)
    if axes.switches:
        if not best.switches:
            _refuse_switches(axes.switches)
        plain = _try_choice(request, options)
        # First, so that switches which gain nothing are not set.
        choices.insert(0, plain)
        best = _pick([plain, best])
        kinds = [kind for kind in axes.switches if kind in best.switches]
        request = _switch(request, kinds)[0]
    marked = tuple(replace(choice, is_chosen=choice is best) for choice in choices)
    return replace(search_request(request, job, options), choices=marked)


def _switch(
    request: PlanRequest, kinds: Sequence[JobSwitchKind]
) -> tuple[PlanRequest, tuple[JobSwitchKind, ...]]:
    """Return a request with switches set, and those that changed it."""
    workload, changed = set_switches(request.model, request.workload, kinds)
    return replace(request, workload=workload), changed


def _refuse_switches(kinds: Sequence[JobSwitchKind]) -> NoReturn:
    """Raise BadInput for switches of which none changes the job."""
    rule = "is set already, or needs experts or a format of 8 or 4 bits, which this job has not"
    raise BadInput(Reason(field="--try", value=" ".join(kinds), rule=rule))


def _list_formats(request: PlanRequest, runs_on: str) -> tuple[Dtype, ...]:
    """Return the formats that the devices multiply in, and that the trainer trains in, if any."""
    formats = (Dtype.BF16, Dtype.FP16, *NARROW_FORMATS)
    legal = [dtype for dtype in formats if not _refuse(_change(request, precision=dtype), runs_on)]
    if Dtype.BF16 in legal and Dtype.FP16 in legal:
        legal.remove(Dtype.FP16)  # as fast, and with a scale of the loss to look after
    if not legal:
        reasons = _refuse(_change(request, precision=Dtype.BF16), runs_on)
        raise BadInput(*reasons)
    return tuple(legal)


def _refuse(request: PlanRequest, runs_on: str) -> tuple[Reason, ...]:
    reasons = check_precision(request.workload, request.hardware)
    if runs_on in tuple(TargetTrainer):
        nouns = (request.model, request.workload, request.hardware)
        reasons += job_refusals(TargetTrainer(runs_on), *nouns)
    return reasons


def _change(
    request: PlanRequest, *, precision: Dtype | None = None, batch: int | None = None
) -> PlanRequest:
    workload = request.workload
    workload = replace(
        workload,
        precision=precision or workload.precision,
        global_batch=batch or workload.global_batch,
    )
    return replace(request, workload=workload)


def _try_choice(
    request: PlanRequest, options: SearchOptions, switches: Sequence[JobSwitchKind] = ()
) -> JobChoice:
    """Return the best safe layout of a job, and what speaks against the job where there is none."""
    request, changed = _switch(request, switches)
    workload = request.workload
    choice = JobChoice(
        precision=workload.precision,
        global_batch=workload.global_batch,
        runs=count_runs_in(workload.precision, request.hardware),
        switches=tuple(kind.value for kind in changed),
    )
    rule = RankingRule(fit_probability=options.fit_probability, risk=options.risk)
    try:
        plan = find_best_plan(
            request.model,
            workload,
            request.hardware,
            fixed=options.layout,
            allowed=build_objections(request),
            rule=rule,
        )
    except BadInput as error:
        # What is illegal in one format or batch may be legal in another.
        return replace(choice, refusal=str(error.reasons[0]))
    if plan is None:
        return replace(choice, refusal="no layout fits")
    if plan.estimate.untimed:
        return replace(choice, refusal=plan.estimate.untimed)
    return replace(
        choice,
        layout=plan.layout,
        step_s=plan.estimate.step_s,
        bound_s=bound_s(plan.estimate, rule),
        tokens_per_s_per_device=plan.estimate.tokens_per_s_per_device,
    )


def _pick(choices: list[JobChoice]) -> JobChoice:
    """Return the choice whose bound is least a sequence; of like ones the first.

    A format of fewer than 16 bits that nobody published a run of on the part is taken only where
    nothing else fits. Where no layout of any is safe, the search of the first says what is wrong.
    """
    timed = [choice for choice in choices if choice.layout is not None]
    proven = [choice for choice in timed if choice.runs or not choice.precision.is_narrow]
    if not timed:
        return choices[0]
    eligible = proven or timed
    least_s = min(choice.bound_s / choice.global_batch for choice in eligible)
    limit_s = least_s * (1 + _WORTH_A_LARGER_BATCH)
    return next(choice for choice in eligible if choice.bound_s / choice.global_batch <= limit_s)
