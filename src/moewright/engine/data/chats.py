"""Records of chats: messages, a prompt and its completion, or two answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from moewright.engine.data.chat_forms import NO_COLUMNS, Columns, read_exchange
from moewright.engine.data.chat_turns import Message


class ChatSchema(StrEnum):
    """The ways to write a chat as a record."""

    MESSAGES = "messages"
    COMPLETION = "prompt and completion"
    PREFERENCE = "chosen and rejected"


# By the number of answers after a prompt.
_SCHEMAS = (ChatSchema.MESSAGES, ChatSchema.COMPLETION, ChatSchema.PREFERENCE)


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
        BadInput: naming the record, where it is of no known form, or a message is not whole.
    """
    exchange, tools = read_exchange(record, columns, where)
    schema = _SCHEMAS[len(exchange.answers)]
    chats = []
    for answer in exchange.answers or ((),):
        messages = (*exchange.turns, *answer)
        unlearnt = {index for index, turn in enumerate(messages) if turn.get("weight", 1) == 0}
        chats.append(
            Chat(
                schema=schema,
                messages=messages,
                tools=tools,
                first=len(exchange.turns) if exchange.answers and not exchange.is_plain else 0,
                is_plain=exchange.is_plain,
                unlearnt=frozenset(unlearnt),
            )
        )
    return tuple(chats)
