"""`moewright chat`: talk to what was trained."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from moewright.cli.answers import STANDARD_OUTPUT
from moewright.cli.option_types import Count, JsonOption
from moewright.spec.errors import BadInput, Reason

if TYPE_CHECKING:
    from moewright.api.chatting import ChatPartner, SamplingOptions

_RESET = "/reset"


def chat(
    folder: Path,
    /,
    *,
    prompt: str = "",
    system: str = "",
    temperature: float = 0.0,
    max_tokens: Count = 256,
    seed: int = 0,
    json: JsonOption = None,
) -> int:
    """Talk to the model of a run or a Hugging Face folder, here, on the CPU in fp32.

    Every token is a forward pass over the whole text, so it is meant for small models. Without
    --prompt each line of standard input is a turn, and the conversation goes on until its end
    (Ctrl-D); /reset begins anew. A folder without a chat template continues the text.

    Parameters
    ----------
    folder
        A run folder, whose newest checkpoint answers, or what `finetune` exported; a Hugging Face
        folder; or the id of a model of the hub.
    prompt
        One turn, in place of a conversation.
    system
        The system prompt.
    temperature
        Draw tokens by their probabilities at this temperature; 0 takes the likeliest.
    max_tokens
        Tokens of an answer at most.
    seed
        Of what is drawn.
    json
        Write the conversation to this file, as `messages`; "-": to standard output, and the text to
        standard error.
    """
    from moewright.api.chatting import SamplingOptions, open_chat_partner

    if not 0 <= temperature < float("inf"):
        rule = "must be 0 or more"
        raise BadInput(Reason(field="--temperature", value=f"{temperature:g}", rule=rule))
    if max_tokens < 1:
        rule = "must be 1 or more"
        raise BadInput(Reason(field="--max-tokens", value=str(max_tokens), rule=rule, nearest="1"))
    options = SamplingOptions(new_tokens=max_tokens, temperature=temperature, seed=seed)
    stream = sys.stderr if json == STANDARD_OUTPUT else sys.stdout
    with open_chat_partner(folder) as partner:
        if not partner.has_template:
            print(f"{partner.name} has no chat template: the text is continued", file=sys.stderr)
            if system:
                rule = "needs a chat template, which the folder has not"
                raise BadInput(Reason(field="--system", value=system[:60], rule=rule))
        talk = _Talk(partner, options, system)
        if prompt:
            talk.say(prompt, stream)
        else:
            for line in _read_lines():
                talk.say(line, stream)
    if json is not None:
        _write(json, talk.messages)
    return 0


class _Talk:
    """A conversation so far; of a text that is continued, the last turn alone counts."""

    def __init__(self, partner: ChatPartner, options: SamplingOptions, system: str) -> None:
        self._partner = partner
        self._options = options
        self._first = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._first)

    def say(self, text: str, stream: TextIO) -> None:
        """Take a turn of the user, and print the answer as it comes."""
        if text.strip() == _RESET:
            self.messages = list(self._first)
            return
        turn = {"role": "user", "content": text}
        turns = [*self.messages, turn] if self._partner.has_template else [turn]
        answer = ""
        for piece in self._partner.answer(turns, self._options):
            answer += piece
            print(piece, end="", file=stream, flush=True)
        print(file=stream, flush=True)
        self.messages += [turn, {"role": "assistant", "content": answer}]


def _read_lines() -> Iterator[str]:
    """Yield the lines of standard input that are not blank, after a sign on a terminal."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401  # keys of the line that is typed
    while True:
        try:
            line = input("> " if is_terminal else "")
        except EOFError:
            if is_terminal:
                print()
            return
        if line.strip():
            yield line


def _write(json: Path, messages: list[dict[str, str]]) -> None:
    from moewright.codec import write_text
    from moewright.spec.record import format_json

    text = format_json({"messages": messages})
    if json == STANDARD_OUTPUT:
        sys.stdout.write(text)
    else:
        write_text(json, text)
