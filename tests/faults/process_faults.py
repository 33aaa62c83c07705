"""What happens to the processes of a run; each tells whether it could be done."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from pathlib import Path

from faults.program import PATIENCE_S, Program


def send_signal(pids: list[int], number: signal.Signals) -> bool:
    """Send a signal; return whether a process was there to take it."""
    delivered = 0
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            delivered += 1
    return delivered > 0


def kill_rank(program: Program, rng: random.Random) -> bool:
    """Kill a rank."""
    ranks = program.list_ranks()
    return bool(ranks) and send_signal([rng.choice(ranks)], signal.SIGKILL)


def kill_all_ranks(program: Program, rng: random.Random) -> bool:
    """Kill all ranks at once."""
    return send_signal(program.list_ranks(), signal.SIGKILL)


def stop_rank(program: Program, rng: random.Random) -> bool:
    """Stop a rank for good (SIGSTOP)."""
    ranks = program.list_ranks()
    return bool(ranks) and send_signal([rng.choice(ranks)], signal.SIGSTOP)


def slow_rank(program: Program, rng: random.Random) -> bool:
    """Stop a rank for half a second, again and again."""
    ranks = program.list_ranks()
    if not ranks:
        return False
    rank = rng.choice(ranks)
    for _ in range(3):
        has_stopped = send_signal([rank], signal.SIGSTOP)
        time.sleep(0.5)
        send_signal([rank], signal.SIGCONT)
        time.sleep(0.02)
    return has_stopped


def kill_launcher(program: Program, rng: random.Random) -> bool:
    """Kill the supervisor, or torchrun; its ranks must end too."""
    ranks = program.list_ranks()
    if not send_signal([program.pid], signal.SIGKILL):
        return False
    program.process.join()
    deadline_s = time.monotonic() + PATIENCE_S
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):
        assert time.monotonic() < deadline_s, "ranks outlive their launcher"
        time.sleep(0.01)
    return True


def ask_to_stop(program: Program, rng: random.Random) -> bool:
    """Send SIGTERM."""
    return send_signal([program.pid], signal.SIGTERM)


def close_terminal(program: Program, rng: random.Random) -> bool:
    """Send SIGHUP to all, as a terminal that closes does."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGHUP)
        return True
    return False


def start_twice(program: Program, rng: random.Random) -> bool:
    """Give the same command beside; one of the two must be refused."""
    program.start_beside()
    return True


def turn_clock(program: Program, rng: random.Random) -> bool:
    """Have the clock of all processes jump by a day at every look."""
    library = program.folder.with_suffix(".so")
    source = Path(__file__).with_name("clock.c")
    command = ["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        return False
    program.environment["LD_PRELOAD"] = str(library)
    program.environment["JUMPING_CLOCK_MARK"] = str(program.folder.with_suffix(".mark"))
    return True


def cut_network(program: Program, rng: random.Random) -> bool:
    """Take the loopback device of the run down, and up when the journal tells of it."""
    command = ["nsenter", "-t", str(program.pid), "-n", "ip", "link", "set", "lo"]
    if subprocess.run([*command, "down"], capture_output=True, check=False).returncode != 0:
        return False
    has_told = program.wait_for((program.folder / "incidents.jsonl").exists)
    if program.process.is_alive():
        subprocess.run([*command, "up"], check=True)
    return has_told or not program.process.is_alive()
