"""The command of a script that trains, out of all that it runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

from moewright.codec import parse_json
from moewright.codec.files import as_table
from moewright.intake.megatron.bash import Command, ShellReading
from moewright.intake.megatron.bash_builtins import PLAIN_PROGRAMS, DecisionNeeded
from moewright.intake.megatron.called_scripts import find_called_script
from moewright.intake.megatron.config_files import (
    ConfiguredCommand,
    configure,
    configure_words,
    is_configured,
)
from moewright.intake.megatron.foreign_options import FOREIGN_OPTIONS, is_swift, swift_settings
from moewright.intake.megatron.launch_command import LaunchCommand, parse_command
from moewright.intake.megatron.launchers import PYTHONS, split_launcher
from moewright.intake.megatron.options import option_table
from moewright.intake.megatron.overrides import ScriptOverrides
from moewright.intake.megatron.post_training import is_slime, slime_words
from moewright.intake.megatron.unknown import (
    UNKNOWN_VALUE,
    UnknownValue,
    find_unknown,
    show_unknown,
)
from moewright.intake.megatron.unread import find_fork_option, group_names
from moewright.spec.errors import BadInput, Reason
from moewright.spec.units import mention

_PRINTERS = ("echo", "printf", "which")
# Programs of Megatron-LM and its forks that run a model without training it.
_OTHER_TASKS = re.compile(
    r"(^|/)tasks/msdp/|text_generation|(^|/)inference/|analyze_data|(^|/)create_doc_index"
    r"|(^|/)tasks/main\.py|pretrain_(bert|t5|ict|retro|vision|vlm|realm)"
    r"|(^|/)\w*(convert|conversion)\w*/"
)
# What names of programs say that change, test or serve a model; _TRAINS is of those that train too.
_OTHER_VERBS = re.compile(
    r"(?<![a-z])(convert\w*|conversion|roundtrip|split|merge|preprocess|tokenize|eval\w*|inf(?:er\w*)?"
    r"|hf2\w*|\w*2hf|\w*2mcore|mcore2\w*|\w*2megatron|megatron2\w*|\w*2mg|mg2\w*"
    r"|generate\w*|generation\w*|generating|serve\w*|score\w*|predict\w*|export\w*|download\w*|upload\w*|prepare\w*)(?![a-z])"
)
_TRAINS = re.compile(r"train|finetune|sft|dpo|rlhf|grpo")
# A command with one of these trains.
_TRAINING_OPTIONS = (
    "--num-layers",
    "--tensor-model-parallel-size",
    "--micro-batch-size",
    "--global-batch-size",
)
# What a training is told, of which a program that only shares options with one has nothing.
_TOLD_TO_TRAIN = (
    *("--lr", "--train-iters", "--train-samples", "--train-tokens", "--data-path", "--mock-data"),
    *("--micro-batch-size", "--global-batch-size", "--num-layers", "--load", "--save"),
)
_MOST_WORDS = 200
# Commands of trainers that run no Megatron-core, or not in this way.
_OTHER_MODELS = (
    (
        r"--mm-(model|data)\b|\bmindspeed_mm\b",
        "is MindSpeed-MM's: its models of pictures, video and sound are not planned here; name the "
        "decoder and the layout to `estimate`",
    ),
    (
        r"\baicb\.py\b|\bworkload_generator\.",
        "is AICB's, which sends the messages of a training and trains nothing; name the model and "
        "the layout to `estimate`",
    ),
)
_WITH_FILES = (
    (
        r"\bprimus/(cli/main|train)\.py\b",
        "is Primus', which takes its settings from a YAML file: give that file (--config), "
        "which is read by itself",
    ),
)
_WITHOUT = "it trains without Megatron-core; name the model and the layout to `estimate`"
_OTHER_TRAINERS = (
    (r"\bverl\.trainer\.", f"is verl's with FSDP: {_WITHOUT}"),
    (r"\bactor_rollout_ref\.", f"is verl's and sets nothing of Megatron: {_WITHOUT}"),
    (
        r"\bskyrl(_train)?\.|\btrainer\.policy\.model\.path=",
        f"is SkyRL's and sets nothing of Megatron: {_WITHOUT}",
    ),
    (r"\bllamafactory-cli train", f"is LLaMA-Factory's: {_WITHOUT}"),
    (r"\bswift (sft|pt|rlhf)\b", f"is ms-swift's without Megatron: {_WITHOUT}"),
    (r"\baxolotl\b.* train|axolotl\.cli", f"is Axolotl's: {_WITHOUT}"),
    (r"\btorchtitan\b|--job\.config[_-]file\b", f"is torchtitan's: {_WITHOUT}"),
    (
        r"\byq\b.*MODEL_ARGS",
        "takes its options from a YAML file by yq: give that file, which is read by itself",
    ),
)
_YAML_PROGRAM = "what yq prints"
_MODULES = ("-m", "--module")
# Options of launchers behind which the program stands.
_NO_VALUE = ("--no-python", "--standalone", "--use-env", "--use_env", "--module")
_SEVERAL = 3  # options of a command, by which its trainer is told
# A program of Python that a line of a script names.
_PROGRAM_FILE = re.compile(r"[^\s\"'=;:]+\.py\b")
# A variable that a script leaves without.
_NEEDED_VARIABLE = re.compile(
    r"\b([A-Z][A-Z0-9_]{2,})\b[^.;A-Z]{0,20}(?:must be|required|not set|unset|missing|is empty)"
    r"|\b(?:[Pp]lease|[Mm]ust) (?:set|provide|export|specify) ([A-Z][A-Z0-9_]{2,})\b"
)
_COLOURS = re.compile(r"\\(?:033|e|x1b)\[[\d;]*m|\\n")  # as echo -e and printf have them
_NO_OVERRIDES = ScriptOverrides()


def find_launch(
    reading: ShellReading,
    folder: Path | None = None,
    overrides: ScriptOverrides = _NO_OVERRIDES,
    *,
    scheduled: Mapping[str, str] = MappingProxyType({}),
) -> LaunchCommand:
    """Return the command that trains, out of all commands of a script.

    Configurations that it names are looked for in `folder`; `scheduled` are the variables that a
    scheduler sets in the script's job.

    Raises:
        BadInput: no command does, or one of its options is not legal.
    """
    if reading.fault is not None:
        # What stands behind the training changes nothing of it.
        ending = f"{reading.fault}; what stands behind the training is not read"
        reading = replace(reading, notes=(*reading.notes, ending))
    training = [command for command in reading.commands if _trains(command, folder)]
    if training:
        return _read_training(training, reading, folder, overrides, scheduled)
    for command in reading.commands:
        if command.words[0] not in _PRINTERS and is_swift(command.words):
            environment = _environment(command)
            configured = configure(swift_settings(command.words, environment))
            return parse_configured(configured, environment, reading.notes, overrides)
        started_by, words = split_launcher(command.words) or ([], [])
        if is_configured(words):
            environment = _environment(command)
            configured = configure_words(
                [*words, *overrides.settings], environment, folder or Path()
            )
            configured = _add_launcher(configured, started_by, words)
            return parse_configured(configured, environment, reading.notes, overrides)
    raise reading.fault or BadInput(_explain_refusal(reading, folder))


def _read_training(
    training: Sequence[Command],
    reading: ShellReading,
    folder: Path | None,
    overrides: ScriptOverrides,
    scheduled: Mapping[str, str],
) -> LaunchCommand:
    """Return the first of the commands that have Megatron-LM's own options."""
    first = training[0]
    if named := _match_command(first, (*_OTHER_MODELS, *_WITH_FILES)):
        raise BadInput(Reason(field="script", rule=named))
    started_by, words = split_launcher(first.words) or ([], [])
    notes = list(reading.notes)
    if is_slime(words):
        words, slime_notes = slime_words(words)
        notes += slime_notes
    notes += _check_decision(training)
    others = len({command.words for command in training}) - 1
    if others:
        notes.append(
            f"the first of {others + 1} training commands is read, that of line {first.line}"
        )
    words = overrides.replace_options(words)
    launch = parse_command(
        words, _environment(first), notes, folder, started_by=started_by, scheduled=scheduled
    )
    return replace(launch, written_files=reading.files)


