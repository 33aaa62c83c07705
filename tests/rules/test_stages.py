import pytest

from model_shapes import moe_model, qwen3_235b
from moewright.rules.timetable.stages import (
    EvenSplit,
    check_stages,
    even_layout_string,
    pipeline_chunks,
    vpp_choices,
)
from moewright.spec.errors import BadInput
from moewright.spec.layout import Layout, Schedule
from moewright.spec.stage_string import parse_stages


def layout(*, pp: int, vpp: int = 1, stages: str = "") -> Layout:
    schedule = Schedule.INTERLEAVED if vpp > 1 else Schedule.ONE_F_ONE_B
    return Layout(world_size=pp, pp=pp, vpp=vpp, stages=stages, schedule=schedule)


def test_vpp_choices() -> None:
    assert vpp_choices(24, 4) == (1, 2, 3, 6)
    assert vpp_choices(94, 8, split=EvenSplit.EMBEDDING_AND_LOSS) == (1, 2, 3, 4, 6, 12)
    assert vpp_choices(94, 32, split=EvenSplit.EMBEDDING_AND_LOSS) == (1, 3)
    assert vpp_choices(94, 8) == vpp_choices(94, 32) == ()
    assert vpp_choices(94, 1) == (1,)


def test_an_even_split_deals_chunks_round_the_ranks() -> None:
    result = pipeline_chunks(moe_model(layers=8, mtp=1), layout(pp=2, vpp=2))
    assert [(c.pp_rank, c.vpp_rank, c.layers) for c in result] == [
        (0, 0, (0, 1)),
        (1, 0, (2, 3)),
        (0, 1, (4, 5)),
        (1, 1, (6, 7)),
    ]
    assert [c.has_embedding for c in result] == [True, False, False, False]
    assert [(c.has_loss, c.mtp_layers) for c in result] == [(False, 0)] * 3 + [(True, 1)]


def test_94_layers_run_where_embedding_and_loss_are_counted() -> None:
    by_eight = pipeline_chunks(qwen3_235b(), layout(pp=8))
    assert [len(c.layers) for c in by_eight] == [11, 12, 12, 12, 12, 12, 12, 11]
    by_ninety_six = pipeline_chunks(qwen3_235b(), layout(pp=32, vpp=3))
    assert [len(c.layers) for c in by_ninety_six] == [0] + [1] * 94 + [0]
    assert (by_ninety_six[-1].pp_rank, by_ninety_six[-1].vpp_rank, by_ninety_six[-1].has_loss) == (
        31,
        2,
        True,
    )


def test_a_layout_string_with_repeats() -> None:
    """docs/formulas.md 5: DeepSeek-V3 over 16 ranks."""
    text = "Et*3|(tt|)*29,m|L"
    stages = parse_stages(text)
    assert len(stages) == 32
    assert stages[:2] == (("E", "t", "t", "t"), ("t", "t"))
    result = pipeline_chunks(moe_model(layers=61, mtp=1), layout(pp=16, vpp=2, stages=text))
    assert sum(len(c.layers) for c in result) == 61
    assert sum(c.mtp_layers for c in result) == 1
    only_mtp = next(c for c in result if c.mtp_layers)
    assert (only_mtp.pp_rank, only_mtp.vpp_rank, only_mtp.layers, only_mtp.has_loss) == (
        14,
        1,
        (),
        False,
    )
    assert (result[-1].pp_rank, result[-1].vpp_rank, result[-1].layers, result[-1].has_loss) == (
        15,
        1,
        (),
        True,
    )
    assert result[1].layers == (3, 4)


