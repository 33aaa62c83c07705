"""Pictures of routing: one token's probabilities, a sentence's rows on devices, uneven loads.

What the router of a small trained model did: probabilities of one sentence, counts of a text.
`docs/tools/router_probabilities.py` wrote the file from a run of this engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import NoReturn

from moewright.rules.job import capacity_rows
from moewright.spec.errors import BadInput, Reason
from moewright.spec.units import format_seconds
from moewright.view.course.drawing import (
    BarLimit,
    BarPart,
    CoursePicture,
    Drawing,
    StackedBar,
    draw_bars,
    picture,
)
from moewright.view.course.lesson import Lesson
from moewright.view.course.quantity import Quantity, Unit

_DEVICES = 4  # of the pictures, each with a quarter of the experts


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyRouter:
    """Router probabilities [layers][tokens][experts] of a sentence, and rows [layers][experts].

    `words` are the tokens of the sentence as text. The chosen probabilities of a token are scaled
    to sum to 1. `counts` has the rows of `token_count` tokens that a model had not seen, for each
    way to balance it: nothing, a selection bias, a loss. These models are younger than the one of
    the sentence.
    """

    top_k: int
    steps: int
    words: tuple[str, ...]
    probabilities: tuple[tuple[tuple[float, ...], ...], ...]
    token_count: int
    balance_steps: int
    counts: Mapping[str, tuple[tuple[int, ...], ...]]

    @property
    def layers(self) -> int:
        return len(self.probabilities)

    @property
    def experts(self) -> int:
        return len(self.probabilities[0][0])

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

    def dropped_share(self, counts: Sequence[int], factor: float) -> float:
        """Return the share of a layer's rows that a capacity factor drops; 0 is no capacity."""
        most = self.capacity(factor)
        return sum(max(0, count - most) for count in counts) / sum(counts)


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
        balance_steps=data["balance_steps"],
        counts={
            balance: tuple(tuple(row) for row in layers)
            for balance, layers in data["counts"].items()
        },
    )


DEVICE_COLOURS = ("#4878b8", "#e07b39", "#2f9e83", "#b562b8")
_UNCHOSEN = "#8d96a3"
_LOADS = ("none", "1", "2", "3")


def _layer(lesson: Lesson) -> int:
    return int(lesson.settings.get("layer", "1")) - 1


def _token(lesson: Lesson) -> int:
    return int(lesson.settings["token"]) - 1


def _counts(lesson: Lesson) -> tuple[int, ...]:
    """Return the rows of each expert in the lesson's layer, as its model is balanced."""
    return load_tiny_router().counts[lesson.settings.get("balance", "none")][_layer(lesson)]


def _capacity(lesson: Lesson) -> float:
    text = lesson.settings.get("capacity", "none")
    return 0.0 if text == "none" else float(text)


def draw_router(lesson: Lesson) -> CoursePicture:
    """Draw the probabilities of one token over the experts; the chosen ones have a colour."""
    router = load_tiny_router()
    layer, token = _layer(lesson), _token(lesson)
    row = router.probabilities[layer][token]
    chosen = router.choose(layer, token)

    def draw(drawing: Drawing) -> None:
        height, step = 130.0, drawing.width / router.experts
        most = max(row)
        for expert, probability in enumerate(row):
            colour = _UNCHOSEN
            if expert in chosen:
                colour = DEVICE_COLOURS[router.device_of(expert)]
            size = (step - 4, height * probability / most)
            hint = f"expert {expert}: {probability:.1%}"
            kind = "" if expert in chosen else "faint"
            drawing.box(expert * step, 18 + height - size[1], size, colour, hint=hint, kind=kind)
            middle = expert * step + step / 2 - 2
            drawing.text(middle, 18 + height + 15, str(expert), "quiet small", anchor="middle")
            if expert in chosen:
                # Neighbours on a phone have no room for the sign.
                sign = drawing.choose(narrow="", wide="%")
                told = f"{100 * probability:.0f}{sign}"
                y = 18 + height - size[1] - 4
                drawing.text(middle, y, told, "strong small", anchor="middle")
        keys = [(DEVICE_COLOURS[device], f"device {device}") for device in range(router.devices)]
        drawing.keys(18 + height + 24, keys)

    weights = router.weights(layer, token)
    says = f"“{router.words[token]}” goes to " + ", ".join(
        f"expert {expert} with {row[expert]:.0%}" for expert in chosen
    )
    rows = [
        (str(expert), f"{probability:.1%}", _say_weight(chosen, weights, expert))
        for expert, probability in enumerate(row)
    ]
    return picture(says + ".", draw, ("expert", "probability", "weight of its output"), rows)


def _say_weight(chosen: tuple[int, ...], weights: tuple[float, ...], expert: int) -> str:
    return f"{weights[chosen.index(expert)]:.0%}" if expert in chosen else "not chosen"


