"""Layouts as people write them: "tp2,ep8,pp32,vpp3,mbs1,recompute=moe_act+layernorm"."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from moewright.spec.choices import FieldFacts, FieldGroup, FieldKind, LayoutField, SetWord
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import (
    DEGREES,
    LAYOUT_FIELDS,
    Layout,
    Recompute,
    Schedule,
)
from moewright.spec.names import closest_match
from moewright.spec.stage_string import StageString, parse_stages
from moewright.spec.units import mention

FIELD_OF_KEY = MappingProxyType({field.key: field for field in LAYOUT_FIELDS if field.key})
# Keys that may be written without "=".
_BARE = (FieldKind.NUMBER, FieldKind.SWITCH, FieldKind.FACTOR)
LAYOUT_KEYS = (
    *DEGREES,
    "dp",
    *(
        key
        for kind in FieldKind
        for key, field in FIELD_OF_KEY.items()
        if field.kind is kind and key not in DEGREES
    ),
)

MAX_DIGITS = 18  # far beyond any size, below 2**63

# Numbers that stand behind a word of a set.
_SET_NUMBERS = tuple(
    (field.facts.word, field) for field in LAYOUT_FIELDS if field.facts.word is not None
)
_ON = ("1", "on", "true", "yes")
_OFF = ("0", "off", "false", "no")
_DP_FACTS = FieldFacts(group=FieldGroup.DEGREES, least=1)  # dp is no field, but a key
# Degrees, then all that has one value, then sets, then the pipeline layout.
_TEXT_ORDER = sorted(
    (field for field in LAYOUT_FIELDS if field.key),
    key=lambda field: (
        field.name not in DEGREES,
        field.kind in (FieldKind.SET, FieldKind.STAGES),
        field.kind is FieldKind.STAGES,
    ),
)
_KEY_NOUNS = MappingProxyType({"layout": "a pipeline layout"})  # keys that are no noun alone
_SELECT = (Recompute.LAYERNORM, Recompute.MOE_ACT)  # what recompute=select stands for


@dataclass(frozen=True, kw_only=True, slots=True)
class _Item:
    key: str
    value: str


def parse_layout(text: str, *, world_size: int) -> Layout:
    """Return the layout that `text` describes over `world_size` ranks; "" is the default layout.

    Defaults that depend on other keys: sp is on when tp > 1, the schedule is interleaved when
    vpp > 1, and vpp is 2 on a V (zbv, v-half, v-min, dualpipev). dp is derived; where it is given
    it must agree. Whether the degrees suit a model is rules.limits.legality's question.

    Raises:
        BadInput: The text is at fault; each fault is a Reason.
    """
    if world_size < 1:
        rule = "must be at least 1"
        raise BadInput(Reason(field="world_size", value=str(world_size), rule=rule, nearest="1"))
    values, dp = _parse_fields(text)
    if values.get("tp", 1) > 1:
        values.setdefault("sp", True)
    if values.get("schedule", Schedule.ONE_F_ONE_B).is_v_shaped:
        values.setdefault("vpp", 2)
    if values.get("vpp", 1) > 1:
        values.setdefault("schedule", Schedule.INTERLEAVED)
    layout = Layout(world_size=world_size, **values)
    dense_ranks = layout.tp * layout.cp * layout.pp
    if dp is not None and dp * dense_ranks != world_size:
        rule = f"must be the {world_size} ranks over tp * cp * pp = {dense_ranks}"
        near = str(layout.dp)
        if world_size % dense_ranks:
            rule += ", which do not divide"
            near = ""
        raise BadInput(Reason(field="dp", value=str(dp), rule=rule, nearest=near))
    return layout


def _implied_values(layout: Layout) -> dict[str, Any]:
    """Return the values that fields have where text leaves them out, if they are no defaults.

    On a V the virtual stages are always written.
    """
    implied: dict[str, Any] = {"sp": layout.tp > 1}
    if layout.vpp > 1:
        implied["schedule"] = Schedule.INTERLEAVED
    if layout.schedule.is_v_shaped:
        implied["vpp"] = None
    return implied


def _format_field(layout: Layout, field: LayoutField) -> str:
    value = getattr(layout, field.name)
    if field.kind is FieldKind.SET:
        return f"{field.key}={'+'.join(_set_words(layout, field))}"
    if field.kind is FieldKind.STAGES:
        return f"{field.key}='{value}'"
    if field.kind is FieldKind.FACTOR:
        return f"{field.key}={value!r}"
    if field.kind is FieldKind.NAME:
        return f"{field.key}={value}"
    return f"{field.key}{int(value)}"


def explicit_fields(text: str) -> frozenset[str]:
    """Return the fields of Layout that `text` itself sets, which a search must keep."""
    return frozenset(_parse_fields(text)[0])


def fields_of_key(key: str) -> tuple[str, ...]:
    """Return the fields that a key of the text sets: its own, and the numbers behind its words."""
    own = FIELD_OF_KEY[key].name
    return (own, *(number.name for word, number in _SET_NUMBERS if word.field == own))


def format_layout(layout: Layout) -> str:
    """Return the shortest text that parse_layout reads back to `layout`.

    Degrees come first; tp, pp, ep and mbs are always shown.
    """
    implied = _implied_values(layout)
    return ",".join(
        _format_field(layout, field)
        for field in _TEXT_ORDER
        if field.facts.is_always_shown
        or getattr(layout, field.name) != implied.get(field.name, field.default)
    )


def split_layout(layout: Layout) -> dict[str, str]:
    """Return the values of a layout's text by their keys, in its order."""
    items = (_parse_item(part) for part in _split_parts(format_layout(layout)))
    return {item.key: item.value for item in items}


