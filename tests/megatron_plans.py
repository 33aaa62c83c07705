"""Plans on GPUs whose exports Megatron-LM's own code has judged, by what they show."""

from dataclasses import replace

from moewright.codec import parse_layout
from moewright.spec.hardware import DeviceKind
from moewright.spec.model import AttentionKind, AttentionSpec, RopeSpec, ScoreFunction
from moewright.spec.workload import (
    BatchRampSpec,
    CheckpointSpec,
    DataSpec,
    DocumentMasking,
    DropPolicy,
    Dtype,
    Fp8Format,
    LossSpec,
    OptimizerSpec,
    RouterForce,
    RouterTraining,
    SaveMode,
    TensorScaling,
)
from sample_run import plan

DEEPSEEK_ATTENTION = AttentionSpec(
    kind=AttentionKind.MLA,
    heads=8,
    kv_heads=8,
    head_dim=192,
    v_head_dim=128,
    q_lora_rank=384,
    kv_lora_rank=128,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    rope=RopeSpec(
        scaling="yarn",
        factor=40,
        original_max_position=4096,
        mscale=1.0,
        mscale_all_dim=1.0,
        interleaved=True,
    ),
)


def on_gpus(text: str, world: int, *, layers: int = 6, base=None):
    """Return the sample plan on `world` GPUs in nodes of eight, in the layout `text`."""
    base = base or plan()
    model = replace(base.model, layers=layers, moe_layers=(True,) * layers)
    device = replace(base.hardware.device, kind=DeviceKind.CUDA, name="GPU")
    fabric = replace(base.hardware.fabric, domain_size=8, devices_per_node=8)
    hardware = replace(base.hardware, count=world, device=device, fabric=fabric)
    return replace(
        base, model=model, hardware=hardware, layout=parse_layout(text, world_size=world)
    )


def deepseek(text="tp2,ep8", world=16):
    base = on_gpus(text, world)
    moe = base.model.moe
    router = replace(
        moe.router,
        score=ScoreFunction.SIGMOID,
        selection_bias=True,
        groups=4,
        top_groups=2,
        scaling_factor=2.5,
    )
    moe = replace(moe, router=router, shared_ffn_size=192, shared_gate=True)
    model = replace(
        base.model,
        attention=DEEPSEEK_ATTENTION,
        moe=moe,
        dense_ffn_size=1024,
        moe_layers=(False, True, True, True, True, True),
        mtp_layers=1,
    )
    return replace(base, model=model)


def in_precision(text: str, world: int, *, device: str = "GPU", **changes):
    """Return the sample plan on GPUs of a name, its workload in 8 or 4 bits."""
    base = on_gpus(text, world)
    hardware = replace(base.hardware, device=replace(base.hardware.device, name=device))
    return replace(base, workload=replace(base.workload, **changes), hardware=hardware)


