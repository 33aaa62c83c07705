"""A launch script of Megatron-LM as a job: what --from-flags reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moewright.codec import read_json_data, read_text
from moewright.intake.megatron.arguments import Arguments
from moewright.intake.megatron.bash import read_commands
from moewright.intake.megatron.foreign_options import FOREIGN_OPTIONS, Treatment
from moewright.intake.megatron.layout import read_layout
from moewright.intake.megatron.model import read_model
from moewright.intake.megatron.options import LaunchCommand, find_launch
from moewright.intake.megatron.workload import read_workload
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import Layout, Overlap
from moewright.spec.model import ModelSpec
from moewright.spec.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptJob:
    """A job as a script says it; `notes` are what was taken otherwise than written, one line
    each."""

    model: ModelSpec
    workload: Workload
    layout: Layout
    notes: tuple[str, ...]


def read_launch(
    script: Path, environment: Mapping[str, str], arguments: Sequence[str] = ()
) -> LaunchCommand:
    """The training command of a script, its variables from the script, then from `environment`.
    Raises BadInput."""
    return find_launch(read_commands(read_text(script), environment, arguments))


def interpret_launch(
    command: LaunchCommand, *, world_size: int, folder: Path, named_model: ModelSpec | None = None
) -> ScriptJob:
    """The job of a training command over `world` ranks. `folder`: where a DeepSpeed config would
    lie.

    Raises BadInput for options that contradict each other or cannot be planned here.
    """
    old = tuple(_old(command))
    given = Arguments({**command.options, **{name: () for _, names in old for name in names}})
    found = read_model(given, named_model)
    pipelined = given.integer("--pipeline-model-parallel-size", 1) > 1
    zero = _deepspeed(command, folder, pipelined=pipelined)
    layout, notes = read_layout(given, found.model, world_size, zero)
    notes += tuple(_queues(command.exported.get("CUDA_DEVICE_MAX_CONNECTIONS", ""), layout))
    batch, counted = _batch(given, command, layout)
    workload, said = read_workload(given, layout, batch)
    past = f"not part of a plan: {' '.join(given.unread_names)}" if given.unread_names else ""
    lines = (found.note, *command.notes, *(line for line, _ in old), *notes, *counted, *said, past)
    return ScriptJob(
        model=found.model,
        workload=workload,
        layout=layout,
        notes=tuple(line for line in lines if line),
    )


def _old(command: LaunchCommand) -> Iterator[tuple[str, tuple[str, ...]]]:
    """A note on every option that is not Megatron-LM's, and the options that say it today."""
    for name in command.foreign_options:
        old = FOREIGN_OPTIONS[name]
        if old.treatment is Treatment.REFUSE:
            raise BadInput(Reason(field=name, rule=old.reason))
        means = f": read as {' '.join(old.replacements)}" if old.replacements else ""
        yield f"{name} {old.reason}{means}", old.replacements


def _queues(said: str, layout: Layout) -> Iterator[str]:
    """Whether the hardware queues that the script sets suit what it overlaps. BadInput where
    Megatron-LM stops."""
    name, overlapped = "CUDA_DEVICE_MAX_CONNECTIONS", Overlap.EP in layout.overlap
    if layout.zero == 3 and said == "1":
        rule = "Megatron-FSDP needs more hardware queues than one"
        raise BadInput(Reason(field=name, value=said, rule=rule, nearest="32"))
    if overlapped and said == "1":
        yield f"{name}=1 leaves little of --overlap-moe-expert-parallel-comm: 32"
    elif layout.tp * layout.cp > 1 and said != "1" and layout.zero != 3 and not overlapped:
        yield f"{name} is not 1: before Blackwell Megatron-LM stops at tensor or context parallelism without"


def _whole(command: LaunchCommand, name: str) -> int:
    """The value of a number that Megatron-LM derives by itself; 0 when nobody gives it."""
    value = next(iter(command.foreign_options.get(name, ())), "")
    if name in command.foreign_options and not (value.isdigit() and int(value)):
        raise BadInput(
            Reason(field=name, value=value[:60].strip("\0"), rule="must be a whole number above 0")
        )
    return int(value or 0)


