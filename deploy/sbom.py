"""Writes the image's bill of materials, CycloneDX 1.6: from what is installed, not from what was asked for.

Python packages with their licences and the hashes of the files that they came from, what those files say they
contain themselves (PEP 770), Debian packages with the licences of their copyright files, and who needs whom.
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

OURS = "batch-dispatcher"
Component = dict[str, Any]


def bill(
    site: Path,
    hashes: Mapping[str, str],
    system: Sequence[Mapping[str, str]],
    via: Mapping[str, frozenset[str]],
) -> dict[str, Any]:
    """The bill of the Python packages in `site` and of the system's packages beside them.

    `hashes`: Python package → sha256 of the wheel that it came from. `system`: entries of dpkg's status, with
    the copyright file as `Copyright`. `via`: Python package → who asks for it; pyproject.toml is us.
    KeyError: something is installed that these do not know.
    """
    found = {plain(each.name): each for each in distributions(path=[str(site)])}
    ours = found.pop(OURS)
    python = [_python(name, each, hashes[name]) for name, each in sorted(found.items())]
    debian = [_debian(entry) for entry in system]
    refs = {name: component["bom-ref"] for name, component in zip(sorted(found), python, strict=True)}
    packages = {
        entry["Package"]: component["bom-ref"] for entry, component in zip(system, debian, strict=True)
    }
    direct = [refs[name] for name in refs if "(pyproject.toml)" in via[name]]
    needs = [
        (
            OURS,
            direct + [ref for name, ref in packages.items() if re.fullmatch(r"python3[.\d]*-minimal", name)],
        )
    ]
    needs += [(refs[name], [refs[child] for child in refs if name in via[child]]) for name in refs]
    needs += [(packages[entry["Package"]], _depended(entry, packages)) for entry in system]
    written: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "lifecycles": [{"phase": "build"}],
            "component": {
                "type": "application",
                "bom-ref": OURS,
                "name": OURS,
                "version": ours.version,
                "licenses": licences(ours),
            },
        },
        "components": python + debian,
        "dependencies": [{"ref": ref, "dependsOn": sorted(set(children))} for ref, children in needs],
    }
    # The same content, the same number: two builds of one thing can be told to be that.
    written["serialNumber"] = (
        f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, json.dumps(written, sort_keys=True))}"
    )
    return written


def plain(name: str) -> str:
    """The one spelling of a Python package's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _python(name: str, package: Distribution, sha256: str) -> Component:
    ref = f"pkg:pypi/{name}@{package.version}"
    component: Component = {
        "type": "library",
        "bom-ref": ref,
        "name": name,
        "version": package.version,
        "purl": ref,
        "hashes": [{"alg": "SHA-256", "content": sha256}],
        "licenses": licences(package),
    }
    if inside := list(_inside(package, ref)):
        component["components"] = inside
    return component


def licences(package: Distribution) -> list[dict[str, Any]]:
    """As the package's metadata says it: an expression, else classifiers, else a name."""
    metadata: Any = package.metadata  # a message: typeshed promises less of it than there is
    if expression := metadata.get("License-Expression"):
        return [{"expression": expression}]
    classifiers = [line for line in metadata.get_all("Classifier") or [] if line.startswith("License :: OSI")]
    names = [line.rpartition(" :: ")[2] for line in classifiers]
    if not names and "\n" not in (text := metadata.get("License") or "\n"):  # some put the whole text there
        names = [text]
    kept = ", ".join(metadata.get_all("License-File") or [])
    return [{"license": {"name": name}} for name in names or [f"see {kept}" if kept else "not said"]]


def _inside(package: Distribution, ref: str) -> Iterator[Component]:
    """What a wheel contains of others: by the bills that it brings, and the one server that we know of."""
    for file in package.files or []:
        path = Path(str(package.locate_file(file)))
        if "sboms" in file.parts and file.suffix == ".json":
            theirs = json.loads(path.read_text())
            for number, each in enumerate(theirs.get("components", [])):
                kept = {key: each[key] for key in ("name", "version", "purl", "licenses") if each.get(key)}
                yield {"type": each["type"], "bom-ref": f"{ref}#{file.name}-{number}", **kept}
        elif file.name == "valkey-server":
            said = subprocess.run([path, "--version"], check=True, capture_output=True, text=True).stdout
            version = re.search(r"v=(\S+)", said)
            yield {
                "type": "application",
                "bom-ref": f"{ref}#valkey",
                "name": "valkey",
                "version": version[1] if version else "",
                "licenses": [{"license": {"id": "BSD-3-Clause"}}],
            }


def _debian(entry: Mapping[str, str]) -> Component:
    name, version = entry["Package"], entry["Version"]
    source = entry.get("Source", name).split()[0]
    rights = entry["Copyright"]
    named = re.findall(r"^License: *(\S.*)$", rights, re.MULTILINE) if rights.startswith("Format:") else []
    ref = f"pkg:deb/debian/{quote(name, safe='')}@{quote(version, safe=':~')}?arch={entry['Architecture']}"
    return {
        "type": "library",
        "bom-ref": ref,
        "name": name,
        "version": version,
        "purl": ref if source == name else f"{ref}&upstream={quote(source, safe='')}",
        "licenses": [
            {"license": {"name": text}}
            for text in sorted(set(named)) or [f"see /usr/share/doc/{name}/copyright"]
        ],
    }


def _depended(entry: Mapping[str, str], known: Mapping[str, str]) -> list[str]:
    asked = re.findall(r"[a-z0-9][a-z0-9.+-]+", re.sub(r"\([^)]*\)", "", entry.get("Depends", "")))
    return [known[name] for name in asked if name in known]
