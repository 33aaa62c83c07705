"""Public chat datasets in their own form, without a flag; named columns; weights; bad records."""

from __future__ import annotations

import copy
import csv
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chat_folders import CHATML, MARKED, write_chat_folder
from moewright.engine.data.build_chats import BAD_FILE, build_chats
from moewright.engine.data.chat_encoder import ChatEncoder, ChatOptions
from moewright.engine.data.chat_forms import parse_columns
from moewright.engine.data.chat_trees import join_trees
from moewright.engine.data.chats import parse_record
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
    "natural instructions": (
        {"id": "1", "definition": "Add.", "inputs": "1, 1", "targets": "2"},
        [("user", "Add.\n\n1, 1"), ("assistant", "2")],
    ),
    "sciq": ({"question": Q, "distractor1": "It is 3.", "correct_answer": A}, ASKED),
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
    "parts of OpenAI": (
        {
            "messages": [
                {**turn, "content": [{"type": "text", "text": turn["content"]}]}
                for turn in MESSAGES
            ]
        },
        ASKED,
    ),
    "contents of Gemini": (
        {
            "systemInstruction": {"parts": [{"text": "Be brief."}]},
            "contents": [
                {"role": "user", "parts": [{"text": "What is "}, {"text": "1 + 1?"}]},
                {"role": "model", "parts": [{"text": A}]},
            ],
        },
        [SYSTEM, *ASKED],
    ),
    "parts of Bedrock": (
        {
            "schemaVersion": "bedrock-conversation-2024",
            "system": [{"text": "Be brief."}],
            "messages": [{**turn, "content": [{"text": turn["content"]}]} for turn in MESSAGES],
        },
        [SYSTEM, *ASKED],
    ),
    "nemotron": (
        {"input": MESSAGES[:1], "output": A, "reasoning": "off", "system_prompt": "Be brief."},
        [SYSTEM, *ASKED],
    ),
    "items of OpenAI's responses": (
        {
            "input": [{"role": "user", "content": [{"type": "input_text", "text": Q}]}],
            "output": [{"role": "assistant", "content": [{"type": "output_text", "text": A}]}],
        },
        ASKED,
    ),
    "a log of calls": ({"messages": MESSAGES[:1], "response": A, "latency": 0.2}, ASKED),
    "tree of oasst": (
        {
            "message_tree_id": "t",
            "prompt": {
                "role": "prompter",
                "text": Q,
                "replies": [
                    {"role": "assistant", "text": "3", "rank": 1, "replies": []},
                    {"role": "assistant", "text": A, "rank": 0, "replies": []},
                    {"role": "assistant", "text": "!", "deleted": True, "replies": []},
                ],
            },
        },
        ASKED,
    ),
    "text of oasst": (
        {"text": f"<|prompter|>{Q}<|endoftext|><|assistant|>{A}<|endoftext|>"},
        ASKED,
    ),
    "text of ChatML": (
        {"text": "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in ASKED)},
        ASKED,
    ),
    "text of Llama 2": (
        {"text": f"<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\n{Q} [/INST] {A} </s>"},
        [SYSTEM, *ASKED],
    ),
    "text of Llama 3": (
        {
            "text": "<|begin_of_text|>"
            + "".join(
                f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>"
                for role, text in ASKED
            )
        },
        ASKED,
    ),
    "text of Zephyr": ({"text": f"<|user|>\n{Q}</s>\n<|assistant|>\n{A}</s>"}, ASKED),
    "capybara": (
        {
            "source": "x",
            "conversation": [{"input": "Hello", "output": "Hi"}, {"input": Q, "output": A}],
        },
        [("user", "Hello"), ("assistant", "Hi"), *ASKED],
    ),
    "turns by who speaks": ({"conversation": [{"human": Q, "assistant": A}]}, ASKED),
    "squad": (
        {"context": "One is one.", "question": Q, "answers": {"text": [A], "answer_start": [0]}},
        [("user", f"{Q}\n\nOne is one."), ("assistant", A)],
    ),
    "cohere": (
        {"chat_history": [{"role": "USER", "message": Q}, {"role": "CHATBOT", "message": A}]},
        ASKED,
    ),
    "camel": ({"message_1": Q, "message_2": A, "topic": "sums"}, ASKED),
    "names in capitals": ({"Question": Q, "Answer": A}, ASKED),
    "export of Claude": (
        {"chat_messages": [{"sender": "human", "text": Q}, {"sender": "assistant", "text": A}]},
        ASKED,
    ),
    "export of ChatGPT": (
        {
            "current_node": "2",
            "mapping": {
                "0": {"message": None, "parent": None},
                **{
                    str(number): {
                        "message": {"author": {"role": role}, "content": {"parts": [text]}},
                        "parent": str(number - 1),
                    }
                    for number, (role, text) in enumerate(ASKED, 1)
                },
            },
        },
        ASKED,
    ),
    "a sum whose answer is a number": (
        {"question": Q, "answer": 2},
        [ASKED[0], ("assistant", "2")],
    ),
    "alpaca without an answer": (
        {"instruction": Q, "input": "", "output": ""},
        [ASKED[0], ("assistant", "")],
    ),
    "marks of another kind within a turn": (
        {"text": f"<|im_start|>user\nUser: x\nAssistant: y<|im_end|>\n<|im_start|>assistant\n{A}"},
        [("user", "User: x\nAssistant: y"), ASKED[1]],
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


def find_keys(value: Any) -> Iterator[tuple[Any, str]]:
    """Yield each key of a record, with the object that has it."""
    if isinstance(value, dict):
        yield from ((value, key) for key in value)
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, dict | list):
            yield from find_keys(part)


@pytest.mark.parametrize("name", FORMS)
def test_a_form_with_a_key_of_another_name_is_refused_or_teaches_the_same(name: str) -> None:
    """No key is so read that without it other answers would be learnt, or to other turns."""
    form, expected = FORMS[name]
    refusals = []
    for number in range(len(list(find_keys(form)))):
        record = copy.deepcopy(form)
        holder, key = list(find_keys(record))[number]
        holder[f"x_{key}"] = holder.pop(key)
        try:
            (chat,) = parse_record(record, "x:1")
        except BadInput as error:
            refusals.append(str(error))
            continue
        turns = [turn for turn in spoken(chat) if turn[0] != "system"]
        wanted = [turn for turn in expected if turn[0] != "system"]
        # A context, a system prompt or what was said before may be what no name tells.
        assert turns[-1] == wanted[-1] or turns == wanted[:1], key
        assert all(text for role, text in turns if role == "user"), key
    assert all(text.startswith("x:1") for text in refusals)


LISTS = ("messages", "conversations", "dialogue", "contents", "chat_messages", "turns")
SPEAKERS = ("role", "from", "speaker", "sender", "author")
TEXTS = ("content", "value", "text", "parts", "message")
NAMES = {
    "user": ("user", "human", "prompter", "Human", "USER"),
    "assistant": ("assistant", "gpt", "model", "bot", "Chatbot"),
    "system": ("system", "System"),
}


def write_text_of(text: str, draws: random.Random) -> Any:
    """Return a text in one of the ways in which services write it."""
    cut = draws.randrange(len(text))
    kind = draws.choice(("text", "input_text", None))
    parts = [{"text": part} | ({"type": kind} if kind else {}) for part in (text[:cut], text[cut:])]
    return draws.choice(
        (text, [text], parts, {"parts": parts}, {"content_type": "text", "parts": [text]})
    )


@pytest.mark.parametrize("seed", range(40))
def test_a_chat_is_the_same_under_every_name_of_its_parts(seed: int) -> None:
    draws = random.Random(seed)
    expected = [SYSTEM] * draws.randrange(2)
    for number in range(draws.randint(1, 4)):
        expected += [("user", f"question {number}?"), ("assistant", f"answer {number}.")]
    list_name, speaker, text = draws.choice(LISTS), draws.choice(SPEAKERS), draws.choice(TEXTS)
    turns: list[dict[str, Any]] = [
        {speaker: draws.choice(NAMES[role]), text: write_text_of(words, draws), "id": number}
        for number, (role, words) in enumerate(expected)
    ]
    record: dict[str, Any] = {"id": seed}
    if draws.random() < 0.3:  # the last answer stands apart
        answer = turns.pop()
        record |= {"output": draws.choice((answer[text], answer, [answer]))}
        list_name = "input"
    record[list_name] = turns
    if draws.random() < 0.3:
        record[list_name] = json.dumps(turns)
    (chat,) = parse_record(record, "x:1")
    assert spoken(chat) == expected


def test_calls_of_tools_and_what_they_answer_are_turns_in_every_service() -> None:
    call = {"name": "add", "arguments": {"a": 1}}
    expected = [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": call}],
        },
        {"role": "tool", "content": "2"},
    ]
    anthropic = [
        {"role": "assistant", "content": [{"type": "tool_use", "name": "add", "input": {"a": 1}}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "content": [{"type": "text", "text": "2"}]}],
        },
    ]
    bedrock = [
        {"role": "assistant", "content": [{"toolUse": {"name": "add", "input": {"a": 1}}}]},
        {"role": "user", "content": [{"toolResult": {"content": [{"text": "2"}]}}]},
    ]
    openai = [
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "tool", "content": "2"},
    ]
    for turns in (anthropic, bedrock, openai):
        (chat,) = parse_record({"messages": [MESSAGES[0], *turns, MESSAGES[1]]}, "x:1")
        assert list(chat.messages[1:3]) == expected
    gemini = [
        {"role": "model", "parts": [{"functionCall": {"name": "add", "args": {"a": 1}}}]},
        {"role": "user", "parts": [{"functionResponse": {"name": "add", "response": {"sum": 2}}}]},
    ]
    (chat,) = parse_record({"contents": [MESSAGES[0], *gemini, MESSAGES[1]]}, "x:1")
    assert chat.messages[1] == expected[0]
    assert chat.messages[2] == {"role": "tool", "content": '{"sum": 2}', "name": "add"}
    xlam = {"query": Q, "answers": json.dumps([call]), "tools": json.dumps([{"name": "add"}])}
    (chat,) = parse_record(xlam, "x:1")
    assert chat.messages[1] == expected[0]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"image": "a.jpg", "conversations": SHAREGPT}, "x:1: has image; text and calls"),
        ({"question": Q, "answers": [A, "3"]}, "x:1: answers: holds 2 answers, and nothing says"),
        (
            {"question": Q, "answers": [{"text": A, "score": 5}, {"text": "3", "score": 1}]},
            "x:1: answers: holds 2 answers",
        ),
        ({"question": Q, "answers": {"text": []}}, "x:1: answers: holds no answer"),
        ({"question": Q, "answer": True}, "x:1: answer: must be text"),
        (
            {"Prompt": Q, "response_0": A, "response_1": "3"},
            "it has Prompt, response_0, response_1;",
        ),
        ({"conversation_a": MESSAGES, "conversation_b": MESSAGES, "winner": "b"}, "has no field"),
        ({"current_node": "1", "mapping": {"1": {"parent": "1"}}}, "mapping: goes in a circle"),
    ],
)
def test_what_no_form_says_how_to_learn_is_refused_by_name(
    record: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput) as caught:
        parse_record(record, "x:1")
    assert message in str(caught.value)


