"""The words that no reader takes: known to change no plan, or named, or a reason to refuse.

The tables in data/trainers have the options of each trainer, data/no_plan.toml those that change no
plan. A word that is in neither is named; one that sounds of what a plan consists of refuses.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase, translate
from functools import cache
from importlib import resources
from typing import Any

from moewright.intake.megatron.options import list_former_defaults, option_table
from moewright.intake.megatron.packaged_tables import read_rows
from moewright.intake.megatron.releases import list_releases
from moewright.intake.megatron.settings import Value, is_unset, spell_value
from moewright.spec.errors import BadInput, Reason
from moewright.spec.units import mention

_DATA = "moewright.intake.megatron"
# What words are about, by what stands in their names between underscores.
_TOPICS = {
    "parallelism": r"parallel\w*|pipeline\w*|pipe|shard\w*|fsdp\w*|tp|pp|cp|ep|etp|dp|vpp"
    # Not what is zero: means, centred gammas, gradients.
    r"|zero(?!_(mean|init|cent|grad|loss|shot))\d?|stage|stages|world_size|nnodes|num_nodes|nproc\w*|devices|overlap\w*|hetero|mesh|meshes",
    "precision": r"fp\d+\w*|bf16|mxfp\w*|nvfp\w*|float\d*|half|int8|\w*dtype|precision|amp"
    r"|quant\w*",
    "the optimizer": r"optim\w*|adam\w*|muon|moment\w*|ddp|main_params|main_grads|lora\w*|peft",
    "experts": r"moe\w*|expert\w*|dispatch\w*|deepep|router?|routing|topk|capacity|grouped|gemm",
    "attention": r"att\w*|heads?|q|k|v|qk|qkv|kv|mla|rope|rotary\w*|window\w*|position\w*|mask",
    "the batch": r"batch\w*|seq\w*|sequence\w*|length|packing|accum\w*|mbs|gbs|bsz|tokens",
    "memory": r"recompute\w*|checkpoint(ed)?_(activation|layer)\w*|activations?|offload\w*|swap"
    r"|graphs?",
    "the model": r"layers?|hidden|ffn|intermediate|vocab\w*|norm\w*|bias|embed\w*|mtp|gated?|width"
    r"|swiglu|glu|mamba|hybrid|residual|kernels?|fus\w+|dropout",
}
# Sections of configurations that speak of texts, tasks and reports, and not of the model.
_ASIDE = (
    *("data", "env", "environment", "logger", "logging", "wandb", "swanlab"),
    *("reward", "rewards", "evaluation", "eval"),
)
# Topics that a name only sounds of where it is about a value of training, and about no size.
_VALUED_TOPICS = ("the optimizer", "experts", "attention", "the model")
_OF_VALUES = re.compile(
    r"(?<![a-z0-9])(lr|rate|init\w*|std|mean|loss\w*|coeff?|coefficient|update|decay|warmup|eps"
    r"|epsilon|betas?\d?|temperature|clip\w*|log\w*|metrics?|seed)(?![a-z0-9])"
)
_OF_SIZES = re.compile(
    r"(?<![a-z0-9])(num|size|sizes|layers?|dims?|hidden|width|heads?|experts|topk|rank|ranks|dtype"
    r"|offload\w*|fus\w+|kernels?|freq)(?![a-z0-9])"
)
# Last parts of names that say nothing without the part before them.
_GENERIC = (
    *("name", "type", "enabled", "enable", "stage", "value", "kind", "impl", "size", "mode"),
    *("num", "degree", "strategy", "method", "use", "format", "policy", "implementation"),
)
# Topics whose sizes make a plan.
_SIZED_TOPICS = ("parallelism", "the batch", "the model", "experts", "attention")
_NOTHING = ("false", "0", "0.0", "no", "off", "none")
# Whose options stand in commands.
_FORKS = (
    *("pai", "mindspeed", "mindspeed_core", "linear_moe", "slime", "flagscale"),
    *("miles", "megatron_deepspeed"),
)
# What trainers call the options of each optimizer after; those of Adam stand for all.
_OF_OPTIMIZER = re.compile(
    r"(muon|sgd|lion|soap|shampoo|ademamix|adafactor|galore|apollo|lamb|came)_"
)
_OF_PICTURES = re.compile(r"(^|_)(vision|vit|images?|img|videos?|pixels?)(_|$)")
_NEAR = 0.85
_MOST_NAMED = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Harmless:
    """Options that change no plan, and why.

    `names` are patterns of last names with underscores, `settings` of full names, `groups` are
    those that a parser's source puts options in; they count for the trainers in `tables`, for all
    where there are none. No option of a group is covered whose name is about one of `but_topics`.
    What is `noted` changes something that a plan leaves out, and is said each time; what
    `is_of_files` has paths for values.
    """

    reason: str
    names: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    but_topics: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    noted: bool = False
    is_of_files: bool = False

    def covers(self, name: str, tables: Sequence[str], group: str = "") -> bool:
        """Whether an option of these trainers, in this group of their parser, is among them."""
        if group.casefold() in self.groups and find_topic(name) not in self.but_topics:
            return True
        if self.tables and not set(self.tables) & set(tables):
            return False
        return _matches(last_name(name), self.names) or _matches(name, self.settings)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerOption:
    """An option that a trainer has besides Megatron-LM's; `values` is as argparse's nargs.

    `core` is the file of the model, the optimizer or their messages that reads it, "" for none.
    """

    trainer: str
    default: str
    values: str
    group: str = ""
    core: str = ""

    @property
    def owner(self) -> str:
        """Return the repository that it was read in."""
        return _repositories().get(self.trainer, "the script's own checkout")


@cache
def _compile(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, patterns)))


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a name is as one of the patterns of a shell."""
    return bool(patterns) and _compile(patterns).match(name) is not None


