"""Records of chats: messages, ShareGPT's conversations, or a prompt and its completion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from moewright.codec.names import closest_match
from moewright.spec.errors import BadInput, Reason

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """A chat, of which the assistant's turns from message `first` on are learnt.

    `is_plain`: a prompt and a completion of bare text, for which no template is needed.
    """

    schema: ChatSchema
    messages: tuple[Message, ...]
    tools: Any = None
    first: int = 0
    is_plain: bool = False


def parse_chat(record: Mapping[str, Any], where: str) -> Chat:
    """Return the chat of a record.

    Raises:
        BadInput: naming the record, where it is of no known schema, or a message is not whole.
    """
    tools = record.get("tools") or None
    if "messages" in record:
        schema = ChatSchema.MESSAGES
        messages = _parse_messages(record["messages"], f"{where}: messages")
        return Chat(schema=schema, messages=messages, tools=tools)
    if "conversations" in record:
        schema = ChatSchema.CONVERSATIONS
        messages = _parse_conversations(record, f"{where}: conversations")
        return Chat(schema=schema, messages=messages, tools=tools)
    if "prompt" in record and "completion" in record:
        return _parse_completion(record, tools, where)
    fields = ", ".join(record) or "none"
    rule = "has no field 'messages', 'conversations', or 'prompt' and 'completion'"
    raise BadInput(Reason(field=where, rule=f"{rule}; it has {fields}"))


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
        messages.append({"role": _ROLES[speaker], "content": text})
    return tuple(messages)


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