def test_parts_that_are_no_text_are_refused_by_their_kind() -> None:
    picture = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    record = {"messages": [{"role": "user", "content": [picture]}, MESSAGES[1]]}
    with pytest.raises(BadInput, match=r"turn 1: content, part 1: is of kind image_url; text"):
        parse_record(record, "x:1")


def test_rows_of_a_tree_are_one_chat_and_a_row_without_its_tree_is_bad() -> None:
    def row(
        name: str, parent: str | None, role: str, text: str, rank: int | None
    ) -> dict[str, Any]:
        names = {"message_id": name, "parent_id": parent, "role": role}
        return {**names, "text": text, "rank": rank, "lang": "en"}

    rows = [
        row("a", None, "prompter", Q, None),
        row("b", "a", "assistant", "3", 1),
        row("c", "a", "assistant", A, 0),
        row("d", "c", "prompter", "And 2?", 0),
        row("e", None, "prompter", "Hello", None),
        row("f", "e", "assistant", "Hi", None),
        row("g", "b", "assistant", "x", None),
    ]
    records = dict(join_trees((f"x:{number}", part) for number, part in enumerate(rows, 1)))
    assert list(records) == ["x:1", "x:7", "x:5"]
    (chat,) = parse_record(records["x:1"], "x:1")
    assert spoken(chat) == [*ASKED, ("user", "And 2?")]
    assert records["x:7"].rule.startswith("answers a message that is not before it")


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
    (chat,) = parse_record(record, "x:1")
    ((sample,),) = encoder.encode([("x:1", chat)])
    learnt = encoder.tokenizer.decode(sample.tokens[sample.is_learnt == 1].tolist())
    whole = encoder.tokenizer.decode(sample.tokens.tolist())
    assert "bad" in whole
    assert A in learnt
    assert "bad" not in learnt
    record["messages"][1]["weight"] = 0.5
    with pytest.raises(BadInput, match=r"turn 2: weight=0.5: must be 0 or 1"):
        parse_record(record, "x:1")


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


KINDS_OF_LISTS = ("lines.jsonl", "all.json", "one.json", "export.json")


@pytest.mark.parametrize("name", KINDS_OF_LISTS)
def test_chats_that_are_lists_without_a_name_are_read(name: str, tmp_path: Path) -> None:
    base = write_chat_folder(tmp_path / "base", CHATML)
    chats = [[{**MESSAGES[0], "content": f"{number}?"}, MESSAGES[1]] for number in range(6)]
    path = tmp_path / name
    if name == "lines.jsonl":
        path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    elif name == "all.json":
        path.write_text(json.dumps(chats))
    else:
        chats = chats[:1]
        path.write_text(json.dumps(chats[0] if name == "one.json" else {"messages": chats[0]}))
    options = ChatOptions(tokenizer=base, heldout_fraction=0.0)
    corpus = build_chats(path, tmp_path / "out", options).corpus
    assert corpus.train.documents == len(chats)


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
