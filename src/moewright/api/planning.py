"""Plans and estimates: which layout is best, what one layout takes, and why not another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Unpack

from moewright.api.comparison import summarize_plan
from moewright.api.recommending import recommend_fast, recommend_proven
from moewright.api.requests import (
    PlanRequest,
    Purpose,
    read_plan_request,
    replan_request,
    to_job_keys,
    to_options,
    translate_fields,
)
from moewright.api.workload_choices import LengthChoices, check_keywords, workload_options
from moewright.codec import explicit_fields, parse_layout, read_bytes, read_json
from moewright.diagnosis.judgement import Judgement, add_judgement, judge_plan
from moewright.rules.job import Job
from moewright.rules.limits.engine_limits import unsupported_layout
from moewright.rules.limits.legality import check_legality
from moewright.rules.limits.trainers import TargetTrainer, job_refusals, trainer_refusals
from moewright.search import explain, what_if
from moewright.search.misfit import explain_imbalance
from moewright.search.ranking import bound_s, is_safe, to_ranked_layout
from moewright.search.search import DOES_NOT_FIT, SearchResult, build_plan, search
from moewright.search.space import Objections, layout_objections, no_objections
from moewright.search.what_if import find_fewest
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Hardware
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.options import SearchOptions, WorkloadOptions
from moewright.spec.plan import Estimate, JobChoice, Plan, RankingRule
from moewright.spec.quoting import Html
from moewright.spec.record import Record, Row, render_html_table
from moewright.spec.units import plural
from moewright.spec.workload import Dtype, Routing
from moewright.view.search_view import build_answers, render_answers

MAX_TOP = 100  # each is estimated in full
FIT_PROBABILITIES = (0.5, 0.999)
RISKS = (0.001, 0.5)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Plans(Record):
    """The answer of `plan`: the best plans that fit, best first, and what the search rejected.

    `best` is the first of them, with what would change it (`gains`) and the two answers of the
    search: `fast`, what to expect of this plan, and `proven`, of the fastest layout that somebody
    ran on the part; `proven` here is that layout's plan. `gambles` are faster plans
    that may not fit; only where nothing fits as probably as asked for, the likeliest to fit is
    `best`. `own` is the best plan that keeps the layout keys of a job file, where it has some.
    """

    request: PlanRequest
    judgement: Judgement | None  # of `best`
    plans: tuple[Plan, ...]
    gambles: tuple[Plan, ...]
    best: Plan | None  # None where nothing fits
    own: Plan | None  # None where the job has no layout keys, or nothing that keeps them fits
    proven: Plan | None  # None where nobody ran a layout that is nearly as fast
    even_routing: Estimate | None  # of `best` under even routing, where a load was measured
    why: tuple[str, ...]
    rejected: tuple[tuple[str, int], ...]  # rule and how many layouts broke it
    search: SearchResult
    choices: tuple[JobChoice, ...] = ()  # where the plan chose a precision or a batch

    def title(self) -> str:
        """Return what was planned, whether the best plan is good, and what its step goes to."""
        request = self.request
        subject = f"{request.model.name} on {request.hardware.count} x {request.hardware.name}"
        return "\n".join((add_judgement(subject, self.judgement), *self.why[:1]))

    def to_rows(self) -> list[Row]:
        """Return a row for each plan: layout, step, speed, memory, verdict."""
        return [summarize_plan(plan) for plan in self.plans]

    def _repr_html_(self) -> Html:
        answers = build_answers(self.best) if self.best else ()
        table = render_html_table(self.title(), self.to_rows())
        return Html.concat((render_answers(answers), table))

    def __len__(self) -> int:
        return len(self.plans)

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    def __getitem__(self, index: int) -> Plan:
        return self.plans[index]


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class WhyNot(Record):
    """What speaks against a layout beside the best plan, a sentence each."""

    layout: str
    lines: tuple[str, ...]

    def title(self) -> str:
        """Return the layout in question."""
        return f"why not {self.layout}"

    def to_rows(self) -> list[Row]:
        """Return a row for each sentence."""
        return [{"reason": line} for line in self.lines]

    def __repr__(self) -> str:
        return "\n".join((self.title(), *self.lines))


def plan_for_training(request: PlanRequest, job: Path) -> Plan:
    """Return the fastest plan that this engine runs and that keeps the layout keys of a job.

    `job` is the file that refusals name.

    Raises:
        BadInput: no layout is legal and fits.
    """
    nouns = (request.model, request.workload, request.hardware)
    with translate_fields(to_job_keys(job)):
        result = search(*nouns, fixed=request.layout_text, top=1, allowed=build_objections(request))
    if not result.plans:
        raise explain_empty_search(request, result, job)
    return result.plans[0]


def find_best(request: PlanRequest) -> Plan | None:
    """Return the best plan of a request, whatever layout keys its job has; None where none fits."""
    nouns = (request.model, request.workload, request.hardware)
    return next(iter(search(*nouns, top=1, allowed=build_objections(request)).plans), None)


def file_name(model: str | Path | ModelSpec) -> str:
    """Return what refusals call a model by: its file, or its name."""
    return model.name if isinstance(model, ModelSpec) else str(model)


def search_request(request: PlanRequest, job: Path, options: SearchOptions) -> Plans:
    """Search the layouts of a request; `best` is None where nothing legal fits.

    `job` is the file that refusals name.
    """
    _check_options(options)
    request = _bind_trainer(request, options.runs_on)
    allowed = build_objections(request)
    rule = RankingRule(fit_probability=options.fit_probability, risk=options.risk)
    if options.fewest:
        request = _take_fewest(request, options, rule)
    find = partial(
        search, request.model, request.workload, request.hardware, allowed=allowed, rule=rule
    )
    with translate_fields(to_options("--layout")):
        result = find(fixed=options.layout, top=options.top)
    own = None
    if request.layout_text:
        with translate_fields(to_job_keys(job)):
            own = next(iter(find(fixed=request.layout_text, top=1).plans), None)
    # --layout stands in place of the job's own keys.
    plans = _insert_own(result.plans, own, rule) if not options.layout else result.plans
    best = None
    why: tuple[str, ...] = ()
    if plans:
        result = replace(result, plans=plans)
        gains = what_if.find_gains(result, fixed=options.layout, allowed=allowed)
        best = replace(
            plans[0],
            gains=gains,
            rule=rule,
            runners_up=tuple(to_ranked_layout(plan, rule) for plan in plans[1:]),
            gambles=tuple(to_ranked_layout(plan, rule) for plan in result.gambles),
            fast=recommend_fast(plans[0], result),
            proven=recommend_proven(result),
        )
        plans = (best, *plans[1:])
        why = (
            *result.why,
            *explain.explain_bound(best),
            *explain.explain_precision(best),
            *explain.explain_unused(best),
            *explain_imbalance(best),
        )
    return Plans(
        request=request,
        judgement=judge_plan(best, best, scored=result.scored) if best else None,
        plans=plans,
        gambles=result.gambles,
        best=best,
        # `best` has more than the plan that it was made of.
        own=best if best and own and own.layout == best.layout else own,
        proven=result.proven,
        even_routing=estimate_even_routing(best) if best else None,
        why=why,
        rejected=result.rejected,
        search=result,
    )


def _take_fewest(request: PlanRequest, options: SearchOptions, rule: RankingRule) -> PlanRequest:
    """Return the request on the fewest devices on which a layout is safe; unchanged without."""
    fewest = find_fewest(
        request.model,
        request.workload,
        request.hardware,
        fixed=options.layout,
        allowed=build_objections(request),
        rule=rule,
    )
    return request if fewest is None else replace(request, hardware=fewest)


def _insert_own(plans: tuple[Plan, ...], own: Plan | None, rule: RankingRule) -> tuple[Plan, ...]:
    """Return plans with the job's own in its place, where that is not behind the last of them.

    So keys that a search would not vary never make the answer worse.
    """
    if own is None or not plans or any(plan.layout == own.layout for plan in plans):
        return plans

    def rank(plan: Plan) -> tuple[bool, float]:
        return not is_safe(plan.estimate, rule), bound_s(plan.estimate, rule)

    if rank(own) >= rank(plans[-1]):
        return plans
    if rank(own) < rank(plans[0]):
        return (own, *plans)
    return (plans[0], *sorted((*plans[1:], own), key=rank))


def _check_options(options: SearchOptions) -> None:
    """Raise BadInput for an option that is out of range."""
    ranges = (
        ("--top", options.top, 1, MAX_TOP),
        ("--fit-probability", options.fit_probability, *FIT_PROBABILITIES),
        ("--risk", options.risk, *RISKS),
    )
    for field, value, lowest, highest in ranges:
        if not lowest <= value <= highest:
            rule = f"must be in {lowest:g}..{highest:g}"
            # `not >`, for nan is not below the lowest either.
            nearest = f"{lowest if not value > lowest else highest:g}"
            raise BadInput(Reason(field=field, value=str(value), rule=rule, nearest=nearest))


def build_objections(request: PlanRequest) -> Objections:
    """Return what speaks against a legal layout: the trainer, or for a job to run this engine."""
    refuse: Callable[[Job], tuple[Reason, ...]] = unsupported_layout
    if request.runs_on is not None:
        refuse = partial(trainer_refusals, request.runs_on, hardware=request.hardware)
    elif request.purpose is Purpose.PLAN:
        return no_objections
    return layout_objections(request.model, request.workload, refuse)


def _bind_trainer(request: PlanRequest, name: str) -> PlanRequest:
    """Return the request for layouts that a trainer starts; "" leaves it as it is.

    Raises:
        BadInput: there is no such trainer, or it trains the job in no layout.
    """
    if not name:
        return request
    if name not in tuple(TargetTrainer):
        rule = f"must be one of {', '.join(TargetTrainer)}"
        raise BadInput(Reason(field="--runs-on", value=name, rule=rule))
    trainer = TargetTrainer(name)
    reasons = job_refusals(trainer, request.model, request.workload, request.hardware)
    if reasons:
        raise BadInput(*reasons)
    return replace(request, runs_on=trainer)


def estimate_even_routing(plan: Plan) -> Estimate | None:
    """Return what the plan would be under even routing, where a load was measured."""
    if plan.workload.routing is not Routing.MEASURED or not plan.model.moe_layer_count:
        return None
    workload = replace(plan.workload, routing=Routing.BALANCED)
    return build_plan(plan.model, workload, plan.hardware, plan.layout).estimate


def explain_empty_search(
    request: PlanRequest, result: SearchResult, job: Path, *, layout: str = ""
) -> BadInput:
    """Return why a search came back empty.

    What is wrong with the pinned keys by themselves comes first, else the commonest rejection.
    `layout` are those of --layout, which stand in place of the job's own.
    """
    if request.purpose is Purpose.TRAIN and not layout:
        spell = to_job_keys(job)
    else:
        spell = to_options("--layout" if layout else "layout")
    try:
        with translate_fields(spell):
            # Raised, so that its fields are spelled on the way.
            raise _empty_search(request, result.rejected, layout or request.layout_text)
    except BadInput as error:
        return error


def _empty_search(
    request: PlanRequest, rejected: Sequence[tuple[str, int]], pinned: str
) -> BadInput:
    layout = parse_layout(pinned, world_size=request.hardware.count)
    reasons = (
        *check_legality(request.job(layout)),
        *build_objections(request)(layout),
    )
    if reasons:
        # What the user has pinned comes first.
        keys = explicit_fields(pinned)
        return BadInput(
            *sorted(reasons, key=lambda reason: reason.field.rpartition(".")[2] not in keys)
        )
    commonest = max(rejected, key=lambda pair: pair[1], default=("none is legal", 0))[0]
    devices = plural(request.hardware.count, "device")
    rule = f"no layout of {devices} can be used; most often: {commonest}"
    nearest = ""
    if commonest == DOES_NOT_FIT:
        nearest = "more devices (--fewest with a larger --on finds how many), or a shorter sequence"
    return BadInput(Reason(field="layout", value=pinned, rule=rule, nearest=nearest))


def estimate(
    model: str | Path | ModelSpec | Plan,
    layout: str | Layout = "",
    *,
    on: str | Hardware = "",
    seq_len: int | None = None,
    global_batch: int | None = None,
    precision: Dtype | str | None = None,
    load: Path | str | float | None = None,
    **choices: Unpack[LengthChoices],
) -> Plan:
    """Predict memory, time and verdict of one layout; the answer is a Plan with its `estimate`.

    Args:
        model: as for `plan`; also a Plan or the plan.json of one, which bring everything.
        layout: layout text such as "tp2,ep8,pp8,mbs1,recompute=select", or a Layout; a job or a
            plan brings its own.
        on: count x device, or a Hardware.
        seq_len: tokens a sequence.
        global_batch: sequences a step.
        precision: compute precision.
        load: "balanced", the hottest rank's rows over the mean, or a file of measured tokens.
        **choices: the other options of `moewright estimate` that say the workload: `from_trace`, a
            traced step of these devices that calibrates the prediction; `network`, `task`,
            `lora_rank`, `quantize_base`, `rampup_batch_size`, `lengths`, `steps`, `tokens`.

    `moewright estimate` exits with 0 where the verdict is "fits" or "uncertain", with 3 where it
    is "oom", and with 2 where something cannot be used.

    Raises:
        BadInput: something cannot be used, or the layout is illegal.

    Example:
        >>> import moewright as mw
        >>> plan = mw.estimate("Qwen3-30B-A3B", "ep8,recompute=full", on="16xH100")
        >>> plan.estimate.micro_batches, plan.estimate.verdict.value
        (16, 'fits')
    """
    check_keywords("estimate", choices, LengthChoices)
    options = workload_options(seq_len, global_batch, precision, load, choices)
    return estimate_request(model, layout, on=on, options=options)[0]


def estimate_request(
    model: str | Path | ModelSpec | Plan,
    layout: str | Layout,
    *,
    on: str | Hardware,
    options: WorkloadOptions,
) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan of one layout, and the values nobody gave, one line each."""
    if isinstance(model, str | Path) and is_plan_file(Path(model)):
        model = read_json(Plan, Path(model))
    if isinstance(model, Plan):
        request = replan_request(model, on, options)
        chosen = layout or model.layout
        spell = to_options("--layout")
    else:
        request = read_plan_request(model, on, options)
        chosen = layout or request.layout_text
        spell = to_options("--layout")
        if request.layout_text and not layout:
            spell = to_job_keys(Path(file_name(model)))
    with translate_fields(spell):
        chosen = _as_layout(chosen, world_size=request.hardware.count)
        return (
            build_plan(request.model, request.workload, request.hardware, chosen),
            request.defaults,
        )


def _as_layout(layout: str | Layout, *, world_size: int) -> Layout:
    if isinstance(layout, Layout):
        return layout
    return parse_layout(layout, world_size=world_size)


def is_plan_file(path: Path) -> bool:
    """Tell a plan from a model's config.json by its keys."""
    if path.suffix != ".json" or path.name == "config.json" or not path.is_file():
        return False
    return b'"fingerprint"' in read_bytes(path)


def why_not(plans: Plans, layout: str) -> WhyNot:
    """Say what speaks against a layout beside the best plan of a search.

    Raises:
        BadInput: the layout text cannot be read.

    Example:
        >>> import moewright as mw
        >>> plans = mw.plan("Qwen3-30B-A3B", on="8xH100", top=1)
        >>> bool(mw.why_not(plans, "tp8,ep1,mbs8").lines)
        True
    """
    request = plans.request
    with translate_fields(to_options("--why-not")):
        parse_layout(layout, world_size=request.hardware.count)
    nouns = (request.model, request.workload, request.hardware)
    lines = tuple(explain.explain_objections(*nouns, plans.search, layout))
    return WhyNot(layout=layout, lines=lines)
