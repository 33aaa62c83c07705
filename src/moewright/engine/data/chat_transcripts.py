"""Chats that are one text, in which a mark begins each turn."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from moewright.engine.data.chat_turns import ASSISTANT, SYSTEM, TOOL, USER

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
