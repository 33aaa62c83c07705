"""The ledger that the planner predicts for a rank equals the one that the engine counts."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tiny_jobs
from layout_proof import explain_storages
from layout_space import LATENT, SHAPES
from moewright.codec import read_json
from moewright.cost.ledger import predict_ledger
from moewright.diagnosis.compare_ledgers import LineStatus, Section, compare_ledgers
from moewright.engine.comm import collectives
from moewright.engine.run.train import train
from moewright.engine.run.worker import ExitCode
from moewright.spec.layout import Schedule
from moewright.spec.ledger import Component, Ledger, Selection, StorageMoment
from moewright.spec.model import (
    AttentionKind,
    AttentionSpec,
    MixerKind,
    NormKind,
    NormPlacement,
    QkNorm,
    RopeSpec,
    RouterSpec,
    ScoreFunction,
)
from moewright.spec.plan import Plan
from moewright.spec.workload import (
    DataSpec,
    DocumentMasking,
    Dtype,
    FineTuningSpec,
    FrozenPart,
    LossSpec,
    MatrixUpdate,
    Task,
    TensorScaling,
)
from selection import thorough

pytestmark = pytest.mark.spawn
SPARSE = SHAPES["sparse"].attention
EVERY_OFFLOAD = "attn_norm+qkv_linear+core_attn+attn_proj+mlp_norm+expert_fc1+moe_act"


@pytest.mark.core
@pytest.mark.turns
@pytest.mark.parametrize(
    ("world_size", "layout", "precision", "loss"),
    [
        thorough(2, "ep2,mbs2", Dtype.BF16, LossSpec(aux_coeff=0.01)),
        (2, "mbs4,zero0", Dtype.BF16, LossSpec(aux_coeff=0.01, z_coeff=0.001)),
        thorough(4, "ep4,mbs2", Dtype.BF16, LossSpec()),
        (
            2,
            "ep2,mbs2,graphs=attn+moe_router+moe_preprocess",
            Dtype.BF16,
            LossSpec(aux_coeff=0.01),
        ),
        thorough(4, "pp2,tp2,ep2,graphs=attn,layout='E|tttL'", Dtype.FP32, LossSpec()),
        thorough(
            4,
            "pp2,vpp2,ep2,graphs=moe_router,overlap=grad+param+p2p,layout='Et|t||tL'",
            Dtype.BF16,
            LossSpec(aux_coeff=0.01),
        ),
        thorough(2, "tp2,mbs2", Dtype.BF16, LossSpec(aux_coeff=0.01)),
        (2, "etp2", Dtype.BF16, LossSpec()),
        (4, "tp2,ep2,mbs2", Dtype.BF16, LossSpec(aux_coeff=0.01, z_coeff=0.001)),
        thorough(8, "tp2,ep4,etp2", Dtype.BF16, LossSpec(aux_coeff=0.01)),
        (1, "mbs2,recompute=mlp+layernorm", Dtype.BF16, LossSpec()),
        thorough(2, "ep2,mbs2,recompute=select", Dtype.BF16, LossSpec(aux_coeff=0.01)),
        (2, "tp2,ep2,recompute=full", Dtype.BF16, LossSpec(aux_coeff=0.01)),
        (4, "tp2,ep2,overlap=grad+param", Dtype.BF16, LossSpec(aux_coeff=0.01)),
        (4, "ep4,dispatcher=allgather", Dtype.BF16, LossSpec()),
        (4, "ep4,dispatcher=dedup,mbs2", Dtype.BF16, LossSpec(aux_coeff=0.01)),
        (4, "ep4,capacity0.75", Dtype.FP32, LossSpec(aux_coeff=0.01)),
        (4, "ep2,etp2,capacity0.75,capacity_fill=padded", Dtype.BF16, LossSpec(aux_coeff=0.01)),
        thorough(4, "ep2,capacity1.25,dispatcher=dedup", Dtype.FP32, LossSpec()),
        thorough(2, "ep2,capacity0.75,dispatcher=allgather", Dtype.BF16, LossSpec()),
        (4, "cp4,ep4,mbs2", Dtype.BF16, LossSpec(aux_coeff=0.01)),
        (
            4,
            "tp2,cp2,ep2,cp_comm=allgather",
            Dtype.BF16,
            LossSpec(aux_coeff=0.01, seq_aux_coeff=0.01),
        ),
        (2, "cp2,recompute=core_attn", Dtype.BF16, LossSpec()),
        thorough(3, "pp3", Dtype.BF16, LossSpec(aux_coeff=0.01)),
        (3, "pp3,schedule=zb-h1", Dtype.BF16, LossSpec(aux_coeff=0.01)),
        (2, "pp2,schedule=dualpipev,recompute=full,layout='E|tt|t|L'", Dtype.BF16, LossSpec()),
        thorough(
            4, "pp2,tp2,ep2,schedule=zb-h1,layout='Et|ttL'", Dtype.BF16, LossSpec(aux_coeff=0.01)
        ),
        (2, "pp2,schedule=v-half,layout='E|t|t|tL'", Dtype.BF16, LossSpec(aux_coeff=0.01)),
        (2, "pp2,vpp2,schedule=gis,layout='E|t|tt|L'", Dtype.BF16, LossSpec(aux_coeff=0.01)),
        thorough(3, "pp3,schedule=v-min,layout='E|t|t|t||L'", Dtype.BF16, LossSpec()),
        thorough(4, "pp2,cp2,schedule=zbv,layout='E|t|t|tL'", Dtype.BF16, LossSpec()),
        thorough(
            2,
            "pp2,schedule=zb-h1,recompute=moe_act,offload=core_attn+moe_act,layout='Et|ttL'",
            Dtype.BF16,
            LossSpec(),
        ),
        (4, "pp2,tp2,ep2,layout='E|tttL'", Dtype.BF16, LossSpec(aux_coeff=0.01)),
        thorough(
            8,
            "pp2,vpp2,tp2,ep4,overlap=grad+param+p2p,layout='Et|t||tL'",
            Dtype.BF16,
            LossSpec(aux_coeff=0.01),
        ),
        thorough(4, "cp4,ep2,cp_comm=a2a", Dtype.BF16, LossSpec()),
        (2, "cp2,ep2,cp_comm=a2a,offload=core_attn+attn_proj", Dtype.BF16, LossSpec()),
        thorough(2, "cp2,offload=core_attn+attn_proj", Dtype.BF16, LossSpec()),
        (4, "cp4,ep2,cp_comm=a2a+p2p,recompute=core_attn", Dtype.BF16, LossSpec()),
        thorough(
            8, "tp2,cp4,ep4,cp_comm=a2a+p2p,recompute=full", Dtype.BF16, LossSpec(aux_coeff=0.01)
        ),
        (1, "mbs2,recompute=loss", Dtype.BF16, LossSpec()),
        (2, "cp2,zero3,recompute=loss+core_attn", Dtype.BF16, LossSpec()),
        thorough(3, "pp3,schedule=zb-h1,recompute=loss", Dtype.BF16, LossSpec(aux_coeff=0.01)),
        (
            4,
            "pp2,tp2,ep2,recompute=full+loss,layout='Et|ttL'",
            Dtype.BF16,
            LossSpec(aux_coeff=0.01),
        ),
    ],
)
def test_the_predicted_ledger_equals_the_counted_one(
    world_size: int, layout: str, precision: Dtype, loss: LossSpec, data: DataSpec, tmp_path: Path
) -> None:
    workload = tiny_jobs.build_workload(data, steps=2, precision=precision, loss=loss)
    assert_ledgers_equal(tiny_jobs.build_plan(workload, layout, world_size=world_size), tmp_path)


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (2, "mbs2,overlap=grad+param"),
        thorough(2, "mbs2,zero0"),
        thorough(4, "zero3,mbs1"),
        thorough(4, "pp2,tp2,ep2,layout='E|tttL'"),
        thorough(2, "ep2,offload=optimizer"),
    ],
)
def test_ledgers_of_bf16_gradients_are_equal(
    world_size: int, layout: str, data: DataSpec, tmp_path: Path
) -> None:
    workload = tiny_jobs.build_workload(
        data, steps=2, precision=Dtype.BF16, grad_dtype=Dtype.BF16, loss=LossSpec(aux_coeff=0.01)
    )
    assert_ledgers_equal(tiny_jobs.build_plan(workload, layout, world_size=world_size), tmp_path)


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        thorough(2, "zero2,mbs2"),
        thorough(4, "pp2,zero3,mbs2,layout='Et|ttL'"),
        thorough(4, "pp2,zero2,mbs2,layout='Et|ttL'"),
        thorough(4, "ep2,zero1,shard2,mbs2"),
    ],
)
def test_ledgers_of_sharded_gradients_are_equal(
    world_size: int, layout: str, data: DataSpec, tmp_path: Path
) -> None:
    workload = tiny_jobs.build_workload(data, steps=2, precision=Dtype.BF16)
    assert_ledgers_equal(tiny_jobs.build_plan(workload, layout, world_size=world_size), tmp_path)


@pytest.mark.turns
@pytest.mark.parametrize(
    "recompute",
    [
        "",
        thorough(",recompute=full"),
        ",recompute=shared_experts+layernorm+mlp",
        thorough(",recompute=moe"),
        thorough(",recompute=loss"),
    ],
)
def test_ledgers_of_cut_norms_shared_experts_and_a_padded_vocabulary_are_equal(
    recompute: str, data: DataSpec, tmp_path: Path
) -> None:
    base = tiny_jobs.MODEL
    assert base.moe is not None
    model = replace(
        base,
        attention=replace(base.attention, qk_norm=QkNorm.FULL),
        vocab_size=tiny_jobs.VOCABULARY + 1,
        moe=replace(base.moe, shared_ffn_size=24),
    )
    workload = tiny_jobs.build_workload(data, steps=2, loss=LossSpec(aux_coeff=0.01))
    assert_ledgers_equal(
        tiny_jobs.build_plan(workload, f"tp2,etp2,mbs2{recompute}", world_size=2, model=model),
        tmp_path,
    )


@pytest.mark.thorough
@pytest.mark.turns
@pytest.mark.parametrize(
    ("score", "recompute"),
    [
        (ScoreFunction.SIGMOID, ""),
        (ScoreFunction.SQRT_SOFTPLUS, ",recompute=moe"),
        thorough(ScoreFunction.SIGMOID, ",recompute=full"),
        thorough(ScoreFunction.SQRT_SOFTPLUS, ",recompute=shared_experts"),
    ],
)
def test_ledgers_of_grouped_scores_a_bias_a_gate_and_every_balance_loss_are_equal(
    score: ScoreFunction, recompute: str, data: DataSpec, tmp_path: Path
) -> None:
    router = RouterSpec(
        top_k=2, score=score, groups=4, top_groups=2, group_scores=2, selection_bias=True
    )
    base = tiny_jobs.MODEL
    assert base.moe is not None
    model = replace(
        base, moe=replace(base.moe, router=router, shared_ffn_size=24, shared_gate=True)
    )
    losses = LossSpec(aux_coeff=0.01, seq_aux_coeff=0.01, global_aux_coeff=0.01, z_coeff=0.001)
    workload = tiny_jobs.build_workload(data, steps=2, loss=losses)
    assert_ledgers_equal(
        tiny_jobs.build_plan(workload, f"tp2,ep2,mbs2{recompute}", world_size=4, model=model),
        tmp_path,
    )


@pytest.mark.turns
@pytest.mark.parametrize(
    ("world_size", "layout", "q_rank", "precision"),
    [
        (1, "mbs2,recompute=mla_up_proj+layernorm", 24, Dtype.FP32),
        thorough(2, "tp2,mbs2", 0, Dtype.BF16),
        (2, f"tp2,ep2,recompute=mla_up_proj+moe_act,offload={EVERY_OFFLOAD}", 0, Dtype.BF16),
        thorough(2, "tp2,ep2,recompute=mla_up_proj+moe_act", 24, Dtype.FP32),
        (4, "tp2,ep2,mbs2,recompute=full", 24, Dtype.FP32),
        thorough(2, "tp2,mbs2,recompute=core_attn", 24, Dtype.FP32),
        thorough(2, "cp2,mbs2,recompute=mla_up_proj", 24, Dtype.BF16),
        (4, "tp2,cp2,cp_comm=allgather,recompute=core_attn", 24, Dtype.FP32),
        thorough(4, "tp2,cp2,cp_comm=a2a,recompute=mla_up_proj", 24, Dtype.BF16),
        (4, "cp4,cp_comm=a2a+p2p", 0, Dtype.FP32),
    ],
)
def test_ledgers_of_latent_attention_are_equal(
    world_size: int, layout: str, q_rank: int, precision: Dtype, data: DataSpec, tmp_path: Path
) -> None:
    attention = AttentionSpec(
        kind=AttentionKind.MLA,
        heads=4,
        kv_heads=4,
        head_dim=16,
        v_head_dim=12,
        q_lora_rank=q_rank,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        rope=RopeSpec(interleaved=True),
    )
    model = replace(tiny_jobs.MODEL, attention=attention)
    workload = tiny_jobs.build_workload(
        data, steps=2, precision=precision, loss=LossSpec(aux_coeff=0.01)
    )
    assert_ledgers_equal(
        tiny_jobs.build_plan(workload, layout, world_size=world_size, model=model), tmp_path
    )


@pytest.mark.turns
@pytest.mark.parametrize(
    ("world_size", "layout", "coefficient"),
    [
        (2, "tp2,ep2,mbs2,recompute=core_attn", 1.0),
        (1, f"mbs2,offload={EVERY_OFFLOAD}", 0.0),
        (2, "cp2,cp_comm=a2a,ep2,recompute=full", 1.0),
        thorough(4, "tp2,cp2,cp_comm=a2a,ep2,mbs2", 1.0),
        thorough(2, "cp2,cp_comm=a2a,ep2", 0.0),
        thorough(2, "tp2,ep2,mbs2,recompute=full", 1.0),
        thorough(2, "ep2,zero3,recompute=uniform2", 1.0),
        thorough(2, "pp2,layout='Et|ttL',recompute=full,schedule=zb-h1", 0.0),
    ],
)
def test_ledgers_of_chosen_keys_are_equal(
    world_size: int, layout: str, coefficient: float, data: DataSpec, tmp_path: Path
) -> None:
    """Two layers of three choose; the last one takes what the one before it has chosen."""
    mixers = (MixerKind.ATTENTION, MixerKind.ATTENTION, MixerKind.SHARED_INDEX)
    model = replace(tiny_jobs.MODEL, attention=SPARSE, mixers=mixers)
    workload = tiny_jobs.build_workload(
        data,
        steps=2,
        precision=Dtype.BF16,
        loss=LossSpec(aux_coeff=0.01, indexer_coeff=coefficient),
    )
    assert_ledgers_equal(
        tiny_jobs.build_plan(workload, layout, world_size=world_size, model=model), tmp_path
    )


@pytest.mark.turns
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (1, "mbs2,recompute=uniform2"),
        (4, "tp2,cp2,ep4,recompute=block1"),
        thorough(4, "tp2,ep2,recompute=block2"),
        thorough(4, "pp2,ep2,recompute=uniform2,layout='Et|ttL'"),
    ],
)
def test_ledgers_under_full_recompute_of_some_layers_are_equal(
    world_size: int, layout: str, data: DataSpec, tmp_path: Path
) -> None:
    workload = tiny_jobs.build_workload(
        data, steps=2, precision=Dtype.BF16, loss=LossSpec(aux_coeff=0.01)
    )
    assert_ledgers_equal(tiny_jobs.build_plan(workload, layout, world_size=world_size), tmp_path)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (1, f"mbs2,offload={EVERY_OFFLOAD}"),
        thorough(2, "tp2,ep2,recompute=select,offload=mlp_norm+moe_act"),
        thorough(2, "tp2,ep2,recompute=core_attn+moe+layernorm,offload=core_attn+attn_proj"),
        (2, f"cp2,ep2,offload={EVERY_OFFLOAD}"),
        (1, f"mbs2,offload={EVERY_OFFLOAD}+layers0.5"),
        thorough(2, f"pp2,recompute=select,offload={EVERY_OFFLOAD}+layers0.4,layout='E|tttL'"),
        thorough(2, "ep2,overlap=ep,offload=core_attn+expert_fc1+layers0.4"),
        thorough(2, "pp2,schedule=v-half,offload=core_attn+layers0.5,layout='E|t|t|tL'"),
        (2, f"pp2,vpp2,schedule=gis,offload={EVERY_OFFLOAD}+chunks1,layout='Et|t|t|L'"),
        thorough(2, "pp2,vpp2,schedule=gis,offload=core_attn+moe_act,layout='Et|t|t|L'"),
        thorough(2, f"pp2,vpp2,offload={EVERY_OFFLOAD}+chunks1+layers0.5,layout='E|tt|t|L'"),
        thorough(2, "pp2,schedule=zbv,offload=core_attn+moe_act+chunks1,layout='E|t|t|tL'"),
        thorough(4, "ep2,pp2,vpp2,overlap=ep,offload=core_attn+moe_act+chunks1,layout='E|t|t|tL'"),
    ],
)
def test_ledgers_with_activations_on_the_host_are_equal(
    world_size: int, layout: str, data: DataSpec, tmp_path: Path
) -> None:
    workload = tiny_jobs.build_workload(data, steps=2, precision=Dtype.BF16)
    assert_ledgers_equal(tiny_jobs.build_plan(workload, layout, world_size=world_size), tmp_path)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("precision", "scaling", "layout"),
    [
        (Dtype.MXFP8, TensorScaling.CURRENT, "tp2,ep2"),
        thorough(Dtype.FP8, TensorScaling.CURRENT, "ep2,mbs2"),
        thorough(Dtype.FP8, TensorScaling.BLOCKWISE, "tp2,ep2,recompute=moe_act+mlp"),
        (Dtype.FP8, TensorScaling.DELAYED, "tp2,ep2"),
        thorough(Dtype.FP8, TensorScaling.DELAYED, "zero3,ep2,recompute=full"),
        thorough(Dtype.FP8, TensorScaling.DELAYED, "pp2,mbs2,layout='Et|ttL'"),
        (Dtype.NVFP4, TensorScaling.CURRENT, "etp2"),
        thorough(Dtype.MXFP8, TensorScaling.CURRENT, "zero3,ep2,recompute=full"),
        thorough(
            Dtype.MXFP8,
            TensorScaling.CURRENT,
            "pp2,schedule=zb-h1,offload=core_attn+moe_act,layout='Et|ttL'",
        ),
    ],
)
def test_ledgers_of_narrow_products_are_equal(
    precision: Dtype, scaling: TensorScaling, layout: str, data: DataSpec, tmp_path: Path
) -> None:
    workload = tiny_jobs.build_workload(
        data, steps=2, precision=precision, tensor_scaling=scaling, loss=LossSpec(aux_coeff=0.01)
    )
    base = tiny_jobs.MODEL
    assert base.moe is not None
    model = replace(base, moe=replace(base.moe, shared_ffn_size=24))
    assert_ledgers_equal(
        tiny_jobs.build_plan(workload, layout, world_size=2, model=model), tmp_path
    )


@pytest.mark.turns
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (2, "tp2,ep2"),
        thorough(4, "ep2,overlap=grad+param"),
        thorough(4, "zero3,ep2"),
        thorough(2, "zero0,etp2"),
    ],
)
def test_ledgers_with_muon_are_equal(
    world_size: int, layout: str, data: DataSpec, tmp_path: Path
) -> None:
    workload = tiny_jobs.build_workload(data, steps=2, precision=Dtype.BF16)
    workload = replace(
        workload, optimizer=replace(workload.optimizer, matrix_update=MatrixUpdate.MUON)
    )
    assert_ledgers_equal(tiny_jobs.build_plan(workload, layout, world_size=world_size), tmp_path)


ADAPTERS = FineTuningSpec(task=Task.LORA, lora_rank=4)
FROZEN_EXPERTS = FineTuningSpec(
    task=Task.SFT, freeze=(FrozenPart.ROUTER, FrozenPart.EMBEDDINGS, FrozenPart.EXPERTS)
)
FROZEN_ATTENTION = FineTuningSpec(
    freeze=(FrozenPart.ATTENTION, FrozenPart.MLP, FrozenPart.SHARED_EXPERTS)
)
ADAPTERS_EVERYWHERE = replace(ADAPTERS, lora_experts=True, lora_router=True)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("layout", "fine_tuning", "attention"),
    [
        ("tp2,ep2,mbs2", ADAPTERS_EVERYWHERE, None),
        ("tp2,ep2,mbs2", FROZEN_EXPERTS, None),
        thorough("ep2,overlap=grad+param,recompute=moe", FROZEN_EXPERTS, LATENT),
        thorough("pp2,schedule=zb-h1,layout='Et|ttL'", FROZEN_EXPERTS, None),
        thorough("pp2,schedule=zb-h1,layout='Et|ttL'", FROZEN_ATTENTION, None),
        thorough("tp2,ep2,recompute=core_attn+mlp+layernorm", FROZEN_ATTENTION, LATENT),
        thorough("cp2,cp_comm=a2a,recompute=shared_experts+loss", FROZEN_ATTENTION, None),
        thorough("ep2,recompute=core_attn", ADAPTERS, None),
        thorough("tp2,ep2,recompute=full", ADAPTERS_EVERYWHERE, LATENT),
        thorough("etp2,zero0,recompute=mla_up_proj+shared_experts", ADAPTERS, LATENT),
        thorough("tp2,ep2,recompute=core_attn", ADAPTERS, SPARSE),
        thorough("tp2,ep2,mbs2", FROZEN_ATTENTION, SPARSE),
        thorough("pp2,schedule=zb-h1,layout='Et|ttL'", ADAPTERS_EVERYWHERE, None),
        thorough("pp2,schedule=zb-h1,layout='Et|ttL'", ADAPTERS, LATENT),
        thorough("cp2,ep2,cp_comm=a2a,recompute=moe+mlp", ADAPTERS_EVERYWHERE, None),
    ],
)
def test_ledgers_of_adapters_and_frozen_parts_are_equal(
    layout: str,
    fine_tuning: FineTuningSpec,
    attention: AttentionSpec | None,
    data: DataSpec,
    tmp_path: Path,
) -> None:
    base = tiny_jobs.MODEL
    assert base.moe is not None
    model = replace(
        base,
        attention=attention or base.attention,
        moe=replace(base.moe, shared_ffn_size=24, shared_gate=True),
    )
    workload = tiny_jobs.build_workload(
        data, steps=2, precision=Dtype.BF16, loss=LossSpec(aux_coeff=0.01), fine_tuning=fine_tuning
    )
    if fine_tuning.lora_experts:  # grouped products need a rank of whole 16 bytes
        workload = replace(workload, fine_tuning=replace(fine_tuning, lora_rank=8))
    assert_ledgers_equal(
        tiny_jobs.build_plan(workload, layout, world_size=2, model=model), tmp_path
    )


@pytest.mark.parametrize(
    ("layout", "precision", "fine_tuning"),
    [
        ("ep2,mbs2", Dtype.BF16, FineTuningSpec()),
        thorough("tp2,ep2,recompute=select,overlap=tp", Dtype.BF16, FineTuningSpec()),
        thorough("tp2,ep2,mbs2", Dtype.FP8, FineTuningSpec()),
        thorough("tp2,ep2,mbs2", Dtype.BF16, ADAPTERS_EVERYWHERE),
        thorough("pp2,schedule=zb-h1,mbs2", Dtype.BF16, ADAPTERS),
    ],
)
def test_ledgers_of_delta_nets_are_equal(
    layout: str, precision: Dtype, fine_tuning: FineTuningSpec, data: DataSpec, tmp_path: Path
) -> None:
    workload = tiny_jobs.build_workload(data, steps=2, precision=precision)
    if fine_tuning.lora_experts:  # grouped products need a rank of whole 16 bytes
        fine_tuning = replace(fine_tuning, lora_rank=8)
    model = replace(SHAPES["delta"], vocab_size=tiny_jobs.VOCABULARY, mtp_layers=0)
    plan = tiny_jobs.build_plan(
        replace(workload, fine_tuning=fine_tuning), layout, world_size=2, model=model
    )
    assert_ledgers_equal(plan, tmp_path)


@pytest.mark.parametrize(
    ("layout", "precision", "fine_tuning"),
    [
        ("tp2,ep2,mbs2", Dtype.BF16, FineTuningSpec()),
        thorough("ep2,recompute=select+mlp,zero0", Dtype.FP32, FineTuningSpec()),
        thorough("tp2,etp2,mbs2,recompute=moe+shared_experts", Dtype.BF16, FineTuningSpec()),
        thorough("ep2,mbs2,recompute=uniform2", Dtype.BF16, FineTuningSpec()),
        thorough("tp2,ep2,mbs2", Dtype.FP8, FineTuningSpec()),
        thorough("tp2,ep2,mbs2", Dtype.BF16, ADAPTERS_EVERYWHERE),
        thorough("pp2,schedule=zb-h1,mbs2", Dtype.BF16, ADAPTERS),
        thorough("pp2,mbs2,offload=attn_norm+mlp_norm+moe_act", Dtype.BF16, FineTuningSpec()),
    ],
)
def test_ledgers_of_hybrids_are_equal(
    layout: str, precision: Dtype, fine_tuning: FineTuningSpec, data: DataSpec, tmp_path: Path
) -> None:
    """Mamba-2 and layers of one block, with latent experts of squared ReLU."""
    workload = tiny_jobs.build_workload(data, steps=2, precision=precision)
    if fine_tuning.lora_experts:  # grouped products need a rank of whole 16 bytes
        fine_tuning = replace(fine_tuning, lora_rank=8)
    model = replace(SHAPES["hybrid"], vocab_size=tiny_jobs.VOCABULARY)
    plan = tiny_jobs.build_plan(
        replace(workload, fine_tuning=fine_tuning), layout, world_size=2, model=model
    )
    assert_ledgers_equal(plan, tmp_path)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("world_size", "layout", "coefficient", "fine_tuning"),
    [
        (2, "tp2,ep2,mbs2,recompute=core_attn", 1.0, FineTuningSpec()),
        (1, "mbs2,recompute=layernorm+moe", 0.0, FineTuningSpec()),
        thorough(2, "tp2,ep2,mbs2,recompute=full", 1.0, FineTuningSpec()),
        thorough(2, "ep2,zero3,recompute=uniform2", 1.0, FineTuningSpec()),
        thorough(2, "pp2,schedule=zb-h1", 1.0, FineTuningSpec()),
        thorough(4, "pp2,tp2,ep2,overlap=tp,offload=expert_fc1+moe_act", 0.0, FineTuningSpec()),
        thorough(2, "cp2,cp_comm=a2a,ep2,mbs2,recompute=core_attn", 1.0, FineTuningSpec()),
        thorough(2, "cp2,cp_comm=a2a,mbs2", 0.0, FineTuningSpec()),
        (
            2,
            "tp2,ep2,mbs2,offload=attn_norm+qkv_linear+core_attn+attn_proj+mlp_norm",
            1.0,
            FineTuningSpec(),
        ),
        thorough(2, "cp2,cp_comm=a2a,offload=qkv_linear+core_attn", 1.0, ADAPTERS_EVERYWHERE),
        thorough(2, "pp2,offload=core_attn+attn_proj,recompute=core_attn", 0.0, FineTuningSpec()),
        thorough(4, "tp2,cp2,cp_comm=a2a,ep2,recompute=full", 1.0, ADAPTERS_EVERYWHERE),
        (2, "tp2,ep2,mbs2,recompute=core_attn", 1.0, ADAPTERS_EVERYWHERE),
        thorough(2, "ep2,mbs2", 0.0, ADAPTERS),
        thorough(2, "pp2,schedule=zb-h1,recompute=moe", 1.0, ADAPTERS_EVERYWHERE),
        thorough(2, "tp2,ep2,recompute=core_attn+layernorm", 1.0, FROZEN_ATTENTION),
        thorough(2, "tp2,ep2,mbs2,recompute=shared_experts", 1.0, FROZEN_EXPERTS),
    ],
)
def test_ledgers_of_compressed_attention_and_parallel_streams_are_equal(
    world_size: int,
    layout: str,
    coefficient: float,
    fine_tuning: FineTuningSpec,
    data: DataSpec,
    tmp_path: Path,
) -> None:
    if fine_tuning.lora_experts:  # grouped products need a rank of whole 16 bytes
        fine_tuning = replace(fine_tuning, lora_rank=8)
    model = replace(SHAPES["compressed_ahead"], vocab_size=tiny_jobs.VOCABULARY)
    workload = tiny_jobs.build_workload(
        data,
        steps=2,
        precision=Dtype.BF16,
        loss=LossSpec(aux_coeff=0.01, indexer_coeff=coefficient),
        fine_tuning=fine_tuning,
    )
    assert_ledgers_equal(
        tiny_jobs.build_plan(workload, layout, world_size=world_size, model=model), tmp_path
    )


@pytest.mark.thorough
@pytest.mark.turns
@pytest.mark.parametrize(
    ("precision", "scaling", "layout"),
    [
        (Dtype.FP8, TensorScaling.DELAYED, "tp2,ep2,mbs2"),
        thorough(Dtype.FP8, TensorScaling.BLOCKWISE, "ep2,recompute=full"),
        thorough(Dtype.FP8, TensorScaling.CURRENT, "cp2,cp_comm=a2a,ep2,mbs2"),
        thorough(Dtype.MXFP8, TensorScaling.CURRENT, "pp2,schedule=zb-h1"),
        thorough(Dtype.NVFP4, TensorScaling.CURRENT, "ep2,zero3,mbs2"),
    ],
)
def test_ledgers_of_narrow_compressed_attention_are_equal(
    precision: Dtype, scaling: TensorScaling, layout: str, data: DataSpec, tmp_path: Path
) -> None:
    model = replace(SHAPES["compressed_ahead"], vocab_size=tiny_jobs.VOCABULARY)
    workload = tiny_jobs.build_workload(
        data, steps=2, precision=precision, tensor_scaling=scaling, loss=LossSpec(aux_coeff=0.01)
    )
    plan = tiny_jobs.build_plan(workload, layout, world_size=2, model=model)
    assert_ledgers_equal(plan, tmp_path)


@pytest.mark.thorough
@pytest.mark.turns
@pytest.mark.parametrize("norm", [QkNorm.NONE, QkNorm.PER_HEAD, QkNorm.FULL])
@pytest.mark.parametrize("recompute", ["", thorough(",recompute=full")])
def test_ledgers_of_more_ranks_than_key_heads_are_equal(
    norm: QkNorm, recompute: str, data: DataSpec, tmp_path: Path
) -> None:
    model = replace(tiny_jobs.MODEL, attention=replace(tiny_jobs.MODEL.attention, qk_norm=norm))
    workload = tiny_jobs.build_workload(data, steps=2, precision=Dtype.BF16)
    assert_ledgers_equal(
        tiny_jobs.build_plan(workload, f"tp4,ep2,mbs2{recompute}", world_size=4, model=model),
        tmp_path,
    )


@pytest.mark.turns
@pytest.mark.parametrize(
    ("layout", "norm"),
    [
        ("tp4,sp0,recompute=full", NormKind.RMS),
        thorough("tp2,sp0,mbs2", NormKind.LAYER),
        thorough("tp2,sp0,zero0,recompute=layernorm+mlp", NormKind.LAYER),
    ],
)
def test_ledgers_of_tensor_parallelism_without_sequence_parallelism_are_equal(
    layout: str, norm: NormKind, data: DataSpec, tmp_path: Path
) -> None:
    workload = tiny_jobs.build_workload(data, steps=2)
    model = replace(tiny_jobs.DENSE, norm=norm)
    plan = tiny_jobs.build_plan(workload, layout, world_size=4, model=model)
    assert_ledgers_equal(plan, tmp_path)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("layout", "precision", "loss"),
    [
        ("tp2,ep2", Dtype.BF16, LossSpec(aux_coeff=0.01)),
        thorough("tp2,ep2,recompute=layernorm+loss", Dtype.BF16, LossSpec()),
        thorough("ep2,recompute=full,mbs2", Dtype.FP32, LossSpec(z_coeff=0.01)),
        thorough("pp2,schedule=zb-h1,layout='Et|ttL'", Dtype.BF16, LossSpec(seq_aux_coeff=0.01)),
    ],
)
def test_ledgers_of_layer_norms_a_biased_head_and_a_sparse_mixer_are_equal(
    layout: str, precision: Dtype, loss: LossSpec, data: DataSpec, tmp_path: Path
) -> None:
    base = tiny_jobs.MODEL
    assert base.moe is not None
    router = replace(
        base.moe.router, score=ScoreFunction.SPARSE_MIXER, renormalize=False, mixer_eps=0.2
    )
    model = replace(
        base,
        norm=NormKind.LAYER,
        head_bias=True,
        tie_embeddings=False,
        attention=replace(base.attention, qkv_bias=True, out_bias=True),
        moe=replace(base.moe, router=router),
    )
    workload = tiny_jobs.build_workload(data, steps=2, precision=precision, loss=loss)
    plan = tiny_jobs.build_plan(workload, layout, world_size=2, model=model)
    assert_ledgers_equal(plan, tmp_path)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("placement", "world_size", "layout", "precision"),
    [
        (NormPlacement.AFTER, 2, "tp2,ep2,recompute=layernorm+mlp", Dtype.BF16),
        (NormPlacement.AROUND, 2, "tp2,ep2,recompute=layernorm+moe", Dtype.BF16),
        thorough(NormPlacement.AFTER, 1, "mbs2,recompute=full", Dtype.FP32),
        thorough(NormPlacement.AFTER, 2, "pp2,mbs2,layout='Et|ttL'", Dtype.BF16),
        thorough(NormPlacement.AFTER, 2, "ep2,zero3,mbs2", Dtype.BF16),
        thorough(NormPlacement.AROUND, 2, "ep2,mbs2", Dtype.FP8),
        thorough(NormPlacement.AROUND, 2, "cp2,ep2,offload=mlp_norm+core_attn", Dtype.BF16),
        thorough(NormPlacement.AROUND, 2, "pp2,schedule=zb-h1,layout='Et|ttL'", Dtype.BF16),
    ],
)
def test_ledgers_of_norms_after_blocks_are_equal(
    placement: NormPlacement,
    world_size: int,
    layout: str,
    precision: Dtype,
    data: DataSpec,
    tmp_path: Path,
) -> None:
    model = replace(tiny_jobs.MODEL, norm_placement=placement)
    workload = tiny_jobs.build_workload(data, steps=2, precision=precision)
    plan = tiny_jobs.build_plan(workload, layout, world_size=world_size, model=model)
    assert_ledgers_equal(plan, tmp_path)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("world_size", "layout", "shape"),
    [
        (1, "mbs4,recompute=core_attn", "qwen"),
        (4, "tp2,cp2,ep2,cp_comm=a2a", "qwen"),
        thorough(2, "mbs2", "qwen"),
        (2, "cp2,cp_comm=a2a,ep2,mbs2", "compressed"),
        thorough(2, "tp2,ep2,mbs2", "compressed"),
    ],
)
def test_ledgers_of_attention_bounded_by_documents_are_equal(
    world_size: int, layout: str, shape: str, tmp_path: Path
) -> None:
    """The work of attention is predicted from the lengths that the step recorded."""
    short = tiny_jobs.write_corpus(tmp_path / "corpus", documents=300, words=6)
    workload = tiny_jobs.build_workload(
        replace(short, documents=DocumentMasking.BOUNDED), steps=2, precision=Dtype.BF16
    )
    model = replace(SHAPES[shape], vocab_size=tiny_jobs.VOCABULARY)
    assert_ledgers_equal(
        tiny_jobs.build_plan(workload, layout, world_size=world_size, model=model), tmp_path / "run"
    )


@pytest.mark.turns
@pytest.mark.parametrize(
    ("world_size", "layout", "tied"),
    [
        thorough(1, "mbs2", False),
        (2, "pp2,mbs2", True),
        thorough(2, "pp2,schedule=zb-h1,layout='Ett|ttmmL'", False),
        thorough(4, "tp2,ep2,mbs2", False),
        (4, "pp2,tp2,ep2,recompute=full", False),
        thorough(2, "ep2,recompute=select", True),
    ],
)
def test_ledgers_of_two_depths_of_prediction_are_equal(
    world_size: int, layout: str, tied: bool, data: DataSpec, tmp_path: Path
) -> None:
    model = replace(
        tiny_jobs.MODEL,
        mtp_layers=2,
        tie_embeddings=tied,
        layers=4,
        moe_layers=(True, False, True, True),
    )
    workload = tiny_jobs.build_workload(data, steps=2, loss=LossSpec(aux_coeff=0.01))
    assert_ledgers_equal(
        tiny_jobs.build_plan(workload, layout, world_size=world_size, model=model), tmp_path
    )


def test_what_nobody_announces_is_weighed(data: DataSpec, tmp_path: Path) -> None:
    """Copies beside autograd, buffers in no list and storages larger than their views count too."""
    workload = tiny_jobs.build_workload(data, steps=2, precision=Dtype.BF16, check_every=1)
    assert_ledgers_equal(tiny_jobs.build_plan(workload, "mbs2", world_size=1), tmp_path)


def test_what_nobody_announces_is_counted(data: DataSpec, tmp_path: Path) -> None:
    """Collectives are counted as torch dispatches them, beside what their callers say."""
    workload = tiny_jobs.build_workload(data, steps=2, precision=Dtype.BF16)
    assert_ledgers_equal(tiny_jobs.build_plan(workload, "ep2", world_size=2), tmp_path)


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (2, "tp2,ep2,mbs2"),
        thorough(2, "mbs2,ep2,zero1,overlap=grad"),
        thorough(2, "cp2,ep2,cp_comm=a2a,offload=core_attn+attn_proj"),
        thorough(4, "cp4,ep4,mbs2"),
    ],
)
def test_a_thread_that_lets_go_late_is_waited_for(
    world_size: int, layout: str, data: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under load a thread of gloo holds the tensors of a collective long after it is over."""
    for name in ("all_reduce", "all_to_all_single"):
        _hold_tensors(monkeypatch, dist, name)
    for name in ("_all_gather_single", "_reduce_scatter_single"):
        _hold_tensors(monkeypatch, collectives, name)
    workload = tiny_jobs.build_workload(data, steps=2, precision=Dtype.BF16)
    assert_ledgers_equal(tiny_jobs.build_plan(workload, layout, world_size=world_size), tmp_path)


