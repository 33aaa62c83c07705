"""Configurations of frameworks on Megatron-core as the launch command that they stand for.

Read are Megatron-LM's MODEL_ARGS, and the frameworks of data/config_dialects.toml.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path

from moewright.intake import catalogue
from moewright.intake.megatron.config_fields import (
    ChosenOptions,
    SettingReader,
    options_with_dashes,
)
from moewright.intake.megatron.dialects import ConfigDialect, find_dialect, list_dialects
from moewright.intake.megatron.foreign_options import FOREIGN_OPTIONS
from moewright.intake.megatron.post_training import (
    REINFORCED,
    nemo_rl_batches,
    roll_batches,
    verl_batches,
)
from moewright.intake.megatron.settings import (
    MISSING_PARENTS,
    SUFFIXES,
    SettingTree,
    Value,
    find_aliases,
    find_referenced,
    is_unset,
    lower_word,
    read_override,
    read_overrides,
    read_settings,
    resolve_references,
)
from moewright.intake.megatron.unknown import UNKNOWN_VALUE
from moewright.intake.megatron.unread import (
    is_of_other_optimizer,
    last_name,
    read_table,
    sort_settings,
)
from moewright.spec.errors import BadInput, Reason
from moewright.spec.names import closest_match
from moewright.spec.units import whole_number

_OPTION_SECTIONS = ("MODEL_ARGS", "model_args", "")
_ENVIRONMENT_SECTION = "ENV_VARS"
_ESCAPE = re.compile(r"\\+([|()*&;<> ])")
_MODE = "MODE"  # of a test of Megatron-LM: pretraining where it is not said
_CONFIG_OPTIONS = ("--config-file", "--config_file", "--config", "--yaml-cfg", "--exp")
_CHECKPOINTING = "policy.megatron_cfg.activation_checkpointing"
_PRECISIONS = {
    "bf16_with_fp8_delayed_scaling_mixed": ("hybrid", "delayed"),
    "bf16_with_fp8_current_scaling_mixed": ("hybrid", "tensorwise"),
    "bf16_with_fp8_subchannel_scaling_mixed": ("hybrid", "blockwise"),
    "bf16_with_mxfp8_mixed": ("e4m3", "mxfp8"),
    "nanov2_bf16_with_fp8_current_scaling_mixed": ("hybrid", "tensorwise"),
}
_MIXED = "mixed_precision"
_PRECISION_SETTINGS = (_MIXED, "trainer.precision", "model.precision")
_REFUSAL = "refuse: "
_TURBO_SWITCHES = ("enable_primus_turbo", "use_turbo_deepep")
_FP8_SECTION = "policy.megatron_cfg.fp8_cfg."
_FP8_SWITCHES = ("model.fp8", "model.fp8_e4m3", "model.fp8_hybrid")
_FP8_DETAILS = ("--fp8-recipe", "--fp8-amax-history-len", "--fp8-amax-compute-algo", "--fp8-margin")
# Parts of a name that do not change sizes: who made it, its format, what it was tuned for.
_MAKER = re.compile(r"^(nvidia|meta)[-_]", re.IGNORECASE)
_VARIANT = re.compile(
    r"[-_](bf16|fp8|nvfp4|base|instruct|chat|hf|it|thinking|reasoning|\d{4})$", re.IGNORECASE
)
_RANGE = re.compile(r"list\(range\((?:(\d+),\s*)?(\d+)\)\)")
_VERL_CONFIGS = ("ppo_megatron_trainer",)
_DEGREES = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
)
_LEVELS = 6  # folders above a script that may be its checkout
_RECIPE_TAIL = re.compile(r"_(pretrain|finetune|sft|peft|lora|config|mcore|\d+gpu|h100|b200).*$")


# What verl's own configuration says of tensor parallelism changed, and its mark before that.
_TENSOR_DEGREE = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size"
_OLD_MICRO_BATCH = "actor_rollout_ref.actor.ppo_micro_batch_size"


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfiguredCommand:
    """The words of the launch command that a configuration stands for.

    `model` is the name that the configuration has for its model, "" where it gives sizes; `unread`
    are settings that nothing here reads; `missing_files` are those that it builds on and that are
    not beside it.
    """

    words: tuple[str, ...]
    exported: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    unread: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    missing_files: tuple[str, ...] = ()


def is_configured(words: Sequence[str]) -> bool:
    """Whether the words of a command hold settings of a framework that is read here."""
    names = [override[0] for override in map(read_override, words) if override is not None]
    if _find_named_config(words) and any("actor_rollout_ref." in name for name in names):
        return True
    told = {name.rpartition(".")[2]: value for name, value in read_overrides(words).items()}
    is_of_core = told.get("strategy") == "megatron"
    is_of_core = is_of_core or any("model_parallel_size" in name for name in names)
    return is_of_core and any(
        dialect.is_spoken_by(names) for dialect in list_dialects() if dialect.is_commanded
    )


def configure_words(
    words: Sequence[str], environment: Mapping[str, str], folder: Path | None
) -> ConfiguredCommand:
    """Return the command of words such as model.num_layers=4, on top of the file that they name.

    Raises:
        BadInput: the file cannot be read, or the settings are of no framework that is known here.
    """
    settings = _read_named_config(_find_named_config(words), folder)
    told = read_overrides(words)
    is_left_out = _TENSOR_DEGREE in settings and _TENSOR_DEGREE not in told
    if is_left_out and _OLD_MICRO_BATCH in told:
        settings[_TENSOR_DEGREE] = "4"
    for name, value in zip(words, [*words[1:], ""], strict=True):
        option, equals, inline = name.partition("=")
        path = Path(UNKNOWN_VALUE.sub("", inline if equals else value))
        if option in _CONFIG_OPTIONS and path.suffix in SUFFIXES and folder is not None:
            settings |= read_settings(folder / path)
        elif option in ("--recipe", "--recipe-name"):
            settings["recipe"] = inline if equals else value
    # Last: what the command line says wins over the files that it names.
    settings |= told
    command = configure(
        resolve_references(settings, environment),
        referenced=find_referenced(settings),
        aliases=find_aliases(settings),
    )
    if not is_left_out:
        return command
    note = (
        f"nothing here says the tensor parallelism: {settings[_TENSOR_DEGREE]}, as verl's own "
        "configuration has it (4 before verl 0.4, 1 since)"
    )
    return replace(command, notes=(*command.notes, note))


def _find_named_config(words: Sequence[str]) -> str:
    """Return the name of verl's configuration for Megatron-core that a command asks for."""
    for word, following in pairwise((*words, "")):
        option, equals, inline = word.partition("=")
        name = (inline if equals else following).strip("'\"").removesuffix(".yaml")
        if option == "--config-name" and "megatron" in name:
            return name
    return ""


