"""Every page in the states that addresses lead to: whole at three sizes, in both colours."""

import os

import pytest

import sample_run
from diagnosis.sample_traces import kineto
from moewright.view.course.chapter import list_chapters
from sample_run import write_run
from studio_pages import QWEN, SEARCH_MS, find_faults, find_uncopied

pytestmark = [pytest.mark.browser, pytest.mark.waits, pytest.mark.thorough]

SMALL = "model=Qwen/Qwen3-30B-A3B&on=16xH100&seq_len=4096&global_batch=512&precision=bf16"
TINY = "model=allenai/OLMoE-1B-7B-0924&on=4xH100&seq_len=4096&global_batch=64&precision=bf16"
HUGE = "model=deepseek-ai/DeepSeek-V3&on=2048xH800&seq_len=4096&global_batch=15360&precision=fp8"
NOWHERE = "model=mistralai/Mixtral-8x22B-v0.1&on=2xH100&seq_len=4096&global_batch=32"
ADDRESSES = {
    "nothing asked yet": "",
    "a plan": f"?{TINY}&layout=ep4",
    "a slow plan": f"?{SMALL}&layout=tp8,ep8,mbs1",
    "a plan in eight bits": f"?{SMALL.replace('bf16', 'fp8')}&layout=ep8,recompute=full",
    "a plan that does not fit": f"?{SMALL}&layout=ep16,mbs8",
    "a plan of many stages": f"?{QWEN}&layout=tp2,ep8,pp32,vpp3,mbs1,recompute=full",
    "a layout of thousands of devices that is not legal": f"?{HUGE}&layout=pp16,vpp2,ep64",
    "a job that fits nowhere": f"?{NOWHERE}&layout=ep2",
    "a layout that is not legal": f"?{TINY}&layout=tp3,ep4",
    "a layout that cannot be read": f"?{TINY}&layout=tpp3",
    "a model that is not known": "?model=Qwen3-30B-A3&on=16xH100",
    "a format that a part has not": f"?{TINY.replace('bf16', 'mxfp8')}&layout=ep4",
    "a part of another vendor": f"?{SMALL.replace('16xH100', '16xMI300X')}&layout=ep8",
    "a search": f"top?{SMALL}",
    "a search in vain": f"top?{NOWHERE}",
    "a search of what is not known": "top?model=nosuch&on=8xH100",
    "a timetable": f"timetable?{QWEN}&layout=tp2,ep8,pp32,vpp3,mbs1,recompute=full",
    "a timetable of ZBV": f"timetable?{SMALL}&layout=pp4,vpp2,ep4,mbs1,schedule=zbv",
    "a timetable of one stage": f"timetable?{TINY}&layout=ep4",
    "a timetable of no layout": f"timetable?{TINY}&layout=tp3",
    "nothing to compare yet": f"compare?{TINY}&layout=ep4",
    "four layouts": f"compare?{SMALL}&layout=tp2,ep8,mbs1,recompute=full"
    "&with=ep8,mbs1,recompute=full&with=tp3,ep8&with=pp4,ep4,mbs1",
    "no budget yet": f"budget?{TINY}",
    "a budget": f"budget?{TINY}&tokens=1T&price=2",
    "a budget with a ramp": f"budget?{TINY}&tokens=100B&rampup_batch_size=16+16+100000",
    "a budget of too few tokens": f"budget?{TINY}&tokens=15",
    "no design yet": f"design?{TINY}",
    "a design of no number": f"design?{TINY}&days=many",
    "no run yet": "runs",
    "a run": "runs?run={run}",
    "two runs": "runs?run={run}&run={second}",
    "a trace": "runs?run={trace}",
    "a trace of a job": "runs?run={trace}&run_model=OLMoE-1B-7B-0924&run_on=4xH100&run_layout=ep4",
    "a log of a job": "runs?run={log}&run_model=Qwen3-30B-A3B&run_on=16xH100&run_layout=tp2,ep8",
    "a run that is not there": "runs?run=nosuch",
    "nothing watched yet": "watch",
    "a watched run": "watch?log={run}",
    "a watched log": "watch?log={log}&run_model=Qwen3-30B-A3B&run_on=16xH100&run_layout=tp2,ep8",
    "a log that is not there": "watch?log=nosuch.log",
    "what is shared": f"share?{SMALL}&layout=ep8,mbs1,recompute=full",
    "chapters": "learn",
    "words": "learn/glossary",
    **{f"chapter {name}": f"learn/{name}" for name in list_chapters()},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Write what pages of runs read."""
    folder = tmp_path_factory.mktemp("files")
    for name in ("run", "second"):
        (folder / name).mkdir()
        write_run(folder / name, sample_run.record())
        os.utime(folder / name / "steps.jsonl", (0, 0))
    kineto(folder / "trace.json")
    lines = (
        f" iteration {step:8d}/ 5000 |"
        f" elapsed time per iteration (ms): {27000 + 40 * (step % 7)}.0 |"
        " global batch size:   512 | lm loss: 3.65E+00 |\n"
        for step in range(1, 301)
    )
    (folder / "run.log").write_text("".join(lines))
    names = {"run": "run", "second": "second", "trace": "trace.json", "log": "run.log"}
    return {key: str(folder / name) for key, name in names.items()}


@pytest.mark.parametrize("state", ADDRESSES)
def test_a_page_is_whole_in_each_state(studio, open_page, files, state):
    page = open_page(f"{studio}{ADDRESSES[state].format(**files)}")
    page.locator("main section:visible, main article").first.wait_for()
    page.wait_for_load_state("networkidle", timeout=SEARCH_MS)
    page.wait_for_timeout(1500)  # what a page asks once it rests
    page.wait_for_load_state("networkidle", timeout=SEARCH_MS)
    assert page.locator("main .skeleton").count() == 0
    assert page.locator("main h1").count() >= 1
    assert find_uncopied(page) == []
    assert find_faults(page, is_whole=True) == []
