"""What a command tells by a name alone: a model with its sizes, or a tokenizer's vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from moewright.codec.megatron_options import LAYOUT_OPTIONS
from moewright.intake.megatron.options import Arguments
from moewright.intake.megatron.packaged_tables import read_rows
from moewright.intake.megatron.unknown import UNKNOWN_VALUE
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import AttentionKind, ModelSpec
from moewright.spec.units import mention

_DIVISOR = 128  # Megatron-LM's default


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerEntry:
    """A tokenizer whose vocabulary is published.

    `type` is Megatron-LM's name of its class, "" for any; `model` is a part of the name of its
    file or repository, "" for any; `source` says where the size was read.
    """

    type: str
    model: str
    vocabulary: int
    source: str


def read_vocabulary(arguments: Arguments) -> tuple[int, str]:
    """Return the entries of the vocabulary, and a note on the tokenizer that told them.

    They are 0 where neither an option nor a tokenizer that is listed tells.
    """
    arguments.ignore("--vocab-file", "--merge-file", "--tokenizer-model", "--tokenizer-type")
    if arguments.has("--vocab-size"):
        return arguments.integer("--vocab-size"), ""
    tokenizer_type = _known_text(arguments, "--tokenizer-type")
    if not tokenizer_type and arguments.has("--tiktoken-pattern"):
        tokenizer_type = "TikTokenizer"
    has_merges = "--vocab-file" in arguments.options and "--merge-file" in arguments.options
    if not tokenizer_type and has_merges:
        tokenizer_type = "GPT2BPETokenizer"  # whatever the files are called
    names = [_known_text(arguments, name) for name in ("--tokenizer-model", "--vocab-file")]
    for entry in _list_tokenizers():
        is_model = any(entry.model in name.lower() for name in names if name)
        if entry.type in ("", tokenizer_type) and (is_model or not entry.model):
            note = f"vocabulary of {entry.vocabulary:,}, from the tokenizer: {entry.source}"
            return entry.vocabulary, note
    return 0, ""


def padded_vocabulary(arguments: Arguments, entries: int) -> int:
    """Return the rows of the embedding: Megatron-LM pads so that tensor parallelism divides them.

    They are a multiple of --make-vocab-size-divisible-by times the tensor-parallel degree, unless
    the command says them.

    Raises:
        BadInput: these are fewer than the vocabulary has.
    """
    if arguments.has("--padded-vocab-size"):
        rows = arguments.integer("--padded-vocab-size")
        if rows < entries:
            rule = f"has fewer rows than the vocabulary of {entries} entries"
            field = "--padded-vocab-size"
            raise BadInput(Reason(field=field, value=str(rows), rule=rule, nearest=str(entries)))
        return rows
    if arguments.has("--no-pad-vocab-size") or arguments.has("--disable-pad-vocab-size"):
        return entries
    tp = arguments.size(LAYOUT_OPTIONS["tp"])
    multiple = max(1, arguments.integer("--make-vocab-size-divisible-by", _DIVISOR)) * tp
    return -(-entries // multiple) * multiple


def _known_text(arguments: Arguments, name: str) -> str:
    """Return what stands in the command of an option's value, without variables nobody set."""
    return UNKNOWN_VALUE.sub("", next(iter(arguments.options.get(name, ())), ""))


def _list_tokenizers() -> Iterator[TokenizerEntry]:
    for row in read_rows("tokenizers.csv"):
        yield TokenizerEntry(
            type=row["type"],
            model=row["model"],
            vocabulary=int(row["vocabulary"]),
            source=row["source"],
        )


_QUERY_GROUPS = "--num-query-groups"


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeOption:
    """An option with a size of a model: where the size stands, below attention, moe or router."""

    part: str
    field: str


def _at(part: str, field: str) -> SizeOption:
    return SizeOption(part=part, field=field)


