"""The sections [train], [data] and [checkpoint] of a job file as a Workload."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from math import sqrt
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from moewright.codec import from_data, read_json_data, read_run, read_text
from moewright.codec.data_paths import format_data_paths, parse_data_paths
from moewright.rules.optimizers import GRADIENT_DTYPES, MOMENT_DTYPES
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import MAX_DEVICES
from moewright.spec.names import closest_match
from moewright.spec.units import is_whole_number
from moewright.spec.workload import (
    BatchRampSpec,
    CheckpointSpec,
    DataSpec,
    DelayedScalingSpec,
    Dtype,
    FineTuningSpec,
    LossScalingSpec,
    LossSpec,
    MuonSpec,
    OptimizerSpec,
    ProfileSpec,
    RouterTraining,
    RoutesSpec,
    TrainerSpec,
    Workload,
)

# A measured expert load: the tokens each expert got, by layer, from a file or a run's record.

ExpertCounts = tuple[tuple[int, ...], ...]  # by layer that has experts, then by expert

_LONG_HEADER = ("layer", "expert", "tokens")  # of a table with a line a layer and expert
_SUFFIXES = (".json", ".csv")
LOG_SUFFIXES = (".log", ".out", ".txt")
_BALANCE_LOSS = re.compile(r"load_balancing_loss: +(\d+\.?\d*(?:[eE][+-]?\d+)?)")

_Row = tuple[int, list[str]]  # a line's number and its cells


def read_expert_load(path: Path) -> ExpertCounts:
    """Read counts by layer and expert.

    A .json file holds a list of layers, each a list of counts. A .csv file has a line of counts a
    layer; or, under the header layer,expert,tokens, a line a count, where experts that are left out
    got none. A folder is a run, whose recorded steps are summed.

    Raises:
        BadInput: there is no such file, or it holds something else.
    """
    if path.is_dir():
        return _read_run_counts(path)
    if path.suffix not in _SUFFIXES:
        rule = "must be balanced, a factor, a .json, .csv or .log file, or the folder of a run"
        nearest = closest_match(path.suffix, _SUFFIXES)
        raise BadInput(Reason(field="--load", value=str(path), rule=rule, nearest=nearest))
    if path.suffix == ".json":
        return _read_json_counts(read_json_data(path), str(path))
    lines = enumerate(read_text(path).splitlines(), 1)
    rows = [(number, line.split(",")) for number, line in lines if line.strip()]
    if rows and tuple(cell.strip().casefold() for cell in rows[0][1]) == _LONG_HEADER:
        return _read_long_table(path, rows[1:])
    return tuple(
        tuple(_read_count(cell, f"{path}:{number}") for cell in cells) for number, cells in rows
    )


def read_logged_skew(path: Path) -> float:
    """Read the deviation of experts' loads over their mean from a log of Megatron-LM.

    The balance loss that it logs is E sum_i f_i P_i, 1 under an even load. Where scores are spread
    as choices are, that is 1 + the square of the deviation. The median over the later half of the
    log is taken.

    Raises:
        BadInput: there is no such file, or it logs no balance loss.
    """
    losses = [float(value) for value in _BALANCE_LOSS.findall(read_text(path))]
    if not losses:
        rule = "logs no load_balancing_loss, which Megatron-LM does under an auxiliary loss"
        raise BadInput(Reason(field="--load", value=str(path), rule=rule))
    return sqrt(max(0.0, median(losses[len(losses) // 2 :]) - 1))


def _read_json_counts(data: Any, where: str) -> ExpertCounts:
    if not isinstance(data, list) or not all(isinstance(layer, list) for layer in data):
        raise BadInput(Reason(field=where, rule="must be a list of layers, each a list of counts"))
    return tuple(
        tuple(
            _read_count(value, f"{where}[{layer}][{expert}]") for expert, value in enumerate(counts)
        )
        for layer, counts in enumerate(data)
    )


def _read_long_table(path: Path, rows: list[_Row]) -> ExpertCounts:
    counts: Counter[tuple[int, int]] = Counter()
    for number, cells in rows:
        where = f"{path}:{number}"
        if len(cells) != len(_LONG_HEADER):
            rule = f"needs {', '.join(_LONG_HEADER)}"
            raise BadInput(Reason(field=where, value=f"{len(cells)} cells", rule=rule))
        layer, expert, tokens = (_read_count(cell, where) for cell in cells)
        counts[layer, expert] += tokens
    experts = range(1 + max((expert for _, expert in counts), default=-1))
    layers = sorted({layer for layer, _ in counts})
    return tuple(tuple(counts[layer, expert] for expert in experts) for layer in layers)


def _read_count(value: Any, where: str) -> int:
    text = str(value).strip()
    if not is_whole_number(text) or isinstance(value, bool):
        rule = "must be a count, a whole number from 0"
        raise BadInput(Reason(field=where, value=text[:40], rule=rule))
    return int(text)


def _read_run_counts(path: Path) -> ExpertCounts:
    """Sum the counts of all steps whose routers a run logged, without the layers of MTP."""
    record = read_run(path)
    sums: dict[int, Counter[int]] = {}
    for step in record.steps:
        for load in step.loads:
            if load.layer < record.plan.model.layers:
                sums.setdefault(load.layer, Counter()).update(dict(enumerate(load.counts)))
    if not sums:
        rule = "the run recorded no loads of experts"
        raise BadInput(Reason(field="--load", value=str(path), rule=rule))
    return tuple(
        tuple(sums[layer][expert] for expert in sorted(sums[layer])) for layer in sorted(sums)
    )


# The lengths of a data set's samples, from a histogram in a file.

Int64s = npt.NDArray[np.int64]

_HEADER = "tokens,samples"
_MOST_SAMPLES = 10_000_000  # packing them takes a minute


def read_sample_lengths(path: Path) -> Int64s:
    """Read the length of every sample, in tokens, from a .csv file with a histogram.

    Under the header tokens,samples, a line says how many samples have so many tokens.

    Raises:
        BadInput: there is no such file, or it holds something else.
    """
    header, *lines = read_text(path).splitlines() or [""]
    if header.replace(" ", "").casefold() != _HEADER:
        rule = f"must begin with the header {_HEADER}"
        raise BadInput(Reason(field=str(path), value=header[:40], rule=rule))
    lengths: list[int] = []
    counts: list[int] = []
    for number, line in enumerate(lines, 2):
        if not line.strip():
            continue
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 2 or not all(_is_count(cell) for cell in cells):
            rule = "must be two whole numbers from 1, tokens and samples"
            raise BadInput(Reason(field=f"{path}:{number}", value=line[:40], rule=rule))
        lengths.append(int(cells[0]))
        counts.append(int(cells[1]))
    if not 1 <= sum(counts) <= _MOST_SAMPLES:
        rule = f"must have from 1 to {_MOST_SAMPLES:,} samples"
        nearest = "counts divided by a power of ten" if counts else ""
        reason = Reason(field=str(path), value=f"{sum(counts):,}", rule=rule, nearest=nearest)
        raise BadInput(reason)
    return np.repeat(np.array(lengths, dtype=np.int64), counts)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10 and int(text) > 0


MAX_SEQ_LEN = 2**24  # products with batch and width stay below 2^63
MAX_BATCH = 2**24  # as for the sequence
MAX_STEPS = 10**9  # beyond any run: a number that was mistyped
MAX_LOAD_FACTOR = 1e6  # no rank has more than all tokens

# Keys of [train] that say where the job runs and are no fields of a Workload.
LAUNCH_KEYS = ("nproc", "hardware", "network")

# Records of a Workload whose fields are keys of [train] itself.
_FLAT_RECORDS: Mapping[str, type] = {
    "optimizer": OptimizerSpec,
    "muon": MuonSpec,
    "loss": LossSpec,
    "router": RouterTraining,
    "trainer": TrainerSpec,
    "fine_tuning": FineTuningSpec,
    "routes": RoutesSpec,
    "scaling": LossScalingSpec,
    "delayed": DelayedScalingSpec,
    "ramp": BatchRampSpec,
}
# Records with a section or a table of their own.
_SECTION_RECORDS = ("data", "checkpoint", "profile")
_REQUIRED_KEYS = ("seq_len", "global_batch")

_Range = tuple[str, float, float, float]  # key, value, lowest and highest legal value


def read_workload(
    tables: Mapping[str, Mapping[str, Any]], weights: str, path: Path, where: str
) -> Workload:
    """Read the workload of a job file's sections; `weights` are what training starts from.

    Raises:
        BadInput: names file, section and key of every fault.
    """
    train = tables["train"]
    keys = {
        name: tuple(field.name for field in fields(record))
        for name, record in _FLAT_RECORDS.items()
    }
    top_keys = tuple(
        field.name
        for field in fields(Workload)
        if field.name not in (*_FLAT_RECORDS, *_SECTION_RECORDS, "weights")
    )
    _check_keys(train, [*top_keys, *(key for group in keys.values() for key in group)], where)
    train_where = f"{where}: train"
    values = _pick(train, top_keys) | {"weights": weights}
    for name, record in _FLAT_RECORDS.items():
        values[name] = _as_fields(from_data(record, _pick(train, keys[name]), where=train_where))
    values["routes"] = {
        key: resolve_beside(path, folder) for key, folder in values["routes"].items()
    }
    values["data"] = _read_data(tables["data"], path, where)
    profile = from_data(ProfileSpec, train.get("profile", {}), where=f"{train_where}.profile")
    values["profile"] = _as_fields(profile)
    values["checkpoint"] = _as_fields(
        from_data(CheckpointSpec, tables["checkpoint"], where=f"{where}: checkpoint")
    )
    workload = from_data(Workload, values, where=train_where)
    faults = (*_range_faults(workload, where), *_dtype_faults(workload, where))
    if faults:
        raise BadInput(*faults)
    return workload


def count_keys() -> frozenset[str]:
    """Return the keys of a job whose values are whole numbers, such as train.seq_len."""
    sections = {
        "data": (DataSpec,),
        "checkpoint": (CheckpointSpec,),
        "train.profile": (ProfileSpec,),
    }
    tables = sections | {"train": (Workload, *_FLAT_RECORDS.values())}
    keys = {
        f"{section}.{field.name}"
        for section, records in tables.items()
        for record in records
        for field in fields(record)
        if field.type in ("int", int)
    }
    return frozenset(keys | {"train.nproc"})


def resolve_beside(path: Path, value: str) -> str:
    """Return a path that is relative to the job file's folder as one from here; "" stays ""."""
    return os.path.normpath(path.parent / value) if value else ""


