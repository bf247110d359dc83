"""Settings of batching: rules and timeouts as the dispatcher uses them."""

from __future__ import annotations

import json

import pytest

from dispatcher.features.merging.settings import BatchingSettings
from tests.settings.parsing import MINIMAL, list_problems, parse_valid


def parse_batching(text: str) -> BatchingSettings:
    return parse_valid(MINIMAL + text).get_section(BatchingSettings)


def test_batching_rules_are_read_as_json_from_a_variable_and_problems_name_the_rule() -> None:
    rules = json.dumps([{"paths": ["/v1/models/*:predict"], "max_size": 64, "preferred_sizes": [16, 32]}])
    settings = parse_valid(BATCHING__RULES=rules, BATCHING__MODE="on")
    (rule,) = settings.get_section(BatchingSettings).active_rules()
    assert (rule.shape.name, rule.mode, rule.grouping.preferred_sizes) == ("tensorflow", "on", (16, 32))
    assert list_problems(MINIMAL, BATCHING__RULES='[{"paths": ["/v1/embeddings"]}, {"paths": ["/odd"]}]') == [
        "environment: BATCH_DISPATCHER__BATCHING__RULES[1].shape: must be given: no shape is usual at /odd"
    ]
    (problem,) = list_problems(MINIMAL, BATCHING__RULES="[{")
    assert problem.startswith("environment: BATCH_DISPATCHER__BATCHING__RULES: cannot be read")


@pytest.mark.parametrize("mode", ["off", "auto"])
def test_timeouts_of_batching_rules_keep_the_order_of_the_rules_in_every_mode(mode: str) -> None:
    rules = (
        "[{paths: [/v1/embeddings]},"
        " {paths: ['/v2/*'], shape: kserve, default_timeout_s: 1.5, timeout_action: delay}]"
    )
    timeouts = parse_batching(f"batching: {{mode: {mode}, rules: {rules}}}").build_timeouts()
    assert [(each.paths, each.timeout_s, each.action) for each in timeouts] == [
        (("/v1/embeddings",), None, "reject"),
        (("/v2/*",), 1.5, "delay"),
    ]
    assert timeouts[1].setting == "batching.rules[1].default_timeout_s"


def test_rules_without_a_timeout_cost_claimed_requests_nothing() -> None:
    assert parse_batching("").build_timeouts() == ()


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("", ["embeddings"]),
        ("batching: {mode: off}", []),
        ("batching: {mode: on, rules: []}", []),
        (
            "batching: {rules: [{paths: [/v2/models/a/infer]}, {paths: ['/*'], shape: predict}]}",
            ["kserve", "predict"],
        ),
    ],
)
def test_active_batching_rules_follow_mode_and_rules(text: str, rules: list[str]) -> None:
    assert [rule.shape.name for rule in parse_batching(text).active_rules()] == rules
