"""Tables of measured runs: each row as model, workload, hardware and layout, with what it measured.

The columns are those of data/README's measurements.csv. Facts a source does not state stay unknown:
the default is taken and the column is listed with the row. A row that cannot be scored is skipped
with its reason.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import combinations
from pathlib import Path

from moewright.calibration import cells as read
from moewright.calibration.columns import canonical_cell, canonical_column, fill_from_layout
from moewright.calibration.software_facts import apply_software_facts
from moewright.calibration.speed import MeasuredSpeed, read_speed, trained_without_mtp
from moewright.calibration.unstated import enumerate_readings, find_unstated_columns
from moewright.cost.estimate import estimate
from moewright.intake import catalogue
from moewright.rules.legality import check_legality
from moewright.rules.stages import parse_stages
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Hardware
from moewright.spec.layout import Layout, Overlap, Schedule
from moewright.spec.model import ModelSpec
from moewright.spec.units import GB, GIB
from moewright.spec.workload import Routing, Workload

# Every column that is read; a table may leave any but the needed ones out, and may have more.
COLUMNS = (
    *(
        "id",
        "source",
        "date_release",
        "task",
        "model",
        "hardware",
        "num_gpus",
        "precision",
        "seq_len",
        "gbs",
        "mbs",
    ),
    *("tp", "sp", "pp", "vpp", "cp", "ep", "etp", "dp", "fsdp", "zero1", "pp_layout"),
    *(
        "recompute_granularity",
        "recompute_modules",
        "offload",
        "cuda_graph",
        "dispatcher",
        *read.OVERLAP_COLUMNS,
    ),
    *("force_balance", "capacity_factor", "optimizer"),
    *(
        "time_per_iter_s",
        "tokens_per_s_per_gpu",
        "tflops_per_gpu",
        "mfu_pct",
        "peak_memory_gb",
        "peak_memory_kind",
    ),
    *("oom", "notes"),
)
_NEEDED = ("model", "hardware", "num_gpus")
CONTRADICTION_RATIO = 1.1  # rows that say the same and differ by more contradict each other


class PeakKind(StrEnum):
    """What a published peak counts, and where."""

    ALLOCATED = "allocated"
    LAST_RANK = "last_rank"  # allocated, on the last pipeline stage
    RESERVED = "reserved"
    DEVICE = "device"


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredPeak:
    """A measured peak as printed, in units of `unit_bytes` (GB or GiB)."""

    value: float
    unit_bytes: int
    kind: PeakKind


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRow:
    """One run: what it was, as far as its source says, and what it measured.

    `unknown` names the columns that decide its speed or memory and are not stated; `least` those
    taken at the values that need least memory (out-of-memory rows alone); `same_as` is the earlier
    row that reports the same measurement ("" for none).
    """

    id: str
    cells: Mapping[str, str]
    model: ModelSpec
    workload: Workload
    hardware: Hardware
    layout: Layout
    speed: MeasuredSpeed | None
    peak: MeasuredPeak | None
    oom: bool
    unstated: tuple[str, ...]
    assumed_least: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    duplicate_of: str = ""

    @property
    def group(self) -> tuple[str, str]:
        return self.model.name, self.hardware.name

    @property
    def release_family(self) -> str:
        """Software family: the release up to its second number for dated releases, else the kind of
        source."""
        dated = re.match(r"\d\d\.\d\d", self.cells["date_release"])
        return dated[0] if dated else self.id.rpartition("-")[0]

    @property
    def is_complete(self) -> bool:
        return not self.unstated


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippedRow:
    id: str
    cells: Mapping[str, str]
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasurementTable:
    """Rows in the order of the file; `order` holds all ids, made unique by their line where the
    file repeats one. `contradictions` are pairs that say the same layout."""

    order: tuple[str, ...]
    rows: tuple[MeasuredRow, ...]
    skipped: tuple[SkippedRow, ...]
    contradictions: tuple[str, ...]


def read_table(path: Path, user_hardware: Sequence[Hardware] = ()) -> MeasurementTable:
    """The rows of a table; `own` are parts beside the catalogue's that its hardware column may
    name.

    Raises BadInput when the file is no such table; a bad row is skipped, not raised."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = list(csv.DictReader(file))
    except OSError as error:
        raise BadInput(
            Reason(field="table", value=str(path), rule=error.strerror or "cannot be read")
        ) from None
    except (UnicodeDecodeError, csv.Error):
        raise BadInput(
            Reason(field="table", value=str(path), rule="is no CSV text in UTF-8")
        ) from None
    titles = {title: canonical_column(title) for title in (lines[0] if lines else ()) if title}
    missing = [column for column in _NEEDED if column not in titles.values()]
    if missing:
        rule = f"needs rows under a header with {', '.join(_NEEDED)}; missing: {', '.join(missing)}"
        raise BadInput(Reason(field="table", value=str(path), rule=rule))
    rows: list[MeasuredRow] = []
    skipped: list[SkippedRow] = []
    order: list[str] = []
    for place, line in enumerate(lines, 2):
        given = dict.fromkeys(COLUMNS, "")
        # A column that stands there by its own name is not overruled by one of another name.
        for title, column in sorted(
            titles.items(), key=lambda pair: pair[0] != pair[1], reverse=True
        ):
            given[column] = canonical_cell(column, line[title] or "") or given.get(column, "")
        if not given["id"] or given["id"] in order:
            given["id"] = f"{given['id']}@line{place}"
        order.append(given["id"])
        try:
            given = fill_from_layout(given)
            rows.append(
                _out_of_memory(given, user_hardware)
                if given["oom"] == "true"
                else _measured(given, user_hardware)
            )
        except BadInput as bad:
            skipped.append(SkippedRow(id=given["id"], cells=given, reason=str(bad)))
    marked = tuple(_repeats(rows))
    return MeasurementTable(
        order=tuple(order),
        rows=marked,
        skipped=tuple(skipped),
        contradictions=tuple(_contradictions(marked)),
    )


