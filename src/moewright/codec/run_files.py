"""Reads a run folder: plan.json, steps.jsonl, ledger/, the timings of its ranks, incidents."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from moewright.codec.data import FloatPolicy, fingerprint, from_data, to_data
from moewright.codec.files import (
    parse_json,
    read_complete_lines,
    read_json,
    read_json_data,
    read_text,
    write_text,
)
from moewright.spec.errors import BadInput, Reason
from moewright.spec.ledger import Ledger, Selection
from moewright.spec.plan import Plan
from moewright.spec.run import EvalRecord, Incident, RankTiming, RunRecord, Session, StepRecord

PLAN_FILE = "plan.json"
STEPS_FILE = "steps.jsonl"
RANK_TIMINGS_FILE = "paces.json"
INCIDENTS_FILE = "incidents.jsonl"
TRACE_FOLDER = "trace"  # the traces of its ranks
MERGED_TRACE_FILE = "trace.json"

_KINDS: tuple[tuple[str, type[Session | StepRecord | EvalRecord]], ...] = (
    ("session", Session),
    ("step", StepRecord),
    ("eval", EvalRecord),
)


def format_record(record: Session | StepRecord | EvalRecord) -> str:
    """Return the line of steps.jsonl for a record, with its newline.

    A diverged loss is written as NaN or Infinity.
    """
    kind = next(name for name, cls in _KINDS if isinstance(record, cls))
    return json.dumps({"kind": kind, **to_data(record)}) + "\n"


def read_run(directory: Path) -> RunRecord:
    """Return what a run left behind, in step order.

    A last line without its end (the writer was killed) is left out and noted; steps that a later
    session repeated are superseded by it.

    Raises:
        BadInput: The folder holds no run, or a line is damaged.
    """
    if not directory.is_dir():
        raise BadInput(Reason(field=str(directory), rule="no such run folder"))
    plan = read_json(Plan, directory / PLAN_FILE)
    sessions: list[Session] = []
    steps: dict[int, StepRecord] = {}
    evals: dict[int, EvalRecord] = {}
    records, notes = _read_records(directory / STEPS_FILE)
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
                steps[step] = record
            case EvalRecord(step=step):
                evals[step] = record
    ledger_folder = directory / "ledger"
    selection = ledger_folder / "selection.json"
    return RunRecord(
        plan=plan,
        sessions=tuple(sessions),
        steps=tuple(steps[step] for step in sorted(steps)),
        evals=tuple(evals[step] for step in sorted(evals)),
        ledgers=tuple(read_json(Ledger, path) for path in sorted(ledger_folder.glob("rank*.json"))),
        selection=read_json(Selection, selection) if selection.exists() else None,
        paces=_read_rank_timings(directory / RANK_TIMINGS_FILE),
        incidents=read_incidents(directory),
        notes=tuple(notes),
    )


def read_incidents(directory: Path) -> tuple[Incident, ...]:
    """Return the incidents of a run, the oldest first."""
    path = directory / INCIDENTS_FILE
    return tuple(
        from_data(Incident, parse_json(line, where=f"{path}:{number}"), where=f"{path}:{number}")
        for number, line in enumerate(read_complete_lines(path), 1)
    )


def write_incidents(directory: Path, incidents: Sequence[Incident]) -> None:
    """Write the incidents of a run, one a line, in place of those of its folder."""
    lines = [json.dumps(to_data(incident)) + "\n" for incident in incidents]
    write_text(directory / INCIDENTS_FILE, "".join(lines))


def _read_rank_timings(path: Path) -> tuple[RankTiming, ...]:
    """Return the timings of the ranks; () for a run that has not ended by itself yet."""
    if not path.exists():
        return ()
    data = read_json_data(path)
    timings = data.get("paces") if isinstance(data, dict) else None
    return tuple(from_data(RankTiming, timing, where=str(path)) for timing in timings or ())


def _read_records(path: Path) -> tuple[list[Session | StepRecord | EvalRecord], list[str]]:
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


def _parse_record(line: str, where: str) -> Session | StepRecord | EvalRecord:
    data = parse_json(line, where=where, floats=FloatPolicy.NON_FINITE)
    kind = data.pop("kind", None) if isinstance(data, dict) else None
    for name, cls in _KINDS:
        if name == kind:
            return from_data(cls, data, where=where, floats=FloatPolicy.NON_FINITE)
    rule = "must be one of session, step, eval"
    raise BadInput(Reason(field=f"{where}: kind", value=str(kind), rule=rule))
