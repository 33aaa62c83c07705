"""Weights that do not train: in the compute dtype, without gradients, masters or moments."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from moewright.engine.checkpoint import LocalShard
from moewright.engine.model.layers import NamedParameter
from moewright.engine.observe.storage_census import storage_id
from moewright.engine.optim.optimizer_states import OwnedRange, build_local_shards
from moewright.engine.runtime import Runtime
from moewright.spec.ledger import Component, MemoryRow


class FrozenWeights:
    """The frozen weights of this rank, each a tensor of its own.

    Every rank holds its whole shard: there is nothing of them to share out over data parallelism.
    """

    def __init__(
        self,
        runtime: Runtime,
        parameters: Sequence[NamedParameter],
        initial_value: Callable[[NamedParameter], torch.Tensor],
    ) -> None:
        self._parameters = tuple(parameters)
        for parameter in parameters:
            value = initial_value(parameter).to(runtime.device, runtime.dtype)
            parameter.owner.weight = nn.Parameter(value, requires_grad=False)
        self._storages = {storage_id(parameter.parameter) for parameter in parameters}

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor lies in one of them."""
        return storage_id(tensor) in self._storages

    def memory_rows(self) -> list[MemoryRow]:
        """Return the bytes of each."""
        return [
            MemoryRow(
                component=Component.WEIGHTS,
                module=parameter.module,
                bytes=parameter.parameter.nbytes,
            )
            for parameter in self._parameters
        ]

    def local_shards(self) -> list[LocalShard]:
        """Return their boxes of the global tensors, in the compute dtype, to be filled."""
        shards = []
        for parameter in self._parameters:
            flat = parameter.parameter.data.view(-1)
            owned = OwnedRange(
                parameter=parameter,
                first=0,
                last=flat.numel(),
                start=0,
                moment_start=0,
                has_momentum=False,
            )
            shards += build_local_shards([owned], "", flat)
        return shards