def draw_dispatch(lesson: Lesson) -> CoursePicture:
    """Draw a sentence's rows on their way: a line a token, a cell an expert that it chose."""
    router = load_tiny_router()
    layer, token = _layer(lesson), _token(lesson)

    def draw(drawing: Drawing) -> None:
        names = drawing.choose(narrow=76.0, wide=110.0)
        gap = 5.0
        step = (drawing.width - names - gap * router.devices) / router.experts

        def x_of(expert: int) -> float:
            return names + expert * step + gap * router.device_of(expert)

        for device in range(router.devices):
            first = device * router.experts // router.devices
            told = drawing.choose(narrow=f"{device}", wide=f"device {device}")
            drawing.text(x_of(first), 12, told, "quiet")
        for place, word in enumerate(router.words):
            y = 20 + place * 21
            drawing.text(0, y + 14, word, "strong" if place == token else "quiet")
            chosen = router.choose(layer, place)
            for expert in range(router.experts):
                if expert not in chosen:
                    drawing.box(x_of(expert), y, (step - 2, 18), "", kind="empty")
                    continue
                colour = DEVICE_COLOURS[router.device_of(expert)]
                hint = f"{word}: expert {expert} on device {router.device_of(expert)}"
                drawing.box(x_of(expert), y, (step - 2, 18), colour, hint=hint)
        bottom = 20 + len(router.words) * 21
        drawing.box(0, 20 + token * 21 - 1, (drawing.width, 20), "", kind="frame")
        counts = count_sentence_rows(router, layer)
        drawing.text(0, bottom + 15, "rows", "quiet")
        for expert, count in enumerate(counts):
            middle = x_of(expert) + step / 2 - 1
            drawing.text(middle, bottom + 15, str(count), "quiet small", anchor="middle")

    counts = count_sentence_rows(router, layer)
    per_device = [
        sum(count for expert, count in enumerate(counts) if router.device_of(expert) == device)
        for device in range(router.devices)
    ]
    says = f"Rows of the {len(router.words)} tokens on each device: " + ", ".join(
        map(str, per_device)
    )
    rows = [
        (word, ", ".join(map(str, sorted(router.choose(layer, place)))))
        for place, word in enumerate(router.words)
    ]
    return picture(says + ".", draw, ("token", "experts"), rows)


def count_sentence_rows(router: TinyRouter, layer: int) -> list[int]:
    """Return the rows that each expert gets of the sentence."""
    counts = [0] * router.experts
    for place in range(len(router.words)):
        for expert in router.choose(layer, place):
            counts[expert] += 1
    return counts


def draw_combine(lesson: Lesson) -> CoursePicture:
    """Draw what share of a token's output comes from each of its experts."""
    router = load_tiny_router()
    layer, token = _layer(lesson), _token(lesson)
    chosen = router.choose(layer, token)
    parts = []
    for expert, weight in zip(chosen, router.weights(layer, token), strict=True):
        colour = DEVICE_COLOURS[router.device_of(expert)]
        text = f"{weight:.0%}"
        parts.append(BarPart(name=f"expert {expert}", amount=weight, colour=colour, text=text))
    whole = StackedBar(name="output", parts=tuple(parts), text="100%")
    single = [StackedBar(name=part.name, parts=(part,), text=part.text) for part in parts]

    def draw(drawing: Drawing) -> None:
        end = draw_bars(drawing, 0, [whole])
        draw_bars(drawing, end + 8, single)

    says = "The output of the layer is the sum of " + ", ".join(
        f"{part.text} of {part.name}" for part in parts
    )
    return picture(says + ".", draw, ("expert", "weight"), [(p.name, p.text) for p in parts])


def draw_expert_loads(lesson: Lesson) -> CoursePicture:
    """Draw the rows of each expert of a layer, on four devices, with what a capacity drops."""
    router = load_tiny_router()
    factor = _capacity(lesson)
    counts = _counts(lesson)
    most = router.capacity(factor)
    mean = sum(counts) / len(counts)

    def draw(drawing: Drawing) -> None:
        height, gap = 150.0, 6.0
        step = (drawing.width - gap * router.devices) / router.experts
        top = max(*counts, mean * 1.05)
        for expert, count in enumerate(counts):
            x = expert * step + gap * router.device_of(expert)
            colour = DEVICE_COLOURS[router.device_of(expert)]
            kept = min(count, most) * height / top
            over = max(0, count - most) * height / top
            hint = f"expert {expert}: {count:,} rows"
            drawing.box(x, 14 + height - kept, (step - 3, kept), colour, hint=hint)
            drawing.box(
                x, 14 + height - kept - over, (step - 3, over), colour, hint=hint, kind="faint"
            )
            middle = x + step / 2 - 1.5
            drawing.text(middle, 14 + height + 15, str(expert), "quiet small", anchor="middle")
        y = 14 + height * (1 - mean / top)
        drawing.line((0, y), (drawing.width, y), "wire")
        told = f"expert; a colour is a device; the line is the mean, {mean:,.0f}"
        drawing.text(0, 14 + height + 32, told, "quiet small")
        if factor:
            y = 14 + height * (1 - min(1.0, most / top))
            drawing.line((0, y), (drawing.width, y), "limit")
            drawing.text(0, 14 + height + 47, f"dashed: capacity {most:,}", "quiet small")

    says = (
        f"The busiest expert gets {max(counts):,} rows, the mean is {mean:,.0f}; "
        f"{router.dropped_share(counts, factor):.1%} of the rows are dropped."
    )
    rows = [
        (str(expert), str(router.device_of(expert)), f"{count:,}", f"{max(0, count - most):,}")
        for expert, count in enumerate(counts)
    ]
    return picture(says, draw, ("expert", "device", "rows", "dropped"), rows)


