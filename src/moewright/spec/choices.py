"""What is known of a choice of a layout, stated once: the records of its fields and members.

A record is data alone. What a choice does stands where it is done, and why it is refused in the
functions of rules.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from typing import Any, Self, get_args, get_type_hints

# Larger numbers are typing errors; refusing them keeps every search for a nearest value short.
MAX_DEGREE = 10**15
MAX_MICRO_BATCH = 2**24


class FieldGroup(StrEnum):
    """What a field of a layout decides."""

    DEGREES = "degrees"  # how many ranks divide the model and the batch, and which they are
    PIPELINE = "pipeline"  # which layers a stage has, and in which order it runs micro-batches
    MEMORY = "memory"  # what a rank holds, computes again or leaves in host memory
    EXCHANGE = "exchange"  # how rows, keys and values travel, and between which ranks
    KERNELS = "kernels"  # what runs beside what, and what graphs replay


class FieldKind(StrEnum):
    """How a field is written in layout text; its type decides."""

    NUMBER = "number"  # a whole number: "tp2"
    SWITCH = "switch"  # "sp1" or "sp0"
    FACTOR = "factor"  # a number from 0: "capacity=1.25"
    NAME = "name"  # a member of an enumeration: "schedule=zbv"
    SET = "set"  # several members: "overlap=grad+param"
    STAGES = "stages"  # a pipeline layout string in quotes


@dataclass(frozen=True, kw_only=True, slots=True)
class SetWord:
    """A word of a set behind which a number stands: "block5" in "recompute=block5".

    `field` is the set, and `member` the one that the word stands for, "" for none.
    """

    field: str
    word: str
    member: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldFacts:
    """What is known of a field of a layout besides its type, its default and what it does."""

    group: FieldGroup
    key: str = ""  # of layout text and job files, where it is not the field's name
    word: SetWord | None = None  # in place of a key of its own
    least: int = 0
    most: int = MAX_DEGREE
    levels: tuple[int, ...] = ()  # the only values, where they are few
    whole: str = ""  # the member of a set that goes with none but `beside_whole`
    beside_whole: tuple[str, ...] = ()
    is_always_shown: bool = False  # in layout text, at its default too
    needs_experts: bool = False  # the default is the only value of a model without experts
    megatron: str = ""  # Megatron-LM's option for it, if a single one sets it
    is_plain_option: bool = False  # that option takes the value, and stands only beside it
    megatron_instead: str = ""  # what Megatron-LM does, which has the default alone; "": it has all
    torchtitan_instead: str = ""
    is_priced: bool = False  # an estimate away from the default needs runs that measured it
    # of the studio's control, "" for none: a number steps through `levels` or `tried`, a name or
    # a set through its members, and a switch follows from others
    label: str = ""
    tried: tuple[Any, ...] = ()  # values that searches try, those that depend on no job

    def describe_levels(self) -> str:
        """Return the rule that a value is one of the levels."""
        *others, last = map(str, self.levels)
        return f"must be {', '.join(others)} or {last}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutField:
    """A field of a layout with its facts; `names` are the members of a name or of a set."""

    name: str
    kind: FieldKind
    default: Any
    names: tuple[StrEnum, ...]
    facts: FieldFacts

    @property
    def key(self) -> str:
        """The key of layout text and job files; "" for a number that stands behind a word."""
        if self.facts.word is not None:
            return ""
        return self.facts.key or self.name

    @property
    def least(self) -> int:
        """The least number that is legal, which may be a default that text never spells."""
        return min(self.facts.least, int(self.default))

    def format(self, value: Any) -> str:
        """Return a value of the field as layout text has it; a set without members is "none"."""
        if self.kind is FieldKind.SET:
            return "+".join(value) or "none"
        return str(value).removesuffix(".0")


FACTS = "facts"  # the key of a field's metadata under which they stand


def list_fields(layout: type) -> tuple[LayoutField, ...]:
    """List the fields of a layout that have a default, in the order of their definition.

    Raises:
        KeyError: one of them has no facts.
    """
    hints = get_type_hints(layout)
    return tuple(
        LayoutField(
            name=entry.name,
            kind=_kind_of_type(hints[entry.name]),
            default=entry.default,
            names=_members_of_type(hints[entry.name]),
            facts=entry.metadata[FACTS],
        )
        for entry in fields(layout)
        if entry.default is not MISSING
    )


def _kind_of_type(hint: Any) -> FieldKind:
    if get_args(hint):
        return FieldKind.SET
    if _members_of_type(hint):
        return FieldKind.NAME
    kinds = {bool: FieldKind.SWITCH, int: FieldKind.NUMBER, float: FieldKind.FACTOR}
    return kinds.get(hint, FieldKind.STAGES)


def _members_of_type(hint: Any) -> tuple[StrEnum, ...]:
    enumeration = next(iter(get_args(hint)), hint)
    is_enumeration = isinstance(enumeration, type) and issubclass(enumeration, StrEnum)
    return tuple(enumeration) if is_enumeration else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class NameFacts:
    """What is known of a member of an enumeration besides what it does."""

    megatron: str = ""  # Megatron-LM's word for it, or its option; "" for the member's own, or none
    torchtitan: str = ""  # torchtitan's word; "" for none
    column: str = ""  # of a table of measured runs; "" for none


_NO_FACTS = NameFacts()


class DescribedName(StrEnum):
    """An enumeration whose members may carry facts beside their values."""

    facts: NameFacts

    def __new__(cls, value: str, facts: NameFacts = _NO_FACTS) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.facts = facts
        return member

    @property
    def megatron_word(self) -> str:
        """The word of Megatron-LM's options for it."""
        return self.facts.megatron or self.value


