"""Faults of the real program, by its command line: layouts, moments and launchers drawn at random.

    python tests/faults/program.py --tries 40 --seed 7     writes a line a try, and the counts
    python tests/faults/program.py --tries 1 --seed 7 --first 12     the thirteenth of them again

A try whose fault did not bite is not counted: the run must have noticed it, or been ended by it.
After each the same command brings the run to its end, the losses and norms of all steps are those
of the run without a fault, bit for bit, and `report` and `diagnose` answer.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

import tiny_jobs  # noqa: E402
from faults.harness import list_children  # noqa: E402
from moewright.codec import read_incidents, write_json  # noqa: E402
from moewright.engine.checkpoint import list_checkpoints  # noqa: E402

STEPS = 24
PATIENCE_S = 240.0
_MOST_STARTS = 4
_POLL_S = 0.003
_BIN = Path(sys.executable).parent

LAYOUTS = (
    (2, "ep2,mbs1"),
    (2, "tp2,mbs2"),
    (2, "pp2,mbs1,layout='Et*2|tL'"),
    (2, "cp2,mbs2"),
    (2, "mbs1,zero1,overlap=grad+param"),
    (2, "mbs1,zero2"),
    (2, "mbs1,zero3"),
    (4, "tp2,ep4,mbs2"),
    (4, "pp2,ep2,mbs1,layout='Et*2|tL'"),
)


class Moment(StrEnum):
    """When a fault comes."""

    START = "start"  # as soon as the ranks are there
    RESTORE = "restore"  # the same, of a run that goes on from a checkpoint
    FIRST_STEP = "first step"
    STEP = "step"
    SAVE = "save"
    LAST_STEP = "last step"
    END = "after the last step"


class Launcher(StrEnum):
    """Who starts the ranks."""

    OWN = "own"
    TORCHRUN = "torchrun"


@dataclass(frozen=True, kw_only=True, slots=True)
class Try:
    """A cell of the matrix."""

    fault: str
    layout: str
    world_size: int
    moment: Moment
    launcher: Launcher
    is_elastic: bool
    has_copies: bool

    def __str__(self) -> str:
        options = [f"by {self.launcher}"]
        options += ["elastic"] * self.is_elastic + ["copies"] * self.has_copies
        return f"{self.fault} at {self.moment}, {self.layout}, {', '.join(options)}"


@dataclass(kw_only=True, slots=True)
class Program:
    """A run by the command line, in a folder of its own."""

    cell: Try
    plan: Path
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    log: list[str] = field(default_factory=list)

    @property
    def command(self) -> list[str]:
        arguments = ["train", str(self.plan), "--out", str(self.folder), "--supervise"]
        if self.cell.is_elastic:
            arguments += ["--min-ranks", "1"]
        if self.cell.launcher is Launcher.OWN:
            return [str(_BIN / "moewright"), *arguments]
        return [
            *(str(_BIN / "torchrun"), "--standalone", "--max-restarts", "3"),
            *("--nproc-per-node", str(self.cell.world_size), "-m", "moewright", *arguments),
        ]

    @property
    def output(self) -> Path:
        return self.folder.with_suffix(".log")

    def start(self) -> subprocess.Popen[bytes]:
        """Give the command."""
        with self.output.open("ab") as stream:
            self.process = subprocess.Popen(
                self.command, stdout=stream, stderr=stream, start_new_session=True
            )
        return self.process

    def list_ranks(self) -> list[int]:
        """Return the processes of the ranks; none until all are there."""
        assert self.process is not None
        children = list_children(self.process.pid)
        return children if len(children) >= self.cell.world_size else []

    def count_steps(self) -> int:
        """Count the steps that were recorded."""
        with contextlib.suppress(OSError):
            return (self.folder / "steps.jsonl").read_bytes().count(b'{"kind": "step"')
        return 0

    def wait_for(self, condition: Callable[[], object]) -> bool:
        """Wait for something; return whether it came before the run ended."""
        assert self.process is not None
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s and self.process.poll() is None:
            if condition():
                return True
            time.sleep(_POLL_S)
        return False

    def wait(self) -> int:
        """Wait for the end of the command, and return its exit code."""
        assert self.process is not None
        return self.process.wait(PATIENCE_S)

    def end(self) -> None:
        """Leave no process behind."""
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


# A fault returns whether it could be done; whether it bit is seen afterwards.
Fault = Callable[[Program, random.Random], bool]


def _signal(pids: list[int], number: signal.Signals) -> bool:
    delivered = 0
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            delivered += 1
    return delivered > 0


def kill_rank(program: Program, rng: random.Random) -> bool:
    ranks = program.list_ranks()
    return bool(ranks) and _signal([rng.choice(ranks)], signal.SIGKILL)


def kill_all(program: Program, rng: random.Random) -> bool:
    return _signal(program.list_ranks(), signal.SIGKILL)


def stop_rank(program: Program, rng: random.Random) -> bool:
    ranks = program.list_ranks()
    return bool(ranks) and _signal([rng.choice(ranks)], signal.SIGSTOP)


def kill_launcher(program: Program, rng: random.Random) -> bool:
    assert program.process is not None
    return _signal([program.process.pid], signal.SIGKILL)


def ask_to_stop(program: Program, rng: random.Random) -> bool:
    assert program.process is not None
    return _signal([program.process.pid], signal.SIGTERM)


def damage_newest(program: Program, rng: random.Random) -> bool:
    """Damage the newest checkpoint of several while nothing runs, and kill the ranks."""
    ranks = program.list_ranks()
    _signal(ranks, signal.SIGSTOP)
    *others, newest = [None, *list_checkpoints(program.folder / "checkpoints")]
    if not ranks or len(others) < 2 or newest is None:
        _signal(ranks, signal.SIGCONT)
        return False
    path = rng.choice(sorted(newest.glob("rank-*")))
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return _signal(ranks, signal.SIGKILL)


def start_twice(program: Program, rng: random.Random) -> bool:
    """Give the same command beside; it must be refused."""
    second = subprocess.run(program.command, capture_output=True, timeout=PATIENCE_S, check=False)
    program.log.append(f"the second ended with {second.returncode}")
    return second.returncode != 0


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        *(kill_rank, kill_all, stop_rank, kill_launcher, ask_to_stop),
        *(damage_newest, start_twice),
    )
}


def draw(seed: int, number: int) -> Try:
    """Draw a cell; the same number of a seed is the same cell."""
    rng = random.Random(f"{seed} {number}")
    world_size, layout = rng.choice(LAYOUTS)
    launcher = rng.choice((Launcher.OWN, Launcher.OWN, Launcher.TORCHRUN))
    fault = rng.choice(sorted(FAULTS))
    moments = list(Moment)
    if fault == damage_newest.__name__:  # of two checkpoints, so that one is left
        moments = [Moment.RESTORE, Moment.STEP, Moment.LAST_STEP]
    return Try(
        fault=fault,
        layout=layout,
        world_size=world_size,
        moment=rng.choice(moments),
        launcher=launcher,
        is_elastic=launcher is Launcher.OWN and rng.random() < 0.3,
        has_copies=rng.random() < 0.3,
    )


class Laboratory:
    """A corpus, and what each layout records without a fault."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._data = tiny_jobs.write_corpus(folder / "corpus")
        self._curves: dict[str, list[tuple[int, float, float]]] = {}

    def try_cell(self, cell: Try, name: str) -> str | None:
        """Inject a fault; return what did not hold, "" for nothing, None where it did not bite."""
        rng = random.Random(name)
        program = Program(cell=cell, plan=self._write_plan(cell, name), folder=self._folder / name)
        try:
            if not self._inject(program, rng):
                return None
            code = program.wait()
            if not self._has_bitten(program, code):
                return None
            return self._judge(program, code)
        except subprocess.TimeoutExpired:
            return f"did not end; {_read_end(program.output)}"
        finally:
            program.end()
            shutil.rmtree(program.folder, ignore_errors=True)

    def _write_plan(self, cell: Try, name: str) -> Path:
        workload = tiny_jobs.build_workload(self._data, steps=STEPS, hang_timeout_s=2.0)
        checkpoint = replace(workload.checkpoint, every_steps=4)
        if cell.has_copies:
            checkpoint = replace(checkpoint, copy_to=str(self._folder / f"{name}-copies"))
        workload = replace(workload, checkpoint=checkpoint)
        plan = tiny_jobs.build_plan(workload, cell.layout, world_size=cell.world_size)
        path = self._folder / f"{name}.json"
        write_json(path, plan)
        return path

    def _find_curve(self, cell: Try) -> list[tuple[int, float, float]]:
        """Return the losses and norms of the layout without a fault."""
        if cell.layout not in self._curves:
            name = f"whole-{len(self._curves)}"
            whole = replace(cell, has_copies=False, launcher=Launcher.OWN, is_elastic=False)
            plan = self._write_plan(whole, name)
            program = Program(cell=whole, plan=plan, folder=self._folder / name)
            program.start()
            assert program.wait() == 0, _read_end(program.output)
            self._curves[cell.layout] = _read_curve(program.folder)
        return self._curves[cell.layout]

    def _inject(self, program: Program, rng: random.Random) -> bool:
        moment = program.cell.moment
        self._find_curve(program.cell)
        program.start()
        if moment is Moment.RESTORE:
            step = rng.randint(9, STEPS // 2)
            if not program.wait_for(lambda: program.count_steps() >= step):
                return False
            program.end()
            program.start()
        saving = program.folder / "checkpoints"
        last = {Moment.FIRST_STEP: 0, Moment.LAST_STEP: STEPS - 1, Moment.END: STEPS}
        step = last.get(moment, rng.randint(9, STEPS - 4))
        has_come = program.wait_for(program.list_ranks)
        if moment is Moment.SAVE:
            has_come = program.wait_for(lambda: any(saving.glob(".saving-*")))
        elif moment is Moment.FIRST_STEP:
            has_come = program.wait_for((program.folder / "steps.jsonl").exists)
        elif moment in (Moment.STEP, Moment.LAST_STEP, Moment.END):
            has_come = program.wait_for(lambda: program.count_steps() >= step)
        if has_come and moment in (Moment.START, Moment.RESTORE, Moment.STEP):
            time.sleep(rng.uniform(0.0, 0.3))
        return has_come and FAULTS[program.cell.fault](program, rng)

    def _has_bitten(self, program: Program, code: int) -> bool:
        """Tell whether the run has noticed the fault, or was ended by it."""
        if program.cell.fault == "start_twice":
            return True
        return code != 0 or bool(read_incidents(program.folder))

    def _judge(self, program: Program, code: int) -> str:
        if "Traceback" in _read_all(program.output) and program.cell.launcher is Launcher.OWN:
            return f"a traceback: {_read_end(program.output)}"
        if program.cell.fault == "start_twice" and "ended with 2" not in program.log[-1]:
            return program.log[-1]
        starts = 1
        while code != 0 and starts < _MOST_STARTS:
            program.start()
            code = program.wait()
            starts += 1
        if code != 0:
            return f"exit code {code} after {starts} starts: {_read_end(program.output)}"
        if _read_curve(program.folder) != self._find_curve(program.cell):
            return "losses differ"
        for verb in ("report", "diagnose"):
            command = [str(_BIN / "moewright"), verb, str(program.folder)]
            answer = subprocess.run(command, capture_output=True, text=True, check=False)
            if answer.returncode != 0:
                return f"{verb} ends with {answer.returncode}: {answer.stderr.strip()[-200:]}"
        return ""


def _read_curve(folder: Path) -> list[tuple[int, float, float]]:
    rows = {row["step"]: (row["loss"], row["grad_norm"]) for row in tiny_jobs.read_steps(folder)}
    return [(step, *rows[step]) for step in sorted(rows)]


def _read_all(path: Path) -> str:
    return path.read_text("utf-8", "replace") if path.exists() else ""


def _read_end(path: Path) -> str:
    return " / ".join(_read_all(path).splitlines()[-3:])[:400]


def main() -> int:
    """Try cells until so many have bitten; return 1 where something did not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=40, help="tries that must bite")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        laboratory = Laboratory(Path(folder))
        number = arguments.first
        while counts["held"] + counts["broken"] < arguments.tries:
            cell = draw(arguments.seed, number)
            broken = laboratory.try_cell(cell, f"{arguments.seed}-{number}")
            outcome = "no bite" if broken is None else "broken" if broken else "held"
            counts[outcome] += 1
            print(f"{number}: {cell}: {broken or outcome}", flush=True)
            number += 1
    print(dict(counts), flush=True)
    return int(counts["broken"] > 0)


if __name__ == "__main__":
    sys.exit(main())