def _read_named_config(name: str, folder: Path | None) -> dict[str, Value]:
    """Return the settings of verl's configuration of a name, with the files below it.

    It is looked for in the checkout that a script lies in; where it is not there, verl's own
    settings of Megatron-core are, as its table has them.
    """
    if not name:
        return {}
    above = () if folder is None else (folder.resolve(), *folder.resolve().parents)[:_LEVELS]
    for parent in above:
        for place in ("verl/trainer/config", "trainer/config", "config"):
            file = parent / place / f"{name}.yaml"
            if file.is_file():
                return read_settings(file)
    is_own = name in _VERL_CONFIGS
    settings: dict[str, Value] = {
        option: row.default
        for option, row in read_table("verl").items()
        if option.startswith("actor_rollout_ref.actor.megatron.")
        and row.default
        and (is_own or "parallel_size" not in option)
    }
    return settings if is_own else {**settings, MISSING_PARENTS: (f"{name}.yaml",)}


def configure_file(
    path: Path, environment: Mapping[str, str], arguments: Sequence[str]
) -> ConfiguredCommand:
    """Return the command of a YAML file; `arguments` are overrides, or options behind it.

    Raises:
        BadInput: the file cannot be read, or is of no framework that is known here.
    """
    settings = read_settings(path) | read_overrides(arguments)
    resolved = resolve_references(settings, environment)
    command = configure(
        resolved, referenced=find_referenced(settings), aliases=find_aliases(settings)
    )
    options = [word for word in arguments if read_override(word) is None]
    return ConfiguredCommand(
        words=(*command.words, *options),
        exported=command.exported,
        model=command.model,
        unread=command.unread,
        notes=command.notes,
        missing_files=command.missing_files,
    )