def _out_of_memory(given: Mapping[str, str], own: Sequence[Hardware]) -> MeasuredRow:
    """A row that states running out of memory, what it leaves open taken at what needs least."""
    columns = find_unstated_columns(given, is_moe=catalogue.model(given["model"]).moe is not None)
    best: tuple[int, MeasuredRow] | None = None
    refused: BadInput | None = None
    for reading in enumerate_readings(given, columns):
        try:
            row = _measured(reading, own)
        except BadInput as error:
            refused = refused or error
            continue
        peak = estimate(row.model, row.workload, row.hardware, row.layout).peak_bytes
        if best is None or peak < best[0]:
            best = peak, replace(row, cells=given, assumed_least=tuple(sorted(columns)))
    if best is None:
        raise refused or read.cell_error("id", given["id"], "has no legal layout")
    return best[1]


def _measured(given: Mapping[str, str], own: Sequence[Hardware]) -> MeasuredRow:
    """Raises BadInput with the reason why a row cannot be scored."""
    if given["task"] not in ("", "pretrain"):
        raise read.cell_error("task", given["task"], "only pre-training is modelled")
    for column in ("model", "hardware", "num_gpus", "seq_len", "mbs"):
        if not given[column]:
            raise read.cell_error(column, "", "is not stated")
    timed = any(
        given[c] for c in ("time_per_iter_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_pct")
    )
    if not (timed or given["peak_memory_gb"] or given["oom"] == "true"):
        raise read.cell_error("id", given["id"], "states neither speed nor memory")
    if not given["vpp"] and re.search(r"VPP[^;]*degree not stated", given["notes"]):
        raise read.cell_error(
            "vpp", given["vpp"], "the source switches VPP on and does not state its degree"
        )
    devices, seq_len = (
        read.parse_whole_number("num_gpus", given["num_gpus"]),
        read.parse_whole_number("seq_len", given["seq_len"]),
    )
    model = catalogue.model(given["model"])
    notes = []
    if trained_without_mtp(given, model, seq_len):
        model = replace(model, mtp_layers=0)
        notes.append("trained without MTP")
    unknown = list(_unknown(given, model))
    given = _with_implied(given)
    layout = _layout(given, model, devices)
    if layout.stages and given["pp_layout"] in ("", "custom layout string"):
        unknown.append("pp_layout")
    gbs = _global_batch(given, layout, timed=timed)
    known = apply_software_facts(given, model, _workload(given, seq_len, gbs), layout)
    workload, layout = known.workload, known.layout
    hardware = read.parse_hardware(given["hardware"], devices, own)
    reasons = check_legality(model, workload, layout)
    if reasons:
        raise BadInput(*reasons)
    return MeasuredRow(
        id=given["id"],
        cells=given,
        model=model,
        workload=workload,
        hardware=replace(hardware, constants=(*hardware.constants, *known.constants)),
        layout=layout,
        speed=read_speed(given, model, seq_len=seq_len, gbs=gbs, devices=devices),
        peak=_peak(given),
        oom=given["oom"] == "true",
        unstated=tuple(unknown),
        notes=(*notes, *known.notes),
    )


