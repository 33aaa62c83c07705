"""Tokenizers: a byte-level BPE trained on the corpus, the 256 bytes alone, or a published one.

All are stored as one tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from moewright.codec import read_json_data, read_text, write_text
from moewright.codec.foreign import budget, read_apart
from moewright.spec.errors import BadInput, Reason

END_OF_DOCUMENT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"  # beside the tokenizers of Hugging Face folders
# Markers that published tokenizers end a document with, where no file beside them names one.
_END_MARKERS = ("</s>", "<|end_of_text|>", "<|end▁of▁sentence|>", "<eos>", "<|eos|>", "[EOS]")
BYTES_VOCAB_SIZE = 257
MAX_VOCAB_SIZE = 1 << 20
_BATCH_CHARS = 1 << 22

Int64s = npt.NDArray[np.int64]


class TokenizerKind(StrEnum):
    """The kinds of tokenizer."""

    BPE = "bpe"
    BYTES = "bytes"  # id = byte value, 256 ends a document
    PUBLISHED = "published"  # a tokenizer.json that somebody else trained


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tokenizer:
    """A loaded tokenizer; `end_of_document` is the id that follows every document.

    Its patterns are somebody else's, so that it works within budgets.
    """

    inner: Any  # tokenizers.Tokenizer
    vocab_size: int
    end_of_document: int

    def __reduce__(self) -> tuple[Callable[..., Tokenizer], tuple[Any, ...]]:
        """Return how it is copied to another process, with what tokenizer.json does not say."""
        flag = bool(self.inner.encode_special_tokens)
        return _restore, (self.inner.to_str(), flag, self.vocab_size, self.end_of_document)

    @read_apart
    def encode_documents(self, texts: Sequence[str]) -> list[Int64s]:
        """Return the int64 ids of each text, the end-of-document id last.

        The marker's own spelling in a text is plain text.
        """
        end = self.end_of_document
        documents = []
        for batch in _group_texts(texts):
            with budget("a text and its tokenizer", sum(map(len, batch))):
                encoded = self.inner.encode_batch_fast(batch, add_special_tokens=False)
                documents += [np.array([*part.ids, end], dtype=np.int64) for part in encoded]
        return documents

    @read_apart
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; markers are left out, half characters become U+FFFD."""
        with budget("a tokenizer's decoder", len(ids)):
            return str(self.inner.decode(list(ids), skip_special_tokens=True))

    def save(self, path: Path) -> None:
        """Write tokenizer.json; readable by the `tokenizers` and `transformers` libraries."""
        write_text(path, self.inner.to_str(pretty=True))


