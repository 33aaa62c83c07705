"""Causes in traces that were made with them: copies, queued work, gaps of the host, exchanges."""

import json
from dataclasses import replace

import pytest
from sample_traces import MS, events, kineto

from moewright.api.planning import estimate
from moewright.diagnosis.priced_fixes import ALREADY_ON, FixContext, Trainer, find_fixes
from moewright.diagnosis.traces.breakdown import break_down_step
from moewright.diagnosis.traces.capture import KernelKind, TrainerMark, kernel_kind
from moewright.diagnosis.traces.comm_classes import CommClass, classify_channels
from moewright.diagnosis.traces.gaps import IdleCause
from moewright.diagnosis.traces.kineto import read_traces
from moewright.diagnosis.traces.rank_skew import measure_rank_skew
from moewright.diagnosis.traces.trace_findings import diagnose_traces
from moewright.diagnosis.traces.trace_waterfall import find_peak_rate
from moewright.search.search import build_plan
from moewright.spec.finding import Cause, Finding, Wall
from moewright.spec.layout import Layout, Overlap


def work(name, start, length, *, cat="kernel", stream=7, launched=None, **args):
    """Make a device activity, and the call that launched it; milliseconds."""
    key = round(start * 1000) + 7 * stream
    common = {"ph": "X", "pid": 0, "tid": stream, "ts": start * MS, "dur": length * MS}
    made = {"stream": stream, "device": 0, "correlation": key, **args}
    yield {**common, "cat": cat, "name": name, "args": made}
    if launched is not None:
        call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": 9}
        yield {**call, "ts": launched * MS, "dur": 5, "args": {"correlation": key}}


def host(name, start, length, *, cat="cpu_op", tid=9):
    common = {"ph": "X", "cat": cat, "name": name, "pid": 9, "tid": tid}
    return {**common, "ts": start * MS, "dur": length * MS}


def capture_of(path, *groups):
    path.write_text(json.dumps({"traceEvents": [event for group in groups for event in group]}))
    (capture,) = read_traces(path)
    return capture


def findings_of(path, *groups):
    parts = (break_down_step(capture_of(path, *groups)),)
    return diagnose_traces(parts, None, None, find_peak_rate(parts, None))


def test_copies_that_hold_up_a_step_are_its_wall(tmp_path):
    copy = "Memcpy DtoH (Device -> Pageable)"
    first = findings_of(
        tmp_path / "t.json",
        work("sm90_xmma_gemm", 0, 1, launched=0),
        work(copy, 1, 97, cat="gpu_memcpy", launched=0.5, bytes=97 << 20),
        work("sm90_xmma_gemm", 98, 2, launched=0.6),
    )[0]
    assert (first.wall, first.cause) == (Wall.HOST, Cause.COPIES)
    assert first.share == pytest.approx(0.97)
    assert any("97 MiB at 1.0 GB/s" in line for line in first.evidence)
    assert "pinned" in first.fixes[0].text


def test_copies_inside_a_device_are_no_wall_of_the_host(tmp_path):
    findings = findings_of(
        tmp_path / "t.json",
        work("sm90_xmma_gemm", 0, 60),
        work("Memcpy DtoD (Device -> Device)", 60, 40, cat="gpu_memcpy"),
    )
    (copies,) = (finding for finding in findings if finding.cause is Cause.DEVICE_COPIES)
    assert copies.wall is Wall.COMPUTE
    assert not any("pinned" in fix.text for fix in copies.fixes)


def test_a_device_that_is_idle_with_work_queued_is_not_blamed_on_launches(tmp_path):
    findings = findings_of(
        tmp_path / "t.json",
        work("first_kernel", 0, 20, launched=0),
        work("second_kernel", 76, 24, launched=1),
    )
    assert findings[0].cause is Cause.QUEUED
    assert findings[0].share == pytest.approx(0.56)
    assert "idle for 56% of the step: work is queued" in findings[0].title
    assert any("0.020000 s on" in line and "second_kernel" in line for line in findings[0].evidence)


def test_a_launch_that_takes_long_itself_is_the_hosts(tmp_path):
    slow = [host("cudaLaunchKernel", 1, 75, cat="cuda_runtime")]
    slow[0]["args"] = {"correlation": 76000 + 49}
    findings = findings_of(
        tmp_path / "t.json",
        work("first_kernel", 0, 20, launched=0),
        slow,
        work("second_kernel", 76, 24),
    )
    assert findings[0].cause is Cause.HOST_OTHER
    assert any("filled by cudaLaunchKernel" in line for line in findings[0].evidence)


