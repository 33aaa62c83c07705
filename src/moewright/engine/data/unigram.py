"""The loss of a model that has learnt no more than how often each token occurs."""

from __future__ import annotations

import numpy as np

from moewright.engine.data.indexed import IndexedDataset, Tokens

# Of a longer stream, blocks are counted that are evenly spaced over it.
_MAX_TOKENS = 1 << 26
_BLOCK_TOKENS = 1 << 20


def unigram_entropy(train: IndexedDataset, heldout: IndexedDataset, vocab_size: int) -> float:
    """Return the nats a token of the held-out stream under the train stream's unigram frequencies.

    One is added to every count (Laplace smoothing). Tokens outside the vocabulary are left out.
    """
    counts = np.bincount(_sample(train, vocab_size), minlength=vocab_size) + 1.0
    nats = np.log(counts.sum()) - np.log(counts)
    return float(nats[_sample(heldout, vocab_size)].mean())


def _sample(dataset: IndexedDataset, vocab_size: int) -> Tokens:
    """Return the tokens of a stream, or of blocks that are evenly spaced over a long one."""
    tokens = dataset.tokens
    if len(tokens) > _MAX_TOKENS:
        starts = np.linspace(0, len(tokens) - _BLOCK_TOKENS, _MAX_TOKENS // _BLOCK_TOKENS)
        tokens = np.concatenate(
            [tokens[start : start + _BLOCK_TOKENS] for start in starts.astype(np.int64)]
        )
    return tokens[(tokens >= 0) & (tokens < vocab_size)]
