"""A fit of the time model's constants to measured runs, with priors, bounds and uncertainties.

A constant is prior * exp(shared + own parts), with an own part for each group that a run belongs
to: its device, its publisher, its network. Spreads of own parts pool the groups in part: many runs
of one publisher move its own part, and the shared part only as far as publishers agree. The fit
minimises the sum of squares of log(predicted / measured) over its noise, robust against rows that
nothing explains (Huber), and of every shift over its spread (Gauss-Newton). The inverse of the
second derivative at the minimum says how uncertain each constant stays.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import exp, log, sqrt

import numpy as np
import numpy.typing as npt

from moewright.calibration.readings import PricedStep
from moewright.cost.constants import Constants
from moewright.spec.hardware import Constant, Hardware
from moewright.spec.units import Sourced, SourceKind

# Standard deviation of the logarithm of a step's time, of a row that the model describes in full:
# repeats differ by 0-5 %, and more between releases.
RUN_NOISE = 0.05
_HUBER = 1.5
_STEP = 0.02  # for derivatives by differences, in the logarithm of a constant
_LARGEST_MOVE = 0.5
_MAX_ITERATIONS = 8
_LAST_JACOBIAN = 1  # the iteration after which derivatives stay as they are
_REWEIGHTINGS = 12
_CONVERGED = 0.003
# Spread of constants that were fitted on published runs already, over the neutral spread.
_HARDWARE_PRIOR_SHARE = 0.6

Vector = npt.NDArray[np.float64]


class Level(StrEnum):
    """The groups of runs that may have a part of a constant of their own."""

    PART = "part"
    PUBLISHER = "publisher"
    NETWORK = "network"


Group = tuple[Level, str]  # such as (PART, "H100")


class PriorCentre(StrEnum):
    """The values that the priors are centred on."""

    NEUTRAL = "neutral"  # round numbers, and kernel tables as they are
    HARDWARE = "hardware"  # the constants that the hardware has already


@dataclass(frozen=True, kw_only=True, slots=True)
class FreeConstant:
    """A constant that the fit may change.

    Spreads are standard deviations of its logarithm: of the part that all runs share, and of the
    own parts of devices (`site_spread`), publishers and networks; 0 means that these have none.
    `machine_spread` is that of the shared part for runs of one's own, where it is wider: a machine
    may be slower than every published part. `tied_names` are constants that take its value.
    """

    name: str
    prior: float
    spread: float
    site_spread: float = 0.0
    publisher_spread: float = 0.0
    network_spread: float = 0.0
    machine_spread: float = 0.0
    low: float = 0.0
    high: float = float("inf")
    tied_names: tuple[str, ...] = ()

    def shared_spread(self, centre: PriorCentre) -> float:
        """Return the spread of the part that all runs share."""
        if centre is PriorCentre.HARDWARE:
            return max(self.spread, self.machine_spread)
        return self.spread

    def own_spread(self, level: Level) -> float:
        """Return the spread of the own parts of groups at a level."""
        return {
            Level.PART: self.site_spread,
            Level.PUBLISHER: self.publisher_spread,
            Level.NETWORK: self.network_spread,
        }[level]


# Kernel tables are of one kernel on an idle part; in training the part is hot, operands are random
# and operations alternate. The scales of products lie close to what dense runs of six parts agree
# on.
FREE_CONSTANTS = (
    FreeConstant(
        name="gemm_time_scale",
        prior=1.1,
        spread=0.05,
        site_spread=0.04,
        publisher_spread=0.03,
        machine_spread=0.25,
    ),
    FreeConstant(
        name="gemm_8bit_time_scale",
        prior=1.08,
        spread=0.06,
        site_spread=0.05,
        publisher_spread=0.03,
        machine_spread=0.25,
    ),
    FreeConstant(name="gemm_mx_time_scale", prior=1.1, spread=0.05),
    FreeConstant(name="grouped_gemm_time_scale", prior=1.0, spread=0.1, machine_spread=0.2),
    FreeConstant(name="sink_attention_time_scale", prior=5.0, spread=0.3),
    FreeConstant(name="scan_time_scale", prior=2.0, spread=0.3),
    FreeConstant(
        name="attention_time_scale",
        prior=1.0,
        spread=0.15,
        tied_names=("attention_backward_time_scale",),
    ),
    FreeConstant(name="elementwise_time_scale", prior=1.3, spread=0.2, publisher_spread=0.1),
    FreeConstant(name="weight_traffic_time_scale", prior=0.5, spread=0.4, high=1.2),
    # 6 ms in quadrature with the device are 4.7 ms at an exponent of 1.5; it was 8.3 ms a year
    # before.
    FreeConstant(
        name="host_s_per_layer_microbatch",
        prior=4.7e-3,
        spread=0.4,
        site_spread=0.15,
        publisher_spread=0.2,
    ),
    FreeConstant(name="host_per_year", prior=1.3, spread=0.1, low=1.0, high=2.0),
    FreeConstant(name="host_s_per_narrow_expert", prior=1e-4, spread=0.4),
    FreeConstant(name="host_dense_layer_share", prior=0.5, spread=0.3, high=1.0),
    FreeConstant(name="host_exponent", prior=1.9, spread=0.1, low=1.0, high=3.0),
    FreeConstant(name="host_exponent_synced", prior=1.3, spread=0.1, low=1.0, high=3.0),
    FreeConstant(name="host_exponent_unblocked", prior=2.5, spread=0.25, low=1.0, high=6.0),
    FreeConstant(name="host_graphed_attention", prior=0.25, spread=0.3, high=0.5),
    FreeConstant(name="host_graphed_router", prior=0.3, spread=0.3, high=0.5),
    FreeConstant(name="ep_overlap_host", prior=1.25, spread=0.15, low=1.0, high=2.0),
    FreeConstant(name="tp_host", prior=1.2, spread=0.1, low=1.0, high=2.2),
    FreeConstant(name="dp_overlap_host", prior=1.05, spread=0.15, low=1.0, high=1.4),
    FreeConstant(name="sync_s_alltoall", prior=1e-3, spread=0.4),
    # Counts that the host polls for, and a map of the choices made by operations whose sizes it
    # waits for: from little to as much as the split sizes of a plain all-to-all.
    FreeConstant(name="sync_s_deepep", prior=2e-4, spread=1.0),
    FreeConstant(name="alltoall_inside_time_scale", prior=1.0, spread=0.12),
    FreeConstant(name="alltoall_between_time_scale", prior=1.1, spread=0.25, site_spread=0.15),
    FreeConstant(name="dedup_inside_time_scale", prior=0.9, spread=0.25, site_spread=0.1),
    FreeConstant(name="dedup_between_time_scale", prior=1.0, spread=0.25, site_spread=0.1),
    FreeConstant(name="efa_alltoall_share", prior=0.7, spread=0.2, high=1.0),
    FreeConstant(name="proxy_message_s", prior=1e-5, spread=0.4),
    FreeConstant(name="proxy_token_s", prior=2e-6, spread=0.4),
    FreeConstant(name="ep_overlap_hidden", prior=0.7, spread=0.25, high=0.95),
    FreeConstant(name="tp_time_scale", prior=0.75, spread=0.25, site_spread=0.1),
    FreeConstant(name="tp_overlap_hidden", prior=0.4, spread=0.4, high=0.9),
    FreeConstant(name="overlapped_dp_share", prior=0.25, spread=0.2, high=1.0),
    FreeConstant(name="natural_load_scale", prior=1.0, spread=0.3, low=0.3, high=3.0),
)


def run_groups(hardware: Hardware, *, publisher: str = "", network: str = "") -> tuple[Group, ...]:
    """Return the groups of a run; one that is not known is left out."""
    names = (
        (Level.PART, hardware.name),
        (Level.PUBLISHER, publisher),
        (Level.NETWORK, network),
    )
    return tuple((level, name) for level, name in names if name)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRun:
    """A measured step; `weight` is below 1 for a run that repeats another.

    `noise` is the standard deviation of the logarithm of its seconds that no constant explains.
    `choices` are those that its layout and job made (cost.evidence).
    """

    id: str
    prepared: PricedStep
    hardware: Hardware
    measured_s: float
    choices: tuple[str, ...] = ()
    weight: float = 1.0
    publisher: str = ""
    network: str = ""
    noise: float = RUN_NOISE

    @property
    def groups(self) -> tuple[Group, ...]:
        """Return the groups whose own parts of constants the run has."""
        return run_groups(self.hardware, publisher=self.publisher, network=self.network)


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedConstant:
    """A constant on one site: its prior and fitted value, with standard deviations of their log."""

    name: str
    prior: float
    value: float
    prior_sd: float
    sd: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _ConstantParts:
    """The unknowns of a fit: a shift for each (constant, group) in `parts`.

    A group of None is the part that all runs share. `priors` holds, by device, the values of the
    free constants that the shifts start from; `covered` are the groups whose spread the fit has in
    its covariance: those of its runs, and of the fit that it started from.
    """

    free_constants: tuple[FreeConstant, ...]
    parts: tuple[tuple[int, Group | None], ...]
    priors: Mapping[str, tuple[float, ...]]
    covered: frozenset[Group]

    def priors_on(self, groups: Sequence[Group]) -> tuple[float, ...]:
        """Return the priors of a device; the neutral ones where no run was measured."""
        for level, name in groups:
            if level is Level.PART and name in self.priors:
                return self.priors[name]
        return tuple(free.prior for free in self.free_constants)

    def members(self, groups: Sequence[Group]) -> npt.NDArray[np.bool_]:
        """Return which parts a run of these groups has [parts]."""
        return np.array([group is None or group in groups for _, group in self.parts])

    def values(self, groups: Sequence[Group], log_shifts: Vector) -> tuple[float, ...]:
        """Return the value of each free constant for a run of these groups, inside its bounds."""
        sums = [0.0] * len(self.free_constants)
        for (index, group), shift in zip(self.parts, log_shifts, strict=True):
            if group is None or group in groups:
                sums[index] += float(shift)
        return tuple(
            min(max(prior * exp(total), free.low), free.high)
            for free, prior, total in zip(
                self.free_constants, self.priors_on(groups), sums, strict=True
            )
        )

    def constants(
        self, groups: Sequence[Group], log_shifts: Vector, *, source: str
    ) -> tuple[Constant, ...]:
        """Return the constants of a run of these groups, those tied to a free one among them."""
        values = self.values(groups, log_shifts)
        return tuple(
            Constant(name=name, value=Sourced(value=value, kind=SourceKind.FITTED, source=source))
            for free, value in zip(self.free_constants, values, strict=True)
            for name in (free.name, *free.tied_names)
        )


class Fit:
    """Constants fitted to runs: for every site among them, and for others by what sites share."""

    __slots__ = (
        "_covariance",
        "_spreads",
        "errors",
        "jacobian",
        "log_shifts",
        "parts",
        "run_count",
    )

    def __init__(
        self,
        *,
        parts: _ConstantParts,
        run_count: int,
        spreads: Vector,
        log_shifts: Vector,
        covariance: Vector,
        jacobian: Vector,
        errors: Vector,
    ) -> None:
        self.parts = parts
        self._spreads = spreads
        self._covariance = covariance
        self.run_count = run_count
        self.log_shifts = log_shifts
        self.jacobian = jacobian
        self.errors = errors

    @property
    def free_constants(self) -> tuple[FreeConstant, ...]:
        return self.parts.free_constants

    def restrict_to_runs(self, indices: Sequence[int], errors: Vector | None = None) -> Fit:
        """Return this fit as the start of another on some of its runs, given by their indices.

        `errors` are `log_errors` of all its runs, where the other has these very runs.
        """
        return Fit(
            parts=self.parts,
            run_count=self.run_count,
            spreads=self._spreads,
            log_shifts=self.log_shifts,
            covariance=self._covariance,
            jacobian=self.jacobian[list(indices)],
            errors=np.zeros(0) if errors is None else errors[list(indices)],
        )

    def log_errors(self, runs: Sequence[MeasuredRun]) -> Vector:
        """Return log(predicted / measured) of every run."""
        return _log_residuals(runs, self.parts, self.log_shifts)

    def constants_for(
        self, hardware: Hardware, *, publisher: str = "", network: str = ""
    ) -> tuple[Constant, ...]:
        """Return what the fit says of every free constant on this hardware."""
        source = f"fit of {self.run_count} runs"
        groups = run_groups(hardware, publisher=publisher, network=network)
        return self.parts.constants(groups, self.log_shifts, source=source)

    def fitted_constants(self, site: str) -> tuple[FittedConstant, ...]:
        """Return every free constant on a site, the best known first."""
        return self._fitted_constants(site, self._covariance)

    def fitted_constants_after(self, run: MeasuredRun, site: str) -> tuple[FittedConstant, ...]:
        """Return the constants with the uncertainty that they would have after measuring `run`."""
        gradient = self.log_time_gradient(run)
        seen = self._covariance @ gradient
        # Sherman-Morrison: the covariance with one more row, without a fit.
        information = run.noise**2 + float(gradient @ seen)
        covariance = self._covariance - np.outer(seen, seen) / information
        return self._fitted_constants(site, covariance)

    def _fitted_constants(self, site: str, covariance: Vector) -> tuple[FittedConstant, ...]:
        groups = ((Level.PART, site),)
        priors = self.parts.priors_on(groups)
        values = self.parts.values(groups, self.log_shifts)
        members = self.parts.members(groups)
        constants = []
        for index, (free, prior, value) in enumerate(
            zip(self.free_constants, priors, values, strict=True)
        ):
            is_constant = np.array([part == index for part, _ in self.parts.parts])
            is_part = np.where(members & is_constant, 1.0, 0.0)
            prior_sd = sqrt(float((is_part * self._spreads**2).sum()))
            # The logarithm of a value is the sum of its shared and own parts, which are correlated.
            sd = sqrt(float(is_part @ covariance @ is_part))
            constants.append(
                FittedConstant(name=free.name, prior=prior, value=value, prior_sd=prior_sd, sd=sd)
            )
        return tuple(sorted(constants, key=lambda constant: constant.sd / constant.prior_sd))

    def log_time_gradient(self, run: MeasuredRun) -> Vector:
        """Return how the log of a run's predicted seconds moves with each part of each constant."""
        rows = _jacobian([run], self.parts, self.log_shifts)
        gradient: Vector = rows[0]
        return gradient

    def log_time_sd(self, run: MeasuredRun) -> float:
        """Return the standard deviation of the log of a run's seconds, from the constants alone.

        A group that the fit knows nothing of adds the spread of the own part that it would have.
        """
        gradient = self.log_time_gradient(run)
        variance = float(gradient @ self._covariance @ gradient)
        by_constant = {
            index: slope
            for (index, group), slope in zip(self.parts.parts, gradient, strict=True)
            if group is None
        }
        for level, _ in set(run.groups) - self.parts.covered:
            variance += sum(
                (slope * self.free_constants[index].own_spread(level)) ** 2
                for index, slope in by_constant.items()
            )
        return sqrt(variance)


