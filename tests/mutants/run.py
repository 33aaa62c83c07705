"""Check that tests catch faults: each mutant of mutants.toml is one wrong line of the package.

    python tests/mutants/run.py                run all of them (`make mutants`)
    python tests/mutants/run.py --list         say what there is
    python tests/mutants/run.py ID [ID ...]    run some of them

The tests of the list first run on the package as it is. Then each mutant gets a copy of src of its
own, with its line in it, and its tests run on that copy until one fails. The exit status is 1 if a
mutant survives, and 2 if the list no longer fits the package.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
MUTANTS_FILE = Path(__file__).with_name("mutants.toml")
# What CI leaves out must not be what catches a mutant.
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not thorough")
TIME_LIMIT_S = 600


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """A fault that replaces a text of one line of a file, and the tests that catch it."""

    id: str
    fault: str  # a sentence that says what breaks
    file: str  # below src/moewright
    old: str
    new: str
    tests: tuple[str, ...]  # files or node ids below tests


class Outcome(StrEnum):
    """What became of the tests of a mutant."""

    CAUGHT = "caught"
    SURVIVED = "SURVIVED"
    BROKEN = "BROKEN"  # the tests did not run: the mutant proves nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The outcome of a mutant with the time and the last lines of its tests."""

    outcome: Outcome
    seconds: float
    output: str


def read_mutants(path: Path = MUTANTS_FILE) -> tuple[Mutant, ...]:
    """Read the list of mutants."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    return tuple(Mutant(**{**table, "tests": tuple(table["tests"])}) for table in tables)


def find_list_faults(mutants: Sequence[Mutant], repository: Path = REPOSITORY) -> Iterator[str]:
    """Yield what keeps a mutant from being applied: a text that is not found once, a lost test."""
    ids = [mutant.id for mutant in mutants]
    for mutant in mutants:
        if ids.count(mutant.id) > 1:
            yield f"{mutant.id}: the id is taken twice"
        if "\n" in mutant.old or mutant.old == mutant.new:
            yield f"{mutant.id}: a mutant changes a text inside one line"
        path = repository / "src" / "moewright" / mutant.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        count = text.count(mutant.old)
        if count != 1:
            yield f"{mutant.id}: {mutant.file} has its text {count} times, not once: {mutant.old}"
        for test in mutant.tests:
            file, _, name = test.partition("::")
            test_path = repository / "tests" / file
            text = test_path.read_text(encoding="utf-8") if test_path.is_file() else ""
            if f"def {name.partition('[')[0]}" not in text:
                yield f"{mutant.id}: there is no test {test}"


@contextmanager
def copied_package(repository: Path, mutant: Mutant | None) -> Iterator[Path]:
    """Copy src into a temporary folder, with a mutant in it if there is one."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(repository / "src", source)
        if mutant is not None:
            path = source / "moewright" / mutant.file
            text = path.read_text(encoding="utf-8")
            path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        yield source


def run_tests(repository: Path, source: Path, tests: Sequence[str], *options: str) -> Result:
    """Run tests on the package below `source`; the exit status tells what became of them."""
    environment = {**os.environ, "PYTHONPATH": str(source)}
    started = time.monotonic()
    imported = subprocess.run(
        [sys.executable, "-c", "import moewright; print(moewright.__file__)"],
        env=environment,
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    if imported != str(source / "moewright" / "__init__.py"):
        return Result(outcome=Outcome.BROKEN, seconds=0.0, output=f"imports {imported}")
    process = subprocess.Popen(
        [sys.executable, *PYTEST, *options, *(f"tests/{test}" for test in tests)],
        env=environment,
        cwd=repository,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that the processes of a test that hangs end with it
    )
    try:
        output, _ = process.communicate(timeout=TIME_LIMIT_S)
        status = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        status = -1
    outcomes = {0: Outcome.SURVIVED, 1: Outcome.CAUGHT}  # pytest: all passed, some failed
    return Result(
        outcome=outcomes.get(status, Outcome.BROKEN),
        seconds=time.monotonic() - started,
        output="\n".join(output.splitlines()[-12:]),
    )


def check_unmutated(repository: Path, mutants: Sequence[Mutant], jobs: int) -> bool:
    """Run the tests of all mutants on the package as it is, which they have to pass."""
    tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    with copied_package(repository, None) as source:
        result = run_tests(repository, source, tests, "-n", str(jobs), "--dist", "worksteal")
    passed = result.outcome is Outcome.SURVIVED
    summary = result.output if not passed else result.output.splitlines()[-1]
    print(f"without a mutant {'all tests pass' if passed else 'TESTS FAIL'}: {summary}", flush=True)
    return passed


def run_mutant(repository: Path, mutant: Mutant) -> Result:
    """Run the tests of one mutant on a copy of the package that has it, and print the result."""
    with copied_package(repository, mutant) as source:
        result = run_tests(repository, source, mutant.tests, "-x")
    print(f"{result.outcome:8} {result.seconds:6.1f} s  {mutant.id}: {mutant.fault}", flush=True)
    if result.outcome is not Outcome.CAUGHT:
        print(result.output, flush=True)
    return result


def main() -> int:
    """Run what the command line asks for and return the exit status."""
    parser = argparse.ArgumentParser(description="Check that tests catch faults.")
    parser.add_argument("ids", nargs="*", help="the mutants to run; all without any")
    parser.add_argument("--list", action="store_true", help="list the mutants and run nothing")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--mutants", type=Path, default=MUTANTS_FILE, help="another list")
    parser.add_argument("--repository", type=Path, default=REPOSITORY, help="another checkout")
    arguments = parser.parse_args()
    repository = arguments.repository.resolve()
    mutants = read_mutants(arguments.mutants)
    if unknown := set(arguments.ids) - {mutant.id for mutant in mutants}:
        parser.error(f"no such mutant: {' '.join(sorted(unknown))}")
    if arguments.ids:
        mutants = tuple(mutant for mutant in mutants if mutant.id in arguments.ids)
    if arguments.list:
        for mutant in mutants:
            print(f"{mutant.id}: {mutant.fault} ({mutant.file}; {' '.join(mutant.tests)})")
        return 0
    if faults := tuple(find_list_faults(mutants, repository)):
        print(*faults, sep="\n")
        return 2
    passed = check_unmutated(repository, mutants, arguments.jobs)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        results = list(pool.map(lambda mutant: run_mutant(repository, mutant), mutants))
    caught = sum(result.outcome is Outcome.CAUGHT for result in results)
    print(f"{caught} of {len(results)} mutants are caught")
    return 0 if passed and caught == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
