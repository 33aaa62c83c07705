"""The columns of a table of measured runs, and one spelling for their titles and cells.

Spreadsheets and data frames turn 256 into "256.0", true into "True" and an empty cell into "nan";
people write "4,096", "4k" and "Micro Batch Size". What a cell says is not changed.
docs/tables.md describes each column, its unit and its meaning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from moewright.codec import explicit_fields, parse_layout
from moewright.spec.layout import DEGREES, CudaGraphScope, Layout, Overlap, Recompute
from moewright.spec.units import mention, whole_number


class ColumnKind(StrEnum):
    """How the cells of a column are spelt."""

    TEXT = "text"
    NUMBER = "number"
    SWITCH = "switch"  # true or false


@dataclass(frozen=True, kw_only=True, slots=True)
class TableColumn:
    """A column that is read, with the titles that other tables give it."""

    name: str
    kind: ColumnKind = ColumnKind.TEXT
    aliases: tuple[str, ...] = ()


def _text(name: str, *aliases: str) -> TableColumn:
    return TableColumn(name=name, aliases=aliases)


def _number(name: str, *aliases: str) -> TableColumn:
    return TableColumn(name=name, kind=ColumnKind.NUMBER, aliases=aliases)


def _switch(name: str, *aliases: str) -> TableColumn:
    return TableColumn(name=name, kind=ColumnKind.SWITCH, aliases=aliases)


# The switch column of each overlap that a layout can have.
OVERLAP_COLUMNS: Mapping[Overlap, str] = MappingProxyType(
    {overlap: overlap.facts.column for overlap in Overlap if overlap.facts.column}
)
# A table may leave any column but the needed ones out, and may have more.
NEEDED_COLUMNS = ("model", "hardware", "num_gpus")
_TABLE_COLUMNS = (
    _text("id"),
    _text("source"),
    _text("publisher"),
    _text("framework", "trainer"),
    _text("date_release"),
    _text("task"),
    _text("model", "model_name", "model_id"),
    _text("hardware", "gpu", "gpu_type", "device", "device_type"),
    _number("num_gpus", "gpus", "num_devices", "devices", "world_size", "n_gpus"),
    _text("network", "interconnect"),
    _text("nvlink_domain"),
    _text("precision", "dtype"),
    _number("seq_len", "seq_length", "sequence_length", "seqlen"),
    _number("gbs", "global_batch_size", "global_batch"),
    _number("mbs", "micro_batch_size", "micro_batch"),
    _number("tp", "tensor_model_parallel_size", "tp_size"),
    _switch("sp", "sequence_parallel"),
    _number("pp", "pipeline_model_parallel_size", "pp_size"),
    _number("vpp", "virtual_pipeline_model_parallel_size", "vp", "vp_size"),
    _number("cp", "context_parallel_size", "cp_size"),
    _number("ep", "expert_model_parallel_size", "ep_size"),
    _number("etp", "expert_tensor_parallel_size", "etp_size"),
    _number("dp"),
    _text("fsdp"),
    _switch("zero1"),
    _text("pp_layout"),
    _text("recompute_granularity"),
    _text("recompute_modules"),
    _text("offload"),
    _text("cuda_graph"),
    _text("dispatcher"),
    *(_switch(column) for column in OVERLAP_COLUMNS.values()),
    _switch("force_balance"),
    _number("capacity_factor"),
    _text("capacity_fill"),
    _text("optimizer"),
    _switch("mtp"),
    _number("time_per_iter_s", "step_time_s", "iteration_time_s", "time_per_step_s"),
    _number(
        "tokens_per_s_per_gpu", "tokens_per_sec_per_gpu", "tokens/s/gpu", "tokens_per_gpu_per_s"
    ),
    _switch("tokens_rounded"),
    _number(
        "tflops_per_gpu",
        "tflops",
        "tflop_s_per_gpu",
        "tflop/s/gpu",
        "tflops/gpu",
        "model_tflops_per_gpu",
    ),
    _text("flops_convention"),
    _number("mfu_pct", "mfu_percent", "mfu_%"),
    _number("mfu_peak_tflops"),
    _number("peak_memory_gb", "peak_gb", "memory_gb", "max_memory_gb"),
    _text("peak_memory_kind"),
    _text("peak_memory_unit"),
    _text("peak_memory_scope"),
    _switch("oom"),
    _text("notes"),
)
COLUMNS = tuple(column.name for column in _TABLE_COLUMNS)
_KINDS: Mapping[str, ColumnKind] = MappingProxyType(
    {column.name: column.kind for column in _TABLE_COLUMNS}
)
_NAME_OF_ALIAS: Mapping[str, str] = MappingProxyType(
    {alias: column.name for column in _TABLE_COLUMNS for alias in column.aliases}
)
# What other tables write in a cell whose source does not state the fact.
_NOT_STATED = frozenset(
    {"nan", "na", "n/a", "null", "unknown", "not stated", "-", "--", "?", "\u2013", "\u2014"}
)
_SWITCH_WORDS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("true", "yes", "on", "1", "1.0"), "true"),
        **dict.fromkeys(("false", "no", "off", "0", "0.0"), "false"),
    }
)
_K = 1024  # sequence lengths are written in "k"


def canonical_column(title: str) -> str:
    """Return the column that a header names: "Micro Batch Size" and "micro-batch-size" are mbs."""
    name = re.sub(r"[\s-]+", "_", title.strip().casefold())
    return _NAME_OF_ALIAS.get(name, name)


def canonical_cell(column: str, text: str) -> str:
    """Return a cell in this project's spelling; "" where it says that nothing is stated."""
    stripped = text.strip()
    if stripped.casefold() in _NOT_STATED:
        return ""
    kind = _KINDS.get(column, ColumnKind.TEXT)
    if kind is ColumnKind.SWITCH:
        return _SWITCH_WORDS.get(stripped.casefold(), stripped)
    if kind is ColumnKind.NUMBER:
        return _canonical_number(column, stripped)
    return stripped