def fit_constants(
    runs: Sequence[MeasuredRun],
    *,
    free_constants: tuple[FreeConstant, ...] = FREE_CONSTANTS,
    centre: PriorCentre = PriorCentre.NEUTRAL,
    start: Fit | None = None,
) -> Fit:
    """Fit the constants to the runs; the priors decide what few runs leave open.

    `start` is a fit of these runs and others: its constants and derivatives are the first guess,
    which makes cross-validation fast.
    """
    unknowns = _build_parts(runs, free_constants, centre, start)
    prior_share = _HARDWARE_PRIOR_SHARE if centre is PriorCentre.HARDWARE else 1.0
    spreads = np.array(
        [
            prior_share * _spread(free_constants[index], group, centre)
            for index, group in unknowns.parts
        ]
    )
    log_shifts = start.log_shifts.copy() if start else np.zeros(len(unknowns.parts))
    # Residuals in deviations of their own noise.
    weights = np.array([run.weight / run.noise for run in runs])
    jacobian = None
    errors = np.zeros(0)
    if start is not None and len(start.jacobian) == len(runs):
        jacobian = start.jacobian
        errors = start.errors
    hessian = np.diag(1 / spreads**2)
    for iteration in range(_MAX_ITERATIONS):
        if iteration or len(errors) != len(runs):
            errors = _log_residuals(runs, unknowns, log_shifts)
        if jacobian is None or (start is None and iteration <= _LAST_JACOBIAN):
            jacobian = _jacobian(runs, unknowns, log_shifts, errors)
        move, hessian = _solve(jacobian, errors, weights, log_shifts, spreads)
        largest = float(np.abs(move).max())
        # Derivatives hold nearby alone: a longer move is cut short.
        log_shifts = log_shifts + move * min(1.0, _LARGEST_MOVE / max(largest, 1e-12))
        if largest < _CONVERGED:
            break
    return Fit(
        parts=unknowns,
        run_count=len(runs),
        spreads=spreads,
        log_shifts=log_shifts,
        covariance=np.asarray(np.linalg.inv(hessian), dtype=np.float64),
        jacobian=np.zeros((0, len(unknowns.parts))) if jacobian is None else jacobian,
        errors=np.zeros(0),
    )


