"""What the router of a small trained model did: probabilities of one sentence, counts of a text.

`docs/tools/router_probabilities.py` wrote the file from a run of this engine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

from moewright.rules.job import capacity_rows

_DEVICES = 4  # of the pictures, each with a quarter of the experts


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyRouter:
    """Router probabilities [layers][tokens][experts] of a sentence, and rows [layers][experts].

    `counts` are of `token_count` tokens that the model had not seen; `words` are the tokens of the
    sentence as text. The chosen probabilities of a token are scaled to sum to 1.
    """

    top_k: int
    steps: int
    words: tuple[str, ...]
    probabilities: tuple[tuple[tuple[float, ...], ...], ...]
    token_count: int
    counts: tuple[tuple[int, ...], ...]

    @property
    def layers(self) -> int:
        return len(self.counts)

    @property
    def experts(self) -> int:
        return len(self.counts[0])

    @property
    def devices(self) -> int:
        """The devices that hold the experts in pictures."""
        return _DEVICES

    def device_of(self, expert: int) -> int:
        """Return the device that holds an expert, in blocks by number."""
        return expert * _DEVICES // self.experts

    def choose(self, layer: int, token: int) -> tuple[int, ...]:
        """Return the experts of a token, the most probable first."""
        row = self.probabilities[layer][token]
        order = sorted(range(len(row)), key=lambda expert: -row[expert])
        return tuple(order[: self.top_k])

    def weights(self, layer: int, token: int) -> tuple[float, ...]:
        """Return the weights of the chosen experts, which sum to 1."""
        row = self.probabilities[layer][token]
        chosen = [row[expert] for expert in self.choose(layer, token)]
        return tuple(probability / sum(chosen) for probability in chosen)

    def capacity(self, factor: float) -> int:
        """Return the rows that an expert takes of the text under a capacity factor."""
        return capacity_rows(self.token_count, self.top_k, self.experts, factor)

    def dropped_share(self, layer: int, factor: float) -> float:
        """Return the share of a layer's rows that a capacity factor drops; 0 is no capacity."""
        most = self.capacity(factor)
        over = sum(max(0, count - most) for count in self.counts[layer])
        return over / sum(self.counts[layer])


@cache
def load_tiny_router() -> TinyRouter:
    """Return the router of the small model."""
    text = resources.files(__package__).joinpath("tiny_router.json").read_text("utf-8")
    data = json.loads(text)
    return TinyRouter(
        top_k=data["top_k"],
        steps=data["steps"],
        words=tuple(data["words"]),
        probabilities=tuple(tuple(tuple(row) for row in layer) for layer in data["probabilities"]),
        token_count=data["token_count"],
        counts=tuple(tuple(row) for row in data["counts"]),
    )
