"""What would change the best plan: never for the worse where a change can only help."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moewright.intake import catalogue
from moewright.search import explain
from moewright.search.ranking import bound_s, to_ranked_layout
from moewright.search.search import search
from moewright.search.what_if import NETWORK_SPEEDUP, find_gains, speed_up_network
from moewright.spec.errors import Reason
from moewright.spec.hardware import Hardware
from moewright.spec.layout import Layout, Overlap
from moewright.spec.plan import RankingRule
from moewright.spec.units import GIB
from moewright.spec.workload import Routing, Workload

WORK = Workload(routing=Routing.BALANCED, seq_len=4096, global_batch=256)
PINS = "tp1,cp1,etp1,zero1"
MODELS = ("OLMoE-1B-7B-0924", "Qwen3-30B-A3B", "Mixtral-8x7B-v0.1", "Qwen3-8B")
MACHINES = ("8xH100", "16xH100", "16xH800", "32xA100", "8xB200")


def _add_memory(hardware: Hardware, more_bytes: float) -> Hardware:
    memory = hardware.device.memory_bytes
    device = replace(hardware.device, memory_bytes=replace(memory, value=memory.value + more_bytes))
    return replace(hardware, device=device)


@pytest.mark.thorough
def test_gains_are_what_a_changed_machine_brings() -> None:
    model, hardware = catalogue.model("Qwen3-30B-A3B"), catalogue.hardware("16xH100")
    ranked = search(model, WORK, hardware, fixed=PINS, top=1)
    before = ranked.plans[0].estimate
    gains = {gain.change: gain for gain in find_gains(ranked, fixed=PINS)}
    changes = {
        "1 GiB more memory a device": _add_memory(hardware, GIB),
        "8 GiB more memory a device": _add_memory(hardware, 8 * GIB),
        "a network 2 x as fast": speed_up_network(hardware, NETWORK_SPEEDUP),
    }
    for change, machine in changes.items():
        after = search(model, WORK, machine, fixed=PINS, top=1)
        told_s = gains[change].step_s if change in gains else before.step_s
        # The first of a search may be a simpler layout that ties with the fastest.
        fastest_s = min(after.near_best, key=lambda candidate: candidate.bound_s).step_s
        assert fastest_s * 0.99 <= told_s <= after.plans[0].estimate.step_s * 1.01, change
        assert told_s <= before.step_s
    assert any(gain.step_s < before.step_s for gain in gains.values())


@st.composite
def jobs(draw: st.DrawFn) -> tuple[str, Hardware, Workload, RankingRule]:
    """Draw a model, a machine with its memory and network scaled, a batch and a rule.

    The rule ranks by the prediction itself: the search chooses dispatchers by time, so that bounds
    of separate searches may differ by a fifth of a percent the wrong way.
    """
    hardware = catalogue.hardware(draw(st.sampled_from(MACHINES)))
    memory = hardware.device.memory_bytes
    share = draw(st.floats(0.7, 1.3))
    hardware = _add_memory(hardware, (share - 1) * memory.value)
    hardware = speed_up_network(hardware, draw(st.floats(0.3, 3.0)))
    batch = hardware.count * draw(st.sampled_from((4, 8, 16)))
    rule = RankingRule(
        fit_probability=draw(st.sampled_from((0.6, 0.9, 0.99))),
        risk=0.5,
    )
    workload = Workload(
        routing=Routing.BALANCED, seq_len=draw(st.sampled_from((2048, 4096))), global_batch=batch
    )
    return draw(st.sampled_from(MODELS)), hardware, workload, rule


@pytest.mark.thorough  # separate searches of random jobs, a minute each
@given(jobs())
@settings(max_examples=3, deadline=None)
def test_more_memory_and_a_faster_network_never_make_the_answer_worse(
    job: tuple[str, Hardware, Workload, RankingRule],
) -> None:
    name, hardware, workload, rule = job
    model = catalogue.model(name)
    ranked = search(model, workload, hardware, top=1, rule=rule)
    best_s = {plan.estimate.step_s for plan in ranked.plans}
    for gain in find_gains(ranked):
        if "expert communication" not in gain.change:
            assert gain.step_s <= min(best_s), gain.change
    if not ranked.plans or ranked.plans[0].estimate.fit_probability < rule.fit_probability:
        return
    before_s = bound_s(ranked.plans[0].estimate, rule)
    for machine in (_add_memory(hardware, 2 * GIB), speed_up_network(hardware, 1.5)):
        after = search(model, workload, machine, top=1, rule=rule).plans[0].estimate
        assert bound_s(after, rule) <= before_s * (1 + 1e-9)


@pytest.mark.thorough  # separate searches of random jobs, a minute each
@given(jobs(), st.sampled_from(("pp1", "mbs1", "tp1", "ep1", "recompute=full", "zero1", "cp1")))
@settings(max_examples=3, deadline=None)
def test_fewer_pins_and_exclusions_never_make_the_answer_worse(
    job: tuple[str, Hardware, Workload, RankingRule], pin: str
) -> None:
    name, hardware, workload, rule = job
    model = catalogue.model(name)

    def refuse(layout: Layout) -> tuple[Reason, ...]:
        bad = layout.offload or layout.pp > 2
        return (Reason(field="layout", rule="is excluded"),) if bad else ()

    free = search(model, workload, hardware, top=1, rule=rule)
    pinned = search(model, workload, hardware, top=1, rule=rule, fixed=pin)
    excluded = search(model, workload, hardware, top=1, rule=rule, allowed=refuse)
    for fewer in (pinned, excluded):
        if not fewer.plans or fewer.plans[0].estimate.fit_probability < rule.fit_probability:
            continue
        least_s = bound_s(fewer.plans[0].estimate, rule)
        assert bound_s(free.plans[0].estimate, rule) <= least_s * (1 + 1e-9)


def test_what_keeps_a_pinned_job_back_is_told() -> None:
    model, hardware = catalogue.model("Qwen3-30B-A3B"), catalogue.hardware("16xH100")
    ranked = search(model, WORK, hardware, fixed="tp8,recompute=full", top=1)
    gains = {gain.change: gain for gain in find_gains(ranked, fixed="tp8,recompute=full")}
    free = search(model, WORK, hardware, top=1).plans[0].estimate
    assert gains["no pinned layout keys"].step_s == pytest.approx(free.step_s)


@pytest.mark.thorough
def test_the_other_side_of_overlapped_expert_communication_is_told() -> None:
    model, hardware = catalogue.model("Qwen3-30B-A3B"), catalogue.hardware("32xH100")
    ranked = search(model, WORK, hardware, fixed=f"{PINS},ep16", top=1)
    plan = replace(ranked.plans[0], gains=find_gains(ranked, fixed=f"{PINS},ep16"))
    other = next(gain for gain in plan.gains if "expert communication" in gain.change)
    assert (Overlap.EP in other.layout.overlap) != (Overlap.EP in plan.layout.overlap)
    assert other.step_s > plan.estimate.step_s
    lines = "\n".join(explain.explain_bound(plan))
    assert "slower" in lines
    assert "Expected error" in lines


def test_memory_binds_where_more_of_it_helps() -> None:
    """Eight devices are short of memory for this model; a much smaller one has room to spare."""
    hardware = catalogue.hardware("8xH100")
    tight = search(catalogue.model("Qwen3-30B-A3B"), WORK, hardware, top=1)
    assert tight.plans
    plan = replace(tight.plans[0], gains=find_gains(tight))
    assert explain.explain_bound(plan)[0].startswith("Limited by memory")
    roomy = search(catalogue.model("OLMoE-1B-7B-0924"), WORK, catalogue.hardware("8xB200"), top=1)
    plan = replace(roomy.plans[0], gains=find_gains(roomy))
    assert "more memory would change nothing" in explain.explain_bound(plan)[0]


def test_more_memory_is_told_from_the_least_on_and_never_gains_less() -> None:
    """The best layout under 1 GiB more is one under 8 GiB more, whatever bounds say."""
    ranked = search(catalogue.model("Qwen3-30B-A3B"), WORK, catalogue.hardware("8xH100"), top=1)
    first = ranked.plans[0].estimate
    candidate = ranked.with_memory[0][1][0]
    fast = replace(candidate, step_s=0.7 * first.step_s, bound_s=0.8 * first.step_s)
    surer = replace(candidate, step_s=0.75 * first.step_s, bound_s=0.76 * first.step_s)
    changed = replace(ranked, with_memory=((8 * GIB, (surer,)), (GIB, (fast,))))
    gains = [gain for gain in find_gains(changed) if "memory" in gain.change]
    assert [gain.change.split()[0] for gain in gains] == ["1", "8"]
    assert [gain.step_s for gain in gains] == [fast.step_s, fast.step_s]


def test_a_gamble_on_memory_is_not_told_to_need_none() -> None:
    """A layout that is faster, but may not fit, would be taken with more memory."""
    hardware = catalogue.hardware("8xB200")
    roomy = search(catalogue.model("OLMoE-1B-7B-0924"), WORK, hardware, top=1)
    plan = roomy.plans[0]
    gamble = replace(
        to_ranked_layout(plan, roomy.rule), step_s=0.99 * plan.estimate.step_s, fit_probability=0.3
    )
    assert "would change nothing" in explain.explain_bound(plan)[0]
    assert "would change nothing" not in explain.explain_bound(replace(plan, gambles=(gamble,)))[0]