def format_fields(layout: Layout, names: Container[str]) -> str:
    """Return layout text that says the named fields of a layout, defaults too, and no other.

    Numbers behind a word of a set go with the set.
    """
    parts = []
    for field in _TEXT_ORDER:
        if field.name in names:
            text = _format_field(layout, field)
            parts.append(f"{text}none" if text.endswith("=") else text)
    return ",".join(parts)


def format_layout_changes(layout: Layout, base: Layout) -> str:
    """Return what a layout has that another does not, and lacks that it has, as a phrase.

    That is "with ep8, mbs2, without offload", or "" where they are the same.
    """
    parts = {_parse_item(part).key: part for part in _split_parts(format_layout(layout))}
    base_parts = {_parse_item(part).key: part for part in _split_parts(format_layout(base))}
    changes = [part for key, part in parts.items() if part != base_parts.get(key)]
    lacking = [f"without {_KEY_NOUNS.get(key, key)}" for key in base_parts if key not in parts]
    return ", ".join(filter(None, (mention("with {}", ", ".join(changes)), *lacking)))


def _parse_fields(text: str) -> tuple[dict[str, Any], int | None]:
    """Return the fields of Layout given in `text`, and dp where it is given.

    Raises:
        BadInput: It has a Reason for every fault.
    """
    values: dict[str, Any] = {}
    faults: list[Reason] = []
    seen: set[str] = set()
    for part in _split_parts(text):
        try:
            item = _parse_item(part)
            if item.key in seen:
                raise BadInput(Reason(field=item.key, value=item.value, rule="is given twice"))
            seen.add(item.key)
            if item.key == "dp":
                values["dp"] = _parse_integer(item, _DP_FACTS)
                continue
            field = FIELD_OF_KEY[item.key]
            values[field.name] = _parse_value(_take_numbers(item, values), field)
        except BadInput as error:
            faults += error.reasons
    if faults:
        raise BadInput(*faults)
    return values, values.pop("dp", None)


def _split_parts(text: str) -> Iterator[str]:
    """Split at commas outside quotes."""
    part = ""
    quote = ""
    for letter in text:
        if letter == "," and not quote:
            yield part
            part = ""
            continue
        if letter in "'\"" and quote in ("", letter):
            quote = "" if quote else letter
        part += letter
    if quote:
        rule = f"the quote {quote} is not closed"
        raise BadInput(Reason(field="layout", value=part.strip(), rule=rule))
    if part.strip() or "," in text:
        yield part


def _parse_item(part: str) -> _Item:
    stripped = part.strip()
    key, equals, value = (side.strip() for side in stripped.partition("="))
    if not equals and stripped.casefold() == "sp":
        return _Item(key="sp", value="1")
    if not equals and (match := re.fullmatch(r"([A-Za-z_]+?)\s*(-?\d.*)", stripped)):
        key, value = match.groups()
    folded = key.casefold()
    if folded == "edp":
        rule = "is derived from the other degrees; leave it out"
        raise BadInput(Reason(field="edp", value=value, rule=rule))
    if folded not in LAYOUT_KEYS:
        raise BadInput(_unknown_key(stripped, key))
    if not equals and folded != "dp" and FIELD_OF_KEY[folded].kind not in _BARE:
        raise BadInput(Reason(field=folded, rule="needs a value", nearest=f"{folded}=..."))
    return _Item(key=folded, value=value)


def _unknown_key(part: str, key: str) -> Reason:
    if not part:
        rule = "has an empty place between commas"
        return Reason(field="layout", rule=rule, nearest="leave it out")
    rule = f"is no layout key; keys are {' '.join(LAYOUT_KEYS)}; a value with commas is quoted"
    near = closest_match(key.casefold(), LAYOUT_KEYS)
    return Reason(field=key or part, rule=rule, nearest=near)


def _set_words(layout: Layout, field: LayoutField) -> Iterator[str]:
    """Yield the members of a set as text, then its numbers that belong to no member."""
    numbers = [
        (word.member, f"{word.word}{getattr(layout, number.name)!r}")
        for word, number in _SET_NUMBERS
        if word.field == field.name and getattr(layout, number.name) != number.default
    ]
    for member in getattr(layout, field.name):
        yield next((text for owner, text in numbers if owner == member), member.value)
    yield from (text for owner, text in numbers if not owner)


