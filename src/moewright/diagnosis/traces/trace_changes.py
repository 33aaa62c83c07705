"""Changes of a traced step: parts that are faster, graphs, overlap, degrees and schedules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from moewright.diagnosis.traces.capture import KernelKind
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import Schedule
from moewright.spec.names import closest_match

HOST = "host"
NETWORK = "network"
GRAPHS = "graphs"
OVERLAP = "overlap"
_SPEED = re.compile(r"(\d+(?:\.\d+)?|inf)x?")
# Other shapes, other orders of work inside a pass, other ranks: a trace does not hold them.
_UNCARRIED = ("tp", "pp", "vpp", "cp", "dp", "etp", "mbs", "zero", "recompute", "dispatcher")
_KINDS = tuple(kind.value for kind in KernelKind if kind is not KernelKind.COMMUNICATION)
_NAMES = (*_KINDS, NETWORK, HOST, GRAPHS, OVERLAP, "ep", "schedule")


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceChange:
    """A change of a traced step.

    `speeds` say how many times as fast a part is. `ep` is another degree of expert parallelism, 0
    for the same, and `schedule` another order of the pipeline's passes, "" for the same.
    """

    speeds: Mapping[str, float] = field(default_factory=dict)
    has_graphs: bool = False
    has_overlap: bool = False  # of the exchange of gradients, with the backward
    ep: int = 0
    schedule: str = ""

    @property
    def needs_job(self) -> bool:
        """Whether it changes what only a plan states."""
        return bool(self.ep or self.schedule)

    def title(self) -> str:
        """Return the change in words."""
        parts = [f"{name} {speed:g} x as fast" for name, speed in self.speeds.items()]
        if self.has_graphs:
            parts.append("steps replayed as graphs")
        if self.has_overlap:
            parts.append("gradients exchanged beside the backward")
        if self.ep:
            parts.append(f"ep{self.ep}")
        if self.schedule:
            parts.append(f"schedule {self.schedule}")
        return ", ".join(parts)


def parse_change(text: str) -> TraceChange:
    """Return the change that a text states: "gemm=2x,host=inf,graphs=on,ep=4,schedule=zb-h1".

    Raises:
        BadInput: it names what a trace does not hold, or no legal value.
    """
    speeds = {}
    values: dict[str, str] = {}
    for part in text.split(","):
        name, _, value = (side.strip() for side in part.partition("="))
        if name in _UNCARRIED:
            rule = "is not carried by a trace: other shapes, orders or ranks ran in it"
            nearest = "moewright plan, or a trace of such a run"
            raise BadInput(Reason(field=f"--what-if {name}", rule=rule, nearest=nearest))
        if name not in _NAMES:
            rule = f"must be one of {', '.join(_NAMES)}"
            nearest = closest_match(name, list(_NAMES))
            raise BadInput(Reason(field=f"--what-if {name[:40]}", rule=rule, nearest=nearest))
        if name in (*_KINDS, NETWORK, HOST):
            speeds[name] = _parse_speed(name, value)
        else:
            values[name] = value
    return TraceChange(
        speeds=speeds,
        has_graphs=_parse_switch(GRAPHS, values, "on"),
        has_overlap=_parse_switch(OVERLAP, values, "grad"),
        ep=_parse_degree(values),
        schedule=_parse_schedule(values),
    )


def _parse_speed(name: str, value: str) -> float:
    match = _SPEED.fullmatch(value)
    if match is None or not float(match[1]) > 0:
        rule = "must say how many times as fast it is"
        nearest = f"{name}=2x"
        raise BadInput(
            Reason(field=f"--what-if {name}", value=value[:40], rule=rule, nearest=nearest)
        )
    return float(match[1])


def _parse_switch(name: str, values: Mapping[str, str], legal: str) -> bool:
    if name not in values:
        return False
    if values[name] != legal:
        rule = f"must be {legal}: nothing else is carried by a trace"
        reason = Reason(
            field=f"--what-if {name}", value=values[name][:40], rule=rule, nearest=f"{name}={legal}"
        )
        raise BadInput(reason)
    return True


def _parse_degree(values: Mapping[str, str]) -> int:
    if "ep" not in values:
        return 0
    text = values["ep"]
    if not (text.isdecimal() and 0 < int(text) < 1 << 20):
        rule = "must be a degree of expert parallelism"
        raise BadInput(Reason(field="--what-if ep", value=text[:40], rule=rule, nearest="ep=4"))
    return int(text)


def _parse_schedule(values: Mapping[str, str]) -> str:
    if "schedule" not in values:
        return ""
    legal = [str(item.value) for item in Schedule]
    if values["schedule"] not in legal:
        rule = f"must be one of {', '.join(legal)}"
        nearest = closest_match(values["schedule"], legal)
        raise BadInput(
            Reason(
                field="--what-if schedule",
                value=values["schedule"][:40],
                rule=rule,
                nearest=nearest,
            )
        )
    return values["schedule"]
