"""The table of saved activations against published and hand-computed sizes."""

from __future__ import annotations

import pytest

from moewright.intake import catalogue
from moewright.rules.job import Job
from moewright.rules.saved import recompute
from moewright.rules.saved.saved_tensor import SavedTensor
from moewright.spec.layout import Layout, Recompute
from moewright.spec.ledger import Module
from moewright.spec.units import GIB, MIB
from moewright.spec.workload import Dtype, LossSpec, Workload

QWEN = catalogue.model("Qwen3-235B-A22B")
WORKLOAD = Workload(seq_len=4096, global_batch=2048)


def kept_bytes(rows: tuple[SavedTensor, ...], *policies: Recompute) -> int:
    return sum(row.bytes for row in rows if recompute.is_kept(row, policies))


@pytest.mark.parametrize(
    ("tp", "policies", "mib"),
    [
        (2, (), 440),
        (1, (), 881),
        (4, (), 220),
        (1, (Recompute.MOE, Recompute.LAYERNORM), 301),
        (1, (Recompute.FULL,), 32.25),  # 32 of the input, the rest the router's choice
    ],
)
def test_qwen3_235b_per_layer(tp: int, policies: tuple[Recompute, ...], mib: int) -> None:
    """docs/formulas.md 6, MiB a layer of Qwen3-235B at 4096 tokens."""
    layout = Layout(world_size=256, tp=tp, sp=tp > 1, pp=8, ep=8)
    rows = recompute.saved_tensors(Job(model=QWEN, workload=WORKLOAD, layout=layout), 5, load=1.0)
    assert kept_bytes(rows, *policies) / MIB == pytest.approx(mib, rel=5e-3)


def test_experts_are_the_largest_share() -> None:
    """docs/formulas.md 6: 272 of 440 MiB at TP2."""
    layout = Layout(world_size=256, tp=2, sp=True, pp=32, ep=8)
    rows = recompute.saved_tensors(Job(model=QWEN, workload=WORKLOAD, layout=layout), 5, load=1.0)
    experts = sum(row.bytes for row in rows if row.module is Module.EXPERTS)
    assert experts / MIB == pytest.approx(272, rel=5e-3)
    assert experts / kept_bytes(rows) == pytest.approx(0.62, abs=5e-3)


def test_deepseek_v3_published_breakdown() -> None:
    """See arXiv 2603.07685: 60 layer-micro-batches on a rank of PP4 VPP4 EP64.

    It prints 131 GiB with the older permutation, which keeps 26.3 GiB more, and 30.4 GiB freed by
    the up-projections.
    """
    model = catalogue.model("DeepSeek-V3")
    layout = Layout(world_size=256, pp=4, vpp=4, ep=64)
    rows = recompute.saved_tensors(Job(model=model, workload=WORKLOAD, layout=layout), 20, load=1.0)
    everything = 60 * kept_bytes(rows)
    assert everything / GIB == pytest.approx(131 - 26.3, rel=5e-3)
    freed = everything - 60 * kept_bytes(rows, Recompute.MLA_UP_PROJ)
    assert freed / GIB == pytest.approx(30.4, rel=2e-2)


def test_rows_by_hand() -> None:
    """Every row of a Qwen3-MoE layer, T = 4096, written out."""
    layout = Layout(world_size=8, ep=8)
    rows = recompute.saved_tensors(Job(model=QWEN, workload=WORKLOAD, layout=layout), 0, load=1.5)
    T, h, R, f = 4096, 4096, 4096 * 8 * 3 // 2, 1536
    expected = {
        (Module.NORM, "layer_input"): 2 * T * h,
        (Module.NORM, "input_norm_rstd"): 4 * T,
        (Module.ATTENTION, "input_norm_out"): 2 * T * h,
        (Module.ATTENTION, "qk_norm_in"): 2 * T * (8192 + 512),
        (Module.ATTENTION, "qk_norm_rstd"): 4 * T * (64 + 4),
        (Module.ATTENTION, "qkv"): 2 * T * (8192 + 2 * 512),
        (Module.ATTENTION, "attention_out"): 2 * T * 8192,
        (Module.ATTENTION, "lse"): 4 * T * 64,
        (Module.NORM, "residual"): 2 * T * h,
        (Module.NORM, "post_norm_rstd"): 4 * T,
        (Module.ROUTER, "post_norm_out"): 2 * T * h,
        (Module.ROUTER, "scores"): 4 * T * 128,
        (Module.ROUTER, "chosen"): 8 * T * 8,
        (Module.ROUTER, "chosen_scores"): 4 * (T * 8 + T),
        (Module.EXPERTS, "permuted"): 2 * R * h,
        (Module.EXPERTS, "fc1"): 4 * R * f,
        (Module.EXPERTS, "activation"): 2 * R * f,
        (Module.EXPERTS, "probs"): 4 * R,
        (Module.EXPERTS, "sent_indices"): 8 * T * 8,
        (Module.EXPERTS, "returned_indices"): 8 * T * 8,
        (Module.EXPERTS, "received_indices"): 16 * R,
        (Module.EXPERTS, "row_ends"): 4 * 16,
    }
    assert {(row.module, row.name): row.bytes for row in rows} == expected


