"""Views: what pages and notebooks show of a job, as records; what cannot be shown says why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

from moewright.api.budgets import check_budget_figures, price_devices, scale_devices
from moewright.api.judging import view_misfit
from moewright.api.planning import (
    Plans,
    explain_empty_search,
    is_plan_file,
    search_request,
)
from moewright.api.requests import (
    PlanRequest,
    change_job,
    read_plan_request,
    replan_request,
    to_options,
    translate_fields,
)
from moewright.api.running import list_trainers
from moewright.api.workload_choices import LoadChoices, check_keywords, workload_options
from moewright.codec import format_layout, parse_layout, read_json
from moewright.codec.layout_words import describe_layout
from moewright.diagnosis.judgement import QUICK_PART, Judgement, judge_plan
from moewright.intake import catalogue
from moewright.intake.devices import find_memory_gb
from moewright.rules.batch_rampup import workload_at_step
from moewright.search.explain import explain_beside
from moewright.search.misfit import Misfit
from moewright.search.search import build_plan, search
from moewright.search.switches import explain_switches
from moewright.search.what_if import find_fewest
from moewright.spec.errors import BadInput
from moewright.spec.hardware import Hardware
from moewright.spec.model import ModelSpec
from moewright.spec.options import SearchOptions, WorkloadOptions
from moewright.spec.plan import Plan
from moewright.spec.record import Record
from moewright.spec.workload import Dtype, Workload
from moewright.view.comparison_view import (
    BudgetPoint,
    BudgetView,
    ComparisonView,
    WhatIfAxis,
    WhatIfPoint,
    WhatIfView,
    build_comparison_view,
)
from moewright.view.layout_controls import list_controls
from moewright.view.plan_view import (
    PlanView,
    RefusalView,
    TimetableView,
    build_plan_view,
    build_refusal,
    build_timetable_view,
)
from moewright.view.search_view import SearchView, build_search_view

_FIRST_TOP = 3  # the first answer of a page; the whole list comes after it


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewQuery:
    """A job and its layout as people write them; a page's address holds the same.

    The model may also be the plan.json of a job, whose values the others replace; so they do with
    `workload`, that of a job which is stated whole. `notes` say how what was written was read.
    """

    model: str | Path | ModelSpec
    on: str | Hardware
    options: WorkloadOptions
    layout: str = ""
    workload: Workload | None = None
    notes: tuple[str, ...] = ()

    def read(self) -> PlanRequest:
        """Read model, hardware and workload.

        Raises:
            BadInput: something cannot be used.
        """
        if self.workload is not None and isinstance(self.model, ModelSpec):
            return change_job(self.model, self.workload, self.on, self.options)
        if isinstance(self.model, str | Path) and is_plan_file(Path(self.model)):
            plan = read_json(Plan, Path(self.model))
            request = replan_request(plan, self.on, self.options)
            # A page of a plan begins at its own layout.
            return replace(request, layout_text=format_layout(plan.layout))
        return read_plan_request(self.model, self.on, self.options)

    def build(self) -> Plan:
        """Estimate the layout.

        Raises:
            BadInput: something cannot be used, or the layout is illegal.
        """
        request = self.read()
        with translate_fields(to_options("--layout")):
            text = self.layout or request.layout_text
            layout = parse_layout(text, world_size=request.hardware.count)
            return build_plan(request.model, request.workload, request.hardware, layout)


def show(
    model: str | Path | ModelSpec,
    layout: str = "",
    *,
    on: str | Hardware = "",
    seq_len: int | None = None,
    global_batch: int | None = None,
    precision: Dtype | str | None = None,
    **choices: Unpack[LoadChoices],
) -> PlanView | RefusalView:
    """Return what the studio's page shows of one layout: figures, stages, parts, legal steps.

    An illegal layout is no error: the answer has its reasons, and the steps that are legal.

    Args:
        model: a name, a config.json or its folder, a job .toml, or a ModelSpec.
        layout: layout text such as "tp2,ep8,pp8,mbs1,recompute=select".
        on: count x device, or a Hardware.
        seq_len: tokens a sequence.
        global_batch: sequences a step.
        precision: compute precision.
        **choices: as `estimate` takes them: `load`, `from_trace`, `network`, `task`, `lora_rank`,
            `quantize_base`, `rampup_batch_size`.

    Example:
        >>> import moewright as mw
        >>> shown = mw.show("Qwen3-30B-A3B", "ep8,recompute=full", on="16xH100")
        >>> shown.estimate.verdict.value, len(shown.stages)
        ('fits', 1)
        >>> mw.show("Qwen3-30B-A3B", "tp3,ep8", on="16xH100").reasons[0].key
        'tp'
    """
    check_keywords("show", choices, LoadChoices)
    try:
        options = workload_options(seq_len, global_batch, precision, choices=choices)
    except BadInput as error:
        return build_refusal(error.reasons)
    return view_plan(ViewQuery(model=model, on=on, options=options, layout=layout))


def view_plan(query: ViewQuery) -> PlanView | RefusalView:
    """Return the record of a query's page; the reasons where it cannot be estimated."""
    try:
        request = query.read()
        layout_text = query.layout or request.layout_text
        with translate_fields(to_options("--layout")):
            layout = parse_layout(layout_text, world_size=request.hardware.count)
    except BadInput as error:
        return build_refusal(error.reasons)
    try:
        # The page's controls are called by the keys of layouts.
        with translate_fields(lambda field: field.removeprefix("layout.")):
            plan = build_plan(request.model, request.workload, request.hardware, layout)
    except BadInput as error:
        controls = list_controls(request.model, request.workload, layout)
        return build_refusal(error.reasons, controls)
    return build_plan_view(plan, (*query.notes, *request.defaults))


