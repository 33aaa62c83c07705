"""The options that Megatron-LM's parser and its later checks accept, written down for tests.

The source is arguments.py and transformer_config.py at d98e8a64. Nothing of the exporter is used.
"""

import csv
from importlib import resources

TABLE = resources.files("moewright.intake.megatron").joinpath("data/megatron_flags.csv").read_text()
OPTIONS = {row["flag"]: row for row in csv.DictReader(TABLE.splitlines())}


def parse_flags(flags):
    """Return flags as {name: values}, after asserting what argparse would.

    They are known, stand once, and have the right number of values, types and choices.
    """
    names = [name for name, *_ in flags]
    assert len(names) == len(set(names)), names
    options = {name: tuple(values) for name, *values in flags}
    for name, values in options.items():
        assert name in OPTIONS, name
        option = OPTIONS[name]
        has_right_count = {"": len(values) == 1, "+": len(values) >= 1, "*": True}
        if option["nargs"] in has_right_count:
            assert has_right_count[option["nargs"]], name
        else:
            assert len(values) == int(option["nargs"]), name
        for value in values:
            assert value, name
            if option["choices"]:
                assert value in option["choices"].split(), (name, value)
            if option["type"] in ("int", "float"):
                {"int": int, "float": float}[option["type"]](value)
    return options


def read_integer(options, name, default):
    return int(options[name][0]) if name in options else default


def check_options(options, world_size, environment):
    """Assert what Megatron-LM asserts of options together, on a node of Hopper."""
    tp, cp, pp = (
        read_integer(options, f"--{kind}-parallel-size", 1)
        for kind in ("tensor-model", "context", "pipeline-model")
    )
    ep = read_integer(options, "--expert-model-parallel-size", 1)
    etp = read_integer(options, "--expert-tensor-parallel-size", tp)
    assert world_size % (tp * cp * pp) == 0
    assert world_size % (etp * ep * pp) == 0
    dp = world_size // (tp * cp * pp)
    assert not ("--bf16" in options and "--fp16" in options)
    check_experts(options, tp, ep)
    check_stages(options, pp)
    check_batches(options, dp)
    check_memory(options, environment)
    check_overlap(options, tp, cp, pp, environment)
    assert read_integer(options, "--max-position-embeddings", 0) >= read_integer(
        options, "--seq-length", 0
    )
    if cp > 1:
        assert read_integer(options, "--seq-length", 0) % (2 * cp) == 0
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
        assert read_integer(options, "--save-interval", 0) > 0
    if options.get("--tokenizer-type") == ("NullTokenizer",):
        assert (
            0
            <= read_integer(options, "--null-tokenizer-eod-id", -1)
            < read_integer(options, "--vocab-size", 0)
        )
    assert float(options["--min-lr"][0]) <= float(options["--lr"][0])


def check_experts(options, tp, ep):
    if "--num-experts" not in options:
        assert ep == 1
        assert not [name for name in options if name.startswith("--moe-") or "expert" in name]
        return
    number = read_integer(options, "--num-experts", 0)
    assert number % ep == 0
    assert not (ep > 1 and "--fp16" in options)
    assert tp == 1 or "--sequence-parallel" in options
    assert "--moe-grouped-gemm" not in options or "--bf16" in options
    score = options["--moe-router-score-function"][0]
    if "--moe-router-enable-expert-bias" in options:
        assert score in ("sigmoid", "sqrtsoftplus")
    if score == "softmax" and options["--moe-router-topk"] == ("1",):
        assert "--moe-router-pre-softmax" in options
    if "--moe-router-num-groups" in options:
        groups, kept = (
            read_integer(options, f"--moe-router-{name}", 0)
            for name in ("num-groups", "group-topk")
        )
        assert number % groups == 0
        assert kept <= groups
    kinds = options["--moe-router-load-balancing-type"]
    assert kinds == ("none",) or len(kinds) == len(options["--moe-aux-loss-coeff"])
    if "--moe-flex-dispatcher-backend" in options:
        assert options["--moe-token-dispatcher-type"] == ("flex",)
    if "--moe-layer-freq" in options:
        pattern = options["--moe-layer-freq"][0]
        assert set(pattern) <= set("0123456789[]()+*,")
        assert len(eval(pattern)) == read_integer(options, "--num-layers", 0)


