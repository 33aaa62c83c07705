"""A layout around its own point: devices, their kind, network, precision and sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moewright.api.views import ViewQuery
from moewright.intake import catalogue
from moewright.spec.errors import BadInput
from moewright.spec.plan import Plan
from moewright.spec.workload import Dtype
from moewright.view.what_if_view import WhatIfAxis, WhatIfPoint, WhatIfView

_DEVICES = ("H100", "H200", "B200", "MI300X")
_NETWORKS = ("ib", "roce", "efa", "tcp")
_PRECISIONS = (Dtype.BF16, Dtype.FP8, Dtype.MXFP8, Dtype.NVFP4)
_SCALES = (0.5, 1, 2, 4)


def view_what_if(query: ViewQuery) -> WhatIfView:
    """Return what a query's layout does where one option of its job is another.

    Raises:
        BadInput: something cannot be used, or the layout is illegal as it is.
    """
    own = query.build()
    return WhatIfView(
        axes=(
            WhatIfAxis(title="Devices", key="on", points=tuple(_scale_devices(query, own))),
            WhatIfAxis(title="Kind of device", key="on", points=tuple(_swap_devices(query, own))),
            WhatIfAxis(title="Network", key="network", points=tuple(_swap_networks(query, own))),
            WhatIfAxis(title="Precision", key="precision", points=tuple(_narrow(query, own))),
            WhatIfAxis(title="Sequence", key="seq_len", points=tuple(_stretch(query, own))),
        )
    )


def _scale_devices(query: ViewQuery, own: Plan) -> Iterator[WhatIfPoint]:
    for scale in _SCALES:
        count = int(own.hardware.count * scale)
        value = f"{count}x{own.hardware.device.name}"
        yield _try_query(replace(query, on=value), own if scale == 1 else None, f"{count:,}", value)


def _swap_devices(query: ViewQuery, own: Plan) -> Iterator[WhatIfPoint]:
    name = own.hardware.device.name
    others = (catalogue.hardware(f"1x{device}").device.name for device in _DEVICES)
    for device in dict.fromkeys((name, *others)):
        value = f"{own.hardware.count}x{device}"
        changed = replace(query, on=value)
        yield _try_query(changed, own if device == name else None, device, value)


def _swap_networks(query: ViewQuery, own: Plan) -> Iterator[WhatIfPoint]:
    chosen = query.options.network
    for network in dict.fromkeys((chosen, "", *_NETWORKS)):
        changed = replace(query, options=replace(query.options, network=network))
        is_own = network == chosen
        yield _try_query(changed, own if is_own else None, network or "its own", network)


def _narrow(query: ViewQuery, own: Plan) -> Iterator[WhatIfPoint]:
    chosen = own.workload.precision
    for precision in dict.fromkeys((*_PRECISIONS, chosen)):
        changed = replace(query, options=replace(query.options, precision=precision))
        plan = own if precision is chosen else None
        yield _try_query(changed, plan, precision.value, precision.value)


def _stretch(query: ViewQuery, own: Plan) -> Iterator[WhatIfPoint]:
    for scale in _SCALES:
        seq_len = int(own.workload.seq_len * scale)
        changed = replace(query, options=replace(query.options, seq_len=seq_len))
        yield _try_query(changed, own if scale == 1 else None, f"{seq_len:,}", str(seq_len))


def _try_query(query: ViewQuery, own: Plan | None, label: str, value: str) -> WhatIfPoint:
    """Estimate a changed query, which `own` is the answer to where nothing is changed."""
    try:
        plan = own or query.build()
    except BadInput as error:
        return WhatIfPoint(label=label, value=value, is_own=False, rule=error.reasons[0].rule)
    estimate = plan.estimate
    return WhatIfPoint(
        label=label,
        value=value,
        is_own=own is not None,
        tokens_per_s_per_device=estimate.tokens_per_s_per_device,
        step_s=estimate.step_s,
        peak_bytes=estimate.peak_bytes,
        verdict=estimate.verdict.value,
    )
