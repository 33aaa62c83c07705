"""The runtime: the record of the job and this rank that every part of the engine is given.

No state is global.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from moewright.engine.comm.mesh import Mesh
from moewright.engine.comm.pass_turns import PassTurns
from moewright.engine.dispatch.interface import DispatchLibrary
from moewright.engine.dispatch.rows import RowBudget
from moewright.engine.kernels.delayed_scaling import DelayedScaling
from moewright.engine.kernels.fused.interface import KernelSet
from moewright.engine.kernels.products import WIDE_PRODUCTS, Products
from moewright.engine.kernels.weight_copies import WeightCopies
from moewright.engine.memory.part_graphs import PartGraphs
from moewright.engine.memory.saved_tensors import SavedTensorManager
from moewright.engine.memory.weight_gradients import WeightGradStore
from moewright.engine.observe.counters import Counters
from moewright.rules.context_parallel import rank_positions
from moewright.rules.job import Job
from moewright.spec.layout import Offload, Recompute
from moewright.spec.model import ModelSpec
from moewright.spec.workload import Dtype, RouterDtype, Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Runtime:
    """A frozen record of the job, this rank and the objects that the engine's parts share.

    `products` are those of linear layers, but of router and head; with delayed scales, in
    `delayed_scaling`, every linear has its own (Weight.products). Both read `weight_copies`.
    `dispatch_library` dispatches tokens where the layout names a library; None elsewhere.
    `row_budget` is there with a rank_capacity. `offloading_layers` are the layers of this rank that
    offload activations.
    """

    job: Job
    mesh: Mesh
    counters: Counters
    weight_grads: WeightGradStore
    saved_tensors: SavedTensorManager
    kernels: KernelSet
    device: torch.device
    turns: PassTurns
    part_graphs: PartGraphs
    products: Products = WIDE_PRODUCTS
    delayed_scaling: DelayedScaling | None = None
    dispatch_library: DispatchLibrary | None = None
    row_budget: RowBudget | None = None
    offloading_layers: frozenset[int] = frozenset()
    weight_copies: WeightCopies = field(default_factory=WeightCopies)

    @property
    def model(self) -> ModelSpec:
        """The job's model."""
        return self.job.model

    @property
    def workload(self) -> Workload:
        """The job's workload."""
        return self.job.workload

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which weights and activations are stored."""
        return stored_dtype(self.workload.precision)

    @property
    def positions(self) -> torch.Tensor:
        """The positions of this CP rank's tokens in every sequence.

        They are int64 [seq_len / cp], on the CPU.
        """
        parts = rank_positions(
            self.workload.seq_len, self.mesh.layout.cp, self.mesh.coordinate("cp")
        )
        return torch.cat([torch.arange(part.start, part.stop) for part in parts])

    def recomputes(self, policy: Recompute) -> bool:
        """Tell whether the layout asks for this recomputation."""
        return policy in self.mesh.layout.recompute

    def offloads(self, choice: Offload) -> bool:
        """Tell whether the layer that runs offloads this tensor to host memory until backward."""
        is_chosen = choice in self.mesh.layout.offload
        return is_chosen and self.counters.scopes.current.layer in self.offloading_layers


def stored_dtype(precision: Dtype) -> torch.dtype:
    """Return the dtype of weights and activations; bf16 for narrower products."""
    return torch_dtype(precision.wide)


def router_dtype(dtype: RouterDtype) -> torch.dtype:
    """Return torch's name of the dtype of a router's logits and weights."""
    return torch.float64 if dtype is RouterDtype.FP64 else torch.float32


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """Return torch's name of a dtype."""
    return {Dtype.FP32: torch.float32, Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16}[dtype]
