"""Ranks that another program started: they meet, or each says which are missing, and ends."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moewright.engine.comm import collectives
from moewright.engine.run.launch import launch
from moewright.engine.run.worker import ExitCode, RankContext, RankOutcome, Timeouts
from moewright.spec.errors import BadInput

pytestmark = [pytest.mark.spawn, pytest.mark.waits]
_TIMEOUT_S = 1.0


def sum_ranks(context: RankContext) -> RankOutcome:
    collectives.join_world(
        rank=context.rank,
        world_size=context.world_size,
        store=context.open_store(),
        backend="gloo",
        timeout_s=10.0,
    )
    total = torch.tensor(1 << context.rank)
    dist.all_reduce(total)
    assert int(total) == (1 << context.world_size) - 1
    return RankOutcome.DONE


def run_rank(folder: Path, number: int, rank: int, world: int, port: int) -> None:
    """Run a rank in a process with torchrun's variables, as the command line would."""
    variables = {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": rank,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({key: str(value) for key, value in variables.items()})
    sys.stderr = (folder / f"err{number}").open("w", buffering=1)
    timeouts = Timeouts(rendezvous_s=_TIMEOUT_S, collective_s=10.0)
    code = ExitCode.BAD_INPUT
    try:
        code = launch(sum_ranks, nproc=world, run_dir=folder / f"run{number}", timeouts=timeouts)
    except BadInput as refused:
        print(refused, file=sys.stderr)
    os._exit(code)


@pytest.mark.parametrize(
    ("started", "code", "message"),
    [
        (((0, 2), (1, 2)), ExitCode.DONE, ""),
        (
            ((0, 4), (2, 4)),
            ExitCode.RANK_FAILED,
            "TimeoutError: ranks 1, 3 of 4 did not come to 127.0.0.1:{port} within 1 s",
        ),
        (
            ((1, 2),),
            ExitCode.RANK_FAILED,
            "TimeoutError: rank 0 could not be reached at 127.0.0.1:{port} within 1 s",
        ),
        (
            ((0, 3), (1, 3), (1, 3)),
            ExitCode.BAD_INPUT,
            "RANK=1: two processes were started with it",
        ),
        (((0, 2), (1, 3)), ExitCode.BAD_INPUT, "WORLD_SIZE="),
        (
            ((0, 2),),
            ExitCode.BAD_INPUT,
            "MASTER_PORT={port}: is in use, by another job or by another process",
        ),
    ],
    ids=["all", "two missing", "the first missing", "one twice", "two worlds", "port in use"],
)
def test_every_rank_ends_in_time_and_says_why(
    started: tuple[tuple[int, int], ...], code: ExitCode, message: str, tmp_path: Path
) -> None:
    """`started` has the rank and the world size of each process."""
    fork = multiprocessing.get_context("fork")
    with socket.socket() as port_holder:
        port_holder.bind(("127.0.0.1", 0))
        port = port_holder.getsockname()[1]
        if "MASTER_PORT" in message:
            port_holder.listen()
        else:
            port_holder.close()
        began_s = time.monotonic()
        processes = [
            fork.Process(target=run_rank, args=(tmp_path, number, rank, world, port))
            for number, (rank, world) in enumerate(started)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(_TIMEOUT_S + 5)
        assert time.monotonic() - began_s < _TIMEOUT_S + 5
    assert [process.exitcode for process in processes] == [code] * len(processes)
    for number in range(len(processes)):
        text = (tmp_path / f"err{number}").read_text()
        assert message.format(port=port) in text.partition("\n")[0], text
