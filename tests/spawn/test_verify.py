"""`moewright verify` equals Hugging Face transformers, and itself in other layouts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hf_families import FAMILIES, save_gradients, write_fused_experts, write_model
from moewright.cli.main import main
from moewright.families.tiny import VOCABULARY
from selection import thorough

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.spawn

ROWS = 8
LENGTH = 16


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {family: tmp_path_factory.mktemp(family) for family in (*FAMILIES, "fused")}
    for family in FAMILIES:
        write_model(family, folders[family])
    write_fused_experts(folders["qwen3_moe"], folders["fused"])
    return folders


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two batches; in the first, a row has no target at all and another a few fewer."""
    ids = torch.randint(
        0, VOCABULARY, (2, ROWS, LENGTH), generator=torch.Generator().manual_seed(3)
    )
    labels = ids.clone()
    labels[0, 0] = -100
    labels[0, 5, 3:9] = -100
    path = tmp_path_factory.mktemp("batch") / "batch.safetensors"
    save_file({"input_ids": ids, "labels": labels}, path)
    return path


def run_verify(
    hf_dir: Path, batch: Path, out: Path, layout: str, nproc: int, *more: str
) -> dict[str, torch.Tensor]:
    options = ("--batch", str(batch), "--layout", layout, "--nproc", str(nproc), "--out", str(out))
    assert main(("verify", str(hf_dir), *options, *more)) == 0
    return load_file(out / "tensors.safetensors")


def read_curve(out: Path) -> dict[str, list[float]]:
    curve: dict[str, list[float]] = json.loads((out / "curve.json").read_text())
    return curve


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    targets = labels[:, 1:].flatten()
    flat = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), targets, ignore_index=-100, reduction="none"
    )
    return flat.view(len(labels), -1)