def _hold_tensors(patch: pytest.MonkeyPatch, module: ModuleType, name: str) -> None:
    """Hold the arguments of a collective for 30 ms, as a thread of gloo does, in C++."""
    call = getattr(module, name)

    def call_and_hold(*args: Any, **options: Any) -> Any:
        work = call(*args, **options)
        held = [torch._C.ScriptList([arg for arg in args if isinstance(arg, torch.Tensor)])]
        threading.Timer(0.03, held.clear).start()
        return work

    patch.setattr(module, name, call_and_hold)


def test_weight_gradients_that_wait_are_counted(data: DataSpec, tmp_path: Path) -> None:
    """The last stage of a split backward holds the gradients of the logits until its W rows."""
    workload = tiny_jobs.build_workload(data, steps=2, precision=Dtype.BF16)
    layout = "pp2,schedule=zb-h1,layout='Et|ttL'"
    plan = tiny_jobs.build_plan(workload, layout, world_size=2)
    assert_ledgers_equal(plan, tmp_path)
    last = predict_ledger(plan, rank=1, selection=None)
    plain = replace(plan.layout, schedule=Schedule.ONE_F_ONE_B)
    usual = predict_ledger(replace(plan, layout=plain), rank=1, selection=None)
    logits = [
        sum(row.bytes for row in ledger.memory if row.component is Component.LOGITS)
        for ledger in (last, usual)
    ]
    logit_bytes = Dtype.BF16.nbytes * workload.seq_len * tiny_jobs.VOCABULARY
    assert logits[0] - logits[1] >= logit_bytes


