"""What a run leaves behind: a line a step in a file and on the screen, TensorBoard, the ledger."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO, cast

import torch
from rich.console import Console

from moewright.codec import (
    RANK_TIMINGS_FILE,
    RECORD_KINDS,
    STEPS_FILE,
    AnyRecord,
    FloatPolicy,
    format_layout,
    format_record,
    parse_json,
    read_complete_lines,
    to_data,
    write_json,
    write_pieces,
    write_text,
)
from moewright.rules.expert_placement import rank_loads
from moewright.rules.routing import measure_load_balance, slot_rows
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import Layout
from moewright.spec.ledger import Ledger, Selection
from moewright.spec.run import (
    CopyRecord,
    EvalRecord,
    LayerLoad,
    PairRewards,
    RankTiming,
    Session,
    StepRecord,
)
from moewright.spec.units import divide, format_bytes
from moewright.spec.workload import RouterForce

_LARGEST_FLOAT = sys.float_info.max
_LONGEST_PLAIN = 1e9  # a diverged loss would print hundreds of digits


class RecordWriter(Protocol):
    """A place that takes the records of a run as they come.

    What was written before `sync`, and has to outlive the machine, is on disk after it.
    """

    def write_session(self, record: Session) -> None: ...

    def write_step(self, record: StepRecord) -> None: ...

    def write_evaluation(self, record: EvalRecord) -> None: ...

    def write_copy(self, record: CopyRecord) -> None: ...

    def write_timings(self, step: int, timings: Sequence[RankTiming]) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


class JsonLinesWriter:
    """The writer of steps.jsonl, the truth that every other view of a run is made from.

    Steps at or past `first_step` were done after the last checkpoint and are about to be done
    again: they are dropped.
    """

    def __init__(self, run_dir: Path, *, first_step: int) -> None:
        path = run_dir / STEPS_FILE
        kept = []
        steps = set()
        for number, line in enumerate(read_complete_lines(path), 1):
            step = _parse_step(line, f"{path}:{number}")
            if step < first_step:
                kept.append(f"{line}\n")
                steps.add(step)
        write_text(path, "".join(kept))  # a kill at any moment leaves the old lines or these
        self.missing = tuple(_find_gaps(steps, first_step))
        self._path = path
        # Readable too, for `_restore`.
        self._file = path.open("a+", encoding="utf-8")

    def write_session(self, record: Session) -> None:
        self._write(record)

    def write_step(self, record: StepRecord) -> None:
        self._write(record)

    def write_evaluation(self, record: EvalRecord) -> None:
        self._write(record)

    def write_copy(self, record: CopyRecord) -> None:
        self._write(record)

    def write_timings(self, step: int, timings: Sequence[RankTiming]) -> None:
        pass  # paces.json has them

    def sync(self) -> None:
        """Wait until all lines, and the name of their file, are on disk."""
        try:
            self._restore()
            os.fsync(self._file.fileno())
            folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise self._explain(error) from error

    def close(self) -> None:
        try:
            self._restore()
        except OSError as error:
            raise self._explain(error) from error
        finally:
            self._file.close()

    def _restore(self) -> None:
        """Write the file anew where it was deleted, or another put there: its lines are still here.

        Of a folder that is gone nothing is made again.
        """
        if not self._path.parent.is_dir():
            return
        own = os.fstat(self._file.fileno())
        if self._path.exists() and os.path.samestat(own, self._path.stat()):
            return
        # A file that was deleted lives as long as this handle.
        write_pieces(self._path, (os.pread(self._file.fileno(), own.st_size, 0),))
        self._file.close()
        self._file = self._path.open("a+", encoding="utf-8")

    def _write(self, record: AnyRecord) -> None:
        try:
            self._file.write(format_record(record))
            self._file.flush()
        except OSError as error:
            raise self._explain(error) from error

    def _explain(self, error: OSError) -> BadInput:
        rule = f"cannot be written: {error.strerror}"
        return BadInput(Reason(field=str(self._path), rule=rule))


def _find_gaps(steps: Set[int], first_step: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the last of the steps before `first_step` that are not there."""
    begin = 0
    for step in range(1, first_step + 1):
        is_missing = step < first_step and step not in steps
        if is_missing and not begin:
            begin = step
        elif not is_missing and begin:
            yield begin, step - 1
            begin = 0


