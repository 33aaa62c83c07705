"""Plans as torchtitan's TOML: its own field names, and degrees that multiply to the world.

What it cannot say is refused by name.
"""

import tomllib
from dataclasses import replace

import pytest

from megatron_cases import build_plan
from moewright.codec import parse_layout
from moewright.exporters.torchtitan import render_torchtitan_config
from moewright.intake import catalogue
from moewright.spec.errors import BadInput
from moewright.spec.layout import ExpertPlacement
from moewright.spec.workload import (
    BatchRampSpec,
    CheckpointSpec,
    DataSpec,
    Dtype,
    LossSpec,
    LrDecay,
    OptimizerSpec,
    Workload,
)
from sample_run import plan as cpu_plan

LLAMA, QWEN = "meta-llama/Meta-Llama-3-8B", "Qwen/Qwen3-30B-A3B"
# Fields of its job_config.py (late 2025) that the exporter may write.
KNOWN = {
    "job": {"description"},
    "model": {"name", "flavor"},
    "optimizer": {"name", "lr", "beta1", "beta2", "eps", "weight_decay"},
    "lr_scheduler": {"warmup_steps", "decay_type", "decay_ratio", "min_lr_factor"},
    "training": {
        *("dataset", "seq_len", "local_batch_size", "global_batch_size", "max_norm", "steps"),
        *("dtype", "mixed_precision_param", "mixed_precision_reduce"),
    },
    "parallelism": {
        *(
            "data_parallel_replicate_degree",
            "data_parallel_shard_degree",
            "fsdp_reshard_after_forward",
        ),
        *("tensor_parallel_degree", "context_parallel_degree", "context_parallel_rotate_method"),
        *(
            "pipeline_parallel_degree",
            "pipeline_parallel_schedule",
            "pipeline_parallel_microbatch_size",
        ),
        *("module_fqns_per_model_part", "pipeline_parallel_expert_parallel_overlap"),
        *(
            "expert_parallel_degree",
            "expert_tensor_parallel_degree",
            "expert_parallel_comm_backend",
        ),
    },
    "activation_checkpoint": {"mode"},
    "checkpoint": {"enable", "interval", "keep_latest_k", "async_mode"},
    "debug": {"seed", "moe_force_load_balance"},
}


def planned(text, world=16, name=LLAMA, **work):
    workload = Workload(seq_len=4096, global_batch=64, **work)
    return build_plan(name, parse_layout(text, world_size=world), workload)


def written(*options, **more):
    result = tomllib.loads(render_torchtitan_config(planned(*options, **more)))
    assert {
        section: set(fields) <= KNOWN[section] for section, fields in result.items()
    } == dict.fromkeys(result, True)
    parallel = result["parallelism"]
    sizes = (
        "data_parallel_shard",
        "data_parallel_replicate",
        "tensor_parallel",
        "context_parallel",
        "pipeline_parallel",
    )
    product = 1
    for size in sizes:
        product *= parallel[f"{size}_degree"]
    assert product == planned(*options, **more).layout.world_size
    return result


def test_full_sharding_and_experts_of_data_ranks():
    result = written("zero3,ep8,mbs2,recompute=full", 16, QWEN)
    assert result["model"] == {"name": "qwen3", "flavor": "30B-A3B"}
    parallel = result["parallelism"]
    assert (parallel["data_parallel_shard_degree"], parallel["expert_parallel_degree"]) == (16, 8)
    assert parallel["expert_parallel_comm_backend"] == "standard"
    assert result["training"]["local_batch_size"] == 2
    assert result["training"]["global_batch_size"] == 64
    assert result["activation_checkpoint"]["mode"] == "full"


def test_a_rate_that_stays_and_falls_in_the_end():
    spec = OptimizerSpec(lr_decay=LrDecay.WSD, wsd_decay_steps=25)
    schedule = written("zero3", 16, steps=200, optimizer=spec)["lr_scheduler"]
    assert (schedule["decay_type"], schedule["decay_ratio"]) == ("linear", 0.125)
    plain = written("zero3", 16, steps=200)["lr_scheduler"]
    assert plain["decay_type"] == "cosine"
    assert "decay_ratio" not in plain


def test_copies_and_hybrid_shards():
    assert written("zero0,tp2", 16)["parallelism"]["data_parallel_replicate_degree"] == 8
    parallel = written("zero3,shard4", 16)["parallelism"]
    assert (parallel["data_parallel_shard_degree"], parallel["data_parallel_replicate_degree"]) == (
        4,
        4,
    )
    # Torchtitan counts the context-parallel ranks of a shard apart.
    parallel = written("zero3,cp2,shard4", 16)["parallelism"]
    assert (parallel["data_parallel_shard_degree"], parallel["data_parallel_replicate_degree"]) == (
        2,
        4,
    )


