"""Bill of materials of the image (CycloneDX 1.6), created from the installed packages.

It lists Python packages with licences and the hashes of their wheels, components that the wheels declare
(PEP 770), Debian packages with the licences of their copyright files, and all dependencies.
"""

from __future__ import annotations

import json
import re
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any
from urllib.parse import quote

PROJECT_NAME = "batch-dispatcher"
Component = dict[str, Any]


def build_bill_of_materials(
    site: Path,
    hashes: Mapping[str, str],
    system: Sequence[Mapping[str, str]],
    via: Mapping[str, frozenset[str]],
) -> dict[str, Any]:
    """Return the bill of materials of the Python packages in `site` and of the system packages.

    `hashes` maps a Python package to the sha256 of its wheel. `system` has entries of dpkg's status, with
    the copyright file as `Copyright`. `via` maps a Python package to the packages that require it, where
    "(pyproject.toml)" is this project. Raise KeyError if an installed package is unknown to these arguments.
    """
    found = {normalize_name(each.name): each for each in distributions(path=[str(site)])}
    project = found.pop(PROJECT_NAME)
    python_components = [
        _describe_python_package(name, each, hashes[name]) for name, each in sorted(found.items())
    ]
    debian_components = [_describe_debian_package(entry) for entry in system]
    python_references = {
        name: component["bom-ref"] for name, component in zip(sorted(found), python_components, strict=True)
    }
    packages = {
        entry["Package"]: component["bom-ref"]
        for entry, component in zip(system, debian_components, strict=True)
    }
    direct = [python_references[name] for name in python_references if "(pyproject.toml)" in via[name]]
    dependencies = [
        (
            PROJECT_NAME,
            direct + [ref for name, ref in packages.items() if re.fullmatch(r"python3[.\d]*-minimal", name)],
        )
    ]
    dependencies += [
        (
            python_references[name],
            [python_references[child] for child in python_references if name in via[child]],
        )
        for name in python_references
    ]
    dependencies += [(packages[entry["Package"]], _find_dependencies(entry, packages)) for entry in system]
    document: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "lifecycles": [{"phase": "build"}],
            "component": {
                "type": "application",
                "bom-ref": PROJECT_NAME,
                "name": PROJECT_NAME,
                "version": project.version,
                "licenses": find_licences(project),
            },
        },
        "components": python_components + debian_components,
        "dependencies": [{"ref": ref, "dependsOn": sorted(set(children))} for ref, children in dependencies],
    }
    # The serial number depends only on the content, so that equal builds have equal bills.
    document["serialNumber"] = (
        f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, json.dumps(document, sort_keys=True))}"
    )
    return document


def normalize_name(name: str) -> str:
    """Return the normalized name of a Python package."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _describe_python_package(name: str, package: Distribution, sha256: str) -> Component:
    ref = f"pkg:pypi/{name}@{package.version}"
    component: Component = {
        "type": "library",
        "bom-ref": ref,
        "name": name,
        "version": package.version,
        "purl": ref,
        "hashes": [{"alg": "SHA-256", "content": sha256}],
        "licenses": find_licences(package),
    }
    if inner_components := list(_find_components_in_wheel(package, ref)):
        component["components"] = inner_components
    return component


def find_licences(package: Distribution) -> list[dict[str, Any]]:
    """Return the licences in the metadata of a package: the expression, else classifiers, else a name."""
    metadata: Any = package.metadata  # An email message: typeshed declares fewer methods than it has.
    if expression := metadata.get("License-Expression"):
        return [{"expression": expression}]
    classifiers = [line for line in metadata.get_all("Classifier") or [] if line.startswith("License :: OSI")]
    names = [line.rpartition(" :: ")[2] for line in classifiers]
    # Some packages put the whole text of the licence into the field for its name.
    if not names and "\n" not in (text := metadata.get("License") or "\n"):
        names = [text]
    licence_files = ", ".join(metadata.get_all("License-File") or [])
    return [
        {"license": {"name": name}}
        for name in names or [f"see {licence_files}" if licence_files else "unknown"]
    ]


def _find_components_in_wheel(package: Distribution, ref: str) -> Iterator[Component]:
    """Yield the components inside a wheel: those in its own bills, and a Valkey server."""
    for file in package.files or []:
        path = Path(str(package.locate_file(file)))
        if "sboms" in file.parts and file.suffix == ".json":
            inner_bill = json.loads(path.read_text())
            for number, each in enumerate(inner_bill.get("components", [])):
                copied_fields = {
                    key: each[key] for key in ("name", "version", "purl", "licenses") if each.get(key)
                }
                yield {"type": each["type"], "bom-ref": f"{ref}#{file.name}-{number}", **copied_fields}
        elif file.name == "valkey-server":
            output = subprocess.run([path, "--version"], check=True, capture_output=True, text=True).stdout
            version = re.search(r"v=(\S+)", output)
            yield {
                "type": "application",
                "bom-ref": f"{ref}#valkey",
                "name": "valkey",
                "version": version[1] if version else "",
                "licenses": [{"license": {"id": "BSD-3-Clause"}}],
            }


def _describe_debian_package(entry: Mapping[str, str]) -> Component:
    name, version = entry["Package"], entry["Version"]
    source = entry.get("Source", name).split()[0]
    copyright_text = entry["Copyright"]
    licence_names = (
        re.findall(r"^License: *(\S.*)$", copyright_text, re.MULTILINE)
        if copyright_text.startswith("Format:")
        else []
    )
    ref = f"pkg:deb/debian/{quote(name, safe='')}@{quote(version, safe=':~')}?arch={entry['Architecture']}"
    return {
        "type": "library",
        "bom-ref": ref,
        "name": name,
        "version": version,
        "purl": ref if source == name else f"{ref}&upstream={quote(source, safe='')}",
        "licenses": [
            {"license": {"name": text}}
            for text in sorted(set(licence_names)) or [f"see /usr/share/doc/{name}/copyright"]
        ],
    }


def _find_dependencies(entry: Mapping[str, str], references: Mapping[str, str]) -> list[str]:
    required_names = re.findall(r"[a-z0-9][a-z0-9.+-]+", re.sub(r"\([^)]*\)", "", entry.get("Depends", "")))
    return [references[name] for name in required_names if name in references]
