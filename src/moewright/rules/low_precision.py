"""The recipes of 8-bit and 4-bit products: number formats, scales, and what linear layers keep.

A product multiplies operands that are converted first: numbers of few bits with a scale for each
tensor or for each block of it, so that the largest number of what shares a scale nearly reaches the
largest of the format. Router, head, norms, attention and communication stay in 16 bits, and so do
DeepSeek-V4's compressors and its projection by groups of heads, as where they are published.

- fp8, tensor_scaling=current: E4M3 (gradients E5M2, unless fp8_format=e4m3), an fp32 scale a
  tensor, of experts a scale for each; Transformer Engine's Float8CurrentScaling.
- fp8, tensor_scaling=delayed: the same formats, with scales of the steps before
  (rules.delayed_scaling).
- fp8, tensor_scaling=blockwise: E4M3, a power of two for 1 x 128 numbers along the contraction, of
  weights for 128 x 128 (DeepSeek-V3, arXiv 2412.19437).
- mxfp8: E4M3, a power of two in 8 bits for 1 x 32 numbers (OCP Microscaling Formats 1.0).
- nvfp4: E2M1, a scale in E4M3 for 1 x 16 numbers, of weights for 16 x 16, and one in fp32 for the
  tensor. Both operands of a weight gradient are rotated by a Hadamard matrix of 16 rows before, and
  gradients are rounded at random (arXiv 2509.25149).

Linear layers keep the converted input of their forward product. Backward reads it and converts it
again along the tokens, as DeepSeek-V3 does; Transformer Engine keeps a second copy instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from moewright.rules.job import Job
from moewright.rules.saved.saved_tensor import KeptFormat, SavedTensor, SavingStack
from moewright.spec.hardware import DeviceKind, Hardware
from moewright.spec.layout import Layout, Recompute
from moewright.spec.ledger import Module
from moewright.spec.model import AttentionKind, ModelSpec
from moewright.spec.workload import Dtype, Fp8Format, TensorScaling, Workload


class NarrowFormat(StrEnum):
    """The number formats of operands."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"
    E2M1 = "e2m1"

    @property
    def largest(self) -> float:
        """The largest number of the format."""
        return {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}[self.value]


class ScaleFormat(StrEnum):
    """The number formats of scales."""

    FP32 = "fp32"
    POWER_OF_TWO = "power_of_two"  # fp32 without a mantissa
    E8M0 = "e8m0"  # a power of two in 8 bits
    E4M3 = "e4m3"  # beside a scale of the tensor in fp32

    @property
    def nbytes(self) -> int:
        """Bytes of a scale."""
        if self in (ScaleFormat.FP32, ScaleFormat.POWER_OF_TWO):
            return 4
        return 1


class OperandKind(StrEnum):
    """What an operand of a product is; recipes convert them differently."""

    INPUT = "input"
    WEIGHT = "weight"
    GRADIENT = "gradient"


