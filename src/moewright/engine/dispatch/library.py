"""The interface of libraries that dispatch and combine tokens in kernels of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from moewright.engine.comm.collectives import Group
from moewright.spec.errors import Reason
from moewright.spec.layout import DispatcherKind


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceivedCopies:
    """The copies of tokens that this rank received: `rows` [N,H].

    `ids` [N,j] are the local experts of each copy, counted from 0, with E_local for none, and
    `weights` [N,j] fp32 their weights. `handle` is the library's own, for `combine` and
    `dispatch_cached`.
    """

    rows: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    handle: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class LibrarySizes:
    """The sizes for which a library is set up; `max_tokens` are those of a rank in one dispatch.

    `nvlink_domain_size` ranks of the group lie in one NVLink domain.
    """

    experts: int
    hidden: int
    max_tokens: int
    nvlink_domain_size: int


class DispatchLibrary(Protocol):
    """A library that dispatches and combines over an expert-parallel group.

    Experts and weights [T,k] are those of this rank's tokens; a dropped slot has expert E.
    """

    group: Group

    def dispatch(
        self, x_TH: torch.Tensor, experts_Tk: torch.Tensor, weights_Tk: torch.Tensor
    ) -> ReceivedCopies: ...

    def dispatch_cached(self, x_TH: torch.Tensor, handle: Any) -> torch.Tensor:
        """Send other rows of the same tokens to the same ranks: [N,H]."""
        ...

    def combine(self, rows_NH: torch.Tensor, handle: Any) -> torch.Tensor:
        """Return the sums [T,H] of what the ranks send back for each token."""
        ...

    def combine_with_weights(
        self, rows_NH: torch.Tensor, weights_Nj: torch.Tensor, handle: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums of `combine`, and each weight [T,k] from the rank that received it."""
        ...


def unusable_reason(dispatcher: DispatcherKind, rule: str) -> Reason:
    """Return the reason why a library cannot dispatch."""
    nearest = dispatcher.stand_in
    return Reason(field="layout.dispatcher", value=dispatcher, rule=rule, nearest=nearest)
