"""Parts of a config.json that say what the experts and the router are, and which layers have them.

docs/formulas.md 4 says what the routers compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moewright.families.draft import Draft, Part
from moewright.families.fields import (
    MAX_EXPERTS,
    MAX_FFN,
    MAX_LAYERS,
    FieldReader,
    nearest_divisor,
)
from moewright.families.keys import Number, ReadOnly, Switch, Whole, Written
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import ModelSpec, MoeSpec, ScoreFunction

_COUNT_NAMES = ("num_experts", "n_routed_experts", "num_local_experts")
GROUPS = "n_group"
TOP_GROUPS = "topk_group"

SIGMOID: Mapping[str, Any] = {"moe.router.score": ScoreFunction.SIGMOID}
LATENT_SIZE = Whole(
    names=("moe_latent_size",),
    says="moe.latent_size",
    low=0,
    at_most="hidden_size",
    default=0,
    zero_is_null=True,
)
_NO_LATENT_SIZE = ReadOnly(
    part=LATENT_SIZE,
    neutral=0,
    rule="transformers has no such experts in this family",
    field_name="model.moe_latent_size",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """The parts of the experts, written where a model has any.

    `latent_size` is read where a layer has experts.
    """

    parts: tuple[Part, ...]
    latent_size: Part = _NO_LATENT_SIZE

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the parts."""
        for part in self.parts:
            part.read(fields, draft)
        if any(draft["moe_layers"]):
            self.latent_size.read(fields, draft)

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the parts."""
        if model.moe is not None:
            for part in (*self.parts, self.latent_size):
                part.write(model, config)


@dataclass(frozen=True, kw_only=True, slots=True)
class NoExperts:
    """A dense model: no layer has experts."""

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Set the layers."""
        draft["moe_layers"] = (False,) * draft["layers"]

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Refuse a model that has experts."""
        if model.moe is not None:
            rule = "has no HF form: a family of dense models"
            raise BadInput(Reason(field="model.family", value=model.family, rule=rule))


def expert_count(name: str) -> Whole:
    """Build the number of experts, which is written as `name` and read in every spelling."""
    names = (name, *(other for other in _COUNT_NAMES if other != name))
    return Whole(names=names, says="moe.experts", high=MAX_EXPERTS)


def top_k(*names: str) -> Whole:
    """Build the experts per token, at most the experts."""
    return Whole(
        names=names or ("num_experts_per_tok", "experts_per_token"),
        says="moe.router.top_k",
        at_most="moe.experts",
    )


def expert_width(*names: str) -> Whole:
    """Build the hidden width of one expert."""
    return Whole(names=names or ("moe_intermediate_size",), says="moe.ffn_size", high=MAX_FFN)


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseWidthOfExperts:
    """The width of experts in the field that other families have for dense MLPs.

    It is written with the width of dense MLPs.
    """

    names: tuple[str, ...] = ("intermediate_size",)

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the width."""
        draft["moe.ffn_size"] = fields.integer(*self.names, low=1, high=MAX_FFN)

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the width."""
        if model.moe is not None:
            config[self.names[0]] = model.moe.ffn_size


def scaling_factor(
    name: str = "routed_scaling_factor", *, written: Written = Written.ALWAYS
) -> Number:
    """Build the factor of the chosen experts' probabilities."""
    return Number(
        names=(name,),
        says="moe.router.scaling_factor",
        high=1e6,
        default=1.0,
        written=written,
    )


def selection_bias(name: str, *, default: bool = True) -> Switch:
    """Build the switch for a bias of experts that is for the choice alone."""
    return Switch(names=(name,), says="moe.router.selection_bias", default=default)


@dataclass(frozen=True, kw_only=True, slots=True)
class Renormalize:
    """Whether the probabilities of the chosen experts are divided by their sum.

    Softmax over the chosen experts equals softmax over all, chosen and divided so (docs/formulas.md
    4); undivided, an `is_softmax` router has it over all.
    """

    default: bool
    is_softmax: bool = True
    name: str = "norm_topk_prob"

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the switch."""
        renormalize = fields.boolean(self.name, default=self.default)
        draft["moe.router.renormalize"] = renormalize
        draft["moe.router.pre_softmax"] = self.is_softmax and not renormalize

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the switch."""
        config[self.name] = moe_of(model).router.renormalize


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertGroups:
    """The groups of experts that the router chooses from, where it rates groups at all."""

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the groups; they must divide the experts, and leave enough to choose from."""
        experts = draft["moe.experts"]
        groups = fields.integer(GROUPS, low=1, high=experts, default=1)
        top_groups = fields.integer(TOP_GROUPS, low=1, high=groups, bound=GROUPS, default=1)
        if experts % groups:
            nearest = nearest_divisor(experts, groups)
            raise fields.refusal(GROUPS, f"must divide the {experts} experts", nearest)
        # A router that rates no groups has one, whatever the fields say.
        if not draft["moe.router.group_scores"]:
            return
        chosen = draft["moe.router.top_k"]
        eligible = experts // groups * top_groups
        if chosen > eligible:
            rule = f"leaves {eligible} experts to choose {chosen} from"
            # The fewest groups that hold enough experts.
            raise fields.refusal(TOP_GROUPS, rule, str(-(-chosen * groups // experts)))
        draft["moe.router.groups"] = groups
        draft["moe.router.top_groups"] = top_groups

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the groups."""
        router = moe_of(model).router
        config |= {GROUPS: router.groups, TOP_GROUPS: router.top_groups}


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedExpertCount:
    """The number of shared experts, each as wide as a routed one."""

    names: tuple[str, ...]
    default: int = 0

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the number."""
        count = fields.integer(*self.names, low=0, high=MAX_EXPERTS, default=self.default)
        draft["moe.shared_ffn_size"] = count * draft["moe.ffn_size"]

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the number."""
        config[self.names[0]] = whole_shared_experts(moe_of(model))


