"""Steps of logs read many at once, beside the readers of single lines."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from moewright.diagnosis.traces import step_lines
from moewright.diagnosis.traces.megatron_log import parse_log
from moewright.diagnosis.traces.megatron_pieces import read_piece
from moewright.diagnosis.traces.step_lines import StepSeries, read_new_steps
from moewright.diagnosis.traces.torchtitan_pieces import read_titan_piece

OTHERS = (
    "(min, max) time across ranks (ms):",
    "    forward-backward ...............................: (24000.00, 24001.00)",
    "[Rank 0] (after 2 iterations) memory (MB) | allocated: 1.0 | max allocated: 60210.1",
    " validation loss at iteration 100 | lm loss value: 2.1E+00 | lm loss PPL: 8.0E+00 | ",
    "saving checkpoint at iteration     100 to /a|b/c in torch_dist format",
    "",
    "|||",
)


def draw_line(rng: random.Random, number: int, *, is_usual: bool) -> str:
    """Return a line of an iteration; one that is not usual has other fields, in another order."""
    ms = rng.choice((f"{rng.uniform(0.1, 99999):.1f}", f"{rng.randrange(1, 10**6)}"))
    fields = [
        f" consumed samples: {number * 512:12d} ",
        f" elapsed time per iteration (ms): {ms} ",
        f" learning rate: {rng.uniform(0, 1e-3):.6E} ",
        " global batch size:   512 ",
    ]
    loss = f" lm loss: {rng.uniform(0, 12):.6E} "
    head = rng.choice((f"{number:8d}", f"{number:6d}", f"{number}"))
    if is_usual:
        head = f"{number:8d}"
        fields.append(loss)
    else:
        kind = rng.randrange(7)
        if kind == 0:
            fields.insert(0, loss)
        elif kind == 1:
            fields.append(f" loss: {rng.uniform(0, 12):.4f} ")
        elif kind == 2:
            fields[1] = f" elapsed time per iteration (ms): {rng.choice(('nan', 'x', '-1.0'))} "
        elif kind == 3:
            rng.shuffle(fields)
            fields.append(loss)
        elif kind == 4:
            fields.append(" lm loss: nan ")
        elif kind == 5:  # the latest, and the mean
            fields[1] = f" elapsed time per iteration (ms):   {ms}/{float(ms) * 1.1:.1f} "
            fields.append(f" lm loss:  {rng.uniform(0, 12):.6E} ")
    fields.append(" number of nan iterations:   0 ")
    stamp = rng.choice(("", " [2026-03-01 12:00:00]", "7: [2026-03-01 12:00:00.123]"))
    if is_usual:
        stamp = " [2026-03-01 12:00:00]"
    return f"{stamp} iteration {head}/{500000:8d} |" + "|".join(fields) + "|"


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5])
@pytest.mark.parametrize("with_others", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_steps_read_many_at_once_are_those_of_single_lines(
    tmp_path: Path, share: float, with_others: bool, seed: int
) -> None:
    rng = random.Random(f"{share} {with_others} {seed}")
    lines = []
    for number in range(1, 200):
        lines.append(draw_line(rng, number, is_usual=rng.random() >= share))
        if with_others and rng.random() < 0.3:
            lines.append(rng.choice(OTHERS))
    text = "\n".join(lines) + "\n"
    path = tmp_path / "run.log"
    path.write_text(text)
    series = StepSeries()
    read_new_steps(path, series)
    wanted = [item for line in lines for item in parse_log(line).iterations if item.step_s > 0]
    assert list(series.numbers) == [item.number for item in wanted]
    assert np.array_equal(series.steps_s, [item.step_s for item in wanted])
    assert np.array_equal(series.losses, [item.loss for item in wanted], equal_nan=True)
    for number, offset in zip(series.numbers, series.offsets, strict=True):
        line = text[offset : text.index("\n", offset)]
        assert line == lines[lines.index(line)]
        assert f"{number}/" in line


def test_a_piece_of_usual_lines_needs_no_reader_of_single_lines() -> None:
    rng = random.Random(1)
    lines = [draw_line(rng, number, is_usual=True) for number in range(900, 1100)]
    piece = ("\n".join(lines) + "\n").encode()
    steps = read_piece(piece)
    assert steps is not None
    assert steps.numbers.tolist() == list(range(900, 1100))
    mixed = read_piece(("\n".join([*lines, OTHERS[0], lines[0]]) + "\n").encode())
    assert mixed is not None
    assert len(mixed.numbers) == 201


def draw_titan_line(rng: random.Random, number: int, *, is_usual: bool) -> str:
    """Return a line of torchtitan; one that is not usual has what only its pattern reads."""
    colour = rng.choice(("", "\x1b[31m", "\x1b[38;5;208m"))
    loss = f"{rng.uniform(0, 12):7.4f}"
    rate = f"{rng.randrange(1, 10**6):,}"
    step = f"{number:2}"
    tail = f"  {colour}tflops: 123.45  {colour}mfu: 31.06%\x1b[39m"
    between = "  "
    if not is_usual:
        loss = rng.choice((loss, "nan", "-0.1", "1e-3", "1.2.3", "7.1x", "", f"{colour}{loss}"))
        rate = rng.choice((rate, "0", ",", "nan", "8180.5", "\x1b[34m77", "9" * 30))
        step = rng.choice((step, "x", "", f"\t{number}", f"{number}th", "9" * 18))
        tail = rng.choice((tail, "", "  step: 1  loss: 2.0  tps: 3", "  tps: 5"))
        between = rng.choice((between, "  aux_loss: 0.1  ", "  step: y  ", "x" * 1200, "\r"))
    prefix = rng.choice(("", "[rank0]:", "[rank0]:[titan] 2026-05-10 16:50:24,115 - INFO - "))
    fields = (f"step: {step}", f"loss: {loss}", "memory:  8.07GiB(8.50%)", f"tps: {rate}")
    return prefix + between.join(f"{colour}{field}" for field in fields) + tail


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5])
@pytest.mark.parametrize("seed", range(8))
def test_steps_of_torchtitan_read_many_at_once_are_those_of_its_pattern(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, seed: int
) -> None:
    rng = random.Random(f"{share} {seed}")
    lines = []
    for number in range(1, 200):
        lines.append(draw_titan_line(rng, number, is_usual=rng.random() >= share))
        if rng.random() < 0.3:
            lines.append(rng.choice((*OTHERS, "tps: 5", "step: 1", 'GET /x HTTP "step:" loss:')))
    path = tmp_path / "run.log"
    path.write_bytes("\n".join(lines).encode() + b"\n")
    monkeypatch.setattr(step_lines, "_PIECE_BYTES", rng.choice((1 << 12, 1 << 22)))
    pieces = StepSeries()
    read_new_steps(path, pieces)
    if not share:
        assert read_titan_piece(path.read_bytes()) is not None
        assert len(pieces.numbers) == 199
    monkeypatch.setattr(step_lines, "read_titan_piece", lambda piece: None)
    single = StepSeries()
    read_new_steps(path, single)
    for name in ("numbers", "steps_s", "losses", "offsets"):
        assert np.array_equal(getattr(pieces, name), getattr(single, name), equal_nan=True)
    assert pieces.has_rates == single.has_rates


@pytest.mark.parametrize(
    "line",
    [
        " iteration {number}/ 100 | elapsed time per iteration (ms): 1000.0 | lm loss: 2.0 |",
        " iteration 5/ {number} | elapsed time per iteration (ms): 1000.0 | lm loss: 2.0 |",
        " iteration {number}/{number} | x | elapsed time per iteration (ms): {number} |",
        "Epoch 0: | 1/{number} [x] train_step_timing in s: 1.0, global_step: {number}",
        "step: {number}  loss: 2.0  memory: 1.0GiB(1%)  tps: {number}",
        '{{"kind": "step", "step": {number}, "step_s": 1.0, "loss": 2.0}}',
        '{{"kind": "step", "step": [1], "step_s": {number}, "loss": null}}',
        '{{"recorded_step": {number}, "step_s": {number}}}',
        '{{"recorded_step": "{number}", "step_s": [{number}]}}',
        '{{"recorded_step": 1e{number}, "step_s": true}}',
    ],
)
@pytest.mark.parametrize("digits", [1, 15, 18, 19, 30, 400, 5000])
def test_a_number_that_no_step_has_is_no_step(line: str, digits: int, tmp_path: Path) -> None:
    """Whatever the digits: steps are read or not, and those that are have numbers that sort."""
    usual = " iteration {0}/ 100 | elapsed time per iteration (ms): 1000.0 | lm loss: 2.0 |\n"
    path = tmp_path / "run.log"
    for lines in (line, usual.format(1) + line):
        path.write_text(lines.format(number="9" * digits) + "\n")
        series = StepSeries()
        read_new_steps(path, series)
        steps = series.sort()
        assert all(0 <= number < 1 << 53 for number in steps.numbers)
        assert np.isfinite(steps.steps_s).all()
        parse_log(path.read_text())
