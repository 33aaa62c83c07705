"""What a page says of a plan's job."""

from dataclasses import replace

from moewright.report.plan_sections import _workload_facts
from moewright.spec.workload import MatrixUpdate, OptimizerSpec, Workload


def test_a_page_names_the_optimizer_of_its_job() -> None:
    workload = Workload(seq_len=64, global_batch=8)
    muon = replace(workload, optimizer=OptimizerSpec(matrix_update=MatrixUpdate.MUON))
    assert dict(_workload_facts(workload))["optimizer"].startswith("AdamW, lr ")
    assert dict(_workload_facts(muon))["optimizer"].startswith("Muon for matrices of layers, AdamW")
