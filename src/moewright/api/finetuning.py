"""Fine-tuning a Hugging Face folder on chats: data, plan, training, export, and a look at it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from moewright.api.exporting_weights import ExportForm, holds_adapters, plan_export
from moewright.api.machines import Tell
from moewright.api.training import TrainingRequest, is_first_rank, prepare_training, run_training
from moewright.codec import STEPS_FILE, write_text
from moewright.intake import hf
from moewright.intake.hardware_text import parse_hardware_text
from moewright.intake.job import DEFAULT_HARDWARE
from moewright.rules.parameters import count_parameters
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import ModelSpec

if TYPE_CHECKING:
    from moewright.engine.data.build_corpus import BuildReport

JOB_FILE = "finetune.toml"
_DATA_FOLDER = "data"
_BASE_FOLDER = "base"
_EXPORT_FOLDER = "hf"
_ADAPTER_FOLDER = "adapter"
# A sequence has so many tokens at least, and a power of two of them.
_MIN_SEQ_LEN = 256
# Steps that an epoch has at least, where the data allow it.
_STEPS_PER_EPOCH = 8
_MAX_BATCH = 64
# The peak learning rates of published recipes for whole models, and for one from fresh weights.
_LR = 1e-5
_LORA_LR = 2e-4
_FRESH_LR = 3e-3
_FRESH_EPOCHS = 20
_EPOCHS = 3
# Parameters of the largest model that answers here, which it does in fp32 and without a cache.
_MAX_ANSWERING = 200_000_000
_ANSWER_TOKENS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class FineTuningRequest:
    """What is to be fine-tuned on what.

    `base` and `chats` are None for the model and the chats that moewright brings. `on` names the
    hardware as count x device, "" this machine. None elsewhere leaves a number to the data; a
    `lora_rank` of 0 trains whole weights.
    """

    base: Path | None
    chats: Path | None
    out: Path
    on: str = ""
    nproc: int | None = None
    epochs: float | None = None
    seq_len: int | None = None
    global_batch: int | None = None
    lr: float | None = None
    lora_rank: int = 0
    heldout: float = 0.05
    template: Path | None = None
    overrides: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A chat up to an answer, as tokens, and the text that it asks and expects."""

    prompt: tuple[int, ...]
    question: str
    expected: str


def finetune(request: FineTuningRequest, tell: Tell) -> int:
    """Fine-tune, and return the exit code of the training.

    Everything is under `request.out`: data, the job, its run, and the trained Hugging Face folder.
    The same call goes on where an interrupted one stopped.

    Raises:
        BadInput: for a folder, a record or a number that cannot be trained.
    """
    base = request.base
    if base is None:
        base = request.out / _BASE_FOLDER
        if is_first_rank() and not (base / "model.safetensors").is_file():
            _write_starter(base)
            tell(f"{base}: a fresh model of {_describe_size(base)} to begin with")
    with _open_chats(request) as chats:
        report = _build_data(request, base, chats)
    corpus = report.corpus
    tell(
        f"{corpus.train.documents:,} samples of {corpus.train.tokens:,} tokens to train on, "
        f"{corpus.train.learnt_tokens / max(1, corpus.train.tokens):.0%} of them the assistant's; "
        f"{corpus.heldout.documents:,} held out"
    )
    job_path = request.out / JOB_FILE
    if is_first_rank():
        write_text(job_path, _write_job(request, base, report, tell))
    training = TrainingRequest(
        path=job_path, run_dir=request.out, nproc=request.nproc, overrides=request.overrides
    )
    plan = prepare_training(training, tell)
    sample = _read_sample(report, base)
    before = _answer(plan.model, base, sample) if is_first_rank() else None
    code = run_training(plan, training)
    if code or not is_first_rank():
        return code
    _tell_losses(request.out, tell)
    out = request.out / _EXPORT_FOLDER
    _export(request.out, out)
    if request.lora_rank:
        tell(f"wrote {request.out / _ADAPTER_FOLDER}, the adapters, which peft loads")
    tell(f"wrote {out}, which transformers loads")
    if before is None:
        tell(f"no answers shown: more than {_MAX_ANSWERING:,} parameters; ask {out} instead")
        return code
    tell(f"asked   {sample.question}")
    tell(f"wanted  {sample.expected}")
    tell(f"before  {before}")
    tell(f"after   {_answer(plan.model, out, sample)}")
    return code


