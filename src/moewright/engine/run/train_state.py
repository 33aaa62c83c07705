"""The state of a rank: its part of the model and what trains it, as shards of a checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from moewright.engine.checkpoint import LocalShard
from moewright.engine.kernels.delayed_scaling import ScaleState
from moewright.engine.model.router import router_state_shards
from moewright.engine.model.transformer import Transformer
from moewright.engine.optim.distributed_optimizer import DistributedOptimizer
from moewright.engine.run.corpus_loader import BatchSource, StepSizes, planned_step_size
from moewright.engine.run.step_graph import StepGraph
from moewright.engine.runtime import Runtime
from moewright.rules.adapters import is_adapter, is_frozen
from moewright.spec.ledger import Component, MemoryRow, Module


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """The state of this rank: its part of the model, and what trains it.

    `host_copies` is the memory for copies of the state: this rank's and another's, and for saves.
    """

    runtime: Runtime
    model: Transformer
    optimizer: DistributedOptimizer
    train_data: BatchSource
    graph: StepGraph | None = None  # where the layout captures whole steps
    step_size: StepSizes = planned_step_size
    host_copies: tuple[torch.Tensor, ...] = ()

    def memory_rows(self) -> tuple[MemoryRow, ...]:
        """Return the bytes held all the time, in one row for each component and module."""
        nbytes: dict[tuple[Component, Module], int] = defaultdict(int)
        for row in self._list_memory_rows():
            nbytes[row.component, row.module] += row.bytes
        return tuple(
            MemoryRow(component=component, module=module, bytes=size)
            for (component, module), size in nbytes.items()
        )

    def _list_memory_rows(self) -> Iterator[MemoryRow]:
        yield from self.optimizer.memory_rows()
        yield from self.runtime.weight_copies.memory_rows()
        yield from self.runtime.part_graphs.memory_rows()
        nbytes = sum(copy.nbytes for copy in self.host_copies)
        yield MemoryRow(component=Component.HOST, module=Module.OTHER, bytes=nbytes)

    def state_tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors of which `memory_rows` has the bytes."""
        return (
            *self.optimizer.state_tensors(),
            *self.runtime.weight_copies.state_tensors(),
            *self.runtime.part_graphs.state_tensors(),
            *self.host_copies,
        )

    def local_shards(self) -> list[LocalShard]:
        """Return everything that a checkpoint holds of this rank.

        Frozen parts are among it; of a model whose adapters alone train, the adapters.
        """
        scaling = self.runtime.delayed_scaling
        scales = () if scaling is None else scaling.owned_states()
        return [*self.optimizer.local_shards(), *self._other_shards(), *scale_shards(scales)]

    def load(self, load: Callable[[Sequence[LocalShard]], None]) -> None:
        """Have `load` read everything that a checkpoint holds of this rank.

        Replicas of experts have delayed scales of their own, which their experts' owners saved.
        """
        scaling = self.runtime.delayed_scaling
        scales = () if scaling is None else scaling.held_states()
        # Copies in fewer bits are of the weights before the load.
        self.runtime.weight_copies.clear()
        self.optimizer.load([*self._other_shards(), *scale_shards(scales)], load)

    def _other_shards(self) -> list[LocalShard]:
        frozen = [] if is_frozen(self.runtime.workload) else self.optimizer.frozen.local_shards()
        return [*frozen, *router_state_shards(self.model)]

    def weight_shards(self) -> list[LocalShard]:
        """Return the shards that make the model: parameters, and the routers' selection biases.

        Frozen weights are among them, adapters are not.
        """
        saved = [shard for shard in self.local_shards() if not shard.name.startswith("optim/")]
        if not is_frozen(self.runtime.workload):
            return saved
        biases = [shard for shard in saved if not is_adapter(shard.name)]
        return [*self.optimizer.frozen.local_shards(), *biases]


def scale_shards(states: Iterable[ScaleState]) -> Iterator[LocalShard]:
    """Yield delayed scales and their histories, where experts follow each other in one shard."""
    for state in states:
        first = state.numbers[0]
        shape = (state.experts, *state.tensor.shape[1:])
        parts = {first: state.tensor}
        if state.numbers != tuple(range(first, first + len(state.numbers))):
            parts = dict(zip(state.numbers, state.tensor.split(1), strict=True))
        for number, tensor in parts.items():
            offsets = (number, *(0 for _ in shape[1:]))
            yield LocalShard(name=state.name, global_shape=shape, offsets=offsets, tensor=tensor)
