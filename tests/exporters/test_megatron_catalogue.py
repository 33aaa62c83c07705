"""Every model of the catalogue in any legal layout: nothing is written that Megatron-LM refuses."""

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from megatron_cases import REFUSED_MODELS, build_plan, catalogue_model, layouts, workloads
from megatron_parser import check_options, parse_flags
from moewright.exporters.megatron.refusals import find_refusals
from moewright.exporters.megatron.script import environment_variables, megatron_flags
from moewright.intake import catalogue
from moewright.rules.legality import check_legality
from moewright.spec.layout import Layout
from moewright.spec.workload import Workload


def test_these_models_are_refused_for_these_reasons_and_no_others():
    workload = Workload(seq_len=4096, global_batch=64)
    reasons = {
        name: find_refusals(build_plan(name, Layout(world_size=8), workload))
        for name in catalogue.model_names()
    }
    assert {
        name: model_reasons[0].field for name, model_reasons in reasons.items() if model_reasons
    } == REFUSED_MODELS


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_what_is_written_is_what_megatron_accepts(data):
    name = data.draw(st.sampled_from(sorted(set(catalogue.model_names()) - set(REFUSED_MODELS))))
    layout = data.draw(layouts(catalogue_model(name).moe is not None))
    workload = data.draw(workloads())
    assume(not check_legality(catalogue_model(name), workload, layout))
    plan = build_plan(name, layout, workload)
    assume(not find_refusals(plan))
    check_options(
        parse_flags(megatron_flags(plan)), layout.world_size, dict(environment_variables(layout))
    )
