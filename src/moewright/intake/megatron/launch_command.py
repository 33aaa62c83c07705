"""The words of a launch command, sorted as Megatron-LM's parser sorts them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

from moewright.intake.megatron.deepspeed_experts import EXPERT_OPTIONS
from moewright.intake.megatron.foreign_options import (
    FOREIGN_OPTIONS,
    FOREIGN_VALUES,
)
from moewright.intake.megatron.launchers import count_ranks
from moewright.intake.megatron.options import (
    WHOLE_NUMBER,
    MegatronOption,
    check_values,
    list_former_defaults,
    option_table,
    take_values,
)
from moewright.intake.megatron.parser_source import (
    TrainerSource,
    find_core_use,
    find_other_package,
    find_own_source,
)
from moewright.intake.megatron.releases import MegatronRelease, find_release
from moewright.intake.megatron.unknown import (
    UNKNOWN_VALUE,
    UnknownValue,
    find_unknown,
)
from moewright.intake.megatron.unread import (
    TrainerOption,
    find_fork_option,
    find_harmless,
    find_topic,
    is_void,
    last_name,
    order_forks,
    read_table,
)
from moewright.spec.errors import BadInput, Reason
from moewright.spec.units import mention, whole_number

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
    r"|local[-_]addr|local[-_]ranks[-_]filter|num_nodes|num_gpus|hostfile|include|exclude"
    r"|num[-_]processes|num[-_]machines|machine[-_]rank|main[-_]process[-_](?:ip|port)|config_file)"
)
_COUNT_OPTION = re.compile(r"nnodes|nproc.*|num[-_].*")
# What only a model with an encoder beside its decoder has.
_ENCODER_OPTIONS = ("--decoder-seq-length", "--decoder-num-layers")
# What only a model without a decoder has, one with an encoder of pictures, and what generates text.
_BIDIRECTIONAL = ("--bert-no-binary-head", "--bert-load", "--vision-pretraining")
_OF_PICTURES = re.compile(r"--(?:\w+-)*(?:vision|img|image|images|video|pixel|pixels)(?:-\w+)*")
_OF_GENERATION = ("--num-tokens-to-generate", "--prompts", "--prompt-file", "--genfile")
# What leaves the training out, "" for any value.
_WITHOUT_TRAINING = (
    ("--skip-train", ""),
    ("--eval-only", ""),
    ("--debug-rollout-only", ""),
    ("--num-rollout", "0"),
    ("--train-iters", "0"),
)
_GONE: Mapping[str, str] = MappingProxyType(
    {
        "--batch-size": "--micro-batch-size",
        "--model-parallel-size": "--tensor-model-parallel-size",
        "--warmup": "--lr-warmup-fraction",
    }
)
_IS_GONE = "is of Megatron-LM before 2021, which says that it is gone"
_NEGATIVE_NUMBER = re.compile(r"-\d+$|-\d*\.\d+$")
_ELLIPSIS = "..."
_TOKENIZER = "--tokenizer-type"
# An option of all parsers of Megatron-LM, and that of layers, which those before 2023 lack.
_LAYERS_MARK = "--num-layers"
_LAYERS = "--transformer-impl"
_DEEPSPEED_MARKS = ("--deepspeed", "--deepspeed-config", "--deepspeed_config", "--zero-stage")
_OF_DEEPSPEED = "--moe-expert-parallel-size"  # an option of its parser alone
# Of the options of DeepSpeed's experts all but the one that only it has.
_SHARED_NAMES = EXPERT_OPTIONS.keys() - {_OF_DEEPSPEED}
_FORK_TABLES = ("pai", "mindspeed", "mindspeed_core", "slime", "miles", "megatron_deepspeed")
# Options that a fork hands on to an engine of generation, whatever their names are.
_HANDED_ON = ("--sglang-", "--vllm-")
# Nearer to an option than this, a name is a typing error and not an option of a fork.
_SIMILAR = 0.88
_NO_DEFAULTS = ("", "None", "False", "True")


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchCommand:
    """A training command: its ranks, its environment and its options with their values.

    Nodes and ranks are 0 where they are only known when the script runs; `foreign_options` are
    those that Megatron-LM's parser does not have and that are known here, `unknown_options` are
    those of forks and settings that nothing here reads. `unknown_words` are variables among the
    words, and files below a configuration, of which only running tells what they hold.
    `written_files` are texts by path that the script writes itself. `model` is the name of the
    model, where a configuration gives no sizes. `rank_account` says who says the ranks, or why they
    are not known. `is_logged` tells that the options are all arguments of a run, as its log has
    them, of whose environment nothing is known.
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
    rank_account: str = ""
    is_logged: bool = False

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


