"""Degrees, stages, memory and overlap of a Megatron-LM command as a Layout."""

from __future__ import annotations

from dataclasses import replace

from moewright.intake.megatron.arguments import Arguments
from moewright.rules.context_parallel import cp_factors
from moewright.rules.stages import check_stages, parse_stages, pipeline_chunks
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import (
    CapacityFill,
    CpComm,
    CudaGraphScope,
    DispatcherKind,
    Layout,
    Offload,
    Overlap,
    Recompute,
    Schedule,
)
from moewright.spec.model import ModelSpec

_NOT_PLANNED = {
    "--use-tp-pp-dp-mapping": "ranks in another order",
    "--hybrid-context-parallel": "sequences of one batch cut differently",
    "--tensor-parallel-num-weight-shards": "weights sharded within tensor parallelism",
    "--expert-tensor-parallel-num-weight-shards": "weights sharded within tensor parallelism",
    "--moe-expert-rank-capacity-factor": "a budget of rows a rank",
}


def read_layout(
    arguments: Arguments, model: ModelSpec, world_size: int, zero: int | None
) -> tuple[Layout, tuple[str, ...]]:
    """The layout over `world` ranks, and notes on defaults that surprise. `zero`: what a DeepSpeed
    config says.

    Whether it is legal for the model is rules.legality's question. Raises BadInput for what is not
    planned here and for options that Megatron-LM itself does not take together.
    """
    for name, what in _NOT_PLANNED.items():
        if arguments.has(name):
            raise BadInput(Reason(field=name, rule=f"{what} cannot be planned here"))
    tp, pp = (
        arguments.integer("--tensor-model-parallel-size", 1),
        arguments.integer("--pipeline-model-parallel-size", 1),
    )
    notes = []
    layout = Layout(
        world_size=world_size,
        tp=tp,
        sp=arguments.has("--sequence-parallel") and tp > 1,
        cp=arguments.integer("--context-parallel-size", 1),
        pp=pp,
        mbs=_micro_batch(arguments),
        zero=_zero(arguments) if zero is None else zero,
    )
    layout = _context(arguments, layout)
    if model.moe is not None:
        layout = _experts(arguments, layout)
        if not arguments.has("--expert-tensor-parallel-size") and tp > 1:
            notes.append(
                "--expert-tensor-parallel-size is not given, so it is the tensor-parallel size: experts are cut in "
                f"{tp}; 1 keeps them whole"
            )
        if not arguments.has("--moe-token-dispatcher-type") and not arguments.has(
            "--moe-enable-deepep"
        ):
            notes.append(
                "--moe-token-dispatcher-type is not given, so it is allgather; alltoall is what training wants"
            )
    layout = _stages(arguments, model, layout)
    layout = replace(
        layout, vpp_group=arguments.integer("--microbatch-group-size-per-virtual-pipeline-stage")
    )
    block, span, recompute = _recompute(arguments)
    layout = replace(layout, recompute=recompute, recompute_block=block, recompute_span=span)
    fraction, offload = _offload(arguments)
    graphs, said = _graphs(arguments)
    return (
        replace(
            layout,
            offload=offload,
            offload_fraction=fraction,
            overlap=_overlap(arguments, layout),
            graphs=graphs,
        ),
        (*notes, *said),
    )


def _micro_batch(given: Arguments) -> int:
    if given.has("--batch-size"):
        raise BadInput(Reason(field="--batch-size", rule="is gone", nearest="--micro-batch-size"))
    if given.has("--model-parallel-size"):
        raise BadInput(
            Reason(
                field="--model-parallel-size",
                rule="is gone",
                nearest="--tensor-model-parallel-size",
            )
        )
    if not given.has("--micro-batch-size"):
        rule = "is missing, and Megatron-LM has no default for it"
        raise BadInput(Reason(field="--micro-batch-size", rule=rule, nearest="1"))
    return given.integer("--micro-batch-size")


