"""What Megatron-LM's parser and its checks after parsing accept, written down again for tests
(arguments.py and transformer_config.py at d98e8a64). Nothing of the exporter is used here.
"""

import csv
from importlib import resources

TABLE = resources.files("moewright.intake.megatron").joinpath("data/megatron_flags.csv").read_text()
OPTIONS = {row["flag"]: row for row in csv.DictReader(TABLE.splitlines())}


def parse_flags(flags):
    """Flags as {name: values}; asserts what argparse would: known, once, how many values, their
    types and choices."""
    names = [name for name, *_ in flags]
    assert len(names) == len(set(names)), names
    given = {name: tuple(values) for name, *values in flags}
    for name, values in given.items():
        assert name in OPTIONS, name
        option = OPTIONS[name]
        wanted = {"": len(values) == 1, "+": len(values) >= 1, "*": True}.get(option["nargs"])
        assert wanted if wanted is not None else len(values) == int(option["nargs"]), name
        for value in values:
            assert value, name
            if option["choices"]:
                assert value in option["choices"].split(), (name, value)
            if option["type"] in ("int", "float"):
                {"int": int, "float": float}[option["type"]](value)
    return given


def integer(options, name, default):
    return int(options[name][0]) if name in options else default


def check_options(options, world_size, environment):
    """Asserts what Megatron-LM asserts of options together, on a node of Hopper."""
    tp, cp, pp = (
        integer(options, f"--{kind}-parallel-size", 1)
        for kind in ("tensor-model", "context", "pipeline-model")
    )
    ep = integer(options, "--expert-model-parallel-size", 1)
    etp = integer(options, "--expert-tensor-parallel-size", tp)
    assert world_size % (tp * cp * pp) == 0
    assert world_size % (etp * ep * pp) == 0
    dp = world_size // (tp * cp * pp)
    assert not ("--bf16" in options and "--fp16" in options)
    check_experts(options, tp, ep)
    check_stages(options, pp)
    check_batches(options, dp)
    check_memory(options, environment)
    check_overlap(options, tp, cp, pp, environment)
    assert integer(options, "--max-position-embeddings", 0) >= integer(options, "--seq-length", 0)
    if cp > 1:
        assert integer(options, "--seq-length", 0) % (2 * cp) == 0
    if options.get("--cp-comm-type") == ("a2a+p2p",):
        inner, outer = map(int, options["--hierarchical-context-parallel-sizes"])
        assert inner * outer == cp
    sources = (
        ("--mock-data" in options) + ("--data-path" in options) + ("--train-data-path" in options)
    )
    assert sources <= 1
    if "--mtp-num-layers" in options:
        assert options["--position-embedding-type"][0] in ("rope", "none")
    if "--save" in options:
        assert integer(options, "--save-interval", 0) > 0
    if options.get("--tokenizer-type") == ("NullTokenizer",):
        assert (
            0
            <= integer(options, "--null-tokenizer-eod-id", -1)
            < integer(options, "--vocab-size", 0)
        )
    assert float(options["--min-lr"][0]) <= float(options["--lr"][0])


def check_experts(given, tp, ep):
    if "--num-experts" not in given:
        assert ep == 1
        assert not [name for name in given if name.startswith("--moe-") or "expert" in name]
        return
    number = integer(given, "--num-experts", 0)
    assert number % ep == 0
    assert not (ep > 1 and "--fp16" in given)
    assert tp == 1 or "--sequence-parallel" in given
    assert "--moe-grouped-gemm" not in given or "--bf16" in given
    score = given["--moe-router-score-function"][0]
    if "--moe-router-enable-expert-bias" in given:
        assert score in ("sigmoid", "sqrtsoftplus")
    if score == "softmax" and given["--moe-router-topk"] == ("1",):
        assert "--moe-router-pre-softmax" in given
    if "--moe-router-num-groups" in given:
        groups, kept = (
            integer(given, f"--moe-router-{name}", 0) for name in ("num-groups", "group-topk")
        )
        assert number % groups == 0
        assert kept <= groups
    kinds = given["--moe-router-load-balancing-type"]
    assert kinds == ("none",) or len(kinds) == len(given["--moe-aux-loss-coeff"])
    if "--moe-flex-dispatcher-backend" in given:
        assert given["--moe-token-dispatcher-type"] == ("flex",)
    if "--moe-layer-freq" in given:
        pattern = given["--moe-layer-freq"][0]
        assert set(pattern) <= set("0123456789[]()+*,")
        assert len(eval(pattern)) == integer(given, "--num-layers", 0)


