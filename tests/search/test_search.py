"""The search: legal layouts, best first, pinned keys kept, rejections counted and explained."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product

import pytest

from moewright.codec import format_layout, parse_layout
from moewright.cost.estimate import estimate
from moewright.intake import catalogue
from moewright.rules.job import Job
from moewright.rules.limits.legality import check_legality
from moewright.search import explain
from moewright.search.ranking import bound_s
from moewright.search.search import DOES_NOT_FIT, NO_HOST_MEMORY, SLOWER, build_plan, search
from moewright.search.space import build_search_space, cp_comm_choices, degree_groups
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Constant, DeviceKind, Hardware
from moewright.spec.layout import CpComm, CudaGraphScope, DispatcherKind, Layout, Offload, Recompute
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Verdict
from moewright.spec.units import Sourced, SourceKind, format_seconds
from moewright.spec.workload import Dtype, Routing, Workload

WORK = Workload(routing=Routing.BALANCED, seq_len=4096, global_batch=128)


@pytest.fixture(scope="module")
def model() -> ModelSpec:
    return catalogue.model("Qwen3-30B-A3B")


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    return catalogue.hardware("16xH100")


def test_context_is_exchanged_as_some_trainer_can(hardware: Hardware) -> None:
    """Megatron-LM has no ring that begins with a sink; a pinned one stays."""
    layout = Layout(world_size=16, cp=2)

    def choices(name: str, fixed: str) -> tuple[CpComm, ...]:
        return cp_comm_choices(
            build_search_space(catalogue.model(name), WORK, hardware, fixed), layout
        )

    assert choices("gpt-oss-20b", "") == (CpComm.A2A,)
    assert choices("gpt-oss-20b", "cp_comm=p2p") == (CpComm.P2P,)
    assert CpComm.P2P in choices("Qwen3-30B-A3B", "")


def test_no_layout_of_a_plain_enumeration_is_better(model: ModelSpec, hardware: Hardware) -> None:
    """Try everything in a small corner, without any of the search's shortcuts."""
    best = None
    for pp, vpp, ep, mbs, recompute in product(
        (1, 2, 4), (1, 2), (2, 8, 16), (1, 2), ("none", "select", "full")
    ):
        schedule = "interleaved" if vpp > 1 else "1f1b"
        text = f"tp1,cp1,etp1,pp{pp},vpp{vpp},ep{ep},mbs{mbs},recompute={recompute}"
        text += f",schedule={schedule}"
        layout = parse_layout(text, world_size=16)
        if check_legality(Job(model=model, workload=WORK, layout=layout)):
            continue
        tried = estimate(model, WORK, hardware, layout)
        if tried.verdict is Verdict.FITS and (best is None or tried.step_s < best):
            best = tried.step_s
    assert best is not None
    first = search(model, WORK, hardware, fixed="tp1,cp1,etp1", top=1).plans[0]
    assert first.estimate.step_s <= best


def test_plans_are_ranked_and_rejections_counted(model: ModelSpec, hardware: Hardware) -> None:
    ranked = search(model, WORK, hardware, fixed="ep8", top=5)
    assert len(ranked.plans) == 5
    bounds = [bound_s(plan.estimate, ranked.rule) for plan in ranked.plans]
    assert bounds == sorted(bounds)
    assert all(
        plan.layout.ep == 8 and plan.estimate.fit_probability >= 0.9 for plan in ranked.plans
    )
    assert len({plan.fingerprint for plan in ranked.plans}) == 5
    assert dict(ranked.rejected)[DOES_NOT_FIT] > 0
    assert format_seconds(ranked.plans[0].estimate.step_s) in ranked.why[0]
    simulated = {candidate.layout: candidate.step_s for candidate in ranked.near_best}
    for plan in ranked.plans:
        assert simulated[plan.layout] == pytest.approx(plan.estimate.step_s, rel=1e-9)


def test_everything_can_be_pinned(model: ModelSpec, hardware: Hardware) -> None:
    text = "tp2,cp1,pp2,vpp2,ep8,etp1,mbs2,dispatcher=alltoall,recompute=moe+layernorm,overlap=grad"
    text += ",graphs=none,zero1,layout='Et*12|(t*12|)*2t*12L'"
    ranked = search(model, WORK, hardware, fixed=text)
    assert [plan.layout for plan in ranked.plans] == [parse_layout(text, world_size=16)]


def test_a_predicate_says_what_can_be_run(model: ModelSpec, hardware: Hardware) -> None:
    def plain(layout: Layout) -> tuple[Reason, ...]:
        bad = layout.pp > 1 or layout.recompute
        return (Reason(field="layout", rule="is too clever"),) if bad else ()

    ranked = search(model, WORK, hardware, fixed="tp2,ep8", allowed=plain)
    assert ranked.plans
    assert all(plan.layout.pp == 1 and not plan.layout.recompute for plan in ranked.plans)
    assert dict(ranked.rejected)["is too clever"] > 0


