"""Operations of this package in torch's dispatcher, where counters and traces see them by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_LIBRARY = torch.library.Library("moewright", "FRAGMENT")
_DEVICES = ("CPU", "CUDA")


def define_operation(
    schema: str,
    kernel: Callable[..., Any],
    shapes: Callable[..., Any],
    devices: Sequence[str] = _DEVICES,
) -> Any:
    """Register `kernel` under the name of `schema`, and return the operation.

    `shapes` returns empty tensors like the kernel's, for tensors without data. This is not
    torch.library.custom_op, whose first call takes two seconds to import a compiler.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    for device in devices:
        _LIBRARY.impl(name, kernel, device)
    # Tensors without data, of a dry run, take their shapes from it.
    _LIBRARY.impl(name, shapes, "Meta")
    return getattr(torch.ops.moewright, name)
