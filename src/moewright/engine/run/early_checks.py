"""What is refused before torch is imported: too many processes, a batch file of another shape.

How many processes this machine takes. It needs no torch: what asks for more processes is refused
before torch is imported.

The shape of a batch file, read from its header alone. It needs no torch, so that refusals do not
wait for it.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

from safetensors import SafetensorError, safe_open

from moewright.spec.errors import BadInput, Reason
from moewright.spec.workload import Dtype, LossSpec, OptimizerSpec, Workload

_RANKS_PER_CORE = 8  # each holds a torch of its own, and starts more slowly than it trains
# Files and connections that a rank opens beside those to each other rank, and of those one for each
# group of its layout.
_FILES = 256
_FILES_PER_RANK = 16


def count_cores() -> int:
    """Count the processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def raise_file_limit(nproc: int) -> None:
    """Let this process and its ranks open as many files as a job of so many ranks may need.

    Raises:
        BadInput: the hard limit does not allow it.
    """
    needed = _FILES + _FILES_PER_RANK * nproc
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY in (soft, hard) or soft >= needed:
        return
    if hard < needed:
        rule = f"a process may open {hard} files here, {nproc} ranks may need {needed}"
        raise BadInput(Reason(field="ulimit -n", rule=rule, nearest=str(needed)))
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def refuse_too_many_processes(nproc: int, *, field: str = "nproc") -> None:
    """Raise BadInput for more processes than a machine survives.

    Each process holds a torch of its own and takes a share of a core.
    """
    cores = count_cores()
    limit = _RANKS_PER_CORE * cores
    if not 1 <= nproc <= limit:
        rule = f"must be in 1..{limit} on a machine of {cores} cores"
        nearest = str(min(max(nproc, 1), limit))
        raise BadInput(Reason(field=field, value=str(nproc), rule=rule, nearest=nearest))


BATCH_TENSORS = ("input_ids", "labels")


def read_batch_workload(batch: Path, *, steps: int, optimizer: OptimizerSpec) -> Workload:
    """Return what a batch file [N,B,T] asks for in a step, in fp32 and without auxiliary losses.

    Raises:
        BadInput: when the file does not hold input_ids and labels of one such shape.
    """
    _, sequences, seq_len = _read_shape(batch)
    return Workload(
        seq_len=seq_len,
        global_batch=sequences,
        steps=steps,
        precision=Dtype.FP32,
        optimizer=optimizer,
        loss=LossSpec(indexer_coeff=0.0),
    )


def _read_shape(batch: Path) -> tuple[int, ...]:
    """Return the shape [N,B,T] that all tensors of the file have."""
    if not batch.is_file():
        raise BadInput(Reason(field=str(batch), rule="no such file"))
    headers: list[tuple[str, tuple[int, ...]]] = []
    try:
        with safe_open(str(batch), framework="numpy") as file:
            stored_names = set(file.keys())
            for name in BATCH_TENSORS:
                if name not in stored_names:
                    raise BadInput(Reason(field=f"{batch}: {name}", rule="is missing"))
                tensor = file.get_slice(name)
                headers.append((tensor.get_dtype(), tuple(tensor.get_shape())))
    except SafetensorError as error:
        raise BadInput(Reason(field=str(batch), rule=f"is no safetensors file: {error}")) from None
    _, first_shape = headers[0]
    for name, (dtype, shape) in zip(BATCH_TENSORS, headers, strict=True):
        is_integer = dtype.startswith(("I", "U"))
        if not is_integer or len(shape) != 3 or shape != first_shape or 0 in shape:
            rule = "must be integers [N, B, T], the same shape for input_ids and labels"
            value = f"{dtype} {list(shape)}"
            raise BadInput(Reason(field=f"{batch}: {name}", value=value, rule=rule))
    return first_shape
