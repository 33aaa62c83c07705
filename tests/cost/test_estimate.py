"""The estimate: parts that sum, figures that follow from each other, directions that must hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from layout_space import SHAPES
from moewright.codec import from_data, parse_layout, to_data
from moewright.cost.estimate import count_rank_parameters, estimate
from moewright.cost.memory.model_states import stage_bucket_sets
from moewright.cost.symbols import build_symbols
from moewright.cost.time.elementwise import elementwise_row
from moewright.cost.time.mixers import mixer_core
from moewright.cost.time.op_time import DeviceRates
from moewright.intake import catalogue
from moewright.rules.expert_load import RankLoad
from moewright.rules.job import Job
from moewright.spec.errors import BadInput
from moewright.spec.hardware import Constant, DeviceKind, Hardware
from moewright.spec.layout import Layout
from moewright.spec.ledger import FlopOp, StepPhase
from moewright.spec.plan import Estimate, TimePart
from moewright.spec.units import Sourced, SourceKind
from moewright.spec.workload import (
    DataSpec,
    DocumentMasking,
    Dtype,
    FusedKernels,
    Routing,
    Workload,
)


def estimate_layout(
    text: str = "ep8,mbs1",
    *,
    model: str = "Qwen3-30B-A3B",
    hardware: Hardware | None = None,
    **job: object,
) -> Estimate:
    work = replace(Workload(routing=Routing.BALANCED, seq_len=4096, global_batch=64), **job)
    machine = hardware or catalogue.hardware("16xH100")
    return estimate(
        catalogue.model(model), work, machine, parse_layout(text, world_size=machine.count)
    )


def seconds(result: Estimate, part: TimePart) -> float:
    return next((share.seconds for share in result.shares if share.part is part), 0.0)


LAYOUTS = (
    "ep8",
    "tp2,ep8,pp2,vpp2",
    "tp2,ep4,etp2,recompute=full",
    "cp2,ep8,recompute=moe",
    "ep16,pp1,dispatcher=deepep",
)


@pytest.mark.parametrize("text", LAYOUTS)
def test_parts_sum_to_the_step(text: str) -> None:
    result = estimate_layout(text)
    assert sum(share.seconds for share in result.shares) == pytest.approx(result.step_s)
    assert all(share.seconds >= 0 and share.hidden_s >= 0 for share in result.shares)
    for ledger in result.ledgers:
        assert sum(row.seconds for row in ledger.time) == pytest.approx(result.step_s)


@pytest.mark.parametrize("text", LAYOUTS)
def test_throughput_follows_from_the_step(text: str) -> None:
    result = estimate_layout(text)
    assert result.tokens_per_s_per_device == pytest.approx(64 * 4096 / 16 / result.step_s)
    assert result.tflops_per_device * 1e12 * 16 * result.step_s == pytest.approx(
        result.model_flops_per_step
    )
    assert result.mfu == pytest.approx(result.tflops_per_device / 989.4, rel=1e-4)


def test_hfu_counts_what_is_replayed() -> None:
    plain = estimate_layout("ep8")
    full = estimate_layout("ep8,recompute=full")
    assert plain.hfu == pytest.approx(plain.mfu)
    head = 6 * 2048 * 151936
    layers = full.model_flops_per_step / (64 * 4096) - head
    assert full.hfu / full.mfu == pytest.approx(1 + layers / 3 / (layers + head))
    assert full.step_s > plain.step_s
    assert full.peak_bytes < plain.peak_bytes


def test_full_recompute_takes_the_layers_forward_once_more() -> None:
    """A forward is a third of the layers' work, half of their exchange, and all their waits."""
    plain = estimate_layout("ep8")
    full = estimate_layout("ep8,recompute=full")
    constants = DeviceRates(catalogue.hardware("16xH100")).constants
    waits_s = 48 * 64 / 16 * constants["sync_s_alltoall"]
    exchange_s = seconds(plain, TimePart.EP_COMM)
    outside = (TimePart.HEAD, TimePart.DP_COMM, TimePart.OPTIMIZER)
    work_s = plain.step_s - waits_s - exchange_s - sum(seconds(plain, part) for part in outside)
    assert full.step_s - plain.step_s == pytest.approx(seconds(full, TimePart.RECOMPUTE))
    forward_s = work_s / 3 + exchange_s / 2 + waits_s
    assert seconds(full, TimePart.RECOMPUTE) == pytest.approx(forward_s, rel=0.05)


