"""The cells of the fault matrix: fault, layout, moment, launcher, and what the run keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

STEPS = 16
SAVE_EVERY = 4

LAYOUTS = (
    (2, "ep2,mbs1"),
    (2, "tp2,mbs2"),
    (2, "pp2,mbs1,layout='Et*2|tL'"),
    (2, "cp2,mbs2"),
    (2, "mbs1,zero1,overlap=grad+param"),
    (2, "mbs1,zero2"),
    (2, "mbs1,zero3"),
    (4, "tp2,ep4,mbs2"),
    (4, "pp2,ep2,mbs1,layout='Et*2|tL'"),
)


class Moment(StrEnum):
    """When a fault comes."""

    START = "start"  # as soon as the ranks are there
    RESTORE = "restore"  # the same, of a run that goes on from a checkpoint
    FIRST_STEP = "first step"
    STEP = "step"
    SAVE = "save"
    LAST_STEP = "last step"
    END = "after the last step"


class Launcher(StrEnum):
    """Who starts the ranks."""

    OWN = "own"
    TORCHRUN = "torchrun"


class Copies(StrEnum):
    """Where checkpoints are copied to."""

    NONE = "no copies"
    FOLDER = "copies in a folder"
    BUCKET = "copies in a bucket"


@dataclass(frozen=True, kw_only=True, slots=True)
class Try:
    """A cell of the matrix; ranks keep copies for each other every `peer_every` steps, 0: never."""

    fault: str
    layout: str
    world_size: int
    moment: Moment
    launcher: Launcher
    is_elastic: bool
    copies: Copies
    peer_every: int = 0

    def __str__(self) -> str:
        options = [f"by {self.launcher}", str(self.copies)]
        options += ["elastic"] * self.is_elastic
        options += [f"in place every {self.peer_every}"] * (self.peer_every > 0)
        return f"{self.fault} at {self.moment}, {self.layout}, {', '.join(options)}"


def parse_try(data: Mapping[str, Any]) -> Try:
    """Read a cell as a log holds it."""
    kinds = {"moment": Moment, "launcher": Launcher, "copies": Copies}
    return Try(**{key: kinds[key](value) if key in kinds else value for key, value in data.items()})
