"""What the engine does not run is refused with the field, the rule and the nearest choice."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

import stand_in_deep_ep
import stand_in_nccl_ep
from layout_space import SHAPES
from moewright.codec import parse_layout
from moewright.rules.job import Job
from moewright.rules.limits.engine_limits import unsupported_layout
from moewright.rules.limits.legality import check_legality
from moewright.spec.model import MixerKind, ModelSpec, NormPlacement
from moewright.spec.workload import (
    DataSpec,
    DocumentMasking,
    Dtype,
    FineTuningSpec,
    FrozenPart,
    RouterTraining,
    Task,
)
from tiny_jobs import MODEL, build_workload


def refusals(layout: str, *, model: ModelSpec = MODEL, **changes: object) -> list[str]:
    work = replace(build_workload(DataSpec()), **changes)  # type: ignore[arg-type]
    chosen = parse_layout(layout, world_size=8)
    job = Job(model=model, workload=work, layout=chosen)
    assert not check_legality(job)
    return [str(reason) for reason in unsupported_layout(job)]


@pytest.mark.parametrize(
    "layout",
    [
        "ep4",
        "tp2,ep2",
        "tp2,etp4",
        "etp2,ep4,zero0",
        "mbs2,tp2,ep8",
        "tp4",
        "recompute=full",
        "recompute=mlp+moe",
        "offload=moe_act+core_attn",
        "offload=optimizer,overlap=grad+param",
        "offload=optimizer0.5",
        "zero3,offload=optimizer0.5",
        "zero3,tp2,etp4,ep2,overlap=grad+param,offload=optimizer,recompute=full",
        "zero3,shard4,recompute=moe",
        "ep4,overlap=ep",
        "ep4,overlap=ep+wgrad,recompute=full",
        "ep2,pp2,vpp2,layout='E|t|t|tL',overlap=ep+p2p",
        "pp2,vpp2,ep2,layout='E|t|t|tL',overlap=ep+wgrad+grad+param,graphs=attn+moe_router",
        "tp2,cp2,overlap=tp,graphs=attn",
        "ep4,graphs=attn+moe_router+moe_preprocess",
        "ep4,capacity=1,capacity_fill=padded,graphs=moe_router+moe_preprocess",
        "graphs=attn,recompute=core_attn+layernorm,offload=moe_act+expert_fc1",
        "graphs=moe_router,recompute=moe_act,offload=qkv_linear+core_attn+attn_proj",
    ],
)
def test_what_the_engine_runs_is_not_refused(layout: str) -> None:
    assert refusals(layout) == []


@pytest.mark.parametrize(("precision", "refused"), [(Dtype.FP32, False), (Dtype.BF16, True)])
def test_expert_rows_must_be_whole_words_for_grouped_gemm(precision: Dtype, refused: bool) -> None:
    """16 / 4 columns are 16 bytes in fp32 and 8 in bf16."""
    reasons = refusals("etp4", precision=precision)
    assert bool(reasons) is refused
    rule = "layout.etp=4: leaves 4 of an expert's width; must be a multiple of 8"
    assert all(rule in reason for reason in reasons)


def test_passes_beside_each_other_need_whole_weights() -> None:
    (reason,) = refusals("ep4,zero3,overlap=ep+grad")
    assert reason.startswith("layout.overlap=ep: the engine moves weights and gradients of a layer")
    assert reason.endswith("not with zero=3; nearest legal value: grad")


@pytest.mark.parametrize("shape", ["delta", "hybrid"])
def test_context_parallelism_must_divide_the_key_heads_of_a_rank(shape: str) -> None:
    assert refusals("tp2,cp2,ep2", model=SHAPES[shape]) == []
    (reason,) = refusals("tp2,cp4,ep2", model=SHAPES[shape])
    assert reason.startswith("layout.cp=4: must divide the 2 key heads of recurrent layers")
    assert reason.endswith("nearest legal value: 2")


@pytest.mark.parametrize("other", ["capacity=1", "rank_capacity=2", "ep4,dispatcher=dedup"])
def test_rows_that_are_mapped_by_numbers_of_the_host_are_not_captured(other: str) -> None:
    (reason,) = refusals(f"graphs=attn+moe_router+moe_preprocess,{other}")
    assert "moe_preprocess" in reason.partition(": ")[0]
    assert "the engine captures how rows of a plain all-to-all are mapped" in reason
    assert reason.endswith("nearest legal value: attn+moe_router")


@pytest.mark.parametrize("shape", ["sparse", "compressed"])
def test_parts_of_layers_that_hand_on_more_than_a_hidden_state_are_not_captured(shape: str) -> None:
    (reason,) = refusals("ep2,graphs=attn", model=SHAPES[shape])
    assert reason.startswith("layout.graphs=attn: the engine captures parts that take and give one")


@pytest.mark.parametrize(
    ("layout", "field", "nearest"),
    [
        ("pp2,schedule=zb-h1,graphs=attn,layout='Et|ttL'", "layout.schedule=zb-h1", "1f1b"),
        ("pp2,schedule=zbv,graphs=attn,layout='E|t|t|tL'", "layout.schedule=zbv", "interleaved"),
        ("ep2,zero3,graphs=moe_router", "layout.zero=3", "1"),
        (
            "graphs=attn,offload=core_attn+mlp_norm+moe_act+optimizer",
            "layout.offload=core_attn+mlp_norm",
            "moe_act+optimizer",
        ),
        ("graphs=moe_router,offload=mlp_norm", "layout.offload=mlp_norm", "none"),
        (
            "graphs=moe_router,recompute=core_attn+layernorm",
            "layout.recompute=layernorm",
            "core_attn",
        ),
    ],
)
def test_what_a_part_keeps_lies_in_its_graph(layout: str, field: str, nearest: str) -> None:
    (reason,) = refusals(layout)
    assert reason.startswith(f"{field}: the engine captures parts of layers whose work differs")
    assert reason.endswith(f"nearest legal value: {nearest}")


def test_a_part_asks_of_the_job_what_concerns_it() -> None:
    jitter = RouterTraining(jitter_eps=0.1)
    documents = DataSpec(documents=DocumentMasking.BOUNDED)
    assert refusals("graphs=attn", router=jitter) == []
    assert refusals("graphs=moe_router", data=documents) == []
    (reason,) = refusals("graphs=moe_router", router=jitter)
    assert reason.startswith("train.jitter_eps=0.1: ")
    (reason,) = refusals("graphs=attn", data=documents)
    assert reason.startswith("data.documents=bounded: ")
    (reason,) = refusals("graphs=attn+moe_router", precision=Dtype.FP16)
    assert reason.startswith("train.precision=fp16: ")


def test_a_captured_step_differs_from_others_in_its_tokens_alone() -> None:
    assert refusals("ep4,graphs=full,rank_capacity=2") == []
    fields = [
        reason.partition("=")[0]
        for reason in refusals(
            "pp2,ep2,graphs=full,capacity=1,overlap=grad,layout='Et|ttL'", precision=Dtype.FP16
        )
    ]
    assert fields == ["layout.rank_capacity", "layout.pp", "layout.overlap", "train.precision"]


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ("zero3", "layout.zero=3"),
        ("capacity=1,capacity_fill=padded", "layout.capacity_fill=padded"),
        ("rank_capacity=2", "layout.rank_capacity=2"),
    ],
)
def test_what_replicas_do_not_go_with(more: str, field: str) -> None:
    work = build_workload(DataSpec(), load_histogram=((1,) * 8,) * 2)
    chosen = parse_layout(f"ep4,expert_placement=balanced,spare1,{more}", world_size=8)
    job = Job(model=MODEL, workload=work, layout=chosen)
    assert not check_legality(job)
    (reason,) = unsupported_layout(job)
    assert str(reason).startswith(f"{field}: ")
    assert "spare=1" in reason.rule


def test_ncclep_is_named_where_it_is_not_there_and_what_it_is_not_built_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (missing,) = refusals("ep4,dispatcher=ncclep", precision=Dtype.BF16)
    assert "needs the package nccl (github.com/NVIDIA/nccl-extensions)" in missing
    stand_in_nccl_ep.install(monkeypatch)
    assert refusals("ep4,dispatcher=ncclep", precision=Dtype.BF16) == []
    (long,) = refusals("tp2,ep4,mbs2,dispatcher=ncclep", precision=Dtype.BF16, seq_len=16384)
    assert long.startswith("layout.mbs=2: a rank would dispatch 16384 tokens")
    assert long.endswith("nearest legal value: 1")


@pytest.mark.parametrize(
    ("kind", "package"), [("deepep", "deep_ep"), ("hybridep", "hybrid_ep_cpp")]
)
def test_a_library_that_is_not_there_is_named_and_what_it_does_not_do(
    kind: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (missing,) = refusals(f"ep4,dispatcher={kind}", precision=Dtype.BF16)
    assert missing.startswith(f"layout.dispatcher={kind}: needs the package deep_ep ")
    assert missing.endswith("which is not installed; nearest legal value: dedup")
    stand_in_deep_ep.install(monkeypatch)
    assert refusals(f"ep4,dispatcher={kind}", precision=Dtype.BF16) == []
    assert refusals(f"ep4,dispatcher={kind}") == [
        f"train.precision=fp32: moves bf16 rows with dispatcher={kind}; nearest legal value: bf16"
    ]
    assert (
        "dispatches whole experts"
        in refusals(f"ep4,etp2,dispatcher={kind}", precision=Dtype.BF16)[0]
    )
    monkeypatch.delitem(sys.modules, package)
    assert (
        f"needs the package {package} "
        in refusals(f"ep4,dispatcher={kind}", precision=Dtype.BF16)[0]
    )


@pytest.mark.parametrize(
    ("layout", "more", "refusal"),
    [
        ("tp2,pp2,ep2", {}, ""),
        ("ep2,offload=moe_act", {}, ""),
        ("tp2,cp2,ep2,cp_comm=a2a", {}, ""),
        ("cp2", {}, "layout.cp_comm=p2p: the engine's compressed attention needs whole"),
        ("tp2,sp0", {}, "layout.sp=0: the engine lets each TP rank choose blocks"),
        ("offload=attn_norm+core_attn+mlp_norm", {}, ""),
        ("ep2", {"precision": Dtype.FP8}, ""),
        ("ep2", {"data": DataSpec(documents=DocumentMasking.BOUNDED)}, ""),
        ("ep2", {"fine_tuning": FineTuningSpec(freeze=(FrozenPart.ROUTER,))}, ""),
        ("ep2", {"fine_tuning": FineTuningSpec(task=Task.LORA)}, ""),
    ],
)
def test_what_compressed_attention_does_not_go_with(
    layout: str, more: dict[str, Any], refusal: str
) -> None:
    work = replace(build_workload(DataSpec()), **more)
    chosen = parse_layout(layout, world_size=8)
    reasons = unsupported_layout(Job(model=SHAPES["compressed"], workload=work, layout=chosen))
    assert len(reasons) == bool(refusal), reasons
    assert all(str(reason).startswith(refusal) for reason in reasons)


def test_what_indexers_do_not_go_with() -> None:
    """CP ranks exchange heads for whole sequences, and no choice goes from stage to stage."""
    attention, shared = MixerKind.ATTENTION, MixerKind.SHARED_INDEX
    model = replace(SHAPES["sparse"], mtp_layers=0, mixers=(attention, shared, attention, shared))
    work = build_workload(DataSpec())
    for layout, refusal in (
        ("tp2,pp2", ""),
        ("cp2,cp_comm=a2a", ""),
        ("cp2", "layout.cp_comm=p2p: the engine's sparse attention needs whole"),
        ("pp4", "layout.pp=4: would part layer 1 from layer 0, whose choice of keys it takes"),
        ("pp2,layout='Ettt|tL'", "layout.pp=2: would part layer 3 from layer 2"),
    ):
        chosen = parse_layout(layout, world_size=8)
        reasons = unsupported_layout(Job(model=model, workload=work, layout=chosen))
        assert len(reasons) == bool(refusal)
        assert all(str(reason).startswith(refusal) for reason in reasons)


@pytest.mark.parametrize(
    ("layout", "changes", "after", "around"),
    [
        ("ep4,overlap=ep+p2p,pp2,vpp2,layout='E|t|t|tL'", {}, "layout.overlap=ep", True),
        ("ep4,graphs=attn", {}, "layout.graphs=attn", True),
        ("offload=core_attn", {}, "layout.offload=core_attn", False),
        ("pp2,schedule=zb-h1,layout='Et|ttL'", {}, "layout.schedule=zb-h1", False),
        ("", {"precision": Dtype.FP8}, "train.precision=fp8", False),
        ("", {"fine_tuning": FineTuningSpec(task=Task.LORA)}, "train.task=lora", False),
        ("tp2,ep2,recompute=full", {}, "", False),
    ],
)
def test_what_is_not_proven_with_norms_after_blocks_is_refused(
    layout: str, changes: dict[str, Any], after: str, around: bool
) -> None:
    """What is refused of norms after blocks alone, and whether of norms around them too."""
    for placement, is_refused in ((NormPlacement.AFTER, True), (NormPlacement.AROUND, around)):
        model = replace(MODEL, norm_placement=placement)
        rule = f"the engine has not for norm_placement={placement}"
        texts = [text for text in refusals(layout, model=model, **changes) if rule in text]
        expected = after if is_refused else ""
        assert [text.startswith(expected) for text in texts] == ([True] if expected else [])
