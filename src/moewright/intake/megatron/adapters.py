"""Adapters (LoRA) that a command or a configuration asks for, by the names of its linears."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moewright.intake.megatron.settings import SettingTree, is_unset
from moewright.spec.errors import BadInput, Reason
from moewright.spec.units import whole_number
from moewright.spec.workload import AdapterTarget, FineTuningSpec, Task

RANK = "--lora-r"
ALPHA = "--lora-alpha"
TARGETS = "--lora-target-modules"
# What Megatron-LM and transformers call the linears that read the input of attention, and write it.
_READING = (
    *("linear_qkv", "linear_q", "linear_k", "linear_v", "linear_kv", "query_key_value"),
    *("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj"),
    *("linear_kv_up_proj", "q_proj", "k_proj", "v_proj", "in_proj", "attention_qkv"),
)
_WRITING = ("linear_proj", "o_proj", "out_proj", "dense", "attention_dense")
_FEEDING = (
    *("linear_fc1", "linear_fc2", "gate_proj", "up_proj", "down_proj", "linear_fc1_gate"),
    *("linear_fc1_up", "dense_h_to_4h", "dense_4h_to_h", "mlp_fc1", "mlp_fc2"),
)
_ROUTER = ("router", "gate", "all-router")
_EVERY = ("all-linear", "all_linear", "all")
# Linears that have their adapters together here: one name alone stands for the others too.
_TOGETHER: tuple[tuple[str, ...], ...] = (
    ("linear_fc1", "linear_fc2"),
    ("mlp_fc1", "mlp_fc2"),
    ("gate_proj", "up_proj", "down_proj"),
    ("q_proj", "k_proj", "v_proj"),
    ("linear_q", "linear_k", "linear_v"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSettings:
    """The settings by which a framework asks for adapters, and its values where they are silent.

    `wanted` are settings with the value that asks for them; where there are none, a rank above 0
    does.
    """

    rank: str
    alpha: str
    targets: str
    default_rank: str = "0"
    default_alpha: str = "32"
    default_targets: str = "all-linear"
    wanted: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.rank, self.alpha, self.targets)

    def take(self, tree: SettingTree) -> tuple[str, ...]:
        """Return the options of the adapters that settings ask for; none where they ask for none.

        Names of linears that are computed in the trainer stand for all linears.
        """
        rank = tree.take_text(self.rank) or self.default_rank
        alpha = tree.take_text(self.alpha) or self.default_alpha
        targets = tree.take_items(self.targets)
        is_wanted = any(
            tree.peek_text(name).strip().lower() == value for name, value in self.wanted.items()
        )
        for name in self.wanted if is_wanted else ():
            tree.take(name)
        if not is_wanted and (self.wanted or rank in ("0", "", "null")):
            return ()
        named = [target for target in targets if not is_unset(target)] or [self.default_targets]
        return (RANK, rank, ALPHA, alpha, TARGETS, *named)


def read_adapters(
    options: Mapping[str, tuple[str, ...]], *, is_moe: bool
) -> tuple[FineTuningSpec, tuple[str, ...]]:
    """Return what a command trains, and notes; all weights where it asks for no adapters.

    Raises:
        BadInput: the rank is no number, or a linear is none that is known here.
    """
    if TARGETS not in options and RANK not in options:
        return FineTuningSpec(), ()
    rank_text = next(iter(options.get(RANK, ())), str(FineTuningSpec().lora_rank))
    rank = whole_number(rank_text)
    if rank < 1:
        rule = "must be a whole number above 0"
        raise BadInput(Reason(field=RANK, value=rank_text[:60], rule=rule, nearest="16"))
    alpha_text = next(iter(options.get(ALPHA, ())), str(2 * rank))
    names = _split_names(options.get(TARGETS, ()))
    if not names:
        rule = "is needed beside adapters: the linears that have one"
        raise BadInput(Reason(field=TARGETS, rule=rule, nearest=f"--set {TARGETS}=all-linear"))
    linears = (*_READING, *_WRITING, *_FEEDING, *_ROUTER, *_EVERY)
    for name in names:
        if name not in linears:
            rule = f"is no linear that is known here: {', '.join((*_EVERY[:1], *linears[:9]))} ..."
            raise BadInput(Reason(field=TARGETS, value=name[:60], rule=rule, nearest="all-linear"))
    is_every = not names.isdisjoint(_EVERY)
    feeds = is_every or not names.isdisjoint(_FEEDING)
    targets = [
        target
        for target, is_adapted in (
            (AdapterTarget.QKV, is_every or not names.isdisjoint(_READING)),
            (AdapterTarget.PROJ, is_every or not names.isdisjoint(_WRITING)),
            (AdapterTarget.MLP, feeds),
            (AdapterTarget.SHARED_EXPERTS, feeds),
        )
        if is_adapted
    ]
    fine_tuning = FineTuningSpec(
        task=Task.LORA,
        lora_rank=rank,
        lora_alpha=_read_alpha(alpha_text),
        lora_targets=tuple(targets),
        lora_experts=feeds and is_moe,
        lora_router=is_moe and not names.isdisjoint(_ROUTER),
    )
    partial = [group for group in _TOGETHER if 0 < len(names & {*group}) < len(group)]
    notes = tuple(
        f"{TARGETS} {' '.join(sorted(names & {*group}))}: planned with adapters beside all of "
        f"{', '.join(group)}"
        for group in partial
    )
    return fine_tuning, notes


def _split_names(values: Sequence[str]) -> set[str]:
    """Return the names of linears, without where they are: *.layers.*.self_attention.linear_qkv."""
    words = (word for value in values for word in value.strip("[]()").replace(",", " ").split())
    return {word.strip("'\"").rpartition(".")[2] for word in words} - {""}


def _read_alpha(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        rule = "must be a number"
        raise BadInput(Reason(field=ALPHA, value=text[:60], rule=rule, nearest="32")) from None