def _export(run_dir: Path, out: Path) -> None:
    """Write what a run has learnt, in place of what an earlier call wrote."""
    for folder, form in ((out, ExportForm.WEIGHTS), (run_dir / _ADAPTER_FOLDER, ExportForm.PEFT)):
        shutil.rmtree(folder, ignore_errors=True)
        if form is ExportForm.WEIGHTS or holds_adapters(run_dir):
            plan_export(run_dir, form=form).run(folder, lambda _nbytes: None)


def _open_chats(request: FineTuningRequest) -> Any:
    """Return a context with the path of the chats."""
    if request.chats is None:
        return as_file(files("moewright.api") / "starter" / "chats.jsonl")
    from contextlib import nullcontext

    return nullcontext(request.chats)


def _write_starter(base: Path) -> None:
    """Write the model that moewright brings, with fresh weights."""
    from moewright.engine.run.fresh_model import write_fresh_model

    starter = files("moewright.api") / "starter"
    config = (starter / "config.json").read_text("utf-8")
    lines = (starter / "chats.jsonl").read_text("utf-8").splitlines()
    texts = [message["content"] for line in lines for message in json.loads(line)["messages"]]
    write_fresh_model(
        base,
        hf.parse_config(json.loads(config), where="starter", name="starter"),
        config=config,
        template=(starter / "chat_template.jinja").read_text("utf-8"),
        texts=texts,
    )


def _describe_size(base: Path) -> str:
    total = count_parameters(hf.read_config(base)).total
    return f"{total / 1e6:.1f}M parameters"


def _build_data(request: FineTuningRequest, base: Path, chats: Path) -> BuildReport:
    from moewright.engine.data.build_chats import build_chats
    from moewright.engine.data.chat_encoder import ChatOptions

    options = ChatOptions(
        tokenizer=base,
        template=request.template,
        heldout_fraction=request.heldout,
        max_tokens=request.seq_len or 0,
    )
    return build_chats(chats, request.out / _DATA_FOLDER, options)


