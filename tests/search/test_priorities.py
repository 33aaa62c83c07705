"""Priorities that practitioners follow come out of prices; where they do not the plan says why.

Phases and pitfalls of published MoE tuning guides: fit with the least model parallelism, recompute
little before much, keep tensor and expert parallelism inside the fast domain, experts by EP before
ETP, context parallelism only for long sequences, graphs with selective recompute; and what a
measured table of Qwen3-235B on 256 H800 departs in.
"""

from __future__ import annotations

import pytest

from moewright.codec import parse_layout
from moewright.cost.estimate import estimate
from moewright.intake import catalogue
from moewright.search import explain, heuristics
from moewright.search.search import SearchResult, search
from moewright.search.space import build_search_space
from moewright.spec.layout import CudaGraphScope, Overlap, Recompute
from moewright.spec.plan import Plan
from moewright.spec.workload import Routing, Workload

# What the runs of the table could use: a plain all-to-all, no graphs, no overlapped experts, no
# offload.
PLAIN = "dispatcher=alltoall,graphs=none,overlap=none,offload=none,zero1"


def _search(
    model: str, on: str, fixed: str = "", *, batch: int, seq_len: int = 4096, top: int = 1
) -> SearchResult:
    workload = Workload(routing=Routing.BALANCED, seq_len=seq_len, global_batch=batch)
    return search(catalogue.model(model), workload, catalogue.hardware(on), fixed=fixed, top=top)


def _best(model: str, on: str, fixed: str = "", *, batch: int, seq_len: int = 4096) -> Plan:
    return _search(model, on, fixed, batch=batch, seq_len=seq_len).plans[0]


@pytest.fixture(scope="module")
def large() -> Plan:
    return _best("Qwen3-235B-A22B", "256xH800", batch=4096)


def test_with_room_no_model_parallelism_and_no_recompute() -> None:
    """The smallest model parallelism that fits; data parallelism takes the rest."""
    layout = _best("OLMoE-1B-7B-0924", "8xH200", batch=256).layout
    assert (layout.tp, layout.pp, layout.cp, layout.etp) == (1, 1, 1, 1)
    assert layout.recompute == ()


def test_tensor_parallelism_stays_in_the_domain_and_experts_are_cut_by_ep(large: Plan) -> None:
    domain = catalogue.hardware("256xH800").fabric.domain_size
    assert large.layout.tp < domain
    assert large.layout.etp == 1
    assert large.layout.ep > 1
    assert large.layout.pp > 1


def test_selective_recompute_comes_before_full_and_goes_with_graphs(large: Plan) -> None:
    assert Recompute.FULL not in large.layout.recompute
    assert CudaGraphScope.ATTN in large.layout.graphs
    full = _best("Qwen3-235B-A22B", "256xH800", "recompute=full,cp1,etp1,zero1", batch=4096)
    assert full.layout.graphs == ()
    assert full.estimate.step_s > 1.05 * large.estimate.step_s


def test_overlapped_experts_turn_the_ranking() -> None:
    """Experts over 32 ranks beat 8, even without duplicates, only if their exchange is hidden."""
    pins = "tp2,cp1,etp1,mbs1,zero1,graphs=none,recompute=select"
    few, many = "pp32,vpp3,ep8,dispatcher=alltoall", "pp8,vpp4,ep32,dispatcher=deepep"

    def step_s(shape: str, overlap: str) -> float:
        return _best(
            "Qwen3-235B-A22B", "256xH800", f"{pins},{shape},overlap={overlap}", batch=2048
        ).estimate.step_s

    assert step_s(few, "none") < step_s(many, "none")
    assert step_s(many, "ep") < step_s(few, "none")


def test_context_parallelism_comes_with_long_sequences() -> None:
    pins = "etp1,zero1,mbs1,ep8,vpp1"
    short = _best("Qwen3-30B-A3B", "64xH100", pins, batch=1024)
    long = _best("Qwen3-30B-A3B", "64xH100", pins, batch=64, seq_len=131072)
    assert short.layout.cp == 1
    assert long.layout.cp >= 2


def test_dropping_tensor_parallelism_for_full_recompute_can_win() -> None:
    """One rank a layer that recomputes everything beats tensor parallelism that recomputes little.

    That is against the usual order, and as measured, at a larger micro-batch; the plan tells which
    parts of the step make the difference.
    """
    ranked = _search(
        "Qwen3-235B-A22B", "256xH800", f"{PLAIN},ep8,etp1,cp1,pp32,vpp3", batch=4096, top=1
    )
    best = ranked.plans[0].layout
    assert best.tp == 1
    assert best.recompute == (Recompute.FULL,)
    assert best.mbs in (2, 4)
    workload = Workload(routing=Routing.BALANCED, seq_len=4096, global_batch=4096)
    usual = "tp2,ep8,pp32,vpp3,mbs1,recompute=select"
    model, hardware = catalogue.model("Qwen3-235B-A22B"), catalogue.hardware("256xH800")
    (line,) = explain.explain_objections(model, workload, hardware, ranked, usual)
    assert "slower" in line
    assert "tp comm +" in line or "host +" in line
    assert "recompute -" in line


def test_sums_are_overlapped_where_they_show() -> None:
    """Overlapped gradient sums cost host time every micro-batch: many of them gain nothing."""
    pins = "tp2,cp1,etp1,ep8,pp8,vpp1,mbs1,zero1,dispatcher=alltoall,graphs=none,recompute=select"
    many = _search("Qwen3-235B-A22B", "256xH800", f"{pins},overlap=none", batch=2048).plans[0]
    overlapped = _search(
        "Qwen3-235B-A22B", "256xH800", f"{pins},overlap=grad+param", batch=2048
    ).plans[0]
    assert overlapped.estimate.step_s > many.estimate.step_s
    few = _best("OLMoE-1B-7B-0924", "64xH100", "tp1,cp1,pp1,etp1,ep8,mbs4", batch=256)
    assert Overlap.GRAD in few.layout.overlap


def test_a_plan_says_what_keeping_to_what_is_usual_would_take() -> None:
    """Each departure has a sentence: a layout that follows the guideline, and how it is slower."""
    ranked = _search("Qwen3-30B-A3B", "8xH100", "zero1", batch=128)
    best = ranked.plans[0]
    workload = Workload(routing=Routing.BALANCED, seq_len=4096, global_batch=128)
    hardware = catalogue.hardware("8xH100")
    space = build_search_space(best.model, workload, hardware, "zero1")
    lines = [line for line in ranked.why if line.startswith("Departs from the usual")]
    departures = heuristics.find_departures(best.layout, space)
    assert departures
    for guideline in departures:
        (line,) = (line for line in lines if guideline.text in line)
        usual = parse_layout(line.partition("): ")[2].partition(" takes ")[0], world_size=8)
        assert guideline.is_followed(usual, space)
        assert estimate(best.model, workload, hardware, usual).step_s > best.estimate.step_s
        assert "% slower" in line
    room = _search("OLMoE-1B-7B-0924", "8xH200", "", batch=256)
    assert not any(line.startswith("Departs") for line in room.why)
