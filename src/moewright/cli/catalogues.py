"""`moewright models` and `moewright hardware`: what is known by name, and by which source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moewright.cli.answers import write_answer
from moewright.cli.options import JsonOption

if TYPE_CHECKING:
    from moewright.spec.record import Row


def models(*words: str, json: JsonOption = None) -> int:
    """List the models that are known by name, with the sources of their figures.

    Parameters
    ----------
    words
        Parts of a name, in either case, such as "qwen3 moe"; all models when not given.
    json
        Write the table to this file; "-": to standard output, and the text to standard error.
    """
    from moewright.api.catalogues import models as list_models

    table = list_models(" ".join(words))
    with write_answer(table, json) as console:
        for line in _format_lines(table.to_rows()):
            console.print(line, soft_wrap=True)
    return 0


def hardware(on: str = "", /, *, json: JsonOption = None) -> int:
    """List the devices that are known by name, or show one, with the sources of its figures.

    Parameters
    ----------
    on
        One hardware as count x device, such as "256xH800", a device, or a hardware file; all known
        devices when not given.
    json
        Write the figures to this file; "-": to standard output, and the text to standard error.
    """
    from moewright.api.catalogues import HardwareTable
    from moewright.api.catalogues import hardware as find_hardware

    answer = find_hardware(on)
    rows = answer.to_rows()
    if not isinstance(answer, HardwareTable):
        rows = HardwareTable(devices=(answer,)).to_rows()
    with write_answer(answer, json) as console:
        for line in _format_lines(rows):
            console.print(line, soft_wrap=True)
    return 0


def _format_lines(rows: Sequence[Row]) -> list[str]:
    from moewright.spec.record import format_table

    return format_table(rows)
