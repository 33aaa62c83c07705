"""The tools of an agent: each with the function of the package that answers it.

An answer is the record that the verb of the same name writes as `--json`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from moewright.agents.parameters import (
    DESCRIPTIONS,
    BudgetParameters,
    CheckParameters,
    DesignParameters,
    EstimateParameters,
    ExportParameters,
    ForecastParameters,
    LogParameters,
    NameParameters,
    PlanParameters,
    RunParameters,
    ScriptParameters,
    WhatIfParameters,
    WhyNotParameters,
)
from moewright.api.budgets import compute_budget
from moewright.api.catalogues import hardware, models
from moewright.api.checking import check
from moewright.api.designing import compute_design
from moewright.api.diagnosing import diagnose, state_logged_job
from moewright.api.launch_scripts import ScriptPlan, find_better_layouts, read_flags
from moewright.api.planning import (
    estimate_request,
    explain_empty_search,
    search_request,
    why_not,
)
from moewright.api.requests import read_plan_request
from moewright.api.run_comparisons import compare_run, forecast_loads, what_if
from moewright.api.running import export
from moewright.api.watching import watch
from moewright.codec import from_data
from moewright.spec.options import BudgetOptions, DesignOptions, SearchOptions, WorkloadOptions
from moewright.spec.plan import Plan
from moewright.spec.record import Record, Row, to_plain_data

_Options = TypeVar("_Options", SearchOptions, WorkloadOptions, DesignOptions, BudgetOptions)

# The types of JSON Schema.
_SIMPLE: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    Path: "string",
}


def build_schema(record: type, descriptions: Mapping[str, str]) -> dict[str, Any]:
    """Return the schema of a dataclass: an object with its fields, and no others.

    Raises:
        KeyError: a field has no description.
    """
    hints = get_type_hints(record)
    properties = {}
    required = []
    for field in fields(cast(Any, record)):
        schema = _describe_type(hints[field.name])
        schema["description"] = descriptions[field.name]
        if field.default is MISSING:
            required.append(field.name)
        elif field.default is not None:
            schema["default"] = to_plain_data(field.default)
        properties[field.name] = schema
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _describe_type(hint: Any) -> dict[str, Any]:
    """Return the schema of a type; None beside another is what is left out."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (item for item in get_args(hint) if item is not type(None))
    if get_origin(hint) is tuple:
        items = get_args(hint)
        schema: dict[str, Any] = {"type": "array", "items": _describe_type(items[0])}
        if items[-1] is not Ellipsis:
            schema |= {"minItems": len(items), "maxItems": len(items)}
        return schema
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return {"type": "string", "enum": [member.value for member in hint]}
    return {"type": _SIMPLE[hint]}


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class LaunchFile(Record):
    """The text of a launch file, and the trainer that it is for."""

    to: str
    text: str

    def title(self) -> str:
        """Return the text."""
        return self.text

    def to_rows(self) -> list[Row]:
        """Return no rows: the text is all."""
        return []


