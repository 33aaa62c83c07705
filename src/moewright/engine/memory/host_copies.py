"""Copies of tensors to host memory and back, beside the device's own work."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class HostCopies(Protocol):
    """A way to copy flat tensors to the host and back.

    What `start_copy` returns goes to `start_fetch`, and what that returns to `finish_fetch`, which
    gives the tensor to the work that follows. The first of what a fetch returns is the tensor.
    """

    def start_copy(self, flat: torch.Tensor) -> Any: ...
    def start_fetch(self, copied: Any) -> tuple[torch.Tensor, Any]: ...
    def finish_fetch(self, fetched: tuple[torch.Tensor, Any]) -> torch.Tensor: ...


def build_host_copies(device: torch.device) -> HostCopies:
    """Return the copies of a device's tensors."""
    return StreamCopies(device) if device.type == "cuda" else PlainCopies()


class PlainCopies:
    """Copies within the memory of a CPU."""

    def start_copy(self, flat: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(flat, device="cpu").copy_(flat)

    def start_fetch(self, copied: torch.Tensor) -> tuple[torch.Tensor, None]:
        return copied.clone(), None

    def finish_fetch(self, fetched: tuple[torch.Tensor, None]) -> torch.Tensor:
        return fetched[0]


class StreamCopies:
    """Copies of a GPU's tensors on two streams of their own, one for each direction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device)
        self._back = torch.cuda.Stream(device)

    def start_copy(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Copy to pinned memory, once the work that makes the tensor is done."""
        host = torch.empty_like(flat, device="cpu", pin_memory=True)
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            host.copy_(flat, non_blocking=True)
            copied = self._out.record_event()
        # The allocator must not reuse its memory before the copy is made.
        flat.record_stream(self._out)
        return host, copied

    def start_fetch(
        self, copied: tuple[torch.Tensor, torch.cuda.Event]
    ) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Copy back, once the copy to the host is made; the device's work goes on meanwhile."""
        host, made = copied
        self._back.wait_event(made)
        with torch.cuda.stream(self._back):
            flat = host.to(self._device, non_blocking=True)
            return flat, self._back.record_event()

    def finish_fetch(self, fetched: tuple[torch.Tensor, torch.cuda.Event]) -> torch.Tensor:
        """Let the work that follows wait for the copy."""
        flat, made = fetched
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(made)
        # It was made on another stream, which must not reuse its memory before this one has read
        # it.
        flat.record_stream(stream)
        return flat
