"""The contract of a tuning: what stays as it is while layouts are compared, and what its figures
may be called."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path

from moewright.codec import fingerprint, read_json, write_json
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Hardware
from moewright.spec.model import ModelSpec
from moewright.spec.tuning_axis import TuningAxis
from moewright.spec.workload import RouterForce, Workload
from moewright.tuning.space import TuningPoint
from moewright.tuning.trials import SCREEN_STEPS, VALIDATE_STEPS, VALIDATION_WINDOW, WARM_UP_STEPS

CONTRACT_FILE = "contract.json"


class Label(StrEnum):
    """What the figures of a tuning stand for."""

    TRAINING = "training-equivalent"
    BENCHMARK = "benchmark-only"  # experts are given, not chosen
    PREDICTED = "predicted"  # nothing ran


@dataclass(frozen=True, kw_only=True, slots=True)
class Contract:
    """Everything that a trial shares with the others. `data` is the fingerprint of the training
    data; `workload` that of the workload without what tuning may change."""

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


def build_contract(
    model: ModelSpec,
    workload: Workload,
    hardware: Hardware,
    *,
    start: TuningPoint,
    axes: tuple[TuningAxis, ...],
    label: Label,
    versions: tuple[str, str],
    data: str,
) -> Contract:
    """`versions` are those of moewright and torch; "" for torch where nothing runs."""
    forced = workload.router.force is not RouterForce.NONE
    routing = f"forced, {workload.router.force}" if forced else "chosen by the router"
    places = replace(
        workload.data, train="", heldout="", tokenizer=""
    )  # `data` tells what lies there
    plain = replace(TuningPoint(layout=start.layout).apply_to(workload), data=places)
    window = (
        f"median of {SCREEN_STEPS} steps after {WARM_UP_STEPS}; to accept, the last {VALIDATION_WINDOW} of {VALIDATE_STEPS}"
        if label is not Label.PREDICTED
        else "none"
    )
    return Contract(
        label=label,
        moewright=versions[0],
        torch=versions[1],
        hardware=hardware.name,
        machine=hardware.fingerprint,
        world_size=hardware.count,
        model=model.name,
        parameters=fingerprint(model),
        data=data,
        routing=routing,
        precision=workload.precision,
        seq_len=workload.seq_len,
        global_batch=workload.global_batch,
        workload=fingerprint(plain),
        window=window,
        start=start,
        axes=axes,
    )


def choose_label(workload: Workload) -> Label:
    return Label.TRAINING if workload.router.force is RouterForce.NONE else Label.BENCHMARK


def freeze_contract(contract: Contract, folder: Path) -> None:
    """Write the contract into the folder of a tuning, or hold it against the one that lies there.

    Raises BadInput that names what has changed: figures under two contracts do not compare.
    """
    path = folder / CONTRACT_FILE
    if not path.exists():
        write_json(path, contract)
        return
    kept = read_json(Contract, path)
    for field in fields(contract):
        was, now = getattr(kept, field.name), getattr(contract, field.name)
        if was != now:
            rule = f"holds a tuning under another contract: its {field.name} is {_short(was)}, not {_short(now)}"
            raise BadInput(
                Reason(field="--out", value=str(folder), rule=rule, nearest=f"{folder}-2")
            )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