def parse_command(
    words: list[str],
    exported: Mapping[str, str],
    notes: Sequence[str],
    folder: Path | None = None,
    *,
    started_by: Sequence[str] = (),
    scheduled: Mapping[str, str] = MappingProxyType({}),
) -> LaunchCommand:
    """Return the command of the words behind its launcher, with the environment it starts in.

    Options that Megatron-LM lacks are looked for in the trainer's source, which lies around
    `folder`, that of the script. `started_by` are the words up to the launcher, and `scheduled` the
    variables that a scheduler sets in the job.

    Raises:
        BadInput: one Reason a word or value that Megatron-LM's parser does not take.
    """
    parser = _LaunchParser(words, folder)
    parser.notes += notes
    parser.parse()
    return parser.build(exported, started_by, scheduled)


class _LaunchParser:
    """A parser that sorts the words of a launch command into options and their values.

    `folder` is that of the script, by which the source of its trainer is looked for.
    """

    def __init__(self, words: list[str], folder: Path | None) -> None:
        self.words = words
        self.folder = folder
        self.position = 0
        self.current_option = ""
        self.own_source = self._find_own_source()
        self.forks = order_forks(words)
        names = {word.partition("=")[0] for word in words}
        self.names_deepspeed = not names.isdisjoint(_DEEPSPEED_MARKS)
        self.fork_notes: dict[str, list[str]] = {}
        self.table = option_table()
        self.by_dest: dict[str, list[MegatronOption]] = {}
        for option in self.table.values():
            self.by_dest.setdefault(option.dest, []).append(option)
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
        self._take_own_defaults()
        if self.options.get("--num-experts") == ("1",) and self._is_deepspeed():
            del self.options["--num-experts"]
            self.notes.append("--num-experts 1 is a dense model to Megatron-DeepSpeed")
        if self.faults:
            raise BadInput(*self.faults)

    def build(
        self, exported: Mapping[str, str], started_by: Sequence[str], scheduled: Mapping[str, str]
    ) -> LaunchCommand:
        """Return the command with the environment it is started in, and what starts it.

        Raises:
            BadInput: the number of nodes or ranks is no number.
        """
        ranks = count_ranks(
            started_by,
            self.words,
            self.launcher_options,
            {**scheduled, **exported},
            next(iter(self.foreign_options.get("--world-size", ())), ""),
        )
        return LaunchCommand(
            nodes=ranks.nodes,
            ranks_per_node=ranks.per_node,
            rank_account=ranks.account,
            exported=exported,
            options=self.options,
            foreign_options=self.foreign_options,
            unknown_options=tuple(self.unknown_options),
            unknown_words=tuple(self.unknown_words),
            notes=(
                *self.notes,
                *self._note_program(),
                *ranks.notes,
                *(f"{reason}: {' '.join(names)}" for reason, names in self.fork_notes.items()),
            ),
        )

    def _refuse_encoders(self) -> None:
        """Refuse options of what trains no decoder, before others that only such a model has."""
        for word, following in pairwise((*self.words, "")):
            name, equals, value = word.partition("=")
            value = value if equals else following
            if name in _BIDIRECTIONAL:
                rule = "is of a model without a decoder (BERT, pictures), which is not planned here"
                raise BadInput(Reason(field=name, rule=rule))
            if name in _OF_GENERATION:
                rule = "generates text and trains nothing: there is nothing to plan"
                raise BadInput(Reason(field=name, rule=rule))
            if (name.replace("_", "-"), "") in _WITHOUT_TRAINING or (
                name,
                value,
            ) in _WITHOUT_TRAINING:
                rule = "leaves the training out, so that there is nothing to plan; without it"
                raise BadInput(Reason(field=name, rule=rule, nearest=f"--set {name}=null"))
            listed = self.table.get(name)
            is_default = listed is not None and value == listed.default
            if _OF_PICTURES.fullmatch(name) and not is_default:
                rule = "is of a model with an encoder of pictures, which is not planned here"
                raise BadInput(Reason(field=name, rule=rule))
        for word, following in pairwise((*self.words, "")):
            name, equals, value = word.partition("=")
            count = value if equals else following
            if name in _ENCODER_OPTIONS and whole_number(count):
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
        if word.startswith("#"):
            rule = "is no comment where a variable's value becomes words: the trainer gets them all"
            nearest = "an array, in which lines may have comments"
            self.faults.append(Reason(field=word[:60], rule=rule, nearest=nearest))
        elif word == _ELLIPSIS:
            self.notes.append(
                "`...` leaves options out: those it stands for are taken at their defaults"
            )
        elif self._is_placeholder():
            self.notes.append(f"{self.current_option}: {word[:40]} is read as of a placeholder")
        else:
            rule = f"stands behind {previous[:60] or 'the program'} and no option takes it"
            # A word of blanks is one of a backslash that something follows on its line.
            field = word[:60] if word.strip() else "a blank behind a backslash"
            self.faults.append(Reason(field=field, rule=rule))

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
        for name in sorted(names.keys() - told):
            # What a fork calls harmless is said of its own options, not of Megatron-LM's.
            tables = ("megatron",) if name in self.table else (*_FORK_TABLES, "megatron")
            if find_harmless(name, tables) is not None:
                left_out.append(name)
                continue
            nearest = mention("--set {}=...", unknown.name) or f"--set {name}=null"
            rule = f"depends on {unknown.origin}, which only running tells"
            self.faults.append(Reason(field=name[:60], rule=rule, nearest=nearest))
        if left_out:
            shown = " ".join(sorted(left_out))
            self.notes.append(f"left out, for they depend on {unknown.origin}: {shown}")

    def _is_placeholder(self) -> bool:
        """Whether words are of a path that a user still has to write, as in "your data path"."""
        name = self.current_option
        launcher_option = _LAUNCHER_OPTION.fullmatch(name)
        if launcher_option is not None:
            return _COUNT_OPTION.fullmatch(launcher_option[1]) is None
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
        # Forks on Megatron-core call others so: without DeepSpeed they are asked for these.
        is_foreign = name in FOREIGN_OPTIONS or dashed in FOREIGN_OPTIONS
        if dashed in _SHARED_NAMES and not self.names_deepspeed:
            is_foreign = False
        if is_foreign:
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
        is_former = last_name(name) in list_former_defaults()
        if is_former and is_void(name, {word.partition("=")[0] for word in self.words}):
            self.fork_notes.setdefault("of no effect beside the others", []).append(name)
            return
        if name.startswith(_HANDED_ON):
            self.fork_notes.setdefault("of an engine of generation", []).append(name)
            return
        if fork is not None:
            self._take_fork_option(name, fork, values)
            return
        topic = find_topic(name)
        nearest = self._nearest_option(name, _SIMILAR)
        if topic or nearest:
            about = mention(", and sounds of {}", topic)
            rule = f"is no option of Megatron-LM or of a fork that is known here{about}"
            degree = whole_number("".join(values[:1]), otherwise=1)
            if topic == "parallelism" and degree > 1 and not nearest:
                rule += f"; left out, its {degree} is lost"
            nearest = nearest or f"--set {name[:60]}=null"
            self.faults.append(Reason(field=name[:60], rule=rule, nearest=nearest))
        else:
            self.notes.append(f"{name[:60]} is no option of Megatron-LM and is left out")

    def _note_program(self) -> Iterator[str]:
        """Yield a note where the program beside the script is called as one of Megatron-LM's."""
        programs = [word for word in self.words if word.endswith(".py")][:1]
        if self.folder is not None and (package := find_other_package(self.folder, programs)):
            name = Path(programs[0]).name
            yield f"{name} beside the script runs {package}, and is planned as Megatron-LM's own"

    def _find_own_source(self) -> TrainerSource:
        if self.folder is None:
            return TrainerSource(root=None, options={})
        programs = [word for word in self.words if word.endswith(".py")]
        return find_own_source(self.folder, programs[:1])

    def _find_own_option(self, name: str) -> TrainerOption | None:
        """Return an option by the source of the trainer that the script lies in."""
        own = self.own_source.options.get(name)
        if own is None:
            return None
        listed = find_fork_option(name, self.forks) or find_fork_option(own.dest, self.forks)
        trainer = "" if listed is None else listed.trainer
        return TrainerOption(
            trainer=trainer, default=own.default, values=own.values, group=own.group
        )

    def _take_fork_option(self, name: str, fork: TrainerOption, values: Sequence[str]) -> None:
        own = self.own_source.options.get(name)
        spellings = (name, own.dest) if own is not None else (name,)  # --no-x is of x
        covering = (find_harmless(spelled, (fork.trainer,), fork.group) for spelled in spellings)
        harmless = next(filter(None, covering), None)
        topic = find_topic(name)
        is_default = bool(fork.default) and list(values) == [fork.default]
        if is_default:
            self.fork_notes.setdefault(f"of {fork.owner}, at their defaults", []).append(name)
        elif harmless is not None and harmless.noted:
            self.fork_notes.setdefault(harmless.reason, []).append(name)
        elif harmless is not None:
            self.fork_notes.setdefault(f"of {fork.owner}, left out", []).append(name)
        elif about := mention("is about {}", topic) or self._describe_use(name, fork):
            rule = f"is of {fork.owner}, {about}, and cannot be planned here"
            self.faults.append(Reason(field=name, rule=rule, nearest=f"--set {name}=null"))
        else:
            self.fork_notes.setdefault(f"of {fork.owner}, left out", []).append(name)

    def _describe_use(self, name: str, fork: TrainerOption) -> str:
        """Return which file of its trainer's core decides with an option; "" for none."""
        root = self.own_source.root
        own = self.own_source.options.get(name)
        if root is None or own is None:
            return mention("is read by {}", fork.core)
        return mention("is read by {}", find_core_use(root, own.dest))

    def _take_own_defaults(self) -> None:
        """Take the defaults that the script's own trainer has in place of Megatron-LM's."""
        taken = []
        defaults = self._list_own_defaults()
        for name, option in self.table.items():
            default = defaults.get(name, "")
            if option.default in _NO_DEFAULTS or default in _NO_DEFAULTS:
                continue
            if self.options.keys() & {other.name for other in self.by_dest[option.dest]}:
                continue
            is_same = _same_value(default, option.default)
            is_read = find_harmless(name, ("megatron",)) is None
            if is_same or not is_read or any(check_values(option, [default])):
                continue
            self.options[name] = (default,)
            taken.append(f"{name} {default}")
        if taken:
            self.fork_notes[f"defaults of {self._name_own_source()}"] = taken

    def _name_own_source(self) -> str:
        """Return whose defaults stand for what the command leaves out."""
        if self.own_source.root is not None:
            return "the script's own checkout"
        if self._is_deepspeed():
            return "Megatron-DeepSpeed"
        release = self._find_release()
        return f"Megatron-LM {release.tag} ({release.month}), the last with these options"

    def _find_release(self) -> MegatronRelease:
        return find_release(word.partition("=")[0] for word in self.words)

    def _is_deepspeed(self) -> bool:
        is_told = not self.foreign_options.keys().isdisjoint(_DEEPSPEED_MARKS)
        return is_told or _OF_DEEPSPEED in self.own_source.options

    def _list_own_defaults(self) -> Mapping[str, str]:
        """Return the defaults of the script's own trainer, by option.

        They are those of its checkout; where it lies in none and has options of DeepSpeed's, those
        of Megatron-DeepSpeed, and otherwise those of the release that its options are of. Layers
        are a trainer's own where its parser offers no others.
        """
        own = self.own_source.options
        if self.own_source.root is None:
            if self._is_deepspeed():
                table = read_table("megatron_deepspeed")
                return {name: row.default for name, row in table.items()}
            return {_LAYERS: "local", **self._find_release().defaults}
        defaults = {name: option.default for name, option in own.items()}
        has_parser = _LAYERS_MARK in own
        return {_LAYERS: "local", **defaults} if has_parser else defaults

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
        self.launcher_options[name.replace("_", "-")] = inline

    def _take_megatron_option(self, name: str, inline: str | None) -> None:
        option = self.table[name]
        if inline is None:
            following = self._following_words()
            values = take_values(option, following)
            if (
                option.value_count == "1"
                and len(following) > 1
                and all(map(str.isdecimal, following))
            ):
                rule = "takes one value; one for each of some layers cannot be planned here"
                self.faults.append(Reason(field=name, value=" ".join(following)[:60], rule=rule))
                values = following
            self.position += len(values)
            values = values[: len(take_values(option, values))]
        else:
            values = [inline]
        foreign = FOREIGN_VALUES.get((name, next(iter(values), "")))
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
        values = [self._spell_number(name, self._spell_choice(name, value)) for value in values]
        self.options[name] = tuple(values)
        self.faults += check_values(option, values)

    def _spell_choice(self, name: str, value: str) -> str:
        """Return a value as Megatron-LM spells it; forks take other capitals."""
        alike = [c for c in self.table[name].choices if c.casefold() == value.casefold()]
        if len(alike) != 1 or alike[0] == value:
            return value
        self.notes.append(f"{name} {value[:60]} is read as {alike[0]}, as Megatron-LM spells it")
        return alike[0]

    def _spell_number(self, name: str, value: str) -> str:
        """Return a whole number without the fraction that parsers of forks take."""
        is_whole = self.table[name].type == "int" and WHOLE_NUMBER.fullmatch(value)
        if not is_whole:
            return value
        plain = str(int(float(value)))
        self.notes.append(f"{name} {value[:60]} is read as {plain}; Megatron-LM's own parser stops")
        return plain

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


def _same_value(text: str, other: str) -> bool:
    try:
        return float(text) == float(other)
    except ValueError:
        return text == other


def _ends_values(word: str) -> bool:
    return word.startswith("--") or word == _ELLIPSIS
