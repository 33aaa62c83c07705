"""What stands behind an estimate and a pick: measured choices, own runs, how far it may be off.

Runs of one's own beside a prediction: what no constant explains of them holds for runs alike. A fit
leaves a part of each run open, log(measured / predicted). Runs that make the same choices share it:
its covariance is LEFT_OPEN_SD^2 * exp(-distance), where the distance sums over choices that one of
the two runs makes and the other does not. This is simple kriging over choices (Matheron 1963;
Kennedy and O'Hagan 2001, who call it a model's discrepancy). What all layouts of a job share, its
model, part and precision, tells runs apart four times as much as a choice among layouts, so that
what is carried over is mostly a level of the job, and its layouts keep the order that constants
give them: single runs tell little of an order. The numbers are those of runs of one publisher,
docs/log/planner_accuracy.md.

How far a prediction may be off: intervals of time and memory, and the probability of fitting.
Residuals of runs that a fit has not seen have heavy tails: the interval of a step is that of the
exponential of a Student's t of four degrees of freedom around its prediction, that of a peak is of
such a t. The bound that ranks layouts and the probability of fitting take a normal variable. They
work on numbers and on arrays alike, so that the search ranks by what an estimate states.

The evidence for an estimate: which choices of a job measured runs made, alone and together.
data/measured_choices.csv has one line for each set of choices that published runs made, with their
number; docs/tools/measured_choices.py writes it.

What is to be expected of a layout that was picked from many, and which of two it tells apart. A
search finds what the model prices too low: the true step of its pick lies above the predicted one
even where predictions are right on average (the winner's curse; Smith and Winkler 2006, "The
optimizer's curse"). Errors of layouts alike are alike and cancel in a choice, those of choices that
no run made do not. Both are those of the intervals: what a fit leaves open fades with the choices
in which two layouts differ (cost.own_runs), and missing choices and pairs add theirs where both
layouts make them.
"""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from itertools import combinations
from math import acos, cos, erf, exp, log, log10, sqrt
from statistics import NormalDist

import numpy as np

from moewright.cost.constants import Constants
from moewright.cost.stage_parts import Array
from moewright.rules.job import Job
from moewright.rules.shapes.parameters import count_parameters
from moewright.spec.hardware import Hardware, OwnRun
from moewright.spec.layout import LAYOUT_FIELDS, CpComm, ExpertPlacement, Layout, Schedule
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Evidence, EvidenceGrade
from moewright.spec.units import SourceKind
from moewright.spec.workload import Dtype, ExpertKernels, Task, Workload

LEFT_OPEN_SD = 0.14  # of log(measured / predicted), where no run alike is known
JOB_FADING = 0.2  # a choice that all layouts of a job share, such as its model
LAYOUT_FADING = 0.05  # any other: of the layout, the number of devices and their network


def choice_distance(choices: Iterable[str]) -> float:
    """Return how far two runs lie apart of which one makes these choices and the other does not."""
    return sum(JOB_FADING if is_shared_by_layouts(choice) else LAYOUT_FADING for choice in choices)


def likeness(distances: Array | float) -> Array:
    """Return the correlation of what is left open of two runs, by their distance."""
    return np.asarray(np.exp(-np.asarray(distances, dtype=float)))


def run_distances(choices: Sequence[Collection[str]], others: Sequence[Collection[str]]) -> Array:
    """Return the distances of runs, by their choices [choices, others]."""
    sets = [frozenset(other) for other in others]
    rows = [[choice_distance(other.symmetric_difference(run)) for other in sets] for run in choices]
    return np.array(rows, dtype=float).reshape(len(choices), len(sets))


def own_run_factor(own_runs: Sequence[OwnRun], distances: Array) -> Array:
    """Return the factor of predicted seconds, by the distance to each own run.

    `distances` is [..., own runs].
    """
    weights = np.array([run.weight.value for run in own_runs])
    return np.asarray(np.exp(likeness(distances) @ weights))


def job_factor(job: Job, hardware: Hardware) -> float:
    """Return the factor of a job's predicted seconds; 1 where the hardware has no own runs."""
    if not hardware.own_runs:
        return 1.0
    own = [run.choices for run in hardware.own_runs]
    distances = run_distances([list_choices(job, hardware)], own)
    return float(own_run_factor(hardware.own_runs, distances)[0])


_STANDARD = NormalDist()


