"""A tiny package adds devices, a network, models, a family and a tracker, without our change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import moewright.intake.networks
from moewright.intake import catalogue
from moewright.intake.devices import read_devices

pytestmark = pytest.mark.slow  # what its tests share takes seconds

PYPROJECT_ENTRY_POINTS = """
[moewright.catalogue]
acme = acme_moewright

[moewright.families]
tulip = acme_moewright.tulip:TULIP

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
FAMILY = """
from moewright.families.record import Family
from moewright.families.table import FAMILIES

TULIP = Family(
    model_type={model_type!r}, architecture="TulipForCausalLM", config=FAMILIES["qwen3_moe"].config
)
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
    root = Path(moewright.intake.networks.__file__).parent / "data"
    if kind == "model":
        models = json.loads((root / "models.json").read_text())
        return {"source": "Acme", "config": models["Qwen/Qwen3-30B-A3B"]["config"]}
    parts = json.loads((root / "hardware.json").read_text())["parts"]
    return next(part for part in parts if part["aliases"][0] == "H100")


def write_package(
    folder: Path, device: dict | None = None, *, family: str = FAMILY.format(model_type="tulip")
) -> None:
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
    (package / "tulip.py").write_text(family)
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
    layout = ("--layout", "ep8,mbs1,recompute=full", "--global-batch", "64")
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


def write_config(folder: Path) -> Path:
    config = own_entry("model")["config"] | {"model_type": "tulip"}
    (folder / "garden").mkdir()
    (folder / "garden" / "config.json").write_text(json.dumps(config))
    return folder / "garden"


def test_an_installed_package_adds_a_family(tmp_path: Path) -> None:
    write_package(tmp_path)
    layout = ("--layout", "ep8,mbs1,recompute=full", "--global-batch", "64")
    arguments = ("--on", "16xH100", *layout, "--json", "-")
    added = run(tmp_path, "estimate", str(write_config(tmp_path)), *arguments)
    assert added.returncode == 0, added.stderr
    own = run(tmp_path, "estimate", "Qwen3-30B-A3B", *arguments)
    plans = [json.loads(answer.stdout) for answer in (added, own)]
    assert [plan["model"]["family"] for plan in plans] == ["tulip", "qwen3_moe"]
    peaks = [plan["estimate"]["peak_bytes"] for plan in plans]
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize(
    ("family", "rule"),
    [
        (FAMILY.format(model_type="llama"), "has the model_type llama, which is a family already"),
        ("TULIP = 3", "is no Family of moewright.families.record"),
        ("import nowhere", "acme_moewright.tulip:TULIP cannot be imported"),
    ],
)
def test_a_family_of_a_package_is_checked(tmp_path: Path, family: str, rule: str) -> None:
    write_package(tmp_path, family=family)
    answer = run(tmp_path, "estimate", str(write_config(tmp_path)), "--on", "16xH100")
    assert answer.returncode == 2
    assert rule in answer.stderr
    assert len(answer.stderr.splitlines()) == 1


def test_the_catalogue_without_packages_has_no_other_entries() -> None:
    assert "X9" not in [device.name for device in read_devices()]
    assert not catalogue.has_model("Tiny-MoE")


EXPORTS = """
from moewright.spec.errors import BadInput, Reason

def render(plan):
    if plan.layout.tp > 1:
        raise BadInput(Reason(field="layout.tp", value=str(plan.layout.tp), rule="is 1 at Acme"))
    return f"experts_over = {plan.layout.ep}\\n"

def read(path):
    if path.suffix != ".acme":
        return None
    if "broken" in path.name:
        raise ZeroDivisionError("nothing")
    return path.read_text().replace("acme", "torchrun --nproc-per-node 8 pretrain_gpt.py")
"""
SCRIPT = (
    "acme --num-layers 4 --hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 512 "
    "--seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 16 "
    "--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 4 --vocab-size 1024 "
    "--make-vocab-size-divisible-by 128 --tokenizer-type NullTokenizer --bf16 --swiglu "
    "--disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
    "--use-distributed-optimizer --moe-grouped-gemm"
)


def test_an_installed_package_adds_a_trainer(tmp_path: Path) -> None:
    write_package(tmp_path)
    (tmp_path / "acme_moewright" / "trainer.py").write_text(EXPORTS)
    entries = tmp_path / "acme_moewright-1.0.dist-info" / "entry_points.txt"
    entries.write_text(
        "[moewright.exporters]\nacme = acme_moewright.trainer:render\n"
        "[moewright.readers]\nacme = acme_moewright.trainer:read\n"
    )
    script = tmp_path / "job.acme"
    script.write_text(SCRIPT)
    plan = str(tmp_path / "plan.json")
    answer = run(tmp_path, "export", "--from-flags", str(script), "--on", "H100", "--json", plan)
    assert answer.returncode == 0, answer.stderr
    written = run(tmp_path, "export", plan, "--to", "acme")
    assert (written.returncode, written.stdout) == (0, "experts_over = 4\n")
    unknown = run(tmp_path, "export", plan, "--to", "acne")
    assert unknown.returncode == 2
    assert "nearest legal value: acme" in unknown.stderr
    script.rename(tmp_path / "broken.acme")
    broken = run(tmp_path, "export", "--from-flags", str(tmp_path / "broken.acme"), "--on", "H100")
    assert broken.returncode == 2
    assert "acme_moewright.trainer:read failed (ZeroDivisionError: nothing)" in broken.stderr
    assert len(broken.stderr.splitlines()) == 1