def assert_ledgers_equal(plan: Plan, tmp_path: Path) -> None:
    """Run a plan with several buckets and compare every rank's ledger with its prediction."""
    optimizer = replace(plan.workload.optimizer, bucket_elements=5000)
    workload = replace(plan.workload, optimizer=optimizer, eval_batches=0)
    if plan.layout.pp == 1 and plan.layout.dp * plan.layout.mbs <= 2:
        workload = replace(workload, global_batch=4)  # two micro-batches or four show all
    plan = replace(plan, workload=workload)
    assert train(plan, tmp_path) is ExitCode.DONE
    selection = read_json(Selection, tmp_path / "ledger" / "selection.json")
    for rank in range(plan.layout.world_size):
        counted = read_json(Ledger, tmp_path / "ledger" / f"rank{rank:05d}.json")
        predicted = predict_ledger(plan, rank=rank, selection=selection)
        comparison = compare_ledgers(predicted, counted)
        wrong = [
            line
            for line in comparison.lines
            if line.section not in (Section.TIME, Section.STORAGES)
            and line.status is not LineStatus.EQUAL
        ]
        assert not wrong, wrong
        assert comparison.is_exact
        assert counted.storages is not None
        storages = comparison.lines_in(Section.STORAGES)
        assert len(storages) == len(StorageMoment)
        assert comparison.is_accounted, list(explain_storages(comparison))
