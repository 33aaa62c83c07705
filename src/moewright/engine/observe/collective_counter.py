"""The collectives that torch dispatches to process groups, whoever calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from moewright.engine.observe.observing_mode import OperationArgs, OperationKwargs
from moewright.spec.hardware import Collective

# Operations of torch's c10d library: what they are, and which argument a rank hands in.
_RULES: Mapping[str, tuple[Collective, int]] = MappingProxyType(
    {
        "allreduce_": (Collective.ALL_REDUCE, 0),
        "allreduce_coalesced_": (Collective.ALL_REDUCE, 0),
        "reduce_": (Collective.ALL_REDUCE, 0),
        "allgather_": (Collective.ALL_GATHER, 1),
        "allgather_coalesced_": (Collective.ALL_GATHER, 1),
        "_allgather_base_": (Collective.ALL_GATHER, 1),
        "allgather_into_tensor_coalesced_": (Collective.ALL_GATHER, 1),
        "gather_": (Collective.ALL_GATHER, 1),
        "reduce_scatter_": (Collective.REDUCE_SCATTER, 1),
        "_reduce_scatter_base_": (Collective.REDUCE_SCATTER, 1),
        "reduce_scatter_tensor_coalesced_": (Collective.REDUCE_SCATTER, 1),
        "scatter_": (Collective.BROADCAST, 1),
        "broadcast_": (Collective.BROADCAST, 0),
        "alltoall_": (Collective.ALL_TO_ALL, 1),
        "alltoall_base_": (Collective.ALL_TO_ALL, 1),
        "send": (Collective.P2P, 0),
    }
)


class CollectiveCounter:
    """A counter that reports every collective with the bytes that this rank hands in."""

    def __init__(self, report: Callable[[Collective, int], None]) -> None:
        self._report = report

    def count(self, func: Any, args: OperationArgs, kwargs: OperationKwargs) -> None:
        """Report an operation that torch dispatches with these arguments, if it is a collective."""
        if func.namespace != "c10d":
            return
        rule = _RULES.get(func.overloadpacket.__name__)
        if rule is not None:
            op, index = rule
            tensors = (x for x in tree_iter(args[index]) if isinstance(x, torch.Tensor))
            self._report(op, sum(x.numel() * x.element_size() for x in tensors))
