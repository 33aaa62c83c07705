"""A supervised run of two ranks, in a process of its own, and what can be done to it."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import tiny_jobs
from moewright.engine.checkpoint import list_checkpoints
from moewright.engine.run.supervise import supervise
from moewright.spec.errors import BadInput
from moewright.spec.plan import Plan
from moewright.spec.workload import DataSpec

STEPS = 48
PATIENCE_S = 120.0
_CLONE_NEWNET = 0x40000000
_DISK_MIB = 24


class FaultNotPossible(Exception):
    """A fault that cannot be injected on this machine; the text says why."""


def build_plan(data: DataSpec) -> Plan:
    """Build a plan of two ranks that save every four steps, and are patient for two seconds."""
    workload = tiny_jobs.build_workload(data, steps=STEPS, hang_timeout_s=2.0)
    checkpoint = replace(workload.checkpoint, every_steps=4)
    return tiny_jobs.build_plan(replace(workload, checkpoint=checkpoint), "ep2,mbs1", world_size=2)


def list_children(pid: int) -> list[int]:
    """List the processes that a process has started and that live, the oldest first."""
    children = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == pid and fields[0] != "Z":
                    children.append(int(entry.name))
    return sorted(children)


class SupervisedRun:
    """A supervised run in its own process, in a folder that may be a file system of its own."""

    def __init__(self, plan: Plan, folder: Path, *, own_network: bool = False) -> None:
        self.plan = plan
        self.folder = folder
        self.log = folder.with_suffix(".log")
        self.injected_s = 0.0
        self._own_network = own_network
        self.process = self._start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def start_again(self) -> None:
        """Give the same command again."""
        self.process = self._start()

    def _start(self) -> BaseProcess:
        def run_job() -> None:
            with self.log.open("a", buffering=1) as stream:
                for number in (1, 2):
                    os.dup2(stream.fileno(), number)
            sys.stdout = os.fdopen(1, "w", buffering=1)
            sys.stderr = os.fdopen(2, "w", buffering=1)
            code = 2
            try:
                if self._own_network:
                    _enter_own_network()
                code = supervise(self.plan, self.folder)
            except BadInput as error:
                print(f"moewright: {error}", file=sys.stderr, flush=True)
            os._exit(code)

        process = multiprocessing.get_context("fork").Process(target=run_job)
        process.start()
        return process

    def ranks(self) -> list[int]:
        """Return the processes of the ranks, in their order, once both are there."""
        deadline_s = time.monotonic() + PATIENCE_S
        while len(ranks := list_children(self.pid)) < 2:
            assert time.monotonic() < deadline_s, "no ranks came"
            time.sleep(0.005)
        return ranks

    def count_steps(self) -> int:
        """Count the steps that were recorded."""
        with contextlib.suppress(OSError):
            return (self.folder / "steps.jsonl").read_bytes().count(b'{"kind": "step"')
        return 0

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        """Wait for something that must come before the run ends."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline_s, f"{what} did not come"
            assert self.process.is_alive(), f"the run ended before {what} came"
            time.sleep(0.002)

    def wait_for_moment(self, rng: random.Random) -> None:
        """Wait for a random moment in the first half of the run, after its first checkpoint."""
        step = rng.randint(5, STEPS // 2)
        self.wait_for(lambda: self.count_steps() >= step, f"step {step}")
        time.sleep(rng.uniform(0.0, 0.03))


def _enter_own_network() -> None:
    """Move this process into a network of its own, with a loopback device that is up."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWNET)")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


@contextlib.contextmanager
def own_disk(folder: Path) -> Iterator[None]:
    """Give a folder a small file system of its own."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={_DISK_MIB}m", "none", str(folder)]
    if subprocess.run(["mount", *options], capture_output=True, check=False).returncode != 0:
        raise FaultNotPossible("needs to mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def kill_rank(run: SupervisedRun, rng: random.Random) -> None:
    os.kill(rng.choice(run.ranks()), signal.SIGKILL)


def kill_all_ranks(run: SupervisedRun, rng: random.Random) -> None:
    for pid in run.ranks():
        os.kill(pid, signal.SIGKILL)


def kill_rank_in_save(run: SupervisedRun, rng: random.Random) -> None:
    folder = run.folder / "checkpoints"
    run.wait_for(lambda: any(folder.glob(".saving-*")), "a save")
    run.injected_s = time.time()
    kill_rank(run, rng)


def stop_rank(run: SupervisedRun, rng: random.Random) -> None:
    os.kill(rng.choice(run.ranks()), signal.SIGSTOP)


def slow_rank(run: SupervisedRun, rng: random.Random) -> None:
    rank = rng.choice(run.ranks())
    for _ in range(3):
        os.kill(rank, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(rank, signal.SIGCONT)
        time.sleep(0.02)


def starve_rank(run: SupervisedRun, rng: random.Random) -> None:
    """Take a rank's room to grow: what it holds already stays."""
    rank = rng.choice(run.ranks())
    resource.prlimit(rank, resource.RLIMIT_AS, (1 << 20, 1 << 20))


def turn_clock(run: SupervisedRun, rng: random.Random) -> None:
    """Do nothing now: the run was started with a clock that jumps (see `jumping_clock`)."""


@contextlib.contextmanager
def jumping_clock() -> Iterator[None]:
    """Have time.time jump by a day back or forth at every look, in what is forked meanwhile."""
    real_time = time.time
    looks = iter(range(10**9))
    time.time = lambda: real_time() + 86400.0 * (-1) ** next(looks)
    try:
        yield
    finally:
        time.time = real_time


def cut_network(run: SupervisedRun, rng: random.Random) -> None:
    """Take the loopback device of the run down, and up when the journal tells of it."""
    command = ["nsenter", "-t", str(run.pid), "-n", "ip", "link", "set", "lo"]
    subprocess.run([*command, "down"], check=True)
    journal = run.folder / "incidents.jsonl"
    run.wait_for(journal.exists, "the notice")
    subprocess.run([*command, "up"], check=True)


def _damage_newest(run: SupervisedRun, damage: Callable[[Path], None]) -> None:
    """Damage the newest checkpoint while the run is stopped, so that no newer one comes."""
    folder = run.folder / "checkpoints"
    run.wait_for(lambda: len(list_checkpoints(folder)) > 1, "a second checkpoint")
    ranks = run.ranks()
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    *_, newest = list_checkpoints(run.folder / "checkpoints")
    damage(newest)
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)


def damage_payload(run: SupervisedRun, rng: random.Random) -> None:
    def flip_byte(newest: Path) -> None:
        path = rng.choice(sorted(newest.glob("rank-*")))
        content = bytearray(path.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)

    _damage_newest(run, flip_byte)


def damage_index(run: SupervisedRun, rng: random.Random) -> None:
    def cut(newest: Path) -> None:
        path = newest / "index.json"
        os.truncate(path, rng.randrange(path.stat().st_size))

    _damage_newest(run, cut)


def delete_payload(run: SupervisedRun, rng: random.Random) -> None:
    _damage_newest(run, lambda newest: rng.choice(sorted(newest.glob("rank-*"))).unlink())


def kill_supervisor(run: SupervisedRun, rng: random.Random) -> None:
    ranks = run.ranks()
    os.kill(run.pid, signal.SIGKILL)
    run.process.join()
    deadline_s = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):
        assert time.monotonic() < deadline_s, "ranks outlive their launcher"
        time.sleep(0.01)


