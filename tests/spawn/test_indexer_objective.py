"""The objective of indexers equals autograd through transformers' own modules, and in layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hf_families import save_gradients, write_model
from moewright.cli.main import main
from moewright.engine.run import early_checks
from moewright.families.tiny import VOCABULARY
from moewright.spec.workload import LossSpec
from selection import thorough

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.spawn

COEFFICIENT = 0.5


@pytest.fixture
def trained_indexers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `verify` train indexers, which it leaves as they are."""
    monkeypatch.setattr(early_checks, "LossSpec", lambda **_: LossSpec(indexer_coeff=COEFFICIENT))


def run_verify(folder: Path, batch: Path, out: Path, layout: str, nproc: int) -> Any:
    options = ("--batch", str(batch), "--layout", layout, "--nproc", str(nproc), "--out", str(out))
    assert main(("verify", str(folder), *options)) == 0
    return load_file(out / "tensors.safetensors")


def index_scores(indexer: nn.Module, inputs: Any, rotate: Any) -> torch.Tensor:
    """Return the scores [B,S,S] of an indexer as it computes them, with gradients."""
    x, q_latent, (cos, sin) = inputs["hidden_states"], inputs["q_resid"], inputs["positions"]
    q = indexer.wq_b(q_latent.detach()).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    k = indexer.k_norm(indexer.wk(x.detach()))[:, :, None]
    width = indexer.qk_rope_head_dim
    q_rotated, k_rotated = rotate(q[..., :width], k[..., :width], cos, sin, unsqueeze_dim=2)
    q, k = (
        torch.cat((turned, whole[..., width:]), -1)
        for turned, whole in ((q_rotated, q), (k_rotated, k))
    )
    products = torch.relu(torch.einsum("bqiw,bkw->bqik", q, k[:, :, 0]) * indexer.softmax_scale)
    heads = indexer.weights_proj(x.detach()) * indexer.n_heads**-0.5
    return torch.einsum("bqi,bqik->bqk", heads, products)


def diverge(target: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Return the mean over queries of the divergence of scores from a target [B,S,keys]."""
    logs = scores.masked_fill(target == 0, float("-inf")).log_softmax(-1)
    terms = torch.xlogy(target, target) - target * logs.masked_fill(target == 0, 0.0)
    return terms.sum(-1).mean()


def add_block_objectives(model: nn.Module, losses: list[torch.Tensor]) -> None:
    """Let a forward of DeepSeek-V4 add the mean over tokens of each indexer's divergence."""
    noted: list[torch.Tensor] = []

    def add_loss(module: nn.Module, args: Any, result: Any) -> None:
        scores = noted.pop()
        blocks = scores.shape[-1]
        # Of blocks, by all heads.
        read = result[1].detach()[..., result[1].shape[-1] - blocks :].sum(1)
        losses.append(diverge(read / read.sum(-1, keepdim=True).clamp(min=1e-30), scores))

    def note_scores(module: nn.Module, args: Any, result: Any) -> None:
        noted.append(result)

    for layer in model.model.layers:
        if hasattr(layer.self_attn.compressor, "indexer"):
            layer.self_attn.register_forward_hook(add_loss)
            layer.self_attn.compressor.indexer.scorer.register_forward_hook(note_scores)


def compute_block_gradients(folder: Path, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradients of DeepSeek-V4's indexers, by the names in the folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    losses: list[torch.Tensor] = []
    add_block_objectives(model, losses)
    model(ids)
    (COEFFICIENT * sum(losses)).backward()
    gradients = save_gradients(model, folder.with_name("gradients"))
    return {name: grad for name, grad in gradients.items() if ".indexer." in name}


def compute_gradients(folder: Path, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradients of indexers: mean over tokens of the divergence, summed over layers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    if model.config.model_type == "deepseek_v4":
        return compute_block_gradients(folder, ids)
    modeling = __import__(type(model).__module__, fromlist=["rotate_half"])
    is_glm = model.config.model_type == "glm_moe_dsa"
    rotate = modeling.apply_rotary_pos_emb_interleave if is_glm else modeling.apply_rotary_pos_emb
    losses = []

    def note_inputs(module: nn.Module, args: Any) -> None:
        module.inputs = {"hidden_states": args[0], "q_resid": args[1], "positions": args[2]}

    def add_loss(module: nn.Module, args: Any, result: Any) -> None:
        if module.indexer is None:
            return
        target = result[1].detach().mean(1)  # what heads read of the chosen keys, and of no others
        scores = index_scores(module.indexer, module.indexer.inputs, rotate)
        losses.append(diverge(target, scores))

    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(add_loss)
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.register_forward_pre_hook(note_inputs)
    model(ids)
    (COEFFICIENT * sum(losses)).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.usefixtures("trained_indexers")
@pytest.mark.parametrize(
    ("family", "layout", "nproc"),
    [
        ("glm_moe_dsa", "tp2,ep2,mbs2", 2),
        ("deepseek_v32", "cp2,cp_comm=a2a,ep2,mbs2", 2),
        ("deepseek_v4", "tp2,ep2,mbs2", 2),
        thorough("deepseek_v32", "ep2,zero3,recompute=full", 2),
        thorough("deepseek_v32", "pp2,mbs2", 2),
        thorough("glm_moe_dsa", "tp2,cp2,cp_comm=a2a,ep2,mbs2,recompute=full", 4),
    ],
)
def test_gradients_of_indexers_are_those_of_the_divergence_and_of_no_other_weight(
    family: str, layout: str, nproc: int, tmp_path: Path
) -> None:
    write_model(family, tmp_path / "hf")
    ids = torch.randint(0, VOCABULARY, (1, 8, 16), generator=torch.Generator().manual_seed(3))
    batch = tmp_path / "batch.safetensors"
    save_file({"input_ids": ids, "labels": ids.clone()}, batch)
    expected = compute_gradients(tmp_path / "hf", ids[0])
    assert expected
    assert all(".indexer." in name for name in expected)
    one = run_verify(tmp_path / "hf", batch, tmp_path / "one", "mbs4", 1)
    for name, gradient in expected.items():
        distance = (one[f"grad/{name}"] - gradient).norm() / gradient.norm()
        assert distance < 1e-5, name
    many = run_verify(tmp_path / "hf", batch, tmp_path / "many", layout, nproc)
    for name, tensor in one.items():
        assert (many[name] - tensor).norm() <= 3e-5 * tensor.norm(), name