def _solve(
    jacobian: Vector, errors: Vector, weights: Vector, log_shifts: Vector, spreads: Vector
) -> tuple[Vector, Vector]:
    """Return the move to the minimum for residuals that are linear in the shifts, and its Hessian.

    Robust weights are found by iteration: they fall where a residual stays large after the move.
    """
    move: Vector = np.zeros(len(log_shifts))
    hessian: Vector = np.diag(1 / spreads**2)
    for _ in range(_REWEIGHTINGS):
        left = np.abs((errors + jacobian @ move) * weights)
        # Huber's loss as a weighted square: c / |r| beyond c, whose root scales a row.
        robust = weights * np.sqrt(np.minimum(1.0, _HUBER / np.maximum(1e-9, left)))
        scaled = jacobian * robust[:, None]
        hessian = scaled.T @ scaled + np.diag(1 / spreads**2)
        # The second term pulls every shift towards its prior.
        gradient = scaled.T @ (errors * robust) + log_shifts / spreads**2
        previous = move
        move = np.asarray(-np.linalg.solve(hessian, gradient), dtype=np.float64)
        if float(np.abs(move - previous).max()) < _CONVERGED:
            break
    return move, hessian


def predict_left_out(
    runs: Sequence[MeasuredRun],
    key: Callable[[MeasuredRun], Hashable],
    *,
    free_constants: tuple[FreeConstant, ...] = FREE_CONSTANTS,
    centre: PriorCentre = PriorCentre.NEUTRAL,
) -> tuple[float, ...]:
    """Predict every run's seconds with constants fitted without the runs that share its key.

    Where that leaves no run, the constants are the hardware's own.
    """
    if len({key(run) for run in runs}) == 1:
        return tuple(run.prepared.step_s(()) for run in runs)
    fit_of_all = fit_constants(runs, free_constants=free_constants, centre=centre)
    errors = fit_of_all.log_errors(runs)
    predicted = [0.0] * len(runs)
    for left_out in dict.fromkeys(key(run) for run in runs):
        inside = [index for index, run in enumerate(runs) if key(run) == left_out]
        others = [index for index, run in enumerate(runs) if key(run) != left_out]
        fit = fit_constants(
            [runs[index] for index in others],
            free_constants=free_constants,
            centre=centre,
            start=fit_of_all.restrict_to_runs(others, errors),
        )
        for index in inside:
            run = runs[index]
            constants = fit.constants_for(
                run.hardware, publisher=run.publisher, network=run.network
            )
            predicted[index] = run.prepared.step_s(constants)
    return tuple(predicted)


