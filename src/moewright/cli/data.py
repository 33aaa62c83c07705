"""`moewright data build`: text to token files."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from moewright.cli.options import Count, Flag


def data_build(
    source: Path | None = None,
    /,
    *,
    out: Path,
    vocab_size: Count = 4096,
    tokenizer: Literal["bpe", "bytes"] = "bpe",
    force: Flag = False,
) -> int:
    """Turn text into Megatron .bin/.idx files for training and held-out loss.

    A tokenizer is trained on the text as well.

    Parameters
    ----------
    source
        A text file or a folder of them; the running interpreter's own standard library when not
        given.
    out
        The folder to write.
    vocab_size
        Size of the vocabulary that bpe learns, such as 4096 or 32k.
    tokenizer
        bpe learns merges over bytes; bytes takes the 256 bytes as they are.
    force
        Build again even when the folder holds this very data.
    """
    from moewright.engine.data.build_corpus import BuildOutcome, RebuildPolicy, build_corpus
    from moewright.engine.data.tokenizer import TokenizerKind
    from moewright.spec.units import format_bytes, format_seconds

    rebuild = RebuildPolicy.ALWAYS if force else RebuildPolicy.IF_CHANGED
    result = build_corpus(
        source,
        out,
        vocab_size=vocab_size,
        tokenizer=TokenizerKind(tokenizer),
        rebuild=rebuild,
    )
    corpus = result.corpus
    if result.outcome is BuildOutcome.REUSED:
        print(f"{out} already holds this corpus; --force builds it again")
    else:
        line = f"read {format_bytes(corpus.text_bytes)} from {corpus.files} files"
        line += f" of {corpus.source}"
        if corpus.skipped_files:
            line += f", {corpus.skipped_files} skipped as not UTF-8 text"
        print(line)
    print(
        f"{out}: {corpus.train.tokens:,} tokens to train on, {corpus.heldout.tokens:,} held out, "
        f"vocabulary {corpus.vocab_size} ({corpus.tokenizer}), "
        f"unigram entropy {corpus.unigram_entropy:.3f} nats a token; "
        f"{format_seconds(result.seconds)}"
    )
    return 0
