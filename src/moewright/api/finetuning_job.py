"""The job of a fine-tuning, whose numbers follow from the data, and the checks before them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import tomli_w

from moewright.codec.data_paths import WeightedPath, format_data_paths, parse_data_paths
from moewright.intake import hf
from moewright.intake.hardware_text import parse_hardware_text
from moewright.intake.job import DEFAULT_HARDWARE, read_job
from moewright.rules.limits.engine_limits import unsupported_model
from moewright.rules.packing import filled_share
from moewright.spec.errors import BadInput, Reason
from moewright.spec.options import FineTuningOptions, Tell
from moewright.spec.workload import BaseQuantization, Objective

if TYPE_CHECKING:
    from moewright.engine.data.build_corpus import BuildReport

JOB_FILE = "finetune.toml"
# A sequence has so many tokens at least, and a power of two of them.
_MIN_SEQ_LEN = 256
# Steps that an epoch has at least, where the data allow it.
_STEPS_PER_EPOCH = 8
_MAX_BATCH = 64
# The peak learning rates of published recipes for whole models, and for one from fresh weights.
_LR = 1e-5
_LORA_LR = 2e-4
_DPO_LR = 1e-6
_DPO_LORA_LR = 1e-5
_FRESH_LR = 3e-3
_FRESH_EPOCHS = 20
_EPOCHS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class FineTuningRequest:
    """What is to be fine-tuned on what.

    `base` is None and `chats` () for the model and the chats that moewright brings. `on` names the
    hardware as count x device, "" this machine.
    """

    base: Path | None
    chats: tuple[WeightedPath, ...]
    out: Path
    options: FineTuningOptions
    on: str = ""
    overrides: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatShare:
    """Chats that were built, and the share of them in what is trained."""

    part: WeightedPath
    report: BuildReport

    @property
    def name(self) -> str:
        """The name of the file or folder of the chats."""
        return Path(self.part.path).name


@dataclass(frozen=True, kw_only=True, slots=True)
class _JobNumbers:
    """The numbers of a job that follow from its data."""

    seq_len: int
    global_batch: int
    steps: int
    heldout_batches: int = 0
    objective: Objective = Objective.NEXT_TOKEN


def read_chat_paths(text: str) -> tuple[WeightedPath, ...]:
    """Read a path of chats, or weights and paths in turns; () for "".

    Raises:
        BadInput: a weight or a path is missing.
    """
    # A path may have blanks, which part those of a blend.
    if text and Path(text).exists():
        return (WeightedPath(path=text),)
    return parse_data_paths(text, "chats")


def check_request(request: FineTuningRequest, base: Path) -> None:
    """Refuse a base, or a number of the job, that cannot be trained, before anything is written.

    Raises:
        BadInput: naming the file of the base, the option, or the key of the job.
    """
    from moewright.engine.data.corpus import check_heldout_fraction
    from moewright.engine.data.preflight import require_vocabulary
    from moewright.engine.data.tokenizer import TOKENIZER_FILE, load_tokenizer
    from moewright.engine.hf.folder import open_hf_folder
    from moewright.engine.hf.names import build_name_table

    if request.options.epochs is not None and request.options.epochs <= 0:
        epochs = f"{request.options.epochs:g}"
        reason = Reason(field="--epochs", value=epochs, rule="must be positive", nearest="1")
        raise BadInput(reason)
    check_heldout_fraction(request.options.heldout)
    # They stand in: the chats are not built yet.
    numbers = _JobNumbers(
        seq_len=request.options.seq_len or _MIN_SEQ_LEN,
        global_batch=request.options.global_batch or 1,
        steps=1,
    )
    # For its refusals, which name the file of the base.
    hf.read_config(base)
    # Read from a file, as the job will be: overrides and refusals are the same.
    with TemporaryDirectory() as folder:
        path = Path(folder) / JOB_FILE
        path.write_text(_format_job(request, base.resolve(), Path(folder), {}, numbers), "utf-8")
        job = read_job(path, request.overrides)
    reasons = unsupported_model(job.model, job.workload)
    if reasons:
        raise BadInput(*reasons)
    tokenizer_path = str(base / TOKENIZER_FILE)
    require_vocabulary(tokenizer_path, load_tokenizer(base).vocab_size, job.model.vocab_size)
    build_name_table(job.model, open_hf_folder(base))


def write_job(
    request: FineTuningRequest, base: Path, shares: Sequence[ChatShare], tell: Tell
) -> str:
    """Return the job file, whose numbers fit the data where the request leaves them open.

    Raises:
        BadInput: chats stand beside preferences.
    """
    from moewright.engine.data.packing import open_chats, pack_chats

    nproc, _ = _choose_hardware(request, request.out)
    chats = [open_chats(Path(share.report.data.train)) for share in shares]
    holds_pairs = {corpus.holds_pairs for corpus in chats}
    if len(holds_pairs) > 1:
        rule = "blends chats with preferences, which are not learnt alike"
        names = ", ".join(share.name for share in shares)
        raise BadInput(Reason(field="chats", value=names, rule=rule, nearest="one kind of them"))
    seq_len = request.options.seq_len
    if seq_len is None:
        longest = max(share.report.corpus.longest.tokens for share in shares)
        seq_len = max(_MIN_SEQ_LEN, 1 << (longest - 1).bit_length())
    packs = [pack_chats(corpus, seq_len=seq_len) for corpus in chats]
    sequences = sum(pack.count for pack in packs)
    batch = request.options.global_batch or _choose_batch(sequences, nproc)
    default_epochs = _FRESH_EPOCHS if request.base is None else _EPOCHS
    epochs = default_epochs if request.options.epochs is None else request.options.epochs
    steps = max(1, round(epochs * sequences / batch))
    filled = sum(
        pack.count * filled_share(corpus.lengths, pack)
        for corpus, pack in zip(chats, packs, strict=True)
    )
    tell(
        f"{sequences:,} sequences of {seq_len:,} tokens, {filled / sequences:.0%} filled; "
        f"{steps:,} steps of {batch}, {epochs:g} {'epoch' if epochs == 1 else 'epochs'}"
    )
    if len(shares) > 1:
        for share, pack in zip(shares, packs, strict=True):
            passes = steps * batch * share.part.share / pack.count
            tell(f"{share.part.share:.1%} of each step from {share.name}: {passes:.2g} times over")
    data = {
        "train": _blend_paths(shares, [share.report.data.train for share in shares], request.out),
        "tokenizer": os.path.relpath(shares[0].report.data.tokenizer, request.out),
        "documents": "restarted",
    }
    heldout = [share for share in shares if share.report.data.heldout]
    heldout_counts = [
        pack_chats(open_chats(Path(share.report.data.heldout)), seq_len=seq_len).count
        for share in heldout
    ]
    # A blend is evaluated up to where its first corpus would begin anew.
    total_share = sum(share.part.share for share in heldout)
    once = [
        int(count * total_share / share.part.share)
        for share, count in zip(heldout, heldout_counts, strict=True)
    ]
    heldout_batches = min(once, default=0) // batch
    if heldout_batches:
        paths = [share.report.data.heldout for share in heldout]
        data["heldout"] = _blend_paths(heldout, paths, request.out)
    elif heldout:
        tell("the held-out samples fill no batch, so nothing is evaluated")
    numbers = _JobNumbers(
        seq_len=seq_len,
        global_batch=batch,
        steps=steps,
        heldout_batches=heldout_batches,
        objective=Objective.DPO if holds_pairs == {True} else Objective.NEXT_TOKEN,
    )
    return _format_job(request, base, request.out, data, numbers)


def _blend_paths(shares: Sequence[ChatShare], paths: Sequence[str], out: Path) -> str:
    """Return the corpora of a job in `out`, with their weights where there are several."""
    return format_data_paths(
        [
            replace(share.part, path=os.path.relpath(path, out))
            for share, path in zip(shares, paths, strict=True)
        ]
    )


def _format_job(
    request: FineTuningRequest,
    base: Path,
    folder: Path,
    data: Mapping[str, str],
    numbers: _JobNumbers,
) -> str:
    """Return the text of a job file in `folder`."""
    nproc, hardware = _choose_hardware(request, folder)
    lr = request.options.lr
    if lr is None:
        default_lr = _LORA_LR if request.options.lora_rank else _LR
        if numbers.objective is Objective.DPO:
            default_lr = _DPO_LORA_LR if request.options.lora_rank else _DPO_LR
        lr = _FRESH_LR if request.base is None else default_lr
    task: dict[str, Any] = {"task": "sft"}
    if request.options.freeze:
        task["freeze"] = list(request.options.freeze)
    if request.options.lora_rank:
        task |= {
            "task": "lora",
            "lora_rank": request.options.lora_rank,
            "lora_alpha": 2.0 * request.options.lora_rank,
        }
    if request.options.quantize_base is not BaseQuantization.NONE:
        task["quantize_base"] = request.options.quantize_base.value
    if numbers.objective is not Objective.NEXT_TOKEN:
        task["objective"] = numbers.objective.value
    steps = numbers.steps
    job = {
        "model": {"weights": os.path.relpath(base, folder)},
        "data": dict(data),
        "train": {
            **task,
            "nproc": nproc,
            "hardware": hardware,
            "seq_len": numbers.seq_len,
            "global_batch": numbers.global_batch,
            "steps": steps,
            "lr": lr,
            "warmup_steps": max(1, steps // 20),
            "weight_decay": 0.0,
            "precision": "bf16",
            "eval_every_steps": max(1, steps // 4),
            "eval_batches": max(1, numbers.heldout_batches),
        },
        "checkpoint": {"every_steps": max(1, steps // 4), "keep": 1},
    }
    return tomli_w.dumps(job)


def _choose_hardware(request: FineTuningRequest, folder: Path) -> tuple[int, str]:
    """Return the number of ranks, and the hardware as a job in `folder` names it."""
    if request.on:
        text = parse_hardware_text(request.on)
        name = os.path.relpath(text.name, folder) if text.is_file else text.name
        return request.options.nproc or text.count or 1, name
    count = request.options.nproc or _count_devices()
    return count, os.path.relpath(DEFAULT_HARDWARE, folder)


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
