"""The roll call by which ranks that another program started meet.

It names the ranks that are missing, or that came twice.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed import DistError, DistNetworkError, DistStoreError

from moewright.engine.torch_private import PrefixStore, Store, TCPStore
from moewright.spec.errors import BadInput, Reason

# The key that ends the roll call: "" once all ranks are there, else JSON that says why not.
_END = "end"
# Time that rank 0 leaves its store open for the others to read the end.
_LINGER_S = 0.5
_MAX_NAMED_RANKS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """The address where ranks meet.

    `hosts_store`: this rank opens the store there. `attempt` counts the restarts of the job.
    """

    host: str
    port: int
    hosts_store: bool
    attempt: str

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


def open_rendezvous(
    rendezvous: Rendezvous, *, rank: int, world_size: int, timeout_s: float
) -> Store:
    """Return the store that all ranks share, once each of them has come.

    Raises:
        BadInput: the same on all ranks, where two came as one rank or with different world sizes.
        TimeoutError: the same on all ranks, `timeout_s` after the first of them came; it names
            those that are missing.
    """
    deadline_s = time.monotonic() + timeout_s
    # By the attempt: ranks that are started again over one store are counted anew.
    store = PrefixStore(f"moewright/{rendezvous.attempt}", _open_store(rendezvous, timeout_s))
    refusal = _sign_in(store, rank, world_size)
    if refusal is not None:
        store.set(_END, json.dumps({"refused": asdict(refusal)}))
    try:
        store.wait([_END], timedelta(seconds=max(0.001, deadline_s - time.monotonic())))
    except DistStoreError:
        missing = _describe_missing(store, rendezvous, world_size, timeout_s)
        store.set(_END, json.dumps({"missing": missing}))
    except DistError as error:
        raise TimeoutError(f"rank 0 left {rendezvous.address} before all ranks had come") from error
    end = store.get(_END)
    if not end:
        return store
    if rendezvous.hosts_store:
        time.sleep(_LINGER_S)
    message = json.loads(end)
    if "refused" in message:
        raise BadInput(Reason(**message["refused"]))
    raise TimeoutError(message["missing"])


def _open_store(rendezvous: Rendezvous, timeout_s: float) -> TCPStore:
    try:
        return TCPStore(
            rendezvous.host,
            rendezvous.port,
            is_master=rendezvous.hosts_store,
            timeout=timedelta(seconds=timeout_s),
            # The roll call says who is missing; torch's own wait only that somebody is.
            wait_for_workers=False,
            multi_tenant=True,
        )
    except DistNetworkError as error:
        if "EADDRINUSE" in str(error):
            reason = Reason(
                field="MASTER_PORT",
                value=str(rendezvous.port),
                rule="is in use, by another job or by another process that was started as rank 0",
                nearest="a free port",
            )
            raise BadInput(reason) from error
        if rendezvous.hosts_store:
            raise
        raise TimeoutError(
            f"rank 0 could not be reached at {rendezvous.address} within {timeout_s:.0f} s"
        ) from error


def _sign_in(store: Store, rank: int, world_size: int) -> Reason | None:
    """Tell the store that this rank is here; the last one ends the roll call.

    Returns a Reason where this rank must not be here.
    """
    own_entry = f"{world_size} {rank}"
    first_entry = store.compare_set("world", "", own_entry).decode()
    first_world_size, first_rank = first_entry.split()
    if first_world_size != str(world_size):
        rule = f"rank {rank} was started with it, rank {first_rank} with {first_world_size}"
        return Reason(
            field="WORLD_SIZE", value=str(world_size), rule=rule, nearest=first_world_size
        )
    if store.add(_rank_key(rank), 1) > 1:
        rule = "two processes were started with it"
        nearest = f"each of 0..{world_size - 1} once"
        return Reason(field="RANK", value=str(rank), rule=rule, nearest=nearest)
    if store.add("count", 1) == world_size:
        store.set(_END, "")
    return None


def _describe_missing(
    store: Store, rendezvous: Rendezvous, world_size: int, timeout_s: float
) -> str:
    missing = [str(rank) for rank in range(world_size) if not store.check([_rank_key(rank)])]
    names = ", ".join(missing[:_MAX_NAMED_RANKS])
    if len(missing) > _MAX_NAMED_RANKS:
        names += f" and {len(missing) - _MAX_NAMED_RANKS} more"
    noun = "ranks" if len(missing) > 1 else "rank"
    return (
        f"{noun} {names} of {world_size} did not come to {rendezvous.address} "
        f"within {timeout_s:.0f} s"
    )


def _rank_key(rank: int) -> str:
    return f"rank {rank}"
