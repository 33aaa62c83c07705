"""A launch script of Megatron-LM as a job: what --from-flags reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import MappingProxyType

from moewright.codec import read_text
from moewright.codec.foreign import budget, read_apart
from moewright.codec.megatron_options import LAYOUT_OPTIONS, OVERLAP_OPTIONS, WORKLOAD_OPTIONS
from moewright.intake.megatron import adapters
from moewright.intake.megatron.bash import read_commands
from moewright.intake.megatron.config_files import configure_file
from moewright.intake.megatron.deepspeed_config import DeepSpeedConfig, read_deepspeed_config
from moewright.intake.megatron.deepspeed_experts import (
    refuse_without_deepspeed,
    translate_experts,
)
from moewright.intake.megatron.directives import read_directives
from moewright.intake.megatron.foreign_options import FOREIGN_OPTIONS, Treatment, translate_options
from moewright.intake.megatron.launch import find_launch, parse_configured
from moewright.intake.megatron.launch_command import LaunchCommand
from moewright.intake.megatron.layout import read_layout
from moewright.intake.megatron.manifests import is_manifest, read_manifest
from moewright.intake.megatron.model import read_model
from moewright.intake.megatron.options import Arguments, ask_value
from moewright.intake.megatron.overrides import ScriptOverrides
from moewright.intake.megatron.settings import SUFFIXES
from moewright.intake.megatron.trainer import SCHEDULE, read_batch_schedule
from moewright.intake.megatron.unknown import find_unknown, show_unknown
from moewright.intake.megatron.unread import (
    account_for_options,
    find_harmless,
    load_tables,
)
from moewright.intake.megatron.workload import read_workload
from moewright.spec.errors import BadInput, Reason
from moewright.spec.extensions import ExtensionPoint, call_extension, list_extensions
from moewright.spec.layout import Layout, Overlap
from moewright.spec.model import ModelSpec
from moewright.spec.units import whole_number
from moewright.spec.workload import Workload

# What forks call the options of adapters.
_ADAPTER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "--lora-rank": adapters.RANK,
        "--lora-dim": adapters.RANK,
        "--target-modules": adapters.TARGETS,
    }
)
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_GLOBAL_BATCH = WORKLOAD_OPTIONS["global_batch"]
_DATA_PARALLEL = "--data-parallel-size"
_ACCUMULATION_STEPS = "--gradient-accumulation-steps"
_NO_OVERRIDES = ScriptOverrides()
_OUTPUTS = (".log", ".out", ".err", ".txt")
# How lines of a run begin, or what each step prints.
_PRINTED = re.compile(
    r"^(\[?\d{4}-\d\d-\d\d[ T,]|\S*\s*\[(INFO|WARNING)\])|elapsed time per iteration", re.MULTILINE
)
_CONFIGURATIONS = (*SUFFIXES, ".toml", ".json")
# Of each of these a plan needs one, or they are at their defaults.
_SIZES = ("--num-layers",)
_NEEDED = (
    _SIZES,
    ("--tensor-model-parallel-size", "--pipeline-model-parallel-size"),
    ("--micro-batch-size", "--global-batch-size"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptJob:
    """The job of a launch script; `notes` say what is not taken as the script has it."""

    model: ModelSpec
    workload: Workload
    layout: Layout
    notes: tuple[str, ...]


def read_launch(
    script: Path,
    environment: Mapping[str, str],
    arguments: Sequence[str] = (),
    overrides: ScriptOverrides = _NO_OVERRIDES,
    *,
    cluster: Mapping[str, str] = MappingProxyType({}),
) -> LaunchCommand:
    """Return the training command of a script, a configuration in YAML or a manifest.

    A reader that an installed package adds is asked first; it returns a command of Megatron-LM as
    a shell would run it, or None for a file that is not its trainer's.

    Variables come from the script, then from `environment`; `arguments` are the words that would
    stand behind the script's name on the command line, or settings such as model.num_layers=4.
    `overrides` win over all of them. `cluster` are variables of a job that neither the script asks
    its scheduler for nor `environment` holds.

    Raises:
        BadInput: the script cannot be read, or starts no training.
        BeyondBudget: reading it takes more than any script needs.
    """
    load_tables()
    return _read_apart(script, environment, arguments, overrides, cluster)


@read_apart
def _read_apart(
    script: Path,
    environment: Mapping[str, str],
    arguments: Sequence[str],
    overrides: ScriptOverrides,
    cluster: Mapping[str, str],
) -> LaunchCommand:
    with budget(script.name):
        added = (
            call_extension(ExtensionPoint.READERS, name, script)
            for name in list_extensions(ExtensionPoint.READERS)
        )
        text = next((command for command in added if command is not None), None)
        if text is None and script.suffix.lower() == ".py":
            raise _refuse_program(script)
        job_variables = dict(cluster)
        if text is None and script.suffix.lower() in SUFFIXES:
            manifest_text = read_text(script)
            if is_manifest(manifest_text):
                manifest = read_manifest(manifest_text, where=script.name)
                text = manifest.command
                job_variables |= manifest.variables
        if text is None and script.suffix.lower() in _CONFIGURATIONS:
            variables = {**cluster, **environment, **overrides.variables}
            words = (*arguments, *overrides.settings_of_files())
            return parse_configured(
                configure_file(script, variables, words), {}, overrides=overrides
            )
        if text is None:
            text = read_text(script)
            if script.suffix.lower() in _OUTPUTS and _PRINTED.search(text):
                raise _refuse_output(script)
        told = {**job_variables, **read_directives(text), **environment}
        scheduled = {**told, **overrides.variables}
        try:
            reading = read_commands(
                text, told, arguments, script=script, constants=overrides.variables
            )
            return find_launch(reading, script.parent, overrides, scheduled=scheduled)
        except BadInput:
            if script.suffix.lower() not in _OUTPUTS or text.startswith("#!"):
                raise
            raise _refuse_output(script) from None


def _refuse_program(script: Path) -> BadInput:
    """Return the refusal of a program in Python: what to give, or to have started, in its place.

    What only defines a configuration starts nothing, and is not offered to be captured.
    """
    text = read_text(script)
    rule = "is a program, which is not run here"
    if _DICTIONARIES.search(text):
        rule = (
            "is a configuration of dictionaries, as InternEvo and XTuner take: they run no "
            "Megatron-core; name the model and the layout to `estimate`"
        )
        return BadInput(Reason(field=script.name, rule=rule))
    if _STARTS.search(text):
        rule += (
            "; give the configuration that it writes, such as the run_config.yaml of a checkpoint, "
            "or have it started"
        )
        nearest = f"moewright capture -- python {script.name}"
        return BadInput(Reason(field=script.name, rule=rule, nearest=nearest))
    rule += ": it defines functions and starts nothing"
    if _RECIPE.search(text):
        rule += "; give what one of its recipes writes, the run_config.yaml of a checkpoint"
    else:
        rule += "; give the script that starts the training"
    return BadInput(Reason(field=script.name, rule=rule))


_DICTIONARIES = re.compile(r"(?m)^(model|parallel)\s*=\s*dict\(")
_STARTS = re.compile(r"(?m)^if __name__|^(main|train|launch|run)\(")
_RECIPE = re.compile(r"megatron\.bridge|nemo\.collections\.llm|ConfigContainer")


def _refuse_output(script: Path) -> BadInput:
    rule = "is what a run printed, and no script"
    nearest = f"moewright capture --log {script.name}"
    return BadInput(Reason(field=script.name, rule=rule, nearest=nearest))


def interpret_launch(
    command: LaunchCommand, *, world_size: int, folder: Path, named_model: ModelSpec | None = None
) -> ScriptJob:
    """Return the job of a training command over `world_size` ranks.

    `folder` is the folder that the path of a DeepSpeed config is relative to; `named_model` is
    taken where the command gives no sizes.

    Raises:
        BadInput: options contradict each other or cannot be planned here.
    """
    notes_on_forks, replaced = _read_foreign_options(command)
    arguments = Arguments(
        {**command.options, **replaced},
        is_planned=lambda name: find_harmless(name, ("megatron",)) is None,
    )
    _check_unknown_words(command, arguments, has_model=named_model is not None)
    script_model = read_model(arguments, named_model)
    fine_tuning, adapter_notes = adapters.read_adapters(
        _name_adapters(command.foreign_options), is_moe=script_model.model.moe is not None
    )
    is_pipelined = arguments.size(LAYOUT_OPTIONS["pp"]) > 1
    zero, deepspeed, zero_notes = _read_deepspeed(command, folder, is_pipelined=is_pipelined)
    if deepspeed is not None:
        deepspeed.check_precision(arguments.options)
        arguments.extend(deepspeed.offload_options())
    layout, layout_notes = read_layout(arguments, script_model.model, world_size, zero)
    queue_notes: tuple[str, ...] = ()
    if not command.is_logged:
        queues = command.exported.get(_QUEUES, "")
        queue_notes = _check_queues(queues, layout, is_deepspeed=zero is not None)
    _check_data_parallel(command, layout)
    if deepspeed is not None:
        told = arguments.integer(_GLOBAL_BATCH)
        deepspeed.check_batch(told or layout.mbs * layout.dp, layout.mbs, layout.dp)
    batch, batch_notes = _read_global_batch(arguments, command, layout)
    workload, workload_notes = read_workload(arguments, layout, batch, command.exported)
    workload = replace(workload, fine_tuning=fine_tuning)
    approximations, void, left = account_for_options(
        arguments.unread_names, arguments.options, command.foreign_options
    )
    # A log has every argument, so that those without meaning for a plan are not worth a line.
    unread_notes = approximations if command.is_logged else (*approximations, void, left)
    notes = (
        script_model.note,
        *command.notes,
        *notes_on_forks,
        *adapter_notes,
        *zero_notes,
        *layout_notes,
        *queue_notes,
        *batch_notes,
        *workload_notes,
        *unread_notes,
    )
    return ScriptJob(
        model=script_model.model,
        workload=workload,
        layout=layout,
        notes=tuple(note for note in notes if note),
    )


def _read_foreign_options(
    command: LaunchCommand,
) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """Return notes on options that are not Megatron-LM's, and the options to read instead."""
    notes: list[str] = []
    dependent: dict[str, tuple[str, ...]] = {}
    replaced: dict[str, tuple[str, ...]] = {}
    experts: dict[str, tuple[str, ...]] = {}
    is_deepspeed = False
    for name, values in command.foreign_options.items():
        option = FOREIGN_OPTIONS[name]
        if option.treatment is Treatment.REFUSE:
            raise BadInput(Reason(field=name, rule=option.reason))
        if option.treatment is Treatment.ADAPTERS:
            continue
        is_deepspeed = is_deepspeed or option.treatment is Treatment.SHARDING
        if option.treatment is Treatment.EXPERTS:
            experts[name] = values
            continue
        if option.treatment is Treatment.DEPENDENT:
            dependent[name] = values
            continue
        note = f"{name} {option.reason}"
        stood_for = option.list_replaced(values)
        unknown = find_unknown(" ".join(values))
        if option.meanings and unknown is not None:
            raise BadInput(ask_value(name, unknown))
        if option.meanings and next(iter(values), "") not in option.meanings:
            rule = f"{option.reason}, and is one of {', '.join(option.meanings)}"
            raise BadInput(Reason(field=name, value=" ".join(values)[:60], rule=rule))
        if stood_for:
            words = [word for other, own in stood_for.items() for word in (other, *own)]
            note += f": read as {' '.join(words)}"
            replaced |= stood_for
        notes.append(note)
    translated, more = translate_options(dependent, {**command.options, **replaced})
    notes += more
    if not is_deepspeed:
        refuse_without_deepspeed(experts)
    else:
        of_experts, more = translate_experts(experts, command.options)
        translated |= of_experts
        notes += more
    return notes, {**replaced, **translated}


