"""Tables of the keys that queries read in their documents, where a key is of one token or a few."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# The keys that documents leave to each query, where a key is of one token or of a few.
#
# Shapes: B sequences of S tokens; M = S / rate keys of `rate` tokens in each.


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
    # On the right: the first token of a document is its own.
    document = torch.searchsorted(ends, tokens, right=True) - 1
    counts = ends.diff() // rate
    first = (counts.cumsum(0) - counts)[document].unflatten(0, (-1, seq_len))
    # No document crosses the end of a sequence, which therefore begins with one.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """Blocks of tokens of documents, M to a sequence: [B,M] all, or [1,M] of all sequences alike.

    `begins` are the first tokens of blocks in their sequences, `is_first` says which begin their
    document, and cos and sin [B,M,D/2] or [1,M,D/2] fp32 rotate each as its first token. Where
    documents have fewer blocks than M, those at the end of a sequence are none that a query reads.
    """

    begins: torch.Tensor
    is_first: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


class KeyTables:
    """The tables of the documents of a micro-batch, each made when a layer first asks for it.

    `ends` are those of `bound_keys`, of as many tokens as the last says: of one sequence where all
    are alike. `rotation` are cos and sin [S,D/2] of every position of a sequence, or of a document
    where positions `restart`; None where no layer has blocks.
    """

    def __init__(
        self,
        ends: torch.Tensor,
        *,
        total: int,
        seq_len: int,
        rotation: tuple[torch.Tensor, torch.Tensor] | None = None,
        restarts: bool = False,
    ) -> None:
        self._ends = ends
        self._total = total
        self._seq_len = seq_len
        self._rotation = rotation
        self._restarts = restarts
        self._bounds: dict[int, torch.Tensor] = {}
        self._blocks: dict[int, Blocks] = {}

    def bounds(self, rate: int) -> torch.Tensor:
        """Return the bounds [B,S,3] of keys of `rate` tokens (kernels.documents), or [1,S,3]."""
        if rate not in self._bounds:
            self._bounds[rate] = bound_keys(
                self._ends, total=self._total, seq_len=self._seq_len, rate=rate
            )
        return self._bounds[rate]

    def blocks(self, rate: int) -> Blocks:
        """Return the blocks of `rate` tokens.

        Raises:
            ValueError: in a model that has none.
        """
        if self._rotation is None:
            raise ValueError("the model has no compressed attention")
        if rate not in self._blocks:
            bounds = self.bounds(rate)
            begins, is_first = find_keys(bounds, rate)
            positions = begins
            if self._restarts:
                positions = begins - bounds[..., 0].long().gather(1, begins)
            cos, sin = (x[positions] for x in self._rotation)
            self._blocks[rate] = Blocks(begins=begins, is_first=is_first, cos=cos, sin=sin)
        return self._blocks[rate]
