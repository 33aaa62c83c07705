"""Weights in 4 bits (NF4) and in 8 (e4m3 by blocks), under adapters.

Weights in 4 bits: NF4 with scales that are quantised too (QLoRA, Dettmers et al. 2023). A matrix is
cut, row after row, into blocks of 64 numbers. A block is divided by its largest magnitude, and each
of its numbers becomes the nearest of 16 levels, the quantiles of a normal distribution. What the
blocks are divided by, less its mean over the matrix, becomes 8 bits in groups of 256: the nearest
level of a dynamic map (Dettmers 2016), times the group's largest magnitude. bitsandbytes' quantizer
gives the same bits of a whole matrix. The parts that tensor parallelism cuts a matrix into have the
blocks, the mean and the groups of the whole one.

Weights in 8 bits: e4m3 with a scale for 128 rows and columns, as DeepSeek-V3 is published. A matrix
is cut into blocks of 128 x 128, the last of which may be shorter. A block is divided by its largest
magnitude over 448, e4m3's largest number, and each of its numbers becomes the nearest of e4m3. What
a published folder holds in such blocks is held in the same numbers again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf

import torch
import torch.nn.functional as F

from moewright.rules.packed_base import CHUNK_NUMEL, FP8_BLOCK, NF4_BLOCK, NF4_GROUP

# Appendix E of the paper.
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_EXPONENTS = 7
_TINY = 1e-38  # a block of zeros is divided by it

# Puts the parts of a dim, this rank's among them, one after the other: part, dim -> whole.
GatherDim = Callable[[torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Nf4Weight:
    """A rank's part of a stack of matrices [M,N,K], in NF4.

    `codes` [M * N * K / 2] has two numbers in a byte, the first in the upper half; `scale_codes`
    [M,B] one byte for each of this rank's blocks. Of the whole matrices are `group_scales` [M,G]
    and `means` [M,1], fp32. `first_block`, `row_blocks` and `row_stride` say which blocks of the
    whole matrix these are: runs of `row_blocks`, every `row_stride`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    codes: torch.Tensor
    scale_codes: torch.Tensor
    group_scales: torch.Tensor
    means: torch.Tensor
    first_block: int
    row_blocks: int
    row_stride: int

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.codes, self.scale_codes, self.group_scales, self.means

    def unpack(self) -> torch.Tensor:
        """Return the numbers that it stands for, rounded once to the dtype that it was made of."""
        device = self.codes.device
        blocks = self.scale_codes.shape[1]
        numbers = torch.arange(blocks, device=device)
        runs = numbers // self.row_blocks
        places = self.first_block + runs * self.row_stride + numbers % self.row_blocks
        scales = dynamic_levels(device)[self.scale_codes.int()]
        # In this order: the mean was taken off before the groups were scaled.
        scales = scales * self.group_scales[:, places // NF4_GROUP] + self.means
        numel = 2 * self.codes.numel() // len(scales)
        out = torch.empty((len(scales), numel), dtype=self.dtype, device=device)
        codes = self.codes.view(len(scales), numel // 2)
        levels = torch.tensor(LEVELS, device=device)
        for matrices, part in _list_chunks(len(scales), numel):
            chosen = codes[matrices, part.start // 2 : part.stop // 2]
            halves = torch.stack((chosen >> 4, chosen & 15), -1).flatten(1).int()
            block_scales = scales[matrices, part.start // NF4_BLOCK : -(-part.stop // NF4_BLOCK)]
            wide = block_scales.repeat_interleave(NF4_BLOCK, 1)[:, : part.stop - part.start]
            torch.mul(levels[halves], wide, out=wide)
            out[matrices, part] = wide
        return out.view(self.shape)


def _list_chunks(matrices: int, numel: int) -> Iterator[tuple[slice, slice]]:
    """Yield some of the matrices and of their numbers, so that few are wide at a time."""
    if numel > CHUNK_NUMEL:
        for matrix in range(matrices):
            for start in range(0, numel, CHUNK_NUMEL):
                yield slice(matrix, matrix + 1), slice(start, min(start + CHUNK_NUMEL, numel))
        return
    step = CHUNK_NUMEL // numel
    for first in range(0, matrices, step):
        yield slice(first, first + step), slice(0, numel)


def pack_nf4(
    weight: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device,
    whole_shape: tuple[int, ...],
    offsets: tuple[int, ...],
    gather: GatherDim,
) -> Nf4Weight:
    """Pack a rank's part of a weight, rounded to `dtype`, on a device.

    Its last two dims are those of a matrix. The part is a box at `offsets` of the tensor of
    `whole_shape`. `gather` joins the parts of a dim that a tensor-parallel axis cuts
    (rules.packed_base says where it may). The weight is never whole on the device, and what lies
    beside a chunk of it is less than what a product has beside the weight that it widens.
    """
    last = weight.dim() - 1
    sizes = zip(whole_shape, weight.shape, strict=True)
    cut_dims = {dim for dim, (whole, local) in enumerate(sizes) if whole != local}
    rows, columns = weight.shape[-2:]
    parts = weight.reshape(-1, rows * columns)
    matrices, numel = parts.shape
    blocks = -(-numel // NF4_BLOCK)
    own_scales = torch.empty((matrices, blocks), device=device)
    codes = torch.empty((matrices, numel // 2), dtype=torch.uint8, device=device)
    for some, part in _list_chunks(matrices, numel):
        chunk_scales, chunk_codes = _pack_chunk(parts[some, part].to(device, dtype).float())
        own_scales[some, part.start // NF4_BLOCK : -(-part.stop // NF4_BLOCK)] = chunk_scales
        codes[some, part.start // 2 : part.stop // 2] = chunk_codes

    whole_rows, whole_columns = whole_shape[-2:]
    first_block, row_blocks, row_stride = 0, blocks, blocks
    scales = own_scales
    if last in cut_dims:
        row_blocks, row_stride = columns // NF4_BLOCK, whole_columns // NF4_BLOCK
        first_block = offsets[last] // NF4_BLOCK
        # Row by row: the blocks of another rank lie beside these in each row of the whole.
        scales = gather(scales.view(matrices, rows, row_blocks), 2).reshape(matrices, -1)
    elif last - 1 in cut_dims:
        first_block = offsets[last - 1] * columns // NF4_BLOCK
        scales = gather(scales, 1)
        # Without the rows that pad the last rank's part.
        scales = scales[:, : whole_rows * whole_columns // NF4_BLOCK]
    means = scales.mean(1, keepdim=True)
    group_scales = _group_maxima((scales - means).abs())
    numbers = torch.arange(blocks, device=device)
    places = first_block + numbers // row_blocks * row_stride + numbers % row_blocks
    # What lies beyond the whole matrix is padding.
    groups = (places // NF4_GROUP).clamp(max=group_scales.shape[1] - 1)
    # A product with the reciprocal, as bitsandbytes has it: a quotient may round otherwise.
    centred = (own_scales - means) * (1.0 / group_scales.clamp(min=_TINY))[:, groups]
    scale_codes = torch.bucketize(centred.clamp(-1, 1), _midpoints(dynamic_levels(device))).to(
        torch.uint8
    )
    return Nf4Weight(
        shape=tuple(weight.shape),
        dtype=dtype,
        codes=codes.view(-1),
        scale_codes=scale_codes,
        group_scales=group_scales,
        means=means,
        first_block=first_block,
        row_blocks=row_blocks,
        row_stride=row_stride,
    )


def _pack_chunk(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales [M,B] and the codes [M,N/2] of numbers [M,N], which are overwritten."""
    numel = values.shape[1]
    padded = torch.nn.functional.pad(values, (0, -numel % NF4_BLOCK))
    blocks = padded.unflatten(1, (-1, NF4_BLOCK))
    scales = torch.linalg.vector_norm(blocks, inf, dim=-1)
    blocks.mul_((1.0 / scales.clamp(min=_TINY))[:, :, None]).clamp_(-1, 1)
    bounds = _midpoints(torch.tensor(LEVELS, device=values.device))
    levels = torch.bucketize(padded[:, :numel], bounds, out_int32=True).to(torch.uint8)
    return scales, (levels[:, ::2] << 4) | levels[:, 1::2]


def dynamic_levels(device: torch.device) -> torch.Tensor:
    """Return the 256 levels of the signed dynamic map of 8 bits, rising."""
    return torch.tensor(_DYNAMIC_LEVELS, dtype=torch.float32).to(device)


def _list_dynamic_levels() -> tuple[float, ...]:
    """List the levels of the dynamic map.

    Seven powers of ten have 1, 2, 4 and so on to 64 levels on either side, in the middles of equal
    parts of 0.1 to 1; zero and one complete them.
    """
    levels = [0.0, 1.0]
    for exponent in range(_EXPONENTS):
        bounds = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        middles = (bounds[:-1] + bounds[1:]) / 2.0
        part = (10 ** (exponent + 1 - _EXPONENTS) * middles).tolist()
        levels += part + [-level for level in part]
    return tuple(sorted(levels))


# Listed when the module is loaded: tensors without data, as those of a dry run, have no numbers.
_DYNAMIC_LEVELS = _list_dynamic_levels()


def _midpoints(levels: torch.Tensor) -> torch.Tensor:
    return (levels[:-1] + levels[1:]) / 2


def _group_maxima(values: torch.Tensor) -> torch.Tensor:
    """Return the largest of every group [M,G] of values [M,B]; the last group may be shorter."""
    short = -values.shape[1] % NF4_GROUP
    return torch.nn.functional.pad(values, (0, short)).unflatten(1, (-1, NF4_GROUP)).amax(-1)


_LARGEST = 448.0  # of e4m3
_DTYPE = torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Weight:
    """A rank's part of a stack of matrices [M,N,K]: its numbers, and fp32 scales of blocks."""

    dtype: torch.dtype
    codes: torch.Tensor
    scales: torch.Tensor  # [M, row blocks, column blocks]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.codes, self.scales

    def unpack(self) -> torch.Tensor:
        """Return the numbers that it stands for, rounded once to `dtype`."""
        rows, columns = self.codes.shape[-2:]
        out = torch.empty_like(self.codes, dtype=self.dtype)
        step = _rows_of_chunk(columns)
        matrices = zip(
            self.codes.view(-1, rows, columns),
            self.scales,
            out.view(-1, rows, columns),
            strict=True,
        )
        for codes, scales, wide in matrices:
            for first in range(0, len(scales), step):
                part = slice(first * FP8_BLOCK, (first + step) * FP8_BLOCK)
                blocks = _cut_into_blocks(codes[part].to(self.dtype).float()[None])[0]
                blocks.mul_(scales[first : first + step, None, :, None])
                wide[part] = blocks.flatten(0, 1).flatten(1, 2)[: len(wide[part]), :columns]
        return out


def pack_fp8(weight: torch.Tensor, dtype: torch.dtype, device: torch.device) -> Fp8Weight:
    """Pack a rank's part of a weight for products in `dtype`; no block is cut by the ranks.

    It is packed some rows at a time, and never whole on the device.
    """
    rows, columns = weight.shape[-2:]
    matrices = weight.reshape(-1, rows, columns)
    codes = torch.empty(matrices.shape, dtype=_DTYPE, device=device)
    sides = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    scales = torch.empty((len(matrices), *sides), device=device)
    step = _rows_of_chunk(columns)
    for matrix in range(len(matrices)):
        for first in range(0, sides[0], step):
            part = slice(first * FP8_BLOCK, (first + step) * FP8_BLOCK)
            values = matrices[matrix, part].to(device).float()
            blocks = _cut_into_blocks(values[None])[0]
            largest = torch.linalg.vector_norm(blocks, inf, dim=(1, 3))
            # A block of zeros has the scale 1, as nothing may be divided by 0.
            own = torch.where(largest > 0, largest / _LARGEST, 1.0)
            scales[matrix, first : first + step] = own
            blocks.div_(own[:, None, :, None])
            codes[matrix, part] = blocks.flatten(0, 1).flatten(1, 2)[: len(values), :columns]
    return Fp8Weight(dtype=dtype, codes=codes.view(weight.shape), scales=scales)


def _rows_of_chunk(columns: int) -> int:
    """Return the rows of blocks that are wide at a time."""
    return max(1, CHUNK_NUMEL // (FP8_BLOCK * columns))


def _cut_into_blocks(matrices: torch.Tensor) -> torch.Tensor:
    """Return matrices [M,N,K] as [M, row blocks, 128, column blocks, 128], filled with zeros."""
    rows, columns = matrices.shape[-2:]
    padded = F.pad(matrices, (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    return padded.unflatten(2, (-1, FP8_BLOCK)).unflatten(1, (-1, FP8_BLOCK))
