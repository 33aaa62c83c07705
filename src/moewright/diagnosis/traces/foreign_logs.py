"""Records of MLPerf and arguments of GPT-NeoX, which logs of other trainers than Megatron hold.

MLPerf's rules ask every submission for records in one form (`:::MLLOG {...}`), whatever trains. Of
steps they say what their loggers count: a step, the steps of a block on average, or the samples a
second of a block; where none is said, a block of training between two evaluations is timed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import isfinite, nan
from types import MappingProxyType

from moewright.spec.units import divide, is_whole_number

MLPERF_MARK = b":::MLLOG "
_SIZES: Mapping[str, str] = MappingProxyType(
    {"global_batch_size": "global_batch_size", "max_sequence_length": "seq_length"}
)
_STEP_KEYS = ("train_step_time", "train_step_timing")  # loggers since 2024, and those before
_LOSS_KEYS = ("reduced_train_loss", "train_loss")

# GPT-NeoX's names of what Megatron-LM's arguments say too (megatron/neox_arguments).
_NEOX_SIZES: Mapping[str, str] = MappingProxyType(
    {
        "train_batch_size": "global_batch_size",
        "train_micro_batch_size_per_gpu": "micro_batch_size",
        "seq_length": "seq_length",
        "global_num_gpus": "world_size",
        "model_parallel_size": "tensor_model_parallel_size",
        "pipe_parallel_size": "pipeline_model_parallel_size",
        "num_layers": "num_layers",
        "hidden_size": "hidden_size",
        "moe_num_experts": "num_experts",
    }
)
# Behind a value it prints whether it is the default, filled up with dots to 64 letters.
_NEOX_ENDING = re.compile(r"\.*(?:updated|default)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class MlperfStep:
    """A step, or the mean of a block's steps; `offset` is the place of its record."""

    number: int
    step_s: float
    loss: float
    offset: int


@dataclass(slots=True)
class _Block:
    """The block of training that a reader of records is in, or that was over last.

    `tokens` are 0 where its logger counts samples; `samples` are those of all blocks with a mean.
    """

    start_ms: float = nan
    stop_ms: float = nan
    tokens: float = 0.0
    end_tokens: float = 0.0
    samples: float = 0.0


def read_mlperf_sizes(text: bytes) -> dict[str, int]:
    """Return the sizes that records state, by Megatron-LM's names."""
    sizes: dict[str, int] = {}
    for _, record in _list_records(text):
        name = _SIZES.get(str(record["key"]), "")
        value = record["value"]
        if name and isinstance(value, int | float) and value > 0 and int(value) == value:
            sizes[name] = int(value)
    return sizes


def read_mlperf_steps(text: bytes) -> tuple[MlperfStep, ...]:
    """Return the steps that records time, by the finest kind of record that the log has."""
    sizes = read_mlperf_sizes(text)
    batch = sizes.get("global_batch_size", 0)
    seq_len = sizes.get("seq_length", 0)
    if not batch:
        return ()
    single: list[MlperfStep] = []
    means: list[MlperfStep] = []
    blocks: list[MlperfStep] = []
    block = _Block()
    for offset, record in _list_records(text):
        if record["key"] == "tracked_stats":
            step, is_mean = _read_stats(record, block, batch, seq_len)
            (means if is_mean else single).append(replace(step, offset=offset))
        elif seconds := _pass_block(record, block):
            steps = divide(block.tokens, batch * seq_len)
            number = round(divide(block.end_tokens, batch * seq_len))
            blocks.append(
                MlperfStep(number=number, step_s=divide(seconds, steps), loss=nan, offset=offset)
            )
    kinds = ([step for step in kind if step.step_s > 0] for kind in (single, means, blocks))
    return tuple(next(filter(None, kinds), ()))


def _list_records(text: bytes) -> Iterator[tuple[int, Mapping[str, object]]]:
    """Yield the records with their places; what is no record of MLPerf is left out."""
    end = 0
    while (start := text.find(MLPERF_MARK, end)) >= 0:
        end = text.find(b"\n", start)
        end = len(text) if end < 0 else end
        try:
            record = json.loads(text[start + len(MLPERF_MARK) : end])
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and {"key", "value", "time_ms"} <= record.keys():
            yield start, record


def _read_stats(
    record: Mapping[str, object], block: _Block, batch: int, seq_len: int
) -> tuple[MlperfStep, bool]:
    """Return the step that statistics time, 0 seconds where none, and whether it is a mean."""
    value, metadata = _table(record["value"]), _table(record.get("metadata"))
    step_key = next((name for name in _STEP_KEYS if name in value), "")
    loss_key = next((name for name in _LOSS_KEYS if name in value), "")
    step_s = _number(value.get(step_key))
    samples = _number(metadata.get("samples_count", metadata.get("step")))
    if block.tokens:
        samples = divide(samples, seq_len)
    if step_key and loss_key:
        loss = _number(value[loss_key])
        return _make_step(samples / batch, step_s, loss), False
    if not step_key and not block.tokens:  # else it is a rate of the run, evaluations included
        step_s = divide(batch, _number(value.get("throughput")))
    if step_s > 0 and "step" not in metadata:  # the samples are those of its block
        block.samples += samples
        samples = block.samples
    return _make_step(samples / batch, step_s, nan), True


def _make_step(number: float, step_s: float, loss: float) -> MlperfStep:
    is_step = isfinite(number) and isfinite(step_s)
    return MlperfStep(
        number=round(number) if is_step else 0,
        step_s=step_s if is_step else 0.0,
        loss=loss,
        offset=0,
    )


def _pass_block(record: Mapping[str, object], block: _Block) -> float:
    """Follow the blocks of a run; return the seconds of one that is known to be training alone.

    It is known where its logger says the tokens of a block, and an evaluation begins once the block
    is over; else 0.
    """
    key, time_ms = record["key"], _number(record["time_ms"])
    if key == "block_start":
        metadata = _table(record.get("metadata"))
        tokens = _number(metadata.get("epoch_count"))
        block.tokens = tokens if isfinite(tokens) else 0.0
        first = _number(metadata.get("first_epoch_num"))
        block.end_tokens = block.tokens + (first if isfinite(first) else 0.0)
        block.start_ms, block.stop_ms = time_ms, nan
    elif key == "block_stop":
        block.stop_ms = time_ms
    elif key == "eval_start":
        seconds = (block.stop_ms - block.start_ms) / 1e3
        block.stop_ms = nan  # a block is counted once
        return seconds if isfinite(seconds) and block.tokens else 0.0
    return 0.0


def _table(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else nan


def read_neox_sizes(arguments: Mapping[str, str]) -> dict[str, int] | None:
    """Return the sizes that GPT-NeoX's arguments state, by Megatron-LM's names; None: not its."""
    if "global_num_gpus" not in arguments:
        return None
    sizes = {}
    for name, megatron_name in _NEOX_SIZES.items():
        text = _NEOX_ENDING.sub("", arguments.get(name, ""))
        if is_whole_number(text):
            # Of a pipeline it says 0 where there is none, of experts 1.
            sizes[megatron_name] = max(1, int(text))
    if sizes.get("num_experts") == 1:
        del sizes["num_experts"]
    return sizes
