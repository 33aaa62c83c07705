"""The tuning procedure with simulated runs: what is kept, pruned and passed over, and its end."""

import random
from dataclasses import replace
from itertools import count
from math import exp, log
from statistics import NormalDist

import pytest

from moewright.codec import parse_layout
from moewright.search.space import no_objections
from moewright.spec.errors import BadInput
from moewright.spec.finding import Cause, Wall
from moewright.spec.options import TuningAxis
from moewright.spec.units import MIB, Sourced, SourceKind
from moewright.tuning.decisions import (
    PREDICTION_RULES,
    AcceptanceRules,
    Noise,
    Ruling,
    TuningPhase,
    estimate_noise,
    log_ratio_interval,
    t_quantile,
)
from moewright.tuning.journal import JOURNAL_FILE, Journal, read_journal
from moewright.tuning.procedure import Tuner
from moewright.tuning.space import TuningSpace, point_from_job, set_variable
from moewright.tuning.trials import (
    TrialFailure,
    TrialFinding,
    TrialLength,
    TrialOutcome,
    ValidationCheck,
    predict_outcome,
)
from sample_run import hardware, model, workload

AXES = (
    TuningAxis(key="ep", values=("1", "2")),
    TuningAxis(key="mbs", values=("1", "2", "4", "8")),
    TuningAxis(key="recompute", values=("none", "moe_act+layernorm", "full")),
    TuningAxis(key="bucket_elements", values=("100000", "40000000")),
)
FEW = AXES[1:3]
BAD_START = "mbs1,recompute=full,ep1,overlap=grad+param"
GOOD = (ValidationCheck(name="loss", passed=True, said="fine"),)


def space(axes=AXES, start=BAD_START, memory_bytes=0):
    machine = hardware(2)
    if memory_bytes:
        room = Sourced(value=memory_bytes, kind=SourceKind.ASSUMED, source="test")
        machine = replace(machine, device=replace(machine.device, memory_bytes=room))
    layout = parse_layout(start, world_size=2)
    return TuningSpace(
        model=model(),
        workload=workload(),
        hardware=machine,
        start=point_from_job(layout, workload()),
        axes=axes,
        allowed=no_objections,
    )


def true_s(point):
    """Return the seconds of a simulated machine.

    Unlike the planner's, spread experts and small buckets are the faster choice.
    """
    layout = point.layout
    seconds = 0.5 + 0.4 / layout.mbs + (0.2 if layout.ep == 1 else 0.0)
    seconds *= {0: 1.0, 2: 1.05}.get(len(layout.recompute), 1.3)
    return seconds * (1.0 if point.bucket_elements < 1_000_000 else 1.06)


class Machine:
    """A machine that runs points in `true_s` times noise, and records what it ran.

    It fails the points that `fails` names.
    """

    def __init__(
        self, noise=0.01, fails=lambda point: TrialFailure.NONE, checks=lambda point: GOOD
    ):
        self.requests = []
        self.noise = noise
        self.fails = fails
        self.checks = checks
        self.dice = random.Random(5)

    def __call__(self, request):
        self.requests.append((request.point, request.length, request.repeat))
        failure = self.fails(request.point)
        if failure is not TrialFailure.NONE:
            return TrialOutcome(
                failure=failure,
                said="no memory" if failure is TrialFailure.MEMORY else "broke",
                spent_s=1.0,
            )
        log_noise = self.noise * NormalDist().inv_cdf(self.dice.uniform(0.001, 0.999))
        seconds = true_s(request.point) * exp(log_noise)
        walls = (
            TrialFinding(wall=Wall.COMPUTE, cause=Cause.RECOMPUTE, title="recompute", share=0.2),
        )
        checks = self.checks(request.point) if request.length is TrialLength.VALIDATE else ()
        return TrialOutcome(
            step_s=seconds,
            wall_step_s=seconds,
            steps=request.length.steps,
            findings=walls if request.point.layout.recompute else (),
            checks=checks,
            spent_s=1.0,
        )


def tune(machine, tuning_space=None, rules=None, budget_s=0.0):
    return Tuner(
        tuning_space or space(),
        machine,
        rules=rules or AcceptanceRules(),
        budget_s=budget_s,
        watch=lambda result: None,
    ).run()


@pytest.fixture(scope="module")
def usual():
    """Return a tuning from the bad start, and the machine it ran on."""
    machine = Machine()
    return tune(machine), machine


def rulings(result, ruling):
    return [decision for decision in result.decisions if decision.ruling is ruling]


def test_a_bad_start_comes_within_a_twentieth_of_the_best_in_a_fifth_of_the_points(usual):
    tuning_space = space()
    result, _ = usual
    best = min(map(true_s, tuning_space.list_points()))
    assert len(tuning_space.list_points()) == 48
    assert true_s(result.winner) <= best / 0.95
    assert result.point_count <= 48 / 5
    assert result.total_interval.high < 0  # faster than the start beyond noise
    assert {phase for phase, _ in result.stops} == set(TuningPhase)


