"""config.json in and out: families, both dialects, and what must be refused in one line."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moewright.cli.main import main
from moewright.families.table import FAMILIES
from moewright.intake import catalogue, hf
from moewright.intake.hf import build_config
from moewright.rules.shapes import parameters
from moewright.spec.errors import BadInput
from moewright.spec.model import AttentionKind, QkNorm, ScoreFunction

# Families that are planned and that weights cannot be written for yet.
PLANNED_FAMILIES = frozenset(
    family.model_type
    for family in FAMILIES.values()
    if not family.architecture and not family.written_as
)

QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 192,
    "intermediate_size": 768,
    "norm_topk_prob": True,
    "max_position_embeddings": 2048,
    "vocab_size": 4096,
    "tie_word_embeddings": False,
}
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 100,
}
DEEPSEEK: dict[str, Any] = build_config(catalogue.model("DeepSeek-V3"))


def write(folder: Path, config: object) -> Path:
    path = folder / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
    return path


def refused(path: Path) -> str:
    """Return the one line with which a path is refused, quickly."""
    start = time.perf_counter()
    with pytest.raises(BadInput) as caught:
        hf.read_config(path)
    assert time.perf_counter() - start < 1.0
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 600
    return text


def test_folder_and_file_read_alike(tmp_path: Path) -> None:
    path = write(tmp_path, QWEN)
    model = hf.read_config(path)
    assert model == hf.read_config(tmp_path)
    assert (model.name, model.family, model.layers) == (tmp_path.name, "qwen3_moe", 6)
    assert model.attention.qk_norm is QkNorm.PER_HEAD
    assert model.moe is not None
    assert (model.moe.experts, model.moe.router.top_k, model.moe.router.pre_softmax) == (
        16,
        4,
        False,
    )
    assert model.moe_layers == (True,) * 6


@pytest.mark.parametrize("spelling", ["num_experts", "n_routed_experts", "num_local_experts"])
def test_expert_spellings(spelling: str) -> None:
    config = {key: value for key, value in QWEN.items() if key != "num_experts"} | {spelling: 16}
    assert hf.parse_config(config, where="c", name="m") == hf.parse_config(
        QWEN, where="c", name="m"
    )


def test_two_spellings_must_agree(tmp_path: Path) -> None:
    hf.parse_config(QWEN | {"num_local_experts": 16}, where="c", name="m")
    assert "num_local_experts=8: disagrees with num_experts" in refused(
        write(tmp_path, QWEN | {"num_local_experts": 8})
    )


def test_rope_dialects_agree() -> None:
    yarn = {
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    old = QWEN | {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **yarn}}
    new = QWEN | {"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", **yarn}}
    model = hf.parse_config(old, where="c", name="m")
    assert model == hf.parse_config(new, where="c", name="m")
    rope = model.attention.rope
    assert (rope.theta, rope.scaling, rope.factor, rope.original_max_position) == (
        1e6,
        "yarn",
        4.0,
        512,
    )


def test_llama3_rope_keeps_its_factors() -> None:
    rope = catalogue.model("Llama-3.1-405B").attention.rope
    assert (rope.scaling, rope.factor, rope.low_freq_factor, rope.high_freq_factor) == (
        "llama3",
        8.0,
        1.0,
        4.0,
    )


def test_sparse_step_and_dense_layers() -> None:
    config = QWEN | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
    model = hf.parse_config(config, where="c", name="m")
    assert model.moe_layers == (False, True, False, False, False, True)
    assert model.dense_ffn_size == 768


def test_deepseek_shape() -> None:
    model = catalogue.model("deepseek-v3")
    spec = model.attention
    assert (spec.kind, spec.head_dim, spec.v_head_dim, spec.rope.interleaved) == (
        AttentionKind.MLA,
        192,
        128,
        True,
    )
    assert model.moe is not None
    router = model.moe.router
    assert (router.score, router.groups, router.top_groups) == (ScoreFunction.SIGMOID, 8, 4)
    assert (router.selection_bias, router.scaling_factor, model.moe.shared_ffn_size) == (
        True,
        2.5,
        2048,
    )
    assert model.moe_layers[:4] == (False, False, False, True)
    assert model.mtp_layers == 1


def test_gpt_oss_shape() -> None:
    model = catalogue.model("gpt-oss-20b")
    spec = model.attention
    assert (spec.sliding_window, spec.window_every, spec.sinks, spec.out_bias) == (
        128,
        2,
        True,
        True,
    )
    assert model.moe is not None
    assert model.moe.expert_bias
    assert model.moe.router.logit_bias


@pytest.mark.parametrize("name", catalogue.model_names())
def test_written_configs_read_back(name: str) -> None:
    model = catalogue.model(name)
    if model.family in PLANNED_FAMILIES:
        with pytest.raises(BadInput, match="has no HF form"):
            build_config(model)
        return
    read = hf.parse_config(json.loads(json.dumps(build_config(model))), where="c", name=name)
    if model.family == "qwen3_vl_moe_text":
        model = replace(model, family="qwen3_moe")
    assert read == model


@pytest.mark.parametrize(
    ("name", "change", "field"),
    [
        ("DeepSeek-V2-Lite", {"renormalize": True}, "model.moe.router.renormalize=True"),
        ("Qwen3-30B-A3B", {"selection_bias": True}, "model.moe.router.selection_bias=True"),
        ("Mixtral-8x7B", {"scaling_factor": 2.5}, "model.moe.router.scaling_factor=2.5"),
    ],
)
def test_a_config_that_would_load_as_another_model_is_not_written(
    name: str, change: dict[str, Any], field: str
) -> None:
    model = catalogue.model(name)
    assert model.moe is not None
    router = replace(model.moe.router, **change)
    with pytest.raises(BadInput) as refusal:
        build_config(replace(model, moe=replace(model.moe, router=router)))
    assert str(refusal.value).startswith(f"{field}: has no place in the config.json of ")


def test_transformers_configs_read_and_come_back() -> None:
    """The default config of each HF class, through our form and HF's own writer."""
    transformers = pytest.importorskip("transformers")
    classes = {
        "MixtralConfig": {},
        "Qwen2MoeConfig": {},
        "Qwen3MoeConfig": {},
        "DeepseekV2Config": {"num_experts_per_tok": 6},
        "DeepseekV3Config": {},
        "OlmoeConfig": {},
        "GptOssConfig": {},
        "LlamaConfig": {},
        "Qwen2Config": {},
        "Qwen3Config": {},
        "MistralConfig": {},
    }
    for name, settled in classes.items():
        build = getattr(transformers, name)
        model = hf.parse_config(
            json.loads(build(**settled).to_json_string()), where=name, name=name
        )
        again = hf.parse_config(
            json.loads(build(**build_config(model)).to_json_string()), where=name, name=name
        )
        assert again == model, name