def _take_numbers(item: _Item, values: dict[str, Any]) -> _Item:
    """Move the numbers of a set's words to fields of their own, and return the item without them.

    "block5" and "uniform2" are full recompute of the first 5 layers of each chunk, and of 2 layers
    per checkpoint; "optimizer0.5" offloads half of the optimizer, "layers0.5" the activations of
    half of the layers, "chunks1" those of the first chunk of each rank.
    """
    words = []
    for text in item.value.split("+"):
        match = re.fullmatch(r"([a-z_]+)(\d.*)", text.strip().casefold())
        numbers = (
            (word, number)
            for word, number in _SET_NUMBERS
            if match and (word.field, word.word) == (item.key, match[1])
        )
        word, number = next(numbers, (None, None))
        if match is None or word is None or number is None:
            words.append(text)
            continue
        if number.kind is FieldKind.FACTOR:
            values[number.name] = _parse_fraction(text, match[2], word)
        else:
            counted = _Item(key=word.word, value=match[2])
            values[number.name] = _parse_integer(counted, number.facts)
        if word.member:
            words.append(word.member)
    return _Item(key=item.key, value="+".join(words))


def _parse_fraction(text: str, fraction: str, word: SetWord) -> float:
    try:
        number = float(fraction)
    except ValueError:
        number = 0.0
    if 0 < number <= 1:
        return number
    rule = "takes a fraction above 0, at most 1"
    nearest = str(word.member or f"{word.word}1")
    raise BadInput(Reason(field=word.field, value=text, rule=rule, nearest=nearest))


def _parse_value(item: _Item, field: LayoutField) -> Any:
    if field.kind is FieldKind.STAGES:
        return _parse_stage_string(item)
    if field.kind is FieldKind.SWITCH:
        return _parse_switch(item)
    if field.kind is FieldKind.FACTOR:
        return _parse_factor(item)
    if field.kind is FieldKind.NAME:
        return _parse_choice(item.key, item.value, field.names)
    if field.kind is FieldKind.SET:
        return _parse_set(item, field)
    return _parse_integer(item, field.facts)


def _parse_integer(item: _Item, facts: FieldFacts) -> int:
    if not re.fullmatch(r"-?[0-9]+", item.value):
        rule = "must be a whole number"
        raise BadInput(
            Reason(field=item.key, value=item.value[:60], rule=rule, nearest=str(facts.least))
        )
    if len(item.value) > MAX_DIGITS:
        rule = f"must have {MAX_DIGITS} digits at most"
        raise BadInput(Reason(field=item.key, value=f"{item.value[:MAX_DIGITS]}...", rule=rule))
    number = int(item.value)
    if number < facts.least:
        rule = f"must be at least {facts.least}"
        nearest = str(facts.least)
        raise BadInput(Reason(field=item.key, value=item.value, rule=rule, nearest=nearest))
    if facts.levels and number not in facts.levels:
        nearest = str(facts.levels[-1])
        reason = Reason(
            field=item.key, value=item.value, rule=facts.describe_levels(), nearest=nearest
        )
        raise BadInput(reason)
    return number


def _parse_switch(item: _Item) -> bool:
    folded = item.value.casefold()
    if folded in _ON or folded in _OFF:
        return folded in _ON
    raise BadInput(Reason(field=item.key, value=item.value, rule="must be 1 or 0", nearest="1"))


def _parse_factor(item: _Item) -> float:
    try:
        number = float(item.value)
    except ValueError:
        number = math.nan
    if math.isfinite(number) and number >= 0:
        return number + 0.0  # -0 reads as 0
    rule = "must be a factor, 0 or more"
    raise BadInput(Reason(field=item.key, value=item.value, rule=rule, nearest="1.0"))


def _parse_choice(key: str, text: str, members: Sequence[StrEnum]) -> StrEnum:
    legal = [member.value for member in members]
    folded = text.strip().casefold()
    if folded in legal:
        return members[legal.index(folded)]
    rule = f"must be one of {', '.join(legal)}"
    near = closest_match(folded, legal)
    raise BadInput(Reason(field=key, value=text.strip(), rule=rule, nearest=near))


def _parse_set(item: _Item, field: LayoutField) -> tuple[StrEnum, ...]:
    """Return the members of a set as a sorted tuple without repeats.

    "none" is the empty set; "select" is layernorm+moe_act, Megatron-LM's usual pair.
    """
    if item.value.casefold() == "none":
        return ()
    members: set[StrEnum] = set()
    for word in item.value.split("+"):
        if field.name == "recompute" and word.strip().casefold() == "select":
            members.update(_SELECT)
        else:
            members.add(_parse_choice(item.key, word, field.names))
    whole = field.facts.whole
    if whole in members and members - {whole, *field.facts.beside_whole}:
        rule = f"{whole} cannot be combined with others"
        raise BadInput(Reason(field=item.key, value=item.value, rule=rule, nearest=str(whole)))
    return tuple(sorted(members))


def _parse_stage_string(item: _Item) -> StageString:
    text = item.value
    is_quoted = len(text) > 1 and text[0] in ("'", '"') and text[-1] == text[0]
    if is_quoted:
        text = text[1:-1]
    try:
        parse_stages(text)
    except BadInput as error:
        example = "'Et*3|(tt|)*29,m|L'"
        reason = replace(error.reasons[0], field="layout", nearest=example)
        raise BadInput(reason) from None
    return StageString(text)
