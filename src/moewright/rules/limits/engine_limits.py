"""What this engine runs today; anything else is refused with a reason before a process starts."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice

from moewright.rules.adapters import is_frozen, trains_adapters, trains_all, trains_module
from moewright.rules.delayed_scaling import is_delayed
from moewright.rules.expert_moves import check_rebalancing
from moewright.rules.job import Job, micro_batch_tokens
from moewright.rules.limits.divisibility import divisors, nearest_legal
from moewright.rules.limits.engine_features import check_graphs, unsupported_features
from moewright.rules.limits.legality import check_legality
from moewright.rules.optimizers import GRADIENT_DTYPES, MOMENT_DTYPES, is_scaled
from moewright.rules.packed_base import cuts_blocks, is_packed
from moewright.rules.saved.recompute import activation_nbytes
from moewright.rules.shapes.fsdp import is_fsdp_sharded
from moewright.rules.shapes.mixers import parted_choices
from moewright.rules.shapes.parameters import parameters
from moewright.spec.errors import BadInput, Reason
from moewright.spec.extensions import ExtensionPoint, list_extensions
from moewright.spec.hardware import DeviceKind, Hardware
from moewright.spec.layout import (
    CapacityFill,
    CpComm,
    ExpertPlacement,
    Layout,
    Overlap,
    plain_schedule,
)
from moewright.spec.ledger import Module
from moewright.spec.model import AttentionKind, ModelSpec
from moewright.spec.names import closest_match
from moewright.spec.workload import (
    AdapterTarget,
    AttentionBackend,
    BaseQuantization,
    CrossEntropyKernel,
    Dtype,
    ExpertKernels,
    MatrixUpdate,
    Objective,
    Task,
    Tracker,
    Workload,
)

# What the engine does not run beside attention to compressed blocks of tokens (DeepSeek-V4).


def check_compressed(layout: Layout, model: ModelSpec) -> Iterator[Reason]:
    """Yield what attention to compressed blocks of tokens does not go with."""
    if model.attention.kind is not AttentionKind.COMPRESSED:
        return
    if layout.cp > 1 and layout.cp_comm is not CpComm.A2A:
        rule = (
            "the engine's compressed attention needs whole sequences, with some heads on each CP "
            "rank"
        )
        yield Reason(field="layout.cp_comm", value=layout.cp_comm, rule=rule, nearest=CpComm.A2A)
    if layout.tp > 1 and not layout.sp:
        rule = "the engine lets each TP rank choose blocks for its own tokens"
        yield Reason(field="layout.sp", value="0", rule=rule, nearest="1")


# Rows of torch's grouped GEMM must be multiples of this.
_GROUPED_ROW_BYTES = 16
_NOT_YET = "the engine does not run this yet"


def require_runnable(job: Job) -> None:
    """Raise BadInput with every reason why a job is not legal or not run by the engine."""
    reasons = (
        *unsupported_model(job.model, job.workload),
        *check_legality(job),
        *unsupported_layout(job),
    )
    if reasons:
        raise BadInput(*reasons)


def unsupported_layout(job: Job) -> tuple[Reason, ...]:
    """Return the choices of a job's layout that the engine cannot run yet, or not for its model."""
    model, workload, layout = job.model, job.workload, job.layout
    return (
        *_unsupported_choices(layout),
        *_check_library(layout, workload),
        *_check_replicas(layout),
        *check_rebalancing(job),
        *_check_frozen(layout, workload),
        *_check_packed(layout, model, workload),
        *_check_recurrence(layout, model, workload),
        *_check_indexer(layout, model),
        *check_compressed(layout, model),
        *_check_shared_depths(layout, model, workload),
        *_check_norms(layout, model, workload),
        *check_graphs(job),
        *_check_shard_sizes(job),
    )


def _unsupported_choices(layout: Layout) -> Iterator[Reason]:
    if Overlap.EP in layout.overlap and layout.zero >= 2:
        rule = (
            "the engine moves weights and gradients of a layer for one pass at a time: not with "
            f"zero={layout.zero}"
        )
        others = (o for o in layout.overlap if o not in (Overlap.EP, Overlap.WGRAD))
        nearest = "+".join(others) or "none"
        yield Reason(field="layout.overlap", value="ep", rule=rule, nearest=nearest)
    if layout.zero >= 2 and layout.pp > 1 and layout.schedule.splits_backward:
        rule = (
            "the engine reduces gradients as a backward ends, and leaves weight gradients of "
            f"{layout.schedule} to later: not with zero={layout.zero}"
        )
        nearest = plain_schedule(layout.vpp)
        yield Reason(field="layout.schedule", value=layout.schedule, rule=rule, nearest=nearest)