def configure(
    settings: Mapping[str, Value],
    *,
    referenced: frozenset[str] = frozenset(),
    aliases: frozenset[str] = frozenset(),
) -> ConfiguredCommand:
    """Return the command of settings whose references are replaced.

    Those that are `referenced` are read with the settings that take their values; `aliases` repeat
    another's value, so that they are named where nothing reads them, and refuse nothing.

    Raises:
        BadInput: they are of no framework that is known here, or one of them sets something that a
            plan consists of and is not read.
    """
    # Options by their own names, with dashes, are read without a dialect.
    for section in _OPTION_SECTIONS:
        if any(options_with_dashes(settings, section)):
            return _configure_options(settings, section)
    tree = SettingTree(settings)
    dialect = find_dialect(tree.names)
    # Sections of the choices that were not made would set sizes of another model.
    kept = _keep_chosen(dialect, settings)
    tree = SettingTree(kept)
    reader = SettingReader()
    defaults = _default_options(reader, dialect)
    chosen = ChosenOptions(options=dict(defaults))
    unknown = _read_sections(reader, dialect, tree, chosen)
    has_texts = any(tree.matches(texts.mark) for texts in REINFORCED)
    if chosen.options == defaults and not has_texts:
        rule = f"holds no setting of {dialect.name} that says a layout, a batch or a model"
        raise BadInput(Reason(field="configuration", rule=rule))
    notes = [f"a configuration of {dialect.name}: {tree.taken_count} settings are read"]
    missing = tree.take_items(MISSING_PARENTS)
    if missing:
        notes.append(f"it builds on {','.join(missing)}, not beside it: what that sets is not read")
    notes += _take_precision(reader, tree, chosen)
    notes += _take_turbo(reader, tree, chosen)
    _settle(tree, chosen.options)
    _take_multiple(unknown, chosen.options)
    notes += verl_batches(tree, chosen.options)
    if tree.matches("policy.megatron_cfg.*"):
        notes += nemo_rl_batches(tree, chosen.options)
    for texts in REINFORCED:
        if tree.matches(texts.mark):
            notes += texts.set_batches(tree, chosen.options)
    if tree.matches("actor_train.strategy_args.*"):
        notes += roll_batches(tree, chosen.options)
    model = _name_model(dialect, tree)
    recipe = tree.take_text("recipe")
    if recipe and "--num-layers" not in chosen.options:
        notes.append(
            f"recipe {recipe} itself is not read: what is not set beside it is taken "
            "at its default; give the run_config.yaml of its checkpoint for all of it"
        )
    adapters = [word for settings_of in dialect.adapters for word in settings_of.take(tree)]
    steps = tree.take_text(dialect.accumulation) if dialect.accumulation else ""
    derived = ("--gradient-accumulation-steps", steps) if steps else ()
    launcher = [
        f"{name}={_count_ranks(tree.take_text(key))}"
        for name, key in (("--nnodes", dialect.nodes), ("--nproc_per_node", dialect.ranks_per_node))
        if key and not is_unset(tree.take(key))
    ]
    launcher = _leave_nodes_open(dialect, launcher, chosen.options)
    exported = tree.take_below(dialect.environment) if dialect.environment else {}
    if exported:
        notes.append(f"exported: {' '.join(exported)}")
    notes += _note_sections(dialect, tree)
    # Settings of an optimizer that does not run change no plan, whatever they are.
    optimizer = "".join(chosen.options.get("--optimizer", ("adam",)))
    unread, noted = sort_settings(
        {
            name: value
            for name, value in {**unknown, **tree.left()}.items()
            if name not in referenced and not is_of_other_optimizer(name, optimizer)
        },
        dialect.tables,
        named=(*dialect.named, *aliases),
        sections=dialect.known_sections,
        option_sections=dialect.sections,
        trainer=dialect.name,
        known_names=[*reader.by_dest, *reader.fields, *dialect.settings, *dialect.values],
    )
    return ConfiguredCommand(
        words=(*launcher, *chosen.words(), *derived, *adapters),
        exported=exported,
        model=model if "--num-layers" not in chosen.options else "",
        unread=(*unread, *(name for name in settings if name not in kept)),
        notes=(*notes, *noted),
        missing_files=missing,
    )