def step_deviation(constants: Constants, choices: Array | int, pairs: Array | int) -> Array:
    """Return the standard deviation of the logarithm of a step's seconds.

    The choices that no run made, and the pairs that no run made together, add theirs in squares.
    """
    variance = (
        constants["step_time_sd"] ** 2
        + constants["choice_time_sd"] ** 2 * choices
        + constants["pair_time_sd"] ** 2 * pairs
    )
    return np.sqrt(variance)


def step_bound(step_s: float, step_sd: Array | float, risk: float) -> Array:
    """Return the seconds that a step exceeds with a probability of `risk`."""
    return np.asarray(step_s * np.exp(_STANDARD.inv_cdf(1 - risk) * step_sd))


def step_interval(step_s: float, step_sd: float, share: float) -> tuple[float, float]:
    """Return the seconds between which a step lies with a probability of `share`."""
    factor = exp(tail_width(share) * step_sd)
    return step_s / factor, step_s * factor


def peak_interval(peak_bytes: float, sd_bytes: float, share: float) -> tuple[float, float]:
    """Return the bytes between which a peak lies with a probability of `share`; never below 0."""
    half_bytes = tail_width(share) * sd_bytes
    return max(0.0, peak_bytes - half_bytes), peak_bytes + half_bytes


def fit_probability(margin_bytes: float, sd_bytes: float) -> float:
    """Return the probability that a peak stays within capacity, `margin_bytes` above the mean."""
    if sd_bytes <= 0:
        return float(margin_bytes >= 0)
    return 0.5 * (1 + erf(margin_bytes / sd_bytes / sqrt(2)))


def needed_margin(sd_bytes: Array, probability: float) -> Array:
    """Return the bytes between mean peak and capacity at which a layout fits so probably."""
    return _STANDARD.inv_cdf(probability) * sd_bytes


def tail_width(share: float) -> float:
    """Return the deviations on either side that hold a share of a Student's t.

    It has four degrees of freedom, of which the quantile is known in closed form.
    """
    probability = (1 + share) / 2
    alpha = 4 * probability * (1 - probability)
    # Shaw (2006): the quantile of t with 4 degrees of freedom, the root of a cubic equation.
    ratio = cos(acos(sqrt(alpha)) / 3) / sqrt(alpha)
    return 2 * sqrt(ratio - 1)


JOIN = " with "  # between the two choices of a pair
OWN_RATES = "rates of this machine"
# What stands before "=" or "~" in choices that all layouts of a job share.
_SHARED_BY_LAYOUTS = frozenset(
    (
        "parameters",
        "attention",
        "moe",
        "dense",
        "part",
        "precision",
        "experts",
        "mtp",
        "mixer",
        "task",
    )
)
# What a run shares with a job for which it proves a layout.
_PROOF = frozenset(("moe", "dense", "part", "precision"))
_PLAIN_PRECISION = f"precision={Dtype.BF16.value}"
_USUAL_SCHEDULES = (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED)


@dataclass(frozen=True, kw_only=True)
class MeasuredChoices:
    """The sets of choices that measured runs made, with the number of runs of each."""

    runs: tuple[tuple[frozenset[str], int], ...]

    @cached_property
    def companions(self) -> Mapping[str, frozenset[str]]:
        """The choices that runs made beside each choice that any run made, itself included."""
        companions: dict[str, set[str]] = {}
        for made, _ in self.runs:
            for name in made:
                companions.setdefault(name, set()).update(made)
        return {name: frozenset(names) for name, names in companions.items()}

    def support(self, choices: Iterable[str]) -> Evidence:
        """Return what these runs say of a job with such choices."""
        # Each once, in order: a choice that a job yields twice is one piece of evidence.
        names = tuple(dict.fromkeys(choices))
        measured = self.companions
        missing = [name for name in names if name not in measured]
        pairs = [
            f"{first}{JOIN}{second}"
            for first, second in combinations(names, 2)
            if first in measured and second in measured and second not in measured[first]
        ]
        runs = self.count_runs(names)
        grade = EvidenceGrade.COMBINED
        if runs:
            grade = EvidenceGrade.MEASURED
        elif missing:
            grade = EvidenceGrade.FORMULA
        elif pairs:
            grade = EvidenceGrade.STACKED
        return Evidence(
            grade=grade,
            runs=runs,
            measured=tuple(name for name in names if name in measured),
            formula=(*missing, *pairs),
        )

    def select_alike(self, choices: Iterable[str]) -> MeasuredChoices:
        """Return the runs on the part of a job, with experts where it has them.

        `choices` are those of the job (job_choices). Runs of a narrow precision are those of the
        same; what runs in a narrow one runs in bf16.
        """
        wanted = {name for name in choices if name.partition("=")[0] in _PROOF}
        wanted.discard(_PLAIN_PRECISION)
        return MeasuredChoices(runs=tuple(run for run in self.runs if run[0].issuperset(wanted)))

    def count_runs(self, choices: Iterable[str]) -> int:
        """Count the runs that made all of these choices together."""
        names = frozenset(choices)
        return sum(count for made, count in self.runs if made.issuperset(names))

    def list_names(self) -> tuple[str, ...]:
        """List the choices that any run made, sorted."""
        return tuple(sorted(self.companions))

    def tabulate_missing_pairs(self) -> Array:
        """Return 1 where no run made two choices together, else 0, in the order of list_names."""
        names = self.list_names()
        made = np.array([[name in choices for name in names] for choices, _ in self.runs])
        # As floats: NumPy has no fast product of integers or booleans.
        counts = made.T.astype(float) @ made
        missing = (counts == 0).astype(float)
        return np.asarray(missing)


