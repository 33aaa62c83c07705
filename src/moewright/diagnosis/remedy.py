"""A remedy: what to change, in whose settings; and the remedies that several causes share."""

from __future__ import annotations

from dataclasses import dataclass

from moewright.codec.megatron_options import LAYOUT_OPTIONS
from moewright.diagnosis.layout_changes import OFFLOADED, LayoutChange, scale_degree
from moewright.diagnosis.traces.capture import TrainerMark


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A remedy in words, with the change that it makes to a layout.

    `change` returns the same layout where there is nothing to change; it is None for a remedy that
    no field of a layout expresses. `megatron` holds the flags of Megatron-LM, `setting` the fields
    of our job file, and `excludes` what the remedy rules out. A switch is on or off, and `mark` is
    what shows in a trace that it is on.
    """

    text: str
    change: LayoutChange | None = None
    megatron: str = ""
    setting: str = ""
    excludes: str = ""
    is_switch: bool = False
    mark: TrainerMark | None = None
    for_experts: bool = False  # of no use without experts
    for_parallel: bool = False  # of no use on a single device
    only_megatron: bool = False  # this engine has nothing to set
    changes_training: bool = False  # batch, precision, capacity: such remedies come last
    is_narrow: bool = False  # the flags are those of the device's own 8-bit format
    is_environment: bool = False  # `megatron` holds variables or a command, for any trainer


OFFLOAD_FLAGS = f"--fine-grained-activation-offloading --offload-modules {' '.join(OFFLOADED)}"
FULL_RECOMPUTE = "overlap of expert communication, and graphs over the recomputed part"
GRAPH_FLAGS = (
    "--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router moe_preprocess"
)
RECOMPUTE_FLAGS = "--recompute-granularity selective --recompute-modules"
MORE_ROWS = (
    Remedy(
        text="a larger micro-batch: more tokens for each kernel",
        change=scale_degree("mbs", 2),
        megatron=LAYOUT_OPTIONS["mbs"],
    ),
    Remedy(
        text="a wider ep: each expert gets the tokens of more ranks",
        change=scale_degree("ep", 2),
        megatron=LAYOUT_OPTIONS["ep"],
        for_experts=True,
    ),
)
FUSIONS = (
    Remedy(
        text="fused kernels of the experts: permute, router",
        megatron="--moe-permute-fusion --moe-router-fusion",
        is_switch=True,
        for_experts=True,
        only_megatron=True,
    ),
    Remedy(
        text="a fused loss",
        megatron="--cross-entropy-loss-fusion --cross-entropy-fusion-impl te",
        is_switch=True,
        only_megatron=True,
    ),
)
MANUAL_GC = Remedy(
    text="collect garbage in step on all ranks",
    megatron="--manual-gc --manual-gc-interval 100",
    setting="train.gc_every_steps",
    is_switch=True,
)
PINNED_THREADS = Remedy(
    text="pin each rank's threads to cores of its own socket",
    megatron="numactl --cpunodebind --membind",
    is_environment=True,
)
LOWER_PRECISION = Remedy(
    text="the 8-bit format of the device for linear layers",
    is_narrow=True,
    changes_training=True,
)
