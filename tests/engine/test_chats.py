"""Chats to tokens: which are learnt, held against transformers; packing; and what is refused."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chat_folders import CHATML, MARKED, THINKING, write_chat_folder, write_chats
from moewright.engine.data.build_chats import build_chats
from moewright.engine.data.build_corpus import BuildOutcome
from moewright.engine.data.chat_encoder import ChatEncoder, ChatOptions, mark_spans
from moewright.engine.data.chats import parse_record
from moewright.engine.data.corpus import read_corpus
from moewright.engine.data.packing import (
    open_chats,
    pack_chats,
    read_packed,
)
from moewright.engine.data.tokenizer import load_tokenizer
from moewright.rules.packing import packed_share
from moewright.spec.errors import BadInput

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": "int"}}}]
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief – or not."},
    {"role": "user", "content": "what is\n\n1 + 1?"},
    {"role": "assistant", "content": "<think>easy</think>\n\nthe answer is 2 🙂"},
    {"role": "user", "content": "and <|im_end|>?"},
    {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": 1}}]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "  two spaces, the end \n"},
]


def encode(folder: Path, record: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of each sample of a record, and which are learnt."""
    encoder = ChatEncoder(ChatOptions(tokenizer=folder))
    (chat,) = parse_record(record, "chats.jsonl:1")
    (samples,) = encoder.encode([("chats.jsonl:1", chat)])
    return [(sample.tokens.tolist(), sample.is_learnt.tolist()) for sample in samples]


