"""What each way of saving memory takes off a rank, against sizes by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moewright.codec import format_layout, parse_layout
from moewright.cost.constants import Constants
from moewright.cost.estimate import estimate
from moewright.cost.ledger import predict_rank_ledger
from moewright.cost.memory.model_states import bucket_sets, checkpoint_bytes, count_copied
from moewright.cost.memory.peak import HeadBytes, head_bytes
from moewright.cost.symbols import build_symbols
from moewright.intake import catalogue
from moewright.rules.expert_load import RankLoad
from moewright.rules.job import Job
from moewright.rules.limits.legality import check_legality
from moewright.rules.shapes.parameters import count_parameters
from moewright.spec.errors import BadInput
from moewright.spec.hardware import DeviceKind
from moewright.spec.layout import Layout, Offload, Recompute
from moewright.spec.ledger import Component, Module
from moewright.spec.plan import Estimate, TimePart
from moewright.spec.units import GIB, MIB
from moewright.spec.workload import Dtype, OptimizerSpec, Routing, SaveMode, Workload

QWEN = catalogue.model("Qwen3-235B-A22B")
WORK = Workload(routing=Routing.BALANCED, seq_len=4096, global_batch=2048)
DEGREES = "tp2,ep8,pp8"  # 8 ranks of 12 layers less the embedding and the head: 11 on the first


def estimate_layout(text: str) -> Estimate:
    hardware = catalogue.hardware("256xH800")
    return estimate(QWEN, WORK, hardware, parse_layout(text, world_size=256))


def memory_bytes(
    result: Estimate, *components: Component, pp_rank: int = 0, module: Module | None = None
) -> int:
    rows = result.ledgers[pp_rank].memory
    return sum(
        row.bytes for row in rows if row.component in components and module in (None, row.module)
    )


@pytest.mark.parametrize(
    "text", ["recompute=block5", "recompute=uniform2+loss", "offload=optimizer0.25+moe_act"]
)
def test_numbers_in_a_set_are_read_and_written(text: str) -> None:
    layout = parse_layout(f"{DEGREES},{text}", world_size=256)
    assert parse_layout(format_layout(layout), world_size=256) == layout
    assert text in format_layout(layout).replace("moe_act+optimizer0.25", "optimizer0.25+moe_act")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recompute=block0", "block=0: must be at least 1"),
        ("offload=optimizer1.5", "takes a fraction above 0, at most 1"),
        ("offload=block5", "offload=block5: must be one of"),
        ("recompute=block5+moe", "full cannot be combined with others"),
    ],
)
def test_numbers_that_say_nothing_are_refused(text: str, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_layout(text, world_size=8)
    assert message in str(caught.value)


def test_block_and_uniform_exclude_each_other() -> None:
    layout = Layout(
        world_size=256, tp=2, sp=True, ep=8, pp=8, recompute=(Recompute.FULL,), recompute_block=5
    )
    assert not check_legality(Job(model=QWEN, workload=WORK, layout=layout))
    both = parse_layout(f"{DEGREES},recompute=block5+uniform2", world_size=256)
    assert "exclude each other" in str(
        check_legality(Job(model=QWEN, workload=WORK, layout=both))[0]
    )


def test_full_recompute_of_the_first_layers_of_each_chunk() -> None:
    """Keep and repeat in proportion to the layers: 12 on a rank, 7 micro-batches in flight."""
    none, first, all_of = (
        estimate_layout(f"{DEGREES}{text}") for text in ("", ",recompute=block6", ",recompute=full")
    )
    kept = [
        memory_bytes(result, Component.ACTIVATIONS, pp_rank=1) for result in (none, first, all_of)
    ]
    assert kept[1] == pytest.approx((kept[0] + kept[2]) / 2, rel=1e-3)
    added = [result.hfu / result.mfu - 1 for result in (none, first, all_of)]
    # 6 of each rank's 12 layers, and 6 of the 11 on the first rank and the last.
    assert added[1] == pytest.approx(added[2] * 48 / 94, rel=1e-6)
    assert none.step_s < first.step_s < all_of.step_s
    calls = [
        {(row.op, row.group): row.bytes for row in result.ledgers[1].comm}
        for result in (none, first, all_of)
    ]
    for key, value in calls[1].items():
        assert 2 * value == pytest.approx(calls[0][key] + calls[2][key])


def test_one_checkpoint_over_two_layers_keeps_half_the_inputs() -> None:
    """Keep one input of 16 MiB for two layers, and repeat both in backward.

    TP2; the second rank has 12 layers and 7 micro-batches in flight.
    """
    each_layer = estimate_layout(f"{DEGREES},recompute=full")
    pairs = estimate_layout(f"{DEGREES},recompute=uniform2")
    less = memory_bytes(each_layer, Component.ACTIVATIONS, pp_rank=1) - memory_bytes(
        pairs, Component.ACTIVATIONS, pp_rank=1
    )
    assert less == 7 * 6 * 16 * MIB
    more = memory_bytes(pairs, Component.TRANSIENT, pp_rank=1) - memory_bytes(
        each_layer, Component.TRANSIENT, pp_rank=1
    )
    assert more / MIB == pytest.approx(424, abs=1)  # what a layer keeps, 440 MiB, less its input


@pytest.mark.parametrize("other", ["", "full+"])
def test_logits_in_pieces_are_neither_kept_nor_whole(other: str) -> None:
    """Make the logits' product once more in backward, on the second of two pipeline ranks."""
    model = catalogue.model("Qwen3-8B")
    hardware = catalogue.hardware("16xH100")
    work = Workload(routing=Routing.BALANCED, seq_len=16384, global_batch=64)
    plain, blockwise = (
        estimate(model, work, hardware, parse_layout(f"tp2,pp2,recompute={text}", world_size=16))
        for text in (other.strip("+") or "none", f"{other}loss")
    )
    assert blockwise.ledgers[1].device_bytes < plain.ledgers[1].device_bytes - 4 * GIB
    assert memory_bytes(blockwise, Component.ACTIVATIONS, pp_rank=1) == memory_bytes(
        plain, Component.ACTIVATIONS, pp_rank=1
    )
    assert blockwise.step_s > plain.step_s
    head = 2 * work.tokens_per_step * 151936 * 4096
    added = (blockwise.hfu / blockwise.mfu - plain.hfu / plain.mfu) * blockwise.model_flops_per_step
    assert added == pytest.approx(head, rel=1e-6)


