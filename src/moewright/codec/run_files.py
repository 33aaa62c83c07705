"""The files of a run: plan.json, steps.jsonl and its tail, ledger/, timings of ranks, incidents."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeAlias, TypeVar

from moewright.codec.data import FloatPolicy, fingerprint, from_data, to_data
from moewright.codec.files import (
    as_table,
    parse_json,
    read_bytes,
    read_json,
    read_json_data,
    read_text,
    write_text,
)
from moewright.codec.layout_text import format_layout
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import Layout
from moewright.spec.ledger import Ledger, Selection
from moewright.spec.model import ModelSpec
from moewright.spec.names import closest_match
from moewright.spec.plan import Plan
from moewright.spec.run import (
    CopyRecord,
    EvalRecord,
    Incident,
    RankTiming,
    RunRecord,
    Session,
    StepRecord,
)
from moewright.spec.units import mention

T = TypeVar("T")

# Of a file that is longer, only its end is read: a resumed run has the records of all its steps.
_MOST_BYTES = 1 << 22
_MOST_NEAR_RUNS = 200  # among which the nearest to a wrong path is looked for
_MOST_DAMAGED_LINES = 1000  # of a journal; with more it is none


class RecordTail:
    """The complete lines of a growing file, each given once; all anew where it was replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode = 0

    def read_lines(self) -> tuple[list[str], bool]:
        """Return the new lines, and whether they begin the file anew; none where it is not there.

        Raises:
            OSError: the file cannot be read.
        """
        try:
            info = os.stat(self._path)
        except FileNotFoundError:
            return [], False
        is_new = info.st_ino != self._inode or info.st_size < self._offset
        if is_new:
            self._inode = info.st_ino
            self._offset = max(0, info.st_size - _MOST_BYTES)
        if info.st_size == self._offset:
            return [], is_new
        is_cut = is_new and self._offset > 0
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read(info.st_size - self._offset)
        complete = data.rfind(b"\n") + 1
        self._offset += complete
        lines = data[:complete].decode("utf-8", "replace").splitlines()
        return lines[1:] if is_cut else lines, is_new


PLAN_FILE = "plan.json"
STEPS_FILE = "steps.jsonl"
RANK_TIMINGS_FILE = "paces.json"
INCIDENTS_FILE = "incidents.jsonl"
COMPARISON_FILE = "ledger/comparison.json"  # of each rank's predicted and counted ledger
TRACE_FOLDER = "trace"  # the traces of its ranks
MERGED_TRACE_FILE = "trace.json"

AnyRecord: TypeAlias = Session | StepRecord | EvalRecord | CopyRecord
# The lines of steps.jsonl, by their kind.
RECORD_KINDS: Mapping[str, type[AnyRecord]] = {
    "session": Session,
    "step": StepRecord,
    "eval": EvalRecord,
    "copy": CopyRecord,
}


def format_record(record: AnyRecord) -> str:
    """Return the line of steps.jsonl for a record, with its newline.

    A diverged loss is written as NaN or Infinity.
    """
    kind = next(name for name, cls in RECORD_KINDS.items() if isinstance(record, cls))
    return json.dumps({"kind": kind, **to_data(record)}) + "\n"


def find_run_folder(path: Path) -> Path:
    """Return the folder of a run, of which `path` may also be the plan file."""
    if path.name == PLAN_FILE and path.is_file():
        return path.parent
    return path


def _refuse_folder(path: Path) -> Reason:
    """Return why a path is no folder of a run, and the run that is nearest to it.

    A file with a name like those of a run is of something else: only folders of runs are offered.
    """
    wanted = f"which has {PLAN_FILE} and {STEPS_FILE}"
    if path.is_dir():
        rule = f"is no run folder, {wanted}: neither is here"
        if (path / STEPS_FILE).exists():
            rule = f"is no run folder, {wanted}: the first is missing"
        near = next(_find_runs(path), "")
    else:
        rule = "no such run folder"
        if path.exists():
            rule = f"is a file, not a run folder, {wanted}"
        names = {Path(run).name: run for run in _find_runs(path.parent)}
        near = names.get(closest_match(path.name, names), "")
    return Reason(field=str(path), rule=rule, nearest=near)


