"""Options that people write for Megatron-LM although its parser lacks them, and their meaning.

The names come from blog posts, Megatron-DeepSpeed, older releases and Pai-Megatron-Patch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from moewright.intake.megatron.deepspeed_experts import EXPERT_OPTIONS
from moewright.intake.megatron.settings import Value
from moewright.spec.errors import BadInput, Reason
from moewright.spec.units import whole_number

_PROGRAM = "megatron"
_TASKS = ("pt", "sft", "rlhf", "export")
_PLANNED = ("pt", "sft")
_SECTION = "swift"
_RANKS = {"NNODES": "nnodes", "NPROC_PER_NODE": "nproc_per_node"}


def is_swift(words: Sequence[str]) -> bool:
    """Whether a command is ms-swift's on Megatron: `megatron sft`, or the file behind it."""
    return bool(_find_task(words)[0])


def swift_settings(words: Sequence[str], environment: Mapping[str, str]) -> dict[str, Value]:
    """Return the options of a command, and its ranks, as settings below `swift`.

    Raises:
        BadInput: the command does something else than pre-training or supervised training.
    """
    task, place = _find_task(words)
    if task not in _PLANNED:
        rule = f"is planned for {' and '.join(_PLANNED)} alone"
        raise BadInput(Reason(field=f"megatron {task}", rule=rule, nearest="megatron sft"))
    settings: dict[str, Value] = {}
    name = ""
    for word in words[place + 1 :]:
        if word.startswith("--"):
            plain, equals, value = word.removeprefix("--").partition("=")
            name = f"{_SECTION}.{plain.replace('-', '_')}"
            settings[name] = value if equals else ""
        elif name:
            before = settings[name]
            values = (*([before] if isinstance(before, str) and before else before), word)
            settings[name] = values if len(values) > 1 else word
    for variable, key in _RANKS.items():
        if variable in environment:
            settings[f"{_SECTION}.{key}"] = environment[variable]
    return settings


def _find_task(words: Sequence[str]) -> tuple[str, int]:
    """Return what a command does, and where that stands; ("", 0) for another command."""
    for place, word in enumerate(words):
        following = words[place + 1] if place + 1 < len(words) else ""
        if word.rpartition("/")[2] == _PROGRAM and following in _TASKS:
            return following, place + 1
        if "_megatron/" in word and word.endswith(".py"):
            task = word.rpartition("/")[2].removesuffix(".py")
            return (task, place) if task in _TASKS else ("", 0)
    return "", 0


_DENSE = "--first-k-dense-replace"
_SHARED = ("--n-shared-experts", "--num-shared-experts")
_SLIDING = "--sliding-window"
_EXTENDED = "--moe-tp-extend-ep"
_CONTEXT = "--context-parallel-algo"
_EXPERT_RANKS = "--expert-model-parallel-size"
_CONTEXT_ALGORITHMS: Mapping[str, str] = MappingProxyType(
    {
        "ulysses_cp_algo": "a2a",
        "megatron_cp_algo": "p2p",
        "kvallgather_cp_algo": "all_gather",
    }
)
DEPENDENT_OPTIONS: Mapping[str, int] = MappingProxyType(
    {_DENSE: 1, **dict.fromkeys(_SHARED, 1), _SLIDING: 1, _EXTENDED: 0, _CONTEXT: 1}
)


def translate_options(
    dependent: Mapping[str, tuple[str, ...]], options: Mapping[str, tuple[str, ...]]
) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """Return the options of Megatron-LM that MindSpeed's stand for, and a note on each.

    Raises:
        BadInput: a value is none that is planned here.
    """
    translated: dict[str, tuple[str, ...]] = {}
    for name, values in dependent.items():
        text = next(iter(values), "")
        if name == _DENSE:
            translated |= _translate_dense_layers(text, options)
        elif name == _SLIDING:
            translated |= _translate_window(text, options)
        elif name in _SHARED:
            size = _number(options, "--moe-ffn-hidden-size", dependent, "--moe-intermediate-size")
            total = str(whole_number(text) * size)
            translated["--moe-shared-expert-intermediate-size"] = (total,)
        elif name == _EXTENDED:
            ranks = _number(options, _EXPERT_RANKS) * _number(
                options, "--tensor-model-parallel-size"
            )
            translated |= {
                _EXPERT_RANKS: (str(ranks),),
                "--expert-tensor-parallel-size": ("1",),
            }
        elif text not in _CONTEXT_ALGORITHMS:
            if _number(options, "--context-parallel-size") > 1:
                rule = f"is planned here as {', '.join(_CONTEXT_ALGORITHMS)}"
                raise BadInput(Reason(field=name, value=text[:60], rule=rule))
        else:
            translated["--cp-comm-type"] = (_CONTEXT_ALGORITHMS[text],)
    notes = tuple(
        f"{name} is of a fork: read as {' '.join((option, *values))}"
        for name in dependent
        for option, values in translated.items()
        if name in _origin(option)
    )
    return translated, notes


