"""`python -m benchmarks.gpu.expected`: what the planner expects of `make gpu`.

It is written before a card was ever there, so that the first run on one tests the planner too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.command import run_command
from moewright.codec import write_text
from moewright.cost.estimate import estimate
from moewright.intake import catalogue
from moewright.rules.low_precision import ScaleFormat, find_recipe, kept_bytes
from moewright.spec.ledger import Component
from moewright.spec.units import GIB
from moewright.spec.workload import Workload

_WIDE_BYTES = 2  # of a number in bf16
_CARDS = ("1xH200", "1xH100")
_PAGE = Path(__file__).parents[2] / "docs" / "gpu" / "expected.md"
_BARS = "<!-- bars: step by card in model -->"
_HEAD = """# What is expected of the first card

The planner's figures for the parts "Speed of a step" and "Memory" of `make gpu`, written by
`python -m benchmarks.gpu.expected` before any of it ran on a GPU: one device, bf16, no
recomputation, the first layers of each model alone. The intervals hold 80 % of the published runs.
The shipped constants describe Megatron-LM's kernels: what the engine's are slower by, the first run
will tell.
"""

_CASTS = """Casts of "Kernels against references" are bound by memory: what they read and write,
at the card's full bandwidth.
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


def list_casts() -> Iterator[Sequence[str]]:
    """Yield the least time of every cast of "Kernels against references" on every card.

    A cast reads its tensor once, or twice where a scale is for all of it, and writes what is kept.
    """
    from benchmarks.gpu.sizes import RECIPES, card_sizes

    sizes = card_sizes()
    width = sizes.models[0].model.hidden_size
    for name, precision, scaling in RECIPES:
        workload = Workload(seq_len=1, global_batch=1, precision=precision, tensor_scaling=scaling)
        recipe = find_recipe(workload)
        assert recipe is not None
        operand = recipe.inputs
        has_tensor_scale = not operand.block or operand.scale is ScaleFormat.E4M3
        passes = 2 if has_tensor_scale else 1
        nbytes = passes * _WIDE_BYTES * sizes.rows * width
        nbytes += kept_bytes(operand, sizes.rows, width, 1)
        for card in _CARDS:
            seconds = nbytes / catalogue.hardware(card).device.memory_Bps.value
            yield name, card.removeprefix("1x"), f"{nbytes / 1e6:.0f} MB", f"{1e6 * seconds:.0f} us"


def write_page() -> int:
    """Write the page."""
    steps = _draw_table(
        ("model", "card", "step", "80 % interval", "tokens/s", "MFU", "peak"), list_rows()
    )
    casts = _draw_table(("cast", "card", "bytes", "at least"), list_casts())
    write_text(_PAGE, f"{_HEAD}\n{steps}\n\n{_BARS}\n\n{_CASTS}\n{casts}\n")
    print(f"wrote {_PAGE}")
    return 0


def _draw_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    run_command("benchmarks.gpu.expected", write_page)
