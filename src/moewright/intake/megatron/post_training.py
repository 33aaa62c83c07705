"""The batches of reinforcement learning as those of a pre-training: verl's and slime's settings.

Their micro-batches are packed up to a number of tokens. A plan takes such a pack for one sequence,
and every generated text for as long as it may get.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from moewright.intake.megatron.settings import SettingTree, is_unset
from moewright.intake.megatron.unknown import UNKNOWN_VALUE
from moewright.spec.errors import BadInput, Reason
from moewright.spec.units import is_whole_number, whole_number

_ACTOR = "actor_rollout_ref.actor."
_POLICY = "policy."
_PACKING_DETAILS = (
    "train_mb_tokens",
    "logprob_mb_tokens",
    "algorithm",
    "microbatch_order",
    "sequence_length_round",
    "fuse_loss",
)
_PACKED_TOKENS = 16384  # verl's default of ppo_max_token_len_per_gpu
_SLIME_NODES = "--actor-num-nodes"
_SLIME_RANKS = "--actor-num-gpus-per-node"
_SLIME_TOKENS = "--max-tokens-per-gpu"
_SLIME_SEQ_LEN = "4096"  # its default
_SLIME_DEFAULTS = ("--bf16", "--use-distributed-optimizer")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSettings:
    """Where a framework says the texts of an update, in settings that match `mark`.

    An update has `prompts` prompts with `samples` texts each; a text is as long as the sum of
    `lengths`. Each name stands with its default.
    """

    mark: str
    prompts: tuple[str, int]
    samples: tuple[str, int]
    micro: tuple[str, int]
    lengths: tuple[tuple[str, int], ...]
    pack: str = ""

    def set_batches(
        self, tree: SettingTree, options: dict[str, tuple[str, ...]]
    ) -> tuple[str, ...]:
        """Set lengths and batches of an update; return a note on them.

        Raises:
            BadInput: a size is no whole number above 0, or micro-batches are packs of tokens.
        """
        packed = tree.take_text(self.pack) if self.pack else ""
        if packed and packed != "-1":
            rule = "packs of tokens in place of texts cannot be planned from this configuration"
            raise BadInput(Reason(field=self.pack, value=packed[:60], rule=rule, nearest="-1"))
        text = sum(_size(tree, *length) for length in self.lengths)
        texts = _size(tree, *self.prompts) * _size(tree, *self.samples)
        _set_batches(options, text, _size(tree, *self.micro), texts)
        return (f"an update is planned on {texts} texts of {text} tokens, their full length",)


REINFORCED = (
    TextSettings(  # skyrl/train/config/config.py
        mark="trainer.policy.*",
        prompts=("trainer.policy_mini_batch_size", 256),
        samples=("generator.n_samples_per_prompt", 5),
        micro=("trainer.micro_train_batch_size_per_gpu", 1),
        lengths=(
            ("trainer.max_prompt_length", 512),
            ("generator.sampling_params.max_generate_length", 1024),
        ),
        pack="trainer.max_tokens_per_microbatch",
    ),
    TextSettings(  # mindspeed_rl/config_cls/rl_config.py
        mark="rl_config.*",
        prompts=("rl_config.mini_batch_size", 1),
        samples=("rl_config.n_samples_per_prompt", 1),
        micro=("actor_config.micro_batch_size", 1),
        lengths=(
            ("rl_config.max_prompt_length", 512),
            ("generate_config.sampling_config.max_tokens", 128),
        ),
    ),
)


def verl_batches(tree: SettingTree, options: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Set lengths and batches of an actor's update; return a note on them, none for others.

    Raises:
        BadInput: a size is no whole number above 0.
    """
    if not tree.matches(f"{_ACTOR}*"):
        return _supervised_batches(tree, options)
    text = _size(tree, "data.max_prompt_length", 512)
    text += _size(tree, "data.max_response_length", 512)
    texts = _size(tree, f"{_ACTOR}ppo_mini_batch_size", 256)
    texts *= _size(tree, "actor_rollout_ref.rollout.n", 1)
    micro = _size(tree, f"{_ACTOR}ppo_micro_batch_size_per_gpu", 0) or _share_micro(tree, options)
    if tree.take_text(f"{_ACTOR}use_dynamic_bsz").lower() != "true":
        _set_batches(options, text, micro, texts)
        return (f"an update is planned on {texts} texts of {text} tokens, their full length",)
    pack = _size(tree, f"{_ACTOR}ppo_max_token_len_per_gpu", _PACKED_TOKENS)
    return _pack(tree, options, texts=texts, text=text, pack=pack)


