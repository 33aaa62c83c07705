"""A run by the command line, and what can be seen of it from outside.

Commands run in processes that a server forks, which has imported what they import: a start takes
a part of a second. What torchrun starts, and what needs the loader of the system, is executed.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from torch.distributed import run as torchrun

from faults.bucket import Bucket
from faults.cells import Launcher, Try
from moewright.cli.main import run
from moewright.engine.optim.distributed_optimizer import DistributedOptimizer

PATIENCE_S = 240.0
_POLL_S = 0.003
_BIN = Path(sys.executable).parent
_CLONE_NEWNET = 0x40000000
_COMMANDS = {"moewright": run, "torchrun": torchrun.main}
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    [
        "moewright.api.diagnosing",
        "moewright.api.training",
        "moewright.cli.verbs",
        "moewright.engine.run.supervise",
        "moewright.studio.app",
        # What ranks import later.
        "torch._dynamo",
        "tensorboard.compat.proto.event_pb2",
        "tensorboard.summary.writer.record_writer",
        "torch.distributed.run",
    ]
)


class Surroundings(Enum):
    """What a run has of its own, so that it can be taken away, or looked into."""

    PLAIN = auto()
    DISK = auto()  # a small file system
    NETWORK = auto()  # of the kernel, with a loopback device
    ADDRESSES = auto()  # each rank writes down where its state lies; checked after each step


def start_command(
    words: Sequence[str],
    output: Path,
    *,
    environment: Mapping[str, str] | None = None,
    surroundings: Surroundings = Surroundings.PLAIN,
) -> BaseProcess:
    """Start a command in a session of its own; what it prints is added to `output`."""
    process = _SERVER.Process(
        target=_run_command, args=(tuple(words), output, dict(environment or {}), surroundings)
    )
    process.start()
    return process


def run_command(words: Sequence[str], output: Path) -> tuple[int, str]:
    """Run a command; return its exit code and what it printed."""
    output.unlink(missing_ok=True)
    process = start_command(words, output)
    process.join(PATIENCE_S)
    end_process(process)
    assert process.exitcode is not None
    return process.exitcode, read_output(output)


def end_process(process: BaseProcess) -> None:
    """Leave no process of a command's session behind."""
    assert process.pid is not None
    if process.exitcode is None:
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                kill(process.pid, signal.SIGKILL)
        process.join()


def read_output(path: Path) -> str:
    """Return what was printed so far."""
    return path.read_text("utf-8", "replace") if path.exists() else ""


def read_end(path: Path) -> str:
    """Return the last lines that were printed, as one."""
    return " / ".join(read_output(path).splitlines()[-3:])[:400]


def list_children(pid: int) -> list[int]:
    """List the processes that a process has started and that live, the oldest first."""
    children = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += [int(word) for word in task.read_text().split()]
    return sorted(child for child in children if not _has_ended(child))


