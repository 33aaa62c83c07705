"""Files of the package: pins, licence, the check of the host, the Makefile and links of pages."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]

# A make that runs under `make test` would otherwise print the folder that it enters.
MAKE = ("make", "--no-print-directory")


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _pins() -> dict[str, str]:
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    pairs = [line.split("==") for line in lines]
    return {_canonical(name): version for name, version in pairs}


def test_every_direct_dependency_is_pinned_within_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    requirements = [
        Requirement(text)
        for text in (*project["dependencies"], *(text for extra in extras for text in extra))
    ]
    pins = _pins()
    for requirement in requirements:
        if requirement.name != "moewright":
            assert pins[_canonical(requirement.name)] in requirement.specifier


def test_pins_are_plain_versions() -> None:
    assert _pins()["torch"] == "2.13.0"
    for name, version in _pins().items():
        assert re.fullmatch(r"[0-9][0-9a-z.]*", version), name


def test_the_licence_is_the_whole_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_ci_runs_make_test_and_the_longer_proofs() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)
    assert script.read_text().rstrip().endswith("make test\nmake test-slow")


def test_make_train_from_a_bare_clone_shows_every_step(tmp_path: Path) -> None:
    for name in ("Makefile", "constraints.txt", "pyproject.toml", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    shown = subprocess.run(
        [*MAKE, "-n", "train"], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    steps = ["pip install", "data build", "bench machine", "moewright plan", "moewright train"]
    positions = [shown.index(step) for step in steps]
    assert positions[0] < min(positions[1:3])
    assert max(positions[1:3]) < positions[3] < positions[4]


def test_make_train_again_only_trains(tmp_path: Path) -> None:
    for name in ("Makefile", "constraints.txt", "pyproject.toml", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    targets = (
        ".venv/constraints.txt",
        ".venv/.ready",
        "runs/quickstart_data/corpus.json",
        "runs/machine.toml",
        "runs/quickstart/plan.json",
    )
    for name in targets:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    shown = subprocess.run(
        [*MAKE, "-n", "train"], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert len(shown.splitlines()) == 1
    assert "moewright train" in shown


def test_links_in_the_pages_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    links = [
        (page, target)
        for page in pages
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    ]
    assert len(links) > 5
    for page, target in links:
        assert (page.parent / target).exists(), f"{page}: {target}"
