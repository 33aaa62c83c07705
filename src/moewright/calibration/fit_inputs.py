"""Measured rows as runs to fit, a hardware with what the fit says, and the run that would teach
most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moewright.calibration.fit import Estimated, Fit, Run
from moewright.calibration.table import Measured
from moewright.codec import layout_text
from moewright.cost.estimate import estimate
from moewright.cost.repricing import Prepared
from moewright.rules.legality import illegal
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Constant, Hardware
from moewright.spec.layout import Dispatcher, Graphs, Layout, Overlap, Recompute, Schedule
from moewright.spec.plan import Verdict
from moewright.spec.sourced import Sourced, SourceKind

FEWEST = 3
# of its prior spread: a constant that stays less certain than this was not seen by the runs
_LEARNT = 0.9
_BASES = 6  # layouts that are varied to find the next run


@dataclass(frozen=True, kw_only=True, slots=True)
class NextRun:
    """A layout worth measuring: how far its time is uncertain now, and the constant it would tell
    most about."""

    model: str
    layout: str
    spread: float
    constant: str
    sd: float  # of the constant's logarithm, now
    sd_after: float


def unfit(row: Measured) -> str:
    """Why a row cannot be fitted; "" when it can."""
    if row.speed is None:
        return "states no speed"
    if row.same_as:
        return f"reports the measurement of {row.same_as}"
    if row.unknown:
        return f"does not state {', '.join(row.unknown)}"
    return "is FSDP, which is priced roughly" if row.layout.zero == 3 else ""


def step_s(row: Measured) -> float:
    """Measured seconds of a step. Raises ValueError for a row without speed."""
    if row.speed is None:
        raise ValueError(f"{row.id} states no speed")
    return row.workload.tokens_per_step / row.hardware.count / row.speed.tokens_per_s_per_device


def runs_of(rows: Sequence[Measured], hardware: Hardware | None = None) -> tuple[Run, ...]:
    """Rows as runs, on `hardware` (of the row's count) instead of the catalogue's part where it is
    given. Repeats of a layout share their weight: n of them count as sqrt(n)."""
    repeats = Counter(_key(row) for row in rows)
    found = []
    for row in rows:
        on = replace(hardware, count=row.hardware.count) if hardware else row.hardware
        prepared = Prepared(row.model, row.workload, on, row.layout)
        weight = repeats[_key(row)] ** -0.5
        found.append(
            Run(id=row.id, prepared=prepared, hardware=on, measured_s=step_s(row), weight=weight)
        )
    return tuple(found)


def _key(row: Measured) -> tuple[object, ...]:
    return (
        row.group,
        row.layout,
        row.workload.global_batch,
        row.workload.seq_len,
        row.workload.precision,
    )


def fitted_hardware(
    hardware: Hardware, found: Fit, *, source: str
) -> tuple[Hardware, tuple[Estimated, ...]]:
    """The hardware with the constants that the runs told something about, and those constants."""
    learnt = tuple(one for one in found.estimated(hardware.name) if one.sd < _LEARNT * one.prior_sd)
    also = {one.name: (one.name, *one.also) for one in found.free}
    new: list[Constant] = []
    for one in learnt:
        said = f"fit of {found.runs} runs, {source}, +-{100 * one.sd:.0f} %"
        value = Sourced(value=one.value, kind=SourceKind.FITTED, source=said)
        new += [Constant(name=name, value=value) for name in also[one.name]]
    names = {constant.name for constant in new}
    kept = [constant for constant in hardware.constants if constant.name not in names]
    return replace(hardware, constants=(*kept, *new)), learnt


def elsewhere(row: Measured, hardware: Hardware) -> bool:
    """Whether a row was measured on another part, or another machine, than `hardware`."""
    same = row.hardware.name == hardware.name
    return not same and not (
        hardware.fingerprint and row.hardware.fingerprint == hardware.fingerprint
    )


def next_run(
    found: Fit,
    rows: Sequence[Measured],
    hardware: Hardware,
    *,
    runs: Callable[[Measured, Layout], bool] = lambda _row, _layout: True,
) -> NextRun | None:
    """Of one-step changes to the measured layouts that the software `runs`, the one whose time is
    least certain and that does not run out of memory: measuring it narrows the constants most (a
    run tells log(1 + spread^2 / NOISE^2) / 2)."""
    seen = {layout_text(row.layout) for row in rows}
    tried: list[tuple[float, Measured, Layout, Hardware]] = []
    bases = {layout_text(row.layout): row for row in rows}
    for row in list(bases.values())[:_BASES]:
        on = replace(hardware, count=row.hardware.count)
        for layout in _changes(row.layout):
            if (
                layout_text(layout) in seen
                or illegal(row.model, row.workload, layout)
                or not runs(row, layout)
            ):
                continue
            seen.add(layout_text(layout))
            run = Run(
                id="",
                prepared=Prepared(row.model, row.workload, on, layout),
                hardware=on,
                measured_s=1.0,
            )
            tried.append((found.spread(run), row, layout, on))
    for spread, row, layout, on in sorted(tried, key=lambda one: -one[0]):
        if estimate(row.model, row.workload, on, layout).verdict is Verdict.OOM:
            continue
        run = Run(
            id="",
            prepared=Prepared(row.model, row.workload, on, layout),
            hardware=on,
            measured_s=1.0,
        )
        after = {one.name: one.sd for one in found.after(run, on.name)}
        most = min(found.estimated(on.name), key=lambda one: after[one.name] / one.sd)
        return NextRun(
            model=row.model.name,
            layout=layout_text(layout),
            spread=spread,
            constant=most.name,
            sd=most.sd,
            sd_after=after[most.name],
        )
    return None


def _changes(layout: Layout) -> Iterator[Layout]:
    """Layouts one decision away."""
    for axis in ("tp", "ep", "mbs"):
        for value in (2 * getattr(layout, axis), getattr(layout, axis) // 2):
            if value >= 1:
                sp = value > 1 if axis == "tp" else layout.sp
                yield replace(layout, **{axis: value}, sp=sp)
    if layout.vpp > 1:
        yield replace(layout, vpp=1, schedule=Schedule.ONE_F_ONE_B, stages="")
    if layout.ep > 1:
        for dispatcher in (Dispatcher.ALL_TO_ALL, Dispatcher.DEEPEP, Dispatcher.HYBRIDEP):
            yield replace(layout, dispatcher=dispatcher)
        yield replace(layout, overlap=tuple(sorted({*layout.overlap} ^ {Overlap.EP})))
    for recompute in ((), (Recompute.FULL,), (Recompute.LAYERNORM, Recompute.MOE_ACT)):
        yield replace(layout, recompute=recompute)
    for graphs in ((), (Graphs.ATTN, Graphs.MOE_PREPROCESS, Graphs.MOE_ROUTER)):
        yield replace(layout, graphs=graphs)
    both = (Overlap.GRAD, Overlap.PARAM)
    rest = tuple(one for one in layout.overlap if one not in both)
    yield replace(
        layout, overlap=rest if both[0] in layout.overlap else tuple(sorted((*rest, *both)))
    )


def enough(runs: Sequence[Run], *, where: str) -> None:
    """Raises BadInput when there are too few runs to fit."""
    if len(runs) < FEWEST:
        rule = f"has {len(runs)} rows that can be fitted on this hardware; a fit needs {FEWEST}"
        raise BadInput(Reason(field="table", value=where, rule=rule))


def errors(runs: Sequence[Run], predicted: Sequence[float]) -> tuple[float, ...]:
    """predicted / measured - 1."""
    measured = np.array([run.measured_s for run in runs])
    return tuple(float(one) for one in np.array(predicted) / measured - 1)
