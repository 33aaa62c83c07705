"""What exports to other trainers do not say of a job, whichever trainer it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from moewright.spec.choices import LayoutField
from moewright.spec.layout import Layout
from moewright.spec.workload import Objective, Task, Workload


def unexported_training(workload: Workload) -> Iterator[tuple[str, object, str, object]]:
    """Yield field, value, rule and nearest value of training that exports do not write."""
    fine_tuning, objective = workload.fine_tuning, workload.loss.objective
    pretrains = "export supports only pre-training"
    if fine_tuning.task is not Task.PRETRAIN:
        yield "task", fine_tuning.task, pretrains, Task.PRETRAIN
    if fine_tuning.freeze:
        yield "freeze", "+".join(fine_tuning.freeze), "export freezes nothing", "none"
    if objective is not Objective.NEXT_TOKEN:
        yield "objective", objective, pretrains, Objective.NEXT_TOKEN
    if workload.batch_samples:
        rule = "export writes steps of a number of sequences"
        yield "batch_samples", workload.batch_samples, rule, 0
    for folder in (workload.routes.record_routes, workload.routes.replay_routes):
        if folder:
            yield "routes", folder, "export records and replays no routes", "none"


def missing_choices(
    layout: Layout, only_defaults: Iterable[tuple[LayoutField, str]]
) -> Iterator[tuple[str, str, str, str]]:
    """Yield field, value, rule and default of choices of which a trainer has the default alone.

    `only_defaults` are those fields, each with what the trainer does.
    """
    for field, rule in only_defaults:
        value = getattr(layout, field.name)
        if value != field.default:
            yield field.name, field.format(value), rule, field.format(field.default)
