"""A made-up run in the product's records: 6 layers, 16 experts, 60 steps, two ranks.

No number in it was measured.
"""

import math
from dataclasses import replace
from pathlib import Path

from moewright.codec import format_record, write_json
from moewright.spec.hardware import (
    Collective,
    Constant,
    Curve,
    Device,
    DeviceKind,
    DtypePeak,
    Fabric,
    Hardware,
    Op,
    OpRate,
)
from moewright.spec.layout import Layout, Recompute
from moewright.spec.ledger import (
    CommRow,
    Component,
    FlopOp,
    FlopRow,
    Ledger,
    MemoryRow,
    Module,
    StepPhase,
    TimeRow,
)
from moewright.spec.model import (
    AttentionKind,
    AttentionSpec,
    ModelSpec,
    MoeSpec,
    QkNorm,
    RouterSpec,
)
from moewright.spec.plan import Assumption, Estimate, Plan, TimePart, TimeShare, Verdict
from moewright.spec.run import EvalRecord, LayerLoad, RunRecord, Session, StepRecord
from moewright.spec.units import GIB, MIB, Sourced, SourceKind
from moewright.spec.workload import DataSpec, Dtype, LossSpec, Routing, Workload

LAYERS = 6
EXPERTS = 16
STEPS = 60
UNIGRAM_ENTROPY = 6.214


def measured_value(value: float, what: str) -> Sourced:
    return Sourced(
        value=value, kind=SourceKind.MEASURED, source=f"bench machine, {what}, median of 5"
    )


def model() -> ModelSpec:
    attention = AttentionSpec(
        kind=AttentionKind.GQA,
        heads=4,
        kv_heads=2,
        head_dim=64,
        v_head_dim=64,
        qk_norm=QkNorm.PER_HEAD,
    )
    moe = MoeSpec(experts=EXPERTS, ffn_size=192, router=RouterSpec(top_k=4))
    return ModelSpec(
        name="quickstart-moe",
        family="qwen3_moe",
        hidden_size=256,
        layers=LAYERS,
        vocab_size=4096,
        attention=attention,
        dense_ffn_size=0,
        moe=moe,
        moe_layers=(True,) * LAYERS,
        max_position=2048,
    )


def hardware(count: int = 2) -> Hardware:
    rate = Curve(
        points=((1e6, 8e9), (1e9, 6.1e10)), kind=SourceKind.MEASURED, source="bench machine"
    )
    device = Device(
        name="one thread of a test processor",
        kind=DeviceKind.CPU,
        memory_bytes=measured_value(4 * GIB, "free memory shared by the ranks"),
        memory_Bps=measured_value(1.1e10, "copy of 64 MiB"),
        peaks=(DtypePeak(dtype=Dtype.BF16, rate=measured_value(7.3e10, "best GEMM")),),
        rates=(OpRate(op=Op.GEMM, dtype=Dtype.BF16, curve=rate),),
    )
    fabric = Fabric(
        domain_size=count,
        devices_per_node=count,
        domain_Bps=measured_value(2.4e9, "all-to-all of 4 MiB"),
        network_Bps=Sourced(
            value=1.25e9, kind=SourceKind.ASSUMED, source="10 Gbit/s Ethernet; not used here"
        ),
        domain_latency_s=measured_value(9e-5, "all-reduce of 8 B"),
        network_latency_s=Sourced(value=5e-5, kind=SourceKind.ASSUMED, source="usual for TCP"),
    )
    host = Constant(
        name="host_s_per_layer_microbatch",
        value=Sourced(value=4.1e-4, kind=SourceKind.FITTED, source="residual of three short runs"),
    )
    return Hardware(
        name="this machine",
        count=count,
        device=device,
        fabric=fabric,
        constants=(host,),
        fingerprint="3f2a9c01d4e5",
    )


def workload() -> Workload:
    return Workload(
        seq_len=256,
        global_batch=16,
        steps=STEPS,
        routing=Routing.LEARNED,
        load_factor=1.15,
        eval_every_steps=20,
        loss=LossSpec(aux_coeff=0.01),
        data=DataSpec(train="data/train", heldout="data/heldout", tokenizer="data/tokenizer.json"),
    )


WEIGHTS = {
    Module.EMBEDDING: 2 * 1_048_576,
    Module.ATTENTION: 2 * 1_180_416,
    Module.ROUTER: 2 * 24_576,
    Module.EXPERTS: 2 * 7_077_888,
    Module.NORM: 2 * 3_328,
    Module.HEAD: 2 * 1_048_576,
    Module.OTHER: 2 * 96,
}
SAVED = {
    Module.EMBEDDING: 2 * MIB,
    Module.ATTENTION: 31 * MIB,
    Module.ROUTER: 3 * MIB,
    Module.EXPERTS: 84 * MIB,
    Module.NORM: 26 * MIB,
    Module.HEAD: 9 * MIB,
}


