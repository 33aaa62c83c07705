from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import TextIO, cast

import pytest

import sample_run
from moewright.engine.observe.record import ConsoleWriter, clamp_to_finite
from moewright.spec.run import EvalRecord


class Leaving(io.StringIO):
    """A reader that leaves after some writes, as `head` does."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error
        self.left = 2

    def write(self, text: str) -> int:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize(
    "error", [BrokenPipeError(32, "Broken pipe"), OSError(28, "No space left on device")]
)
def test_a_screen_nobody_reads_does_not_end_a_run(error: OSError) -> None:
    stream = Leaving(error)
    screen = ConsoleWriter(last_step=8, stream=cast(TextIO, stream))
    for step in sample_run.record(steps=8).steps:
        screen.write_step(step)
    screen.close()
    assert stream.getvalue().startswith("step 1/8  loss")
    assert "step 8/8" not in stream.getvalue()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e300, -3.2e12])
def test_a_number_of_any_size_takes_a_few_letters(value: float) -> None:
    stream = io.StringIO()
    screen = ConsoleWriter(last_step=8, stream=stream)
    step = sample_run.record(steps=1).steps[0]
    clamped = clamp_to_finite(value)
    screen.write_step(replace(step, loss=clamped, grad_norm=clamped))
    screen.write_evaluation(
        EvalRecord(step=1, heldout_loss=clamped, unigram_entropy=1.0, tokens=10)
    )
    assert all(len(line) < 200 for line in stream.getvalue().splitlines())
    assert ("not finite" in stream.getvalue()) == (not math.isfinite(value))
