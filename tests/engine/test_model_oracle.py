"""The one-process model against Hugging Face transformers.

Compared are the loss of every token and every gradient.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from moewright.engine.comm.mesh import build_mesh
from moewright.engine.comm.pass_turns import PassTurns
from moewright.engine.kernels.fused.table import torch_kernels
from moewright.engine.memory.part_graphs import PartGraphs
from moewright.engine.memory.saved_tensors import SavedTensorManager
from moewright.engine.memory.weight_gradients import WeightGradStore
from moewright.engine.model.layers import list_parameters
from moewright.engine.model.micro_batch import build_micro_batch
from moewright.engine.model.transformer import Transformer, draw_initial_value
from moewright.engine.observe.counters import Counters
from moewright.engine.runtime import Runtime
from moewright.rules.job import plan_job
from moewright.rules.shapes.parameters import parameters
from moewright.rules.timetable.stages import pipeline_chunks
from moewright.spec.model import ModelSpec
from moewright.spec.workload import DataSpec, LossSpec, Workload
from tiny_jobs import MODEL, build_plan, build_workload

transformers = pytest.importorskip("transformers")


def single_process_model(spec: ModelSpec, work: Workload) -> Transformer:
    """Build the engine's model of one process, weights in place."""
    job = build_plan(work, "", world_size=1, model=spec)
    counters = Counters()
    runtime = Runtime(
        job=plan_job(job),
        mesh=build_mesh(job.layout, 0, counters),
        counters=counters,
        weight_grads=WeightGradStore(),
        saved_tensors=SavedTensorManager(counters, replaces_tensors=False),
        kernels=torch_kernels(),
        device=torch.device("cpu"),
        turns=PassTurns(torch.device("cpu"), ()),
        part_graphs=PartGraphs(torch.device("cpu"), WeightGradStore()),
    )
    model = Transformer(runtime, pipeline_chunks(spec, job.layout))
    for parameter in list_parameters(model):
        parameter.owner.weight = nn.Parameter(draw_initial_value(parameter, runtime))
    return model


