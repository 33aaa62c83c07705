"""Verbs that train or prepare it: a job, a Hugging Face folder on chats, a model upcycled."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import fields
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moewright.cli.answers import print_nothing, print_now, reserve_stdout, write_told_answer
from moewright.cli.exit_codes import STOPPED
from moewright.cli.option_types import Count, Flag, JsonOption, OptionalCount, SetOption
from moewright.cli.options import EnduranceOptions, PortionOptions, RunOutputs, UpcyclingOptions
from moewright.cli.progress import answer_stops, open_display
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import ModelSpec

if TYPE_CHECKING:
    from moewright.engine.run.upcycle import ReadParameter


_NO_ENDURANCE = EnduranceOptions()
_NO_OUTPUTS = RunOutputs()


def train(
    job: Path,
    /,
    *,
    nproc: OptionalCount = None,
    out: Path | None = None,
    set_: SetOption = None,
    extend: Flag = False,
    outputs: RunOutputs = _NO_OUTPUTS,
    endurance: EnduranceOptions = _NO_ENDURANCE,
) -> int:
    """Train a job, and resume it where its run folder stands.

    The same command also runs under torchrun.

    Parameters
    ----------
    job
        The job file, with sections model, data, layout, train, checkpoint; or a plan, as
        `plan --json`, `estimate --json` or `tune` wrote it, which is run as it stands.
    nproc
        Processes to start; the job's own number when not given.
    out
        The run folder; `runs/<name of the job file>` when not given. A plan needs it.
    set_
        Another value for a key of the job, section.key=value; may be given again.
    extend
        When the run has done all its steps, do as many again.
    """
    from moewright.api.planning import is_plan_file
    from moewright.api.reporting import (
        build_report,
        describe_outcome,
        write_comparisons,
        write_page,
    )
    from moewright.api.training import (
        TrainingRequest,
        describe_stop,
        is_first_rank,
        prepare_training,
        run_training,
    )

    endurance.check()
    if out is None:
        if is_plan_file(job):
            rule = "is needed with a plan: the run folder"
            raise BadInput(Reason(field="--out", rule=rule, nearest=f"runs/{job.stem}"))
        out = Path("runs") / job.stem
    request = TrainingRequest(
        path=job,
        run_dir=out,
        nproc=nproc,
        overrides=tuple(set_ or ()),
        extend=extend,
        falls_back=endurance.fall_back,
        supervises=endurance.supervise,
        min_ranks=endurance.min_ranks,
    )
    reports = is_first_rank()

    def run() -> int:
        plan = prepare_training(request, print_now if reports else print_nothing)
        code = run_training(plan, request, open_display(is_quiet=outputs.quiet))
        if code == STOPPED and reports:
            print_now(describe_stop(out))
        if code == 0 and reports:
            report = build_report(out)
            written = [write_page(report, out / "report.html")]
            if report.comparisons:
                written.append(write_comparisons(report, out))
            print_now("\n".join(describe_outcome(report, out, written)))
        return code

    with reserve_stdout(outputs.json):
        code = answer_stops(run)
    return _write_run(out, code, outputs.json if reports else None)


def _write_run(out: Path, code: int, json: Path | None) -> int:
    """Write the record of a run that has trained, and return its exit code."""
    from moewright.api.reporting import build_report

    if code == 0 and json is not None:
        write_told_answer(build_report(out), json)
    return code


_NO_PORTION = PortionOptions()


def finetune(
    base: Path | None = None,
    chats: str = "",
    /,
    *,
    out: Path = Path("runs/finetune"),
    on: str = "",
    options: PortionOptions = _NO_PORTION,
    set_: SetOption = None,
    outputs: RunOutputs = _NO_OUTPUTS,
) -> int:
    """Fine-tune a Hugging Face folder on chats: build the data, plan, train, and export.

    Without BASE and CHATS, a tiny model learns two hundred chats that moewright brings. The same
    call goes on where an interrupted one stopped.

    Parameters
    ----------
    base
        The Hugging Face folder to start from, with its tokenizer and chat template; or the id of a
        model of the hub.
    chats
        A file or folder of chats, as `data build --chats` reads them; or several with weights, as
        "0.7 web.jsonl 0.3 code.jsonl", of which each step has so much.
    out
        The folder of the run; the trained model is in its folder hf.
    on
        Hardware as count x device, such as 8xH100; this machine, which is measured, when not given.
    set_
        Another value for a key of the job, section.key=value; may be given again.
    """
    from moewright.api.finetuning import finetune as run_finetuning
    from moewright.api.finetuning_job import FineTuningRequest, read_chat_paths
    from moewright.api.training import describe_stop, is_first_rank
    from moewright.intake.hub import locate_folder

    if base is not None and not chats:
        rule = "is needed with a model: a file of chats"
        raise BadInput(Reason(field="chats", rule=rule, nearest=f"{base} chats.jsonl"))
    request = FineTuningRequest(
        base=base and locate_folder(base, "base"),
        chats=read_chat_paths(chats),
        out=out,
        on=on,
        options=options,
        overrides=tuple(set_ or ()),
    )
    tell = print_now if is_first_rank() else print_nothing
    display = open_display(is_quiet=outputs.quiet)
    with reserve_stdout(outputs.json):
        code = answer_stops(lambda: run_finetuning(request, tell, display))
        if code == STOPPED:
            tell(describe_stop(out))
    return _write_run(out, code, outputs.json if is_first_rank() else None)


def upcycle(
    dense: Path,
    /,
    *,
    out: Path,
    options: UpcyclingOptions,
    seed: Count = 1234,
    json: JsonOption = None,
) -> int:
    """Turn a dense checkpoint into one with experts that computes the same.

    Writes config.json and a checkpoint; a job starts from them with model.config = OUT and
    model.weights = OUT.

    Parameters
    ----------
    dense
        A run folder or folder of checkpoints of moewright, or a Hugging Face folder.
    out
        The folder to write; it must not hold anything yet.
    seed
        Decides the routers' fresh rows.
    json
        Write the new model and both counts of parameters to this file; "-": to standard output, and
        the text to standard error.
    """
    from moewright.api.requests import translate_fields
    from moewright.codec import write_text
    from moewright.intake.hub import locate_folder
    from moewright.rules.shapes.parameters import count_parameters
    from moewright.rules.upcycling import upcycle_model

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        rule = "holds something already"
        raise BadInput(Reason(field="--out", value=str(out), rule=rule, nearest=f"{out}-2"))
    source, open_parameters = _open_dense(locate_folder(dense, "dense"))
    with translate_fields(_option_of_field):
        model = upcycle_model(source, options)
    config = _complete_config(model)

    # After the refusals, which need no torch.
    from moewright.engine.run.upcycle import upcycle as write_upcycled

    with open_parameters as read_parameter:
        write_upcycled(read_parameter, source, model, options, seed=seed, out=out)
    write_text(out / "config.json", dumps(config, indent=1) + "\n")
    before = count_parameters(source)
    after = count_parameters(model)
    width = model.moe.ffn_size if model.moe else 0
    with reserve_stdout(json):
        print_now(
            f"wrote {out}: {model.moe_layer_count} of {model.layers} layers with {options.experts} "
            f"experts of width {width}, top {options.top_k}; {after.total:,} parameters, "
            f"{after.active:,} active ({before.total:,} before)"
        )
    counts = {"parameters_before": before, "parameters": after}
    write_told_answer({"out": out, "model": model, **counts}, json)
    return 0


def _option_of_field(field: str) -> str:
    # What is of the dense model is no option.
    return field if field.startswith("model") else f"--{field.replace('_', '-')}"


def _open_dense(path: Path) -> tuple[ModelSpec, AbstractContextManager[ReadParameter]]:
    """Return the model of a folder, ours or Hugging Face's, and how its parameters are read."""
    from moewright.engine.hf.folder import is_hf_folder
    from moewright.engine.run.upcycle import (
        open_checkpoint_parameters,
        open_hf_parameters,
        read_checkpoint_model,
    )
    from moewright.intake.hf import read_config

    if is_hf_folder(path):
        model = read_config(path)
        return model, open_hf_parameters(model, path)
    return read_checkpoint_model(path), open_checkpoint_parameters(path)


def _complete_config(model: ModelSpec) -> dict[str, Any]:
    """Return the config.json of a model, which must say all of it.

    Raises:
        BadInput: Reading the config back does not give the same model.
    """
    from moewright.intake.hf import build_config, parse_config

    config = build_config(model)
    read_back = parse_config(config, where="config.json", name=model.name)
    lost = [
        field.name
        for field in fields(model)
        if getattr(read_back, field.name) != getattr(model, field.name)
    ]
    if lost:
        rule = f"its config.json cannot say {', '.join(lost)} of this model"
        raise BadInput(Reason(field="model", value=model.family, rule=rule))
    return config
