"""What a tuning keeps from first to last: its contract, and the journal of its trials."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path

from moewright.codec import (
    FloatPolicy,
    append_line,
    fingerprint,
    from_data,
    parse_json,
    read_complete_lines,
    read_json,
    to_data,
    write_json,
)
from moewright.spec.errors import BadInput, Reason
from moewright.spec.options import TuningAxis
from moewright.spec.workload import RouterForce, Workload
from moewright.tuning.space import TuningPoint, TuningSpace
from moewright.tuning.trials import (
    SCREEN_STEPS,
    VALIDATE_STEPS,
    VALIDATION_WINDOW,
    WARM_UP_STEPS,
    Announce,
    RunTrial,
    Trial,
    TrialLength,
    TrialOutcome,
    TrialRequest,
)

CONTRACT_FILE = "contract.json"
_MEASURED_WINDOW = (
    f"median of {SCREEN_STEPS} steps after {WARM_UP_STEPS}; "
    f"to accept, the last {VALIDATION_WINDOW} of {VALIDATE_STEPS}"
)
_SHOWN = 80  # letters of a value in a message


class Label(StrEnum):
    """The kind of the figures of a tuning."""

    TRAINING = "training-equivalent"
    BENCHMARK = "benchmark-only"  # experts are given, not chosen
    PREDICTED = "predicted"  # nothing ran


@dataclass(frozen=True, kw_only=True, slots=True)
class Contract:
    """The contract of a tuning: everything that its trials share.

    `data` is the fingerprint of the training data, and `workload` the fingerprint of the workload
    apart from what tuning may change.
    """

    label: Label
    moewright: str
    torch: str
    hardware: str
    machine: str  # fingerprint of the machine that was measured; "" of a part
    world_size: int
    model: str
    parameters: str  # fingerprint of the model
    data: str
    routing: str
    precision: str
    seq_len: int
    global_batch: int
    workload: str
    window: str
    start: TuningPoint
    axes: tuple[TuningAxis, ...]
    trainer: str = "moewright"


def build_contract(
    space: TuningSpace,
    *,
    label: Label,
    versions: tuple[str, str],
    data: str,
    trainer: str = "moewright",
) -> Contract:
    """Build the contract of a tuning.

    `versions` are those of moewright and torch, "" for torch where nothing runs; `data` is the
    fingerprint of the training data, and `trainer` the path of Megatron-LM's where it runs.
    """
    workload = space.workload
    routing = "chosen by the router"
    if workload.router.force is not RouterForce.NONE:
        routing = f"forced, {workload.router.force}"
    # Paths are left out: `data` tells what lies there.
    without_paths = replace(workload.data, train="", heldout="", tokenizer="")
    default_point = TuningPoint(layout=space.start.layout)
    fixed_workload = replace(default_point.apply_to(workload), data=without_paths)
    return Contract(
        label=label,
        moewright=versions[0],
        torch=versions[1],
        hardware=space.hardware.name,
        machine=space.hardware.fingerprint,
        world_size=space.hardware.count,
        model=space.model.name,
        parameters=fingerprint(space.model),
        data=data,
        routing=routing,
        precision=workload.precision,
        seq_len=workload.seq_len,
        global_batch=workload.global_batch,
        workload=fingerprint(fixed_workload),
        window="none" if label is Label.PREDICTED else _MEASURED_WINDOW,
        start=space.start,
        axes=space.axes,
        trainer=trainer,
    )


def choose_label(workload: Workload) -> Label:
    """Return the label of the figures of a workload's trials."""
    if workload.router.force is RouterForce.NONE:
        return Label.TRAINING
    return Label.BENCHMARK


def freeze_contract(contract: Contract, folder: Path) -> None:
    """Write the contract into the folder of a tuning, or compare it with the one that is there.

    Raises:
        BadInput: something has changed, and is named; figures under two contracts do not compare.
    """
    path = folder / CONTRACT_FILE
    if not path.exists():
        write_json(path, contract)
        return
    kept = read_json(Contract, path)
    for field in fields(contract):
        was = getattr(kept, field.name)
        now = getattr(contract, field.name)
        if was != now:
            change = f"its {field.name} is {_shorten(was)}, not {_shorten(now)}"
            rule = f"holds a tuning under another contract: {change}"
            raise BadInput(
                Reason(field="--out", value=str(folder), rule=rule, nearest=f"{folder}-2")
            )


def _shorten(value: object) -> str:
    text = str(value)
    if len(text) <= _SHOWN:
        return text
    return f"{text[: _SHOWN - 3]}..."


JOURNAL_FILE = "journal.jsonl"

_TrialKey = tuple[TuningPoint, TrialLength, int]


class Journal:
    """A runner of trials that makes each run once: a run that the file holds is read from it.

    The procedure asks for the same runs in the same order every time, so the file is enough to
    resume a tuning.
    """

    def __init__(self, folder: Path, run_one: RunTrial, clock: Callable[[], float]) -> None:
        self._path = folder / JOURNAL_FILE
        self._run_one = run_one
        self._clock = clock
        self._trials: dict[_TrialKey, Trial] = {
            (trial.point, trial.length, trial.repeat): trial for trial in read_journal(folder)
        }
        self._last_ended_s = clock()

    def holds(self, request: TrialRequest) -> bool:
        """Tell whether a run was made."""
        return (request.point, request.length, request.repeat) in self._trials

    def __call__(self, request: TrialRequest) -> TrialOutcome:
        """Return the outcome of the run; a run made now is on disk before it is returned."""
        key = (request.point, request.length, request.repeat)
        if key not in self._trials:
            outcome = self._run_one(request)
            spent_s = self._clock() - self._last_ended_s
            trial = Trial(
                point=request.point,
                length=request.length,
                repeat=request.repeat,
                predicted_s=request.plan.estimate.step_s,
                outcome=replace(outcome, spent_s=spent_s),
            )
            append_line(self._path, json.dumps(to_data(trial)))
            self._trials[key] = trial
        self._last_ended_s = self._clock()
        return self._trials[key].outcome


def announce_new(journal: Journal, announce: Announce) -> Announce:
    """Return an announcement of the runs that a journal does not hold yet."""

    def announce_missing(requests: Sequence[TrialRequest]) -> None:
        announce([request for request in requests if not journal.holds(request)])

    return announce_missing


def read_journal(folder: Path) -> tuple[Trial, ...]:
    """Read the runs of a tuning so far, in the order they were made.

    Raises:
        BadInput: a line is damaged.
    """
    path = folder / JOURNAL_FILE
    trials = []
    for number, line in enumerate(read_complete_lines(path), 1):
        where = f"{path}:{number}"
        try:
            data = parse_json(line, where=where, floats=FloatPolicy.NON_FINITE)
            trials.append(from_data(Trial, data, where=where, floats=FloatPolicy.NON_FINITE))
        except BadInput as error:
            rule = f"is no line of a tuning's journal ({error.reasons[0].rule})"
            raise BadInput(Reason(field=where, rule=rule, nearest="another --out")) from None
    return tuple(trials)
