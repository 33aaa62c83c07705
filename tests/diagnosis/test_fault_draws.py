"""Launch scripts with a fault, drawn by the day: both verbs name it, and what they write is faster.

`estimate --from-flags` of the script and `diagnose` of a log of it give one list of changes.
"""

from __future__ import annotations

import re

import pytest

import moewright as mw
from diagnosis.fault_draws import draw_fault
from diagnosis.test_megatron_log import LINE
from diagnosis.test_planted_changes import apply_advice
from job_draws import list_seeds
from moewright.api.launch_scripts import find_better_layouts
from moewright.codec import parse_layout
from moewright.diagnosis.advice import Advice
from moewright.exporters.megatron.script import render_megatron_script

_DRAWS = 30
_ITERATIONS = 20
_LATER = 1.03  # times the predicted step: what the log tells


def find_place(advice: Advice, cures: frozenset[str]) -> int:
    """Return the place of the first change that takes a fault away, from 1; 99 where none does."""
    places = [n for n, change in enumerate(advice.changes, 1) if cures & set(change.fields)]
    return min(places, default=99)


@pytest.mark.parametrize("seed", list_seeds(0, 2)[:_DRAWS])
def test_a_drawn_fault_is_first_or_second_and_what_to_write_is_faster(seed, tmp_path):
    draw = draw_fault(seed)
    script = tmp_path / "run.sh"
    script.write_text(str(render_megatron_script(draw.slow)))
    reading = mw.read_flags(script, on=draw.on)
    slow = reading.plan
    assert slow.layout == draw.slow.layout, str(draw)
    batch = slow.workload.global_batch
    lines = [
        LINE.format(n=n, samples=batch * n, ms=1e3 * _LATER * slow.estimate.step_s, tflops=100.0)
        for n in range(1, _ITERATIONS + 1)
    ]
    log = tmp_path / "run.log"
    log.write_text(
        re.sub(r"global batch size: +\d+", f"global batch size: {batch}", "\n".join(lines))
    )
    advice = find_better_layouts(slow, reading.options).change_list
    assert advice is not None
    assert find_place(advice, draw.fault.cures) <= 2, (str(draw), advice.changes)
    assert mw.diagnose(log, script=script, on=draw.on).advice == advice, str(draw)

    faster = tmp_path / "faster.sh"
    faster.write_text(apply_advice(script.read_text(), advice))
    after = mw.read_flags(faster, on=draw.on).plan
    assert after.layout == parse_layout(advice.after, world_size=after.layout.world_size)
    assert after.estimate.step_s < slow.estimate.step_s, str(draw)
    assert after.estimate.step_s <= 1.02 * draw.good.estimate.step_s, str(draw)
