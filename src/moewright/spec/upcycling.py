"""How a dense model becomes an MoE model: how many experts, of which slices, by which factors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class UpcyclingScaling(StrEnum):
    """Where the factor goes that makes up for G slices sharing the weights of one MLP."""

    EXACT = "exact"  # all on the down projection, which is linear: the function stays the same
    # its cube root on gate, up and down each (arXiv 2410.07524): it stays only about the same
    PUBLISHED = "published"


class RouterWeighting(StrEnum):
    """The experts over which the router's softmax is taken."""

    POST_SOFTMAX = "post-softmax"  # the chosen experts, whose weights sum to 1
    PRE_SOFTMAX = "pre-softmax"  # all experts


@dataclass(frozen=True, kw_only=True, slots=True)
class UpcyclingSpec:
    """How a dense model is upcycled: E experts, k per token, of MLPs cut in `granularity` slices.

    Layer i has experts from `dense_first` on where `every` divides i.
    """

    experts: int
    top_k: int
    granularity: int = 1
    dense_first: int = 0
    every: int = 1
    scaling: UpcyclingScaling = UpcyclingScaling.EXACT
    weighting: RouterWeighting = RouterWeighting.POST_SOFTMAX

    @property
    def copies(self) -> int:
        """How many experts are copies of the same slice."""
        return self.experts // self.granularity

    @property
    def weight_factors(self) -> tuple[float, float]:
        """The factor of gate and up, and the factor of down."""
        total = float(self.granularity)
        if self.weighting is RouterWeighting.PRE_SOFTMAX:
            total *= self.experts / self.top_k
        if self.scaling is UpcyclingScaling.EXACT:
            return 1.0, total
        return total ** (1 / 3), total ** (1 / 3)
