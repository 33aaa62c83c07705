"""The bill of materials of the wheel (CycloneDX): what others made, and what it is installed with.

The build puts it into the wheel's .dist-info/sboms (PEP 770).
"""

from __future__ import annotations

import json
import re
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BillOfMaterials(BuildHookInterface):
    """A hook of the build of the wheel; an editable one has no bill."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the bill beside the wheel that is built, and have it packed."""
        if version == "editable":
            return
        folder = Path(self.directory)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.metadata.name}.cdx.json"
        path.write_text(json.dumps(self._build(), indent=1) + "\n", "utf-8")
        build_data["sbom_files"].append(str(path))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was packed."""
        for path in build_data["sbom_files"]:
            Path(path).unlink(missing_ok=True)

    def _build(self) -> dict[str, Any]:
        name, version = self.metadata.name, self.metadata.version
        own = f"pkg:pypi/{name}@{version}"
        parts = [*self._list_bundled(), *self._list_dependencies()]
        bill = {
            "bomFormat": "CycloneDX",
            "specVersion": "1.6",
            "version": 1,
            "metadata": {
                "component": {
                    "type": "application",
                    "bom-ref": own,
                    "name": name,
                    "version": version,
                    "purl": own,
                    "licenses": [{"license": {"id": "Apache-2.0"}}],
                }
            },
            "components": parts,
            "dependencies": [
                {"ref": own, "dependsOn": [part["bom-ref"] for part in parts]},
                *({"ref": part["bom-ref"]} for part in parts),
            ],
        }
        # The same for the same content, so that a build can be done again.
        serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(bill))
        return {**bill, "serialNumber": f"urn:uuid:{serial}"}

    def _list_bundled(self) -> Iterator[dict[str, Any]]:
        """Yield the files of others that the wheel ships."""
        listed = tomllib.loads(Path(self.root, "vendored.toml").read_text("utf-8"))
        for file in listed["files"]:
            if not file["path"].startswith("src/"):
                continue
            yield {
                "type": "library",
                "bom-ref": file["package"],
                "name": file["name"],
                "version": file["version"],
                "purl": file["package"],
                "scope": "required",
                "hashes": [{"alg": "SHA-256", "content": file["sha256"]}],
                "licenses": [{"license": {"id": file["licence"]}}],
                "properties": [
                    {"name": "moewright:path", "value": file["path"].removeprefix("src/")},
                    {"name": "moewright:published_as", "value": file["published_as"]},
                ],
            }

    def _list_dependencies(self) -> Iterator[dict[str, Any]]:
        """Yield what the wheel is installed with, in the versions that it was tested with."""
        pins = dict(
            line.split("==")
            for line in Path(self.root, "constraints.txt").read_text("utf-8").splitlines()
            if "==" in line
        )
        versions = {_canonical(name): version for name, version in pins.items()}
        core = self.metadata.core
        extras = ("engine", "track", "data", "studio", "remote", "hub")
        asked = [(text, "required") for text in core.dependencies]
        for extra in extras:
            asked += [(text, "optional") for text in core.optional_dependencies[extra]]
        for text, scope in asked:
            name = _canonical(re.split(r"[^A-Za-z0-9_.-]", text, maxsplit=1)[0])
            package = f"pkg:pypi/{name}@{versions[name]}"
            yield {
                "type": "library",
                "bom-ref": package,
                "name": name,
                "version": versions[name],
                "purl": package,
                "scope": scope,
                "properties": [{"name": "moewright:requirement", "value": text}],
            }


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
