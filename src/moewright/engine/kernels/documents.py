"""The keys that documents leave to each query, where a key is of one token or of a few.

Shapes: B sequences of S tokens; M = S / rate keys of `rate` tokens in each.
"""

from __future__ import annotations

import torch


def bound_keys(ends: torch.Tensor, *, total: int, seq_len: int, rate: int) -> torch.Tensor:
    """Return where the document of each token starts, and which keys it reads: [B,S,3] int32.

    `ends` [documents + 1] are where each document starts and the last one ends, of `total` tokens;
    none crosses the end of a sequence. A document has a key of every `rate` tokens from its first
    on, and none of what is left at its end; the keys of a sequence follow each other. All that is
    returned counts from the beginning of the sequence: the start, the first key of the document,
    and the key after the last that ends before the next token.
    """
    ends = ends.long()
    tokens = torch.arange(total, device=ends.device)
    document = torch.searchsorted(ends, tokens, right=True) - 1
    counts = ends.diff() // rate
    first = (counts.cumsum(0) - counts)[document].unflatten(0, (-1, seq_len))
    first = first - first[:, :1]
    start = ends[document].unflatten(0, (-1, seq_len)) % seq_len
    stop = first + (torch.arange(seq_len, device=ends.device) - start + 1) // rate
    return torch.stack((start, first, stop), -1).int()


def find_keys(bounds: torch.Tensor, rate: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first token of each key in its sequence, and whether it is its document's first.

    Both [B,M], of `bounds` [B,S,3]. Places that no document has a key for, the last ones of a
    sequence, are of its first tokens.
    """
    start, first, stop = bounds.long().unbind(-1)
    length = bounds.shape[1]
    tokens = torch.arange(length, device=bounds.device)
    is_end = (tokens - start + 1) % rate == 0
    count = length // rate
    # A column more than there are keys takes the tokens that end none.
    places = torch.where(is_end, stop - 1, count)
    begins = torch.zeros_like(start[:, : count + 1])
    begins.scatter_(1, places, tokens.expand_as(places) - rate + 1)
    starts_document = torch.zeros_like(begins, dtype=torch.bool)
    starts_document.scatter_(1, places, stop - 1 == first)
    return begins[:, :count], starts_document[:, :count]