def test_every_candidate_runs_in_turns_with_the_incumbent(usual):
    result, machine = usual
    screened = [point for point, length, _ in machine.requests if length is TrialLength.SCREEN]
    assert screened[:3] == [result.start] * 3  # how far runs of one layout differ is seen first
    incumbent = rulings(result, Ruling.START)[0].point
    for decision in result.decisions:
        if decision.interval is not None:
            indices = [index for index, point in enumerate(screened) if point == decision.point]
            neighbours = [
                screened[max(0, index - 1) : index + 2]
                for index in indices[: decision.interval.pairs]
            ]
            assert len(neighbours) == decision.interval.pairs
            assert all(incumbent in runs for runs in neighbours)
        incumbent = decision.point if decision.ruling is Ruling.KEPT else incumbent


def test_one_variable_changes_at_a_time_after_scaling(usual):
    result, _ = usual
    incumbent = None
    for decision in result.decisions:
        if decision.phase is TuningPhase.RETUNE:
            reachable = {point for _, point in space().neighbours(incumbent)}
            assert decision.point in reachable
        if decision.ruling in (Ruling.START, Ruling.KEPT):
            incumbent = decision.point


def test_constants_are_fitted_to_every_trial():
    seen = []
    tuning = Tuner(
        space(),
        Machine(),
        rules=AcceptanceRules(),
        budget_s=0.0,
        watch=lambda _: seen.append(tuning.predictor.fitted_hardware),
    )
    result = tuning.run()
    assert len({str(hardware.constants) for hardware in seen}) > len(rulings(result, Ruling.KEPT))
    start = rulings(result, Ruling.START)[0]
    was = abs(log(start.predicted_s / start.step_s))
    assert abs(log(tuning.predictor.predict_step_s(start.point) / start.step_s)) < was


def test_noise_that_hides_a_gain_keeps_the_incumbent():
    flat = (TuningAxis(key="bucket_elements", values=("100000", "40000000")),)
    # 6 % are to be seen through runs that differ by half.
    result = tune(Machine(noise=0.5), space(flat))
    assert result.winner == result.start
    assert not rulings(result, Ruling.KEPT)


def test_what_runs_out_of_memory_prunes_all_that_needs_more():
    tuning_space = space(AXES[1:])  # of two sizes of buckets one at least needs what the other does
    machine = Machine(
        fails=lambda point: TrialFailure.MEMORY if point.layout.mbs >= 4 else TrialFailure.NONE
    )
    result = tune(machine, tuning_space)
    limits = [failed.predicted_peak_bytes for failed in rulings(result, Ruling.FAILED)]
    assert limits
    assert limits == sorted(limits, reverse=True)  # whatever ran after a failure needed less
    pruned = rulings(result, Ruling.PRUNED)
    assert pruned
    assert all(decision.predicted_peak_bytes >= min(limits) for decision in pruned)
    assert all(decision.run_count == 0 for decision in pruned)
    assert all("ran out" in decision.reason for decision in pruned)
    assert result.winner.layout.mbs < 4
    assert result.validated is not None


def test_what_is_predicted_not_to_fit_is_not_run():
    machine = Machine()
    small = space(FEW, memory_bytes=300 * MIB)
    result = tune(machine, small)
    requested = {point for point, _, _ in machine.requests}
    pruned = rulings(result, Ruling.PRUNED)
    assert all(decision.point not in requested for decision in pruned)
    assert any("predicted not to fit" in decision.reason for decision in pruned)


def test_a_fault_that_is_not_of_memory_prunes_nothing_else():
    broken = set_variable(set_variable(space().start, "mbs", "8"), "recompute", "none")
    result = tune(
        Machine(fails=lambda point: TrialFailure.OTHER if point == broken else TrialFailure.NONE),
        space(FEW),
    )
    assert [decision.point for decision in rulings(result, Ruling.FAILED)] in ([broken], [])
    assert not rulings(result, Ruling.PRUNED)


def test_a_start_that_does_not_run_gives_way_to_the_planners_own():
    start = space().start
    result = tune(
        Machine(fails=lambda point: TrialFailure.OTHER if point == start else TrialFailure.NONE),
        space(FEW),
    )
    assert result.decisions[0].ruling is Ruling.FAILED
    assert rulings(result, Ruling.START)[0].point != start
    assert result.winner is not None
    nothing = tune(Machine(fails=lambda _: TrialFailure.OTHER))
    assert nothing.winner is None
    assert nothing.stops == ((TuningPhase.FIT, "no layout of the planner's first ones runs"),)


def test_a_winner_that_is_not_valid_gives_way_to_the_incumbent_before_it():
    bad = (ValidationCheck(name="loss", passed=False, said="no number"),)
    best = tune(Machine(), space(FEW)).winner
    result = tune(Machine(checks=lambda point: bad if point == best else GOOD), space(FEW))
    assert rulings(result, Ruling.INVALID)[0].point == best
    assert result.winner not in (None, best)
    assert tune(Machine(checks=lambda _: bad), space(FEW[:1])).winner is None