def _spread(free: FreeConstant, group: Group | None, centre: PriorCentre) -> float:
    return free.shared_spread(centre) if group is None else free.own_spread(group[0])


def _log_residuals(
    runs: Sequence[MeasuredRun], unknowns: _ConstantParts, log_shifts: Vector
) -> Vector:
    """Return log(predicted / measured) of every run."""
    constants = {
        groups: unknowns.constants(groups, log_shifts, source="")
        for groups in {run.groups for run in runs}
    }
    return np.array(
        [log(run.prepared.step_s(constants[run.groups]) / run.measured_s) for run in runs]
    )


def _jacobian(
    runs: Sequence[MeasuredRun],
    unknowns: _ConstantParts,
    log_shifts: Vector,
    errors: Vector | None = None,
) -> Vector:
    """Return the derivatives of the residuals, by differences [runs, parts].

    A run reacts alike to the shared part of a constant and to its groups' own parts, so one slope
    serves them all. `errors` are the residuals at `log_shifts`, where they are known.
    """
    base = _log_residuals(runs, unknowns, log_shifts) if errors is None else errors
    members = np.array([unknowns.members(run.groups) for run in runs])
    jacobian = np.zeros(members.shape)
    for shared, (index, group) in enumerate(unknowns.parts):
        if group is not None:
            continue
        moved = log_shifts.copy()
        moved[shared] += _STEP
        slope = (_log_residuals(runs, unknowns, moved) - base) / _STEP
        for part, (part_index, _) in enumerate(unknowns.parts):
            if part_index == index:
                jacobian[:, part] = np.where(members[:, part], slope, 0.0)
    return jacobian


