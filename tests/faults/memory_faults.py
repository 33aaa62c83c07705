"""What happens to the memory of a run; each tells whether it could be done."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import time
from pathlib import Path

from faults.program import Program, addresses_path

_CGROUPS = Path("/sys/fs/cgroup")


def starve_rank(program: Program, rng: random.Random) -> bool:
    """Take a rank's room to grow (RLIMIT_AS): what it holds already stays."""
    ranks = program.list_ranks()
    if not ranks:
        return False
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(rng.choice(ranks), resource.RLIMIT_AS, (1 << 20, 1 << 20))
        return True
    return False


def run_out_of_memory(program: Program, rng: random.Random) -> bool:
    """Have the kernel's OOM killer take a rank: it gets a cgroup that grants it no page more."""
    ranks = program.list_ranks()
    if not ranks:
        return False
    rank = rng.choice(ranks)
    with contextlib.suppress(OSError):
        group = _find_memory_group() / f"moewright-{rank}"
        group.mkdir()
        program.groups.append(group)
        limits = (group / "memory.limit_in_bytes", group / "memory.max")
        limit = next(path for path in limits if path.exists())
        limit.write_text(str(64 << 10))
        (group / "cgroup.procs").write_text(str(rank))
        return True
    return False


def _find_memory_group() -> Path:
    """Return the folder of this process's own group of the controller of memory."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return _CGROUPS / "memory" / path.lstrip("/")
        if not controllers:
            unified = _CGROUPS / path.lstrip("/")
    return unified


def _flip_bit(program: Program, rng: random.Random, part: str) -> bool:
    """Flip a bit of a rank's memory, in the midst of a step; the rank knows nothing of it."""
    ranks = program.list_ranks()
    if not ranks:
        return False
    rank = rng.choice(ranks)
    path = addresses_path(program.output, rank)
    if not program.wait_for(lambda: path.exists() and "bytes=" in path.read_text()):
        return False
    fields = dict(pair.split("=") for pair in path.read_text().split())
    address = int(fields[part]) + rng.randrange(int(fields["bytes"]))
    steps = program.count_steps()
    if not program.wait_for(lambda: program.count_steps() > steps):
        return False
    time.sleep(rng.uniform(0.0, 0.01))
    program.injected_s = time.time()
    with contextlib.suppress(OSError):
        handle = os.open(f"/proc/{rank}/mem", os.O_RDWR)
        try:
            (byte,) = os.pread(handle, 1, address)
            os.pwrite(handle, bytes([byte ^ 1 << rng.randrange(8)]), address)
        finally:
            os.close(handle)
        return True
    return False


def flip_weight(program: Program, rng: random.Random) -> bool:
    """Flip a bit of a live rank's weights (train.check_every = 1)."""
    return _flip_bit(program, rng, "weights")


def flip_moment(program: Program, rng: random.Random) -> bool:
    """Flip a bit of a live rank's master weights or moments (train.check_every = 1)."""
    return _flip_bit(program, rng, rng.choice(("master", "exp_avg", "exp_avg_sq")))


def flip_gradient(program: Program, rng: random.Random) -> bool:
    """Flip a bit of a live rank's gradients (train.check_every = 1)."""
    return _flip_bit(program, rng, "grads")
