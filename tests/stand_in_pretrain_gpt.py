"""A stand-in for Megatron-LM's pretrain_gpt.py: its log, with steps of a planted cost surface.

It parses its flags, prints them as Megatron-LM does, then a line an iteration, memory and timers; a
layout that needs more memory than 79 GiB ends in the allocator's error. `STAND_IN_STEP_S` makes
each step take so long, `STAND_IN_CRASH` names a flag and value at which it crashes.
"""

from __future__ import annotations

import os
import sys
import time
import zlib

GIB = 2**30
CAPACITY_GIB = 79.1
BASE_MS = 900.0


def read_flags(words: list[str]) -> dict[str, str]:
    """Return the flags, each with its values joined."""
    flags: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word
            flags[name] = []
        else:
            flags[name].append(word)
    return {key: " ".join(values) for key, values in flags.items()}


def degree(flags: dict[str, str], name: str) -> int:
    return int(flags.get(name) or 1)


def step_ms(flags: dict[str, str]) -> float:
    """Return the planted milliseconds of a step, best at tp1, ep8, mbs4, selective recompute."""
    tp = {1: 1.0, 2: 1.08, 4: 1.3}[degree(flags, "--tensor-model-parallel-size")]
    ep = {1: 1.5, 2: 1.25, 4: 1.1, 8: 1.0, 16: 1.16}[degree(flags, "--expert-model-parallel-size")]
    mbs = {1: 1.45, 2: 1.18, 4: 1.0, 8: 0.97}[degree(flags, "--micro-batch-size")]
    recompute = {"full": 1.28, "selective": 1.02}.get(flags.get("--recompute-granularity", ""), 1)
    return BASE_MS * tp * ep * mbs * recompute


def memory_gib(flags: dict[str, str]) -> float:
    """Return the planted peak; without recompute only small micro-batches fit."""
    tp = degree(flags, "--tensor-model-parallel-size")
    ep = degree(flags, "--expert-model-parallel-size")
    mbs = degree(flags, "--micro-batch-size")
    kept = {"full": 1.5, "selective": 9.0}.get(flags.get("--recompute-granularity", ""), 14.0)
    return 12.0 + 60.0 / ep + kept * mbs / tp


def main() -> int:
    flags = read_flags(sys.argv[1:])
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if rank != size - 1:
        return 0
    print("------------------------ arguments ------------------------")
    for name, value in sorted(flags.items()):
        print(f"  {name[2:].replace('-', '_')} {'.' * max(2, 46 - len(name))} {value or True}")
    print("-------------------- end of arguments ---------------------", flush=True)
    crash = os.environ.get("STAND_IN_CRASH", "")
    if crash and flags.get(crash.split("=")[0]) == crash.split("=")[1]:
        print("RuntimeError: CUDA error: an illegal memory access was encountered", flush=True)
        return 1
    needed = memory_gib(flags)
    if needed > CAPACITY_GIB:
        print(
            f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a "
            f"total capacity of {CAPACITY_GIB} GiB of which 1.2 GiB is free.",
            flush=True,
        )
        return 1
    pause_s = float(os.environ.get("STAND_IN_STEP_S", "0"))
    iterations = int(flags["--train-iters"])
    batch = int(flags["--global-batch-size"])
    run = str(time.time_ns())
    for number in range(1, iterations + 1):
        time.sleep(pause_s)
        noise = zlib.crc32(f"{run} {number}".encode()) / 2**32 - 0.5
        elapsed = step_ms(flags) * (1 + 0.02 * noise) * (4 if number == 1 else 1)
        print(
            f" [2026-11-22 12:00:00] iteration {number:8d}/{iterations:8d} | consumed samples: "
            f"{number * batch:12d} | elapsed time per iteration (ms): {elapsed:.1f} | throughput "
            f"per GPU (TFLOP/s/GPU): {1e5 / elapsed:.1f} | learning rate: 1.0E-04 | global batch "
            f"size: {batch:5d} | lm loss: {9 - number / 100:.6E} | loss scale: 1.0 | grad norm: "
            "1.000 | number of skipped iterations:   0 | number of nan iterations:   0 |",
            flush=True,
        )
        if number == 2:
            mib = needed * 1024
            print(
                f"[Rank {rank}] (after {number} iterations) memory (MB) | allocated: {mib / 2:.1f} "
                f"| max allocated: {0.95 * mib:.1f} | reserved: {mib:.1f} | max reserved: "
                f"{mib:.1f}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
