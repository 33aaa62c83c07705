"""Text in, corpus out: split, counts, skipped files, refusals, and when a corpus is used again."""

from __future__ import annotations

import gzip
import json
import math
import struct
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from moewright.codec.foreign import read_apart
from moewright.engine.data import build_corpus as build_module
from moewright.engine.data.build_corpus import (
    BuildOutcome,
    CorpusOptions,
    RebuildPolicy,
    build_corpus,
)
from moewright.engine.data.corpus import find_heldout_limit, read_corpus, unigram_entropy
from moewright.engine.data.indexed import open_indexed
from moewright.engine.data.sampler import read_samples
from moewright.engine.data.sharded import open_stream
from moewright.engine.data.source import STDLIB_EXCLUDED, DocumentReader, SkipReason, find_source
from moewright.engine.data.tokenizer import TokenizerKind, load_tokenizer, train_bpe
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
    report = build_corpus(
        folder, tmp_path / "out", CorpusOptions(vocab_size=300, heldout_fraction=0.2)
    )
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
    report = build_corpus(folder, tmp_path / "out", CorpusOptions(tokenizer=TokenizerKind.BYTES))
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


def _read_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a corpus; the lock has the number of the process that had it."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


def test_the_same_corpus_is_used_again_and_a_changed_one_is_not(
    folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"

    def run(
        vocab_size: int = 280, rebuild: RebuildPolicy = RebuildPolicy.IF_CHANGED
    ) -> BuildOutcome:
        options = CorpusOptions(vocab_size=vocab_size)
        return build_corpus(folder, out, options, rebuild=rebuild).outcome

    assert run() is BuildOutcome.BUILT
    first = _read_files(out)
    assert run() is BuildOutcome.REUSED
    assert run(rebuild=RebuildPolicy.ALWAYS) is BuildOutcome.BUILT
    assert _read_files(out) == first
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
    documents = list(DocumentReader(find_source(path, tmp_path / "out")))
    assert "".join(documents) == "".join(lines)
    assert 64 <= len(documents) <= 80
    assert all(document.endswith("\n") for document in documents)
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
    reader = DocumentReader(find_source(path, tmp_path / "out"), limit_bytes=limit)
    assert "".join(reader) == kept
    assert reader.text_bytes == len(kept.encode())


def test_order_does_not_depend_on_the_file_system(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    for path in sorted(folder.glob("*/*.txt"), reverse=True):
        target = moved / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    for name in ("latin.txt", "zero.bin", "empty.txt"):
        (moved / name).write_bytes((folder / name).read_bytes())
    first, second = (
        DocumentReader(find_source(root, tmp_path / "out"), limit_bytes=8000)
        for root in (folder, moved)
    )
    assert list(first) == list(second)
    assert 7000 < first.text_bytes <= 8000


def test_equal_documents_are_on_one_side() -> None:
    hashes = np.array([7, 3, 3, 9, 5] * 10, dtype=np.uint64)
    chars = np.full(50, 10)
    limits = [find_heldout_limit(hashes, chars, share, "here") for share in (0.0, 0.01, 0.5, 1.0)]
    # 3 has two fifths of the characters; the largest hash always stays to train on.
    assert limits == [0, 5, 7, 9]


def test_out_inside_the_source_is_not_read(folder: Path) -> None:
    out = folder / "corpus"
    assert build_corpus(folder, out, CorpusOptions(vocab_size=280)).outcome is BuildOutcome.BUILT
    assert build_corpus(folder, out, CorpusOptions(vocab_size=280)).outcome is BuildOutcome.REUSED
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
    reader = DocumentReader(source, limit_bytes=200_000)
    assert list(reader)
    assert 150_000 < reader.text_bytes <= 200_000


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
        (folder, out, {"heldout_fraction": 0.6}, "heldout_fraction=0.6: .*nearest legal value"),
        (folder, out, {"heldout_fraction": math.nan}, "heldout_fraction"),
        (folder, out, {"limit_bytes": 0}, "limit_bytes"),
        (folder, out, {"vocab_size": 256}, "vocab_size=256: .*nearest legal value: 257"),
        (folder, out, {"vocab_size": 10**12}, "vocab_size"),
    )
    for source, target, changes, words in cases:
        with pytest.raises(BadInput, match=words):
            build_corpus(source, target, CorpusOptions(**changes))  # type: ignore[arg-type]
    assert not out.exists() or not any(out.iterdir())


def test_everything_is_read_unless_a_limit_says_otherwise(tmp_path: Path) -> None:
    """Words that the tokenizer does not have are a token each, which takes least time of all."""
    inner = Tokenizer(WordLevel({"[UNK]": 0, "</s>": 1}, unk_token="[UNK]"))
    inner.pre_tokenizer = WhitespaceSplit()
    tokenizer = tmp_path / "tokenizer.json"
    inner.save(str(tokenizer))
    root = tmp_path / "texts"
    root.mkdir()
    for number in range(3):
        (root / f"{number}.txt").write_text(f"{number}".zfill(9_999).join(["\n"] * 1_001))
    report = build_corpus(
        root,
        tmp_path / "out",
        CorpusOptions(
            tokenizer=TokenizerKind.PUBLISHED, tokenizer_path=tokenizer, heldout_fraction=0.0
        ),
    )
    assert report.corpus.text_bytes == sum(path.stat().st_size for path in root.iterdir()) > 2e7
    assert report.corpus.train.tokens == 3_000 + report.corpus.train.documents
    assert (report.corpus.heldout.documents, report.data.heldout) == (0, "")
    assert not (tmp_path / "out" / "heldout.bin").exists()


def write_records(root: Path) -> list[str]:
    """Write two files of records; return their texts, of which two are empty."""
    texts = [f"record {number} says {WORDS[number % 14]}\n" for number in range(60)]
    records = [json.dumps({"id": number, "body": text}) for number, text in enumerate(texts)]
    root.mkdir()
    (root / "a.jsonl").write_text("\n".join([*records[:30], "", '{"body": null}']) + "\n")
    with gzip.open(root / "b.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join([*records[30:], '{"body": "  "}']))
    return texts


@read_apart
def read_documents(path: Path, out: Path, **options: str) -> tuple[list[str], DocumentReader]:
    """Read all documents of a source; the reader has counted them."""
    reader = DocumentReader(find_source(path, out), **options)
    return list(reader), reader


def test_records_are_read_by_their_field(tmp_path: Path) -> None:
    texts = write_records(tmp_path / "texts")
    documents, reader = read_documents(tmp_path / "texts", tmp_path / "out", field="body")
    assert sorted(documents) == sorted(texts)
    assert (reader.files, reader.skipped) == (2, {SkipReason.EMPTY: 2})
    options = CorpusOptions(field="body", vocab_size=300)
    corpus = build_corpus(tmp_path / "texts", tmp_path / "out", options).corpus
    assert corpus.train.documents + corpus.heldout.documents == 60
    assert corpus.empty_documents == 2


@pytest.mark.parametrize("name", ["t.parquet", "t.arrow", "stream.arrow"])
def test_columns_are_read_by_their_name(tmp_path: Path, name: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import ipc, parquet

    texts = [f"row {number}" for number in range(3000)]
    table = pyarrow.table({"n": list(range(3000)), "text": texts})
    path = tmp_path / name
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=700)
    else:
        create = ipc.new_stream if name.startswith("stream") else ipc.new_file
        with create(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=700)
    assert read_documents(path, tmp_path / "out")[0] == texts
    rule = r"no field 'txt'; it has n, text.*nearest legal value: text"
    with pytest.raises(BadInput, match=rule):
        read_documents(path, tmp_path / "out", field="txt")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(BadInput, match=name):
        read_documents(path, tmp_path / "out")


def test_offsets_beyond_a_column_are_not_followed(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import ipc

    table = pyarrow.table({"text": ["a" * 81] * 3})
    path = tmp_path / "t.arrow"
    with ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    intact = path.read_bytes()
    for offset in (-5, 1 << 20):
        path.write_bytes(
            intact.replace(struct.pack("<3i", 0, 81, 162), struct.pack("<3i", 0, offset, 162))
        )
        with pytest.raises(BadInput, match=r"t\.arrow: is damaged"):
            read_documents(path, tmp_path / "out")


def test_a_column_that_stands_twice_is_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = [pyarrow.array(["a"]), pyarrow.array(["b"])]
    parquet.write_table(pyarrow.table(columns, names=["text"] * 2), tmp_path / "t.parquet")
    with pytest.raises(BadInput, match=r"t\.parquet, after row 0: cannot be read"):
        read_documents(tmp_path / "t.parquet", tmp_path / "out")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "a"', r"t.jsonl:2: is no line of JSON"),
        ("[1]", r"t.jsonl:2: is no JSON object"),
        ('{"texts": "a"}', r"t.jsonl:2: has no field 'text'; it has texts.*: texts"),
        ('{"text": 3}', r"t.jsonl:2: text: must be text, and is of type int"),
        ("[" * 100_000, r"t.jsonl:2: is no line of JSON"),
    ],
)
def test_a_broken_record_is_named_and_nothing_is_written(
    tmp_path: Path, line: str, words: str
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(BadInput, match=words):
        build_corpus(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_published_tokenizer_encodes_the_text(folder: Path, tmp_path: Path) -> None:
    """Its documents end with the eos_token that the file beside it names."""
    published = tmp_path / "published"
    published.mkdir()
    made = train_bpe((path.read_text() for path in folder.glob("*/*.txt")), vocab_size=300)
    text = made.inner.to_str().replace("<|endoftext|>", "<|my_end|>")
    (published / "tokenizer.json").write_text(text)
    options = CorpusOptions(tokenizer=TokenizerKind.PUBLISHED, tokenizer_path=published)
    with pytest.raises(BadInput, match=r"has no .* token to end documents"):
        build_corpus(folder, tmp_path / "out", options)
    (published / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|my_end|>"}}')
    report = build_corpus(folder, tmp_path / "out", options)
    tokenizer = load_tokenizer(Path(report.data.tokenizer))
    assert tokenizer.inner.id_to_token(tokenizer.end_of_document) == "<|my_end|>"
    data = open_indexed(Path(report.data.train))
    first = data.tokens[: data.lengths[0]].tolist()
    assert first[-1] == tokenizer.end_of_document
    assert tokenizer.decode(first) in {path.read_text("utf-8") for path in folder.glob("*/*.txt")}


def test_an_interrupted_build_goes_on_where_it_flushed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "_FLUSH_BYTES", 5000)
    monkeypatch.setattr(build_module, "_BATCH_DOCUMENTS", 4)
    whole, out = tmp_path / "whole", tmp_path / "out"
    build_corpus(folder, whole)

    def interrupt(what: str, done: int, total: int) -> None:
        if what == "encoding" and done > 0.6 * total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_apart(partial(build_corpus, folder, out, report_progress=interrupt))()
    with pytest.raises(BadInput):
        read_corpus(out)
    report = build_corpus(folder, out)
    assert 0 < report.resumed_documents < 30
    names = {path.name for path in whole.iterdir()}
    assert {path.name for path in out.iterdir()} == names
    for name in names - {"lock"}:
        assert (out / name).read_bytes() == (whole / name).read_bytes()


def test_shards_are_the_stream_of_one_pair(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples, documents and entropy are those of one pair, and each shard is a pair of its own."""
    monkeypatch.setattr(build_module, "_BATCH_DOCUMENTS", 4)
    whole = build_corpus(folder, tmp_path / "whole")
    out = tmp_path / "out"
    report = build_corpus(folder, out, CorpusOptions(shard_bytes=4000))
    pair, stream = open_indexed(Path(whole.data.train)), open_stream(Path(report.data.train))
    assert len(stream.shards) > 3
    assert all(2 * shard.token_count >= 4000 for shard in stream.shards[:-1])
    for name in ("lengths", "document_marks", "document_starts"):
        assert np.array_equal(getattr(stream, name), getattr(pair, name))
    ids = np.array([5, 0, 3, 17])
    for seq_len in (16, 100):
        read = [
            read_samples(data, ids, seq_len=seq_len, vocab_size=4096) for data in (pair, stream)
        ]
        assert np.array_equal(*read)
    assert np.array_equal(stream.tokens[1500:4711], pair.tokens[1500:4711])
    assert report.corpus.unigram_entropy == whole.corpus.unigram_entropy
    assert report.corpus.train.tokens == whole.corpus.train.tokens
    assert build_corpus(folder, out, CorpusOptions(shard_bytes=4000)).outcome is BuildOutcome.REUSED
    open_indexed(out / "train-00001")
    (out / "train-00001.bin").unlink()
    with pytest.raises(BadInput, match=r"train-00001.bin: does not exist"):
        open_stream(out / "train")
    build_corpus(folder, out)
    assert not list(out.glob("*-0000*"))
    assert open_stream(out / "train").fingerprint == pair.fingerprint


def test_interrupted_shards_go_on_where_they_were_flushed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written after the last flush, whole shards of it too, is written again."""
    monkeypatch.setattr(build_module, "_FLUSH_BYTES", 20_000)
    monkeypatch.setattr(build_module, "_BATCH_DOCUMENTS", 2)
    options = CorpusOptions(shard_bytes=3000, tokenizer=TokenizerKind.BYTES)
    whole, out = tmp_path / "whole", tmp_path / "out"
    build_corpus(folder, whole, options)

    for share in (0.4, 0.9):

        def interrupt(what: str, done: int, total: int, share: float = share) -> None:
            if what == "encoding" and done > share * total:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            read_apart(partial(build_corpus, folder, out, options, report_progress=interrupt))()
    assert build_corpus(folder, out, options).resumed_documents > 0
    names = {path.name for path in whole.iterdir()}
    assert {path.name for path in out.iterdir()} == names
    for name in names - {"lock"}:
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name
