"""Finding: which wall holds a run back, the evidence, and what to change next."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Wall(StrEnum):
    MEMORY = "memory"
    COMMUNICATION = "communication"
    HOST = "host"
    COMPUTE = "compute"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """`share` is the part of the step (or of the device's memory) behind the finding; fixes come in order of gain."""

    wall: Wall
    title: str
    share: float
    evidence: tuple[str, ...]
    fixes: tuple[str, ...]
