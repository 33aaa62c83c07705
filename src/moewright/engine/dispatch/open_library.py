"""Opening the library that a layout's dispatcher names."""

from __future__ import annotations

import importlib

import torch

from moewright.engine.comm.collectives import Group
from moewright.engine.dispatch.deepep_bindings import DeepEp, HybridEp
from moewright.engine.dispatch.library import DispatchLibrary, unusable_reason
from moewright.engine.dispatch.ncclep_binding import NcclEp
from moewright.spec.errors import BadInput
from moewright.spec.layout import DispatcherKind


def open_library(
    dispatcher: DispatcherKind,
    group: Group,
    *,
    experts: int,
    hidden: int,
    max_tokens: int,
    nvlink_domain_size: int,
    device: torch.device,
) -> DispatchLibrary:
    """Set up the library for a group; every rank of it calls this.

    Raises:
        BadInput: when it cannot be set up.
    """
    try:
        if dispatcher is DispatcherKind.NCCLEP:
            return NcclEp(
                group, experts=experts, hidden=hidden, max_tokens=max_tokens, device=device
            )
        module = importlib.import_module("deep_ep")
        if dispatcher is DispatcherKind.DEEPEP:
            return DeepEp(module, group, experts=experts, hidden=hidden)
        return HybridEp(
            module,
            group,
            experts=experts,
            hidden=hidden,
            max_tokens=max_tokens,
            nvlink_domain_size=nvlink_domain_size,
        )
    except Exception as error:  # it may refuse a device, a number of ranks, its own version
        raise BadInput(
            unusable_reason(dispatcher, f"cannot be set up: {type(error).__name__}: {error}")
        ) from error
