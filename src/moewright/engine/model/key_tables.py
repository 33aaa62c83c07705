"""Tables of the keys that queries read in their documents, where a key is of one token or a few."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moewright.engine.kernels.documents import bound_keys, find_keys


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
