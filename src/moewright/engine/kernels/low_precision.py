"""Operands of 8 and 4 bits: numbers with scales, as rules.low_precision defines their recipes.

Conversion is exact to the bit on every device: it uses fp32 products, comparisons and torch's own
8-bit types. Where `rounds_at_random` asks for it, the draws come from a generator.

Shapes: R rows, K columns, G groups of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch

from moewright.engine.kernels.scale_tiles import untile_scales
from moewright.rules.low_precision import NarrowFormat, OperandFormat, ScaleFormat

_TORCH_FORMATS = {NarrowFormat.E4M3: torch.float8_e4m3fn, NarrowFormat.E5M2: torch.float8_e5m2}
_E4M3_LARGEST = NarrowFormat.E4M3.largest
FP32_LARGEST = torch.finfo(torch.float32).max
# Codes of E2M1; of the numbers beside a tie the even one is taken.
_E2M1_CODES = 8  # without the sign
# Signs of the rows of the Hadamard matrix that rotates operands: any fixed choice does.
HADAMARD_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
# The negative ones, a bit each: a table of the host's would be sent to the device.
HADAMARD_BITS = sum(1 << row for row, sign in enumerate(HADAMARD_SIGNS) if sign < 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """Consecutive rows, or columns, that have scales of their own, such as those of an expert.

    `ends` [G] are their running ends; None for one group of all.
    """

    ends: torch.Tensor | None = None
    of_columns: bool = False

    def largest(self, wide: torch.Tensor) -> torch.Tensor:
        """Return the largest magnitude of each group [G]; 0 for an empty one."""
        if not wide.numel():
            return wide.new_zeros(1 if self.ends is None else len(self.ends))
        return self.largest_of_lines(wide.abs().amax(0 if self.of_columns else 1))

    def largest_of_lines(self, lines: torch.Tensor) -> torch.Tensor:
        """Return the largest number of each group [G], of one for each row or column."""
        if self.ends is None:
            return lines.amax()[None]
        numbers = group_numbers(self.ends, len(lines))
        return lines.new_zeros(len(self.ends) + 1).scatter_reduce(0, numbers, lines, "amax")[:-1]

    def spread(self, values: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
        """Return the value [G] of each row's group [R,1], or of each column's [1,K]."""
        if self.ends is None:
            return values[:, None]
        # What lies after the last group is padding, of any scale.
        padded = torch.cat((values, values.new_ones(1)))
        if self.of_columns:
            return padded[group_numbers(self.ends, wide.shape[1])][None]
        return padded[group_numbers(self.ends, len(wide))][:, None]


ONE_GROUP = Groups()


def group_numbers(ends: torch.Tensor, count: int) -> torch.Tensor:
    """Return the group of each of `count` rows; those after the last end have the next number."""
    rows = torch.arange(count, dtype=ends.dtype, device=ends.device)
    return torch.bucketize(rows, ends, right=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class NarrowTensor:
    """A converted tensor [R,K]: codes, scales of its blocks, and a scale of each group of rows.

    `codes` are of an 8-bit type, or pairs of 4-bit numbers in uint8. `scales` [R, blocks] decode
    blocks of columns, and are absent where a scale is for all; `group_scales` [G] decode `groups`.
    `decode` is the implementation's that converted it. With `in_tiles` the scales lie in the order
    of tensor cores, in whole tiles.
    """

    codes: torch.Tensor
    scales: torch.Tensor | None
    group_scales: torch.Tensor | None
    groups: Groups
    operand: OperandFormat
    columns: int
    decode: Decode = field(default_factory=lambda: decode_numbers)
    in_tiles: bool = False

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What a forward keeps of it; the ends are kept anyway."""
        parts = (self.codes, self.scales, self.group_scales)
        return tuple(part for part in parts if part is not None)

    def without_data(self) -> NarrowTensor:
        """Return the same conversion of no numbers, for `with_tensors`."""
        empty = self.codes.new_empty(0)
        return replace(
            self,
            codes=empty,
            scales=None if self.scales is None else empty,
            group_scales=None if self.group_scales is None else empty,
        )

    def with_tensors(self, tensors: Iterable[torch.Tensor]) -> NarrowTensor:
        """Return the same conversion of other numbers, in the order of `tensors`."""
        parts = iter(tensors)
        return replace(
            self,
            codes=next(parts),
            scales=None if self.scales is None else next(parts),
            group_scales=None if self.group_scales is None else next(parts),
        )

    def transpose(self) -> NarrowTensor:
        """Return the transposed tensor, which has one scale."""
        assert self.scales is None
        assert self.groups.ends is None
        return replace(self, codes=self.codes.T, columns=len(self.codes))

    def widen(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers times their scales, in `dtype`."""
        return self.decode(self, dtype)


Decode = Callable[[NarrowTensor, torch.dtype], torch.Tensor]


def decode_numbers(narrow: NarrowTensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute NarrowTensor.widen, an operation at a time."""
    if narrow.operand.number is NarrowFormat.E2M1:
        numbers = decode_e2m1(narrow.codes)[:, : narrow.columns]
    else:
        numbers = narrow.codes.float()
    if narrow.scales is not None:
        block = narrow.operand.block
        scales = untile_scales(narrow.scales) if narrow.in_tiles else narrow.scales
        scales = decode_scales(scales, narrow.operand.scale)
        numbers = numbers * scales.repeat_interleave(block, 1)[:, : narrow.columns]
    if narrow.group_scales is not None:
        numbers = numbers * narrow.groups.spread(narrow.group_scales, numbers)
    return numbers.to(dtype)


def convert(
    x_RK: torch.Tensor,
    operand: OperandFormat,
    groups: Groups = ONE_GROUP,
    generator: torch.Generator | None = None,
) -> NarrowTensor:
    """Convert a tensor, with blocks along its columns and scales of their own for `groups`.

    Numbers are rounded to the nearest, ties to even, or at random with a `generator` where the
    operand asks for that.
    """
    wide = x_RK.float()
    if not operand.block:
        return _convert_groups(wide, operand, groups)
    # Zeros in the last block change no largest magnitude.
    blocks = _pad_columns(wide, operand.block).unflatten(1, (-1, operand.block))
    largest = blocks.abs().amax(2)
    if operand.is_tiled:
        largest = _largest_in_tiles(largest, operand.block)
    group_scales = None
    spread = wide.new_ones(1, 1)
    if operand.scale is ScaleFormat.E4M3:
        group_scales = find_nvfp4_scales(groups.largest(wide))
        spread = groups.spread(group_scales, wide)
        if spread.shape[1] > 1:
            # Scales of columns: all columns of a block are of one group.
            spread = spread[:, :: operand.block]
    scales = _encode_scales(largest / spread, operand)
    decode = decode_scales(scales, operand.scale) * spread
    # A block whose scale is 0 holds zeros, or numbers too small for any scale.
    encode = torch.where(decode > 0, 1.0 / decode, 0.0)
    scaled = (blocks * encode[:, :, None]).flatten(1)[:, : x_RK.shape[1]]
    return NarrowTensor(
        codes=_round(scaled, operand, generator),
        scales=scales,
        group_scales=group_scales,
        groups=groups,
        operand=operand,
        columns=x_RK.shape[1],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class NarrowWeight:
    """A weight [N,K] or [E,N,K] converted along K, as rows [E*N,K], and along N, as [E*K,N]."""

    forward: NarrowTensor
    transposed: NarrowTensor

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield what both copies hold; where the rows of experts end is a tensor too."""
        for narrow in (self.forward, self.transposed):
            yield from narrow.tensors
            if narrow.groups.ends is not None:
                yield narrow.groups.ends


def convert_weight(w: torch.Tensor, operand: OperandFormat) -> NarrowWeight:
    """Convert a weight [N,K] or [E,N,K] both ways."""
    return NarrowWeight(
        forward=convert_matrices(w, operand, convert),
        transposed=convert_matrices(w.mT, operand, convert),
    )


def convert_matrices(w: torch.Tensor, operand: OperandFormat, by: Convert) -> NarrowTensor:
    """Convert a weight [N,K] or [E,N,K] along K, as rows."""
    rows, groups = place_experts(w, operand)
    if w.dim() == 2:
        return by(w, operand, groups, None)
    missing = rows // len(w) - w.shape[1]
    flat = torch.nn.functional.pad(w, (0, 0, 0, missing)).flatten(0, 1)
    return by(flat, operand, groups, None)


def place_experts(w: torch.Tensor, operand: OperandFormat) -> tuple[int, Groups]:
    """Return how many rows a weight [N,K] or [E,N,K] is converted as, and those of experts.

    Tiles must not hold rows of two experts: each has as many more as fill its last.
    """
    if w.dim() == 2:
        return len(w), ONE_GROUP
    experts, rows, _ = w.shape
    if operand.is_tiled:
        rows += -rows % operand.block
    ends = torch.arange(1, experts + 1, device=w.device) * rows
    return experts * rows, Groups(ends=ends)


# Conversions as `convert` and `convert_weight` are.
Convert = Callable[[torch.Tensor, OperandFormat, Groups, torch.Generator | None], NarrowTensor]
ConvertWeight = Callable[[torch.Tensor, OperandFormat], NarrowWeight]


def _convert_groups(wide: torch.Tensor, operand: OperandFormat, groups: Groups) -> NarrowTensor:
    """Convert with one scale for each group: the format's largest over the group's."""
    return cast_groups(wide, operand, groups, find_group_scales(groups.largest(wide), operand))


def find_group_scales(largest: torch.Tensor, operand: OperandFormat) -> torch.Tensor:
    """Return what groups are multiplied by, so that their largest is the format's."""
    scales = _divide(operand.number.largest, largest).clamp(max=FP32_LARGEST)
    return torch.where(largest > 0, scales, 1.0)


def cast_groups(
    wide: torch.Tensor, operand: OperandFormat, groups: Groups, scales: torch.Tensor
) -> NarrowTensor:
    """Convert fp32 numbers [R,K] by given scales [G] of groups, saturating at the largest number.

    A scale multiplies what is converted.
    """
    return NarrowTensor(
        codes=_round(wide * groups.spread(scales, wide), operand, None),
        scales=None,
        group_scales=1.0 / scales,
        groups=groups,
        operand=operand,
        columns=wide.shape[1],
    )


def find_nvfp4_scales(largest: torch.Tensor) -> torch.Tensor:
    """Return the scales with which the largest number of a group is the largest of both formats."""
    scales = _divide(largest, _E4M3_LARGEST * NarrowFormat.E2M1.largest)
    return torch.where(scales > 0, scales, 1.0)


def _divide(a: torch.Tensor | float, b: torch.Tensor | float) -> torch.Tensor:
    """Return a / b rounded to the nearest, as Transformer Engine divides (recipe_common.cuh).

    torch multiplies by a reciprocal where one of them is a number, which rounds twice.
    """
    if not isinstance(b, torch.Tensor):
        assert isinstance(a, torch.Tensor)
        b = torch.full_like(a, b)
    if not isinstance(a, torch.Tensor):
        a = torch.full_like(b, a)
    return a / b


def _largest_in_tiles(largest: torch.Tensor, block: int) -> torch.Tensor:
    """Return the largest of `block` rows together, in each of them."""
    rows = len(largest)
    padded = torch.nn.functional.pad(largest, (0, 0, 0, -rows % block))
    tiles = padded.unflatten(0, (-1, block)).amax(1)
    return tiles.repeat_interleave(block, 0)[:rows]


def _pad_columns(x: torch.Tensor, block: int) -> torch.Tensor:
    missing = -x.shape[1] % block
    if missing:
        return torch.nn.functional.pad(x, (0, missing))
    return x


def _encode_scales(largest: torch.Tensor, operand: OperandFormat) -> torch.Tensor:
    """Return the scales of blocks by their largest magnitudes; a block of zeros has some scale."""
    top = operand.number.largest
    if operand.scale is ScaleFormat.E8M0:
        return _round_up_to_e8m0(largest * (1.0 / top))
    if operand.scale is ScaleFormat.E4M3:
        return _divide(largest, top).clamp(max=_E4M3_LARGEST).to(torch.float8_e4m3fn)
    encode = torch.where(largest > 0, _divide(top, largest).clamp(max=FP32_LARGEST), 1.0)
    # The power of two below it.
    return 1.0 / (encode.view(torch.int32) & 0x7F800000).view(torch.float32)


def _round_up_to_e8m0(values: torch.Tensor) -> torch.Tensor:
    """Return the exponents, plus 127, of the least powers of two that are no less than `values`."""
    bits = values.view(torch.int32)
    exponent = (bits >> 23) & 0xFF
    mantissa = bits & 0x7FFFFF
    # A number below 2^-126 has exponent 0 and no hidden bit: up to 2^-127 is the least scale.
    is_above = (mantissa > 0) & ((exponent > 0) | (mantissa > 0x400000))
    return (exponent + is_above).clamp(max=254).to(torch.uint8).view(torch.float8_e8m0fnu)


def decode_scales(scales: torch.Tensor, scale: ScaleFormat) -> torch.Tensor:
    """Return scales of blocks in fp32."""
    if scale in (ScaleFormat.FP32, ScaleFormat.POWER_OF_TWO):
        return scales
    return scales.float()


def _round(
    scaled: torch.Tensor, operand: OperandFormat, generator: torch.Generator | None
) -> torch.Tensor:
    """Round scaled numbers to codes of the operand's format."""
    top = operand.number.largest
    scaled = scaled.clamp(-top, top)
    if operand.number is not NarrowFormat.E2M1:
        return scaled.to(_TORCH_FORMATS[operand.number])
    magnitude = scaled.abs().contiguous()
    if operand.rounds_at_random and generator is not None:
        codes = _draw_e2m1(magnitude, generator)
    else:
        # Above a bound the next number is nearer; on it, the even one of its neighbours is taken.
        numbers = _list_e2m1(scaled.device)
        bounds = (numbers[1:] + numbers[:-1]) / 2
        below = torch.bucketize(magnitude, bounds, out_int32=True)
        above = torch.bucketize(magnitude, bounds, out_int32=True, right=True)
        codes = torch.where(below % 2 == 0, below, above)
    # The sign is the fourth bit, of zeros too.
    codes = (codes + 8 * torch.signbit(scaled)).to(torch.uint8)
    # A byte has two numbers.
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def _draw_e2m1(magnitude: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return one of the two neighbours of each number, the nearer one with more probability."""
    numbers = _list_e2m1(magnitude.device)
    below = (torch.bucketize(magnitude, numbers, right=True) - 1).clamp(max=6)
    low, high = numbers[below], numbers[below + 1]
    # Unbiased: the mean over draws is the number itself.
    draws = torch.rand(magnitude.shape, generator=generator, device=magnitude.device)
    return below + (draws < (magnitude - low) / (high - low))


def decode_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Return the numbers of bytes, two of each along the last dim, the lower half's first: fp32."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).int()
    numbers = _list_e2m1(packed.device)
    return torch.cat((numbers, -numbers))[codes]


def _list_e2m1(device: torch.device) -> torch.Tensor:
    """Return the numbers of codes 0 to 7 in fp32, made there: a table of the host's would be sent.

    A code has an exponent of two bits and one bit of a mantissa; exponent 0 is that of 1, without
    the hidden bit.
    """
    codes = torch.arange(_E2M1_CODES, device=device)
    exponents, mantissas = codes >> 1, codes & 1
    quarters = torch.where(exponents > 0, (2 + mantissas) << exponents, 2 * mantissas)
    return quarters.float() / 4


def rotate_rows(x_RK: torch.Tensor, rows: int, *, is_inverse: bool = False) -> torch.Tensor:
    """Rotate each `rows` rows by a Hadamard matrix with signs, or back, in fp32.

    R is a multiple of `rows`. The product a^T b over the rows of two tensors stays the same.
    """
    signs = 1.0 - 2.0 * ((HADAMARD_BITS >> torch.arange(rows, device=x_RK.device)) & 1)
    out = x_RK.float().unflatten(0, (-1, rows))
    if not is_inverse:
        out = out * signs[:, None]
    width = 1
    while width < rows:  # sums and differences, not a product: those are counted as the model's
        low, high = out.unflatten(1, (-1, 2, width)).unbind(2)
        out = torch.stack((low + high, low - high), 2).flatten(1, 3)
        width *= 2
    if is_inverse:
        out = out * signs[:, None]
    # So that the matrix is orthogonal, and its own inverse but for the signs.
    return out.flatten(0, 1) / rows**0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPadding:
    """Groups of rows padded by zeros to a multiple, so that no block holds rows of two groups.

    There are as many rows as any sizes of the groups need, so that the host need not know them:
    `places` are those of the rows, `ends` [G] the new ends of the groups.
    """

    places: torch.Tensor
    ends: torch.Tensor
    rows: int

    def pad(self, x_RK: torch.Tensor) -> torch.Tensor:
        """Return the rows with zeros between the groups, and after the last."""
        return x_RK.new_zeros(self.rows, x_RK.shape[1]).index_copy(0, self.places, x_RK)

    @property
    def sources(self) -> torch.Tensor:
        """The row [P] that lies at each place; -1 for zeros."""
        numbers = torch.arange(len(self.places), dtype=torch.int32, device=self.places.device)
        return numbers.new_full((self.rows,), -1).index_copy(0, self.places, numbers)


def pad_groups(ends: torch.Tensor, rows: int, multiple: int, least: int = 0) -> GroupPadding:
    """Plan the padding of groups of rows that end at `ends`.

    No group has fewer rows than `least`, which is 0 or the multiple.
    """
    starts = torch.cat((ends.new_zeros(1), ends[:-1]))
    sizes = ((ends - starts).clamp(min=least) + multiple - 1) // multiple * multiple
    new_ends = sizes.cumsum(0).to(ends.dtype)
    shift = (new_ends - sizes - starts)[group_numbers(ends, rows)]
    return GroupPadding(
        places=torch.arange(rows, device=ends.device) + shift,
        ends=new_ends,
        # Each group may need almost one multiple more.
        rows=-(-rows // multiple) * multiple + len(ends) * multiple,
    )