PLANS = {
    "one rank": on_gpus("", 1),
    "folded": on_gpus("tp2,ep8,mbs2,recompute=select,overlap=grad+param+tp", 16),
    "virtual stages": on_gpus("tp2,pp4,vpp3,ep4,vpp_group=4", 32, layers=94),
    "virtual stages that overlap": on_gpus("pp2,vpp3,ep4,overlap=p2p+ep", 8),
    "layout string": on_gpus("pp2,vpp2,overlap=p2p,layout='Ett|t|tt|tL'", 4),
    "context in two levels": on_gpus("cp8,cp_comm=a2a+p2p", 8, layers=4),
    "packed documents": replace(
        on_gpus("", 1),
        workload=replace(
            plan().workload, data=DataSpec(train="a", documents=DocumentMasking.RESTARTED)
        ),
    ),
    "context and full recompute": on_gpus("tp2,cp2,recompute=full,cp_comm=a2a", 8),
    "ZeRO-3": on_gpus("zero3,ep4", 8),
    "ZeRO-0": on_gpus("zero0", 2),
    "offload": on_gpus("offload=optimizer", 2),
    "activation offload": on_gpus("offload=expert_fc1+moe_act", 2),
    "graphs": on_gpus("graphs=attn+moe_router", 2),
    "whole graph": on_gpus("graphs=full", 2),
    "DeepEP": on_gpus("ep8,dispatcher=deepep", 8),
    "capacity": on_gpus("ep2,dispatcher=allgather,capacity=1.25", 2),
    "latent attention": deepseek(),
    "low-precision optimizer": replace(
        on_gpus("", 1),
        workload=replace(
            plan().workload, grad_dtype=Dtype.BF16, optimizer=OptimizerSpec(moment_dtype=Dtype.BF16)
        ),
    ),
    "8-bit first moments": replace(
        on_gpus("", 1),
        workload=replace(
            plan().workload,
            optimizer=OptimizerSpec(moment_dtype=Dtype.FP8, second_moment_dtype=Dtype.BF16),
        ),
    ),
    "no data": replace(on_gpus("", 1), workload=replace(plan().workload, data=DataSpec())),
    "training data only": replace(
        on_gpus("", 1), workload=replace(plan().workload, data=DataSpec(train="a"))
    ),
    "fp16": replace(on_gpus("", 1), workload=replace(plan().workload, precision=Dtype.FP16)),
    "growing batches": replace(
        on_gpus("", 1),
        workload=replace(
            plan().workload, ramp=BatchRampSpec(ramp_start=4, ramp_increment=4, ramp_samples=96)
        ),
    ),
    "batches that grow and are saved while training goes on": replace(
        on_gpus("vpp2,pp2", 4, layers=4),
        workload=replace(
            plan().workload,
            ramp=BatchRampSpec(ramp_start=8, ramp_increment=8, ramp_samples=64),
            checkpoint=CheckpointSpec(every_steps=5, mode=SaveMode.ASYNC),
        ),
    ),
    "states in two groups": on_gpus("ep2,shard2,overlap=grad", 4),
    "no length": replace(on_gpus("", 1), workload=replace(plan().workload, steps=0)),
    "whole graph and activation offload": on_gpus(
        "ep2,dispatcher=hybridep,graphs=full,offload=moe_act", 2
    ),
    "weights in the moments' type": replace(
        on_gpus("zero3", 2),
        workload=replace(plan().workload, optimizer=OptimizerSpec(moment_dtype=Dtype.BF16)),
    ),
    "three balance losses": replace(
        on_gpus("capacity=2", 1),
        workload=replace(
            plan().workload,
            loss=LossSpec(aux_coeff=0.01, seq_aux_coeff=1e-4, global_aux_coeff=1e-3, z_coeff=1e-3),
            router=RouterTraining(
                force=RouterForce.SKEWED, force_std=2, drop_policy=DropPolicy.POSITION
            ),
        ),
    ),
    "rank budget": on_gpus("ep8,dispatcher=hybridep,rank_capacity=1.5", 8),
    "rank budget in a whole graph": on_gpus(
        "ep8,dispatcher=hybridep,rank_capacity=1.5,graphs=full", 8
    ),
    "ranks in the other order": on_gpus("tp2,pp2,ep2,order=tp-cp-ep-pp-dp", 16),
    "FP8 blocks": in_precision(
        "ep8", 8, precision=Dtype.FP8, tensor_scaling=TensorScaling.BLOCKWISE
    ),
    "FP8 with delayed scales": in_precision(
        "ep8", 8, precision=Dtype.FP8, tensor_scaling=TensorScaling.DELAYED
    ),
    "FP8 whose gradients are E4M3": in_precision(
        "ep8", 8, precision=Dtype.FP8, fp8_format=Fp8Format.E4M3
    ),
    "MXFP8": in_precision("ep8", 8, device="B200", precision=Dtype.MXFP8),
    "NVFP4": in_precision("ep8", 8, device="B200", precision=Dtype.NVFP4),
}
