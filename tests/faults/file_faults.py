"""What happens to the files of a run; each tells whether it could be done."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from faults.cells import SAVE_EVERY
from faults.process_faults import kill_launcher, send_signal
from faults.program import PATIENCE_S, Program
from moewright.engine.checkpoint import list_checkpoints


def _flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def _cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def _choose_payload(checkpoint: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(checkpoint.glob("rank-*")))


def _damage_newest(program: Program, damage: Callable[[Path], None]) -> bool:
    """Damage the newest checkpoint of several while nothing runs, and kill the ranks."""
    ranks = program.list_ranks()
    send_signal(ranks, signal.SIGSTOP)
    checkpoints = list_checkpoints(program.folder / "checkpoints")
    if not ranks or len(checkpoints) < 2:
        send_signal(ranks, signal.SIGCONT)
        return False
    damage(checkpoints[-1])
    return send_signal(ranks, signal.SIGKILL)


def flip_payload(program: Program, rng: random.Random) -> bool:
    """Flip a bit of a file of the newest checkpoint, and kill all ranks."""
    return _damage_newest(program, lambda newest: _flip(_choose_payload(newest, rng), rng))


def cut_payload(program: Program, rng: random.Random) -> bool:
    """Cut a file of the newest checkpoint, and kill all ranks."""
    return _damage_newest(program, lambda newest: _cut(_choose_payload(newest, rng), rng))


def delete_payload(program: Program, rng: random.Random) -> bool:
    """Delete a file of the newest checkpoint, and kill all ranks."""
    return _damage_newest(program, lambda newest: _choose_payload(newest, rng).unlink())


def swap_payloads(program: Program, rng: random.Random) -> bool:
    """Swap two files of the newest checkpoint, and kill all ranks."""

    def swap(newest: Path) -> None:
        one, other, *_ = rng.sample(sorted(newest.glob("rank-*")), 2)
        first, second = one.read_bytes(), other.read_bytes()
        one.write_bytes(second)
        other.write_bytes(first)

    return _damage_newest(program, swap)


def flip_index(program: Program, rng: random.Random) -> bool:
    """Flip a bit of the newest index, and kill all ranks."""
    return _damage_newest(program, lambda newest: _flip(newest / "index.json", rng))


def cut_index(program: Program, rng: random.Random) -> bool:
    """Cut the newest index, and kill all ranks."""
    return _damage_newest(program, lambda newest: _cut(newest / "index.json", rng))


def _damage_record(program: Program, rng: random.Random, name: str) -> bool:
    """Write bytes that mean nothing over a part of a file of the run folder, and kill all ranks."""
    path = program.folder / name
    ranks = program.list_ranks()
    send_signal(ranks, signal.SIGSTOP)
    content = bytearray(path.read_bytes() if path.exists() else b"{}")
    start = rng.randrange(len(content))
    content[start : start + 20] = rng.randbytes(20)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return send_signal(ranks, signal.SIGKILL)


def damage_plan(program: Program, rng: random.Random) -> bool:
    """Overwrite a part of plan.json, and kill all ranks."""
    return _damage_record(program, rng, "plan.json")


def damage_journal(program: Program, rng: random.Random) -> bool:
    """Overwrite a part of incidents.jsonl, and kill all ranks."""
    return _damage_record(program, rng, "incidents.jsonl")


def damage_ledger(program: Program, rng: random.Random) -> bool:
    """Overwrite a part of a ledger, and kill all ranks."""
    return _damage_record(program, rng, "ledger/rank00000.json")


def tear_steps(program: Program, rng: random.Random) -> bool:
    """Kill the supervisor, and tear the record of a step that no checkpoint holds.

    The record of one that a checkpoint holds is not written again.
    """
    if not program.wait_for(lambda: program.count_steps() % SAVE_EVERY == SAVE_EVERY // 2):
        return False
    if not kill_launcher(program, rng):
        return False
    path = program.folder / "steps.jsonl"
    os.truncate(path, path.stat().st_size - rng.randint(2, 200))
    return True


def fill_disk(program: Program, rng: random.Random) -> bool:
    """Fill the disk until the run ends, whatever it frees meanwhile; then free it."""
    filler = program.folder / "filler"
    deadline_s = time.monotonic() + PATIENCE_S
    with filler.open("ab", buffering=0) as stream:
        while program.process.is_alive() and time.monotonic() < deadline_s:
            with contextlib.suppress(OSError):
                stream.write(bytes(1 << 16))
                continue
            time.sleep(0.01)
    filler.unlink()
    return True


def make_read_only(program: Program, rng: random.Random) -> bool:
    """Mount the folder of checkpoints read-only until the run has ended."""
    folder = program.folder / "checkpoints"
    bind = ["mount", "--bind", str(folder), str(folder)]
    has_folder = program.wait_for(folder.exists)
    if not has_folder or subprocess.run(bind, capture_output=True, check=False).returncode != 0:
        return False
    try:
        # A mount with a file that is open for writing is busy.
        remount = ["mount", "-o", "remount,ro,bind", str(folder)]
        is_done = program.wait_for(
            lambda: subprocess.run(remount, capture_output=True, check=False).returncode == 0
        )
        program.process.join(PATIENCE_S)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
    return is_done
