"""The part of a global tensor that this rank holds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from moewright.engine.checkpoint.geometry import Box, find_box_fault, flat_range_boxes

# The names safetensors gives to dtypes.
SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAME = re.compile(r"[A-Za-z0-9_][\w.\-]*(/[A-Za-z0-9_][\w.\-]*)*", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LocalShard:
    """A box of the global tensor `name`, which lies at `offsets` and is as large as `tensor`.

    The tensor is on any device and of any of SAFETENSORS_DTYPES. An empty one holds nothing and is
    passed over.

    Raises:
        ValueError: when the box is not within `global_shape`.
    """

    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor

    def __post_init__(self) -> None:
        if not is_legal_name(self.name):
            raise ValueError(
                f"{self.name!r} is not a name of letters, digits, '_', '.', '-' and single '/'"
            )
        if self.tensor.dtype not in SAFETENSORS_DTYPES.values():
            raise ValueError(f"{self.name}: {self.tensor.dtype} is not a dtype of safetensors")
        fault = find_box_fault(self.global_shape, self.box) if self.tensor.numel() else ""
        if fault:
            raise ValueError(f"{self.name}: {fault}")

    @property
    def box(self) -> Box:
        return self.offsets, tuple(self.tensor.shape)

    @property
    def dtype(self) -> str:
        """The safetensors name of the dtype."""
        dtype = self.tensor.dtype
        return next(name for name, candidate in SAFETENSORS_DTYPES.items() if candidate == dtype)


def whole_shard(name: str, tensor: torch.Tensor) -> LocalShard:
    """Return the shard of a tensor that every rank which has it holds whole."""
    return LocalShard(
        name=name,
        global_shape=tuple(tensor.shape),
        offsets=(0,) * tensor.dim(),
        tensor=tensor,
    )


def is_legal_name(name: str) -> bool:
    """Tell whether a tensor may have this name."""
    return _NAME.fullmatch(name) is not None and ".." not in name


def flat_range_shards(
    name: str,
    *,
    global_shape: Sequence[int],
    offsets: Sequence[int],
    local_shape: Sequence[int],
    start: int,
    flat: torch.Tensor,
) -> Iterator[LocalShard]:
    """Yield the flat range [start, start + flat.numel()) of a rank's part as views of `flat`.

    The part is the box of `local_shape` at `offsets` of the global tensor; `flat` is 1-D and
    contiguous, so that a load writes through the views (a ZeRO range of an optimizer buffer).
    """
    used = 0
    for inner_offsets, sizes in flat_range_boxes(local_shape, start, start + flat.numel()):
        count = prod(sizes)
        yield LocalShard(
            name=name,
            global_shape=tuple(global_shape),
            offsets=tuple(
                outer + inner for outer, inner in zip(offsets, inner_offsets, strict=True)
            ),
            tensor=flat[used : used + count].view(sizes),
        )
        used += count


def find_nonfinite(shards: Sequence[LocalShard]) -> str:
    """Return the name of the first shard with a NaN or an infinite number; "" where there is none.

    The smallest and the largest number of a tensor are NaN where any is: that takes one pass.
    """
    for shard in shards:
        tensor = shard.tensor.detach()
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        if tensor.element_size() == 1:  # 8-bit numbers have no minimum
            tensor = tensor.to(torch.bfloat16)
        if not torch.isfinite(torch.stack(tensor.aminmax())).all():
            return shard.name
    return ""
