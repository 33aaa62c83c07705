"""Replicas of hot experts: copies of the weights of experts that other ranks own.

Replicas are not parameters. Once a step, before gradients are reduced, a replica's gradient is sent
to the expert's owner and added to the expert's gradient there; after the update the owner sends the
new weights. So master weights, moments, gradient norm and checkpoints know every expert once, on
its owner: the rank that also holds it without replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from moewright.engine.comm.autograd_collectives import all_to_all
from moewright.engine.kernels.products import Products
from moewright.engine.model.layers import Weight
from moewright.engine.runtime import Runtime, torch_dtype
from moewright.engine.torch_private import storage_id
from moewright.rules.expert_placement import ReplicaExchange
from moewright.spec.ledger import Component, MemoryRow, Module


class ExpertReplicas:
    """The replicas in the spare slots of a rank, one of each of `experts`.

    `parts` are the weights and biases of the experts that the rank owns; each has its replicas.
    """

    def __init__(
        self,
        runtime: Runtime,
        parts: Sequence[Weight],
        exchange: ReplicaExchange,
        experts: tuple[int, ...],
    ) -> None:
        self._group = runtime.mesh.group("ep")
        self._exchange = exchange
        self.parts = tuple(parts)
        self.experts = experts
        # What multiplies by the replicas of each part.
        self.products: list[Products] = [part.products for part in parts]
        shapes = [(len(experts), *part.placement.local_shape[1:]) for part in parts]
        device = runtime.device
        self._sent_slots = torch.tensor(exchange.sent_slots, dtype=torch.int64, device=device)
        self._weights = [
            nn.Parameter(torch.zeros(shape, dtype=runtime.dtype, device=device)) for shape in shapes
        ]
        grad_dtype = torch_dtype(runtime.workload.grad_dtype)
        self._grads = [torch.zeros(shape, dtype=grad_dtype, device=device) for shape in shapes]
        self._parts_without_grad: set[int] = set()  # in this step
        for number, weight in enumerate(self._weights):
            weight.register_post_accumulate_grad_hook(self._make_hook(number))

    def _make_hook(self, number: int) -> Callable[[torch.Tensor], None]:
        """Make the hook that adds a part's new gradient to the step's sum and frees it."""

        def accumulate(weight: torch.Tensor) -> None:
            if weight.grad is None:
                return
            if number in self._parts_without_grad:
                self._parts_without_grad.discard(number)
                # The first gradient of a step overwrites that of the last one.
                self._grads[number].copy_(weight.grad)
            else:
                self._grads[number].add_(weight.grad)
            weight.grad = None

        return accumulate

    def weight_of(self, part: Weight) -> torch.Tensor:
        """Return the replicas' weights of one of `parts`."""
        return self._weights[self._place_of(part)]

    def products_of(self, part: Weight) -> Products:
        """Return what multiplies by the replicas of one of `parts`."""
        return self.products[self._place_of(part)]

    def _place_of(self, part: Weight) -> int:
        return next(place for place, own in enumerate(self.parts) if own is part)

    def begin_step(self) -> None:
        """Forget the gradients of the last step."""
        self._parts_without_grad = set(range(len(self.parts)))

    def send_gradients(self, grads: Sequence[torch.Tensor]) -> None:
        """Send the replicas' gradients to the owners of their experts.

        The gradients that other ranks' replicas of this rank's experts got are added to `grads`,
        one tensor for each of `parts`.
        """
        exchange = self._exchange
        for number, (grad, own_grad) in enumerate(zip(self._grads, grads, strict=True)):
            if number in self._parts_without_grad:
                grad.zero_()
            # Gradients go back the way that weights come, so that counts change places.
            received = all_to_all(
                grad, self._group, send=exchange.receive_counts, receive=exchange.send_counts
            )
            # One by one in a fixed order, which a scatter-add would not keep.
            for row, slot in zip(received, exchange.sent_slots, strict=True):
                own_grad[slot].add_(row)

    @torch.no_grad()
    def fetch_weights(self) -> None:
        """Fetch the replicas' weights from the owners of their experts."""
        exchange = self._exchange
        for weight, part in zip(self._weights, self.parts, strict=True):
            sent = part.weight.detach()[self._sent_slots]
            received = all_to_all(
                sent, self._group, send=exchange.send_counts, receive=exchange.receive_counts
            )
            weight.copy_(received)

    def state_tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors of which `memory_rows` has the bytes."""
        return (*self._weights, *self._grads)

    def memory_rows(self) -> list[MemoryRow]:
        """Return the bytes of the replicas' weights and gradients."""
        weight_bytes = sum(weight.nbytes for weight in self._weights)
        grad_bytes = sum(grad.nbytes for grad in self._grads)
        return [
            MemoryRow(component=Component.WEIGHTS, module=Module.EXPERTS, bytes=weight_bytes),
            MemoryRow(component=Component.GRADIENTS, module=Module.EXPERTS, bytes=grad_bytes),
        ]

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor lies in the replicas' weights."""
        return any(storage_id(weight) == storage_id(tensor) for weight in self._weights)