def reference_gradient(gradients: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return a gradient of transformers, which fuses experts, by the name in the file."""
    granite = {
        "input_linear.weight": "experts.gate_up_proj",
        "output_linear.weight": "experts.down_proj",
        "router.layer.weight": "router.weight",
    }
    for stored, own in granite.items():
        if f"block_sparse_moe.{stored}" in name:
            name = name.replace(stored, own)
    if name in gradients:
        return gradients[name]
    if ".indexer." in name:  # what an indexer chooses has no gradient
        return torch.zeros(())
    name = name.replace("block_sparse_moe", "mlp")
    others = (
        name.replace("mlp.gate.", "mlp.router."),  # Phi's
        name.replace("mlp.router.gate.", "mlp.gate."),  # Hy3's
        name.replace("mlp.shared_mlp.", "mlp.shared_experts."),
    )
    for own in (name, *others):
        if own in gradients:
            return gradients[own]
    name = name.replace("backbone.", "model.")  # Nemotron-H's published names
    if name in gradients:
        return gradients[name]
    match = re.fullmatch(r"(.*\.experts\.)(\d+)\.(\w+)\.weight", name)
    assert match is not None, name
    base = match[1]
    expert = int(match[2])
    part = match[3]
    if part in ("down_proj", "w2"):
        return gradients[f"{base}down_proj"][expert]
    if f"{base}up_proj" in gradients:
        return gradients[f"{base}up_proj"][expert]
    gate, up = gradients[f"{base}gate_up_proj"][expert].chunk(2)
    return gate if part in ("gate_proj", "w1") else up


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative distance in the Euclidean norm.

    A tensor that should be zero counts absolutely.
    """
    scale = expected.norm() if expected.norm() else 1.0
    return float((actual - expected).norm() / scale)


# Families without mathematics of their own.
ALIKE = (
    "dots1",
    "solar_open",
    "hy_v3",
    "minimax_m2",
    "glm4_moe_lite",
    "granitemoe",
    "qwen3_5_moe_text",
    "nemotron",
    "olmo3",
)
CASES = [thorough(family) if family in ALIKE else family for family in (*FAMILIES, "fused")]


@pytest.mark.turns
@pytest.mark.parametrize("family", CASES)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_verify_equals_transformers(
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
    outputs = run_verify(checkpoints[family], batch, tmp_path, "mbs4", 1, *more)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoints[family], attn_implementation="eager", dtype=torch.float32
    )
    data = load_file(batch)
    reference_optimizer: torch.optim.Optimizer
    if optimizer == "sgd":
        reference_optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    else:
        reference_optimizer = torch.optim.AdamW(
            model.parameters(), lr=0.02, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.0
        )
    losses = []
    norms = []
    for step in range(3):
        ids = data["input_ids"][step % 2]
        labels = data["labels"][step % 2]
        logits = model(ids).logits
        nll = token_loss(logits, labels)
        loss = nll.sum() / (labels[:, 1:] >= 0).sum()
        reference_optimizer.zero_grad()
        loss.backward()
        if step == 0:
            torch.testing.assert_close(outputs["logits"], logits.detach(), rtol=1e-4, atol=2e-5)
            torch.testing.assert_close(outputs["nll"], nll.detach(), rtol=1e-4, atol=2e-5)
            gradients = {
                name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
            }
            if family == "deepseek_v4":
                gradients = save_gradients(model, tmp_path / "gradients")
            stored = load_file(checkpoints[family] / "model.safetensors")
            stored = {
                name: tensor
                for name, tensor in stored.items()
                if not name.endswith(("correction_bias", "expert_bias", "gate.bias", "tid2eid"))
            }
            assert {
                name.removeprefix("grad/") for name in outputs if name.startswith("grad/")
            } == stored.keys()
            for name, tensor in stored.items():
                expected = reference_gradient(gradients, name)
                assert outputs[f"grad/{name}"].shape == tensor.shape
                # The floor for any two programs: transformers in fp32 is up to 2.1e-6 from itself
                # in fp64.
                assert distance(outputs[f"grad/{name}"], expected) < 1e-5, name
        losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        reference_optimizer.step()
    curve = read_curve(tmp_path)
    assert curve["loss"] == pytest.approx(losses, rel=2e-5)
    assert curve["grad_norm"] == pytest.approx(norms, rel=1e-4)


LAYOUTS = [
    ("qwen3_moe", 2, "ep2,mbs2"),
    ("fused", 4, "ep4"),
    thorough("mixtral", 4, "ep2,mbs2,zero0"),
    thorough("olmoe", 2, "ep2"),
    thorough("qwen3", 2, "mbs4"),
    ("deepseek_v3", 4, "ep2,zero3"),
    thorough("qwen3_moe", 4, "tp2,ep2,mbs2"),
    ("mixtral", 4, "tp2,etp4"),
    thorough("olmoe", 2, "tp2,ep2"),
    thorough("qwen3", 2, "tp2,zero0"),
    ("qwen3_moe", 4, "pp2,ep2,mbs2"),  # the embedding is tied: both ends of the pipeline hold it
    thorough("qwen3_moe", 3, "pp3,layout='E|tt|L'"),
    thorough("qwen3_moe", 8, "pp2,zero0"),
    ("mixtral", 2, "pp2,vpp2,layout='E|t|t|L'"),
    thorough("qwen3", 8, "pp2,tp2,mbs2"),
    thorough("deepseek_v2", 4, "tp2,ep4"),
    thorough("deepseek_v3", 4, "tp2,ep2,mbs2"),
    ("qwen3_moe", 4, "cp4,ep2,mbs2"),
    thorough("olmoe", 4, "tp2,cp2,ep4,mbs2,cp_comm=allgather"),
    thorough("deepseek_v3", 4, "cp2,ep4"),
    ("deepseek_v2", 4, "tp2,cp2,cp_comm=allgather"),
    thorough("qwen3_moe", 4, "cp2,ep4,mbs2,cp_comm=a2a"),
    thorough("deepseek_v3", 4, "cp4,ep2,cp_comm=a2a+p2p"),
    ("deepseek_v32", 2, "tp2,ep2,mbs2"),
    thorough("deepseek_v32", 4, "pp2,ep2,zero0,recompute=core_attn"),
    ("deepseek_v4", 2, "tp2,ep2,mbs2"),
    thorough("deepseek_v4", 4, "pp2,ep2,zero0,recompute=core_attn"),
    thorough("deepseek_v4", 4, "tp2,cp2,cp_comm=a2a,ep2,mbs2"),
    thorough("glm_moe_dsa", 2, "pp2,layout='Ett|tL'"),
    thorough("glm_moe_dsa", 4, "ep4,zero3,recompute=full"),
    thorough("qwen2_moe", 4, "tp2,cp2,ep4"),
    ("qwen2_moe", 4, "tp4,pp1,ep2,etp2"),  # more ranks than key heads
    thorough("gpt_oss", 4, "tp2,ep2,mbs2"),
    thorough("gpt_oss", 4, "tp2,ep2,etp2"),
    ("gpt_oss", 4, "cp2,ep4,cp_comm=a2a"),
    ("gpt_oss", 4, "pp2,ep2,zero0,recompute=moe_act+core_attn"),
    thorough("gpt_oss", 2, "ep2,zero3"),
    ("granitemoeshared", 2, "pp2,mbs2"),  # factors of both ends, and of every layer between
    thorough("granitemoeshared", 4, "tp2,ep2,recompute=full"),
    ("llama4_text", 2, "cp2,ep2,mbs2"),  # chunks end inside the ranks' parts of a sequence
    thorough("llama4_text", 4, "tp2,ep2,etp2,mbs2"),
    thorough("llama4_text", 4, "pp2,cp2,cp_comm=allgather,recompute=moe_act"),
    thorough("llama4_text", 4, "tp2,cp2,cp_comm=a2a,recompute=full"),
    ("phimoe", 2, "tp2,ep2,recompute=layernorm+loss"),
    thorough("phimoe", 4, "tp2,pp2,mbs2"),
    thorough("phimoe", 4, "cp2,ep2,zero3,recompute=full"),
    thorough("phimoe", 4, "tp2,etp2,ep2,recompute=moe"),
    ("hunyuan_v1_moe", 2, "tp2,ep2"),
    thorough("hunyuan_v1_moe", 4, "tp4,ep4"),  # more ranks than key heads
    ("ernie4_5_moe", 2, "ep2,zero3"),
    thorough("ernie4_5_moe", 4, "tp2,pp2"),
    thorough("glm4_moe_lite", 4, "tp2,ep2,cp2"),
    ("qwen3_5_moe_text", 2, "tp2,ep2,mbs2"),  # a key head, and those that share it, a rank
    thorough("qwen3_next", 2, "tp2,ep2,mbs4"),
    thorough("qwen3_next", 4, "pp2,ep2,zero0,recompute=moe_act+core_attn"),
    thorough("qwen3_5_moe_text", 4, "tp2,pp2,mbs4"),
    thorough("qwen3_5_moe_text", 4, "ep4,zero3,recompute=full"),
    thorough("nemotron_h", 2, "tp2,ep2,mbs2"),  # a group, and its heads, a rank
    thorough("nemotron_h", 4, "pp2,ep2,zero0,recompute=moe_act+core_attn"),
    thorough("nemotron_h", 4, "tp2,etp2,zero3,recompute=full"),
    thorough("nemotron_h", 2, "cp2,ep2,mbs4"),
    thorough("nemotron", 4, "tp2,pp2,mbs4"),
    ("llama", 8, "tp4,sp0,pp2"),
    thorough("llama", 4, "tp2,zero0,recompute=mlp"),
]


@pytest.mark.turns
@pytest.mark.parametrize(("family", "nproc", "layout"), LAYOUTS)
def test_a_layout_equals_one_process(
    family: str, nproc: int, layout: str, checkpoints: dict[str, Path], batch: Path, tmp_path: Path
) -> None:
    more = ("--steps", "4", "--lr", "0.02")
    single = run_verify(checkpoints[family], batch, tmp_path / "one", "", 1, *more)
    many = run_verify(checkpoints[family], batch, tmp_path / "many", layout, nproc, *more)
    assert single.keys() == many.keys()
    for name in single:
        assert distance(many[name], single[name]) < 3e-5, name
    for key, expected in read_curve(tmp_path / "one").items():
        assert read_curve(tmp_path / "many")[key] == pytest.approx(expected, rel=1e-5)


def refusal_line(
    capsys: pytest.CaptureFixture[str], hf_dir: Path, batch: Path, out: Path, *more: str
) -> str:
    assert main(("verify", str(hf_dir), "--batch", str(batch), "--out", str(out), *more)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_what_cannot_be_verified_is_refused_by_name(
    checkpoints: dict[str, Path], batch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = checkpoints["mixtral"]
    out = tmp_path / "out"
    spoiled = tmp_path / "hf"
    spoiled.mkdir()
    (spoiled / "config.json").write_text((good / "config.json").read_text())
    stored = load_file(good / "model.safetensors")
    gate = "model.layers.1.block_sparse_moe.gate.weight"
    expert = "model.layers.0.block_sparse_moe.experts.3.w3.weight"
    for change, message in (
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
        assert message in refusal_line(capsys, spoiled, batch, out)
    (spoiled / "model.safetensors").write_bytes(b"nothing")
    assert "is no safetensors file" in refusal_line(capsys, spoiled, batch, out)
    wrong = tmp_path / "wrong.safetensors"
    ids = torch.zeros(1, 2, 4, dtype=torch.int64)
    save_file({"input_ids": ids + VOCABULARY, "labels": ids}, wrong)
    assert f"input_ids={VOCABULARY}: ids must be in 0..{VOCABULARY - 1}" in refusal_line(
        capsys, good, wrong, out
    )
    save_file({"input_ids": ids}, wrong)
    assert "labels: is missing" in refusal_line(capsys, good, wrong, out)
    assert "nearest legal value" in refusal_line(
        capsys, good, batch, out, "--layout", "ep3", "--nproc", "3"
    )
    assert "--betas=0.9" in refusal_line(capsys, good, batch, out, "--betas", "0.9")
    assert not (out / "tensors.safetensors").exists()
