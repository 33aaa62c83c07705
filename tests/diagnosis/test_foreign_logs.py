"""Logs of other trainers than Megatron-LM: the records of MLPerf, and those of GPT-NeoX."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from moewright.diagnosis.traces.megatron_log import parse_log
from moewright.diagnosis.traces.step_lines import StepSeries, read_new_steps

LOGGERS = ("steps", "steps by samples", "tokens", "block means", "rates", "blocks alone")


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedRun:
    """A run that each logger of MLPerf writes its records of: blocks of steps of one length."""

    batch: int
    seq_len: int
    block_steps: int
    blocks: int
    step_s: float


def draw_run(rng: random.Random) -> TimedRun:
    return TimedRun(
        batch=rng.choice((8, 9, 64, 1120, 2904)),
        seq_len=rng.choice((2048, 8192)),
        block_steps=rng.randint(2, 40),
        blocks=rng.randint(2, 9),
        step_s=rng.uniform(0.2, 20),
    )


def write_records(run: TimedRun, logger: str, prefix: str) -> Iterator[str]:
    """Yield the lines of a log, in the form that the loggers of published results have."""
    now_ms = 1_700_000_000_000.0

    def record(key: str, value: object, **metadata: object) -> str:
        content = {"time_ms": round(now_ms), "key": key, "value": value, "metadata": metadata}
        return f"{prefix}:::MLLOG {json.dumps(content)}"

    yield record("submission_benchmark", "llama31_8b")
    yield record("global_batch_size", run.batch)
    yield record("max_sequence_length", run.seq_len)
    yield record("gradient_accumulation_steps", 4.0)
    block_samples = run.batch * run.block_steps
    counts_tokens = logger in ("tokens", "blocks alone")
    for block in range(run.blocks):
        samples = block * block_samples
        if counts_tokens:
            tokens = block_samples * run.seq_len
            counts = {"first_epoch_num": samples * run.seq_len, "epoch_count": tokens}
            yield record("block_start", None, **counts)
        else:
            yield record("block_start", None, samples_count=samples)
        for _ in range(run.block_steps):
            now_ms += run.step_s * 1e3
            samples += run.batch
            timed = {"train_step_time": run.step_s, "reduced_train_loss": 2.5}
            if logger == "steps":
                # Of the step it has the number from 0 on, which is not what counts.
                number = samples // run.batch - 1.0
                yield record("tracked_stats", timed, step=number, samples_count=float(samples))
            elif logger == "steps by samples":
                yield record("tracked_stats", timed, step=float(samples))
            elif logger == "tokens":
                timed = {"train_step_timing": run.step_s, "reduced_train_loss": 2.5}
                yield record("tracked_stats", timed, step=samples * run.seq_len)
        if logger in ("steps", "block means"):
            mean = {"train_step_time": run.step_s}
            yield record("tracked_stats", mean, samples_count=block_samples)
        elif logger == "rates":
            rate = {"throughput": run.batch / run.step_s}
            yield record("tracked_stats", rate, step=samples)
        yield record("block_stop", None)
        yield record("eval_start", None)
        now_ms += 7e3
        yield record("tracked_stats", {"validation_time": 7.0}, step=samples)
        yield record("eval_stop", None)
    if counts_tokens:  # a rate of the whole run, evaluations included
        yield record("tracked_stats", {"throughput": 1.0}, step=samples * run.seq_len)


@pytest.mark.parametrize("logger", LOGGERS)
@pytest.mark.parametrize("seed", range(3))
def test_every_logger_of_mlperf_tells_the_same_run(tmp_path: Path, logger: str, seed: int) -> None:
    rng = random.Random(f"{logger} {seed}")
    run = draw_run(rng)
    prefix = rng.choice(("", " 0: ", "11: "))
    text = "\n".join(write_records(run, logger, prefix)) + "\n"
    log = parse_log(text)
    assert log.step_s == pytest.approx(run.step_s, rel=1e-2 if logger == "blocks alone" else 1e-9)
    assert (log.global_batch, log.find_size("seq_length")) == (run.batch, run.seq_len)
    numbers = [iteration.number for iteration in log.iterations]
    count = run.block_steps * run.blocks
    is_single = logger in ("steps", "steps by samples", "tokens")
    each = 1 if is_single else run.block_steps
    assert numbers == list(range(each, count + 1, each))

    path = tmp_path / "result_0.txt"
    series = StepSeries()
    cut = text.rfind("\n", 0, rng.randrange(len(text) // 2, len(text))) + 1
    for part in (text[:cut], text):  # a log that grows
        path.write_text(part)
        read_new_steps(path, series)
    steps = series.sort()
    assert (series.trainer, list(steps.numbers)) == ("MLPerf", numbers)
    assert steps.steps_s[0] == pytest.approx(log.iterations[0].step_s)


def test_records_of_mlperf_that_time_no_step_make_none() -> None:
    run = draw_run(random.Random(0))
    lines = [line for line in write_records(run, "blocks alone", "") if "eval" not in line]
    log = parse_log("\n".join(lines))
    assert (log.iterations, log.find_size("global_batch_size")) == ((), run.batch)
    broken = ':::MLLOG {"key": 3}\n:::MLLOG [1]\n:::MLLOG {\n:::MLLOG \n'
    assert parse_log(broken).iterations == ()


NEOX = """  attention_config ................ ['flash', 'flash']updated
  checkpoint_activations .......... {recomputes}........................updated
  global_num_gpus ................. 4...........................updated
  hidden_size ..................... 768.........................updated
  model_parallel_size ............. 2...........................updated
  moe_num_experts ................. 8...........................updated
  num_layers ...................... 12..........................updated
  pipe_parallel_size .............. 0...........................default
  seq_length ...................... 2048........................updated
  train_batch_size ................ 72..........................updated
  world_size ...................... None........................default
 samples/sec: 36.917 | iteration       10/   11000 | elapsed time per iteration (ms): 1950.3 | \
learning rate: 1.364E-04 | approx flops per GPU: 59.4TFLOPS | lm_loss: 1.138677E+01 | \
number of skipped iterations:   0 | number of nan iterations:   0 |
"""


@pytest.mark.parametrize(("recomputes", "tflops"), [("True", 44.55), ("False", 59.4)])
def test_a_log_of_gpt_neox_is_taken_at_its_word(recomputes: str, tflops: float) -> None:
    log = parse_log(NEOX.format(recomputes=recomputes))
    (iteration,) = log.iterations
    assert (iteration.number, iteration.step_s) == (10, 1.9503)
    assert (iteration.loss, iteration.global_batch) == (11.38677, 72)
    # It counts the forward pass again where it recomputes.
    assert log.tflops_per_device == pytest.approx(tflops)
    names = ("world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size")
    assert [log.find_size(name) for name in names] == [4, 2, 1]
    assert [log.find_size(name) for name in ("num_layers", "hidden_size", "seq_length")] == [
        12,
        768,
        2048,
    ]
    assert log.has_experts
    # They are none of Megatron-LM's, and make no command of it.
    assert log.arguments == ()
