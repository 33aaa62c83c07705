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

import torch

import tiny_jobs
from moewright.engine.checkpoint import list_checkpoints
from moewright.engine.optim.distributed_optimizer import DistributedOptimizer
from moewright.engine.run.supervise import supervise
from moewright.spec.errors import BadInput
from moewright.spec.plan import Plan
from moewright.spec.workload import DataSpec

STEPS = 40
PATIENCE_S = 120.0
_CLONE_NEWNET = 0x40000000
_DISK_MIB = 24


class FaultNotPossible(Exception):
    """A fault that cannot be injected on this machine; the text says why."""


def build_plan(data: DataSpec, *, check_every: int = 0) -> Plan:
    """Build a plan of two ranks that save every four steps, and are patient for two seconds."""
    workload = tiny_jobs.build_workload(
        data, steps=STEPS, hang_timeout_s=2.0, check_every=check_every
    )
    checkpoint = replace(workload.checkpoint, every_steps=4)
    return tiny_jobs.build_plan(replace(workload, checkpoint=checkpoint), "ep2,mbs2", world_size=2)


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
                if self.plan.workload.check_every:
                    _note_addresses(self.folder)
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

    def wait_for_moment(self, rng: random.Random, last: int) -> None:
        """Wait for a random moment up to step `last`, after the first checkpoint."""
        step = rng.randint(5, last)
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


def _note_addresses(folder: Path) -> None:
    """Have each rank write down where its state lies, for what flips a bit of it from outside."""
    reduce = DistributedOptimizer.reduce_gradients

    def note_and_reduce(self: DistributedOptimizer) -> torch.Tensor:
        bucket = self.buckets[0]
        (segment,) = bucket.segments
        tensors = {
            "weights": bucket.weights,
            "grads": bucket.grads,
            "master": segment.master,
            "exp_avg": segment.exp_avg.tensors[0],
            "exp_avg_sq": segment.exp_avg_sq.tensors[0],
        }
        text = " ".join(f"{name}={tensor.data_ptr()}" for name, tensor in tensors.items())
        path = folder.with_suffix(f".addresses-{os.getpid()}")
        path.write_text(f"{text} bytes={segment.master.nbytes}")
        DistributedOptimizer.reduce_gradients = reduce  # type: ignore[method-assign]
        return reduce(self)

    DistributedOptimizer.reduce_gradients = note_and_reduce  # type: ignore[method-assign]


def _flip_bit(run: SupervisedRun, rng: random.Random, part: str) -> None:
    """Flip a bit of a rank's memory, in the midst of a step; the rank knows nothing of it."""
    rank = rng.choice(run.ranks())
    path = run.folder.with_suffix(f".addresses-{rank}")
    run.wait_for(path.exists, "the addresses")
    fields = dict(field.split("=") for field in path.read_text().split())
    address = int(fields[part]) + rng.randrange(int(fields["bytes"]))
    steps = run.count_steps()
    run.wait_for(lambda: run.count_steps() > steps, "a step")
    time.sleep(rng.uniform(0.0, 0.01))
    run.injected_s = time.time()
    handle = os.open(f"/proc/{rank}/mem", os.O_RDWR)
    try:
        (byte,) = os.pread(handle, 1, address)
        os.pwrite(handle, bytes([byte ^ 1 << rng.randrange(8)]), address)
    finally:
        os.close(handle)


def flip_weight(run: SupervisedRun, rng: random.Random) -> None:
    _flip_bit(run, rng, "weights")


def flip_moment(run: SupervisedRun, rng: random.Random) -> None:
    _flip_bit(run, rng, rng.choice(("master", "exp_avg", "exp_avg_sq")))


def flip_gradient(run: SupervisedRun, rng: random.Random) -> None:
    _flip_bit(run, rng, "grads")


def slow_down_rank(run: SupervisedRun, rng: random.Random) -> None:
    """Let a rank run for a third of the time, until the journal tells of it."""
    rank = rng.choice(run.ranks())
    journal = run.folder / "incidents.jsonl"
    while run.process.is_alive() and not journal.exists():
        os.kill(rank, signal.SIGSTOP)
        time.sleep(0.02)
        os.kill(rank, signal.SIGCONT)
        time.sleep(0.01)


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


def cut_payload(run: SupervisedRun, rng: random.Random) -> None:
    def cut(newest: Path) -> None:
        path = rng.choice(sorted(newest.glob("rank-*")))
        os.truncate(path, rng.randrange(path.stat().st_size))

    _damage_newest(run, cut)


def flip_index(run: SupervisedRun, rng: random.Random) -> None:
    def flip_byte(newest: Path) -> None:
        path = newest / "index.json"
        content = bytearray(path.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)

    _damage_newest(run, flip_byte)


def swap_payloads(run: SupervisedRun, rng: random.Random) -> None:
    def swap(newest: Path) -> None:
        one, other = sorted(newest.glob("rank-*"))
        first, second = one.read_bytes(), other.read_bytes()
        one.write_bytes(second)
        other.write_bytes(first)

    _damage_newest(run, swap)


def _damage_record(run: SupervisedRun, rng: random.Random, name: str) -> None:
    """Write bytes that mean nothing over a part of a file of the run folder, and kill a rank."""
    path = run.folder / name
    ranks = run.ranks()
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    content = bytearray(path.read_bytes() if path.exists() else b"{}")
    start = rng.randrange(len(content))
    content[start : start + 20] = rng.randbytes(20)
    path.write_bytes(content)
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)


def damage_plan(run: SupervisedRun, rng: random.Random) -> None:
    _damage_record(run, rng, "plan.json")


def damage_journal(run: SupervisedRun, rng: random.Random) -> None:
    _damage_record(run, rng, "incidents.jsonl")


def damage_ledger(run: SupervisedRun, rng: random.Random) -> None:
    _damage_record(run, rng, "ledger/rank00000.json")


def make_read_only(run: SupervisedRun, rng: random.Random) -> None:
    """Mount the folder of checkpoints read-only until the run has ended, or for a while."""
    folder = run.folder / "checkpoints"
    run.wait_for(folder.exists, "the folder of checkpoints")
    if subprocess.run(["mount", "--bind", str(folder), str(folder)], check=False).returncode:
        raise FaultNotPossible("needs to mount a file system")
    try:
        # A mount with a file that is open for writing is busy.
        remount = ["mount", "-o", "remount,ro,bind", str(folder)]
        run.wait_for(
            lambda: subprocess.run(remount, check=False).returncode == 0, "a moment without a save"
        )
        run.process.join(PATIENCE_S)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


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
    """Tear the record of a step that no checkpoint holds; one that does is not done again."""
    run.wait_for(lambda: run.count_steps() % 4 == 2, "a step between checkpoints")
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
        cut_payload,
        swap_payloads,
        damage_index,
        flip_index,
        delete_payload,
        kill_supervisor,
        tear_steps,
        ask_to_stop,
        fill_disk,
        make_read_only,
        start_twice,
        damage_plan,
        damage_journal,
        damage_ledger,
        flip_weight,
        flip_moment,
        flip_gradient,
        slow_down_rank,
    )
}
NEEDS_DISK = ("fill_disk",)
NEEDS_NETWORK = ("cut_network",)
# What must come early: it takes two windows of ten steps, or another job's start, to be noticed.
NEEDS_TIME = ("slow_down_rank", "start_twice")
NEEDS_CHECKS = ("flip_weight", "flip_moment", "flip_gradient")
NEEDS_CLOCK = ("turn_clock",)
