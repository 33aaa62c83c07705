"""The launcher: how jobs end, which rank it blames, and that no process survives."""

import errno
import faulthandler
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tiny_jobs
from moewright.codec.folder_lock import lock_folder
from moewright.engine.comm import collectives
from moewright.engine.run.build_state import build_coordinator, init_distributed
from moewright.engine.run.launch import launch
from moewright.engine.run.train import _choose_timeouts
from moewright.engine.run.worker import ExitCode, RankContext, RankOutcome, Timeouts
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import DeviceKind
from moewright.spec.workload import DataSpec, FusedKernels

pytestmark = [pytest.mark.spawn, pytest.mark.waits]
QUICK = Timeouts(rendezvous_s=20.0, collective_s=1.0)


def run_toy_steps(
    context: RankContext, *, fault: str = "", rank: int = 1, steps: int = 2000
) -> RankOutcome:
    """Run steps that agree on a stop flag by an all-reduce over all ranks, as in training.

    `rank` does `fault` at step 3.
    """
    pids = Path(os.environ["TOY_PIDS"])
    (pids / str(context.rank)).write_text(str(os.getpid()))
    assert torch.get_num_threads() == 1
    collectives.join_world(
        rank=context.rank,
        world_size=context.world_size,
        store=context.open_store(),
        backend="gloo",
        timeout_s=context.timeouts.collective_s,
    )
    everyone = collectives.create_process_groups([tuple(range(context.world_size))], context.rank)
    for step in range(1, steps + 1):
        context.beat(step)
        if step == 3 and context.rank == rank:
            misbehave(fault)
        stop = torch.tensor([int(context.stop.requested)])
        try:
            dist.all_reduce(stop, group=everyone)
        except RuntimeError:
            (pids / f"lost{context.rank}").touch()
            raise
        if stop.item():
            (pids / f"saving{context.rank}").touch()
            time.sleep(0.5)
            (pids / f"saved{context.rank}").write_text(str(step))
            return RankOutcome.STOPPED
        time.sleep(0.005)
    collectives.leave_world()
    return RankOutcome.DONE


_NAMELESS = signal.SIGRTMIN + 1  # Python names the first and the last real-time signal alone


def misbehave(fault: str) -> None:
    if fault == "exception":
        raise ValueError("simulated failure")
    if fault == "no memory":
        raise MemoryError
    if fault == "bad input":
        raise BadInput(Reason(field="data.train", rule="is truncated", nearest="rebuild it"))
    if fault == "exit":
        sys.exit(7)
    if fault == "spin":
        time.sleep(60)
    if fault:
        faulthandler.disable()  # pytest's would print over the report
        os.kill(os.getpid(), _NAMELESS if fault == "nameless" else signal.Signals[fault])


@pytest.fixture(autouse=True)
def _nothing_survives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TOY_PIDS", str(tmp_path))
    yield
    time.sleep(0.05)
    assert not [pid for pid in pids_in(tmp_path) if is_alive(pid)]
    assert not (tmp_path / "run" / ".launch").exists()


def pids_in(folder: Path) -> list[int]:
    texts = [path.read_text() for path in folder.iterdir() if path.name.isdecimal()]
    return [int(text) for text in texts if text]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_job_that_ends_well(
    tmp_path: Path, world: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        launch(partial(run_toy_steps, steps=3), nproc=world, run_dir=tmp_path / "run")
        == ExitCode.DONE
    )
    assert len(pids_in(tmp_path)) == world
    assert capfd.readouterr().err == ""


