"""`moewright convert`: Hugging Face folders to checkpoints, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from moewright.spec.model import ModelSpec
    from moewright.spec.workload import Dtype


def convert_import(hf_dir: Path, /, *, out: Path) -> int:
    """Write the weights of a Hugging Face folder as a checkpoint, for `weights` of a job's model
    section.

    Every tensor is written exactly once, or nothing is; memory holds about one file of the folder
    at most. Weights in FP8 blocks or MXFP4 are written as what they stand for.

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
    with _told(f"import {hf_dir}", plan.nbytes) as told:
        written = run_import(plan, told)
    print(f"wrote {written}")
    return 0


def convert_export(
    checkpoint: Path, /, *, out: Path, dtype: Literal["fp32", "bf16", "fp16"] | None = None
) -> int:
    """Write a checkpoint, whatever layout wrote it, as a Hugging Face folder that transformers
    loads.

    What `convert import` wrote goes back byte for byte, but for packed weights, which go back in
    bf16.

    Parameters
    ----------
    checkpoint
        A checkpoint, or a run's folder: then its newest one.
    out
        The folder to write, which is new.
    dtype
        Of the weights; as they were imported (packed ones: bf16), or as the run computed, when not given.
    """
    from moewright.engine.checkpoint import find_checkpoint
    from moewright.engine.hf.export_weights import plan_export, run_export
    from moewright.spec.workload import Dtype

    plan = plan_export(find_checkpoint(checkpoint), Dtype(dtype) if dtype else None, _config)
    with _told(f"export {plan.checkpoint}", plan.nbytes) as told:
        run_export(plan, out, told)
    print(f"wrote {out}")
    return 0


def _config(model: ModelSpec, dtype: Dtype) -> str:
    import json

    from moewright.intake.hf_write import build_config

    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    return json.dumps({**build_config(model), "torch_dtype": names[dtype.value]}, indent=2) + "\n"


@contextmanager
def _told(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal's stderr, moved by bytes."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda nbytes: bar.advance(task, nbytes)
