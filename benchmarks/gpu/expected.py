"""`python -m benchmarks.gpu.expected`: what the planner expects of `make gpu`.

It is written before a card was ever there, so that the first run on one tests the planner too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.command import run_command
from moewright.codec import write_text
from moewright.cost.estimate import estimate
from moewright.intake import catalogue
from moewright.spec.ledger import Component
from moewright.spec.units import GIB

_CARDS = ("1xH200", "1xH100")
_PAGE = Path(__file__).parents[2] / "docs" / "gpu" / "expected.md"
_HEAD = """# What is expected of the first card

The planner's figures for the parts "Speed of a step" and "Memory" of `make gpu`, written by
`python -m benchmarks.gpu.expected` before any of it ran on a GPU: one device, bf16, no
recomputation, the first layers of each model alone. The intervals hold 80 % of the published runs.
The shipped constants describe Megatron-LM's kernels: what the engine's are slower by, the first run
will tell.
"""


def list_rows() -> Iterator[Sequence[str]]:
    """Yield the expected step and peak of every measured model on every card."""
    from benchmarks.gpu.sizes import build_job, card_sizes

    sizes = card_sizes()
    for measured in sizes.models:
        model = measured.cut(measured.step_layers)
        job = build_job(sizes, model)
        for card in _CARDS:
            expected = estimate(job.model, job.workload, catalogue.hardware(card), job.layout)
            (ledger,) = expected.ledgers
            low, high = expected.step_interval_80
            on_device = sum(
                row.bytes for row in ledger.memory if row.component is not Component.HOST
            )
            yield (
                f"{model.name}, {measured.step_layers} layers",
                card.removeprefix("1x"),
                f"{1e3 * expected.step_s:.1f} ms",
                f"{1e3 * low:.1f} to {1e3 * high:.1f} ms",
                f"{expected.tokens_per_s_per_device:,.0f}",
                f"{expected.mfu:.1%}",
                f"{on_device / GIB:.1f} GiB",
            )


def write_page() -> int:
    """Write the page."""
    columns = ("model", "card", "step", "80 % interval", "tokens/s", "MFU", "peak")
    lines = [columns, ["---"] * len(columns), *list_rows()]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    write_text(_PAGE, f"{_HEAD}\n{table}\n")
    print(f"wrote {_PAGE}")
    return 0


if __name__ == "__main__":
    run_command("benchmarks.gpu.expected", write_page)
