"""What the host is told of tensors that have no data."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class HostAnswers(TorchDispatchMode):
    """A dispatch mode of a dry run, in which every number that the host reads is 1."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten._local_scalar_dense:
            return 1
        return func(*args, **(kwargs or {}))
