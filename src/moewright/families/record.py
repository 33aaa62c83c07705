"""The record of a family of models, and the one reader and writer of its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from moewright.families.draft import Draft, Part
from moewright.families.fields import FieldReader
from moewright.families.rope import Rope
from moewright.families.weight_names import WeightNames
from moewright.spec.model import ModelSpec


class Config(Protocol):
    """What a family's config.json consists of."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts in the order in which they are read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """A config.json of these parts alone."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class UpcycledForms:
    """The families whose config.json describes a dense model that got experts."""

    in_all_layers: str
    in_some_layers: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A family of models: `model_type` of its config.json and all that follows from it.

    `architecture` is the class that transformers, or the remote code of its checkpoints, has for
    it; without one no config.json is written. Model types of `nested_in` have a language model of
    the family in their `text_config`, beside what sees or hears. The language model of `written_as`
    families has no class of its own, and is written as one of another family. `tiny` are the
    fields of a model that trains in seconds, beside those of `TINY`.

    `has_clamped_swiglu`: its gates are gpt-oss's, with the two constants of that.
    `has_score_factor`: a factor of scores of 1 is one, and does not stand for the usual one.
    `torchtitan_with_images`: torchtitan has these models with what sees alone.
    `upcycled` is what a dense model becomes.
    """

    model_type: str
    config: Config
    architecture: str = ""
    nested_in: tuple[str, ...] = ()
    written_as: str = ""
    weights: WeightNames = field(default_factory=WeightNames)
    tiny: Mapping[str, Any] = field(default_factory=dict)
    has_clamped_swiglu: bool = False
    has_score_factor: bool = False
    torchtitan_with_images: bool = False
    upcycled: UpcycledForms | None = None

    @property
    def rounds_yarn(self) -> bool:
        """Whether the bounds of a yarn ramp are rounded."""
        return all(part.rounds for part in self.config.parts if isinstance(part, Rope))

    @property
    def scales_full_layers_alone(self) -> bool:
        """Whether a scaling of the rotation is for layers without a window alone."""
        return any(part.kinds for part in self.config.parts if isinstance(part, Rope))

    def read_model(self, fields: FieldReader, name: str) -> ModelSpec:
        """Read the model of a table of fields.

        Raises:
            BadInput: a field is missing, wrong or asks for what moewright does not model.
        """
        draft = Draft(self.model_type)
        for part in self.config.parts:
            part.read(fields, draft)
        return draft.build(name)

    def write_config(self, model: ModelSpec) -> dict[str, Any]:
        """Return the fields that are read back to `model`.

        Raises:
            BadInput: the family has no form for what the model is.
        """
        # It may be a model of a family that is written as this one.
        model = replace(model, family=self.model_type)
        config: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
        }
        for part in self.config.parts:
            part.write(model, config)
        return config