def test_nothing_fits_is_an_answer(model: ModelSpec) -> None:
    ranked = search(
        model,
        Workload(routing=Routing.BALANCED, seq_len=4096, global_batch=16),
        catalogue.hardware("1xH100"),
    )
    assert ranked.plans == ranked.why == ()
    assert [rule for rule, _ in ranked.rejected] == [DOES_NOT_FIT]


def test_bad_pins_are_refused(model: ModelSpec, hardware: Hardware) -> None:
    with pytest.raises(BadInput, match="tp"):
        search(model, WORK, hardware, fixed="tp0x")


def test_layers_that_split_evenly_nowhere_get_a_layout_string() -> None:
    """DeepSeek-V3 has 61 layers: 61 and 63 are odd."""
    deepseek = catalogue.model("DeepSeek-V3")
    space = build_search_space(
        deepseek, WORK, catalogue.hardware("64xH100"), "tp1,cp1,ep8,etp1,mbs1"
    )
    shapes = {shape for group in degree_groups(space) for shape in group.pipelines.shapes}
    assert {(shape.pp, bool(shape.stages)) for shape in shapes} >= {(2, True), (4, True), (8, True)}
    for shape in shapes:
        layout = Layout(world_size=64, ep=8, pp=shape.pp, vpp=shape.vpp, stages=shape.stages)
        assert not [
            reason
            for reason in check_legality(Job(model=deepseek, workload=WORK, layout=layout))
            if reason.field in ("layout.stages", "layout.pp")
        ]


def test_dense_models_and_cpus_have_no_dispatcher_choice(hardware: Hardware) -> None:
    dense = search(catalogue.model("Qwen3-8B"), WORK, hardware, top=3)
    assert all(plan.layout.ep == plan.layout.etp == 1 for plan in dense.plans)
    cpu = replace(hardware, device=replace(hardware.device, kind=DeviceKind.CPU))
    ranked = search(catalogue.model("Qwen3-30B-A3B"), WORK, cpu, fixed="tp1,pp2", top=3)
    assert all(plan.layout.dispatcher == "alltoall" for plan in ranked.plans)


def test_rocm_gets_graphs_and_libraries_of_cuda_only_when_asked(model: ModelSpec) -> None:
    hardware = catalogue.hardware("16xMI300X")
    ranked = search(model, WORK, hardware, fixed="tp1,cp1,etp1,pp1,ep8", top=3)
    for plan in (*ranked.plans, *ranked.gambles):
        assert plan.layout.graphs == ()
        assert plan.layout.dispatcher == "alltoall"
    asked = search(model, WORK, hardware, fixed="tp1,cp1,etp1,pp1,ep8,graphs=attn", top=1)
    assert asked.plans[0].layout.graphs == ("attn",)


@pytest.mark.parametrize("part", ["TPU-v5p", "Ascend-910B"])
def test_parts_without_cuda_get_no_cuda_graphs_and_no_libraries_of_its_kernels(
    model: ModelSpec, part: str
) -> None:
    hardware = catalogue.hardware(f"16x{part}")
    ranked = search(model, WORK, hardware, top=3)
    for plan in (*ranked.plans, *ranked.gambles):
        assert plan.layout.graphs == ()
        assert plan.layout.dispatcher == "alltoall"
    for text, field in (("graphs=attn", "graphs"), ("ep8,dispatcher=deepep", "dispatcher")):
        with pytest.raises(BadInput, match=rf"layout\.{field}"):
            search(model, WORK, hardware, fixed=text, top=1)
        with pytest.raises(BadInput, match=rf"layout\.{field}"):
            estimate(model, WORK, hardware, parse_layout(text, world_size=16))


@pytest.mark.thorough
def test_a_part_without_cuda_still_offloads_to_its_host(model: ModelSpec) -> None:
    """What is CUDA's alone is left out, not what any accelerator can do."""
    long = replace(WORK, seq_len=16384)
    ranked = search(model, long, catalogue.hardware("16xTPU-v6e"), fixed="recompute=none", top=1)
    assert any(plan.layout.offload for plan in (*ranked.plans, *ranked.gambles))


def test_a_tpu_has_no_host_time_for_each_layer(model: ModelSpec) -> None:
    """Its step is one program, so parts of a layer are not launched by the host."""
    layout = parse_layout("tp2,ep8,mbs1,recompute=select", world_size=16)
    tpu = estimate(model, WORK, catalogue.hardware("16xTPU-v5p"), layout)
    assert next((share.seconds for share in tpu.shares if share.part == "host"), 0.0) < 0.02


