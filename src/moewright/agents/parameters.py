"""What each tool of an agent asks for, and what its parameters mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from moewright.api.design_question import DEFAULT_LIKE
from moewright.spec.options import DesignOptions, SearchOptions, WorkloadOptions

_DESIGN = DesignOptions()
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
    """What a model is designed for: one of `days`, `design_tokens` and `until`.

    The others bound its size, or say what is varied.
    """

    on: str
    like: str = DEFAULT_LIKE
    seq_len: int | None = None
    global_batch: int | None = None
    days: float = 0.0
    design_tokens: str = ""
    max_total: str = ""
    max_active: str = ""
    serve: str = ""
    context: int = _DESIGN.context
    batch: int = _DESIGN.batch
    until: float = 0.0
    served_tokens: str = ""
    attention_kinds: tuple[str, ...] = ()
    kv_heads: tuple[int, ...] = ()
    vocab_sizes: tuple[int, ...] = ()
    shared_experts: tuple[int, ...] = ()


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
    overrides: tuple[str, ...] = ()


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
class WhatIfParameters:
    """A trace, and a change of it."""

    run: str
    change: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ForecastParameters:
    """A run of this engine, and how far ahead its loads are forecast."""

    run: str
    horizon: int = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckParameters:
    """Two files that state a job, before and after a change."""

    before: str
    after: str
    on: str = ""
    model: str = ""
    script_args: str = ""
    network: str = ""
    overrides: tuple[str, ...] = ()
    budgets: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class NameParameters:
    """Words of a name."""

    name: str = ""


DESCRIPTIONS: Mapping[str, str] = MappingProxyType(
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
        "from_trace": "The path of a traced step of these devices, whose kernels calibrate the "
        "prediction: a run of this engine with traces, or a trace with plan.json beside it.",
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
        "until": "A held-out loss in nats a token to train to, in place of days.",
        "served_tokens": "Tokens that the model decodes in its life, such as 10T.",
        "attention_kinds": "Kinds of attention to compare: gqa, mla.",
        "kv_heads": "Numbers of heads of keys and values to compare.",
        "vocab_sizes": "Sizes of the vocabulary to compare.",
        "shared_experts": "Numbers of shared experts to compare.",
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
        "overrides": "NAME=VALUE of a variable, an option (--vocab-size=128000; null leaves it "
        "out) or a setting, which win over those of the script: --set of the command line.",
        "run": "The path of the folder of a run, of a trace of a profiler or a folder of them, or "
        "of a console log of Megatron-LM.",
        "plan": "The path of a plan.json or a job .toml that says what is expected.",
        "change": "What is changed in a trace: parts with how many times as fast they are, such as "
        "gemm=2x,network=1.5x,host=inf; graphs=on; overlap=grad; of a run of this engine with the "
        "traces of all ranks also ep=4 and schedule=1f1b.",
        "horizon": "Steps ahead.",
        "before": "The path of a script, a configuration, a job or a plan before the change.",
        "after": "The path of the same after the change.",
        "budgets": "The path of a file of budgets.",
        "name": "Words of the name; all are listed without.",
    }
)
