"""Records of chats: messages, conversations, a prompt and its completion, or two answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from types import MappingProxyType
from typing import Any

from moewright.engine.data.chat_forms import NO_COLUMNS, Columns, normalize_record
from moewright.spec.errors import BadInput, Reason
from moewright.spec.names import closest_match

ASSISTANT = "assistant"
USER = "user"
# The roles of ShareGPT's "from", as the field's "role".
_ROLES: Mapping[str, str] = MappingProxyType(
    {
        "human": USER,
        "user": USER,
        "gpt": ASSISTANT,
        "chatgpt": ASSISTANT,
        "assistant": ASSISTANT,
        "model": ASSISTANT,
        "function_call": ASSISTANT,
        "system": "system",
        "tool": "tool",
        "observation": "tool",
        "function_response": "tool",
    }
)

Message = Mapping[str, Any]


class ChatSchema(StrEnum):
    """The ways to write a chat as a record."""

    MESSAGES = "messages"
    CONVERSATIONS = "conversations"  # ShareGPT
    COMPLETION = "prompt and completion"
    PREFERENCE = "chosen and rejected"


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """A chat, of which the assistant's turns from message `first` on are learnt.

    Those of `unlearnt` are not: their records give them the weight 0. `is_plain`: a prompt and a
    completion of bare text, for which no template is needed.
    """

    schema: ChatSchema
    messages: tuple[Message, ...]
    tools: Any = None
    first: int = 0
    is_plain: bool = False
    unlearnt: frozenset[int] = frozenset()


def parse_record(
    record: Mapping[str, Any], where: str, columns: Columns = NO_COLUMNS
) -> tuple[Chat, ...]:
    """Return the chat of a record; of a preference the chat with the chosen answer and the other.

    The record may have any form of `chat_forms`; `columns` name its fields otherwise.

    Raises:
        BadInput: naming the record, where it is of no known schema, or a message is not whole.
    """
    record = normalize_record(record, columns, where)
    if "chosen" in record or "rejected" in record:
        return _parse_preference(record, where)
    return (parse_chat(record, where),)


def parse_chat(record: Mapping[str, Any], where: str) -> Chat:
    """Return the chat of a record that is no preference.

    Raises:
        BadInput: naming the record, where it is of no known schema, or a message is not whole.
    """
    tools = record.get("tools") or None
    if "messages" in record:
        schema = ChatSchema.MESSAGES
        messages = _parse_messages(record["messages"], f"{where}: messages")
        unlearnt = _find_unlearnt(messages)
        return Chat(schema=schema, messages=messages, tools=tools, unlearnt=unlearnt)
    if "conversations" in record:
        schema = ChatSchema.CONVERSATIONS
        messages = _parse_conversations(record, f"{where}: conversations")
        unlearnt = _find_unlearnt(messages)
        return Chat(schema=schema, messages=messages, tools=tools, unlearnt=unlearnt)
    if "prompt" in record and "completion" in record:
        return _parse_completion(record, tools, where)
    fields = ", ".join(record) or "none"
    rule = (
        "has no field 'messages', 'conversations', 'prompt' and 'completion', or 'chosen' and "
        "'rejected'"
    )
    nearest = "--columns prompt=...,answer=... with two of its fields"
    raise BadInput(Reason(field=where, rule=f"{rule}; it has {fields}", nearest=nearest))


def _parse_completion(record: Mapping[str, Any], tools: Any, where: str) -> Chat:
    schema = ChatSchema.COMPLETION
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion.strip():
            raise BadInput(Reason(field=f"{where}: completion", rule="is empty"))
        pair = ({"role": USER, "content": prompt}, {"role": ASSISTANT, "content": completion})
        return Chat(schema=schema, messages=pair, tools=tools, is_plain=True)
    before = _parse_messages(prompt, f"{where}: prompt")
    after = _parse_messages(completion, f"{where}: completion")
    return Chat(schema=schema, messages=(*before, *after), tools=tools, first=len(before))


def _parse_preference(record: Mapping[str, Any], where: str) -> tuple[Chat, Chat]:
    """Return both chats of a preference, in the formats that TRL documents.

    The answers follow the `prompt`; messages without one begin with the turns that they share.
    """
    for name, other in (("chosen", "rejected"), ("rejected", "chosen")):
        if name not in record:
            raise BadInput(Reason(field=where, rule=f"has no field {name!r} beside {other!r}"))
    tools = record.get("tools") or None
    prompt = record.get("prompt")
    chosen, rejected = record["chosen"], record["rejected"]
    if chosen == rejected:
        raise BadInput(Reason(field=where, rule="has the same answer as 'chosen' and 'rejected'"))
    if isinstance(chosen, str) or isinstance(rejected, str):
        if not isinstance(prompt, str):
            rule = "must be text where 'chosen' and 'rejected' are"
            raise BadInput(Reason(field=f"{where}: prompt", rule=rule))
        for name in ("chosen", "rejected"):
            if not isinstance(record[name], str) or not record[name].strip():
                rule = "must be text, and not empty"
                raise BadInput(Reason(field=f"{where}: {name}", rule=rule))
        return _build_plain(prompt, chosen, tools), _build_plain(prompt, rejected, tools)
    answers = [_parse_messages(record[name], f"{where}: {name}") for name in ("chosen", "rejected")]
    before: tuple[Message, ...] = ()
    if isinstance(prompt, list):
        before = _parse_messages(prompt, f"{where}: prompt")
    else:  # the text of a prompt is that of the first turn, which both answers begin with
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(*answers, strict=False))
        before = tuple(message for message, _ in shared)
        answers = [answer[len(before) :] for answer in answers]
        if not before and isinstance(prompt, str):
            before = ({"role": USER, "content": prompt},)
    return (
        _build_preference((*before, *answers[0]), tools, len(before)),
        _build_preference((*before, *answers[1]), tools, len(before)),
    )


def _build_preference(messages: tuple[Message, ...], tools: Any, first: int) -> Chat:
    return Chat(schema=ChatSchema.PREFERENCE, messages=messages, tools=tools, first=first)


def _build_plain(prompt: str, answer: str, tools: Any) -> Chat:
    turns = ({"role": USER, "content": prompt}, {"role": ASSISTANT, "content": answer})
    return Chat(schema=ChatSchema.PREFERENCE, messages=turns, tools=tools, is_plain=True)


def _parse_messages(value: Any, where: str) -> tuple[Message, ...]:
    messages = _require_list(value, where)
    for number, message in enumerate(messages, 1):
        role = message.get("role")
        if not isinstance(role, str) or not role:
            rule = "has no 'role'; it is user, assistant, system or tool"
            raise BadInput(Reason(field=f"{where}, message {number}", rule=rule))
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            rule = "has neither 'content' nor 'tool_calls'"
            raise BadInput(Reason(field=f"{where}, message {number}", rule=rule))
        if content is not None and not isinstance(content, str | list):
            rule = f"must be text, or a list of parts, and is of type {type(content).__name__}"
            raise BadInput(Reason(field=f"{where}, message {number}: content", rule=rule))
        _read_weight(message, f"{where}, message {number}")
    return messages


def _parse_conversations(record: Mapping[str, Any], where: str) -> tuple[Message, ...]:
    """Return the messages of ShareGPT's turns, after the record's own `system`, if it has one."""
    messages: list[Message] = []
    system = record.get("system")
    if isinstance(system, str) and system:
        messages.append({"role": "system", "content": system})
    for number, turn in enumerate(_require_list(record["conversations"], where), 1):
        speaker, text = turn.get("from"), turn.get("value")
        if not isinstance(speaker, str) or not isinstance(text, str):
            rule = "needs 'from' and 'value', both text"
            raise BadInput(Reason(field=f"{where}, turn {number}", rule=rule))
        if speaker not in _ROLES:
            raise BadInput(
                Reason(
                    field=f"{where}, turn {number}: from",
                    value=speaker,
                    rule=f"is none of {', '.join(_ROLES)}",
                    nearest=closest_match(speaker, _ROLES) or "human",
                )
            )
        weight = _read_weight(turn, f"{where}, turn {number}")
        messages.append({"role": _ROLES[speaker], "content": text} | weight)
    return tuple(messages)


def _find_unlearnt(messages: Sequence[Message]) -> frozenset[int]:
    return frozenset(
        index for index, message in enumerate(messages) if message.get("weight", 1) == 0
    )


def _read_weight(turn: Message, where: str) -> dict[str, Any]:
    """Return the weight of a turn, 0 or 1, where it states one."""
    weight = turn.get("weight")
    if weight is None:
        return {}
    if weight not in (0, 1):
        rule = "must be 0 or 1: a turn is learnt, or it is not"
        raise BadInput(Reason(field=f"{where}: weight", value=str(weight)[:20], rule=rule))
    return {"weight": weight}


def _require_list(value: Any, where: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise BadInput(Reason(field=where, rule="must be a list of messages, one at least"))
    for message in value:
        if not isinstance(message, dict):
            rule = f"must hold objects, and holds {type(message).__name__}"
            raise BadInput(Reason(field=where, rule=rule))
    # A row of a columnar file has every field, null where the message has none.
    return tuple(
        {key: part for key, part in message.items() if part is not None or key == "content"}
        for message in value
    )