def test_zero3_reduces_and_gathers_twice_every_micro_batch_and_copies_both() -> None:
    """A gather of bf16 weights takes half of the reduction of fp32 gradients."""

    def exchange_s(text: str) -> float:
        share = next(s for s in estimate_layout(text).shares if s.part is TimePart.DP_COMM)
        return share.seconds + share.hidden_s

    micro_batches = 64 // 16
    layout = parse_layout("ep8,zero3", world_size=16)
    work = Workload(routing=Routing.BALANCED, seq_len=4096, global_batch=64)
    job = Job(model=catalogue.model("Qwen3-30B-A3B"), workload=work, layout=layout)
    parameters = count_rank_parameters(stage_bucket_sets(job)[0])
    sym = build_symbols(job, device_kind=DeviceKind.CUDA, load=RankLoad(), router_efficiency=1.0)
    # Two gathers, out of buffers of 2 bytes; gradients, read in 2 bytes and written in 4.
    copied = elementwise_row(
        "copies", sym, (2 * 2 * 2 + 2 + 4) * (parameters.dense + parameters.expert)
    )
    # Each reduced shard is read and added in fp32; the sums of experts count beside their products.
    added = elementwise_row("sums", sym, 4 * (3 * parameters.dense / 16 + parameters.expert / 2))
    rates = DeviceRates(catalogue.hardware("16xH100"))
    copies_s = micro_batches * (rates.seconds(copied) + rates.seconds(added))
    ratio = micro_batches * (2 + 2 * 1) / (2 + 1)
    exchanged_s = exchange_s("ep8,zero3") - copies_s
    assert exchanged_s / exchange_s("ep8") == pytest.approx(ratio, rel=0.01)


def test_every_assumption_has_a_source() -> None:
    result = estimate_layout()
    assert all(assumption.source and assumption.value for assumption in result.assumptions)
    named = {assumption.name for assumption in result.assumptions}
    assert {
        "expert_load",
        "memory_bytes",
        "domain_efficiency",
        "host_s_per_layer_microbatch",
    } <= named


def test_plain_kernels_take_longer_where_there_are_fused_ones() -> None:
    auto, fused, compiled, plain = (
        estimate_layout(fused_kernels=kernels) for kernels in FusedKernels
    )
    assert compiled.step_s == fused.step_s
    for part in (TimePart.ELEMENTWISE, TimePart.HEAD):
        assert seconds(plain, part) > seconds(auto, part) > 0
    assert plain.step_s > auto.step_s == fused.step_s
    assert seconds(plain, TimePart.EXPERTS) == pytest.approx(seconds(auto, TimePart.EXPERTS))
    on_cpu = catalogue.hardware("2xH100")
    on_cpu = replace(on_cpu, device=replace(on_cpu.device, kind=DeviceKind.CPU))
    auto, plain = (
        estimate_layout("ep2", hardware=on_cpu, fused_kernels=kernels)
        for kernels in (FusedKernels.AUTO, FusedKernels.PLAIN)
    )
    assert plain.step_s == auto.step_s


def test_estimates_survive_the_codec() -> None:
    result = estimate_layout()
    assert from_data(Estimate, to_data(result), where="estimate") == result


def test_hot_experts_cost_time() -> None:
    even = estimate_layout()
    hot = estimate_layout(routing=Routing.LEARNED, load_factor=2.0)
    assert seconds(hot, TimePart.EXPERTS) > 1.3 * seconds(even, TimePart.EXPERTS)
    assert seconds(hot, TimePart.EP_COMM) > 1.5 * seconds(even, TimePart.EP_COMM)
    assert seconds(hot, TimePart.ATTENTION) == pytest.approx(seconds(even, TimePart.ATTENTION))


def test_steps_over_a_rank_capacity_cost_a_second_pass() -> None:
    """The rows are as many at any load, so repeats alone make a step longer."""
    text = "ep8,rank_capacity=1.1"
    once = estimate_layout(text)
    twice = estimate_layout(text, routing=Routing.LEARNED, load_factor=1.1)
    assert not any(assumption.name == "repeated_steps" for assumption in once.assumptions)
    repeats = next(a.value for a in twice.assumptions if a.name == "repeated_steps")
    assert repeats == "100.00% of steps run twice"
    for part in (TimePart.EXPERTS, TimePart.ATTENTION, TimePart.HEAD):
        assert seconds(twice, part) == pytest.approx(2 * seconds(once, part))
    assert seconds(twice, TimePart.OPTIMIZER) == seconds(once, TimePart.OPTIMIZER)