def to_hf_names(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what transformers keeps for one of the engine's tensors, by its own names."""
    table = {
        "embedding.weight": "model.embed_tokens.weight",
        "final_norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    }
    if name in table:
        return {table[name]: tensor}
    layer, part = name.removeprefix("layers.").split(".", 1)
    base = f"model.layers.{layer}."
    simple = {
        "input_norm.weight": "input_layernorm.weight",
        "post_norm.weight": "post_attention_layernorm.weight",
        "attention.q.weight": "self_attn.q_proj.weight",
        "attention.k.weight": "self_attn.k_proj.weight",
        "attention.v.weight": "self_attn.v_proj.weight",
        "attention.o.weight": "self_attn.o_proj.weight",
        "attention.q_norm.weight": "self_attn.q_norm.weight",
        "attention.k_norm.weight": "self_attn.k_norm.weight",
        "moe.router.weight": "mlp.gate.weight",
        "mlp.down.weight": "mlp.down_proj.weight",
    }
    if part in simple:
        return {base + simple[part]: tensor}
    if part == "mlp.gate_up.weight":
        return {f"{base}mlp.gate_proj.weight": tensor[0], f"{base}mlp.up_proj.weight": tensor[1]}
    if part == "moe.experts.gate_up.weight":
        return {f"{base}mlp.experts.gate_up_proj": tensor.flatten(1, 2)}
    assert part == "moe.experts.down.weight"
    return {f"{base}mlp.experts.down_proj": tensor}


def build_hf_model(spec: ModelSpec, model: Transformer) -> nn.Module:
    assert spec.moe is not None
    config = transformers.Qwen3MoeConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.dense_ffn_size,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.attention.heads,
        num_key_value_heads=spec.attention.kv_heads,
        head_dim=spec.attention.head_dim,
        rms_norm_eps=spec.norm_eps,
        rope_theta=spec.attention.rope.theta,
        num_experts=spec.moe.experts,
        num_experts_per_tok=spec.moe.router.top_k,
        moe_intermediate_size=spec.moe.ffn_size,
        norm_topk_prob=spec.moe.router.renormalize,
        mlp_only_layers=[i for i, is_moe in enumerate(spec.moe_layers) if not is_moe],
        tie_word_embeddings=spec.tie_embeddings,
        attn_implementation="eager",
    )
    hf_model = transformers.Qwen3MoeForCausalLM(config).float()
    state = {}
    for parameter in list_parameters(model):
        state |= to_hf_names(parameter.name, parameter.parameter.detach().clone())
    if spec.tie_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    hf_model.load_state_dict(state)
    return hf_model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
def test_loss_and_every_gradient_equal_transformers(tied: bool, renormalize: bool) -> None:
    moe = MODEL.moe
    assert moe is not None
    spec = replace(
        MODEL,
        tie_embeddings=tied,
        moe=replace(moe, router=replace(moe.router, renormalize=renormalize)),
    )
    model = single_process_model(spec, build_workload(DataSpec(), loss=LossSpec()))
    hf_model = build_hf_model(spec, model)
    tokens = torch.randint(0, spec.vocab_size, (3, 33), generator=torch.Generator().manual_seed(1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, :5] = -1
    out = model(build_micro_batch(model._runtime, inputs, targets, None))
    out.nll.sum().backward()
    logits = hf_model(inputs).logits
    nll = nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none"
    )
    nll.sum().backward()
    torch.testing.assert_close(out.nll, nll, rtol=1e-5, atol=1e-5)
    expected = dict(hf_model.named_parameters())
    for parameter in list_parameters(model):
        assert parameter.parameter.grad is not None, parameter.name
        for name, grad in to_hf_names(parameter.name, parameter.parameter.grad).items():
            reference = expected[name].grad
            assert reference is not None
            error = (grad - reference).norm() / reference.norm()
            assert error < 2e-5, (name, float(error))


def test_a_depth_predicts_the_token_after_the_next() -> None:
    """By the formula of DeepSeek-V3 (arXiv 2412.19437, 21-25) on the layer that is tested above."""
    spec = replace(MODEL, mtp_layers=1)
    model = single_process_model(spec, build_workload(DataSpec(), loss=LossSpec()))
    tokens = torch.randint(0, spec.vocab_size, (3, 33), generator=torch.Generator().manual_seed(1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, :5] = -1
    out = model(build_micro_batch(model._runtime, inputs, targets, None))

    def apply_norm(x: torch.Tensor, norm: torch.nn.Module) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + spec.norm_eps).sqrt() * norm.weight

    depth = model.mtp["0"]
    ahead = model.embedding.weight[inputs[:, 1:]]  # of the next token; the last position has none
    hidden = out.hidden_tH.unflatten(0, inputs.shape)[:, :-1]
    joined = torch.cat(
        (apply_norm(ahead, depth.embed_norm), apply_norm(hidden, depth.hidden_norm)), -1
    )
    x = (joined @ depth.proj.weight.T).flatten(0, 1)
    padded = nn.functional.pad(x.unflatten(0, (3, 31)), (0, 0, 0, 1)).flatten(0, 1)
    context = model._contexts.build(3, None, None)
    x = depth.layer(None, context, padded)[0].unflatten(0, (3, 32))[:, :-1]
    logits = apply_norm(x, depth.final_norm) @ model.head.weight.T
    expected = nn.functional.cross_entropy(
        logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=-1, reduction="sum"
    )
    torch.testing.assert_close(out.mtp_nll, expected)


def test_the_model_has_the_parameters_that_the_planner_counts() -> None:
    """The planner and the engine list the same parameters independently."""
    for tied in (False, True):
        spec = replace(MODEL, tie_embeddings=tied, mtp_layers=2 * tied)
        model = single_process_model(spec, build_workload(DataSpec()))
        built = [(p.name, tuple(p.parameter.shape), p.module) for p in list_parameters(model)]
        listed = [(p.name, p.shape, p.module) for p in parameters(spec)]
        assert sorted(built) == sorted(listed)
        assert [name for name, _, _ in built] == [p.name for p in parameters(spec)]
        experts = {p.name for p in list_parameters(model) if ".experts." in p.name}
        assert experts == {p.name for p in parameters(spec) if p.is_expert}
        # Drawn by name: no two matrices alike, layers of one shape neither.
        drawn = [
            p.parameter.detach().flatten()[:8].tolist()
            for p in list_parameters(model)
            if len(p.parameter.shape) > 1
        ]
        assert len({tuple(values) for values in drawn}) == len(drawn)
