"""Logs that are watched: planted slowdowns, what recurs, several trainers, and alarms."""

from __future__ import annotations

import itertools
import json
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest

import moewright as mw
from moewright.api.watching import LogWatcher, WatchedJob
from moewright.api.webhook import Webhook
from moewright.cli.main import main
from moewright.diagnosis.run_watch import Alarm, AlarmKind, expect_loss
from moewright.diagnosis.traces.event_files import EventReader
from moewright.diagnosis.traces.megatron_log import parse_log
from moewright.diagnosis.traces.step_lines import (
    SortedSteps,
    StepLine,
    StepSeries,
    read_new_steps,
)
from moewright.spec.errors import BadInput

HEAD = """using world size: 16, tensor-model-parallel size: 2, pipeline-model-parallel size: 1
------------------------ arguments ------------------------
  save_interval ................................... 50
  eval_interval ................................... 1000
  global_batch_size ............................... 512
  seq_length ...................................... 4096
-------------------- end of arguments ---------------------
[Rank 0] (after 2 iterations) memory (MB) | max allocated: 60210.1 | max reserved: 66120.0
"""
LINE = (
    " [2026-03-01 12:00:00] iteration {n:8d}/{total:8d} | consumed samples: {n:12d} | "
    "elapsed time per iteration (ms): {ms:.1f} | learning rate: 1.000000E-04 | "
    "global batch size:   512 | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: 3.210 | "
    "number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)
TIMERS = """(min, max) time across ranks (ms):
    forward-backward ...............................: ({forward:.2f}, {forward:.2f})
    all-grads-sync .................................: ({sync:.2f}, {sync:.2f})
    optimizer ......................................: (500.00, 510.00)
"""
JOB = ["--model", "Qwen3-30B-A3B", "--on", "16xH100", "--layout", "tp2,ep8,recompute=select"]


def write_log(
    *, steps: int = 400, slower: float = 0.05, since: int = 300, total: int = 5000
) -> str:
    """Return a log whose steps take longer from one on, by the sum of gradients."""
    rng = random.Random(3)
    text = [HEAD]
    for n in range(1, steps + 1):
        extra = 27100 * slower if n >= since else 0.0
        ms = 27100 * (1 + 0.006 * rng.gauss(0, 1)) + extra + 9000 * (n % 50 == 0)
        loss = 11 / (1 + n / 200) + 0.02 * rng.gauss(0, 1)
        text.append(LINE.format(n=n, total=total, ms=ms, loss=loss))
        text.append(TIMERS.format(forward=24000 + extra, sync=900 + extra))
    return "".join(text)


@pytest.mark.parametrize("slower", [0.03, 0.05, 0.10])
def test_a_planted_slowdown_is_found_with_the_part_that_grew(tmp_path: Path, slower: float) -> None:
    (tmp_path / "run.log").write_text(write_log(slower=slower))
    watch = mw.watch(tmp_path)  # the newest log of the folder
    (change,) = watch.changes
    assert abs(change.step - 300) <= 3
    assert change.sighting < 350
    assert change.growth == pytest.approx(slower, abs=0.004)
    assert change.part == "all-grads-sync"
    assert change.part_growth_s == pytest.approx(27.1 * slower, rel=1e-3)
    (alarm,) = watch.alarms
    assert f"({change.growth:+.1%})" in alarm.text
    assert "all-grads-sync grew by" in alarm.text
    # The latest timers are all of steps after the change.
    names = [timer.name for timer in watch.timers]
    assert names == ["forward-backward", "all-grads-sync", "optimizer"]
    assert watch.timers[1].seconds == pytest.approx(0.9 + 27.1 * slower, abs=1e-4)
    (checkpoint,) = watch.recurrences
    assert (checkpoint.name, checkpoint.period, checkpoint.count) == ("checkpoint", 50, 8)
    assert watch.days_left == pytest.approx(4600 * 27.1 * (1 + slower / 4) / 86400, rel=0.05)


@pytest.mark.parametrize("seed", range(3))
def test_days_left_go_by_the_time_that_a_run_lost(tmp_path: Path, seed: int) -> None:
    """Evaluations, a restart, and the steps that it went back behind; clocks of whole seconds."""
    rng = random.Random(seed)
    clock = datetime(2026, 3, 1, tzinfo=UTC)
    lines = []
    begin, end = sorted(rng.sample(range(20, 380), 2))
    for n in (*range(1, end + 1), *range(begin, 401)):
        clock += timedelta(seconds=20 + 90 * (n % 50 == 0))
        if len(lines) == end:
            clock += timedelta(seconds=rng.uniform(600, 2000))
        lines.append(
            LINE.format(n=n, total=1000, ms=20000, loss=2.0).replace(
                "2026-03-01 12:00:00", f"{clock:%Y-%m-%d %H:%M:%S}"
            )
        )
    (tmp_path / "run.log").write_text("".join(lines))
    watch = mw.watch(tmp_path)
    passed_s = (clock - datetime(2026, 3, 1, tzinfo=UTC)).total_seconds() - 20
    assert watch.goodput == pytest.approx(399 * 20 / passed_s, abs=1e-3)
    assert watch.days_left == pytest.approx(600 * 20 / watch.goodput / 86400)


def test_a_trend_of_losses_leads_where_they_go() -> None:
    """Losses that fall as powers of the step, with noise of two kinds; then one that jumps."""
    rng = np.random.default_rng(36)
    inside = 0
    for _ in range(200):
        first = int(rng.integers(1, 5000))
        numbers = np.arange(first, first + 700)
        floor, scale, power = rng.uniform(1, 3), rng.uniform(2, 10), rng.uniform(0.05, 0.5)
        noise = rng.choice((rng.normal(size=700), rng.standard_t(3, size=700)))
        losses = floor + scale * numbers**-power + rng.uniform(0.005, 0.1) * noise
        steps = SortedSteps(
            numbers=tuple(numbers.tolist()),
            steps_s=np.ones(700),
            losses=losses,
            offsets=tuple(range(700)),
        )
        latest, (low, high) = expect_loss(steps)
        inside += low <= latest <= high
        losses[-100:] += 0.5
        jumped, band = expect_loss(steps)
        assert band == pytest.approx((low, high), rel=0.1)
        assert jumped > latest
    assert inside >= 180
    assert expect_loss(replace(steps, losses=np.full(700, np.nan)))[0] == 0.0


def test_a_run_without_a_change_has_no_alarm_and_exit_code_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "run.log"
    log.write_text(write_log(slower=0.0))
    answer = tmp_path / "watch.json"
    command = ["watch", str(log), "--once", *JOB, "--json", str(answer)]
    assert main(command) == 0
    data = json.loads(answer.read_text())
    assert data["alarms"] == []
    assert data["band_s"][0] < data["step_s"] < data["band_s"][1]
    assert data["peak_bytes"] == 66120 * 2**20
    assert "a change of 3% is found within 50 steps" in capsys.readouterr().out
    log.write_text(write_log(slower=1.0))
    assert main(command) == 5
    kinds = [alarm["kind"] for alarm in json.loads(answer.read_text())["alarms"]]
    assert kinds == ["slower", "slow"]


def test_a_log_is_followed_to_its_last_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "run.log"
    lines = write_log(total=400).splitlines(keepends=True)
    log.write_text("".join(lines[:600]))

    def write_on() -> None:
        with log.open("a") as file:
            for begin in range(600, len(lines), 250):
                time.sleep(0.05)
                # A line in two pieces, as a reader may meet it.
                text = "".join(lines[begin : begin + 250])
                file.write(text[:-40])
                file.flush()
                file.write(text[-40:])
                file.flush()

    writer = threading.Thread(target=write_on)
    writer.start()
    assert main(["watch", str(log), "--interval", "0.02"]) == 5
    writer.join()
    out = capsys.readouterr().out
    assert out.count("slower: from step 300 on") == 2  # when it came, and at the end
    assert "step      400 of 400, 400 read" in out


def test_a_pipe_is_watched_as_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "piped").write_text(write_log())
    with (tmp_path / "piped").open() as stream:
        monkeypatch.setattr("sys.stdin", stream)
        assert main(["watch", "-", "--interval", "0.01", "--json", "-"]) == 5
    assert json.loads(capsys.readouterr().out)["latest"] == 400


