"""Answers of a model in one process, token by token, for a look at what it has learnt.

Every token is a forward pass over the whole text, without a cache: meant for small models.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import torch

from moewright.engine.model.micro_batch import build_micro_batch
from moewright.engine.run.corpus_loader import NoBatches
from moewright.engine.run.train_state import TrainState
from moewright.engine.run.verify import load_hf_state
from moewright.rules.job import Job
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.workload import Dtype, Workload

_LEAST_ROOM = 64  # tokens of a forward pass, of which there are twice as many when they are full
_MOST_ROOM = 1 << 15

ChooseToken = Callable[[torch.Tensor], int]


def choose_likeliest(logits_V: torch.Tensor) -> int:
    """Return the likeliest token; V is the vocabulary."""
    return int(logits_V.argmax())


def build_sampler(temperature: float, seed: int) -> ChooseToken:
    """Return what draws a token by its probability at a temperature, the same for a seed."""
    if not temperature:
        return choose_likeliest
    generator = torch.Generator().manual_seed(seed)

    def draw(logits_V: torch.Tensor) -> int:
        probabilities_V = torch.softmax(logits_V.float() / temperature, dim=0)
        return int(torch.multinomial(probabilities_V, 1, generator=generator))

    return draw


class AnsweringModel:
    """A model with the weights of a Hugging Face folder, in fp32 on the CPU.

    Raises:
        BadInput: when the folder of `weights` is not of the model, or a text is too long.
    """

    def __init__(self, model: ModelSpec, weights: Path) -> None:
        self._model = model
        self._weights = weights
        self._state: TrainState | None = None
        self._room = 0

    def generate(
        self,
        prompt: Sequence[int],
        *,
        new_tokens: int,
        stops: Collection[int] = (),
        choose: ChooseToken = choose_likeliest,
    ) -> Iterator[int]:
        """Yield the next tokens of a prompt as `choose` takes them, one after the other.

        It ends after `new_tokens`, or with a token of `stops`, which is left out.
        """
        tokens = list(prompt)
        for _ in range(new_tokens):
            token = choose(self._predict(tokens))
            if token in stops:
                return
            yield token
            tokens.append(token)

    @torch.no_grad()
    def _predict(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the logits [V] of the token after these."""
        state = self._prepare(len(tokens))
        # Attention is causal: what fills the room changes nothing before it.
        ids = torch.zeros(1, self._room, dtype=torch.int64)
        ids[0, : len(tokens)] = torch.tensor(tokens)
        batch = build_micro_batch(state.runtime, ids, torch.full_like(ids, -1), None)
        logits_TV = state.model(batch, needs_logits=True).logits
        logits_V: torch.Tensor = logits_TV[len(tokens) - 1, : self._model.vocab_size]
        return logits_V

    def _prepare(self, length: int) -> TrainState:
        """Return the state of a model that has room for so many tokens."""
        if self._state is not None and length <= self._room:
            return self._state
        if length > _MOST_ROOM:
            rule = f"has {length:,} tokens; {_MOST_ROOM:,} are answered at most"
            raise BadInput(Reason(field="prompt", rule=rule, nearest="a shorter one"))
        # Powers of two, so that a growing text has a model built anew only a few times.
        self._room = max(_LEAST_ROOM, 1 << (length - 1).bit_length())
        workload = Workload(seq_len=self._room, global_batch=1, precision=Dtype.FP32)
        job = Job(model=self._model, workload=workload, layout=Layout(world_size=1))
        self._state = load_hf_state(
            job, self._weights, NoBatches(), rank=0, device=torch.device("cpu")
        )
        return self._state
