"""What a Kubernetes of a version admits, asked of kubeconform with the schemas that are kept beside this."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.deploy.release import BRIEF
from tests.support import require_tool

_KEPT = json.loads(Path(__file__).with_name("schemas.json").read_text())
KUBERNETES: tuple[str, ...] = tuple(_KEPT["kubernetes"])


def lay_out(directory: Path) -> None:
    """Write the schemas as kubeconform looks for them: a directory a version, a file a kind."""
    for version in KUBERNETES:
        short = version.rpartition(".")[0]
        here = directory / f"v{version}"
        here.mkdir()
        definitions = {
            name: each["schema"]
            for name, kept in _KEPT["definitions"].items()
            for each in kept
            if short in each["in"]
        }
        (here / "all.json").write_text(json.dumps({"definitions": definitions}))
        for name, schema in {**definitions, **_KEPT["crds"]}.items():
            kind, _, api = name.partition(" ")
            if api:
                group, _, last = api.rpartition("/")
                suffix = "-".join(filter(None, (group.partition(".")[0], last)))
                if name in definitions:
                    schema = {"$ref": f"all.json{schema['$ref']}"}
                (here / f"{kind.lower()}-{suffix}.json").write_text(json.dumps(schema))


def faults(text: str, version: str, schemas: Path) -> list[str]:
    """What that Kubernetes would not take of a YAML text, an object a line."""
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
        env=BRIEF,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout.splitlines()
