"""Every documented setting does something: it is read outside `settings/`, and so is what carries it on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from dispatcher.settings import Settings
from dispatcher.settings.load import key_paths
from tests.reads import Class, Read, Source
from tests.source import MODULES, name_of

SETTINGS = "dispatcher.settings"
SHOWN = "dispatcher.telemetry"
"""What goes into a status is shown, by whatever name."""


@pytest.fixture(scope="module")
def source() -> Source:
    return Source({name_of(path): path.read_text() for path in MODULES})


def steps(path: str) -> Iterator[Read]:
    """The reads that lead to a setting: `gateway.tls.ca_file` takes three."""
    model: type[BaseModel] = Settings
    for name in path.split("."):
        yield (model.__module__, model.__name__), name
        kind = model.model_fields[name].annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            model = kind


def test_every_documented_setting_is_read_outside_settings(source: Source) -> None:
    read = source.reads(SETTINGS)
    paths = list(key_paths(Settings))
    assert len(paths) > 60
    assert {path for path in paths if not read.issuperset(steps(path))} == set()


def test_what_carries_a_setting_on_is_read_where_it_arrives(source: Source) -> None:
    settings = {step for path in key_paths(Settings) for step in steps(path)}
    carriers = {carrier for carrier, of in source.carried.items() if of & settings}
    wanted = {each for each in carriers if not each[0][0].startswith(SHOWN)}
    assert {name for (_, name), _ in wanted} >= {"Policy", "RetryPolicy", "Options", "Targets"}
    assert wanted - source.reads("nowhere") == set()


MODEL = """
class Tls:
    ca_file: str

class Gateway:
    url: str
    tls: Tls
    def context(self):
        return self.tls.ca_file
    def _validated(self):
        return self.url

class Settings:
    gateway: Gateway
"""


def read_in(text: str) -> set[str]:
    head = "from dispatcher.settings import Gateway, Settings, Tls\n"
    modules = {SETTINGS: MODEL, "dispatcher.other": head + text}
    found = Source(modules).reads(SETTINGS)
    return {f"{owner}.{name}" for (module, owner), name in found if module == SETTINGS}


def test_a_name_elsewhere_is_no_read() -> None:
    text = """
class Other:
    url: str

def f(settings, other: Other, gateway: Gateway):
    "settings.gateway.url"
    # gateway.url
    settings.gateway.url
    other.url
    gateway = other
    gateway.url
    x = {"url": getattr(gateway, "url")}
    gateway.url = 1
"""
    assert read_in(text) == set()


CASES = {
    "an annotation": "def f(s: Settings | None):\n    g = s.gateway\n    return [g.url for _ in x]",
    "an attribute": """
class A:
    def __init__(self, s: 'Settings'):
        self.g = s.gateway
    def f(self):
        self.g.url
""",
    "what a call returns": "def f() -> Settings: ...\nf().gateway.url",
    "a function within": "def f(s: Settings):\n    def h():\n        return s.gateway.url",
    "a lambda": "def f(s: Settings):\n    h(lambda: s.gateway.url)",
    "several at once": "def f(s: Settings):\n    a, b = 1, s.gateway\n    return f'{b.url}'",
    "a protocol": """
class P:
    @property
    def url(self): ...
def f(p: P):
    p.url
def g(s: Settings):
    f(s.gateway)
""",
}


@pytest.mark.parametrize("text", CASES.values(), ids=CASES)
def test_names_are_followed(text: str) -> None:
    assert read_in(text) == {"Settings.gateway", "Gateway.url"}


def test_what_the_settings_read_themselves_counts_where_it_is_called_from_outside() -> None:
    assert read_in("def f(g: Gateway):\n    g.context()") == {"Gateway.tls", "Tls.ca_file"}
    assert read_in("def f(g: Gateway):\n    pass") == set()


def test_an_object_that_carries_a_setting_is_found() -> None:
    text = "from dispatcher.settings import Gateway\nclass A:\n    where: str\n    when: str\n"
    text += "def f(g: Gateway):\n    A(g.url, when=g.tls)\n"
    made: Class = ("dispatcher.other", "A")
    carried = Source({"dispatcher.settings": MODEL, "dispatcher.other": text}).carried
    assert carried == {
        (made, "where"): {((SETTINGS, "Gateway"), "url")},
        (made, "when"): {((SETTINGS, "Gateway"), "tls")},
    }