@dataclass(frozen=True, kw_only=True, slots=True)
class WideSharedExperts:
    """The number of shared experts, and the width of one."""

    name: str
    default: int
    width_name: str = "moe_shared_expert_intermediate_size"
    width_is_routed: bool = False  # where the config does not say, else there is none

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read both."""
        count = fields.integer(self.name, low=0, high=MAX_EXPERTS, default=self.default)
        default = 0
        if self.width_is_routed:
            default = draft["moe.ffn_size"]
        low = int(self.width_is_routed)
        width = fields.integer(self.width_name, low=low, high=MAX_FFN, default=default)
        draft["moe.shared_ffn_size"] = count * width

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add one shared expert of all their width, or as many as are as wide as a routed one."""
        moe = moe_of(model)
        width = moe.shared_ffn_size
        if self.width_is_routed and width % moe.ffn_size == 0:
            config[self.name] = width // moe.ffn_size
        else:
            config |= {self.name: int(width > 0), self.width_name: width or moe.ffn_size}


@dataclass(frozen=True, kw_only=True, slots=True)
class AllLayers:
    """Every layer has experts."""

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Set the layers."""
        draft["moe_layers"] = (True,) * draft["layers"]

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Refuse a model of which a layer has none."""
        if not all(model.moe_layers):
            rule = "has no HF form: every layer of this family has experts"
            raise BadInput(Reason(field="model.moe_layers", rule=rule))


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseFirst:
    """Experts in the layers after the first dense ones, in every n-th of these, or as listed.

    `default` is the number of dense layers where `name` does not say. `words` writes the list,
    and `first` the number of dense layers; `every` writes n too.
    """

    default: int = 0
    name: str = "first_k_dense_replace"
    first: bool = True
    every: bool = False
    words: bool = False

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the number, or the list."""
        layers = draft["layers"]
        first = fields.integer(
            self.name,
            low=0,
            high=layers,
            bound="num_hidden_layers",
            # A tiny model may have fewer layers than the family has dense ones.
            default=min(self.default, layers),
        )
        step = fields.integer("moe_layer_freq", low=1, high=MAX_LAYERS, default=1)
        listed = fields.sequence("mlp_layer_types", max_length=layers)
        if listed is None:
            draft["moe_layers"] = tuple(i >= first and i % step == 0 for i in range(layers))
            return
        if len(listed) != layers or any(kind not in ("dense", "sparse") for kind in listed):
            rule = f"must hold dense or sparse for {layers} layers"
            raise fields.refusal("mlp_layer_types", rule)
        draft["moe_layers"] = tuple(kind == "sparse" for kind in listed)

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add what the family writes, and n where it is not 1."""
        first = model.moe_layers.index(True)
        if self.first:
            config[self.name] = first
        if self.words:
            config["mlp_layer_types"] = [
                "sparse" if is_moe else "dense" for is_moe in model.moe_layers
            ]
            return
        every = self._find_every(model.moe_layers, first)
        if self.every or every > 1:
            config["moe_layer_freq"] = every

    def _find_every(self, moe_layers: Sequence[bool], first: int) -> int:
        """Return the n for which layer i has experts if and only if i >= first and n divides i."""
        for n in range(1, len(moe_layers) + 1):
            if moe_layers == tuple(i >= first and i % n == 0 for i in range(len(moe_layers))):
                return n
        rule = "these MoE layers have no HF form in this family: dense first, then every n-th"
        raise BadInput(Reason(field="model.moe_layers", rule=rule))


def moe_of(model: ModelSpec) -> MoeSpec:
    """Return the experts of a model that has them: the others write none of these parts."""
    assert model.moe is not None
    return model.moe


def whole_shared_experts(moe: MoeSpec) -> int:
    """Return how many routed experts the shared ones are as wide as.

    Raises:
        BadInput: they are no whole number of them.
    """
    count, rest = divmod(moe.shared_ffn_size, moe.ffn_size)
    if rest:
        raise BadInput(
            Reason(
                field="model.moe.shared_ffn_size",
                value=str(moe.shared_ffn_size),
                rule="has no HF form: this family has a whole number of shared experts",
                nearest=str(max(1, count) * moe.ffn_size),
            )
        )
    return count


def require_layers(
    fields: FieldReader, name: str, numbers: Sequence[Any], layers: int, nearest: str
) -> None:
    """Refuse a list that holds anything but numbers of layers.

    Raises:
        BadInput: it names the list, and the numbers of layers.
    """
    for layer in numbers:
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < layers:
            raise fields.refusal(name, f"must name layers 0..{layers - 1}", nearest)
