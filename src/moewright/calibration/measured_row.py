"""A row of a table of measured runs, as model, workload, hardware and layout, with its figures.

Where a source does not state a fact, the default is taken and the row lists the column as unstated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product
from types import MappingProxyType

from moewright.calibration import cells as cell
from moewright.calibration.cells import VPP_ON, MeasuredPeak
from moewright.calibration.readings import Reading, likely_readings
from moewright.calibration.software_facts import (
    apply_software_facts,
    facts_for,
    fill_implied,
    fill_stated,
    find_device_name,
    infer_cells,
)
from moewright.calibration.speed import MeasuredSpeed, read_speed, trained_without_mtp
from moewright.cost.estimate import estimate
from moewright.cost.memory.estimate_memory import refuse_illegal_job
from moewright.intake import catalogue
from moewright.rules.job import Job
from moewright.spec.errors import BadInput
from moewright.spec.hardware import Hardware
from moewright.spec.layout import DEGREES, Layout, Overlap, Recompute, Schedule
from moewright.spec.model import ModelSpec
from moewright.spec.stage_string import StageString, parse_stages
from moewright.spec.workload import Routing, Workload

# Readings of rows that ran out of memory and do not state everything that decides it.
#
# A statement that a run was out of memory has no step time and often no more than a layout. The
# reading that needs least memory is taken. If even that does not fit, the verdict stands whatever
# the source left out; if it fits, nothing is known, and calibration.score says uncertain.

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


_REQUIRED = ("model", "hardware", "num_gpus", "seq_len")
# The micro-batches that a row may have had which does not state it, and how likely: the shares
# among the pre-training rows that do (tests/published/data/measurements.csv).
_MICRO_BATCHES = (("1", 0.72), ("2", 0.2), ("4", 0.08))
_LOCAL_BATCH = "local batch"  # a micro-batch of all that a step brings to a rank
_SPEEDS = ("time_per_iter_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_pct")
_WITHOUT_CUDA = ("TPU", "Ascend")  # names of parts that have no CUDA graphs
_NO_LAYOUT_STRING = ("", "custom layout string")


class RowStatement(StrEnum):
    """How much of what decides a row's speed its source states."""

    COMPLETE = "complete"
    UNSTATED = "switches unstated"
    NATURAL = "natural routing"


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRow:
    """A run: what it was, as far as its source says, and what it measured.

    `unstated` names the columns that decide its speed or memory and are not stated;
    `assumed_least` those taken at the values that need least memory (out-of-memory rows alone);
    `duplicate_of` is the earlier row that reports the same measurement ("" for none); `readings`
    are the jobs that it may have been, the likeliest first, which the row itself has.
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
    readings: tuple[Reading, ...] = ()

    @property
    def job(self) -> Job:
        """Return the job that ran."""
        return Job(model=self.model, workload=self.workload, layout=self.layout)

    @property
    def group(self) -> tuple[str, str]:
        """Return the names of model and hardware, within which layouts are ranked."""
        return self.model.name, self.hardware.name

    @property
    def publisher(self) -> str:
        """Return who ran it: the rows of one publisher share machines, habits and errors."""
        return self.cells["publisher"]

    @property
    def kind(self) -> RowStatement:
        """Return how much of what decides its speed the source states."""
        if self.model.moe is not None and self.workload.routing is Routing.LEARNED:
            return RowStatement.NATURAL
        return RowStatement.COMPLETE if self.is_complete else RowStatement.UNSTATED

    @property
    def release_family(self) -> str:
        """Return the software family of the run.

        It is the release up to its second number for dated releases, else the kind of source.
        """
        dated = re.match(r"\d\d\.\d\d", self.cells["date_release"])
        return dated[0] if dated else self.id.rpartition("-")[0]

    @property
    def is_complete(self) -> bool:
        """Return whether the source states all that decides speed and memory."""
        return not self.unstated


def parse_row(cells: Mapping[str, str], user_hardware: Sequence[Hardware]) -> MeasuredRow:
    """Parse a row whose cells are in canonical spelling.

    Raises:
        BadInput: the reason why the row cannot be scored.
    """
    if cells["oom"] == "true":
        return _parse_least_reading(cells, user_hardware)
    return _parse_likely_readings(cells, user_hardware)


def _parse_likely_readings(
    cells: Mapping[str, str], user_hardware: Sequence[Hardware]
) -> MeasuredRow:
    """Parse a row in every likely reading of what it leaves open, and return the likeliest."""
    _require_needed_cells(cells)
    model = catalogue.model(cells["model"])
    facts = facts_for(cells, model)
    cells_so_far = fill_implied(fill_stated(cells, facts), facts)
    is_full = not any(_find_unstated(cells_so_far, model))
    rows: list[tuple[float, MeasuredRow]] = []
    refusal: BadInput | None = None
    guesses = infer_cells(cells_so_far, model, is_full=is_full)
    for share, guess in guesses if cells_so_far["mbs"] else _guess_micro_batch(guesses):
        try:
            rows.append((share, _parse_reading(cells, user_hardware, guess)))
        except BadInput as error:
            refusal = refusal or error
    if refusal is not None and not rows:
        raise refusal
    readings = likely_readings(
        rows[0][1].model,
        rows[0][1].hardware,
        [Reading(share=share, workload=row.workload, layout=row.layout) for share, row in rows],
    )
    likeliest = next(row for _, row in rows if row.layout == readings[0].layout)
    return replace(likeliest, readings=readings)


def _guess_micro_batch(
    guesses: Iterable[tuple[float, dict[str, str]]],
) -> Iterator[tuple[float, dict[str, str]]]:
    """Yield each guess with each micro-batch that a row may have had."""
    for share, guess in guesses:
        for size, likelihood in _MICRO_BATCHES:
            yield share * likelihood, {**guess, "mbs": size}


def _parse_least_reading(
    cells: Mapping[str, str], user_hardware: Sequence[Hardware]
) -> MeasuredRow:
    """Parse an out-of-memory row; unstated cells get the values that need least memory."""
    model = catalogue.model(cells["model"])
    facts = facts_for(cells, model)
    stated = fill_stated(cells, facts)
    implied = fill_implied(stated, facts)
    columns = find_unstated_columns(stated, implied, is_moe=model.moe is not None)
    least: tuple[int, MeasuredRow] | None = None
    refusal: BadInput | None = None
    for reading in enumerate_readings(cells, columns):
        try:
            row = _parse_reading(reading, user_hardware)
        except BadInput as error:
            refusal = refusal or error
            continue
        peak_bytes = estimate(row.model, row.workload, row.hardware, row.layout).peak_bytes
        if least is None or peak_bytes < least[0]:
            least = peak_bytes, row
    if least is None:
        raise refusal or cell.cell_error("id", cells["id"], "has no legal layout")
    return replace(least[1], cells=stated, assumed_least=tuple(sorted(columns)))


def _parse_reading(
    cells: Mapping[str, str],
    user_hardware: Sequence[Hardware],
    guess: Mapping[str, str] = MappingProxyType({}),
) -> MeasuredRow:
    """Parse a row of which every needed cell is filled; `guess` fills others that are empty."""
    _require_needed_cells(cells)
    devices = cell.parse_whole_number("num_gpus", cells["num_gpus"])
    seq_len = cell.parse_whole_number("seq_len", cells["seq_len"])
    model = catalogue.model(cells["model"])
    facts = facts_for(cells, model)
    cells = fill_stated(cells, facts)
    if cells["vpp"] == cell.VPP_ON:
        rule = "the source switches VPP on and does not state its degree"
        raise cell.cell_error("vpp", "", rule)
    notes = []
    if trained_without_mtp(cells, model, seq_len):
        model = replace(model, mtp_layers=0)
        notes.append("trained without MTP")
    unstated = list(_find_unstated(cells, model))
    cells = _spell_micro_batch({**fill_implied(cells, facts), **guess}, devices)
    layout = _parse_layout(cells, model, devices)
    if layout.stages and cells["pp_layout"] in _NO_LAYOUT_STRING:
        unstated.append("pp_layout")
    global_batch = _parse_global_batch(cells, layout)
    workload = _parse_workload(cells, seq_len, global_batch)
    job = apply_software_facts(cells, model, workload, layout, facts)
    hardware = cell.parse_hardware(
        cells["hardware"], devices, user_hardware, network=cells["network"]
    )
    hardware = cell.bound_domain(hardware, cells["nvlink_domain"])
    # What cannot be estimated is refused here, so that the row alone is left out of its table.
    refuse_illegal_job(Job(model=model, workload=job.workload, layout=layout), hardware)
    return MeasuredRow(
        id=cells["id"],
        cells=cells,
        model=model,
        workload=job.workload,
        hardware=replace(hardware, constants=(*hardware.constants, *job.constants)),
        layout=layout,
        speed=read_speed(cells, model, seq_len=seq_len, gbs=global_batch, devices=devices),
        peak=cell.parse_peak(cells),
        oom=cells["oom"] == "true",
        unstated=tuple(unstated),
        notes=(*notes, *job.notes),
    )


def _spell_micro_batch(cells: Mapping[str, str], devices: int) -> dict[str, str]:
    """Return cells whose micro-batch is a number where it is the whole batch of a rank.

    A pipeline cuts that batch, into single sequences unless it is told otherwise.
    """
    if cells["mbs"] != _LOCAL_BATCH:
        return dict(cells)
    if cells["pp"] not in ("", "1"):
        return {**cells, "mbs": "1"}
    model_parallel = 1
    for column in ("tp", "cp"):
        model_parallel *= cell.parse_whole_number(column, cells[column] or "1")
    sequences = cell.parse_whole_number("gbs", cells["gbs"]) if cells["gbs"] else 0
    return {**cells, "mbs": str(max(1, sequences * model_parallel // devices))}


def _require_needed_cells(cells: Mapping[str, str]) -> None:
    cell.parse_task(cells["task"])
    for column in _REQUIRED:
        if not cells[column]:
            raise cell.cell_error(column, "", "is not stated")
    if not (_has_speed(cells) or cells["peak_memory_gb"] or cells["oom"] == "true"):
        raise cell.cell_error("id", cells["id"], "states neither speed nor memory")


def _has_speed(cells: Mapping[str, str]) -> bool:
    return any(cells[column] for column in _SPEEDS)


def _parse_layout(cells: Mapping[str, str], model: ModelSpec, devices: int) -> Layout:
    is_fsdp = cells["fsdp"] not in ("", "none")
    for column in ("tp", "pp"):
        if not cells[column] and not is_fsdp:
            raise cell.cell_error(column, "", "is not stated")
    if model.moe and not cells["ep"]:
        raise cell.cell_error("ep", "", "is not stated")
    tp, cp, pp, vpp, ep, etp, mbs = (
        cell.parse_whole_number(column, cells[column] or "1") for column in DEGREES
    )
    stages = cell.parse_stage_text(cells["pp_layout"], model, pp)
    if stages and not cells["vpp"]:
        vpp = max(1, len(parse_stages(stages)) // pp)
    is_interleaved = pp > 1 and vpp > 1
    granularity = cells["recompute_granularity"]
    modules = cells["recompute_modules"]
    overlaps = cell.parse_overlaps(cells)
    layout = Layout(
        world_size=devices,
        tp=tp,
        sp=tp > 1 and cells["sp"] != "false",
        cp=cp,
        pp=pp,
        vpp=vpp if pp > 1 else 1,
        ep=ep if model.moe else 1,
        etp=etp if model.moe else 1,
        mbs=mbs,
        zero=_parse_zero_stage(cells, is_fsdp=is_fsdp and pp == 1),
        shard=cell.parse_shard_ranks(cells["fsdp"]) if pp == 1 else 0,
        schedule=Schedule.INTERLEAVED if is_interleaved else Schedule.ONE_F_ONE_B,
        recompute=cell.parse_recompute(granularity, modules),
        recompute_block=cell.parse_recompute_layers(granularity, modules, "block") or 0,
        recompute_span=cell.parse_recompute_layers(granularity, modules, "uniform") or 1,
        offload=cell.parse_offload(cells["offload"]),
        offload_fraction=cell.parse_offload_fraction(cells["offload"]),
        dispatcher=cell.parse_dispatcher(cells["dispatcher"] if model.moe else ""),
        capacity=_parse_capacity(cells),
        capacity_fill=cell.parse_capacity_fill(cells["capacity_fill"], cells["notes"]),
        overlap=tuple(overlap for overlap in overlaps if overlap is not Overlap.TP or tp > 1),
        graphs=cell.parse_graphs(cells["cuda_graph"], has_experts=model.moe is not None),
        stages=StageString(stages),
    )
    if cells["dp"] and cell.parse_whole_number("dp", cells["dp"]) != layout.dp:
        rule = f"{devices} devices leave {layout.dp} after tp*cp*pp"
        raise cell.cell_error("dp", cells["dp"], rule)
    return cell.spread_layers(model, layout)


def _parse_zero_stage(cells: Mapping[str, str], *, is_fsdp: bool) -> int:
    """Parse what data-parallel ranks shard.

    FSDP in a pipeline keeps the gathered weights for all micro-batches (torchtitan and NeMo
    AutoModel do not reshard after a forward there), so that its time is that of ZeRO-1.
    """
    if is_fsdp:
        return 3
    return 0 if cells["zero1"] == "false" else 1


def _parse_capacity(cells: Mapping[str, str]) -> float:
    text = cells["capacity_factor"]
    return cell.parse_number("capacity_factor", text) if text else 0.0


def _parse_workload(cells: Mapping[str, str], seq_len: int, global_batch: int) -> Workload:
    optimizer, grad_dtype = cell.parse_optimizer(cells["optimizer"])
    return Workload(
        seq_len=seq_len,
        global_batch=global_batch,
        precision=cell.parse_precision(cells["precision"]),
        tensor_scaling=cell.parse_tensor_scaling(cells["precision"]),
        grad_dtype=grad_dtype,
        routing=Routing.LEARNED if _has_natural_routing(cells) else Routing.BALANCED,
        optimizer=optimizer,
        fine_tuning=cell.parse_task(cells["task"]),
    )


def _parse_global_batch(cells: Mapping[str, str], layout: Layout) -> int:
    """Return the batch, or for a row that states memory alone one that keeps the pipeline full.

    The peak does not depend on more micro-batches than that.
    """
    if cells["gbs"]:
        return cell.parse_whole_number("gbs", cells["gbs"])
    if _has_speed(cells):
        raise cell.cell_error("gbs", "", "is not stated")
    return 2 * layout.pp * layout.mbs * layout.dp


def _find_unstated(cells: Mapping[str, str], model: ModelSpec) -> Iterator[str]:
    """Yield the columns that decide speed or memory and are empty.

    What no part of this layout uses is not asked for; a switch that an otherwise full row leaves
    open is off.
    """
    is_moe = model.moe is not None
    is_natural = _has_natural_routing(cells)
    deciding = ["mbs", "precision", "recompute_granularity"]
    if not cells["hardware"].startswith(_WITHOUT_CUDA):
        deciding.append("cuda_graph")
    if is_moe and not is_natural:
        deciding.append("force_balance")
    if is_moe and cells["ep"] not in ("", "1") and not cells["cuda_graph"]:
        deciding.append("dispatcher")
    for column in deciding:
        if not cells[column]:
            yield column
    if cells["recompute_granularity"] == "selective" and not cells["recompute_modules"]:
        yield "recompute_modules"
    if cell.offloads_whole_layers(cells["offload"]):
        yield "offload"
    if is_moe and is_natural:
        yield "expert_load"
    if find_device_name(cells["hardware"]):
        yield "hardware"
    if cells["cuda_graph"] == "on" or cells["cuda_graph"].startswith("on "):
        yield "cuda_graph"


def _has_natural_routing(cells: Mapping[str, str]) -> bool:
    """Return whether the router decides where tokens go, rather than a forced balance."""
    return cells["force_balance"] == "false"
