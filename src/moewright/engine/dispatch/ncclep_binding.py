"""A binding of NCCL-EP (the package nccl.ep of github.com/NVIDIA/nccl-extensions).

It is called through the package's Python interface alone, in its high-throughput algorithm with the
flat layout: a rank receives one copy of a token, whatever number of its experts the token chose.
It has not been run on hardware by this project: tests replace it by a module that exchanges over
gloo, and a job that asks for it starts with `deepep.verify_library`.
"""

from __future__ import annotations

import importlib
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from moewright.engine.comm.collectives import Group, communicator_address
from moewright.engine.dispatch.interface import LibrarySizes, ReceivedCopies, copy_to_host


@dataclass(frozen=True, kw_only=True, eq=False)
class NcclEpRoute:
    """The route of one batch of tokens: the library's handle, and the sizes on both sides.

    `experts` [T,k] is what the handle was made of, and must live as long. The handle is destroyed
    with this record.
    """

    handle: Any
    experts: torch.Tensor
    copies: int

    def __post_init__(self) -> None:
        weakref.finalize(self, self.handle.destroy).atexit = False


class NcclEp:
    """A binding of `nccl.ep.Group`, by its high-throughput kernels.

    The host waits once a dispatch, for the number of copies that this rank receives.
    """

    def __init__(self, group: Group, sizes: LibrarySizes, device: torch.device) -> None:
        """Set up the library's group on the communicator of a process group."""
        core = importlib.import_module("nccl.core")
        self._ep = ep = importlib.import_module("nccl.ep")
        self.group = group
        self._experts = sizes.experts
        self._device = device
        # The library holds no reference to the communicator that it is built on.
        self._communicator = core.Communicator(ptr=communicator_address(group, device))
        config = ep.GroupConfig(
            algorithm=ep.Algorithm.HIGH_THROUGHPUT,
            num_experts=sizes.experts,
            max_dispatch_tokens_per_rank=sizes.max_tokens,
            max_recv_tokens_per_rank=0,  # outputs have as many rows as a dispatch brings
            max_token_bytes=2 * sizes.hidden,  # rows are bf16
        )
        self._library_group = ep.Group.create(self._communicator, config)

    @property
    def _stream(self) -> int:
        if self._device.type != "cuda":
            return 0
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def dispatch(
        self, x_TH: torch.Tensor, experts_Tk: torch.Tensor, weights_Tk: torch.Tensor
    ) -> ReceivedCopies:
        ep = self._ep
        chosen = experts_Tk.masked_fill(experts_Tk == self._experts, -1).contiguous()
        total = torch.zeros(1, dtype=torch.int32, device=x_TH.device)
        handle = self._library_group.create_handle(
            ep.Layout.FLAT,
            ep.Tensor(chosen),
            layout_info=ep.LayoutInfo(recv_total_counter=ep.Tensor(total)),
            config=ep.HandleConfig(),
            stream=self._stream,
        )
        ((copies,),) = copy_to_host(total)
        route = NcclEpRoute(handle=handle, experts=chosen, copies=copies)
        rows = x_TH.new_empty(copies, x_TH.shape[1])
        ids = chosen.new_empty(copies, chosen.shape[1])
        weights = weights_Tk.new_empty(ids.shape)
        handle.dispatch(
            ep.DispatchInputs(
                tokens=ep.Tensor(x_TH.contiguous()), topk_weights=ep.Tensor(weights_Tk.contiguous())
            ),
            ep.DispatchOutputs(
                tokens=ep.Tensor(rows), topk_weights=ep.Tensor(weights), topk_idx=ep.Tensor(ids)
            ),
            layout_info=ep.LayoutInfo(recv_topk_idx_kind=ep.ExpertIdKind.LOCAL),
            config=ep.DispatchConfig(pass_direction=ep.PassDir.FWD),
            stream=self._stream,
        )
        is_elsewhere = ids < 0
        return ReceivedCopies(
            rows=rows,
            ids=ids.masked_fill(is_elsewhere, self._experts // self.group.size),
            weights=weights.masked_fill(is_elsewhere, 0.0),
            handle=route,
        )

    def dispatch_cached(self, x_TH: torch.Tensor, handle: Any) -> torch.Tensor:
        """Send rows along a route in the direction of backward, which takes no weights."""
        ep = self._ep
        rows = x_TH.new_empty(handle.copies, x_TH.shape[1])
        handle.handle.dispatch(
            ep.DispatchInputs(tokens=ep.Tensor(x_TH.contiguous())),
            ep.DispatchOutputs(tokens=ep.Tensor(rows)),
            config=ep.DispatchConfig(pass_direction=ep.PassDir.BWD),
            stream=self._stream,
        )
        return rows

    def combine(self, rows_NH: torch.Tensor, handle: Any) -> torch.Tensor:
        ep = self._ep
        sums = rows_NH.new_empty(len(handle.experts), rows_NH.shape[1])
        handle.handle.combine(
            ep.CombineInputs(tokens=ep.Tensor(rows_NH.contiguous())),
            ep.CombineOutputs(tokens=ep.Tensor(sums)),
            config=ep.CombineConfig(pass_direction=ep.PassDir.FWD),
            stream=self._stream,
        )
        return sums

    def combine_with_weights(
        self, rows_NH: torch.Tensor, weights_Nj: torch.Tensor, handle: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum rows in the direction of backward, which sends the weights' gradients back too."""
        ep = self._ep
        sums = rows_NH.new_empty(len(handle.experts), rows_NH.shape[1])
        weights = weights_Nj.new_empty(handle.experts.shape)
        handle.handle.combine(
            ep.CombineInputs(
                tokens=ep.Tensor(rows_NH.contiguous()),
                topk_weights=ep.Tensor(weights_Nj.contiguous()),
            ),
            ep.CombineOutputs(tokens=ep.Tensor(sums), topk_weights=ep.Tensor(weights)),
            config=ep.CombineConfig(pass_direction=ep.PassDir.BWD),
            stream=self._stream,
        )
        return sums, weights