def test_where_nothing_fits_no_layout_is_called_slower_than_those_shown() -> None:
    ranked = search(catalogue.model("Qwen3-235B-A22B"), WORK, catalogue.hardware("8xH100"))
    assert not ranked.plans
    refused = dict(ranked.rejected)
    assert refused[DOES_NOT_FIT] + refused[NO_HOST_MEMORY] == ranked.scored
    assert SLOWER not in dict(ranked.rejected)


@pytest.mark.filterwarnings("error")
def test_devices_that_no_power_of_two_divides_are_searched_without_a_warning(
    model: ModelSpec,
) -> None:
    """A rank may own no element of the optimizer's states then."""
    work = Workload(routing=Routing.BALANCED, seq_len=4096, global_batch=1600)
    assert search(model, work, catalogue.hardware("100xH100"), top=1).plans


def test_expert_ranks_that_one_rack_holds_have_no_nodes() -> None:
    """64 ranks of experts lie on 64 of the 72 devices that NVLink joins."""
    wide = search(
        catalogue.model("DeepSeek-V3"),
        Workload(routing=Routing.BALANCED, seq_len=4096, global_batch=4096),
        catalogue.hardware("256xGB200"),
        fixed="tp1,pp4,ep64,dispatcher=hybridep",
        top=1,
    )
    assert wide.plans[0].layout.ep_node == 0
    assert not any(candidate.layout.ep_node for _, pair in wide.with_memory for candidate in pair)


def test_why_not(model: ModelSpec, hardware: Hardware) -> None:
    ranked = search(model, WORK, hardware, fixed="ep8", top=2)

    def lines(text: str) -> str:
        return "\n".join(explain.explain_objections(model, WORK, hardware, ranked, text))

    assert "is not legal: layout.ep=7" in lines("ep7")
    assert "GiB over the memory" in lines("ep2,mbs8")
    assert "of experts" in lines("ep2,mbs8")
    slow = lines("ep8,pp2,mbs1,recompute=full")
    assert "slower" in slow
    assert "recompute +" in slow
    assert "is the best plan" in lines(format_layout(ranked.plans[0].layout))


def test_a_layout_beside_another_is_judged_by_that_one_alone(model: ModelSpec) -> None:
    """The first of two need not be the best: the other is then faster, with no word of doubt."""
    roomy = catalogue.hardware("64xH100")
    texts = ("tp8,ep8,mbs1", "tp1,ep8,pp4,mbs1", "ep8,mbs2,recompute=full", "tp2,ep16,mbs1")
    texts += ("ep2,mbs2", "ep1,mbs1")  # neither of them fits
    plans = [build_plan(model, WORK, roomy, parse_layout(text, world_size=64)) for text in texts]
    for first, other in permutations(plans, 2):
        (*_, line) = explain.explain_beside(other, first, "A")
        own, reference = other.estimate, first.estimate
        assert ("faster than A" in line) == (own.step_s < reference.step_s)
        assert ("slower than A" in line) == (own.step_s > reference.step_s)
        is_as_sure = own.fit_probability >= min(0.9, reference.fit_probability)
        is_doubted = own.step_s < reference.step_s and not is_as_sure
        doubts = ("but fits with a probability of", "but does not fit")
        assert any(doubt in line for doubt in doubts) == is_doubted
        misfits = {Verdict.OOM: ", which does not fit", Verdict.UNCERTAIN: ", which may not fit"}
        assert (", which " in line) == (reference.verdict is not Verdict.FITS)
        assert misfits.get(reference.verdict, "") in line
    slow, fast = plans[:2]
    assert fast.estimate.step_s < slow.estimate.step_s
    assert " but " not in explain.explain_beside(fast, slow, "A")[0]
    assert "same layout as A" in explain.explain_beside(fast, fast, "A")[0]


def test_full_recompute_is_left_out_where_less_fits(model: ModelSpec) -> None:
    """A layout that fits with room makes heavier recompute pointless, which counts as slower."""
    roomy = catalogue.hardware("64xH100")
    ranked = search(
        model, WORK, roomy, fixed="tp1,cp1,pp4,vpp1,ep16,etp1,mbs1,dispatcher=alltoall", top=5
    )
    assert {plan.layout.recompute for plan in ranked.plans} == {()}
    assert dict(ranked.rejected)[SLOWER] == ranked.scored - len(ranked.plans)
    fullest = search(
        model, WORK, catalogue.hardware("16xH100"), fixed="tp1,cp1,pp1,ep8,etp1,mbs8", top=8
    ).plans
    assert (Recompute.FULL,) in {plan.layout.recompute for plan in fullest}


