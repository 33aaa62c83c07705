"""The forms of chat datasets: which fields of a record hold the turns, and which the answers.

`_FORMS` has them in the order in which they are tried: two answers to choose from; a tree of
messages; a list of turns under one of several names (with an answer after it, if its last turn asks
for one); a question and its answer under theirs (alpaca, Dolly, OpenOrca, GSM8K, MetaMath, FLAN);
a transcript whose turns begin with marks (HH-RLHF, Guanaco, Glaive, ChatML, Llama). A record that
has none of them is refused with the names of its fields. Columns that a user names go first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from types import MappingProxyType
from typing import Any

from moewright.engine.data.chat_trees import find_tree_path
from moewright.engine.data.chat_turns import (
    ANSWERS,
    ASSISTANT,
    PROMPTS,
    SYSTEM,
    TOOL,
    USER,
    Message,
    check_media,
    first_key,
    is_part,
    is_turn,
    read_json,
    read_text,
    read_turns,
)
from moewright.spec.errors import BadInput, Reason
from moewright.spec.names import closest_match

_LISTS = (
    "messages",
    "conversations",
    "conversation",
    "dialogue",
    "dialog",
    "turns",
    "contents",
    "chat_messages",
    "chat_history",
    "data",
)
_CONTEXTS = ("context",)
_TASKS = ("definition",)  # stands before the inputs of Natural Instructions
_SYSTEMS = (
    "system",
    "system_prompt",
    "system_message",
    "systeminstruction",
    "system_instruction",
)
_TRANSCRIPTS = ("chat", "text", "transcript")
# What --columns may name; each stands in place of what is recognized.
COLUMN_NAMES = ("prompt", "answer", "system", "context", "messages", "chosen", "rejected", "tools")

Columns = Mapping[str, str]
NO_COLUMNS: Columns = MappingProxyType({})
Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """The turns of a record, and the answers after them.

    Without answers the turns hold the whole; one answer follows a prompt, of two the first is
    chosen. `is_plain`: all is bare text, for which no template is needed.
    """

    turns: tuple[Message, ...]
    answers: tuple[tuple[Message, ...], ...] = ()
    is_plain: bool = False


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


def read_exchange(record: Record, columns: Columns, where: str) -> tuple[Exchange, Any]:
    """Return the turns and answers of a record in any form of `_FORMS`, and its tools.

    Raises:
        BadInput: naming the record, where it has no form that is known, lacks a column that the
            user named, or holds an answer that nobody wants.
    """
    fields = ", ".join(record) or "none"
    record = _take_columns(record, columns, where) if columns else _fold_names(record)
    check_media(record, where)
    tools = read_json(record.get("tools")) or None
    for read in _FORMS:
        exchange = read(record, where)
        if exchange is not None:
            # TRL's unpaired preferences, in which a label tells good answers from bad ones.
            if record.get("label") is False and len(exchange.answers) < 2:
                rule = "is an answer that nobody wants (label false), and would be learnt"
                nearest = "pairs of chosen and rejected"
                raise BadInput(Reason(field=where, rule=rule, nearest=nearest))
            return exchange, tools if isinstance(tools, list) else None
    # A list that has the right name says itself what is wrong with it.
    for name in ("messages", "conversations"):
        if record.get(name) is not None:
            read_turns(record[name], f"{where}: {name}")
    rule = (
        "has no field 'messages', 'conversations', 'prompt' and 'completion', or 'chosen' and "
        f"'rejected'; it has {fields}"
    )
    nearest = "--columns prompt=...,answer=... with two of its fields"
    raise BadInput(Reason(field=where, rule=rule, nearest=nearest))


def _fold_names(record: Record) -> Record:
    """Return the record with its names in small letters, where these are not names already."""
    folded = {name.strip().lower().replace(" ", "_"): value for name, value in record.items()}
    # The record's own names go first.
    return {**folded, **record}


def _take_columns(record: Record, columns: Columns, where: str) -> Record:
    """Return the record with the columns under the names that are recognized."""
    for column in columns.values():
        if column not in record:
            fields = list(record)
            rule = f"has no column {column!r} of --columns; it has {', '.join(fields) or 'none'}"
            nearest = closest_match(column, fields)
            raise BadInput(Reason(field=where, rule=rule, nearest=nearest))
    taken = {name: record[column] for name, column in columns.items()}
    if "answer" in taken:
        taken = {"instruction": taken.pop("prompt"), "output": taken.pop("answer"), **taken}
    return taken


def _read_preference(record: Record, where: str) -> Exchange | None:
    """Return a preference, in TRL's formats and those of public datasets.

    The prompt may be turns, a question, or what both answers begin with; an answer may be text, a
    turn, turns, or the transcript of the whole.
    """
    if "chosen" not in record and "rejected" not in record:
        return None
    for name, other in (("chosen", "rejected"), ("rejected", "chosen")):
        if name not in record:
            raise BadInput(Reason(field=where, rule=f"has no field {name!r} beside {other!r}"))
    names = ("chosen", "rejected")
    if record["chosen"] == record["rejected"]:
        raise BadInput(Reason(field=where, rule="has the same answer as 'chosen' and 'rejected'"))
    prompt = _read_prompt({name: record[name] for name in record if name not in names}, where)
    if any(isinstance(record[name], str) for name in names):
        spoken = [split_transcript(record[name]) for name in names]
        if prompt is None and all(spoken):
            return _split_shared(tuple(map(tuple, spoken)))
        if prompt is None:
            rule = "must be text where 'chosen' and 'rejected' are"
            raise BadInput(Reason(field=f"{where}: prompt", rule=rule))
        for name in names:
            if not isinstance(record[name], str) or not record[name].strip():
                rule = "must be text, and not empty"
                raise BadInput(Reason(field=f"{where}: {name}", rule=rule))
        texts = tuple(({"role": ASSISTANT, "content": record[name]},) for name in names)
        return Exchange(turns=prompt.turns, answers=texts, is_plain=prompt.is_plain)
    answers = tuple(_read_answer(record[name], f"{where}: {name}") for name in names)
    whole = _split_shared(answers)
    # Both answers may begin with the prompt.
    if prompt is None or any(turn["role"] == USER for turn in whole.turns):
        return whole
    return Exchange(turns=prompt.turns, answers=answers)


def _split_shared(whole: tuple[tuple[Message, ...], ...]) -> Exchange:
    """Return two chats as the turns that both begin with, and two answers."""
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(*whole, strict=False))
    turns = tuple(message for message, _ in shared)
    return Exchange(turns=turns, answers=tuple(chat[len(turns) :] for chat in whole))


def _read_prompt(record: Record, where: str) -> Exchange | None:
    """Return what is asked: turns, a text, or a question with what stands before it."""
    system = _read_system(record, where)
    for name in ("prompt", *_LISTS, *PROMPTS):
        turns = read_json(record.get(name))
        if isinstance(turns, list) and turns:
            return Exchange(turns=_begin(system, read_turns(turns, f"{where}: {name}")))
    question = _find_question(record)
    if not question:
        return None
    turns = _begin(system, ({"role": USER, "content": _join_context(record, question)},))
    return Exchange(turns=turns, is_plain=question == "prompt" and not system)


def _read_answer(value: Any, where: str) -> tuple[Message, ...]:
    return read_turns([value] if isinstance(value, dict) else value, where)


def _read_tree(record: Record, where: str) -> Exchange | None:
    path = find_tree_path(record, where)
    return Exchange(turns=read_turns(path, where)) if path else None


def _read_list(record: Record, where: str) -> Exchange | None:
    """Return a list of turns, after the record's system prompt.

    A list that the user ends, beside an answer, is the answer's prompt.
    """
    system = _read_system(record, where)
    for name in (*_LISTS, *PROMPTS):
        value = read_json(record.get(name))
        if not isinstance(value, list) or not value:
            continue
        if name in PROMPTS and not all(map(is_turn, value)):
            continue
        turns = _begin(system, read_turns(value, f"{where}: {name}"))
        answer = _find_answer(record)
        if answer and (name in PROMPTS or turns[-1]["role"] == USER):
            return Exchange(turns=turns, answers=(_read_reply(record, answer, where),))
        return Exchange(turns=turns)
    return None


def _read_question(record: Record, where: str) -> Exchange | None:
    """Return a question and its answer, after earlier ones; both alone may be bare text."""
    prompt, answer = _find_question(record), _find_answer(record)
    if not prompt or not answer:
        return None
    system = _read_system(record, where)
    reply = _read_reply(record, answer, where)
    # TRL's prompts and completions.
    if (prompt, answer) == ("prompt", "completion") and not system:
        if reply[-1].get("content") is not None and not reply[-1]["content"].strip():
            raise BadInput(Reason(field=f"{where}: completion", rule="is empty"))
        turns = ({"role": USER, "content": record["prompt"]},)
        is_plain = isinstance(record["completion"], str) and "tool_calls" not in reply[-1]
        return Exchange(turns=turns, answers=(reply,), is_plain=is_plain)
    history = read_json(record.get("history"))
    earlier = read_turns(history, f"{where}: history") if history else ()
    question = {"role": USER, "content": _join_context(record, prompt)}
    if not question["content"]:
        return None
    return Exchange(turns=_begin(system, (*earlier, question, *reply)))


def _read_marks(record: Record, where: str) -> Exchange | None:
    for name in _TRANSCRIPTS:
        turns = split_transcript(record.get(name))
        if turns:
            spoken = record.get("system")
            before = split_transcript(spoken) if isinstance(spoken, str) else []
            if before:
                return Exchange(turns=(*before, *turns))
            return Exchange(turns=_begin(_read_system(record, where), tuple(turns)))
    return None


def _find_question(record: Record) -> str:
    """Return the field that holds the question as text, be it empty; "" where none does."""
    return _find_text(record, PROMPTS)


def _find_answer(record: Record) -> str:
    """Return the field that holds an answer, or else an empty text; "" where none does."""
    return first_key(record, ANSWERS) or _find_text(record, ANSWERS)


def _find_text(record: Record, names: Sequence[str]) -> str:
    texts = [name for name in names if isinstance(record.get(name), str)]
    return next((name for name in texts if record[name].strip()), texts[0] if texts else "")


def _join_context(record: Record, prompt: str) -> str:
    """Return a question between its task and what it is about, if the record has them apart."""
    # Beside an instruction `input` is what it is about; elsewhere it is the question.
    names = ("input", *_CONTEXTS) if prompt == "instruction" else _CONTEXTS
    tasks = _TASKS if prompt in ("inputs", "input") else ()
    texts = (record.get(name) for name in (*tasks, prompt, *names))
    return "\n\n".join(text for text in texts if isinstance(text, str) and text.strip())


def _read_system(record: Record, where: str) -> str:
    name = first_key(record, _SYSTEMS)
    text = read_text(record[name], f"{where}: {name}") if name else ""
    return text if text.strip() else ""


def _read_reply(record: Record, name: str, where: str) -> tuple[Message, ...]:
    """Return the turns of an answer: text, turns, calls of tools, or the first of texts."""
    value = record[name]
    field = f"{where}: {name}"
    parsed = read_json(value)
    if isinstance(parsed, dict) and isinstance(parsed.get("text"), list):
        value = parsed["text"][:1]  # SQuAD's are several people's for the same question
    elif isinstance(parsed, list | dict):
        turns = parsed if isinstance(parsed, list) else [parsed]
        if all(map(is_turn, turns)):
            return read_turns(turns, field)
        if record.get("tools") and all(map(_is_call, turns)):
            calls = [{"type": "function", "function": turn} for turn in turns]
            return ({"role": ASSISTANT, "content": None, "tool_calls": calls},)
        if isinstance(value, list) and len(turns) > 1 and not all(map(is_part, turns)):
            rule = f"holds {len(turns)} answers, and nothing says which is learnt"
            raise BadInput(Reason(field=field, rule=rule, nearest="one, as text"))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        value = f"{value}"
    text = read_text(value, field)
    if not text and not isinstance(value, str):
        raise BadInput(Reason(field=field, rule="holds no answer"))
    return ({"role": ASSISTANT, "content": text},)


def _is_call(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str)


def _begin(system: str, turns: Sequence[Message]) -> tuple[Message, ...]:
    """Return turns after a system prompt, unless they begin with theirs."""
    if not system or (turns and turns[0]["role"] == SYSTEM):
        return tuple(turns)
    return ({"role": SYSTEM, "content": system}, *turns)


# Who speaks after a mark, by what the mark has in it.
_SPEAKERS: Mapping[str, str] = MappingProxyType(
    {
        "human": USER,
        "user": USER,
        "prompter": USER,
        "instruction": USER,
        "[inst]": USER,
        "<</sys>>": USER,
        "assistant": ASSISTANT,
        "response": ASSISTANT,
        "model": ASSISTANT,
        "[/inst]": ASSISTANT,
        "system": SYSTEM,
        "<<sys>>": SYSTEM,
        "function response": TOOL,
        "tool": TOOL,
        "ipython": TOOL,
    }
)
# A way to mark turns each; a text is read by the first in which both speak.
_DIALECTS = (
    re.compile(r"<\|im_start\|>(system|user|assistant|tool)\n"),
    re.compile(r"<\|start_header_id\|>(system|user|assistant|ipython|tool)<\|end_header_id\|>"),
    re.compile(r"<start_of_turn>(user|model)\n"),
    re.compile(r"<\|(system|user|prompter|assistant)\|>"),
    re.compile(r"(\[INST\]|\[/INST\]|<<SYS>>|<</SYS>>)"),
    re.compile(
        r"(?im)(?:^[ \t]*|#{2,3}[ \t]*)"
        r"(human|user|instruction|assistant|response|system|function response)[ \t]*:[ \t]*"
    ),
)
# What begins or ends a text or a turn, and is the template's to write.
_ENDS = (
    "<|endoftext|>",
    "</s>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<eos>",
    "<|end|>",
    "<s>",
)
_BEGINNINGS = ("<s>", "<|begin_of_text|>", "<bos>", "<|endoftext|>")


def split_transcript(text: Any) -> list[dict[str, str]]:
    """Return the turns of a transcript; [] of a text in which not both speak.

    A text of a system prompt alone is that.
    """
    if not isinstance(text, str):
        return []
    for dialect in _DIALECTS:
        messages = _split_turns(text, dialect)
        roles = {message["role"] for message in messages}
        if roles == {SYSTEM} or {USER, ASSISTANT} <= roles:
            return messages
    return []


def _split_turns(text: str, dialect: re.Pattern[str]) -> list[dict[str, str]]:
    marks = list(dialect.finditer(text))
    if not marks:
        return []
    messages = []
    before = text[: marks[0].start()].strip()
    for beginning in _BEGINNINGS:
        before = before.removeprefix(beginning).strip()
    if before:
        messages.append({"role": SYSTEM, "content": before})
    for mark, following in zip(marks, [*marks[1:], None], strict=True):
        content = text[mark.end() : following.start() if following else len(text)].strip()
        # Ends may follow each other, in any order.
        is_ended = True
        while is_ended:
            shorter = content
            for end in _ENDS:
                shorter = shorter.removesuffix(end).rstrip()
            is_ended = shorter != content
            content = shorter
        # Llama-2's system prompt stands inside the first turn of the user, whose mark it follows.
        if content or following is None or mark[1] != "[INST]":
            messages.append({"role": _SPEAKERS[mark[1].lower()], "content": content})
    return messages


_FORMS: tuple[Callable[[Record, str], Exchange | None], ...] = (
    _read_preference,
    _read_tree,
    _read_list,
    _read_question,
    _read_marks,
)
