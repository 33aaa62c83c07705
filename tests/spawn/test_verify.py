"""`moewright verify` against Hugging Face transformers, and against itself in other layouts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hf_families import FAMILIES, VOCABULARY, write_fused_experts, write_model
from moewright.cli.main import main
from selection import thorough

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.spawn

ROWS, LENGTH = 8, 16


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {family: tmp_path_factory.mktemp(family) for family in (*FAMILIES, "fused")}
    for family in FAMILIES:
        write_model(family, found[family])
    write_fused_experts(found["qwen3_moe"], found["fused"])
    return found


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two batches; in the first, one row has no target at all and another a few fewer."""
    ids = torch.randint(
        0, VOCABULARY, (2, ROWS, LENGTH), generator=torch.Generator().manual_seed(3)
    )
    labels = ids.clone()
    labels[0, 0], labels[0, 5, 3:9] = -100, -100
    path = tmp_path_factory.mktemp("batch") / "batch.safetensors"
    save_file({"input_ids": ids, "labels": labels}, path)
    return path


def verified(
    hf_dir: Path, batch: Path, out: Path, layout: str, nproc: int, *more: str
) -> dict[str, torch.Tensor]:
    given = (
        "--batch",
        str(batch),
        "--layout",
        layout,
        "--nproc",
        str(nproc),
        "--out",
        str(out),
        *more,
    )
    assert main(("verify", str(hf_dir), *given)) == 0
    return load_file(out / "tensors.safetensors")


def curve_of(out: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = json.loads((out / "curve.json").read_text())
    return found


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    wanted = labels[:, 1:].flatten()
    flat = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), wanted, ignore_index=-100, reduction="none"
    )
    return flat.view(len(labels), -1)