@pytest.mark.parametrize("kind", list(DeviceKind))
def test_what_a_piece_of_the_logits_takes(kind: DeviceKind) -> None:
    """Count a block of the logits, 16,384 tokens and 4096 columns.

    The logits are in 16 bits and, in a fused stack, in 32 (it takes the larger of its forward and
    its backward); backward adds their gradient, that of the weight (in a fused stack a placeholder
    that stays, and no part of this), and that of the head's input in fp32.
    """
    model = catalogue.model("Qwen3-8B")
    work = Workload(routing=Routing.BALANCED, seq_len=16384, global_batch=64)
    layout = parse_layout("tp2,recompute=loss", world_size=16)
    sym = build_symbols(
        Job(model=model, workload=work, layout=layout),
        device_kind=kind,
        load=RankLoad(),
        router_efficiency=1.0,
    )
    result = head_bytes(Constants(catalogue.hardware("16xH100")), sym)
    block = 16384 * 4096
    weight = 151936 * 4096 // 2
    assert block == 16384 * model.hidden_size  # also the numbers of the head's input
    if kind is DeviceKind.CPU:
        assert result == HeadBytes(
            forward=2 * block, backward=4 * block + 2 * weight + 4 * block, weights=0
        )
    else:
        assert result == HeadBytes(forward=4 * block + 2 * block + 4 * block, backward=0, weights=0)


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_a_part_of_the_optimizer_on_the_host(share: float) -> None:
    before = estimate_layout(DEGREES)
    after = estimate_layout(f"{DEGREES},offload=optimizer{share if share < 1 else ''}")
    parts = Component.MASTER, Component.MOMENTS
    total = memory_bytes(before, *parts)
    # Whole blocks of 64 elements of 12 bytes go to the host.
    assert 0 <= memory_bytes(after, Component.HOST) - share * total < 64 * 12
    assert memory_bytes(after, *parts) == total - memory_bytes(after, Component.HOST)
    assert memory_bytes(after, Component.GRADIENTS) == memory_bytes(before, Component.GRADIENTS)


@pytest.mark.parametrize("share", ["", "0.3"])
@pytest.mark.parametrize("degrees", ["ep8,zero2", "ep8,zero3", "ep16,zero3"])
def test_units_of_fully_shard_on_the_host_are_those_of_the_ledger(degrees: str, share: str) -> None:
    """The engine moves gradients too; with ep16 one rank alone holds its experts, in no unit."""
    model = catalogue.model("Qwen3-30B-A3B")
    work = Workload(routing=Routing.BALANCED, seq_len=4096, global_batch=256)
    layout = parse_layout(f"{degrees},offload=optimizer{share}", world_size=16)
    plan = estimate(model, work, catalogue.hardware("16xH100"), layout)
    job = Job(model=model, workload=work, layout=layout)
    ledger = predict_rank_ledger(job, rank=0, selection=None)
    states = (Component.HOST, Component.WEIGHTS, Component.GRADIENTS, Component.MASTER)
    for component in (*states, Component.MOMENTS):
        assert memory_bytes(plan, component) == sum(
            row.bytes for row in ledger.memory if row.component is component
        )
    assert memory_bytes(plan, Component.HOST) > 6.6 * GIB


