"""A verdict has three parts on every face: does it fit, how far from the best, and from others."""

import html
import re
from random import Random

import pytest

import moewright as mw
from moewright.api.diagnosing import diagnose, view_diagnosis
from moewright.api.launch_scripts import find_better_layouts, read_flags
from moewright.api.views import ViewQuery, view_judgement, view_plan
from moewright.cli.main import main
from moewright.codec import format_layout
from moewright.spec.errors import BadInput
from moewright.spec.options import WorkloadOptions
from moewright.studio.wire import encode_record

PARTS = {
    "fit": r"\b(fits|may not fit|does not fit)\b",
    "speed": r"a step(: the best|, [\d.,]+( x|%) (slower|faster) than|: a quick search finds none)",
    "measured": r"(nearest published run(:|, on) \S+|no published run is near)",
}
MODELS = (("OLMoE-1B-7B-0924", "H100"), ("Qwen3-30B-A3B", "H800"), ("gpt-oss-20b", "B200"))
COMMON = ("estimate", "script", "log", "studio", "notebook")


def draw_job(number):
    """Draw a model, devices, a batch and a legal layout, good or bad."""
    draws = Random(3400 + number)
    model, device = draws.choice(MODELS)
    while True:
        world = draws.choice((8, 16))
        job = {"on": f"{world}x{device}", "global_batch": world * draws.choice((8, 16))}
        tp, pp, ep = (draws.choice((1, 2, 4, 8)) for _ in range(3))
        recompute = draws.choice(("full", "layernorm+moe_act"))
        try:
            return mw.estimate(model, f"tp{tp},pp{pp},ep{ep},mbs1,recompute={recompute}", **job)
        except BadInput:
            continue


def ask_command_line(capsys, *command):
    assert main([*map(str, command)]) in (0, 3)
    return capsys.readouterr().out


def write_log(plan, path):
    line = (
        " iteration {step:8d}/ 5000 | elapsed time per iteration (ms): {ms:.1f} |"
        f" global batch size: {plan.workload.global_batch} | lm loss: 3.65E+00 |\n"
    )
    ms = 1300 * plan.estimate.step_s
    path.write_text("".join(line.format(step=step, ms=ms + step % 5) for step in range(1, 61)))
    return path


def list_faces(plan, face, folder, capsys):
    """Yield what a face shows of a plan."""
    model = plan.model.name
    on = f"{plan.hardware.count}x{plan.hardware.device.name}"
    layout = format_layout(plan.layout)
    batch = plan.workload.global_batch
    job = ("--on", on, "--global-batch", batch)
    match face:
        case "estimate":
            yield ask_command_line(capsys, "estimate", model, *job, "--layout", layout)
        case "plan":
            yield ask_command_line(capsys, "plan", model, *job)
        case "script":
            script = folder / "run.sh"
            script.write_text(mw.export(plan, to="megatron"))
            part = plan.hardware.device.name
            yield ask_command_line(capsys, "estimate", "--from-flags", script, "--on", part)
            yield repr(find_better_layouts(read_flags(script, on=part).plan))
        case "log":
            log = write_log(plan, folder / "run.log")
            of = ("--model", model, *job, "--layout", layout)
            yield ask_command_line(capsys, "diagnose", log, *of)
            diagnosis = diagnose(log, plan=plan)
            yield repr(diagnosis)
            yield encode_record(view_diagnosis(diagnosis)).decode()
        case "studio":
            options = WorkloadOptions(global_batch=batch)
            query = ViewQuery(model=model, on=on, options=options, layout=layout)
            best = format_layout(mw.estimate(model, "ep8", on=on, global_batch=batch).layout)
            judged = encode_record(view_judgement(query, best)).decode()
            yield encode_record(view_plan(query)).decode() + judged
        case "notebook":
            yield mw.judge(plan)._repr_html_()
        case "notebook of a search":
            yield mw.plan(model, on=on, global_batch=batch)._repr_html_()


@pytest.mark.turns
@pytest.mark.parametrize("face", [*COMMON, "plan", "notebook of a search"])
@pytest.mark.parametrize("number", range(4))
def test_the_parts_of_a_verdict_stand_on(face, number, tmp_path, capsys):
    plan = draw_job(number)
    for shown in list_faces(plan, face, tmp_path, capsys):
        text = " ".join(html.unescape(re.sub(r"<[^>]+>", " ", shown)).split())
        for part, words in PARTS.items():
            assert re.search(words, text, re.IGNORECASE), (part, plan.layout, text[:2000])
