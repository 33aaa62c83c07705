"""Chats to text, by the chat template that a Hugging Face folder brings.

A template is a Jinja program of somebody else: it runs in a sandbox, and sees the chat and the
tokenizer's special tokens alone. Which characters are the assistant's is read from the template's
`generation` blocks where it has them, as transformers does, else from the text that it renders up
to each of the assistant's turns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moewright.codec import read_json_data, read_text
from moewright.codec.files import as_table
from moewright.codec.foreign import budget, read_apart
from moewright.engine.data.chat_turns import ASSISTANT, Message
from moewright.engine.data.chats import Chat
from moewright.engine.data.tokenizer import TOKENIZER_CONFIG_FILE
from moewright.spec.errors import BadInput, Reason

TEMPLATE_FILE = "chat_template.jinja"
_DEFAULT = "default"
_TOOL_USE = "tool_use"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
# Noncharacters, which no text holds, around what a `generation` block renders.
_OPEN_MARK = "\ufdd0"
_CLOSE_MARK = "\ufdd1"

Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class RenderedChat:
    """The text of a chat, and the spans of characters [start, stop) that the model learns."""

    text: str
    spans: tuple[Span, ...]


class _GenerationBlock(Extension):
    """The block {% generation %}, whose text is the assistant's."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 reads it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marks = [
            nodes.Output([nodes.TemplateData(mark)]).set_lineno(line)
            for mark in (_OPEN_MARK, _CLOSE_MARK)
        ]
        return [marks[0], *body, marks[1]]


class ChatTemplate:
    """A chat template, ready to render.

    Args:
        sources: the programs by name; "default" is one of them, and "tool_use" is taken for chats
            with tools where it is there.
        special_tokens: values of the names bos_token, eos_token and so on.
        end_marks: special tokens; white space after one that ends a turn is not learnt.
        origin: the file that it was read from.

    Raises:
        BadInput: naming the file, where a template is no Jinja.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        end_marks: Sequence[str],
        origin: str,
    ) -> None:
        # White space, extensions and names as transformers gives templates.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _format_json
        environment.globals["raise_exception"] = _raise_from_template
        environment.globals["strftime_now"] = _format_now
        self._environment = environment
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._end_marks = tuple(end_marks)
        self._origin = origin
        self._programs: dict[str, jinja2.Template] = {}
        self._check()

    @read_apart
    def _check(self) -> None:
        for name in self._sources:
            self._find_program(name)

    def _find_program(self, name: str) -> jinja2.Template:
        """Return a program, which is compiled where it is first asked for."""
        if name not in self._programs:
            text = self._sources[name]
            try:
                with budget(self._origin, len(text)):
                    self._programs[name] = self._environment.from_string(text)
            except jinja2.TemplateError as error:
                rule = f"is no chat template: {error}"
                raise BadInput(Reason(field=self._origin, rule=rule)) from error
        return self._programs[name]

    @read_apart
    def render(
        self, messages: Sequence[Message], tools: Any, where: str, *, prompts: bool
    ) -> RenderedChat:
        """Render messages as they stand; `prompts` adds the beginning of the assistant's turn.

        The spans are those of `generation` blocks.

        Raises:
            BadInput: naming the chat, where the template refuses it.
        """
        name = _TOOL_USE if tools and _TOOL_USE in self._sources else _DEFAULT
        program = self._find_program(name)
        try:
            with budget(f"{where}: the chat template of {self._origin}"):
                marked = program.render(
                    messages=list(messages),
                    tools=tools,
                    documents=None,
                    add_generation_prompt=prompts,
                    **self._special_tokens,
                )
        except BadInput:
            raise
        except Exception as error:  # whatever somebody else's program raises
            rule = f"the chat template of {self._origin} refuses it: {error}"
            raise BadInput(Reason(field=where, rule=rule)) from error
        return _take_out_marks(marked, where)

    @read_apart
    def render_chat(self, chat: Chat, where: str) -> list[RenderedChat]:
        """Render a chat as the texts that train all of its assistant turns from `first` on.

        A template may render an earlier turn otherwise once others follow it, as those do that
        leave out what the assistant thought: such a turn is learnt in a text of its own, which ends
        with it, so that it is learnt as it will be generated.

        Raises:
            BadInput: naming the chat, where it has no turn to learn, or the template refuses it.
        """
        turns = [
            index
            for index, message in enumerate(chat.messages)
            if message["role"] == ASSISTANT
            and index >= max(1, chat.first)
            and index not in chat.unlearnt
        ]
        if not turns:
            rule = "has no turn of the assistant after another's, so there is nothing to learn"
            raise BadInput(Reason(field=where, rule=rule))
        whole = self.render(chat.messages[: turns[-1] + 1], chat.tools, where, prompts=False)
        if whole.spans:
            start = 0
            if chat.first:
                before = chat.messages[: chat.first]
                start = len(self.render(before, chat.tools, where, prompts=False).text)
            spans = tuple(span for span in whole.spans if span[0] >= start)
            spans = self._drop_unlearnt(spans, chat, turns[-1], where)
            return [RenderedChat(text=whole.text, spans=spans)]
        pending = [self._render_turn(chat, turn, where) for turn in turns]
        texts = []
        # The longest text learns every turn that it renders alike; the others have texts of their
        # own.
        while pending:
            text = pending[-1].text
            joined = [turn for turn in pending if text.startswith(turn.text)]
            pending = [turn for turn in pending if not text.startswith(turn.text)]
            texts.append(RenderedChat(text=text, spans=tuple(turn.spans[0] for turn in joined)))
        return texts[::-1]

    def _drop_unlearnt(
        self, spans: tuple[Span, ...], chat: Chat, last: int, where: str
    ) -> tuple[Span, ...]:
        """Return the spans without those of turns that are not learnt: a span is one turn's."""
        if not chat.unlearnt:
            return spans
        turns = [
            index
            for index in range(max(1, chat.first), last + 1)
            if chat.messages[index]["role"] == ASSISTANT
        ]
        if len(turns) != len(spans):
            rule = (
                f"has turns of weight 0, and the chat template of {self._origin} marks "
                f"{len(spans)} spans of {len(turns)} turns"
            )
            raise BadInput(Reason(field=where, rule=rule, nearest="weights of 1"))
        pairs = zip(turns, spans, strict=True)
        return tuple(span for turn, span in pairs if turn not in chat.unlearnt)

    def _render_turn(self, chat: Chat, turn: int, where: str) -> RenderedChat:
        """Render a chat up to the end of an assistant turn, whose characters are the one span."""
        before = chat.messages[:turn]
        text = self.render(chat.messages[: turn + 1], chat.tools, where, prompts=False).text
        prompt = self.render(before, chat.tools, where, prompts=True).text
        start = _count_common(prompt, text)
        if start < len(prompt):
            # The prompt may begin a turn otherwise than a written one, say with <think>.
            shortest = len(self.render(before, chat.tools, where, prompts=False).text)
            if start < shortest:
                rule = (
                    f"the chat template of {self._origin} renders what comes before turn "
                    f"{turn + 1} otherwise when the turn is there, so its beginning is not known"
                )
                nearest = "a template with {% generation %} blocks"
                raise BadInput(Reason(field=where, rule=rule, nearest=nearest))
        stop = len(text)
        stripped = text[start:].rstrip()
        if stripped.endswith(self._end_marks):
            stop = start + len(stripped)
        if stop == start:
            rule = f"the chat template of {self._origin} renders nothing of the assistant's turn"
            raise BadInput(Reason(field=where, rule=f"{rule} {turn + 1}"))
        return RenderedChat(text=text, spans=((start, stop),))


