"""Fine-tuning a Hugging Face folder on chats: data, plan, training, export, and a look at it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from moewright.api.converting import ExportForm, holds_adapters, plan_export
from moewright.api.finetuning_job import (
    JOB_FILE,
    ChatShare,
    FineTuningRequest,
    check_request,
    write_job,
)
from moewright.api.reporting import build_report, describe_outcome, write_page
from moewright.api.training import TrainingRequest, is_first_rank, prepare_training, run_training
from moewright.codec import write_text
from moewright.codec.data_paths import WeightedPath
from moewright.engine.observe.display import STEP_LINES, RunDisplay
from moewright.intake import hf
from moewright.rules.shapes.parameters import count_parameters
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import ModelSpec
from moewright.spec.options import Tell

if TYPE_CHECKING:
    from moewright.engine.data.build_corpus import BuildReport

_DATA_FOLDER = "data"
_BASE_FOLDER = "base"
_EXPORT_FOLDER = "hf"
_ADAPTER_FOLDER = "adapter"
# Parameters of the largest model that answers here, which it does in fp32 and without a cache.
_MAX_ANSWERING = 200_000_000
_ANSWER_TOKENS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A chat up to an answer, as tokens, and the text that it asks and expects."""

    prompt: tuple[int, ...]
    question: str
    expected: str


def finetune(request: FineTuningRequest, tell: Tell, display: RunDisplay = STEP_LINES) -> int:
    """Fine-tune, and return the exit code of the training, which `display` shows.

    Everything is under `request.out`: data, the job, its run, and the trained Hugging Face folder.
    The same call goes on where an interrupted one stopped.

    Raises:
        BadInput: for a folder, a record or a number that cannot be trained.
    """
    from moewright.engine.data.build_chats import BAD_FILE
    from moewright.engine.data.corpus import count_samples

    base = request.base or request.out / _BASE_FOLDER
    if is_first_rank():
        if request.base is None and not (base / "model.safetensors").is_file():
            with TemporaryDirectory() as folder:  # a refusal leaves nothing behind
                _write_starter(Path(folder))
                check_request(request, Path(folder))
            _write_starter(base)
            tell(f"{base}: a fresh model of {_describe_size(base)} to begin with")
        else:
            check_request(request, base)
    shares = _build_shares(request, base)
    for share in shares:
        corpus = share.report.corpus
        name = f"{share.name}: " if len(shares) > 1 else ""
        learnt = corpus.train.learnt_tokens / max(1, corpus.train.tokens)
        tell(
            f"{name}{count_samples(corpus, corpus.train)} of {corpus.train.tokens:,} tokens to "
            f"train on, {learnt:.0%} of them the assistant's; "
            f"{count_samples(corpus, corpus.heldout)} held out"
        )
        if corpus.bad_records:
            bad = Path(share.report.data.train).parent / BAD_FILE
            tell(f"{name}{corpus.bad_records:,} bad records left out: {bad}")
    job_path = request.out / JOB_FILE
    if is_first_rank():
        write_text(job_path, write_job(request, base, shares, tell))
    training = TrainingRequest(
        path=job_path, run_dir=request.out, nproc=request.options.nproc, overrides=request.overrides
    )
    plan = prepare_training(training, tell)
    sample = _read_sample(shares[0].report, base)
    before = _answer(plan.model, base, sample) if is_first_rank() else None
    code = run_training(plan, training, display)
    if code or not is_first_rank():
        return code
    out = request.out / _EXPORT_FOLDER
    _export(request.out, out, tell)
    written = [out]
    if (request.out / _ADAPTER_FOLDER).is_dir():
        written.append(request.out / _ADAPTER_FOLDER)
    run = build_report(request.out)
    written.append(write_page(run, request.out / "report.html"))
    # What comes next is to be talked with; transformers and peft load the folders.
    chat = f"moewright chat {request.out}"
    for line in describe_outcome(run, request.out, written, next_steps=(chat,)):
        tell(line)
    if before is None:
        tell(f"no answers shown: more than {_MAX_ANSWERING:,} parameters; ask {out} instead")
        return code
    tell(f"asked   {sample.question}")
    tell(f"wanted  {sample.expected}")
    tell(f"before  {before}")
    tell(f"after   {_answer(plan.model, out, sample)}")
    return code


def _export(run_dir: Path, out: Path, tell: Tell) -> None:
    """Write what a run has learnt, in place of what an earlier call wrote.

    Where PEFT has no name for an adapter, the merged weights are all there is.
    """
    adapter = run_dir / _ADAPTER_FOLDER
    for folder in (out, adapter):
        shutil.rmtree(folder, ignore_errors=True)
    plan_export(run_dir, form=ExportForm.WEIGHTS).run(out, lambda _nbytes: None)
    if not holds_adapters(run_dir):
        return
    try:
        plan_export(run_dir, form=ExportForm.PEFT).run(adapter, lambda _nbytes: None)
    except BadInput as error:
        tell(f"no {adapter}: {error.reasons[0].field} {error.reasons[0].rule}")


def _build_shares(request: FineTuningRequest, base: Path) -> tuple[ChatShare, ...]:
    """Build the data of a request: one corpus in its folder, several in one each below it."""
    folder = request.out / _DATA_FOLDER
    if not request.chats:
        with as_file(files("moewright.api") / "starter" / "chats.jsonl") as path:
            report = _build_data(request, base, path, folder)
        return (ChatShare(part=WeightedPath(path=str(path)), report=report),)
    # Blanks part the paths of a blend.
    if len(request.chats) > 1 and " " in str(folder):
        rule = "cannot have a space where chats are blended"
        raise BadInput(Reason(field="--out", value=str(request.out), rule=rule))
    return tuple(
        ChatShare(
            part=part,
            report=_build_data(
                request, base, Path(part.path), folder / str(number) if number else folder
            ),
        )
        # From 0 where there is one part: 0 is the data's own folder.
        for number, part in enumerate(request.chats, start=len(request.chats) > 1)
    )


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


def _build_data(request: FineTuningRequest, base: Path, chats: Path, out: Path) -> BuildReport:
    from moewright.engine.data.build_chats import build_chats
    from moewright.engine.data.chat_encoder import ChatOptions

    options = ChatOptions(
        tokenizer=base,
        template=request.options.chat_template,
        heldout_fraction=request.options.heldout,
        max_tokens=request.options.seq_len or 0,
        columns=request.options.columns,
        skip_bad=request.options.skip_bad,
    )
    return build_chats(chats, out, options)


def _read_sample(report: BuildReport, base: Path) -> Sample:
    """Return the first held-out sample, or the first of all, up to its first answer."""
    from moewright.engine.data.packing import open_chats
    from moewright.engine.data.tokenizer import load_tokenizer

    # Of a pair that is the chosen answer.
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
    from moewright.engine.run.generate import AnsweringModel

    if count_parameters(model).total > _MAX_ANSWERING:
        return None
    tokenizer = load_tokenizer(weights)
    stops = {*read_generation_stops(weights), tokenizer.end_of_document}
    answering = AnsweringModel(model, weights)
    tokens = answering.generate(sample.prompt, new_tokens=_ANSWER_TOKENS, stops=stops)
    return " ".join(tokenizer.decode(list(tokens)).split())