# A design searches layouts for up to 53 models, a budget for each number of devices, in a row.
_SEARCHING_LIMITS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentTool:
    """A question that an agent asks: its name, what it is for, its parameters and its answer.

    An answer may take `limits` times the limit of time.
    """

    name: str
    description: str
    parameters: type
    answer: Callable[[Any], object]
    limits: int = 1

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON Schema of the parameters."""
        return build_schema(self.parameters, DESCRIPTIONS)


def call_tool(name: str, arguments: Mapping[str, Any]) -> object:
    """Return the record that answers a question.

    Raises:
        BadInput: the arguments are none of the tool, or something cannot be used.
        KeyError: there is no such tool.
    """
    tool = TOOLS[name]
    return tool.answer(from_data(tool.parameters, dict(arguments), where=name))


def _pick(kind: type[_Options], question: object) -> _Options:
    """Return options with those of their fields that a question has."""
    names = (field.name for field in fields(kind))
    return kind(**{name: getattr(question, name) for name in names if hasattr(question, name)})


def _plan(question: PlanParameters) -> Plan:
    request = read_plan_request(question.model, question.on, question)
    plans = search_request(request, Path(question.model), _pick(SearchOptions, question))
    if plans.best is None:
        raise explain_empty_search(
            request, plans.search, Path(question.model), layout=question.layout
        )
    return plans.best


def _estimate(question: EstimateParameters) -> Plan:
    return estimate_request(question.model, question.layout, on=question.on, options=question)[0]


def _explain_why_not(question: WhyNotParameters) -> object:
    request = read_plan_request(question.model, question.on, question)
    plans = search_request(request, Path(question.model), SearchOptions(top=1))
    return why_not(plans, question.why_not)


def _budget(question: BudgetParameters) -> object:
    return compute_budget(
        question.model,
        question.on,
        question,
        tokens=question.budget_tokens,
        options=_pick(BudgetOptions, question),
    )


def _design(question: DesignParameters) -> object:
    return compute_design(
        question.on,
        question.like,
        _pick(WorkloadOptions, question),
        replace(_pick(DesignOptions, question), tokens=question.design_tokens),
    )


def _export(question: ExportParameters) -> LaunchFile:
    text = export(_estimate(question), to=question.to, job=question.job, image=question.image)
    return LaunchFile(to=question.to, text=text)


def _read_script(question: ScriptParameters) -> ScriptPlan:
    return read_flags(
        question.script,
        on=question.on,
        model=question.model,
        arguments=question.script_args,
        network=question.network,
        strict=question.strict,
        overrides=question.overrides,
    )


def _plan_script(question: ScriptParameters) -> Plan:
    return _read_script(question).plan


def _improve_script(question: ScriptParameters) -> object:
    reading = _read_script(question)
    return find_better_layouts(reading.plan, reading.options)


def _state_job(question: RunParameters) -> Plan | None:
    """Return the job that the parameters state; None where the run does, or a script."""
    if question.script or not question.model:
        return None
    return state_logged_job(
        Path(question.run),
        question.model,
        question.layout,
        on=question.on,
        options=_pick(WorkloadOptions, question),
    )


def _ask_of_run(answer: Callable[..., object], question: RunParameters) -> object:
    """Ask `diagnose` or `compare_run` of a run, with the job that the parameters state."""
    return answer(
        question.run,
        plan=_state_job(question),
        script=question.script or None,
        on=question.on,
        model=question.model,
        network=question.network,
    )


def _watch(question: LogParameters) -> object:
    return watch(
        question.run,
        plan=question.plan or None,
        script=question.script or None,
        model=question.model,
        on=question.on,
        layout=question.layout,
    )


def _check(question: CheckParameters) -> object:
    return check(
        question.before,
        question.after,
        on=question.on,
        model=question.model,
        arguments=question.script_args,
        network=question.network,
        overrides=question.overrides,
        budgets=question.budgets or None,
    )


TOOLS: Mapping[str, AgentTool] = MappingProxyType(
    {
        tool.name: tool
        for tool in (
            AgentTool(
                name="plan",
                description="Find the fastest layout of a model on some hardware that fits: step "
                "time by part, memory by component, next best layouts, what would change it.",
                parameters=PlanParameters,
                answer=_plan,
            ),
            AgentTool(
                name="estimate",
                description="Predict memory, step time and whether one given layout fits.",
                parameters=EstimateParameters,
                answer=_estimate,
            ),
            AgentTool(
                name="why_not",
                description="Say what speaks against a layout beside the best one of a job.",
                parameters=WhyNotParameters,
                answer=_explain_why_not,
            ),
            AgentTool(
                name="read_flags",
                description="Read a launch script of Megatron-LM, or a configuration of Megatron "
                "Bridge, NeMo, verl or Primus, and estimate its job on some hardware.",
                parameters=ScriptParameters,
                answer=_plan_script,
            ),
            AgentTool(
                name="improve_script",
                description="Find better layouts than a launch script's own, and the options to "
                "write and to leave out; for one that runs out of memory or is slow.",
                parameters=ScriptParameters,
                answer=_improve_script,
            ),
            AgentTool(
                name="diagnose",
                description="Say why a run, a profiler trace or a console log is slow or out of "
                "memory: walls with evidence, where the step goes, and what to write.",
                parameters=RunParameters,
                answer=partial(_ask_of_run, diagnose),
            ),
            AgentTool(
                name="compare",
                description="Put a run, a trace or a log beside its prediction and the nearest "
                "published runs.",
                parameters=RunParameters,
                answer=partial(_ask_of_run, compare_run),
            ),
            AgentTool(
                name="what_if",
                description="Say what a step of a profiler trace would take under a change: faster "
                "kernels, host or network, graphs, overlap, another degree or schedule.",
                parameters=WhatIfParameters,
                answer=lambda question: what_if(question.run, question.change),
            ),
            AgentTool(
                name="forecast",
                description="Forecast the load of a run's experts: the hottest rank some steps "
                "ahead, which placement or replicas pay, and what moving the experts takes.",
                parameters=ForecastParameters,
                answer=lambda question: forecast_loads(question.run, question.horizon),
            ),
            AgentTool(
                name="watch",
                description="Say what the log of a run shows so far: its speed beside the plan, "
                "when steps became slower and which part grew, what recurs, days left, alarms.",
                parameters=LogParameters,
                answer=_watch,
            ),
            AgentTool(
                name="check",
                description="Say exactly what a change of a script, a configuration or a job costs "
                "in bytes, calls and FLOPs, and which budgets it breaks.",
                parameters=CheckParameters,
                answer=_check,
            ),
            AgentTool(
                name="export",
                description="Write a layout of a job as the launch file of a trainer.",
                parameters=ExportParameters,
                answer=_export,
            ),
            AgentTool(
                name="budget",
                description="Tell what training on so many tokens takes in days, device-hours and "
                "money, on several numbers of devices.",
                parameters=BudgetParameters,
                answer=_budget,
                limits=_SEARCHING_LIMITS,
            ),
            AgentTool(
                name="design",
                description="Choose the shape of a model: the least predicted loss in so many days "
                "or tokens on some hardware, with its plan, its size and what serving it takes.",
                parameters=DesignParameters,
                answer=_design,
                limits=_SEARCHING_LIMITS,
            ),
            AgentTool(
                name="models",
                description="List the models that are known by name.",
                parameters=NameParameters,
                answer=lambda question: models(question.name),
            ),
            AgentTool(
                name="hardware",
                description="List the devices that are known by name, or show one.",
                parameters=NameParameters,
                answer=lambda question: hardware(question.name),
            ),
        )
    }
)
