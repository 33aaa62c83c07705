"""`moewright upcycle`: a dense checkpoint as one with experts, for `train` to start from."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import ModelSpec

if TYPE_CHECKING:
    from moewright.engine.run.upcycle import ReadParameter


def upcycle(
    dense: Path,
    /,
    *,
    out: Path,
    experts: int,
    top_k: Annotated[int, Parameter(name="--top-k")],
    granularity: int = 1,
    dense_first: int = 0,
    every: int = 1,
    scaling: Literal["exact", "published"] = "exact",
    router: Literal["post-softmax", "pre-softmax"] = "post-softmax",
    seed: int = 1234,
) -> int:
    """Turn a dense checkpoint into one with experts that computes the same, for `train` to start
    from.

    Writes config.json and a checkpoint; a job starts from them with model.config = OUT and
    model.weights = OUT.

    Parameters
    ----------
    dense
        A run folder or folder of checkpoints of moewright, or a Hugging Face folder.
    out
        The folder to write; it must not hold anything yet.
    experts
        Experts of a layer: copies of its MLP times --granularity.
    top_k
        Experts a token: a multiple of --granularity.
    granularity
        Slices that each MLP is cut into; experts are that much narrower.
    dense_first
        How many layers at the start stay dense.
    every
        Of the others, those whose number this divides get experts.
    scaling
        exact keeps the function; published spreads the factor over gate, up and down, which keeps it only about.
    router
        post-softmax: the weights of the chosen experts sum to 1; pre-softmax: they are shares of all.
    seed
        Decides the routers' fresh rows.
    """
    from moewright.cli.plan_request import translate_fields
    from moewright.codec import write_text
    from moewright.rules.parameters import count_parameters
    from moewright.rules.upcycling import (
        RouterWeighting,
        UpcyclingScaling,
        UpcyclingSpec,
        upcycle_model,
    )

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadInput(
            Reason(
                field="--out", value=str(out), rule="holds something already", nearest=f"{out}-2"
            )
        )
    choice = UpcyclingSpec(
        experts=experts,
        top_k=top_k,
        granularity=granularity,
        dense_first=dense_first,
        every=every,
        scaling=UpcyclingScaling(scaling),
        weighting=RouterWeighting(router),
    )
    source, source_of = _dense(dense)
    with translate_fields(
        lambda field: field if field.startswith("model") else f"--{field.replace('_', '-')}"
    ):
        model = upcycle_model(source, choice)
    config = _config_of(model)

    from moewright.engine.run.upcycle import upcycle as run

    with source_of as read:
        run(read, source, model, choice, seed=seed, out=out)
    write_text(out / "config.json", json.dumps(config, indent=1) + "\n")
    size = count_parameters(model)
    print(
        f"wrote {out}: {model.moe_layer_count} of {model.layers} layers with {experts} experts of width "
        f"{model.moe.ffn_size if model.moe else 0}, top {top_k}; {size.total:,} parameters, {size.active:,} active "
        f"({count_parameters(source).total:,} before)"
    )
    return 0


def _dense(path: Path) -> tuple[ModelSpec, AbstractContextManager[ReadParameter]]:
    """The model of a folder, ours or Hugging Face's, and how its parameters are read."""
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


def _config_of(model: ModelSpec) -> dict[str, Any]:
    """The config.json of a model, which must say all of it. Raises BadInput."""
    from moewright.intake.hf import parse_config
    from moewright.intake.hf_write import build_config

    config = build_config(model)
    read = parse_config(config, where="config.json", name=model.name)
    lost = [
        field.name
        for field in fields(model)
        if getattr(read, field.name) != getattr(model, field.name)
    ]
    if lost:
        rule = f"its config.json cannot say {', '.join(lost)} of this model"
        raise BadInput(Reason(field="model", value=model.family, rule=rule))
    return config