def _find_runs(folder: Path) -> Iterator[str]:
    """Yield the folders of runs in a folder and in those in it, by name; a few hundred are seen."""
    for pattern in (PLAN_FILE, f"*/{PLAN_FILE}", f"*/*/{PLAN_FILE}"):
        try:
            plans = sorted(islice(folder.glob(pattern), _MOST_NEAR_RUNS))
        except OSError:  # a folder that may not be read
            return
        for plan in plans:
            if (plan.parent / STEPS_FILE).exists():
                yield str(plan.parent)


def read_run(directory: Path) -> RunRecord:
    """Return what a run left behind, in step order; its plan.json stands for the folder.

    A last line without its end (the writer was killed) is left out and noted; steps that a later
    session repeated are superseded by it.

    Raises:
        BadInput: The folder holds no run, or the plan or a line of the steps is damaged.
    """
    directory = find_run_folder(directory)
    if not (directory / PLAN_FILE).exists():
        raise BadInput(_refuse_folder(directory))
    plan = read_json(Plan, directory / PLAN_FILE)
    sessions: list[Session] = []
    steps: dict[int, StepRecord] = {}
    evals: dict[int, EvalRecord] = {}
    copied_step = -1
    records, notes = _read_records(directory / STEPS_FILE)
    incidents, damage = read_journal(directory)
    if damage:
        more = mention(", and {} more lines", len(damage) - 1)
        notes.append(f"left out: {damage[0]}{more}")
    if plan.fingerprint != fingerprint(plan.model, plan.workload, plan.hardware, plan.layout):
        notes.append(
            "plan.json does not hold its own fingerprint: edited, or of another version of "
            "moewright"
        )
    for record in records:
        match record:
            case Session(first_step=first):
                sessions.append(record)
                steps = {step: old for step, old in steps.items() if step < first}
                evals = {step: old for step, old in evals.items() if step < first}
            case StepRecord(step=step):
                _require_loads_of(plan.model, record, directory / STEPS_FILE)
                steps[step] = record
                copied_step = record.copied_step
            case EvalRecord(step=step):
                evals[step] = record
            case CopyRecord():
                copied_step = record.copied_step
    return RunRecord(
        plan=plan,
        sessions=tuple(sessions),
        steps=tuple(steps[step] for step in sorted(steps)),
        evals=tuple(evals[step] for step in sorted(evals)),
        ledgers=_read_beside(lambda: _read_ledgers(directory), (), notes),
        selection=_read_beside(lambda: _read_selection(directory), None, notes),
        paces=_read_beside(lambda: _read_rank_timings(directory, plan.layout), (), notes),
        incidents=incidents,
        notes=tuple(notes),
        planned_from=_find_planned_from(plan.layout, sessions, steps),
        copied_step=copied_step,
    )


def _read_beside(read: Callable[[], T], default: T, notes: list[str]) -> T:
    """Read a file beside the plan and the steps; a damaged one is noted, and hides no step."""
    try:
        return read()
    except BadInput as error:
        notes.append(f"left out: {error}")
        return default


def _read_ledgers(directory: Path) -> tuple[Ledger, ...]:
    paths = sorted((directory / "ledger").glob("rank*.json"))
    return tuple(read_json(Ledger, path) for path in paths)


def _read_selection(directory: Path) -> Selection | None:
    path = directory / "ledger" / "selection.json"
    return read_json(Selection, path) if path.exists() else None


def _require_loads_of(model: ModelSpec, record: StepRecord, path: Path) -> None:
    """Raise BadInput for the loads of another model's experts."""
    for load in record.loads:
        if len(load.counts) != model.expert_count:
            raise BadInput(
                Reason(
                    field=f"{path}: step {record.step}: loads of layer {load.layer}",
                    value=f"{len(load.counts)} experts",
                    rule="are not of the model of plan.json",
                    nearest=f"{model.expert_count} experts",
                )
            )


