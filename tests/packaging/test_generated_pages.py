"""The reference pages that are made from the code say what the code says."""

from __future__ import annotations

import re
from pathlib import Path

from docs.tools import command_reference, families, job_reference
from moewright.api import face

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def test_the_pages_of_the_command_line_are_the_programs_own_help() -> None:
    pages = command_reference.render_pages()
    for name, text in pages.items():
        page = command_reference.FOLDER / name
        assert page.read_text(encoding="utf-8") == text, "run: make docs"
        assert len(text.split()) < 4000, f"{name} is to be split"


def test_the_page_of_the_job_file_has_the_fields_and_defaults_of_the_records() -> None:
    page = job_reference.PAGE.read_text(encoding="utf-8")
    assert page == job_reference.render_page(), "run: make docs"


def test_the_page_of_families_says_what_planner_engine_and_weights_do() -> None:
    assert families.PAGE.read_text(encoding="utf-8") == families.render_page(), "run: make docs"


def test_every_key_of_a_job_file_is_described() -> None:
    assert job_reference.list_undescribed() == []


def test_the_page_of_the_python_interface_has_every_public_name() -> None:
    page = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^::: moewright\.api\.face\.(\w+)", page, flags=re.MULTILINE))
    assert shown == set(face.__all__)


def test_every_path_of_the_feature_map_exists() -> None:
    page = (DOCS / "feature_map.md").read_text(encoding="utf-8")
    roots = (ROOT / "src" / "moewright", ROOT / "tests", ROOT)
    paths = [word for word in re.findall(r"`([\w./]+)`", page) if word != "recompute"]
    assert len(paths) > 150
    missing = [path for path in paths if not any((root / path).exists() for root in roots)]
    assert not missing