def _zero(given: Arguments) -> int:
    sharded = given.has("--use-distributed-optimizer")
    if given.integer("--num-distributed-optimizer-instances", 1) > 1:
        rule = "optimizer states sharded within several groups cannot be planned here"
        raise BadInput(
            Reason(field="--num-distributed-optimizer-instances", rule=rule, nearest="1")
        )
    if given.has("--use-torch-fsdp2"):
        return 3
    strategy = given.text("--data-parallel-sharding-strategy", "optim_grads_params")
    given.has("--ckpt-format")
    if not given.has("--use-megatron-fsdp"):
        return int(sharded)
    if strategy == "optim_grads":
        rule = "sharded gradients beside whole weights (ZeRO-2) cannot be planned here"
        raise BadInput(
            Reason(
                field="--data-parallel-sharding-strategy",
                value=strategy,
                rule=rule,
                nearest="optim_grads_params",
            )
        )
    return {"no_shard": 0, "optim": 1, "optim_grads_params": 3}[strategy]


def _context(given: Arguments, layout: Layout) -> Layout:
    kinds = set(given.values("--cp-comm-type", "p2p"))
    if len(kinds) > 1:
        rule = "layers that exchange keys in different ways cannot be planned here"
        raise BadInput(
            Reason(field="--cp-comm-type", value=" ".join(sorted(kinds)), rule=rule, nearest="p2p")
        )
    kind, legal = kinds.pop(), [member.value for member in CpComm]
    if kind not in legal:
        rule = f"is one of {', '.join(legal)}"
        raise BadInput(
            Reason(field="--cp-comm-type", value=kind[:60], rule=rule, nearest=CpComm.P2P)
        )
    layout = replace(layout, cp_comm=CpComm(kind) if layout.cp > 1 else CpComm.P2P)
    sizes = tuple(map(int, given.values("--hierarchical-context-parallel-sizes")))
    if layout.cp_comm is CpComm.A2A_P2P and sizes != cp_factors(layout):
        inner, outer = cp_factors(layout)
        rule = f"two levels of {layout.cp} ranks are planned here as {inner} x {outer}"
        raise BadInput(
            Reason(
                field="--hierarchical-context-parallel-sizes",
                value=" ".join(map(str, sizes)),
                rule=rule,
                nearest=f"{inner} {outer}",
            )
        )
    return layout


def _experts(given: Arguments, layout: Layout) -> Layout:
    kind = given.text("--moe-token-dispatcher-type", "allgather")
    backend = given.text("--moe-flex-dispatcher-backend", "deepep")
    if given.has("--moe-enable-deepep"):
        kind, backend = "flex", "deepep"
    if kind == "flex" and backend == "ncclep":
        rule = "NCCL-EP cannot be planned here"
        raise BadInput(
            Reason(
                field="--moe-flex-dispatcher-backend", value=backend, rule=rule, nearest="hybridep"
            )
        )
    return replace(
        layout,
        ep=given.integer("--expert-model-parallel-size", 1),
        etp=given.integer("--expert-tensor-parallel-size", layout.tp),
        dispatcher=DispatcherKind(backend if kind == "flex" else kind),
        capacity=given.number("--moe-expert-capacity-factor"),
        capacity_fill=CapacityFill.PADDED
        if given.has("--moe-pad-expert-input-to-capacity")
        else CapacityFill.USED,
    )


