"""Faults of the real program, by its command line: cells drawn at random, and the table of them.

    python tests/faults/tries.py --tries 40 --seed 7     prints a line a try, and the counts
    python tests/faults/tries.py --tries 1 --seed 7 --first 12     the thirteenth of them again
    python tests/faults/tries.py --tries 400 --log FILE     goes on where FILE ends; and the table

A try whose fault did not bite is not counted: the run must have noticed it, or been ended by it.
After each the same command brings the run to its end, the losses and norms of all steps are those
of the run without a fault, bit for bit, and `report`, `diagnose` and the studio answer.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from threading import Lock

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from faults.catalogue import draw  # noqa: E402
from faults.cells import Try, parse_try  # noqa: E402
from faults.laboratory import Laboratory, Result  # noqa: E402


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A try that was made, by its number of a seed."""

    seed: int
    number: int
    cell: Try
    result: Result
    seconds: float


def read_log(path: Path) -> list[Outcome]:
    """Read the tries of earlier starts; none where there is no file."""
    if not path.exists():
        return []
    outcomes = []
    for line in path.read_text("utf-8").splitlines():
        data = json.loads(line)
        cell, result = parse_try(data.pop("cell")), Result(**data.pop("result"))
        outcomes.append(Outcome(cell=cell, result=result, **data))
    return outcomes


class Series:
    """Tries of one seed, several at a time, until so many have bitten or the time is over."""

    def __init__(self, arguments: argparse.Namespace, outcomes: list[Outcome]) -> None:
        self._arguments = arguments
        self.outcomes = outcomes
        made = {outcome.number for outcome in outcomes if outcome.seed == arguments.seed}
        self._numbers = (number for number in count(arguments.first) if number not in made)
        self._lock = Lock()
        self._end_s = time.monotonic() + 60.0 * arguments.minutes

    def run(self, laboratory: Laboratory) -> None:
        """Make the tries."""
        jobs: int = self._arguments.jobs
        with ThreadPoolExecutor(jobs) as pool:
            for made in [pool.submit(self._make_tries, laboratory) for _ in range(jobs)]:
                made.result()

    def _make_tries(self, laboratory: Laboratory) -> None:
        while time.monotonic() < self._end_s:
            with self._lock:
                bitten = sum(outcome.result.has_bitten for outcome in self.outcomes)
                if bitten >= self._arguments.tries:
                    return
                number = next(self._numbers)
            self._note(self._make_try(laboratory, number))

    def _make_try(self, laboratory: Laboratory, number: int) -> Outcome:
        seed: int = self._arguments.seed
        cell = draw(seed, number)
        started_s = time.monotonic()
        result = laboratory.try_cell(cell, f"{seed}-{number}")
        seconds = round(time.monotonic() - started_s, 1)
        return Outcome(seed=seed, number=number, cell=cell, result=result, seconds=seconds)

    def _note(self, outcome: Outcome) -> None:
        with self._lock:
            self.outcomes.append(outcome)
            told = f"{outcome.cell}: {outcome.result.verdict} ({outcome.seconds} s)"
            print(f"{outcome.number}: {told}", flush=True)
            if self._arguments.log:
                with self._arguments.log.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(asdict(outcome)) + "\n")


@contextmanager
def _folder_of_tries(log: Path | None) -> Iterator[Path]:
    """Keep what runs recorded without a fault beside the log, where there is one."""
    if log is None:
        with tempfile.TemporaryDirectory() as temporary:
            yield Path(temporary)
    else:
        folder = log.with_suffix("")
        folder.mkdir(parents=True, exist_ok=True)
        yield folder.resolve()


def main() -> int:
    """Try cells until so many have bitten; return 1 where something did not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=40, help="tries that must bite")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="tries at a time")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin none after so long")
    parser.add_argument("--log", type=Path, help="keep tries here, go on behind, write the page")
    arguments = parser.parse_args()
    outcomes = read_log(arguments.log) if arguments.log else []
    with _folder_of_tries(arguments.log) as folder:
        laboratory = Laboratory(folder)
        try:
            Series(arguments, outcomes).run(laboratory)
        finally:
            laboratory.close()
    if arguments.log:
        from faults.page import write_page

        write_page(outcomes)
    print(_count_verdicts(outcomes), flush=True)
    return int(any(o.result.has_bitten and not o.result.has_held for o in outcomes))


def _count_verdicts(outcomes: Sequence[Outcome]) -> dict[str, int]:
    results = [outcome.result for outcome in outcomes]
    verdicts = (
        "no bite" if not result.has_bitten else "held" if result.has_held else "broken"
        for result in results
    )
    return dict(Counter(verdicts))


if __name__ == "__main__":
    sys.exit(main())
