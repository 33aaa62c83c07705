"""NF4 and FP8: what a matrix stands for, whole and in the parts that layouts cut, and its bytes."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moewright.engine.kernels import packed_base
from moewright.engine.kernels.packed_base import (
    LEVELS,
    Fp8Weight,
    Nf4Weight,
    dynamic_levels,
    pack_fp8,
    pack_nf4,
)
from moewright.rules.packed_base import NF4_BLOCK, packed_bytes_per_element, packed_nbytes
from moewright.spec.workload import BaseQuantization, FineTuningSpec, Task, Workload

WORKLOAD = Workload(
    seq_len=8,
    global_batch=1,
    fine_tuning=FineTuningSpec(task=Task.LORA, quantize_base=BaseQuantization.NF4),
)


def locate(shape: tuple[int, ...], *, dim: int, rank: int) -> tuple[int, ...]:
    """Return where a half of a tensor begins."""
    return tuple(rank * size // 2 if place == dim else 0 for place, size in enumerate(shape))


def pack(weight: torch.Tensor) -> Nf4Weight:
    shape = tuple(weight.shape)
    device = weight.device
    return pack_nf4(weight, weight.dtype, device, shape, (0,) * len(shape), lambda part, _: part)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * 0.02).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 128), (48, 40), (37, 50), (512, 768), (2048, 96)])
def test_codes_are_those_of_bitsandbytes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Codes, scales of groups and the mean are its own bits; so is all, where no tie is near.

    Of scales that lie within 1e-4 of the middle of two levels its CPU kernel takes either.
    """
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = draw(*shape, dtype=dtype)
    codes, state = functional.quantize_4bit(
        weight, blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    own = pack(weight)
    assert torch.equal(own.codes, codes.flatten())
    assert torch.equal(own.group_scales.flatten(), state.state2.absmax)
    assert torch.equal(own.means.flatten(), state.offset.view(1))
    steps = (own.scale_codes.flatten().int() - state.absmax.flatten().int()).abs()
    assert steps.max() <= 1
    assert steps.float().mean() < 0.005
    # Its CPU kernel ends blocks with their rows where it reads them, and not where it writes them.
    if not steps.any() and not shape[1] % NF4_BLOCK:
        assert torch.equal(own.unpack(), functional.dequantize_4bit(codes, state))


def test_levels_are_quantiles_of_a_normal_distribution() -> None:
    """As the paper has them: 8 of the positive and 9 of the negative half, zero in both."""
    offset = 0.5 * ((1 - 1 / 30) + (1 - 1 / 32))
    normal = torch.distributions.Normal(0.0, 1.0)
    positive = normal.icdf(torch.linspace(offset, 0.5, 9)[:-1])
    negative = -normal.icdf(torch.linspace(offset, 0.5, 8)[:-1])
    expected = torch.cat((positive, negative, torch.zeros(1))).sort().values
    torch.testing.assert_close(torch.tensor(LEVELS), expected / expected.max(), atol=1e-5, rtol=0)
    assert len(dynamic_levels(torch.device("cpu")).unique()) == 256


@pytest.mark.parametrize(
    ("shape", "dim"),
    [((256, 384), 0), ((256, 384), 1), ((3, 2, 128, 256), 3), ((3, 2, 128, 256), 2)],
)
def test_parts_stand_for_the_numbers_of_the_whole(shape: tuple[int, ...], dim: int) -> None:
    """Rows and columns of two ranks; the first round hears the scales, the second packs."""
    weight = draw(*shape, dtype=torch.bfloat16)
    whole = pack(weight)
    heard: list[torch.Tensor] = []

    def listen(part: torch.Tensor, gathered: int) -> torch.Tensor:
        heard.append(part)
        return torch.cat((part, part), gathered)

    parts = [part.contiguous() for part in weight.chunk(2, dim)]
    for rank, part in enumerate(parts):
        pack_nf4(part, part.dtype, part.device, shape, locate(shape, dim=dim, rank=rank), listen)
    packed: list[Nf4Weight] = [
        pack_nf4(
            part,
            part.dtype,
            part.device,
            shape,
            locate(shape, dim=dim, rank=rank),
            lambda _, gathered: torch.cat(heard[:2], gathered),
        )
        for rank, part in enumerate(parts)
    ]
    joined = torch.cat([part.unpack() for part in packed], dim)
    assert torch.equal(joined, whole.unpack())
    for own in packed:
        assert sum(tensor.nbytes for tensor in own.tensors) == packed_nbytes(
            shape, own.shape, BaseQuantization.NF4
        )


def test_a_stack_is_its_matrices() -> None:
    weight = draw(3, 2, 40, 48)
    stack = pack(weight).unpack()
    for expert in range(3):
        for part in range(2):
            assert torch.equal(stack[expert, part], pack(weight[expert, part]).unpack())


def test_bytes_and_errors_are_those_of_four_bits() -> None:
    weight = draw(1024, 1024)
    own = pack(weight)
    nbytes = sum(tensor.nbytes for tensor in own.tensors)
    assert nbytes == packed_nbytes((1024, 1024), (1024, 1024), BaseQuantization.NF4)
    assert nbytes / weight.numel() == pytest.approx(packed_bytes_per_element(WORKLOAD), abs=1e-5)
    error = (own.unpack() - weight).norm() / weight.norm()
    assert 0.08 < error < 0.1
    blocks = weight.view(-1, NF4_BLOCK)
    largest = blocks.abs().amax(1)
    assert ((own.unpack().view(-1, NF4_BLOCK) - blocks).abs().amax(1) <= 0.16 * largest).all()
    assert prod(own.shape) == weight.numel()
    assert torch.equal(pack(torch.zeros(16, 64)).unpack(), torch.zeros(16, 64))


@pytest.mark.parametrize("shape", [(256, 384), (200, 72), (3, 2, 130, 256)])
def test_fp8_blocks_are_those_of_published_folders(shape: tuple[int, ...]) -> None:
    """What DeepSeek-V3's blocks stand for is held in the same numbers."""
    weight = draw(*shape)
    own = pack_fp8(weight, torch.float32, weight.device)
    nbytes = sum(tensor.nbytes for tensor in own.tensors)
    assert nbytes == packed_nbytes(shape, shape, BaseQuantization.FP8)
    rows, columns = (torch.arange(size) // 128 for size in shape[-2:])
    for matrix, codes, scales in zip(
        weight.reshape(-1, *shape[-2:]),
        own.codes.reshape(-1, *shape[-2:]),
        own.scales,
        strict=True,
    ):
        for row in rows.unique():
            for column in columns.unique():
                block = matrix[rows == row][:, columns == column]
                scale = scales[row, column]
                assert scale == block.abs().max() / 448
                expected = (block / scale).to(torch.float8_e4m3fn)
                assert torch.equal(codes[rows == row][:, columns == column], expected)
    once = own.unpack()
    again = pack_fp8(once, torch.float32, once.device)
    assert torch.equal(again.codes.view(torch.uint8), own.codes.view(torch.uint8))
    torch.testing.assert_close(again.unpack(), once, rtol=3e-7, atol=0)
    assert (once - weight).norm() / weight.norm() < 0.03


@pytest.mark.parametrize("bits", [4, 8])
def test_chunks_are_widened_to_the_same_numbers(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = draw(3, 2, 256, 200)
    packed: Nf4Weight | Fp8Weight = (
        pack(weight) if bits == 4 else pack_fp8(weight, torch.float32, weight.device)
    )
    whole = packed.unpack()
    for numel in (128, 512, 30_000, 120_000):
        monkeypatch.setattr(packed_base, "CHUNK_NUMEL", numel // 128 * 128)
        assert torch.equal(packed.unpack(), whole)


class WidestOutput(TorchDispatchMode):
    """Notes the most numbers, of two bytes or more, that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.element_size() > 1 and not func.is_view:
            self.numel = max(self.numel, out.numel())
        return out


@pytest.mark.parametrize("bits", [4, 8])
def test_packing_in_chunks_makes_the_same_bits_and_nothing_whole(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a rank holds as it starts is less than what its products widen later."""
    weight = draw(3, 2, 256, 200)
    before = weight.clone()

    def pack_once() -> tuple[torch.Tensor, ...]:
        if bits == 4:
            return pack(weight).tensors
        return pack_fp8(weight, torch.float32, weight.device).tensors

    whole = pack_once()
    for numel in (26_624, 51_200, 102_400):  # of 51,200 numbers a matrix
        monkeypatch.setattr(packed_base, "CHUNK_NUMEL", numel)
        with WidestOutput() as widest:
            chunked = pack_once()
        assert all(map(torch.equal, chunked, whole))
        assert torch.equal(weight, before)
        # FP8 fills the last block of columns with zeros, to 256 of them.
        assert widest.numel <= numel * 256 // 200
