"""What the engine does not run beside attention to compressed blocks of tokens (DeepSeek-V4)."""

from __future__ import annotations

from collections.abc import Iterator

from moewright.spec.errors import Reason
from moewright.spec.layout import CpComm, Layout
from moewright.spec.model import AttentionKind, ModelSpec


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