def check_stages(given, pp):
    ways = ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")
    said = [name for name in (*ways, "--pipeline-model-parallel-layout") if name in given]
    assert len(said) <= 1
    counted = sum(
        f"--account-for-{name}-in-pipeline-split" in given for name in ("embedding", "loss")
    )
    if "--pipeline-model-parallel-layout" in given:
        assert not counted
        return
    virtual = integer(given, "--num-virtual-stages-per-pipeline-rank", 1)
    layers = integer(given, "--num-layers", 0) + counted
    assert layers % pp == 0
    assert layers // pp % virtual == 0
    if virtual > 1:
        assert pp > (2 if "--no-overlap-p2p-communication" in given else 1)
        group = integer(given, "--microbatch-group-size-per-virtual-pipeline-stage", pp)
        assert group >= pp


def check_batches(given, dp):
    step = integer(given, "--micro-batch-size", 0) * dp
    batch = integer(given, "--global-batch-size", 0)
    assert batch % step == 0
    by_steps = {"--train-iters", "--lr-decay-iters", "--lr-warmup-iters"} & set(given)
    by_samples = {"--train-samples", "--lr-decay-samples", "--lr-warmup-samples"} & set(given)
    assert not (by_steps and by_samples)
    if "--rampup-batch-size" in given:
        start, grow, _ = map(int, given["--rampup-batch-size"])
        assert not by_steps
        assert start % step == 0 == grow % step
        assert (batch - start) % grow == 0


def check_memory(given, environment):
    granularity = given.get("--recompute-granularity", ("",))[0]
    assert (
        (granularity == "full")
        == ("--recompute-method" in given)
        == ("--recompute-num-layers" in given)
    )
    modules = given.get("--recompute-modules", ())
    assert bool(modules) == (granularity == "selective")
    if "moe_act" in modules:
        assert "--moe-grouped-gemm" in given
    if "--fp8-format" in given and {"moe_act", "layernorm"} & set(modules):
        assert given["--fp8-recipe"] != ("delayed",)
    if "--use-megatron-fsdp" in given:
        assert given["--ckpt-format"] == ("fsdp_dtensor",)
        assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] != "1"
    if "--optimizer-cpu-offload" in given:
        assert "--use-precision-aware-optimizer" in given
    if "--use-precision-aware-optimizer" in given:
        assert "--use-distributed-optimizer" in given
    offloaded = given.get("--offload-modules", ())
    assert bool(offloaded) == ("--fine-grained-activation-offloading" in given)
    assert "attn_proj" not in offloaded or "core_attn" in offloaded
    assert not (offloaded and granularity == "full")
    assert not ("moe" in modules and {"expert_fc1", "moe_act"} & set(offloaded))
    if "--cuda-graph-impl" in given:
        assert "expandable_segments" not in environment.get("PYTORCH_CUDA_ALLOC_CONF", "")
        assert "--te-rng-tracker" in given
        whole_step = given["--cuda-graph-impl"] == ("full_iteration",)
        assert whole_step == ("--cuda-graph-modules" not in given)
        assert granularity != "full" or whole_step
        graphed = given.get("--cuda-graph-modules", ())
        assert "moe_preprocess" not in graphed or "moe_router" in graphed
        assert not whole_step or "--no-check-for-nan-in-loss-and-grad" in given


def check_overlap(given, tp, cp, pp, environment):
    if "--overlap-param-gather" in given:
        assert "--overlap-grad-reduce" in given
        assert "--use-distributed-optimizer" in given
    if "--tp-comm-overlap" in given:
        assert "--sequence-parallel" in given
        assert tp > 1
    queues = environment["CUDA_DEVICE_MAX_CONNECTIONS"]
    moving = "--overlap-moe-expert-parallel-comm" in given
    if (tp > 1 or cp > 1) and not moving and "--use-megatron-fsdp" not in given:
        assert queues == "1"
    if moving:
        assert queues != "1"
        assert integer(given, "--expert-model-parallel-size", 1) > 1
        assert given["--moe-token-dispatcher-type"][0] in ("alltoall", "flex")
        assert pp == 1 or {
            "--num-virtual-stages-per-pipeline-rank",
            "--pipeline-model-parallel-layout",
        } & set(given)
        assert given.get("--recompute-granularity") != ("full",)
        assert "moe" not in given.get("--recompute-modules", ())
        assert "--bf16" in given or "--fp16" in given
        assert integer(given, "--mtp-num-layers", 0) <= 1
        assert not {"moe", "mlp"} & set(given.get("--cuda-graph-modules", ()))
