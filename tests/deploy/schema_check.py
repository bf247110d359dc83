"""Checks of manifests with kubeconform and the schemas of each Kubernetes version in schemas.json."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.deploy.release import GO_ENVIRONMENT
from tests.support import require_tool

_SCHEMAS = json.loads(Path(__file__).with_name("schemas.json").read_text())
KUBERNETES: tuple[str, ...] = tuple(_SCHEMAS["kubernetes"])


def write_schemas(directory: Path) -> None:
    """Write the schemas in the layout of kubeconform: a directory per version, a file per kind."""
    for version in KUBERNETES:
        short = version.rpartition(".")[0]
        version_directory = directory / f"v{version}"
        version_directory.mkdir()
        definitions = {
            name: definition["schema"]
            for name, variants in _SCHEMAS["definitions"].items()
            for definition in variants
            if short in definition["in"]
        }
        (version_directory / "all.json").write_text(json.dumps({"definitions": definitions}))
        for name, schema in {**definitions, **_SCHEMAS["crds"]}.items():
            kind, _, api = name.partition(" ")
            if api:
                group, _, last = api.rpartition("/")
                suffix = "-".join(filter(None, (group.partition(".")[0], last)))
                if name in definitions:
                    schema = {"$ref": f"all.json{schema['$ref']}"}
                (version_directory / f"{kind.lower()}-{suffix}.json").write_text(json.dumps(schema))


def find_schema_errors(text: str, version: str, schemas: Path) -> list[str]:
    """Return a line for each object of a YAML text that this version of Kubernetes would reject."""
    done = subprocess.run(
        [
            require_tool("kubeconform"),
            "-strict",
            "-schema-location",
            f"{schemas}/{{{{.NormalizedKubernetesVersion}}}}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json",
            "-kubernetes-version",
            version,
            "-",
        ],
        input=text,
        env=GO_ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout.splitlines()
