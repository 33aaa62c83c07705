"""`moewright upcycle`: a dense checkpoint as one with experts, for `train` to start from."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moewright.cli.options import Count, UpcyclingOptions
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import ModelSpec

if TYPE_CHECKING:
    from moewright.engine.run.upcycle import ReadParameter


def upcycle(dense: Path, /, *, out: Path, options: UpcyclingOptions, seed: Count = 1234) -> int:
    """Turn a dense checkpoint into one with experts that computes the same.

    Writes config.json and a checkpoint; a job starts from them with model.config = OUT and
    model.weights = OUT.

    Parameters
    ----------
    dense
        A run folder or folder of checkpoints of moewright, or a Hugging Face folder.
    out
        The folder to write; it must not hold anything yet.
    seed
        Decides the routers' fresh rows.
    """
    from moewright.api.requests import translate_fields
    from moewright.codec import write_text
    from moewright.intake.hub import locate_folder
    from moewright.rules.shapes.parameters import count_parameters
    from moewright.rules.upcycling import upcycle_model

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        rule = "holds something already"
        raise BadInput(Reason(field="--out", value=str(out), rule=rule, nearest=f"{out}-2"))
    source, open_parameters = _open_dense(locate_folder(dense, "dense"))
    with translate_fields(_option_of_field):
        model = upcycle_model(source, options)
    config = _complete_config(model)

    from moewright.engine.run.upcycle import upcycle as write_upcycled

    with open_parameters as read_parameter:
        write_upcycled(read_parameter, source, model, options, seed=seed, out=out)
    write_text(out / "config.json", json.dumps(config, indent=1) + "\n")
    before = count_parameters(source)
    after = count_parameters(model)
    width = model.moe.ffn_size if model.moe else 0
    print(
        f"wrote {out}: {model.moe_layer_count} of {model.layers} layers with {options.experts} "
        f"experts of width {width}, top {options.top_k}; {after.total:,} parameters, "
        f"{after.active:,} active ({before.total:,} before)"
    )
    return 0


def _option_of_field(field: str) -> str:
    return field if field.startswith("model") else f"--{field.replace('_', '-')}"


def _open_dense(path: Path) -> tuple[ModelSpec, AbstractContextManager[ReadParameter]]:
    """Return the model of a folder, ours or Hugging Face's, and how its parameters are read."""
    from moewright.engine.hf.folder import is_hf_folder
    from moewright.engine.run.upcycle import (
        open_checkpoint_parameters,
        open_hf_parameters,
        read_checkpoint_model,
    )
    from moewright.intake.hf import read_config

    if is_hf_folder(path):
        model = read_config(path)
        return model, open_hf_parameters(model, path)
    return read_checkpoint_model(path), open_checkpoint_parameters(path)


def _complete_config(model: ModelSpec) -> dict[str, Any]:
    """Return the config.json of a model, which must say all of it.

    Raises:
        BadInput: Reading the config back does not give the same model.
    """
    from moewright.intake.hf import build_config, parse_config

    config = build_config(model)
    read_back = parse_config(config, where="config.json", name=model.name)
    lost = [
        field.name
        for field in fields(model)
        if getattr(read_back, field.name) != getattr(model, field.name)
    ]
    if lost:
        rule = f"its config.json cannot say {', '.join(lost)} of this model"
        raise BadInput(Reason(field="model", value=model.family, rule=rule))
    return config