def test_plans_differ_in_degrees_where_there_are_so_many(
    model: ModelSpec, hardware: Hardware
) -> None:
    plans = search(model, WORK, hardware, top=6).plans
    degrees = {
        (p.layout.tp, p.layout.cp, p.layout.pp, p.layout.ep, p.layout.etp, p.layout.mbs)
        for p in plans
    }
    assert len(degrees) == 6


def test_what_saves_memory_is_combined_where_one_choice_alone_does_not_fit(
    model: ModelSpec, hardware: Hardware
) -> None:
    """Two H100 hold neither shards of weights beside moments nor whole weights."""
    small = replace(hardware, count=2)
    for alone in ("zero1,offload=optimizer", "zero3,offload=none"):
        assert not search(model, WORK, small, fixed=alone, top=1).plans
    first = search(model, WORK, small, top=1).plans[0]
    assert first.layout.zero == 3
    assert Offload.OPTIMIZER in first.layout.offload
    assert first.estimate.fit_probability >= 0.9


@pytest.mark.parametrize("share", [0.5, 0.95, 1.2])
def test_states_on_the_host_fit_where_its_memory_holds_them(
    model: ModelSpec, hardware: Hardware, share: float
) -> None:
    """Scores leave out what estimates call out of host memory, and say so."""
    text = "tp1,pp1,ep16,etp1,cp1,mbs1,zero1,offload=optimizer,recompute=full,dispatcher=deepep"
    layout = parse_layout(text, world_size=16)
    kept = estimate(model, WORK, hardware, layout)
    assert kept.host_verdict is Verdict.FITS
    node_bytes = 8 * kept.host_bytes / share
    own = Constant(
        name="host_memory_bytes",
        value=Sourced(value=node_bytes, kind=SourceKind.MEASURED, source="free on these hosts"),
    )
    others = (item for item in hardware.constants if item.name != own.name)
    limited = replace(hardware, constants=(*others, own))
    tried = estimate(model, WORK, limited, layout)
    verdict = Verdict.OOM
    if share < 1:
        verdict = Verdict.FITS if share == 0.5 else Verdict.UNCERTAIN
    assert (tried.host_verdict, tried.verdict) == (verdict, verdict)
    assert (share == 0.5) == (not tried.host_shortage)
    assert ("in host memory" in tried.title()) == bool(tried.host_shortage)
    found = search(model, WORK, limited, fixed=text, top=1)
    assert bool(found.plans) == (share == 0.5)
    assert bool(dict(found.rejected).get(NO_HOST_MEMORY)) == (share > 0.5)


@pytest.mark.parametrize("fixed", ["", "graphs=full"])
def test_whole_iterations_are_captured_where_a_dispatcher_has_static_shapes(
    model: ModelSpec, fixed: str
) -> None:
    """Racks have HybridEP; of DeepEP, which nodes have, the host waits for sizes unless EP is 1."""
    work = replace(WORK, precision=Dtype.MXFP8)
    rack = search(model, work, catalogue.hardware("16xGB300"), fixed=fixed, top=1).plans[0]
    assert rack.layout.graphs == (CudaGraphScope.FULL,)
    assert rack.layout.dispatcher is DispatcherKind.HYBRIDEP
    parts = search(model, work, rack.hardware, fixed="graphs=attn+moe_router", top=1).plans[0]
    assert rack.estimate.step_s < parts.estimate.step_s
    node = search(model, WORK, catalogue.hardware("16xH100"), fixed=fixed, top=1).plans
    assert node
    assert all(
        CudaGraphScope.FULL not in plan.layout.graphs or plan.layout.ep == 1 for plan in node
    )


def test_all_experts_on_each_rank_have_whole_iterations_searched() -> None:
    """Nobody waits for sizes there, so that the search has what it would find pinned."""
    work = replace(WORK, routing=Routing.LEARNED, global_batch=64)
    small, node = catalogue.model("gpt-oss-20b"), catalogue.hardware("8xB200")
    (best,) = search(small, work, node, top=1).plans
    (pinned,) = search(small, work, node, fixed="graphs=full,ep1", top=1).plans
    assert best.layout == pinned.layout


def test_a_budget_of_a_rank_is_searched_with_what_pads_rows_to_it(model: ModelSpec) -> None:
    """DeepEP, the faster library on nodes, pads none; under a budget whole iterations repeat."""
    hardware = catalogue.hardware("16xH100")
    pins = "rank_capacity=2,ep8,pp1,tp1,zero1"
    (best,) = search(model, WORK, hardware, fixed=pins, top=1).plans
    assert best.layout.dispatcher.facts.pads_rows
    assert best.layout.rank_capacity == 2
    assert best.layout.graphs == (CudaGraphScope.FULL,)
    of_parts = f"{pins},graphs=attn+moe_router"
    (parts,) = search(model, WORK, hardware, fixed=of_parts, top=1).plans
    assert best.estimate.step_s < parts.estimate.step_s
