"""The arguments that a Megatron-LM log prints at its start, as the command that they come from.

The dump holds every argument after the trainer's own checks: what was said, defaults, and what
follows from others. One that is not at its default is written as the option that sets it, unless it
follows from others; so none is lost, and the readers of commands account for each.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType

from moewright.intake.megatron.options import (
    MegatronOption,
    list_former_defaults,
    option_table,
)
from moewright.intake.megatron.releases import list_changed
from moewright.intake.megatron.unread import find_fork_option, find_harmless
from moewright.spec.units import is_whole_number, whole_number

_NOTHING = ("None", "", "[]", "{}", "False", "()")
# What tells of the process that prints, and what always follows from other arguments.
_DERIVED = frozenset(
    (
        *("rank", "local_rank", "world_size", "data_parallel_size", "padded_vocab_size"),
        *("params_dtype", "model_type", "virtual_pipeline_model_parallel_size"),
        *("variable_seq_lengths", "consumed_train_samples", "consumed_valid_samples"),
        *("skipped_train_samples", "do_train", "do_valid", "do_test"),
        *("gtp_weight_remat_size", "expert_gtp_weight_remat_size"),
    )
)
# What Megatron-LM's checks (training/arguments.py) set to another argument where nobody says it.
_FOLLOWS: Mapping[str, str] = MappingProxyType(
    {
        "encoder_num_layers": "num_layers",
        "encoder_seq_length": "seq_length",
        "transformer_pipeline_model_parallel_size": "pipeline_model_parallel_size",
        "tensor_parallel_num_weight_shards": "tensor_model_parallel_size",
        "expert_tensor_parallel_num_weight_shards": "expert_tensor_parallel_size",
        "inprocess_active_world_size": "world_size",
        "eval_global_batch_size": "global_batch_size",
        "eval_micro_batch_size": "micro_batch_size",
    }
)
_ENUM = re.compile(r"<\w+\.(\w+): [^>]*>")
_DTYPES: Mapping[str, str] = MappingProxyType(
    {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "uint8": "fp8", "int8": "int8"}
)


def rebuild_command(arguments: Sequence[tuple[str, str]]) -> str:
    """Return the launch command of a dump; "" where it does not say how many ranks there were."""
    values = dict(arguments)
    world_size = values.get("world_size", "")
    if not is_whole_number(world_size):
        return ""
    if values.get("step_batch_size_schedule", "None") != "None":
        values.pop("global_batch_size", "")  # the batch that the schedule begins with
    words = [
        word
        for name, value in values.items()
        if name not in _DERIVED and value != values.get(_FOLLOWS.get(name, ""))
        for word in _argument_words(name, value)
    ]
    padded = values.get("padded_vocab_size", "")
    if is_whole_number(padded) and not _is_padded(values):
        # The tokenizer's own size is often not among the arguments.
        words += ["--vocab-size", padded]
    return f"torchrun --nproc_per_node={world_size} pretrain_gpt.py {shlex.join(words)}\n"


def _is_padded(values: Mapping[str, str]) -> bool:
    """Whether the padded vocabulary is that of the arguments, to the multiple that they give."""
    names = ("vocab_size", "make_vocab_size_divisible_by", "tensor_model_parallel_size")
    sizes = [whole_number(values.get(name, "")) for name in (*names, "padded_vocab_size")]
    if not all(sizes):
        return False
    vocabulary, divisor, tp, padded = sizes
    return -(-vocabulary // (divisor * tp)) * divisor * tp == padded


def _argument_words(name: str, value: str) -> Iterator[str]:
    """Yield the words that set an argument; none for a default."""
    spelled = f"--{name.replace('_', '-')}"
    options = _list_setters().get(name)
    if options is None and value in (*_NOTHING, *list_former_defaults().get(name, ())):
        return
    options = options or tuple(filter(None, (option_table().get(spelled),)))
    if not options:
        yield from _other_words(spelled, name, value)
    elif not _same_value(value, options[0].default) or _is_changed(options):
        yield from _option_words(options, value)


def _is_changed(options: Sequence[MegatronOption]) -> bool:
    """Whether releases differ in an argument's default: left out, it would be that of a release."""
    return any(option.name in list_changed() for option in options)


@cache
def _list_setters() -> Mapping[str, tuple[MegatronOption, ...]]:
    """Return the options that set each argument."""
    setters: dict[str, tuple[MegatronOption, ...]] = {}
    for option in option_table().values():
        setters[option.dest] = (*setters.get(option.dest, ()), option)
    return MappingProxyType(setters)


def _same_value(value: str, default: str) -> bool:
    try:
        return float(value) == float(default)
    except ValueError:
        return value == default or tuple(_list_items(value)) == tuple(_list_items(default))


def _option_words(options: Sequence[MegatronOption], value: str) -> Iterator[str]:
    """Yield the option as a user would write it; nothing for one that was not set."""
    switches = [option for option in options if option.value_count == "0"]
    if switches and value in ("True", "False"):
        is_false = value == "False"
        matching = [option.name for option in switches if option.clears == is_false]
        yield from matching[-1:]
        return
    taking = [option for option in options if option.value_count != "0"]
    if value in ("None", "", "[]") or not taking:
        return
    option = taking[-1]
    yield option.name
    member = value.rpartition(".")[2]  # a member of an enumeration is printed with its class
    if member in option.choices:
        yield member
    elif option.value_count in ("+", "*"):
        yield from _list_items(value)
    else:
        yield _spell_item(value)


def _other_words(spelled: str, name: str, value: str) -> Iterator[str]:
    """Yield an argument that is not Megatron-LM's as the option of a fork that sets it."""
    option = find_fork_option(spelled)
    if option is not None and _same_value(value, option.default):
        return
    if option is None and find_harmless(name, ("megatron",)) is not None:
        return
    yield spelled
    if value != "True":
        yield from _list_items(value)


def _list_items(value: str) -> tuple[str, ...]:
    try:
        items = ast.literal_eval(_ENUM.sub(r"'\1'", value))
    except (ValueError, SyntaxError):
        return (_spell_item(value),)
    items = items if isinstance(items, list | tuple) else (items,)
    return tuple(_spell_item(str(item)) for item in items)


def _spell_item(value: str) -> str:
    """Return a value as the parser takes it: Python prints torch's dtypes otherwise."""
    module, _, name = value.rpartition(".")
    return _DTYPES.get(name, value) if module == "torch" else value