@cache
def read_measured_choices() -> MeasuredChoices:
    """Read the choices of the published runs that ship with the package."""
    text = resources.files("moewright.cost").joinpath("data/measured_choices.csv").read_text()
    rows = csv.DictReader(text.splitlines())
    return MeasuredChoices(
        runs=tuple((frozenset(row["choices"].split()), int(row["runs"])) for row in rows)
    )


def judge_evidence(job: Job, hardware: Hardware) -> Evidence:
    """Return which choices of a job measured runs support.

    A CPU is priced by its own measured rates; no published run used one.
    """
    if not hardware.device.kind.is_accelerator:
        kinds = {rate.curve.kind for rate in hardware.device.rates}
        if SourceKind.MEASURED in kinds:
            return Evidence(grade=EvidenceGrade.COMBINED, measured=(OWN_RATES,))
        return Evidence(grade=EvidenceGrade.FORMULA, formula=("rates of the device",))
    choices = list_choices(job, hardware)
    return read_measured_choices().support(choices)


def count_proofs(job: Job, hardware: Hardware) -> int:
    """Count the published runs that prove a layout.

    They ran on the part, with experts where the job has them, and made all choices of the layout
    together (MeasuredChoices.select_alike).
    """
    of_job = job_choices(job.model, job.workload, hardware)
    alike = read_measured_choices().select_alike(of_job)
    return alike.count_runs(layout_choices(job.layout, hardware))


def count_runs_in(precision: Dtype, hardware: Hardware) -> int:
    """Count the published runs on a part that multiplied in a format."""
    part = f"part={hardware.device.name.split()[0]}"
    return read_measured_choices().count_runs((part, f"precision={precision.value}"))


def count_missing(evidence: Evidence) -> tuple[int, int]:
    """Count the choices that no run made, and the pairs that no run made together."""
    pairs = sum(JOIN in name for name in evidence.formula)
    return len(evidence.formula) - pairs, pairs


def list_choices(job: Job, hardware: Hardware) -> tuple[str, ...]:
    """List the choices of a job that decide how it is priced, a word each.

    Sizes fall into classes: parameters by half decades, devices by powers of four.
    """
    return (*job_choices(job.model, job.workload, hardware), *layout_choices(job.layout, hardware))


def is_shared_by_layouts(choice: str) -> bool:
    """Return whether a choice is of the model, the part or the precision of a job.

    Those of a layout are not, nor the number of devices and their network.
    """
    return choice.partition("=")[0].partition("~")[0] in _SHARED_BY_LAYOUTS


def job_choices(model: ModelSpec, workload: Workload, hardware: Hardware) -> Iterator[str]:
    """Yield the choices of a job that hold for all its layouts."""
    parameters = count_parameters(model).total
    yield f"parameters~1e{round(2 * log10(parameters)) / 2:g}"
    yield f"attention={model.attention.kind.value}"
    yield "moe" if model.moe_layer_count else "dense"
    yield f"part={hardware.device.name.split()[0]}"
    yield f"devices~{4 ** round(log(hardware.count, 4))}"
    yield f"precision={workload.precision.value}"
    if hardware.fabric.domain_size < hardware.count:
        yield f"network={hardware.fabric.network}"
    if workload.trainer.attention_backend.keeps_scores:
        yield "attention=unfused"
    if model.moe_layer_count and workload.trainer.expert_kernels is not ExpertKernels.GROUPED:
        yield f"experts={workload.trainer.expert_kernels.value}"
    if workload.trainer.bf16_first_layers or workload.trainer.bf16_last_layers:
        yield "precision=mixed-layers"
    yield from (f"{name}=bf16" for name in workload.trainer.bf16_products)
    yield from (f"{name}=narrow" for name in workload.trainer.narrowed)
    if model.mtp_layers:
        yield "mtp"
    if model.recurrent is not None:
        yield f"mixer={model.recurrent.kind.value}"
    if model.attention.indexer is not None:
        yield "mixer=indexed"
    if workload.fine_tuning.task is Task.LORA:
        yield "task=lora"