def check_stages(options, pp):
    options_of_stages = (
        "--num-layers-per-virtual-pipeline-stage",
        "--num-virtual-stages-per-pipeline-rank",
    )
    spellings = [
        name for name in (*options_of_stages, "--pipeline-model-parallel-layout") if name in options
    ]
    assert len(spellings) <= 1
    counted = sum(
        f"--account-for-{name}-in-pipeline-split" in options for name in ("embedding", "loss")
    )
    if "--pipeline-model-parallel-layout" in options:
        assert not counted
        return
    virtual = read_integer(options, "--num-virtual-stages-per-pipeline-rank", 1)
    layers = read_integer(options, "--num-layers", 0) + counted
    assert layers % pp == 0
    assert layers // pp % virtual == 0
    if virtual > 1:
        assert pp > (2 if "--no-overlap-p2p-communication" in options else 1)
        group = read_integer(options, "--microbatch-group-size-per-virtual-pipeline-stage", pp)
        assert group >= pp


def check_batches(options, dp):
    step = read_integer(options, "--micro-batch-size", 0) * dp
    batch = read_integer(options, "--global-batch-size", 0)
    assert batch % step == 0
    by_steps = {"--train-iters", "--lr-decay-iters", "--lr-warmup-iters"} & set(options)
    by_samples = {"--train-samples", "--lr-decay-samples", "--lr-warmup-samples"} & set(options)
    assert not (by_steps and by_samples)
    if "--rampup-batch-size" in options:
        start, grow, _ = map(int, options["--rampup-batch-size"])
        assert not by_steps
        assert start % step == 0 == grow % step
        assert (batch - start) % grow == 0


def check_memory(options, environment):
    granularity = options.get("--recompute-granularity", ("",))[0]
    assert (
        (granularity == "full")
        == ("--recompute-method" in options)
        == ("--recompute-num-layers" in options)
    )
    modules = options.get("--recompute-modules", ())
    assert bool(modules) == (granularity == "selective")
    if "moe_act" in modules:
        assert "--moe-grouped-gemm" in options
    if "--fp8-format" in options and {"moe_act", "layernorm"} & set(modules):
        assert options["--fp8-recipe"] != ("delayed",)
    if "--use-megatron-fsdp" in options:
        assert options["--ckpt-format"] == ("fsdp_dtensor",)
        assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] != "1"
    if "--optimizer-cpu-offload" in options:
        assert "--use-precision-aware-optimizer" in options
    if "--use-precision-aware-optimizer" in options:
        assert "--use-distributed-optimizer" in options
    offloaded = options.get("--offload-modules", ())
    assert bool(offloaded) == ("--fine-grained-activation-offloading" in options)
    assert "attn_proj" not in offloaded or "core_attn" in offloaded
    assert not (offloaded and granularity == "full")
    assert not ("moe" in modules and {"expert_fc1", "moe_act"} & set(offloaded))
    if "--cuda-graph-impl" in options:
        assert "expandable_segments" not in environment.get("PYTORCH_CUDA_ALLOC_CONF", "")
        assert "--te-rng-tracker" in options
        whole_step = options["--cuda-graph-impl"] == ("full_iteration",)
        assert whole_step == ("--cuda-graph-modules" not in options)
        assert granularity != "full" or whole_step
        graphed = options.get("--cuda-graph-modules", ())
        assert "moe_preprocess" not in graphed or "moe_router" in graphed
        assert not whole_step or "--no-check-for-nan-in-loss-and-grad" in options


def check_overlap(options, tp, cp, pp, environment):
    if "--overlap-param-gather" in options:
        assert "--overlap-grad-reduce" in options
        assert "--use-distributed-optimizer" in options
    if "--tp-comm-overlap" in options:
        assert "--sequence-parallel" in options
        assert tp > 1
    connections = environment["CUDA_DEVICE_MAX_CONNECTIONS"]
    overlaps_moe = "--overlap-moe-expert-parallel-comm" in options
    if (tp > 1 or cp > 1) and not overlaps_moe and "--use-megatron-fsdp" not in options:
        assert connections == "1"
    if overlaps_moe:
        assert connections != "1"
        assert read_integer(options, "--expert-model-parallel-size", 1) > 1
        assert options["--moe-token-dispatcher-type"][0] in ("alltoall", "flex")
        assert pp == 1 or {
            "--num-virtual-stages-per-pipeline-rank",
            "--pipeline-model-parallel-layout",
        } & set(options)
        assert options.get("--recompute-granularity") != ("full",)
        assert "moe" not in options.get("--recompute-modules", ())
        assert "--bf16" in options or "--fp16" in options
        assert read_integer(options, "--mtp-num-layers", 0) <= 1
        assert not {"moe", "mlp"} & set(options.get("--cuda-graph-modules", ()))