def tear_steps(run: SupervisedRun, rng: random.Random) -> None:
    kill_supervisor(run, rng)
    path = run.folder / "steps.jsonl"
    os.truncate(path, path.stat().st_size - rng.randint(2, 200))


def ask_to_stop(run: SupervisedRun, rng: random.Random) -> None:
    os.kill(run.pid, signal.SIGTERM)


def fill_disk(run: SupervisedRun, rng: random.Random) -> None:
    """Fill the disk until the run ends, whatever it frees meanwhile; then free it."""
    filler = run.folder / "filler"
    with filler.open("ab", buffering=0) as stream:
        while run.process.is_alive():
            with contextlib.suppress(OSError):
                stream.write(bytes(1 << 16))
                continue
            time.sleep(0.01)
    filler.unlink()


def start_twice(run: SupervisedRun, rng: random.Random) -> None:
    second = SupervisedRun(run.plan, run.folder)
    second.process.join(PATIENCE_S)
    assert second.process.exitcode == 2
    assert "is in use by another job" in run.log.read_text()


FAULTS: dict[str, Callable[[SupervisedRun, random.Random], None]] = {
    action.__name__: action
    for action in (
        kill_rank,
        kill_all_ranks,
        kill_rank_in_save,
        stop_rank,
        slow_rank,
        starve_rank,
        turn_clock,
        cut_network,
        damage_payload,
        damage_index,
        delete_payload,
        kill_supervisor,
        tear_steps,
        ask_to_stop,
        fill_disk,
        start_twice,
    )
}
NEEDS_DISK = ("fill_disk",)
NEEDS_NETWORK = ("cut_network",)
NEEDS_CLOCK = ("turn_clock",)
