"""Sentences on a plan: what they say is what the estimate says."""

import moewright as mw
from moewright.search.explain import explain_unused
from moewright.spec.units import format_seconds


def test_the_next_step_of_interleaving_and_context_is_said_with_its_own_estimate():
    job = {"on": "256xH800", "global_batch": 512}
    plan = mw.estimate("Qwen3-235B-A22B", "tp2,ep8,pp8,vpp2,mbs1,recompute=full", **job)
    interleaved, context = explain_unused(plan)
    for line, layout in (
        (interleaved, "tp2,ep8,pp8,vpp3,mbs1,recompute=full"),
        (context, "tp2,ep8,pp8,vpp2,cp2,mbs1,recompute=full"),
    ):
        other = mw.estimate("Qwen3-235B-A22B", layout, **job).estimate
        assert f"takes {format_seconds(other.step_s)} a step" in line
        word = "faster" if other.step_s < plan.estimate.step_s else "slower"
        assert f"% {word} than the first" in line
    assert "bubble -" in interleaved
    whole = mw.estimate("Qwen3-30B-A3B", "ep8,mbs1,recompute=full", on="16xH100")
    assert [line.split(":")[0] for line in explain_unused(whole)] == ["One step further, cp2"]
