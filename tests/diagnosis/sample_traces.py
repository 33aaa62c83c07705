"""Traces of known seconds, as the PyTorch profiler and Nsight Systems would have written them."""

from __future__ import annotations

import gzip
import json
import sqlite3
from pathlib import Path
from typing import Any

MS = 1000.0  # microseconds

# A step of 100 ms: (name, stream, start ms, length ms, launched ms, args). On stream 7 are two
# products and an elementwise kernel; on 20 an all-to-all, half of it under the second product; on
# 24 a reduction wholly under it.
A2A = {
    "Collective name": "all_to_allv",
    "Process Group Name": "11",
    "Process Group Description": "EXPERT_MODEL_PARALLEL_GROUP",
    "Process Group Ranks": "[0, 1, 2, 3]",
    "Group size": 4,
    "dtype": "BFloat16",
    "In msg nelems": 1_000_000,
    "Out msg nelems": 1_000_000,
}
REDUCE = {
    "Collective name": "_reduce_scatter_base",
    "Process Group Name": "5",
    "Process Group Description": "DATA_PARALLEL_GROUP_WITH_CP",
    "Group size": 8,
    "dtype": "Float",
    "In msg nelems": 4_000_000,
}
KERNELS: tuple[tuple[str, int, float, float, float, dict[str, Any]], ...] = (
    ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNT", 7, 0, 20, -1, {"External id": 1}),
    ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 20, 20, 20, 1, A2A),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", 7, 30, 30, 2, {"External id": 2}),
    (
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        24,
        35,
        10,
        3,
        REDUCE,
    ),
    ("void at::native::vectorized_elementwise_kernel<4>", 7, 70, 5, 68, {}),
    ("void at::native::vectorized_elementwise_kernel<4>", 7, 85, 15, 84, {}),
)
COMPUTE_MS = 20 + 30 + 5 + 15
EXPOSED_EP_MS = 10
# Of the gap from 75 to 85 a wait ends at 80, and refilling the queue takes 0.05 of the rest.
SYNC_MS = 5.05
HOST_MS = 10 + 4.95


def events(step: int = 0) -> list[dict[str, Any]]:
    """Return the events of the step, shifted by so many steps of 100 ms."""
    base = 1e6 + step * 100 * MS
    trace: list[dict[str, Any]] = []
    for number, (name, stream, start, length, launched, args) in enumerate(KERNELS):
        key = step * 100 + number
        made = {"device": 0, "stream": stream, "correlation": key} | args
        if "External id" in args:
            made["External id"] = step * 100 + args["External id"]
        event = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "args": made}
        trace.append({**event, "ts": base + start * MS, "dur": length * MS})
        call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": 9}
        trace.append({**call, "ts": base + launched * MS, "dur": 5, "args": {"correlation": key}})
    for key, sizes in ((1, [[4096, 8192], [8192, 8192]]), (2, [[4096, 8192], [8192, 12288]])):
        shape = {"External id": step * 100 + key, "Input Dims": sizes}
        trace.append(
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": base, "dur": 3, "args": shape}
        )
    wait = {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": "cudaStreamSynchronize",
        "args": {"correlation": 0},
    }
    trace.append({**wait, "ts": base + 74 * MS, "dur": 6 * MS})
    mark = {
        "ph": "X",
        "cat": "user_annotation",
        "name": f"ProfilerStep#{step + 5}",
        "pid": 9,
        "tid": 9,
    }
    return [*trace, {**mark, "ts": base - 1 * MS, "dur": 100 * MS}]


def kineto(
    path: Path, *, steps: int = 3, rank: int = 0, extra: tuple[dict[str, Any], ...] = ()
) -> Path:
    made = [event for step in range(steps) for event in events(step)]
    data = {
        "schemaVersion": 1,
        "deviceProperties": [
            {"id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85_000_000_000}
        ],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 4},
        "traceEvents": [*made, *extra],
    }
    text = json.dumps(data).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def nsight(path: Path) -> Path:
    """Write the same kernels as `nsys export` does: one process, steps marked by NVTX."""
    names = {
        name: place for place, name in enumerate(dict.fromkeys(kernel[0] for kernel in KERNELS), 1)
    }
    names |= {"cudaLaunchKernel_v7000": 50, "cudaStreamSynchronize_v3020": 51}
    process = 7 << 24
    with sqlite3.connect(path) as database:
        database.executescript(
            """
            CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, deviceId INT, streamId INT,
              correlationId INT, globalPid INT, demangledName INT, shortName INT);
            CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT, end INT, globalTid INT,
              correlationId INT, nameId INT);
            CREATE TABLE NVTX_EVENTS (start INT, end INT, eventType INT, text TEXT, textId INT,
              globalTid INT);
            CREATE TABLE TARGET_INFO_GPU (id INT, name TEXT, totalMemory INT);
            INSERT INTO TARGET_INFO_GPU VALUES (0, 'NVIDIA H100 80GB HBM3', 85000000000);
            """
        )
        database.executemany(
            "INSERT INTO StringIds VALUES (?, ?)", [(key, name) for name, key in names.items()]
        )
        for step in range(3):
            base = 10**9 + step * 10**8
            for number, (name, stream, start, length, launched, _) in enumerate(KERNELS):
                key = step * 100 + number
                ms = 10**6
                row = (
                    base + start * ms,
                    base + (start + length) * ms,
                    0,
                    stream,
                    key,
                    process,
                    names[name],
                    names[name],
                )
                database.execute(
                    "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row
                )
                call = (base + launched * ms, base + launched * ms + 5000, process + 3, key, 50)
                database.execute(
                    "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)", call
                )
            wait = (base + 74 * 10**6, base + 80 * 10**6, process + 3, 0, 51)
            database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)", wait)
            mark = (base - 10**6, base + 99 * 10**6, 59, f"iteration {step}", None, process + 3)
            database.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?)", mark)
            dispatch = (
                base + 10**6 - 1000,
                base + 10**6 + 9000,
                59,
                "nccl:all_to_all",
                None,
                process + 3,
            )
            database.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?)", dispatch)
    return path
