"""Rows that state running out of memory and leave out what decides it: read at the values that need
least memory.

A statement has no step time and often no more than a layout. If even the least does not fit, the
verdict stands whatever the source left out; if it fits, nothing is known (tune.score says
uncertain).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from moewright.spec.layout import Recompute

# What a micro-batch or a sequence needs at least, and what the rest is where nobody says otherwise.
_LEAST: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("mbs", ("1",)),
    ("seq_len", ("4096",)),
    ("precision", ("bf16",)),
)
_POWERS = tuple(str(2**n) for n in range(8))
_CHUNKS = ("2", "3", "4", "6", "12")


def find_unstated_columns(given: Mapping[str, str], *, is_moe: bool) -> dict[str, tuple[str, ...]]:
    """Columns of an out-of-memory row that are not stated, and the values that they may have."""
    found: dict[str, tuple[str, ...]] = {
        column: values for column, values in _LEAST if not given[column]
    }
    sharded = given["fsdp"] not in ("", "none")
    # Without a single degree there is no layout to speak of.
    if given["tp"] or given["pp"] or given["ep"]:
        found |= {column: _POWERS for column in ("tp", "pp") if not given[column] and not sharded}
        found |= {"ep": _POWERS} if is_moe and not given["ep"] else {}
    if "degree not stated" in given["notes"]:
        found["vpp"] = _CHUNKS
    words = given["recompute_modules"].replace(",", " ").partition("(")[0].split()
    if not given["recompute_granularity"] and "without recompute" not in given["notes"]:
        found["recompute_granularity"] = ("full",)
    if given["recompute_granularity"] == "selective" and not set(words) <= {*Recompute}:
        found["recompute_granularity"] = ("full",)
    if given["offload"] and "optimizer" not in given["offload"] and given["offload"] != "none":
        found["offload"] = ("attn_norm qkv_linear core_attn attn_proj mlp_norm expert_fc1 moe_act",)
    return found


def enumerate_readings(
    given: Mapping[str, str], columns: Mapping[str, tuple[str, ...]]
) -> Iterator[dict[str, str]]:
    """The row with every combination of the values."""
    for values in product(*columns.values()):
        yield {**given, **dict(zip(columns, values, strict=True))}