def _check_norms(layout: Layout, model: ModelSpec, workload: Workload) -> Iterator[Reason]:
    """Yield what is not proven yet for layers with norms after their blocks.

    Without a norm before, blocks keep the residual stream itself, which narrow formats, adapters,
    offload and weight gradients of later look for under the name of a norm's output.
    """
    placement = model.norm_placement
    if not placement.is_after:
        return
    rule = f"the engine has not for norm_placement={placement}"
    graphs = "+".join(layout.graphs)
    if graphs:
        yield Reason(field="layout.graphs", value=graphs, rule=rule, nearest="none")
    refused = (Overlap.EP,) if placement.is_before else (Overlap.EP, Overlap.WGRAD)
    overlap = "+".join(o for o in layout.overlap if o in refused)
    if overlap:
        nearest = "+".join(o for o in layout.overlap if o not in refused) or "none"
        yield Reason(field="layout.overlap", value=overlap, rule=rule, nearest=nearest)
    if placement.is_before:
        return
    if layout.offload:
        value = "+".join(layout.offload)
        yield Reason(field="layout.offload", value=value, rule=rule, nearest="none")
    if layout.pp > 1 and layout.schedule.splits_backward:
        nearest = plain_schedule(layout.vpp)
        yield Reason(field="layout.schedule", value=layout.schedule, rule=rule, nearest=nearest)
    if workload.precision.is_narrow:
        precision = workload.precision
        yield Reason(field="train.precision", value=precision, rule=rule, nearest="bf16")
    if not trains_all(workload.fine_tuning):
        task = workload.fine_tuning.task
        yield Reason(field="train.task", value=task, rule=rule, nearest=Task.PRETRAIN)


def _check_library(layout: Layout, workload: Workload) -> Iterator[Reason]:
    """Yield what keeps a library dispatcher from running: a missing package, or an unmet limit."""
    kind = layout.dispatcher
    if not kind.facts.is_library:
        return
    # find_spec looks a package up without running it: these load CUDA libraries.
    missing = next((name for name in kind.facts.packages if find_spec(name) is None), "")
    if missing:
        rule = f"needs the package {missing} ({kind.facts.home}), which is not installed"
        yield Reason(field="layout.dispatcher", value=kind, rule=rule, nearest=kind.stand_in)
    yield from _check_library_sizes(layout, workload)
    if layout.etp > 1:
        rule = f"the engine dispatches whole experts with dispatcher={kind}"
        yield Reason(field="layout.etp", value=str(layout.etp), rule=rule, nearest="1")
    if layout.rank_capacity:
        rule = f"the engine sends as many rows as there are with dispatcher={kind}"
        value = f"{layout.rank_capacity:g}"
        yield Reason(field="layout.rank_capacity", value=value, rule=rule, nearest="0")
    if layout.spare > 0:
        rule = f"the engine dispatches to experts, not to replicas with dispatcher={kind}"
        yield Reason(field="layout.spare", value=str(layout.spare), rule=rule, nearest="0")
    overlap = "+".join(o for o in layout.overlap if o in (Overlap.SHARED, Overlap.EP))
    if overlap:
        rule = f"the engine cannot overlap a library's exchange, with dispatcher={kind}"
        yield Reason(field="layout.overlap", value=overlap, rule=rule, nearest="none")
    if workload.precision is not Dtype.BF16:
        rule = f"moves bf16 rows with dispatcher={kind}"
        precision = str(workload.precision)
        yield Reason(field="train.precision", value=precision, rule=rule, nearest="bf16")