@pytest.mark.parametrize(
    ("text", "letters"),
    [
        ("EttL", ("EttL",)),
        ("E|t|t|L", ("E", "t", "t", "L")),
        (" E t*2 , | |*2 t L ", ("Ett", "", "", "tL")),
        ("E((t|)*2|)*2L", ("Et", "t", "", "t", "t", "", "L")),
        ("E(t)L", ("EtL",)),
        ("Et*12|L", ("E" + "t" * 12, "L")),
    ],
)
def test_grammar(text: str, letters: tuple[str, ...]) -> None:
    assert tuple("".join(stage) for stage in parse_stages(text)) == letters


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("E(t|L", "not closed"),
        ("Et)|L", "without"),
        ("Ex|L", "none of E t m L"),
        ("Et*|L", "needs a count"),
        ("Et*0|L", "needs a count"),
        ("*3tL", "none of"),
        ("Et*999999999|L", "needs a count"),
        ("E((t*1000)*1000)*1000L", "more than 100000"),
        ("(" * 5000, "not closed"),
    ],
)
def test_bad_grammar(text: str, rule: str) -> None:
    with pytest.raises(BadInput, match=rule) as bad:
        parse_stages(text)
    assert len(str(bad.value)) < 300


@pytest.mark.parametrize(
    ("text", "mtp", "rule"),
    [
        ("ttE|tttttt|L|", 0, "start with E"),
        ("Etttt|Etttt||L", 0, "start with E"),
        ("Etttt|tttt|L|", 0, "end with L"),
        ("Etttt|ttttL||L", 0, "end with L"),
        ("Ettt|tttt||L", 0, "holds 7 t; the model has 8 layers"),
        ("Etttt|tttt||mL", 0, "holds 1 m; the model has 0"),
        ("Etttt|tttt||L", 1, "holds 0 m; the model has 1"),
        ("Etttt|ttt|mt|L", 1, "after all t"),
        ("Etttt|tttt|m|mL", 2, "one stage"),
        ("Etttt|tttt|m|L", 1, "pipeline rank 0"),
        ("Etttttttt|m||L", 1, "last chunk of its pipeline rank"),
    ],
)
def test_bad_layout_strings_name_the_rule_and_a_string_that_works(
    text: str, mtp: int, rule: str
) -> None:
    model = moe_model(layers=8, mtp=mtp)
    reasons = check_stages(model, layout(pp=2, vpp=2, stages=text))
    matching = [reason for reason in reasons if rule in reason.rule]
    assert matching, reasons
    assert check_stages(model, layout(pp=2, vpp=2, stages=matching[0].nearest)) == ()


def test_the_number_of_stages_is_pp_times_vpp() -> None:
    model = moe_model(layers=4)
    (vpp,) = check_stages(model, layout(pp=2, stages="Et|t|t|tL"))
    assert (vpp.field, vpp.value, vpp.nearest) == ("layout.vpp", "1", "2")
    (vpp,) = check_stages(moe_model(layers=4, mtp=1), layout(pp=2, stages="Et|t|t|tmL"))
    assert vpp.field == "layout.vpp"  # and no word on where m stands, which nobody can tell yet
    (stages,) = check_stages(model, layout(pp=2, stages="Et|tt|tL"))
    assert (stages.field, stages.nearest) == ("layout.stages", "Et*2|t*2L")


def test_an_impossible_even_split_shows_what_would_work() -> None:
    (reason,) = check_stages(qwen3_235b(), layout(pp=32, vpp=2))
    assert reason.field == "layout.vpp"
    assert reason.nearest == "1 or 3, or stages 'Et|(t*2|)*31(t|)*31L'"
    (reason,) = check_stages(moe_model(layers=61), Layout(world_size=16, pp=16))
    assert (reason.field, reason.value) == ("layout.pp", "16")
    string = reason.nearest.split("'")[1]
    assert check_stages(moe_model(layers=61), layout(pp=16, stages=string)) == ()
    with pytest.raises(BadInput, match="divides neither the 61 layers"):
        pipeline_chunks(moe_model(layers=61), layout(pp=16))


def test_layout_string_reads_well() -> None:
    assert even_layout_string(94, mtp=0, stages=4) == "Et*23|(t*24|)*2t*23L"
    assert even_layout_string(61, mtp=1, stages=16) == "Et*3|(t*4|)*14t*2mL"
    assert even_layout_string(3, mtp=0, stages=1) == "Et*3L"
