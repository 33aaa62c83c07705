"""A plan as a picture for a README or an issue: one SVG that needs nothing else."""

from __future__ import annotations

from textwrap import wrap

from moewright.spec.plan import Plan
from moewright.spec.quoting import Html
from moewright.spec.units import format_bytes, format_seconds
from moewright.view.layout_view import STAGE_STEP, count_drawn_stages, draw_grid
from moewright.view.plan_view import build_plan_view

_WIDTH = 680  # of a README's column on GitHub, with room beside
_LEFT = 18  # of text and squares, within the frame
_LINE = 20  # between lines of text
_COLUMNS = 84  # of the words of a layout
_STYLE = """
.card { fill: #ffffff; stroke: #d9dfe6; } .ink { fill: #17202b; } .quiet { fill: #566273; }
.rank { fill: #235fb0; } text { font: 14px system-ui, "DejaVu Sans", sans-serif; }
.big { font-size: 19px; font-weight: 700; } .name { font-weight: 700; } .small { font-size: 12px; }
@media (prefers-color-scheme: dark) {
  .card { fill: #181e26; stroke: #2c3642; } .ink { fill: #e7ecf2; } .quiet { fill: #9fadbe; }
  .rank { fill: #86b6f7; }
}
"""


def render_card(plan: Plan) -> Html:
    """Return the card of a plan: job, layout in words and as ranks, figures, verdict."""
    view = build_plan_view(plan)
    job, estimate = view.job, plan.estimate
    shown = job.shown
    lines = wrap(shown.words, _COLUMNS)
    below = 68 + _LINE * len(lines)
    figures_at = below + STAGE_STEP * count_drawn_stages(shown.grid) + 34
    figures = (
        ("step", format_seconds(estimate.step_s)),
        ("tokens/s a device", f"{estimate.tokens_per_s_per_device:,.0f}"),
        ("MFU", f"{estimate.mfu:.1%}"),
        ("peak memory", format_bytes(estimate.peak_bytes)),
        ("verdict", view.headline),
    )
    height = figures_at + 36
    title = f"{job.model.rpartition('/')[2]} on {job.devices:,} x {job.device}"
    batch = f"sequence {job.seq_len:,}, global batch {job.global_batch:,}, {job.precision}"
    return Html.write(
        """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {} {}" width="{}"
 height="{}" role="img">
<title>{}: {}</title>
<style>{}</style>
<rect class="card" x="0.5" y="0.5" width="{}" height="{}" rx="10"/>
<text class="ink name" x="18" y="28">{}</text>
<text class="quiet small" x="18" y="47">{}</text>
{}
{}
{}
<text class="quiet small" text-anchor="end" x="{}" y="28">predicted by moewright</text>
</svg>
""",
        *(_WIDTH, height, _WIDTH, height, title, shown.words, Html.trust(_STYLE)),
        *(_WIDTH - 1, height - 1, title, batch),
        Html.concat(
            (
                Html.write('<text class="ink" x="18" y="{}">{}</text>', 74 + _LINE * place, line)
                for place, line in enumerate(lines)
            ),
            "\n",
        ),
        draw_grid(shown.grid, _LEFT, below + 4),
        Html.concat(
            (
                Html.write(
                    '<text class="quiet small" x="{}" y="{}">{}</text>'
                    '<text class="ink {}" x="{}" y="{}">{}</text>',
                    *(x, figures_at, name, "name" if name == "verdict" else "big"),
                    *(x, figures_at + 21, text),
                )
                for x, (name, text) in zip((18, 118, 262, 352, 482), figures, strict=True)
            ),
            "\n",
        ),
        _WIDTH - 18,
    )
