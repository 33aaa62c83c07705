"""The all-to-all dispatcher: every (token, expert) pair is one row sent to the expert's rank (docs/formulas.md 3)."""

from __future__ import annotations

import torch

from moewright.engine.collectives import Group, all_to_all
from moewright.engine.dispatch.seam import Route, Routed
from moewright.engine.model.functions import Gather, Reorder, Spread


class AllToAll:
    """Dispatch over an expert-parallel group; alone in its group it only sorts. Dropless, uneven splits."""

    def __init__(self, group: Group, experts: int) -> None:
        self._group = group
        self._experts = experts

    def preprocess(
        self, x_TH: torch.Tensor, experts_Tk: torch.Tensor, weights_Tk: torch.Tensor
    ) -> tuple[Routed, Route]:
        """Sort (token, slot) pairs by expert and agree with the group on how many rows go where."""
        top_k = experts_Tk.shape[1]
        order = torch.argsort(experts_Tk.flatten(), stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)
        counts = torch.bincount(experts_Tk.flatten(), minlength=self._experts)
        size, local = self._group.size, self._experts // self._group.size
        received = all_to_all(counts, self._group, send=[local] * size, receive=[local] * size).view(size, local)
        # The one wait for the device in a layer: split sizes must be known on the host.
        sizes = torch.stack((counts.view(size, local).sum(1), received.sum(1))).tolist()
        regroup = ungroup = None
        if size > 1 and local > 1:
            expert_of_row = torch.arange(local, device=order.device).repeat(size).repeat_interleave(received.flatten())
            regroup = torch.argsort(expert_of_row, stable=True)
            ungroup = torch.empty_like(regroup)
            ungroup[regroup] = torch.arange(regroup.numel(), device=order.device)
        route = Route(
            top_k=top_k,
            order=order,
            inverse=inverse,
            send=tuple(sizes[0]),
            receive=tuple(sizes[1]),
            regroup=regroup,
            ungroup=ungroup,
            ends=received.sum(0).cumsum(0).to(torch.int32),
        )
        rows = Spread.apply(x_TH, order, inverse, top_k)
        weights = Reorder.apply(weights_Tk.flatten(), order, inverse)
        return Routed(rows=rows, weights=weights), route

    def dispatch(self, routed: Routed, route: Route) -> Routed:
        """Rows and weights to the ranks of their experts."""
        return Routed(
            rows=all_to_all(routed.rows, self._group, send=route.send, receive=route.receive),
            weights=all_to_all(routed.weights, self._group, send=route.send, receive=route.receive),
        )

    def postprocess(self, routed: Routed, route: Route) -> Routed:
        """Received rows come by source rank; order them by local expert."""
        if route.regroup is None:
            return routed
        return Routed(
            rows=Reorder.apply(routed.rows, route.regroup, route.ungroup),
            weights=Reorder.apply(routed.weights, route.regroup, route.ungroup),
        )

    def combine_preprocess(self, rows: torch.Tensor, route: Route) -> torch.Tensor:
        """Back to the order of the source ranks."""
        return rows if route.regroup is None else Reorder.apply(rows, route.ungroup, route.regroup)

    def combine(self, rows: torch.Tensor, route: Route) -> torch.Tensor:
        """Rows back to the ranks of their tokens."""
        return all_to_all(rows, self._group, send=route.receive, receive=route.send)

    def combine_postprocess(self, rows: torch.Tensor, route: Route) -> torch.Tensor:
        """Sum the k rows of each token: [T*k,H] -> [T,H]."""
        return Gather.apply(rows, route.order, route.inverse, route.top_k)
