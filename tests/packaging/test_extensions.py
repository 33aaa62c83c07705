"""A tiny package adds devices, a network, a model and a tracker, without a change of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import moewright.intake.added_catalogues
from moewright.intake import catalogue
from moewright.intake.devices import read_devices

PYPROJECT_ENTRY_POINTS = """
[moewright.catalogue]
acme = acme_moewright

[moewright.trackers]
acme = acme_moewright:LineTracker
"""
PACKAGE = """
class LineTracker:
    def __init__(self, run_dir, config):
        self.file = (run_dir / "acme.txt").open("w")

    def log(self, scalars, step):
        self.file.write(f"{step} {scalars['train/loss']}\\n")

    def close(self):
        self.file.close()
"""
NETWORKS = """
[[network]]
kind = "acmenet"
joins = "network"
title = "the network of Acme's clusters"
latency_s = 1e-5
Bps = { any = 30e9 }
source = "Acme's datasheet"
"""


def own_entry(kind: str) -> dict:
    """Return an entry of our own catalogue, as a form for an added one."""
    root = Path(moewright.intake.added_catalogues.__file__).parent / "data"
    if kind == "model":
        models = json.loads((root / "models.json").read_text())
        return {"source": "Acme", "config": models["Qwen/Qwen3-30B-A3B"]["config"]}
    parts = json.loads((root / "hardware.json").read_text())["parts"]
    return next(part for part in parts if part["aliases"][0] == "H100")


def write_package(folder: Path, device: dict | None = None) -> None:
    package = folder / "acme_moewright"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(PACKAGE)
    device = device or {
        **own_entry("device"),
        "name": "Acme X9",
        "aliases": ["X9"],
        "network": "acmenet",
        "words": [],
    }
    (package / "hardware.json").write_text(json.dumps({"parts": [device]}))
    (package / "networks.toml").write_text(NETWORKS)
    (package / "models.json").write_text(json.dumps({"acme/Tiny-MoE": own_entry("model")}))
    info = folder / "acme_moewright-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-moewright\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(PYPROJECT_ENTRY_POINTS)


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join((str(folder), *filter(None, sys.path)))
    return subprocess.run(
        [sys.executable, "-m", "moewright", *arguments],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_installed_package_adds_to_the_catalogue(tmp_path: Path) -> None:
    write_package(tmp_path)
    layout = ("--layout", "ep8,mbs1", "--global-batch", "64")
    added = run(tmp_path, "estimate", "Tiny-MoE", "--on", "16xX9", *layout, "--json", "-")
    assert added.returncode == 0, added.stderr
    hardware = json.loads(added.stdout)["hardware"]
    assert hardware["device"]["name"] == "Acme X9"
    assert hardware["fabric"]["network"] == "acmenet"
    own = run(tmp_path, "estimate", "Qwen3-30B-A3B", "--on", "16xH100", *layout, "--json", "-")
    acmenet = ("--network", "acmenet")
    changed = run(
        tmp_path, "estimate", "Qwen3-30B-A3B", "--on", "16xH100", *layout, *acmenet, "--json", "-"
    )
    own_fabric, fabric = (json.loads(r.stdout)["hardware"]["fabric"] for r in (own, changed))
    assert own_fabric["network_Bps"]["value"] != fabric["network_Bps"]["value"] == 30e9
    without = run(tmp_path.parent, "estimate", "Tiny-MoE", "--on", "16xX9", *layout)
    assert without.returncode == 2


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({}, "is in the catalogue already"),
        ({"aliases": ["X9"], "name": "X9", "network": "acmenot"}, "acmenot"),
        ({"aliases": ["X9"], "name": "X9", "memory_gb": "much"}, "memory_gb"),
    ],
)
def test_a_file_of_a_package_is_checked(tmp_path: Path, changes: dict, field: str) -> None:
    write_package(tmp_path, {**own_entry("device"), **changes})
    answer = run(tmp_path, "hardware")
    assert answer.returncode == 2
    assert field in answer.stderr
    assert "acme_moewright/hardware.json" in answer.stderr
    assert len(answer.stderr.splitlines()) == 1


def test_the_catalogue_without_packages_has_no_other_entries() -> None:
    assert "X9" not in [device.name for device in read_devices()]
    assert not catalogue.has_model("Tiny-MoE")
