"""Warm-up files as settings name them: read when they come into force, and again when one has changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dispatcher.core.models.warmup import WarmupRules
from dispatcher.settings import Problem, Settings, parse_settings
from dispatcher.settings.warmups import WarmupFiles, read_warmup_file

LINE = '{"body": {"model": "qwen", "prompt": "%s"}}\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "warm.jsonl"
    path.write_text(LINE % "a")
    return path


def settings(directory: Path) -> Settings:
    text = "gateway: {url: http://gw}\nmodels: [{name: other}, {name: qwen, warmup: warm.jsonl}]\n"
    found = parse_settings(text, {}, directory=directory)
    assert isinstance(found, Settings), found
    return found


def prompts(files: WarmupFiles) -> list[str]:
    return [json.loads(each.body)["prompt"] for each in files.requests_for("qwen")[0]]


def test_what_a_file_holds_is_read_with_the_rules_of_the_gateway(file: Path, tmp_path: Path) -> None:
    files = WarmupFiles.load_usable(settings(tmp_path))
    assert dict(files.paths) == {"qwen": file}
    assert files.setting_path("qwen") == "models[1].warmup"
    (request,), problem = files.requests_for("qwen")
    assert (request.url, request.repeat, problem) == ("/v1/completions", 1, "")
    assert files.requests_for("other") == ((), "")
    for extra in ("queue: {max_payload_bytes: 10}", "gateway: {url: http://gw, allowed_paths: []}"):
        file.write_text('{"url": "/v1/embeddings", "body": {"model": "qwen"}}')
        text = extra if extra.startswith("gateway") else f"gateway: {{url: http://gw}}\n{extra}"
        found = parse_settings(text + "\nmodels: [{name: qwen, warmup: warm.jsonl}]", {}, directory=tmp_path)
        assert isinstance(found, Settings), found
        with pytest.raises(OSError, match="line 1: "):
            WarmupFiles.load_usable(found)


def test_a_file_that_changes_is_read_again(file: Path, tmp_path: Path) -> None:
    files = WarmupFiles.load_usable(settings(tmp_path))
    assert prompts(files) == ["a"]
    file.write_text(LINE % "a" + LINE % "longer")
    assert prompts(files) == ["a", "longer"]
    replaced = tmp_path / "new"
    replaced.write_text(LINE % "c")
    replaced.rename(file)
    assert prompts(files) == ["c"]
    assert files.read_requests("qwen") is files.read_requests("qwen"), "it is not read again as it stands"


@pytest.mark.parametrize("spoil", [lambda path: path.write_text("{"), lambda path: path.unlink()])
def test_what_it_held_last_is_used_while_a_file_cannot_be(
    file: Path, tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    files = WarmupFiles.load_usable(settings(tmp_path))
    spoil(file)
    requests, problem = files.requests_for("qwen")
    assert len(requests) == 1
    assert problem.startswith(f"warm.jsonl: models[1].warmup: {file}: ")
    file.write_text(LINE % "again")
    assert prompts(files) == ["again"]
    assert files.requests_for("qwen")[1] == ""


def test_all_that_is_wrong_refuses_the_settings_and_repeats_no_body(file: Path, tmp_path: Path) -> None:
    file.write_text('{"body": {"model": "qwen", "prompt": "hunter2", "stream": true}}\n{"x": 1}\n')
    with pytest.raises(OSError, match=r"^models\[1\]\.warmup: ") as refused:
        WarmupFiles.load_usable(settings(tmp_path))
    assert "line 1: body.stream: cannot be had in a warm-up" in str(refused.value)
    assert "line 2: x: unknown field" in str(refused.value)
    assert "hunter2" not in str(refused.value)
    file.unlink()
    (problem,) = WarmupFiles(settings(tmp_path)).find_problems()
    assert str(problem) == f"warm.jsonl: models[1].warmup: {file}: cannot be read: No such file or directory"
    assert isinstance(WarmupFiles(settings(tmp_path)).read_requests("qwen"), Problem)


def test_a_file_that_never_could_be_used_warms_with_nothing(file: Path, tmp_path: Path) -> None:
    file.write_text("")
    assert WarmupFiles(settings(tmp_path)).requests_for("qwen")[0] == ()


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    found = read_warmup_file(tmp_path, WarmupRules("/v1/completions"))
    assert isinstance(found, str)
    assert "cannot be read" in found
