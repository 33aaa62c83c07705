"""The state of a rank: its part of the model and what trains it, as shards of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moewright.engine.checkpoint import LocalShard, whole_shard
from moewright.engine.model.router import router_state_shards
from moewright.engine.model.transformer import Transformer
from moewright.engine.optim.distributed_optimizer import DistributedOptimizer
from moewright.engine.run.corpus_loader import BatchSource, StepSizes, planned_step_size
from moewright.engine.run.step_graph import StepGraph
from moewright.engine.runtime import Runtime
from moewright.rules.adapters import is_adapter, is_frozen


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """The state of this rank: its part of the model, and what trains it."""

    runtime: Runtime
    model: Transformer
    optimizer: DistributedOptimizer
    train_data: BatchSource
    graph: StepGraph | None = None  # where the layout captures whole steps
    step_size: StepSizes = planned_step_size

    def local_shards(self) -> list[LocalShard]:
        """Return everything that a checkpoint holds of this rank.

        Frozen parts are among it; of a model whose adapters alone train, the adapters.
        """
        return [*self.optimizer.local_shards(), *self._other_shards()]

    def load(self, load: Callable[[Sequence[LocalShard]], None]) -> None:
        """Have `load` read everything that a checkpoint holds of this rank."""
        self.optimizer.load(self._other_shards(), load)

    def _other_shards(self) -> list[LocalShard]:
        frozen = [] if is_frozen(self.runtime.workload) else self.optimizer.frozen.local_shards()
        return [*frozen, *router_state_shards(self.model), *self._scale_shards()]

    def _scale_shards(self) -> list[LocalShard]:
        """Return delayed scales and their histories, which all ranks of a stage have alike."""
        scaling = self.runtime.delayed_scaling
        states = () if scaling is None else scaling.named_states()
        return [whole_shard(name, state) for name, state in states]

    def weight_shards(self) -> list[LocalShard]:
        """Return the shards that make the model: parameters, and the routers' selection biases.

        Frozen weights are among them, adapters are not.
        """
        saved = [shard for shard in self.local_shards() if not shard.name.startswith("optim/")]
        if not is_frozen(self.runtime.workload):
            return saved
        biases = [shard for shard in saved if not is_adapter(shard.name)]
        return [*self.optimizer.frozen.local_shards(), *biases]