def _explain_refusal(reading: ShellReading, folder: Path | None) -> Reason:
    """Return why no command of a script can be planned, with what would tell more."""
    rule = "no command here starts pretrain_gpt.py: torchrun or python with Megatron-LM's options"
    nearest = "moewright capture -- bash SCRIPT"
    programs = [program for program in map(_find_program, reading.commands) if program]
    missing = next(filter(None, map(_missing_script, reading.commands)), "")
    if missing:
        rule += f"; {missing} is started, and is not in the folder of the script"
    other = next(filter(None, (_find_other_task(line, folder) for line in reading.commands)), "")
    if other:
        rule += f"; {show_unknown(other)[-80:]} trains no decoder"
        nearest = "" if not missing else nearest
    rules = (*_OTHER_MODELS, *_WITH_FILES, *_OTHER_TRAINERS)
    named = next(filter(None, (_match_command(c, rules) for c in reading.commands)), "")
    if named:
        return Reason(field="script", rule=named)
    request = next(filter(None, map(_ask_options, reading.commands)), None)
    if request is not None and not (missing or other or reading.exit_line):
        return request
    if not (missing or other or reading.exit_line):
        trainer = next(filter(None, map(_find_trainer, reading.commands)), "")
        if trainer:
            rule = (
                f"starts {show_unknown(trainer)[-80:]} with options that Megatron-LM has not: a "
                "trainer of its own; name the model and the layout to `estimate`"
            )
            return Reason(field="script", rule=rule)
        if programs:
            rule += f"; it starts {show_unknown(programs[0])[-80:]}"
        elif all(command.words[0] in PLAIN_PROGRAMS for command in reading.commands):
            rule += "; it starts no program"
            nearest = "the script that sources it, where there is one"
    if reading.exit_line:
        rule += f"; the script leaves at line {reading.exit_line}"
        printed = _last_words(reading.commands)
        rule += mention(", saying: {}", printed)
        told = list(reading.deciding)
        needed = _NEEDED_VARIABLE.search(printed)
        if needed is not None:
            told.append(needed[1] or needed[2])
        names = dict.fromkeys(name for name in told if not _is_argument(name))
        if names:
            nearest = " ".join(f"--set {name}=..." for name in names)
        elif told or re.search(r"usage|\bargument", printed, re.IGNORECASE):
            nearest = '--script-args "..."'
    return Reason(field="script", rule=rule, nearest=nearest)


