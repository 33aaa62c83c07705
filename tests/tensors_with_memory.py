"""Dry runs of small jobs on tensors that have memory.

A dry run makes its tensors without memory, for jobs of any size, and torch's code in Python then
works out each result: half a millisecond an operation. Those of a small job have room in memory,
where an operation takes a tenth of that, and all else stays the same: the world of other ranks that
do not exist, the numbers that the host is told, what is counted. Their numbers mean as little.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moewright.engine.run import dry_run

_EMPTY = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
}
_REPEAT = torch.ops.aten.repeat_interleave.Tensor
_ALL_TO_ALL = torch.ops.c10d.alltoall_base_.default


class _ZeroedMemory(TorchDispatchMode):
    """A mode in which new memory is zeros: what no rank sends is the number of a row, too."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as of ObservingMode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _REPEAT and "output_size" in kwargs:
            # What the host is told of other ranks is not what the counts in memory sum to.
            return args[0].new_zeros(kwargs["output_size"])
        if func is _ALL_TO_ALL and not args[1].numel():
            # torch's fake group has nothing to receive where this rank sends nothing.
            out, _, group, sizes, _, *rest = args
            args = (out, torch.zeros_like(out), group, sizes, sizes, *rest)
        out = func(*args, **kwargs)
        if func.overloadpacket in _EMPTY:
            out.zero_()
        return out


@contextmanager
def tensors_with_memory() -> Iterator[None]:
    """Give the tensors of the dry runs inside memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dry_run, "FakeTensorMode", _ZeroedMemory)
        yield
