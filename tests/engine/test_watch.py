"""The patience with a rank, by what it does and by what Linux says of its process."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from moewright.codec import read_json_data, write_text
from moewright.codec.run_files import MERGED_TRACE_FILE, TRACE_FOLDER
from moewright.engine.observe.profile import merge_traces
from moewright.engine.run.watch import WatchedRank, read_process_stat
from moewright.engine.run.worker import Heartbeat, RankInfo, Timeouts, rank_file_path
from moewright.spec.hardware import DeviceKind

TIMEOUTS = Timeouts(rendezvous_s=60.0, hang_s=2.0, start_s=120.0, first_step_s=30.0)
MARGIN_S = 3.0


def watch_rank(folder: Path, pid: int) -> WatchedRank:
    info = RankInfo(
        rank=0,
        local_rank=0,
        world_size=2,
        timeouts=TIMEOUTS,
        device=DeviceKind.CPU,
        rendezvous=folder,
    )
    return WatchedRank(info=info, folder=folder, pid=pid)


def test_a_trace_may_be_written_for_as_long_as_others_wait(tmp_path: Path) -> None:
    heartbeat = Heartbeat(rank_file_path(tmp_path, "beat", 0))
    rank = watch_rank(tmp_path, os.getpid())
    heartbeat.beat(1)
    heartbeat.beat(2)
    assert rank.patience_s() == TIMEOUTS.hang_s + MARGIN_S
    heartbeat.note("writes its trace", is_slow=True)
    assert rank.patience_s() == TIMEOUTS.collective_s + MARGIN_S
    heartbeat.beat(3)
    assert rank.patience_s() == TIMEOUTS.hang_s + MARGIN_S


def test_traces_may_be_merged_for_as_long_as_others_wait(tmp_path: Path) -> None:
    heartbeat = Heartbeat(rank_file_path(tmp_path, "beat", 0))
    rank = watch_rank(tmp_path, os.getpid())
    heartbeat.beat(1)
    heartbeat.beat(2)
    merge_traces(tmp_path, heartbeat.note)  # there are none
    assert rank.patience_s() == TIMEOUTS.hang_s + MARGIN_S
    write_text(tmp_path / TRACE_FOLDER / "rank00000.json", '{"traceEvents": [{"name": "a"}]}')
    merge_traces(tmp_path, heartbeat.note)
    assert rank.patience_s() == TIMEOUTS.collective_s + MARGIN_S
    assert read_json_data(tmp_path / MERGED_TRACE_FILE)["traceEvents"] == [{"name": "a"}]


@pytest.mark.parametrize("kind", ["before the first beat", "at a start"])
def test_a_suspended_process_is_given_no_time_to_start(kind: str, tmp_path: Path) -> None:
    """It may be a spare that is asked to take a place, or one that stays while others recover."""
    if kind == "at a start":
        Heartbeat(rank_file_path(tmp_path, "beat", 0)).beat(0)
    with subprocess.Popen(["sleep", "60"]) as process:
        rank = watch_rank(tmp_path, process.pid)
        longest_s = TIMEOUTS.start_s if kind == "at a start" else TIMEOUTS.rendezvous_s
        assert rank.patience_s() == longest_s + MARGIN_S
        process.send_signal(signal.SIGSTOP)
        while read_process_stat(process.pid)[0] != "T":
            time.sleep(0.01)
        assert rank.patience_s() == TIMEOUTS.hang_s + MARGIN_S
        process.kill()