def test_harmless_fields_are_ignored_and_unknown_ones_named(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        QWEN
        | {
            "torch_dtype": "bfloat16",
            "my_note": "x",
            "zz": 1,
            "auto_map": {"AutoModel": "evil.py"},
        },
    )
    assert hf.unknown_fields(path) == ("my_note", "zz")
    assert hf.read_config(path) == hf.read_config(write(tmp_path, QWEN))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_experts_per_tok": 17},
            "num_experts_per_tok=17: must be at most num_experts=16; nearest legal value: 16",
        ),
        ({"num_experts": 0}, "num_experts=0: must be in 1..65536; nearest legal value: 1"),
        ({"hidden_size": -256}, "hidden_size=-256: must be in 1..131072; nearest legal value: 1"),
        (
            {"hidden_size": 10**9},
            "hidden_size=1000000000: must be in 1..131072; nearest legal value: 131072",
        ),
        (
            {"num_hidden_layers": -6},
            "num_hidden_layers=-6: must be in 1..1024; nearest legal value: 1",
        ),
        (
            {"vocab_size": 10**12},
            "vocab_size=1000000000000: must be in 1..16777216; nearest legal value: 16777216",
        ),
        (
            {"num_hidden_layers": 10**6},
            "num_hidden_layers=1000000: must be in 1..1024; nearest legal value: 1024",
        ),
        ({"num_hidden_layers": 10**40}, "num_hidden_layers=a huge integer"),
        ({"vocab_size": "4096"}, 'vocab_size="4096": must be a whole number'),
        ({"vocab_size": True}, "vocab_size=true: must be a whole number"),
        (
            {"vocab_size": 4096.5},
            "vocab_size=4096.5: must be a whole number in 1..16777216; nearest legal value: 4096",
        ),
        ({"vocab_size": [4096]}, "vocab_size=a list of 1: must be a whole number"),
        ({"vocab_size": None}, "vocab_size=null: is missing"),
        (
            {"num_key_value_heads": 3},
            "num_key_value_heads=3: must divide num_attention_heads=8; nearest legal value: 2",
        ),
        ({"num_key_value_heads": 16}, "must be at most num_attention_heads=8"),
        ({"head_dim": 31}, "head_dim=31: must be even"),
        ({"hidden_act": "gelu"}, 'hidden_act="gelu": must be one of silu, swiglu'),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            'rope_scaling.type="longrope": must be one of default',
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "surprise": 1}},
            "rope_scaling.surprise=1: is not known",
        ),
        ({"rope_theta": 0}, "rope_theta=0: must be in 1..1e+15; nearest legal value: 1"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"use_sliding_window": True, "sliding_window": 512}, "needs layer_types"),
        (
            {"layer_types": ["full_attention"] * 5 + ["linear_attention"]},
            "'linear_attention', a mixer",
        ),
        (
            {"layer_types": ["full_attention"]},
            "layer_types=a list of 1: must have num_hidden_layers=6 entries",
        ),
        ({"mlp_only_layers": [6]}, "must name layers 0..5"),
        (
            {"linear_num_key_heads": 4},
            "linear_num_key_heads=4: asks for what moewright does not model",
        ),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0: asks for"),
        ({"norm_topk_prob": "yes"}, 'norm_topk_prob="yes": must be true or false'),
        ({"num_nextn_predict_layers": 1}, "multi-token prediction is not known for qwen3_moe"),
        ({"model_type": "qwen3_moo"}, 'model_type="qwen3_moo": must be one of'),
        ({"model_type": "mamba"}, "Mamba layers, a mixer"),
        ({"model_type": "nemotron_h"}, "hybrid_override_pattern: is missing"),
        ({"alibi": 1}, "alibi=1: must be true or false"),
        ({"alibi_bias_max": 4}, "alibi_bias_max=4: asks for what moewright does not model"),
        ({"attn_output_gate": True}, "attn_output_gate=true: asks for"),
        ({"use_mamba": True}, "use_mamba=true: asks for"),
        ({"some_new_switch": True}, "some_new_switch=true: asks for"),
        ({"model_type": ["x"]}, "model_type=a list of 1"),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else "",
)
def test_bad_fields(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    text = refused(write(tmp_path, QWEN | change))
    assert message in text
    assert "config.json: " in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"scoring_func": "softmax"},
            'scoring_func="softmax": must be one of sigmoid; nearest legal value: sigmoid',
        ),
        ({"topk_method": "greedy"}, 'topk_method="greedy": must be one of noaux_tc'),
        ({"n_group": 7}, "n_group=7: must divide the 256 experts; nearest legal value: 8"),
        ({"topk_group": 9}, "topk_group=9: must be at most n_group=8"),
        (
            {"n_group": 256, "topk_group": 4},
            "leaves 4 experts to choose 8 from; nearest legal value: 8",
        ),
        ({"first_k_dense_replace": 62}, "must be at most num_hidden_layers=61"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim=63: must be even"),
        ({"index_topk": 2048}, "index_topk=2048: asks for"),
        ({"num_key_value_heads": 8}, "must equal num_attention_heads=128"),
        (
            {
                "model_type": "deepseek_v2",
                "topk_method": "group_limited_greedy",
                "scoring_func": "softmax",
                "norm_topk_prob": True,
            },
            "norm_topk_prob=true: asks for what moewright does not model; nearest legal value: f",
        ),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else "",
)
def test_bad_deepseek_fields(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    assert message in refused(write(tmp_path, DEEPSEEK | change))


def test_absent_fields(tmp_path: Path) -> None:
    for field in (
        "hidden_size",
        "num_experts",
        "num_experts_per_tok",
        "num_key_value_heads",
        "model_type",
    ):
        config = {key: value for key, value in QWEN.items() if key != field}
        assert f"config.json: {field}: is missing" in refused(write(tmp_path, config))


def test_head_width_needs_a_divisor(tmp_path: Path) -> None:
    assert "num_attention_heads=6: must divide hidden_size=64" in refused(
        write(tmp_path, MIXTRAL | {"num_attention_heads": 6})
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[]", "must hold a table of fields"),
        ("null", "must hold a table of fields"),
        ('{"model_type": "mixtral", "model_type": "llama"}', "stands twice"),
        (json.dumps(QWEN)[:-1] + ', "rope_theta": NaN}', "rope_theta=nan: must be a finite number"),
        (
            json.dumps(QWEN)[:-1] + ', "rope_theta": -Infinity}',
            "rope_theta=-inf: must be a finite number",
        ),
        ('{"a":' * 200_000 + "1" + "}" * 200_000, "nested too deeply"),
        ("[" * 200_000, "nested too deeply"),
        (
            json.dumps(QWEN)[:-1] + ', "rope_theta": 1e400}',
            "rope_theta=inf: must be a finite number",
        ),
        ('{"hidden_size": ' + "9" * 10_000 + "}", "too many digits"),
    ],
    ids=[
        "empty",
        "open",
        "list",
        "null",
        "twice",
        "nan",
        "infinity",
        "deep",
        "deep-list",
        "overflow",
        "digits",
    ],
)
def test_malformed_files(tmp_path: Path, content: str, message: str) -> None:
    assert message in refused(write(tmp_path, content))