def _check_keys(train: Mapping[str, Any], workload_keys: list[str], where: str) -> None:
    legal = [*workload_keys, *LAUNCH_KEYS, "profile"]
    for key in train:
        if key not in legal:
            nearest = closest_match(key, legal)
            rule = "unknown key" if nearest else f"unknown key; known here: {', '.join(legal)}"
            raise BadInput(Reason(field=f"{where}: train.{key[:60]}", rule=rule, nearest=nearest))
    for key in _REQUIRED_KEYS:
        if key not in train:
            raise BadInput(Reason(field=f"{where}: train.{key}", rule="is missing"))


def _pick(table: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: table[key] for key in keys if key in table}


def _as_fields(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _read_data(table: Mapping[str, Any], path: Path, where: str) -> dict[str, Any]:
    data = from_data(DataSpec, table, where=f"{where}: data")
    paths = {"tokenizer": resolve_beside(path, data.tokenizer)}
    for name in ("train", "heldout"):
        parts = parse_data_paths(getattr(data, name), f"{where}: data.{name}")
        paths[name] = format_data_paths(
            [replace(part, path=resolve_beside(path, part.path)) for part in parts]
        )
    return _as_fields(data) | paths


def _range_faults(workload: Workload, where: str) -> Iterator[Reason]:
    ranges = (
        *_workload_ranges(workload),
        *_profile_ranges(workload.profile),
        *_optimizer_ranges(workload.optimizer),
        ("train.muon_momentum", workload.muon.muon_momentum, 0, 1 - 1e-9),
        ("train.muon_num_ns_steps", workload.muon.muon_num_ns_steps, 1, 99),
        ("train.muon_extra_scale_factor", workload.muon.muon_extra_scale_factor, 0, 1e3),
        *_loss_ranges(workload.loss),
        *_router_ranges(workload.router),
        ("train.lora_rank", workload.fine_tuning.lora_rank, 1, 2**16),
        ("train.attention_dropout", workload.trainer.attention_dropout, 0, 0.999),
        ("train.hidden_dropout", workload.trainer.hidden_dropout, 0, 0.999),
        *_scaling_ranges(workload.scaling),
        *_delayed_ranges(workload.delayed),
        ("train.batch_samples", workload.batch_samples, 0, 2**40),
        *_ramp_ranges(workload.ramp, workload.global_batch),
        ("data.attended_share", workload.data.attended_share, 1e-9, 1),
        *_checkpoint_ranges(workload.checkpoint),
    )
    for key, value, low, high in ranges:
        if not low <= value <= high:
            nearest = f"{min(max(value, low), high):.12g}"
            rule = f"must be in {low:.12g}..{high:.12g}"
            yield Reason(field=f"{where}: {key}", value=f"{value:.12g}", rule=rule, nearest=nearest)


def _workload_ranges(workload: Workload) -> Iterator[_Range]:
    yield "train.seq_len", workload.seq_len, 1, MAX_SEQ_LEN
    yield "train.global_batch", workload.global_batch, 1, MAX_BATCH
    yield "train.steps", workload.steps, 0, MAX_STEPS
    yield "train.seed", workload.seed, 0, 2**62
    least_load = int(workload.load_factor != 0)
    yield "train.load_factor", workload.load_factor, least_load, MAX_LOAD_FACTOR
    yield "train.load_skew", workload.load_skew, 0, 1e6
    yield "train.eval_every_steps", workload.eval_every_steps, 0, MAX_STEPS
    yield "train.router_log_every_steps", workload.router_log_every_steps, 0, MAX_STEPS
    yield "train.eval_batches", workload.eval_batches, 1, MAX_STEPS
    yield "train.ledger_step", workload.ledger_step, 0, MAX_STEPS
    yield "train.gc_every_steps", workload.gc_every_steps, 0, MAX_STEPS
    yield "train.hang_timeout_s", workload.hang_timeout_s, 0, 1e6
    yield "train.start_timeout_s", workload.start_timeout_s, 0, 1e6
    yield "train.first_step_timeout_s", workload.first_step_timeout_s, 0, 1e6
    yield "train.compile_timeout_s", workload.compile_timeout_s, 0, 1e6
    yield "train.check_every", workload.check_every, 0, MAX_STEPS
    yield "train.rebalance_every", workload.rebalance_every, 0, MAX_STEPS


def _profile_ranges(profile: ProfileSpec) -> Iterator[_Range]:
    first_start = int(profile.end > 0)
    first_end = profile.start + 1 if profile.start else 0
    yield "train.profile.start", profile.start, first_start, MAX_STEPS
    yield "train.profile.end", profile.end, first_end, MAX_STEPS
    yield "train.profile.ranks", min(profile.ranks, default=-1), 0, MAX_DEVICES


def _optimizer_ranges(optimizer: OptimizerSpec) -> Iterator[_Range]:
    yield "train.lr", optimizer.lr, 0, 1e3
    yield "train.min_lr_fraction", optimizer.min_lr_fraction, 0, 1
    yield "train.warmup_steps", optimizer.warmup_steps, 0, MAX_STEPS
    yield "train.decay_steps", optimizer.decay_steps, 0, MAX_STEPS
    yield "train.wsd_decay_steps", optimizer.wsd_decay_steps, 0, MAX_STEPS
    yield "train.beta1", optimizer.beta1, 0, 1 - 1e-9
    yield "train.beta2", optimizer.beta2, 0, 1 - 1e-9
    yield "train.eps", optimizer.eps, 1e-30, 1
    yield "train.weight_decay", optimizer.weight_decay, 0, 1e3
    yield "train.clip_norm", optimizer.clip_norm, 0, 1e9
    yield "train.bucket_elements", optimizer.bucket_elements, 1, 2**40


def _loss_ranges(loss: LossSpec) -> Iterator[_Range]:
    yield "train.aux_coeff", loss.aux_coeff, 0, 1e3
    yield "train.seq_aux_coeff", loss.seq_aux_coeff, 0, 1e3
    yield "train.global_aux_coeff", loss.global_aux_coeff, 0, 1e3
    yield "train.z_coeff", loss.z_coeff, 0, 1e3
    yield "train.mtp_coeff", loss.mtp_coeff, 0, 1e3
    yield "train.indexer_coeff", loss.indexer_coeff, 0, 1e3
    yield "train.dpo_beta", loss.dpo_beta, 1e-9, 1e3
    yield "train.dpo_label_smoothing", loss.dpo_label_smoothing, 0, 0.5


def _router_ranges(router: RouterTraining) -> Iterator[_Range]:
    yield "train.bias_update_rate", router.bias_update_rate, 0, 1
    yield "train.force_std", router.force_std, 0, 1e3
    yield "train.sinkhorn_iterations", router.sinkhorn_iterations, 0, 10**6
    yield "train.jitter_eps", router.jitter_eps, 0, 0.999


def _scaling_ranges(scaling: LossScalingSpec) -> Iterator[_Range]:
    yield "train.initial_loss_scale", scaling.initial_loss_scale, 1, 2.0**40
    yield "train.min_loss_scale", scaling.min_loss_scale, 1, scaling.initial_loss_scale
    yield "train.loss_scale_window", scaling.loss_scale_window, 1, MAX_STEPS


def _delayed_ranges(delayed: DelayedScalingSpec) -> Iterator[_Range]:
    yield "train.amax_history_len", delayed.amax_history_len, 1, 2**16
    yield "train.fp8_margin", delayed.fp8_margin, 0, 16


def _ramp_ranges(ramp: BatchRampSpec, global_batch: int) -> Iterator[_Range]:
    yield "train.ramp_start", ramp.ramp_start, 0, global_batch
    yield "train.ramp_increment", ramp.ramp_increment, int(ramp.ramp_start > 0), global_batch
    yield "train.ramp_samples", ramp.ramp_samples, 0, 2**40


def _checkpoint_ranges(checkpoint: CheckpointSpec) -> Iterator[_Range]:
    yield "checkpoint.every_steps", checkpoint.every_steps, 0, MAX_STEPS
    yield "checkpoint.keep", checkpoint.keep, 1, 10**6
    yield "checkpoint.copy_keep", checkpoint.copy_keep, 1, 10**6
    yield "checkpoint.keep_every_steps", checkpoint.keep_every_steps, 0, MAX_STEPS
    yield "checkpoint.peer_every_steps", checkpoint.peer_every_steps, 0, MAX_STEPS


def _dtype_faults(workload: Workload, where: str) -> Iterator[Reason]:
    optimizer = workload.optimizer
    accumulators = (
        ("grad_dtype", workload.grad_dtype, GRADIENT_DTYPES),
        ("moment_dtype", optimizer.moment_dtype, MOMENT_DTYPES),
        # None is as the first.
        ("second_moment_dtype", optimizer.second_moment_dtype or Dtype.FP32, MOMENT_DTYPES),
    )
    for key, dtype, legal in accumulators:
        if dtype in legal:
            continue
        rule = f"must be {' or '.join(legal)}"
        nearest = legal[-1]
        if dtype is Dtype.FP16:
            rule = "fp16 has too little range to accumulate in"
            nearest = Dtype.FP32
        yield Reason(field=f"{where}: train.{key}", value=dtype, rule=rule, nearest=nearest)