def test_a_pipeline_names_the_modules_of_every_stage():
    result = written("zero3,pp4,vpp2,mbs2,overlap=p2p", 16)
    parallel = result["parallelism"]
    assert parallel["pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert (
        result["training"]["local_batch_size"] == 64 // 4
    )  # a rank's whole batch, in micro-batches of 2
    assert parallel["pipeline_parallel_microbatch_size"] == 2
    parts = parallel["module_fqns_per_model_part"]
    assert len(parts) == 8
    layers = [f"layers.{layer}" for layer in range(32)]
    assert [name for part in parts for name in part] == [
        "tok_embeddings",
        *layers,
        "norm",
        "output",
    ]


def test_what_else_a_job_says():
    result = written(
        "zero0,cp2,cp_comm=allgather",
        16,
        steps=900,
        seed=3,
        precision=Dtype.FP32,
        optimizer=OptimizerSpec(lr=1e-4, warmup_steps=10, min_lr_fraction=0.2),
        checkpoint=CheckpointSpec(every_steps=100),
    )
    assert result["lr_scheduler"] == {
        "warmup_steps": 10,
        "decay_type": "cosine",
        "min_lr_factor": 0.2,
    }
    assert result["training"]["mixed_precision_param"] == "float32"
    assert result["parallelism"]["context_parallel_rotate_method"] == "allgather"
    assert result["checkpoint"] == {
        "enable": True,
        "interval": 100,
        "keep_latest_k": 2,
        "async_mode": "disabled",
    }
    assert (result["training"]["steps"], result["debug"]["seed"]) == (900, 3)


def placed(plan):
    return replace(plan, layout=replace(plan.layout, expert_placement=ExpertPlacement.BALANCED))


REFUSED = [
    (planned("ep8", name="mistralai/Mixtral-8x7B-v0.1"), "model.name", "Qwen/Qwen3-30B-A3B"),
    (planned("tp2"), "layout.zero", "3"),
    (planned("zero3,pp2", name=QWEN), "layout.pp", "1"),
    (planned("zero3,cp2", name=QWEN), "layout.cp", "1"),
    (planned("zero3,tp2,sp0"), "layout.sp", "true"),
    (planned("zero3,cp2,cp_comm=a2a"), "layout.cp_comm", "p2p"),
    (planned("zero3,pp2,schedule=zb-h1"), "layout.schedule", "1f1b"),
    (planned("zero3,recompute=mlp"), "layout.recompute", "full"),
    (planned("zero3,recompute=full+loss"), "layout.recompute", "full"),
    (planned("zero3,offload=optimizer"), "layout.offload", "none"),
    (planned("zero3,tp2,overlap=tp"), "layout.overlap", "none"),
    (planned("zero3,graphs=attn"), "layout.graphs", "none"),
    (planned("zero3,ep8,dispatcher=dedup", name=QWEN), "layout.dispatcher", "alltoall"),
    (placed(planned("zero3,ep8", name=QWEN)), "layout.expert_placement", "contiguous"),
    (planned("zero3,ep8,capacity=1", name=QWEN), "layout.capacity", "0"),
    (planned("zero3,tp4,ep2", name=QWEN), "layout.ep", "4"),
    (planned("zero3,tp4,ep2,etp2", name=QWEN), "layout.etp", "1"),
    (planned("zero3", precision=Dtype.FP8), "workload.precision", "bf16"),
    (planned("zero3", loss=LossSpec(aux_coeff=0.1)), "workload.aux_coeff", "0"),
    (planned("zero3", data=DataSpec(train="x")), "data.train", "no data"),
    (
        planned("zero3", ramp=BatchRampSpec(ramp_start=16, ramp_increment=16, ramp_samples=99)),
        "workload.ramp_start",
        "0",
    ),
    (planned("zero3", optimizer=OptimizerSpec(clip_norm=0)), "workload.clip_norm", "1"),
    (
        replace(cpu_plan(), layout=parse_layout("zero0", world_size=2)),
        "hardware.device.kind",
        "cuda",
    ),
    (
        replace(planned("zero3,ep8", name=QWEN), hardware=catalogue.hardware("8xAscend-910C")),
        "hardware.fabric.domain",
        "nvlink",
    ),
]


@pytest.mark.parametrize(
    ("options", "field", "nearest"), REFUSED, ids=[field for _, field, _ in REFUSED]
)
def test_what_torchtitan_cannot_say_is_refused_by_name(options, field, nearest):
    with pytest.raises(BadInput) as caught:
        render_torchtitan_config(options)
    reason = caught.value.reasons[0]
    assert (reason.field, reason.nearest) == (field, nearest)
    assert reason.rule.startswith("torchtitan ")
