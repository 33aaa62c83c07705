"""A plan as a recipe of Megatron Bridge: a Python file that builds its ConfigContainer and trains.

Bridge configures the same Megatron Core as Megatron-LM's flags do, so the settings are those flags
under Bridge's names (main at 067f987d, 2026-08-22). The model's shape comes from its Hugging Face
config.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import resources

from moewright.codec.data_paths import parse_data_paths
from moewright.codec.megatron_options import PLAIN_FIELDS
from moewright.exporters.megatron.model import model_flags
from moewright.exporters.megatron.script import all_flags, comment_lines, environment_variables
from moewright.exporters.torchrun import NO_FILES, RunFiles, trainer_command, transport_settings
from moewright.families.table import find_family
from moewright.intake import catalogue
from moewright.intake.megatron.options import MegatronOption, option_table
from moewright.rules.job import plan_job
from moewright.rules.limits.megatron_limits import core_refusals, provider_refusals
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import CudaGraphScope, DispatcherKind, Overlap
from moewright.spec.model import AttentionKind, RecurrentKind
from moewright.spec.plan import Plan
from moewright.spec.quoting import Python
from moewright.spec.workload import DocumentMasking, Dtype, MatrixUpdate, RouterForce, TrainerSpec

# The flags of each section of ConfigContainer, without their dashes; most fields there have the
# names of Megatron-LM's own arguments.
_SECTIONS = {
    "model": (
        "tensor-model-parallel-size",
        "sequence-parallel",
        "context-parallel-size",
        "cp-comm-type",
        "hierarchical-context-parallel-sizes",
        "pipeline-model-parallel-size",
        "pipeline-model-parallel-layout",
        "account-for-embedding-in-pipeline-split",
        "account-for-loss-in-pipeline-split",
        "expert-model-parallel-size",
        "expert-tensor-parallel-size",
        "moe-token-dispatcher-type",
        "moe-flex-dispatcher-backend",
        "moe-expert-capacity-factor",
        "moe-expert-rank-capacity-factor",
        "moe-use-grouped-tensor",
        "moe-pad-expert-input-to-capacity",
        "moe-token-drop-policy",
        "moe-shared-expert-overlap",
        "recompute-granularity",
        "recompute-method",
        "recompute-num-layers",
        "recompute-modules",
        "fine-grained-activation-offloading",
        "offload-modules",
        "activation-offload-fraction",
        "fine-grained-offloading-max-inflight-offloads",
        "cuda-graph-impl",
        "cuda-graph-modules",
        "seq-length",
        "moe-router-load-balancing-type",
        "moe-aux-loss-coeff",
        "moe-z-loss-coeff",
        "moe-router-dtype",
        "moe-input-jitter-eps",
        "moe-router-bias-update-rate",
        "moe-router-force-load-balancing",
        "moe-router-force-biased",
        "moe-grouped-gemm",
        "moe-permute-fusion",
        "mtp-loss-scaling-factor",
        "init-method-std",
        "attention-dropout",
        "hidden-dropout",
    ),
    "train": (
        "micro-batch-size",
        "global-batch-size",
        "train-iters",
        "manual-gc",
        "manual-gc-interval",
        "exit-signal-handler",
    ),
    "validation": (
        "eval-interval",
        "eval-iters",
    ),
    "scheduler": (
        "lr-decay-style",
        "lr-wsd-decay-style",
        "lr-warmup-iters",
        "lr-decay-iters",
        "lr-wsd-decay-iters",
    ),
    "optimizer": (
        "lr",
        "min-lr",
        "adam-beta1",
        "adam-beta2",
        "adam-eps",
        "weight-decay",
        "clip-grad",
        "use-precision-aware-optimizer",
        "exp-avg-dtype",
        "exp-avg-sq-dtype",
        "optimizer-cpu-offload",
        "optimizer-offload-fraction",
        "initial-loss-scale",
        "min-loss-scale",
        "loss-scale-window",
        "hysteresis",
    ),
    "ddp": (
        "use-distributed-optimizer",
        "use-megatron-fsdp",
        "data-parallel-sharding-strategy",
        "overlap-grad-reduce",
        "overlap-param-gather",
    ),
    "comm_overlap": (
        "tp-comm-overlap",
        "overlap-moe-expert-parallel-comm",
        "delay-wgrad-compute",
    ),
    "mixed_precision": (
        "fp8-format",
        "fp8-recipe",
        "fp8-amax-history-len",
        "fp8-amax-compute-algo",
        "fp8-margin",
        "fp4-format",
        "fp4-recipe",
    ),
    "dataset": (
        "reset-attention-mask",
        "eod-mask-loss",
        "reset-position-ids",
    ),
    "checkpoint": (
        "save",
        "load",
        "pretrained-checkpoint",
        "finetune",
        "save-interval",
        "async-save",
        "ckpt-format",
    ),
    "rng": (
        "seed",
        "te-rng-tracker",
    ),
    "logger": (
        "log-interval",
        "log-throughput",
        "tensorboard-dir",
        "wandb-project",
        "wandb-exp-name",
        "wandb-save-dir",
    ),
    "dist": ("use-tp-pp-dp-mapping",),
}
_RENAMED = {
    "--num-virtual-stages-per-pipeline-rank": ("model", "virtual_pipeline_model_parallel_size"),
    "--microbatch-group-size-per-virtual-pipeline-stage": (
        "model",
        "microbatch_group_size_per_vp_stage",
    ),
    "--ddp-bucket-size": ("ddp", "bucket_size"),
    "--fp8-format": ("mixed_precision", "fp8"),
    "--fp4-format": ("mixed_precision", "fp4"),
    "--log-throughput": ("logger", "log_throughput"),
}
# Flags that follow from the recipe's choice of mixed precision or of data.
_ELSEWHERE = (
    "--bf16",
    "--fp16",
    "--grad-reduce-in-bf16",
    "--accumulate-allreduce-grads-in-fp32",
    "--mock-data",
    "--data-path",
    "--split",
    "--train-data-path",
    "--valid-data-path",
    "--no-overlap-p2p-communication",
    "--no-check-for-nan-in-loss-and-grad",
    "--use-persistent-ckpt-worker",
)
# Flags whose list of values is a single value where it has one.
_SINGLE_VALUES = ("--cp-comm-type", "--moe-router-load-balancing-type", "--moe-aux-loss-coeff")
_DTYPES = {
    "fp32": "torch.float32",
    "bf16": "torch.bfloat16",
    "fp16": "torch.float16",
    "fp8": "torch.uint8",
}
_CLASSES = {
    "train": "TrainingConfig",
    "validation": "ValidationConfig",
    "scheduler": "SchedulerConfig",
    "dataset": "GPTDatasetConfig",
    "checkpoint": "CheckpointConfig",
    "rng": "RNGConfig",
    "logger": "LoggerConfig",
    "tokenizer": "TokenizerConfig",
    "rerun_state_machine": "RerunStateMachineConfig",
    "dist": "DistributedInitConfig",
}
_CORE = {
    "optimizer": "OptimizerConfig",
    "ddp": "DistributedDataParallelConfig",
    "comm_overlap": "CommOverlapConfig",
}
_TAIL = (
    "",
    'if __name__ == "__main__":',
    "    pretrain(config(), forward_step)",
)

# Their models are stacks of a pattern, which no layout of a pipeline cuts.
_HYBRID_MIXERS = (RecurrentKind.MAMBA, RecurrentKind.MAMBA2)
_Field = tuple[str, Python]  # its name and its value


def render_bridge_recipe(plan: Plan, files: RunFiles = NO_FILES) -> Python:
    """Return a Python file for torchrun.

    Raises:
        BadInput: one Reason for each thing that Megatron cannot say, or for a model that Hugging
            Face does not know by this name.
    """
    reasons = tuple(bridge_refusals(plan))
    if reasons:
        raise BadInput(*reasons)
    flags = all_flags(plan, files)
    shape_flags = {name for name, *_ in model_flags(plan.model, plan.workload, files)}
    options = option_table()
    places = _places(options)
    settings: dict[str, list[_Field]] = {}
    for name, *values in flags:
        if name in places:
            section, field = places[name]
            value = _python_value(options[name], tuple(values))
            settings.setdefault(section, []).append((field, value))
        # The shape is the provider's, from Hugging Face.
        elif name not in shape_flags and name not in _ELSEWHERE:
            raise AssertionError(f"{name} has no place in Megatron Bridge")
    tail = map(Python.write, _TAIL)
    head = _head_lines(plan, files)
    return Python.lines((*head, *_config_lines(plan, settings, files), *tail))


def bridge_refusals(plan: Plan) -> Iterator[Reason]:
    """Yield why Megatron Bridge does not start a plan: what Megatron Core does not train, and more.

    What Megatron-LM has no option for, although its configuration has a field, Bridge can say, and
    it builds the models that it converts by code of its own.
    """
    model = plan.model
    is_converted = find_family(model.family).architecture in list_converted()
    find_refusals = provider_refusals if is_converted else core_refusals
    yield from find_refusals(plan_job(plan), plan.hardware)
    # The recipe fetches the config by this name when it runs.
    if "/" not in model.name or model.name not in catalogue.model_names():
        rule = "Megatron Bridge takes models by their Hugging Face name"
        nearest = "Qwen/Qwen3-30B-A3B"
        yield Reason(field="model.name", value=model.name, rule=rule, nearest=nearest)
    elif not is_converted:
        rule = f"Megatron Bridge converts no {model.family}"
        yield Reason(field="model.name", value=model.name, rule=rule, nearest="--to megatron")
    is_hybrid = model.recurrent is not None and model.recurrent.kind in _HYBRID_MIXERS
    if is_hybrid and (plan.layout.stages or plan.layout.vpp > 1):
        rule = "Megatron Bridge cuts hybrid models evenly, a stage a rank"
        yield Reason(field="layout.vpp", value=str(plan.layout.vpp), rule=rule, nearest="1")
    yield from _check_library(plan)
    ramp = plan.workload.ramp.ramp_start
    if ramp:
        rule = "Megatron Bridge has batches of one size"
        yield Reason(field="workload.ramp_start", value=str(ramp), rule=rule, nearest="0")
    # Dropout has fields in the recipe.
    trainer = replace(plan.workload.trainer, attention_dropout=0.0, hidden_dropout=0.0)
    is_muon = plan.workload.optimizer.matrix_update is MatrixUpdate.MUON
    if trainer != TrainerSpec() or is_muon or (plan.layout.shard and plan.layout.zero == 1):
        rule = "Megatron Bridge's recipe has Adam and the kernels of its own providers"
        yield Reason(field="workload.trainer", rule=rule, nearest="--to megatron")


def list_converted() -> frozenset[str]:
    """Return the architectures that Megatron Bridge registers a converter for (067f987d)."""
    file = resources.files("moewright.exporters").joinpath("data/bridge_models.csv")
    rows = csv.DictReader(file.read_text(encoding="utf-8").splitlines())
    return frozenset(row["name"] for row in rows)


def _check_library(plan: Plan) -> Iterator[Reason]:
    """Yield why Megatron Bridge does not set up the library that moves tokens."""
    kind = plan.layout.dispatcher
    device = plan.hardware.device.name
    without = kind.facts.no_bridge_devices
    is_excluded = bool(without) and device.startswith(without)
    if not kind.facts.is_library or (kind.facts.is_in_bridge and not is_excluded):
        return
    rule = f"Megatron Bridge has no {kind.facts.title} on {device}"
    if not kind.facts.is_in_bridge:
        titles = [other.facts.title for other in DispatcherKind if other.facts.is_in_bridge]
        rule = f"Megatron Bridge sets up {' and '.join(titles)} alone"
    everywhere = (
        other
        for other in DispatcherKind
        if other.facts.is_in_bridge and not other.facts.no_bridge_devices
    )
    yield Reason(field="layout.dispatcher", value=kind, rule=rule, nearest=next(everywhere))


def _places(options: Mapping[str, MegatronOption]) -> Mapping[str, tuple[str, str]]:
    """Return the section and the field of each flag."""
    places = {
        f"--{name}": (section, options[f"--{name}"].dest)
        for section, names in _SECTIONS.items()
        for name in names
    }
    plain = {
        field.facts.megatron: ("model", options[field.facts.megatron].dest)
        for field in PLAIN_FIELDS
    }
    # The last one wins: Bridge's own names go before those of Megatron-LM.
    return plain | places | _RENAMED


def _python_value(option: MegatronOption, values: tuple[str, ...]) -> Python:
    """Return the values of a flag as a Python expression."""
    name = option.name
    # A switch is among the flags only where it is on.
    if option.value_count == "0":
        return _constant(True)
    if name in ("--exp-avg-dtype", "--exp-avg-sq-dtype"):
        return Python.name(_DTYPES[values[0]])
    read = Python.number if option.type in ("int", "float") else _constant
    items = [read(value) for value in values]
    if option.value_count == "1" or (len(items) == 1 and name in _SINGLE_VALUES):
        return items[0]
    return _constant(items)


def _constant(value: object) -> Python:
    return Python.write("{}", value)


def _head_lines(plan: Plan, files: RunFiles) -> Iterator[Python]:
    yield from comment_lines(plan, Python, files)
    yield Python.comment("Start on every node: {} THIS_FILE.py", trainer_command(plan))
    yield Python.write("import os")
    yield Python.write("")
    for name, value in environment_variables(plan.layout):
        yield Python.write("os.environ.setdefault({}, {})  # before torch starts", name, str(value))
    for setting in transport_settings(plan.layout, plan.hardware):
        yield Python.comment("{}", setting.reason)
        yield Python.write("os.environ.setdefault({}, {})", setting.name, setting.value)
    yield Python.write("")
    yield Python.write("import torch")
    yield Python.write("from megatron.bridge import AutoBridge")
    yield Python.write("from megatron.bridge.training.comm_overlap import CommOverlapConfig")
    yield Python.write("from megatron.bridge.training.config import (")
    for name in sorted((*_CLASSES.values(), "ConfigContainer")):
        yield Python.write("    {},", Python.name(name))
    yield Python.write(")")
    yield Python.write("from megatron.bridge.training.gpt_step import forward_step")
    yield Python.write(
        "from megatron.bridge.training.mixed_precision import bf16_mixed, fp16_mixed"
    )
    yield Python.write("from megatron.bridge.training.pretrain import pretrain")
    yield Python.write("from megatron.core.distributed import DistributedDataParallelConfig")
    yield Python.write("from megatron.core.optimizer import OptimizerConfig")
    yield Python.write("")


def _config_lines(
    plan: Plan, settings: Mapping[str, list[_Field]], files: RunFiles
) -> Iterator[Python]:
    """Yield the function that builds the ConfigContainer; `settings` are the fields by section."""
    yield Python.write("")
    yield Python.write("def config() -> ConfigContainer:")
    yield Python.write(
        "    model = AutoBridge.from_hf_pretrained({}).to_megatron_provider(load_weights=False)",
        plan.model.name,
    )
    for field, value in (*settings.get("model", ()), *_model_fields(plan)):
        yield Python.write("    model.{} = {}", Python.name(field), value)
    yield from _precision_lines(plan, settings.get("mixed_precision", []))
    fields = dict(settings)
    for section, defaults in _default_fields(plan, files):
        fields[section] = [*defaults, *fields.get(section, ())]
    yield Python.write("    return ConfigContainer(")
    yield Python.write("        model=model,")
    yield Python.write("        mixed_precision=precision,")
    for section, name in (*_CLASSES.items(), *_CORE.items()):
        yield Python.write("        {}={}(", Python.name(section), Python.name(name))
        for field, value in fields.get(section, ()):
            yield Python.write("            {}={},", Python.name(field), value)
        yield Python.write("        ),")
    yield Python.write("    )")
    yield Python.write("")


def _model_fields(plan: Plan) -> Iterator[_Field]:
    """Yield fields that have no flag, and those that a provider may come with switched on."""
    layout = plan.layout
    yield "pipeline_dtype", _pipeline_dtype(plan.workload.precision)
    # None takes away depths that the config on Hugging Face has.
    yield "mtp_num_layers", _constant(plan.model.mtp_layers or None)
    # Elsewhere the flag of virtual stages sets it.
    if layout.vpp == 1 or layout.stages:
        yield (
            "virtual_pipeline_model_parallel_size",
            _constant(layout.vpp if layout.vpp > 1 else None),
        )
    if not layout.sp:
        yield "sequence_parallel", _constant(False)
    if not layout.recompute:
        yield "recompute_granularity", _constant(None)
    if not layout.graphs:
        yield "cuda_graph_impl", _constant("none")
    if Overlap.SHARED not in layout.overlap:
        yield "moe_shared_expert_overlap", _constant(False)
    if plan.workload.router.force is not RouterForce.BALANCED:
        yield "moe_router_force_load_balancing", _constant(False)
    if layout.graphs:
        yield "use_te_rng_tracker", _constant(True)
    attention = plan.model.attention
    if attention.kind is AttentionKind.MLA and attention.rope.scaling != "yarn":
        yield "apply_rope_fusion", _constant(False)
    if attention.kind is AttentionKind.MLA and attention.rope.scaling == "yarn":
        rope = attention.rope
        yield "original_max_position_embeddings", _constant(rope.original_max_position)
        yield "beta_fast", _constant(rope.beta_fast)
        yield "beta_slow", _constant(rope.beta_slow)


def _pipeline_dtype(precision: Dtype) -> Python:
    is_plain = precision in (Dtype.FP32, Dtype.FP16)
    return Python.name(_DTYPES[precision if is_plain else Dtype.BF16])


def _precision_lines(plan: Plan, narrow_fields: list[_Field]) -> Iterator[Python]:
    precision = plan.workload.precision
    if precision is Dtype.FP32:
        yield Python.write("    precision = None")
        return
    recipe = "fp16_mixed" if precision is Dtype.FP16 else "bf16_mixed"
    yield Python.write("    precision = {}()", Python.name(recipe))
    is_fp32 = plan.workload.grad_dtype is Dtype.FP32
    yield Python.write("    precision.grad_reduce_in_fp32 = {}", is_fp32)
    for field, value in narrow_fields:
        yield Python.write("    precision.{} = {}", Python.name(field), value)


def _default_fields(plan: Plan, files: RunFiles) -> Iterator[tuple[str, list[_Field]]]:
    """Yield fields that no flag sets and that Bridge needs, or has another default for."""
    workload = plan.workload
    layout = plan.layout
    vocab_size = plan.model.vocab_size
    weight_decay = _constant(workload.optimizer.weight_decay)
    yield (
        "optimizer",
        [
            ("optimizer", _constant("adam")),
            ("use_distributed_optimizer", _constant(layout.zero > 0)),
        ],
    )
    yield (
        "scheduler",
        [
            # Both ends are the same: it does not move.
            ("start_weight_decay", weight_decay),
            ("end_weight_decay", weight_decay),
            ("weight_decay_incr_style", _constant("constant")),
        ],
    )
    yield "ddp", [("grad_reduce_in_fp32", _constant(workload.grad_dtype is Dtype.FP32))]
    yield "dataset", list(_dataset_fields(plan))
    tokenizer = [
        ("tokenizer_type", _constant("NullTokenizer")),
        ("vocab_size", _constant(vocab_size)),
        ("null_tokenizer_eod_id", _constant(vocab_size - 1)),
    ]
    if files.tokenizer:
        tokenizer = [
            ("tokenizer_type", _constant("HuggingFaceTokenizer")),
            ("tokenizer_model", _constant(files.tokenizer)),
        ]
    yield "tokenizer", tokenizer
    if CudaGraphScope.FULL in layout.graphs:  # captured steps cannot look at their own values
        yield "rerun_state_machine", [("check_for_nan_in_loss", _constant(False))]
        yield "ddp", [("check_for_nan_in_grad", _constant(False))]
    comm_overlap = []
    if Overlap.TP not in layout.overlap:
        comm_overlap.append(("tp_comm_overlap", _constant(False)))
    if layout.pp > 1 and layout.vpp > 1:
        comm_overlap.append(("overlap_p2p_comm", _constant(True)))
    yield "comm_overlap", comm_overlap


def _format_blend(text: str) -> Python:
    """Return the paths of corpora and their weights, None for one corpus, as Python has them."""
    parts = parse_data_paths(text)
    weights = [part.share for part in parts] if len(parts) > 1 else None
    return Python.write("({}, {})", [part.path for part in parts], weights)


def _dataset_fields(plan: Plan) -> Iterator[_Field]:
    workload = plan.workload
    data = workload.data
    yield "random_seed", _constant(workload.seed)
    yield "seq_length", _constant(workload.seq_len)
    if data.train and data.heldout:
        # The third is a test split, which no run here has.
        blends = [_format_blend(data.train), _format_blend(data.heldout), None]
        yield "blend_per_split", _constant(blends)
    elif data.train:
        yield "blend", _format_blend(data.train)
        # All of the corpus trains.
        yield "split", _constant("1,0,0")
    else:
        yield "blend", _constant(None)
    if data.documents is DocumentMasking.JOINED:
        yield "reset_attention_mask", _constant(False)
        yield "eod_mask_loss", _constant(False)
    if data.documents is not DocumentMasking.RESTARTED:
        yield "reset_position_ids", _constant(False)
