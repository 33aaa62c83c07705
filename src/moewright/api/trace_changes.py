"""What a step of a trace would take if parts of it were faster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moewright.api.diagnosing import is_engine_run, is_trace, read_captures
from moewright.codec.run_files import TRACE_FOLDER
from moewright.diagnosis.traces.what_if_trace import TraceWhatIf, parse_speeds, replay_trace
from moewright.spec.errors import BadInput, Reason
from moewright.spec.record import Record, Row


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class TraceReplays(Record):
    """The replays of a change, of each rank that has a trace."""

    change: str
    replays: tuple[TraceWhatIf, ...]

    def title(self) -> str:
        """Return the change in words."""
        return self.replays[0].title()

    def to_rows(self) -> list[Row]:
        """Return a row for each rank."""
        return [row for item in self.replays for row in item.to_rows()]


def what_if(path: Path | str, change: str) -> TraceReplays:
    """Say what a step of a trace would take if parts of it were faster, between two bounds.

    Args:
        path: a trace of the PyTorch profiler, an Nsight Systems export, a folder of them, or the
            folder of a run with traces.
        change: parts with how many times as fast they are, "gemm=2x,network=1.5x,host=inf".

    Raises:
        BadInput: there is no trace, it marks no steps, or it does not carry the change.

    Example:
        >>> import moewright as mw
        >>> mw.what_if.__name__  # docs/how_to/diagnose.md has an answer
        'what_if'
    """
    speeds = parse_speeds(change)
    folder = Path(path)
    if is_engine_run(folder) and (folder / TRACE_FOLDER).is_dir():
        folder = folder / TRACE_FOLDER
    if not folder.exists() or is_engine_run(folder) or not is_trace(folder):
        rule = "needs a trace: a log and the record of a run have no times of kernels"
        raise BadInput(Reason(field="--what-if", value=change[:40], rule=rule))
    captures = read_captures(folder)
    return TraceReplays(
        change=change, replays=tuple(replay_trace(capture, speeds) for capture in captures)
    )
