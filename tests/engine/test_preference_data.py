"""Preferences become pairs of samples that stay together, and what is none is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny_jobs
from chat_folders import CHATML, write_chat_folder, write_chats, write_preferences
from moewright.engine.data.build_chats import build_chats
from moewright.engine.data.chat_encoder import ChatOptions
from moewright.engine.data.corpus import CorpusKind
from moewright.engine.data.corpus_rows import open_corpora
from moewright.engine.data.packing import open_chats, pack_chats, read_packed
from moewright.engine.data.sampler import SampleOrder
from moewright.engine.data.tokenizer import load_tokenizer
from moewright.engine.model.preferences import weigh_pairs
from moewright.rules.limits.engine_limits import unsupported_model
from moewright.spec.errors import BadInput
from moewright.spec.workload import DataSpec, DocumentMasking, LossSpec, Objective

QUESTION = {"role": "user", "content": "and?"}
YES, NO = ({"role": "assistant", "content": text} for text in ("yes", "no"))


def build(folder: Path, *records: Any, **options: Any) -> DataSpec:
    hf = write_chat_folder(folder / "hf", CHATML)
    source = folder / "pairs.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    return build_chats(
        source, folder / "out", ChatOptions(tokenizer=hf, heldout_fraction=0.0, **options)
    ).data


def test_the_formats_of_trl_give_the_same_pairs(tmp_path: Path) -> None:
    """With a prompt, without one, with both, and as text, which the template writes as a chat."""
    records = (
        {"prompt": [QUESTION], "chosen": [YES], "rejected": [NO]},
        {"chosen": [QUESTION, YES], "rejected": [QUESTION, NO]},
        {"prompt": "and?", "chosen": [QUESTION, YES], "rejected": [QUESTION, NO], "score": 1.0},
        {"prompt": "and?", "chosen": [YES], "rejected": [NO]},
        {"prompt": "and?", "chosen": "yes", "rejected": "no"},
    )
    data = build(tmp_path, *records)
    chats = open_chats(Path(data.train))
    assert chats.samples == len(records)
    tokenizer = load_tokenizer(Path(data.tokenizer))
    for document in range(2 * len(records)):
        start = int(chats.tokens.document_starts[document])
        place = slice(start, start + int(chats.tokens.lengths[document]))
        tokens = chats.tokens.tokens[place]
        answer = "no" if document % 2 else "yes"
        assert tokenizer.decode(tokens.tolist()) == f"user\nand?\nassistant\n{answer}\n"
        learnt = tokens[np.asarray(chats.learnt.tokens[place]) == 1]
        assert tokenizer.decode(learnt[:-1].tolist()) == answer
        assert learnt[-1] == tokenizer.inner.token_to_id("<|im_end|>")


def test_the_answers_of_a_pair_lie_beside_each_other_in_one_sequence(tmp_path: Path) -> None:
    hf = write_chat_folder(tmp_path / "hf", CHATML)
    source = write_preferences(tmp_path / "pairs.jsonl", 30)
    report = build_chats(source, tmp_path / "out", ChatOptions(tokenizer=hf))
    assert report.corpus.kind is CorpusKind.PAIRS
    assert report.corpus.train.documents + report.corpus.heldout.documents == 60
    chats = open_chats(Path(report.data.train))
    packs = pack_chats(chats, seq_len=256)
    rows = read_packed(chats, packs, np.arange(packs.count), vocab_size=300)
    pairs = 0
    for lengths, answers in zip(rows.lengths, rows.reference, strict=True):
        assert len(answers) % 2 == 0
        pairs += len(answers) // 2
        assert sum(lengths) == 256
    assert pairs == chats.samples
    longest = report.corpus.longest
    with pytest.raises(BadInput, match=rf"pairs.jsonl:\d+: gives a sample of {longest.tokens}"):
        pack_chats(chats, seq_len=longest.tokens - 1)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "rejected": "b"}, "pairs.jsonl:2: has no field 'chosen' beside"),
        ({"prompt": "a", "chosen": "b"}, "pairs.jsonl:2: has no field 'rejected' beside"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "2: has the same answer as"),
        ({"chosen": "a b", "rejected": "a c"}, "2: prompt: must be text where"),
        ({"prompt": "a", "chosen": "b", "rejected": " "}, "2: rejected: must be text, and not"),
        ({"prompt": "a", "chosen": [YES], "rejected": "no"}, "2: chosen: must be text, and not"),
        ({"prompt": [QUESTION], "chosen": [YES], "rejected": []}, "2: rejected: must be a list"),
        ({"prompt": [QUESTION], "chosen": [YES], "rejected": [QUESTION]}, "2: has no turn of the"),
        ({"messages": [QUESTION, YES]}, "2: is of schema messages, and the chats before it of"),
        ({"prompt": "x " * 90, "chosen": "b", "rejected": "c"}, "pairs.jsonl:2: gives a sample of"),
        (
            {"prompt": [QUESTION], "chosen": [YES | {"id": 1}], "rejected": [YES | {"id": 2}]},
            "pairs.jsonl:2: gives the same tokens for 'chosen' and 'rejected'",
        ),
    ],
)
def test_a_broken_preference_is_one_line_that_names_it(
    record: dict[str, Any], message: str, tmp_path: Path
) -> None:
    first = {"prompt": [QUESTION], "chosen": [YES], "rejected": [NO]}
    with pytest.raises(BadInput) as caught:
        build(tmp_path, first, record, max_tokens=150)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_pairs_and_their_objective_go_together(tmp_path: Path) -> None:
    pairs = build(tmp_path, {"prompt": "and?", "chosen": "yes", "rejected": "no"})
    source = write_chats(tmp_path / "chats.jsonl", 8)
    chats = build_chats(source, tmp_path / "chats", ChatOptions(tokenizer=tmp_path / "hf")).data
    for data, objective, nearest in (
        (pairs, Objective.NEXT_TOKEN, "dpo"),
        (chats, Objective.DPO, "next_token"),
    ):
        workload = tiny_jobs.build_workload(
            replace(data, documents=DocumentMasking.RESTARTED),
            seq_len=256,
            global_batch=1,
            loss=LossSpec(objective=objective),
        )
        with pytest.raises(BadInput, match=r"train\.objective") as caught:
            open_corpora(workload.data.train, workload, SampleOrder.SHUFFLED)
        assert caught.value.reasons[0].nearest == nearest
    (reason,) = unsupported_model(replace(tiny_jobs.MODEL, mtp_layers=1), workload)
    assert (reason.field, reason.nearest) == ("train.mtp_coeff", "0")


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_pairs_is_that_of_trl_and_has_its_derivative(smoothing: float) -> None:
    """TRL's `sigmoid` loss, and its conservative form with smoothed labels."""
    loss = LossSpec(dpo_beta=0.3, dpo_label_smoothing=smoothing)
    differences = torch.linspace(-40, 40, 41, dtype=torch.float64, requires_grad=True)
    margins, losses, slopes = weigh_pairs(differences, loss)
    scores = 0.3 * differences
    expected = -(1 - smoothing) * torch.nn.functional.logsigmoid(scores)
    expected = expected - smoothing * torch.nn.functional.logsigmoid(-scores)
    torch.testing.assert_close(margins, scores)
    torch.testing.assert_close(losses, expected)
    (derivative,) = torch.autograd.grad(expected.sum(), differences)
    torch.testing.assert_close(slopes, derivative)
