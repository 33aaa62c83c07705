"""What the launcher sees of its ranks: who failed, who hangs, and what each of them did last."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from moewright.engine.run.worker import (
    STACK_SIGNAL,
    Beat,
    ExitCode,
    FailureKind,
    RankFailure,
    RankInfo,
    StopFlag,
    rank_file_path,
    read_beats,
    receive_failure,
)
from moewright.spec.run import IncidentKind
from moewright.spec.units import mention

_POLL_S = 0.2  # how late a hang is noticed
# The most that one round of a watch counts as time in which ranks were silent.
_MOST_ROUND_S = 2.0
# Time to wait for the cause of the first failure, when that failure is only a consequence.
_SETTLE_S = 0.7
# Time past the collective timeout, so that a rank that times out can report that itself.
_HANG_MARGIN_S = 3.0
# Time for ranks that hang to write their stacks.
_STACK_S = 0.3


class WatchedTime:
    """The time in which a watch ran.

    A machine that sleeps, a virtual machine that is paused or a job that is suspended stops the
    watch with its ranks: that they were silent meanwhile says nothing.
    """

    def __init__(self) -> None:
        self.started_s = time.monotonic()
        self._looked_s = self.started_s
        self._pauses: list[tuple[float, float]] = []  # the end of each, and its length

    def look(self) -> None:
        """Begin another round of the watch."""
        now_s = time.monotonic()
        paused_s = now_s - self._looked_s - _MOST_ROUND_S
        if paused_s > 0.0:
            self._pauses.append((now_s, paused_s))
        self._looked_s = now_s

    def since(self, time_s: float) -> float:
        """Return how long ago that was, less the pauses since."""
        paused_s = sum(length_s for end_s, length_s in self._pauses if end_s > time_s)
        return time.monotonic() - time_s - paused_s


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchedRank:
    """A rank on this machine, with the folder of the files over which it tells of itself."""

    info: RankInfo
    folder: Path
    pid: int

    def note_path(self, kind: str) -> Path:
        """Return the rank's file of a kind (see rank_file_path)."""
        return rank_file_path(self.folder, kind, self.info.rank)

    def beats(self) -> list[Beat]:
        """Return the last heartbeats, the oldest first; none before the first."""
        return read_beats(self.note_path("beat"))

    def last_step(self) -> int:
        """Return the step of the last heartbeat; 0 before the first step."""
        beats = self.beats()
        return beats[-1].step if beats else 0

    def silence_s(self, watched: WatchedTime) -> float:
        """Return the watched time since the last heartbeat, or since the start."""
        beats = self.beats()
        return watched.since(beats[-1].time_s if beats else watched.started_s)

    def is_waiting(self) -> bool:
        """Tell whether the last thing that the rank began was to wait for others."""
        beats = self.beats()
        return bool(beats) and beats[-1].is_waiting

    def activity(self) -> str:
        """Return what the rank began last; nothing before its first heartbeat."""
        beats = self.beats()
        return beats[-1].activity if beats else ""

    def patience_s(self) -> float:
        """Return how long the rank may be silent before it is taken to hang.

        Nothing that takes long at a start keeps a suspended process silent.
        """
        timeouts = self.info.timeouts
        patience_s = timeouts.hang_s or timeouts.collective_s
        beats = self.beats()
        if self.is_suspended():
            return patience_s + _HANG_MARGIN_S
        if not beats:
            patience_s = timeouts.rendezvous_s
        elif beats[-1].is_slow:
            patience_s = max(patience_s, timeouts.collective_s)
        elif beats[-1].steps_begun == 0:
            patience_s = max(patience_s, timeouts.start_s)
        elif beats[-1].steps_begun == 1:
            patience_s = max(patience_s, timeouts.first_step_s)
        return patience_s + _HANG_MARGIN_S

    def is_suspended(self) -> bool:
        """Tell whether Linux reports that the process is stopped (state T)."""
        return read_process_stat(self.pid)[:1] == ["T"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankProcess(WatchedRank):
    """A rank that this process has started, with pipes for its failure and for calls."""

    process: BaseProcess
    notes: Connection
    calls: Connection

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return self.process.exitcode is None

    @property
    def has_failed(self) -> bool:
        """Whether the process has ended, and neither done nor stopped as agreed."""
        return self.process.exitcode not in (None, ExitCode.DONE, ExitCode.STOPPED)


def read_process_stat(pid: int) -> list[str]:
    """Return the fields of Linux's stat line of a process from its state on; [] without one.

    The state follows the last ")", for a name may hold any other.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return stat.rpartition(")")[2].split()


def watch_ranks(
    ranks: Sequence[RankProcess],
    stop: StopFlag,
    wants_stop: Callable[[bool], bool],
    refresh: Callable[[], None] = lambda: None,
) -> RankFailure | None:
    """Wait until all ranks are done, or one has failed or hangs; return that rank's failure.

    They are asked to stop when the user asks for it, or `wants_stop` does, which is told of that.
    `refresh` is called several times a second.
    """
    watched = WatchedTime()
    has_forwarded_stop = False
    while live := [rank for rank in ranks if rank.is_alive]:
        # In this order: it is told of a user's stop in any case.
        should_stop = wants_stop(stop.requested) or stop.requested
        if should_stop and not has_forwarded_stop:
            send_signal(live, signal.SIGTERM)
            has_forwarded_stop = True
        refresh()
        wait([rank.process.sentinel for rank in live], timeout=_POLL_S)
        watched.look()
        if any(rank.has_failed for rank in ranks):
            break
        silent = [rank for rank in live if rank.silence_s(watched) > rank.patience_s()]
        # Who waits for others may wait for as long as they show life.
        is_hang = any(not rank.is_waiting() or rank.is_suspended() for rank in silent)
        # All wait for others: none would ever go on.
        if is_hang or len(silent) == len(live):
            return blame_hanging_rank(live, watched, live[0].folder.parent)
    return _find_first_failure(ranks, watched)


def _find_first_failure(ranks: Sequence[RankProcess], watched: WatchedTime) -> RankFailure | None:
    """Return the failure to blame, once ranks have had time to settle; None when none failed."""
    deadline_s = time.monotonic() + _SETTLE_S
    failures: dict[int, RankFailure] = {}
    while True:
        for rank in ranks:
            if rank.has_failed and rank.info.rank not in failures:
                failures[rank.info.rank] = _describe_failure(rank)
        live = [rank for rank in ranks if rank.is_alive]
        first = min(
            failures.values(), key=lambda failure: (failure.kind, failure.time_s), default=None
        )
        if first is None or first.kind is FailureKind.CAUSE or not live:
            return first
        if time.monotonic() > deadline_s:
            # No rank has ended of itself, so that the lost peer still lives.
            if first.kind is FailureKind.PEER_LOST:
                return blame_hanging_rank(live, watched, live[0].folder.parent)
            return first
        wait([rank.process.sentinel for rank in live], timeout=_POLL_S)


def _describe_failure(rank: RankProcess) -> RankFailure:
    """Return what a failed rank noted itself, else what its exit code says."""
    note = receive_failure(rank.notes)
    if note is not None:
        return note
    code = rank.process.exitcode or 0
    kind = FailureKind.CAUSE
    event = f"exited with code {code}"
    # multiprocessing gives the number of the signal that ended a process, negative.
    if code < 0:
        killer = -code
        # Of real-time signals only the first and the last have names.
        names = {member.value: member.name for member in signal.Signals}
        event = f"was killed by {names.get(killer, f'signal {killer}')}"
        if killer == signal.SIGABRT:
            kind = FailureKind.ABORT
    return RankFailure(
        rank=rank.info.rank,
        step=rank.last_step(),
        time_s=time.monotonic(),
        kind=kind,
        event=event,
    )


def blame_hanging_rank(
    live: Sequence[WatchedRank], watched: WatchedTime, run_dir: Path
) -> RankFailure:
    """Blame one of the ranks that still live.

    That is a suspended one, else one that never came to meet the others, else one that does not
    wait for others, else the one that has been silent for longest. What every rank did last, and
    its stack, go to the flight record in the folder of the run.
    """

    def suspicion(rank: WatchedRank) -> tuple[bool, bool, bool, float]:
        has_met = rank.note_path("met").exists()
        return rank.is_suspended(), not has_met, not rank.is_waiting(), rank.silence_s(watched)

    rank = max(live, key=suspicion)
    cause = "the others wait for it" if rank.info.world_size > 1 else "it shows no life"
    if rank.is_suspended():
        cause = "it is suspended (SIGSTOP)"
    silence_s = rank.silence_s(watched)
    activity = mention(" in: {}", rank.activity())
    record = write_flight_record(live, run_dir)
    return RankFailure(
        rank=rank.info.rank,
        step=rank.last_step(),
        time_s=time.monotonic(),
        kind=FailureKind.CAUSE,
        cause=IncidentKind.HANG,
        event="stopped answering",
        error=f"{cause}, silent for {silence_s:.0f} s{activity}",
        detail=record,
    )


def write_flight_record(ranks: Sequence[WatchedRank], run_dir: Path, part: str = "") -> str:
    """Write what each rank did last, and its stack, and return the stacks as text.

    `part` names the file of a machine, where there are several.
    """
    for rank in ranks:
        # A suspended process takes no signal until it goes on.
        if not rank.is_suspended():
            with suppress(ProcessLookupError):
                os.kill(rank.pid, STACK_SIGNAL)
    time.sleep(_STACK_S)
    now_s = time.monotonic()
    record = []
    text = ""
    for rank in ranks:
        stack = ""
        with suppress(OSError):
            stack = rank.note_path("stack").read_text("utf-8", errors="replace")
        beats = [
            {
                "age_s": round(now_s - beat.time_s, 3),
                "step": beat.step,
                "activity": beat.activity,
                "is_waiting": beat.is_waiting,
            }
            for beat in rank.beats()
        ]
        record.append({"rank": rank.info.rank, "beats": beats, "stack": stack})
        text += f"rank {rank.info.rank}, {rank.activity()}:\n{stack}"
    path = run_dir / f"flight_record{part}.json"
    with suppress(OSError):
        path.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    return f"{text}flight record: {path}\n"


def send_signal(ranks: Sequence[RankProcess], number: signal.Signals) -> None:
    """Send a signal to the ranks that live."""
    for rank in ranks:
        if rank.is_alive:
            # Its pid is no other's: it has not been waited for.
            os.kill(rank.pid, number)
