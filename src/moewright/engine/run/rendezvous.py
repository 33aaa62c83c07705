"""How ranks that another program started come together: a roll call, so that who is missing or too
many is named."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch._C._distributed_c10d import (
    PrefixStore,
    Store,
    TCPStore,
)  # torch.distributed re-exports them, unseen
from torch.distributed import DistError, DistNetworkError, DistStoreError

from moewright.spec.errors import BadInput, Reason

_END = "end"  # of the roll call: "" once all are there, else why not
_LINGER_S = 0.5  # that rank 0 leaves its store open, for the others to read the end
_NAMED = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """Where ranks meet: `opens` it is this rank, `attempt` counts the restarts of the job there."""

    host: str
    port: int
    hosts_store: bool
    attempt: str


def open_rendezvous(
    rendezvous: Rendezvous, *, rank: int, world_size: int, timeout_s: float
) -> Store:
    """The store that all ranks share, once each of them has come.

    All ranks raise the same BadInput where two came as one rank or with different world sizes, and
    the same TimeoutError, which names those that are missing, `patience_s` after the first of them
    came.
    """
    deadline_s = time.monotonic() + timeout_s
    store = PrefixStore(f"moewright/{rendezvous.attempt}", _open_store(rendezvous, timeout_s))
    refused = _sign_in(store, rank, world_size)
    if refused is not None:
        store.set(_END, json.dumps({"refused": asdict(refused)}))
    try:
        store.wait([_END], timedelta(seconds=max(0.001, deadline_s - time.monotonic())))
    except DistStoreError:
        store.set(
            _END,
            json.dumps({"missing": _describe_missing(store, rendezvous, world_size, timeout_s)}),
        )
    except DistError as error:
        raise TimeoutError(
            f"rank 0 left {rendezvous.host}:{rendezvous.port} before all ranks had come"
        ) from error
    end = store.get(_END)
    if not end:
        return store
    if rendezvous.hosts_store:
        time.sleep(_LINGER_S)
    said = json.loads(end)
    if "refused" in said:
        raise BadInput(Reason(**said["refused"]))
    raise TimeoutError(said["missing"])


def _open_store(door: Rendezvous, patience_s: float) -> TCPStore:
    try:
        return TCPStore(
            door.host,
            door.port,
            is_master=door.hosts_store,
            timeout=timedelta(seconds=patience_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except DistNetworkError as error:
        if "EADDRINUSE" in str(error):
            rule = "is in use, by another job or by another process that was started as rank 0"
            field, value = "MASTER_PORT", str(door.port)
            raise BadInput(
                Reason(field=field, value=value, rule=rule, nearest="a free port")
            ) from error
        if door.hosts_store:
            raise
        where = f"{door.host}:{door.port}"
        raise TimeoutError(
            f"rank 0 could not be reached at {where} within {patience_s:.0f} s"
        ) from error


def _sign_in(store: Store, rank: int, world: int) -> Reason | None:
    """Say that this rank is here; the last one ends the roll call. A Reason where it must not
    be."""
    mine = f"{world} {rank}"
    first = store.compare_set("world", "", mine).decode()
    theirs, other = first.split()
    if theirs != str(world):
        rule = f"rank {rank} was started with it, rank {other} with {theirs}"
        return Reason(field="WORLD_SIZE", value=str(world), rule=rule, nearest=theirs)
    if store.add(_rank_key(rank), 1) > 1:
        rule = "two processes were started with it"
        return Reason(
            field="RANK", value=str(rank), rule=rule, nearest=f"each of 0..{world - 1} once"
        )
    if store.add("count", 1) == world:
        store.set(_END, "")
    return None


def _describe_missing(store: Store, door: Rendezvous, world: int, patience_s: float) -> str:
    absent = [str(rank) for rank in range(world) if not store.check([_rank_key(rank)])]
    more = f" and {len(absent) - _NAMED} more" if len(absent) > _NAMED else ""
    who = ("ranks " if len(absent) > 1 else "rank ") + ", ".join(absent[:_NAMED]) + more
    return f"{who} of {world} did not come to {door.host}:{door.port} within {patience_s:.0f} s"


def _rank_key(rank: int) -> str:
    return f"rank {rank}"