def _name_adapters(options: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the options of adapters by one name each; a rank of 0 asks for none."""
    named = {_ADAPTER_NAMES.get(name, name): values for name, values in options.items()}
    if named.get(adapters.RANK) == ("0",):
        return {}
    return named


def _check_unknown_words(command: LaunchCommand, arguments: Arguments, *, has_model: bool) -> None:
    """Check that what a plan needs stands in the words of a command that are known.

    Raises:
        BadInput: it does not, and may stand in a variable of which only running tells.
    """
    for unknown in command.unknown_words:
        for names in _NEEDED:
            is_told = any(arguments.has(name) for name in names)
            if is_told or (has_model and names == _SIZES):
                continue
            rule = f"is not said here, and may be in {unknown.origin}, which is not here"
            nearest = f"--set {names[0]}=..."
            if unknown.name:
                rule = (
                    f"is not in the command, and may stand in ${unknown.name}, which depends on "
                    f"{unknown.origin}"
                )
                nearest = f'--set {unknown.name}="{names[0]} ..."'
            raise BadInput(Reason(field=names[0], rule=rule, nearest=nearest))


def _check_queues(queues: str, layout: Layout, *, is_deepspeed: bool) -> tuple[str, ...]:
    """Return a note where the script's number of hardware queues does not suit its overlaps.

    DeepSpeed shards without Megatron-FSDP, and asks for no number of them.

    Raises:
        BadInput: Megatron-LM would stop at this number.
    """
    overlaps_experts = Overlap.EP in layout.overlap
    if layout.zero >= 2 and queues == "1" and not is_deepspeed:
        rule = "Megatron-FSDP needs more hardware queues than one"
        raise BadInput(Reason(field=_QUEUES, value=queues, rule=rule, nearest="32"))
    if overlaps_experts and queues == "1":
        return (f"{_QUEUES}=1 leaves little of {OVERLAP_OPTIONS[Overlap.EP]}: 32",)
    needs_one_queue = layout.tp * layout.cp > 1 and layout.zero < 2 and not overlaps_experts
    if needs_one_queue and queues != "1":
        return (
            f"{_QUEUES} is not 1: before Blackwell Megatron-LM stops at tensor or context "
            "parallelism without",
        )
    return ()


def _read_derived_number(command: LaunchCommand, name: str) -> int:
    """Return a number that Megatron-LM derives by itself; 0 where the command does not give it."""
    if name not in command.foreign_options:
        return 0
    value = next(iter(command.foreign_options[name]), "")
    if not whole_number(value):
        shown = value[:60].strip("\0")
        raise BadInput(Reason(field=name, value=shown, rule="must be a whole number above 0"))
    return int(value)


def _check_data_parallel(command: LaunchCommand, layout: Layout) -> None:
    """Check that the degrees fill the ranks, and data parallelism as the script may give it."""
    degrees = f"tensor {layout.tp} x context {layout.cp} x pipeline {layout.pp}"
    model_ranks = layout.tp * layout.cp * layout.pp
    if layout.world_size % model_ranks:
        rule = f"{degrees} = {model_ranks} ranks do not divide {layout.world_size}"
        name, degree, nearest = _nearest_degree(layout)
        raise BadInput(
            Reason(field=LAYOUT_OPTIONS[name], value=str(degree), rule=rule, nearest=nearest)
        )
    data_parallel = _read_derived_number(command, _DATA_PARALLEL)
    if data_parallel and data_parallel != layout.dp:
        raise BadInput(
            Reason(
                field=_DATA_PARALLEL,
                value=str(data_parallel),
                rule=f"{layout.world_size} ranks / ({degrees}) = {layout.dp}",
                nearest=str(layout.dp),
            )
        )


def _nearest_degree(layout: Layout) -> tuple[str, int, str]:
    """Return which of the degrees is to be another, its value, and the nearest that fills ranks."""
    degrees = {"pp": layout.pp, "tp": layout.tp, "cp": layout.cp}
    for name, degree in degrees.items():
        others = prod(degrees.values()) // degree
        for smaller in range(degree - 1, 0, -1):
            if not layout.world_size % (others * smaller):
                return name, degree, str(smaller)
    return "pp", layout.pp, ""


def _read_global_batch(
    arguments: Arguments, command: LaunchCommand, layout: Layout
) -> tuple[int, tuple[str, ...]]:
    """Return the global batch, and a note where it follows from other sizes."""
    dp = layout.dp
    mbs = layout.mbs
    steps = _read_derived_number(command, _ACCUMULATION_STEPS)
    if arguments.has(SCHEDULE):
        seq_len = arguments.size(WORKLOAD_OPTIONS["seq_len"])
        full = read_batch_schedule(arguments, seq_len).global_batch
        told = arguments.integer(_GLOBAL_BATCH, full)
        if told != full:
            rule = f"is not the batch of {full} that {SCHEDULE} ends with"
            raise BadInput(
                Reason(field=_GLOBAL_BATCH, value=str(told), rule=rule, nearest=str(full))
            )
        return full, ()
    if not arguments.has(_GLOBAL_BATCH):
        count = steps or 1
        batch = mbs * dp * count
        note = f"global batch {batch} = micro-batch {mbs} x data-parallel {dp} x {count}"
        return batch, (note,)
    batch = arguments.integer(_GLOBAL_BATCH)
    if batch < 1 or batch % (mbs * dp):
        nearest = max(1, round(batch / (mbs * dp))) * mbs * dp
        rule = f"micro-batch {mbs} x data-parallel {dp} = {mbs * dp} must divide it"
        raise BadInput(
            Reason(field=_GLOBAL_BATCH, value=str(batch), rule=rule, nearest=str(nearest))
        )
    if steps and steps * mbs * dp != batch:
        rule = (
            f"{steps} x micro-batch {mbs} x data-parallel {dp} = {steps * mbs * dp}, "
            f"not {_GLOBAL_BATCH} {batch}; Megatron-LM derives {batch} / ({mbs} x {dp})"
        )
        nearest = batch // (mbs * dp)
        raise BadInput(
            Reason(field=_ACCUMULATION_STEPS, value=str(steps), rule=rule, nearest=str(nearest))
        )
    return batch, ()


def _read_deepspeed(
    command: LaunchCommand, folder: Path, *, is_pipelined: bool
) -> tuple[int | None, DeepSpeedConfig | None, tuple[str, ...]]:
    """Return the ZeRO stage of DeepSpeed's options, its configuration, and notes.

    The stage is None where there are none.
    """
    values = {
        name.replace("_", "-"): next(iter(value), "")
        for name, value in command.foreign_options.items()
        if FOREIGN_OPTIONS[name].treatment is Treatment.SHARDING
    }
    stage = values.get("--zero-stage", "")
    field = "--zero-stage"
    path = values.get("--deepspeed-config")
    config = None
    notes: tuple[str, ...] = ()
    if path and stage and not _is_there(command, folder, path):
        notes = (
            f"DeepSpeed's config is not beside the script: ZeRO-{stage} is as --zero-stage says",
        )
    elif path:
        field = f"--deepspeed_config {show_unknown(path)}"[:80]
        text = _written(command, path) or _read_config_text(folder / path.strip("\0"), field)
        name = Path(show_unknown(path)).name[:40]
        config = read_deepspeed_config(text, f"--deepspeed_config {name}")
        stage = config.stage or stage
        notes = config.notes
    if stage not in ("", "0", "1", "2", "3"):
        rule = "a ZeRO stage is 0, 1, 2 or 3"
        raise BadInput(Reason(field=field, value=stage[:20], rule=rule, nearest="1"))
    if stage in ("2", "3") and is_pipelined:
        rule = f"DeepSpeed combines ZeRO-{stage} with no pipeline; with one, shard the optimizer"
        raise BadInput(Reason(field=field, rule=rule, nearest="--use-distributed-optimizer"))
    return int(stage) if stage else None, config, notes


def _is_there(command: LaunchCommand, folder: Path, config: str) -> bool:
    return bool(_written(command, config)) or (folder / config.strip("\0")).is_file()


def _written(command: LaunchCommand, path: str) -> str:
    """Return the text of a file that the script writes before it trains; "" where it does not."""
    return command.written_files.get(path.removeprefix("./"), "")


def _read_config_text(path: Path, field: str) -> str:
    """Return the text of a DeepSpeed config.

    Raises:
        BadInput: it is not there.
    """
    if path.is_file():
        return read_text(path)
    rule = (
        "is not beside the script, so that its ZeRO stage is not known; without DeepSpeed 1 is "
        "--use-distributed-optimizer, 3 is --use-megatron-fsdp (without pipelines)"
    )
    raise BadInput(Reason(field=field, rule=rule, nearest="--set --zero-stage=1"))