def test_files_that_are_none(tmp_path: Path) -> None:
    assert "no such file" in refused(tmp_path / "nothing" / "config.json")
    assert "no such file" in refused(tmp_path)
    binary = tmp_path / "weights.json"
    binary.write_bytes(b"\x80\x02}q\x00(\xff\xfe" * 100)
    assert "not text in UTF-8" in refused(binary)
    big = tmp_path / "big.json"
    with big.open("wb") as stream:
        stream.truncate(hf.MAX_FILE_BYTES + 1)
    assert "larger than 16 MiB" in refused(big)
    assert "zero byte" in refused(Path("a\0b"))
    assert "cannot be read" in refused(Path("x" * 5000))


def test_deep_values_in_a_known_field_are_refused_by_name(tmp_path: Path) -> None:
    deep = "[" * 900 + "]" * 900
    text = json.dumps(QWEN)[:-1] + f', "rope_scaling": {deep}}}'
    assert "rope_scaling=a list of 1: must be a table" in refused(write(tmp_path, text))


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(0, 3), max_size=3),
    st.dictionaries(
        st.sampled_from(["type", "rope_type", "factor", "x"]),
        st.integers(-2, 2) | st.text(max_size=3),
    ),
)
FIELDS = sorted(
    {*QWEN, *DEEPSEEK, "rope_parameters", "layer_types", "mlp_only_layers", "sliding_window"}
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([QWEN, MIXTRAL, DEEPSEEK]),
    st.dictionaries(st.sampled_from(FIELDS), JUNK, min_size=1, max_size=3),
)
def test_no_value_of_a_field_breaks_the_reader(base: dict[str, Any], junk: dict[str, Any]) -> None:
    """Whatever stands in a field, the answer is a model that can be counted, or one BadInput."""
    try:
        model = hf.parse_config(base | junk, where="config.json", name="fuzz")
    except BadInput:
        return
    assert parameters.count_parameters(model).total > 0