def test_a_spent_budget_ends_the_trials_and_the_winner_is_validated_all_the_same(usual):
    unlimited, _ = usual
    machine = Machine()
    # Trials take a second each, a validation of 53 steps as long as five of them.
    result = tune(machine, budget_s=11.0)
    assert result.run_count < unlimited.run_count
    assert any("budget" in why for _, why in result.stops)
    assert machine.requests[-1][1] is TrialLength.VALIDATE
    assert result.validated is not None
    least = tune(Machine(), budget_s=0.5)
    assert (least.winner, least.run_count) == (least.start, 2)  # one run, and its validation


def test_a_killed_tuning_goes_on_where_it_stood(tmp_path):
    def clock():
        ticks = count()
        return lambda: float(next(ticks))

    class KilledError(Exception):
        pass

    def dies(machine, after):
        def run_one(request):
            if len(machine.requests) == after:
                raise KilledError
            return machine(request)

        return run_one

    unbroken = Machine(noise=0.0)
    expected = tune(Journal(tmp_path / "unbroken", unbroken, clock()), space(FEW))
    first = Machine(noise=0.0)
    second = Machine(noise=0.0)
    with pytest.raises(KilledError):
        tune(Journal(tmp_path / "cut", dies(first, 6), clock()), space(FEW))
    with (tmp_path / "cut" / JOURNAL_FILE).open("a") as stream:
        stream.write('{"point": {"lay')  # killed while it wrote
    result = tune(Journal(tmp_path / "cut", second, clock()), space(FEW))
    assert first.requests + second.requests == unbroken.requests
    assert (result.winner, result.decisions) == (expected.winner, expected.decisions)
    again = Machine()
    assert tune(Journal(tmp_path / "cut", again, clock()), space(FEW)).winner == expected.winner
    assert not again.requests
    assert len(read_journal(tmp_path / "cut")) == len(unbroken.requests)


def test_a_damaged_journal_is_refused_by_its_line(tmp_path):
    (tmp_path / JOURNAL_FILE).write_text('{"point": 3}\n')
    with pytest.raises(BadInput, match=r"journal.jsonl:1"):
        read_journal(tmp_path)


def test_predictions_alone_decide_without_runs_of_the_start_or_validation():
    tuning_space = space()
    result = tune(predict_outcome, tuning_space, rules=PREDICTION_RULES)
    fastest = min(
        tuning_space.list_points(),
        key=lambda point: Tuner(
            tuning_space, predict_outcome, rules=PREDICTION_RULES, budget_s=0, watch=len
        ).predictor.predict_step_s(point),
    )
    assert result.winner == fastest
    assert result.validated is None
    assert result.noise.sd == 0
    assert "predicted" in dict(result.stops)[TuningPhase.VALIDATE]


def test_a_job_that_spells_nothing_out_is_searched_by_the_planner():
    tuning_space = space(axes=())
    result = tune(predict_outcome, tuning_space, rules=PREDICTION_RULES)
    first = rulings(result, Ruling.START)[0]
    last = rulings(result, Ruling.KEPT)[-1]
    assert last.predicted_s < first.predicted_s
    with pytest.raises(BadInput, match="spells nothing out"):
        tuning_space.list_points()


def test_the_space_holds_what_its_axes_reach_and_nothing_else():
    tuning_space = space()
    points = tuning_space.list_points()
    assert all(tuning_space.contains(point) for point in points)
    assert not tuning_space.contains(replace(points[0], gc_every_steps=7))
    assert not tuning_space.contains(set_variable(points[0], "mbs", "16"))
    assert not tuning_space.contains(set_variable(points[0], "overlap", "none"))


def test_students_t_is_that_of_the_tables():
    for degrees_of_freedom, expected in (
        (1, 12.706),
        (2, 4.303),
        (3, 3.182),
        (10, 2.228),
        (30, 2.042),
        (31, 2.040),
    ):
        assert t_quantile(0.975, degrees_of_freedom) == pytest.approx(expected, abs=6e-4)
    assert t_quantile(0.975, 100_000) == pytest.approx(NormalDist().inv_cdf(0.975), rel=1e-4)


def test_an_interval_narrows_with_pairs_and_widens_with_looks():
    noise = Noise(sd=0.05, degrees_of_freedom=6)
    single = log_ratio_interval([0.1], noise, looks=1)
    four = log_ratio_interval([0.1] * 4, noise, looks=1)
    assert single.high - single.low == pytest.approx(2 * (four.high - four.low))
    assert log_ratio_interval([0.1], noise, looks=5).high > single.high
    assert single.gain == pytest.approx(1 - exp(0.1))


def test_a_drift_of_the_machine_is_no_noise():
    steady = [[0.0, 0.1, 0.0, 0.1]]
    drifting = [[0.01 * number for number in range(40)]]
    assert estimate_noise(drifting, prior_sd=0.07, prior_degrees_of_freedom=2).sd < 0.03
    assert estimate_noise(steady, prior_sd=0.07, prior_degrees_of_freedom=2).sd == pytest.approx(
        0.0866, abs=1e-3
    )
    assert estimate_noise([], prior_sd=0.07, prior_degrees_of_freedom=2) == Noise(
        sd=0.07, degrees_of_freedom=2
    )