def find_template(folder: Path) -> Mapping[str, str]:
    """Return the chat templates of a Hugging Face folder by name; empty where it has none.

    They are chat_template.jinja, or else the `chat_template` of tokenizer_config.json.
    """
    path = folder / TEMPLATE_FILE
    if path.is_file():
        return {_DEFAULT: read_text(path)}
    template = _read_tokenizer_config(folder).get("chat_template")
    if isinstance(template, str):
        return {_DEFAULT: template}
    templates = {}
    for entry in template if isinstance(template, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("template"), str):
            templates[str(entry.get("name"))] = entry["template"]
    if templates and _DEFAULT not in templates:
        rule = f"names chat templates, and none of them {_DEFAULT!r}"
        raise BadInput(Reason(field=str(folder / TOKENIZER_CONFIG_FILE), rule=rule))
    return templates


def read_special_tokens(folder: Path) -> Mapping[str, str]:
    """Return the special tokens that a folder's tokenizer_config.json names, by their names."""
    config = _read_tokenizer_config(folder)
    tokens = {}
    for name in _SPECIAL_TOKENS:
        token = config.get(name)
        if isinstance(token, dict):  # an AddedToken, written with its properties
            token = token.get("content")
        if isinstance(token, str):
            tokens[name] = token
    return tokens


def _read_tokenizer_config(folder: Path) -> Mapping[str, Any]:
    path = folder / TOKENIZER_CONFIG_FILE
    return as_table(read_json_data(path) if path.is_file() else {})


def _count_common(first: str, second: str) -> int:
    """Return the number of characters with which both texts begin."""
    shorter = min(len(first), len(second))
    differing = (place for place in range(shorter) if first[place] != second[place])
    # One text mostly begins with the other, which is seen without a loop over characters.
    if second.startswith(first):
        return shorter
    return next(differing, shorter)


def _take_out_marks(marked: str, where: str) -> RenderedChat:
    """Return the text without marks, and the spans between them."""
    first, *blocks = marked.split(_OPEN_MARK)
    text = first
    spans = []
    for block in blocks:
        inside, *after = block.split(_CLOSE_MARK)
        if len(after) != 1:
            rule = "holds the noncharacters U+FDD0 or U+FDD1, or its template nests generation"
            raise BadInput(Reason(field=where, rule=rule))
        spans.append((len(text), len(text) + len(inside)))
        text += inside + after[0]
    return RenderedChat(text=text, spans=tuple(span for span in spans if span[1] > span[0]))


def _format_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Write JSON as transformers' `tojson` does: without escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise_from_template(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _format_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
