"""Console logs of Megatron-LM as its versions print them."""

import json
import math
import re

import pytest

from moewright.cli.main import main
from moewright.diagnosis.traces.log_findings import diagnose_log, suggest_switches
from moewright.diagnosis.traces.megatron_log import parse_log, printed_flops_per_token
from moewright.diagnosis.traces.megatron_timers import Timer, diagnose_timers
from moewright.spec.finding import Cause, Wall
from moewright.spec.units import GIB, MIB

HEAD = """using world size: 256, data-parallel size: 4, tensor-model-parallel size: 2
------------------------ arguments ------------------------
  accumulate_allreduce_grads_in_fp32 .............. True
  add_bias_linear ................................. False
  data_path ....................................... ['/data/a', '/data/b']
  expert_model_parallel_size ...................... 8
  global_batch_size ............................... 2048
  recompute_modules ............................... ['moe_act', 'layernorm']
-------------------- end of arguments ---------------------
"""
LINE = (
    " [2026-03-01 12:00:{n:02d}] iteration {n:8d}/     500 | consumed samples: {samples:12d} | "
    "elapsed time per iteration (ms): {ms:.1f} | throughput per GPU (TFLOP/s/GPU): {tflops:.1f} | "
    "learning rate: 1.000000E-04 | global batch size:  2048 | lm loss: 9.876543E+00 | "
    "load_balancing_loss: 1.012345E+00 | loss scale: 1.0 | "
    "grad norm: 3.210 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)
REPORT = (
    "[Rank {rank}] (after 1 iterations) memory (MB) | allocated: 30000.5 | "
    "max allocated: {allocated:.1f} | reserved: 70000.0 | max reserved: {reserved:.1f}"
)


def log(*, steps=30, ms=22420.0, tflops=216.4, tail=""):
    lines = [
        LINE.format(n=n, samples=2048 * n, ms=ms * (3 if n == 1 else 1), tflops=tflops)
        for n in range(1, steps + 1)
    ]
    return "\n".join((HEAD, *lines, tail))


def test_steps_arguments_and_rates_are_read():
    parsed = parse_log(log())
    assert len(parsed.iterations) == 30
    assert parsed.step_s == pytest.approx(22.42)
    assert parsed.tflops_per_device == pytest.approx(216.4)
    assert parsed.iterations[0].loss == pytest.approx(9.876543)
    assert parsed.iterations[-1].global_batch == 2048
    assert parsed.find_argument("expert_model_parallel_size") == "8"
    assert parsed.find_argument("recompute_modules") == "['moe_act', 'layernorm']"
    assert printed_flops_per_token(parsed, seq_len=4096, devices=256) == pytest.approx(
        148.05e9, rel=1e-3
    )


def test_lines_of_launchers_carriage_returns_and_broken_ends_do_no_harm():
    text = (
        log(steps=3).replace("] iteration", "][default7]: iteration").replace("\n", "\r\n")
        + "\n iteration  4/ 500 | elap"
    )
    parsed = parse_log(text)
    assert [iteration.number for iteration in parsed.iterations] == [1, 2, 3, 4]
    assert parsed.iterations[-1].step_s == 0
    assert math.isnan(parsed.iterations[-1].loss)
    assert parsed.step_s == pytest.approx(22.42)


def test_a_restart_does_its_steps_over_and_forgets_those_behind():
    parsed = parse_log(log(steps=4) + "\n" + log(steps=2, ms=11210.0))
    steps_s = [iteration.step_s for iteration in parsed.iterations]
    assert steps_s == pytest.approx([33.63, 11.21])


def test_memory_reports_of_megatron_and_of_bridge():
    bridge = (
        "[Rank 2] (after 2 iterations) memory (GB) | mem-allocated-gigabytes: 61.881 | "
        "mem-reserved-gigabytes: 182.24 | mem-max-allocated-gigabytes: 153.47 | "
        "mem-max-reserved-gigabytes: 182.24 | mem-alloc-retires: 0"
    )
    megatron = REPORT.format(rank=0, allocated=60000.0, reserved=70000.0)
    of_megatron, of_bridge = parse_log(log(tail=f"{megatron}\n{bridge}")).memory_reports
    assert of_megatron.max_allocated_bytes == 60000 * MIB
    assert of_megatron.max_reserved_bytes == 70000 * MIB
    assert of_bridge.rank == 2
    assert of_bridge.max_allocated_bytes == 153_470_000_000
    assert of_bridge.max_reserved_bytes == 182_240_000_000


@pytest.mark.parametrize(
    "line",
    [
        "OutOfMemoryError: HIP out of memory. Tried to allocate 2.50 GiB. "
        "GPU 0 has a total capacity of 79.11 GiB",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. "
        "GPU 3 has a total capacity of 79.11 GiB of which 1.2 GiB is free.",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB "
        "(GPU 0; 79.11 GiB total capacity; 70.12 GiB already allocated; 1.2 GiB free)",
    ],
)
def test_failed_allocations_are_a_memory_wall(line):
    parsed = parse_log(log(steps=2, tail=line))
    (failure,) = parsed.failures
    assert failure.requested_bytes == round(2.5 * GIB)
    assert failure.capacity_bytes == round(79.11 * GIB)
    first = diagnose_log(parsed, None)[0]
    assert (first.wall, first.cause) == (Wall.MEMORY, Cause.CAPACITY)
    assert "expandable_segments" in first.fixes[0].megatron


def test_what_the_allocator_holds_and_does_not_give_out_is_fragmentation():
    tail = "\n".join(
        REPORT.format(rank=rank, allocated=60000.0, reserved=78000.0) for rank in range(2)
    )
    failure = "CUDA out of memory. Tried to allocate 512.00 MiB."
    capacity = "GPU 0 has a total capacity of 79.11 GiB"
    text = log(tail=f"{tail}\n{failure} {capacity}")
    assert diagnose_log(parse_log(text), None)[0].cause is Cause.FRAGMENTATION


@pytest.mark.thorough
def test_the_command_explains_120_where_others_report_277(tmp_path, capsys):
    path = tmp_path / "run.log"
    path.write_text(log(ms=40000.0, tflops=121.3))
    job = ["--model", "Qwen3-235B-A22B", "--on", "256xH800", "--global-batch", "2048"]
    layout = "tp2,ep8,pp32,vpp3,mbs1,recompute=select,layout='E|(t|)*94L'"
    assert main(["diagnose", str(path), *job, "--layout", layout, "-v"]) == 0
    out = capsys.readouterr().out
    assert "121 TFLOP/s a device measured" in out
    assert "pipeline bubble" in out
    assert "unexplained" in out
    assert main(["diagnose", str(path)]) == 0
    assert "--model" in capsys.readouterr().out


TIMERS = """(min, max) time across ranks (ms):
    forward-backward ...............................: (22100.00, 22150.00)
    forward-compute ................................: (6900.00, 7100.00)
    backward-compute ...............................: (9000.00, 9300.00)
    batch-generator ................................: ({load:.2f}, {load:.2f})
{messages}    all-grads-sync .................................: (150.00, {sync:.2f})
    params-all-gather ..............................: (80.00, 80.00)
    optimizer ......................................: (200.00, 210.00)
"""
MESSAGES = "    forward-recv ...................................: (100.00, 900.00)\n"


def text_with_timers(*, load=20.0, sync=150.0, messages=MESSAGES):
    block = TIMERS.format(load=load, sync=sync, messages=messages)
    warm = block.replace("(22100.00, 22150.00)", "(90000.00, 90000.00)")
    lines = [LINE.format(n=n, samples=n, ms=22420.0, tflops=216.4) for n in range(1, 4)]
    return "\n".join((lines[0], warm + lines[1], block + lines[2], block))


def timers(**changed):
    return parse_log(text_with_timers(**changed))


def test_timers_tell_measured_walls():
    parsed = timers()
    # The first iteration's is left out.
    assert parsed.timers["forward-backward"].max_s == pytest.approx(22.15)
    assert parsed.timers["forward-compute"].min_s == pytest.approx(6.9)
    first = diagnose_log(parsed, None)[0]
    assert (first.wall, first.cause) == (Wall.COMMUNICATION, Cause.PP)
    assert first.share == pytest.approx((22.15 - 7.1 - 9.3 - 0.15) / 22.42)
    assert any("6.9 s to 7.1 s over the ranks" in line for line in first.evidence)


@pytest.mark.parametrize(
    ("changed", "wall", "cause", "share"),
    [
        ({"load": 4000.0}, Wall.HOST, Cause.DATA, 4.0 / 22.42),
        # Who came last waits 150 ms for the sum; the others wait for it.
        ({"sync": 5150.0, "messages": ""}, Wall.COMMUNICATION, Cause.STRAGGLER, 5.0 / 22.42),
        ({"messages": ""}, Wall.HOST, Cause.HOST_OTHER, (22.15 - 7.1 - 9.3 - 0.15) / 22.42),
    ],
)
def test_each_timer_has_its_cause(changed, wall, cause, share):
    findings = {finding.cause: finding for finding in diagnose_log(timers(**changed), None)}
    assert findings[cause].wall is wall
    assert findings[cause].share == pytest.approx(share)


def test_timers_that_add_up_to_more_than_a_step_share_their_sum():
    """As NCCL's issue 743 shows them: an iteration of 140.6 ms, around steps that were skipped."""
    seconds = {
        "forward-compute": 0.05816,
        "backward-compute": 0.04266,
        "backward-params-all-reduce": 0.02143,
        "optimizer": 0.0575,
    }
    timed = {name: Timer(min_s=value, max_s=value) for name, value in seconds.items()}
    shares = [finding.share for finding in diagnose_timers(timed, 0.1406)]
    assert shares == pytest.approx([0.02143 / 0.17975, 0.15832 / 0.17975])


def test_timers_of_one_line_and_of_every_rank():
    one_line = (
        "time (ms) | forward-compute: 53.79 | forward-recv: 38.38 | backward-compute: 138.84 "
        "| backward-send-forward-recv: 2.60 | backward-params-all-reduce: 10.17 | optimizer: 49.42"
    )
    text = f"{LINE.format(n=1, samples=1, ms=430.0, tflops=0.0)}\n{one_line}"
    shares = {finding.cause: finding.share for finding in diagnose_log(parse_log(text), None)}
    assert shares[Cause.PP] == pytest.approx((38.38 + 2.60) / 430)
    assert shares[Cause.DP] == pytest.approx(10.17 / 430)
    ranks = (
        "times across ranks (ms):\n  forward-backward:\n"
        "     rank  0: 9000.00\n     rank  1: 9001.00\nsaving"
    )
    timer = parse_log(ranks).timers["forward-backward"]
    assert (timer.min_s, timer.max_s) == pytest.approx((9.0, 9.001))


@pytest.mark.parametrize(
    ("line", "step_s", "tflops", "batch"),
    [
        (
            "[20251202 09:12:08][rank-7/8][INFO ] [-trainer.py:2560] : iteration 126/ 5000 | "
            "consumed samples: 16128 | elapsed time per iteration (ms): 13372.8/13364.7 | "
            "hip mem usage/free/total/usage_ratio: 153.81GB/102.17GB/255.98GB/60.09% | "
            "throughput per GPU (TFLOP/s/GPU): 567.6/568.0 | "
            "tokens per GPU (tokens/s/GPU): 9801.4/9807.3 | global batch size: 128 | "
            "lm loss: 6.548988E-03 |",
            13.3728,
            567.6,
            128,
        ),
        (
            "[2024-06-21 10:50:42][INFO][training:1609] - iteration=    1/  317892 | "
            "consumed_samples=         768 | elapsed_time_per_iteration_ms=108893.2 | "
            "global_batch_size=  768 | lm loss=11.133188 |",
            108.8932,
            0.0,
            768,
        ),
        (
            " iteration  11/50000 | consumed samples: 5632 | consumed tokens:  11534336 | "
            "elapsed time per iteration (ms):  52728.1 | learning rate:    1.499E-05 | "
            "gloabl batch size:  512 | lm loss:  1.376514E+01 | "  # codespell:ignore
            "actual seqlen:  2048 | "
            "samples per second: 9.710 | TFLOPs: 167.52 |",
            52.7281,
            167.52,
            512,
        ),
    ],
)
def test_relatives_of_megatron_are_read(line, step_s, tflops, batch):
    (iteration,) = parse_log(line).iterations
    assert iteration.step_s == pytest.approx(step_s)
    assert iteration.tflops_per_device == pytest.approx(tflops)
    assert iteration.global_batch == batch


@pytest.mark.thorough
def test_what_was_timed_replaces_what_was_predicted(tmp_path, capsys):
    path = tmp_path / "run.log"
    path.write_text(text_with_timers())
    job = ["--model", "Qwen3-235B-A22B", "--on", "256xH800", "--global-batch", "2048"]
    layout = "tp2,ep8,pp32,vpp3,mbs1,recompute=select,layout='E|(t|)*94L'"
    assert main(["diagnose", str(path), *job, "--layout", layout, "-v"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "+" in line]
    bubble, late = (
        next(line for line in lines if name in line) for name in ("pipeline bubble", "exposed DP")
    )
    assert "5.6 s" in bubble
    assert "230 ms" in late
    assert "measured" in bubble
    assert "measured" in late
    assert not any("exposed PP" in line for line in lines)  # in the bubble
    assert "predicted" in next(line for line in lines if "exposed EP" in line)


def test_a_file_that_is_no_log_is_refused(tmp_path, capsys):
    (tmp_path / "x.log").write_text("nothing here\n")
    assert main(["diagnose", str(tmp_path / "x.log")]) == 2
    assert "Megatron-LM" in capsys.readouterr().err


def test_a_launch_script_tells_the_job_of_its_log(tmp_path, capsys):
    plan = tmp_path / "plan.json"
    script = tmp_path / "run.sh"
    path = tmp_path / "run.log"
    job = ["Qwen3-235B-A22B", "--on", "256xH800", "--global-batch", "2048"]
    layout = "tp2,ep8,pp32,vpp3,mbs1,recompute=select,layout='E|(t|)*94L'"
    assert main(["estimate", *job, "--layout", layout, "--json", str(plan)]) == 0
    capsys.readouterr()
    assert main(["export", str(plan), "--to", "megatron"]) == 0
    script.write_text(capsys.readouterr().out)
    path.write_text(log(ms=24000.0, tflops=202.1))
    told = ["--script", str(script), "--on", "256xH800"]
    assert main(["diagnose", str(path), *told, "-v"]) == 0
    out = capsys.readouterr().out
    assert "from ideal to measured" in out
    assert "WALL: " in out
    two_jobs = ["--script", str(script), "--on", "256xH800", "--layout", "tp2"]
    assert main(["diagnose", str(path), *two_jobs]) == 2


DUMP = {
    "world_size": 8,
    "num_layers": 16,
    "hidden_size": 2048,
    "ffn_hidden_size": 1024,
    "num_attention_heads": 16,
    "kv_channels": 128,
    "max_position_embeddings": 4096,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "padded_vocab_size": 50304,
    "num_experts": 64,
    "moe_ffn_hidden_size": 1024,
    "moe_router_topk": 8,
    "seq_length": 4096,
    "micro_batch_size": 1,
    "global_batch_size": 128,
    "bf16": True,
    "tensor_model_parallel_size": 1,
    "sequence_parallel": False,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 8,
    "expert_tensor_parallel_size": 1,
    "moe_token_dispatcher_type": "alltoall",
    "use_distributed_optimizer": True,
    "recompute_modules": ["core_attn"],
    "recompute_granularity": None,
    "data_parallel_size": 8,
    "virtual_pipeline_model_parallel_size": None,
}


def test_the_arguments_that_a_log_prints_tell_its_job(tmp_path, capsys):
    path = tmp_path / "run.log"
    dump = "\n".join(f"  {name} {'.' * (48 - len(name))} {value}" for name, value in DUMP.items())
    text = log(ms=2000.0, tflops=150.0).replace(
        HEAD, f"---- arguments ----\n{dump}\n---- end of arguments ----\n"
    )
    path.write_text(text)
    assert main(["diagnose", str(path), "--on", "8xH100", "-v"]) == 0
    out = capsys.readouterr().out
    assert "from ideal to measured" in out
    assert "predicted: " in out
    names = [line.split(maxsplit=1)[0] for line in out.splitlines() if line.strip()]
    assert {"verdict", "speed"} <= set(names)


@pytest.mark.thorough
def test_the_shares_of_a_slow_run_are_of_its_measured_step(tmp_path, capsys):
    path = tmp_path / "run.log"
    path.write_text(log(ms=80000.0, tflops=60.6))
    job = ["--model", "Qwen3-235B-A22B", "--on", "256xH800", "--global-batch", "2048"]
    layout = "tp2,ep8,pp32,vpp3,mbs1,recompute=select,layout='E|(t|)*94L'"
    answer = tmp_path / "answer.json"
    command = ["diagnose", str(path), *job, "--layout", layout, "--json", str(answer)]
    assert main(command) == 0
    told = json.loads(answer.read_text())
    predicted_s = told["job"]["estimate"]["step_s"]
    shares = sum(finding["share"] for finding in told["findings"])
    assert shares < 1.1 * predicted_s / 80
    assert told["headline"].startswith(f"{80 / predicted_s:.1f} x slower than the plan")
    out = capsys.readouterr().out
    assert "--use-pytorch-profiler" in out
    assert "WALL" not in out  # nothing that is predicted explains it
    judged = told["judgement"]
    for part in ("fit", "speed", "measured"):
        assert " ".join(judged[part].split()) in " ".join(out.split())
    assert judged["nearest_run"]["error"] is not None
    # A run as fast as its plan has nothing that is not explained.
    path.write_text(log(ms=1000 * predicted_s, tflops=60.6))
    assert main(command) == 0
    assert json.loads(answer.read_text())["headline"] == ""


def test_a_script_that_makes_no_job_still_gets_what_the_log_holds(tmp_path, capsys):
    path = tmp_path / "run.log"
    script = tmp_path / "run.sh"
    path.write_text(text_with_timers())
    script.write_text("torchrun pretrain_gpt.py --num-layers 4 --micro-batch-size 1\n")
    assert main(["diagnose", str(path), "--script", str(script), "--on", "8xH100"]) == 0
    out = capsys.readouterr().out
    assert "makes no job that can be planned" in out
    assert "WALL: communication (pipeline)" in out
    missing = ["--script", str(tmp_path / "none.sh"), "--on", "8xH100"]
    assert main(["diagnose", str(path), *missing]) == 2


def test_timers_without_lines_of_iterations_make_a_step(tmp_path, capsys):
    line = (
        "time (ms) | forward-compute: 604.56 | backward-compute: 701.16 | "
        "backward-params-all-reduce: 2672.65 | optimizer-unscale-and-check-inf: 835.71 | "
        "optimizer: 857.27"
    )
    path = tmp_path / "run.log"
    path.write_text("\n".join([line] * 4))
    parsed = parse_log(path.read_text())
    assert parsed.step_s == pytest.approx(0.60456 + 0.70116 + 2.67265 + 0.85727)
    first = diagnose_log(parsed, None)[0]
    assert first.cause is Cause.DP
    assert first.share == pytest.approx(2.67265 / parsed.step_s)
    assert main(["diagnose", str(path)]) == 0
    assert "no iteration has a line" in capsys.readouterr().out


def test_steps_that_grow_are_told_with_the_timer_that_grows():
    block = (
        "time (ms) | forward-compute: {f:.2f} | backward-compute: 701.16 | "
        "backward-params-all-reduce: 2672.65 | optimizer: 257.27"
    )
    growing = parse_log("\n".join(block.format(f=600 + 400 * n) for n in range(12)))
    (finding,) = (f for f in diagnose_log(growing, None) if f.cause is Cause.GROWING)
    assert "forward-compute grows most, from 600 ms to 5 s" in finding.evidence[1]
    steady = parse_log("\n".join(block.format(f=600) for _ in range(12)))
    assert not any(f.cause is Cause.GROWING for f in diagnose_log(steady, None))
    # A batch that is ramped up is no fault.
    lines = [LINE.format(n=n, samples=n, ms=1000.0 * n, tflops=200.0) for n in range(1, 13)]
    ramped = "\n".join(
        line.replace("size:  2048", f"size:  {256 * (n + 1)}") for n, line in enumerate(lines)
    )
    assert not any(f.cause is Cause.GROWING for f in diagnose_log(parse_log(ramped), None))
    assert any(f.cause is Cause.GROWING for f in diagnose_log(parse_log("\n".join(lines)), None))


@pytest.mark.thorough
def test_flops_of_another_sequence_length_are_noticed(tmp_path, capsys):
    path = tmp_path / "run.log"
    job = ["--model", "Qwen3-235B-A22B", "--on", "256xH800", "--global-batch", "2048"]
    layout = "tp2,ep8,pp32,vpp3,mbs1,recompute=select,layout='E|(t|)*94L'"
    command = ["diagnose", str(path), *job, "--layout", layout]
    path.write_text(log(ms=22420.0, tflops=216.4))  # of sequences of 4,096, as planned
    assert main(command) == 0
    assert "the trainer counts 1" not in capsys.readouterr().out
    path.write_text(log(ms=22420.0, tflops=432.8))
    assert main(command) == 0
    assert "as if sequences were 8,192 tokens long, not 4,096" in capsys.readouterr().out


def test_reports_of_several_ranks_on_a_line_are_all_read():
    ranks = "".join(
        REPORT.format(rank=rank, allocated=50000.0 + rank, reserved=60000.0 + rank)
        for rank in range(3)
    )
    reports = parse_log(ranks).memory_reports
    assert [report.rank for report in reports] == [0, 1, 2]
    assert [report.max_allocated_bytes for report in reports] == [
        (50000 + rank) * MIB for rank in range(3)
    ]


def test_a_rate_and_the_hardware_give_mfu_and_what_to_switch_on(tmp_path, capsys):
    path = tmp_path / "run.log"
    path.write_text(log(steps=12).replace(HEAD, ""))
    assert main(["diagnose", str(path), "--on", "H800"]) == 0
    out = capsys.readouterr().out
    assert f"MFU {216.4 / 989.4:.1%}" in out
    assert "--timing-log-level 2" in out


@pytest.mark.parametrize(
    "number", ["1.2.3", "nan", "inf", "-inf", "1e999", "--", "12.", "1,2,3", "٣"]
)
@pytest.mark.parametrize(
    "line",
    [
        " iteration 7/ 500 | global batch size: {} | elapsed time per iteration (ms): 12.0 |",
        " iteration 7/ 500 | elapsed time per iteration (ms): {} | lm loss: 2.0 |",
        " iteration 7/ 500 | number of skipped iterations: {} | number of nan iterations: {} |",
        " iteration 7/ 500 | {} TFLOP/s/GPU | TFLOPs: {} |",
        "Step Time : {}s GPU utilization: {}MODEL_TFLOP/s/GPU",
        "[Rank 0] (after 2 iterations) memory (MB) | allocated: {} | max reserved: {}",
        "CUDA out of memory. Tried to allocate {} GiB (GPU 0; {} GiB total capacity)",
        " (min, max) time across ranks (ms):\n    forward-backward ...: ({}, {})",
    ],
)
def test_no_text_in_the_place_of_a_number_is_a_traceback(line, number):
    parsed = parse_log(f"{HEAD}\n{line.replace('{}', number)}")
    assert all(math.isfinite(iteration.step_s) for iteration in parsed.iterations)


def test_a_version_is_no_number():
    (iteration,) = parse_log(" iteration 1/ 5 | torch: 2.11.0 | lm loss: 1.2.3 |").iterations
    assert math.isnan(iteration.loss)


def test_the_line_that_bridge_prints_before_an_iteration_is_read():
    line = "0: Step Time : 5.39s GPU utilization: 2347.0MODEL_TFLOP/s/GPU"
    only = parse_log(f"{line}\n{line.replace('5.39', '5.41')}")
    assert [iteration.step_s for iteration in only.iterations] == [5.39, 5.41]
    assert only.tflops_per_device == 2347.0
    beside = parse_log(
        f"{line}\n iteration 9/ 50 | elapsed time per iteration (ms): 5388.0 | lm loss: 2.0 |"
    )
    (iteration,) = beside.iterations
    assert (iteration.number, iteration.step_s) == (9, 5.388)
    assert iteration.tflops_per_device == 2347.0
    assert "--log-throughput" not in suggest_switches(beside)


def test_a_log_is_taken_at_its_word(tmp_path, capsys):
    path = tmp_path / "run.log"
    path.write_text(log())
    job = ["diagnose", str(path), "--model", "Qwen3-235B-A22B", "--on", "256xH800"]
    layout = ["--layout", "tp2,ep8,pp32,vpp3,mbs1,recompute=select,layout='E|(t|)*94L'"]
    assert main([*job, *layout, "--json", str(tmp_path / "said.json")]) == 0
    assert (
        json.loads((tmp_path / "said.json").read_text())["job"]["workload"]["global_batch"] == 2048
    )
    assert main([*job, *layout, "--global-batch", "256"]) == 2
    assert "the log's global_batch_size is 2048, the job given beside it says 256" in (
        capsys.readouterr().err
    )
    assert main([*job, "--layout", "tp2,ep4,pp32,vpp3,mbs1,layout='E|(t|)*94L'"]) == 2
    assert "layout.ep=4: the log's expert_model_parallel_size is 8" in capsys.readouterr().err


def test_a_step_that_no_device_could_take_is_refused(tmp_path, capsys):
    """The log says nothing of its batch: the default is of more sequences than were computed."""
    path = tmp_path / "run.log"
    line = " iteration {}/ 9 | elapsed time per iteration (ms): 1420.0 | lm loss: 2.1 |\n"
    path.write_text("".join(line.format(n) for n in range(1, 6)))
    job = ["diagnose", str(path), "--model", "Qwen3-30B-A3B", "--on", "64xH100"]
    layout = ["--layout", "ep8,mbs1"]
    assert main([*job, *layout]) == 2
    (refusal,) = capsys.readouterr().err.splitlines()
    assert "--global-batch=1024: the log's step of 1.42 s would be an MFU of" in refusal
    most = int(re.search(r"at most (\d+)", refusal)[1])
    assert main([*job, *layout, "--global-batch", f"{most // 64 * 64}"]) == 0
    stated = line.replace("| lm loss", "| global batch size: 4096 | lm loss")
    path.write_text("".join(stated.format(n) for n in range(1, 6)))
    assert main([*job, *layout, "--global-batch", "4096"]) == 2
    assert re.search(r"--on=64: .*: \d+ devices or more", capsys.readouterr().err)
    path.write_text("".join(stated.replace("4096", "1536").format(n) for n in range(1, 6)))
    assert main([*job, *layout, "--global-batch", "1536"]) == 2  # in fewer bits they could
    assert re.search(r"--precision=bf16: .* in bf16; .*: (mx)?fp8", capsys.readouterr().err)


def test_seconds_of_older_trainers_are_seconds():
    line = " iteration 3/ 9 | elapsed time per iteration (s): 5.17 | TFLOPs: 41.3 | lm loss: 2.1 |"
    (iteration,) = parse_log(line).iterations
    assert (iteration.step_s, iteration.tflops_per_device) == (5.17, 41.3)