def test_fp32_doubles_the_activations_and_not_the_statistics() -> None:
    layout = Layout(world_size=8, ep=8)
    wide = Workload(seq_len=4096, global_batch=8, precision=Dtype.FP32)
    pairs = zip(
        recompute.saved_tensors(Job(model=QWEN, workload=WORKLOAD, layout=layout), 0, load=1.0),
        recompute.saved_tensors(Job(model=QWEN, workload=wide, layout=layout), 0, load=1.0),
        strict=True,
    )
    wider = {
        "layer_input",
        "input_norm_out",
        "qk_norm_in",
        "qkv",
        "attention_out",
        "residual",
        "post_norm_out",
    }
    wider |= {"permuted", "fc1", "activation"}
    for narrow, full in pairs:
        assert full.bytes == narrow.bytes * (2 if narrow.name in wider else 1), narrow.name


def test_dense_and_shared_layers() -> None:
    v3 = catalogue.model("DeepSeek-V3")
    layout = Layout(world_size=8, ep=8)
    dense = {
        row.name: row
        for row in recompute.saved_tensors(
            Job(model=v3, workload=WORKLOAD, layout=layout), 0, load=1.0
        )
    }
    assert dense["fc1"].bytes == 4 * 4096 * 18432
    assert dense["post_norm_out"].module is Module.DENSE_MLP
    assert Recompute.MLP in dense["fc1"].freed_by
    shared = [
        r
        for r in recompute.saved_tensors(
            Job(model=v3, workload=WORKLOAD, layout=layout), 5, load=1.0
        )
        if r.module is Module.SHARED_EXPERTS
    ]
    assert sum(row.bytes for row in shared) == 6 * 4096 * 2048
    gated = recompute.saved_tensors(
        Job(model=catalogue.model("Qwen2-57B-A14B"), workload=WORKLOAD, layout=layout), 5, load=1.0
    )
    assert sum(r.bytes for r in gated if r.name == "gated") == 2 * 4096 * (3584 + 1)


def test_mtp_depth_is_a_layer_and_its_inputs() -> None:
    v3 = catalogue.model("DeepSeek-V3")
    layout = Layout(world_size=8, ep=8)
    depth = recompute.saved_tensors(
        Job(model=v3, workload=WORKLOAD, layout=layout), v3.layers + 1, load=1.0
    )
    layer = recompute.saved_tensors(
        Job(model=v3, workload=WORKLOAD, layout=layout), v3.layers - 1, load=1.0
    )
    assert {row.module for row in depth} == {Module.MTP, Module.ROUTER}
    # The embedding, and both norms' outputs; the hidden state is the final norm's.
    assert kept_bytes(depth) - kept_bytes(layer) == 4096 * (3 * 2 * 7168 + 2 * 4)


def test_full_keeps_only_the_layer_input_and_the_choice() -> None:
    for name in ("DeepSeek-V3", "Qwen3-8B", "gpt-oss-20b", "Qwen2-57B-A14B"):
        rows = recompute.saved_tensors(
            Job(model=catalogue.model(name), workload=WORKLOAD, layout=Layout(world_size=8, ep=8)),
            3,
            load=1.0,
        )
        choice = ["chosen"] if any(row.module is Module.ROUTER for row in rows) else []
        assert [row.name for row in rows if recompute.is_kept(row, (Recompute.FULL,))] == [
            "layer_input",
            *choice,
        ]


def test_axes_divide_the_activations_or_leave_them() -> None:
    """docs/formulas.md 5: balanced EP keeps the activations of a layer; TP (SP) and CP divide."""

    def total(**degrees: int) -> int:
        layout = Layout(world_size=64, sp=degrees.get("tp", 1) > 1, **degrees)
        return kept_bytes(
            recompute.saved_tensors(Job(model=QWEN, workload=WORKLOAD, layout=layout), 5, load=1.0)
        )

    whole = total(ep=8)
    assert total(ep=8, pp=8) == whole
    # But for a number per local expert.
    assert total(ep=64) == pytest.approx(whole, rel=1e-6)
    assert total(ep=8, tp=4) * 4 == pytest.approx(whole, rel=1e-6)
    assert total(ep=8, cp=4) * 4 == pytest.approx(whole, rel=1e-6)
    assert total(ep=8, mbs=2) == pytest.approx(2 * whole, rel=1e-6)


def test_auxiliary_losses_keep_their_inputs() -> None:
    layout = Layout(world_size=8, ep=8)
    plain = recompute.saved_tensors(Job(model=QWEN, workload=WORKLOAD, layout=layout), 0, load=1.0)
    losses = Workload(seq_len=4096, global_batch=8, loss=LossSpec(aux_coeff=0.01, z_coeff=0.001))
    extra = {
        row.name: row.bytes
        for row in recompute.saved_tensors(
            Job(model=QWEN, workload=losses, layout=layout), 0, load=1.0
        )
    }
    for row in plain:
        assert extra.pop(row.name) == row.bytes
    assert extra == {"load_share": 4 * 128, "logits": 4 * 4096 * 128, "log_sums": 4 * 4096}