def read_numbers(path: Path, text: str) -> StepSeries:
    path.write_text(text)
    series = StepSeries()
    read_new_steps(path, series)
    return series


def test_lines_of_other_trainers_are_read(tmp_path: Path) -> None:
    nemo = "".join(
        f"Training epoch 0, iteration {n}/99 | lr: 0.0001 | global_step: {n}"
        f" | reduced_train_loss: {10 - n / 20:.4} | train_step_timing in s: {8.25 + n / 1000:.5}\n"
        for n in range(30)
    )
    series = read_numbers(tmp_path / "nemo.log", nemo)
    assert (series.trainer, series.total) == ("NeMo", 100)
    assert series.numbers[:2].tolist() == [1, 2]
    assert series.steps_s[0] == 8.25
    assert series.losses[20] == 9.0
    reserved = nemo.replace(" | reduced", " | max_memory_reserved: 127785762816 | reduced")
    (tmp_path / "nemo.log").write_text(reserved)
    assert mw.watch(tmp_path / "nemo.log").peak_bytes == 127785762816
    titan = "".join(
        f"[rank0]:[titan] 2026-01-01 - root - INFO - \x1b[31mstep: {n:2}  \x1b[32mloss: "
        f"{8 - n / 50:7.4f}  \x1b[33mmemory: 30.52GiB(38.55%)  \x1b[34mtps: 5,{n:03}  \x1b[36m"
        f"tflops: 260.1  \x1b[35mmfu: 26.30%\x1b[39m\n"
        for n in range(1, 31)
    )
    series = read_numbers(tmp_path / "titan.log", titan)
    assert (series.trainer, series.has_rates, len(series.numbers)) == ("torchtitan", True, 30)
    assert series.steps_s[9] == pytest.approx(1 / 5010)
    assert (
        mw.watch(tmp_path / "titan.log").title() == "step 30: 199 us a token of a device, 0 alarms"
    )
    plan = mw.estimate("Llama-3.1-8B", "recompute=full", on="8xH100")
    plan_file = tmp_path / "plan.json"
    main(["estimate", "Llama-3.1-8B", "--on", "8xH100", "--json", str(plan_file)])
    watch = mw.watch(tmp_path / "titan.log", plan=plan_file)
    tokens = plan.workload.tokens_per_step / 8
    assert watch.step_s == pytest.approx(tokens / 5020, rel=0.01)
    assert watch.peak_bytes == round(30.52 * 2**30)
    bridge = "".join(
        f" iteration {n:8d}/     100 | elapsed time per iteration (s): 2.5 | lm loss: 3.5E+00 |\n"
        for n in range(1, 31)
    )
    series = read_numbers(tmp_path / "bridge.log", bridge)
    assert (series.trainer, series.total, series.steps_s[3]) == ("Megatron-LM", 100, 2.5)