def reference_gradient(gradients: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """A gradient of transformers, which holds experts fused, by the name in the file."""
    name = name.replace("block_sparse_moe", "mlp")
    if name in gradients:
        return gradients[name]
    found = re.fullmatch(r"(.*\.experts\.)(\d+)\.(\w+)\.weight", name)
    assert found is not None, name
    base, expert, part = found[1], int(found[2]), found[3]
    if part in ("down_proj", "w2"):
        return gradients[f"{base}down_proj"][expert]
    gate, up = gradients[f"{base}gate_up_proj"][expert].chunk(2)
    return gate if part in ("gate_proj", "w1") else up


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative in the Euclidean norm; a tensor that should be zero counts absolutely."""
    return float((found - wanted).norm() / (wanted.norm() if wanted.norm() else 1.0))


@pytest.mark.parametrize("family", [*FAMILIES, "fused"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_equals_transformers(
    family: str, optimizer: str, checkpoints: dict[str, Path], batch: Path, tmp_path: Path
) -> None:
    more = (
        "--steps",
        "3",
        "--optimizer",
        optimizer,
        "--lr",
        "0.02",
        "--clip",
        "0.5",
        "--betas",
        "0.9,0.99",
        # Adam divides a gradient that is rounding by itself; a smaller eps would compare rounding.
        "--eps",
        "1e-6",
    )
    found = verified(checkpoints[family], batch, tmp_path, "mbs4", 1, *more)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoints[family], attn_implementation="eager", dtype=torch.float32
    )
    data = load_file(batch)
    rule = (
        torch.optim.SGD(model.parameters(), lr=0.02)
        if optimizer == "sgd"
        else torch.optim.AdamW(
            model.parameters(), lr=0.02, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.0
        )
    )
    losses, norms = [], []
    for step in range(3):
        ids, labels = data["input_ids"][step % 2], data["labels"][step % 2]
        logits = model(ids).logits
        nll = token_loss(logits, labels)
        loss = nll.sum() / (labels[:, 1:] >= 0).sum()
        rule.zero_grad()
        loss.backward()
        if step == 0:
            torch.testing.assert_close(found["logits"], logits.detach(), rtol=1e-4, atol=2e-5)
            torch.testing.assert_close(found["nll"], nll.detach(), rtol=1e-4, atol=2e-5)
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
            stored = load_file(checkpoints[family] / "model.safetensors")
            stored = {
                name: tensor for name, tensor in stored.items() if "correction_bias" not in name
            }
            assert {
                name.removeprefix("grad/") for name in found if name.startswith("grad/")
            } == stored.keys()
            for name, tensor in stored.items():
                wanted = reference_gradient(gradients, name)
                assert found[f"grad/{name}"].shape == tensor.shape
                # transformers in fp32 is up to 2.1e-6 from itself in fp64, which is the floor for
                # any two programs
                assert distance(found[f"grad/{name}"], wanted) < 1e-5, name
        losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        rule.step()
    curve = curve_of(tmp_path)
    assert curve["loss"] == pytest.approx(losses, rel=2e-5)
    assert curve["grad_norm"] == pytest.approx(norms, rel=1e-4)


LAYOUTS = [
    ("qwen3_moe", 2, "ep2,mbs2"),
    ("fused", 4, "ep4"),
    thorough("mixtral", 4, "ep2,mbs2,zero0"),
    ("olmoe", 2, "ep2"),
    ("qwen3", 2, "mbs4"),
    ("deepseek_v3", 4, "ep2,zero3"),
    thorough("qwen3_moe", 4, "tp2,ep2,mbs2"),
    ("mixtral", 4, "tp2,etp4"),
    thorough("olmoe", 2, "tp2,ep2"),
    ("qwen3", 2, "tp2,zero0"),
    ("qwen3_moe", 4, "pp2,ep2,mbs2"),  # the embedding is tied: both ends of the pipeline hold it
    ("qwen3_moe", 3, "pp3,layout='E|tt|L'"),
    thorough("qwen3_moe", 8, "pp2,zero0"),
    ("mixtral", 2, "pp2,vpp2,layout='E|t|t|L'"),
    thorough("qwen3", 8, "pp2,tp2,mbs2"),
    thorough("deepseek_v2", 4, "tp2,ep4"),
    ("deepseek_v3", 4, "tp2,ep2,mbs2"),
    ("qwen3_moe", 4, "cp4,ep2,mbs2"),
    ("olmoe", 4, "tp2,cp2,ep4,mbs2,cp_comm=allgather"),
    thorough("deepseek_v3", 4, "cp2,ep4"),
    ("deepseek_v2", 4, "tp2,cp2,cp_comm=allgather"),
    thorough("qwen3_moe", 4, "cp2,ep4,mbs2,cp_comm=a2a"),
    ("deepseek_v3", 4, "cp4,ep2,cp_comm=a2a+p2p"),
    ("qwen2_moe", 4, "tp2,cp2,ep4"),
    ("qwen2_moe", 4, "tp4,pp1,ep2,etp2"),  # more ranks than key heads
    ("gpt_oss", 4, "tp2,ep2,mbs2"),
    thorough("gpt_oss", 4, "tp2,ep2,etp2"),
    ("gpt_oss", 4, "cp2,ep4,cp_comm=a2a"),
    ("gpt_oss", 4, "pp2,ep2,zero0,recompute=moe_act+core_attn"),
    ("gpt_oss", 2, "ep2,zero3"),
    ("llama", 8, "tp4,sp0,pp2"),
    thorough("llama", 4, "tp2,zero0,recompute=mlp"),
]


@pytest.mark.parametrize(("family", "nproc", "layout"), LAYOUTS)
def test_a_layout_equals_one_process(
    family: str, nproc: int, layout: str, checkpoints: dict[str, Path], batch: Path, tmp_path: Path
) -> None:
    more = ("--steps", "4", "--lr", "0.02")
    one = verified(checkpoints[family], batch, tmp_path / "one", "", 1, *more)
    many = verified(checkpoints[family], batch, tmp_path / "many", layout, nproc, *more)
    assert one.keys() == many.keys()
    for name in one:
        assert distance(many[name], one[name]) < 3e-5, name
    for key, wanted in curve_of(tmp_path / "one").items():
        assert curve_of(tmp_path / "many")[key] == pytest.approx(wanted, rel=1e-5)


def refusal(
    capsys: pytest.CaptureFixture[str], hf_dir: Path, batch: Path, out: Path, *more: str
) -> str:
    assert main(("verify", str(hf_dir), "--batch", str(batch), "--out", str(out), *more)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_what_cannot_be_verified_is_refused_by_name(
    checkpoints: dict[str, Path], batch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, out = checkpoints["mixtral"], tmp_path / "out"
    spoiled = tmp_path / "hf"
    spoiled.mkdir()
    (spoiled / "config.json").write_text((good / "config.json").read_text())
    stored = load_file(good / "model.safetensors")
    gate, expert = (
        "model.layers.1.block_sparse_moe.gate.weight",
        "model.layers.0.block_sparse_moe.experts.3.w3.weight",
    )
    for change, said in (
        ({expert: None}, f"{expert}: is missing"),
        (
            {"model.layers.0.extra": torch.ones(2)},
            "model.layers.0.extra: is not a tensor of this model",
        ),
        ({gate: torch.ones(4, 31)}, f"{gate}: has shape [4, 31]"),
        ({gate: torch.ones(4, 32, dtype=torch.int32)}, f"{gate}: is of I32"),
    ):
        changed = {
            name: tensor for name, tensor in {**stored, **change}.items() if tensor is not None
        }
        save_file(changed, spoiled / "model.safetensors")
        assert said in refusal(capsys, spoiled, batch, out)
    (spoiled / "model.safetensors").write_bytes(b"nothing")
    assert "is no safetensors file" in refusal(capsys, spoiled, batch, out)
    wrong = tmp_path / "wrong.safetensors"
    ids = torch.zeros(1, 2, 4, dtype=torch.int64)
    save_file({"input_ids": ids + VOCABULARY, "labels": ids}, wrong)
    assert f"input_ids={VOCABULARY}: ids must be in 0..{VOCABULARY - 1}" in refusal(
        capsys, good, wrong, out
    )
    save_file({"input_ids": ids}, wrong)
    assert "labels: is missing" in refusal(capsys, good, wrong, out)
    assert "nearest legal value" in refusal(
        capsys, good, batch, out, "--layout", "ep3", "--nproc", "3"
    )
    assert "--betas=0.9" in refusal(capsys, good, batch, out, "--betas", "0.9")
    assert not (out / "tensors.safetensors").exists()