def last_name(name: str) -> str:
    """Return the last part of a setting's or an option's name as an argument is named."""
    return name.rpartition(".")[2].lstrip("-").replace("-", "_")


@dataclass(frozen=True, kw_only=True, slots=True)
class VoidOptions:
    """Options that say nothing without one of `needs`, or with one of `excluded_by`."""

    names: tuple[str, ...]
    needs: tuple[str, ...] = ()
    excluded_by: tuple[str, ...] = ()

    def covers(self, name: str, others: Container[str]) -> bool:
        """Whether an option says nothing among others."""
        if not _matches(last_name(name), self.names):
            return False
        lacks = bool(self.needs) and not any(other in others for other in self.needs)
        return lacks or any(other in others for other in self.excluded_by)


def load_tables() -> None:
    """Read what every script is read by, once in this process, for the forks that read scripts."""
    list_former_defaults()
    list_releases()
    order_forks(())
    find_harmless("", _FORKS)


@cache
def _read_no_plan() -> Mapping[str, Any]:
    text = resources.files(_DATA).joinpath("data/no_plan.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def list_void() -> tuple[VoidOptions, ...]:
    """Return the options that say nothing without another one, or beside it."""
    return tuple(
        VoidOptions(
            names=tuple(entry["names"]),
            needs=tuple(entry.get("needs", ())),
            excluded_by=tuple(entry.get("excluded_by", ())),
        )
        for entry in _read_no_plan()["void"]
    )


@cache
def list_harmless() -> tuple[Harmless, ...]:
    """Return the closed list of options that change no plan."""
    return tuple(
        Harmless(
            reason=entry["reason"],
            names=tuple(entry.get("names", ())),
            settings=tuple(entry.get("settings", ())),
            groups=tuple(entry.get("groups", ())),
            but_topics=tuple(entry.get("but_topics", ())),
            tables=tuple(entry.get("tables", ())),
            noted=entry.get("noted", False),
            is_of_files=entry.get("is_of_files", False),
        )
        for entry in _read_no_plan()["option"]
    )


@cache
def read_table(trainer: str) -> Mapping[str, TrainerOption]:
    """Return the options of a trainer by name, as its repository has them."""
    return {
        row["name"]: TrainerOption(
            trainer=trainer,
            default=row["default"],
            values=row["values"],
            group=row["group"],
            core=row.get("core", ""),
        )
        for row in read_rows(f"trainers/{trainer}.csv")
    }


@cache
def _repositories() -> Mapping[str, str]:
    return {row["trainer"]: row["repository"] for row in read_rows("trainers/commits.csv")}


def order_forks(words: Iterable[str]) -> tuple[str, ...]:
    """Return the forks of Megatron-LM, those first that know most options of a command."""
    names = {word.partition("=")[0] for word in words if word.startswith("--")}
    names -= option_table().keys()
    return tuple(sorted(_FORKS, key=lambda trainer: -len(names & read_table(trainer).keys())))


def find_fork_option(name: str, forks: Sequence[str] = ()) -> TrainerOption | None:
    """Return the option of the first fork of Megatron-LM that has it; None where none here does."""
    spellings = (name, f"--{last_name(name).replace('_', '-')}", f"--{last_name(name)}")
    for trainer in forks or _FORKS:
        for spelled in spellings:
            if option := read_table(trainer).get(spelled):
                return option
    return None


def is_void(name: str, others: Container[str]) -> bool:
    """Whether an option says nothing beside others."""
    return any(entry.covers(name, others) for entry in list_void())


def is_of_other_optimizer(name: str, optimizer: str) -> bool:
    """Whether an option is called after an optimizer that a training does not take."""
    match = _OF_OPTIMIZER.match(last_name(name))
    return match is not None and match[1] not in optimizer.casefold()


@cache
def _last_names(trainer: str) -> frozenset[str]:
    return frozenset(map(last_name, read_table(trainer)))


@cache
def _megatron_names() -> frozenset[str]:
    own = {option.dest for option in option_table().values()}
    return frozenset(own | set(map(last_name, option_table())))


def find_harmless(name: str, tables: Sequence[str], group: str = "") -> Harmless | None:
    """Return the entry of an option that changes no plan; None for another.

    `group` is that of the trainer's parser, where its source is known.
    """
    return next((entry for entry in list_harmless() if entry.covers(name, tables, group)), None)


def is_known(name: str, tables: Sequence[str], sections: Sequence[str] = ()) -> bool:
    """Whether one of the trainers has this option: by its last name in one of `sections`."""
    if re.fullmatch(r"_\w+_", last_name(name)):
        return True  # what a dump has to be read again: _target_
    if sections:
        if not any(_is_inside(name, section) for section in sections):
            return False
        last = last_name(name)
        return last in _megatron_names() or any(last in _last_names(table) for table in tables)
    return any(name in read_table(table) for table in tables)


def _is_of_core(name: str, sections: Sequence[str]) -> bool:
    """Whether a name stands in a section of Megatron-core's fields, and is one of them."""
    is_inside = any(_is_inside(name, section) for section in sections)
    last = last_name(name)
    return is_inside and (last in _megatron_names() or last in _last_names("megatron_core"))


def _is_inside(name: str, section: str) -> bool:
    """Whether a name stands right in a section, in whose name * is one part."""
    pattern = re.escape(section).replace(r"\*", "[^.]+")
    return re.fullmatch(pattern, name.rpartition(".")[0]) is not None


def find_topic(name: str) -> str:
    """Return what a name is about that a plan consists of; "" where it sounds of nothing such."""
    parts = [part for part in name.lstrip("-").replace("-", "_").split(".") if part]
    is_aside = len(parts) > 1 and parts[0] in _ASIDE
    last = parts[-1] if parts else ""
    if last.casefold() in _GENERIC and len(parts) > 1:
        last = f"{parts[-2]}_{last}"
    spelled = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", last).casefold()
    is_value = _OF_VALUES.search(spelled) is not None and _OF_SIZES.search(spelled) is None
    for topic, words in _TOPICS.items():
        if (is_value or is_aside) and topic in _VALUED_TOPICS:
            continue
        if re.search(rf"(?<![a-z0-9])(?:{words})(?![a-z0-9])", spelled):
            return topic
    return ""


def says_nothing(value: Value) -> bool:
    """Whether a value is what a whole dump holds for things that are off."""
    return is_unset(value) or (isinstance(value, str) and value.strip().lower() in _NOTHING)


def sort_settings(
    left: Mapping[str, Value],
    tables: Sequence[str],
    *,
    sections: Sequence[str],
    trainer: str,
    known_names: Iterable[str] = (),
    named: Sequence[str] = (),
    option_sections: Sequence[str] = (),
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (the names that are unread, notes) of leaves that no reader took.

    `sections` are those in which the trainer's names stand by their last part; where there are
    none, its tables have full names. Megatron-core's own names stand in `option_sections`. Those of
    a pattern in `named` are named and never refuse.

    Raises:
        BadInput: one of them sets something that a plan consists of.
    """
    unread: list[str] = []
    refused: list[Reason] = []
    noted: list[str] = []
    for name, value in left.items():
        harmless = find_harmless(name, tables, _group(name, tables))
        # A name of an older release, which a note tells of, is in no table of today's names.
        is_listed = harmless is not None and harmless.noted and last_name(name) in harmless.names
        has_name = is_known(name, tables, sections) or _is_of_core(name, option_sections)
        has_name = has_name or is_listed
        if has_name and harmless is not None:
            if harmless.noted and not says_nothing(value):
                noted.append(f"{name}: {harmless.reason}")
            continue
        is_default = _is_default(name, value, tables) and not _is_plan_size(name, value)
        if has_name and (says_nothing(value) or is_default):
            continue
        topic = find_topic(name)
        is_named = any(fnmatchcase(name, pattern) for pattern in named)
        if topic and not is_named and not says_nothing(value):
            refused.append(_refuse(name, value, topic, trainer, has_name, known_names))
        else:
            unread.append(name)
    if refused:
        raise BadInput(*refused)
    return tuple(unread), tuple(noted)


def account_for_options(
    names: Iterable[str], options: Mapping[str, tuple[str, ...]], foreign: Iterable[str]
) -> tuple[tuple[str, ...], str, str]:
    """Return notes on Megatron-LM's own options that no reader of a plan looked at.

    The first are of those that a plan leaves out although they change something, then one of those
    without effect, and one of those that change no plan. `foreign` are the options beside them that
    are not Megatron-LM's.

    Raises:
        BadInput: one of them sets something that a plan consists of.
    """
    table = option_table()
    left: list[str] = []
    void: list[str] = []
    noted: list[str] = []
    refused: list[Reason] = []
    for name in names:
        if name not in table or " ".join(options[name]) == table[name].default:
            continue
        others = (*options, *foreign)
        if is_void(name, others):
            void.append(name)
            continue
        harmless = find_harmless(name, ("megatron",))
        topic = find_topic(name)
        if harmless is not None and harmless.noted:
            noted.append(f"{name}: {harmless.reason}")
        elif harmless is None and topic and not says_nothing(" ".join(options[name]) or "on"):
            refused.append(_refuse_option(name, " ".join(options[name])[:60], topic, options))
        else:
            left.append(name)
    if refused:
        raise BadInput(*refused)
    return (
        tuple(noted),
        mention("of no effect beside the others: {}", " ".join(void)),
        mention("not part of a plan: {}", " ".join(left)),
    )


def _refuse_option(name: str, value: str, topic: str, options: Container[str]) -> Reason:
    """Return why an option cannot be planned: a model without experts has none of their options."""
    if name.startswith(("--moe-", "--expert-")) and "--num-experts" not in options:
        rule = f"is missing beside {name} {value}: the model, or its experts, are not here"
        return Reason(field="--num-experts", rule=rule, nearest="--set --num-experts=...")
    rule = f"is about {topic} and cannot be planned here; left out, the rest is"
    return Reason(field=name, value=value, rule=rule, nearest=f"--set {name}=null")


def _group(name: str, tables: Sequence[str]) -> str:
    """Return the group that a trainer's source puts a name in; "" for none."""
    options = (read_table(table).get(last_name(name)) for table in tables)
    return next((option.group for option in options if option is not None), "")


@cache
def _megatron_defaults() -> Mapping[str, str]:
    """Return the default of each argument of Megatron-LM that takes one number."""
    numbers = (option for option in option_table().values() if option.type in ("int", "float"))
    return {option.dest: option.default for option in numbers if option.value_count == "1"}


def _is_plan_size(name: str, value: Value) -> bool:
    """Whether a leaf is a size of a plan that is not Megatron-LM's own default.

    That no reader took it means that it stands where none looks; that the trainer's own files have
    the same size there does not make it the plan's.
    """
    default = _megatron_defaults().get(last_name(name))
    is_other = default is not None and isinstance(value, str) and value != default
    return is_other and find_topic(name) in _SIZED_TOPICS


def _is_default(name: str, value: Value, tables: Sequence[str]) -> bool:
    plain = value if isinstance(value, str) else "[" + ",".join(value) + "]"
    return any(
        option.default.casefold() == plain.casefold()
        for table in tables
        for option in (read_table(table).get(name) or read_table(table).get(last_name(name)),)
        if option is not None and option.default
    )


def _refuse(
    name: str, value: Value, topic: str, trainer: str, has_name: bool, known_names: Iterable[str]
) -> Reason:
    shown = spell_value(value)[:60].replace("\0", "$")
    if has_name:
        rule = f"is about {topic} and cannot be planned here; set to null it is left out"
        return Reason(field=name, value=shown, rule=rule, nearest=f"--set {name}=null")
    if _OF_PICTURES.search(last_name(name)):
        rule = "is of a model with an encoder of pictures, which is not planned here"
        return Reason(field=name, value=shown, rule=rule)
    rule = f"is no setting of {trainer} that is known here, and sounds of {topic}"
    nearest = nearest_name(name, known_names) or f"--set {name}=null"
    return Reason(field=name, value=shown, rule=rule, nearest=nearest)


def nearest_name(name: str, known_names: Iterable[str]) -> str:
    """Return the known name that is most like another, its last part first; "" for none."""
    names = list(known_names)
    whole = get_close_matches(name, names, n=1, cutoff=0.85)
    if whole:
        return whole[0]
    last = name.rpartition(".")[2]
    by_last = {other.rpartition(".")[2]: other for other in names}
    near = get_close_matches(last, by_last, n=1, cutoff=_NEAR)
    return by_last[near[0]] if near else ""


def group_names(names: Iterable[str]) -> Iterator[str]:
    """Yield names, or a section with the number of its settings where they are many."""
    by_section: dict[str, list[str]] = {}
    for name in names:
        by_section.setdefault(name.rpartition(".")[0], []).append(name)
    for section, inside in by_section.items():
        if not section or len(inside) <= _MOST_NAMED:
            yield from inside
        else:
            first = ", ".join(name.rpartition(".")[2] for name in inside)
            yield f"{section}: {first}"
