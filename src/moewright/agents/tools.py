"""The tools of an agent: what each asks for, and the function of the package that answers it.

An answer is the record that the verb of the same name writes as `--json`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from moewright.agents.schemas import build_schema
from moewright.api.budgets import compute_budget
from moewright.api.catalogues import hardware, models
from moewright.api.checking import check
from moewright.api.designing import DEFAULT_LIKE, compute_design
from moewright.api.diagnosing import diagnose
from moewright.api.launch_scripts import find_better_layouts, read_flags
from moewright.api.planning import (
    estimate_request,
    explain_empty_search,
    search_request,
    why_not,
)
from moewright.api.requests import read_plan_request
from moewright.api.run_comparisons import compare_run
from moewright.api.running import export
from moewright.api.watching import watch
from moewright.codec import from_data
from moewright.spec.options import BudgetOptions, DesignOptions, SearchOptions, WorkloadOptions
from moewright.spec.plan import Plan
from moewright.spec.record import Record, Row

_Options = TypeVar("_Options", SearchOptions, WorkloadOptions, DesignOptions, BudgetOptions)
_SEARCH = SearchOptions()


@dataclass(frozen=True, kw_only=True, slots=True)
class JobParameters(WorkloadOptions):
    """A model, or a job or a plan, on some hardware."""

    model: str
    on: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanParameters(JobParameters):
    """What a search of layouts is asked: the fields of SearchOptions beside a job."""

    top: int = _SEARCH.top
    layout: str = _SEARCH.layout
    fewest: bool = _SEARCH.fewest
    fit_probability: float = _SEARCH.fit_probability
    risk: float = _SEARCH.risk
    runs_on: str = _SEARCH.runs_on


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimateParameters(JobParameters):
    """One layout of a job."""

    layout: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class WhyNotParameters(JobParameters):
    """A layout that is held against the best."""

    why_not: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetParameters(JobParameters):
    """What training on so many tokens is asked for."""

    budget_tokens: str
    devices: tuple[int, ...] = ()
    price: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DesignParameters:
    """What a model is designed for: one of `days` and `design_tokens`, and what bounds its size."""

    on: str
    like: str = DEFAULT_LIKE
    seq_len: int | None = None
    global_batch: int | None = None
    days: float = 0.0
    design_tokens: str = ""
    max_total: str = ""
    max_active: str = ""
    serve: str = ""
    context: int = DesignOptions().context
    batch: int = DesignOptions().batch


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportParameters(EstimateParameters):
    """A layout of a job, and the trainer that it is written for."""

    to: str
    job: str = ""
    image: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptParameters:
    """A launch script."""

    script: str
    on: str = ""
    model: str = ""
    script_args: str = ""
    network: str = ""
    strict: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RunParameters:
    """A run, a trace or a log, and what states its job where it does not."""

    run: str
    script: str = ""
    on: str = ""
    model: str = ""
    layout: str = ""
    seq_len: int | None = None
    global_batch: int | None = None
    network: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogParameters:
    """A log that grows, and what states its job."""

    run: str
    plan: str = ""
    script: str = ""
    model: str = ""
    on: str = ""
    layout: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckParameters:
    """Two files that state a job, before and after a change."""

    before: str
    after: str
    on: str = ""
    model: str = ""
    script_args: str = ""
    network: str = ""
    budgets: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class NameParameters:
    """Words of a name."""

    name: str = ""


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


_DESCRIPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "model": "A model's name, such as Qwen3-30B-A3B (resource moewright://models lists them); "
        "the path of a config.json, of a job .toml, or of a plan.json. Of a script, a trace or a "
        "log: what trained, where it gives no sizes.",
        "on": "The hardware as count x device, such as 256xH800 (resource moewright://hardware); "
        "of a script that tells its ranks the device alone, H800.",
        "layout": "A layout as text, such as tp2,ep8,pp4,mbs1,recompute=select. Keys: tp cp pp vpp "
        "ep etp mbs zero recompute offload overlap dispatcher schedule; dp is derived.",
        "seq_len": "Tokens a sequence.",
        "global_batch": "Sequences a step.",
        "precision": "The compute precision.",
        "network": "Kinds of network in place of the hardware's own, such as ib, or nvl72+efa.",
        "rampup_batch_size": "A global batch that grows: start, increment, samples.",
        "task": "What the model is trained for.",
        "lora_rank": "The rank of LoRA's adapters.",
        "quantize_base": "The form of the frozen weights under adapters.",
        "load": 'Loads of experts: "balanced", the hottest rank\'s rows over the mean, or a file.',
        "steps": "Steps of the training.",
        "tokens": "Tokens of the training.",
        "lengths": "A .csv of the lengths of samples that are packed into sequences.",
        "top": "How many layouts are ranked.",
        "fewest": "Plan for the fewest devices on which a layout fits.",
        "fit_probability": "Layouts that fit with at least this probability come first.",
        "risk": "Layouts are ranked by the seconds that a step exceeds with this probability.",
        "runs_on": "The trainer that has to start the layouts: engine, megatron or torchtitan.",
        "why_not": "The layout that is asked about, as text.",
        "budget_tokens": "Tokens to train on, such as 15T or 500B.",
        "devices": "Numbers of devices to compare.",
        "like": "The model whose family, attention, router and vocabulary the shapes have.",
        "days": "Days of training on the hardware.",
        "design_tokens": "Tokens to train on, such as 1T, in place of days.",
        "max_total": "The most parameters, such as 30B.",
        "max_active": "The most parameters of a token, such as 3B.",
        "serve": "Hardware that has to hold the model when it is served, such as 8xH100.",
        "context": "Tokens of context of a sequence that is served.",
        "batch": "Sequences that are served together.",
        "price": "What an hour of a device costs.",
        "to": "The trainer: megatron, bridge, torchtitan, slurm, k8s or torchrun.",
        "job": "The path of a job file of this engine, for slurm, k8s and torchrun.",
        "image": "The container image of k8s.",
        "script": "The path of a launch script of Megatron-LM, or of a configuration in YAML.",
        "script_args": "What stands behind the script's name on its command line.",
        "strict": "Refuse options that are not read.",
        "run": "The path of the folder of a run, of a trace of a profiler or a folder of them, or "
        "of a console log of Megatron-LM.",
        "plan": "The path of a plan.json or a job .toml that says what is expected.",
        "before": "The path of a script, a configuration, a job or a plan before the change.",
        "after": "The path of the same after the change.",
        "budgets": "The path of a file of budgets.",
        "name": "Words of the name; all are listed without.",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentTool:
    """A question that an agent asks: its name, what it is for, its parameters and its answer."""

    name: str
    description: str
    parameters: type
    answer: Callable[[Any], object]

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON Schema of the parameters."""
        return build_schema(self.parameters, _DESCRIPTIONS)


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


def _read_script(question: ScriptParameters) -> Plan:
    return read_flags(
        question.script,
        on=question.on,
        model=question.model,
        arguments=question.script_args,
        network=question.network,
        strict=question.strict,
    ).plan


def _improve_script(question: ScriptParameters) -> object:
    return find_better_layouts(_read_script(question))


def _state_job(question: RunParameters) -> Plan | None:
    """Return the job that the parameters state; None where the run does, or a script."""
    if question.script or not question.model:
        return None
    options = _pick(WorkloadOptions, question)
    return estimate_request(question.model, question.layout, on=question.on, options=options)[0]


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
                answer=_read_script,
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
            ),
            AgentTool(
                name="design",
                description="Choose the shape of a model: the least predicted loss in so many days "
                "or tokens on some hardware, with its plan, its size and what serving it takes.",
                parameters=DesignParameters,
                answer=_design,
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
