"""`python -m benchmarks.engine`: the engine beside a plain PyTorch loop over the same modules."""

from __future__ import annotations

from benchmarks.command import run_command


def measure_engine(*, nproc: int = 2) -> int:
    """Time the engine beside a plain PyTorch loop, overlap beside none, saves beside none.

    Parameters
    ----------
    nproc
        Processes for ZeRO-1; 1 leaves it out.
    """
    from moewright.engine.run.early_checks import refuse_too_many_processes

    refuse_too_many_processes(nproc, field="--nproc")
    import torch

    from benchmarks.overhead import (
        measure_overhead,
        measure_overlap_ratio,
        measure_save_cost,
    )
    from benchmarks.workloads import QUICKSTART_WORKLOAD
    from moewright.spec.hardware import DeviceKind

    kind = DeviceKind.CPU
    device = torch.device("cpu")
    if torch.cuda.is_available():
        kind = DeviceKind.CUDA
        device = torch.device("cuda", 0)
        if nproc > torch.cuda.device_count():
            nproc = 1
    # The ranks come first: they are forked, and this process has not started a thread of torch's.
    overlap_ratio = measure_overlap_ratio(kind, nproc) if nproc > 1 else None
    save_cost = measure_save_cost(kind, nproc) if nproc > 1 else None
    overhead = measure_overhead(device)
    tokens = QUICKSTART_WORKLOAD.tokens_per_step
    print(f"{'one process, TP 1':<26}{'step':>10}{'tokens/s':>11}{'host outside torch ops':>25}")
    for name, step_s, outside_s in (
        ("engine", overhead.engine_s, overhead.engine_outside_s),
        ("plain PyTorch loop", overhead.plain_s, overhead.plain_outside_s),
    ):
        rate = f"{tokens / step_s:>11,.0f}"
        print(f"{name:<26}{step_s * 1e3:>7.1f} ms{rate}{outside_s * 1e3:>22.1f} ms")
    print(f"engine over plain: {overhead.ratio:.3f} of the tokens/s")
    if overlap_ratio is not None:
        print(
            f"ZeRO-1 over {nproc} processes: overlap=grad+param gives {overlap_ratio:.3f} of the "
            "tokens/s without"
        )
    if save_cost is not None:
        print(
            f"an asynchronous save at every 10 steps of {nproc} processes: {save_cost:+.1%} of "
            "their time"
        )
    return 0


if __name__ == "__main__":
    run_command("benchmarks.engine", measure_engine)
