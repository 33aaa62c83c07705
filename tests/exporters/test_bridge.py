"""Plans as Megatron Bridge recipes, run against stand-ins of its modules.

The stand-ins keep what they are given.
"""

import json
import os
import sys
import types
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from megatron_cases import (
    REFUSED_MODELS,
    as_read,
    as_written,
    build_plan,
    catalogue_model,
    layouts,
    refusals,
    workloads,
)
from moewright.api.running import list_trainers
from moewright.codec import parse_layout
from moewright.exporters.bridge import bridge_refusals, render_bridge_recipe
from moewright.intake import catalogue
from moewright.intake.megatron.read import interpret_launch, read_launch
from moewright.rules.job import Job, plan_job
from moewright.rules.limits.legality import check_legality
from moewright.rules.limits.megatron_limits import megatron_refusals
from moewright.spec.errors import BadInput
from moewright.spec.workload import (
    AttentionBackend,
    BatchRampSpec,
    CheckpointSpec,
    DataSpec,
    Dtype,
    LossSpec,
    LrDecay,
    OptimizerSpec,
    RouterForce,
    RouterTraining,
    TrainerSpec,
    Workload,
)

MODULES = {
    "megatron.bridge": ("AutoBridge",),
    "megatron.bridge.training.comm_overlap": ("CommOverlapConfig",),
    "megatron.bridge.training.config": (
        *("CheckpointConfig", "ConfigContainer", "GPTDatasetConfig", "LoggerConfig", "RNGConfig"),
        *("DistributedInitConfig", "RerunStateMachineConfig"),
        *("SchedulerConfig", "TokenizerConfig", "TrainingConfig", "ValidationConfig"),
    ),
    "megatron.bridge.training.gpt_step": ("forward_step",),
    "megatron.bridge.training.mixed_precision": ("bf16_mixed", "fp16_mixed"),
    "megatron.bridge.training.pretrain": ("pretrain",),
    "megatron.core.distributed": ("DistributedDataParallelConfig",),
    "megatron.core.optimizer": ("OptimizerConfig",),
}


class Kept(types.SimpleNamespace):
    """Stands in for a class, a function and a provider alike."""

    def __call__(self, **fields):
        return Kept(**fields)

    def from_hf_pretrained(self, name):
        return Kept(hf=name)

    def to_megatron_provider(self, *, load_weights):
        return Kept(hf=self.hf, load_weights=load_weights)


@pytest.fixture(scope="module", autouse=True)
def stand_ins():
    """Stand in for Bridge's modules, and for torch, while these tests run.

    Recipes name dtypes of torch alone.
    """
    stored = {name: sys.modules.get(name) for name in ("torch", "megatron", *MODULES)}
    sys.modules["torch"] = types.SimpleNamespace(
        **{name: f"torch.{name}" for name in ("float32", "bfloat16", "float16", "uint8")}
    )
    for name, members in MODULES.items():
        module = types.ModuleType(name)
        vars(module).update({member: Kept() for member in members})
        sys.modules[name] = module
    recipes = {"bf16_mixed": lambda: Kept(bf16=True), "fp16_mixed": lambda: Kept(fp16=True)}
    vars(sys.modules["megatron.bridge.training.mixed_precision"]).update(recipes)
    yield
    for name, module in stored.items():
        sys.modules.pop(name) if module is None and name in sys.modules else sys.modules.update(
            {name: module}
        )


def built(plan):
    space: dict = {"__name__": "recipe"}
    with patch.dict(os.environ):  # a recipe sets variables, which ranks of other tests would get
        exec(compile(render_bridge_recipe(plan), "recipe.py", "exec"), space)
        return space["config"]()


def dump(config):
    """Write a built configuration as Bridge's own to_yaml does, dtypes as what makes them."""
    sections = {"_target_": "megatron.bridge.training.config.ConfigContainer"}
    for name, section in vars(config).items():
        sections[name] = section and {
            field: {"_call_": False, "_target_": value} if is_dtype(value) else value
            for field, value in vars(section).items()
            if field not in ("hf", "load_weights")
        }
    return json.dumps(sections)  # tuples are lists in both; JSON is YAML


def is_dtype(value):
    return isinstance(value, str) and value.startswith("torch.")


def planned(text, world=256, name="Qwen/Qwen3-235B-A22B", **work):
    workload = Workload(**{"seq_len": 4096, "global_batch": 2048, **work})
    return build_plan(name, parse_layout(text, world_size=world), workload)


