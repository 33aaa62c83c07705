"""The list of mutants fits the package and the tests; `make mutants` runs it."""

from __future__ import annotations

import tomllib
from pathlib import Path

from mutants.run import MUTANTS_FILE, Mutant, find_list_faults, read_mutants

FLOORS = ("families", "rules", "cost", "search", "engine", "exporters", "intake", "codec")


def test_every_mutant_changes_one_place_and_names_tests_that_are_there() -> None:
    mutants = read_mutants()
    assert len(mutants) >= 30
    assert {mutant.file.partition("/")[0] for mutant in mutants} == set(FLOORS)
    assert not list(find_list_faults(mutants))


def test_every_mutant_that_a_user_has_to_see_changes_one_place() -> None:
    tables = tomllib.loads(MUTANTS_FILE.with_name("seen.toml").read_text("utf-8"))["mutant"]
    mutants = [
        Mutant(**{key: text for key, text in table.items() if key != "plan"}, tests=())
        for table in tables
    ]
    assert len(mutants) >= 30
    assert not list(find_list_faults(mutants))


def test_a_mutant_that_no_longer_fits_is_named(tmp_path: Path) -> None:
    package = tmp_path / "src" / "moewright"
    package.mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    (package / "twice.py").write_text("a = 1\nb = 1\n", encoding="utf-8")
    (tmp_path / "tests" / "test_here.py").write_text("def test_it(): ...\n", encoding="utf-8")
    mutant = Mutant(
        id="one",
        fault="",
        file="twice.py",
        old="= 1",
        new="= 2",
        tests=("test_here.py::test_it[1]", "test_here.py::test_gone", "test_gone.py"),
    )
    faults = list(find_list_faults([mutant], tmp_path))
    assert faults == [
        "one: twice.py has its text 2 times, not once: = 1",
        "one: there is no test test_here.py::test_gone",
        "one: there is no test test_gone.py",
    ]
