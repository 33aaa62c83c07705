"""Tokens per second of a published row, whatever it prints: time, tokens/s, TFLOP/s or MFU.

TFLOP/s are turned round by rules.flops under the convention of their source: Megatron counts the
causal half, MTP where it trains it, logits, and neither embedding nor router nor recomputation;
NeMo 24.07 and Megatron's llama example count full attention; gpt-oss was counted in two ways over
time, so its TFLOP/s are not turned round at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from moewright.calibration.cells import parse_number
from moewright.rules import flops
from moewright.spec.model import ModelSpec
from moewright.spec.units import TERA

_FULL_ATTENTION = ("24.07", "llama README", "examples/llama")
_WITHOUT_MTP = ("FP8-FLOW", "AutoModel")
_ROUNDED = (
    "26.04.01",
    "26.06.01",
    "26.08",
)  # these tables round tokens/s to whole sequences a second of the job
_MFU_OF = 989.5e12  # what arXiv 2504.14960 divides by
_SAME = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSpeed:
    """Measured speed, and from which figure it came."""

    tokens_per_s_per_device: float
    origin: str


def trained_without_mtp(cells: Mapping[str, str], model: ModelSpec, seq_len: int) -> bool:
    """Whether a model that can train MTP layers did not in this run: the source says so, its layout
    string has none, or its TFLOP/s and tokens/s agree only without."""
    if not model.mtp_layers:
        return False
    said = cells["pp_layout"]
    if any(name in cells["source"] for name in _WITHOUT_MTP) or "w/o MTP" in cells["notes"]:
        return True
    if said and not said.startswith(("uneven", "custom")):
        return "m" not in said
    if "MTP" in cells["notes"] or not (cells["tflops_per_gpu"] and cells["tokens_per_s_per_gpu"]):
        return False
    implied = _figure(cells, "tflops_per_gpu") * TERA / _figure(cells, "tokens_per_s_per_gpu")
    bare = flops.model_flops_per_token(replace(model, mtp_layers=0), seq_len)
    full = flops.model_flops_per_token(model, seq_len)
    return abs(implied - bare) < abs(implied - full)


def read_speed(
    cells: Mapping[str, str], model: ModelSpec, *, seq_len: int, gbs: int, devices: int
) -> MeasuredSpeed | None:
    """The speed of a row; None when it prints none that can be turned into tokens/s. Raises
    BadInput for no number."""
    if cells["time_per_iter_s"]:
        rate = gbs * seq_len / _figure(cells, "time_per_iter_s") / devices
        return MeasuredSpeed(tokens_per_s_per_device=rate, origin="time of a step")
    turned = _from_flops(cells, _flops_per_token(cells, model, seq_len))
    if not cells["tokens_per_s_per_gpu"]:
        return turned
    printed = MeasuredSpeed(
        tokens_per_s_per_device=_figure(cells, "tokens_per_s_per_gpu"), origin="tokens/s"
    )
    if turned is None or cells["date_release"] not in _ROUNDED:
        return printed
    close = abs(turned.tokens_per_s_per_device / printed.tokens_per_s_per_device - 1) < _SAME
    return (
        replace(turned, origin=turned.origin + "; the printed tokens/s are rounded")
        if close
        else printed
    )


def _figure(cells: Mapping[str, str], column: str) -> float:
    return parse_number(column, cells[column])


def _from_flops(cells: Mapping[str, str], per_token: int) -> MeasuredSpeed | None:
    if not per_token or not (cells["tflops_per_gpu"] or cells["mfu_pct"]):
        return None
    if cells["tflops_per_gpu"]:
        rate, origin = (
            _figure(cells, "tflops_per_gpu") * TERA,
            f"TFLOP/s at {per_token / 1e9:.2f} GFLOP a token",
        )
    else:
        rate, origin = _figure(cells, "mfu_pct") / 100 * _MFU_OF, "MFU of 989.5 TFLOP/s"
    return MeasuredSpeed(tokens_per_s_per_device=rate / per_token, origin=origin)


def _flops_per_token(cells: Mapping[str, str], model: ModelSpec, seq_len: int) -> int:
    """FLOPs of a token as the row's source counts them; 0 where its convention changed over
    time."""
    if "gpt-oss" in model.name:
        return 0
    counted = flops.model_flops_per_token(model, seq_len)
    if any(name in cells["source"] for name in _FULL_ATTENTION):
        halves = sum(
            flops.attention_flops(model, layer, seq_len, seq_len) for layer in range(model.layers)
        )
        counted += flops.TRAIN_TO_FORWARD_RATIO * halves // seq_len
    return counted