def layout_choices(layout: Layout, hardware: Hardware) -> Iterator[str]:
    """Yield the choices of a layout, those that take part of its default left out."""
    yield from (name for name in ("tp", "cp", "pp", "vpp", "etp") if getattr(layout, name) > 1)
    if layout.ep > 1:
        yield "ep" if layout.ep * layout.etp <= hardware.fabric.domain_size else "ep-between"
        yield f"dispatcher={layout.dispatcher.value}"
    if layout.mbs > 1:
        yield "mbs>1"
    if layout.zero != 1:
        yield f"zero={layout.zero}"
    if layout.pp > 1 and layout.schedule not in _USUAL_SCHEDULES:
        yield f"schedule={layout.schedule.value}"
    if layout.cp > 1 and layout.cp_comm is not CpComm.P2P:
        yield f"cp_comm={layout.cp_comm.value}"
    yield from (
        field.name
        for field in LAYOUT_FIELDS
        if field.facts.is_priced and getattr(layout, field.name) != field.default
    )
    if layout.expert_placement is not ExpertPlacement.CONTIGUOUS or layout.spare:
        yield "placement"
    yield from (f"recompute={name.value}" for name in layout.recompute)
    yield from (f"offload={name.value}" for name in layout.offload)
    yield from (f"overlap={name.value}" for name in layout.overlap)
    yield from (f"graphs={name.value}" for name in layout.graphs)


# Deviations of a difference up to which it decides nothing: the faster layout is so with a
# probability of three in five.
TIE = 0.25
_DRAWS = 2048
_SEED = 31


def error_covariance(
    choices: Sequence[Sequence[str]], unproven: Sequence[Sequence[str]], constants: Constants
) -> Array:
    """Return the covariance [layouts, layouts] of the logarithms of measured over predicted steps.

    `choices` are those of each layout, `unproven` the choices and pairs of each that no run made.
    """
    covariance = LEFT_OPEN_SD**2 * likeness(run_distances(choices, choices))
    names = sorted({name for missing in unproven for name in missing})
    made = np.array([[name in missing for name in names] for missing in unproven], dtype=float)
    sds = [constants["pair_time_sd" if JOIN in name else "choice_time_sd"] for name in names]
    return np.asarray(covariance + (made * np.square(sds)) @ made.T)


def expected_optimism(step_s: Sequence[float], covariance: Array) -> float:
    """Return how far the prediction of the fastest lies below its step, in logarithms, on average.

    Predictions are drawn around `step_s`, in pairs of errors of either sign, and the fastest of
    each draw is picked. The same input has the same answer.
    """
    logs = np.log(np.asarray(step_s, dtype=float))
    values, vectors = np.linalg.eigh(covariance)
    # Not Cholesky: layouts of equal choices make the matrix singular, and rounding negative.
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    half = np.random.default_rng(_SEED).standard_normal((_DRAWS // 2, len(logs))) @ root.T
    errors = np.concatenate((half, -half))
    picks = (logs + errors).argmin(axis=1)
    return float(-errors[np.arange(len(errors)), picks].mean())


def find_simplest(
    bounds_s: Sequence[float], choices: Sequence[Sequence[str]], burdens: Sequence[int]
) -> int:
    """Return the index of the simplest layout among those that tie with the fastest.

    A layout ties where it lies behind by less than TIE deviations of the two layouts' difference,
    by the errors of choices that runs made: bounds have the others in them. `burdens` count what
    each asks for: choices beside its default, and those without evidence.
    """
    first = int(np.argmin(bounds_s))
    behind = np.log(np.asarray(bounds_s) / min(bounds_s))
    distances = run_distances([choices[first]], choices)[0]
    # Var(a - b) = 2 s^2 (1 - r) of two errors of one deviation s and correlation r.
    difference_sd = LEFT_OPEN_SD * np.sqrt(2 * (1 - likeness(distances)))
    tied = np.flatnonzero(behind <= TIE * difference_sd)
    return min(tied.tolist(), key=lambda place: (burdens[place], bounds_s[place]))
