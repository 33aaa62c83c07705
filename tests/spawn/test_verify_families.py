"""`moewright verify` of folders that see too, and of Ling, beside transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hf_families import (
    LING_SOURCES,
    transpose_experts,
    write_ling,
    write_model,
)
from moewright.cli.main import main
from moewright.families.tiny import VOCABULARY
from selection import thorough

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.spawn

LING = {"bailing_moe_v2": "glm4_moe", "bailing_moe": "granitemoeshared"}


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCABULARY, (1, 8, 16), generator=generator)
    labels = ids.clone()
    labels[0, 5, 3:9] = -100
    path = tmp_path_factory.mktemp("batch") / "batch.safetensors"
    save_file({"input_ids": ids, "labels": labels}, path)
    return path


def write_folders(family: str, folder: Path) -> tuple[Path, Path]:
    """Write a model as transformers has it, and as it is published."""
    source = folder / "source"
    write_model(LING.get(family, family), source, **LING_SOURCES.get(LING.get(family, ""), {}))
    if family in LING:
        write_ling(source, folder / "published")
        return source, folder / "published"
    return source, source


def run_verify(hf_dir: Path, batch: Path, out: Path, layout: str) -> dict[str, torch.Tensor]:
    nproc = "2" if layout else "1"
    options = ("--batch", str(batch), "--layout", layout, "--nproc", nproc, "--out", str(out))
    assert main(("verify", str(hf_dir), *options)) == 0
    return load_file(out / "tensors.safetensors")


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    scale = expected.norm() if expected.norm() else 1.0
    return float((actual - expected).norm() / scale)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3_vl_moe", "ep2"),
        thorough("qwen3_vl_moe", "pp2"),
        ("bailing_moe_v2", "tp2,ep2"),
        thorough("bailing_moe", "tp2"),
        thorough("qwen3_5_moe", "tp2,ep2,mbs2"),
        thorough("llama4", "ep2"),
    ],
)
def test_families_without_a_class_of_their_own_equal_transformers(
    family: str, layout: str, batch: Path, tmp_path: Path
) -> None:
    """In logits, token losses and every gradient; a layout equals one process.

    Gradients are written as a folder of weights, whose names then change as those of weights.
    """
    source, published = write_folders(family, tmp_path)
    model_type = json.loads((source / "config.json").read_text())["model_type"]
    is_nested = "vision_config" in json.loads((source / "config.json").read_text())
    assert is_nested or model_type in LING.values()
    build = (
        transformers.AutoModelForImageTextToText if is_nested else transformers.AutoModelForCausalLM
    )
    model = build.from_pretrained(source, attn_implementation="eager", dtype=torch.float32)
    if family == "qwen3_vl_moe":
        transpose_experts(published)
    outputs = run_verify(published, batch, tmp_path / "one", "")
    data = load_file(batch)
    ids, labels = data["input_ids"][0], data["labels"][0]
    logits = model(ids).logits
    targets = labels[:, 1:].flatten()
    nll = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), targets, ignore_index=-100, reduction="none"
    ).view(len(labels), -1)
    (nll.sum() / (targets >= 0).sum()).backward()
    torch.testing.assert_close(outputs["logits"], logits.detach(), rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(outputs["nll"], nll.detach(), rtol=1e-4, atol=2e-5)
    with torch.no_grad():
        for parameter in model.parameters():
            gradient = parameter.grad
            parameter.copy_(torch.zeros_like(parameter) if gradient is None else gradient)
    gradients = tmp_path / "gradients"
    model.save_pretrained(gradients)
    if family in LING:
        write_ling(gradients, tmp_path / "renamed")
        gradients = tmp_path / "renamed"
    elif family == "qwen3_vl_moe":
        transpose_experts(gradients)
    expected = load_file(gradients / "model.safetensors")
    names = {name.removeprefix("grad/") for name in outputs if name.startswith("grad/")}
    beside = ("visual", "vision_model", "multi_modal", "expert_bias")
    assert names == {name for name in expected if not any(part in name for part in beside)}
    for name in names:
        # The floor for any two programs is that of tests/spawn/test_verify.py.
        assert distance(outputs[f"grad/{name}"], expected[name]) < 1e-5, name
    many = run_verify(published, batch, tmp_path / "many", layout)
    assert many.keys() == outputs.keys()
    for name, tensor in outputs.items():
        assert distance(many[name], tensor) < 3e-5, name
