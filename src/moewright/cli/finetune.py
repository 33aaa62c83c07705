"""`moewright finetune`: a Hugging Face folder and chats to a trained Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from moewright.cli.answers import print_nothing, print_now
from moewright.cli.displays import open_display
from moewright.cli.options import PortionOptions, Quiet, SetOption
from moewright.cli.stop_signals import answer_stops
from moewright.spec.errors import BadInput, Reason

_NO_OPTIONS = PortionOptions()


def finetune(
    base: Path | None = None,
    chats: Path | None = None,
    /,
    *,
    out: Path = Path("runs/finetune"),
    on: str = "",
    options: PortionOptions = _NO_OPTIONS,
    set_: SetOption = None,
    quiet: Quiet = False,
) -> int:
    """Fine-tune a Hugging Face folder on chats: build the data, plan, train, and export.

    Without BASE and CHATS, a tiny model learns two hundred chats that moewright brings. The same
    call goes on where an interrupted one stopped. Exit codes are those of `train`.

    Parameters
    ----------
    base
        The Hugging Face folder to start from, with its tokenizer and chat template; or the id of a
        model of the hub.
    chats
        A file or folder of chats, as `data build --chats` reads them.
    out
        The folder of the run; the trained model is in its folder hf.
    on
        Hardware as count x device, such as 8xH100; this machine, which is measured, when not given.
    set_
        Another value for a key of the job, section.key=value; may be given again.
    quiet
        Show nothing while it trains, neither a panel on a terminal nor a line a step elsewhere.
    """
    from moewright.api.finetuning import finetune as run_finetuning
    from moewright.api.finetuning_job import FineTuningRequest
    from moewright.api.training import is_first_rank
    from moewright.intake.hub import locate_folder

    if base is not None and chats is None:
        rule = "is needed with a model: a file of chats"
        raise BadInput(Reason(field="chats", rule=rule, nearest=f"{base} chats.jsonl"))
    request = FineTuningRequest(
        base=base and locate_folder(base, "base"),
        chats=chats,
        out=out,
        on=on,
        options=options,
        overrides=tuple(set_ or ()),
    )
    tell = print_now if is_first_rank() else print_nothing
    return answer_stops(lambda: run_finetuning(request, tell, open_display(is_quiet=quiet)))
