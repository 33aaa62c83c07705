"""Experts in a latent space against the plain formula.

That is y = up(sum of p_e expert_e(down x)) + shared(x).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moewright.engine.comm.mesh import build_mesh
from moewright.engine.comm.pass_turns import PassTurns
from moewright.engine.kernels.fused.table import torch_kernels
from moewright.engine.memory.part_graphs import PartGraphs
from moewright.engine.memory.saved_tensors import SavedTensorManager
from moewright.engine.memory.weight_gradients import WeightGradStore
from moewright.engine.model.moe import MoeLayer
from moewright.engine.observe.counters import Counters
from moewright.engine.runtime import Runtime
from moewright.intake import hf
from moewright.rules.job import Job
from moewright.rules.shapes.flops import model_flops_per_token
from moewright.rules.shapes.parameters import count_parameters
from moewright.spec.errors import BadInput
from moewright.spec.layout import Layout
from moewright.spec.workload import DataSpec
from tiny_jobs import MODEL, build_workload

assert MODEL.moe is not None
NARROW = replace(MODEL, moe=replace(MODEL.moe, latent_size=12, shared_ffn_size=16))


def build_layer() -> MoeLayer:
    """Build a layer of one process, weights drawn wide."""
    job = Job(model=NARROW, workload=build_workload(DataSpec()), layout=Layout(world_size=1))
    counters = Counters()
    runtime = Runtime(
        job=job,
        mesh=build_mesh(job.layout, 0, counters),
        counters=counters,
        weight_grads=WeightGradStore(),
        saved_tensors=SavedTensorManager(counters, replaces_tensors=False),
        device=torch.device("cpu"),
        turns=PassTurns(torch.device("cpu"), ()),
        part_graphs=PartGraphs(torch.device("cpu"), WeightGradStore()),
        kernels=torch_kernels(),
    )
    layer = MoeLayer(runtime, 2)
    generator = torch.Generator().manual_seed(0)
    for module in layer.modules():
        for name, parameter in module.named_parameters(recurse=False):
            value = 0.5 * torch.randn(parameter.shape, generator=generator)
            setattr(module, name, torch.nn.Parameter(value))
    return layer


def silu_mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return (torch.nn.functional.silu(x @ gate_up[0].T) * (x @ gate_up[1].T)) @ down.T


def test_a_layer_equals_the_plain_formula() -> None:
    moe = build_layer()
    assert moe.latent is not None
    assert moe.shared is not None
    x = torch.randn(
        32, NARROW.hidden_size, generator=torch.Generator().manual_seed(1), requires_grad=True
    )
    out, _, _ = moe(x, None, 0)
    probs = torch.softmax(x @ moe.router.weight.T, -1)
    best, chosen = probs.topk(MODEL.moe.router.top_k, -1)  # type: ignore[union-attr]
    best = best / best.sum(-1, keepdim=True)
    narrow = x @ moe.latent.down.weight.T
    expert_outputs = [
        silu_mlp(narrow, moe.experts.gate_up.weight[e], moe.experts.down.weight[e])
        for e in range(MODEL.moe.experts)  # type: ignore[union-attr]
    ]
    mixed = sum(
        best[:, slot, None] * torch.stack(expert_outputs)[chosen[:, slot], torch.arange(32)]
        for slot in range(2)
    )
    shared = silu_mlp(x, moe.shared.gate_up.weight, moe.shared.down.weight)
    expected = mixed @ moe.latent.up.weight.T + shared
    # Sums of large numbers that cancel: the error is of the output's size, not of each number's.
    assert (out - expected).norm() <= 1e-6 * expected.norm()
    weights = [
        moe.latent.down.weight,
        moe.latent.up.weight,
        moe.experts.gate_up.weight,
        moe.router.weight,
    ]
    gradients = torch.autograd.grad(out.square().sum(), weights, retain_graph=True)
    expected_gradients = torch.autograd.grad(expected.square().sum(), weights)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert (gradient - expected_gradient).norm() <= 3e-5 * expected_gradient.norm()


def test_what_a_narrower_space_takes() -> None:
    """A layer has two more projections [12,32], and experts of 12 columns instead of 32."""
    plain = replace(NARROW, moe=replace(NARROW.moe, latent_size=0))  # type: ignore[type-var]
    moe = plain.moe
    assert moe is not None
    layers = sum(plain.moe_layers)
    h = plain.hidden_size
    fewer = 3 * moe.ffn_size * (h - 12)
    projections = 2 * 12 * h
    assert count_parameters(NARROW).total - count_parameters(plain).total == layers * (
        projections - moe.experts * fewer
    )
    flops = model_flops_per_token(NARROW, 64) - model_flops_per_token(plain, 64)
    assert flops == 6 * layers * (projections - moe.router.top_k * fewer)


def test_a_config_says_it_and_none_is_written() -> None:
    table = {
        "model_type": "deepseek_v3", "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "q_lora_rank": None, "kv_lora_rank": 8,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
        "intermediate_size": 64, "vocab_size": 64, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "moe_latent_size": 12,
    }  # fmt: skip
    model = hf.parse_config(table, where="job.toml: model", name="narrow")
    assert model.expert_width == 12
    with pytest.raises(BadInput, match="has no HF form"):
        hf.build_config(model)
    with pytest.raises(BadInput, match="moe_latent_size=33"):
        hf.parse_config({**table, "moe_latent_size": 33}, where="job.toml: model", name="wide")
