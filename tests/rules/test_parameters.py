"""Names, shapes and shards of parameters, on a small model of every kind."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from moewright.codec import parse_layout
from moewright.intake import catalogue
from moewright.rules.shapes import parameters, shards
from moewright.spec.layout import Layout
from moewright.spec.ledger import Module
from moewright.spec.model import (
    AttentionKind,
    AttentionSpec,
    ModelSpec,
    MoeSpec,
    NormKind,
    PositionKind,
    QkNorm,
    RouterSpec,
)

GQA = AttentionSpec(kind=AttentionKind.GQA, heads=8, kv_heads=4, head_dim=16, v_head_dim=16)
MLA = AttentionSpec(
    kind=AttentionKind.MLA,
    heads=8,
    kv_heads=8,
    head_dim=24,
    v_head_dim=12,
    q_lora_rank=32,
    kv_lora_rank=20,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
)
MODEL = ModelSpec(
    name="small",
    family="",
    hidden_size=64,
    layers=4,
    vocab_size=96,
    attention=GQA,
    dense_ffn_size=128,
    moe=MoeSpec(
        experts=16,
        ffn_size=32,
        router=RouterSpec(top_k=4),
        shared_ffn_size=48,
        shared_gate=True,
        expert_bias=True,
    ),
    moe_layers=(False, True, True, True),
)


def shapes(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    return {param.name: param.shape for param in parameters.parameters(model)}


def test_names_and_shapes_of_a_moe_layer() -> None:
    model = replace(
        MODEL,
        attention=replace(GQA, qk_norm=QkNorm.PER_HEAD, qkv_bias=True, out_bias=True, sinks=True),
        moe=replace(MODEL.moe, router=RouterSpec(top_k=4, logit_bias=True)) if MODEL.moe else None,
    )
    expected = {
        "input_norm.weight": (64,),
        "attention.q.weight": (128, 64),
        "attention.q.bias": (128,),
        "attention.k.weight": (64, 64),
        "attention.k.bias": (64,),
        "attention.v.weight": (64, 64),
        "attention.v.bias": (64,),
        "attention.q_norm.weight": (16,),
        "attention.k_norm.weight": (16,),
        "attention.sinks": (8,),
        "attention.o.weight": (64, 128),
        "attention.o.bias": (64,),
        "post_norm.weight": (64,),
        "moe.router.weight": (16, 64),
        "moe.router.bias": (16,),
        "moe.experts.gate_up.weight": (16, 2, 32, 64),
        "moe.experts.gate_up.bias": (16, 2, 32),
        "moe.experts.down.weight": (16, 64, 32),
        "moe.experts.down.bias": (16, 64),
        "moe.shared.gate_up.weight": (2, 48, 64),
        "moe.shared.down.weight": (64, 48),
        "moe.shared.gate.weight": (1, 64),
    }
    got = {
        name.removeprefix("layers.1."): s
        for name, s in shapes(model).items()
        if name.startswith("layers.1.")
    }
    assert list(got.items()) == list(expected.items())


def test_names_and_shapes_of_latent_attention() -> None:
    got = {
        k.removeprefix("layers.0."): v
        for k, v in shapes(replace(MODEL, attention=MLA)).items()
        if "layers.0." in k
    }
    assert got == {
        "input_norm.weight": (64,),
        "attention.q_down.weight": (32, 64),
        "attention.q_down_norm.weight": (32,),
        "attention.q_up.weight": (192, 32),
        "attention.kv_down.weight": (28, 64),
        "attention.kv_norm.weight": (20,),
        "attention.kv_up.weight": (224, 20),
        "attention.o.weight": (64, 96),
        "post_norm.weight": (64,),
        "mlp.gate_up.weight": (2, 128, 64),
        "mlp.down.weight": (64, 128),
    }
    direct = shapes(replace(MODEL, attention=replace(MLA, q_lora_rank=0)))
    assert direct["layers.0.attention.q.weight"] == (192, 64)
    assert not any("q_down" in name or "q_up" in name for name in direct)


def test_order_and_layers_of_the_whole_model() -> None:
    params = parameters.parameters(replace(MODEL, mtp_layers=2))
    names = [param.name for param in params]
    assert len(set(names)) == len(names)
    assert names[0] == "embedding.weight"
    assert [param.layer for param in params] == sorted(param.layer for param in params)
    tops = [param.name for param in params if param.layer == MODEL.layers]
    assert tops == ["final_norm.weight", "head.weight"]
    depth = [param for param in params if param.layer == MODEL.layers + 2]
    assert [param.name for param in depth[:3]] == [
        f"mtp.1.{part}.weight" for part in ("embed_norm", "hidden_norm", "proj")
    ]
    assert depth[2].shape == (64, 128)
    assert depth[-1].name == "mtp.1.final_norm.weight"
    assert {param.module for param in depth} == {Module.MTP}
    assert any(param.is_expert for param in depth)


def test_tied_head_is_absent_and_gpt_has_biases_and_positions() -> None:
    gpt = replace(
        MODEL,
        attention=replace(GQA, qkv_bias=True, out_bias=True),
        moe=None,
        moe_layers=(False,) * 4,
        gated=False,
        mlp_bias=True,
        norm=NormKind.LAYER,
        position=PositionKind.LEARNED,
        max_position=50,
        tie_embeddings=True,
    )
    got = shapes(gpt)
    assert "head.weight" not in got
    assert got["position.weight"] == (50, 64)
    assert got["layers.3.mlp.up.weight"] == (128, 64)
    assert got["layers.3.mlp.up.bias"] == (128,)
    assert got["layers.3.mlp.down.bias"] == (64,)
    assert got["final_norm.bias"] == (64,)
    counted = parameters.count_parameters(gpt)
    assert counted.total == counted.active == sum(prod(shape) for shape in got.values())


def test_active_counts_the_chosen_experts() -> None:
    counted = parameters.count_parameters(MODEL)
    experts = 3 * (16 * 2 * 32 * 64 + 16 * 64 * 32 + 16 * 2 * 32 + 16 * 64)
    assert counted.total - counted.active == experts * 12 // 16
    assert counted.active - counted.active_without_embedding == counted.embedding == 96 * 64


def test_layers_that_are_counted_once_count_as_all_of_them() -> None:
    for model in map(catalogue.model, catalogue.model_names()):
        own = [param for param in parameters.parameters(model) if param.layer <= model.layers]
        counted = parameters.count_parameters(model)
        assert counted.total == sum(param.numel for param in own), model.name
        assert counted.mtp == sum(param.numel for param in parameters.parameters(model)) - (
            counted.total
        )
        experts = sum(param.numel for param in own if param.is_expert)
        top_k, count = (model.moe.router.top_k, model.moe.experts) if model.moe else (1, 1)
        assert counted.active == counted.total - experts + experts * top_k // count, model.name


def test_decay_is_for_matrices() -> None:
    for param in parameters.parameters(replace(MODEL, mtp_layers=1)):
        plain = param.name.endswith((".bias", "norm.weight", "sinks"))
        assert param.has_weight_decay is not plain, param.name


@pytest.mark.parametrize("attention", [GQA, MLA], ids=["gqa", "mla"])
def test_shards_of_a_grid_add_up(attention: AttentionSpec) -> None:
    """Over tp or etp x ep, shards hold a matrix once, and a replicated tensor on every rank."""
    model = replace(MODEL, attention=attention, mtp_layers=1)
    layout = Layout(world_size=8, tp=4, sp=True, ep=4, etp=2)
    for param in parameters.parameters(model):
        local = prod(shards.local_shape(param, layout))
        shard_count = prod({"tp": 4, "ep": 4, "etp": 2}[axis] for axis, _ in param.sharded_dims)
        assert local * shard_count == param.numel, param.name
        assert {axis for axis, _ in param.sharded_dims} <= (
            {"ep", "etp"} if param.is_expert else {"tp"}
        )
    gate_up = next(
        p for p in parameters.parameters(model) if p.name == "layers.1.moe.experts.gate_up.weight"
    )
    assert shards.local_shape(gate_up, layout) == (4, 2, 16, 64)


def test_every_parameter_stands_on_one_pipeline_rank() -> None:
    layout = Layout(world_size=4, pp=2, vpp=2)
    for param in parameters.parameters(MODEL):
        holders = [rank for rank in range(2) if shards.holds_parameter(param, layout, MODEL, rank)]
        assert len(holders) == 1, param.name
    by_rank = [shards.stage_parameters(MODEL, layout, rank) for rank in range(2)]
    assert sum(map(len, by_rank)) == len(parameters.parameters(MODEL))
    # Interleaved: rank 0 holds layers 0 and 2.
    assert {p.layer for p in by_rank[0]} == {-1, 0, 2}
    assert {p.layer for p in by_rank[1]} == {1, 3, 4}


def test_shared_embeddings_stand_where_they_are_used() -> None:
    layout = Layout(world_size=2, pp=2)
    tied = replace(MODEL, tie_embeddings=True)
    embedding = parameters.parameters(tied)[0]
    assert [shards.holds_parameter(embedding, layout, tied, rank) for rank in range(2)] == [
        True,
        True,
    ]
    assert [shards.holds_parameter(embedding, layout, MODEL, rank) for rank in range(2)] == [
        True,
        False,
    ]
    with_mtp = replace(MODEL, mtp_layers=2)
    first = [p for p in parameters.parameters(with_mtp) if p.layer > MODEL.layers]
    assert all(
        shards.holds_parameter(p, layout, with_mtp, 1)
        and not shards.holds_parameter(p, layout, with_mtp, 0)
        for p in first
    )
    assert shards.holds_parameter(embedding, layout, with_mtp, 1)


@pytest.mark.parametrize(
    "text",
    ["tp2,ep8,pp32", "tp2,ep8,pp8", "tp4,ep8,pp8", "tp2,ep32,pp8", "ep8,pp32", "ep8,etp2,pp8"],
)
def test_optimizer_state_per_device_does_not_depend_on_the_layout(text: str) -> None:
    """docs/formulas.md 2: 12 bytes a parameter over all devices.

    What TP ranks hold in common is below 0.2 %.
    """
    model = catalogue.model("Qwen3-235B-A22B")
    layout = parse_layout(text, world_size=256)
    numel = 0.0
    for rank in range(layout.pp):
        for param in shards.stage_parameters(model, layout, rank):
            shard_count = layout.edp if param.is_expert else layout.dp * layout.cp
            numel += prod(shards.local_shape(param, layout)) / shard_count
    assert numel / layout.pp == pytest.approx(
        parameters.count_parameters(model).total / 256, rel=2e-3
    )