_SIZES: Mapping[str, SizeOption] = MappingProxyType(
    {
        "--num-layers": _at("", "layers"),
        "--hidden-size": _at("", "hidden_size"),
        "--ffn-hidden-size": _at("", "dense_ffn_size"),
        "--mtp-num-layers": _at("", "mtp_layers"),
        "--num-attention-heads": _at("attention", "heads"),
        _QUERY_GROUPS: _at("attention", "kv_heads"),
        "--kv-channels": _at("attention", "head_dim"),
        "--q-lora-rank": _at("attention", "q_lora_rank"),
        "--kv-lora-rank": _at("attention", "kv_lora_rank"),
        "--qk-head-dim": _at("attention", "qk_nope_head_dim"),
        "--qk-pos-emb-head-dim": _at("attention", "qk_rope_head_dim"),
        "--v-head-dim": _at("attention", "v_head_dim"),
        "--num-experts": _at("moe", "experts"),
        "--moe-ffn-hidden-size": _at("moe", "ffn_size"),
        "--moe-shared-expert-intermediate-size": _at("moe", "shared_ffn_size"),
        "--moe-router-topk": _at("router", "top_k"),
        "--moe-router-num-groups": _at("router", "groups"),
        "--moe-router-group-topk": _at("router", "top_groups"),
    }
)
# Sizes that others follow from: a model of another one is another model.
_FIXED = ("--num-layers", "--hidden-size", "--num-attention-heads", "--kv-channels")
# Switches that say what a model is; each must hold of the named one.
_SWITCHES: Mapping[str, Callable[[ModelSpec], bool]] = MappingProxyType(
    {
        "--group-query-attention": lambda model: model.attention.kind is AttentionKind.GQA,
        "--multi-latent-attention": lambda model: model.attention.kind is AttentionKind.MLA,
        "--swiglu": lambda model: model.gated,
        "--untie-embeddings-and-output-weights": lambda model: not model.tie_embeddings,
        "--disable-bias-linear": lambda model: not model.mlp_bias,
        "--qk-layernorm": lambda model: (
            model.attention.qk_norm.value != "none" or model.attention.kind is AttentionKind.MLA
        ),
        "--add-qkv-bias": lambda model: model.attention.qkv_bias,
    }
)


def check_sizes(arguments: Arguments, model: ModelSpec) -> None:
    """Check that a command which has all sizes has those of a model.

    Raises:
        BadInput: one is another.
    """
    for name, own, text in _differences(arguments, model):
        rule = f"{model.name} has {own}"
        raise BadInput(Reason(field=name, value=text, rule=rule, nearest=str(own)))


def with_sizes(arguments: Arguments, model: ModelSpec) -> tuple[ModelSpec, str]:
    """Return a model with the sizes that a command sets otherwise, and a note on them.

    Raises:
        BadInput: it is another model then, or a part of one that this one lacks.
    """
    changes: list[str] = []
    for name, own, text in list(_differences(arguments, model)):
        if name in _FIXED or own is None:
            has = f"has {own}" if own is not None else "has none"
            rule = f"{model.name} {has}; a model of other sizes needs all of them, --num-layers too"
            raise BadInput(Reason(field=name, value=text, rule=rule, nearest=str(own or "")))
        model = _replace(model, _SIZES[name], int(text))
        changes.append(f"{name} {text}, not {own}")
    for name, holds in _SWITCHES.items():
        if arguments.has(name) and not holds(model):
            rule = f"does not hold of {model.name}"
            raise BadInput(Reason(field=name, rule=rule, nearest="leave it out"))
    return model, mention("with {}", "; ".join(changes))


def _differences(arguments: Arguments, model: ModelSpec) -> Iterator[tuple[str, Any, str]]:
    """Yield each option with the model's own size and another one that is given."""
    for name, place in _SIZES.items():
        if not arguments.has(name):
            continue
        if name == _QUERY_GROUPS and model.attention.kind is AttentionKind.MLA:
            continue
        own = _get(model, place)
        text = arguments.text(name)
        if own is not None and not own and place.field == "dense_ffn_size":
            continue  # no layer is dense
        if str(own) != text and not (not own and text == "0"):
            yield name, own, text


def _get(model: ModelSpec, place: SizeOption) -> Any:
    owner: Any = model
    if place.part == "router":
        owner = model.moe.router if model.moe is not None else None
    elif place.part:
        owner = getattr(model, place.part)
    return None if owner is None else getattr(owner, place.field)


def _replace(model: ModelSpec, place: SizeOption, size: int) -> ModelSpec:
    change: dict[str, Any] = {place.field: size}
    if not place.part:
        return replace(model, **change)
    if place.part == "attention":
        return replace(model, attention=replace(model.attention, **change))
    assert model.moe is not None
    if place.part == "moe":
        return replace(model, moe=replace(model.moe, **change))
    return replace(model, moe=replace(model.moe, router=replace(model.moe.router, **change)))
