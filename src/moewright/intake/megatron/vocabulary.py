"""The size of the vocabulary of a Megatron-LM command, which mostly only its tokenizer tells."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources

from moewright.codec.megatron_options import LAYOUT_OPTIONS
from moewright.intake.megatron.arguments import Arguments
from moewright.intake.megatron.bash import UNKNOWN_VALUE

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
    """
    if arguments.has("--padded-vocab-size"):
        return arguments.integer("--padded-vocab-size")
    if arguments.has("--no-pad-vocab-size") or arguments.has("--disable-pad-vocab-size"):
        return entries
    tp = arguments.size(LAYOUT_OPTIONS["tp"])
    multiple = max(1, arguments.integer("--make-vocab-size-divisible-by", _DIVISOR)) * tp
    return -(-entries // multiple) * multiple


def _known_text(arguments: Arguments, name: str) -> str:
    """Return what stands in the command of an option's value, without variables nobody set."""
    return UNKNOWN_VALUE.sub("", next(iter(arguments.options.get(name, ())), ""))


def _list_tokenizers() -> Iterator[TokenizerEntry]:
    file = resources.files("moewright.intake.megatron").joinpath("data/tokenizers.csv")
    for row in csv.DictReader(file.read_text(encoding="utf-8").splitlines()):
        yield TokenizerEntry(
            type=row["type"],
            model=row["model"],
            vocabulary=int(row["vocabulary"]),
            source=row["source"],
        )
