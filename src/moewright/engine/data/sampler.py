"""Which tokens a step trains on: a pure function of (seed, step), whatever the layout.

Documents lie end to end in one stream. Sample i covers tokens [i * seq_len, i * seq_len + seq_len],
so neighbours share one token (the last target of one is the first input of the next) and every
token but the first is a target once. What is left at the end of the stream, fewer than seq_len
targets, is not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from moewright.engine.data.indexed import IndexedDataset, refuse_if_shrunk
from moewright.spec.errors import BadInput, Reason

FEISTEL_ROUNDS = 6  # four make a pseudorandom permutation (Luby, Rackoff); two to spare
MASK64 = (1 << 64) - 1  # Python's integers do not wrap, numpy's do

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]


class SampleOrder(StrEnum):
    """The order in which samples are read."""

    SHUFFLED = "shuffled"  # another permutation each epoch
    SEQUENTIAL = "sequential"  # as they lie, for held-out data


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """An endless sequence of sample ids; each epoch holds every id in [0, samples) exactly once."""

    samples: int
    seed: int
    order: SampleOrder = SampleOrder.SHUFFLED

    def sample_ids(self, first: int, count: int) -> Int64s:
        """Return int64 ids [count] from place `first` of the sequence on, over edges of epochs."""
        if first < 0 or count < 1:
            raise ValueError(f"{count} samples from {first} on")
        parts = []
        position = first
        remaining = count
        while remaining:
            epoch, start = divmod(position, self.samples)
            taken = min(remaining, self.samples - start)
            index = np.arange(start, start + taken, dtype=np.int64)
            if self.order is SampleOrder.SHUFFLED:
                index = permute(index, self.samples, self.seed, epoch)
            parts.append(index)
            position += taken
            remaining -= taken
        return np.concatenate(parts)


def permute(index: Int64s, size: int, seed: int, epoch: int) -> Int64s:
    """Return the images of `index` under the permutation of [0, size) that (seed, epoch) name.

    The permutation is not stored: it is a balanced Feistel network on the next even number of bits.
    Images outside are walked along their cycle until they fall inside (Black and Rogaway 2002,
    "Ciphers with arbitrary finite domains"), at most about 4 steps on average.
    """
    # Both halves of a balanced network are equally wide.
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    epoch_key = _mix_int(_mix_int(seed) ^ epoch)
    keys = [_mix_int(epoch_key ^ number) for number in range(FEISTEL_ROUNDS)]
    image = _feistel(index.astype(np.uint64), half, keys)
    outside = np.flatnonzero(image >= size)
    while outside.size:
        image[outside] = _feistel(image[outside], half, keys)
        outside = outside[image[outside] >= size]
    return image.astype(np.int64)


def _feistel(value: UInt64s, half: int, keys: list[int]) -> UInt64s:
    mask = np.uint64((1 << half) - 1)
    shift = np.uint64(half)
    left, right = value >> shift, value & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ np.uint64(key)) & mask)
    return (left << shift) | right


def _mix(value: UInt64s) -> UInt64s:
    """Apply the splitmix64 finalizer (Steele, Lea, Flood 2014), wrapping at 64 bits."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _mix_int(value: int) -> int:
    return int(_mix(np.array([(value + 0x9E3779B97F4A7C15) & MASK64], dtype=np.uint64))[0])


def sample_count(dataset: IndexedDataset, seq_len: int) -> int:
    """Return the number of whole samples in the stream."""
    return (dataset.token_count - 1) // seq_len


def build_sampler(
    dataset: IndexedDataset,
    *,
    seq_len: int,
    global_batch: int,
    seed: int,
    order: SampleOrder = SampleOrder.SHUFFLED,
) -> Sampler:
    """Build the sampler of a dataset; raise BadInput when it does not fill one global batch."""
    samples = sample_count(dataset, seq_len)
    if samples < global_batch:
        rule = (
            f"{dataset.token_count} tokens give {max(samples, 0)} samples of {seq_len}; "
            f"a global batch needs {global_batch} ({global_batch * seq_len + 1} tokens)"
        )
        raise BadInput(Reason(field=str(dataset.bin_path), rule=rule))
    return Sampler(samples=samples, seed=seed, order=order)


def count_whole_batches(samples: int, *, global_batch: int, limit: int) -> int:
    """Count the batches, at most `limit`, that so many samples fill; the tail is dropped."""
    return min(limit, samples // global_batch)


def micro_batch_rows(
    *, global_batch: int, dp: int, dp_rank: int, mbs: int, micro_batch: int
) -> range:
    """Return the rows of the global batch in one micro-batch of one data-parallel rank.

    Rank d owns the contiguous block [d, d + 1) * global_batch / dp; its micro-batches follow each
    other in the block.

    Raises:
        BadInput: when the global batch is no multiple of dp * mbs.
        ValueError: for a rank or a micro-batch that does not exist.
    """
    if global_batch % (dp * mbs):
        nearest = max(global_batch // (dp * mbs), 1) * dp * mbs
        rule = f"must be a multiple of dp * mbs = {dp * mbs}"
        raise BadInput(
            Reason(field="global_batch", rule=rule, value=str(global_batch), nearest=str(nearest))
        )
    block = global_batch // dp
    if not (0 <= dp_rank < dp and 0 <= micro_batch < block // mbs):
        raise ValueError(f"dp rank {dp_rank} of {dp}, micro-batch {micro_batch} of {block // mbs}")
    start = dp_rank * block + micro_batch * mbs
    return range(start, start + mbs)


def document_ends(dataset: IndexedDataset, sample: int, *, seq_len: int) -> tuple[int, ...]:
    """Return the positions 1 to seq_len of a sample before which a document ends.

    The token at such a position is the first of another document.
    """
    starts = dataset.document_starts
    first = sample * seq_len
    # From the second token on, up to the one after the last, which is a target.
    low, high = np.searchsorted(starts, [first + 1, first + seq_len + 1])
    # Empty documents start where the next one does.
    return tuple(dict.fromkeys((starts[low:high] - first).tolist()))


def attended_share(dataset: IndexedDataset, *, seq_len: int) -> float:
    """Return the share of the token pairs of whole samples that lie within one document.

    It is 1 where the dataset has no whole sample.
    """
    samples = sample_count(dataset, seq_len)
    if samples < 1:
        return 1.0
    stop = samples * seq_len
    starts = dataset.document_starts
    sample_starts = np.arange(samples + 1, dtype=np.int64) * seq_len
    edges = np.union1d(starts[starts < stop], sample_starts)
    return float(np.square(np.diff(edges).astype(np.float64)).sum() / (stop * seq_len))


def read_samples(dataset: IndexedDataset, ids: Int64s, *, seq_len: int, vocab_size: int) -> Int64s:
    """Read tokens int64 [len(ids), seq_len + 1]: inputs are [:, :-1], targets [:, 1:].

    Raises:
        BadInput: naming the file and the position, when a token is outside [0, vocab_size).
    """
    refuse_if_shrunk(dataset)
    positions = ids[:, None] * seq_len + np.arange(seq_len + 1, dtype=np.int64)
    tokens = np.asarray(dataset.tokens[positions], dtype=np.int64)
    outside = (tokens < 0) | (tokens >= vocab_size)
    if outside.any():
        row, column = np.argwhere(outside)[0]
        rule = (
            f"token {int(tokens[row, column])} at position {int(positions[row, column])} "
            "is outside the vocabulary"
        )
        nearest = f"an id below {vocab_size}"
        raise BadInput(Reason(field=str(dataset.bin_path), rule=rule, nearest=nearest))
    return tokens