def draw_load_cost(lesson: Lesson) -> CoursePicture:
    """Draw the step of the lesson's job under several loads of the busiest rank."""
    bars = []
    rows = []
    now = lesson.settings["load_factor"]
    for load in _LOADS:
        estimate = lesson.change({"load_factor": load}).plan.estimate
        text = format_seconds(estimate.step_s)
        colour = DEVICE_COLOURS[1] if load == now else DEVICE_COLOURS[0]
        hottest = estimate.imbalance.load
        name = f"published, {hottest:.2f}" if load == "none" else f"load {load}"
        part = BarPart(name=name, amount=estimate.step_s, colour=colour, text=text)
        bars.append(StackedBar(name=name, parts=(part,), text=text))
        rows.append((name, text))
    even = lesson.change({"load_factor": "1"}).plan.estimate.step_s
    limit = BarLimit(amount=even, name=f"even {format_seconds(even)}")
    says = "Seconds of a step: " + ", ".join(f"{bar.name} {bar.text}" for bar in bars)

    def draw(drawing: Drawing) -> None:
        draw_bars(drawing, 0, bars, limit)

    return picture(says + ".", draw, ("busiest over mean", "step"), rows)


def _tiny(lesson: Lesson, part: str) -> Quantity:
    router = load_tiny_router()
    counts = _counts(lesson)
    mean = sum(counts) / len(counts)
    devices = [0] * router.devices
    for expert, count in enumerate(counts):
        devices[router.device_of(expert)] += count
    numbers = {
        "layers": (router.layers, Unit.COUNT),
        "experts": (router.experts, Unit.COUNT),
        "top_k": (router.top_k, Unit.COUNT),
        "steps": (router.steps, Unit.COUNT),
        "tokens": (router.token_count, Unit.COUNT),
        "balance_steps": (router.balance_steps, Unit.COUNT),
        "devices": (router.devices, Unit.COUNT),
        "words": (len(router.words), Unit.COUNT),
        "expert_load": (max(counts) / mean, Unit.TIMES),
        "most_liked": (max(counts) / router.token_count, Unit.PERCENT),
        "rank_load": (max(devices) * router.devices / sum(devices), Unit.TIMES),
        "dropped": (router.dropped_share(counts, _capacity(lesson)), Unit.PERCENT),
    }
    if part not in numbers:
        _refuse("tiny", part)
    number, unit = numbers[part]
    return Quantity(number=number, unit=unit)


def _route(lesson: Lesson, part: str) -> Quantity:
    """Return a figure of the token that is followed."""
    router = load_tiny_router()
    layer, token = _layer(lesson), _token(lesson)
    row = router.probabilities[layer][token]
    chosen = router.choose(layer, token)
    homes = {router.device_of(expert) for expert in chosen}
    numbers = {
        "first": (chosen[0], Unit.COUNT),
        "second": (chosen[1], Unit.COUNT),
        "probability": (row[chosen[0]], Unit.PERCENT),
        "kept": (sum(row[expert] for expert in chosen), Unit.PERCENT),
        "weight": (router.weights(layer, token)[0], Unit.PERCENT),
        "devices": (len(homes), Unit.COUNT),
        "device": (router.device_of(chosen[0]), Unit.COUNT),
        "even": (1 / router.experts, Unit.PERCENT),
        "most_rows": (max(count_sentence_rows(router, layer)), Unit.COUNT),
        "rows": (len(router.words) * router.top_k, Unit.COUNT),
        "copies": (_count_copies(router, layer), Unit.COUNT),
    }
    if part == "word":
        return Quantity(number=0, unit=Unit.TEXT, word=router.words[token].strip())
    if part not in numbers:
        _refuse("route", part)
    number, unit = numbers[part]
    return Quantity(number=number, unit=unit)


def _count_copies(router: TinyRouter, layer: int) -> int:
    """Return the copies of the sentence's tokens where each goes to a device once."""
    return sum(
        len({router.device_of(expert) for expert in router.choose(layer, place)})
        for place in range(len(router.words))
    )


def _load(lesson: Lesson, part: str) -> Quantity:
    if part:
        _refuse("load", part)
    return Quantity(number=lesson.plan.estimate.imbalance.load, unit=Unit.TIMES)


def _refuse(name: str, part: str) -> NoReturn:
    raise BadInput(Reason(field="chapter", value=f"{name}.{part}", rule="there is no such figure"))


ROUTE_FIGURES: Mapping[str, Callable[[Lesson, str], Quantity]] = MappingProxyType(
    {"tiny": _tiny, "route": _route, "load": _load}
)