@dataclass(frozen=True, kw_only=True, slots=True)
class OperandFormat:
    """The format of an operand, with a scale for `block` numbers along the contraction; 0: all.

    With `is_tiled` a scale is for as many rows too.
    """

    number: NarrowFormat
    scale: ScaleFormat
    block: int
    is_tiled: bool = False
    rounds_at_random: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The formats of the operands of all products of a workload."""

    inputs: OperandFormat
    weights: OperandFormat
    gradients: OperandFormat
    hadamard_rows: int = 0  # of the matrix that rotates the operands of weight gradients; 0: none

    def operand(self, kind: OperandKind) -> OperandFormat:
        """Return the format of an operand of a kind."""
        by_kind = {
            OperandKind.INPUT: self.inputs,
            OperandKind.WEIGHT: self.weights,
            OperandKind.GRADIENT: self.gradients,
        }
        return by_kind[kind]


_TENSOR = OperandFormat(number=NarrowFormat.E4M3, scale=ScaleFormat.FP32, block=0)
_CURRENT = Recipe(
    inputs=_TENSOR,
    weights=_TENSOR,
    gradients=OperandFormat(number=NarrowFormat.E5M2, scale=ScaleFormat.FP32, block=0),
)
_CURRENT_E4M3 = replace(_CURRENT, gradients=_TENSOR)
_BLOCK = OperandFormat(number=NarrowFormat.E4M3, scale=ScaleFormat.POWER_OF_TWO, block=128)
_BLOCKWISE = Recipe(
    inputs=_BLOCK,
    weights=OperandFormat(
        number=NarrowFormat.E4M3, scale=ScaleFormat.POWER_OF_TWO, block=128, is_tiled=True
    ),
    gradients=_BLOCK,
)
_MX = OperandFormat(number=NarrowFormat.E4M3, scale=ScaleFormat.E8M0, block=32)
_MXFP8 = Recipe(inputs=_MX, weights=_MX, gradients=_MX)
_NVFP4 = Recipe(
    inputs=OperandFormat(number=NarrowFormat.E2M1, scale=ScaleFormat.E4M3, block=16),
    weights=OperandFormat(
        number=NarrowFormat.E2M1, scale=ScaleFormat.E4M3, block=16, is_tiled=True
    ),
    gradients=OperandFormat(
        number=NarrowFormat.E2M1, scale=ScaleFormat.E4M3, block=16, rounds_at_random=True
    ),
    hadamard_rows=16,
)


_CODES: Mapping[NarrowFormat, KeptFormat] = MappingProxyType(
    {NarrowFormat.E4M3: KeptFormat.E4M3, NarrowFormat.E2M1: KeptFormat.E2M1}
)
# Inputs of 8-bit linears of a fused stack: each linear keeps a converted copy of its own, and none
# keeps the 16-bit tensor. The output projection is told to save its original input, which attention
# keeps anyway (Megatron-LM, attention.py: save_original_input).
_FUSED_CONVERTED = frozenset(
    {
        *((Module.ATTENTION, name) for name in ("input_norm_out", "q_latent", "kv_latent")),
        (Module.ATTENTION, "mixer_out"),
        *((Module.DENSE_MLP, name) for name in ("post_norm_out", "activation")),
        *((Module.EXPERTS, name) for name in ("permuted", "activation")),
        (Module.SHARED_EXPERTS, "activation"),
    }
)


def find_recipe(workload: Workload) -> Recipe | None:
    """Return the recipe of a workload; None where products have 16 bits or more."""
    if workload.precision is Dtype.FP8:
        if workload.tensor_scaling is TensorScaling.BLOCKWISE:
            return _BLOCKWISE
        return _CURRENT if workload.fp8_format is Fp8Format.HYBRID else _CURRENT_E4M3
    return {Dtype.MXFP8: _MXFP8, Dtype.NVFP4: _NVFP4}.get(workload.precision)


def find_rate_dtype(workload: Workload) -> Dtype:
    """Return the dtype whose rates time a workload's products.

    Kernels that read a scale a block are timed as MXFP8, whatever the size of the block.
    """
    is_blockwise = workload.tensor_scaling is TensorScaling.BLOCKWISE
    if workload.precision is Dtype.FP8 and is_blockwise:
        return Dtype.MXFP8
    return workload.precision


def find_narrow_form(workload: Workload, hardware: Hardware) -> Workload | None:
    """Return a job of 16 bits with its linear layers in the 8-bit format of the device.

    That is MXFP8 on NVIDIA's parts that multiply it, FP8 by blocks on those that have kernels for
    these, and FP8 with a scale a tensor on others that have a peak for it; None where there is
    none, or where the job is no bf16 job.
    """
    device = hardware.device
    peaks = {peak.dtype for peak in device.peaks}
    if workload.precision is not Dtype.BF16 or Dtype.FP8 not in peaks:
        return None
    if Dtype.MXFP8 in peaks and device.kind is DeviceKind.CUDA:
        return replace(workload, precision=Dtype.MXFP8)
    # H100, H200, H20, H800 and GH200: the parts with kernels for FP8 by blocks.
    is_hopper = re.match(r"G?H\d", device.name) is not None
    scaling = TensorScaling.BLOCKWISE if is_hopper else TensorScaling.CURRENT
    return replace(workload, precision=Dtype.FP8, tensor_scaling=scaling)


def list_narrow_forms(workload: Workload, hardware: Hardware) -> Iterator[Workload]:
    """Yield a job in the narrower formats that may be tried on a device, the widest first.

    After 8 bits that is NVFP4 on NVIDIA's parts that multiply it, where 16 or 8 bits have proven
    stable.
    """
    eight_bit = find_narrow_form(workload, hardware)
    if eight_bit is not None:
        yield eight_bit
    device = hardware.device
    multiplies = any(peak.dtype is Dtype.NVFP4 for peak in device.peaks)
    is_wider = workload.precision in (Dtype.BF16, Dtype.FP8, Dtype.MXFP8)
    if multiplies and is_wider and device.kind is DeviceKind.CUDA:
        yield replace(workload, precision=Dtype.NVFP4)


def megatron_recipe(workload: Workload) -> tuple[str, str]:
    """Return Megatron-LM's FP8 format and recipe."""
    if workload.precision is Dtype.MXFP8:
        return "e4m3", "mxfp8"
    if workload.tensor_scaling is TensorScaling.BLOCKWISE:
        return "e4m3", "blockwise"
    is_delayed = workload.tensor_scaling is TensorScaling.DELAYED
    return workload.fp8_format.value, "delayed" if is_delayed else "tensorwise"


