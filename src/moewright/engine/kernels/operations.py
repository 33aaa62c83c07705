"""Operations of this package in torch's dispatcher, where counters and traces see them by name.

An operation is registered with all that others know of it: what runs it, the shapes of what it
returns, and its FLOPs of the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moewright.spec.ledger import FlopOp

_LIBRARY = torch.library.Library("moewright", "FRAGMENT")
_DEVICES = ("CPU", "CUDA")


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationWork:
    """The FLOPs of an operation: their kind in the ledger, and their number.

    `count` takes the arguments of the operation. torch hands on none that has its default value.
    """

    op: FlopOp
    count: Callable[..., int]

    def backward(self) -> OperationWork:
        """Return the work of the backward, whose first argument is the gradient.

        By convention scores and states that it computes again are left out.
        """
        return OperationWork(op=self.op, count=lambda _, *args, **kw: 2 * self.count(*args, **kw))


# Filled as modules define operations, like torch's own table of them, and never afterwards.
_REGISTERED: dict[Any, OperationWork | None] = {}


def define_operation(
    schema: str,
    kernel: Callable[..., Any],
    shapes: Callable[..., Any],
    work: OperationWork | None,
    devices: Sequence[str] = _DEVICES,
) -> Any:
    """Register `kernel` under the name of `schema`, and return the operation.

    `shapes` returns empty tensors like the kernel's, for tensors without data. `work` is None where
    the ledger counts no FLOPs. This is not torch.library.custom_op, whose first call takes two
    seconds to import a compiler.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    for device in devices:
        _LIBRARY.impl(name, kernel, device)
    # Tensors without data, of a dry run, take their shapes from it.
    _LIBRARY.impl(name, shapes, "Meta")
    operation = getattr(torch.ops.moewright, name)
    _REGISTERED[operation] = work
    return operation


def find_work(operation: Any) -> OperationWork | None:
    """Return the work of an operation; None where it has none, or is not of this package."""
    return _REGISTERED.get(operation)
