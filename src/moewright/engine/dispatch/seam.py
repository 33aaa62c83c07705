"""The seam between router and experts: dispatch (pre, comm, post) and combine (pre, comm, post).

Communication stands alone in `dispatch` and `combine`, so that it can be overlapped or replaced.
Shapes: T tokens of this rank, k experts a token, H hidden, R rows for the experts here, E_local experts held here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Routed:
    """Rows on their way: rows [*, H] in compute dtype, weights [*] fp32, one weight a row."""

    rows: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Where the rows of one forward went, for the way back.

    `order` [T*k] sorts (token, slot) pairs by expert, `inverse` undoes it; `send` and `receive` count rows a rank of
    the expert group; `regroup` sorts received rows by local expert, None when they already are; `ends` [E_local] int32
    are the running ends of the local experts' rows.

    Where experts are cut over ETP, its ranks gather each other's received rows, each padded to `widest` rows, and
    `places` [R] are the rows that are none of the padding, sorted by local expert.
    """

    top_k: int
    order: torch.Tensor
    inverse: torch.Tensor
    send: tuple[int, ...]
    receive: tuple[int, ...]
    regroup: torch.Tensor | None
    ungroup: torch.Tensor | None
    ends: torch.Tensor
    places: torch.Tensor | None
    widest: int


class Dispatcher(Protocol):
    """One way to bring tokens to their experts and the results back."""

    def preprocess(
        self, x_TH: torch.Tensor, experts_Tk: torch.Tensor, weights_Tk: torch.Tensor
    ) -> tuple[Routed, Route]: ...

    def dispatch(self, routed: Routed, route: Route) -> Routed: ...

    def postprocess(self, routed: Routed, route: Route) -> Routed: ...

    def combine_preprocess(self, rows: torch.Tensor, route: Route) -> torch.Tensor: ...

    def combine(self, rows: torch.Tensor, route: Route) -> torch.Tensor: ...

    def combine_postprocess(self, rows: torch.Tensor, route: Route) -> torch.Tensor: ...
