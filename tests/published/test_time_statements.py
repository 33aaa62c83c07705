"""Rankings and statements of published runs (features.md C.4 18-29), by the shipped constants."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from moewright.calibration.fit import FREE_CONSTANTS, fit_constants
from moewright.calibration.fit_inputs import relative_errors, runs_from_rows
from moewright.calibration.table import read_table
from moewright.codec import parse_layout
from moewright.cost.estimate import estimate
from moewright.intake import catalogue
from moewright.spec.hardware import Constant
from moewright.spec.plan import TimePart
from moewright.spec.units import Sourced, SourceKind
from moewright.spec.workload import Routing, Workload

ROWS = read_table(Path(__file__).parent / "data" / "measured_steps.csv").rows
EP_IN_NODE = "tp2,ep8,pp32,vpp3,mbs1,recompute=select"
PP8 = "tp2,ep8,pp8,mbs1,recompute=select"


def seconds(
    text: str, *, model: str = "Qwen3-235B-A22B", on: str = "256xH800", batch: int = 2048
) -> float:
    """Return the seconds of a step at 4096 tokens."""
    hardware = catalogue.hardware(on)
    layout = parse_layout(text, world_size=hardware.count)
    return estimate(
        catalogue.model(model),
        Workload(routing=Routing.BALANCED, seq_len=4096, global_batch=batch),
        hardware,
        layout,
    ).step_s


def test_tensor_parallelism_over_four_costs_more_than_its_exchange() -> None:
    """The published cost of TP4 against TP2 is x1.58, with fewer stages and no recompute."""
    assert 1.4 < seconds("tp4,ep8,pp8,vpp4,mbs1") / seconds(EP_IN_NODE) < 1.7


def test_sending_a_token_once_a_node_gains() -> None:
    """The published gain of DeepEP over four nodes is x1.375."""
    text = "tp2,ep32,pp8,vpp4,mbs1,recompute=select"
    assert 1.25 < seconds(text) / seconds(f"{text},dispatcher=deepep") < 1.5


def test_more_stages_with_virtual_ones_gain_more_than_the_bubble_explains() -> None:
    """The gain of PP32 VPP3 over PP8 is 22.9 %, of which the bubble explains 3.4 %."""
    assert 1.08 < seconds(PP8) / seconds(EP_IN_NODE) < 1.27


def test_overlap_of_a_rare_reduction_does_not_pay() -> None:
    """With 128 micro-batches a step, overlapped gradients and weights made it 7.6 % slower."""
    slower = seconds(f"{PP8},overlap=grad+param") / seconds(PP8)
    assert 1.0 < slower < 1.1


def test_overlap_of_tensor_parallel_traffic_over_two_ranks_gains_next_to_nothing() -> None:
    """The published gain is +1.3 %."""
    gain = seconds(f"{PP8},overlap=grad+param") / seconds(f"{PP8},overlap=grad+param+tp")
    assert 1.0 <= gain < 1.03


def test_recomputing_the_experts_costs_as_much_as_cutting_the_layer() -> None:
    """Recompute of `moe` at TP1 is 2.3 % slower than selective recompute at TP2."""
    moe = seconds("tp1,ep8,pp32,vpp3,mbs1,recompute=moe+layernorm")
    assert abs(seconds(EP_IN_NODE) / moe - (1 - 0.023)) < 0.1


def test_whole_experts_beat_sharded_ones() -> None:
    """Mixtral 8x7B: EP8 with ETP1 against EP4 with ETP2."""
    for tp in (1, 2):
        whole, sharded = (
            seconds(
                f"tp{tp},pp4,mbs1,{experts}", model="Mixtral-8x7B-v0.1", on="128xH100", batch=256
            )
            for experts in ("ep8", "ep4,etp2")
        )
        assert whole < sharded


def test_recomputing_attention_costs_more_the_longer_the_sequence() -> None:
    """It is worth it at no length, and least at 64K, where it is over a tenth of the step."""
    model = catalogue.model("Qwen3-235B-A22B")
    hardware = catalogue.hardware("256xH100")

    def step_s(seq_len: int, recompute: str) -> float:
        text = f"tp4,cp4,ep8,pp8,vpp4,mbs1,dispatcher=deepep,recompute={recompute}"
        workload = Workload(routing=Routing.BALANCED, seq_len=seq_len, global_batch=256)
        return estimate(model, workload, hardware, parse_layout(text, world_size=256)).step_s

    costs = [step_s(n, "select+core_attn") / step_s(n, "select") for n in (4096, 16384, 65536)]
    assert 1 < costs[0] < costs[1] < costs[2]
    assert costs[2] > 1.1


def test_the_best_published_layout_is_among_the_best_predicted() -> None:
    """TP1, PP32, VPP3, MBS4 with full recompute; the second lies 1.3 % behind it."""
    batches = {
        "tp1,ep8,pp32,vpp3,mbs4,recompute=full": 4096,
        "tp1,ep8,pp32,vpp3,mbs8,recompute=full": 8192,
        "tp2,ep8,pp32,vpp3,mbs4,recompute=full": 4096,
        "tp1,ep8,pp32,vpp3,mbs1,recompute=moe+layernorm": 2048,
        EP_IN_NODE: 2048,
        PP8: 2048,
    }
    speeds = {text: batch / seconds(text, batch=batch) for text, batch in batches.items()}
    best = max(speeds.values())
    assert speeds["tp1,ep8,pp32,vpp3,mbs4,recompute=full"] > best / 1.03
    assert max(speeds[text] for text in (EP_IN_NODE, PP8)) < best


# The four terms that carry the model, each taken away by its constants.
TERMS = {
    "expert exchange": {
        f"{kind}_{where}_time_scale": 1e-6
        for kind in ("alltoall", "dedup")
        for where in ("inside", "between")
    },
    "host work": {
        "host_s_per_layer_microbatch": 1e-9,
        "sync_s_alltoall": 1e-9,
        "sync_s_fused": 0.0,
    },
    "elementwise work": {"elementwise_time_scale": 1e-6},
    "overlap of the exchange": {"ep_overlap_hidden": 0.0, "ep_overlap_host": 1.0},
}


@cache
def fitted_error(term: str) -> float:
    """Return the mean error over one row of each layout, by constants fitted to these rows.

    The model is without `term`, unless that is "".
    """
    without_term = tuple(
        Constant(name=name, value=Sourced(value=value, kind=SourceKind.ASSUMED, source="left out"))
        for name, value in TERMS.get(term, {}).items()
    )
    row_by_layout = {(row.group, row.layout): row for row in ROWS if row.model.moe}.values()
    runs = runs_from_rows(
        [
            replace(
                row,
                hardware=replace(row.hardware, constants=(*row.hardware.constants, *without_term)),
            )
            for row in row_by_layout
        ]
    )
    free = tuple(free for free in FREE_CONSTANTS if free.name not in TERMS.get(term, {}))
    fit = fit_constants(runs, free_constants=free)
    predicted = [run.prepared.step_s(fit.constants_for(run.hardware)) for run in runs]
    return float(np.mean(np.abs(relative_errors(runs, predicted))))


@pytest.mark.thorough
@pytest.mark.parametrize("term", TERMS)
def test_every_main_term_earns_its_place(term: str) -> None:
    """Without it, and with all other constants refitted, the error is a fifth larger or more."""
    assert fitted_error(term) > 1.2 * fitted_error("")


def test_named_fixed_costs_are_told_apart() -> None:
    """Graphs, plain all-to-all and more micro-batches move the host part alone."""
    model = catalogue.model("Qwen3-235B-A22B")
    hardware = catalogue.hardware("256xH100")

    def host_s(text: str) -> float:
        layout = parse_layout(f"tp1,ep8,pp32,vpp3,{text}", world_size=256)
        workload = Workload(routing=Routing.BALANCED, seq_len=4096, global_batch=2048)
        shares = estimate(model, workload, hardware, layout).shares
        return next((share.seconds for share in shares if share.part is TimePart.HOST), 0.0)

    eager, partly_captured, fully_captured = (
        host_s(f"mbs1{graphs}")
        for graphs in ("", ",graphs=attn+moe_router", ",graphs=full,dispatcher=hybridep")
    )
    assert eager > partly_captured > fully_captured
    assert host_s("mbs1") > host_s("mbs1,dispatcher=deepep")
    assert host_s("mbs1") > 2 * host_s("mbs4")