def _leave_nodes_open(
    dialect: ConfigDialect, launcher: list[str], options: Mapping[str, tuple[str, ...]]
) -> list[str]:
    """Return what says the ranks; of a layout that one node cannot hold, no nodes are assumed."""
    per_node = [whole_number(word.partition("=")[2]) for word in launcher if "nproc" in word]
    is_told = any(word.startswith("--nnodes") for word in launcher)
    if is_told or not dialect.nodes or not per_node:
        return launcher
    ranks = 1
    for name in _DEGREES:
        ranks *= whole_number("".join(options.get(name, ())), otherwise=1)
    return [*launcher, "--nnodes=auto"] if ranks > per_node[0] > 0 else launcher


def _take_multiple(unknown: dict[str, Value], options: dict[str, tuple[str, ...]]) -> None:
    """Set the width of gated layers as FlagScale does that is told a multiple of it alone."""
    told = {name.rpartition(".")[2]: name for name in unknown}
    if "multiple_of" not in told:
        return
    multiple = whole_number(str(unknown.pop(told["multiple_of"])))
    factor = str(unknown.pop(told.get("hidden_dim_multiplier", ""), ""))
    hidden = whole_number("".join(options.get("--hidden-size", ())))
    if "--ffn-hidden-size" in options or "--swiglu" not in options or not multiple * hidden:
        return
    try:
        # The order of roundings is that of Llama's reference code: truncate, scale, then round up.
        width = int(int(4 * hidden * 2 / 3) * float(factor or 1))
    except ValueError:
        rule = "must be a number"
        name = told["hidden_dim_multiplier"]
        raise BadInput(Reason(field=name, value=factor[:60], rule=rule)) from None
    options["--ffn-hidden-size"] = (str(-(-width // multiple) * multiple),)


def _keep_chosen(dialect: ConfigDialect, settings: Mapping[str, Value]) -> dict[str, Value]:
    """Return settings without the sections that stand beside the one that a setting names."""
    kept = dict(settings)
    for section, chooser in dialect.chosen.items():
        choice = kept.get(chooser, "")
        if (
            isinstance(choice, str)
            and choice
            and any(name.startswith(f"{section}.{choice}.") for name in kept)
        ):
            kept = {
                name: value
                for name, value in kept.items()
                if not name.startswith(f"{section}.") or name.startswith(f"{section}.{choice}.")
            }
    return kept


def _configure_options(settings: Mapping[str, Value], section: str) -> ConfiguredCommand:
    """Return the command of settings that are options of Megatron-LM, as its own tests have them.

    A switch that is false is left out, as the tools do that start them.
    """
    if str(settings.get(_MODE, "")).strip().lower() == "inference":
        rule = "generates text and trains nothing: there is nothing to plan"
        raise BadInput(Reason(field=_MODE, value="inference", rule=rule))
    reader = SettingReader()
    chosen = ChosenOptions()
    words: list[str] = []
    for name, value in options_with_dashes(settings, section):
        option = reader.table.get(name)
        # YAML says false where a command line would leave the switch out.
        if is_unset(value) or (isinstance(value, str) and value.lower() == "false"):
            continue
        if isinstance(value, str) and value.lower() == "true":
            words.append(name)
        elif option is not None and option.value_count == "0":
            _refuse_unknown(name, str(value))
        elif option is not None:
            plain = _unescape(value) if isinstance(value, str) else value
            reader.set_values(name, plain, chosen)
        else:
            words += [name, *([value] if isinstance(value, str) else value)]
    prefix = f"{_ENVIRONMENT_SECTION}."
    exported = {
        name.removeprefix(prefix): str(value)
        for name, value in settings.items()
        if name.startswith(prefix)
    }
    left = {
        name: value
        for name, value in settings.items()
        if name.rpartition(".")[0] != section and name.removeprefix(prefix) not in exported
    }
    unread, _ = sort_settings(left, (), sections=(), trainer="Megatron-LM's tests")
    notes = [f"exported: {' '.join(exported)}"] if exported else []
    return ConfiguredCommand(
        words=(*chosen.words(), *words), exported=exported, unread=unread, notes=tuple(notes)
    )


def _unescape(value: str) -> str:
    """Return a value as the shells leave it that Megatron-LM's tests hand it through."""
    return _ESCAPE.sub(r"\1", value.strip().strip("'\""))


def _refuse_unknown(name: str, value: str) -> None:
    """Refuse a switch whose value is neither true nor false, or stands in the environment."""
    variable = UNKNOWN_VALUE.search(value)
    if variable is not None:
        rule = f"takes the value of {variable[1]}, which is not set"
        nearest = f"--set {variable[1]}=true"
        raise BadInput(Reason(field=name, rule=rule, nearest=nearest))
    raise BadInput(Reason(field=name, value=value[:60], rule="must be true or false"))


def _default_options(reader: SettingReader, dialect: ConfigDialect) -> dict[str, tuple[str, ...]]:
    """Return what a framework sets by itself."""
    options: dict[str, tuple[str, ...]] = {}
    name = ""
    for word in dialect.defaults.split():
        if word in reader.table:
            name = word
            options[name] = ()
        else:
            options[name] = (*options[name], word)
    return options


def _read_sections(
    reader: SettingReader, dialect: ConfigDialect, tree: SettingTree, chosen: ChosenOptions
) -> dict[str, Value]:
    """Read the sections of a dialect in its order; return what no option stands for."""
    unknown: dict[str, Value] = {}
    places = (dialect.nodes, dialect.ranks_per_node)
    of_adapters = (name for entry in dialect.adapters for name in (*entry.names, *entry.wanted))
    own = (
        *(*dialect.settings, *dialect.values, *dialect.apart),
        *(*dialect.model, *places, *of_adapters),
    )
    for section in dialect.sections:
        for name, value in tree.take_section(section, own):
            is_read = reader.take(name, value, chosen)
            if not is_read and not (dialect.has_options and _take_foreign(name, value, chosen)):
                unknown[name] = value
    for name, option in dialect.settings.items():
        if not is_unset(tree.take(name)):
            reader.set_values(option, tree.take(name), chosen)
    for pattern, meanings in dialect.values.items():
        for name in tree.names:
            if fnmatchcase(name, pattern):
                _take_meaning(reader, name, meanings, tree, chosen)
    return unknown


def _take_foreign(name: str, value: Value, chosen: ChosenOptions) -> bool:
    """Set the option of a fork that a setting spells with underscores; False for another."""
    last = last_name(name)
    spellings = (f"--{last}", f"--{last.replace('_', '-')}")
    option = next((spelled for spelled in spellings if spelled in FOREIGN_OPTIONS), "")
    text = lower_word(value)
    if option and not is_unset(value) and text != "false":
        is_switch = text == "true"
        values = (value,) if isinstance(value, str) else tuple(value)
        chosen.options[option] = () if is_switch else values
    return bool(option)


def _count_ranks(text: str) -> str:
    """Return a number of ranks; ROLL says them as a list that Python evaluates."""
    ranks = _RANGE.fullmatch(text.strip())
    return str(int(ranks[2]) - int(ranks[1] or 0)) if ranks is not None else text


def _note_sections(dialect: ConfigDialect, tree: SettingTree) -> Iterator[str]:
    """Yield a note on sections that the framework reads whatever their names are."""
    if not any("*" in section for section in dialect.sections):
        return
    places = sorted({name.rpartition(".")[0] for name in tree.names})
    unknown = [
        place
        for place in places
        if any(fnmatchcase(place, section) for section in dialect.sections)
        and not any(fnmatchcase(place, section) for section in dialect.known_sections)
    ]
    if unknown:
        yield f"sections that none of {dialect.name}'s examples has: {' '.join(unknown)}"


def _take_meaning(
    reader: SettingReader,
    name: str,
    meanings: Mapping[str, str],
    tree: SettingTree,
    chosen: ChosenOptions,
) -> None:
    """Set the options that a value of a setting stands for; "-" before one leaves it out.

    Raises:
        BadInput: the value stands for nothing that is known here.
    """
    value = tree.take_text(name).strip().lower()
    if is_unset(value) and value not in meanings:
        return
    meaning = meanings.get(value, meanings.get("*"))
    if meaning is None:
        if set(meanings.values()) == {""}:
            # It chooses a trainer or a task, which is not for a reader to choose.
            rule = f"is planned for {' and '.join(meanings)} alone; name the model and the layout"
            raise BadInput(Reason(field=name, value=value[:60], rule=f"{rule} to `estimate`"))
        rule = f"is one of {', '.join(meanings)}, as far as it is read here"
        nearest = closest_match(value, meanings) or next(iter(meanings))
        raise BadInput(Reason(field=name, value=value[:60], rule=rule, nearest=nearest))
    if meaning.startswith(_REFUSAL):
        rule = meaning.removeprefix(_REFUSAL)
        raise BadInput(Reason(field=name, value=value[:60], rule=rule))
    for option, *values in _split_options(reader, meaning):
        if option.startswith("!"):
            chosen.options.pop(option.removeprefix("!"), None)
        else:
            reader.set_values(option, tuple(values), chosen)


def _split_options(reader: SettingReader, text: str) -> Iterator[list[str]]:
    """Yield each option of a text with its values."""
    words: list[str] = []
    for word in text.split():
        if word.removeprefix("!") in reader.table and words:
            yield words
            words = []
        words.append(word)
    if words:
        yield words


def _settle(tree: SettingTree, options: dict[str, tuple[str, ...]]) -> None:
    """Leave out options that others make void."""
    checkpointing = tree.take_text(_CHECKPOINTING).lower()
    if checkpointing == "true":  # NeMo-RL's switch is for whole layers, where nothing else is said
        options.setdefault("--recompute-granularity", ("full",))
    elif checkpointing:
        for name in ("--recompute-granularity", "--recompute-modules"):
            options.pop(name, None)
    if options.get("--recompute-granularity") == ("full",):
        options.setdefault("--recompute-method", ("uniform",))
        options.setdefault("--recompute-num-layers", ("1",))
    else:  # as all of them do: a method without full recompute says nothing
        options.pop("--recompute-method", None)
        options.pop("--recompute-num-layers", None)
    if "--fp16" in options:
        options.pop("--bf16", None)
    if "--pipeline-model-parallel-layout" in options:
        options.pop("--num-virtual-stages-per-pipeline-rank", None)
    tp = options.get("--tensor-model-parallel-size", ("1",))
    if tp == ("1",) or "--sequence-parallel" not in options:
        options.pop("--tp-comm-overlap", None)  # as Bridge itself does, with a warning
    if not options.keys().isdisjoint(("--quick-geglu", "--squared-relu")):
        options.pop("--swiglu", None)


def _take_precision(
    reader: SettingReader, tree: SettingTree, chosen: ChosenOptions
) -> Iterator[str]:
    """Read a precision that is a name, as Bridge and NeMo have them; yield a note on what it is.

    Raises:
        BadInput: no precision of this name is known here.
    """
    names = [(key, tree.take_text(key)) for key in _PRECISION_SETTINGS]
    # Bridge mixes nothing where it is null, and its model is fp32 unless it says otherwise.
    if _MIXED in tree.names and is_unset(tree.take(_MIXED)) and is_unset(tree.take("model.bf16")):
        chosen.options.pop("--bf16", None)
    for key, name in names:
        if is_unset(name):
            continue
        if name.startswith(("fp16", "16")):
            chosen.options.pop("--bf16", None)
            chosen.options["--fp16"] = ()
        elif name.startswith(("32", "fp32")):
            chosen.options.pop("--bf16", None)
        elif name in _PRECISIONS:
            form, recipe = _PRECISIONS[name]
            reader.set_values("--fp8-format", form, chosen)
            reader.set_values("--fp8-recipe", recipe, chosen)
            if recipe == "delayed":  # Bridge's and NeMo's recipe, not Megatron-LM's defaults
                reader.set_values("--fp8-amax-history-len", "1024", chosen)
                reader.set_values("--fp8-amax-compute-algo", "max", chosen)
        elif "nvfp4" in name:
            reader.set_values("--fp4-format", "e2m1", chosen)
        elif not name.startswith("bf16"):
            rule = "is no precision that is known here"
            nearest = closest_match(name, _PRECISIONS) or "bf16_mixed"
            raise BadInput(Reason(field=key, value=name[:60], rule=rule, nearest=nearest))
    if tree.take_text(f"{_FP8_SECTION}enabled").lower() == "true":
        for name in tree.names:
            if name.startswith(_FP8_SECTION) and not name.endswith(".enabled"):
                reader.take(name, tree.take(name), chosen)
    scaled = [key for key in _FP8_SWITCHES if not is_unset(tree.take(key))]
    if scaled:
        yield from _take_nemo_fp8(reader, tree, chosen)


def _take_turbo(reader: SettingReader, tree: SettingTree, chosen: ChosenOptions) -> Iterator[str]:
    """Read the dispatcher of Primus-Turbo, which takes the place of the one that is written."""
    switches = {
        key: [tree.take_text(name) for name in tree.names if fnmatchcase(name, f"modules.*.{key}")]
        for key in _TURBO_SWITCHES
    }
    if all(values and values[-1].lower() == "true" for values in switches.values()):
        reader.set_values("--moe-token-dispatcher-type", "flex", chosen)
        reader.set_values("--moe-flex-dispatcher-backend", "deepep", chosen)
        yield "use_turbo_deepep: experts' tokens go by DeepEP, whatever dispatcher is written"


def _take_nemo_fp8(
    reader: SettingReader, tree: SettingTree, chosen: ChosenOptions
) -> Iterator[str]:
    """Read NeMo 1's fp8 of true or false, and the form that its scales come in."""
    if tree.take_text("model.fp8").lower() != "true":
        for name in ("--fp8-format", *_FP8_DETAILS):
            chosen.options.pop(name, None)
        return
    is_e4m3 = tree.take_text("model.fp8_e4m3").lower() == "true"
    form = "e4m3" if is_e4m3 else "hybrid"
    reader.set_values("--fp8-format", form, chosen)
    yield f"fp8: true is --fp8-format {form} with delayed scales"


def _name_model(dialect: ConfigDialect, tree: SettingTree) -> str:
    """Return the model's name as the catalogue has it, or else as the configuration has it."""
    for pattern in dialect.model:
        for name in tree.names:
            if fnmatchcase(name, pattern) and name.count(".") == pattern.count("."):
                value = tree.take_text(name)
                if not is_unset(value):
                    return find_model(value)
    return ""


def find_model(text: str) -> str:
    """Return the catalogue's name of a model that is named as a path, a preset or a repository."""
    # A path such as ${HOME}/models/Qwen3-30B-A3B names its model by its last part.
    plain = UNKNOWN_VALUE.sub("", text).rstrip("/").rpartition("/")[2].removesuffix(".yaml")
    plain = _RECIPE_TAIL.sub("", plain)
    names = {_squeeze(name.rpartition("/")[2]): name for name in catalogue.model_names()}
    name = names.get(_squeeze(plain))
    bare = _MAKER.sub("", plain)
    while name is None and bare:
        name = names.get(_squeeze(bare))
        shorter = _VARIANT.sub("", bare)
        bare = "" if shorter == bare else shorter
    return name or plain


def _squeeze(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
