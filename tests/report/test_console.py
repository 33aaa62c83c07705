import io
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from moewright.cli.main import main
from moewright.codec import parse_layout
from moewright.diagnosis.judgement import judge_plan
from moewright.report import console
from moewright.report.console import make_console, print_on_a_screen
from moewright.report.document_text import print_sections
from moewright.report.estimate_document import build_estimate_parts, build_verdict, format_flops
from moewright.report.plan_text import describe_evidence, print_plans
from moewright.spec.ledger import Component, MemoryRow, Module
from moewright.spec.plan import Evidence, EvidenceGrade, Verdict
from moewright.spec.units import GIB
from sample_run import estimate, ledger, plan, with_recompute


@pytest.fixture
def out():
    return io.StringIO()


def _print(out, shown):
    sections = (build_verdict(shown, judge_plan(shown)), *build_estimate_parts(shown))
    print_sections(make_console(out), sections, verbose=True)


def too_large(base):
    full = replace(base.estimate, peak_bytes=5 * GIB, margin_bytes=-GIB, verdict=Verdict.OOM)
    return replace(base, estimate=full)


def test_piped_plans_are_plain_text_of_at_most_120_columns(out):
    plans = (plan(1.25), with_recompute(plan(1.5)), too_large(plan(2.0, ep=1, zero=0)))
    rejected = (("experts % ep == 0", 12), ("memory above capacity", 3456))
    print_plans(
        make_console(out),
        plans,
        rejected=rejected,
        why=("0.25 s less recompute than the runner-up",),
        verbose=True,
    )
    text = out.getvalue()
    assert "\x1b" not in text
    lines = text.splitlines()
    assert max(map(len, lines)) <= 120
    first, second, third = (
        next(line for line in lines if line.startswith(f" {place} "))
        for place in ("> 1", "  2", "  3")
    )
    assert "ep2, mbs2 " in first
    assert "1.25 s" in first
    assert "1,638" in first  # 2048 tokens a rank in 1.25 s
    assert "fits" in first
    assert "1.5 s" in second
    assert "5 GiB ██████████" in third
    assert "-1 GiB" in third
    assert "oom" in third
    assert text.index("3,456") < text.index("experts % ep == 0")
    assert "0.25 s less recompute than the runner-up" in lines
    for assumption in plans[0].estimate.assumptions:
        (row,) = [line for line in lines if assumption.name in line]
        assert f"{assumption.name} {assumption.value}" in row
        assert row.startswith(f" {assumption.kind} ")
        assert assumption.source in row
    kinds = [line.split()[0] for line in lines if "short runs" in line or "job file" in line]
    assert kinds == ["assumed", "fitted"]  # the least certain first


def test_long_layouts_have_lines_of_their_own_and_one_gamble_is_shown(out):
    long = "tp1,pp1,ep2,mbs2,dispatcher=allgather,recompute=full,overlap=grad+param"
    base = plan(1.25)
    plans = [replace(base, layout=parse_layout(long, world_size=2)), base]
    print_plans(make_console(out), plans, gambles=(plan(1.3), plan(1.0), plan(1.1)))
    lines = out.getvalue().splitlines()
    place = lines.index(f"    {long}")
    assert lines[place - 1].split()[:3] == [">", "1", "1.25"]
    assert lines[place + 1].split()[:2] == ["2", "1.25"]
    (gamble,) = (line for line in lines if line.startswith("Gamble: 1"))
    assert gamble.startswith("Gamble: 1 s a step, -20.0%")


def test_an_order_that_is_not_that_of_the_steps_is_explained(out):
    print_plans(make_console(out), [plan(1.3), plan(1.25)])
    assert "Ranked by the time exceeded in 10% of cases" in out.getvalue()
    out.truncate(0)
    print_plans(make_console(out), [plan(1.25), plan(1.3)])
    assert "Ranked by" not in out.getvalue()


def test_choices_without_evidence_are_told_in_words():
    evidence = Evidence(
        grade=EvidenceGrade.STACKED,
        measured=(),
        formula=("parameters~1e11.5 with devices~4096", "part=H800 with overlap=ep", "cp"),
    )
    assert describe_evidence(evidence) == (
        "published runs made each of its choices, but not every pair together: about 316B "
        "parameters with about 4,096 devices, H800 with overlap=ep and 1 more"
    )


def test_constants_of_one_source_share_a_row(out):
    base = plan()
    twice = replace(base.estimate.assumptions[0], name="second", value="7")
    estimate = replace(base.estimate, assumptions=(*base.estimate.assumptions, twice))
    _print(out, replace(base, estimate=estimate))
    (row,) = [line for line in out.getvalue().splitlines() if "short runs" in line]
    assert row.rstrip().endswith("host_s_per_layer_microbatch 410 us, second 7")