def test_a_recipe_holds_the_plan(monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    cfg = built(
        planned(
            "tp2,ep8,pp8,vpp4,mbs1,recompute=select,overlap=grad+param+p2p,dispatcher=deepep",
            steps=100,
        )
    )
    assert cfg.model.hf == "Qwen/Qwen3-235B-A22B"
    assert cfg.model.load_weights is False
    degrees = [
        "tensor_model",
        "context",
        "pipeline_model",
        "expert_model",
        "expert_tensor",
        "virtual_pipeline_model",
    ]
    assert [getattr(cfg.model, f"{degree}_parallel_size") for degree in degrees] == [
        2,
        1,
        8,
        8,
        1,
        4,
    ]
    assert cfg.model.sequence_parallel is True
    assert sorted(cfg.model.recompute_modules) == ["layernorm", "moe_act"]
    assert (cfg.model.moe_token_dispatcher_type, cfg.model.moe_flex_dispatcher_backend) == (
        "flex",
        "deepep",
    )
    assert cfg.model.account_for_loss_in_pipeline_split is True
    assert (cfg.train.micro_batch_size, cfg.train.global_batch_size, cfg.train.train_iters) == (
        1,
        2048,
        100,
    )
    assert (cfg.ddp.overlap_grad_reduce, cfg.ddp.use_distributed_optimizer) == (True, True)
    assert cfg.ddp.grad_reduce_in_fp32 is True
    assert cfg.comm_overlap.overlap_p2p_comm is True
    assert cfg.comm_overlap.tp_comm_overlap is False
    assert cfg.optimizer.lr == 3e-4
    assert cfg.optimizer.min_lr == 3e-5
    assert (cfg.scheduler.lr_decay_style, cfg.scheduler.start_weight_decay) == ("cosine", 0.1)
    assert cfg.dataset.blend is None
    assert cfg.tokenizer.vocab_size == 151936


def test_a_recipe_switches_off_what_a_provider_may_bring():
    cfg = built(planned("ep8,pp8,zero0"))
    assert cfg.model.recompute_granularity is None
    assert cfg.model.virtual_pipeline_model_parallel_size is None
    assert cfg.model.sequence_parallel is False
    assert cfg.model.cuda_graph_impl == "none"
    assert cfg.model.mtp_num_layers is None
    assert cfg.optimizer.use_distributed_optimizer is False


def test_a_rate_that_stays_and_falls_in_the_end():
    optimizer = OptimizerSpec(lr_decay=LrDecay.WSD, wsd_decay_steps=25)
    scheduler = built(planned("ep8,pp8", steps=200, optimizer=optimizer)).scheduler
    assert (scheduler.lr_decay_style, scheduler.lr_wsd_decay_style) == ("WSD", "linear")
    assert (scheduler.lr_decay_iters, scheduler.lr_wsd_decay_iters) == (200, 25)


def test_narrows_data_and_checkpoints():
    saving = planned(
        "ep8,pp8",
        steps=50,
        precision=Dtype.FP8,
        data=DataSpec(train="d/train", heldout="d/held"),
        checkpoint=CheckpointSpec(every_steps=10),
        router=RouterTraining(force=RouterForce.BALANCED),
    )
    cfg = built(saving)
    assert (cfg.mixed_precision.fp8, cfg.mixed_precision.fp8_recipe) == ("hybrid", "tensorwise")
    assert cfg.train.train_iters == cfg.scheduler.lr_decay_iters == 50
    assert cfg.dataset.blend_per_split[0] == (["d/train"], None)
    assert cfg.checkpoint.save_interval == 10
    text = str(render_bridge_recipe(saving))
    assert "--max-restarts 3 THIS_FILE.py" in text
    assert "--max-restarts" not in str(render_bridge_recipe(planned("ep8,pp8")))
    assert cfg.model.moe_router_force_load_balancing is True


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_plan_is_the_same_after_a_recipe_and_its_dump(tmp_path_factory, data):
    names = [name for name in catalogue.model_names() if "/" in name and name not in REFUSED_MODELS]
    model = catalogue_model(data.draw(st.sampled_from(names)))
    layout, workload = data.draw(layouts(model.moe is not None)), data.draw(workloads())
    assume(not check_legality(Job(model=model, workload=workload, layout=layout)))
    if model.moe is None:  # what trains a router says nothing then
        workload = replace(workload, loss=LossSpec(), router=RouterTraining())
    plan = build_plan(model.name, layout, workload)
    assume(not refusals(plan) and not list(bridge_refusals(plan)))
    path = tmp_path_factory.mktemp("dump") / "config.yaml"
    path.write_text(dump(built(plan)))
    command = read_launch(path, {})
    again = interpret_launch(
        command, world_size=layout.world_size, folder=path.parent, named_model=model
    )
    assert again.layout == as_read(layout)
    assert again.workload == as_written(plan).workload


def test_the_other_order_of_ranks_has_a_place():
    recipe = render_bridge_recipe(planned("pp2,order=tp-cp-ep-pp-dp", name="Qwen/Qwen2.5-32B"))
    assert "use_tp_pp_dp_mapping=True" in recipe


def test_a_shared_expert_beside_the_exchange_has_a_place():
    recipe = render_bridge_recipe(planned("tp2,ep8,overlap=shared", name="deepseek-ai/DeepSeek-V3"))
    assert "model.moe_shared_expert_overlap = True" in recipe
    assert "moe_shared_expert_overlap = False" not in recipe


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (planned("ep8", name="mistralai/Mixtral-8x7B-v0.1"), "converts no mixtral"),
        (planned("ep4", name="Qwen/Qwen2-57B-A14B"), "converts no qwen2_moe"),
        (
            planned(
                "ep8,pp8",
                ramp=BatchRampSpec(ramp_start=512, ramp_increment=512, ramp_samples=10_000),
            ),
            "has batches of one size",
        ),
        (
            replace(planned("ep8,pp8,dispatcher=deepep"), hardware=catalogue.hardware("256xGB200")),
            "has no DeepEP on GB200",
        ),
        (
            planned("ep8,pp8", trainer=TrainerSpec(attention_backend=AttentionBackend.UNFUSED)),
            "kernels of its own providers",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_bridge_does_not_start_is_refused(plan, reason):
    with pytest.raises(BadInput, match=reason):
        render_bridge_recipe(plan)


@pytest.mark.parametrize(
    "name",
    [
        "zai-org/GLM-4.5",
        "zai-org/GLM-4.7-Flash",
        "inclusionAI/Ling-mini-2.0",
        "tencent/Hy3-preview",
    ],
)
def test_families_that_bridge_registers_are_written(name):
    assert built(planned("ep8", name=name)).model.hf == name


def test_no_model_that_bridge_registers_is_refused_for_that():
    """The families that it converts are those of its own register, not of a list beside it."""
    registered = ("Qwen/Qwen3-Next-80B-A3B", "nvidia/Nemotron-H-56B", "zai-org/GLM-5")
    for name in registered:
        rules = [reason.rule for reason in bridge_refusals(planned("ep1", name=name))]
        assert not any("converts no" in rule for rule in rules)


@pytest.mark.parametrize(
    "name",
    [
        "allenai/OLMoE-1B-7B-0924",  # norms over all heads
        "MiniMaxAI/MiniMax-M2",
        "nvidia/Nemotron-3-Nano-30B-A3B",  # a hybrid
        "Qwen/Qwen3-Next-80B-A3B",
        "zai-org/GLM-5",  # an indexer
    ],
)
def test_models_that_bridge_builds_by_its_own_code_start_although_megatron_has_no_flags(name):
    plan = planned("ep2", name=name)
    assert megatron_refusals(plan_job(plan), plan.hardware)
    assert built(plan).model.hf == name


def test_hybrids_are_cut_evenly_and_a_kinds_of_router_that_core_lacks_stay_refused():
    hybrid = planned("ep2,pp2,vpp2", name="nvidia/Nemotron-3-Nano-30B-A3B")
    assert [reason.field for reason in bridge_refusals(hybrid)] == ["layout.vpp"]
    grouped = planned("ep2", name="deepseek-ai/DeepSeek-V2")
    assert "model.moe.router.group_scores" in [reason.field for reason in bridge_refusals(grouped)]


def test_a_length_is_always_there_and_whole_graphs_do_not_look_at_their_values():
    cfg = built(planned("ep8,dispatcher=hybridep,graphs=full,zero1"))
    assert cfg.train.train_iters == 100
    assert cfg.rerun_state_machine.check_for_nan_in_loss is False
    assert cfg.ddp.check_for_nan_in_grad is False


def test_latent_attention_without_yarn_has_no_fused_rotation():
    assert (
        built(planned("ep8", name="moonshotai/Moonlight-16B-A3B")).model.apply_rope_fusion is False
    )


def test_models_that_hugging_face_does_not_know_are_refused():
    with pytest.raises(
        BadInput,
        match=r"model\.name=GPT3-175B: Megatron Bridge takes models by their Hugging Face name",
    ):
        render_bridge_recipe(planned("tp8,pp8", name="GPT3-175B"))
    with pytest.raises(BadInput, match="de-duplicates tokens in DeepEP"):
        render_bridge_recipe(replace(planned("ep8,pp8,dispatcher=dedup")))


def test_bridge_says_yarn_that_no_option_of_megatron_says() -> None:
    """Kimi-K2 turns by beta_fast 1: Megatron-LM has no option for it, its configuration a field."""
    plan = planned("tp1,ep64", name="moonshotai/Kimi-K2")
    trainers = list_trainers(plan)
    assert "bridge" in trainers
    assert "megatron" not in trainers
    recipe = render_bridge_recipe(plan)
    assert "model.beta_fast = 1.0" in recipe
    assert "model.original_max_position_embeddings = 4096" in recipe