def _share_micro(tree: SettingTree, options: Mapping[str, tuple[str, ...]]) -> int:
    """Return a replica's part of the micro-batch of all, as verl said it before 0.2; 1 for none."""
    whole = _size(tree, f"{_ACTOR}ppo_micro_batch_size", 1)
    return max(1, whole // _count_replicas(tree, options))


def _count_replicas(tree: SettingTree, options: Mapping[str, tuple[str, ...]]) -> int:
    ranks = _size(tree, "trainer.nnodes", 1) * _size(tree, "trainer.n_gpus_per_node", 8)
    degrees = (_degree(options, name) for name in ("tensor", "pipeline", "context"))
    return max(1, ranks // prod(degrees))


def _supervised_batches(tree: SettingTree, options: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    if not tree.matches("engine.*parallel_size"):
        return ()
    text = _size(tree, "data.max_length", 1024)
    if tree.take_text("data.use_dynamic_bsz", "true").lower() != "true":
        options["--seq-length"] = (str(text),)
        return ()
    texts = _size(tree, "data.train_batch_size", 256)
    pack = _size(tree, "data.max_token_len_per_gpu", 8192)
    return _pack(tree, options, texts=texts, text=text, pack=pack)


def _pack(
    tree: SettingTree,
    options: dict[str, tuple[str, ...]],
    *,
    texts: int,
    text: int,
    pack: int,
) -> tuple[str, ...]:
    """Set packs of at most `pack` tokens a rank for sequences, and return a note on them."""
    tokens = pack * _degree(options, "context")
    in_pack = max(1, tokens // text)
    packs = -(-texts // in_pack)
    replicas = _count_replicas(tree, options)
    batch = -(-packs // replicas) * replicas
    _set_batches(options, tokens, 1, batch)
    note = (
        f"an update of {texts} texts is planned as {batch} packs of {tokens} tokens, {in_pack} "
        f"texts of {text} tokens, their full length, in each"
    )
    return (note,)


def roll_batches(tree: SettingTree, options: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Set the sequences of ROLL, a prompt with its response; return a note on them.

    Raises:
        BadInput: a length is no whole number above 0.
    """
    if not is_unset(tree.take("sequence_length")):
        length = _size(tree, "sequence_length", 1)
    else:
        length = _size(tree, "prompt_length", 1024) + _size(tree, "response_length", 1024)
    options["--seq-length"] = (str(length),)
    return (f"texts are planned at their full length of {length} tokens",)


def nemo_rl_batches(tree: SettingTree, options: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Set packs of tokens for NeMo-RL's sequences where it packs them; return a note on them.

    Raises:
        BadInput: a size is no whole number above 0.
    """
    sections = (f"{_POLICY}sequence_packing.", f"{_POLICY}dynamic_batching.")
    enabled = [
        section for section in sections if tree.take_text(f"{section}enabled").lower() == "true"
    ]
    for section in sections:
        for name in _PACKING_DETAILS:
            tree.take(f"{section}{name}")
    if not enabled:
        return ()
    text = _size(tree, f"{_POLICY}max_total_sequence_length", 512)
    texts = _size(tree, f"{_POLICY}train_global_batch_size", 512)
    tokens = _size(tree, f"{enabled[0]}train_mb_tokens", text)
    in_pack = max(1, tokens // text)
    ranks = _size(tree, "cluster.num_nodes", 1) * _size(tree, "cluster.gpus_per_node", 8)
    degrees = [_degree(options, name) for name in ("tensor", "pipeline", "context")]
    replicas = max(1, ranks // prod(degrees))
    packs = -(-texts // in_pack)
    batch = -(-packs // replicas) * replicas
    _set_batches(options, in_pack * text, 1, batch)
    note = (
        f"an update of {texts} texts is planned as {batch} packs of {in_pack * text} tokens, "
        f"{in_pack} texts of {text} tokens, their full length, in each"
    )
    return (note,)


def is_slime(words: Sequence[str]) -> bool:
    """Whether a command is slime's: it says the actor's ranks."""
    return _SLIME_NODES in words


def slime_words(words: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return slime's command as one of Megatron-LM, and a note on its batches."""
    values = dict(pairwise(words))
    launcher = [
        f"--nnodes={values[_SLIME_NODES]}",
        f"--nproc_per_node={values.get(_SLIME_RANKS, '8')}",
    ]
    added = [name for name in _SLIME_DEFAULTS if name not in words]
    note = ""
    if "--global-batch-size" not in words:
        added += ["--global-batch-size", _slime_batch(values)]
    tokens = values.get(_SLIME_TOKENS, "")
    pack = int(_SLIME_SEQ_LEN)
    if is_whole_number(tokens):
        context = values.get("--context-parallel-size", "1")
        pack = int(tokens) * whole_number(context, otherwise=1)
        added += ["--micro-batch-size", "1", "--seq-length", str(pack)]
        note = f"packs of {pack} tokens stand for sequences; each text is taken for one pack"
    else:
        for name, value in (("--seq-length", _SLIME_SEQ_LEN), ("--micro-batch-size", "1")):
            added += [] if name in words else [name, value]
    if "--max-position-embeddings" not in words:
        added += ["--max-position-embeddings", str(pack)]
    return [*launcher, *words, *added], (note,) if note else ()


def _slime_batch(values: Mapping[str, str]) -> str:
    """Return the samples of a step: those of a rollout over its steps.

    Raises:
        BadInput: the command does not say how many samples a rollout has.
    """
    texts = 1
    for name, default in (("--rollout-batch-size", ""), ("--n-samples-per-prompt", "1")):
        text = values.get(name, default)
        if not is_whole_number(text):
            rule = "is missing, and so is --global-batch-size"
            raise BadInput(Reason(field=name, value=text[:60].replace("\0", "$"), rule=rule))
        texts *= int(text)
    steps = values.get("--num-steps-per-rollout", "1")
    return str(texts // max(1, whole_number(steps)))


def _set_batches(options: dict[str, tuple[str, ...]], seq_len: int, micro: int, batch: int) -> None:
    options["--seq-length"] = (str(seq_len),)
    options["--micro-batch-size"] = (str(micro),)
    options["--global-batch-size"] = (str(batch),)


def _degree(options: Mapping[str, tuple[str, ...]], axis: str) -> int:
    name = f"--{axis}-parallel-size" if axis == "context" else f"--{axis}-model-parallel-size"
    text = next(iter(options.get(name, ())), "1")
    return whole_number(text) or 1


def _size(tree: SettingTree, name: str, default: int) -> int:
    value = tree.take(name)
    if is_unset(value):
        return default
    if isinstance(value, str) and (unset := UNKNOWN_VALUE.search(value)):
        rule = f"takes the value of {unset[1]}, which is not set"
        raise BadInput(Reason(field=name, rule=rule, nearest=f"--set {unset[1]}=..."))
    if not isinstance(value, str) or not whole_number(value):
        shown = str(value)[:60].replace("\0", "$")
        raise BadInput(Reason(field=name, value=shown, rule="must be a whole number above 0"))
    return int(value)