def test_a_checkpoint_beside_training_is_copied_to_the_host() -> None:
    """Copy 12 bytes a parameter over all ranks, whichever ranks hold replicas.

    On a CPU the copy is in the memory that has to fit.
    """
    tiny = replace(
        catalogue.model("Qwen3-30B-A3B"), layers=6, moe_layers=(True,) * 6, tie_embeddings=True
    )
    spec = replace(WORK.checkpoint, mode=SaveMode.ASYNC)
    sync_work, async_work = (
        replace(WORK, global_batch=64, checkpoint=checkpoint)
        for checkpoint in (WORK.checkpoint, spec)
    )
    for text in ("tp2,ep4,pp2", "ep2,pp2,zero0"):
        layout = parse_layout(text, world_size=16)
        copied = [
            checkpoint_bytes(
                async_work,
                count_copied(
                    layout, bucket_sets(Job(model=tiny, workload=async_work, layout=layout), rank)
                ),
            )
            for rank in range(16)
        ]
        assert sum(copied) == pytest.approx(
            12 * count_parameters(tiny).total, rel=1e-3
        )  # buckets are padded
    on_gpu = catalogue.hardware("16xH800")
    cpu = replace(on_gpu, device=replace(on_gpu.device, kind=DeviceKind.CPU))
    for hardware, more in ((on_gpu, 0), (cpu, copied[0])):
        synchronous, asynchronous = (
            estimate(tiny, job, hardware, layout) for job in (sync_work, async_work)
        )
        grown = asynchronous.ledgers[0].device_bytes - synchronous.ledgers[0].device_bytes
        assert grown == pytest.approx(
            more, rel=0.05
        )  # an allowance is a share of what is allocated
        assert memory_bytes(asynchronous, Component.HOST) == (0 if more else copied[0])


@pytest.mark.parametrize(
    ("offload", "mib"),
    [
        (Offload.ATTN_NORM, 16),  # t h
        (Offload.QKV_LINEAR, 16),
        (Offload.CORE_ATTN, 36),  # T (q + 2 kv) / tp
        (Offload.MLP_NORM, 16),
        (Offload.EXPERT_FC1, 128),  # t k h
        (Offload.MOE_ACT, 96),  # 2 t k f
    ],
)
def test_offloaded_activations(offload: Offload, mib: int) -> None:
    """Count MiB a layer on the second rank: 12 layers, 7 micro-batches in flight."""
    before = estimate_layout(DEGREES)
    after = estimate_layout(f"{DEGREES},offload={offload}")
    less = memory_bytes(before, Component.ACTIVATIONS, pp_rank=1) - memory_bytes(
        after, Component.ACTIVATIONS, pp_rank=1
    )
    assert less == 7 * 12 * mib * MIB
    assert before.peak_bytes - after.peak_bytes > 0.9 * less / GIB


@pytest.mark.parametrize(
    ("moments", "share"),
    # An 8-bit scale for 32 elements.
    [(Dtype.FP32, 1.0), (Dtype.BF16, 0.5), (Dtype.FP8, 0.25 * 33 / 32)],
)
def test_moments_in_fewer_bits(moments: Dtype, share: float) -> None:
    hardware = catalogue.hardware("256xH800")
    layout = parse_layout(DEGREES, world_size=256)
    work = replace(WORK, optimizer=OptimizerSpec(moment_dtype=moments))
    result = estimate(QWEN, work, hardware, layout)
    master = memory_bytes(result, Component.MASTER)
    assert memory_bytes(result, Component.MOMENTS) == share * 2 * master
    # Shards of 8-bit moments are of multiples of 64 elements.
    padding = master - memory_bytes(estimate_layout(DEGREES), Component.MASTER)
    assert 0 <= padding <= (1024 if moments is Dtype.FP8 else 0)


def test_copies_of_whole_chunks_are_priced_beside_the_rows_around() -> None:
    """A copy has its own row and that beside it, which under GIS is of another chunk."""

    def exposed_s(schedule: str, offload: str) -> float:
        text = f"pp4,vpp2,ep4,{schedule}offload={offload}+chunks1"
        result = estimate(
            catalogue.model("Qwen3-30B-A3B"),
            Workload(routing=Routing.BALANCED, seq_len=4096, global_batch=256),
            catalogue.hardware("16xH100"),
            parse_layout(text, world_size=16),
        )
        return sum(share.seconds for share in result.shares if share.part is TimePart.OFFLOAD)

    every = "attn_norm+qkv_linear+core_attn+attn_proj+mlp_norm+expert_fc1+moe_act"
    assert exposed_s("schedule=gis,", "core_attn+moe_act") == 0
    assert 0 < exposed_s("schedule=gis,", every) < 0.5 * exposed_s("", every)