def _write_job(request: FineTuningRequest, base: Path, report: BuildReport, tell: Tell) -> str:
    """Return the job file, whose numbers fit the data where the request leaves them open."""
    from moewright.engine.data.packing import open_chats, pack_chats

    nproc, hardware = _choose_hardware(request)
    seq_len = request.seq_len
    if seq_len is None:
        seq_len = max(_MIN_SEQ_LEN, 1 << (report.corpus.longest.tokens - 1).bit_length())
    packs = pack_chats(open_chats(Path(report.data.train)), seq_len=seq_len)
    filled = report.corpus.train.tokens / (packs.count * seq_len)
    batch = request.global_batch or _choose_batch(packs.count, nproc)
    is_fresh = request.base is None
    epochs = request.epochs or (_FRESH_EPOCHS if is_fresh else _EPOCHS)
    if epochs <= 0:
        raise BadInput(Reason(field="--epochs", value=f"{epochs:g}", rule="must be positive"))
    steps = max(1, round(epochs * packs.count / batch))
    default_lr = _LORA_LR if request.lora_rank else _LR
    lr = request.lr or (_FRESH_LR if is_fresh else default_lr)
    tell(
        f"{packs.count:,} sequences of {seq_len:,} tokens, {filled:.0%} filled; {steps:,} steps "
        f"of {batch}, {epochs:g} epochs"
    )
    data = {
        "train": os.path.relpath(report.data.train, request.out),
        "tokenizer": os.path.relpath(report.data.tokenizer, request.out),
        "documents": "restarted",
    }
    heldout_batches = 0
    if report.data.heldout:
        heldout = pack_chats(open_chats(Path(report.data.heldout)), seq_len=seq_len)
        heldout_batches = heldout.count // batch
    if heldout_batches:
        data["heldout"] = os.path.relpath(report.data.heldout, request.out)
    elif report.data.heldout:
        tell("the held-out samples fill no batch, so nothing is evaluated")
    task: dict[str, Any] = {"task": "sft"}
    if request.lora_rank:
        task = {
            "task": "lora",
            "lora_rank": request.lora_rank,
            "lora_alpha": 2.0 * request.lora_rank,
        }
    job = {
        "model": {"weights": os.path.relpath(base, request.out)},
        "data": data,
        "train": {
            **task,
            "nproc": nproc,
            "hardware": hardware,
            "seq_len": seq_len,
            "global_batch": batch,
            "steps": steps,
            "lr": lr,
            "warmup_steps": max(1, steps // 20),
            "weight_decay": 0.0,
            "precision": "bf16",
            "eval_every_steps": max(1, steps // 4),
            "eval_batches": max(1, heldout_batches),
        },
        "checkpoint": {"every_steps": max(1, steps // 4), "keep": 1},
    }
    return tomli_w.dumps(job)


def _choose_hardware(request: FineTuningRequest) -> tuple[int, str]:
    """Return the number of ranks, and the hardware as a job in the request's folder names it."""
    if request.on:
        text = parse_hardware_text(request.on)
        name = os.path.relpath(text.name, request.out) if text.is_file else text.name
        return request.nproc or text.count or 1, name
    count = request.nproc or _count_devices()
    return count, os.path.relpath(DEFAULT_HARDWARE, request.out)


def _count_devices() -> int:
    """Return the GPUs of this machine, or where it has none two processes at most."""
    import torch

    return torch.cuda.device_count() or min(2, os.cpu_count() or 1)


def _choose_batch(sequences: int, nproc: int) -> int:
    """Return the sequences of a step: some steps make an epoch, and every rank has work."""
    batch = nproc
    while 2 * batch <= min(_MAX_BATCH, sequences // _STEPS_PER_EPOCH):
        batch *= 2
    return min(batch, max(1, sequences))


def _read_sample(report: BuildReport, base: Path) -> Sample:
    """Return the first held-out sample, or the first of all, up to its first answer."""
    from moewright.engine.data.packing import open_chats
    from moewright.engine.data.tokenizer import load_tokenizer

    chats = open_chats(Path(report.data.heldout or report.data.train))
    length = int(chats.tokens.lengths[0])
    tokens = chats.tokens.tokens[:length].tolist()
    learnt = chats.learnt.tokens[:length].tolist()
    start = learnt.index(1)
    stop = learnt.index(0, start) if 0 in learnt[start:] else length
    tokenizer = load_tokenizer(base)
    return Sample(
        prompt=tuple(tokens[:start]),
        question=" ".join(tokenizer.decode(tokens[:start]).split()),
        expected=tokenizer.decode(tokens[start:stop]),
    )


def _answer(model: ModelSpec, weights: Path, sample: Sample) -> str | None:
    """Return what the weights of a folder answer; None where the model is too large to ask here."""
    from moewright.engine.data.tokenizer import load_tokenizer
    from moewright.engine.run.companions import read_generation_stops
    from moewright.engine.run.generate import generate_greedily

    if count_parameters(model).total > _MAX_ANSWERING:
        return None
    tokenizer = load_tokenizer(weights)
    stops = {*read_generation_stops(weights), tokenizer.end_of_document}
    tokens = generate_greedily(
        model, weights, sample.prompt, new_tokens=_ANSWER_TOKENS, stops=stops
    )
    return " ".join(tokenizer.decode(tokens).split())


def _tell_losses(run_dir: Path, tell: Tell) -> None:
    """Tell the losses of the first and the last step, and of the held-out samples."""
    lines = [json.loads(line) for line in (run_dir / STEPS_FILE).read_text("utf-8").splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    tell(
        f"loss {steps[0]['loss']:.3f} in step {steps[0]['step']}, "
        f"{steps[-1]['loss']:.3f} in step {steps[-1]['step']}"
    )
    evaluations = [line for line in lines if line["kind"] == "eval"]
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        tell(
            f"held-out loss {first['heldout_loss']:.3f} after {first['step']} steps, "
            f"{last['heldout_loss']:.3f} after {last['step']}"
        )
