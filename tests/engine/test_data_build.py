"""Text in, corpus out: split, counts, skipped files, refusals, and when a corpus is used again."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest

from moewright.engine.data.build_corpus import (
    BuildOutcome,
    RebuildPolicy,
    build_corpus,
    read_corpus,
    split_documents,
    unigram_entropy,
)
from moewright.engine.data.indexed import open_indexed
from moewright.engine.data.source import STDLIB_EXCLUDED, find_source, read_documents
from moewright.engine.data.tokenizer import TokenizerKind, load_tokenizer
from moewright.spec.errors import BadInput

WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "experts",
    "wait",
    "for",
    "rows",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Thirty text files in two folders, and things that are not text."""
    root = tmp_path / "texts"
    for number in range(30):
        path = root / ("a" if number % 2 else "b") / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            "\n".join(f"{WORDS[(number * step) % 13]} {number} ünï" for step in range(1, 60)),
            "utf-8",
        )
    (root / "latin.txt").write_bytes("größe".encode("latin-1"))
    (root / "zero.bin").write_bytes(b"ab\0cd")
    (root / ".hidden").write_text("hidden")
    (root / "empty.txt").write_text("")
    return root


def test_a_folder(folder: Path, tmp_path: Path) -> None:
    report = build_corpus(folder, tmp_path / "out", vocab_size=300, heldout_fraction=0.2)
    corpus = report.corpus
    assert report.outcome is BuildOutcome.BUILT
    assert (corpus.files, corpus.skipped_files, corpus.vocab_size) == (31, 2, 300)
    assert corpus.train.documents + corpus.heldout.documents == 30
    assert corpus.heldout.documents == pytest.approx(6, abs=2)
    assert read_corpus(tmp_path / "out") == corpus
    tokenizer = load_tokenizer(Path(report.data.tokenizer))
    for name, split in ((report.data.train, corpus.train), (report.data.heldout, corpus.heldout)):
        data = open_indexed(Path(name))
        assert (data.documents, data.token_count, data.fingerprint) == (
            split.documents,
            split.tokens,
            split.fingerprint,
        )
        assert int((data.tokens == tokenizer.end_of_document).sum()) == split.documents
    texts = {path.read_text("utf-8") for path in folder.glob("*/*.txt")}
    heldout_data = open_indexed(Path(report.data.heldout))
    start = 0
    for length in heldout_data.lengths.tolist():
        assert tokenizer.decode(heldout_data.tokens[start : start + length].tolist()) in texts
        start += length


def test_entropy_by_hand(folder: Path, tmp_path: Path) -> None:
    report = build_corpus(folder, tmp_path / "out", tokenizer=TokenizerKind.BYTES)
    train = open_indexed(tmp_path / "out" / "train")
    heldout = open_indexed(tmp_path / "out" / "heldout")
    counts = Counter(train.tokens.tolist())
    total = train.token_count + 257
    nats = (
        sum(-math.log((counts[token] + 1) / total) for token in heldout.tokens.tolist())
        / heldout.token_count
    )
    assert report.corpus.unigram_entropy == pytest.approx(nats, rel=1e-12)
    assert unigram_entropy(train, heldout, 257) == report.corpus.unigram_entropy
    assert 2 < nats < math.log(257)


