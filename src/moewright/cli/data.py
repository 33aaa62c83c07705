"""`moewright data build`: text to token files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import Parameter

from moewright.cli.answers import print_now, reserve_stdout, write_told_answer
from moewright.cli.option_types import Count, Flag, JsonOption
from moewright.cli.progress import show_bytes
from moewright.spec.errors import BadInput, Reason
from moewright.spec.names import closest_match

if TYPE_CHECKING:
    from rich.progress import TaskID

    from moewright.engine.data.build_corpus import BuildReport, CorpusOptions
    from moewright.engine.data.chat_encoder import ChatOptions

_MADE_TOKENIZERS = ("bpe", "bytes")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusFlags:
    """Options that say what a corpus is made of.

    Parameters
    ----------
    field
        The field of text of JSON lines, Parquet and Arrow.
    tokenizer
        bpe learns merges over bytes from the text; bytes takes the 256 bytes as they are; anything
        else is a published tokenizer.json, the folder that holds it, or the id of a model of the
        hub.
    vocab_size
        Size of the vocabulary that bpe learns, such as 4096 or 32k.
    heldout
        Share of the text that is held out of training; 0 holds nothing out.
    limit
        Text to read at most, such as 16MB or 2GB, a fair sample of the files; all of it when not
        given.
    shard_size
        Bytes of tokens after which a pair of files ends and the next begins, such as 2GB; one pair
        when not given. What is read does not depend on it.
    chats
        The records are chats in a form of public datasets: messages, conversations (ShareGPT),
        instruction and output (alpaca), question and answer, transcripts; or pairs of answers,
        chosen and rejected, for train.objective = dpo. They are written by the chat template of the
        folder that --tokenizer names, and the assistant's tokens alone are
        learnt.
    chat_template
        With --chats, a file with the template, in place of the folder's own.
    columns
        With --chats, the fields of records where they are not recognized, such as
        prompt=instruction,answer=output; system, context, messages, chosen, rejected, tools too.
    skip_bad
        With --chats, leave out so many bad records at most, and list them in bad_records.txt.
    """

    field: str = "text"
    tokenizer: str = "bpe"
    vocab_size: Count = 4096
    heldout: float = 0.05
    limit: str = ""
    shard_size: str = ""
    chats: Flag = False
    chat_template: Path | None = None
    columns: str = ""
    skip_bad: Count = 0

    def to_chat_options(self) -> ChatOptions:
        """Return the options of a build of chats.

        Raises:
            BadInput: for a tokenizer without a folder, or an option that chats do not have.
        """
        from moewright.engine.data.chat_encoder import ChatOptions

        if self.tokenizer in _MADE_TOKENIZERS:
            rule = "of chats is that of the model: a folder with tokenizer.json and its template"
            nearest = "the Hugging Face folder of the model"
            raise BadInput(
                Reason(field="--tokenizer", value=self.tokenizer, rule=rule, nearest=nearest)
            )
        for option, value in (("--limit", self.limit), ("--shard-size", self.shard_size)):
            if value:
                raise BadInput(Reason(field=option, value=value, rule="is not for --chats"))
        return ChatOptions(
            tokenizer=_find_tokenizer(self.tokenizer),
            template=self.chat_template,
            heldout_fraction=self.heldout,
            columns=self.columns,
            skip_bad=self.skip_bad,
        )

    def to_options(self) -> CorpusOptions:
        """Return the options of the build.

        Raises:
            BadInput: for a tokenizer that is neither a kind nor a file, or a limit that is no size.
        """
        from moewright.codec.numbers import parse_bytes
        from moewright.engine.data.build_corpus import CorpusOptions
        from moewright.engine.data.tokenizer import TokenizerKind

        of_chats = (
            ("--chat-template", self.chat_template),
            ("--columns", self.columns),
            ("--skip-bad", self.skip_bad),
        )
        for option, value in of_chats:
            if value:
                raise BadInput(Reason(field=option, value=str(value), rule="is for --chats"))
        kind = TokenizerKind.PUBLISHED
        path = None
        if self.tokenizer in _MADE_TOKENIZERS:
            kind = TokenizerKind(self.tokenizer)
        else:
            path = _find_tokenizer(self.tokenizer)
        return CorpusOptions(
            field=self.field,
            tokenizer=kind,
            tokenizer_path=path,
            vocab_size=self.vocab_size,
            heldout_fraction=self.heldout,
            limit_bytes=parse_bytes(self.limit, "--limit") if self.limit else None,
            shard_bytes=(parse_bytes(self.shard_size, "--shard-size") if self.shard_size else None),
        )


DEFAULT_CORPUS_FLAGS = CorpusFlags()


def data_build(
    source: Path | None = None,
    /,
    *,
    out: Path,
    corpus: CorpusFlags = DEFAULT_CORPUS_FLAGS,
    force: Flag = False,
    json: JsonOption = None,
) -> int:
    """Turn text or chats into Megatron .bin/.idx files for training and held-out loss.

    A build of text that was interrupted goes on where it stopped.

    Parameters
    ----------
    source
        A file or a folder: text, JSON lines (.jsonl, .jsonl.gz), Parquet or Arrow; of chats a list
        in JSON, CSV, or the folder of a dataset too; the running interpreter's own standard library
        when not given.
    out
        The folder to write.
    force
        Build again even when the folder holds this very data.
    json
        Write what was built (corpus, data as a job names them, outcome, seconds) to this file; "-":
        to standard output, and the text to standard error.
    """
    from moewright.engine.data.build_chats import build_chats
    from moewright.engine.data.build_corpus import RebuildPolicy, build_corpus

    rebuild = RebuildPolicy.ALWAYS if force else RebuildPolicy.IF_CHANGED
    if corpus.chats:
        if source is None:
            raise BadInput(Reason(field="source", rule="is needed with --chats: a file or folder"))
        chat_options = corpus.to_chat_options()
        with _show_progress() as report_progress:
            result = build_chats(
                source, out, chat_options, rebuild=rebuild, report_progress=report_progress
            )
        with reserve_stdout(json):
            _print_chat_report(out, result)
        write_told_answer(result, json)
        return 0
    options = corpus.to_options()
    with _show_progress() as report_progress:
        result = build_corpus(
            source, out, options, rebuild=rebuild, report_progress=report_progress
        )
    with reserve_stdout(json):
        _print_report(out, options, result)
    write_told_answer(result, json)
    return 0


def _find_tokenizer(text: str) -> Path:
    from moewright.intake.hub import locate_tokenizer

    path = locate_tokenizer(Path(text), "--tokenizer")
    if not path.exists():
        rule = f"must be {' or '.join(_MADE_TOKENIZERS)}, or a tokenizer.json or its folder"
        nearest = closest_match(text, _MADE_TOKENIZERS)
        raise BadInput(Reason(field="--tokenizer", value=text, rule=rule, nearest=nearest))
    return path


def _print_chat_report(out: Path, result: BuildReport) -> None:
    from moewright.engine.data.build_chats import BAD_FILE
    from moewright.engine.data.build_corpus import BuildOutcome
    from moewright.engine.data.corpus import count_samples
    from moewright.spec.units import format_seconds

    corpus = result.corpus
    if result.outcome is BuildOutcome.REUSED:
        print_now(f"{out} already holds these chats; --force builds them again")
    heldout = "nothing held out"
    if corpus.heldout.documents:
        heldout = f"{count_samples(corpus, corpus.heldout)} held out"
    learnt = corpus.train.learnt_tokens / max(1, corpus.train.tokens)
    print_now(
        f"{out}: {count_samples(corpus, corpus.train)} of {corpus.train.tokens:,} tokens to train "
        f"on, of which {learnt:.0%} are the assistant's; {heldout}; the longest sample has "
        f"{corpus.longest.tokens:,} tokens ({corpus.longest.where}); "
        f"{format_seconds(result.seconds)}"
    )
    if corpus.bad_records:
        print_now(f"{corpus.bad_records:,} bad records left out: {out / BAD_FILE}")


def _print_report(out: Path, options: CorpusOptions, result: BuildReport) -> None:
    from moewright.engine.data.build_corpus import BuildOutcome
    from moewright.spec.units import format_bytes, format_seconds

    corpus = result.corpus
    if result.outcome is BuildOutcome.REUSED:
        print_now(f"{out} already holds this corpus; --force builds it again")
    else:
        line = f"read {format_bytes(corpus.text_bytes)} from {corpus.files} files"
        line += f" of {corpus.source}"
        if options.limit_bytes is not None:
            line += f", at most {format_bytes(options.limit_bytes)} as --limit says"
        if corpus.skipped_files:
            line += f", {corpus.skipped_files} skipped as not UTF-8 text"
        if corpus.empty_documents:
            line += f", {corpus.empty_documents:,} empty documents left out"
        print_now(line)
        if result.resumed_documents:
            # A rate is not told: only part of the text was encoded in this time.
            resumed = f"{result.resumed_documents:,} documents of an interrupted build"
            print_now(f"went on after {resumed}")
        else:
            rate = corpus.text_bytes / 1e6 / max(result.encode_s, 1e-9)
            print_now(f"encoded at {rate:,.1f} MB/s")
    heldout = "nothing held out"
    if corpus.heldout.documents:
        heldout = (
            f"{corpus.heldout.tokens:,} held out, "
            f"unigram entropy {corpus.unigram_entropy:.3f} nats a token"
        )
    print_now(
        f"{out}: {corpus.train.tokens:,} tokens to train on, {heldout}; "
        f"vocabulary {corpus.vocab_size} ({corpus.tokenizer}); {format_seconds(result.seconds)}"
    )


@contextmanager
def _show_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar for each thing that is done; what is yielded sets the bytes of one."""
    with show_bytes() as progress:
        tasks: dict[str, TaskID] = {}

        def report_progress(what: str, done: int, total: int) -> None:
            # A bar is made when its thing begins: its total is known then.
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done)

        yield report_progress