def _ask_options(command: Command) -> Reason | None:
    """Return what asks for the options of a trainer, where they stand in variables not set here."""
    program = _find_program(command)
    if not program or _TRAINS.search(program) is None or _has_own_options(command):
        return None
    # Behind an option a variable is its value.
    whole = (
        word
        for before, word in pairwise(command.words)
        if not UNKNOWN_VALUE.sub("", word) and not _takes_value(before)
    )
    unknown = [value for value in map(find_unknown, whole) if value is not None]
    named = {value.name: value for value in unknown if value.name}
    if not named:
        return None
    name, value = list(named.items())[-1]
    if _YAML_PROGRAM in value.origin:
        rule = f"{name} is {value.origin}: give that YAML file, which is read by itself"
        return Reason(field="script", rule=rule[:200])
    rule = f"{show_unknown(program)[-80:]} takes its options from {', '.join(named)}, not set here"
    nearest = f'--set {name}="--num-layers ..."'
    if _is_argument(name):
        nearest = '--script-args "..."'
    return Reason(field="script", rule=rule[:200], nearest=nearest)


def _takes_value(word: str) -> bool:
    option = option_table().get(word)
    is_switch = option is not None and option.value_count == "0"
    return word.startswith("--") and not is_switch


def _find_trainer(command: Command) -> str:
    """Return the program of a command that trains by options of its own; "" for another."""
    program = _find_program(command)
    is_trainer = bool(program) and _TRAINS.search(program) is not None
    return program if is_trainer and _has_own_options(command) else ""


def _has_own_options(command: Command) -> bool:
    """Whether most options of a command are of no fork of Megatron-LM that is known here."""
    words = command.words
    program = _find_program(command)
    place = words.index(program) if program in words else -1
    names = {word.partition("=")[0] for word in words[place + 1 :] if word.startswith("--")}
    of_forks = [
        name
        for name in names
        if name in option_table() or name in FOREIGN_OPTIONS or find_fork_option(name)
    ]
    # Every trainer has --bf16 and --seed.
    return len(names) >= _SEVERAL and len(of_forks) * 2 < len(names)


def _is_argument(name: str) -> bool:
    return name.isdigit() or name in ("#", "@", "*")


def _check_decision(training: Sequence[Command]) -> list[str]:
    """Return a note where the first training runs only if something holds.

    Raises:
        DecisionNeeded: it is one of several, of which only running tells which one runs.
    """
    first = training[0]
    if first.decision is None:
        return []
    if len({command.words for command in training if command.decision is not None}) > 1:
        raise DecisionNeeded(first.decision, first.line)
    return [f"line {first.line}: this training depends on {first.decision.origin}"]


def _last_words(commands: Sequence[Command]) -> str:
    """Return what a script prints before it leaves, the line of its usage first; "" for nothing."""
    printers = ("echo", "printf")
    printed = [" ".join(c.words[1:]) for c in commands if c.words[0] in printers]
    usage = [text for text in printed if "usage" in text.casefold()]
    text = next(iter(usage[-1:] + printed[-1:]), "")
    return " ".join(_COLOURS.sub(" ", show_unknown(text)).split())[:120]


def _add_launcher(
    configured: ConfiguredCommand, started_by: Sequence[str], words: Sequence[str]
) -> ConfiguredCommand:
    """Return a configured command with the ranks that its launcher says, where it says none."""
    is_plain = not started_by or started_by[-1].rpartition("/")[2] in PYTHONS
    is_told = any(word.startswith(("--nnodes", "--nproc")) for word in configured.words)
    if is_plain or is_told:
        return configured
    is_program = (word.endswith(".py") or word == "-m" for word in words)
    place = next((at for at, is_there in enumerate(is_program) if is_there), 0)
    return replace(configured, words=(*words[:place], *configured.words))


