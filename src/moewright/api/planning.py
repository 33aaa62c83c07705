"""Plans and estimates: which layout is best, what one layout takes, and why not another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from moewright.api.requests import (
    PlanRequest,
    Purpose,
    WorkloadOptions,
    read_plan_request,
    to_job_keys,
    to_options,
    translate_fields,
)
from moewright.codec import explicit_fields, format_layout, parse_layout, read_json
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
from moewright.spec.units import GIB
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


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class PlanComparison(Record):
    """Plans side by side: time by part and memory by component, a column each."""

    plans: tuple[Plan, ...]

    def title(self) -> str:
        """Return the layout of each plan, and what the table shows."""
        layouts = [
            f"plan {number}: {format_layout(plan.layout)}"
            for number, plan in enumerate(self.plans, 1)
        ]
        return "\n".join((*layouts, "seconds by part, GiB by component"))

    def to_rows(self) -> list[Row]:
        """Return a row for each part of the step and each component of memory."""
        names = [f"plan {number}" for number in range(1, len(self.plans) + 1)]
        estimates = [plan.estimate for plan in self.plans]
        rows: list[Row] = [
            {"quantity": "step, s"} | _pair(names, [one.step_s for one in estimates])
        ]
        parts = [{share.part: share.seconds for share in one.shares} for one in estimates]
        for part in dict.fromkeys(part for shares in parts for part in shares):
            seconds = [shares.get(part, 0.0) for shares in parts]
            rows.append({"quantity": f"{part}, s"} | _pair(names, seconds))
        peaks = [one.peak_bytes / GIB for one in estimates]
        rows.append({"quantity": "peak, GiB"} | _pair(names, peaks))
        memories = [_component_bytes(one) for one in estimates]
        for component in dict.fromkeys(name for memory in memories for name in memory):
            sizes = [memory.get(component, 0) / GIB for memory in memories]
            rows.append({"quantity": f"{component}, GiB"} | _pair(names, sizes))
        verdicts = [one.verdict.value for one in estimates]
        rows.append({"quantity": "verdict"} | _pair(names, verdicts))
        return rows


def _pair(names: Sequence[str], values: Sequence[object]) -> dict[str, object]:
    return dict(zip(names, values, strict=True))


def _component_bytes(estimate: Estimate) -> dict[str, int]:
    """Return the bytes of the fullest pipeline rank by component."""
    totals: dict[str, int] = {}
    for ledger in estimate.ledgers:
        if ledger.pp_rank == estimate.peak_rank:
            for row in ledger.memory:
                totals[row.component] = totals.get(row.component, 0) + row.bytes
    return totals


def summarize_plan(plan: Plan) -> Row:
    """Return one line about a plan: layout, step, speed, memory, verdict."""
    estimate = plan.estimate
    return {
        "layout": format_layout(plan.layout),
        "step_s": estimate.step_s,
        "tokens_per_s_per_device": estimate.tokens_per_s_per_device,
        "tflops_per_device": estimate.tflops_per_device,
        "mfu": estimate.mfu,
        "peak_GiB": estimate.peak_bytes / GIB,
        "margin_GiB": estimate.margin_bytes / GIB,
        "verdict": estimate.verdict.value,
    }


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
        raise explain_empty_search(result, Path(_file_name(model)))
    return result


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


def explain_empty_search(plans: Plans, job: Path) -> BadInput:
    """Return why a search came back empty.

    What is wrong with the pinned keys by themselves comes first, else the commonest rejection.
    """
    is_job = plans.request.purpose is Purpose.TRAIN
    spell = to_job_keys(job) if is_job else to_options("layout")
    try:
        with translate_fields(spell):
            raise _empty_search(plans)
    except BadInput as error:
        return error


def _empty_search(plans: Plans) -> BadInput:
    request = plans.request
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
    commonest = max(plans.rejected, key=lambda pair: pair[1], default=("none is legal", 0))[0]
    rule = f"no layout over {request.hardware.count} devices will do; most often: {commonest}"
    nearest = "more devices, or a shorter sequence" if commonest == DOES_NOT_FIT else ""
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
    if isinstance(model, str | Path) and Path(model).suffix == ".json" and _is_plan(Path(model)):
        model = read_json(Plan, Path(model))
    if isinstance(model, Plan):
        return _estimate_plan_again(model, layout, on=on, options=options), ()
    request = read_plan_request(model, on, options)
    text = layout if isinstance(layout, Layout) else layout or request.layout_text
    from_options = bool(layout) or not request.layout_text
    spell = to_options("--layout") if from_options else to_job_keys(Path(_file_name(model)))
    with translate_fields(spell):
        chosen = _as_layout(text, world_size=request.hardware.count)
        return (
            build_plan(request.model, request.workload, request.hardware, chosen),
            request.defaults,
        )


def _as_layout(layout: str | Layout, *, world_size: int) -> Layout:
    return layout if isinstance(layout, Layout) else parse_layout(layout, world_size=world_size)


def _is_plan(path: Path) -> bool:
    """Tell a plan from a model's config.json by its keys."""
    return path.name != "config.json" and path.is_file() and '"fingerprint"' in path.read_text()


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


def compare(*plans: Plan) -> PlanComparison:
    """Put plans side by side: time by part, memory by component, verdict.

    Example:
        >>> import moewright as mw
        >>> a = mw.estimate("Qwen3-30B-A3B", "ep8", on="8xH100")
        >>> b = mw.estimate("Qwen3-30B-A3B", "tp2,ep8", on="8xH100")
        >>> mw.compare(a, b).to_rows()[0]["quantity"]
        'step, s'
    """
    if not plans:
        raise BadInput(Reason(field="plans", rule="at least one plan is needed"))
    return PlanComparison(plans=plans)