def _layout(given: Mapping[str, str], model: ModelSpec, devices: int) -> Layout:
    fsdp = given["fsdp"] not in ("", "none")
    for column in ("tp", "pp"):
        if not given[column] and not fsdp:
            raise read.cell_error(column, "", "is not stated")
    if model.moe and not given["ep"]:
        raise read.cell_error("ep", "", "is not stated")
    tp, cp, pp, vpp, ep, etp, mbs = (
        read.parse_whole_number(column, given[column] or "1")
        for column in ("tp", "cp", "pp", "vpp", "ep", "etp", "mbs")
    )
    stages = read.parse_stage_text(given["pp_layout"], model, pp)
    if stages and not given["vpp"]:
        vpp = max(1, len(parse_stages(stages)) // pp)
    layout = Layout(
        world_size=devices,
        tp=tp,
        sp=tp > 1 and given["sp"] != "false",
        cp=cp,
        pp=pp,
        vpp=vpp if pp > 1 else 1,
        ep=ep if model.moe else 1,
        etp=etp if model.moe else 1,
        mbs=mbs,
        zero=3 if fsdp else 0 if given["zero1"] == "false" else 1,
        schedule=Schedule.INTERLEAVED if pp > 1 and vpp > 1 else Schedule.ONE_F_ONE_B,
        recompute=read.parse_recompute(given["recompute_granularity"], given["recompute_modules"]),
        recompute_block=read.parse_recompute_layers(
            given["recompute_granularity"], given["recompute_modules"], "block"
        )
        or 0,
        recompute_span=read.parse_recompute_layers(
            given["recompute_granularity"], given["recompute_modules"], "uniform"
        )
        or 1,
        offload=read.parse_offload(given["offload"]),
        offload_fraction=read.parse_offload_fraction(given["offload"]),
        dispatcher=read.parse_dispatcher(given["dispatcher"] if model.moe else ""),
        capacity=read.parse_number("capacity_factor", given["capacity_factor"])
        if given["capacity_factor"]
        else 0.0,
        overlap=tuple(one for one in read.parse_overlaps(given) if one is not Overlap.TP or tp > 1),
        graphs=read.parse_graphs(given["cuda_graph"]),
        stages=stages,
    )
    if given["dp"] and read.parse_whole_number("dp", given["dp"]) != layout.dp:
        raise read.cell_error(
            "dp", given["dp"], f"{devices} devices leave {layout.dp} after tp*cp*pp"
        )
    return read.spread_layers(model, layout)


def _workload(given: Mapping[str, str], seq_len: int, gbs: int) -> Workload:
    optimizer, grad_dtype = read.parse_optimizer(given["optimizer"])
    return Workload(
        seq_len=seq_len,
        global_batch=gbs,
        precision=read.parse_precision(given["precision"]),
        grad_dtype=grad_dtype,
        routing=Routing.LEARNED if _is_natural(given) else Routing.BALANCED,
        optimizer=optimizer,
    )


def _global_batch(given: Mapping[str, str], layout: Layout, *, timed: bool) -> int:
    """The batch, or for a row that tells memory alone a pipeline kept full: its peak does not
    depend on more."""
    if given["gbs"]:
        return read.parse_whole_number("gbs", given["gbs"])
    if timed:
        raise read.cell_error("gbs", "", "is not stated")
    return 2 * layout.pp * layout.mbs * layout.dp


def _unknown(given: Mapping[str, str], model: ModelSpec) -> Iterator[str]:
    """Columns that decide and are empty. What no part of this layout uses is not asked for; a
    switch that an otherwise full row leaves open is off."""
    moe = model.moe is not None
    asked = ["precision", "recompute_granularity", "cuda_graph"]
    if moe:
        if not _is_natural(given):
            asked.append("force_balance")
        if given["ep"] not in ("", "1") and not given["cuda_graph"]:
            asked.append("dispatcher")
    for column in asked:
        if not given[column]:
            yield column
    if given["recompute_granularity"] == "selective" and not given["recompute_modules"]:
        yield "recompute_modules"
    if moe and _is_natural(given):
        yield "expert_load"
    if given["hardware"].startswith("Hopper"):
        yield "hardware"
    if given["cuda_graph"].startswith("on "):
        yield "cuda_graph"


def _with_implied(given: Mapping[str, str]) -> Mapping[str, str]:
    """With the precision that its source implies where it does not state one."""
    implied = re.search(r"\b(bf16|fp8|mxfp8)\b[^;]* implied", given["notes"], re.IGNORECASE)
    return given if given["precision"] or not implied else {**given, "precision": implied[1]}


def _is_natural(given: Mapping[str, str]) -> bool:
    """Whether the router decides: switched so, or said in words."""
    if given["force_balance"]:
        return given["force_balance"] == "false"
    return "natural routing" in given["notes"] or "real data" in given["notes"]


def _peak(given: Mapping[str, str]) -> MeasuredPeak | None:
    if not given["peak_memory_gb"]:
        return None
    value, said = (
        read.parse_number("peak_memory_gb", given["peak_memory_gb"]),
        given["peak_memory_kind"],
    )
    kind = PeakKind.ALLOCATED
    if "LAST rank" in said:
        kind = PeakKind.LAST_RANK
    elif "device" in said:
        kind = PeakKind.DEVICE
    elif "reserved" in said and "allocated" not in said:
        kind = PeakKind.RESERVED
    if "MiB" in said:
        return MeasuredPeak(value=value / 1024, unit_bytes=GIB, kind=kind)
    return MeasuredPeak(value=value, unit_bytes=GIB if "GiB" in said else GB, kind=kind)


# What makes two rows the same job, feature by feature; and what two reports of one measurement
# share.
_IDENTITY = (
    *(
        "hardware",
        "num_gpus",
        "precision",
        "seq_len",
        "gbs",
        "mbs",
        "tp",
        "pp",
        "vpp",
        "cp",
        "ep",
        "etp",
        "fsdp",
    ),
    *(
        "recompute_granularity",
        "recompute_modules",
        "offload",
        "cuda_graph",
        "dispatcher",
        *read.OVERLAP_COLUMNS,
    ),
    *("force_balance", "capacity_factor", "pp_layout"),
)
_SHARED = (
    "hardware",
    "num_gpus",
    "precision",
    "seq_len",
    "gbs",
    "tp",
    "pp",
    "ep",
    "tflops_per_gpu",
)


def _repeats(rows: Sequence[MeasuredRow]) -> Iterator[MeasuredRow]:
    """Rows of different sources that print the same TFLOP/s of the same job are one measurement."""
    first: dict[tuple[str, ...], MeasuredRow] = {}
    for row in rows:
        if row.speed is None or not row.cells["tflops_per_gpu"]:
            yield row
            continue
        key = row.model.name, *(row.cells[column] for column in _SHARED)
        earlier = first.setdefault(key, row)
        same = earlier is not row and earlier.cells["source"] != row.cells["source"]
        yield replace(row, duplicate_of=earlier.id) if same else row


def _contradictions(rows: Sequence[MeasuredRow]) -> Iterator[str]:
    """Pairs that state the same job, feature by feature, and differ by more than a tenth: no model
    can fit both."""
    groups: dict[tuple[str, ...], list[MeasuredRow]] = {}
    for row in rows:
        if row.speed and not row.duplicate_of:
            key = (
                row.model.name,
                str(row.model.mtp_layers),
                *(row.cells[column] for column in _IDENTITY),
            )
            groups.setdefault(key, []).append(row)
    for group in groups.values():
        for one, other in combinations(group, 2):
            if one.speed is None or other.speed is None:
                continue
            ratio = one.speed.tokens_per_s_per_device / other.speed.tokens_per_s_per_device
            if max(ratio, 1 / ratio) > CONTRADICTION_RATIO:
                yield f"{one.id} ({one.release_family}) and {other.id} ({other.release_family}): {max(ratio, 1 / ratio):.2f} x apart"
