"""The shape of a batch file, read from its header alone and without torch, for refusals that should
not wait for it."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from moewright.spec.errors import BadInput, Reason
from moewright.spec.workload import Dtype, LossSpec, OptimizerSpec, Workload

BATCH_TENSORS = ("input_ids", "labels")


def read_batch_workload(batch: Path, *, steps: int, optimizer: OptimizerSpec) -> Workload:
    """What a batch file [N,B,T] asks for in a step, in fp32 and without auxiliary losses.

    Raises BadInput when the file does not hold input_ids and labels of one such shape.
    """
    if not batch.is_file():
        raise BadInput(Reason(field=str(batch), rule="no such file"))
    try:
        with safe_open(str(batch), framework="numpy") as file:
            stored = set(file.keys())
            for name in BATCH_TENSORS:
                if name not in stored:
                    raise BadInput(Reason(field=f"{batch}: {name}", rule="is missing"))
            shapes = [
                (file.get_slice(name).get_dtype(), tuple(file.get_slice(name).get_shape()))
                for name in BATCH_TENSORS
            ]
    except SafetensorError as error:
        raise BadInput(Reason(field=str(batch), rule=f"is no safetensors file: {error}")) from None
    ids = shapes[0][1]
    for name, (dtype, shape) in zip(BATCH_TENSORS, shapes, strict=True):
        if not dtype.startswith(("I", "U")) or len(shape) != 3 or shape != ids or 0 in shape:
            rule = "must be integers [N, B, T], the same shape for input_ids and labels"
            raise BadInput(
                Reason(field=f"{batch}: {name}", value=f"{dtype} {list(shape)}", rule=rule)
            )
    _, rows, length = ids
    return Workload(
        seq_len=length,
        global_batch=rows,
        steps=steps,
        precision=Dtype.FP32,
        optimizer=optimizer,
        loss=LossSpec(),
    )