@pytest.mark.parametrize(
    "field",
    ["attention_value_norm", "rope_local_base_freq", "moe_router_groups_v2", "expert_choice"],
)
def test_an_unknown_setting_of_a_part_is_refused(tmp_path: Path, field: str) -> None:
    message = refused(write(tmp_path, QWEN | {field: 7}))
    assert field in message
    assert "asks for what moewright does not model" in message


def test_an_unknown_harmless_field_is_named_and_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, QWEN | {"badge": "gold", "moe_note": None})
    assert catalogue.skipped_fields(str(path)) == ("badge", "moe_note")
    assert catalogue.skipped_fields("Qwen3-8B") == ()
    main(["estimate", str(path), "--on", "1xH100", "--global-batch", "1", "--seq-len", "128"])
    assert "not known here: badge, moe_note" in capsys.readouterr().out


def test_a_model_has_the_name_of_its_folder_or_of_its_file(tmp_path: Path) -> None:
    text = json.dumps(QWEN)
    blob = tmp_path / "blobs" / "0123abc"
    blob.parent.mkdir()
    blob.write_text(text)
    snapshot = tmp_path / "hub/models--Org--Tiny-MoE/snapshots/0123abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to(blob)
    (tmp_path / "kimi.json").write_text(text)
    assert hf.read_config(snapshot).name == "Org/Tiny-MoE"
    assert hf.read_config(snapshot / "config.json").name == "Org/Tiny-MoE"
    assert hf.read_config(tmp_path / "kimi.json").name == "kimi"
