"""The one place of the engine that reads the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass

from moewright.spec.errors import BadInput, Reason

MAX_WORLD, MAX_PORT = 1_000_000, 65535
_KEYS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchrunEnv:
    """This process as torchrun started it; the rendezvous is "env://". `local_world` is 0 where nobody said."""

    rank: int
    world: int
    local_rank: int
    local_world: int = 0


def torchrun() -> TorchrunEnv | None:
    """The rank that torchrun made of this process, or None. Raises BadInput when only some variables are there."""
    given = {key: os.environ[key] for key in _KEYS if key in os.environ}
    if "RANK" not in given or "WORLD_SIZE" not in given:
        return None
    for key in _KEYS:
        if key not in given:
            raise BadInput(
                Reason(field=key, rule="is not set, but RANK and WORLD_SIZE are", nearest="start by torchrun")
            )
    numbers = {key: _whole(key, given[key]) for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    local_world = _whole("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "0"))
    # Port 0 lets the system choose, which a world of one may.
    for key, low, high in (("WORLD_SIZE", 1, MAX_WORLD), ("MASTER_PORT", 0, MAX_PORT)):
        if not low <= numbers[key] <= high:
            close = str(min(max(numbers[key], low), high))
            raise BadInput(Reason(field=key, value=given[key][:60], rule=f"must be in {low}..{high}", nearest=close))
    if numbers["RANK"] >= numbers["WORLD_SIZE"]:
        raise BadInput(
            Reason(
                field="RANK",
                value=given["RANK"],
                rule=f"must be below WORLD_SIZE={given['WORLD_SIZE']}",
                nearest=str(numbers["WORLD_SIZE"] - 1),
            )
        )
    return TorchrunEnv(
        rank=numbers["RANK"], world=numbers["WORLD_SIZE"], local_rank=numbers["LOCAL_RANK"], local_world=local_world
    )


def _whole(key: str, text: str) -> int:
    if not text.isdecimal():
        close = "29500" if key == "MASTER_PORT" else "0"
        raise BadInput(Reason(field=key, value=text[:60], rule="must be a whole number", nearest=close))
    return int(text)
