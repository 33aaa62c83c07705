"""The forms of public chat datasets, brought into those that `chats` parses.

A record is a list of messages under one of several names, a question and its answer under theirs
(alpaca, Dolly, OpenOrca, GSM8K, MetaMath, FLAN), or a transcript whose turns begin with the
speaker's name (HH-RLHF, Guanaco, Glaive). Columns that a user names go before what is recognized.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from moewright.spec.errors import BadInput, Reason
from moewright.spec.names import closest_match

_LISTS = ("messages", "conversations", "conversation", "dialogue", "dialog", "turns", "data")
_PROMPTS = ("instruction", "question", "query", "problem", "inputs", "prompt", "input")
_ANSWERS = (
    "output",
    "response",
    "answer",
    "completion",
    "targets",
    "target",
    "generated_solution",
    "solution",
)
_CONTEXTS = ("input", "context")  # of an instruction
_SYSTEMS = ("system", "system_prompt", "system_message")
_TRANSCRIPTS = ("chat", "text", "transcript")
_SPEAKERS: Mapping[str, str] = MappingProxyType(
    {
        "human": "user",
        "user": "user",
        "instruction": "user",
        "assistant": "assistant",
        "response": "assistant",
        "system": "system",
        "function response": "tool",
    }
)
_TURN = re.compile(
    r"(?im)(?:^[ \t]*|#{2,3}[ \t]*)"
    r"(human|user|instruction|assistant|response|system|function response)[ \t]*:[ \t]*"
)
_ENDS = ("<|endoftext|>", "</s>")
# What --columns may name; each stands in place of what is recognized.
COLUMN_NAMES = ("prompt", "answer", "system", "context", "messages", "chosen", "rejected", "tools")

Columns = Mapping[str, str]
NO_COLUMNS: Columns = MappingProxyType({})
Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Question:
    """The text that is asked with what stands before it, and its answer."""

    text: str
    answer: str
    system: str = ""
    earlier: Sequence[Any] = ()  # pairs of a question and its answer


def parse_columns(text: str) -> Columns:
    """Return the columns of "prompt=instruction,answer=output"; none of "".

    Raises:
        BadInput: naming the part that is no such pair.
    """
    columns = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, column = part.partition("=")
        if name not in COLUMN_NAMES or not column:
            rule = f"must be NAME=COLUMN, of the names {', '.join(COLUMN_NAMES)}"
            nearest = f"{closest_match(name, COLUMN_NAMES) or 'prompt'}={column or 'instruction'}"
            raise BadInput(Reason(field="--columns", value=part[:60], rule=rule, nearest=nearest))
        columns[name] = column
    missing = {"prompt": "answer", "answer": "prompt", "chosen": "rejected", "rejected": "chosen"}
    for name in columns:
        other = missing.get(name)
        if other and other not in columns and not (name == "prompt" and "chosen" in columns):
            rule = f"names {name} and no {other}"
            nearest = f"{text},{other}=COLUMN"
            raise BadInput(Reason(field="--columns", value=text[:60], rule=rule, nearest=nearest))
    return columns


def normalize_record(record: Record, columns: Columns, where: str) -> Record:
    """Return a record with the fields that `chats.parse_record` takes.

    A record in no form that is known is returned as it is.

    Raises:
        BadInput: naming the record, where it lacks a column that the user named.
    """
    if columns:
        record = _take_columns(record, columns, where)
    tools = _read_json(record.get("tools"))
    extra = {"tools": tools} if isinstance(tools, list) and tools else {}
    if record.get("label") is False and "messages" in record:
        rule = "is an answer that nobody wants (label false), and would be learnt"
        raise BadInput(Reason(field=where, rule=rule, nearest="pairs of chosen and rejected"))
    if "chosen" in record or "rejected" in record:
        return {**_name_preference(record), **extra}
    if isinstance(record.get("prompt"), list) and "completion" in record:
        return {**record, **extra}
    system = _first_text(record, _SYSTEMS)
    for name in _LISTS:
        turns = _read_json(record.get(name))
        if isinstance(turns, list) and turns:
            return {**_name_turns(turns, system), **extra}
    question = _find_question(record)
    if question is not None:
        return {"messages": _build_messages(question), **extra}
    return {**(_split_transcript(record, system) or record), **extra}


def _take_columns(record: Record, columns: Columns, where: str) -> Record:
    """Return the record with the columns under the names that are recognized."""
    for column in columns.values():
        if column not in record:
            fields = list(record)
            rule = f"has no column {column!r} of --columns; it has {', '.join(fields) or 'none'}"
            nearest = closest_match(column, fields)
            raise BadInput(Reason(field=where, rule=rule, nearest=nearest))
    taken = {name: record[column] for name, column in columns.items()}
    if "answer" not in taken:
        return taken
    prompt, context = taken.pop("prompt"), taken.pop("context", "")
    if not isinstance(prompt, list):
        return taken | {"instruction": prompt, "output": taken.pop("answer"), "input": context}
    return taken | {"prompt": prompt, "completion": taken.pop("answer")}


def _read_json(value: Any) -> Any:
    """Return what a text of JSON holds, as cells of tables do; any other value as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _first_text(record: Record, names: Sequence[str]) -> str:
    texts = (record.get(name) for name in names)
    return next((text for text in texts if isinstance(text, str) and text.strip()), "")