def memory_rows(saved_scale: float = 1.0) -> tuple[MemoryRow, ...]:
    sizes = {
        Component.WEIGHTS: 1.0,
        Component.GRADIENTS: 2.0,
        Component.MASTER: 1.0,
        Component.MOMENTS: 2.0,
    }
    states = [
        MemoryRow(component=component, module=module, bytes=int(size * scale))
        for component, scale in sizes.items()
        for module, size in WEIGHTS.items()
    ]
    saved = [
        MemoryRow(component=Component.ACTIVATIONS, module=module, bytes=int(size * saved_scale))
        for module, size in SAVED.items()
    ]
    return (
        *states,
        *saved,
        MemoryRow(component=Component.LOGITS, module=Module.HEAD, bytes=64 * MIB),
    )


def ledger(rank: int) -> Ledger:
    rows = 3 * 2048 * 4 * 256 * 2
    comm = (
        CommRow(op=Collective.ALL_GATHER, group="dp_cp", bytes=3_305_760, calls=1),
        CommRow(op=Collective.ALL_REDUCE, group="dp_cp", bytes=768, calls=1),
        CommRow(op=Collective.ALL_REDUCE, group="world", bytes=40, calls=2),
        CommRow(op=Collective.ALL_TO_ALL, group="ep", bytes=rows + rank * 1024, calls=84),
        CommRow(op=Collective.REDUCE_SCATTER, group="dp_cp", bytes=13_223_040, calls=1),
    )
    flops = (
        FlopRow(op=FlopOp.ATTENTION, module=Module.ATTENTION, flops=2_415_919_104),
        FlopRow(op=FlopOp.GEMM, module=Module.ATTENTION, flops=14_495_514_624),
        FlopRow(op=FlopOp.GEMM, module=Module.ROUTER, flops=301_989_888),
        FlopRow(op=FlopOp.GEMM, module=Module.HEAD, flops=12_884_901_888),
        FlopRow(op=FlopOp.GROUPED_GEMM, module=Module.EXPERTS, flops=43_486_543_872 + rank * 4096),
    )
    return Ledger(
        rank=rank, pp_rank=0, memory=memory_rows(), comm=comm, flops=flops, time=time_rows(1.0)
    )


def time_rows(scale: float) -> tuple[TimeRow, ...]:
    seconds = {
        StepPhase.DATA: 0.002,
        StepPhase.FORWARD: 0.41,
        StepPhase.BACKWARD: 0.83,
        StepPhase.GRAD_REDUCE: 0.052,
        StepPhase.OPTIMIZER: 0.071,
        StepPhase.PARAM_GATHER: 0.021,
        StepPhase.OTHER: 0.009,
    }
    return tuple(TimeRow(phase=phase, seconds=value * scale) for phase, value in seconds.items())


def counted_ledger(rank: int) -> Ledger:
    note = "saved softmax statistics are fp32 on this device"
    return replace(
        ledger(rank), memory=memory_rows(saved_scale=1.013), time=time_rows(1.08), notes=(note,)
    )


def estimate(step_s: float = 1.29) -> Estimate:
    parts = {
        TimePart.ATTENTION: 0.16,
        TimePart.DENSE: 0.21,
        TimePart.EXPERTS: 0.44,
        TimePart.ELEMENTWISE: 0.18,
        TimePart.HEAD: 0.12,
        TimePart.EP_COMM: 0.06,
        TimePart.DP_COMM: 0.05,
        TimePart.HOST: 0.03,
        TimePart.OPTIMIZER: 0.04,
    }
    assumptions = (
        Assumption(
            name="host_s_per_layer_microbatch",
            value="410 us",
            kind=SourceKind.FITTED,
            source="short runs",
        ),
        Assumption(
            name="gemm_rate", value="61 GFLOP/s", kind=SourceKind.MEASURED, source="bench machine"
        ),
        Assumption(name="load_factor", value="1.15", kind=SourceKind.ASSUMED, source="job file"),
        Assumption(
            name="memory_Bps", value="11 GB/s", kind=SourceKind.DATASHEET, source="<vendor> & co"
        ),
    )
    total = sum(row.bytes for row in memory_rows())
    return Estimate(
        ledgers=(ledger(0),),
        peak_rank=0,
        peak_bytes=total,
        capacity_bytes=4 * GIB,
        verdict=Verdict.FITS,
        margin_bytes=4 * GIB - total,
        peak_sd_bytes=1,
        largest="activations of experts",
        step_s=step_s,
        step_sd=0.1,
        shares=tuple(TimeShare(part=part, seconds=s * step_s / 1.29) for part, s in parts.items()),
        micro_batches=4,
        bubble_fraction=0.0,
        tokens_per_s_per_device=2048 / step_s,
        model_flops_per_step=1.466e11,
        tflops_per_device=0.0733 / step_s,
        mfu=1.004 / step_s,
        hfu=1.004 / step_s,
        assumptions=assumptions,
    )