def _build_parts(
    runs: Sequence[MeasuredRun],
    free_constants: tuple[FreeConstant, ...],
    centre: PriorCentre,
    start: Fit | None,
) -> _ConstantParts:
    """Build the unknowns of a fit, those of `start` where there is one."""
    parts = start.parts.parts if start else _list_parts(free_constants, runs)
    priors = dict(start.parts.priors) if start else {}
    for run in runs:
        if run.hardware.name not in priors:
            priors[run.hardware.name] = _prior_values(free_constants, run.hardware, centre)
    # A group that only the start had runs of keeps its own parts, as uncertain as before any run.
    with_parts = {group for _, group in parts if group is not None}
    return _ConstantParts(
        free_constants=free_constants,
        parts=parts,
        priors=priors,
        covered=frozenset(with_parts.union(*(run.groups for run in runs))),
    )


def _list_parts(
    free_constants: tuple[FreeConstant, ...], runs: Sequence[MeasuredRun]
) -> tuple[tuple[int, Group | None], ...]:
    """Return (constant, group) of every unknown.

    A level of which the runs have one group alone has no own parts.
    """
    shared: list[tuple[int, Group | None]] = [(index, None) for index in range(len(free_constants))]
    groups = sorted({group for run in runs for group in run.groups})
    own: list[tuple[int, Group | None]] = []
    for level in Level:
        of_level = [group for group in groups if group[0] is level]
        if len(of_level) > 1:
            own += [
                (index, group)
                for index, free in enumerate(free_constants)
                if free.own_spread(level)
                for group in of_level
            ]
    return (*shared, *own)


def _prior_values(
    free_constants: tuple[FreeConstant, ...], hardware: Hardware, centre: PriorCentre
) -> tuple[float, ...]:
    if centre is PriorCentre.NEUTRAL:
        return tuple(free.prior for free in free_constants)
    constants = Constants(hardware)
    return tuple(constants[free.name] for free in free_constants)