def _name_turns(turns: list[Any], system: str) -> Record:
    """Return turns as messages, or as ShareGPT's conversations; texts take turns themselves."""
    if all(isinstance(turn, str) for turn in turns):
        roles = ("user", "assistant")
        turns = [{"role": roles[index % 2], "content": text} for index, text in enumerate(turns)]
    first = turns[0]
    if isinstance(first, dict) and "from" in first:
        return {"conversations": turns, "system": system}
    if system and isinstance(first, dict) and first.get("role") != "system":
        turns = [{"role": "system", "content": system}, *turns]
    return {"messages": turns}


def _find_question(record: Record) -> _Question | None:
    """Return the question and the answer of a record that has both as texts."""
    prompt = next((name for name in _PROMPTS if isinstance(record.get(name), str)), "")
    answer = next((name for name in _ANSWERS if isinstance(record.get(name), str)), "")
    if not prompt or not answer or (prompt, answer) == ("prompt", "completion"):
        return None
    text = record[prompt]
    context = _first_text(record, _CONTEXTS) if prompt == "instruction" else ""
    if context and text.strip():
        text = f"{text}\n\n{context}"
    elif context:
        text = context
    history = record.get("history")
    return _Question(
        text=text,
        answer=record[answer],
        system=_first_text(record, _SYSTEMS),
        earlier=history if isinstance(history, list) else (),
    )


def _build_messages(question: _Question) -> list[dict[str, str]]:
    messages = []
    if question.system:
        messages.append({"role": "system", "content": question.system})
    pairs = [pair for pair in question.earlier if isinstance(pair, list) and len(pair) == 2]
    for prompt, answer in (*pairs, (question.text, question.answer)):
        messages.append({"role": "user", "content": str(prompt)})
        messages.append({"role": "assistant", "content": str(answer)})
    return messages


def _name_preference(record: Record) -> Record:
    """Return a preference with the prompt and the answers that TRL's formats have.

    The prompt may be turns or a question under another name; an answer may be one turn, or the
    transcript of the whole.
    """
    answers = {name: record[name] for name in ("chosen", "rejected") if name in record}
    if len(answers) > 1 and "prompt" not in record:
        system = _first_text(record, _SYSTEMS)
        turns = next((record[name] for name in _LISTS if isinstance(record.get(name), list)), None)
        questions = {name: record.get(name) for name in (*_PROMPTS, *_CONTEXTS)}
        question = _find_question({**questions, "output": ""})
        if turns:
            record = {**record, "prompt": _name_roles(turns)}
        elif question is not None and all(isinstance(text, str) for text in answers.values()):
            turns = _build_messages(replace(question, system=system))[:-1]
            record = {**record, "prompt": turns}
            answers = {
                name: [{"role": "assistant", "content": text}] for name, text in answers.items()
            }
        else:
            return _split_transcripts(record)
    turned = {
        name: _name_roles([answer]) if isinstance(answer, dict) else answer
        for name, answer in answers.items()
    }
    return {**record, **turned}


def _name_roles(turns: list[Any]) -> list[Any]:
    """Return ShareGPT's turns as messages; others as they are."""
    return [
        {"role": _SPEAKERS.get(turn["from"], "assistant"), "content": turn.get("value")}
        if isinstance(turn, dict) and isinstance(turn.get("from"), str)
        else turn
        for turn in turns
    ]


def _split_transcripts(record: Record) -> Record:
    """Return a preference whose answers are transcripts as messages."""
    answers = {name: _split_turns(record.get(name)) for name in ("chosen", "rejected")}
    return {**record, **answers} if all(answers.values()) else record


def _split_transcript(record: Record, system: str) -> Record | None:
    for name in _TRANSCRIPTS:
        turns = _split_turns(record.get(name))
        if turns:
            spoken = _split_turns(system) or [{"role": "system", "content": system}]
            return {"messages": [*spoken, *turns] if system else turns}
    return None


def _split_turns(text: Any) -> list[dict[str, str]]:
    """Return the turns of a transcript; [] of a text in which not both speak."""
    if not isinstance(text, str):
        return []
    marks = list(_TURN.finditer(text))
    if not marks:
        return []
    messages = []
    before = text[: marks[0].start()].strip()
    if before:
        messages.append({"role": "system", "content": before})
    for mark, following in zip(marks, [*marks[1:], None], strict=True):
        content = text[mark.end() : following.start() if following else len(text)].strip()
        for end in _ENDS:
            content = content.removesuffix(end).rstrip()
        messages.append({"role": _SPEAKERS[mark[1].lower()], "content": content})
    roles = {message["role"] for message in messages}
    if roles == {"system"}:
        return messages
    return messages if {"user", "assistant"} <= roles else []
