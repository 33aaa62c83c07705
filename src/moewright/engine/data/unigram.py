"""The loss of a model that has learnt no more than how often each token occurs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moewright.engine.data.indexed import IndexedDataset, Tokens

Counts = npt.NDArray[np.int64]

# Of a longer stream, blocks are counted that are evenly spaced over it.
_MAX_TOKENS = 1 << 26
_BLOCK_TOKENS = 1 << 20


def unigram_entropy(train: IndexedDataset, heldout: IndexedDataset, vocab_size: int) -> float:
    """Return the nats a token of the held-out stream under the train stream's unigram frequencies.

    One is added to every count (Laplace smoothing). Tokens outside the vocabulary are left out.
    """
    return unigram_nats(
        np.bincount(_sample(train, vocab_size), minlength=vocab_size),
        np.bincount(_sample(heldout, vocab_size), minlength=vocab_size),
    )


def unigram_nats(train_counts: Counts, heldout_counts: Counts) -> float:
    """Return these nats from the counts of each token [vocab]; 0 where nothing is held out."""
    total = int(heldout_counts.sum())
    if not total:
        return 0.0
    smoothed = train_counts + 1.0
    nats = np.log(smoothed.sum()) - np.log(smoothed)
    return float(nats @ heldout_counts / total)


def sum_token_counts(parts: Sequence[tuple[IndexedDataset, float]], vocab_size: int) -> Counts:
    """Return the counts of each token [vocab] in a blend of streams by their shares.

    They are of as many tokens as the streams have together.
    """
    counts = [np.bincount(_sample(pair, vocab_size), minlength=vocab_size) for pair, _ in parts]
    total = sum(int(part.sum()) for part in counts)
    blended = sum(
        share * total * part / max(1, part.sum())
        for part, (_, share) in zip(counts, parts, strict=True)
    )
    return np.rint(blended).astype(np.int64)


def _sample(dataset: IndexedDataset, vocab_size: int) -> Tokens:
    """Return the tokens of a stream, or of blocks that are evenly spaced over a long one."""
    tokens = dataset.tokens
    if len(tokens) <= _MAX_TOKENS:
        tokens = tokens[:]
    else:
        starts = np.linspace(0, len(tokens) - _BLOCK_TOKENS, _MAX_TOKENS // _BLOCK_TOKENS)
        tokens = np.concatenate(
            [tokens[start : start + _BLOCK_TOKENS] for start in starts.astype(np.int64)]
        )
    return tokens[(tokens >= 0) & (tokens < vocab_size)]