def plan(step_s: float = 1.29, **layout: object) -> Plan:
    degrees = {"world_size": 2, "ep": 2, "mbs": 2} | layout
    return Plan(
        model=model(),
        workload=workload(),
        hardware=hardware(),
        layout=Layout(**degrees),
        estimate=estimate(step_s),
        fingerprint="9d1c3b5a7e2f4860",
    )


def layer_load(layer: int, step: int) -> LayerLoad:
    skew = 0.9 * math.exp(-step / 15) + 0.12 + 0.04 * layer
    weights = [
        math.exp(skew * math.sin(1.7 * expert + layer + 0.01 * step)) for expert in range(EXPERTS)
    ]
    counts = tuple(round(4096 * 4 * weight / sum(weights)) for weight in weights)
    shares = [count / sum(counts) for count in counts]
    return LayerLoad(
        layer=layer,
        max_over_mean=max(counts) * EXPERTS / sum(counts),
        dead_experts=counts.count(0),
        entropy=-sum(p * math.log(p) for p in shares if p) / math.log(EXPERTS),
        counts=counts,
        p95_over_mean=sorted(counts)[-1 - EXPERTS // 20] * EXPERTS / sum(counts),
        rank_counts=(sum(counts[: EXPERTS // 2]), sum(counts[EXPERTS // 2 :])),
        aux_loss=0.01 * max(counts) * EXPERTS / sum(counts),
        z_loss=0.002,
    )


def step_record(number: int) -> StepRecord:
    pace = 1.08 + 0.05 * math.sin(number * 2.3) + (1.4 if number == 1 else 0.0)
    step_s = sum(row.seconds for row in time_rows(pace))
    return StepRecord(
        step=number,
        loss=3.1 + 5.2 * math.exp(-number / 14) + 0.08 * math.sin(3.7 * number),
        aux_loss=1.02 + 0.4 * math.exp(-number / 10),
        lr=3e-4 * min(1, number / 10),
        grad_norm=0.8 + 2 * math.exp(-number / 8),
        tokens=4096,
        step_s=step_s,
        tokens_per_s_per_rank=2048 / step_s,
        tflops_per_rank=0.0733 / step_s,
        mfu=1.004 / step_s,
        skipped=False,
        phases=time_rows(pace),
        loads=tuple(layer_load(layer, number) for layer in range(LAYERS)),
    )


def record(steps: int = STEPS) -> RunRecord:
    evals = tuple(
        EvalRecord(
            step=number,
            heldout_loss=3.25 + 5.0 * math.exp(-number / 14),
            unigram_entropy=UNIGRAM_ENTROPY,
            tokens=32768,
        )
        for number in range(20, steps + 1, 20)
    )
    sessions = tuple(
        Session(
            first_step=first,
            started=started,
            world_size=2,
            torch_version="2.13.0+cpu",
            device_name="one thread of a test processor",
            threads_per_rank=1,
        )
        for first, started in ((1, "2026-11-21T04:00:00Z"), (31, "2026-11-21T04:02:10Z"))
    )
    return RunRecord(
        plan=plan(),
        sessions=sessions,
        steps=tuple(step_record(number) for number in range(1, steps + 1)),
        evals=evals,
        ledgers=(counted_ledger(0), counted_ledger(1)),
        selection=None,
    )


def with_recompute(base: Plan) -> Plan:
    return replace(
        base, layout=replace(base.layout, recompute=(Recompute.LAYERNORM, Recompute.MOE_ACT))
    )


def write_run(directory: Path, record: RunRecord) -> None:
    """Write a run folder that reads back as `record`, without the ledgers of its made-up job."""
    write_json(directory / "plan.json", record.plan)
    lines = [format_record(row) for row in (*record.sessions, *record.steps, *record.evals)]
    (directory / "steps.jsonl").write_text("".join(lines))