def _canonical_number(column: str, text: str) -> str:
    """Drop separators of thousands and a zero after the point; leave any other text as it is."""
    plain = text
    # Whole groups of three alone: "4,5" may be a decimal number.
    if re.fullmatch(r"\d{1,3}([,_]\d{3})+(\.\d+)?", text):
        plain = text.replace(",", "").replace("_", "")
    in_k = re.fullmatch(r"(\d+) ?[kK]", plain)
    if in_k and column == "seq_len":
        return str(int(in_k[1]) * _K)
    return re.sub(r"^(\d+)\.0+$", r"\1", plain)


def fill_from_layout(cells: Mapping[str, str]) -> dict[str, str]:
    """Fill the empty cells from a `layout` column, as far as its text states them.

    Raises:
        BadInput: the column holds text that is no layout.
    """
    text = cells.get("layout", "")
    if not text:
        return dict(cells)
    devices = cells.get("num_gpus", "")
    layout = parse_layout(text, world_size=whole_number(devices, otherwise=1))
    stated = _cells_of_layout(layout, explicit_fields(text))
    # A column of its own wins over the text of the layout.
    empty = {column: value for column, value in stated.items() if not cells.get(column)}
    return {**cells, **empty}


def _cells_of_layout(layout: Layout, fields: frozenset[str]) -> dict[str, str]:
    """Return the cells that say what `fields` of a layout say."""
    stated: dict[str, str] = {
        name: str(getattr(layout, name)) for name in DEGREES if name in fields
    }
    if "recompute" in fields:
        stated["recompute_modules"] = " ".join(
            policy for policy in layout.recompute if policy is not Recompute.FULL
        )
        stated["recompute_granularity"] = _recompute_granularity(layout)
    if "dispatcher" in fields:
        stated["dispatcher"] = layout.dispatcher
    if "graphs" in fields:
        stated["cuda_graph"] = _cuda_graph_cell(layout)
    if "overlap" in fields:
        stated |= {
            column: str(overlap in layout.overlap).lower()
            for overlap, column in OVERLAP_COLUMNS.items()
        }
    if "offload" in fields:
        stated["offload"] = "; ".join(layout.offload) or "none"
    if "stages" in fields:
        stated["pp_layout"] = layout.stages
    if "zero" in fields:
        stated["fsdp"] = "fsdp" if layout.zero == 3 else "none"
        stated["zero1"] = str(layout.zero in (1, 2)).lower()
    return stated


def _recompute_granularity(layout: Layout) -> str:
    if Recompute.FULL in layout.recompute:
        return "full"
    return "selective" if layout.recompute else "none"


def _cuda_graph_cell(layout: Layout) -> str:
    if CudaGraphScope.FULL in layout.graphs:
        return "scope: iteration"
    return mention("scope: {}", " ".join(layout.graphs)) or "none"
