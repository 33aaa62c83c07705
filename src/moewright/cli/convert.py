"""`moewright convert`: Hugging Face folders to checkpoints, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

from moewright.cli.answers import print_now, reserve_stdout, write_told_answer
from moewright.cli.option_types import Flag, JsonOption
from moewright.cli.options import ExportedWeights
from moewright.cli.progress import show_bytes
from moewright.spec.errors import BadInput, Reason
from moewright.spec.units import plural

_AS_TRAINED = ExportedWeights()


def convert_import(
    hf_dir: Path,
    /,
    *,
    out: Path,
    config: Path | None = None,
    job: Path | None = None,
    json: JsonOption = None,
) -> int:
    """Write the weights of a folder as a checkpoint, for `weights` in a job's [model].

    The folder is of Hugging Face, or a checkpoint of Megatron-LM in its format torch_dist, saved in
    any TP, PP and EP. Every tensor is written exactly once, or nothing is; memory holds about one
    file of the folder at most. Weights in FP8 blocks or MXFP4 are written as the values that they
    stand for.

    Parameters
    ----------
    hf_dir
        A folder with config.json and model.safetensors, or its shards and their index; the id of a
        model of the hub; or a folder that Megatron-LM saved to, or an iter_* of it.
    out
        The folder in which the checkpoint is to lie.
    config
        The config.json, or its folder, of the model of a checkpoint of Megatron-LM.
    job
        The job that is to go on with a checkpoint of Megatron-LM: main weights, moments of AdamW
        and the number of steps come along, and `out` is the folder of its run.
    json
        Write what was read, what was written and its bytes to this file; "-": to standard output,
        and the text to standard error.
    """
    from moewright.api.converting import read_resumed_job
    from moewright.engine.hf.import_weights import plan_import, run_import
    from moewright.engine.torch_dist.import_weights import (
        find_megatron_checkpoint,
        plan_megatron_import,
        run_megatron_import,
    )
    from moewright.intake.hf import read_config
    from moewright.intake.hub import locate_folder

    # Before the hub is asked: a folder of Megatron-LM is no model of it.
    megatron = find_megatron_checkpoint(hf_dir)
    if config is not None and job is not None:
        rule = "is not needed with --job, which states the model"
        raise BadInput(Reason(field="--config", value=str(config), rule=rule))
    if megatron is not None:
        resumed = None
        if job is not None:
            model, resumed = read_resumed_job(job)
        elif config is not None:
            model = read_config(config)
        else:
            rule = "is needed: a checkpoint of Megatron-LM does not say its model"
            raise BadInput(Reason(field="--config", rule=rule, nearest="--config HF_DIR"))
        megatron_plan = plan_megatron_import(megatron, model, out, resumed)
        with show_bytes() as progress:
            task = progress.add_task(f"import {megatron}", total=megatron_plan.nbytes)
            report = partial(progress.update, task)
            checkpoint = run_megatron_import(
                megatron_plan, report_progress=lambda done: report(completed=done)
            )
        return _tell_conversion(megatron, checkpoint, megatron_plan.nbytes, json)
    for option, path in (("--config", config), ("--job", job)):
        if path is not None:
            rule = "is of no use: the folder has its own config.json, or is not of Megatron-LM"
            raise BadInput(Reason(field=option, value=str(path), rule=rule))
    hf_dir = locate_folder(hf_dir, "hf_dir")
    plan = plan_import(hf_dir, read_config(hf_dir), out)
    with _progress_bar(f"import {hf_dir}", plan.nbytes) as advance:
        checkpoint = run_import(plan, advance)
    return _tell_conversion(hf_dir, checkpoint, plan.nbytes, json)


def _tell_conversion(source: Path, written: Path, nbytes: int, json: Path | None) -> int:
    with reserve_stdout(json):
        print_now(f"wrote {written}")
    write_told_answer({"source": source, "written": written, "bytes": nbytes}, json)
    return 0


def convert_export(
    checkpoint: Path,
    /,
    *,
    out: Path,
    tokenizer: Path | None = None,
    adapters: Flag = False,
    to: Literal["hf", "megatron"] = "hf",
    weights: ExportedWeights = _AS_TRAINED,
    json: JsonOption = None,
) -> int:
    """Write a checkpoint of any layout as a Hugging Face folder that transformers loads.

    With --to megatron it becomes a torch_dist checkpoint of Megatron-LM, for --load in any layout.
    The tokenizer, a generation config and the stub of a model card go with the weights of a run.
    What `convert import` wrote goes back byte for byte, but for packed weights, which go back in
    bf16.

    Parameters
    ----------
    checkpoint
        A checkpoint, or a run's folder: then its newest one.
    out
        The folder to write, which is new.
    tokenizer
        The folder whose tokenizer goes with the weights; when not given, that which the run started
        from, or that of its data.
    adapters
        Write the adapters of a LoRA run alone, as peft loads them; they are merged into the weights
        that they were trained beside when not given.
    to
        hf: a folder of Hugging Face. megatron: a folder as Megatron-LM saves to, in bf16 when no
        dtype is given; weights alone, if not told otherwise.
    json
        Write what was read, what was written and its bytes to this file; "-": to standard output,
        and the text to standard error.
    """
    from moewright.api.converting import ExportForm, plan_export
    from moewright.engine.checkpoint import find_checkpoint
    from moewright.spec.workload import Dtype

    dtype = Dtype(weights.dtype) if weights.dtype else None
    optimizer = weights.optimizer
    if optimizer is not None and to != "megatron":
        rule = "says nothing to Hugging Face, whose folders hold weights alone"
        raise BadInput(
            Reason(field="--optimizer", value=optimizer, rule=rule, nearest="--to megatron")
        )
    if to == "megatron":
        from moewright.engine.run.companions import plan_companions
        from moewright.engine.torch_dist.export_weights import (
            plan_megatron_export,
            run_megatron_export,
        )
        from moewright.engine.torch_dist.optimizer_state import ChainedOptimizers

        if adapters or tokenizer is not None:
            option = "--adapters" if adapters else "--tokenizer"
            rule = "says nothing to a checkpoint of Megatron-LM"
            raise BadInput(Reason(field=option, rule=rule, nearest="leave it out"))
        source = find_checkpoint(checkpoint)
        megatron = plan_megatron_export(
            source,
            dtype=dtype,
            optimizer=ChainedOptimizers(optimizer) if optimizer else None,
            base=plan_companions(source, None).base,
        )
        with reserve_stdout(json):
            for part, count in megatron.left_out.items():
                left_out = f"{plural(count, 'tensor')} of {part}"
                print_now(f"left out: {left_out}; the language model alone goes to Megatron-LM")
        with _progress_bar(f"export {megatron.checkpoint}", megatron.nbytes) as advance:
            run_megatron_export(megatron, out, advance)
        return _tell_conversion(megatron.checkpoint, out, megatron.nbytes, json)

    plan = plan_export(
        checkpoint,
        form=ExportForm.PEFT if adapters else ExportForm.WEIGHTS,
        dtype=dtype,
        tokenizer=tokenizer,
    )
    with _progress_bar(f"export {plan.checkpoint}", plan.nbytes) as advance:
        plan.run(out, advance)
    return _tell_conversion(plan.checkpoint, out, plan.nbytes, json)


@contextmanager
def _progress_bar(description: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr where that is a terminal; what is yielded advances it by bytes."""
    with show_bytes() as progress:
        task = progress.add_task(description, total=total_bytes)
        yield lambda nbytes: progress.advance(task, nbytes)