def _group_texts(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield texts in groups that are encoded together, of so many characters but for a long one."""
    group: list[str] = []
    chars = 0
    for text in texts:
        if group and chars + len(text) > _BATCH_CHARS:
            yield group
            group = []
            chars = 0
        group.append(text)
        chars += len(text)
    if group:
        yield group


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Learn merges from the texts.

    A small corpus may give fewer ids than `vocab_size`, but never fewer than 257.

    Raises:
        BadInput: when `vocab_size` is not in 257..1,048,576.
    """
    check_vocab_size(vocab_size)
    inner = _build_byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        # All 256 bytes have an id, so that any text can be encoded.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return _build_tokenizer(inner, END_OF_DOCUMENT)


def check_vocab_size(vocab_size: int) -> None:
    """Raise BadInput where no byte-level vocabulary has so many ids."""
    if not BYTES_VOCAB_SIZE <= vocab_size <= MAX_VOCAB_SIZE:
        nearest = min(max(vocab_size, BYTES_VOCAB_SIZE), MAX_VOCAB_SIZE)
        rule = (
            f"a byte-level vocabulary has 256 bytes and {END_OF_DOCUMENT} at least, "
            f"{MAX_VOCAB_SIZE} ids at most"
        )
        raise BadInput(
            Reason(field="vocab_size", rule=rule, value=str(vocab_size), nearest=str(nearest))
        )


def build_byte_tokenizer() -> Tokenizer:
    """Build the tokenizer that needs no training: 256 bytes and the end of a document."""
    inner = _build_byte_level(
        models.BPE(vocab={letter: byte for byte, letter in enumerate(_byte_letters())}, merges=[])
    )
    inner.add_special_tokens([END_OF_DOCUMENT])
    return _build_tokenizer(inner, END_OF_DOCUMENT)


@read_apart
def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json, or the one of a folder.

    The marker that ends a document is <|endoftext|> where the vocabulary has it, as it has in
    pre-training; else the eos_token of the tokenizer_config.json beside it, else a usual one.

    Raises:
        BadInput: naming the file, when it is none, or has no such marker.
    """
    if path.is_dir():
        path = path / TOKENIZER_FILE
        if not path.is_file():
            rule = (
                "does not exist; a fast tokenizer's save_pretrained of transformers writes it, "
                "also from a SentencePiece model"
            )
            raise BadInput(Reason(field=str(path), rule=rule))
    text = read_text(path)
    try:
        with budget(str(path), file_bytes=len(text)):
            inner = tokenizers.Tokenizer.from_str(text)
    except BadInput:
        raise
    except Exception as error:  # the library raises bare Exception for malformed JSON
        raise BadInput(Reason(field=str(path), rule=f"is not a tokenizer.json: {error}")) from error
    markers = (END_OF_DOCUMENT, read_eos_token(path.parent), *_END_MARKERS)
    marker = next((name for name in markers if inner.token_to_id(name) is not None), None)
    _check_ids(path, inner)
    if marker is None:
        rule = (
            f"has no {END_OF_DOCUMENT} token to end documents with, and no {TOKENIZER_CONFIG_FILE} "
            "beside it names an eos_token"
        )
        raise BadInput(Reason(field=str(path), rule=rule))
    return _build_tokenizer(inner, marker)


def _check_ids(path: Path, inner: Any) -> None:
    """Raise BadInput where a token has an id for which no embedding would have a row."""
    with budget(str(path)):
        token, token_id = max(
            inner.get_vocab(with_added_tokens=True).items(),
            key=lambda entry: entry[1],
            default=("", 0),
        )
    if token_id >= MAX_VOCAB_SIZE:
        rule = f"numbers the token {token[:40]!r} {token_id}; ids are below {MAX_VOCAB_SIZE}"
        raise BadInput(Reason(field=str(path), rule=rule, nearest=str(MAX_VOCAB_SIZE - 1)))


@read_apart
def find_token_id(path: Path, token: str) -> int | None:
    """Return the id of a token of a tokenizer.json; None where it has none."""
    with budget(str(path), file_bytes=path.stat().st_size):
        token_id: int | None = tokenizers.Tokenizer.from_file(str(path)).token_to_id(token)
    return token_id


def read_eos_token(folder: Path) -> str:
    """Return the eos_token of a folder's tokenizer_config.json; "" where it names none."""
    path = folder / TOKENIZER_CONFIG_FILE
    if not path.is_file():
        return ""
    config = read_json_data(path)
    token = ""
    if isinstance(config, dict):
        token = config.get("eos_token", "")
    if isinstance(token, dict):  # an AddedToken, written with its properties
        token = token.get("content", "")
    return token if isinstance(token, str) else ""


def _restore(
    text: str, encodes_special_tokens: bool, vocab_size: int, end_of_document: int
) -> Tokenizer:
    inner = tokenizers.Tokenizer.from_str(text)
    inner.encode_special_tokens = encodes_special_tokens
    return Tokenizer(inner=inner, vocab_size=vocab_size, end_of_document=end_of_document)


def _build_tokenizer(inner: Any, marker: str) -> Tokenizer:
    inner.encode_special_tokens = True  # a corpus must not be able to spell the marker
    return Tokenizer(
        inner=inner,
        vocab_size=max(inner.get_vocab(with_added_tokens=True).values()) + 1,
        end_of_document=inner.token_to_id(marker),
    )


def _build_byte_level(model: models.BPE) -> Any:
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def _byte_letters() -> list[str]:
    """Return the letter that stands for each byte in byte-level vocabularies (Radford et al. 2019).

    Printable Latin-1 letters stand for themselves, the 68 other bytes are numbered from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    code_points = {byte: 0x100 + number for number, byte in enumerate(others)}
    return [chr(code_points.get(byte, byte)) for byte in range(256)]