def test_the_fast_reader_says_what_the_reader_of_whole_logs_says(tmp_path: Path) -> None:
    rng = random.Random(7)
    pieces = ["[rank3]: noise about iteration 12/ and nothing else\n", "\n", "x" * 300 + "\n"]
    text = "".join(
        rng.choice(pieces) * rng.randrange(2)
        + LINE.format(n=n, total=99, ms=10 ** rng.uniform(1, 5), loss=rng.uniform(0, 12))
        for n in rng.choices(range(1, 90), k=200)
    )
    text = text.replace("lm loss: 1", "lm loss: nan | other: 1", 3)
    series = read_numbers(tmp_path / "run.log", text + " [2026] iteration 99/ 99 | elap")
    steps = series.sort()
    whole = parse_log(text)
    assert steps.numbers == tuple(iteration.number for iteration in whole.iterations)
    assert steps.steps_s.tolist() == [iteration.step_s for iteration in whole.iterations]
    losses = [iteration.loss for iteration in whole.iterations]
    assert steps.losses.tolist() == pytest.approx(losses, nan_ok=True)


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[dict]]]:
    """Give the address of a server, and what is posted to it."""
    posts: list[dict] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["content-length"])
            posts.append(json.loads(self.rfile.read(length)))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hook", posts
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_alarm_is_posted_once_and_a_dead_webhook_stops_nothing(
    tmp_path: Path,
    webhook: tuple[str, list[dict]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    address, posts = webhook
    log = tmp_path / "run.log"
    log.write_text(write_log(total=400))
    assert main(["watch", str(log), "--interval", "0.01", "--webhook", address]) == 5
    (post,) = posts
    assert (post["kind"], post["source"]) == ("slower", str(log))
    assert post["text"].startswith(f"{log}: from step ")
    assert main(["watch", str(log), "--once", "--webhook", "http://127.0.0.1:1/x"]) == 5
    assert "the webhook does not answer" in capsys.readouterr().err


@pytest.fixture
def broken_server() -> Iterator[str]:
    """Give the address of a server whose answers are random bytes, none, or never whole."""
    server = socket.create_server(("127.0.0.1", 0))
    silent: list[socket.socket] = []

    def answer() -> None:
        rng = random.Random(36)
        for count in itertools.count():
            try:
                connection, _ = server.accept()
            except OSError:
                return
            if count % 3 == 2:  # it keeps the connection, and says nothing
                silent.append(connection)
                continue
            connection.recv(1 << 16)
            connection.sendall(rng.randbytes(60) * (count % 3) + b"\n\n")
            connection.close()

    thread = threading.Thread(target=answer)
    thread.start()
    yield f"http://127.0.0.1:{server.getsockname()[1]}/hook"
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    for connection in silent:
        connection.close()
    thread.join()


def test_a_watch_does_not_wait_for_a_webhook_nor_end_by_its_answer(broken_server: str) -> None:
    failures: list[str] = []
    webhook = Webhook(broken_server, failures.append)
    start = time.monotonic()
    for step in range(50):
        webhook.post(Alarm(kind=AlarmKind.SLOWER, step=step, text="slower"), "run.log")
    assert time.monotonic() - start < 1  # a request alone may take ten
    for _ in range(100):
        if failures:
            break
        time.sleep(0.05)
    assert "the webhook does not answer" in failures[0]


def test_an_alarm_is_posted_again_until_the_webhook_takes_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    failures: list[str] = []
    down = Webhook(f"http://127.0.0.1:{port}/hook", failures.append)
    down.post(Alarm(kind=AlarmKind.LOSS, step=7, text="it rises"), "run.log")
    while not failures:
        time.sleep(0.01)
    got: list[bytes] = []
    with socket.create_server(("127.0.0.1", port)) as server:
        connection, _ = server.accept()
        with connection:
            got.append(connection.recv(1 << 16))
            connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")
    down.close()
    assert b"POST /hook" in got[0]
    assert len(failures) == 1


@pytest.mark.parametrize(
    "address",
    [
        "hook",
        "ftp://example.org/x",
        "file:///etc/passwd",
        "http://",
        "http://[::1",
        "http://example.org:99999/x",
        "http://a host/",
        "https://example.org/\n",
    ],
)
def test_an_address_that_takes_no_alarm_is_refused_before_the_watch(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "run.log"
    log.write_text(write_log(total=120))
    assert main(["watch", str(log), "--once", "--webhook", address]) == 2
    told = capsys.readouterr().err
    assert told.startswith("moewright: --webhook")
    assert len(told.splitlines()) == 1


def test_losses_that_rise_or_are_lost_raise_an_alarm(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    text = write_log(slower=0.0)
    log.write_text(text)
    assert mw.watch(log).alarms == ()
    lines = text.split("lm loss: ")
    risen = [line if n < 300 else f"6.0E+00{line[12:]}" for n, line in enumerate(lines)]
    log.write_text("lm loss: ".join(risen))
    (alarm,) = mw.watch(log).alarms
    assert (alarm.kind, alarm.step) == ("loss", 400)
    assert "the loss rises: from " in alarm.text
    lost = [line if n < 290 else f"nan{line[12:]}" for n, line in enumerate(lines)]
    log.write_text("lm loss: ".join(lost))
    (alarm,) = mw.watch(log).alarms
    assert alarm.text == "the latest losses are no numbers"


def write_events(path: Path, step: int, scalars: dict[str, float], written_s: float = 1.0) -> None:
    """Write events as TensorBoard does, one for each scalar, as SummaryWriter has them."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    with path.open("ab") as file:
        records = RecordWriter(file)
        for tag, value in scalars.items():
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            event = Event(step=step, wall_time=written_s, summary=summary)
            records.write(event.SerializeToString())
        records.flush()


@pytest.mark.parametrize(
    ("trainer", "time_tag", "loss_tag"),
    [
        ("Megatron-LM", "iteration-time", "lm loss"),
        ("NeMo", "train_step_timing in s", "reduced_train_loss"),
        ("torchtitan", "time_metrics/end_to_end(s)", "loss_metrics/global_avg_loss"),
    ],
)
def test_event_files_of_tensorboard_are_watched_as_they_grow(
    tmp_path: Path, trainer: str, time_tag: str, loss_tag: str
) -> None:
    pytest.importorskip("tensorboard")
    rng = random.Random(4)
    path = tmp_path / "events.out.tfevents.17.host.1.0"
    for n in range(1, 301):
        step_s = 20 * (1 + 0.005 * rng.gauss(0, 1)) * (1.05 if n >= 220 else 1)
        write_events(path, n, {"learning-rate": 1e-4, loss_tag: 3 + 1 / n, time_tag: step_s})
    whole = path.read_bytes()
    series = StepSeries()
    reader = EventReader(path)
    for end in (0, 5, len(whole) // 3, len(whole) - 3, len(whole)):
        path.write_bytes(whole[:end])
        reader.read_new(series)
    assert series.sort().numbers == tuple(range(1, 301))
    shown = mw.watch(tmp_path)
    assert (shown.trainer, shown.steps) == (trainer, 300)
    assert shown.loss == pytest.approx(3 + 1 / 300)
    (alarm,) = shown.alarms
    assert alarm.kind == "slower"
    assert abs(alarm.step - 220) <= 3
    path.write_bytes(b"\xff" * 200)
    with pytest.raises(BadInput, match="is no event file of TensorBoard"):
        mw.watch(tmp_path)


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("time_tag", ["", "iteration-time"])
def test_event_files_of_a_run_that_began_again_are_read_together(
    tmp_path: Path, time_tag: str, every: int
) -> None:
    """Without a tag of seconds the clock of the events tells them, as any trainer writes them."""
    pytest.importorskip("tensorboard")
    rng = random.Random(7)
    folder = tmp_path / "logs" / "version_0"
    folder.mkdir(parents=True)
    now_s = 1.7e9
    for start, (first, last) in enumerate(((1, 180), (161, 300), (301, 400))):
        path = folder / f"events.out.tfevents.{1700000000 + start}.host.{start}.0"
        now_s += 300  # a start takes its time
        for n in range(first, last + 1):
            step_s = 2 * (1 + 0.005 * rng.gauss(0, 1)) * (1.05 if n >= 320 else 1)
            now_s += every * step_s
            values = {"train/loss": 3 + 1 / n, **({time_tag: step_s} if time_tag else {})}
            write_events(path, every * n, values, now_s)
    shown = mw.watch(tmp_path)
    assert shown.latest == 400 * every
    assert shown.steps >= 397  # of a start's first step a clock tells nothing
    assert shown.step_s == pytest.approx(2.1, rel=0.01)
    (alarm,) = shown.alarms
    assert (alarm.kind, abs(alarm.step - 320 * every) <= 3 * every) == ("slower", True)


@pytest.mark.parametrize("seed", range(20))
def test_of_starts_that_go_back_the_latest_one_s_steps_are_shown(seed: int) -> None:
    rng = random.Random(seed)
    series = StepSeries()
    shown: dict[int, float] = {}
    for start in range(rng.randint(1, 6)):
        first = rng.randint(1, max(shown, default=0) + 1)
        shown = {number: step_s for number, step_s in shown.items() if number < first}
        for number in range(first, first + rng.randint(1, 40)):
            shown[number] = 1 + start + rng.random()
            series.add(StepLine(number=number, step_s=shown[number]), 0)
    steps = series.sort()
    assert dict(zip(steps.numbers, steps.steps_s.tolist(), strict=True)) == shown


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
def test_progress_bars_of_nemo_are_read(tmp_path: Path, end: str) -> None:
    """A bar is drawn over itself; the state that is being written is not read yet."""
    states = [
        f"Epoch 0: :   1%| | {number}/300 [09:07<878:01, v_num=, reduced_train_loss="
        f"{9 - number / 100:.3f}, global_step={number - 1}.0, consumed_samples={number * 8}.0, "
        f"train_step_timing in s=4.{number:03d}]"
        for number in range(1, 31)
    ]
    rest = "Epoch 0: :  2%| | 31/300 [09:07<878:01, v_"
    text = "".join(f"{state}{end}" for state in (*states, states[-1]))
    series = read_numbers(tmp_path / "bar.log", text + rest)
    assert series.sort().numbers == tuple(range(1, 31))
    assert (series.trainer, series.total) == ("NeMo", 300)
    assert series.steps_s[11] == 4.012
    assert series.losses[11] == 8.88
    assert series.end == len(text)
    untimed = re.sub(r", train_step_timing in s=[\d.]+", "", text)
    (tmp_path / "bar.log").write_text(untimed)
    with pytest.raises(BadInput, match="has steps of NeMo without their seconds"):
        mw.watch(tmp_path / "bar.log")


def test_what_cannot_be_watched_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "none.log").write_text("nothing\n")
    with pytest.raises(BadInput, match="holds no step"):
        mw.watch(tmp_path / "none.log")
    with pytest.raises(BadInput, match="no such log"):
        mw.watch(tmp_path / "gone.log")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=r"holds no steps\.jsonl and no \.log"):
        mw.watch(tmp_path / "empty")
    assert main(["watch", str(tmp_path / "none.log"), "--interval", "0"]) == 2
    assert "--interval=0: must be seconds, above 0" in capsys.readouterr().err
    assert (
        main(["watch", str(tmp_path / "none.log"), "--patience", "0.05", "--interval", "0.02"]) == 2
    )


def test_what_a_log_tells_before_its_steps_may_come_after_the_watch(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text("")
    watcher = LogWatcher(log, WatchedJob(on="H100"), name="standard input")
    with pytest.raises(BadInput, match="standard input: holds no step"):
        watcher.look()
    log.write_text(write_log(slower=0.0))
    shown = watcher.look()
    assert shown.source == "standard input"
    assert [recurrence.name for recurrence in shown.recurrences] == ["checkpoint"]
    assert shown.peak_bytes == 66120 * 2**20
