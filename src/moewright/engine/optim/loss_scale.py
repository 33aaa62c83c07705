"""The scale of the loss in fp16, where small gradients would vanish and large ones overflow."""

from __future__ import annotations

import torch

from moewright.engine.checkpoint import LocalShard, whole_shard
from moewright.spec.workload import Dtype, Workload


class LossScaler:
    """A dynamic scale of the loss; it is always 1 unless in fp16.

    All ranks have the same one, because all update it by the same global norm.
    """

    def __init__(self, workload: Workload) -> None:
        self._spec = workload.scaling
        self._is_active = workload.precision is Dtype.FP16
        scale = self._spec.initial_loss_scale if self._is_active else 1.0
        # The scale, and the finite steps since it last changed.
        self._state = torch.tensor([scale, 0.0])

    @property
    def value(self) -> float:
        """The factor of the loss."""
        return float(self._state[0]) if self._is_active else 1.0

    def update(self, *, finite: bool) -> None:
        """Halve the scale after a step that was not finite; double it at the end of a window."""
        if not self._is_active:
            return
        if not finite:
            self._state[0] = max(self.value / 2, self._spec.min_loss_scale)
            self._state[1] = 0.0
            return
        self._state[1] += 1
        if int(self._state[1]) >= self._spec.loss_scale_window:
            self._state[0] *= 2
            self._state[1] = 0.0

    def local_shards(self) -> list[LocalShard]:
        """Return what a checkpoint must hold of it."""
        if not self._is_active:
            return []
        return [whole_shard("optim/loss_scale", self._state)]
