"""Turns of chats, however a dataset or a service writes them, as messages of chat templates.

A turn is text, in turns the user's and the assistant's; a pair of a question and its answer; or an
object that says who speaks, under one of `_SPEAKERS`, and what, under one of `_TEXTS`. What it says
is text or a list of parts: of OpenAI, Anthropic, Bedrock or Gemini. Parts of text are joined,
calls of tools become `tool_calls`, their results turns of the tool; pictures and sound are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from moewright.spec.errors import BadInput, Reason
from moewright.spec.names import closest_match

ASSISTANT = "assistant"
USER = "user"
SYSTEM = "system"
TOOL = "tool"

Message = Mapping[str, Any]

PROMPTS = (
    "instruction",
    "question",
    "query",
    "problem",
    "inputs",
    "prompt",
    "input",
    "message_1",
)
ANSWERS = (
    "output",
    "response",
    "answer",
    "correct_answer",
    "completion",
    "targets",
    "target",
    "generated_solution",
    "solution",
    "message_2",
    "answers",
)
# `role` goes to the chat template, which may know more roles than these.
_SPEAKERS = ("role", "from", "speaker", "sender", "author")
_TEXTS = ("content", "value", "text", "parts", "message")
_CALLS = ("tool_calls", "function_call")
# Names of speakers that no chat template knows, by their roles.
_NICKNAMES: Mapping[str, str] = MappingProxyType(
    {
        "human": USER,
        "prompter": USER,
        "gpt": ASSISTANT,
        "chatgpt": ASSISTANT,
        "model": ASSISTANT,
        "bot": ASSISTANT,
        "chatbot": ASSISTANT,
    }
)
# Those of ShareGPT's `from` and the like, which no template sees.
_ROLES: Mapping[str, str] = MappingProxyType(
    {
        **_NICKNAMES,
        USER: USER,
        ASSISTANT: ASSISTANT,
        SYSTEM: SYSTEM,
        TOOL: TOOL,
        "function_call": ASSISTANT,
        "observation": TOOL,
        "function_response": TOOL,
    }
)
# Kinds of parts: of text; of what was thought; a call and a result of Anthropic, Bedrock, Gemini.
_TEXT_KINDS = ("text", "input_text", "output_text")
_THOUGHT_KINDS = ("thinking", "reasoning")
_CALL_PARTS = ("tool_use", "toolUse", "functionCall", "function_call")
_MEDIA = ("image", "images", "audio", "audios", "video", "videos")
_RESULT_PARTS = ("tool_result", "toolResult", "functionResponse", "function_response")


def read_json(value: Any) -> Any:
    """Return what a text of JSON holds, as cells of tables do; any other value as it is."""
    # A bare number or word is JSON too, but is meant as text.
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        # json raises RecursionError where brackets lie too deep in each other.
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def first_key(record: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the first of these names that a record has something under; "" where it has none."""
    # Not by truth, for which 0 would be nothing.
    return next((name for name in names if record.get(name) not in (None, "", [], {})), "")


def is_turn(value: Any) -> bool:
    """Return whether a value is an object that says who speaks, and what."""
    return (
        isinstance(value, dict)
        and isinstance(_read_speaker(value)[1], str)
        and any(name in value for name in (*_TEXTS, *_CALLS))
    )


def is_part(value: Any) -> bool:
    """Return whether a value is a part of what is said, with nothing beside its text and kind."""
    return isinstance(value, dict) and bool(value) and value.keys() <= {"type", "text", "thought"}


def check_media(record: Mapping[str, Any], where: str) -> None:
    """Refuse a record or a turn with pictures, sound or films, which its text is about.

    Raises:
        BadInput: naming what it has.
    """
    name = first_key(record, _MEDIA)
    if name:
        rule = f"has {name}; text and calls of tools alone are learnt"
        raise BadInput(Reason(field=where, rule=rule, nearest="chats of text"))


def holds_chat(value: Any) -> bool:
    """Return whether a value is a list of turns in which both speak, and no table of messages."""
    if not isinstance(value, list) or not all(map(is_turn, value)):
        return False
    names = {str(_read_speaker(turn)[1]).strip().lower() for turn in value}
    is_table = any("parent_id" in turn for turn in value)
    return {USER, ASSISTANT} <= {_ROLES.get(name) for name in names} and not is_table