@pytest.mark.parametrize(
    ("flops", "text"),
    [
        (1.242e18, "1,242 PFLOP"),
        (1.5e20, "150,000 PFLOP"),
        (1.466e11, "146.6 GFLOP"),
        (12.5, "1.25e-05 MFLOP"),
    ],
)
def test_flops_are_shown_in_the_unit_that_fits(flops, text):
    assert format_flops(flops) == text


def test_no_plan_is_stated_with_the_rules_that_rejected(out):
    print_plans(make_console(out), (), rejected=(("memory above capacity", 7),))
    assert "No legal layout fits." in out.getvalue()
    assert "memory above capacity" in out.getvalue()


def test_brackets_of_a_layout_are_not_taken_for_markup(out):
    print_plans(
        make_console(out),
        (plan(),),
        verbose=True,
        rejected=(("[bold]rule[/]", 1),),
        why=("why [red]not[/]",),
    )
    assert "[bold]rule[/]" in out.getvalue()
    assert "why [red]not[/]" in out.getvalue()


def test_estimate_tables_add_up(out):
    _print(out, plan())
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 120
    assert any("verdict   fits: peak 338 MiB of 4 GiB on pipeline rank 0" in line for line in lines)
    (experts,) = [line.split() for line in lines if line.startswith(" total")]
    assert float(experts[-1]) == pytest.approx(ledger(0).device_bytes / 2**20, abs=0.01)
    assert sum(map(float, experts[1:-1])) == pytest.approx(float(experts[-1]), abs=0.05)
    (activations,) = [line.split() for line in lines if line.startswith(" activations")]
    assert activations[1:] == ["2.00", "31.00", "3.00", "84.00", "26.00", "9.00", "155.00"]
    (share,) = [line for line in lines if line.startswith(" experts ") and "%" in line]
    assert "440 ms" in share
    assert "34.1%" in share


def test_the_widest_memory_table_fits_and_the_peak_stage_is_the_one_shown(out):
    rows = tuple(
        MemoryRow(component=component, module=module, bytes=3 * GIB)
        for component in Component
        for module in Module
    )
    wide = replace(ledger(0), pp_rank=1, memory=rows)
    piped = replace(estimate(), ledgers=(ledger(0), wide), peak_rank=1)
    _print(out, replace(plan(), estimate=piped))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 120
    assert any("Memory of pipeline rank 1, GiB" in line for line in lines)
    assert not any("…" in line for line in lines)
    assert f"0: 338 MiB  1: {3 * (len(rows) - len(Module))} GiB" in out.getvalue()


@pytest.mark.parametrize("width", [20, 40, 80, 120])
def test_no_table_is_cut_however_narrow_the_console(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """Words are there in one piece, and lines are longer than the console for words alone."""
    monkeypatch.setattr(console, "PIPED_WIDTH", width)
    draws = random.Random(width)
    layout = "tp2,pp8,vpp2,ep8,mbs1,recompute=layernorm+moe_act,layout='Et*4|(t*5|)*2tL'"
    for columns in range(1, 14):
        stream = io.StringIO()
        names = [f"column{at}" for at in range(columns)]
        table = console.make_table(*names, text_columns=names[::3], title="A title of it")
        cells = [draws.choice((layout, "12,345.6 s", "word", "")) for _ in names]
        table.add_row(*cells)
        console.make_console(stream).print(table)
        printed = stream.getvalue()
        words = " ".join(printed.split())
        assert "…" not in printed
        assert all(cell in words for cell in cells)
        assert all(name in printed for name, cell in zip(names, cells, strict=True) if cell)
        assert all(
            len(line) <= width or any(len(word) + 10 > width for word in line.split("  "))
            for line in printed.splitlines()
        )


def test_verbs_cut_nothing_at_eighty_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "PIPED_WIDTH", 80)
    for command in (
        ["models"],
        ["hardware"],
        ["hardware", "H100"],
        ["estimate", "OLMoE-1B-7B-0924", "--on", "4xH100", "--layout", "ep4", "-v"],
    ):
        assert main(command) in (0, 3)
        lines = capsys.readouterr().out.splitlines()
        assert not [line for line in lines if "…" in line], command


@pytest.mark.parametrize("count", [0, 3, 30, 200])
def test_an_answer_is_a_screen_whatever_its_reasons(count: int) -> None:
    """The last reasons are left out and counted; what is not a reason stays."""
    out = io.StringIO()
    screen = make_console(out)
    reasons = [f"reason {number} " + "word " * (number % 40) for number in range(count)]

    def draw(shown: Sequence[str]) -> None:
        for line in ("first", *shown, "last"):
            screen.print(line)

    print_on_a_screen(screen, reasons, draw)
    lines = out.getvalue().splitlines()
    assert sum(-(-len(line) // screen.width) for line in lines) <= 40
    assert (lines[0], lines[-1]) == ("first", "last")
    kept = sum(line.startswith("reason ") for line in lines)
    assert kept == count or lines[-2] == f"{count - kept} reasons more with -v"
