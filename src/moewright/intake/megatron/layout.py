"""The degrees, memory savers and overlaps of a Megatron-LM command as a Layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moewright.codec.megatron_options import LAYOUT_OPTIONS, OVERLAP_OPTIONS, PLAIN_FIELDS
from moewright.intake.megatron.options import Arguments, ask_missing
from moewright.intake.megatron.stages import read_stages
from moewright.rules.context_parallel import cp_factors
from moewright.spec.choices import FieldKind, LayoutField
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import (
    CapacityFill,
    CpComm,
    CudaGraphScope,
    DispatcherKind,
    Layout,
    Offload,
    Overlap,
    RankOrder,
    Recompute,
)
from moewright.spec.model import ModelSpec

_NOT_PLANNED = {
    "--hybrid-context-parallel": "sequences of one batch cut differently",
    "--tensor-parallel-num-weight-shards": "weights sharded within tensor parallelism",
    "--expert-tensor-parallel-num-weight-shards": "weights sharded within tensor parallelism",
}
_EXPERT_OFFLOADS = (Offload.EXPERT_FC1, Offload.MOE_ACT)
_DENSE_GRAPH = "mlp"
_LONE_MESSAGES = "--no-overlap-p2p-communication"
_OTHER_RANK_ORDER = "--use-tp-pp-dp-mapping"
_INSTANCES = "--num-distributed-optimizer-instances"
_FSDP_ZERO = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_DEPRECATED_GRAPHS = {"--external-cuda-graph": "transformer_engine", "--enable-cuda-graph": "local"}


def read_layout(
    arguments: Arguments, model: ModelSpec, world_size: int, zero: int | None
) -> tuple[Layout, tuple[str, ...]]:
    """Return the layout over `world_size` ranks, and notes on defaults that surprise.

    `zero` is the ZeRO stage of a DeepSpeed config, None where there is none. Whether the layout is
    legal for the model is for rules.limits.legality to say.

    Raises:
        BadInput: an option is not planned here, or Megatron-LM itself refuses a combination.
    """
    arguments.refuse_unplanned(_NOT_PLANNED)
    tp = arguments.size(LAYOUT_OPTIONS["tp"])
    layout = Layout(
        world_size=world_size,
        tp=tp,
        # Megatron-LM turns sequence parallelism off at TP 1, where nothing splits a sequence.
        sp=arguments.has(LAYOUT_OPTIONS["sp"]) and tp > 1,
        cp=arguments.size(LAYOUT_OPTIONS["cp"]),
        pp=arguments.size(LAYOUT_OPTIONS["pp"]),
        mbs=_read_micro_batch(arguments),
        zero=_read_zero(arguments) if zero is None else zero,
    )
    layout = _read_context_parallel(arguments, layout)
    layout = _read_optimizer_instances(arguments, layout)
    notes: tuple[str, ...] = ()
    if model.moe is not None:
        layout = _read_experts(arguments, layout)
        notes = _note_expert_defaults(arguments, tp)
    elif arguments.size(LAYOUT_OPTIONS["ep"]) > 1:
        degree = arguments.text(LAYOUT_OPTIONS["ep"])
        if arguments.has("--num-experts"):
            rule = "splits experts, and no layer of the model has any"
            raise BadInput(Reason(field=LAYOUT_OPTIONS["ep"], value=degree, rule=rule, nearest="1"))
        rule = f"is missing beside {LAYOUT_OPTIONS['ep']} {degree}, with which Megatron-LM stops"
        raise BadInput(Reason(field="--num-experts", rule=rule, nearest="--set --num-experts=..."))
    # The order of ranks shows only where both stages and replicas exist.
    if arguments.has(_OTHER_RANK_ORDER) and layout.pp > 1 and layout.dp > 1:
        layout = replace(layout, order=RankOrder.DP_LAST)
    layout = read_stages(arguments, model, layout)
    layout = replace(
        layout, **{field.name: _read_plain(arguments, field) for field in PLAIN_FIELDS}
    )
    if layout.vpp == 1:  # micro-batches are grouped by the interleaved schedule alone
        layout = replace(layout, vpp_group=0)
    layout = _read_recompute(arguments, layout)
    layout = _read_offload(arguments, layout)
    layout, offload_notes = _leave_out_void_offloads(layout)
    overlaps, overlap_notes = _read_overlap(arguments, layout, model)
    graphs, graph_notes = _read_graphs(arguments)
    notes = (*notes, *offload_notes, *overlap_notes, *graph_notes)
    return replace(layout, overlap=overlaps, graphs=graphs), notes


def _read_plain(arguments: Arguments, field: LayoutField) -> Any:
    """Return the value of a choice that one option says; its default where that is left out."""
    name = field.facts.megatron
    if field.kind is FieldKind.SWITCH:
        return arguments.has(name)
    if field.kind is FieldKind.NUMBER:
        return arguments.integer(name, field.default)
    if field.kind is FieldKind.FACTOR:
        return arguments.number(name, field.default)
    word = arguments.text(name, field.default)
    member = next((member for member in field.names if member == word), None)
    if member is None:
        rule = f"is one of {', '.join(field.names)}"
        raise BadInput(Reason(field=name, value=word[:60], rule=rule, nearest=field.default))
    return member


def _read_micro_batch(arguments: Arguments) -> int:
    name = LAYOUT_OPTIONS["mbs"]
    if not arguments.has(name):
        raise ask_missing(name, "1")
    return arguments.size(name)


def _read_zero(arguments: Arguments) -> int:
    is_sharded = arguments.has("--use-distributed-optimizer")
    strategy = arguments.text("--data-parallel-sharding-strategy", "optim_grads_params")
    # FSDP2 shards weights, gradients and states, whatever else is told to shard.
    if arguments.has("--use-torch-fsdp2"):
        return 3
    arguments.ignore("--ckpt-format")
    if not arguments.has("--use-megatron-fsdp"):
        return int(is_sharded)
    return _FSDP_ZERO[strategy]


def _read_optimizer_instances(arguments: Arguments, layout: Layout) -> Layout:
    """Return the layout with states sharded within each of several groups of data-parallel ranks.

    Groups of one rank shard nothing.
    """
    instances = arguments.size(_INSTANCES)
    if instances == 1 or layout.zero != 1:
        return layout
    ranks = layout.dp * layout.cp
    if ranks % instances:
        rule = f"must divide the {ranks} ranks of data and context parallelism"
        raise BadInput(Reason(field=_INSTANCES, value=str(instances), rule=rule, nearest="1"))
    shard = ranks // instances
    return replace(layout, shard=shard) if shard > 1 else replace(layout, zero=0)


def _read_context_parallel(arguments: Arguments, layout: Layout) -> Layout:
    name = LAYOUT_OPTIONS["cp_comm"]
    kinds = {kind.replace("_", "") for kind in arguments.values(name, "p2p")}
    if len(kinds) > 1:
        rule = "layers that exchange keys in different ways cannot be planned here"
        value = " ".join(sorted(kinds))
        raise BadInput(Reason(field=name, value=value, rule=rule, nearest="p2p"))
    kind = kinds.pop()
    legal = [member.value for member in CpComm]
    if kind not in legal:
        rule = f"is one of {', '.join(legal)}"
        raise BadInput(Reason(field=name, value=kind[:60], rule=rule, nearest=CpComm.P2P))
    layout = replace(layout, cp_comm=CpComm(kind) if layout.cp > 1 else CpComm.P2P)
    levels = "--hierarchical-context-parallel-sizes"
    sizes = tuple(int(size) for size in arguments.values(levels))
    if layout.cp_comm is CpComm.A2A_P2P and sizes != cp_factors(layout):
        inner, outer = cp_factors(layout)
        raise BadInput(
            Reason(
                field=levels,
                value=" ".join(map(str, sizes)),
                rule=f"two levels of {layout.cp} ranks are planned here as {inner} x {outer}",
                nearest=f"{inner} {outer}",
            )
        )
    return layout


def _read_experts(arguments: Arguments, layout: Layout) -> Layout:
    kind = arguments.text(LAYOUT_OPTIONS["dispatcher"], "allgather")
    backend = arguments.text("--moe-flex-dispatcher-backend", "deepep")
    # The older switch implies the flex dispatcher, whatever type is written beside it.
    if arguments.has("--moe-enable-deepep"):
        kind = "flex"
        backend = "deepep"
    words = (kind, backend) if kind == "flex" else (kind,)
    is_padded = arguments.has(LAYOUT_OPTIONS["capacity_fill"])
    return replace(
        layout,
        ep=arguments.size(LAYOUT_OPTIONS["ep"]),
        # Left out, experts are cut as all other layers are.
        etp=arguments.size(LAYOUT_OPTIONS["etp"], layout.tp),
        dispatcher=next(kind for kind in DispatcherKind if kind.facts.megatron == words),
        capacity=arguments.number(LAYOUT_OPTIONS["capacity"]),
        capacity_fill=CapacityFill.PADDED if is_padded else CapacityFill.USED,
        rank_capacity=arguments.number(LAYOUT_OPTIONS["rank_capacity"]),
    )


def _note_expert_defaults(arguments: Arguments, tp: int) -> tuple[str, ...]:
    notes = []
    if not arguments.has(LAYOUT_OPTIONS["etp"]) and tp > 1:
        notes.append(
            f"{LAYOUT_OPTIONS['etp']} is not given, so it is the tensor-parallel size: "
            f"experts are cut in {tp}; 1 keeps them whole"
        )
    has_dispatcher = arguments.has(LAYOUT_OPTIONS["dispatcher"])
    if not has_dispatcher and not arguments.has("--moe-enable-deepep"):
        notes.append(
            f"{LAYOUT_OPTIONS['dispatcher']} is not given, so it is allgather; "
            "alltoall is what training wants"
        )
    return tuple(notes)


def _read_recompute(arguments: Arguments, layout: Layout) -> Layout:
    granularity = arguments.text("--recompute-granularity")
    if arguments.has("--recompute-activations"):
        granularity = "selective"  # whatever else is said
    method = arguments.text("--recompute-method")
    layers = arguments.integer("--recompute-num-layers", 1)
    modules = arguments.values(LAYOUT_OPTIONS["recompute"], "core_attn")
    moe_layer = (Recompute.MOE,) if arguments.has("--moe-layer-recompute") else ()
    if granularity == "full":
        if method == "block":
            return replace(layout, recompute=(Recompute.FULL,), recompute_block=layers)
        if method:
            return replace(layout, recompute=(Recompute.FULL,), recompute_span=layers)
        raise BadInput(
            Reason(
                field="--recompute-granularity full",
                rule="needs --recompute-method: uniform over all layers, "
                "or block for the first of each stage",
                nearest="--recompute-method uniform",
            )
        )
    if granularity != "selective":
        return replace(layout, recompute=moe_layer)
    if method:
        rule = "stands with full recompute alone; selective names modules: --recompute-modules"
        raise BadInput(
            Reason(field="--recompute-method", value=method, rule=rule, nearest="leave it out")
        )
    recomputed = {*map(_read_recompute_module, modules), *moe_layer}
    return replace(layout, recompute=tuple(sorted(recomputed)))


def _read_recompute_module(name: str) -> Recompute:
    modules = [
        module.value for module in Recompute if module not in (Recompute.FULL, Recompute.LOSS)
    ]
    if name not in modules:
        rule = f"is one of {', '.join(modules)}"
        raise BadInput(
            Reason(field=LAYOUT_OPTIONS["recompute"], value=name, rule=rule, nearest="moe_act")
        )
    return Recompute(name)


def _read_offload(arguments: Arguments, layout: Layout) -> Layout:
    if arguments.integer("--cpu-offloading-num-layers"):
        rule = "whole layers on the host cannot be planned here"
        raise BadInput(
            Reason(
                field="--cpu-offloading-num-layers", rule=rule, nearest=LAYOUT_OPTIONS["offload"]
            )
        )
    modules: list[Offload] = []
    layers = arguments.number(LAYOUT_OPTIONS["offload_layers"], 1.0)
    if arguments.has("--fine-grained-activation-offloading") and layers:
        modules += map(_read_offload_module, arguments.values(LAYOUT_OPTIONS["offload"]))
    layout = replace(layout, offload_layers=layers if modules else 1.0)
    fraction = arguments.number(LAYOUT_OPTIONS["offload_fraction"], 1.0)
    if not arguments.has("--optimizer-cpu-offload") or not fraction:
        return replace(layout, offload=tuple(sorted(modules)), offload_fraction=1.0)
    offload = tuple(sorted((*modules, Offload.OPTIMIZER)))
    return replace(layout, offload=offload, offload_fraction=fraction)


def _leave_out_void_offloads(layout: Layout) -> tuple[Layout, tuple[str, ...]]:
    """Leave out what nothing is kept of: Megatron-LM takes it, and moves nothing."""
    void = [module for module in layout.offload if module in _EXPERT_OFFLOADS]
    if Recompute.MOE not in layout.recompute or not void:
        return layout, ()
    kept = tuple(module for module in layout.offload if module not in void)
    note = (
        f"{LAYOUT_OPTIONS['offload']} {' '.join(void)} moves nothing: recompute of moe keeps "
        "nothing inside it"
    )
    has_activations = any(module is not Offload.OPTIMIZER for module in kept)
    layers = layout.offload_layers if has_activations else 1.0
    return replace(layout, offload=kept, offload_layers=layers), (note,)


def _read_offload_module(name: str) -> Offload:
    if name not in [module.value for module in Offload if module is not Offload.OPTIMIZER]:
        rule = "is no module that can be moved"
        raise BadInput(Reason(field=LAYOUT_OPTIONS["offload"], value=name, rule=rule))
    return Offload(name)


def _read_overlap(
    arguments: Arguments, layout: Layout, model: ModelSpec
) -> tuple[tuple[Overlap, ...], tuple[str, ...]]:
    """Return what an option overlaps.

    Messages of virtual stages overlap by themselves there, so a layout need not say it; a script
    that switches this off gets a note. Of shared experts that a model has not Megatron-LM overlaps
    nothing, and says nothing.
    """
    overlaps = {overlap for overlap, name in OVERLAP_OPTIONS.items() if arguments.has(name)}
    if model.moe is None or not model.moe.shared_ffn_size:
        overlaps.discard(Overlap.SHARED)
    if not arguments.has(_LONE_MESSAGES) or layout.vpp == 1 or layout.pp == 1:
        return tuple(sorted(overlaps)), ()
    note = f"{_LONE_MESSAGES} is planned as what Megatron-LM does without: messages overlap"
    return tuple(sorted(overlaps)), (note,)


def _read_graphs(arguments: Arguments) -> tuple[tuple[CudaGraphScope, ...], tuple[str, ...]]:
    """Return what CUDA graphs capture, and notes on deprecated options."""
    name = LAYOUT_OPTIONS["graphs"]
    implementation = arguments.text("--cuda-graph-impl", "none")
    modules = arguments.values(name) or arguments.values("--cuda-graph-scope")
    notes: tuple[str, ...] = ()
    for old, meaning in _DEPRECATED_GRAPHS.items():
        if arguments.has(old):
            implementation = meaning
            notes = (f"{old} is deprecated: --cuda-graph-impl {meaning}, and {name}",)
    if implementation == "none":
        return (), notes
    if implementation == "full_iteration" or "full_iteration" in modules:
        return (CudaGraphScope.FULL,), notes
    legal = [scope.value for scope in CudaGraphScope if scope is not CudaGraphScope.FULL]
    scopes = [word for module in modules for word in module.replace(",", " ").split()]
    if _DENSE_GRAPH in scopes and len(scopes) > 1:
        scopes.remove(_DENSE_GRAPH)
        notes += (f"{name} {_DENSE_GRAPH} is not planned: dense MLPs are launched one by one",)
    if not scopes or not set(scopes) <= set(legal):
        rule = (
            f"graphs of {', '.join(scopes) or 'whole layers'} cannot be planned here; "
            f"of {', '.join(legal)} they can"
        )
        raise BadInput(Reason(field=name, rule=rule, nearest="attn"))
    return tuple(sorted(map(CudaGraphScope, scopes))), notes
