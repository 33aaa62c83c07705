"""What a launch file says of a run beyond its plan: where its files are, and who watches it."""

from __future__ import annotations

from dataclasses import dataclass

SAVE_FOLDER = "checkpoints"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFiles:
    """Paths and names of a run; "" where a launch file does without.

    `save` is the folder of its checkpoints, from which it also goes on, `weights` a checkpoint of
    the trainer that it starts from; `tokenizer` is a name or a folder of Hugging Face, `tracker` a
    project of Weights & Biases. `remarks` are said on top of the file.
    """

    save: str = SAVE_FOLDER
    weights: str = ""
    tokenizer: str = ""
    tracker: str = ""
    remarks: tuple[str, ...] = ()


NO_FILES = RunFiles()
