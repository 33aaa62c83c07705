"""A config.json or a script's job in an address comes back, and no text of it does harm."""

import json
import random
import zlib
from base64 import urlsafe_b64encode
from dataclasses import replace
from pathlib import Path

import pytest

import moewright as mw
from moewright.api.launch_scripts import read_flags
from moewright.codec import format_layout, write_json
from moewright.intake import catalogue, hf
from moewright.spec.errors import BadInput
from moewright.spec.workload import (
    CrossEntropyKernel,
    Dtype,
    OptimizerSpec,
    TrainerSpec,
    Workload,
)
from moewright.studio.folder import StudioFolder
from moewright.studio.queries import (
    MOST_LETTERS,
    pack_config,
    pack_job,
    read_dropped_model,
    read_query,
    unpack_job,
)

NAMES = ("OLMoE-1B-7B-0924", "Qwen3-30B-A3B", "DeepSeek-V3", "gpt-oss-120b", "Mixtral-8x7B")


@pytest.mark.parametrize("name", NAMES)
def test_a_model_comes_back_from_an_address(name):
    model = catalogue.model(name)
    packed = pack_config("mine", hf.build_config(model))
    assert 0 < len(packed) <= MOST_LETTERS
    query = read_query({"model": packed, "on": "8xH100", "layout": "ep8"})
    assert hf.build_config(query.model) == hf.build_config(model)
    assert query.model.name == "mine"


@pytest.mark.parametrize("on", ["4xH100", "4xH100 with 96GB", "8xGB200"])
def test_a_plan_that_another_studio_has_sent_comes_back_whole(on, tmp_path):
    plan = mw.estimate("OLMoE-1B-7B-0924", "ep4", on=on, seq_len=2048, precision="fp8")
    path = tmp_path / "plan.json"
    write_json(path, plan)
    query = read_dropped_model(StudioFolder(tmp_path), path)["query"]
    assert str(tmp_path) not in query["model"]
    assert read_query(query).build() == plan


def test_a_plan_on_hardware_of_its_own_is_kept_as_a_file(tmp_path):
    plan = mw.estimate("OLMoE-1B-7B-0924", "ep4", on="4xH100")
    memory = replace(plan.hardware.device.memory_Bps, value=1e12)
    device = replace(plan.hardware.device, memory_Bps=memory)
    plan = mw.estimate(plan, on=replace(plan.hardware, device=device))
    path = tmp_path / "plan.json"
    write_json(path, plan)
    answer = read_dropped_model(StudioFolder(tmp_path), path)
    assert "send plan.json" in answer["notes"][0]
    assert read_query(answer["query"]).build() == plan


def test_what_is_cut_changed_or_endless_is_refused():
    packed = pack_config("mine", hf.build_config(catalogue.model(NAMES[0])))
    draws = random.Random(34)
    for _ in range(200):
        at = draws.randrange(len("mine~") + 1, len(packed))
        letter = draws.choice("abcXYZ019-_")
        changed = packed[:at] + draws.choice(("", letter)) + packed[at + 1 :]
        try:
            job = unpack_job(changed)
        except BadInput:
            continue
        assert job == unpack_job(packed)  # bits beyond the last byte
    endless = zlib.compress(json.dumps({"a": "x" * (1 << 22)}).encode(), 9)
    with pytest.raises(BadInput, match="whole job"):
        unpack_job(f"mine~{urlsafe_b64encode(endless).decode().rstrip('=')}")
    assert unpack_job("Qwen/Qwen3-30B-A3B") is None
    assert unpack_job("~/models/config.json") is None


def test_what_is_too_long_for_an_address_is_not_packed():
    draws = random.Random(34)
    noise = {f"field{number}": draws.random() for number in range(400)}
    assert pack_config("mine", noise) == ""


SCRIPTS = sorted((Path(__file__).parents[2] / "examples").glob("*.sh"))


def test_the_job_of_a_script_comes_back_from_an_address_with_all_that_it_states():
    for script in SCRIPTS:
        plan = read_flags(script, on="H100").plan
        packed = pack_job(plan.model, plan.workload)
        assert 0 < len(packed) <= MOST_LETTERS
        query = read_query({"model": packed, "on": "16xH100", "layout": format_layout(plan.layout)})
        assert query.build().estimate == plan.estimate
        shorter = read_query({"model": packed, "on": "16xH100", "layout": "ep8", "seq_len": "2k"})
        own = replace(plan.workload, seq_len=2000)
        assert shorter.build().workload == own


def test_any_job_comes_back_from_an_address():
    draws = random.Random(37)
    for name in NAMES:
        model = catalogue.model(name)
        workload = Workload(
            seq_len=draws.choice((512, 4096)),
            global_batch=draws.randrange(1, 4096),
            precision=draws.choice(tuple(Dtype)),
            optimizer=OptimizerSpec(lr=draws.uniform(1e-6, 1e-2)),
            trainer=TrainerSpec(cross_entropy=draws.choice(tuple(CrossEntropyKernel))),
        )
        job = unpack_job(pack_job(model, workload))
        assert (job.model, job.workload) == (model, workload)
        changed = pack_job(model, workload)[:-3]
        with pytest.raises(BadInput, match="cut or changed"):
            unpack_job(changed)
