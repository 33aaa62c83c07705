"""Launch scripts as plans: read, or run by the user's own shell with nothing started."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import lcm
from pathlib import Path
from typing import TypeVar

from moewright.api.advising import advise_job, has_times, judge_advised_job
from moewright.api.comparison import summarize_plan
from moewright.api.requests import read_hardware, translate_fields
from moewright.api.script_requests import ScriptAdditions, gather_requests
from moewright.codec import format_layout
from moewright.codec.foreign import BeyondBudget, budget, read_apart
from moewright.codec.megatron_options import LAYOUT_OPTIONS, field_option
from moewright.diagnosis.advice import Advice
from moewright.diagnosis.judgement import Judgement, add_judgement, judge_plan
from moewright.diagnosis.priced_fixes import Trainer
from moewright.diagnosis.traces.megatron_log import read_log as read_megatron_log
from moewright.intake import catalogue
from moewright.intake.hardware_text import parse_hardware_text
from moewright.intake.megatron.bash import Command, ShellReading, read_commands
from moewright.intake.megatron.called_scripts import (
    SCRIPT_SUFFIXES,
    SUBMITTERS,
    find_called_script,
)
from moewright.intake.megatron.launch import find_launch, refuse_other_task
from moewright.intake.megatron.launch_command import LaunchCommand
from moewright.intake.megatron.launchers import ONE_PROCESS
from moewright.intake.megatron.logged_arguments import rebuild_command
from moewright.intake.megatron.model import require_positions
from moewright.intake.megatron.overrides import ScriptOverrides, parse_script_overrides
from moewright.intake.megatron.read import ScriptJob, interpret_launch, read_launch
from moewright.intake.megatron.script_arguments import complete_refusal
from moewright.intake.megatron.stand_in_programs import RecordedCommand, record_commands
from moewright.search.search import build_plan
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Hardware
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Plan, Verdict
from moewright.spec.record import Record, Row
from moewright.spec.units import is_whole_number, whole_number

_Reading = TypeVar("_Reading")
_NO_OVERRIDES = ScriptOverrides()
_SHELL_SUFFIXES = ("", *SCRIPT_SUFFIXES, ".pbs")


def capture(
    words: Sequence[str],
    *,
    on: str | Hardware,
    model: str = "",
    network: str = "",
    seconds: int = 60,
    overrides: Sequence[str] = (),
) -> ScriptPlan:
    """Plan what a command would train: a shell runs it, and nothing that trains is started.

    Args:
        words: the command, such as ("bash", "run.sh", "1", "2").
        on: count x device, or the device alone: the command states the count.
        model: stands in where the command gives no sizes.
        network: kinds of network in place of the hardware's own.
        seconds: how long the command may take.
        overrides: NAME=VALUE of options, which win over those of the command.

    Raises:
        BadInput: the command starts no training, or its job cannot be planned.
    """
    if not words:
        rule = "is needed: what starts the training"
        nearest = "moewright capture --on H100 -- bash run.sh"
        raise BadInput(Reason(field="command", rule=rule, nearest=nearest))
    commands = tuple(_record_all(words, seconds))
    name = next((word for word in words if word.endswith(".sh")), words[0])
    launch = _find_started(commands, parse_script_overrides(overrides))
    return plan_launch(launch, Path(name), model=model, on=on, network=network)


def read_process(
    pid: int,
    *,
    on: str | Hardware,
    model: str = "",
    network: str = "",
    overrides: Sequence[str] = (),
) -> ScriptPlan:
    """Plan what a running process trains, by its command line and environment in /proc.

    Raises:
        BadInput: there is no such process that may be looked at, or it trains nothing.
    """
    folder = Path("/proc") / str(pid)
    try:
        # Each word ends with a zero byte, the last one too.
        words = folder.joinpath("cmdline").read_text(errors="replace").split("\0")[:-1]
        pairs = folder.joinpath("environ").read_text(errors="replace").split("\0")
    except OSError as error:
        rule = f"cannot be looked at: {error.strerror}"
        raise BadInput(Reason(field="--pid", value=str(pid), rule=rule)) from None
    split = (pair.partition("=") for pair in pairs if pair)
    environment = {name: value for name, _, value in split}
    command = RecordedCommand(words=_with_ranks(words, environment), environment=environment)
    launch = _find_started((command,), parse_script_overrides(overrides))
    return plan_launch(launch, folder, model=model, on=on, network=network)


def read_log(
    log: Path,
    *,
    on: str | Hardware,
    model: str = "",
    network: str = "",
    overrides: Sequence[str] = (),
) -> ScriptPlan:
    """Plan what a log's run trains, by the arguments that Megatron-LM dumped at its start.

    Raises:
        BadInput: the log has no arguments, or they do not say the ranks.
    """
    content = read_megatron_log(log)
    arguments = content.arguments
    if content.sizes and not arguments:
        rule = "is of another trainer than Megatron-LM, and says sizes of its job alone"
        nearest = "moewright diagnose LOG --model MODEL --on DEVICES --layout LAYOUT"
        raise BadInput(Reason(field="--log", value=str(log)[:60], rule=rule, nearest=nearest))
    plan = read_logged_flags(
        arguments, log, model=model, on=on, network=network, overrides=overrides
    )
    if plan is None:
        rule = "has no dump of arguments with the number of ranks"
        raise BadInput(Reason(field="--log", value=str(log)[:60], rule=rule))
    return plan


def _with_ranks(words: Sequence[str], environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return a rank's own command with the torchrun that its environment tells of."""
    world = environment.get("WORLD_SIZE", "")
    # Where it is not set, all ranks are on one node.
    local = environment.get("LOCAL_WORLD_SIZE", world)
    is_rank = not any(word.rpartition("/")[2] == "torchrun" for word in words)
    if not (is_rank and is_whole_number(world) and whole_number(local)):
        return tuple(words)
    nodes = max(1, int(world) // int(local))
    # The first word is Python, which torchrun starts by itself.
    return ("torchrun", f"--nnodes={nodes}", f"--nproc_per_node={local}", *words[1:])


def _record_all(words: Sequence[str], seconds: int) -> Iterator[RecordedCommand]:
    """Yield what a command starts, and what the scripts start that it hands to a scheduler."""
    for command in record_commands(words, seconds=seconds):
        called = find_called_script(list(command.words), None)
        is_submitted = command.words[0] in SUBMITTERS and called is not None and called.path
        if is_submitted and called is not None and Path(called.path).is_file():
            yield from record_commands(("bash", called.path, *called.arguments), seconds=seconds)
        else:
            yield command


def _find_started(commands: Sequence[RecordedCommand], overrides: ScriptOverrides) -> LaunchCommand:
    """Return the first of some commands that trains."""
    started: list[Command] = []
    for command in commands:
        # The words may hold a shell of their own, as in `srun bash -c '...'`.
        reading = read_commands(shlex.join(command.words), command.environment)
        exported = tuple(command.environment.items())
        started += [replace(inner, exported=exported) for inner in reading.commands]
    return find_launch(ShellReading(commands=tuple(started)), overrides=overrides)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ScriptPlan(Record):
    """The plan that a launch script states; `notes` say what was read otherwise than written.

    `options` names the options and the variables of the environment that the script sets, and
    `values` are all of them with their words; those of an option that is not read are not known.
    """

    plan: Plan
    notes: tuple[str, ...]
    options: tuple[str, ...] = ()
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def title(self) -> str:
        """Return the notes and the title of the plan."""
        return "\n".join((*self.notes, self.plan.title()))

    def to_rows(self) -> list[Row]:
        """Return the rows of the plan."""
        return self.plan.to_rows()


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class BetterLayouts(Record):
    """What makes the job of a plan faster, change by change, and the job with all that helps.

    `plans` are that job and the plan's own. `advice` is one sentence: what all changes gain.
    `changes` are the options of Megatron-LM that make the difference, one line each.
    `change_list` has the price of each change, None where no step is predicted. `judgement` is on
    the plan's own layout.
    """

    own: Plan
    plans: tuple[Plan, ...]
    advice: str
    judgement: Judgement
    changes: tuple[str, ...] = ()
    change_list: Advice | None = None

    def title(self) -> str:
        """Return the advice, and the judgement of the plan's own layout."""
        return add_judgement(self.advice, self.judgement)

    def to_rows(self) -> list[Row]:
        """Return a row for each plan."""
        return [summarize_plan(plan) for plan in self.plans]


def read_flags(
    script: Path | str,
    *,
    on: str | Hardware = "",
    model: str = "",
    arguments: str = "",
    network: str = "",
    strict: bool = False,
    overrides: Sequence[str] = (),
) -> ScriptPlan:
    """Read a Megatron-LM launch script into a plan, estimated on some hardware.

    Args:
        script: the file, or a configuration in YAML of Megatron-LM, Megatron Bridge, NeMo, NeMo-RL,
            verl or Primus; variables that it does not set are taken from the environment.
        on: count x device, or the device alone: the script states the count.
        model: stands in where the script gives no sizes.
        arguments: what stands behind the script's name, as a shell reads it; behind a
            configuration settings such as model.num_layers=4, or options.
        network: kinds of network in place of the hardware's own.
        strict: refuse options that are not Megatron-LM's, which are left out with a note.
        overrides: NAME=VALUE of variables, of options (--num-layers=4; null leaves one out) and of
            settings, which win over those of the script.

    Raises:
        BadInput: an option cannot be read, or the job cannot be planned.

    Example:
        >>> import moewright as mw
        >>> mw.read_flags("run.sh", on="H100").plan.layout.world_size
        8
    """
    try:
        words = shlex.split(arguments)
    except ValueError as error:
        reason = Reason(
            field="--script-args", value=arguments[:60], rule=f"cannot be read: {error}"
        )
        raise BadInput(reason) from None
    inputs = ScriptAdditions(
        devices=on if isinstance(on, str) else "",
        model=model,
        arguments=tuple(words),
        settings=tuple(overrides),
    )

    def read(additions: ScriptAdditions) -> ScriptPlan:
        devices = additions.devices or on
        return _read_once(Path(script), additions, devices, network, strict=strict)

    return _read_completely(inputs, read)


def _read_completely(
    inputs: ScriptAdditions, read: Callable[[ScriptAdditions], _Reading]
) -> _Reading:
    """Return what is read with `inputs`; a refusal asks for all that is lacking.

    Raises:
        BadInput: the job lacks something, or cannot be planned.
    """

    def refuse(additions: ScriptAdditions) -> BadInput | None:
        try:
            read(additions)
        except BeyondBudget:
            raise
        except BadInput as refused:
            return refused
        return None

    try:
        return read(inputs)
    except BeyondBudget:
        # A second reading would be stopped as well.
        raise
    except BadInput as refused:
        raise gather_requests(refused, inputs, refuse) from None


def _read_once(
    script: Path, additions: ScriptAdditions, on: str | Hardware, network: str, *, strict: bool
) -> ScriptPlan:
    """Return the plan of a script with what is given beside it.

    Raises:
        BadInput: it lacks something, or cannot be planned.
    """
    values = parse_script_overrides(additions.settings)
    environment = dict(os.environ)
    model = additions.model
    words = additions.arguments
    try:
        command = read_launch(script, environment, words, values)
        return _plan_strictly(command, script, model, on, network, strict=strict)
    except BeyondBudget:
        raise
    except BadInput as refused:
        refusal = _complete_refusal(refused, script, words)
        # Only now: a script that is read without Slurm's variables says all by itself.
        cluster = _cluster_variables(on, network)
        if not cluster:
            raise refusal from None
        try:
            command = read_launch(script, environment, words, values, cluster=cluster)
            reading = _plan_strictly(command, script, model, on, network, strict=strict)
        except BadInput:
            # The first refusal is of the script as it stands.
            raise refusal from None
    told = " ".join(f"{name}={value}" for name, value in cluster.items())
    return replace(reading, notes=(f"as --on says: {told}", *reading.notes))


@read_apart
def _complete_refusal(refusal: BadInput, script: Path, words: Sequence[str]) -> BadInput:
    """Return what a shell script is refused for: it trains nothing, or what its arguments lack."""
    if script.suffix.lower() not in _SHELL_SUFFIXES or not script.is_file():
        return refusal
    text = script.read_text(encoding="utf-8", errors="replace")
    with budget(script.name):
        other = refuse_other_task(text, script.parent)
        return complete_refusal(refusal, text, words) if other is None else other


def _cluster_variables(on: str | Hardware, network: str) -> dict[str, str]:
    """Return what Slurm would tell a script of the devices; none where no count is given."""
    if not on or (isinstance(on, str) and parse_hardware_text(on).count is None):
        return {}
    hardware = read_hardware(on, network)
    per_node = min(hardware.count, hardware.fabric.devices_per_node)
    nodes = str(-(-hardware.count // per_node))
    return {
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), nodes),
        **dict.fromkeys(("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"), str(per_node)),
    }


def _plan_strictly(
    command: LaunchCommand,
    script: Path,
    model: str,
    on: str | Hardware,
    network: str,
    *,
    strict: bool,
) -> ScriptPlan:
    """Return the plan of a command; with `strict`, of one whose options are all Megatron-LM's.

    Raises:
        BadInput: the command cannot be planned.
    """
    if strict and command.unknown_options:
        rule = "is no option of Megatron-LM"
        raise BadInput(*(Reason(field=name[:60], rule=rule) for name in command.unknown_options))
    return plan_launch(command, script, model=model, on=on, network=network)


def read_logged_flags(
    arguments: Sequence[tuple[str, str]],
    log: Path,
    *,
    model: str,
    on: str | Hardware,
    network: str = "",
    overrides: Sequence[str] = (),
) -> ScriptPlan | None:
    """Read the arguments that a log printed into a plan; None when they do not say the ranks."""
    inputs = ScriptAdditions(
        devices=on if isinstance(on, str) else "", model=model, settings=tuple(overrides)
    )

    def read(additions: ScriptAdditions) -> ScriptPlan | None:
        command = _rebuild_launch(arguments, parse_script_overrides(additions.settings))
        if command is None:
            return None
        devices = additions.devices or on
        return plan_launch(command, log, model=additions.model, on=devices, network=network)

    return _read_completely(inputs, read)


def read_logged_job(arguments: Sequence[tuple[str, str]]) -> ScriptJob | None:
    """Read the arguments that a log printed into a job; None when they do not say the ranks.

    Raises:
        BadInput: they make no job.
    """
    command = _rebuild_launch(arguments)
    if command is None:
        return None
    return interpret_launch(command, world_size=command.world_size, folder=Path())


@read_apart
def _rebuild_launch(
    arguments: Sequence[tuple[str, str]], overrides: ScriptOverrides = _NO_OVERRIDES
) -> LaunchCommand | None:
    with budget("arguments of the log"):
        text = rebuild_command(arguments)
        if not text:
            return None
        launch = find_launch(read_commands(text, {}), overrides=overrides)
        return replace(launch, is_logged=True)


def plan_launch(
    command: LaunchCommand, script: Path, *, model: str, on: str | Hardware, network: str = ""
) -> ScriptPlan:
    """Return the plan of a training command, estimated on the hardware `on` over `network`.

    Raises:
        BadInput: the hardware is not named, has another count than the command's ranks, or none
            where the command does not tell its ranks either.
    """
    if not on:
        rule = "is needed: a script does not name its devices"
        raise BadInput(Reason(field="--on", rule=rule, nearest="--on H100"))
    hardware = read_hardware(on, network)
    states_count = isinstance(on, Hardware) or parse_hardware_text(on).count is not None
    if not states_count:
        if not command.world_size:
            rule = "needs a count: how many devices the script starts is only known where it runs"
            if command.rank_account == ONE_PROCESS:
                rule = f"needs a count: {ONE_PROCESS} (WORLD_SIZE)"
            count = _find_count(command, hardware.fabric.devices_per_node)
            nearest = f"{count}x{on}"
            raise BadInput(Reason(field="--on", value=str(on)[:60], rule=rule, nearest=nearest))
        hardware = replace(hardware, count=command.world_size)
    rank_notes: tuple[str, ...] = ()
    if not command.world_size:
        rank_notes = (f"{hardware.count} ranks as --on says: {command.rank_account}",)
    if command.world_size not in (0, hardware.count):
        ranks = f"{command.nodes} x {command.ranks_per_node} = {command.world_size} ranks"
        ranks += f", {command.rank_account}"
        raise BadInput(
            Reason(
                field="--on",
                value=str(on)[:60],
                rule=f"the script starts {ranks}",
                nearest=f"{command.world_size}x...",
            )
        )
    name = model or command.model
    named = _find_model(name, is_given=bool(model)) if name else None
    job = interpret_launch(
        command, world_size=hardware.count, folder=script.parent, named_model=named
    )
    require_positions(job.model, job.workload.seq_len)
    with translate_fields(to_script_options(script)):
        plan = build_plan(job.model, job.workload, hardware, job.layout)
    return ScriptPlan(
        plan=plan,
        notes=(*rank_notes, *job.notes),
        options=(*command.options, *command.exported),
        values={
            **dict.fromkeys(command.unknown_options, ()),
            **command.foreign_options,
            **command.options,
            **{name: (value,) for name, value in command.exported.items()},
        },
    )


def _find_count(command: LaunchCommand, node_devices: int) -> int:
    """Return the least count of devices that the degrees of a command fill: whole nodes, or one.

    A program that no launcher starts is one process, where its degrees leave it so.
    """
    degrees = {
        axis: whole_number("".join(command.options.get(LAYOUT_OPTIONS[axis], ())), otherwise=1)
        for axis in ("tp", "cp", "pp", "ep", "etp")
    }
    dense = degrees["tp"] * degrees["cp"] * degrees["pp"]
    sparse = degrees["ep"] * degrees["etp"] * degrees["pp"]
    ranks = lcm(dense, sparse)
    if ranks == 1 and command.rank_account == ONE_PROCESS:
        return 1
    return lcm(ranks, command.nodes or 1, node_devices)


def _find_model(name: str, *, is_given: bool) -> ModelSpec:
    """Return a model by name; one that a script names is asked for where it is not known.

    Raises:
        BadInput: it is not known.
    """
    try:
        return catalogue.model(name)
    except BadInput:
        if is_given:
            raise
        rule = "is what the script calls its model, which is not known: give its config.json"
        nearest = "estimate CONFIG.json --from-flags ..."
        raise BadInput(Reason(field="model", value=name[:60], rule=rule, nearest=nearest)) from None


def to_script_options(script: Path) -> Callable[[str], str]:
    """Spell fields as the options of a script that state them."""

    def translate(field: str) -> str:
        option = "--on" if field == "layout.world_size" else field_option(field)
        return f"{script.name}: {option}"

    return translate


def find_better_layouts(plan: Plan, options: Collection[str] = ()) -> BetterLayouts:
    """Price every change of a plan's job that Megatron-LM starts, as a diagnosis of its run does.

    `options` are those that its command has.
    """
    if not has_times(plan):
        return BetterLayouts(
            own=plan,
            plans=(plan,),
            advice=f"nothing that is priced here: {plan.estimate.untimed}",
            judgement=judge_plan(plan),
        )
    advised = advise_job(
        plan,
        trainer=Trainer.MEGATRON,
        options=frozenset(options),
        must_shrink=plan.estimate.verdict is Verdict.OOM,
    )
    advice = advised.advice
    lines = advice.setting_lines()
    if not plan.hardware.device.kind.runs_cuda:
        lines = (f"Megatron-LM does not run on {plan.hardware.device.name}: no options to write",)
        advice = replace(advice, write="", leave_out="", export="")
    after = advised.after
    return BetterLayouts(
        own=plan,
        plans=(plan,) if after == plan else (after, plan),
        advice=_describe_gain(plan, after),
        judgement=judge_advised_job(advised),
        changes=lines,
        change_list=advice,
    )


def _describe_gain(plan: Plan, after: Plan) -> str:
    """Say what a job with all changes that help gains over the plan's own."""
    does_not_fit = plan.estimate.verdict is Verdict.OOM
    if after == plan and does_not_fit:
        return f"nothing: no layout fits {plan.hardware.count} devices"
    if after == plan:
        return "nothing that is planned here: the script's layout comes first"
    name = format_layout(after.layout)
    if does_not_fit:
        return f"{name} fits, the script's layout does not"
    gain = plan.estimate.step_s / after.estimate.step_s - 1
    return f"{name}: {gain:.1%} more tokens/s than the script's, by estimate"
