"""The record of one tensor that a layer saves for backward."""

from __future__ import annotations

from dataclasses import dataclass

from moewright.spec.layout import Recompute
from moewright.spec.ledger import Module


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensor:
    """One tensor that a layer saves for backward, per micro-batch on one rank.

    Any policy of `freed_by` frees it, and one of `kept_by` must be on, where there are any, for it
    to be kept. No policy frees the layer input, from which even full
    recomputation starts, nor what a router decided, which a replay must not decide again.
    """

    module: Module
    name: str
    bytes: int
    freed_by: tuple[Recompute, ...]
    owner: Module  # the module that it is part of, even where `module` is an MTP depth
    kept_by: tuple[Recompute, ...] = ()


def saved_tensor(
    module: Module, name: str, size_bytes: int, *freed_by: Recompute, full: bool = True
) -> SavedTensor:
    """Return a tensor that the given policies free, and full recompute too unless `full` is off."""
    if full:
        freed_by = (Recompute.FULL, *freed_by)
    return SavedTensor(module=module, name=name, bytes=size_bytes, freed_by=freed_by, owner=module)