def test_a_rank_without_memory_ends_the_job_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    worker = partial(run_toy_steps, fault="no memory")
    assert launch(worker, nproc=2, run_dir=tmp_path / "run", timeouts=QUICK) == 3
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("rank 1 failed at step 3: MemoryError: raise the limits of this process")


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("SIGKILL", "rank 1 was killed by SIGKILL at step 3;"),
        ("SIGSEGV", "rank 1 was killed by SIGSEGV at step 3;"),
        ("SIGABRT", "rank 1 was killed by SIGABRT at step 3;"),
        ("nameless", f"rank 1 was killed by signal {_NAMELESS} at step 3;"),
        ("exit", "rank 1 exited with code 7 at step 3;"),
        ("exception", "rank 1 failed at step 3: ValueError: simulated failure;"),
    ],
)
def test_a_rank_that_fails_ends_the_job_and_is_named_first(
    tmp_path: Path, world: int, fault: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    began_s = time.monotonic()
    timeouts = Timeouts(rendezvous_s=20.0, collective_s=30.0)
    code = launch(
        partial(run_toy_steps, fault=fault),
        nproc=world,
        run_dir=tmp_path / "run",
        timeouts=timeouts,
    )
    assert code == ExitCode.RANK_FAILED == 3
    assert time.monotonic() - began_s < 5
    error = capfd.readouterr().err
    assert error.startswith(message)
    assert "closed by peer" not in error


def fail_on_a_full_disk(context: RankContext) -> RankOutcome:
    """Fail where nothing can be written any more: the launcher's folder is gone."""
    assert isinstance(context.info.rendezvous, Path)
    shutil.rmtree(context.info.rendezvous.parent)
    raise OSError(errno.ENOSPC, "No space left on device" + "x" * 100_000)


def test_the_cause_is_told_where_nothing_can_be_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(fail_on_a_full_disk, nproc=1, run_dir=tmp_path / "run") == ExitCode.RANK_FAILED
    error = capfd.readouterr().err
    assert error.startswith(
        "rank 0 failed before its first step: OSError: [Errno 28] No space left on device"
    )


def test_bad_input_of_a_rank_reaches_the_caller_whole(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BadInput) as refused:
        launch(partial(run_toy_steps, fault="bad input"), nproc=2, run_dir=tmp_path / "run")
    assert refused.value.reasons == (
        Reason(field="data.train", rule="is truncated", nearest="rebuild it"),
    )
    assert capfd.readouterr().err == ""


def test_a_suspended_rank_is_named_after_the_timeout(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    began_s = time.monotonic()
    worker = partial(run_toy_steps, fault="SIGSTOP")
    assert launch(worker, nproc=2, run_dir=tmp_path / "run", timeouts=QUICK) == ExitCode.RANK_FAILED
    assert QUICK.collective_s < time.monotonic() - began_s < QUICK.collective_s + 5
    assert capfd.readouterr().err.startswith(
        "rank 1 stopped answering at step 3: it is suspended (SIGSTOP)"
    )


IMPATIENT = Timeouts(rendezvous_s=20.0, collective_s=1.0, hang_s=0.5)


def work_for_long(context: RankContext) -> RankOutcome:
    """Rank 1 shows life within a step of seconds; rank 0 waits for it and shows none."""
    for step in (1, 2):
        context.beat(step)
    if context.rank == 0:
        context.note("all_reduce over dp", is_waiting=True)
        time.sleep(5.0)
    else:
        for micro_batch in range(20):
            context.note(f"forward of micro-batch {micro_batch}")
            time.sleep(0.3)
    return RankOutcome.DONE


@pytest.mark.parametrize("world", [1, 2])
def test_a_long_step_with_signs_of_life_is_no_hang(world: int, tmp_path: Path) -> None:
    worker = work_for_long if world == 2 else work_alone
    assert launch(worker, nproc=world, run_dir=tmp_path / "run", timeouts=IMPATIENT) == 0


def work_alone(context: RankContext) -> RankOutcome:
    context.beat(1)
    context.beat(2)
    for micro_batch in range(15):
        context.note(f"forward of micro-batch {micro_batch}")
        time.sleep(0.3)
    return RankOutcome.DONE


def hang_in_a_forward(context: RankContext) -> RankOutcome:
    context.beat(1)
    context.beat(2)
    if context.rank == 0:
        context.note("all_to_all over ep, in experts of layer 1", is_waiting=True)
    else:
        context.note("forward of micro-batch 3, chunk 0")
    time.sleep(60)
    return RankOutcome.DONE


def test_a_hang_is_told_by_what_each_rank_did(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    began_s = time.monotonic()
    run_dir = tmp_path / "run"
    code = launch(hang_in_a_forward, nproc=2, run_dir=run_dir, timeouts=IMPATIENT)
    assert code == ExitCode.RANK_FAILED
    assert time.monotonic() - began_s < 8
    error = capfd.readouterr().err
    assert re.match(
        r"rank 1 stopped answering at step 2: the others wait for it, silent for \d s in: "
        r"forward of micro-batch 3, chunk 0",
        error,
    )
    assert "rank 0, all_to_all over ep, in experts of layer 1:" in error
    assert "in hang_in_a_forward" in error
    record = json.loads((run_dir / "flight_record.json").read_text())
    assert [rank["beats"][-1]["is_waiting"] for rank in record] == [True, False]
    assert record[1]["beats"][-1]["step"] == 2
    assert all("hang_in_a_forward" in rank["stack"] for rank in record)


def hang_before(steps: int, context: RankContext) -> RankOutcome:
    """Rank 1 hangs when it has begun so many steps, and rank 0 waits for it."""
    for step in range(41, 41 + steps):
        context.beat(step)
    if context.rank == 1:
        context.note("opens what does not answer")
        time.sleep(60)
    context.note("waits for the other ranks", is_waiting=True)
    time.sleep(60)
    return RankOutcome.DONE


@pytest.mark.parametrize(
    ("steps", "step", "low_s"), [(0, "before its first step", 1.0), (1, "at step 41", 2.0)]
)
def test_a_start_and_a_first_step_have_patience_of_their_own(
    steps: int, step: str, low_s: float, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    timeouts = Timeouts(rendezvous_s=60.0, hang_s=0.2, start_s=1.0, first_step_s=2.0)
    began_s = time.monotonic()
    worker = partial(hang_before, steps)
    code = launch(worker, nproc=2, run_dir=tmp_path / "run", timeouts=timeouts)
    assert code == ExitCode.RANK_FAILED
    assert low_s < time.monotonic() - began_s < low_s + 8
    assert capfd.readouterr().err.startswith(f"rank 1 stopped answering {step}: ")


def start_slowly(context: RankContext) -> RankOutcome:
    """Rank 1 reads for longer than the patience, and rank 0 waits for it at a coordinator."""
    init_distributed(context)
    comm = build_coordinator(context)
    for piece in range(15 if context.rank else 0):
        comm.note(f"reads piece {piece}")
        time.sleep(0.3)
    assert comm.gather(context.rank) == [0, 1]
    return RankOutcome.DONE


def test_a_slow_start_with_progress_is_no_hang(tmp_path: Path) -> None:
    timeouts = Timeouts(rendezvous_s=60.0, hang_s=0.2, start_s=0.5)
    assert launch(start_slowly, nproc=2, run_dir=tmp_path / "run", timeouts=timeouts) == 0


def test_a_job_states_its_patience() -> None:
    workload = tiny_jobs.build_workload(DataSpec(), hang_timeout_s=5.0)
    plan = tiny_jobs.build_plan(workload, "", world_size=1)
    timeouts = _choose_timeouts(plan)
    assert (timeouts.start_s, timeouts.first_step_s) == (120.0, 30.0)
    compiled = replace(workload, fused_kernels=FusedKernels.COMPILED, compile_timeout_s=77.0)
    assert _choose_timeouts(replace(plan, workload=compiled)).first_step_s == 77.0


def test_patience_follows_the_predicted_step() -> None:
    plan = tiny_jobs.build_plan(tiny_jobs.build_workload(DataSpec()), "", world_size=1)
    long = replace(plan, estimate=replace(plan.estimate, step_s=1000.0))
    own = replace(long, workload=replace(plan.workload, hang_timeout_s=5.0))
    hangs = [_choose_timeouts(job).hang_s for job in (plan, long, own)]
    assert hangs == [60.0, 20_000.0, 5.0]
    assert all(_choose_timeouts(job).collective_s > 600 for job in (plan, long, own))


def suspend_rank_1(context: RankContext) -> RankOutcome:
    """Suspend rank 1 where no process group can time out.

    Rank 0 is silent for longer, but rank 1 is the one suspended.
    """
    context.beat(2)
    time.sleep(0.3)
    if context.rank == 1:
        context.beat(3)
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(30)
    return RankOutcome.DONE


def test_silence_is_noticed_without_a_collective(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        launch(suspend_rank_1, nproc=2, run_dir=tmp_path / "run", timeouts=QUICK)
        == ExitCode.RANK_FAILED
    )
    assert capfd.readouterr().err.startswith(
        "rank 1 stopped answering at step 3: it is suspended (SIGSTOP)"
    )


def test_a_rank_that_spins_is_named_though_another_times_out_first(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = launch(
        partial(run_toy_steps, fault="spin", rank=0),
        nproc=2,
        run_dir=tmp_path / "run",
        timeouts=QUICK,
    )
    assert code == ExitCode.RANK_FAILED
    assert capfd.readouterr().err.startswith(
        "rank 0 stopped answering at step 3: the others wait for it"
    )
    # The group's own timeout has ended the other rank.
    assert (tmp_path / "lost1").exists()


def test_sigterm_to_one_rank_stops_all_at_the_same_step(tmp_path: Path) -> None:
    assert (
        launch(partial(run_toy_steps, fault="SIGTERM"), nproc=4, run_dir=tmp_path / "run")
        == ExitCode.STOPPED
        == 143
    )
    assert len({(tmp_path / f"saved{rank}").read_text() for rank in range(4)}) == 1


def start_launcher(tmp_path: Path) -> int:
    """Return the process id of a launcher of its own, once its two ranks step."""
    launcher = os.fork()
    if launcher == 0:
        os._exit(launch(run_toy_steps, nproc=2, run_dir=tmp_path / "run"))
    deadline_s = time.monotonic() + 20
    while len(pids_in(tmp_path)) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.02)
    time.sleep(0.2)
    return launcher


def wait_for_exit_code(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def test_a_stop_signal_to_the_launcher_saves_and_more_are_ignored(tmp_path: Path) -> None:
    launcher = start_launcher(tmp_path)
    os.kill(launcher, signal.SIGTERM)
    deadline_s = time.monotonic() + 5
    while len(list(tmp_path.glob("saving*"))) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert len(list(tmp_path.glob("saving*"))) == 2
    for process in (launcher, *pids_in(tmp_path)):
        os.kill(process, signal.SIGTERM)
        os.kill(process, signal.SIGINT)
    assert wait_for_exit_code(launcher) == 143
    assert len({(tmp_path / f"saved{rank}").read_text() for rank in range(2)}) == 1


def test_ranks_die_with_a_killed_launcher_and_the_directory_is_free_again(tmp_path: Path) -> None:
    launcher = start_launcher(tmp_path)
    pids = pids_in(tmp_path)
    assert len(pids) == 2
    with pytest.raises(BadInput, match=f"in use by another job .process {launcher}"):
        launch(run_toy_steps, nproc=1, run_dir=tmp_path / "run")
    os.kill(launcher, signal.SIGKILL)
    assert wait_for_exit_code(launcher) == -signal.SIGKILL
    deadline_s = time.monotonic() + 5
    while any(map(is_alive, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not any(map(is_alive, pids))
    assert (
        launch(partial(run_toy_steps, steps=1), nproc=1, run_dir=tmp_path / "run") == ExitCode.DONE
    )


def test_spawned_ranks_run_the_same(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """CUDA ranks are started so; they touch no GPU here."""
    assert (
        launch(fail, nproc=1, run_dir=tmp_path / "run", device=DeviceKind.CUDA)
        == ExitCode.RANK_FAILED
    )
    assert capfd.readouterr().err.startswith(
        "rank 0 failed before its first step: RuntimeError: on purpose"
    )


def fail(context: RankContext) -> RankOutcome:
    raise RuntimeError("on purpose")


def torchrun_env(monkeypatch: pytest.MonkeyPatch, **changes: str) -> None:
    values = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    for key, value in (values | changes).items():
        monkeypatch.setenv(key, value)


def test_under_torchrun_the_worker_runs_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    torchrun_env(monkeypatch)
    calls = []

    def worker(context: RankContext) -> RankOutcome:
        calls.append((os.getpid(), context.rank, context.world_size))
        with pytest.raises(BadInput, match="in use"), lock_folder(tmp_path / "run"):
            pass
        return RankOutcome.STOPPED

    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert launch(worker, nproc=1, run_dir=tmp_path / "run") == ExitCode.STOPPED
    assert calls == [(os.getpid(), 0, 1)]
    assert launch(fail, nproc=1, run_dir=tmp_path / "run") == ExitCode.RANK_FAILED
    assert capfd.readouterr().err.startswith(
        "rank 0 failed before its first step: RuntimeError: on purpose"
    )
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "1"}, "RANK=1: must be below WORLD_SIZE=1"),
        ({"RANK": "-1"}, "RANK=-1: must be a whole number"),
        ({"WORLD_SIZE": "2"}, "nproc=1: torchrun started 2 ranks; nearest legal value: 2"),
    ],
)
def test_a_wrong_torchrun_environment_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], message: str
) -> None:
    torchrun_env(monkeypatch, **changes)
    with pytest.raises(BadInput, match=message):
        launch(run_toy_steps, nproc=1, run_dir=tmp_path / "run")
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(BadInput, match="MASTER_PORT"):
        launch(run_toy_steps, nproc=1, run_dir=tmp_path / "run")


def test_nothing_starts_without_a_rank_or_a_directory(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="nproc=0: must be in 1"):
        launch(run_toy_steps, nproc=0, run_dir=tmp_path / "run")
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be used as a folder to write in"):
        launch(run_toy_steps, nproc=1, run_dir=tmp_path / "file")


def test_a_refusal_that_one_rank_under_torchrun_found_is_told_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The command line speaks for the first rank of a machine alone."""

    def refuse(context: RankContext) -> RankOutcome:
        raise BadInput(Reason(field="data.train", rule="is truncated"))

    torchrun_env(monkeypatch, RANK="1", LOCAL_RANK="1", WORLD_SIZE="2")
    assert launch(refuse, nproc=2, run_dir=tmp_path / "run") == ExitCode.BAD_INPUT
    assert capfd.readouterr().err == "rank 1: data.train: is truncated\n"
    torchrun_env(monkeypatch, WORLD_SIZE="2")
    with pytest.raises(BadInput, match="truncated"):
        launch(refuse, nproc=2, run_dir=tmp_path / "run")


def never_join(context: RankContext) -> RankOutcome:
    """Rank 1 never comes to where the ranks meet."""
    if context.rank == 1:
        time.sleep(60)
    collectives.join_world(
        rank=context.rank,
        world_size=context.world_size,
        store=context.open_store(),
        backend="gloo",
        timeout_s=60.0,
    )
    return RankOutcome.DONE


def test_a_rank_that_never_joins_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    began_s = time.monotonic()
    timeouts = Timeouts(rendezvous_s=1.0, collective_s=2.0)
    assert (
        launch(never_join, nproc=2, run_dir=tmp_path / "run", timeouts=timeouts)
        == ExitCode.RANK_FAILED
    )
    assert time.monotonic() - began_s < timeouts.collective_s + 8
    assert capfd.readouterr().err.startswith("rank 1 stopped answering before its first step")
