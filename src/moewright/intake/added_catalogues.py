"""The files of devices, networks and models that installed packages add to the catalogue."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import resources

from moewright.spec.errors import BadInput, Reason
from moewright.spec.extensions import ExtensionPoint, list_extensions, load_extension


def read_added_files(file_name: str) -> Iterator[tuple[str, str]]:
    """Yield where each package that has such a file has it, and its text.

    Raises:
        BadInput: a package cannot be imported.
    """
    for name, entry in list_extensions(ExtensionPoint.CATALOGUE).items():
        package = load_extension(ExtensionPoint.CATALOGUE, name)
        file = resources.files(package).joinpath(file_name)
        if file.is_file():
            yield f"{entry.value}/{file_name}", file.read_text(encoding="utf-8")


def check_new_names(names: Iterable[str], own_names: Iterable[str], *, where: str) -> None:
    """Refuse names that the catalogue has already: an estimate would not say which it used.

    Raises:
        BadInput: a name is known, whatever the case of its letters.
    """
    folded = {name.casefold() for name in own_names}
    for name in names:
        if name.casefold() in folded:
            rule = "is in the catalogue already; an added entry needs a name of its own"
            raise BadInput(Reason(field=where, value=name, rule=rule))