def test_overlap_hides_and_graphs_spare_the_host() -> None:
    text = "ep16,dispatcher=hybridep"
    plain = estimate_layout(text)
    graphed = estimate_layout(f"{text},graphs=attn+moe_router")
    hidden = estimate_layout(f"{text},overlap=ep")
    assert seconds(graphed, TimePart.HOST) < 0.7 * seconds(plain, TimePart.HOST)
    exposed = next(share for share in hidden.shares if share.part is TimePart.EP_COMM)
    share = next(
        float(assumption.value)
        for assumption in hidden.assumptions
        if assumption.name == "ep_overlap_hidden"
    )
    assert exposed.hidden_s == pytest.approx(share * seconds(plain, TimePart.EP_COMM))
    assert exposed.seconds + exposed.hidden_s == pytest.approx(seconds(plain, TimePart.EP_COMM))


def test_a_recomputed_moe_block_takes_its_share_of_the_host() -> None:
    hardware = catalogue.hardware("16xH100")
    seconds_by_share = []
    for share in (0.0, 0.6, 1.0):
        value = Sourced(value=share, kind=SourceKind.ASSUMED, source="test")
        constant = Constant(name="host_recomputed_moe_share", value=value)
        changed = replace(hardware, constants=(*hardware.constants, constant))
        result = estimate_layout("ep8,recompute=moe", hardware=changed)
        seconds_by_share.append(seconds(result, TimePart.RECOMPUTE))
    default = estimate_layout("ep8,recompute=moe", hardware=hardware)
    assert seconds_by_share[0] < seconds_by_share[1] < seconds_by_share[2]
    assert seconds(default, TimePart.RECOMPUTE) == seconds_by_share[1]


def test_nothing_overlaps_on_a_cpu() -> None:
    machine = catalogue.hardware("4xH100")
    machine = replace(machine, constants=(), device=replace(machine.device, kind=DeviceKind.CPU))
    result = estimate_layout("ep4,pp1,overlap=grad+param", hardware=machine, seq_len=512)
    assert all(share.hidden_s == 0 for share in result.shares)
    phases = {row.phase for row in result.ledgers[0].time}
    assert {
        StepPhase.FORWARD,
        StepPhase.BACKWARD,
        StepPhase.OPTIMIZER,
        StepPhase.GRAD_REDUCE,
        StepPhase.PARAM_GATHER,
    } <= phases


def test_mtp_and_mla_models_are_priced() -> None:
    result = estimate_layout(
        "tp8,ep64,recompute=select", model="DeepSeek-V3", hardware=catalogue.hardware("64xH100")
    )
    assert {row.module.value for row in result.ledgers[0].memory} >= {
        "mtp",
        "dense_mlp",
        "shared_experts",
    }


@pytest.mark.parametrize(("text", "field"), [("ep7", r"layout\.ep"), ("tp3", r"layout\.tp")])
def test_illegal_layouts_are_refused(text: str, field: str) -> None:
    with pytest.raises(BadInput, match=field):
        estimate_layout(text)


def test_another_world_is_refused() -> None:
    with pytest.raises(BadInput, match=r"world_size=8: the hardware has 16 devices"):
        estimate(
            catalogue.model("Qwen3-30B-A3B"),
            Workload(routing=Routing.BALANCED, seq_len=4096, global_batch=64),
            catalogue.hardware("16xH100"),
            parse_layout("ep8", world_size=8),
        )


@pytest.mark.parametrize("text", ["ep8", "cp2,ep8,recompute=full", "cp4,ep8,cp_comm=a2a"])
def test_documents_that_bound_attention_take_their_share_of_it(text: str) -> None:
    whole = estimate_layout(text)
    packed = estimate_layout(
        text, data=DataSpec(documents=DocumentMasking.BOUNDED, attended_share=0.25)
    )
    assert seconds(packed, TimePart.ATTENTION) == pytest.approx(
        0.25 * seconds(whole, TimePart.ATTENTION)
    )
    # Layers x width of all heads x pairs and tokens, forward and backward.
    core = 6 * 48 * 4096 * 4096 * 4096 * 64
    assert whole.model_flops_per_step - packed.model_flops_per_step == pytest.approx(0.75 * core)
    counted = [
        sum(row.flops for row in result.ledgers[0].flops if row.op is FlopOp.ATTENTION)
        for result in (packed, whole)
    ]
    assert counted[0] == pytest.approx(0.25 * counted[1])
    assert any(
        fact.name == "documents" and fact.value.startswith("leave 0.25")
        for fact in packed.assumptions
    )


