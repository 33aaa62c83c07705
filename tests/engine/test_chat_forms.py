"""Public chat datasets in their own form, without a flag; named columns; weights; bad records."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from chat_folders import CHATML, MARKED, write_chat_folder
from moewright.engine.data.build_chats import BAD_FILE, build_chats
from moewright.engine.data.chat_encoder import ChatEncoder, ChatOptions
from moewright.engine.data.chat_forms import parse_columns
from moewright.engine.data.chats import parse_chat, parse_record
from moewright.spec.errors import BadInput

ASKED = [("user", "What is 1 + 1?"), ("assistant", "It is 2.")]
Q, A = "What is 1 + 1?", "It is 2."
SYSTEM = ("system", "Be brief.")
SHAREGPT = [{"from": "human", "value": Q}, {"from": "gpt", "value": A}]
MESSAGES = [{"role": "user", "content": Q}, {"role": "assistant", "content": A}]
# Each as its dataset has it, with fields beside those that are read.
FORMS: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "alpaca": ({"instruction": Q, "input": "", "output": A, "text": "Below is"}, ASKED),
    "alpaca with an input": (
        {"instruction": "Add.", "input": "1, 1", "output": "2"},
        [("user", "Add.\n\n1, 1"), ("assistant", "2")],
    ),
    "dolly": (
        {"instruction": Q, "context": "", "response": A, "category": "open_qa"},
        ASKED,
    ),
    "sharegpt": ({"id": "x_0", "conversations": SHAREGPT}, ASKED),
    "sharegpt with a system": (
        {"system": "Be brief.", "conversations": SHAREGPT, "tools": "[]"},
        [SYSTEM, *ASKED],
    ),
    "no_robots": ({"prompt": Q, "prompt_id": "1", "messages": MESSAGES, "category": "QA"}, ASKED),
    "openorca": (
        {"id": "cot.1", "system_prompt": "Be brief.", "question": Q, "response": A},
        [SYSTEM, *ASKED],
    ),
    "gsm8k": ({"question": Q, "answer": A}, ASKED),
    "metamath": ({"query": Q, "response": A, "type": "GSM", "original_question": "-"}, ASKED),
    "openmath": (
        {"problem": Q, "generated_solution": A, "expected_answer": "2", "problem_source": "x"},
        ASKED,
    ),
    "flan": ({"inputs": Q, "targets": A, "task": "arithmetic"}, ASKED),
    "ultrachat": ({"id": "0", "data": [Q, A]}, ASKED),
    "lima": ({"conversations": [Q, A], "source": "stackexchange"}, ASKED),
    "guanaco": ({"text": f"### Human: {Q}### Assistant: {A}"}, ASKED),
    "glaive": (
        {"system": "SYSTEM: Be brief.", "chat": f"USER: {Q}\n\n\nASSISTANT: {A} <|endoftext|>\n"},
        [SYSTEM, *ASKED],
    ),
    "belle with a history": (
        {"instruction": Q, "input": "", "output": A, "history": [["Hello", "Hi"]]},
        [("user", "Hello"), ("assistant", "Hi"), *ASKED],
    ),
    "messages as a text of JSON": ({"messages": json.dumps(MESSAGES)}, ASKED),
}


def spoken(chat: Any) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in chat.messages]


@pytest.mark.parametrize("name", FORMS)
def test_a_public_form_is_read_without_a_flag(name: str) -> None:
    record, expected = FORMS[name]
    (chat,) = parse_record(record, "data.jsonl:1")
    assert spoken(chat) == expected


def test_transcripts_of_preferences_are_two_chats() -> None:
    begin = f"\n\nHuman: Hello\n\nAssistant: Hi\n\nHuman: {Q}\n\nAssistant: "
    chosen, rejected = parse_record({"chosen": begin + A, "rejected": begin + "3"}, "hh:1")
    assert spoken(chosen)[:3] == spoken(rejected)[:3]
    assert (spoken(chosen)[3], spoken(rejected)[3]) == (("assistant", A), ("assistant", "3"))
    assert chosen.first == rejected.first == 3


@pytest.mark.parametrize(
    "record",
    [
        {
            "conversations": SHAREGPT[:1],
            "chosen": SHAREGPT[1],
            "rejected": {"from": "gpt", "value": "3"},
        },
        {"instruction": Q, "input": "", "chosen": A, "rejected": "3"},
        {"question": Q, "chosen": A, "rejected": "3"},
        {"prompt": Q, "chosen": [MESSAGES[1]], "rejected": [{"role": "assistant", "content": "3"}]},
    ],
)
def test_public_forms_of_preferences_ask_and_answer_the_same(record: dict[str, Any]) -> None:
    chosen, rejected = parse_record(record, "dpo:1")
    assert spoken(chosen) == ASKED
    assert spoken(rejected) == [ASKED[0], ("assistant", "3")]
    assert chosen.first == 1


def test_an_answer_that_nobody_wants_is_not_learnt() -> None:
    assert parse_record({"messages": MESSAGES, "label": True}, "kto:1")
    with pytest.raises(BadInput, match=r"kto:1: is an answer that nobody wants"):
        parse_record({"messages": MESSAGES, "label": False}, "kto:1")


def test_tools_of_a_text_are_those_of_a_list() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    (chat,) = parse_record({"messages": MESSAGES, "tools": json.dumps(tools)}, "x:1")
    assert chat.tools == tools


def test_named_columns_go_before_what_is_recognized() -> None:
    record = {"instruction": "no", "output": "no", "frage": Q, "antwort": A, "rolle": "Be brief."}
    columns = parse_columns("prompt=frage, answer=antwort,system=rolle")
    (chat,) = parse_record(record, "x:1", columns)
    assert spoken(chat) == [SYSTEM, *ASKED]
    with pytest.raises(BadInput, match=r"has no column 'frag' .*nearest legal value: frage"):
        parse_record(record, "x:1", parse_columns("prompt=frag,answer=antwort"))
    for text, message in (
        ("prompt", "must be NAME=COLUMN"),
        ("prmpt=a,answer=b", "nearest legal value: prompt=a"),
        ("prompt=a", "names prompt and no answer"),
    ):
        with pytest.raises(BadInput, match=message):
            parse_columns(text)


def test_a_record_in_no_known_form_names_its_fields_and_the_option() -> None:
    with pytest.raises(BadInput, match=r"it has frage, antwort; nearest.*--columns prompt="):
        parse_record({"frage": Q, "antwort": A}, "x:1")


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_turns_of_weight_0_are_read_and_not_learnt(template: str, tmp_path: Path) -> None:
    folder = write_chat_folder(tmp_path, template)
    first = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bad", "weight": 0}]
    encoder = ChatEncoder(ChatOptions(tokenizer=folder))
    record = {"messages": [*first, *MESSAGES]}
    ((sample,),) = encoder.encode([("x:1", parse_chat(record, "x:1"))])
    learnt = encoder.tokenizer.decode(sample.tokens[sample.is_learnt == 1].tolist())
    whole = encoder.tokenizer.decode(sample.tokens.tolist())
    assert "bad" in whole
    assert A in learnt
    assert "bad" not in learnt
    record["messages"][1]["weight"] = 0.5
    with pytest.raises(BadInput, match=r"message 2: weight=0.5: must be 0 or 1"):
        parse_chat(record, "x:1")


def alpaca_rows(count: int) -> list[dict[str, str]]:
    return [
        {"instruction": f"what is {number}", "input": "", "output": f"the answer is {number}"}
        for number in range(count)
    ]


def write_rows(folder: Path, kind: str, rows: list[dict[str, str]]) -> Path:
    """Write rows as a file of this ending, or as a folder as datasets and the hub have them."""
    path = folder / f"alpaca.{kind}"
    if kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "of lines.json":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "of an object.json":
        path.write_text(json.dumps({"version": "1.0", "rows": rows}))
    elif kind == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        pyarrow = pytest.importorskip("pyarrow")
        table = pyarrow.Table.from_pylist(rows)
        test = pyarrow.Table.from_pylist([{**row, "output": "of the test"} for row in rows])
        path.mkdir()
        (path / "README.md").write_text("# a card")
        if kind == "hub":
            from pyarrow import parquet

            (path / "data").mkdir()
            parquet.write_table(table, path / "data" / "train-00000-of-00001.parquet")
            parquet.write_table(test, path / "data" / "test-00000-of-00001.parquet")
        else:
            (path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
            for split, part in (("train", table), ("test", test)):
                (path / split).mkdir()
                (path / split / "dataset_info.json").write_text("{}")
                (path / split / "state.json").write_text("{}")
                arrow = path / split / "data-00000-of-00001.arrow"
                with pyarrow.ipc.new_stream(str(arrow), part.schema) as writer:
                    writer.write_table(part)
    return path


KINDS = ("json", "of lines.json", "of an object.json", "csv", "hub", "saved to disk")


@pytest.mark.parametrize("kind", KINDS)
def test_files_and_folders_of_a_dataset_give_the_same_corpus(kind: str, tmp_path: Path) -> None:
    base = write_chat_folder(tmp_path / "base", CHATML)
    rows = alpaca_rows(12)
    lines = tmp_path / "alpaca.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = build_chats(lines, tmp_path / "lines", ChatOptions(tokenizer=base)).corpus
    source = write_rows(tmp_path, kind, rows)
    corpus = build_chats(source, tmp_path / "out", ChatOptions(tokenizer=base)).corpus
    assert corpus.train == expected.train
    assert corpus.heldout == expected.heldout


def test_bad_records_are_counted_listed_and_bounded(tmp_path: Path) -> None:
    base = write_chat_folder(tmp_path / "base", CHATML)
    source = tmp_path / "chats.jsonl"
    lines = [json.dumps(row) for row in alpaca_rows(300)]
    lines[3] = '{"instruction": "cut off'
    lines[7] = json.dumps({"frage": Q})
    lines[280] = json.dumps({"instruction": "long", "output": "9 " * 400})
    source.write_text("\n".join(lines))
    out = tmp_path / "out"
    with pytest.raises(BadInput, match=r"chats.jsonl:4: is no line of JSON"):
        build_chats(source, out, ChatOptions(tokenizer=base, max_tokens=200))
    with pytest.raises(BadInput, match=r"--skip-bad=2: there are more bad records than 2"):
        build_chats(source, out, ChatOptions(tokenizer=base, max_tokens=200, skip_bad=2))
    assert not out.exists()
    options = ChatOptions(tokenizer=base, max_tokens=200, skip_bad=3)
    corpus = build_chats(source, out, options).corpus
    assert corpus.bad_records == 3
    assert corpus.train.documents + corpus.heldout.documents == 297
    listed = (out / BAD_FILE).read_text().splitlines()
    assert [line.partition(":")[2].partition(":")[0] for line in listed] == ["4", "8", "281"]
    assert 0 < corpus.longest.tokens <= 200


def test_a_table_with_a_cell_too_few_names_its_line(tmp_path: Path) -> None:
    base = write_chat_folder(tmp_path / "base", CHATML)
    source = tmp_path / "chats.csv"
    source.write_text("prompt,response\nwhat,the answer\nwhat\n")
    with pytest.raises(BadInput, match=r"chats.csv:3: has not the 2 cells of the first line"):
        build_chats(source, tmp_path / "out", ChatOptions(tokenizer=base))