def view_search(query: ViewQuery, top: int = 10) -> Iterator[SearchView | Misfit]:
    """Yield what a search of a query's job answers: first of a small part of the space, then all.

    Where nothing fits, the answers are the nearest miss and what would fit, more each time.
    The query's layout text is not pinned. The part holds one sequence a micro-batch, plain
    pipelines and neither context nor expert tensor parallelism: good layouts, searched in a second.

    Raises:
        BadInput: something cannot be used, or no layout is legal.
    """
    request = query.read()
    nouns = (request.model, request.workload, request.hardware)
    first = search(*nouns, fixed=QUICK_PART, top=_FIRST_TOP)
    if first.plans:
        yield build_search_view(first.plans, first, first.why, trainers={}, is_final=False)
    name = Path("model")
    answer = search_request(request, name, SearchOptions(top=top))
    if answer.best is not None:
        yield _build_ranking(answer)
    elif answer.search.nearest_miss is not None:
        yield from view_misfit(answer)
    else:
        raise explain_empty_search(answer.request, answer.search, name)


def _build_ranking(plans: Plans) -> SearchView:
    trainers = {plan.layout: list_trainers(plan) for plan in (*plans, *plans.gambles)}
    why = (*plans.why, *(explain_switches(plans.best) if plans.best else ()))
    return build_search_view(plans.plans, plans.search, why, trainers=trainers, is_final=True)


def view_plans(plans: Plans) -> tuple[Record, ...]:
    """Return what the page of a search's answer shows: the ranking, and the best plan."""
    ranking = _build_ranking(plans)
    if plans.best is None:
        return (ranking,)
    return ranking, build_plan_view(plans.best, plans.request.defaults, plans.judgement)


def view_estimate(plan: Plan, notes: tuple[str, ...], judgement: Judgement) -> tuple[Record, ...]:
    """Return what the page of an estimate shows: the plan as judged, and its timetable."""
    return build_plan_view(plan, notes, judgement), build_timetable_view(plan)


def view_judgement(query: ViewQuery, best: str) -> Judgement:
    """Return the judgement of a query's layout beside the best one, which a search has found.

    Raises:
        BadInput: something cannot be used, or a layout is illegal.
    """
    plan = query.build()
    return judge_plan(plan, replace(query, layout=best).build())


def view_timetable(query: ViewQuery) -> TimetableView:
    """Return the timetable of a query's layout.

    Raises:
        BadInput: something cannot be used, or the layout is illegal.
    """
    return build_timetable_view(query.build())


def view_comparison(query: ViewQuery, others: Sequence[str]) -> ComparisonView:
    """Return a query's layout with others beside it, each with what speaks against it.

    Raises:
        BadInput: something cannot be used, or the query's own layout is illegal.
    """
    first = query.build()
    nouns = (first.model, first.workload, first.hardware)
    compared: list[Plan | str] = []
    lines: dict[str, tuple[str, ...]] = {}
    for text in others:
        try:
            layout = parse_layout(text, world_size=first.hardware.count)
            plan = build_plan(*nouns, layout)
        except BadInput as error:
            lines[text] = tuple(map(str, error.reasons))
            compared.append(text)
            continue
        lines[format_layout(plan.layout)] = explain_beside(plan, first, "A")
        compared.append(plan)
    return build_comparison_view(first, compared, lines)


def view_budget(query: ViewQuery, *, tokens: str, price: float | None) -> Iterator[BudgetView]:
    """Yield the budget of a query's job, a number of devices more each time, then the fewest.

    Raises:
        BadInput: something cannot be used.
    """
    request = query.read()
    total = check_budget_figures(tokens, price)
    points: list[BudgetPoint] = []
    without: list[int] = []

    def build(fewest: int, *, is_final: bool) -> BudgetView:
        return BudgetView(
            model=request.model.name,
            device=request.hardware.device.name,
            tokens=total,
            tokens_per_step=request.workload.tokens_per_step,
            first_tokens=workload_at_step(request.workload, 0).tokens_per_step,
            price=price or 0.0,
            points=tuple(sorted(points, key=lambda point: point.devices)),
            without_layout=tuple(without),
            fewest=fewest,
            is_final=is_final,
        )

    own = request.hardware.count
    # The number that was asked about comes first.
    for count in sorted(scale_devices(own), key=lambda count: (count != own, count)):
        line = price_devices(request, count, total, price)
        if line is None:
            without.append(count)
        else:
            points.append(
                BudgetPoint(
                    devices=count,
                    layout=format_layout(line.plan.layout),
                    words=describe_layout(line.plan.layout).sentence,
                    step_s=line.plan.estimate.step_s,
                    steps=line.steps,
                    days=line.days,
                    days_80=line.days_80,
                    device_hours=line.device_hours,
                    ramp_days=line.ramp_days,
                    cost=line.cost or 0.0,
                )
            )
        yield build(0, is_final=False)
    fewest = find_fewest(request.model, request.workload, request.hardware)
    # 0 stands for a search that goes on, -1 for none.
    yield build(fewest.count if fewest else -1, is_final=True)


