"""A plan as a recipe of Megatron Bridge: a Python file that builds its ConfigContainer and trains.

Bridge configures the same Megatron core as Megatron-LM's flags do, so the settings are those flags
under Bridge's names (main at 067f987d, 2026-08-22). The model's shape comes from its Hugging Face
config.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby

from moewright.exporters.megatron.model import model_flags
from moewright.exporters.megatron.script import comment_lines, environment_variables, megatron_flags
from moewright.exporters.torchrun import torchrun_command
from moewright.intake import catalogue
from moewright.intake.megatron.options import MegatronOption, option_table
from moewright.spec.errors import BadInput, Reason
from moewright.spec.plan import Plan
from moewright.spec.workload import Dtype, RouterForce

# Flag -> the section of ConfigContainer and the field there; most fields are the flag's own name in
# Megatron-LM.
_SECTIONS = {
    "model": (
        "tensor-model-parallel-size sequence-parallel context-parallel-size cp-comm-type "
        "hierarchical-context-parallel-sizes pipeline-model-parallel-size pipeline-model-parallel-layout "
        "account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split expert-model-parallel-size "
        "expert-tensor-parallel-size moe-token-dispatcher-type moe-flex-dispatcher-backend moe-expert-capacity-factor "
        "moe-token-drop-policy recompute-granularity recompute-method recompute-num-layers recompute-modules "
        "fine-grained-activation-offloading offload-modules cuda-graph-impl cuda-graph-modules seq-length "
        "moe-router-load-balancing-type moe-aux-loss-coeff moe-z-loss-coeff moe-router-dtype moe-input-jitter-eps "
        "moe-router-bias-update-rate moe-router-force-load-balancing moe-router-force-biased moe-grouped-gemm "
        "mtp-loss-scaling-factor init-method-std attention-dropout hidden-dropout"
    ),
    "train": "micro-batch-size global-batch-size train-iters train-samples rampup-batch-size",
    "validation": "eval-interval eval-iters",
    "scheduler": (
        "lr-decay-style lr-warmup-iters lr-decay-iters lr-warmup-samples lr-decay-samples"
    ),
    "optimizer": (
        "lr min-lr adam-beta1 adam-beta2 adam-eps weight-decay clip-grad use-precision-aware-optimizer exp-avg-dtype "
        "exp-avg-sq-dtype optimizer-cpu-offload optimizer-offload-fraction initial-loss-scale min-loss-scale "
        "loss-scale-window hysteresis"
    ),
    "ddp": (
        "use-distributed-optimizer use-megatron-fsdp data-parallel-sharding-strategy overlap-grad-reduce "
        "overlap-param-gather"
    ),
    "comm_overlap": "tp-comm-overlap overlap-moe-expert-parallel-comm delay-wgrad-compute",
    "mixed_precision": "fp8-format fp8-recipe fp4-format fp4-recipe",
    "dataset": "reset-attention-mask eod-mask-loss reset-position-ids",
    "checkpoint": "save load save-interval async-save ckpt-format",
    "rng": "seed te-rng-tracker",
    "logger": "log-interval log-throughput",
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
_ELSEWHERE = (  # said by the choice of mixed precision or of data
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
)
_DTYPES = {
    "fp32": "torch.float32",
    "bf16": "torch.bfloat16",
    "fp16": "torch.float16",
    "fp8": "torch.uint8",
}


def render_bridge_recipe(plan: Plan) -> str:
    """A Python file for torchrun. Raises BadInput with a Reason for each thing that Megatron cannot
    say, and for models that Hugging Face does not know by this name.
    """
    flags = megatron_flags(plan)
    if "/" not in plan.model.name or plan.model.name not in catalogue.model_names():
        rule = "Megatron Bridge takes models by their Hugging Face name"
        nearest = "Qwen/Qwen3-30B-A3B"
        raise BadInput(
            Reason(field="model.name", value=plan.model.name, rule=rule, nearest=nearest)
        )
    shape = {name for name, *_ in model_flags(plan.model, plan.workload)}
    options = option_table()
    places = _places(options)
    for name, *_ in flags:
        if name not in (*places, *shape, *_ELSEWHERE):
            raise AssertionError(
                f"{name} has no place in Megatron Bridge"
            )  # a flag that the exporter has learnt since
    settings = [
        (*places[name], _python(options[name], tuple(values)))
        for name, *values in flags
        if name in places
    ]
    return "\n".join((*_head(plan), *_body(plan, settings), *_TAIL)) + "\n"


def _places(options: Mapping[str, MegatronOption]) -> Mapping[str, tuple[str, str]]:
    """Flag -> (section, field)."""
    own = ((section, f"--{bare}") for section, names in _SECTIONS.items() for bare in names.split())
    return {name: (section, options[name].dest) for section, name in own} | _RENAMED


def _python(option: MegatronOption, values: tuple[str, ...]) -> str:
    """The values of a flag as a Python expression."""
    name = option.name
    if option.value_count == "0":
        return "True"
    if name in ("--exp-avg-dtype", "--exp-avg-sq-dtype"):
        return _DTYPES[values[0]]
    items = [value if option.type in ("int", "float") else repr(value) for value in values]
    if option.value_count == "1" or (len(items) == 1 and name in _SINGLE):
        return items[0]
    return f"[{', '.join(items)}]"


_SINGLE = ("--cp-comm-type", "--moe-router-load-balancing-type", "--moe-aux-loss-coeff")


def _head(plan: Plan) -> Iterator[str]:
    yield from comment_lines(plan)
    yield f"# Start on every node: {torchrun_command(plan)} THIS_FILE.py"
    yield "import os"
    yield ""
    for name, value in environment_variables(plan.layout):
        yield f'os.environ.setdefault("{name}", "{value}")  # before torch starts'
    yield ""
    yield "import torch"
    yield "from megatron.bridge import AutoBridge"
    yield "from megatron.bridge.training.comm_overlap import CommOverlapConfig"
    yield "from megatron.bridge.training.config import ("
    for name in sorted((*_CLASSES.values(), "ConfigContainer")):
        yield f"    {name},"
    yield ")"
    yield "from megatron.bridge.training.gpt_step import forward_step"
    yield "from megatron.bridge.training.mixed_precision import bf16_mixed, fp16_mixed"
    yield "from megatron.bridge.training.pretrain import pretrain"
    yield "from megatron.core.distributed import DistributedDataParallelConfig"
    yield "from megatron.core.optimizer import OptimizerConfig"
    yield ""


_CLASSES = {
    "train": "TrainingConfig",
    "validation": "ValidationConfig",
    "scheduler": "SchedulerConfig",
    "dataset": "GPTDatasetConfig",
    "checkpoint": "CheckpointConfig",
    "rng": "RNGConfig",
    "logger": "LoggerConfig",
    "tokenizer": "TokenizerConfig",
}
_CORE = {
    "optimizer": "OptimizerConfig",
    "ddp": "DistributedDataParallelConfig",
    "comm_overlap": "CommOverlapConfig",
}


def _body(plan: Plan, settings: list[tuple[str, str, str]]) -> Iterator[str]:
    groups = {
        section: [(field, value) for _, field, value in found]
        for section, found in _grouped(settings)
    }
    yield ""
    yield "def config() -> ConfigContainer:"
    yield f'    model = AutoBridge.from_hf_pretrained("{plan.model.name}").to_megatron_provider(load_weights=False)'
    for field, value in (*groups.pop("model", []), *_model(plan)):
        yield f"    model.{field} = {value}"
    eight = groups.pop("mixed_precision", [])
    yield from _precision(plan, eight)
    for section, fields in _defaults(plan):
        groups.setdefault(section, [])[:0] = fields
    yield "    return ConfigContainer("
    yield "        model=model,"
    yield "        mixed_precision=precision,"
    for section, name in (*_CLASSES.items(), *_CORE.items()):
        yield f"        {section}={name}("
        yield from (f"            {field}={value}," for field, value in groups.get(section, []))
        yield "        ),"
    yield "    )"
    yield ""


def _grouped(
    settings: list[tuple[str, str, str]],
) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    for section, found in groupby(sorted(settings, key=lambda one: one[0]), key=lambda one: one[0]):
        yield section, list(found)


def _model(plan: Plan) -> Iterator[tuple[str, str]]:
    layout, precision = plan.layout, plan.workload.precision
    yield (
        "pipeline_dtype",
        _DTYPES[
            "fp32" if precision is Dtype.FP32 else "fp16" if precision is Dtype.FP16 else "bf16"
        ],
    )
    yield "mtp_num_layers", str(plan.model.mtp_layers or None)
    if layout.vpp == 1 or layout.stages:
        yield "virtual_pipeline_model_parallel_size", str(layout.vpp if layout.vpp > 1 else None)
    # A provider may come with these on.
    unsaid = (
        ("sequence_parallel", layout.sp, "False"),
        ("recompute_granularity", bool(layout.recompute), "None"),
        ("cuda_graph_impl", bool(layout.graphs), "'none'"),
        ("moe_shared_expert_overlap", "shared" in layout.overlap, "False"),
        (
            "moe_router_force_load_balancing",
            plan.workload.router.force is RouterForce.BALANCED,
            "False",
        ),
    )
    yield from ((field, off) for field, on, off in unsaid if not on)
    if layout.graphs:
        yield "use_te_rng_tracker", "True"


def _precision(plan: Plan, eight: list[tuple[str, str]]) -> Iterator[str]:
    precision = plan.workload.precision
    if precision is Dtype.FP32:
        yield "    precision = None"
        return
    yield f"    precision = {'fp16' if precision is Dtype.FP16 else 'bf16'}_mixed()"
    yield f"    precision.grad_reduce_in_fp32 = {plan.workload.grad_dtype is Dtype.FP32}"
    for field, value in eight:
        yield f"    precision.{field} = {value}"


def _defaults(plan: Plan) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Fields that flags leave out and Bridge wants, or has otherwise by default."""
    workload, layout = plan.workload, plan.layout
    data = workload.data
    yield (
        "optimizer",
        [("optimizer", "'adam'"), ("use_distributed_optimizer", str(layout.zero > 0))],
    )
    decay = workload.optimizer.weight_decay
    ends = [("start_weight_decay", str(decay)), ("end_weight_decay", str(decay))]
    yield "scheduler", [*ends, ("weight_decay_incr_style", "'constant'")]
    yield "ddp", [("grad_reduce_in_fp32", str(workload.grad_dtype is Dtype.FP32))]
    blend = [("blend", "None")]
    if data.train and data.heldout:
        blend = [
            ("blend_per_split", f"[([{data.train!r}], None), ([{data.heldout!r}], None), None]")
        ]
    elif data.train:
        blend = [("blend", f"([{data.train!r}], None)"), ("split", "'1,0,0'")]
    said = data.documents
    unset = ("reset_attention_mask", "eod_mask_loss") if said == "joined" else ()
    off = [
        (field, "False")
        for field in (*unset, *(("reset_position_ids",) if said != "restarted" else ()))
    ]
    yield (
        "dataset",
        [("random_seed", str(workload.seed)), ("seq_length", str(workload.seq_len)), *blend, *off],
    )
    last = ("null_tokenizer_eod_id", str(plan.model.vocab_size - 1))
    yield (
        "tokenizer",
        [("tokenizer_type", "'NullTokenizer'"), ("vocab_size", str(plan.model.vocab_size)), last],
    )
    overlapped = (
        [("overlap_p2p_comm", str("p2p" in layout.overlap))]
        if layout.pp > 1 and layout.vpp > 1
        else []
    )
    quiet = [] if "tp" in layout.overlap else [("tp_comm_overlap", "False")]
    yield "comm_overlap", [*quiet, *overlapped]


_TAIL = (
    "",
    'if __name__ == "__main__":',
    "    pretrain(config(), forward_step)",
)