def load_peer(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


def test_marked_templates_learn_what_transformers_marks(tmp_path: Path) -> None:
    folder = write_chat_folder(tmp_path, MARKED)
    expected = load_peer(folder).apply_chat_template(
        CHAT, return_dict=True, return_assistant_tokens_mask=True
    )
    (sample,) = encode(folder, {"messages": CHAT})
    assert sample == (expected["input_ids"], expected["assistant_masks"])
    assert 0 < sum(sample[1]) < len(sample[0])


def test_plain_templates_learn_what_the_model_would_generate(tmp_path: Path) -> None:
    """What a model is given is the chat before the turn with a prompt; it ends with <|im_end|>."""
    folder = write_chat_folder(tmp_path, CHATML)
    peer = load_peer(folder)
    end = peer.convert_tokens_to_ids("<|im_end|>")
    ((tokens, learnt),) = encode(folder, {"messages": CHAT})
    assert tokens == peer.apply_chat_template(CHAT, return_dict=False)
    expected = [0] * len(tokens)
    for turn, message in enumerate(CHAT):
        if message["role"] == "assistant":
            before = peer.apply_chat_template(
                CHAT[:turn], add_generation_prompt=True, return_dict=False
            )
            after = peer.apply_chat_template(CHAT[: turn + 1], return_dict=False)
            assert tokens[: len(before)] == before
            last = len(after) - 1 - after[::-1].index(end)
            expected[len(before) : last + 1] = [1] * (last + 1 - len(before))
    assert learnt == expected


STARTER = (files("moewright.api") / "starter" / "chat_template.jinja").read_text("utf-8")


@pytest.mark.parametrize("template", [CHATML, MARKED, STARTER])
def test_an_answer_is_learnt_behind_the_tokens_that_chat_asks_with(
    template: str, tmp_path: Path
) -> None:
    """And it ends with a token at which `chat` stops."""
    encoder = ChatEncoder(ChatOptions(tokenizer=write_chat_folder(tmp_path, template)))
    turns = [turn for turn in CHAT if turn["role"] != "tool" and not turn.get("tool_calls")]
    (chat,) = parse_record({"messages": turns}, "chats.jsonl:1")
    ((sample,),) = encoder.encode([("chats.jsonl:1", chat)])
    answers = [place for place, turn in enumerate(turns) if turn["role"] == "assistant"]
    edges = np.flatnonzero(np.diff(sample.is_learnt, prepend=0, append=0)).reshape(-1, 2)
    assert len(edges) == len(answers)
    for place, (start, stop) in zip(answers, edges.tolist(), strict=True):
        prompt = encoder.encode_prompt(turns[:place], "chats.jsonl:1")
        assert sample.tokens[:start].tolist() == prompt
        assert int(sample.tokens[stop - 1]) in encoder.end_ids


def test_turns_that_a_template_rewrites_are_learnt_as_they_are_generated(tmp_path: Path) -> None:
    folder = write_chat_folder(tmp_path, THINKING)
    peer = load_peer(folder)
    samples = encode(folder, {"messages": CHAT, "tools": TOOLS})
    learnt = [
        peer.decode([token for token, flag in zip(*sample, strict=True) if flag])
        for sample in samples
    ]
    whole = peer.apply_chat_template(CHAT, tools=TOOLS, return_dict=False)
    assert samples[-1][0] == whole
    assert learnt[0] == "<think>easy</think>\n\nthe answer is 2 🙂<|im_end|>"
    call = '\n<call>{"name": "add", "arguments": {"a": 1}}</call><|im_end|>'
    assert learnt[1] == call + "  two spaces, the end \n<|im_end|>"
    assert len(samples) == 2


def test_the_three_schemas_are_one_chat(tmp_path: Path) -> None:
    folder = write_chat_folder(tmp_path, CHATML)
    expected = encode(folder, {"messages": [{"role": "system", "content": "s"}, *CHAT[1:3]]})
    turns = [
        {"from": "human", "value": CHAT[1]["content"]},
        {"from": "gpt", "value": CHAT[2]["content"]},
    ]
    assert encode(folder, {"system": "s", "conversations": turns}) == expected
    pair = {"prompt": CHAT[1]["content"], "completion": CHAT[2]["content"]}
    assert encode(folder, pair) == encode(folder, {"messages": CHAT[1:3]})
    both = {"prompt": CHAT[:4], "completion": CHAT[4:]}
    ((tokens, learnt),) = encode(folder, both)
    ((all_tokens, all_learnt),) = encode(folder, {"messages": CHAT})
    assert tokens == all_tokens
    assert 0 < sum(learnt) < sum(all_learnt)
    bare = write_chat_folder(tmp_path / "bare", "")
    config = json.loads((bare / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    ((tokens, learnt),) = encode(bare, {"prompt": "a b", "completion": " c"})
    assert load_peer(bare).decode(tokens) == "<s>a b c<|im_end|>"
    assert sum(learnt) == 3


def test_spans_mark_every_token_that_has_a_character_in_them() -> None:
    offsets = [(0, 2), (2, 3), (3, 3), (3, 5), (5, 9)]
    assert mark_spans(offsets, [(2, 5)]).tolist() == [0, 1, 1, 1, 0]
    assert mark_spans(offsets, [(4, 6)]).tolist() == [0, 0, 0, 1, 1]
    assert mark_spans(offsets, []).tolist() == [0] * 5


def test_a_corpus_of_chats_is_read_back_packed(tmp_path: Path) -> None:
    folder = write_chat_folder(tmp_path / "hf", CHATML)
    source = write_chats(tmp_path / "chats.jsonl")
    options = ChatOptions(tokenizer=folder, heldout_fraction=0.2)
    report = build_chats(source, tmp_path / "out", options)
    corpus = report.corpus
    assert corpus.train.documents + corpus.heldout.documents == 40
    assert corpus.heldout.documents == pytest.approx(8, abs=1)
    assert read_corpus(tmp_path / "out") == corpus
    chats = open_chats(Path(report.data.train))
    assert int(chats.learnt.tokens.sum()) == corpus.train.learnt_tokens
    packs = pack_chats(chats, seq_len=256)
    rows = read_packed(chats, packs, np.arange(packs.count), vocab_size=corpus.vocab_size)
    # A sample's first token is no target, and is never the assistant's.
    assert int((rows.targets >= 0).sum()) == corpus.train.learnt_tokens
    samples = {tuple(encode(folder, json.loads(line))[0][0]) for line in source.open()}
    for row, lengths in zip(rows.inputs, rows.lengths, strict=True):
        assert sum(lengths) == 256
        assert tuple(row[: lengths[0]]) in samples
    pairs = sum(length**2 for lengths in rows.lengths for length in lengths)
    assert packed_share(chats.lengths, chats.tokens.lengths, packs) == pytest.approx(
        pairs / (packs.count * 256**2)
    )
    assert build_chats(source, tmp_path / "out", options).outcome is BuildOutcome.REUSED
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["chat_template"]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "stream"])
def test_columnar_files_give_the_chats_of_json_lines(kind: str, tmp_path: Path) -> None:
    """Rows of a columnar file have every field, null where a message has none."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import ipc, parquet

    folder = write_chat_folder(tmp_path / "hf", THINKING)
    call = {"name": "add", "arguments": "2 3"}
    chats = [
        [
            {"role": "user", "content": f"what is {number} and 3?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "5"},
            {"role": "assistant", "content": f"the answer is {number + 3}"},
        ]
        for number in range(12)
    ]
    lines = tmp_path / "chats.jsonl"
    lines.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    table = pyarrow.Table.from_pylist([{"messages": chat} for chat in chats])
    path = tmp_path / ("chats.parquet" if kind == "parquet" else "chats.arrow")
    if kind == "parquet":
        parquet.write_table(table, path, row_group_size=5)
    else:
        open_file = ipc.new_file if kind == "arrow" else ipc.new_stream
        with open_file(str(path), table.schema) as writer:
            writer.write_table(table)
    streams = []
    for source in (lines, path):
        options = ChatOptions(tokenizer=folder, heldout_fraction=0.0)
        report = build_chats(source, tmp_path / source.suffix, options)
        opened = open_chats(Path(report.data.train))
        streams.append((opened.tokens.tokens.tolist(), opened.learnt.tokens.tolist()))
    assert streams[0] == streams[1]
    broken = pyarrow.Table.from_pylist([{"messages": chats[0]}, {"messages": chats[1][:1]}])
    parquet.write_table(broken, tmp_path / "broken.parquet")
    with pytest.raises(BadInput, match=r"broken\.parquet: row 2: has no turn of the assistant"):
        build_chats(tmp_path / "broken.parquet", tmp_path / "none", options)
    assert not (tmp_path / "none").exists()


def chat_line(*roles: str) -> str:
    return json.dumps({"messages": [{"role": role, "content": "x"} for role in roles]})


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], "bad.jsonl:3: is no line of JSON: Expecting property name enclosed in double"),
        (['{"messages": [{"role": "user"'], "Expecting ',' delimiter at column 30"),
        (["[1]"], "bad.jsonl:3: is no JSON object"),
        (['{"text": "x"}'], "bad.jsonl:3: has no field 'messages'"),
        ([chat_line("user", "user")], "bad.jsonl:3: has no turn of the assistant"),
        (['{"messages": []}'], "bad.jsonl:3: messages: must be a list of messages"),
        (['{"messages": [{"content": "x"}]}'], "bad.jsonl:3: messages, turn 1: has no 'role'"),
        (['{"messages": [{"role": "user"}]}'], "turn 1: has neither 'content'"),
        (['{"messages": [{"role": "user", "content": null}]}'], "turn 1: has neither 'content'"),
        (['{"messages": [{"role": "user", "content": 5}]}'], "turn 1: content: must be text"),
        (
            ['{"conversations": [{"from": "humn", "value": "x"}]}'],
            "bad.jsonl:3: conversations, turn 1: from=humn: is none of",
        ),
        (['{"prompt": "a", "completion": "b"}'], "bad.jsonl:3: is of schema prompt and completion"),
        ([chat_line("user", "assistant").replace('"x"', f'"{"x " * 90}"')], "bad.jsonl:3: gives a"),
        ([chat_line("user", "bad", "assistant")], "refuses it: bad is no role"),
    ],
)
def test_a_broken_chat_is_one_line_that_names_it_and_nothing_is_written(
    lines: list[str], message: str, tmp_path: Path
) -> None:
    template = "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('bad is no role')"
    folder = write_chat_folder(tmp_path / "hf", template + " }}{% endif %}{% endfor %}" + CHATML)
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join([chat_line("user", "assistant"), "", *lines]) + "\n")
    out = tmp_path / "run" / "data"
    options = ChatOptions(tokenizer=folder, heldout_fraction=0.0, max_tokens=100)
    with pytest.raises(BadInput) as caught:
        build_chats(path, out, options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not out.parent.exists()


def test_text_that_has_no_bytes_is_replaced_and_a_share_beyond_half_is_refused(
    tmp_path: Path,
) -> None:
    folder = write_chat_folder(tmp_path / "hf", CHATML)
    path = tmp_path / "chats.jsonl"
    path.write_text(chat_line("user", "assistant").replace("x", "\\ud800 x") + "\n")
    options = ChatOptions(tokenizer=folder, heldout_fraction=0.0)
    report = build_chats(path, tmp_path / "out", options)
    tokens = open_chats(Path(report.data.train)).tokens.tokens.tolist()
    assert load_tokenizer(folder).decode(tokens).count("? x") == 2
    with pytest.raises(BadInput, match=r"heldout_fraction=.* must be"):
        build_chats(path, tmp_path / "new", ChatOptions(tokenizer=folder, heldout_fraction=0.9))
    assert not (tmp_path / "new").exists()


def test_a_template_that_is_none_or_that_never_writes_the_assistant_is_refused(
    tmp_path: Path,
) -> None:
    source = write_chats(tmp_path / "chats.jsonl", 3)
    for template, message in (
        ("{% for %}", "is no chat template"),
        ("{{ ''.__class__.__mro__ }}", "refuses it"),
        ("{{ messages | length }}", "renders what comes before turn"),
        ("the same", "renders nothing of the assistant's turn"),
    ):
        folder = write_chat_folder(tmp_path / "hf", template)
        with pytest.raises(BadInput, match=message):
            build_chats(source, tmp_path / "out", ChatOptions(tokenizer=folder))
    folder = write_chat_folder(tmp_path / "hf", "")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match="has no chat template to write it with"):
        build_chats(source, tmp_path / "out", ChatOptions(tokenizer=folder))


def test_a_sample_longer_than_the_sequence_names_its_record(tmp_path: Path) -> None:
    folder = write_chat_folder(tmp_path / "hf", CHATML)
    source = write_chats(tmp_path / "chats.jsonl")
    report = build_chats(source, tmp_path / "out", ChatOptions(tokenizer=folder))
    longest = report.corpus.longest
    chats = open_chats(Path(report.data.train))
    with pytest.raises(BadInput, match=rf"chats.jsonl:\d+: gives a sample of {longest.tokens}"):
        pack_chats(chats, seq_len=longest.tokens - 1)
    assert pack_chats(chats, seq_len=longest.tokens).count > 0
