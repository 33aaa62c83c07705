"""`moewright convert`: Hugging Face folders to checkpoints, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from moewright.cli.progress import show_bytes

if TYPE_CHECKING:
    from moewright.spec.model import ModelSpec
    from moewright.spec.workload import Dtype


def convert_import(hf_dir: Path, /, *, out: Path) -> int:
    """Write a Hugging Face folder's weights as a checkpoint, for `weights` in a job's [model].

    Every tensor is written exactly once, or nothing is; memory holds about one file of the folder
    at most. Weights in FP8 blocks or MXFP4 are written as the values that they stand for.

    Parameters
    ----------
    hf_dir
        A folder with config.json and model.safetensors, or its shards and their index.
    out
        The folder in which the checkpoint is to lie.
    """
    from moewright.engine.hf.import_weights import plan_import, run_import
    from moewright.intake.hf import read_config

    plan = plan_import(hf_dir, read_config(hf_dir), out)
    with _progress_bar(f"import {hf_dir}", plan.nbytes) as advance:
        checkpoint = run_import(plan, advance)
    print(f"wrote {checkpoint}")
    return 0


def convert_export(
    checkpoint: Path, /, *, out: Path, dtype: Literal["fp32", "bf16", "fp16"] | None = None
) -> int:
    """Write a checkpoint of any layout as a Hugging Face folder that transformers loads.

    What `convert import` wrote goes back byte for byte, but for packed weights, which go back in
    bf16.

    Parameters
    ----------
    checkpoint
        A checkpoint, or a run's folder: then its newest one.
    out
        The folder to write, which is new.
    dtype
        Dtype of the weights; when not given, that in which they were imported (bf16 for packed
        ones) or in which the run computed.
    """
    from moewright.engine.checkpoint import find_checkpoint
    from moewright.engine.hf.export_weights import plan_export, run_export
    from moewright.spec.workload import Dtype

    plan = plan_export(find_checkpoint(checkpoint), Dtype(dtype) if dtype else None, _config_text)
    with _progress_bar(f"export {plan.checkpoint}", plan.nbytes) as advance:
        run_export(plan, out, advance)
    print(f"wrote {out}")
    return 0


def _config_text(model: ModelSpec, dtype: Dtype) -> str:
    """Return the config.json of a model whose weights have this dtype."""
    import json

    from moewright.intake.hf_write import build_config

    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    return json.dumps({**build_config(model), "torch_dtype": names[dtype.value]}, indent=2) + "\n"


@contextmanager
def _progress_bar(description: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr where that is a terminal; what is yielded advances it by bytes."""
    with show_bytes() as progress:
        task = progress.add_task(description, total=total_bytes)
        yield lambda nbytes: progress.advance(task, nbytes)
