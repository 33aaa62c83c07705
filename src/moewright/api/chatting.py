"""Talking to what was trained: a run, a folder of checkpoints, or a Hugging Face folder."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from moewright.api.converting import plan_export
from moewright.intake import hf
from moewright.intake.hub import locate_folder
from moewright.rules.shapes.parameters import count_parameters
from moewright.spec.errors import BadInput, Reason
from moewright.spec.units import format_bytes

if TYPE_CHECKING:
    from moewright.engine.data.chat_encoder import ChatEncoder
    from moewright.engine.run.generate import AnsweringModel

_EXPORT_FOLDER = "hf"  # of a fine-tuning
_CONFIG_FILE = "config.json"
_BYTES_PER_PARAMETER = 4
_SHOWN_EVERY_S = 0.25  # how often text is decoded while it comes


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOptions:
    """How an answer is drawn: greedily at temperature 0, else by probabilities, by a seed."""

    new_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatPartner:
    """A model that answers, with the tokenizer and the template of its folder."""

    name: str
    model: AnsweringModel
    encoder: ChatEncoder
    stops: frozenset[int]

    @property
    def has_template(self) -> bool:
        """Whether turns are written by a chat template; else a text is continued."""
        return bool(self.encoder.sources)

    def answer(
        self, messages: Sequence[Mapping[str, str]], options: SamplingOptions
    ) -> Iterator[str]:
        """Yield the text of the next turn piece by piece.

        Raises:
            BadInput: the template refuses the messages, or they are too long.
        """
        from moewright.engine.run.generate import build_sampler

        prompt = self.encoder.encode_prompt(messages, "the conversation")
        choose = build_sampler(options.temperature, options.seed)
        tokens: list[int] = []
        shown = ""
        shown_s = time.monotonic()
        for token in self.model.generate(
            prompt, new_tokens=options.new_tokens, stops=self.stops, choose=choose
        ):
            tokens.append(token)
            if time.monotonic() - shown_s >= _SHOWN_EVERY_S:
                # Half a character becomes a mark, which more tokens may complete.
                text = self.encoder.tokenizer.decode(tokens).rstrip("\ufffd")
                yield text[len(shown) :]
                shown = text
                shown_s = time.monotonic()
        yield self.encoder.tokenizer.decode(tokens)[len(shown) :]


@contextmanager
def open_chat_partner(path: Path, template: Path | None = None) -> Iterator[ChatPartner]:
    """Yield the model of a run or of a folder; a run's newest checkpoint is exported for it.

    Raises:
        BadInput: there is no model or no tokenizer, or it is too large to answer here.
    """
    from moewright.engine.data.chat_encoder import ChatEncoder, ChatOptions
    from moewright.engine.data.tokenizer import TOKENIZER_FILE
    from moewright.engine.run.companions import read_generation_stops
    from moewright.engine.run.generate import AnsweringModel

    with _find_folder(path) as folder:
        model = hf.read_config(folder)
        needed = _BYTES_PER_PARAMETER * count_parameters(model).total
        room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if needed > room:
            rule = f"needs {format_bytes(needed)} in fp32, of {format_bytes(room)} here"
            raise BadInput(Reason(field=str(path), rule=rule, nearest="a server of its folder"))
        if not (folder / TOKENIZER_FILE).is_file():
            rule = f"has no {TOKENIZER_FILE}, so that no text can be written"
            raise BadInput(Reason(field=str(path), rule=rule, nearest="a tokenizer beside it"))
        encoder = ChatEncoder(ChatOptions(tokenizer=folder, template=template))
        stops = {*read_generation_stops(folder), encoder.tokenizer.end_of_document}
        yield ChatPartner(
            name=str(path),
            model=AnsweringModel(model, folder),
            encoder=encoder,
            stops=frozenset(stops | encoder.end_ids),
        )


@contextmanager
def _find_folder(path: Path) -> Iterator[Path]:
    """Yield the Hugging Face folder of a path: itself, that of a fine-tuning, or one made of it."""
    path = locate_folder(path, "model")
    for folder in (path, path / _EXPORT_FOLDER):
        if (folder / _CONFIG_FILE).is_file():
            yield folder
            return
    planned = plan_export(path)
    with TemporaryDirectory() as made:
        folder = Path(made) / _EXPORT_FOLDER
        planned.run(folder, lambda _nbytes: None)
        yield folder
