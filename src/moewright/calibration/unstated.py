"""Readings of rows that ran out of memory and do not state everything that decides it.

A statement that a run was out of memory has no step time and often no more than a layout. The
reading that needs least memory is taken. If even that does not fit, the verdict stands whatever the
source left out; if it fits, nothing is known, and calibration.score says uncertain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from moewright.calibration.cells import VPP_ON
from moewright.spec.layout import Recompute

# The smallest micro-batch, and the usual values of the other two.
_LEAST: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("mbs", ("1",)),
    ("seq_len", ("4096",)),
    ("precision", ("bf16",)),
)
_POWERS = tuple(str(2**n) for n in range(8))
_CHUNKS = ("2", "3", "4", "6", "12")
_ALL_MODULES = "attn_norm qkv_linear core_attn attn_proj mlp_norm expert_fc1 moe_act"


def find_unstated_columns(
    cells: Mapping[str, str], implied: Mapping[str, str], *, is_moe: bool
) -> dict[str, tuple[str, ...]]:
    """Return the unstated columns of an out-of-memory row, and the values that they may have.

    `implied` are the same cells with what follows from their source filled in.
    """
    values: dict[str, tuple[str, ...]] = {
        column: least for column, least in _LEAST if not cells[column]
    }
    is_sharded = cells["fsdp"] not in ("", "none")
    # A row without any degree states no layout, so its other degrees are not enumerated.
    if cells["tp"] or cells["pp"] or cells["ep"]:
        values |= {
            column: _POWERS for column in ("tp", "pp") if not cells[column] and not is_sharded
        }
        if is_moe and not cells["ep"]:
            values["ep"] = _POWERS
    if cells["vpp"] == VPP_ON:
        values["vpp"] = _CHUNKS
    modules = cells["recompute_modules"].replace(",", " ").partition("(")[0].split()
    if not implied["recompute_granularity"]:
        values["recompute_granularity"] = ("full",)
    if cells["recompute_granularity"] == "selective" and not set(modules) <= {*Recompute}:
        values["recompute_granularity"] = ("full",)
    offload = cells["offload"]
    if offload and "optimizer" not in offload and offload != "none":
        values["offload"] = (_ALL_MODULES,)
    return values


def enumerate_readings(
    cells: Mapping[str, str], columns: Mapping[str, tuple[str, ...]]
) -> Iterator[dict[str, str]]:
    """Yield the row with every combination of the values."""
    for values in product(*columns.values()):
        yield {**cells, **dict(zip(columns, values, strict=True))}
