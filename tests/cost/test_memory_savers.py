"""What each way of saving memory takes off a rank, against sizes by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moewright.codec import format_layout, parse_layout
from moewright.cost.constants import Constants
from moewright.cost.estimate import estimate
from moewright.cost.memory import HeadBytes, head_bytes
from moewright.cost.model_states import bucket_sets, checkpoint_copy_bytes
from moewright.cost.symbols import build_symbols
from moewright.intake import catalogue
from moewright.rules.legality import check_legality
from moewright.rules.parameters import count_parameters
from moewright.spec.errors import BadInput
from moewright.spec.hardware import DeviceKind
from moewright.spec.layout import Layout, Offload, Recompute
from moewright.spec.ledger import Component, Module
from moewright.spec.plan import Estimate
from moewright.spec.units import GIB, MIB
from moewright.spec.workload import Dtype, OptimizerSpec, SaveMode, Workload

QWEN = catalogue.model("Qwen3-235B-A22B")
WORK = Workload(seq_len=4096, global_batch=2048)
CUT = "tp2,ep8,pp8"  # 8 ranks of 12 layers less the embedding and the head: 11 on the first


def of(text: str) -> Estimate:
    hardware = catalogue.hardware("256xH800")
    return estimate(QWEN, WORK, hardware, parse_layout(text, world_size=256))


def held(
    found: Estimate, *components: Component, pp_rank: int = 0, module: Module | None = None
) -> int:
    rows = found.ledgers[pp_rank].memory
    return sum(
        row.bytes for row in rows if row.component in components and module in (None, row.module)
    )


@pytest.mark.parametrize(
    "text", ["recompute=block5", "recompute=uniform2+loss", "offload=optimizer0.25+moe_act"]
)
def test_numbers_in_a_set_are_read_and_written(text: str) -> None:
    layout = parse_layout(f"{CUT},{text}", world_size=256)
    assert parse_layout(format_layout(layout), world_size=256) == layout
    assert text in format_layout(layout).replace("moe_act+optimizer0.25", "optimizer0.25+moe_act")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("recompute=block0", "block=0: must be at least 1"),
        ("offload=optimizer1.5", "takes a fraction above 0, at most 1"),
        ("offload=block5", "offload=block5: must be one of"),
        ("recompute=block5+moe", "full stands alone"),
    ],
)
def test_numbers_that_say_nothing_are_refused(text: str, said: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_layout(text, world_size=8)
    assert said in str(caught.value)


def test_block_and_uniform_exclude_each_other() -> None:
    layout = Layout(
        world_size=256, tp=2, sp=True, ep=8, pp=8, recompute=(Recompute.FULL,), recompute_block=5
    )
    assert not check_legality(QWEN, WORK, layout)
    both = parse_layout(f"{CUT},recompute=block5+uniform2", world_size=256)
    assert "exclude each other" in str(check_legality(QWEN, WORK, both)[0])


def test_full_recompute_of_the_first_layers_of_each_chunk() -> None:
    """A rank of 12 layers and 7 micro-batches in flight: between none and all of them, in
    proportion."""
    none, first, all_of = (
        of(f"{CUT}{text}") for text in ("", ",recompute=block6", ",recompute=full")
    )
    kept = [held(one, Component.ACTIVATIONS, pp_rank=1) for one in (none, first, all_of)]
    assert kept[1] == pytest.approx((kept[0] + kept[2]) / 2, rel=1e-3)
    added = [one.hfu / one.mfu - 1 for one in (none, first, all_of)]
    # 6 of each rank's 12 layers, and 6 of the 11 on the first rank and the last.
    assert added[1] == pytest.approx(added[2] * 48 / 94, rel=1e-6)
    assert none.step_s < first.step_s < all_of.step_s
    calls = [
        {(row.op, row.group): row.bytes for row in one.ledgers[1].comm}
        for one in (none, first, all_of)
    ]
    for key, value in calls[1].items():
        assert 2 * value == pytest.approx(calls[0][key] + calls[2][key])


def test_one_checkpoint_over_two_layers_keeps_half_the_inputs() -> None:
    """16 MiB an input at TP2, 12 layers, 7 in flight on the second rank; its backward replays two
    layers."""
    one, two = of(f"{CUT},recompute=full"), of(f"{CUT},recompute=uniform2")
    less = held(one, Component.ACTIVATIONS, pp_rank=1) - held(two, Component.ACTIVATIONS, pp_rank=1)
    assert less == 7 * 6 * 16 * MIB
    more = held(two, Component.TRANSIENT, pp_rank=1) - held(one, Component.TRANSIENT, pp_rank=1)
    assert more / MIB == pytest.approx(424, abs=1)  # what a layer keeps, 440 MiB, less its input


@pytest.mark.parametrize("beside", ["", "full+"])
def test_logits_in_pieces_are_neither_kept_nor_whole(beside: str) -> None:
    """16,384 tokens of Qwen3-8B on the second of two ranks; the logits' product comes once more in
    backward."""
    model, hardware = catalogue.model("Qwen3-8B"), catalogue.hardware("16xH100")
    work = Workload(seq_len=16384, global_batch=64)
    plain, found = (
        estimate(model, work, hardware, parse_layout(f"tp2,pp2,recompute={text}", world_size=16))
        for text in (beside.strip("+") or "none", f"{beside}loss")
    )
    assert found.ledgers[1].device_bytes < plain.ledgers[1].device_bytes - 4 * GIB
    assert held(found, Component.ACTIVATIONS, pp_rank=1) == held(
        plain, Component.ACTIVATIONS, pp_rank=1
    )
    assert found.step_s > plain.step_s
    head = 2 * work.tokens_per_step * 151936 * 4096
    added = (found.hfu / found.mfu - plain.hfu / plain.mfu) * found.model_flops_per_step
    assert added == pytest.approx(head, rel=1e-6)


@pytest.mark.parametrize("kind", list(DeviceKind))
def test_what_a_piece_of_the_logits_takes(kind: DeviceKind) -> None:
    """16,384 tokens, 4096 columns: the logits in 16 bits and, of a fused stack, in 32 (it is the
    larger of what its forward and its backward take); in backward their gradient, that of the
    weight, and of the head's input in fp32.
    """
    model, work = catalogue.model("Qwen3-8B"), Workload(seq_len=16384, global_batch=64)
    layout = parse_layout("tp2,recompute=loss", world_size=16)
    size = build_symbols(model, work, layout, device_kind=kind, load=1.0, router_efficiency=1.0)
    found = head_bytes(Constants(catalogue.hardware("16xH100")), size)
    piece, weight = 16384 * 4096, 151936 * 4096 // 2
    assert piece == 16384 * model.hidden_size  # also the numbers of the head's input
    if kind is DeviceKind.CPU:
        assert found == HeadBytes(forward=2 * piece, backward=4 * piece + 2 * weight + 4 * piece)
    else:
        assert found == HeadBytes(
            forward=4 * piece + 2 * weight + 2 * piece + 4 * piece, backward=0
        )


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_a_part_of_the_optimizer_on_the_host(share: float) -> None:
    before, after = of(CUT), of(f"{CUT},offload=optimizer{share if share < 1 else ''}")
    parts = Component.MASTER, Component.MOMENTS
    assert held(after, *parts) == pytest.approx((1 - share) * held(before, *parts), abs=64)
    assert held(after, Component.GRADIENTS) == held(before, Component.GRADIENTS)
    assert held(after, Component.HOST) == pytest.approx(share * held(before, *parts), abs=64)


def test_a_checkpoint_beside_training_is_copied_to_the_host() -> None:
    """12 bytes a parameter over all ranks, whoever holds copies; on a CPU the copy is in the memory
    that runs full."""
    tiny = replace(
        catalogue.model("Qwen3-30B-A3B"), layers=6, moe_layers=(True,) * 6, tie_embeddings=True
    )
    spec = replace(WORK.checkpoint, mode=SaveMode.ASYNC)
    work, beside = (
        replace(WORK, global_batch=64, checkpoint=one) for one in (WORK.checkpoint, spec)
    )
    for text in ("tp2,ep4,pp2", "ep2,pp2,zero0"):
        layout = parse_layout(text, world_size=16)
        copied = [
            checkpoint_copy_bytes(beside, layout, bucket_sets(tiny, beside, layout, rank))
            for rank in range(16)
        ]
        assert sum(copied) == pytest.approx(
            12 * count_parameters(tiny).total, rel=1e-3
        )  # buckets are padded
    on_gpu = catalogue.hardware("16xH800")
    cpu = replace(on_gpu, device=replace(on_gpu.device, kind=DeviceKind.CPU))
    for hardware, more in ((on_gpu, 0), (cpu, copied[0])):
        without, found = (estimate(tiny, one, hardware, layout) for one in (work, beside))
        grown = found.ledgers[0].device_bytes - without.ledgers[0].device_bytes
        assert grown == pytest.approx(
            more, rel=0.05
        )  # an allowance is a share of what is allocated
        assert held(found, Component.HOST) == (0 if more else copied[0])


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
    """MiB a layer on the second rank: 12 layers, 7 in flight."""
    before, after = of(CUT), of(f"{CUT},offload={offload}")
    less = held(before, Component.ACTIVATIONS, pp_rank=1) - held(
        after, Component.ACTIVATIONS, pp_rank=1
    )
    assert less == 7 * 12 * mib * MIB
    assert before.peak_bytes - after.peak_bytes > 0.9 * less / GIB


@pytest.mark.parametrize(
    ("moments", "share"), [(Dtype.FP32, 1.0), (Dtype.BF16, 0.5), (Dtype.FP8, 0.25)]
)
def test_moments_in_fewer_bits(moments: Dtype, share: float) -> None:
    hardware, layout = catalogue.hardware("256xH800"), parse_layout(CUT, world_size=256)
    work = replace(WORK, optimizer=OptimizerSpec(moment_dtype=moments))
    found = estimate(QWEN, work, hardware, layout)
    assert held(found, Component.MOMENTS) == share * held(of(CUT), Component.MOMENTS)
    assert held(found, Component.MASTER) == held(of(CUT), Component.MASTER)