def _find_planned_from(
    layout: Layout, sessions: Sequence[Session], steps: Mapping[int, StepRecord]
) -> int:
    """Return the step since which a run has had a layout; past the last one where it has not.

    A session of an earlier version does not state its layout: its world size and the number of its
    expert-parallel ranks tell of another one.
    """
    texts = ("", format_layout(layout))
    first = max(steps, default=0) + 1 if sessions else 1
    for session in reversed(sessions):
        if session.world_size != layout.world_size or session.layout not in texts:
            break
        first = min(first, session.first_step)
    others = [
        step
        for step, record in steps.items()
        if any(len(load.rank_counts) not in (0, layout.ep) for load in record.loads)
    ]
    return max(first, max(others, default=0) + 1)


def read_incidents(directory: Path) -> tuple[Incident, ...]:
    """Return the incidents of a run that can be read, the oldest first."""
    incidents, _ = read_journal(directory)
    return incidents


def read_journal(directory: Path) -> tuple[tuple[Incident, ...], tuple[BadInput, ...]]:
    """Return the incidents of a run, the oldest first, and what is wrong with the other lines.

    A last line without its end is left out, for its writer was killed; so is all after many wrong
    lines.
    """
    path = directory / INCIDENTS_FILE
    if not path.exists():
        return (), ()
    try:
        lines = read_bytes(path).split(b"\n")[:-1]
    except BadInput as error:
        return (), (error,)
    incidents: list[Incident] = []
    damage: list[BadInput] = []
    for number, line in enumerate(lines, 1):
        if len(damage) == _MOST_DAMAGED_LINES:
            break
        where = f"{path}:{number}"
        try:
            incidents.append(
                from_data(Incident, parse_json(line.decode(), where=where), where=where)
            )
        except UnicodeDecodeError:
            damage.append(BadInput(Reason(field=where, rule="is not text in UTF-8")))
        except BadInput as error:
            damage.append(error)
    return tuple(incidents), tuple(damage)


def write_incidents(directory: Path, incidents: Sequence[Incident]) -> None:
    """Write the incidents of a run, one a line, in place of those of its folder."""
    lines = [json.dumps(to_data(incident)) + "\n" for incident in incidents]
    write_text(directory / INCIDENTS_FILE, "".join(lines))


def _read_rank_timings(directory: Path, layout: Layout) -> tuple[RankTiming, ...]:
    """Return the timings of a layout's ranks; () where no run of it has ended by itself yet.

    A file of an earlier version does not state its layout, but has an entry for each of its ranks.
    """
    path = directory / RANK_TIMINGS_FILE
    if not path.exists():
        return ()
    data = read_json_data(path)
    if not isinstance(data, dict) or data.get("layout", "") not in ("", format_layout(layout)):
        return ()
    timings = data.get("paces") or ()
    if len(timings) != layout.world_size:
        return ()
    return tuple(from_data(RankTiming, timing, where=str(path)) for timing in timings)


def _read_records(path: Path) -> tuple[list[AnyRecord], list[str]]:
    """Return the records of steps.jsonl, and notes on what had to be left out."""
    *lines, torn = read_text(path).split("\n")  # `torn` is "" when the last line is complete
    notes = []
    if torn:
        notes.append(f"{path.name}: a torn last line ({len(torn)} characters) was left out")
    records = [
        _parse_record(line, f"{path}:{number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    return records, notes


def _parse_record(line: str, where: str) -> AnyRecord:
    data = parse_json(line, where=where, floats=FloatPolicy.NON_FINITE)
    kind = as_table(data).pop("kind", None)
    for name, cls in RECORD_KINDS.items():
        if name == kind:
            return from_data(cls, data, where=where, floats=FloatPolicy.NON_FINITE)
    rule = f"must be one of {', '.join(RECORD_KINDS)}"
    raise BadInput(Reason(field=f"{where}: kind", value=str(kind), rule=rule))