def read_turns(value: Any, where: str) -> tuple[Message, ...]:
    """Return the messages of a list of turns, in order.

    Raises:
        BadInput: naming the turn, where it does not say who speaks, or says nothing that is text.
    """
    value = read_json(value)
    if not isinstance(value, list) or not value:
        raise BadInput(Reason(field=where, rule="must be a list of messages, one at least"))
    if all(isinstance(turn, str) for turn in value):
        return tuple(
            {"role": (USER, ASSISTANT)[index % 2], "content": text}
            for index, text in enumerate(value)
        )
    messages: list[Message] = []
    for number, turn in enumerate(value, 1):
        if not isinstance(turn, dict | list):
            rule = f"must hold objects, and holds {type(turn).__name__}"
            raise BadInput(Reason(field=where, rule=rule))
        messages.extend(_read_turn(turn, f"{where}, turn {number}"))
    return tuple(messages)


def read_text(value: Any, where: str) -> str:
    """Return the text of what is said: of text, a list of parts, or an object that holds them.

    Raises:
        BadInput: naming what is no text.
    """
    messages = _read_parts(value, where)
    if len(messages) != 1 or not isinstance(messages[0]["content"], str):
        raise BadInput(Reason(field=where, rule="must be text, and calls a tool"))
    text: str = messages[0]["content"]
    return text


def _read_turn(turn: Any, where: str) -> Iterator[Message]:
    if isinstance(turn, list):  # a question and its answer
        if len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            rule = "is a list, and no question and its answer, both text"
            raise BadInput(Reason(field=where, rule=rule))
        yield from _write_pair(*turn)
        return
    # A row of a columnar file has every field, null where the message has none.
    turn = {key: part for key, part in turn.items() if part is not None or key == "content"}
    name, speaker = _read_speaker(turn)
    if not name:
        yield from _read_pair(turn, where)
        return
    role = _find_role(name, speaker, where)
    rest = {
        key: part for key, part in turn.items() if key not in (name, *_TEXTS) and key not in _CALLS
    }
    _check_weight(rest, where)
    check_media(rest, where)
    calls = turn.get("tool_calls")
    if not calls and isinstance(turn.get("function_call"), dict):
        calls = [{"type": "function", "function": turn["function_call"]}]
    calls = {"tool_calls": calls} if calls else {}
    text = next((key for key in _TEXTS if turn.get(key) is not None), "")
    if not text:
        if not calls:
            rule = "has neither 'content' nor 'tool_calls'"
            raise BadInput(Reason(field=where, rule=rule))
        yield {"role": role, "content": None, **rest, **calls}
        return
    for message in _read_parts(turn[text], f"{where}: {text}"):
        # The message goes last: a result of a tool brings its own role.
        yield {"role": role, **rest, **calls, **message}