def kept_bytes(operand: OperandFormat, rows: Any, width: int, groups: int) -> Any:
    """Return the bytes of a converted input [rows, width], numbers and scales.

    Numbers of 4 bits are packed in pairs. A scale of a tensor is there once for each of `groups`.
    """
    is_packed = operand.number is NarrowFormat.E2M1
    nbytes = rows * (-(-width // 2) if is_packed else width)
    if operand.block:
        nbytes = nbytes + rows * operand.scale.nbytes * -(-width // operand.block)
    # Scales of E4M3 end at 448: NVFP4 has one in fp32 for the tensor beside them.
    has_tensor_scale = not operand.block or operand.scale is ScaleFormat.E4M3
    return nbytes + 4 * groups * has_tensor_scale


def convert_kept(
    job: Job, tensor: SavedTensor, wide_nbytes: int, stack: SavingStack
) -> SavedTensor:
    """Return a saved tensor in the format in which it is kept under the recipe of a workload.

    Its numbers have `wide_nbytes` bytes as they come. Recomputation of a dense MLP starts from its
    input as it came, which is then kept instead of the converted one.
    """
    recipe = find_recipe(job.workload)
    if recipe is None or (stack.is_fused and stack.input_ratio is None):
        return tensor
    narrow = _CODES[recipe.inputs.number]
    if stack.input_ratio is not None:
        ratio = _fused_ratio(job.model, tensor, stack.input_ratio)
        if ratio == 1.0:
            return tensor
        return replace(tensor, bytes=round(tensor.bytes * ratio), format=narrow)
    width = kept_width(job.model, job.layout, tensor)
    if not width:
        return tensor
    groups = 1
    if tensor.owner is Module.EXPERTS and job.model.moe is not None:
        # A scale for each expert in the rank's slots, replicas included.
        groups = job.model.moe.experts // job.layout.ep + job.layout.spare
    rows = tensor.bytes // (wide_nbytes * width)
    is_mlp_input = (tensor.owner, tensor.name) == (Module.DENSE_MLP, "post_norm_out")
    return replace(
        tensor,
        bytes=int(kept_bytes(recipe.inputs, rows, width, groups)),
        format=narrow,
        wide_by=(Recompute.MLP,) if is_mlp_input else (),
    )


def _fused_ratio(model: ModelSpec, tensor: SavedTensor, input_ratio: float) -> float:
    """Return the size of what a fused stack keeps over that of the tensor in 16 bits.

    The two down-projections of latent attention read one norm's output and keep a copy each. The
    router keeps its input in 16 bits, and shared experts keep a converted copy besides. With these
    rules the sum is what arXiv 2603.07685 prints for DeepSeek-V3.
    """
    key = tensor.module, tensor.name
    if key in _FUSED_CONVERTED:
        twice = tensor.name == "input_norm_out" and model.attention.kind is AttentionKind.MLA
        return input_ratio * (2 if twice else 1)
    has_shared = model.moe is not None and model.moe.shared_ffn_size > 0
    if key == (Module.ROUTER, "post_norm_out") and has_shared:
        return 1.0 + input_ratio
    return 1.0


def kept_width(model: ModelSpec, layout: Layout, tensor: SavedTensor) -> int:
    """Return the width of a saved tensor that the engine keeps converted; 0 for all others.

    The router keeps its input in 16 bits, and attention its output: layers that read these too keep
    no copy. A compressor takes the input of its attention in 16 bits.
    """
    spec = model.attention
    widths = {
        (Module.ATTENTION, "input_norm_out"): model.hidden_size,
        (Module.ATTENTION, "q_latent"): spec.q_lora_rank,
        (Module.ATTENTION, "kv_latent"): spec.kv_lora_rank,
        (Module.DENSE_MLP, "post_norm_out"): model.hidden_size,
        (Module.DENSE_MLP, "activation"): model.dense_ffn_size // layout.tp,
    }
    if spec.kind is AttentionKind.COMPRESSED:
        del widths[Module.ATTENTION, "input_norm_out"]
        low = spec.output_groups * spec.output_lora_rank
        widths[Module.ATTENTION, "o_down"] = low // layout.tp
    if model.recurrent is not None:
        widths[Module.ATTENTION, "mixer_out"] = model.recurrent.value_width // layout.tp
    if model.moe is not None:
        widths |= {
            (Module.EXPERTS, "permuted"): model.expert_width,
            (Module.EXPERTS, "activation"): model.moe.ffn_size // layout.etp,
            (Module.SHARED_EXPERTS, "activation"): model.moe.shared_ffn_size // layout.tp,
        }
    return widths.get((tensor.owner, tensor.name), 0)
