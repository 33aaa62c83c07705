"""What every question to the planner begins with: a model or a job, the hardware, the defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from moewright.api.trace_calibration import calibrate_from_trace
from moewright.codec.data_paths import parse_data_paths
from moewright.codec.numbers import parse_count
from moewright.intake import catalogue, hub
from moewright.intake.job import JobFile, read_job
from moewright.intake.job_workload import (
    LOG_SUFFIXES,
    MAX_BATCH,
    MAX_LOAD_FACTOR,
    MAX_SEQ_LEN,
    Int64s,
    read_expert_load,
    read_logged_skew,
    read_sample_lengths,
)
from moewright.intake.networks import apply_network
from moewright.rules.batch_rampup import check_ramp
from moewright.rules.job import Job
from moewright.rules.limits.trainers import TargetTrainer
from moewright.rules.packing import filled_share, pack_lengths, packed_share
from moewright.rules.routing import check_load_histogram
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Hardware
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.names import closest_match
from moewright.spec.options import JobAxes, WorkloadOptions
from moewright.spec.plan import Plan
from moewright.spec.workload import (
    BatchRampSpec,
    DocumentMasking,
    Dtype,
    Objective,
    Routing,
    Task,
    Workload,
)

DEFAULT_SEQ_LEN = 4096  # what most published pretraining runs have
DEFAULT_SEQUENCES_PER_DEVICE = 16  # as in the published 256-GPU measurements: global batch 4096


class Purpose(StrEnum):
    """What a plan is for: a job is trained by this engine, a model may go to any trainer."""

    PLAN = "plan"
    TRAIN = "train"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """What is to be planned; `defaults` are the values nobody gave, one line each."""

    model: ModelSpec
    workload: Workload
    hardware: Hardware
    layout_text: str  # layout keys that must hold, as layout text
    purpose: Purpose
    defaults: tuple[str, ...]
    runs_on: TargetTrainer | None = None  # the trainer that has to start the layouts

    def job(self, layout: Layout) -> Job:
        """Return the job of the request in a layout."""
        return Job(model=self.model, workload=self.workload, layout=layout)


def read_plan_request(
    model: str | Path | ModelSpec, on: str | Hardware, options: WorkloadOptions
) -> PlanRequest:
    """Read a model (a catalogue name, a config.json or its folder, a record) or a job .toml.

    `on` is hardware as count x device; a job brings its own.

    Raises:
        BadInput: a name, file or number cannot be used; fields are named as options
            ("--seq-len").
    """
    is_job = isinstance(model, str | Path) and Path(model).suffix == ".toml"
    if is_job:
        request = _read_job_request(Path(str(model)), on, options)
    else:
        request = _read_model_request(model, on, options)
    return _change_workload(request, options)


def replan_request(plan: Plan, on: str | Hardware, options: WorkloadOptions) -> PlanRequest:
    """Return the request that a plan answers, with what the caller gives in place of its own.

    Raises:
        BadInput: something cannot be used; fields are named as options.
    """
    return change_job(plan.model, plan.workload, on or plan.hardware, options)


def change_job(
    model: ModelSpec, workload: Workload, on: str | Hardware, options: WorkloadOptions
) -> PlanRequest:
    """Return the request for a job, with what the caller gives in place of its workload's values.

    Raises:
        BadInput: something cannot be used; fields are named as options.
    """
    values = {
        "seq_len": options.seq_len,
        "global_batch": options.global_batch,
        "precision": options.precision,
    }
    changes: dict[str, Any] = {key: value for key, value in values.items() if value is not None}
    hardware = read_hardware(on, options.network)
    request = _request_model(model, replace(workload, **changes), hardware)
    return _change_workload(request, options)


def _change_workload(request: PlanRequest, options: WorkloadOptions) -> PlanRequest:
    """Return the request with length, ramp, task, samples and load as the caller says."""
    request = replace(request, workload=change_training(request.workload, options))
    if options.lengths is not None:
        request = _pack_samples(request, read_sample_lengths(options.lengths), options.lengths)
    if options.from_trace is not None:
        hardware, line = calibrate_from_trace(options.from_trace, request.hardware)
        request = replace(request, hardware=hardware, defaults=(*request.defaults, line))
    if options.load is None:
        return request
    return replace(request, workload=_add_measured_load(request, options.load))


def read_lora_rank(text: str) -> int | None:
    """Return the rank of "r=16" or "16"; None for "".

    Raises:
        BadInput: it is no rank.
    """
    digits = text.removeprefix("r=")
    if not text:
        return None
    if not digits.isdecimal() or int(digits) < 1:
        raise BadInput(Reason(field="--lora", value=text, rule="must be a rank", nearest="r=16"))
    return int(digits)


ANY_PRECISION = "any"


def read_axes(
    precision: Dtype | str | None, global_batch: int | str | None
) -> tuple[Dtype | None, int | None, JobAxes]:
    """Return a format and a batch, and which of the two a plan may choose.

    "any" lets it choose the format, "512..4096" the batch, of which the largest is returned.

    Raises:
        BadInput: there is no such format, or the range is none.
    """
    axes = JobAxes()
    if precision == ANY_PRECISION:
        axes = replace(axes, any_precision=True)
        precision = None
    elif precision is not None and precision not in tuple(Dtype):
        rule = f"must be one of {', '.join(Dtype)}, or {ANY_PRECISION} where plan chooses"
        nearest = closest_match(precision, [*Dtype, ANY_PRECISION])
        raise BadInput(Reason(field="precision", value=precision, rule=rule, nearest=nearest))
    if isinstance(global_batch, str):
        least, is_range, most = global_batch.partition("..")
        batches = [parse_count(part, "global_batch") for part in (least, most) if part]
        if is_range and (len(batches) < 2 or not 1 <= batches[0] < batches[1]):
            rule = "must be LEAST..MOST, from 1 up"
            raise BadInput(
                Reason(field="global_batch", value=global_batch, rule=rule, nearest="512..4096")
            )
        if is_range:
            axes = replace(axes, batches=(batches[0], batches[1]))
        global_batch = batches[-1] if batches else parse_count("", "global_batch")
    return None if precision is None else Dtype(precision), global_batch, axes


def change_training(workload: Workload, options: WorkloadOptions) -> Workload:
    """Return the workload with the length, the ramp and the task that the caller says.

    Raises:
        BadInput: they cannot be, or contradict each other.
    """
    workload = _set_length(workload, options)
    if options.rampup_batch_size is not None:
        start, increment, samples = options.rampup_batch_size
        ramp = BatchRampSpec(ramp_start=start, ramp_increment=increment, ramp_samples=samples)
        workload = _add_ramp(workload, ramp)
    task = options.task
    if options.lora_rank is not None:
        if task not in (None, Task.LORA):
            rule = f"is the rank of LoRA's adapters, and --task is {task}"
            raise BadInput(Reason(field="--lora", rule=rule, nearest="--task lora"))
        task = Task.LORA
    if options.quantize_base is not None and (task or workload.fine_tuning.task) is not Task.LORA:
        rule = "applies to the frozen weights under adapters"
        raise BadInput(Reason(field="--quantize-base", rule=rule, nearest="--lora r=16"))
    if task is None and options.quantize_base is None:
        return workload
    fine_tuning = replace(workload.fine_tuning, task=task or workload.fine_tuning.task)
    if options.quantize_base is not None:
        fine_tuning = replace(fine_tuning, quantize_base=options.quantize_base)
    if options.lora_rank is not None:
        fine_tuning = replace(fine_tuning, lora_rank=options.lora_rank)
    return replace(workload, fine_tuning=fine_tuning)


def _set_length(workload: Workload, options: WorkloadOptions) -> Workload:
    """Return the workload with the steps that the caller says, or that its tokens take.

    Raises:
        BadInput: both are there, or less than one.
    """
    if options.steps is not None and options.tokens is not None:
        rule = "excludes --steps: both are the length of training"
        raise BadInput(Reason(field="--tokens", rule=rule, nearest="--tokens alone"))
    for option, length in (("--steps", options.steps), ("--tokens", options.tokens)):
        if length is not None and length < 1:
            raise BadInput(
                Reason(field=option, value=str(length), rule="must be at least 1", nearest="1")
            )
    if options.tokens is not None:
        # Rounded up: all of the tokens are trained on.
        return replace(workload, steps=-(-options.tokens // workload.tokens_per_step))
    if options.steps is None:
        return workload
    return replace(workload, steps=options.steps)


def _add_ramp(workload: Workload, ramp: BatchRampSpec) -> Workload:
    """Return the workload with a batch that grows.

    Raises:
        BadInput: the ramp is none for this batch, whatever the layout.
    """
    workload = replace(workload, ramp=ramp)
    # On one device no layout is in the way.
    reasons = tuple(check_ramp(workload, Layout(world_size=1)))
    # In place of the others, which follow from it.
    if ramp.ramp_start < 1:
        rule = "must begin with the sequences of the first batch, 1 or more"
        reasons = (Reason(field="", value=str(ramp.ramp_start), rule=rule, nearest="1"),)
    if ramp.ramp_samples < 1:
        rule = "must end with the sequences over which the batch grows, 1 or more"
        reasons += (Reason(field="", value=str(ramp.ramp_samples), rule=rule, nearest="1"),)
    if reasons:
        raise BadInput(*(replace(reason, field="--rampup-batch-size") for reason in reasons))
    return workload


def _pack_samples(request: PlanRequest, lengths: Int64s, path: Path) -> PlanRequest:
    """Return the request with sequences into which samples of these lengths are packed.

    Raises:
        BadInput: a sequence is too short for the longest sample.
    """
    seq_len, longest = request.workload.seq_len, int(lengths.max())
    if longest > seq_len:
        rule = f"is too short for the longest sample of {path}, which has {longest:,} tokens"
        # The next power of two.
        nearest = str(1 << (longest - 1).bit_length())
        raise BadInput(Reason(field="--seq-len", value=str(seq_len), rule=rule, nearest=nearest))
    packs = pack_lengths(lengths, seq_len)
    data = replace(
        request.workload.data,
        documents=DocumentMasking.RESTARTED,
        attended_share=packed_share(lengths, lengths, packs),
    )
    line = (
        f"{len(lengths):,} samples of up to {longest:,} tokens, packed into {packs.count:,} "
        f"sequences: {filled_share(lengths, packs):.1%} of their tokens are samples', and "
        f"attention takes {data.attended_share:.1%} of their pairs (--lengths)"
    )
    return replace(
        request,
        workload=replace(request.workload, data=data),
        defaults=(*request.defaults, line),
    )


def _read_load_factor(text: str) -> float:
    """Return the load of the hottest rank that a text says as a number; 0 where it says none.

    Raises:
        BadInput: the number is no load.
    """
    try:
        factor = float(text)
    except ValueError:
        return 0.0
    if not 1 <= factor <= MAX_LOAD_FACTOR:
        rule = f"must be the hottest rank's rows over the mean, in 1..{MAX_LOAD_FACTOR:g}"
        raise BadInput(Reason(field="--load", value=text, rule=rule, nearest="1.5"))
    return factor


def _add_measured_load(request: PlanRequest, path: Path) -> Workload:
    """Return the workload with the load that `path` says: a word, a number, or tokens measured."""
    if not request.model.moe_layer_count:
        rule = f"{request.model.name} has no experts"
        raise BadInput(Reason(field="--load", value=str(path), rule=rule))
    if str(path) == Routing.BALANCED:
        return replace(request.workload, routing=Routing.BALANCED)
    factor = _read_load_factor(str(path))
    if factor:
        return replace(request.workload, routing=Routing.LEARNED, load_factor=factor)
    if path.suffix in LOG_SUFFIXES:
        skew = read_logged_skew(path)
        return replace(request.workload, routing=Routing.SKEWED, load_skew=skew)
    histogram = read_expert_load(path)
    workload = replace(request.workload, routing=Routing.MEASURED, load_histogram=histogram)
    job = Job(model=request.model, workload=workload, layout=Layout(world_size=1))
    reasons = check_load_histogram(job)
    if reasons:
        option = f"--load {path}"
        raise BadInput(
            *(
                replace(reason, field=reason.field.replace("workload.load_histogram", option))
                for reason in reasons
            )
        )
    return workload


_MOST_USUAL_TOKENS = 1 << 29  # of a step; nobody published a training with a quarter of it


def _read_model_request(
    model: str | Path | ModelSpec, on: str | Hardware, options: WorkloadOptions
) -> PlanRequest:
    if not on:
        rule = "is needed with a model: count x device"
        raise BadInput(Reason(field="--on", rule=rule, nearest="--on 8xH100"))
    defaults = []
    if isinstance(model, ModelSpec):
        spec = model
    else:
        name = hub.locate_config(str(model))
        spec = catalogue.model(name)
        if skipped := catalogue.skipped_fields(name):
            defaults.append(f"skipped in {model}, not known here: {', '.join(skipped)}")
    hardware = read_hardware(on, options.network)
    values = []
    seq_len = options.seq_len
    if seq_len is None:
        seq_len = DEFAULT_SEQ_LEN
        values.append(f"--seq-len {seq_len}")
    global_batch = options.global_batch
    if global_batch is None:
        global_batch = DEFAULT_SEQUENCES_PER_DEVICE * hardware.count
        values.append(f"--global-batch {global_batch} ({DEFAULT_SEQUENCES_PER_DEVICE} a device)")
    precision = options.precision
    if precision is None:
        precision = Dtype.BF16
        values.append(f"--precision {precision}")
    if values:
        defaults.append(f"by default {', '.join(values)}")
    tokens = seq_len * global_batch
    # Tokens were taken for sequences, it seems.
    if tokens > _MOST_USUAL_TOKENS and global_batch >= seq_len:
        defaults.append(
            f"--global-batch counts sequences: {tokens:,} tokens a step; {global_batch:,} tokens "
            f"are --global-batch {max(1, round(global_batch / seq_len)):,}"
        )
    workload = Workload(seq_len=seq_len, global_batch=global_batch, precision=precision)
    return replace(_request_model(spec, workload, hardware), defaults=tuple(defaults))


def _request_model(model: ModelSpec, workload: Workload, hardware: Hardware) -> PlanRequest:
    _check_range("--seq-len", workload.seq_len, MAX_SEQ_LEN)
    _check_range("--global-batch", workload.global_batch, MAX_BATCH)
    return PlanRequest(
        model=model,
        workload=workload,
        hardware=hardware,
        layout_text="",
        purpose=Purpose.PLAN,
        defaults=(),
    )


def _check_range(field: str, value: int, highest: int) -> None:
    if 1 <= value <= highest:
        return
    nearest = str(min(max(value, 1), highest))
    raise BadInput(
        Reason(field=field, value=str(value), rule=f"must be in 1..{highest}", nearest=nearest)
    )


def read_hardware(on: str | Hardware, network: str = "") -> Hardware:
    """Return the hardware that `on` names as count x device; a refusal names --on or --network."""
    options = {"hardware": "--on", "network": "--network"}
    with translate_fields(lambda field: options.get(field, field)):
        if isinstance(on, Hardware):
            return apply_network(on, network)
        return catalogue.hardware(on, network)


def _read_job_request(path: Path, on: str | Hardware, options: WorkloadOptions) -> PlanRequest:
    values = {
        "seq_len": options.seq_len,
        "global_batch": options.global_batch,
        "precision": options.precision,
    }
    changes = [f"train.{key}={value}" for key, value in values.items() if value is not None]
    job = read_job(path, changes)
    defaults: tuple[str, ...] = ()
    if on:
        hardware = read_hardware(on, options.network)
    else:
        text = f"{job.nproc}x{job.hardware}"
        # The option goes before the job's own network.
        hardware = read_hardware(catalogue.hardware(text, job.network), options.network)
        defaults = (f"hardware {job.nproc}x{job.hardware} (from {path}, --on)",)
    job = replace(job, workload=fill_attended_share(job.workload))
    if job.workload.loss.objective is Objective.DPO:
        line = (
            "preferences (train.objective=dpo): a step costs what one of sft does; before the "
            "first, one forward of all pairs makes the reference, a third of the steps of an epoch"
        )
        defaults = (*defaults, line)
    return request_training(job, hardware, defaults)


def request_training(
    job: JobFile, hardware: Hardware, defaults: tuple[str, ...] = ()
) -> PlanRequest:
    """Return the request for a plan by which this engine trains a job on some hardware."""
    return PlanRequest(
        model=job.model,
        workload=job.workload,
        hardware=hardware,
        layout_text=job.layout_text,
        purpose=Purpose.TRAIN,
        defaults=defaults,
    )


def fill_attended_share(workload: Workload) -> Workload:
    """Return the workload with the share of attention that its packed documents leave.

    The share is read from the training files, unless the job states it.
    """
    data = workload.data
    parts = parse_data_paths(data.train)
    if (
        data.documents is DocumentMasking.JOINED
        or data.attended_share != 1
        or not parts
        or not all(_is_corpus(part.path) for part in parts)
    ):
        return workload
    # This needs no torch, but takes a moment.
    from moewright.engine.data.corpus_rows import count_attended_share

    share = count_attended_share(parts, workload)
    return replace(workload, data=replace(data, attended_share=share))


def _is_corpus(prefix: str) -> bool:
    """Tell whether there is a pair of this prefix, or the list of its shards."""
    return any(Path(prefix + suffix).is_file() for suffix in (".idx", ".shards.json"))


@contextmanager
def translate_fields(spell: Callable[[str], str]) -> Iterator[None]:
    """Let refusals name their fields as the user wrote them: `spell` turns "layout.ep" into it."""
    try:
        yield
    except BadInput as error:
        raise BadInput(
            *(replace(reason, field=spell(reason.field)) for reason in error.reasons)
        ) from None


_JOB_KEYS = {
    "dp": "layout.dp",
    # As its key is called in layout text.
    "layout.stages": "layout.layout",
    "layout.world_size": "train.nproc",
}
_JOB_SECTIONS = ("model", "data", "layout", "train")


def to_job_keys(job: Path) -> Callable[[str], str]:
    """Spell fields as keys of a job file: "job.toml: train.global_batch"."""

    def spell(field: str) -> str:
        key = _JOB_KEYS.get(field, field.replace("workload.", "train."))
        if key.split(".")[0] in _JOB_SECTIONS:
            return f"{job.name}: {key}"
        return field

    return spell


def to_options(option: str) -> Callable[[str], str]:
    """Spell fields as options: "--global-batch", and "--layout ep" where `option` is --layout."""
    spellings: Mapping[str, str] = {
        "layout": option,
        "layout.stages": f"{option} layout",
        "layout.world_size": "--on",
    }

    def spell(field: str) -> str:
        if field.startswith("workload."):
            return f"--{field.removeprefix('workload.').replace('_', '-')}"
        return spellings.get(field, f"{option} {field.removeprefix('layout.')}")

    return spell