def _read_speaker(turn: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the field that says who speaks, and who; "" where none does."""
    name = next((key for key in _SPEAKERS if turn.get(key)), "")
    speaker = turn.get(name)
    if isinstance(speaker, dict):  # an author with properties
        speaker = speaker.get("role")
    return name, speaker


def _find_role(name: str, speaker: Any, where: str) -> str:
    if isinstance(speaker, str) and speaker:
        folded = speaker.strip().lower()
        if name == "role":
            return _NICKNAMES.get(folded, folded if folded in _ROLES else speaker)
        if folded in _ROLES:
            return _ROLES[folded]
    rule = f"is none of {', '.join(_ROLES)}"
    nearest = closest_match(str(speaker), _ROLES) or "human"
    field = f"{where}: {name}"
    raise BadInput(Reason(field=field, value=str(speaker)[:60], rule=rule, nearest=nearest))


def _read_pair(turn: Mapping[str, Any], where: str) -> Iterator[Message]:
    """Yield a question and its answer, by their names or by those of who speaks."""
    prompt, answer = first_key(turn, PROMPTS), first_key(turn, ANSWERS)
    if prompt and answer:
        texts = (read_text(turn[name], f"{where}: {name}") for name in (prompt, answer))
        yield from _write_pair(*texts)
        return
    speakers = {name: _ROLES.get(name.lower()) for name in turn}
    if not {USER, ASSISTANT} <= set(speakers.values()):
        rule = "has no 'role'; it is user, assistant, system or tool"
        raise BadInput(Reason(field=where, rule=rule))
    for name, role in speakers.items():
        if role:
            yield {"role": role, "content": read_text(turn[name], f"{where}: {name}")}


def _write_pair(question: str, answer: str) -> tuple[Message, ...]:
    return ({"role": USER, "content": question}, {"role": ASSISTANT, "content": answer})


def _read_parts(value: Any, where: str) -> list[dict[str, Any]]:
    """Return what is said, as fields of one message, after the turns of tools whose results it has.

    Raises:
        BadInput: naming a part that is no text and no call of a tool.
    """
    if isinstance(value, str):
        return [{"content": value}]
    if isinstance(value, dict):
        value = value["parts"] if isinstance(value.get("parts"), list) else [value]
    if not isinstance(value, list):
        rule = f"must be text, or a list of parts, and is of type {type(value).__name__}"
        raise BadInput(Reason(field=where, rule=rule))
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for number, part in enumerate(value, 1):
        place = f"{where}, part {number}"
        kind, inner = _find_kind(part, place)
        if kind == "text":
            texts.append(inner)
        elif kind == "thinking":
            thoughts.append(inner)
        elif kind == "call":
            arguments = first_key(inner, ("arguments", "input", "args"))
            function = {"name": inner.get("name"), "arguments": inner.get(arguments, {})}
            calls.append({"type": "function", "function": function})
        else:
            name = inner.get("name")
            results.append(
                {"role": TOOL, "content": _read_result(inner, place)}
                | ({"name": name} if name else {})
            )
    # OpenAI's messages that call tools alone have no content.
    message: dict[str, Any] = {"content": "".join(texts) if texts or not calls else None}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    # Who sends results alone has said nothing.
    return results if results and not texts and not calls else [*results, message]


def _find_kind(part: Any, where: str) -> tuple[str, Any]:
    """Return what a part is (text, thinking, call or result), and what it holds."""
    if isinstance(part, str):
        return "text", part
    if not isinstance(part, dict):
        rule = f"must be text or an object, and is of type {type(part).__name__}"
        raise BadInput(Reason(field=where, rule=rule))
    part = {key: value for key, value in part.items() if value is not None}
    stated = part.get("type", part.get("content_type"))
    for names, kind in ((_CALL_PARTS, "call"), (_RESULT_PARTS, "result")):
        name = stated if stated in names else first_key(part, names)
        # Bedrock's and Gemini's parts state no kind: their key is it.
        if name and (stated in names or stated is None):
            inner = part if stated in names else part[name]
            if isinstance(inner, dict):
                return kind, inner
    if stated in _THOUGHT_KINDS:
        text = first_key(part, _THOUGHT_KINDS)
        if isinstance(part.get(text), str):
            return "thinking", part[text]
    if isinstance(part.get("text"), str) and stated in (None, *_TEXT_KINDS):
        # Gemini marks a thought so.
        return "thinking" if part.get("thought") is True else "text", part["text"]
    kind = stated if isinstance(stated, str) else ", ".join(map(str, part)) or "nothing"
    rule = f"is of kind {kind[:60]}; text and calls of tools alone are learnt"
    raise BadInput(Reason(field=where, rule=rule, nearest="parts of type text"))


def _read_result(inner: Mapping[str, Any], where: str) -> str:
    """Return what a tool answered: the text of its parts, or JSON."""
    value = inner.get(first_key(inner, ("content", "response", "output")), "")
    parts = value if isinstance(value, list) else [value]
    if all(isinstance(part, str) or (isinstance(part, dict) and "text" in part) for part in parts):
        return read_text(parts, where)
    return json.dumps(value, ensure_ascii=False)


def _check_weight(turn: Message, where: str) -> None:
    """Refuse a weight of a turn that is neither 0 nor 1."""
    weight = turn.get("weight")
    if weight is not None and weight not in (0, 1):
        rule = "must be 0 or 1: a turn is learnt, or it is not"
        raise BadInput(Reason(field=f"{where}: weight", value=str(weight)[:20], rule=rule))
