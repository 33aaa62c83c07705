"""Chats to tokens, and which of them are learnt, by the tokenizer and template of a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moewright.codec import read_text
from moewright.codec.foreign import budget, read_apart
from moewright.engine.data.chat_template import (
    TEMPLATE_FILE,
    ChatTemplate,
    RenderedChat,
    Span,
    find_template,
    read_special_tokens,
)
from moewright.engine.data.chat_turns import ASSISTANT, USER, Message
from moewright.engine.data.chats import Chat
from moewright.engine.data.tokenizer import load_tokenizer
from moewright.spec.errors import BadInput, Reason

Tokens = npt.NDArray[np.int64]
Flags = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOptions:
    """What a corpus of chats is made of.

    `tokenizer` is the folder that holds tokenizer.json, its configuration and the chat template;
    `template` is a file that takes the place of the folder's own. `max_tokens` is what a sample has
    at most, 0 for any number. `columns` names the fields of records, "prompt=instruction,
    answer=output"; so many bad records as `skip_bad` are left out.
    """

    tokenizer: Path
    template: Path | None = None
    heldout_fraction: float = 0.05
    max_tokens: int = 0
    columns: str = ""
    skip_bad: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatSample:
    """The tokens of a sample, which of them are learnt, and the record that it comes from."""

    tokens: Tokens
    is_learnt: Flags
    where: str


class ChatEncoder:
    """An encoder of chats by the tokenizer and the template of a folder.

    Raises:
        BadInput: when the folder has no tokenizer, or a template that is none.
    """

    def __init__(self, options: ChatOptions) -> None:
        folder = options.tokenizer
        self.folder = folder if folder.is_dir() else folder.parent
        self.tokenizer = load_tokenizer(folder)
        # The template spells special tokens, which are then tokens.
        self.tokenizer.inner.encode_special_tokens = False
        self.special_tokens = read_special_tokens(self.folder)
        self.sources = find_template(self.folder)
        origin = str(self.folder)
        if options.template is not None:
            origin = str(options.template)
            self.sources = {"default": _read_template(options.template)}
        end_marks = [
            token.content
            for token in self.tokenizer.inner.get_added_tokens_decoder().values()
            if token.special
        ]
        self._end_marks = tuple(end_marks)
        self.text_bytes = 0  # rendered so far
        self._template: ChatTemplate | None = None
        if self.sources:
            self._template = ChatTemplate(self.sources, self.special_tokens, end_marks, origin)

    @read_apart
    def encode(self, chats: Sequence[tuple[str, Chat]]) -> list[list[ChatSample]]:
        """Return the samples of each chat, which is given with where it lies.

        Raises:
            BadInput: naming the chat that cannot be rendered.
        """
        rendered = [self._render(chat, where) for where, chat in chats]
        # A lone surrogate, which JSON can spell, has no bytes.
        encoded = [text.text.encode("utf-8", "replace") for samples in rendered for text in samples]
        texts = [text.decode() for text in encoded]
        self.text_bytes += sum(map(len, encoded))
        with budget(f"{self.folder}: its tokenizer", sum(map(len, texts))):
            encodings = iter(self.tokenizer.inner.encode_batch(texts, add_special_tokens=False))
        return [
            [_build_sample(next(encodings), text.spans, where) for text in samples]
            for (where, _), samples in zip(chats, rendered, strict=True)
        ]

    @property
    def end_ids(self) -> frozenset[int]:
        """The special tokens that the chat template ends the assistant's turn with."""
        if self._template is None:
            return frozenset()
        turns = ({"role": USER, "content": "a"}, {"role": ASSISTANT, "content": "b"})
        rendered = self._template.render(turns, None, "a turn", prompts=False).text.rstrip()
        ends = [mark for mark in self._end_marks if rendered.endswith(mark)]
        ids = (self.tokenizer.inner.token_to_id(mark) for mark in ends)
        return frozenset(number for number in ids if number is not None)

    @read_apart
    def encode_prompt(self, messages: Sequence[Message], where: str) -> list[int]:
        """Return the tokens up to the answer of messages; of a plain folder, those of their text.

        Raises:
            BadInput: the template refuses the messages.
        """
        if self._template is not None:
            text = self._template.render(messages, None, where, prompts=True).text
        else:
            texts = (str(message["content"]) for message in messages)
            text = self.special_tokens.get("bos_token", "") + "".join(texts)
        text = text.encode("utf-8", "replace").decode()
        with budget(f"{self.folder}: its tokenizer", len(text)):
            return list(self.tokenizer.inner.encode(text, add_special_tokens=False).ids)

    def _render(self, chat: Chat, where: str) -> list[RenderedChat]:
        if self._template is not None:
            return self._template.render_chat(chat, where)
        if not chat.is_plain:
            rule = f"is a chat, and {self.folder} has no chat template to write it with"
            nearest = f"{TEMPLATE_FILE} there, or --chat-template FILE"
            raise BadInput(Reason(field=where, rule=rule, nearest=nearest))
        prompt, completion = (str(message["content"]) for message in chat.messages)
        text = self.special_tokens.get("bos_token", "") + prompt
        learnt = completion + self.special_tokens.get("eos_token", "")
        span = (len(text), len(text) + len(learnt))
        return [RenderedChat(text=text + learnt, spans=(span,))]


def _build_sample(encoding: Any, spans: Sequence[Span], where: str) -> ChatSample:
    return ChatSample(
        tokens=np.array(encoding.ids, dtype=np.int64),
        is_learnt=mark_spans(encoding.offsets, spans),
        where=where,
    )


def mark_spans(offsets: Sequence[Span], spans: Sequence[Span]) -> Flags:
    """Return which tokens [tokens] have a character in a span, 1 or 0.

    `offsets` are the characters [start, stop) of each token, in order. A token without characters
    of its own, inside a span, is in it.
    """
    flags = np.zeros(len(offsets), dtype=np.uint8)
    starts = np.array([start for start, _ in offsets], dtype=np.int64)
    stops = np.array([stop for _, stop in offsets], dtype=np.int64)
    for start, stop in spans:
        # From the first token that ends inside of the span to the last that begins there.
        first = int(np.searchsorted(stops, start, side="right"))
        last = int(np.searchsorted(starts, stop, side="left"))
        flags[first:last] = 1
    return flags


def _read_template(path: Path) -> str:
    if not path.is_file():
        raise BadInput(Reason(field="--chat-template", value=str(path), rule="no such file"))
    return read_text(path)