def test_of_a_synchronisation_only_the_overlap_counts(tmp_path):
    sync = host("cudaStreamSynchronize", 20.0, 0.014, cat="cuda_runtime")
    frames = [
        host("train.py(1): main", 0, 300, cat="python_function"),
        host("metrics.py(7): write_images", 21, 216, cat="python_function"),
        host("threading.py(300): wait", 0, 300, cat="python_function", tid=77),
    ]
    capture = capture_of(
        tmp_path / "t.json",
        work("first_kernel", 0, 20, launched=0),
        [sync, *frames],
        work("second_kernel", 238, 62, launched=237.9),
    )
    part = break_down_step(capture)
    idle = dict(part.idle_times)
    assert idle[IdleCause.SYNC] == pytest.approx(14e-6 + 50e-6, rel=0.01)  # and the refill after it
    assert idle[IdleCause.HOST] == pytest.approx(0.218 - 64e-6, rel=0.001)
    (gap,) = part.worst_gaps
    assert gap.filler == "metrics.py(7): write_images"
    assert gap.start_s == pytest.approx(0.020)


@pytest.mark.parametrize(
    "name",
    [
        "void dpsk::ep::internode::combine<false, 8, __nv_bfloat16, 8, 2, 16, 24, 8>(int4*)",
        "void dpsk::ep::internode::notify_dispatch<false, 8>(int const*, long*)",
        "void dpsk::ep::internode::cached_notify<false>(int, int, int, int, int*)",
        "void deep_ep::intranode::dispatch<8, 768>(int4*, float*)",
        "void hybrid_ep::dispatch_kernel<...>",
        "nvshmemi_transfer_rma_nbi_kernel",
        "void barrier_on_stream_kernel_threadgroup<...>",
        "void c10d::symmetric_memory::multimem_one_shot_all_reduce_kernel<...>",
        "oneShotAllReduceKernel",
        "all_to_all_vdev_kernel",
        "void deep_ep::internode_ll::dispatch<(bool)1, (bool)1, (int)6144>(void *, void *, int *)",
        "hybrid_ep::device_sync_kernel<8>",
        "ncclSymkDevKernel_ReduceScatter_RailA2A_LsaLD_sum_bf16",
        "void c10d::symmetric_memory::multimem_all_gather_kernel<16>(char*, char*, unsigned long)",
        "moeA2ADispatchKernel",
    ],
)
def test_kernels_that_send_are_communication(name):
    assert kernel_kind(name) is KernelKind.COMMUNICATION


@pytest.mark.parametrize(
    "name",
    [
        "moe::dev::routing::routingCombineKernel",
        "flash_fwd_splitkv_mla_combine_kernel",
        "void at::native::vectorized_gather_kernel<16, long>",
        "_unpermute_kernel",
    ],
)
def test_kernels_that_combine_or_gather_on_one_device_are_no_communication(name):
    assert kernel_kind(name) is not KernelKind.COMMUNICATION


def test_the_exchange_of_deepep_is_told_from_compute_under_any_namespace(tmp_path):
    capture = capture_of(
        tmp_path / "t.json",
        work("void dpsk::ep::internode::dispatch<false, 8>(int4*)", 0, 40, stream=20),
        work("sm90_xmma_gemm", 30, 70),
    )
    (time,) = break_down_step(capture).comm_times
    assert time.comm is CommClass.EP
    assert (time.busy_s, time.exposed_s) == pytest.approx((0.040, 0.030))
    assert TrainerMark.DEEPEP in capture.trainer_marks