def _check_library_sizes(layout: Layout, workload: Workload) -> Iterator[Reason]:
    facts = layout.dispatcher.facts
    if 0 < facts.max_ranks < layout.ep:
        rule = f"{facts.title} has {facts.max_ranks} ranks at most"
        nearest = str(facts.max_ranks)
        yield Reason(field="layout.ep", value=str(layout.ep), rule=rule, nearest=nearest)
    tokens = micro_batch_tokens(workload, layout)
    if 0 < facts.max_tokens < tokens:
        rule = f"a rank would dispatch {tokens} tokens; {facts.title} is built for "
        rule += str(facts.max_tokens)
        nearest = str(max(1, layout.mbs * facts.max_tokens // tokens))
        yield Reason(field="layout.mbs", value=str(layout.mbs), rule=rule, nearest=nearest)


def _check_replicas(layout: Layout) -> Iterator[Reason]:
    """Yield what expert replicas do not go with.

    Replicas are no parameters, and send their gradients to the owners at the end of a step.
    """
    if not layout.spare:
        return
    if is_fsdp_sharded(layout, "edp"):
        rule = "cuts experts over edp ranks, none of which has one to send"
        yield Reason(
            field="layout.zero",
            value=str(layout.zero),
            rule=f"{rule}: not with spare={layout.spare}",
            nearest="1",
        )
    fixed: tuple[tuple[str, bool, str, str], ...] = (
        ("capacity_fill", layout.capacity_fill is CapacityFill.PADDED, "padded", "used"),
        ("rank_capacity", layout.rank_capacity > 0, f"{layout.rank_capacity:g}", "0"),
    )
    for name, is_fixed, value, nearest in fixed:
        if is_fixed:
            rule = f"gives every rank equally many rows already: not with spare={layout.spare}"
            yield Reason(field=f"layout.{name}", value=value, rule=rule, nearest=nearest)


def _check_frozen(layout: Layout, workload: Workload) -> Iterator[Reason]:
    """Yield what frozen weights, and adapters beside them, do not go with."""
    fine_tuning = workload.fine_tuning
    if trains_all(fine_tuning):
        return
    if is_frozen(workload) and fine_tuning.freeze:
        rule = "task=lora freezes all weights"
        value = "+".join(fine_tuning.freeze)
        yield Reason(field="train.freeze", value=value, rule=rule, nearest="[]")
    if is_frozen(workload) and not trains_adapters(fine_tuning):
        rule = "leaves nothing to train"
        nearest = "+".join(AdapterTarget)
        yield Reason(field="train.lora_targets", value="[]", rule=rule, nearest=nearest)
    if layout.zero >= 2:
        rule = "the engine holds frozen weights whole on every rank"
        yield Reason(field="layout.zero", value=str(layout.zero), rule=rule, nearest="1")
    if layout.spare and not trains_module(fine_tuning, Module.EXPERTS):
        rule = "the engine has no replicas of frozen experts"
        yield Reason(field="layout.spare", value=str(layout.spare), rule=rule, nearest="0")
    if workload.precision.is_narrow:
        rule = "the engine multiplies frozen weights and adapters in 16 bits or more"
        value = str(workload.precision)
        yield Reason(field="train.precision", value=value, rule=rule, nearest="bf16")
    if is_frozen(workload) and workload.optimizer.matrix_update is MatrixUpdate.MUON:
        rule = "the engine updates adapters by AdamW"
        yield Reason(field="train.matrix_update", value="muon", rule=rule, nearest="adamw")
    if workload.fine_tuning.lora_experts and layout.etp > 1:
        rule = "the engine gives adapters to whole experts"
        yield Reason(field="layout.etp", value=str(layout.etp), rule=rule, nearest="1")
    step = _GROUPED_ROW_BYTES // workload.precision.nbytes
    if workload.fine_tuning.lora_experts and workload.fine_tuning.lora_rank % step:
        rank = workload.fine_tuning.lora_rank
        rule = f"must be a multiple of {step} for the grouped products of experts"
        nearest = str(max(step, rank // step * step))
        yield Reason(field="train.lora_rank", value=str(rank), rule=rule, nearest=nearest)


def _check_packed(layout: Layout, model: ModelSpec, workload: Workload) -> Iterator[Reason]:
    """Yield what a base in fewer bits does not go with."""
    fine_tuning = workload.fine_tuning
    if fine_tuning.quantize_base is BaseQuantization.NONE:
        return
    value = str(fine_tuning.quantize_base)
    if not is_frozen(workload):
        rule = "applies to the frozen weights under adapters: task=lora"
        yield Reason(field="train.quantize_base", value=value, rule=rule, nearest="none")
        return
    if layout.spare:
        rule = f"the engine has no replicas of weights in {value}"
        yield Reason(field="layout.spare", value=str(layout.spare), rule=rule, nearest="0")
    for param in parameters(model):
        if not is_packed(param.name, param.module, param.shape, fine_tuning):
            continue
        if cuts_blocks(param, layout, fine_tuning.quantize_base):
            rule = f"cuts {param.name} {list(param.shape)} inside of the blocks of {value}"
            axis = "etp" if param.is_expert else "tp"
            degree = layout.etp if param.is_expert else layout.tp
            yield Reason(field=f"layout.{axis}", value=str(degree), rule=rule, nearest="1")
            # The first alone: the degree that mends it mends the others too.
            return


def _check_recurrence(layout: Layout, model: ModelSpec, workload: Workload) -> Iterator[Reason]:
    """Yield what layers that carry a state along the sequence do not go with."""
    if model.recurrent is None:
        return
    taps, rank = model.recurrent.short_conv, workload.fine_tuning.lora_rank
    if is_frozen(workload) and rank < taps:
        rule = f"would give adapters to convolutions of {taps} tokens, which are no linears"
        yield Reason(field="train.lora_rank", value=str(rank), rule=rule, nearest=str(taps))
    groups = model.recurrent.key_heads // layout.tp
    if groups % layout.cp:
        rule = (
            f"must divide the {groups} key heads of recurrent layers on a TP rank, which CP ranks "
            "exchange for tokens"
        )
        # 0 groups are those of more TP ranks than key heads.
        nearest = nearest_legal(layout.cp, divisors(max(1, groups)))
        yield Reason(field="layout.cp", value=str(layout.cp), rule=rule, nearest=nearest)


def _check_indexer(layout: Layout, model: ModelSpec) -> Iterator[Reason]:
    """Yield what layers that choose the keys of their attention do not go with."""
    if model.attention.indexer is None or model.attention.kind is AttentionKind.COMPRESSED:
        return
    if layout.cp > 1 and layout.cp_comm is not CpComm.A2A:
        rule = (
            "the engine's sparse attention needs whole sequences, with some heads on each CP rank"
        )
        yield Reason(field="layout.cp_comm", value=layout.cp_comm, rule=rule, nearest=CpComm.A2A)
    # The first alone: one change of the pipeline mends all of them.
    for layer, source in islice(parted_choices(model, layout), 1):
        rule = f"would part layer {layer} from layer {source}, whose choice of keys it takes"
        yield Reason(field="layout.pp", value=str(layout.pp), rule=rule, nearest="1")


def _check_shared_depths(layout: Layout, model: ModelSpec, workload: Workload) -> Iterator[Reason]:
    """Yield what MTP depths do not go with that have the same weights."""
    if not model.mtp_shared or model.mtp_layers < 2:
        return
    routes = workload.routes.record_routes or workload.routes.replay_routes
    choices = (
        ("layout.zero", str(layout.zero), layout.zero >= 2, "1"),
        ("layout.spare", str(layout.spare), layout.spare > 0, "0"),
        (
            "layout.expert_placement",
            str(layout.expert_placement),
            layout.expert_placement is not ExpertPlacement.CONTIGUOUS,
            str(ExpertPlacement.CONTIGUOUS),
        ),
        ("train.routes", routes, bool(routes), "no routes"),
    )
    for field, value, is_refused, nearest in choices:
        if is_refused:
            rule = "the engine passes through the weights of an MTP depth once a micro-batch"
            yield Reason(field=field, value=value, rule=f"{rule} there", nearest=nearest)


def _check_shard_sizes(job: Job) -> Iterator[Reason]:
    """Yield shards that are part of a row, or expert rows that grouped GEMM cannot address."""
    model = job.model
    layout = job.layout
    attention = model.attention
    if attention.kind is AttentionKind.GQA and attention.kv_width % layout.tp:
        rule = f"must divide the {attention.kv_width} rows of the key projection"
        near = str(attention.kv_heads)
        yield Reason(field="layout.tp", value=str(layout.tp), rule=rule, nearest=near)
    if model.moe is None or layout.etp == 1:
        return
    etp = str(layout.etp)
    if model.moe.expert_bias and model.expert_width % layout.etp:
        rule = (
            f"must divide the {model.expert_width} rows of an expert's output, over which the "
            "experts' biases are cut"
        )
        yield Reason(field="layout.etp", value=etp, rule=rule, nearest="1")
    step = _GROUPED_ROW_BYTES // activation_nbytes(job.workload)
    width = model.moe.ffn_size // layout.etp
    if width % step:
        rule = f"leaves {width} of an expert's width; must be a multiple of {step}"
        yield Reason(field="layout.etp", value=etp, rule=rule, nearest="1")


def unsupported_device(hardware: Hardware) -> tuple[Reason, ...]:
    """Return why the engine does not run on a kind of device; () where it does."""
    kind = hardware.device.kind
    if kind.runs_cuda or not kind.is_accelerator:
        return ()
    rule = f"the engine trains on CPUs and on CUDA and ROCm devices, not on {hardware.device.name}"
    nearest = DeviceKind.CUDA
    return (Reason(field="hardware.device.kind", value=kind, rule=rule, nearest=nearest),)


def unsupported_model(model: ModelSpec, workload: Workload) -> tuple[Reason, ...]:
    """Return the features of a model or workload that the engine cannot run yet."""
    # None is as the first, of which one reason is enough.
    second = workload.optimizer.second_moment_dtype
    dtypes = (
        ("train.grad_dtype", workload.grad_dtype, GRADIENT_DTYPES),
        ("train.moment_dtype", workload.optimizer.moment_dtype, MOMENT_DTYPES),
        ("train.second_moment_dtype", second or Dtype.FP32, MOMENT_DTYPES),
    )
    trainer = workload.trainer
    choices = (
        ("attention_backend", trainer.attention_backend, AttentionBackend.FLASH),
        ("attention_dropout", trainer.attention_dropout, 0.0),
        ("hidden_dropout", trainer.hidden_dropout, 0.0),
        ("expert_kernels", trainer.expert_kernels, ExpertKernels.GROUPED),
        ("cross_entropy", trainer.cross_entropy, CrossEntropyKernel.FP32),
        ("unfused", "+".join(trainer.unfused), ""),
        ("bf16_first_layers", trainer.bf16_first_layers, 0),
        ("bf16_last_layers", trainer.bf16_last_layers, 0),
        ("bf16_products", "+".join(trainer.bf16_products), ""),
        ("narrowed", "+".join(trainer.narrowed), ""),
    )
    return (
        *_check_trackers(workload),
        *_check_peer_copies(workload),
        *(
            Reason(field=f"train.{field}", value=str(value), rule=_NOT_YET, nearest=str(own))
            for field, value, own in choices
            if value != own
        ),
        *_check_muon_moments(workload),
        *_check_objective(model, workload),
        *(
            Reason(field=f"model.{field}", value=str(value), rule=_NOT_YET, nearest=nearest)
            for field, value, is_unsupported, nearest in unsupported_features(model)
            if is_unsupported
        ),
        *(
            Reason(field=field, value=str(dtype), rule=_NOT_YET, nearest=" or ".join(supported))
            for field, dtype, supported in dtypes
            if dtype not in supported
        ),
    )


def _check_peer_copies(workload: Workload) -> Iterator[Reason]:
    """Yield what copies of the states in other ranks' memory do not hold."""
    steps = workload.checkpoint.peer_every_steps
    if not steps:
        return
    field = "checkpoint.peer_every_steps"
    if not trains_all(workload.fine_tuning):
        rule = "copies in other ranks' memory hold no frozen weights"
        yield Reason(field=field, value=str(steps), rule=rule, nearest="0")
    if is_delayed(workload):
        rule = "copies in other ranks' memory hold no delayed scales"
        yield Reason(field=field, value=str(steps), rule=rule, nearest="0")


def _check_objective(model: ModelSpec, workload: Workload) -> Iterator[Reason]:
    """Yield the loss of MTP depths beside an objective of whole answers."""
    if workload.loss.objective is Objective.DPO and model.mtp_layers and workload.loss.mtp_coeff:
        rule = "MTP depths learn next tokens, of which objective=dpo has none"
        value = f"{workload.loss.mtp_coeff:g}"
        yield Reason(field="train.mtp_coeff", value=value, rule=rule, nearest="0")


def _check_trackers(workload: Workload) -> Iterator[Reason]:
    added = list_extensions(ExtensionPoint.TRACKERS)
    for name in workload.trackers:
        if name in added:
            continue
        if name not in tuple(Tracker):
            names = (*Tracker, *added)
            rule = f"must be one of {', '.join(names)}"
            near = closest_match(name[:60], names) or Tracker.WANDB.value
            yield Reason(field="train.trackers", value=name[:60], rule=rule, nearest=near)
        elif find_spec(name) is None:
            rule = f"needs the package {name}, which is not installed: pip install {name}"
            yield Reason(field="train.trackers", value=name, rule=rule)


def _check_muon_moments(workload: Workload) -> Iterator[Reason]:
    """Yield 8-bit moments beside Muon, whose momenta lie where their blocks would begin."""
    optimizer = workload.optimizer
    if optimizer.matrix_update is not MatrixUpdate.MUON:
        return
    for field in ("moment_dtype", "second_moment_dtype"):
        dtype = getattr(optimizer, field)
        if dtype is not None and is_scaled(dtype):
            rule = "blocks of 8-bit moments begin where shards do, which Muon's momenta share"
            yield Reason(field=f"train.{field}", value=dtype, rule=rule, nearest=Dtype.BF16)
