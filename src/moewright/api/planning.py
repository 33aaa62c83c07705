"""Plans and estimates: which layout is best, what one layout takes, and why not another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from moewright.api.comparison import summarize_plan
from moewright.api.requests import (
    PlanRequest,
    Purpose,
    WorkloadOptions,
    read_plan_request,
    to_job_keys,
    to_options,
    translate_fields,
)
from moewright.codec import explicit_fields, parse_layout, read_bytes, read_json
from moewright.rules.engine_limits import unsupported_layout
from moewright.rules.legality import check_legality
from moewright.search import explain, what_if
from moewright.search.search import DOES_NOT_FIT, SearchResult, build_plan, search
from moewright.search.space import Objections, no_objections
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Hardware
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Estimate, Plan
from moewright.spec.record import Record, Row
from moewright.spec.workload import Dtype, Routing

MAX_TOP = 100  # each is estimated in full


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Plans(Record):
    """The answer of `plan`: the best plans, fastest first, and what the search rejected.

    `best` carries the sensitivities (`gains`); where the job pins layout keys, `best` is the
    fastest plan that keeps them, and `plans` shows what else there is.
    """

    request: PlanRequest
    plans: tuple[Plan, ...]
    best: Plan | None  # None where nothing fits
    even_routing: Estimate | None  # of `best` under even routing, where a load was measured
    why: tuple[str, ...]
    rejected: tuple[tuple[str, int], ...]  # rule and how many layouts broke it
    search: SearchResult

    def title(self) -> str:
        """Return what was planned, and the first reason for the best plan."""
        request = self.request
        subject = f"{request.model.name} on {request.hardware.count} x {request.hardware.name}"
        return "\n".join([subject, *self.why[:1]])

    def to_rows(self) -> list[Row]:
        """Return a row for each plan: layout, step, speed, memory, verdict."""
        return [summarize_plan(plan) for plan in self.plans]

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


def plan(
    model: str | Path | ModelSpec,
    *,
    on: str | Hardware = "",
    seq_len: int | None = None,
    global_batch: int | None = None,
    precision: Dtype | str | None = None,
    load: Path | str | None = None,
    top: int = 5,
) -> Plans:
    """Rank the layouts of a model, or of a job file, on some hardware by predicted step time.

    Args:
        model: a name, a config.json or its folder, a job .toml, or a ModelSpec.
        on: count x device, such as "256xH800", or a Hardware; a job brings its own.
        seq_len: tokens a sequence; 4096 when neither this nor a job says it.
        global_batch: sequences a step; 16 a device when neither this nor a job says it.
        precision: "bf16" when neither this nor a job says it.
        load: a file of measured tokens by expert; memory and time are the hottest rank's.
        top: how many layouts to return.

    Raises:
        BadInput: something cannot be used, or no layout is legal and fits.

    Example:
        >>> import moewright as mw
        >>> plans = mw.plan("Qwen3-30B-A3B", on="8xH100", top=2)
        >>> len(plans), plans.best.layout.world_size
        (2, 8)
    """
    options = workload_options(seq_len, global_batch, precision, load)
    result = search_request(read_plan_request(model, on, options), Path(_file_name(model)), top=top)
    if result.best is None:
        raise explain_empty_search(result.request, result.search, Path(_file_name(model)))
    return result


def plan_for_training(request: PlanRequest, job: Path) -> Plan:
    """Return the fastest plan that this engine runs and that keeps the layout keys of a job.

    `job` is the file that refusals name.

    Raises:
        BadInput: no layout is legal and fits.
    """
    nouns = (request.model, request.workload, request.hardware)
    with translate_fields(to_job_keys(job)):
        result = search(*nouns, fixed=request.layout_text, top=1, allowed=_objections(request))
    if not result.plans:
        raise explain_empty_search(request, result, job)
    return result.plans[0]


def workload_options(
    seq_len: int | None,
    global_batch: int | None,
    precision: Dtype | str | None,
    load: Path | str | None = None,
) -> WorkloadOptions:
    """Return what the caller says of the workload; a wrong precision is refused by name."""
    if precision is not None:
        try:
            precision = Dtype(precision)
        except ValueError:
            names = ", ".join(Dtype)
            reason = Reason(field="precision", value=str(precision), rule=f"must be one of {names}")
            raise BadInput(reason) from None
    return WorkloadOptions(
        seq_len=seq_len,
        global_batch=global_batch,
        precision=precision,
        load=None if load is None else Path(load),
    )


def _file_name(model: str | Path | ModelSpec) -> str:
    return model.name if isinstance(model, ModelSpec) else str(model)


def search_request(request: PlanRequest, job: Path, *, top: int) -> Plans:
    """Search the layouts of a request; `best` is None where nothing legal fits.

    Layout keys that the job pins decide which plan is `best`; `plans` then ranks all layouts, with
    `best` among them. `job` is the file that refusals name.
    """
    if not 1 <= top <= MAX_TOP:
        nearest = str(min(max(top, 1), MAX_TOP))
        rule = f"must be in 1..{MAX_TOP}"
        raise BadInput(Reason(field="--top", value=str(top), rule=rule, nearest=nearest))
    allowed = _objections(request)
    pinned = request.layout_text
    nouns = (request.model, request.workload, request.hardware)
    with translate_fields(to_job_keys(job)):
        result = search(*nouns, fixed=pinned, top=top, allowed=allowed)
    if not result.plans:
        return Plans(
            request=request,
            plans=(),
            best=None,
            even_routing=None,
            why=result.why,
            rejected=result.rejected,
            search=result,
        )
    first = result.plans[0]
    best = replace(first, gains=what_if.find_gains(result, fixed=pinned, allowed=allowed))
    ranking = result.plans
    if pinned:
        ranking = search(*nouns, fixed="", top=top, allowed=allowed).plans
        if first not in ranking:
            ranking = (*ranking, first)
    return Plans(
        request=request,
        plans=tuple(best if plan == first else plan for plan in ranking),
        best=best,
        even_routing=estimate_even_routing(best),
        why=(*result.why, *explain.explain_bound(best)),
        rejected=result.rejected,
        search=result,
    )


def _objections(request: PlanRequest) -> Objections:
    """Return what speaks against a legal layout: a job must run on this engine."""
    if request.purpose is Purpose.PLAN:
        return no_objections
    return partial(unsupported_layout, model=request.model, workload=request.workload)


def estimate_even_routing(plan: Plan) -> Estimate | None:
    """Return what the plan would be under even routing, where a load was measured."""
    if plan.workload.routing is not Routing.MEASURED or not plan.model.moe_layer_count:
        return None
    workload = replace(plan.workload, routing=Routing.BALANCED)
    return build_plan(plan.model, workload, plan.hardware, plan.layout).estimate


def explain_empty_search(request: PlanRequest, result: SearchResult, job: Path) -> BadInput:
    """Return why a search came back empty.

    What is wrong with the pinned keys by themselves comes first, else the commonest rejection.
    """
    if request.purpose is Purpose.TRAIN:
        spell = to_job_keys(job)
    else:
        spell = to_options("layout")
    try:
        with translate_fields(spell):
            raise _empty_search(request, result.rejected)
    except BadInput as error:
        return error


def _empty_search(request: PlanRequest, rejected: Sequence[tuple[str, int]]) -> BadInput:
    pinned = request.layout_text
    layout = parse_layout(pinned, world_size=request.hardware.count)
    reasons = (
        *check_legality(request.model, request.workload, layout),
        *_objections(request)(layout),
    )
    if reasons:
        keys = explicit_fields(pinned)
        return BadInput(
            *sorted(reasons, key=lambda reason: reason.field.rpartition(".")[2] not in keys)
        )
    commonest = max(rejected, key=lambda pair: pair[1], default=("none is legal", 0))[0]
    rule = f"no layout over {request.hardware.count} devices will do; most often: {commonest}"
    nearest = ""
    if commonest == DOES_NOT_FIT:
        nearest = "more devices, or a shorter sequence"
    return BadInput(Reason(field="layout", value=pinned, rule=rule, nearest=nearest))


def estimate(
    model: str | Path | ModelSpec | Plan,
    layout: str | Layout = "",
    *,
    on: str | Hardware = "",
    seq_len: int | None = None,
    global_batch: int | None = None,
    precision: Dtype | str | None = None,
    load: Path | str | None = None,
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
        load: a file of measured tokens by expert.

    `moewright estimate` exits with 0 where the verdict is "fits" or "uncertain", with 3 where it
    is "oom", and with 2 where something cannot be used.

    Raises:
        BadInput: something cannot be used, or the layout is illegal.

    Example:
        >>> import moewright as mw
        >>> plan = mw.estimate("Qwen3-30B-A3B", "ep8,zero3,recompute=full", on="8xH100")
        >>> plan.estimate.micro_batches, plan.estimate.verdict.value
        (16, 'fits')
    """
    options = workload_options(seq_len, global_batch, precision, load)
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
        return _estimate_plan_again(model, layout, on=on, options=options), ()
    request = read_plan_request(model, on, options)
    if layout or not request.layout_text:
        spell = to_options("--layout")
    else:
        spell = to_job_keys(Path(_file_name(model)))
    with translate_fields(spell):
        chosen = _as_layout(layout or request.layout_text, world_size=request.hardware.count)
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


def _estimate_plan_again(
    plan: Plan, layout: str | Layout, *, on: str | Hardware, options: WorkloadOptions
) -> Plan:
    """Estimate the job of a plan, with what the caller gives in place of the plan's own."""
    request = read_plan_request(plan.model, on or plan.hardware, options)
    workload = plan.workload
    for field in ("seq_len", "global_batch", "precision"):
        value = getattr(options, field)
        if value is not None:
            workload = replace(workload, **{field: value})
    if options.load is not None:
        histogram = request.workload.load_histogram
        workload = replace(workload, routing=Routing.MEASURED, load_histogram=histogram)
    chosen = layout or plan.layout
    with translate_fields(to_options("--layout")):
        chosen = _as_layout(chosen, world_size=request.hardware.count)
        return build_plan(plan.model, workload, request.hardware, chosen)


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