def test_a_collective_without_metadata_belongs_to_its_stream(tmp_path):
    described = {
        "Collective name": "allreduce",
        "Process Group Description": "TENSOR_MODEL_PARALLEL_GROUP",
    }
    capture = capture_of(
        tmp_path / "t.json",
        work("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 0, 2, stream=20, **described),
        work("ncclDevKernel_AllGather_RING_LL", 2, 40, stream=20),
        work("ncclDevKernel_AllGather_RING_LL", 50, 40, stream=24),
    )
    classes = dict(
        zip(
            ((channel.stream, channel.op) for channel in capture.channels),
            classify_channels(capture, None),
            strict=True,
        )
    )
    assert {comm.comm for (stream, _), comm in classes.items() if stream == "20"} == {CommClass.TP}
    (other,) = (comm for (stream, _), comm in classes.items() if stream == "24")
    assert "guessed" in other.evidence


def test_ddp_means_data_parallelism(tmp_path):
    reductions = [
        event
        for start in range(40)
        for event in work("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", start, 0.9, stream=20)
    ]
    alone = capture_of(tmp_path / "a.json", reductions)
    wrapped = capture_of(
        tmp_path / "b.json", reductions, [host("DistributedDataParallel.forward", 0, 40)]
    )
    assert classify_channels(alone, None)[0].comm is CommClass.TP  # many calls, of unknown size
    assert classify_channels(wrapped, None)[0].comm is CommClass.DP


def test_without_evidence_of_experts_an_exchange_is_no_dispatch(tmp_path):
    exchange = {"Collective name": "all_to_allv", "dtype": "Float", "In msg nelems": 1000}
    names = ("permute_021_kernel", "grouped_convolution")
    plain = findings_of(
        tmp_path / "a.json",
        *(work(name, 0, 1) for name in names),
        work("ncclDevKernel_SendRecv", 1, 60, stream=20, **exchange),
    )
    assert plain[0].cause is Cause.COLLECTIVES
    assert "all-to-all communication is exposed" in plain[0].title
    assert not any("expert" in fix.text for finding in plain for fix in finding.fixes)
    experts = findings_of(
        tmp_path / "b.json",
        work("_unpermute_kernel", 0, 1),
        work("ncclDevKernel_SendRecv", 1, 60, stream=20, **exchange),
    )
    assert experts[0].cause is Cause.EP
    assert not any(fix.megatron for fix in experts[0].fixes)  # nothing shows Megatron


def finding(cause, wall=Wall.COMMUNICATION):
    return Finding(wall=wall, cause=cause, title="", share=0.5, evidence=(), fixes=())


@pytest.fixture(scope="module")
def job():
    return estimate("Qwen3-30B-A3B", "tp2,ep8,mbs1", on="16xH100", global_batch=512)


def test_fixes_that_are_predicted_to_hurt_or_to_do_nothing_are_not_shown(job):
    for cause in Cause:
        fixes = find_fixes(finding(cause), FixContext(job=job, trainer=Trainer.MEGATRON))
        priced = [fix for fix in fixes if fix.price is not None]
        gains = [fix.price.step_share for fix in priced if not fix.excluded]
        assert all(fix.price.step_share <= -0.005 for fix in priced), cause
        assert gains == sorted(gains), cause  # those that cannot be, as for their memory, come last


def test_what_is_on_says_so_and_comes_last(job):
    layout = replace(job.layout, overlap=(Overlap.GRAD, Overlap.PARAM))
    on = build_plan(job.model, job.workload, job.hardware, layout)
    fixes = find_fixes(finding(Cause.DP), FixContext(job=on, trainer=Trainer.MEGATRON))
    assert fixes[-1].excluded == ALREADY_ON
    assert "overlap the reduction" in fixes[-1].text
    options = frozenset(("--manual-gc", "--manual-gc-interval"))
    context = FixContext(trainer=Trainer.MEGATRON, options=options)
    (gc,) = find_fixes(finding(Cause.GARBAGE_COLLECTION), context)
    assert gc.excluded == ALREADY_ON


def test_of_several_flags_only_the_missing_are_named():
    context = FixContext(
        trainer=Trainer.MEGATRON, options=frozenset(("--moe-permute-fusion",)), has_moe=True
    )
    fixes = find_fixes(finding(Cause.KERNEL_RATES, Wall.COMPUTE), context)
    (fusion,) = (fix for fix in fixes if "experts: permute" in fix.text)
    assert (fusion.megatron, fusion.excluded) == ("--moe-router-fusion", "")


def test_each_trainer_reads_its_own_settings(job):
    own = find_fixes(finding(Cause.GARBAGE_COLLECTION), FixContext(job=job, trainer=Trainer.OURS))
    assert [(fix.setting, fix.megatron) for fix in own] == [("train.gc_every_steps", "")]
    unknown = find_fixes(finding(Cause.FRAGMENTATION, Wall.MEMORY), FixContext())
    assert unknown[0].setting.startswith("PYTORCH_CUDA_ALLOC_CONF")
    assert not any(fix.megatron for fix in unknown)


def test_graphs_that_a_trace_shows_are_on(tmp_path):
    launch = host("cudaGraphLaunch", 0, 1, cat="cuda_runtime")
    parts = (break_down_step(read_traces(kineto(tmp_path / "t.json", extra=(launch,)))[0]),)
    findings = diagnose_traces(parts, None, None, find_peak_rate(parts, None))
    fixes = [fix for found in findings for fix in found.fixes if "graphs" in fix.text]
    assert {fix.excluded for fix in fixes} == {ALREADY_ON}


def test_a_layout_of_one_expert_rank_has_no_dispatcher_on(job):
    layout = Layout(world_size=16)
    plan = build_plan(job.model, job.workload, job.hardware, layout)
    fixes = find_fixes(finding(Cause.EP), FixContext(job=plan, trainer=Trainer.MEGATRON))
    assert not any("dispatcher" in fix.text for fix in fixes)


def test_events_of_the_sample_hold_no_cause_that_was_not_made(tmp_path):
    (tmp_path / "t.json").write_text(json.dumps(events()))
    part = break_down_step(read_traces(tmp_path / "t.json")[0])
    assert not part.copy_times
    assert {gap.cause for gap in part.worst_gaps} <= {IdleCause.HOST, IdleCause.SYNC}


@pytest.mark.parametrize(
    ("name", "tflops"),
    [("Tesla V100-SXM2-32GB", 125), ("NVIDIA A100-PG509-200", 312), ("AMD Instinct MI300X", 1307)],
)
def test_peaks_of_devices_by_their_drivers_names(name, tflops, tmp_path):
    path = kineto(tmp_path / "t.json")
    path.write_text(path.read_text().replace("NVIDIA H100 80GB HBM3", name))
    peak = find_peak_rate((break_down_step(read_traces(path)[0]),), None)
    assert peak.flops == pytest.approx(tflops * 1e12, rel=0.01)


def sends(*ends, late=0.0, clock=0.0):
    """Make all-reduces without any metadata that end at these milliseconds, begun `late` later."""
    for end in ends:
        start = end - 5 + late
        yield from work("ncclKernel_AllReduce", start + clock, end - start, stream=20)
    yield from work("sm90_xmma_gemm", clock, 3)


def test_ranks_that_wait_are_told_without_process_groups(tmp_path):
    ends = (10, 21, 33, 46, 60, 75)
    late = {0: 0.0, 1: 4.0, 2: 0.0}
    for rank, lateness in late.items():
        made = sends(*ends, late=lateness, clock=1000.0 * rank)  # hosts have clocks of their own
        (tmp_path / f"rank{rank}.json").write_text(json.dumps({"traceEvents": list(made)}))
    # A rank of another job has as many calls, which end at other times.
    made = sends(*(end * 1.3 for end in ends))
    (tmp_path / "rank3.json").write_text(json.dumps({"traceEvents": list(made)}))
    captures = read_traces(tmp_path)
    parts = tuple(break_down_step(capture) for capture in captures)
    (waiting,) = measure_rank_skew(captures, parts).waiting
    assert waiting.seconds == pytest.approx(6 * 2 * 0.004 / 4)


def test_sends_of_unknown_callers_are_no_pipeline(tmp_path):
    send = list(work("ncclKernel_SendRecv_RING_SIMPLE", 0, 60, stream=20))
    unknown = findings_of(tmp_path / "a.json", send)
    assert unknown[0].cause is Cause.COLLECTIVES
    exchange = findings_of(tmp_path / "b.json", send, [host("nccl:all_to_all", 0, 1)])
    assert "all-to-all" in exchange[0].title
    pipeline = findings_of(tmp_path / "c.json", send, [host("nccl:send 0->1", 0, 1)])
    assert pipeline[0].cause is Cause.PP


def test_host_work_is_not_given_the_fixes_of_launches(tmp_path):
    findings = findings_of(
        tmp_path / "t.json",
        work("first_kernel", 0, 20, launched=0),
        [host("train.py(9): save_checkpoint", 20, 70, cat="python_function")],
        work("second_kernel", 90, 10, launched=89),
    )
    assert findings[0].cause is Cause.HOST_OTHER
    assert any("filled by train.py(9): save_checkpoint" in line for line in findings[0].evidence)
    assert "fills the longest gaps" in findings[0].fixes[0].text
    assert not any("graphs" in fix.text or "tp" in fix.text for fix in findings[0].fixes)


def test_times_of_gaps_count_from_where_a_viewer_begins(tmp_path):
    findings = findings_of(
        tmp_path / "t.json",
        [host("model_init", 100, 50)],
        work("first_kernel", 200, 20, launched=199),
        work("second_kernel", 280, 20, launched=201),
    )
    assert any("0.120000 s on" in line for line in findings[0].evidence)