class Payload(StrEnum):
    """What a dispatcher sends of the tokens that a rank has routed."""

    TOKENS = "tokens"  # every token to every rank of the experts
    ROWS = "rows"  # a row for each expert that a token chose
    COPIES = "copies"  # a copy for each rank that has a chosen expert, however many it has


class RegisteredMemory(StrEnum):
    """What a dispatcher registers before it moves anything, however much it will send."""

    NOTHING = "nothing"
    RINGS = "rings"  # of tokens, for each peer of the node and each node, both ways
    EVERY_TOKEN = "every_token"  # room for all tokens of the group on one rank, both ways


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatcherFacts:
    """What is known of a dispatcher besides how it works.

    One that needs `packages` leaves the moving to the kernels of a library. They write to a peer
    or post messages themselves on `gpu_networks`, have a CPU thread post them on `proxy_networks`
    (values of NetworkKind), and do not run on others.
    """

    title: str
    payload: Payload
    packages: tuple[str, ...] = ()
    home: str = ""  # where the packages come from
    gpu_networks: tuple[str, ...] = ()
    proxy_networks: tuple[str, ...] = ()
    max_ranks: int = 0  # of an expert group; 0: any number
    max_tokens: int = 0  # of a rank and micro-batch; 0: any number
    registers: RegisteredMemory = RegisteredMemory.NOTHING
    knows_nodes: bool = False  # may send to a node before it sends to a rank
    pads_rows: bool = False  # to a capacity of experts, or to a budget of a rank
    has_static_shapes: bool = False  # whatever the router chooses
    waits_for_counts: bool = False  # the host, for those of a library's peers
    brings_local_probs: bool = False  # with a copy come those of all experts of the rank
    frees_received_rows: bool = False  # before another micro-batch beside them ends
    permutes_rows: bool = False  # by kernels of its own, whichever the trainer has
    is_searched: bool = False  # how fast it is has been published
    megatron: tuple[str, ...] = ()  # its type, and the backend of the flexible one; () for none
    torchtitan: str = ""  # its backend; "" for none
    is_in_bridge: bool = False  # Megatron Bridge sets it up
    no_bridge_devices: str = ""  # how the names of devices begin on which it does not

    @property
    def is_library(self) -> bool:
        """Whether kernels of a library move the tokens."""
        return bool(self.packages)
