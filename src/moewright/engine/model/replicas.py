"""Replicas of hot experts: weights of another rank's experts, equal to its own, and gradients that
go home to them.

They are no parameters. Once a step, before gradients are reduced, a replica's gradient is sent to
the rank whose own the expert is and added to its gradient there; after the update that rank sends
the new weights. So master weights, moments, gradient norm and checkpoints know every expert once,
on the rank that holds it without replicas too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from moewright.engine.comm.collectives import all_to_all
from moewright.engine.model.layers import Weight
from moewright.engine.observe.counters import storage_id
from moewright.engine.runtime import Runtime
from moewright.rules.expert_placement import ReplicaExchange
from moewright.spec.ledger import Component, MemoryRow, Module


class ExpertReplicas:
    """`spare` replicas beside the experts whose weights and biases are `parts`."""

    def __init__(
        self, run: Runtime, parts: Sequence[Weight], copies: ReplicaExchange, spare: int
    ) -> None:
        self._group, self._copies, self.parts = run.mesh.group("ep"), copies, tuple(parts)
        shapes = [(spare, *part.placement.local_shape[1:]) for part in parts]
        self._sends = torch.tensor(copies.sent_slots, dtype=torch.int64, device=run.device)
        self._weights = [
            nn.Parameter(torch.zeros(shape, dtype=run.dtype, device=run.device)) for shape in shapes
        ]
        self._grads = [
            torch.zeros(shape, dtype=torch.float32, device=run.device) for shape in shapes
        ]
        self._lacking: set[int] = set()
        for number, weight in enumerate(self._weights):
            weight.register_post_accumulate_grad_hook(self._accumulate(number))

    def _accumulate(self, number: int) -> Callable[[torch.Tensor], None]:
        def hook(weight: torch.Tensor) -> None:
            if weight.grad is None:
                return
            if number in self._lacking:
                self._lacking.discard(number)
                self._grads[number].copy_(weight.grad)
            else:
                self._grads[number].add_(weight.grad)
            weight.grad = None

        return hook

    def weight_of(self, part: Weight) -> torch.Tensor:
        """The replicas' weights of one of `parts`."""
        return self._weights[next(i for i, one in enumerate(self.parts) if one is part)]

    def begin_step(self) -> None:
        """Forget the gradients of the last step."""
        self._lacking = set(range(len(self.parts)))

    def send_gradients(self, grads: Sequence[torch.Tensor]) -> None:
        """Send what others own, and add what the replicas of this rank's own experts were given to
        `grads`."""
        copies = self._copies
        for number, (grad, own) in enumerate(zip(self._grads, grads, strict=True)):
            if number in self._lacking:
                grad.zero_()
            came = all_to_all(
                grad, self._group, send=copies.receive_counts, receive=copies.send_counts
            )
            for row, slot in zip(
                came, copies.sent_slots, strict=True
            ):  # in their order: a scatter would not keep to it
                own[slot].add_(row)

    @torch.no_grad()
    def fetch_weights(self) -> None:
        """Take the weights of the ranks whose own these experts are."""
        for weight, part in zip(self._weights, self.parts, strict=True):
            going = part.weight.detach()[self._sends]
            weight.copy_(
                all_to_all(
                    going,
                    self._group,
                    send=self._copies.send_counts,
                    receive=self._copies.receive_counts,
                )
            )

    def memory_rows(self) -> list[MemoryRow]:
        """Bytes held."""
        return [
            MemoryRow(
                component=component,
                module=Module.EXPERTS,
                bytes=sum(tensor.nbytes for tensor in tensors),
            )
            for component, tensors in (
                (Component.WEIGHTS, self._weights),
                (Component.GRADIENTS, self._grads),
            )
        ]

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the replicas' weights."""
        return any(storage_id(weight) == storage_id(tensor) for weight in self._weights)
