"""Both tokenizers give any text back, end documents, and are not tricked into ending one early."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moewright.engine.data.tokenizer import (
    END_OF_DOCUMENT,
    Tokenizer,
    build_byte_tokenizer,
    load_tokenizer,
    train_bpe,
)
from moewright.spec.errors import BadInput

TEXTS = ["def f(x):\n    return x + 1\n" * 40, "größe ünï 漢字 🙂\n" * 20]
BPE = train_bpe(TEXTS, vocab_size=280)
BYTES = build_byte_tokenizer()


# Texts are drawn by the list, since each call reads apart, in a process of its own.
LISTS = st.lists(st.text(), min_size=20, max_size=20)


@settings(max_examples=8, deadline=None)
@given(LISTS)
def test_any_text_returns(texts: list[str]) -> None:
    for tokenizer in (BPE, BYTES):
        documents = tokenizer.encode_documents(texts)
        for ids in documents:
            assert ids[-1] == tokenizer.end_of_document
            assert (ids < tokenizer.vocab_size).all()
        assert tokenizer.decode(np.concatenate(documents).tolist()) == "".join(texts)


@settings(max_examples=4, deadline=None)
@given(LISTS)
def test_byte_ids_are_the_bytes(texts: list[str]) -> None:
    for ids, text in zip(BYTES.encode_documents(texts), texts, strict=True):
        assert ids.tolist() == [*text.encode(), 256]


def test_sizes() -> None:
    assert (BPE.vocab_size, BYTES.vocab_size) == (280, 257)
    assert len(BPE.encode_documents(TEXTS[:1])[0]) < len(TEXTS[0]) / 2
    assert train_bpe(["ab"], vocab_size=4096).vocab_size < 300


@pytest.mark.parametrize("tokenizer", [BPE, BYTES], ids=["bpe", "bytes"])
def test_the_marker_in_a_text_is_text(tokenizer: Tokenizer) -> None:
    (ids,) = tokenizer.encode_documents([f"a {END_OF_DOCUMENT} b"])
    assert ids.tolist().count(tokenizer.end_of_document) == 1
    assert tokenizer.decode(ids.tolist()) == f"a {END_OF_DOCUMENT} b"


@pytest.mark.parametrize("tokenizer", [BPE, BYTES], ids=["bpe", "bytes"])
def test_saved_and_loaded(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    again = load_tokenizer(path)
    assert (again.vocab_size, again.end_of_document) == (
        tokenizer.vocab_size,
        tokenizer.end_of_document,
    )
    texts = [*TEXTS, f"x{END_OF_DOCUMENT}"]
    for ids, loaded_ids in zip(
        tokenizer.encode_documents(texts), again.encode_documents(texts), strict=True
    ):
        assert ids.tolist() == loaded_ids.tolist()
    assert [entry.name for entry in tmp_path.iterdir()] == ["tokenizer.json"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not a tokenizer.json"),
        ("[" * 100_000, "is not a tokenizer.json"),
        (b"\xff\xfe", "is not text in UTF-8"),
        (None, "no such file"),
        (
            '{"version":"1.0","model":{"type":"BPE","vocab":{"a":0},"merges":[]}}',
            "no <.endoftext.> token",
        ),
        (
            '{"version":"1.0","model":{"type":"BPE","vocab":{"a":0,"<eos>":4294967295},"merges":[]}}',
            "numbers the token '<eos>' 4294967295; .*nearest legal value: 1048575",
        ),
    ],
)
def test_refused_by_name(tmp_path: Path, content: str | bytes | None, words: str) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadInput, match=words) as caught:
        load_tokenizer(path)
    assert "tokenizer.json" in str(caught.value)
    assert "\n" not in str(caught.value)
