"""Warm-up files of the settings: they are read with the settings, and again whenever one has changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dispatcher.features.models.options import build_options
from dispatcher.features.models.warm_up_files import WarmupFile, load_warmup_files
from dispatcher.features.models.warmup import WarmupRules
from dispatcher.settings.load import parse_settings
from dispatcher.settings.model import Settings

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


def load_file(directory: Path) -> WarmupFile:
    (file,) = load_warmup_files(parse_valid(directory)).values()
    return file


def read_prompts(file: WarmupFile) -> list[str]:
    return [json.loads(each.body)["prompt"] for each in file.load()[0]]


def test_warm_up_file_is_checked_by_the_rules_of_the_gateway(warmup_file: Path, tmp_path: Path) -> None:
    files = load_warmup_files(parse_valid(tmp_path))
    assert list(files) == ["qwen"]
    assert (files["qwen"].path, files["qwen"].setting) == (warmup_file, "models[1].warmup")
    (request,), problem = files["qwen"].load()
    assert (request.url, request.repeat, problem) == ("/v1/completions", 1, "")
    for extra in ("queue: {max_payload_bytes: 10}", "gateway: {url: http://gw, allowed_paths: []}"):
        warmup_file.write_text('{"url": "/v1/embeddings", "body": {"model": "qwen"}}')
        text = extra if extra.startswith("gateway") else f"gateway: {{url: http://gw}}\n{extra}"
        found = parse_settings(text + "\nmodels: [{name: qwen, warmup: warm.jsonl}]", {}, directory=tmp_path)
        assert isinstance(found, Settings), found
        with pytest.raises(OSError, match="line 1: "):
            load_warmup_files(found)


def test_changed_file_is_read_again(warmup_file: Path, tmp_path: Path) -> None:
    file = load_file(tmp_path)
    assert read_prompts(file) == ["a"]
    warmup_file.write_text(LINE_FORMAT % "a" + LINE_FORMAT % "longer")
    assert read_prompts(file) == ["a", "longer"]
    replaced = tmp_path / "new"
    replaced.write_text(LINE_FORMAT % "c")
    replaced.rename(warmup_file)
    assert read_prompts(file) == ["c"]
    assert file.read() is file.read(), "an unchanged file is not read again"


@pytest.mark.parametrize("break_file", [lambda path: path.write_text("{"), lambda path: path.unlink()])
def test_last_valid_content_is_used_while_the_file_is_unusable(
    warmup_file: Path, tmp_path: Path, break_file: Callable[[Path], object]
) -> None:
    file = load_file(tmp_path)
    break_file(warmup_file)
    requests, problem = file.load()
    assert len(requests) == 1
    assert problem.startswith(f"warm.jsonl: models[1].warmup: {warmup_file}: ")
    warmup_file.write_text(LINE_FORMAT % "again")
    assert read_prompts(file) == ["again"]
    assert file.load()[1] == ""


def test_settings_are_rejected_with_all_problems_and_without_bodies(
    warmup_file: Path, tmp_path: Path
) -> None:
    warmup_file.write_text('{"body": {"model": "qwen", "prompt": "hunter2", "stream": true}}\n{"x": 1}\n')
    with pytest.raises(OSError, match=r"^models\[1\]\.warmup: ") as raised:
        load_file(tmp_path)
    assert "line 1: body.stream: cannot be had in a warm-up" in str(raised.value)
    assert "line 2: x: unknown field" in str(raised.value)
    assert "hunter2" not in str(raised.value)
    warmup_file.unlink()
    with pytest.raises(OSError, match=r"models\[1\]\.warmup: .*cannot be read: No such file or directory$"):
        load_file(tmp_path)


def test_file_that_was_never_usable_gives_no_requests(warmup_file: Path, tmp_path: Path) -> None:
    warmup_file.write_text("")
    file = WarmupFile(warmup_file, "models[0].warmup", WarmupRules("/v1/completions"))
    assert file.load() == ((), f"warm.jsonl: models[0].warmup: {warmup_file}: holds no request")


def test_directory_cannot_be_read_as_a_warm_up_file(tmp_path: Path) -> None:
    found = WarmupFile(tmp_path, "models[0].warmup", WarmupRules("/v1/completions")).read()
    assert "cannot be read" in str(found)


@pytest.mark.usefixtures("warmup_file")
def test_terms_of_a_family_say_whether_it_has_a_warm_up(tmp_path: Path) -> None:
    models = "[{name: qwen, warmup: warm.jsonl, warmup_required: true}, {name: other, match: 'v{version}'}]"
    found = parse_settings(f"gateway: {{url: http://gw}}\nmodels: {models}\n", {}, directory=tmp_path)
    assert isinstance(found, Settings), found
    (options,) = build_options(found)
    qwen, other = options.families
    assert (qwen.has_warm_up, qwen.is_warmup_required) == (True, True)
    assert qwen.load_warmup is not None
    assert (other.has_warm_up, other.is_warmup_required, other.load_warmup) == (False, False, None)