def _parse_step(line: str, where: str) -> int:
    """Return the step that a line is about; 0 for a session, which has none and is kept.

    Raises:
        BadInput: for a line that no run has written.
    """
    record = parse_json(line, where=where, floats=FloatPolicy.NON_FINITE)
    step = None
    if isinstance(record, dict) and record.get("kind") in RECORD_KINDS:
        step = record.get("step", 0)
    if not isinstance(step, int):
        rule = f"is not a record of one of {', '.join(RECORD_KINDS)}"
        raise BadInput(Reason(field=where, rule=rule, nearest="delete the line"))
    return step


class _FailSafeStream:
    """A text stream that falls silent when its reader leaves or its disk is full.

    A display must not end a run.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        self._terminal = stream.isatty()
        self.encoding = stream.encoding

    def write(self, text: str) -> int:
        self._attempt(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(lambda stream: stream.flush())

    def isatty(self) -> bool:
        return self._terminal

    def _attempt(self, action: Callable[[TextIO], object]) -> None:
        try:
            if self._stream is not None:
                action(self._stream)
        except (OSError, ValueError):  # ValueError: the stream is closed
            self._stream = None


class ConsoleWriter:
    """A writer that prints a line a step."""

    def __init__(self, *, last_step: int, stream: TextIO) -> None:
        self._last = last_step
        self._console = Console(file=cast(TextIO, _FailSafeStream(stream)))

    def write_session(self, record: Session) -> None:
        self._line(
            "MFU: model FLOPs, causal attention counted half, over the peak; "
            "HFU: replays counted too"
        )
        if record.first_step > 1:
            self._line(f"continuing from step {record.first_step - 1}")
        if record.routing is not RouterForce.NONE:
            self._line(
                f"experts are given, not chosen ({record.routing}): "
                "this measures speed, it does not train"
            )

    def write_step(self, record: StepRecord) -> None:
        norm = "-" if record.skipped else _format_number(record.grad_norm, 3)
        parts = [
            f"loss {_format_number(record.loss, 4)}",
            f"lr {record.lr:.2e}",
            f"grad-norm {norm}",
            f"{record.tokens_per_s_per_rank:,.0f} tok/s/rank",
            f"{record.tflops_per_rank:.4f} TFLOP/s",
            f"MFU {record.mfu:.1%}",
        ]
        if record.rewards.pairs:
            parts.insert(1, _describe_rewards(record.rewards))
        if record.hfu > record.mfu:  # with recomputation
            parts.append(f"HFU {record.hfu:.1%}")
        if record.waits:
            parts.append(f"waits {_wait_share(record):.0%}")
        if record.copied_step >= 0:
            parts.append(f"copy {record.copy_age} steps old")
        if record.moves.experts:
            size = format_bytes(record.moves.sent_bytes)
            parts.append(f"{record.moves.experts} experts moved before, {size}")
        if record.skipped:
            parts.append("SKIPPED: gradient not finite")
        if record.is_repeated:
            parts.append("run twice: rows over rank_capacity")
        self._line(f"step {record.step}/{self._last}  {'  '.join(parts)}")

    def write_copy(self, record: CopyRecord) -> None:
        pass  # the last lines of a run say it

    def write_timings(self, step: int, timings: Sequence[RankTiming]) -> None:
        pass

    def write_evaluation(self, record: EvalRecord) -> None:
        loss = _format_number(record.heldout_loss, 4)
        line = (
            f"held-out loss {loss} nats after {record.step} steps "
            f"(unigram entropy {record.unigram_entropy:.4f}; {record.tokens:,} targets)"
        )
        if record.rewards.pairs:
            line = (
                f"held-out loss {loss} after {record.step} steps "
                f"({record.tokens:,} pairs, {_describe_rewards(record.rewards)})"
            )
        self._line(line)

    def sync(self) -> None:
        """Do nothing: what a terminal showed is gone with it."""

    def close(self) -> None:
        pass

    def _line(self, text: str) -> None:
        # soft_wrap keeps rich from breaking the line.
        self._console.print(text, highlight=False, soft_wrap=True)


def _describe_rewards(rewards: PairRewards) -> str:
    return f"accuracy {rewards.accuracy:.0%}  margin {_format_number(rewards.margin, 4)}"


def _format_number(value: float, digits: int) -> str:
    """Return a number to so many digits behind the point, in a few letters whatever it is."""
    if abs(value) >= _LARGEST_FLOAT or math.isnan(value):
        return "not finite"
    return f"{value:.{digits}f}" if abs(value) < _LONGEST_PLAIN else f"{value:.{digits}e}"


def _wait_share(record: StepRecord) -> float:
    """Return the share of the step in which this rank waited for others."""
    if not record.step_s:
        return 0.0
    return sum(wait.seconds for wait in record.waits) / record.step_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorder:
    """All writers of this rank; there are none on ranks other than 0."""

    writers: tuple[RecordWriter, ...]

    def write_session(self, record: Session) -> None:
        for writer in self.writers:
            writer.write_session(record)

    def write_step(self, record: StepRecord) -> None:
        for writer in self.writers:
            writer.write_step(record)

    def write_evaluation(self, record: EvalRecord) -> None:
        for writer in self.writers:
            writer.write_evaluation(record)

    def write_copy(self, record: CopyRecord) -> None:
        for writer in self.writers:
            writer.write_copy(record)

    def write_timings(self, step: int, timings: Sequence[RankTiming]) -> None:
        for writer in self.writers:
            writer.write_timings(step, timings)

    def sync(self) -> None:
        for writer in self.writers:
            writer.sync()

    def close(self) -> None:
        for writer in self.writers:
            writer.close()


def build_layer_loads(
    loads: torch.Tensor,
    losses: torch.Tensor,
    slots: Mapping[int, Sequence[int]],
    *,
    ep: int,
    chosen_rows: int,
) -> tuple[LayerLoad, ...]:
    """Build the load statistics of every MoE layer.

    `loads` [MoE layers, E] are the rows that experts received, `losses` [MoE layers, 4] the router
    losses, `chosen_rows` the rows that all tokens chose in each layer, 0 where none are dropped.
    `slots` maps each MoE layer, in order, to the expert in each of its slots; an expert's rows are
    dealt evenly to its slots.
    """
    layer_loads = []
    for (layer, slot_experts), counts, layer_losses in zip(
        slots.items(), loads.tolist(), losses.tolist(), strict=True
    ):
        load = measure_load_balance(counts)
        aux, seq_aux, global_aux, z = map(clamp_to_finite, layer_losses)
        layer_loads.append(
            LayerLoad(
                layer=layer,
                max_over_mean=load.max_over_mean,
                p95_over_mean=load.p95_over_mean,
                dead_experts=load.dead_experts,
                entropy=load.entropy,
                counts=tuple(counts),
                rank_counts=rank_loads(slot_rows([counts], slot_experts), ep),
                dropped_share=1 - divide(sum(counts), chosen_rows, otherwise=1.0),
                aux_loss=aux,
                seq_aux_loss=seq_aux,
                global_aux_loss=global_aux,
                z_loss=z,
            )
        )
    return tuple(layer_loads)


def clamp_to_finite(value: float) -> float:
    """Return the value, or the largest float for one that is not finite.

    JSON has no NaN or infinity.
    """
    return value if math.isfinite(value) else math.copysign(_LARGEST_FLOAT, value)


def write_rank_timings(run_dir: Path, layout: Layout, timings: Sequence[RankTiming]) -> None:
    """Write paces.json: the timings of all ranks of a layout."""
    data = {
        "layout": format_layout(layout),
        "paces": [to_data(timing) for timing in timings],
    }
    write_text(run_dir / RANK_TIMINGS_FILE, json.dumps(data, indent=1) + "\n")


def write_ledger(run_dir: Path, ledger: Ledger, selection: Selection | None) -> None:
    """Write ledger/rankNNNNN.json, and the selection that it was counted under (on rank 0)."""
    folder = run_dir / "ledger"
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"rank{ledger.rank:05d}.json", ledger)
    if selection is not None:
        write_json(folder / "selection.json", selection)
