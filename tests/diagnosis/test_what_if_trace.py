"""Replayed traces: as they are, and changed beside a device that runs the changed program."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import sample_traces

from moewright.cli.main import main
from moewright.diagnosis.traces.kineto import read_traces
from moewright.diagnosis.traces.trace_changes import TraceChange, parse_change
from moewright.diagnosis.traces.what_if_trace import TraceWhatIf, replay_trace
from moewright.spec.errors import BadInput

GEMM = "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNT"
SENDRECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
REDUCE = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4>"
PARTS = {GEMM: "gemm", SENDRECV: "network", REDUCE: "network", ELEMENTWISE: "other"}


@dataclass(frozen=True)
class Launch:
    """A kernel that the host launches after some host work; `waits` are kernels before it."""

    name: str
    stream: int
    length_us: float
    host_us: float
    waits: tuple[int, ...] = ()


@dataclass(frozen=True)
class Wait:
    """The host waits for a kernel."""

    kernel: int


@dataclass
class Device:
    """Runs a program as CUDA does: streams in order, events, and a host ahead of its device."""

    has_graphs: bool = False
    has_overlap: bool = False
    launches: list[tuple[float, float, float, Launch]] = field(default_factory=list)
    syncs: list[tuple[float, float]] = field(default_factory=list)
    marks: list[tuple[float, float]] = field(default_factory=list)

    def run(self, program: list[list[Launch | Wait]], speeds: dict[str, float]) -> float:
        """Return the microseconds of all steps."""
        host, free, ends, names = 0.0, {}, [], []
        for step in program:
            begin = host
            for place, item in enumerate(step):
                if isinstance(item, Wait):
                    until = max(host, ends[item.kernel])
                    self.syncs.append((host, until + 3))
                    host = until + 3
                    continue
                if not (self.has_graphs and place):
                    host += item.host_us / speeds.get("host", 1.0)
                length = item.length_us / speeds.get(PARTS[item.name], 1.0)
                waits = item.waits
                if self.has_overlap:
                    waits = tuple(kernel for kernel in waits if names[kernel] != REDUCE)
                names.append(item.name)
                events = (ends[kernel] for kernel in waits)
                start = max(host + 4, free.get(item.stream, 0.0) + 1, *events, 0.0)
                self.launches.append((host, start, length, item))
                free[item.stream] = start + length
                ends.append(start + length)
            self.marks.append((begin, host))
        return max(host, *ends)

    def write(self, path: Path) -> Path:
        events = []
        for key, (launched, start, length, item) in enumerate(self.launches):
            args = {"device": 0, "stream": item.stream, "correlation": key}
            if item.name == REDUCE:
                args["Process Group Description"] = "DATA_PARALLEL_GROUP"
            kernel = {"ph": "X", "cat": "kernel", "name": item.name, "pid": 0, "tid": item.stream}
            events.append({**kernel, "ts": start, "dur": length, "args": args})
            call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9}
            events.append({**call, "tid": 9, "ts": launched, "dur": 0.5, "args": args})
        for begin, end in self.syncs:
            wait = {"ph": "X", "cat": "cuda_runtime", "name": "cudaStreamSynchronize", "pid": 9}
            events.append({**wait, "tid": 9, "ts": begin, "dur": end - begin, "args": {}})
        for number, (begin, end) in enumerate(self.marks):
            mark = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{number}"}
            events.append({**mark, "pid": 9, "tid": 9, "ts": begin, "dur": end - begin})
        path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
        return path


def draw_program(seed: int) -> list[list[Launch | Wait]]:
    """Return three steps: layers of products with exchanges between them, and sums beside them."""
    rng = random.Random(seed)
    host_us = rng.choice((5.0, 40.0, 120.0))
    step: list[tuple] = []
    for _ in range(rng.randrange(4, 9)):
        step += [("gemm", rng.uniform(50, 300)), ("other", rng.uniform(10, 60))]
        if rng.random() < 0.8:
            step += [("exchange", rng.uniform(50, 300))]
        if rng.random() < 0.6:
            step += [("sum", rng.uniform(50, 400))]
        if rng.random() < 0.2:
            step += [("wait", 0.0)]
    step.append(("wait", 0.0))
    program, kernel = [], 0
    last_compute = last_exchange = -1
    for _ in range(3):
        items: list[Launch | Wait] = []
        for kind, length in step:
            gap = host_us * rng.uniform(0.5, 1.5)
            if kind == "wait":
                items.append(Wait(kernel - 1))
                continue
            name, stream, waits = {
                "gemm": (GEMM, 7, (last_exchange,)),
                "other": (ELEMENTWISE, 7, ()),
                "exchange": (SENDRECV, 20, (last_compute,)),
                "sum": (REDUCE, 24, (last_compute,)),
            }[kind]
            known = tuple(item for item in waits if item >= 0)
            items.append(Launch(name, stream, length, gap, known))
            if kind == "exchange":
                last_exchange = kernel
            elif kind != "sum":
                last_compute = kernel
            kernel += 1
        program.append(items)
    return program


CHANGES = ("gemm=2x", "network=2x", "host=2x", "gemm=1.5x,network=3x", "other=4x", "host=inf")


def replay(folder: Path, seed: int, change: str) -> tuple[TraceWhatIf, float]:
    """Return a replay, and the seconds of a step of the program that was changed."""
    program = draw_program(seed)
    device = Device()
    device.run(program, {})
    (capture,) = read_traces(device.write(folder / f"{seed}.json"))
    parsed = parse_change(change)
    changed = Device(has_graphs=parsed.has_graphs, has_overlap=parsed.has_overlap)
    return replay_trace(capture, parsed), changed.run(program, dict(parsed.speeds)) / 3e6


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_program_lies_between_the_bounds(tmp_path: Path, change: str) -> None:
    widths = []
    for seed in range(6):
        answer, changed_s = replay(tmp_path, seed, change)
        assert answer.replayed_s == pytest.approx(answer.measured_s, rel=0.001)
        assert answer.low_s <= answer.high_s * 1.0001
        assert answer.low_s <= changed_s * 1.01, seed
        assert answer.high_s >= changed_s * 0.99, seed
        widths.append(answer.high_s / answer.low_s - 1)
    assert sum(widths) / len(widths) < 0.25


@pytest.mark.parametrize("seed", range(4))
def test_graphs_take_the_launches_away(tmp_path: Path, seed: int) -> None:
    program = [
        [item for item in step[:-1] if isinstance(item, Launch)] + step[-1:]
        for step in draw_program(seed)
    ]
    device = Device()
    device.run(program, {})
    (capture,) = read_traces(device.write(tmp_path / "trace.json"))
    answer = replay_trace(capture, parse_change("graphs=on"))
    changed_s = Device(has_graphs=True).run(program, {}) / 3e6
    assert answer.low_s <= changed_s * 1.01
    assert answer.high_s >= changed_s * 0.99


def test_graphs_of_steps_that_wait_for_the_device_are_refused(tmp_path: Path) -> None:
    step = [Launch(GEMM, 7, 100.0, 5.0), Wait(0), Launch(GEMM, 7, 100.0, 5.0), Wait(1)]
    device = Device()
    device.run([step], {})
    (capture,) = read_traces(device.write(tmp_path / "trace.json"))
    with pytest.raises(BadInput, match="the host waits for the device 1 times within a step"):
        replay_trace(capture, parse_change("graphs=on"))


def test_an_overlapped_exchange_of_gradients_lies_between_the_bounds(tmp_path: Path) -> None:
    """Sums that products wait for run beside them; the step still ends behind the last of them."""
    step: list[Launch | Wait] = []
    for layer in range(6):
        first = 3 * layer
        step.append(Launch(GEMM, 7, 200.0, 5.0, (first - 1,) if layer else ()))
        step.append(Launch(ELEMENTWISE, 7, 20.0, 5.0))
        step.append(Launch(REDUCE, 24, 90.0, 5.0, (first + 1,)))
    step.append(Wait(17))
    device = Device()
    device.run([step], {})
    (capture,) = read_traces(device.write(tmp_path / "trace.json"))
    answer = replay_trace(capture, parse_change("overlap=grad"))
    changed_s = Device(has_overlap=True).run([step], {}) / 1e6
    assert changed_s < 0.8 * answer.measured_s
    assert answer.low_s == pytest.approx(changed_s, rel=0.01)
    assert answer.high_s == pytest.approx(answer.measured_s, rel=0.01)


def test_a_sample_is_replayed_as_it_is(tmp_path: Path) -> None:
    (capture,) = read_traces(sample_traces.kineto(tmp_path / "trace.json"))
    answer = replay_trace(capture, TraceChange())
    assert answer.measured_s == pytest.approx(0.1, rel=0.02)
    assert answer.replayed_s == pytest.approx(answer.measured_s, rel=0.001)
    assert answer.low_s == pytest.approx(answer.high_s)


def test_operations_of_a_cpu_shorten_its_step(tmp_path: Path) -> None:
    """Two threads hand work to each other; between operations the host takes its time."""
    operations = [(0, 30, 1), (40, 60, 2), (110, 20, 2), (150, 50, 1)]
    events = [
        {
            "ph": "X",
            "cat": "cpu_op",
            "name": "aten::mm",
            "pid": 1,
            "tid": thread,
            "ts": ts,
            "dur": d,
        }
        for ts, d, thread in operations
    ]
    mark = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 1, "tid": 1}
    events.append({**mark, "ts": 0, "dur": 220})
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    (capture,) = read_traces(path)
    for change, expected_us in (("gemm=2x", 140), ("host=2x", 190), ("gemm=2x,host=2x", 110)):
        answer = replay_trace(capture, parse_change(change))
        assert answer.replayed_s == pytest.approx(220e-6)
        assert answer.low_s == answer.high_s == pytest.approx(expected_us * 1e-6)


def test_what_a_trace_does_not_carry_is_refused() -> None:
    change = parse_change("gemm=2x, host=inf, graphs=on, ep=4")
    assert change.speeds == {"gemm": 2.0, "host": float("inf")}
    assert (change.has_graphs, change.ep, change.schedule) == (True, 4, "")
    for text, message in (
        ("tp=2", "is not carried by a trace"),
        ("ep=2x", "must be a degree of expert parallelism; nearest legal value: ep=4"),
        ("graphs=attn", "nearest legal value: graphs=on"),
        ("schedule=zbh1", "nearest legal value: zb-h1"),
        ("gem=2x", "nearest legal value: gemm"),
        ("gemm", "must say how many times as fast it is; nearest legal value: gemm=2x"),
        ("gemm=0x", "must say how many times"),
        ("gemm=-1", "must say how many times"),
    ):
        with pytest.raises(BadInput, match=message):
            parse_change(text)


def test_the_command_line_says_both_bounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device = Device()
    device.run(draw_program(3), {})
    trace = device.write(tmp_path / "trace.json")
    answer = tmp_path / "answer.json"
    assert main(["diagnose", str(trace), "--what-if", "host=2x", "--json", str(answer)]) == 0
    (replay,) = json.loads(answer.read_text())["replays"]
    assert 0 < replay["low_s"] <= replay["high_s"] < replay["measured_s"]
    assert "host 2 x as fast" in capsys.readouterr().out
    (tmp_path / "run.log").write_text("iteration 1/2 | lm loss: 1.0 |\n")
    assert main(["diagnose", str(tmp_path / "run.log"), "--what-if", "host=2x"]) == 2
    assert "needs a trace" in capsys.readouterr().err
    assert main(["diagnose", str(trace), "--what-if", "ep=2x"]) == 2
