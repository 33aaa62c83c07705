"""The command of a script that starts pretrain_gpt.py, split as Megatron-LM's parser splits it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

from moewright.codec import parse_json
from moewright.intake.megatron.bash import Command, ShellReading
from moewright.intake.megatron.bash_builtins import PLAIN_PROGRAMS, DecisionNeeded
from moewright.intake.megatron.called_scripts import find_called_script
from moewright.intake.megatron.config_files import (
    ConfiguredCommand,
    configure,
    configure_words,
    is_configured,
)
from moewright.intake.megatron.foreign_options import (
    FOREIGN_OPTIONS,
    FOREIGN_VALUES,
    is_swift,
    swift_settings,
)
from moewright.intake.megatron.options import (
    check_values,
    option_table,
    take_values,
)
from moewright.intake.megatron.overrides import ScriptOverrides
from moewright.intake.megatron.parser_source import ParsedOption, find_own_options
from moewright.intake.megatron.post_training import is_slime, slime_words
from moewright.intake.megatron.unknown import (
    UNKNOWN_VALUE,
    UnknownValue,
    find_unknown,
    show_unknown,
)
from moewright.intake.megatron.unread import (
    TrainerOption,
    find_fork_option,
    find_harmless,
    find_topic,
    group_names,
    order_forks,
)
from moewright.spec.errors import BadInput, Reason

_PROGRAMS = ("torchrun", "python", "python3", "deepspeed")
_RUNNERS = ("uv",)  # of modules, where they start no program of those
_PRINTERS = ("echo", "printf", "which")
_LAUNCHER_SWITCHES = (
    "--standalone",
    "--no-python",
    "--module",
    "--use-env",
    "--use_env",
    "-m",
    "-u",
    "--force_multi",
)
_LAUNCHER_OPTION = re.compile(
    r"--(nnodes|nproc[-_]per[-_]node|node[-_]rank|master[-_]addr|master[-_]port|rdzv[-_]\w+"
    r"|max[-_]restarts|numa[-_]binding|log[-_]dir|redirects|tee|monitor[-_]interval|start[-_]method|role"
    r"|local[-_]addr|local[-_]ranks[-_]filter|num_nodes|num_gpus|hostfile|include|exclude)"
)
# What DeepSpeed's launcher calls torchrun's options.
_DEEPSPEED_LAUNCHER = {"num-nodes": "nnodes", "num-gpus": "nproc-per-node"}
# A command with one of these trains.
# Programs of Megatron-LM and its forks that run a model without training it.
_OTHER_TASKS = re.compile(
    r"(^|/)tasks/msdp/|text_generation|(^|/)inference/|analyze_data|(^|/)create_doc_index"
    r"|(^|/)tasks/main\.py|pretrain_(bert|t5|ict|retro|vision|vlm|realm)"
    r"|(^|/)\w*(convert|conversion)\w*/"
)
# What names of programs say that change, test or serve a model; _TRAINS is of those that train too.
_OTHER_VERBS = re.compile(
    r"(?<![a-z])(convert\w*|conversion|roundtrip|split|merge|preprocess|tokenize|eval\w*|infer\w*"
    r"|generate\w*|generation\w*|generating|serve\w*|score\w*|predict\w*|export\w*|download\w*|upload\w*|prepare\w*)(?![a-z])"
)
_TRAINS = re.compile(r"train|finetune|sft|dpo|rlhf|grpo")
_TRAINING_OPTIONS = (
    "--num-layers",
    "--tensor-model-parallel-size",
    "--micro-batch-size",
    "--global-batch-size",
)
# What only a model with an encoder beside its decoder has.
_ENCODER_OPTIONS = ("--decoder-seq-length", "--decoder-num-layers")
_GONE: Mapping[str, str] = MappingProxyType(
    {
        "--batch-size": "--micro-batch-size",
        "--model-parallel-size": "--tensor-model-parallel-size",
        "--warmup": "--lr-warmup-fraction",
    }
)
_IS_GONE = "is of Megatron-LM before 2021, which says that it is gone"
_SCHEDULERS = ("srun", "mpirun", "mpiexec", "prun", "jsrun", "aprun")
# What they call the number of processes, of nodes and of processes on each.
_TASKS = ("-n", "-np", "--ntasks", "--np")
_NODES = ("-N", "--nodes")
_TASKS_PER_NODE = ("--ntasks-per-node", "--npernode", "-ppn", "--ppn")
_DISTRIBUTED = "torch.distributed"
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
_ADAPTERS = re.compile(r"--lora[-_](r|rank|alpha|target[-_]modules|load)")
_WITHOUT = "it trains without Megatron-core; name the model and the layout to `estimate`"
_OTHER_TRAINERS = (
    (r"\bverl\.trainer\.", f"is verl's with FSDP: {_WITHOUT}"),
    (r"\bactor_rollout_ref\.", f"is verl's and sets nothing of Megatron: {_WITHOUT}"),
    (r"\bllamafactory-cli train", f"is LLaMA-Factory's: {_WITHOUT}"),
    (r"\bswift (sft|pt|rlhf)\b", f"is ms-swift's without Megatron: {_WITHOUT}"),
    (r"\baxolotl\b.* train|axolotl\.cli", f"is Axolotl's: {_WITHOUT}"),
    (r"\btorchtitan\b", f"is torchtitan's: {_WITHOUT}"),
    (
        r"\byq\b.*MODEL_ARGS",
        "takes its options from a YAML file by yq: give that file, which is read by itself",
    ),
)
# A variable that a script leaves without.
_NEEDED_VARIABLE = re.compile(
    r"\b([A-Z][A-Z0-9_]{2,})\b[^.;A-Z]{0,20}(?:must be|required|not set|unset|missing|is empty)"
)
_NEGATIVE_NUMBER = re.compile(r"-\d+$|-\d*\.\d+$")
_ELLIPSIS = "..."
_TOKENIZER = "--tokenizer-type"
_FORK_TABLES = ("pai", "mindspeed", "mindspeed_core", "slime", "miles", "megatron_deepspeed")
# Options that a fork hands on to an engine of generation, whatever their names are.
_HANDED_ON = ("--sglang-", "--vllm-")
# Nearer to an option than this, a name is a typing error and not an option of a fork.
_SIMILAR = 0.88
_NO_OVERRIDES = ScriptOverrides()
_ALIKE = 0.75


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchCommand:
    """A training command: its ranks, its environment and its options with their values.

    Nodes and ranks are 0 where they are only known when the script runs; `foreign_options` are
    those that Megatron-LM's parser does not have and that are known here, `unknown_options` are
    those of forks and settings that nothing here reads. `unknown_words` are variables among the
    words, and files below a configuration, of which only running tells what they hold.
    `written_files` are texts by path that the
    script writes itself. `model` is the name of the model, where a
    configuration gives no sizes.
    """

    nodes: int
    ranks_per_node: int
    exported: Mapping[str, str]
    options: Mapping[str, tuple[str, ...]]
    foreign_options: Mapping[str, tuple[str, ...]]
    unknown_options: tuple[str, ...]
    notes: tuple[str, ...]
    model: str = ""
    unknown_words: tuple[UnknownValue, ...] = ()
    written_files: Mapping[str, str] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


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
    training = [command for command in reading.commands if _trains(command)]
    if training:
        if named := _match_command(training[0], _OTHER_MODELS):
            raise BadInput(Reason(field="script", rule=named))
        words = _program_arguments(training[0].words) or []
        notes = list(reading.notes)
        if is_slime(words):
            words, slime_notes = slime_words(words)
            notes += slime_notes
        notes += _check_decision(training)
        others = len({command.words for command in training}) - 1
        if others:
            notes.append(
                f"the first of {others + 1} training commands is read, that of line "
                f"{training[0].line}"
            )
        words = overrides.replace_options(words)
        _refuse_adapters(words)
        launch = _parse_command(words, _environment(training[0]), notes, folder)
        if not launch.ranks_per_node:
            nodes, per_node = _count_tasks(training[0].words, scheduled)
            launch = replace(launch, nodes=nodes or launch.nodes, ranks_per_node=per_node)
        return replace(launch, written_files=reading.files)
    for command in reading.commands:
        if command.words[0] not in _PRINTERS and is_swift(command.words):
            environment = _environment(command)
            configured = configure(swift_settings(command.words, environment))
            return parse_configured(configured, environment, reading.notes, overrides)
        words = _program_arguments(command.words) or []
        if is_configured(words):
            environment = _environment(command)
            words = [*words, *overrides.settings]
            configured = configure_words(words, environment, folder or Path())
            return parse_configured(configured, environment, reading.notes, overrides)
    rule = "no command here starts pretrain_gpt.py: torchrun or python with Megatron-LM's options"
    nearest = "moewright capture -- bash SCRIPT"
    programs = [program for program in map(_find_program, reading.commands) if program]
    missing = next(filter(None, map(_missing_script, reading.commands)), "")
    if missing:
        rule += f"; {missing} is started, and is not in the folder of the script"
    other = next(filter(None, map(_find_other_task, reading.commands)), "")
    if other:
        rule += f"; {show_unknown(other)[-80:]} trains no decoder"
        nearest = "" if not missing else nearest
    rules = (*_OTHER_MODELS, *_OTHER_TRAINERS)
    named = next(filter(None, (_match_command(c, rules) for c in reading.commands)), "")
    if named:
        raise BadInput(Reason(field="script", rule=named))
    if not (missing or other or reading.exit_line):
        if programs:
            rule += f"; it starts {show_unknown(programs[0])[-80:]}"
        elif all(command.words[0] in PLAIN_PROGRAMS for command in reading.commands):
            rule += "; it starts no program"
            nearest = "the script that sources it, where there is one"
    if reading.exit_line:
        rule += f"; the script leaves at line {reading.exit_line}"
        printed = _last_words(reading.commands)
        rule += f", saying: {printed}" if printed else ""
        needed = _NEEDED_VARIABLE.search(printed)
        if "usage" in printed.casefold():
            nearest = '--script-args "..."'
        elif needed is not None:
            nearest = f"--set {needed[1]}=..."
    raise BadInput(Reason(field="script", rule=rule, nearest=nearest))


def _refuse_adapters(words: Sequence[str]) -> None:
    """Refuse a command that trains adapters; without their options it trains all weights."""
    names = (word.partition("=")[0] for word in words)
    option = next(filter(_ADAPTERS.fullmatch, names), "")
    if option:
        rule = (
            "trains adapters, which cannot be planned from a script: name the model, the layout "
            "and the adapters in a job file"
        )
        raise BadInput(Reason(field=option, rule=rule, nearest=f"--set {option}=null"))


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
    printed = [" ".join(command.words[1:]) for command in commands if command.words[0] == "echo"]
    usage = [text for text in printed if "usage" in text.casefold()]
    text = next(iter(usage[-1:] + printed[-1:]), "")
    return " ".join(show_unknown(text).split())[:120]


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
    command = _parse_command(words, {**environment, **configured.exported}, told)
    unknown = (*command.unknown_options, *unread)
    missing = tuple(UnknownValue(origin=f"what {file} sets") for file in configured.missing_files)
    return replace(command, unknown_options=unknown, unknown_words=missing, model=configured.model)


def _parse_command(
    words: list[str],
    exported: Mapping[str, str],
    notes: Sequence[str],
    folder: Path | None = None,
) -> LaunchCommand:
    parser = _LaunchParser(words, folder)
    parser.notes += notes
    parser.parse()
    return parser.build(exported)


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
            variables = data.get("env_vars") if isinstance(data, dict) else None
            if isinstance(variables, dict):
                environment |= {key: str(value) for key, value in variables.items()}
    return environment


def _trains(command: Command) -> bool:
    names = {word.partition("=")[0].replace("_", "-") for word in command.words}
    arguments = _program_arguments(command.words)
    is_training = arguments is not None and not names.isdisjoint(_TRAINING_OPTIONS)
    return is_training and not _find_other_task(command)


def _find_other_task(command: Command) -> str:
    """Return the program of a command that runs a model and does not train it; "" for others."""
    program = _find_program(command)
    name = program.rpartition("/")[2].removesuffix(".py").casefold()
    name = name.rpartition(".")[2].replace("_", " ")
    is_verb = _OTHER_VERBS.search(name) is not None and _TRAINS.search(name) is None
    return program if is_verb or _OTHER_TASKS.search(program) else ""


def _find_program(command: Command) -> str:
    """Return the file or the module of Python that a command runs; "" for another command."""
    words = command.words
    if words[0] in _PRINTERS:
        return ""
    suffixes = (".py", ".sh") if "--no-python" in words else (".py",)
    files = (word for word in words if word.endswith(suffixes))
    modules = (
        following
        for word, following in pairwise(words)
        if word == "-m" and not following.startswith("torch.")
    )
    return next(files, "") or next(modules, "")


def _match_command(command: Command, rules: Sequence[tuple[str, str]]) -> str:
    """Return what the first rule says whose mark is in a command; "" where none is."""
    line = " ".join(command.words[:_MOST_WORDS])
    return next((rule for mark, rule in rules if re.search(mark, line)), "")


def _missing_script(command: Command) -> str:
    """Return the script that a command starts and that was not read; "" for another command."""
    called = find_called_script(list(command.words), None)
    return show_unknown(called.path)[:80] if called is not None else ""


def _program_arguments(words: tuple[str, ...]) -> list[str] | None:
    """Return the words behind torchrun, python or deepspeed; None for another command."""
    if words[0] in _PRINTERS:
        return None
    for programs in (_PROGRAMS, _RUNNERS):
        for position, word in enumerate(words):
            if UNKNOWN_VALUE.sub("", word).rpartition("/")[2] in programs:
                return list(words[position + 1 :])
    return None


def _count_tasks(words: Sequence[str], scheduled: Mapping[str, str]) -> tuple[int, int]:
    """Return nodes and ranks of each of `srun -n16 python ...`; 0 where a task is a launcher.

    What srun is not told is as the job has it.
    """
    if not any(word.rpartition("/")[2] in _SCHEDULERS for word in words):
        return 0, 0
    place = next((p for p, word in enumerate(words) if "python" in word.rpartition("/")[2]), 0)
    if not place or any(_DISTRIBUTED in word for word in words[place:]):
        return 0, 0
    tasks = _find_count(words[:place], _TASKS)
    nodes = _find_count(words[:place], _NODES)
    per_node = _find_count(words[:place], _TASKS_PER_NODE)
    if not tasks and any(word.rpartition("/")[2] == "srun" for word in words[:place]):
        nodes = nodes or _number(scheduled, "SLURM_NNODES")
        per_node = per_node or _number(scheduled, "SLURM_NTASKS_PER_NODE")
        tasks = nodes * per_node or _number(scheduled, "SLURM_NTASKS")
    tasks = tasks or nodes * per_node
    nodes = nodes or (tasks // per_node if per_node else 1)
    if not tasks or not nodes or tasks % nodes:
        return 0, 0
    return nodes, tasks // nodes


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name, "")
    return int(text) if text.isdigit() else 0


def _find_count(words: Sequence[str], names: Sequence[str]) -> int:
    """Return the number behind an option of a scheduler, also in `-n16` and `-n=16`; 0 for none."""
    for word, following in pairwise((*words, "")):
        for name in names:
            inline = word.removeprefix(name).removeprefix("=")
            if word == name and following.isdigit():
                return int(following)
            if word.startswith(name) and inline.isdigit():
                return int(inline)
    return 0


class _LaunchParser:
    """A parser that sorts the words of a launch command into options and their values.

    `folder` is that of the script, by which the source of its trainer is looked for.
    """

    def __init__(self, words: list[str], folder: Path | None) -> None:
        self.words = words
        self.folder = folder
        self.position = 0
        self.current_option = ""
        self.own_options: Mapping[str, ParsedOption] | None = None
        self.forks = order_forks(words)
        self.fork_notes: dict[str, list[str]] = {}
        self.table = option_table()
        self.launcher_options: dict[str, str] = {}
        self.options: dict[str, tuple[str, ...]] = {}
        self.foreign_options: dict[str, tuple[str, ...]] = {}
        self.unknown_options: list[str] = []
        self.unknown_words: list[UnknownValue] = []
        self.notes: list[str] = []
        self.faults: list[Reason] = []

    def parse(self) -> None:
        """Sort all words.

        Raises:
            BadInput: one Reason a word or value that Megatron-LM's parser does not take.
        """
        self._refuse_encoders()
        self._refuse_old()
        while self.position < len(self.words):
            word = self.words[self.position]
            self.position += 1
            if not word.startswith("-") or _NEGATIVE_NUMBER.match(word):
                self._take_stray_word(word)
            else:
                self._take_option(word)
        if self.faults:
            raise BadInput(*self.faults)

    def build(self, exported: Mapping[str, str]) -> LaunchCommand:
        """Return the command with the environment it is started in.

        Raises:
            BadInput: the number of nodes or ranks is no number.
        """
        world = next(iter(self.foreign_options.get("--world-size", ())), "")
        return LaunchCommand(
            nodes=self._launcher_count("nnodes", "1"),
            ranks_per_node=self._launcher_count("nproc-per-node", world),
            exported=exported,
            options=self.options,
            foreign_options=self.foreign_options,
            unknown_options=tuple(self.unknown_options),
            unknown_words=tuple(self.unknown_words),
            notes=(
                *self.notes,
                *(f"{reason}: {' '.join(names)}" for reason, names in self.fork_notes.items()),
            ),
        )

    def _refuse_encoders(self) -> None:
        """Refuse options of a model with an encoder, before others that only such a model has."""
        for word, following in pairwise((*self.words, "")):
            name, equals, value = word.partition("=")
            count = value if equals else following
            if name in _ENCODER_OPTIONS and count.isdigit() and int(count):
                rule = "is of a model with an encoder and a decoder (T5), which is not planned here"
                raise BadInput(Reason(field=name, value=count, rule=rule))

    def _refuse_old(self) -> None:
        """Refuse options that Megatron-LM's parser still has to say that they are gone."""
        names = {word.partition("=")[0] for word in self.words}
        gone = [name for name in _GONE if name in names]
        if gone:
            raise BadInput(
                *(Reason(field=name, rule=_IS_GONE, nearest=_GONE[name]) for name in gone)
            )

    def _take_stray_word(self, word: str) -> None:
        """Take a word that is no option's value: the trainer, a module's name, or a fault."""
        previous = self.words[self.position - 2] if self.position > 1 else ""
        if not UNKNOWN_VALUE.sub("", word):
            self._take_unknown_words(word)
            return
        if word.endswith(".py") or previous == "-m" or "pretrain" in word:
            return
        if word == _ELLIPSIS:
            self.notes.append(
                "`...` leaves options out: those it stands for are taken at their defaults"
            )
        elif self._is_placeholder():
            self.notes.append(f"{self.current_option}: {word[:40]} is read as of a placeholder")
        else:
            rule = f"stands behind {previous[:60] or 'the program'} and no option takes it"
            self.faults.append(Reason(field=word[:60], rule=rule))

    def _take_unknown_words(self, word: str) -> None:
        """Take a variable of which only running tells what it holds; an unset one holds nothing.

        Options that it may stand for are asked for where they bear on a plan.
        """
        unknown = find_unknown(word)
        if unknown is None or not unknown.origin:
            return
        if not unknown.words:
            self.unknown_words.append(unknown)
            self.notes.append(
                f"what ${unknown.name} holds depends on {unknown.origin}, and is left out "
                f'(--set {unknown.name}="...")'
            )
            return
        names = dict.fromkeys(
            name.partition("=")[0] for name in unknown.words if name.startswith("--")
        )
        told = {option.partition("=")[0] for option in self.words}
        left_out = []
        for name in names.keys() - told:
            if find_harmless(name, (*_FORK_TABLES, "megatron")) is not None:
                left_out.append(name)
                continue
            nearest = f"--set {unknown.name}=..." if unknown.name else f"--set {name}=null"
            rule = f"depends on {unknown.origin}, which only running tells"
            self.faults.append(Reason(field=name[:60], rule=rule, nearest=nearest))
        if left_out:
            shown = " ".join(sorted(left_out))
            self.notes.append(f"left out, for they depend on {unknown.origin}: {shown}")

    def _is_placeholder(self) -> bool:
        """Whether words are of a path that a user still has to write, as in "your data path"."""
        name = self.current_option
        harmless = find_harmless(name, (*_FORK_TABLES, "megatron")) if name else None
        return harmless is not None and harmless.is_of_files

    def _take_option(self, word: str) -> None:
        name, equals, value = word.partition("=")
        self.current_option = name
        if name in _LAUNCHER_SWITCHES:
            return
        inline = value if equals else None
        dashed = name.replace("_", "-")
        launcher_option = _LAUNCHER_OPTION.fullmatch(name)
        if name in FOREIGN_OPTIONS or dashed in FOREIGN_OPTIONS:
            self._take_foreign_option(name if name in FOREIGN_OPTIONS else dashed, inline)
        elif name in self.table:
            self._take_megatron_option(name, inline)
        elif launcher_option:
            self._take_launcher_option(launcher_option[1], inline)
        elif dashed in self.table:  # Megatron-LLM and others spell all of them so
            self.fork_notes.setdefault("read with dashes", []).append(name)
            self._take_megatron_option(dashed, inline)
        else:
            self._take_unknown_option(name, inline)

    def _take_unknown_option(self, name: str, inline: str | None) -> None:
        """Leave an option out that changes no plan; refuse one that may, or is misspelt."""
        fork = self._find_own_option(name) or find_fork_option(name, self.forks)
        values = [] if inline is None else [inline]
        if inline is None:
            values = self._following_words()
            has_count = fork is not None and fork.values.isdigit()
            if fork is not None and has_count:
                values = values[: int(fork.values)]
            self.position += len(values)
        self.unknown_options.append(name)
        if name.startswith(_HANDED_ON):
            self.fork_notes.setdefault("of an engine of generation", []).append(name)
            return
        if fork is not None:
            self._take_fork_option(name, fork, values)
            return
        topic = find_topic(name)
        nearest = self._nearest_option(name, _SIMILAR if not topic else _ALIKE)
        if topic or nearest:
            about = f", and sounds of {topic}" if topic else ""
            rule = f"is no option of Megatron-LM or of a fork that is known here{about}"
            self.faults.append(Reason(field=name[:60], rule=rule, nearest=nearest))
        else:
            self.notes.append(f"{name[:60]} is no option of Megatron-LM and is left out")

    def _find_own_option(self, name: str) -> TrainerOption | None:
        """Return an option by the source of the trainer that the script lies in."""
        if self.folder is None:
            return None
        if self.own_options is None:
            programs = [word for word in self.words if word.endswith(".py")]
            self.own_options = find_own_options(self.folder, programs[:1])
        own = self.own_options.get(name)
        if own is None:
            return None
        listed = find_fork_option(name, self.forks)
        trainer = "" if listed is None else listed.trainer
        return TrainerOption(
            trainer=trainer, default=own.default, values=own.values, group=own.group
        )

    def _take_fork_option(self, name: str, fork: TrainerOption, values: Sequence[str]) -> None:
        harmless = find_harmless(name, (fork.trainer,), fork.group)
        topic = find_topic(name)
        is_default = bool(fork.default) and list(values) == [fork.default]
        if is_default:
            self.fork_notes.setdefault(f"of {fork.owner}, at their defaults", []).append(name)
        elif harmless is not None and harmless.noted:
            self.fork_notes.setdefault(harmless.reason, []).append(name)
        elif harmless is not None or not topic:
            self.fork_notes.setdefault(f"of {fork.owner}, left out", []).append(name)
        else:
            rule = f"is of {fork.owner}, is about {topic}, and cannot be planned here"
            self.faults.append(Reason(field=name, rule=rule, nearest=f"--set {name}=null"))

    def _nearest_option(self, name: str, cutoff: float) -> str:
        """Return the option that was meant; none that says the opposite."""
        spelled = name.replace("_", "-")
        is_negative = spelled.startswith("--no-")
        names = [
            other.lstrip("-")
            for other in (*self.table, *FOREIGN_OPTIONS)
            if other.startswith("--no-") == is_negative
        ]
        near = get_close_matches(spelled.lstrip("-"), names, n=1, cutoff=cutoff)
        return f"--{near[0]}" if near else ""

    def _take_launcher_option(self, name: str, inline: str | None) -> None:
        if inline is None:
            inline = next(iter(self.words[self.position : self.position + 1]), "")
            self.position += 1
        spelled = name.replace("_", "-")
        self.launcher_options[_DEEPSPEED_LAUNCHER.get(spelled, spelled)] = inline

    def _take_megatron_option(self, name: str, inline: str | None) -> None:
        option = self.table[name]
        if inline is None:
            values = take_values(option, self._following_words())
            self.position += len(values)
        else:
            values = [inline]
        foreign = FOREIGN_VALUES.get((name, values[0] if values else ""))
        choices = option.choices
        is_listed = any(choice.casefold() == (*values, "")[0].casefold() for choice in choices)
        if name == _TOKENIZER and values and not is_listed and foreign is None:
            self.notes.append(f"{name} {values[0][:60]} is no tokenizer of Megatron-LM's")
            return
        if foreign is not None:
            self.notes.append(
                f"{name} {values[0]} is no value of Megatron-LM's: it {foreign.reason}"
            )
            self.options |= foreign.options
            return
        values = [self._spell_choice(name, value) for value in values]
        self.options[name] = tuple(values)
        self.faults += check_values(option, values)

    def _spell_choice(self, name: str, value: str) -> str:
        """Return a value as Megatron-LM spells it; forks take other capitals."""
        alike = [c for c in self.table[name].choices if c.casefold() == value.casefold()]
        if len(alike) != 1 or alike[0] == value:
            return value
        self.notes.append(f"{name} {value[:60]} is read as {alike[0]}, as Megatron-LM spells it")
        return alike[0]

    def _take_foreign_option(self, name: str, inline: str | None) -> None:
        if inline is None:
            values = self._following_words()[: FOREIGN_OPTIONS[name].value_count]
            self.position += len(values)
        else:
            values = [inline]
        self.foreign_options[name] = tuple(values)

    def _following_words(self) -> list[str]:
        """Return the words up to the next option."""
        end = self.position
        while end < len(self.words) and not _ends_values(self.words[end]):
            end += 1
        return self.words[self.position : end]

    def _launcher_count(self, name: str, default: str) -> int:
        """Return a number of torchrun's; 0 where the script does not tell."""
        value = self.launcher_options.get(name, default)
        if value.isdigit():
            return int(value)
        if value and not UNKNOWN_VALUE.search(value) and value not in ("gpu", "auto"):
            rule = "must be a whole number: the layout does not change while training"
            raise BadInput(Reason(field=f"--{name}", value=value[:60], rule=rule))
        return 0


def _ends_values(word: str) -> bool:
    return word.startswith("--") or word == _ELLIPSIS
