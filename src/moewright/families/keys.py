"""Fields of config.json that say one field of a ModelSpec each, and those that say nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from moewright.families.draft import Draft, ModelFields, WholeModel
from moewright.families.fields import FieldReader
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import ModelSpec

# What a field is where the config does not say: a value, or one that follows from other fields.
Default = Any | Callable[[ModelFields], Any]


class Written(Enum):
    """When a field is written."""

    ALWAYS = "always"
    CHANGED = "changed"  # where it is not what a reader takes in its absence


@dataclass(frozen=True, kw_only=True, slots=True)
class Key(ABC):
    """A field of config.json and the field of the model that it says.

    The first of `names` is written; the others are spellings that are read too. Without a default,
    the field must be there.
    """

    names: tuple[str, ...]
    says: str  # the field of ModelSpec, dotted
    default: Default = None
    written: Written = Written.ALWAYS

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the field of the model, by the spelling that is there."""
        value = self._take(fields, self._resolve(draft), draft)
        spellings = (name for name in self.names if fields.has_value(name))
        # A later refusal names the bound as the config spells it.
        draft.spell(self.says, next(spellings, self.names[0]))
        draft[self.says] = value

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the field by its first name."""
        whole = WholeModel(model)
        value = whole[self.says]
        if self.written is Written.ALWAYS or value != self._resolve(whole):
            config[self.names[0]] = self._spell(value)

    def _resolve(self, model: ModelFields) -> Any:
        if callable(self.default):
            return self.default(model)
        return self.default

    @abstractmethod
    def _take(self, fields: FieldReader, default: Any, draft: Draft) -> Any: ...

    def _spell(self, value: Any) -> Any:
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole(Key):
    """A whole number in low..high, at most the field `at_most` where that is given.

    `zero_is_null` writes null for 0.
    """

    low: int = 1
    high: int = 2**31
    at_most: str = ""
    is_even: bool = False
    zero_is_null: bool = False

    def _take(self, fields: FieldReader, default: Any, draft: Draft) -> Any:
        high, bound = self.high, ""
        if self.at_most:
            high = draft[self.at_most]
            bound = draft.spelling(self.at_most)
        value = fields.integer(*self.names, low=self.low, high=high, default=default, bound=bound)
        if self.is_even:
            require_even(fields, self.names[0], value)
        return value

    def _spell(self, value: Any) -> Any:
        if self.zero_is_null and value == 0:
            return None
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Number(Key):
    """A finite number in low..high."""

    low: float = 0
    high: float = 1

    def _take(self, fields: FieldReader, default: Any, draft: Draft) -> Any:
        return fields.number(*self.names, low=self.low, high=self.high, default=default)


@dataclass(frozen=True, kw_only=True, slots=True)
class Switch(Key):
    """True or false."""

    def _take(self, fields: FieldReader, default: Any, draft: Draft) -> Any:
        return fields.boolean(self.names[0], default=default)


@dataclass(frozen=True, kw_only=True, slots=True)
class Word(Key):
    """A word for a member of an enum; the first word of the table is the default.

    A member is written by its first word.
    """

    words: Mapping[str, Any]

    def _take(self, fields: FieldReader, default: Any, draft: Draft) -> Any:
        words = tuple(self.words)
        return self.words[fields.choice(*self.names, choices=words, default=words[0])]

    def _spell(self, value: Any) -> Any:
        words = (word for word, meaning in self.words.items() if meaning == value)
        word = next(words, None)
        if word is None:
            rule = "has no HF form in this family"
            nearest = str(next(iter(self.words.values())))
            field_name = f"model.{self.says}"
            raise BadInput(Reason(field=field_name, value=str(value), rule=rule, nearest=nearest))
        return word


@dataclass(frozen=True, kw_only=True, slots=True)
class Fixed:
    """Fields of the model that follow from the family: no field of its config.json says them."""

    values: Mapping[str, Any]

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Set the fields."""
        for name, value in self.values.items():
            draft[name] = value

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Write nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copied:
    """A field of the model that is another one in this family."""

    says: str
    source: str

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Set the field."""
        draft[self.says] = draft[self.source]

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Write nothing: the other field is written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Neutral:
    """A field that would change the model: absent, null, or one of `allowed`, else refused.

    `constants` are written.
    """

    names: tuple[str, ...]
    allowed: tuple[Any, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Refuse any other value."""
        for name in self.names:
            fields.require_neutral(name, *self.allowed)

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the constants."""
        config |= self.constants


@dataclass(frozen=True, kw_only=True, slots=True)
class OneWord:
    """A field whose one legal word goes without saying."""

    names: tuple[str, ...]
    word: str
    is_written: bool = False

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Refuse any other word."""
        fields.choice(*self.names, choices=(self.word,), default=self.word)

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the word by its first name, where it is written at all."""
        if self.is_written:
            config[self.names[0]] = self.word


@dataclass(frozen=True, kw_only=True, slots=True)
class Ignored:
    """Fields that say nothing about the shape of the model."""

    names: tuple[str, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Count the fields as read."""
        fields.ignore(*self.names)

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the constants that other readers need."""
        config |= self.constants


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOnly:
    """A field that is read in every family, though no class of transformers has it in this one.

    A model with another value than `neutral` has no written form.
    """

    part: Key
    neutral: Any
    rule: str
    field_name: str  # as users know it

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the field."""
        self.part.read(fields, draft)

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Refuse a model that needs the field."""
        value = WholeModel(model)[self.part.says]
        if value != self.neutral:
            raise BadInput(
                Reason(
                    field=self.field_name,
                    value=str(value),
                    rule=f"has no HF form: {self.rule}",
                    nearest=str(self.neutral),
                )
            )


def require_even(fields: FieldReader, name: str, width: int) -> None:
    """Refuse an odd width of what rotates.

    Raises:
        BadInput: it names the field and the even width above.
    """
    if width % 2:
        rule = "must be even: rotary embedding turns pairs"
        raise fields.refusal(name, rule, str(width + 1))