def _origin(option: str) -> tuple[str, ...]:
    origins = {
        "--moe-layer-freq": (_DENSE,),
        "--moe-shared-expert-intermediate-size": _SHARED,
        "--window-size": (_SLIDING,),
        "--cp-comm-type": (_CONTEXT,),
    }
    return origins.get(option, (_EXTENDED,))


def _translate_dense_layers(
    text: str, options: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """Return the pattern of layers that has no experts in the first ones."""
    layers = _number(options, "--num-layers")
    if not 0 < whole_number(text) < layers:
        return {}
    dense = int(text)
    return {"--moe-layer-freq": (f"([0]*{dense}+[1]*{layers - dense})",)}


def _translate_window(
    text: str, options: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """Return the window of a token and those before it; none where it holds a whole sequence."""
    width = whole_number(text)
    if not 0 < width < _number(options, "--seq-length"):
        return {}
    return {"--window-size": (f"{width - 1},0",)}


def _number(
    options: Mapping[str, tuple[str, ...]],
    name: str,
    others: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    other: str = "",
) -> int:
    text = next(iter(options.get(name, others.get(other, ()))), "1")
    return whole_number(text, otherwise=1)


class Treatment(StrEnum):
    """The treatment of an option that Megatron-LM's parser does not have."""

    CHECK = "check"  # it is a derived number and is checked against the others
    RENAMED = "same"  # other options mean the same today
    IGNORE = "drop"  # nothing in a plan depends on it
    SHARDING = "sharding"  # it is DeepSpeed's way to say ZeRO
    ADAPTERS = "adapters"  # it is of low-rank adapters beside frozen weights
    DEPENDENT = "dependent"  # what it means depends on others
    EXPERTS = "experts"  # it is of DeepSpeed's own layer of experts
    REFUSE = "refuse"


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignOption:
    """An option that Megatron-LM's parser does not have, with its treatment and the reason.

    `value_count` is the number of values behind it; `replacements` are the options that mean the
    same today, which take its values, and `also` are options that it sets besides. `meanings` are
    the options that each of its values stands for.
    """

    treatment: Treatment
    reason: str
    value_count: int = 0
    replacements: tuple[str, ...] = ()
    also: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    meanings: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)

    def list_replaced(self, values: tuple[str, ...]) -> Mapping[str, tuple[str, ...]]:
        """Return the options that it stands for with these values."""
        meaning = self.meanings.get(next(iter(values), ""), {})
        return {**dict.fromkeys(self.replacements, values), **self.also, **meaning}


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignValue:
    """A value that a fork of Megatron-LM takes for one of its options.

    `options` are Megatron-LM's with their values that come nearest, and `reason` says how near.
    """

    reason: str
    options: Mapping[str, tuple[str, ...]]


def _checked(reason: str, value_count: int = 0) -> ForeignOption:
    return ForeignOption(treatment=Treatment.CHECK, reason=reason, value_count=value_count)


def _ignored(reason: str, value_count: int = 0) -> ForeignOption:
    return ForeignOption(treatment=Treatment.IGNORE, reason=reason, value_count=value_count)


def _sharding(reason: str, value_count: int = 0) -> ForeignOption:
    return ForeignOption(treatment=Treatment.SHARDING, reason=reason, value_count=value_count)


def _of_adapters(value_count: int) -> ForeignOption:
    reason = "is of adapters"
    return ForeignOption(treatment=Treatment.ADAPTERS, reason=reason, value_count=value_count)


def _refused(reason: str, value_count: int = 0) -> ForeignOption:
    return ForeignOption(treatment=Treatment.REFUSE, reason=reason, value_count=value_count)


def _renamed(
    reason: str,
    *replacements: str,
    value_count: int = 0,
    also: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> ForeignOption:
    return ForeignOption(
        treatment=Treatment.RENAMED,
        reason=reason,
        value_count=value_count,
        replacements=replacements,
        also=also,
    )


_MOST_LINEARS = 64  # names behind an option: more than a layer has linears
_DERIVED = "is derived, never given: Megatron-LM takes it from the other sizes; here it is checked"
_DEEPSPEED = "is Megatron-DeepSpeed's"
_MINDSPEED = "is MindSpeed's"
_OLD = "is of Megatron-LM before 2022"
_PAI = "belongs to Pai-Megatron-Patch; no plan depends on it"

FOREIGN_OPTIONS: Mapping[str, ForeignOption] = MappingProxyType(
    {
        "--data-parallel-size": _checked(_DERIVED, 1),
        "--gradient-accumulation-steps": _checked(_DERIVED, 1),
        "--use-torch-compile": _ignored(
            "does not exist: fused elementwise functions are compiled by themselves; "
            "graphs of kernels are --cuda-graph-impl"
        ),
        "--use-fused-kernels": _ignored(
            "does not exist: fusions are on unless a --no-...-fusion says otherwise"
        ),
        "--no-async-tensor-model-parallel-allreduce": _ignored(
            "is gone: --sequence-parallel and --tp-comm-overlap are what overlaps "
            "tensor parallelism"
        ),
        "--deepspeed": _sharding(_DEEPSPEED),
        "--deepspeed-config": _sharding(_DEEPSPEED, 1),
        "--deepspeed_config": _sharding(_DEEPSPEED, 1),
        "--zero-stage": _sharding(_DEEPSPEED, 1),
        "--train-tokens": _ignored(
            f"{_DEEPSPEED}: a length of training, on which no step depends", 1
        ),
        "--tokenizer-name-or-path": _renamed(
            "is of Megatron-DeepSpeed and MindSpeed", "--tokenizer-model", value_count=1
        ),
        "--no-pipeline-parallel": _ignored(f"{_DEEPSPEED}, for models of one stage"),
        "--deepspeed-activation-checkpointing": _ignored(
            f"{_DEEPSPEED}: who runs --checkpoint-activations"
        ),
        "--use-flash-attn-v1": _renamed(_DEEPSPEED, "--use-flash-attn"),
        "--use-flash-attn-v2": _renamed(_DEEPSPEED, "--use-flash-attn"),
        "--use-flash-attn-triton": _renamed(_DEEPSPEED, "--use-flash-attn"),
        "--cpu-optimizer": _renamed(_DEEPSPEED, "--optimizer-cpu-offload"),
        "--checkpoint-activations": _renamed(
            _OLD, also={"--recompute-granularity": ("full",), "--recompute-method": ("uniform",)}
        ),
        "--checkpoint-num-layers": _renamed(_OLD, "--recompute-num-layers", value_count=1),
        "--activations-checkpoint-method": _renamed(
            _OLD,
            "--recompute-method",
            value_count=1,
            also={"--recompute-granularity": ("full",)},
        ),
        "--activations-checkpoint-num-layers": _renamed(
            _OLD, "--recompute-num-layers", value_count=1
        ),
        "--distribute-checkpointed-activations": _renamed(_OLD, "--distribute-saved-activations"),
        "--partition-activations": _renamed(_DEEPSPEED, "--distribute-saved-activations"),
        "--num-key-value-heads": _renamed(
            _DEEPSPEED, "--num-query-groups", value_count=1, also={"--group-query-attention": ()}
        ),
        "--ds-sequence-parallel-size": _renamed(
            f"{_DEEPSPEED}, Ulysses",
            "--context-parallel-size",
            value_count=1,
            also={"--cp-comm-type": ("a2a",)},
        ),
        "--overlapped-distributed-optimizer": _renamed(
            "is Megatron-LLaMA's",
            also={
                "--use-distributed-optimizer": (),
                "--overlap-grad-reduce": (),
                "--overlap-param-gather": (),
            },
        ),
        "--attention-head-type": ForeignOption(
            treatment=Treatment.RENAMED,
            reason="is of BigCode's fork",
            value_count=1,
            meanings={
                "multihead": {},
                "multiquery": {"--group-query-attention": (), "--num-query-groups": ("1",)},
            },
        ),
        "--profile-step-range": _ignored(
            "is --profile --profile-step-start A --profile-step-end B", 1
        ),
        "--profile-output-path": _ignored("is --use-pytorch-profiler with --tensorboard-dir", 1),
        "--fake-init-process-group": _renamed(
            "never existed under this name", "--fake-process-group"
        ),
        "--sequcen-parallel": _renamed("is misspelt", "--sequence-parallel"),
        "--use-custom-fsdp": _renamed("was renamed", "--use-megatron-fsdp"),
        "--moe-extended-tp": _ignored(
            "is gone: left out, --expert-tensor-parallel-size is the tensor-parallel size, "
            "as it said"
        ),
        "--use-legacy-models": _refused("is gone, and legacy models with it; leave it out"),
        "--num-experts-per-token": _refused("is --moe-router-topk", 1),
        "--expert-parallel-size": _refused("is --expert-model-parallel-size", 1),
        # Of the fork of Megatron-LM that databricks/megablocks' exp/ starts: left out, a model with
        # experts would be planned as a dense one.
        "--moe-num-experts": _refused("is megablocks'; in Megatron-LM it is --num-experts", 1),
        "--moe-top-k": _refused("is megablocks'; in Megatron-LM it is --moe-router-topk", 1),
        "--moe-capacity-factor": _refused(
            "is megablocks'; in Megatron-LM it is --moe-expert-capacity-factor", 1
        ),
        "--moe-expert-model-parallelism": _refused(
            "is megablocks'; in Megatron-LM it is --expert-model-parallel-size with its degree"
        ),
        "--expert-ep-size": _refused(
            "is FastMoE's; in Megatron-LM it is --expert-model-parallel-size with its degree", 1
        ),
        "--combined-1f1b": _renamed(
            "is of a branch of Megatron-LM", "--overlap-moe-expert-parallel-comm"
        ),
        "--combined-1f1b-recipe": _ignored("is how --combined-1f1b orders what it overlaps", 1),
        "--mtp-1f1b-overlap": _ignored(
            "is of a branch of Megatron-LM: a plan overlaps all layers that have experts"
        ),
        "--use-la-module": _refused(
            "is Linear-MoE's: all attention is replaced by linear attention, which cannot be "
            "planned here"
        ),
        "--moe-loss-weight": _ignored(
            "is megablocks' --moe-aux-loss-coeff; no plan depends on it", 1
        ),
        "--moe-loss-coeff": _ignored(
            "is Megatron-DeepSpeed's --moe-aux-loss-coeff; no plan depends on it", 1
        ),
        "--no-query-key-layer-scaling": _ignored(
            "is gone: scores are scaled by layer only where --apply-query-key-layer-scaling says so"
        ),
        "--patch-size": _refused("is of an encoder of pictures, which cannot be planned here", 1),
        "--tokenizer-prompt-format": _ignored(
            "belongs to Megatron-LM's multimodal example; no plan depends on it", 1
        ),
        "--use-llama2-rotary-position-embeddings": _renamed(
            "is Pai-Megatron-Patch's", "--use-rotary-position-embeddings"
        ),
        "--language-model-type": _refused(
            "is of a model of pictures, which is not planned here", 1
        ),
        "--vision-model-type": _refused("is of a model of pictures, which is not planned here", 1),
        "--intermediate-size": _renamed(
            "is Pai-Megatron-Patch's", "--ffn-hidden-size", value_count=1
        ),
        "--shared-moe-ffn-hidden-size": _renamed(
            "is Pai-Megatron-Patch's", "--moe-shared-expert-intermediate-size", value_count=1
        ),
        "--enable-shared-expert": _ignored("is Pai-Megatron-Patch's: the size says it"),
        "--multi-head-latent-attention": _renamed(_MINDSPEED, "--multi-latent-attention"),
        "--moe-intermediate-size": _renamed(_MINDSPEED, "--moe-ffn-hidden-size", value_count=1),
        "--qk-nope-head-dim": _renamed(_MINDSPEED, "--qk-head-dim", value_count=1),
        "--qk-rope-head-dim": _renamed(_MINDSPEED, "--qk-pos-emb-head-dim", value_count=1),
        "--shared-expert-gate": _renamed(_MINDSPEED, "--moe-shared-expert-gate"),
        "--fix-router": _renamed(_MINDSPEED, "--moe-router-force-load-balancing"),
        "--moe-fb-overlap": _renamed(_MINDSPEED, "--overlap-moe-expert-parallel-comm"),
        "--swap-optimizer": _renamed(
            "is MindSpeed's, which brings states back in parts", "--optimizer-cpu-offload"
        ),
        "--pad-vocab-size-to": _renamed(
            "is of MindSpeed and forks of Megatron-DeepSpeed", "--padded-vocab-size", value_count=1
        ),
        "--use-qk-norm": _renamed("is of a fork", "--qk-layernorm"),
        "--schedules-method": _refused(
            "is MindSpeed's: its schedules cannot be planned here; left out, the rest is", 1
        ),
        "--noop-layers": _refused("is MindSpeed's: empty layers cannot be planned here", 1),
        "--num-layer-list": _refused(
            "is MindSpeed's; in Megatron-LM it is --pipeline-model-parallel-layout", 1
        ),
        "--lora-r": _of_adapters(1),
        "--lora-alpha": _of_adapters(1),
        "--lora-target-modules": _of_adapters(_MOST_LINEARS),
        # As miles and FlagScale spell them.
        "--lora-rank": _of_adapters(1),
        "--lora-dim": _of_adapters(1),
        "--target-modules": _of_adapters(_MOST_LINEARS),
        "--world-size": _checked("is derived, never given: here it is the number of ranks", 1),
        "--rank": _ignored("is the rank that a launcher says", 1),
        "--DDP-impl": _ignored("is gone: gradients are reduced by Megatron-LM's own code", 1),
        "--dist-url": _ignored("is the address that a launcher says", 1),
        "--no-delay-grad-reduce": _ignored("is gone: --no-align-grad-reduce"),
        "--delay-param-gather": _ignored("is gone: --no-align-param-gather"),
        "--log-batch-size-to-tensorboard": _ignored("is gone: always logged"),
        "--local_rank": _ignored("is torch.distributed.launch's; torchrun says it by itself", 1),
        "--patch-tokenizer-type": _ignored(_PAI, 1),
        "--extra-vocab-size": _ignored(_PAI, 1),
        "--max-padding-length": _ignored(_PAI, 1),
        "--train-mode": _ignored(_PAI, 1),
        "--dataset": _ignored(_PAI, 1),
        **{
            name: ForeignOption(treatment=Treatment.EXPERTS, reason=_DEEPSPEED, value_count=count)
            for name, count in EXPERT_OPTIONS.items()
        },
        **{
            name: ForeignOption(treatment=Treatment.DEPENDENT, reason=_MINDSPEED, value_count=count)
            for name, count in DEPENDENT_OPTIONS.items()
        },
    }
)

FOREIGN_VALUES: Mapping[tuple[str, str], ForeignValue] = MappingProxyType(
    {
        # training/megatron/bailing_moe_v2.patch of inclusionAI/Ling-V2: bitsandbytes' AdamW8bit.
        ("--optimizer", "adamw-bnb-8bit"): ForeignValue(
            reason="keeps a byte a moment and a scale for 256 of them, paged; planned is fp8 with "
            "a scale for 32, 1.5 % more bytes, all of them on the device",
            options={
                "--optimizer": ("adam",),
                "--use-precision-aware-optimizer": (),
                "--exp-avg-dtype": ("fp8",),
                "--exp-avg-sq-dtype": ("fp8",),
            },
        ),
        ("--optimizer", "adamw"): ForeignValue(
            reason="is adam, whose weight decay is decoupled", options={"--optimizer": ("adam",)}
        ),
        ("--moe-token-dispatcher-type", "alltoall_seq"): ForeignValue(
            reason="was removed; alltoall sends the same tokens",
            options={"--moe-token-dispatcher-type": ("alltoall",)},
        ),
        ("--moe-router-load-balancing-type", "softmax_topk"): ForeignValue(
            reason="is MindSpeed's router without a balancing loss",
            options={"--moe-router-load-balancing-type": ("none",), "--moe-router-pre-softmax": ()},
        ),
        ("--moe-router-load-balancing-type", "pai_megatron_aux_loss"): ForeignValue(
            reason="is another form of the balancing loss",
            options={"--moe-router-load-balancing-type": ("aux_loss",)},
        ),
        ("--moe-layer-freq", "-1"): ForeignValue(
            reason="is MindSpeed's for --first-k-dense-replace alone", options={}
        ),
        ("--tokenizer-type", "BailingTokenizer"): ForeignValue(
            reason="is of the patch of Ling 2.0, and a tokenizer of Hugging Face",
            options={"--tokenizer-type": ("HuggingFaceTokenizer",)},
        ),
    }
)
