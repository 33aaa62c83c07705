"""The machine's own rate beside the contest: the faster matrix product of torch, each side 2048.

In fp32 torch.mm runs MKL, which is slower than oneDNN on some CPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.peers.protocol import parse_request, take_turns

_SIDE = 2048
_FLOPS = 2 * _SIDE**3


def best_rate(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the FLOP/s of the faster of torch.mm and oneDNN's product."""

    def rate(product: Callable[[], object]) -> float:
        started = time.perf_counter()
        product()
        return _FLOPS / (time.perf_counter() - started)

    onednn = torch.ops.mkldnn._linear_pointwise
    return max(rate(lambda: torch.mm(a, b)), rate(lambda: onednn(a, b, None, "none", [], "")))


if __name__ == "__main__":
    request = parse_request()
    a = torch.randn(_SIDE, _SIDE).to(request.torch_dtype)
    b = torch.randn(_SIDE, _SIDE).to(request.torch_dtype)
    take_turns(lambda _: lambda: best_rate(a, b))
