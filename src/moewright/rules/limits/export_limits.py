"""What no export to another trainer says of a job's training, whichever trainer it is."""

from __future__ import annotations

from collections.abc import Iterator

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