def _stages(given: Arguments, model: ModelSpec, layout: Layout) -> Layout:
    """vpp, and a layout string where the split is not one that a Layout has without."""
    ways = (
        "--num-layers-per-virtual-pipeline-stage",
        "--num-virtual-stages-per-pipeline-rank",
        "--pipeline-model-parallel-layout",
    )
    said = [name for name in ways if given.has(name)]
    if len(said) > 1:
        raise BadInput(
            Reason(field=said[1], rule=f"excludes {said[0]}", nearest=f"{said[0]} alone")
        )
    text = given.text("--pipeline-model-parallel-layout")
    if text:
        count = len(parse_stages(text))
        if count % layout.pp:
            rule = f"spells {count} stages, which --pipeline-model-parallel-size {layout.pp} does not divide"
            raise BadInput(
                Reason(field="--pipeline-model-parallel-layout", value=text[:60], rule=rule)
            )
        return _scheduled(replace(layout, stages=text, vpp=count // layout.pp))
    ends = (
        int(given.has("--account-for-embedding-in-pipeline-split")),
        int(given.has("--account-for-loss-in-pipeline-split")),
    )
    outer = (
        given.integer("--decoder-first-pipeline-num-layers", -1),
        given.integer("--decoder-last-pipeline-num-layers", -1),
    )
    if layout.pp == 1:
        return layout
    a_rank = _layers_a_rank(model, layout, ends, outer)
    vpp = given.integer("--num-virtual-stages-per-pipeline-rank", 1)
    if given.has("--num-layers-per-virtual-pipeline-stage"):
        each = given.integer("--num-layers-per-virtual-pipeline-stage")
        if max(outer) >= 0:
            raise BadInput(
                Reason(field=said[0], rule="excludes uneven first and last ranks", nearest=ways[1])
            )
        if not each or a_rank[0] % each:
            rule = f"must divide the {a_rank[0]} layers of a pipeline rank"
            raise BadInput(Reason(field=said[0], value=str(each), rule=rule, nearest="1"))
        vpp = a_rank[0] // each
    for count in set(a_rank):
        if not vpp or count % vpp:
            rule = f"must divide the {count} layers of a pipeline rank (embedding and loss as they are counted)"
            raise BadInput(Reason(field=ways[1], value=str(vpp), rule=rule, nearest="1"))
    layout = _scheduled(replace(layout, vpp=vpp))
    counts = [a_rank[stage % layout.pp] // vpp for stage in range(layout.pp * vpp)]
    counts[0] -= ends[0]
    counts[-1] -= ends[1]
    if not check_stages(model, layout) and counts == [
        len(chunk.layers) for chunk in pipeline_chunks(model, layout)
    ]:
        return layout
    return replace(layout, stages=_spelled(counts, model.mtp_layers))


def _layers_a_rank(
    model: ModelSpec, layout: Layout, ends: tuple[int, int], outer: tuple[int, int]
) -> tuple[int, ...]:
    """Layers of every pipeline rank, embedding and loss among them where they are counted."""
    pp, first, last = layout.pp, *outer
    if max(outer) >= 0 and max(ends):
        rule = "excludes --account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split"
        raise BadInput(Reason(field="--decoder-first-pipeline-num-layers", rule=rule))
    middle = pp - (first >= 0) - (last >= 0)
    left = model.layers + sum(ends) - max(first, 0) - max(last, 0)
    if left < 0 or (left % middle if middle else left):
        rule = f"{left} layers do not divide over {middle} pipeline ranks"
        close = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
        fits = (model.layers + 2) % pp == 0
        raise BadInput(
            Reason(
                field="--num-layers",
                value=str(model.layers),
                rule=rule,
                nearest=close if fits else "",
            )
        )
    each = left // middle if middle else 0
    head, tail = ((first,) if first >= 0 else ()), ((last,) if last >= 0 else ())
    return (*head, *(each,) * middle, *tail)


def _spelled(counts: list[int], mtp: int) -> str:
    words = [("t" * count if count < 2 else f"t*{count}") for count in counts]
    words[0] = "E" + words[0]
    words[-1] += ("m" * mtp) + "L"
    return "|".join(words)


def _scheduled(layout: Layout) -> Layout:
    return replace(
        layout, schedule=Schedule.INTERLEAVED if layout.vpp > 1 else Schedule.ONE_F_ONE_B
    )


def _recompute(given: Arguments) -> tuple[int, int, tuple[Recompute, ...]]:
    """Layers of a block (0: all), layers a checkpoint, and the modules."""
    granularity = given.text("--recompute-granularity")
    if given.has("--checkpoint-activations"):
        raise BadInput(
            Reason(
                field="--checkpoint-activations",
                rule="is gone",
                nearest="--recompute-granularity full",
            )
        )
    if given.has("--recompute-activations"):
        granularity = "selective"  # what it means, whatever else is said
    method, number = given.text("--recompute-method"), given.integer("--recompute-num-layers", 1)
    modules = given.values("--recompute-modules", "core_attn")
    more = (Recompute.MOE,) if given.has("--moe-layer-recompute") else ()
    if granularity == "full":
        if not method:
            rule = "needs --recompute-method: uniform over all layers, or block for the first of each stage"
            raise BadInput(
                Reason(
                    field="--recompute-granularity full",
                    rule=rule,
                    nearest="--recompute-method uniform",
                )
            )
        return (
            (number, 1, (Recompute.FULL,)) if method == "block" else (0, number, (Recompute.FULL,))
        )
    if granularity == "selective":
        if method:
            rule = "stands with full recompute alone; selective names modules: --recompute-modules"
            raise BadInput(
                Reason(field="--recompute-method", value=method, rule=rule, nearest="leave it out")
            )
        return 0, 1, tuple(sorted({*map(_module, modules), *more}))
    return 0, 1, more


def _module(name: str) -> Recompute:
    modules = [
        module.value for module in Recompute if module not in (Recompute.FULL, Recompute.LOSS)
    ]
    if name not in modules:
        legal = ", ".join(modules)
        raise BadInput(
            Reason(
                field="--recompute-modules",
                value=name,
                rule=f"is one of {legal}",
                nearest="moe_act",
            )
        )
    return Recompute(name)


def _offload(given: Arguments) -> tuple[float, tuple[Offload, ...]]:
    found = []
    if given.integer("--cpu-offloading-num-layers"):
        rule = "whole layers on the host cannot be planned here"
        raise BadInput(
            Reason(field="--cpu-offloading-num-layers", rule=rule, nearest="--offload-modules")
        )
    if given.has("--fine-grained-activation-offloading"):
        for name in given.values("--offload-modules"):
            if name not in [module.value for module in Offload if module is not Offload.OPTIMIZER]:
                raise BadInput(
                    Reason(
                        field="--offload-modules", value=name, rule="is no module that can be moved"
                    )
                )
            found.append(Offload(name))
    if given.number("--activation-offload-fraction", 1.0) != 1.0:
        rule = "a part of a module's activations on the host cannot be planned here"
        raise BadInput(Reason(field="--activation-offload-fraction", rule=rule, nearest="1"))
    fraction = given.number("--optimizer-offload-fraction", 1.0)
    if not given.has("--optimizer-cpu-offload") or not fraction:
        return 1.0, tuple(sorted(found))
    return fraction, tuple(sorted((*found, Offload.OPTIMIZER)))


def _overlap(given: Arguments, layout: Layout) -> tuple[Overlap, ...]:
    flags = {
        "--overlap-grad-reduce": Overlap.GRAD,
        "--overlap-param-gather": Overlap.PARAM,
        "--tp-comm-overlap": Overlap.TP,
        "--overlap-moe-expert-parallel-comm": Overlap.EP,
        "--delay-wgrad-compute": Overlap.WGRAD,
        "--moe-shared-expert-overlap": Overlap.SHARED,
    }
    found = [overlap for name, overlap in flags.items() if given.has(name)]
    alone = given.has("--no-overlap-p2p-communication")
    if layout.vpp > 1 and layout.pp > 1 and not alone:
        found.append(Overlap.P2P)
    return tuple(sorted(found))


def _graphs(given: Arguments) -> tuple[tuple[CudaGraphScope, ...], tuple[str, ...]]:
    impl = given.text("--cuda-graph-impl", "none")
    notes: tuple[str, ...] = ()
    modules = given.values("--cuda-graph-modules") or given.values("--cuda-graph-scope")
    for name, means in (
        ("--external-cuda-graph", "transformer_engine"),
        ("--enable-cuda-graph", "local"),
    ):
        if given.has(name):
            impl, notes = (
                means,
                (f"{name} is deprecated: --cuda-graph-impl {means}, and --cuda-graph-modules",),
            )
    if impl == "none":
        return (), notes
    if impl == "full_iteration" or "full_iteration" in modules:
        return (CudaGraphScope.FULL,), notes
    legal = [part.value for part in CudaGraphScope if part is not CudaGraphScope.FULL]
    words = [word for module in modules for word in module.replace(",", " ").split()]
    if not words or not set(words) <= set(legal):
        rule = f"graphs of {', '.join(words) or 'whole layers'} cannot be planned here; of {', '.join(legal)} they can"
        raise BadInput(Reason(field="--cuda-graph-modules", rule=rule, nearest="attn"))
    return tuple(sorted(map(CudaGraphScope, words))), notes
