"""What several verbs read alike: a model name or a job file, the hardware, and the defaults that
were chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Hardware
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Estimate, Plan
from moewright.spec.workload import DocumentMasking, Dtype, Routing, Workload

if TYPE_CHECKING:
    from moewright.search.search import SearchResult
    from moewright.search.space import Objections

DEFAULT_SEQ_LEN = 4096
DEFAULT_SEQUENCES_PER_DEVICE = 16  # as in the published 256-GPU measurements: global batch 4096


class Purpose(StrEnum):
    """What a plan is for: a job is to be trained here, so only what the engine runs counts; a model
    may go anywhere."""

    PLAN = "plan"
    TRAIN = "train"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """What a planning verb is to plan; `chosen` are the values nobody gave, one line each."""

    model: ModelSpec
    workload: Workload
    hardware: Hardware
    layout_text: str  # layout keys that must hold, as layout text
    purpose: Purpose
    defaults: tuple[str, ...]


def read_plan_request(
    model: str,
    *,
    on: str,
    seq_len: int | None,
    global_batch: int | None,
    precision: Dtype | None,
    load: Path | None = None,
) -> PlanRequest:
    """From MODEL (a catalogue name, a config.json or its folder, or a job .toml) and the options
    beside it."""
    from moewright.intake.expert_load import read_expert_load
    from moewright.rules.routing import check_load_histogram

    asked = _read_asked(
        model, on=on, seq_len=seq_len, global_batch=global_batch, precision=precision
    )
    if load is None:
        return asked
    if not asked.model.moe_layer_count:
        raise BadInput(
            Reason(field="--load", value=str(load), rule=f"{asked.model.name} has no experts")
        )
    workload = replace(
        asked.workload, routing=Routing.MEASURED, load_histogram=read_expert_load(load)
    )
    if reasons := check_load_histogram(asked.model, workload, Layout(world_size=1)):
        found = (
            replace(one, field=one.field.replace("workload.load_histogram", f"--load {load}"))
            for one in reasons
        )
        raise BadInput(*found)
    return replace(asked, workload=workload)


def _read_asked(
    model: str, *, on: str, seq_len: int | None, global_batch: int | None, precision: Dtype | None
) -> PlanRequest:
    from moewright.intake import catalogue
    from moewright.intake.job import MAX_BATCH, MAX_SEQ_LEN

    if Path(model).suffix == ".toml":
        return _from_job(
            Path(model), on=on, seq_len=seq_len, global_batch=global_batch, precision=precision
        )
    if not on:
        raise BadInput(
            Reason(
                field="--on", rule="is needed with a model: count x device", nearest="--on 8xH100"
            )
        )
    spec = catalogue.model(model)
    hardware = _hardware(on)
    chosen = []
    if skipped := catalogue.skipped_fields(model):
        chosen.append(f"skipped in {model}, not known here: {', '.join(skipped)}")
    if seq_len is None:
        seq_len = DEFAULT_SEQ_LEN
        chosen.append(f"sequence length {seq_len} (default; --seq-len)")
    if global_batch is None:
        global_batch = DEFAULT_SEQUENCES_PER_DEVICE * hardware.count
        chosen.append(
            f"global batch {global_batch} ({DEFAULT_SEQUENCES_PER_DEVICE} sequences a device; --global-batch)"
        )
    if precision is None:
        precision = Dtype.BF16
        chosen.append(f"precision {precision} (default; --precision)")
    for field, value, high in (
        ("--seq-len", seq_len, MAX_SEQ_LEN),
        ("--global-batch", global_batch, MAX_BATCH),
    ):
        if not 1 <= value <= high:
            close = str(min(max(value, 1), high))
            raise BadInput(
                Reason(field=field, value=str(value), rule=f"must be in 1..{high}", nearest=close)
            )
    workload = Workload(seq_len=seq_len, global_batch=global_batch, precision=precision)
    return PlanRequest(
        model=spec,
        workload=workload,
        hardware=hardware,
        layout_text="",
        purpose=Purpose.PLAN,
        defaults=tuple(chosen),
    )


def _hardware(on: str) -> Hardware:
    from moewright.intake import catalogue

    with translate_fields(lambda field: "--on" if field == "hardware" else field):
        return catalogue.hardware(on)


def _from_job(
    path: Path, *, on: str, seq_len: int | None, global_batch: int | None, precision: Dtype | None
) -> PlanRequest:
    from moewright.intake import catalogue
    from moewright.intake.job import read_job

    options = {"seq_len": seq_len, "global_batch": global_batch, "precision": precision}
    job = read_job(
        path, [f"train.{key}={value}" for key, value in options.items() if value is not None]
    )
    return PlanRequest(
        model=job.model,
        workload=fill_attended_share(job.workload),
        hardware=_hardware(on) if on else catalogue.hardware(f"{job.nproc}x{job.hardware}"),
        layout_text=job.layout_text,
        purpose=Purpose.TRAIN,
        defaults=() if on else (f"hardware {job.nproc}x{job.hardware} (from {path}; --on)",),
    )


def fill_attended_share(workload: Workload) -> Workload:
    """The workload with the attention that the documents of its training files leave, unless the
    job says how much."""
    data = workload.data
    if (
        data.documents is DocumentMasking.JOINED
        or data.attended_share != 1
        or not Path(f"{data.train}.idx").is_file()
    ):
        return workload
    from moewright.engine.data.indexed import open_indexed
    from moewright.engine.data.sampler import attended_share

    share = attended_share(open_indexed(Path(data.train)), seq_len=workload.seq_len)
    return replace(workload, data=replace(data, attended_share=share))


def estimate_even_routing(plan: Plan) -> Estimate | None:
    """What the plan would be under even routing, where a load was measured."""
    from moewright.search.search import build_plan

    if plan.workload.routing is not Routing.MEASURED or not plan.model.moe_layer_count:
        return None
    return build_plan(
        plan.model, replace(plan.workload, routing=Routing.BALANCED), plan.hardware, plan.layout
    ).estimate


@contextmanager
def translate_fields(name: Callable[[str], str]) -> Iterator[None]:
    """Let faults name their fields as the user wrote them: `name` turns "layout.ep" into that."""
    try:
        yield
    except BadInput as error:
        raise BadInput(
            *(replace(reason, field=name(reason.field)) for reason in error.reasons)
        ) from None


def to_job_keys(job: Path) -> Callable[[str], str]:
    """Fields as the keys of a job file: "job.toml: train.global_batch" for
    workload.global_batch."""
    spelled = {
        "dp": "layout.dp",
        "layout.stages": "layout.layout",
        "layout.world_size": "train.nproc",
    }

    def name(field: str) -> str:
        key = spelled.get(field, field.replace("workload.", "train."))
        return (
            f"{job.name}: {key}"
            if key.split(".")[0] in ("model", "data", "layout", "train")
            else field
        )

    return name


def to_options(option: str) -> Callable[[str], str]:
    """Fields as options: "--global-batch" for workload.global_batch, "--layout ep" for ep where
    that is the option."""
    spelled = {"layout": option, "layout.stages": f"{option} layout", "layout.world_size": "--on"}

    def name(field: str) -> str:
        if field.startswith("workload."):
            return f"--{field.removeprefix('workload.').replace('_', '-')}"
        return spelled.get(field, f"{option} {field.removeprefix('layout.')}")

    return name


def explain_empty_search(
    model: ModelSpec,
    workload: Workload,
    hardware: Hardware,
    *,
    fixed: str,
    allowed: Objections,
    ranked: SearchResult,
) -> BadInput:
    """Why a search came back empty: what is wrong with the pinned keys by themselves, else the
    commonest rejection."""
    from moewright.codec import explicit_fields, parse_layout
    from moewright.rules.legality import check_legality
    from moewright.search.search import DOES_NOT_FIT

    layout = parse_layout(fixed, world_size=hardware.count)
    reasons = (*check_legality(model, workload, layout), *allowed(layout))
    if reasons:
        pinned = explicit_fields(fixed)
        return BadInput(
            *sorted(reasons, key=lambda reason: reason.field.rpartition(".")[2] not in pinned)
        )
    most = max(ranked.rejected, key=lambda pair: pair[1], default=("none is legal", 0))[0]
    rule = f"no layout over {hardware.count} devices will do; most often: {most}"
    close = "more devices, or a shorter sequence" if most == DOES_NOT_FIT else ""
    return BadInput(Reason(field="layout", value=fixed, rule=rule, nearest=close))
