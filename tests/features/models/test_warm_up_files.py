"""Warm-up files of the settings: they are read with the settings, and again whenever one has changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dispatcher.features.models.warm_up_files import WarmupFiles, read_warmup_file
from dispatcher.features.models.warmup import WarmupRules
from dispatcher.settings.load import parse_settings
from dispatcher.settings.model import Settings
from dispatcher.settings.yaml_source import Problem

LINE_FORMAT = '{"body": {"model": "qwen", "prompt": "%s"}}\n'


@pytest.fixture
def warmup_file(tmp_path: Path) -> Path:
    path = tmp_path / "warm.jsonl"
    path.write_text(LINE_FORMAT % "a")
    return path


def parse_valid(directory: Path) -> Settings:
    text = "gateway: {url: http://gw}\nmodels: [{name: other}, {name: qwen, warmup: warm.jsonl}]\n"
    found = parse_settings(text, {}, directory=directory)
    assert isinstance(found, Settings), found
    return found


def read_prompts(files: WarmupFiles) -> list[str]:
    return [json.loads(each.body)["prompt"] for each in files.requests_for("qwen")[0]]


def test_warm_up_file_is_checked_by_the_rules_of_the_gateway(warmup_file: Path, tmp_path: Path) -> None:
    files = WarmupFiles.load_usable(parse_valid(tmp_path))
    assert dict(files.paths) == {"qwen": warmup_file}
    assert files.setting_path("qwen") == "models[1].warmup"
    (request,), problem = files.requests_for("qwen")
    assert (request.url, request.repeat, problem) == ("/v1/completions", 1, "")
    assert files.requests_for("other") == ((), "")
    for extra in ("queue: {max_payload_bytes: 10}", "gateway: {url: http://gw, allowed_paths: []}"):
        warmup_file.write_text('{"url": "/v1/embeddings", "body": {"model": "qwen"}}')
        text = extra if extra.startswith("gateway") else f"gateway: {{url: http://gw}}\n{extra}"
        found = parse_settings(text + "\nmodels: [{name: qwen, warmup: warm.jsonl}]", {}, directory=tmp_path)
        assert isinstance(found, Settings), found
        with pytest.raises(OSError, match="line 1: "):
            WarmupFiles.load_usable(found)


def test_changed_file_is_read_again(warmup_file: Path, tmp_path: Path) -> None:
    files = WarmupFiles.load_usable(parse_valid(tmp_path))
    assert read_prompts(files) == ["a"]
    warmup_file.write_text(LINE_FORMAT % "a" + LINE_FORMAT % "longer")
    assert read_prompts(files) == ["a", "longer"]
    replaced = tmp_path / "new"
    replaced.write_text(LINE_FORMAT % "c")
    replaced.rename(warmup_file)
    assert read_prompts(files) == ["c"]
    assert files.read_requests("qwen") is files.read_requests("qwen"), "an unchanged file is not read again"


@pytest.mark.parametrize("break_file", [lambda path: path.write_text("{"), lambda path: path.unlink()])
def test_last_valid_content_is_used_while_the_file_is_unusable(
    warmup_file: Path, tmp_path: Path, break_file: Callable[[Path], object]
) -> None:
    files = WarmupFiles.load_usable(parse_valid(tmp_path))
    break_file(warmup_file)
    requests, problem = files.requests_for("qwen")
    assert len(requests) == 1
    assert problem.startswith(f"warm.jsonl: models[1].warmup: {warmup_file}: ")
    warmup_file.write_text(LINE_FORMAT % "again")
    assert read_prompts(files) == ["again"]
    assert files.requests_for("qwen")[1] == ""


def test_settings_are_rejected_with_all_problems_and_without_bodies(
    warmup_file: Path, tmp_path: Path
) -> None:
    warmup_file.write_text('{"body": {"model": "qwen", "prompt": "hunter2", "stream": true}}\n{"x": 1}\n')
    with pytest.raises(OSError, match=r"^models\[1\]\.warmup: ") as raised:
        WarmupFiles.load_usable(parse_valid(tmp_path))
    assert "line 1: body.stream: cannot be had in a warm-up" in str(raised.value)
    assert "line 2: x: unknown field" in str(raised.value)
    assert "hunter2" not in str(raised.value)
    warmup_file.unlink()
    (problem,) = WarmupFiles(parse_valid(tmp_path)).find_problems()
    assert (
        str(problem)
        == f"warm.jsonl: models[1].warmup: {warmup_file}: cannot be read: No such file or directory"
    )
    assert isinstance(WarmupFiles(parse_valid(tmp_path)).read_requests("qwen"), Problem)


def test_file_that_was_never_usable_gives_no_requests(warmup_file: Path, tmp_path: Path) -> None:
    warmup_file.write_text("")
    assert WarmupFiles(parse_valid(tmp_path)).requests_for("qwen")[0] == ()


def test_directory_cannot_be_read_as_a_warm_up_file(tmp_path: Path) -> None:
    found = read_warmup_file(tmp_path, WarmupRules("/v1/completions"))
    assert isinstance(found, str)
    assert "cannot be read" in found