def parse_configured(
    configured: ConfiguredCommand,
    environment: Mapping[str, str],
    notes: Sequence[str] = (),
    overrides: ScriptOverrides = _NO_OVERRIDES,
) -> LaunchCommand:
    """Return the command of a configuration, with what it sets and what is not read in it.

    Raises:
        BadInput: one of its options is not legal.
    """
    unread = configured.unread
    told = [*notes, *configured.notes]
    if unread:
        told.append(f"not read: {', '.join(group_names(unread))}")
    words = overrides.replace_options(configured.words)
    command = parse_command(words, {**environment, **configured.exported}, told)
    unknown = (*command.unknown_options, *unread)
    missing = tuple(UnknownValue(origin=f"what {file} sets") for file in configured.missing_files)
    return replace(command, unknown_options=unknown, unknown_words=missing, model=configured.model)


def _environment(command: Command) -> dict[str, str]:
    """Return what a command is started in, with what Ray is told to set."""
    environment = dict(command.exported)
    for word in command.words:
        name, _, text = word.partition("=")
        if name == "--runtime-env-json":
            try:
                data = parse_json(UNKNOWN_VALUE.sub("", text), where=name)
            except BadInput:
                continue
            variables = as_table(data).get("env_vars")
            if isinstance(variables, dict):
                environment |= {key: str(value) for key, value in variables.items()}
    return environment


def _trains(command: Command, folder: Path | None) -> bool:
    names = {word.partition("=")[0].replace("_", "-") for word in command.words}
    is_started = command.words[0] not in _PRINTERS and split_launcher(command.words) is not None
    is_training = is_started and not names.isdisjoint(_TRAINING_OPTIONS)
    has_variables = any(not UNKNOWN_VALUE.sub("", word) for word in command.words)
    if not has_variables and names.isdisjoint(_TOLD_TO_TRAIN):
        is_training = is_training and _TRAINS.search(_find_program(command)) is not None
    return is_training and not _find_other_task(command, folder)


def _find_other_task(command: Command, folder: Path | None) -> str:
    """Return the program of a command that runs a model and does not train it; "" for others.

    A program that lies beside the script, in `folder`, is what the folder's name says too.
    """
    program = _find_program(command)
    spellings = [program]
    if folder is not None and program and "/" not in program and (folder / program).is_file():
        spellings.append(f"{folder.resolve().name}/{program}")
    name = program.rpartition("/")[2].removesuffix(".py").casefold()
    name = name.rpartition(".")[2].replace("_", " ")
    is_verb = _OTHER_VERBS.search(name) is not None and _TRAINS.search(name) is None
    return next((path for path in spellings if is_verb or _OTHER_TASKS.search(path)), "")


def refuse_other_task(text: str, folder: Path | None) -> BadInput | None:
    """Return the refusal of a script all of whose programs do something else than train.

    None where one may train, or where the script names no program.
    """
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    programs = dict.fromkeys(_PROGRAM_FILE.findall("\n".join(lines)))
    commands = (Command(words=("python", program), exported=(), line=0) for program in programs)
    others = [_find_other_task(command, folder) for command in commands]
    if not others or not all(others):
        return None
    rule = f"it starts no training: {others[0][-80:]} trains no decoder"
    return BadInput(Reason(field="script", rule=rule))


def _find_program(command: Command) -> str:
    """Return the file or the module of Python that a command runs; "" for another command."""
    words = command.words
    if words[0] in _PRINTERS:
        return ""
    suffixes = (".py", ".sh") if "--no-python" in words else (".py",)
    for before, word in pairwise(("", *words)):
        is_module = before in _MODULES and not word.startswith(("torch.", "-"))
        # Behind an option of the trainer a file is its value.
        is_file = word.endswith(suffixes) and not _is_trainer_option(before)
        if is_module or is_file:
            return word
    return next((word for word in words if word.endswith(suffixes)), "")


def _is_trainer_option(word: str) -> bool:
    return word.startswith("--") and "=" not in word and word not in _NO_VALUE


def _match_command(command: Command, rules: Sequence[tuple[str, str]]) -> str:
    """Return what the first rule says whose mark is in a command; "" where none is."""
    line = " ".join(command.words[:_MOST_WORDS])
    return next((rule for mark, rule in rules if re.search(mark, line)), "")


def _missing_script(command: Command) -> str:
    """Return the script that a command starts and that was not read; "" for another command."""
    called = find_called_script(list(command.words), None)
    return show_unknown(called.path)[:80] if called is not None else ""
