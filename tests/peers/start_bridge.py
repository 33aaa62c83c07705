"""Starts of Megatron Bridge on a machine without GPUs, up to its checked configuration.

`python start_bridge.py MEGATRON_BRIDGE MEGATRON_LM < recipes.jsonl > verdicts.jsonl` runs Bridge's
own code: its provider of the model, from the model's config.json, its configuration and all that
it checks in it, with Megatron-core's. Kernels are stand-ins, as tests/megatron/start.py has them,
and so are data and quantizers; omegaconf, rich and Pillow are needed.

A recipe is {"id", "text", "world_size", "capability", "config"}; its verdict has the same
id and `refusal`, "" where the configuration is accepted.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import typing
import warnings
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "megatron"))
import start as megatron_start

_PACKAGES = (
    *("datasets", "modelopt", "accelerate", "nvidia_resiliency_ext", "wandb", "peft", "fla"),
    *("multistorageclient", "causal_conv1d", "mamba_ssm", "flash_attn", "flashinfer"),
    *("qwen_vl_utils", "bitsandbytes", "megatron_energon"),
)


def start(bridge, recipe: dict) -> str:
    """Build and check a configuration; return what Bridge says against it, "" for nothing."""
    for name in megatron_start._OWN_VARIABLES:  # of the recipe before
        os.environ.pop(name, None)
    megatron_start._set_device(recipe["capability"])
    torch.cuda.is_available = lambda: False
    os.environ.update(WORLD_SIZE=str(recipe["world_size"]), RANK="0")
    from_published = bridge.AutoBridge.__dict__["from_hf_pretrained"]
    try:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(recipe["config"]))
            bridge.AutoBridge.from_hf_pretrained = classmethod(
                lambda cls, name, **options: from_published.__func__(cls, folder, **options)
            )
            space = {"__name__": "recipe"}
            exec(compile(recipe["text"], "recipe.py", "exec"), space)
            space["config"]().validate()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        bridge.AutoBridge.from_hf_pretrained = from_published
    return ""


def main(bridge: str, megatron_lm: str) -> None:
    """Read recipes from standard input, write a verdict for each to standard output."""
    sys.path[:0] = [f"{bridge}/src", megatron_lm]
    if not hasattr(typing, "override"):  # Python 3.11; Bridge's own images have 3.12
        setattr(typing, "override", lambda method: method)  # noqa: B010
    megatron_start._KERNEL_PACKAGES += _PACKAGES
    sys.meta_path.insert(0, megatron_start._KernelFinder())
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    verdicts = sys.stdout
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        from megatron import bridge as package
    for line in sys.stdin:
        recipe = json.loads(line)
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            refusal = " ".join(start(package, recipe).split())
        print(json.dumps({"id": recipe["id"], "refusal": refusal}), file=verdicts, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