_DEVICES = ("H100", "H200", "B200", "MI300X")
_NETWORKS = ("ib", "roce", "efa", "tcp")
_PRECISIONS = (Dtype.BF16, Dtype.FP8, Dtype.MXFP8, Dtype.NVFP4)
_SCALES = (0.5, 1, 2, 4)


def view_what_if(query: ViewQuery) -> WhatIfView:
    """Return what a query's layout does where one option of its job is another.

    Raises:
        BadInput: something cannot be used, or the layout is illegal as it is.
    """
    own = query.build()
    return WhatIfView(
        axes=(
            WhatIfAxis(title="Devices", key="on", points=tuple(_scale_devices(query, own))),
            WhatIfAxis(title="Kind of device", key="on", points=tuple(_swap_devices(query, own))),
            WhatIfAxis(title="Memory", key="on", points=tuple(_resize_memory(query, own))),
            WhatIfAxis(title="Network", key="network", points=tuple(_swap_networks(query, own))),
            WhatIfAxis(title="Precision", key="precision", points=tuple(_narrow(query, own))),
            WhatIfAxis(title="Sequence", key="seq_len", points=tuple(_stretch(query, own))),
        )
    )


def _scale_devices(query: ViewQuery, own: Plan) -> Iterator[WhatIfPoint]:
    for scale in _SCALES:
        count = int(own.hardware.count * scale)
        value = f"{count}x{own.hardware.device.name}"
        yield _try_query(replace(query, on=value), own, f"{count:,}", value, is_own=scale == 1)


def _swap_devices(query: ViewQuery, own: Plan) -> Iterator[WhatIfPoint]:
    name = own.hardware.device.name
    others = (catalogue.hardware(f"1x{device}").device.name for device in _DEVICES)
    for device in dict.fromkeys((name, *others)):
        value = f"{own.hardware.count}x{device}"
        changed = replace(query, on=value)
        yield _try_query(changed, own, device, value, is_own=device == name)


def _resize_memory(query: ViewQuery, own: Plan) -> Iterator[WhatIfPoint]:
    """Yield the device with other memories, which say what fits and change no speed."""
    hardware = own.hardware
    # The job's own device may have another memory than its kind already.
    name, _, _ = hardware.device.name.partition(" with ")
    for scale in _SCALES:
        memory_gb = f"{find_memory_gb(hardware) * scale:g}"
        value = f"{hardware.count}x{name} with {memory_gb}GB"
        changed = replace(query, on=value)
        yield _try_query(changed, own, f"{memory_gb} GB", value, is_own=scale == 1)


def _swap_networks(query: ViewQuery, own: Plan) -> Iterator[WhatIfPoint]:
    chosen = query.options.network
    for network in dict.fromkeys((chosen, "", *_NETWORKS)):
        changed = replace(query, options=replace(query.options, network=network))
        label = network or "its own"
        yield _try_query(changed, own, label, network, is_own=network == chosen)


def _narrow(query: ViewQuery, own: Plan) -> Iterator[WhatIfPoint]:
    chosen = own.workload.precision
    for precision in dict.fromkeys((*_PRECISIONS, chosen)):
        changed = replace(query, options=replace(query.options, precision=precision))
        name = precision.value
        yield _try_query(changed, own, name, name, is_own=precision is chosen)


def _stretch(query: ViewQuery, own: Plan) -> Iterator[WhatIfPoint]:
    for scale in _SCALES:
        seq_len = int(own.workload.seq_len * scale)
        changed = replace(query, options=replace(query.options, seq_len=seq_len))
        yield _try_query(changed, own, f"{seq_len:,}", str(seq_len), is_own=scale == 1)


def _try_query(query: ViewQuery, own: Plan, label: str, value: str, *, is_own: bool) -> WhatIfPoint:
    """Estimate a changed query, which `own` is the answer to where nothing is changed."""
    try:
        plan = own if is_own else query.build()
    except BadInput as error:
        return WhatIfPoint(label=label, value=value, is_own=False, rule=error.reasons[0].rule)
    estimate = plan.estimate
    return WhatIfPoint(
        label=label,
        value=value,
        is_own=is_own,
        tokens_per_s_per_device=estimate.tokens_per_s_per_device,
        step_s=estimate.step_s,
        peak_bytes=estimate.peak_bytes,
        verdict=estimate.verdict.value,
    )
