"""Faults of the real program, by its command line: layouts, moments and launchers drawn at random.

    python tests/faults/program.py --tries 40 --seed 7     writes a line a try, and the counts
    python tests/faults/program.py --tries 1 --seed 7 --first 12     the thirteenth of them again
    python tests/faults/program.py --tries 400 --log FILE     goes on where FILE ends; and the table

A try whose fault did not bite is not counted: the run must have noticed it, or been ended by it.
After each the same command brings the run to its end, the losses and norms of all steps are those
of the run without a fault, bit for bit, and `report`, `diagnose` and the studio answer.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

import tiny_jobs  # noqa: E402
from faults.bucket import Bucket  # noqa: E402
from faults.harness import list_children  # noqa: E402
from moewright.codec import read_incidents, write_json  # noqa: E402
from moewright.engine.checkpoint import list_checkpoints  # noqa: E402

STEPS = 24
PATIENCE_S = 240.0
_MOST_STARTS = 4
_POLL_S = 0.003
# The longest that a silent server may delay the end of a run, and what a busy machine adds to it.
_MOST_DELAY_S = 60.0 + 30.0
_TABLE = TESTS.parent / "docs/reference/faults.md"
_SECTION = "## By the command line"
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


class Copies(StrEnum):
    """Where checkpoints are copied to."""

    NONE = "no copies"
    FOLDER = "copies in a folder"
    BUCKET = "copies in a bucket"


@dataclass(frozen=True, kw_only=True, slots=True)
class Try:
    """A cell of the matrix; ranks keep copies for each other every `peer_every` steps, 0: never."""

    fault: str
    layout: str
    world_size: int
    moment: Moment
    launcher: Launcher
    is_elastic: bool
    copies: Copies
    peer_every: int = 0

    def __str__(self) -> str:
        options = [f"by {self.launcher}", str(self.copies)]
        options += ["elastic"] * self.is_elastic
        options += [f"in place every {self.peer_every}"] * (self.peer_every > 0)
        return f"{self.fault} at {self.moment}, {self.layout}, {', '.join(options)}"


@dataclass(kw_only=True, slots=True)
class Program:
    """A run by the command line, in a folder of its own."""

    cell: Try
    plan: Path
    folder: Path
    bucket: Bucket | None = None
    environment: dict[str, str] = field(default_factory=dict)
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
                self.command,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
                env={**os.environ, **self.environment},
            )
        return self.process

    def find_bucket(self) -> Bucket:
        """Return the bucket that the copies go to."""
        assert self.bucket is not None
        return self.bucket

    def list_ranks(self) -> list[int]:
        """Return the processes of the ranks; none until all are there.

        A spare process is the last that is started.
        """
        assert self.process is not None
        children = list_children(self.process.pid)
        size = self.cell.world_size
        return children[:size] if len(children) >= size else []

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


def turn_clock(program: Program, rng: random.Random) -> bool:
    """Have the clock of all processes jump by a day at every look."""
    library = program.folder.with_suffix(".so")
    source = Path(__file__).with_name("clock.c")
    command = ["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        return False
    program.environment["LD_PRELOAD"] = str(library)
    program.environment["JUMPING_CLOCK_MARK"] = str(_clock_mark(program))
    return True


def _clock_mark(program: Program) -> Path:
    return program.folder.with_suffix(".mark")


def refuse_credentials(program: Program, rng: random.Random) -> bool:
    program.find_bucket().refuse()
    return True


def remove_bucket(program: Program, rng: random.Random) -> bool:
    program.find_bucket().go_away()
    return True


def silence_server(program: Program, rng: random.Random) -> bool:
    program.find_bucket().fall_silent()
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Cells:
    """The cells of a fault; one that comes `before_start` is there when the command is given."""

    moments: Sequence[Moment] = tuple(Moment)
    launchers: Sequence[Launcher] = (Launcher.OWN, Launcher.OWN, Launcher.TORCHRUN)
    copies: Sequence[Copies] = (Copies.NONE, Copies.NONE, Copies.FOLDER, Copies.BUCKET)


_STARTS = (Moment.START, Moment.RESTORE)
_BEFORE_END = tuple(moment for moment in Moment if moment not in (Moment.LAST_STEP, Moment.END))
CELLS: Mapping[Fault, Cells] = {
    **{
        fault: Cells()
        for fault in (kill_rank, kill_all, stop_rank, kill_launcher, ask_to_stop, start_twice)
    },
    # Of two checkpoints, so that one is left.
    damage_newest: Cells(moments=(Moment.RESTORE, Moment.STEP, Moment.LAST_STEP)),
    turn_clock: Cells(moments=_STARTS, launchers=(Launcher.OWN,)),
    refuse_credentials: Cells(moments=_STARTS, copies=(Copies.BUCKET,)),
    remove_bucket: Cells(moments=_BEFORE_END, copies=(Copies.BUCKET,)),
    silence_server: Cells(moments=_BEFORE_END, copies=(Copies.BUCKET,)),
}
FAULTS: dict[str, Fault] = {fault.__name__: fault for fault in CELLS}
# What is there when the command is given, where the moment is a start.
_BEFORE_START = (turn_clock, refuse_credentials, remove_bucket, silence_server)


def draw(seed: int, number: int) -> Try:
    """Draw a cell; the same number of a seed is the same cell."""
    rng = random.Random(f"{seed} {number}")
    world_size, layout = rng.choice(LAYOUTS)
    fault = rng.choice(sorted(FAULTS))
    cells = CELLS[FAULTS[fault]]
    launcher = rng.choice(cells.launchers)
    is_own = launcher is Launcher.OWN
    return Try(
        fault=fault,
        layout=layout,
        world_size=world_size,
        moment=rng.choice(cells.moments),
        launcher=launcher,
        is_elastic=is_own and rng.random() < 0.3,
        copies=rng.choice(cells.copies),
        peer_every=rng.choice((0, 1, 3)) if is_own else 0,
    )


class Studio:
    """A studio over the folders of the tries, as users start it."""

    def __init__(self, root: Path) -> None:
        command = [str(_BIN / "moewright"), "studio", "--root", str(root), "--port", "0"]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        line = ""
        while "token=" not in line:
            line = self._process.stdout.readline()
            assert line, "the studio has ended"
        address, token = re.findall(r"http://([^/]+)/\?token=(\S+)", line)[0]
        self._address = address
        self._headers = {"authorization": f"Bearer {token}"}

    def ask(self, folder: str) -> int:
        """Return the status of the answer about a run."""
        connection = http.client.HTTPConnection(self._address, timeout=PATIENCE_S)
        connection.request("GET", f"/api/run?run={folder}", headers=self._headers)
        status = connection.getresponse().status
        connection.close()
        return status

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


class Laboratory:
    """A corpus, and what each layout records without a fault."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._data = tiny_jobs.write_corpus(folder / "corpus")
        self._curves: dict[str, list[tuple[int, float, float]]] = {}
        self._studios: list[Studio] = []

    def close(self) -> None:
        """End the studio."""
        for studio in self._studios:
            studio.close()

    def try_cell(self, cell: Try, name: str) -> str | None:
        """Inject a fault; return what did not hold, "" for nothing, None where it did not bite."""
        rng = random.Random(name)
        program = Program(cell=cell, plan=self._write_plan(cell, name), folder=self._folder / name)
        if cell.copies is Copies.BUCKET:
            program.bucket = Bucket()
            program.environment |= program.bucket.environment()
            program.bucket.make()
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
            if program.bucket is not None:
                program.bucket.close()
            shutil.rmtree(program.folder, ignore_errors=True)

    def _write_plan(self, cell: Try, name: str) -> Path:
        workload = tiny_jobs.build_workload(self._data, steps=STEPS, hang_timeout_s=2.0)
        targets = {
            Copies.NONE: "",
            Copies.FOLDER: str(self._folder / f"{name}-copies"),
            Copies.BUCKET: f"s3://bucket/{name}",
        }
        checkpoint = replace(
            workload.checkpoint,
            every_steps=4,
            copy_to=targets[cell.copies],
            peer_every_steps=cell.peer_every,
        )
        workload = replace(workload, checkpoint=checkpoint)
        plan = tiny_jobs.build_plan(workload, cell.layout, world_size=cell.world_size)
        path = self._folder / f"{name}.json"
        write_json(path, plan)
        return path

    def _find_curve(self, cell: Try) -> list[tuple[int, float, float]]:
        """Return the losses and norms of the layout without a fault."""
        if cell.layout not in self._curves:
            name = f"whole-{len(self._curves)}"
            whole = replace(
                cell, copies=Copies.NONE, launcher=Launcher.OWN, is_elastic=False, peer_every=0
            )
            plan = self._write_plan(whole, name)
            program = Program(cell=whole, plan=plan, folder=self._folder / name)
            program.start()
            assert program.wait() == 0, _read_end(program.output)
            self._curves[cell.layout] = _read_curve(program.folder)
        return self._curves[cell.layout]

    def _inject(self, program: Program, rng: random.Random) -> bool:
        moment = program.cell.moment
        fault = FAULTS[program.cell.fault]
        is_before = fault in _BEFORE_START and moment in _STARTS
        self._find_curve(program.cell)
        if is_before and moment is Moment.START:
            return fault(program, rng) and bool(program.start())
        program.start()
        if moment is Moment.RESTORE:
            step = rng.randint(9, STEPS // 2)
            if not program.wait_for(lambda: program.count_steps() >= step):
                return False
            program.end()
            if is_before:
                return fault(program, rng) and bool(program.start())
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
        return has_come and fault(program, rng)

    def _has_bitten(self, program: Program, code: int) -> bool:
        """Tell whether the run has noticed the fault, or was ended by it."""
        if program.cell.fault == start_twice.__name__:
            return True
        if program.cell.fault == turn_clock.__name__:
            return _clock_mark(program).exists()
        return code != 0 or bool(read_incidents(program.folder))

    def _judge(self, program: Program, code: int) -> str:
        if "Traceback" in _read_all(program.output) and program.cell.launcher is Launcher.OWN:
            return f"a traceback: {_read_end(program.output)}"
        if program.cell.fault == "start_twice" and "ended with 2" not in program.log[-1]:
            return program.log[-1]
        if broken := self._judge_copies(program, code):
            return broken
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
        self._studios = self._studios or [Studio(self._folder)]
        status = self._studios[0].ask(program.folder.name)
        return "" if status == 200 else f"the studio answers {status}"

    def _judge_copies(self, program: Program, code: int) -> str:
        """Say what a run without its bucket has done wrong, and bring the bucket back."""
        if program.bucket is None:
            return ""
        program.bucket.come_back()
        if FAULTS[program.cell.fault] not in _BEFORE_START:
            return ""
        if program.cell.moment is Moment.START:
            told = _read_end(program.output)
            is_refused = code == 2 and "checkpoint.copy_to" in told
            return "" if is_refused else f"was not refused, but ended with {code}: {told}"
        delay_s = time.time() - (program.folder / "steps.jsonl").stat().st_mtime
        if code == 0 and delay_s > _MOST_DELAY_S:
            return f"the end came {delay_s:.0f} s after the last step"
        return ""


def _read_curve(folder: Path) -> list[tuple[int, float, float]]:
    rows = {row["step"]: (row["loss"], row["grad_norm"]) for row in tiny_jobs.read_steps(folder)}
    return [(step, *rows[step]) for step in sorted(rows)]


def _read_all(path: Path) -> str:
    return path.read_text("utf-8", "replace") if path.exists() else ""


def _read_end(path: Path) -> str:
    return " / ".join(_read_all(path).splitlines()[-3:])[:400]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A try that was made: "held", "no bite", or what did not hold."""

    seed: int
    number: int
    cell: Try
    verdict: str
    seconds: float

    @property
    def has_bitten(self) -> bool:
        return self.verdict != "no bite"


def read_log(path: Path) -> list[Outcome]:
    """Read the tries of earlier starts; none where there is no file."""
    if not path.exists():
        return []
    outcomes = []
    for line in path.read_text("utf-8").splitlines():
        data = json.loads(line)
        cell = data.pop("cell")
        for key, kind in (("moment", Moment), ("launcher", Launcher), ("copies", Copies)):
            cell[key] = kind(cell[key])
        outcomes.append(Outcome(cell=Try(**cell), **data))
    return outcomes


def format_section(outcomes: Sequence[Outcome]) -> str:
    """Return the section of the page: what was tried, and what held, by fault."""
    by_fault: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_fault[outcome.cell.fault].append(outcome)
    bitten = [outcome for outcome in outcomes if outcome.has_bitten]
    held = sum(outcome.verdict == "held" for outcome in bitten)
    lines = [
        f"{_SECTION}",
        "",
        f"{held} of {len(bitten)} tries that bit held (`tests/faults/program.py`); "
        f"{len(outcomes) - len(bitten)} others did not bite.",
        "",
        "| fault | bit | held | layouts | moments | launchers | in place | copies |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for fault, tried in sorted(by_fault.items()):
        cells = [outcome.cell for outcome in tried if outcome.has_bitten]
        counts = (
            len(cells),
            sum(outcome.verdict == "held" for outcome in tried),
            len({cell.layout for cell in cells}),
            len({cell.moment for cell in cells}),
            len({cell.launcher for cell in cells}),
            sum(cell.peer_every > 0 for cell in cells),
            sum(cell.copies is not Copies.NONE for cell in cells),
        )
        lines.append(f"| {fault.replace('_', ' ')} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines) + "\n"


def replace_section(page: str, section: str) -> str:
    """Return a page with its section of the tries by the command line replaced, or put in."""
    before, _, rest = page.partition(_SECTION)
    if not rest:
        before, heading, rest = page.partition("\n## ")
        return f"{before}\n{section}{heading}{rest}"
    _, heading, after = rest.partition("\n## ")
    return f"{before}{section}{heading}{after}"


def find_section(page: str) -> str:
    """Return the section of the tries by the command line; "" where a page has none."""
    _, _, rest = page.partition(_SECTION)
    return f"{_SECTION}{rest.partition(chr(10) + '## ')[0]}" if rest else ""


def main() -> int:
    """Try cells until so many have bitten; return 1 where something did not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=40, help="tries that must bite")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--log", type=Path, help="keep tries here, go on behind, write the table")
    arguments = parser.parse_args()
    if arguments.log:
        arguments.log.parent.mkdir(parents=True, exist_ok=True)
    outcomes = read_log(arguments.log) if arguments.log else []
    own = [outcome.number for outcome in outcomes if outcome.seed == arguments.seed]
    number = max((arguments.first, *(last + 1 for last in own)))
    with tempfile.TemporaryDirectory() as folder:
        laboratory = Laboratory(Path(folder))
        while sum(outcome.has_bitten for outcome in outcomes) < arguments.tries:
            cell = draw(arguments.seed, number)
            started_s = time.monotonic()
            broken = laboratory.try_cell(cell, f"{arguments.seed}-{number}")
            outcome = Outcome(
                seed=arguments.seed,
                number=number,
                cell=cell,
                verdict="no bite" if broken is None else broken or "held",
                seconds=round(time.monotonic() - started_s, 1),
            )
            outcomes.append(outcome)
            print(f"{number}: {cell}: {outcome.verdict} ({outcome.seconds} s)", flush=True)
            if arguments.log:
                with arguments.log.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(asdict(outcome)) + "\n")
            number += 1
        laboratory.close()
    if arguments.log:
        page = _TABLE.read_text("utf-8")
        _TABLE.write_text(replace_section(page, format_section(outcomes)), "utf-8")
    verdicts = Counter(
        outcome.verdict if outcome.verdict in ("held", "no bite") else "broken"
        for outcome in outcomes
    )
    print(dict(verdicts), flush=True)
    return int(verdicts["broken"] > 0)


if __name__ == "__main__":
    sys.exit(main())
