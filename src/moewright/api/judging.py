"""Judgements: whether a plan is good, beside the best layout of its job and published runs."""

from __future__ import annotations

from moewright.diagnosis.judgement import Judgement, judge_plan
from moewright.search.search import find_best_plan
from moewright.spec.plan import Plan


def judge(plan: Plan) -> Judgement:
    """Say whether a plan fits, how far it is from the best that fits, and from measured runs.

    The best is that of a whole search of the plan's job on its hardware, which takes seconds.

    Args:
        plan: what `estimate`, `plan` or `read_flags` returns.

    Example:
        >>> import moewright as mw
        >>> judged = mw.judge(mw.estimate("Qwen3-30B-A3B", "tp8,ep8,mbs1", on="16xH100"))
        >>> judged.quality.value, judged.times_best > 5, "tp1" in judged.change
        ('slow', True, True)
    """
    return judge_plan(plan, find_best_plan(plan.model, plan.workload, plan.hardware))