def _has_ended(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


@dataclass(kw_only=True, slots=True)
class Program:
    """A run by the command line, in a folder of its own; `beside` has others in the same folder."""

    cell: Try
    plan: Path
    folder: Path
    surroundings: Surroundings = Surroundings.PLAIN
    bucket: Bucket | None = None
    environment: dict[str, str] = field(default_factory=dict)
    processes: list[BaseProcess] = field(default_factory=list)
    beside: list[BaseProcess] = field(default_factory=list)
    groups: list[Path] = field(default_factory=list)  # control groups of the kernel
    injected_s: float = 0.0

    @property
    def words(self) -> list[str]:
        """The command."""
        arguments = ["train", str(self.plan), "--out", str(self.folder), "--supervise"]
        if self.cell.is_elastic:
            arguments += ["--min-ranks", "1"]
        if self.cell.launcher is Launcher.OWN:
            return ["moewright", *arguments]
        return [
            *("torchrun", "--standalone", "--max-restarts", "3"),
            *("--nproc-per-node", str(self.cell.world_size), "-m", "moewright", *arguments),
        ]

    @property
    def output(self) -> Path:
        return self.folder.with_suffix(".log")

    @property
    def process(self) -> BaseProcess:
        """The process of the command that was given last."""
        return self.processes[-1]

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def start(self) -> None:
        """Give the command."""
        self.processes.append(self._start(self.output))

    def start_beside(self) -> None:
        """Give the same command while the first may run."""
        self.beside.append(self._start(self.folder.with_suffix(".beside")))

    def _start(self, output: Path) -> BaseProcess:
        return start_command(
            self.words, output, environment=self.environment, surroundings=self.surroundings
        )

    def find_bucket(self) -> Bucket:
        """Return the bucket that the copies go to."""
        assert self.bucket is not None
        return self.bucket

    def list_ranks(self) -> list[int]:
        """Return the processes of the ranks; none until all are there.

        A spare process is the last that is started.
        """
        children = list_children(self.pid)
        size = self.cell.world_size
        return children[:size] if len(children) >= size else []

    def count_steps(self) -> int:
        """Count the steps that were recorded."""
        with contextlib.suppress(OSError):
            return (self.folder / "steps.jsonl").read_bytes().count(b'{"kind": "step"')
        return 0

    def wait_for(self, condition: Callable[[], object]) -> bool:
        """Wait for something; return whether it came before the run ended."""
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s and self.process.is_alive():
            if condition():
                return True
            time.sleep(_POLL_S)
        return False

    def wait(self) -> int | None:
        """Wait for the end of the command, and return its exit code; None where none comes."""
        self.process.join(PATIENCE_S)
        return self.process.exitcode

    def end(self) -> None:
        """Leave no process behind."""
        for process in (*self.processes, *self.beside):
            end_process(process)
        for group in self.groups:
            _remove_group(group)
        self.groups.clear()


def _remove_group(group: Path) -> None:
    """Remove a control group, once the kernel has let its last process go."""
    deadline_s = time.monotonic() + 5
    while True:
        try:
            group.rmdir()
            return
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)


def _run_command(
    words: tuple[str, ...],
    output: Path,
    environment: Mapping[str, str],
    surroundings: Surroundings,
) -> None:
    """Be the command, in a process that was forked for it."""
    os.setsid()
    stream = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for number in (1, 2):
        os.dup2(stream, number)
    os.close(stream)
    os.environ.update(environment)
    if surroundings is Surroundings.NETWORK:
        _enter_own_network()
    if "LD_PRELOAD" in environment:
        os.execv(_BIN / words[0], words)
    if surroundings is Surroundings.ADDRESSES:
        _note_addresses(output)
    sys.argv = list(words)
    sys.stdout = os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", buffering=1)
    _COMMANDS[words[0]]()


def _enter_own_network() -> None:
    """Move this process into a network of its own, with a loopback device that is up."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWNET)")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def addresses_path(output: Path, rank_pid: int) -> Path:
    """Return where a rank writes down where its state lies."""
    return output.with_suffix(f".addresses-{rank_pid}")


def _note_addresses(output: Path) -> None:
    """Have each rank write down where its state lies, for what flips a bit of it from outside."""
    reduce = DistributedOptimizer.reduce_gradients

    def note_and_reduce(self: DistributedOptimizer) -> torch.Tensor:
        bucket = self.buckets[0]
        segment = bucket.segments[0]
        tensors = {
            "weights": bucket.weights,
            "grads": bucket.grads,
            "master": segment.master,
            "exp_avg": segment.exp_avg.tensors[0],
            "exp_avg_sq": segment.exp_avg_sq.tensors[0],
        }
        text = " ".join(f"{name}={tensor.data_ptr()}" for name, tensor in tensors.items())
        addresses_path(output, os.getpid()).write_text(f"{text} bytes={segment.master.nbytes}")
        DistributedOptimizer.reduce_gradients = reduce  # type: ignore[method-assign]
        return reduce(self)

    DistributedOptimizer.reduce_gradients = note_and_reduce  # type: ignore[method-assign]
