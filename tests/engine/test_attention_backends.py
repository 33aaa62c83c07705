"""Attention runs by the first kernels of the table that are for the card and installed."""

from __future__ import annotations

import pytest
import torch
from torch.nn import attention

from moewright.engine.kernels import attention_backends
from moewright.engine.kernels.attention_backends import activate_attention, is_installed


@pytest.mark.parametrize(
    ("capability", "packages", "active", "sentence"),
    [
        ((9, 0), {"flash_attn_interface"}, ["FA3"], "FlashAttention-3: it is installed"),
        ((9, 0), set(), [], "FlashAttention-2: it comes with torch"),
        ((8, 0), {"flash_attn_interface"}, [], "FlashAttention-2"),
        ((10, 0), {"flash_attn_interface", "flash_attn"}, [], "FlashAttention-2"),
    ],
)
def test_a_card_gets_the_kernels_that_are_for_it(
    capability: tuple[int, int],
    packages: set[str],
    active: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    activated: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(
        attention_backends, "find_spec", lambda name: name if name in packages else None
    )
    monkeypatch.setattr(attention, "activate_flash_attention_impl", activated.append)
    assert activate_attention(torch.device("cuda", 0)).startswith(f"attention by {sentence}")
    assert activated == active


def test_a_torch_without_other_kernels_runs_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_backends, "find_spec", lambda name: name)
    assert is_installed(attention_backends.BACKENDS[0])
    monkeypatch.delattr(attention, "list_flash_attention_impls")
    assert not is_installed(attention_backends.BACKENDS[0])