def _batch(given: Arguments, command: LaunchCommand, layout: Layout) -> tuple[int, tuple[str, ...]]:
    """The global batch, held against whatever else the script says of it."""
    model_ranks = layout.tp * layout.cp * layout.pp
    if layout.world_size % model_ranks:
        rule = (
            f"tensor {layout.tp} x context {layout.cp} x pipeline {layout.pp} = {model_ranks} ranks do not divide "
            f"{layout.world_size}"
        )
        raise BadInput(
            Reason(field="--pipeline-model-parallel-size", value=str(layout.pp), rule=rule)
        )
    dp, mbs = layout.dp, layout.mbs
    said = _whole(command, "--data-parallel-size")
    if said and said != dp:
        rule = f"{layout.world_size} ranks / (tensor {layout.tp} x context {layout.cp} x pipeline {layout.pp}) = {dp}"
        raise BadInput(
            Reason(field="--data-parallel-size", value=str(said), rule=rule, nearest=str(dp))
        )
    steps = _whole(command, "--gradient-accumulation-steps")
    if not given.has("--global-batch-size"):
        count = steps or 1
        return mbs * dp * count, (
            f"global batch {mbs * dp * count} = micro-batch {mbs} x data-parallel {dp} x {count}",
        )
    batch = given.integer("--global-batch-size")
    if batch < 1 or batch % (mbs * dp):
        near = max(1, round(batch / (mbs * dp))) * mbs * dp
        rule = f"micro-batch {mbs} x data-parallel {dp} = {mbs * dp} must divide it"
        raise BadInput(
            Reason(field="--global-batch-size", value=str(batch), rule=rule, nearest=str(near))
        )
    if steps and steps * mbs * dp != batch:
        rule = (
            f"{steps} x micro-batch {mbs} x data-parallel {dp} = {steps * mbs * dp}, not --global-batch-size {batch}; "
            f"Megatron-LM derives {batch} / ({mbs} x {dp})"
        )
        right = str(batch // (mbs * dp))
        raise BadInput(
            Reason(
                field="--gradient-accumulation-steps", value=str(steps), rule=rule, nearest=right
            )
        )
    return batch, ()


def _deepspeed(command: LaunchCommand, folder: Path, *, pipelined: bool) -> int | None:
    """ZeRO as DeepSpeed's options say it; None when there are none."""
    names = [
        name
        for name in command.foreign_options
        if FOREIGN_OPTIONS[name].treatment is Treatment.SHARDING
    ]
    if not names:
        return None
    values = {
        name.replace("_", "-"): next(iter(command.foreign_options[name]), "") for name in names
    }
    stage, where = values.get("--zero-stage", ""), "--zero-stage"
    if config := values.get("--deepspeed-config"):
        where, path = f"--deepspeed_config {config}"[:80], folder / config.strip("\0")
        if not path.is_file():
            rule = "Megatron-LM takes no DeepSpeed config, and no such file tells its ZeRO stage: 1 is "
            rule += "--use-distributed-optimizer, 3 is --use-megatron-fsdp (without pipelines)"
            raise BadInput(Reason(field=where, rule=rule, nearest="--use-distributed-optimizer"))
        section = read_json_data(path)
        zero = section.get("zero_optimization", {}) if isinstance(section, dict) else {}
        stage = str(zero.get("stage", 0)) if isinstance(zero, dict) else "0"
    if stage not in ("", "0", "1", "2", "3"):
        raise BadInput(
            Reason(field=where, value=stage[:20], rule="a ZeRO stage is 0, 1, 2 or 3", nearest="1")
        )
    if stage in ("2", "3") and pipelined:
        rule = f"DeepSpeed combines ZeRO-{stage} with no pipeline; with one, shard the optimizer"
        raise BadInput(Reason(field=where, rule=rule, nearest="--use-distributed-optimizer"))
    if stage == "2":
        rule = "sharded gradients beside whole weights (ZeRO-2) cannot be planned here"
        raise BadInput(Reason(field=where, rule=rule, nearest="--use-distributed-optimizer"))
    return int(stage) if stage else None