def test_documents_leave_the_windows_of_compressed_attention() -> None:
    model = replace(SHAPES["compressed"], vocab_size=512)
    seq_len, amounts = 64, {}
    for share in (1.0, 0.25):
        documents = DataSpec(documents=DocumentMasking.BOUNDED, attended_share=share)
        job = Job(
            model=model,
            workload=Workload(
                routing=Routing.BALANCED, seq_len=seq_len, global_batch=2, data=documents
            ),
            layout=Layout(world_size=1),
        )
        for layer in range(4):
            sym = build_symbols(
                job, device_kind=DeviceKind.CUDA, load=RankLoad(), router_efficiency=1.0
            )
            ((forward, _),) = mixer_core(sym, layer)
            amounts[share, layer] = forward.amount
    spec = model.attention
    # Twice the pairs of a window of 6; two FLOPs in each dim of a score and of a value.
    near = 2 * spec.heads * spec.head_dim * (6 * 6 + (seq_len - 6) * 11)
    assert amounts[1.0, 0] == amounts[0.25, 0] == near
    for layer in (1, 2, 3):
        assert amounts[0.25, layer] - near == 0.25 * (amounts[1.0, layer] - near) > 0


def test_a_cpu_without_rates_of_a_format_plans_memory_and_says_that_it_has_no_time() -> None:
    model = catalogue.model("Qwen3-30B-A3B")
    hardware = catalogue.hardware("8xH100")
    device = replace(
        hardware.device,
        kind=DeviceKind.CPU,
        name="some CPU",
        peaks=tuple(peak for peak in hardware.device.peaks if not peak.dtype.is_narrow),
        rates=(),
    )
    cpu = replace(hardware, device=device)
    layout = parse_layout("ep8", world_size=8)
    # One micro-batch a step: of more, converted copies of weights are kept, which weigh more here.
    work = Workload(seq_len=1024, global_batch=8, precision=Dtype.MXFP8)
    narrow = estimate(model, work, cpu, layout)
    wide = estimate(model, replace(work, precision=Dtype.BF16), cpu, layout)
    assert (
        narrow.untimed
        == "some CPU has no rates for mxfp8: memory and counts are planned, and no time"
    )
    assert narrow.title().endswith(narrow.untimed)
    assert not wide.untimed
    assert narrow.peak_bytes < wide.peak_bytes


def test_four_bit_linears_keep_less_and_multiply_faster_where_the_part_can() -> None:
    """Compare with 1,440 tokens/s a GB300 in NVFP4, as published."""
    hardware = catalogue.hardware("256xGB300")
    model = catalogue.model("Llama-3.1-405B")
    layout = parse_layout("tp4,pp8,vpp4", world_size=256)
    work = Workload(
        routing=Routing.BALANCED, seq_len=8192, global_batch=1536, grad_dtype=Dtype.BF16
    )
    eight, four = (
        estimate(model, replace(work, precision=dtype), hardware, layout)
        for dtype in (Dtype.FP8, Dtype.NVFP4)
    )
    assert four.step_s < eight.step_s
    assert four.peak_bytes < eight.peak_bytes
    assert four.tokens_per_s_per_device == pytest.approx(1440, rel=0.1)
    for part, dtype, legal in (
        ("H100", Dtype.NVFP4, "fp8"),
        ("A100", Dtype.FP8, "bf16"),
        ("MI300X", Dtype.MXFP8, "fp8"),
        ("MI355X", Dtype.NVFP4, "mxfp8"),
    ):
        with pytest.raises(BadInput, match=r"in (it|fewer)|fewer than 16") as refused:
            estimate(
                model, replace(work, precision=dtype), catalogue.hardware(f"256x{part}"), layout
            )
        assert refused.value.reasons[0].nearest == legal


def test_collectives_hide_no_longer_than_the_micro_batches_beside_them_take() -> None:
    model = catalogue.model("Mixtral-8x22B-v0.1")
    workload = Workload(routing=Routing.BALANCED, seq_len=1024, global_batch=256)
    hardware = catalogue.hardware("256xH100")
    layout = parse_layout("zero3,mbs1", world_size=256)
    shares = {share.part: share for share in estimate(model, workload, hardware, layout).shares}
    exchange = shares.pop(TimePart.DP_COMM)
    optimizer = shares.pop(TimePart.OPTIMIZER)
    assert optimizer.seconds > 0
    beside_s = sum(share.seconds for share in shares.values())
    # All weights of 141 billion parameters cross the network for 1,024 tokens a device.
    assert exchange.hidden_s == pytest.approx(beside_s)
    assert exchange.seconds > exchange.hidden_s
