"""Tokens per second of a published row, from its step time, tokens/s, TFLOP/s or MFU.

TFLOP/s are converted with rules.shapes.flops under the convention of their source: Megatron counts
the causal half of attention, MTP layers where it trains them and logits, and counts neither
embedding nor router nor recomputation. The column `flops_convention` names a source that counts
otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from moewright.calibration.cells import cell_error, parse_number
from moewright.rules.shapes import flops, mixers
from moewright.spec.model import MixerKind, ModelSpec, RecurrentKind
from moewright.spec.units import TERA

# The MFU of arXiv 2504.14960 is of the dense bf16 peak of an H100.
_DEFAULT_MFU_PEAK_TFLOPS = "989.5"
# TFLOP/s and rounded tokens/s that are nearer than this share are taken for the same speed.
_ROUNDING = 0.02


class FlopsConvention(StrEnum):
    """What a source counts as model FLOPs."""

    CAUSAL = "causal"  # half of attention, as Megatron counts
    FULL_ATTENTION = "full_attention"
    OTHER = "other"  # its TFLOP/s are not converted to tokens/s


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSpeed:
    """A measured speed, with the figure that it came from."""

    tokens_per_s_per_device: float
    origin: str


def trained_without_mtp(cells: Mapping[str, str], model: ModelSpec, seq_len: int) -> bool:
    """Return whether a model that can train MTP layers did not in this run.

    The source says so, or its layout string has none, or its TFLOP/s and tokens/s agree only
    without.
    """
    if not model.mtp_layers:
        return False
    if cells["mtp"] == "false":
        return True
    stages = cells["pp_layout"]
    if stages and not stages.startswith(("uneven", "custom")):
        return "m" not in stages
    if cells["mtp"] or not (cells["tflops_per_gpu"] and cells["tokens_per_s_per_gpu"]):
        return False
    flops_per_s = _parse_cell(cells, "tflops_per_gpu") * TERA
    printed = flops_per_s / _parse_cell(cells, "tokens_per_s_per_gpu")
    with_mtp = megatron_flops_per_token(model, seq_len)
    without_mtp = megatron_flops_per_token(replace(model, mtp_layers=0), seq_len)
    return abs(printed - without_mtp) < abs(printed - with_mtp)


def read_speed(
    cells: Mapping[str, str], model: ModelSpec, *, seq_len: int, gbs: int, devices: int
) -> MeasuredSpeed | None:
    """Return the speed of a row; None when it prints none that can be converted to tokens/s.

    Raises:
        BadInput: a figure is no number.
    """
    if cells["time_per_iter_s"]:
        rate = gbs * seq_len / _parse_cell(cells, "time_per_iter_s") / devices
        return MeasuredSpeed(tokens_per_s_per_device=rate, origin="time of a step")
    converted = _speed_from_flops(cells, _flops_per_token(cells, model, seq_len))
    if not cells["tokens_per_s_per_gpu"]:
        return converted
    printed = MeasuredSpeed(
        tokens_per_s_per_device=_parse_cell(cells, "tokens_per_s_per_gpu"), origin="tokens/s"
    )
    if converted is None or cells["tokens_rounded"] != "true":
        return printed
    ratio = converted.tokens_per_s_per_device / printed.tokens_per_s_per_device
    if abs(ratio - 1) >= _ROUNDING:
        return printed
    return replace(converted, origin=converted.origin + "; the printed tokens/s are rounded")


def _parse_cell(cells: Mapping[str, str], column: str) -> float:
    return parse_number(column, cells[column])


def _speed_from_flops(cells: Mapping[str, str], flops_per_token: int) -> MeasuredSpeed | None:
    if not flops_per_token:
        return None
    if cells["tflops_per_gpu"]:
        flops_per_s = _parse_cell(cells, "tflops_per_gpu") * TERA
        origin = f"TFLOP/s at {flops_per_token / 1e9:.2f} GFLOP a token"
    elif cells["mfu_pct"]:
        peak = cells["mfu_peak_tflops"] or _DEFAULT_MFU_PEAK_TFLOPS
        share = _parse_cell(cells, "mfu_pct") / 100
        flops_per_s = share * (parse_number("mfu_peak_tflops", peak) * TERA)
        origin = f"MFU of {peak} TFLOP/s"
    else:
        return None
    return MeasuredSpeed(tokens_per_s_per_device=flops_per_s / flops_per_token, origin=origin)


def _flops_per_token(cells: Mapping[str, str], model: ModelSpec, seq_len: int) -> int:
    """Return the FLOPs of a token as the row's source counts them; 0 where that is not known."""
    convention = _flops_convention(cells)
    if convention is FlopsConvention.OTHER:
        return 0
    counted = megatron_flops_per_token(model, seq_len)
    if convention is FlopsConvention.CAUSAL:
        return counted
    causal_half = sum(
        mixers.attention_flops(model, layer, seq_len, seq_len) for layer in range(model.layers)
    )
    # The half that a causal mask hides, as much again as was counted.
    return counted + flops.TRAIN_TO_FORWARD_RATIO * causal_half // seq_len


def megatron_flops_per_token(model: ModelSpec, seq_len: int) -> int:
    """Return the FLOPs of a token as Megatron counts them, for training.

    They are the model FLOPs, but for hybrids with Mamba-2 layers: there it takes the inner width
    for twice the hidden size, whatever heads and head size say (Nemotron 3 Nano: 5376 for 4096),
    and leaves out the projections of MTP depths (Megatron-Bridge flop_utils, hybrid_flops).
    """
    counted = flops.model_flops_per_token(model, seq_len)
    spec, h = model.recurrent, model.hidden_size
    if spec is None or spec.kind is not RecurrentKind.MAMBA2:
        return counted
    layers = model.mixers.count(MixerKind.RECURRENT)
    # FLOPs of a channel of values: three columns of projections, and 7 an element of the state.
    wider = layers * (6 * h + 7 * spec.key_dim) * (2 * h - spec.value_width)
    # A projection [h, 2 h] of a token.
    projections = model.mtp_layers * 4 * h * h
    return counted + flops.TRAIN_TO_FORWARD_RATIO * (wider - projections)


def _flops_convention(cells: Mapping[str, str]) -> FlopsConvention:
    text = cells["flops_convention"] or FlopsConvention.CAUSAL
    if text not in tuple(FlopsConvention):
        rule = f"must be one of {', '.join(FlopsConvention)}"
        raise cell_error("flops_convention", text, rule)
    return FlopsConvention(text)
