"""The base install plans without torch, in a fresh environment like a user's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # what its tests share takes seconds

ROOT = Path(__file__).resolve().parents[2]

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def moewright(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a function that runs the installed program with the base dependencies only."""
    folder = tmp_path_factory.mktemp("base")
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    python = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    # The few modules that a test imports are compiled when it does.
    install = [*pip, "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    subprocess.run([*install, "-c", ROOT / "constraints.txt", ROOT], check=True)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        program = [venv / "bin" / "moewright", *arguments]
        return subprocess.run(
            program, cwd=folder, capture_output=True, text=True, timeout=60, check=False
        )

    engine_packages = "('torch', 'safetensors', 'tokenizers')"
    check = f"import importlib.util as u; assert not any(map(u.find_spec, {engine_packages}))"
    subprocess.run([python, "-c", check], check=True)
    return run


def test_the_help_lists_the_verbs(moewright: Run) -> None:
    done = moewright("--help")
    assert done.returncode == 0, done.stderr
    assert "estimate" in done.stdout


def test_a_plan_is_made_without_torch(moewright: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    done = moewright(
        "plan", "Qwen3-235B-A22B", "--on", "256xH800", "--top", "3", "--json", str(path)
    )
    assert done.returncode == 0, done.stderr
    assert "tp" in done.stdout
    assert "by default --seq-len 4096" in done.stdout
    plan = json.loads(path.read_text())
    assert plan["layout"]["world_size"] == 256
    assert plan["estimate"]["verdict"] in ("fits", "uncertain")
    assert len(plan["fingerprint"]) == 16


def test_an_estimate_is_made_without_torch(moewright: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    layout = "tp2,ep8,pp8,vpp2,mbs1,recompute=moe_act+layernorm"
    model = "Qwen/Qwen3-235B-A22B"
    done = moewright("estimate", model, "--on", "256xH800", "--layout", layout, "--json", str(path))
    assert done.returncode == 3, done.stderr  # the layout does not fit
    plan = json.loads(path.read_text())
    assert plan["layout"]["vpp"] == 2
    assert len(plan["estimate"]["ledgers"]) == 8
    assert plan["estimate"]["step_s"] > 0


def test_a_verb_of_the_engine_says_what_to_install(moewright: Run, tmp_path: Path) -> None:
    done = moewright("data", "build", "--out", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "moewright: this verb needs tokenizers; install it with: pip install 'moewright[engine]'"
    ]


def test_the_wheel_ships_licences_and_its_bill_of_materials(moewright: Run) -> None:
    place = "import moewright; print(moewright.__path__[0])"
    python = Path(str(moewright("--version").args[0])).with_name("python")
    package = subprocess.run([python, "-c", place], capture_output=True, text=True, check=True)
    (information,) = Path(package.stdout.strip()).parent.glob("moewright-*.dist-info")
    licences = {path.name for path in (information / "licenses").rglob("*") if path.is_file()}
    assert licences == {"LICENSE"}
    bill = json.loads((information / "sboms" / "moewright.cdx.json").read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    components = {item["name"]: item for item in bill["components"]}
    shipped = [item for item in components.values() if "hashes" in item]
    assert shipped == []  # no file of others is in the wheel
    assert components["numpy"]["scope"] == "required"
    assert components["torch"]["scope"] == "optional"
    references = [item["bom-ref"] for item in bill["components"]]
    assert len(set(references)) == len(references)
    assert bill["dependencies"][0]["dependsOn"] == references