def test_the_same_corpus_is_used_again_and_a_changed_one_is_not(
    folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"

    def run(
        vocab_size: int = 280, rebuild: RebuildPolicy = RebuildPolicy.IF_CHANGED
    ) -> BuildOutcome:
        return build_corpus(folder, out, vocab_size=vocab_size, rebuild=rebuild).outcome

    assert run() is BuildOutcome.BUILT
    first = {path.name: path.read_bytes() for path in out.iterdir()}
    assert run() is BuildOutcome.REUSED
    assert run(rebuild=RebuildPolicy.ALWAYS) is BuildOutcome.BUILT
    assert {path.name: path.read_bytes() for path in out.iterdir()} == first
    assert run(vocab_size=290) is BuildOutcome.BUILT
    (folder / "a" / "new.txt").write_text("one more document\n")
    assert run(vocab_size=290) is BuildOutcome.BUILT
    damaged = out / "train.bin"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x01")
    assert run(vocab_size=290) is BuildOutcome.BUILT
    (out / "tokenizer.json").unlink()
    assert run(vocab_size=290) is BuildOutcome.BUILT
    assert run(vocab_size=290) is BuildOutcome.REUSED


def test_one_file_is_cut_into_documents(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    lines = [f"line {number} of a book with {number * 7919 % 1000}\n" for number in range(2000)]
    path.write_text("".join(lines))
    texts = read_documents(find_source(path, tmp_path / "out"), limit_bytes=10**6)
    assert "".join(texts.documents) == "".join(lines)
    assert 64 <= len(texts.documents) <= 80
    assert all(document.endswith("\n") for document in texts.documents)
    assert build_corpus(path, tmp_path / "out").corpus.heldout.documents >= 3


@pytest.mark.parametrize(
    ("text", "limit", "kept"),
    [("ab\ncd\nef\n", 7, "ab\ncd\n"), ("üüüü", 5, "üü"), ("abc", 3, "abc")],
)
def test_the_limit_cuts_at_lines_or_characters(
    tmp_path: Path, text: str, limit: int, kept: str
) -> None:
    path = tmp_path / "t.txt"
    path.write_text(text, "utf-8")
    texts = read_documents(find_source(path, tmp_path / "out"), limit_bytes=limit)
    assert "".join(texts.documents) == kept
    assert texts.text_bytes == len(kept.encode())


def test_order_does_not_depend_on_the_file_system(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    for path in sorted(folder.glob("*/*.txt"), reverse=True):
        target = moved / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    for name in ("latin.txt", "zero.bin", "empty.txt"):
        (moved / name).write_bytes((folder / name).read_bytes())
    limit = 8000
    first = read_documents(find_source(folder, tmp_path / "out"), limit_bytes=limit)
    assert read_documents(find_source(moved, tmp_path / "out"), limit_bytes=limit) == first
    assert 7000 < first.text_bytes <= limit


def test_equal_documents_are_on_one_side() -> None:
    documents = [f"document {number % 5}" for number in range(50)]
    train, heldout = split_documents(documents, 0.01, "here")
    assert len(heldout) == 10
    assert not set(train) & set(heldout)
    assert [document for document in documents if document not in heldout] == list(train)


def test_out_inside_the_source_is_not_read(folder: Path) -> None:
    out = folder / "corpus"
    assert build_corpus(folder, out, vocab_size=280).outcome is BuildOutcome.BUILT
    assert build_corpus(folder, out, vocab_size=280).outcome is BuildOutcome.REUSED
    with pytest.raises(BadInput, match="is the source itself"):
        build_corpus(folder, folder)


def test_standard_library() -> None:
    source = find_source(None, Path("out"))
    assert source.description.startswith("standard library of ")
    assert len(source.files) > 300
    assert all(path.suffix == ".py" for path in source.files)
    assert not any(
        STDLIB_EXCLUDED & set(path.relative_to(source.root).parts) for path in source.files
    )
    report_texts = read_documents(source, limit_bytes=200_000)
    assert 150_000 < report_texts.text_bytes <= 200_000


def test_refusals(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "nothing").mkdir()
    (tmp_path / "one.txt").write_text("\n \n")
    (tmp_path / "file").write_text("x")
    cases: tuple[tuple[Path, Path, dict[str, float], str], ...] = (
        (tmp_path / "absent", out, {}, "source=.*absent: no such file or folder"),
        (tmp_path / "nothing", out, {}, "holds no files of text"),
        (tmp_path / "one.txt", out, {}, "two different documents"),
        (folder / "latin.txt", out, {}, "two different documents"),
        (folder, tmp_path / "file", {}, "is a file; a folder is needed"),
        (folder, tmp_path / "file" / "below", {}, "cannot be written"),
        (folder, out, {"heldout_fraction": 0.0}, "heldout_fraction=0: .*nearest legal value"),
        (folder, out, {"heldout_fraction": math.nan}, "heldout_fraction"),
        (folder, out, {"limit_bytes": 0}, "limit_bytes"),
        (folder, out, {"vocab_size": 256}, "vocab_size=256: .*nearest legal value: 257"),
        (folder, out, {"vocab_size": 10**12}, "vocab_size"),
    )
    for source, target, changes, words in cases:
        with pytest.raises(BadInput, match=words):
            build_corpus(source, target, **changes)  # type: ignore[arg-type]
    assert not out.exists() or not any(out.iterdir())
