"""Moments of 8 bits: what they hold, and that checkpoints hold the same."""

from __future__ import annotations

import pytest
import torch

from moewright.engine.optim.moments import BlockMoment, build_moment
from moewright.spec.workload import Dtype

CPU = torch.device("cpu")


def build(numel: int, *, is_second: bool) -> BlockMoment:
    moment = build_moment(numel, Dtype.FP8, CPU, CPU, is_second=is_second)
    assert isinstance(moment, BlockMoment)
    return moment


def draw(numel: int, *, is_second: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    normal = torch.randn(numel, generator=generator) * 1e-3
    scattered = normal * torch.exp(4 * torch.randn(numel, generator=generator))
    return scattered.square() if is_second else scattered


def reference(values: torch.Tensor, *, is_second: bool) -> torch.Tensor:
    """Round blocks of 32 with torch's own E4M3, each times the largest power of two that fits."""
    rounded = []
    for block in values.split(32):
        scale = 1.0
        while block.abs().max() / scale > 448:
            scale *= 2
        while block.abs().max() / scale <= 224 and block.any():
            scale /= 2
        numbers = (block / scale).to(torch.float8_e4m3fn).float()
        if is_second:
            numbers = torch.where((numbers == 0) & (block > 0), 2.0**-9, numbers)
        rounded.append(numbers * scale)
    return torch.cat(rounded)


@pytest.mark.parametrize("is_second", [False, True])
@pytest.mark.parametrize("numel", [32, 1000])
def test_blocks_are_rounded_to_e4m3_and_kept_by_checkpoints(numel: int, is_second: bool) -> None:
    values = draw(numel, is_second=is_second)
    moment = build(numel, is_second=is_second)
    moment.write(slice(0, numel), values)
    read = moment.read(slice(0, numel))
    assert torch.equal(read, reference(values, is_second=is_second))
    assert is_second == bool((read[values != 0] != 0).all())
    assert sum(tensor.nbytes for tensor in moment.tensors) == numel + -(-numel // 32)
    stored = moment.to_stored()
    assert stored.dtype is torch.bfloat16
    other = build(numel, is_second=is_second)
    other.take_stored(stored)
    assert torch.equal(other.read(slice(0, numel)), read)


def test_a_part_is_written_and_the_rest_stays() -> None:
    moment = build(96, is_second=False)
    moment.write(slice(0, 96), torch.ones(96))
    moment.write(slice(32, 64), torch.full((32,), -3.0))
    assert moment.read(slice(0, 96)).tolist() == [1.0] * 32 + [-3.0] * 32 + [1.0] * 32
    moment.write(slice(64, 90), torch.zeros(26))
    assert moment.read(slice(64, 96))[:26].tolist() == [0.0] * 26
