"""A number and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class SourceKind(StrEnum):
    """How far a number may be trusted, best first."""

    MEASURED = "measured"
    FITTED = "fitted"
    DATASHEET = "datasheet"
    ASSUMED = "assumed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sourced:
    """A value in SI units, the kind of evidence for it, and the evidence itself in words."""

    value: float
    kind: SourceKind
    source: str
