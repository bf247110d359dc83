"""Parsing of the whole configuration: valid files and variables, and the problems of invalid ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.limit.budget import Policy
from dispatcher.settings.effective import render_lines, settings_as_json
from dispatcher.settings.load import key_paths, load_settings, parse_settings
from dispatcher.settings.model import Settings
from dispatcher.settings.values import SecretUrl, is_secret_name
from dispatcher.settings.yaml_source import Problem
from tests.settings.parsing import MINIMAL, list_problems, parse_valid


def test_minimal_file_has_the_documented_defaults() -> None:
    settings = parse_valid()
    assert settings.queue.name == "batch:{default}:requests"
    assert settings.queue.results == "batch:{default}:results"
    assert (settings.queue.lease_s, settings.queue.poll_s) == (30, 0.2)
    assert settings.gateway.allowed_paths == ("/v1/*",)
    assert settings.budget.model_dump() == {
        "reserve": 0.05,
        "upper": None,
        "max_sys": None,
        "per_endpoint": None,
        "initial_per_endpoint": 8.0,
        "capacity": "configured",
        "max_in_flight": None,
        "overload_backoff": 0.7,
    }
    assert settings.retry.model_dump() == {"base_s": 2, "max_s": 60, "max_attempts": 8}


@pytest.mark.parametrize(
    ("queue", "timeout_s"),
    [("{}", 5), ("{lease_s: 3}", 3), ("{lease_s: 3, owner_timeout_s: 3}", 3), ("{owner_timeout_s: 9}", 9)],
)
def test_owner_timeout_defaults_to_five_seconds_but_never_exceeds_the_lease(
    queue: str, timeout_s: float
) -> None:
    settings = parse_valid(MINIMAL + f"queue: {queue}")
    assert settings.queue.effective_owner_timeout_s() == timeout_s
    assert settings.limit_policy().orphan_timeout_s == settings.queue.lease_s


def test_queue_is_named_after_its_pool_unless_it_has_a_name() -> None:
    assert parse_valid(MINIMAL + "pool: {name: qwen}").queue.name == "batch:{qwen}:requests"
    named = parse_valid(MINIMAL + "pool: {name: qwen}\nqueue: {name: 'mine'}").queue
    assert (named.name, named.results) == ("mine", "batch:{qwen}:results")


def test_all_problems_are_reported_at_once_with_line_and_nearest_key() -> None:
    text = (
        "gateway:\n  url: http://gw\n  timeout_s: 0\nbudget:\n  reserv: 0.1\nlog: {level: inf}\nreserve: 1\n"
    )
    assert list_problems(text, RETRY__MAX_ATTEMPT="3") == [
        "config.yaml: line 3: gateway.timeout_s: must be above 0.0, not 0",
        "config.yaml: line 5: budget.reserv: unknown key (did you mean reserve?)",
        "config.yaml: line 6: log.level: must be one of debug, info, warning, error (did you mean info?)",
        "config.yaml: line 7: reserve: unknown key (did you mean budget.reserve?)",
        "environment: BATCH_DISPATCHER__RETRY__MAX_ATTEMPT: unknown key (did you mean BATCH_DISPATCHER__RETRY__MAX_ATTEMPTS?)",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "config.yaml: gateway.url: is required"),
        ("gateway: {path: /v1}", "config.yaml: line 1: gateway.url: is required"),
        ("gateway:\n\turl: http://gw", "config.yaml: line 2: is not valid YAML: indented with a tab; use spaces"),
        ("- 1", "config.yaml: line 1: must be a mapping of sections, such as `gateway:`"),
        ("just text", "config.yaml: line 1: must be a mapping of sections, such as `gateway:`"),
        ("\na: &x 1", "config.yaml: line 2: anchors and aliases are not supported: write the value out"),
        ("a: *x", "config.yaml: line 1: anchors and aliases are not supported: write the value out"),
        ("a: !!python/object:os.system x", "config.yaml: line 1: tags are not supported"),
        (MINIMAL + "---\n" + MINIMAL, "config.yaml: line 2: must be one document: take out the `---`"),
        ("[" * 50_000, "config.yaml: line 1: nests too deep"),
        ("? {a: 1}\n: 2", "config.yaml: line 1: a key must be a plain name"),
        ("a: \x00", "config.yaml: holds characters that YAML does not allow (control characters)"),
        ("a: \ud800", "config.yaml: is not valid Unicode"),
        ("a: 1\n" * 6_500, "config.yaml: line 6000: holds too many values: not a configuration"),
        ("#" * 300_000, "config.yaml: is larger than 256 KiB: not a configuration"),
        (MINIMAL + MINIMAL, "config.yaml: line 2: gateway: is given twice (first in line 1)"),
        (
            MINIMAL + "batching: {rules: [{paths: [/v1/embeddings], max_sise: 3}]}",
            "config.yaml: line 2: batching.rules[0].max_sise: unknown key (did you mean max_size?)",
        ),
        (
            MINIMAL + "batching:\n  rules:\n  - paths: [/v1/embeddings]\n  - paths: [/a/b]",
            "config.yaml: line 5: batching.rules[1].shape: must be given: no shape is usual at /a/b",
        ),
        (
            MINIMAL + "batching: {rules: [{paths: [/v1/embeddings], unit: calls}]}",
            "config.yaml: line 2: batching.rules[0].unit: must be one of item, call (did you mean call?)",
        ),
        (
            MINIMAL + "batching: {rules: [{paths: []}]}",
            "config.yaml: line 2: batching.rules[0].paths: must not be empty",
        ),
        (
            MINIMAL + "batching: {rules: [{shape: embed}]}",
            "config.yaml: line 2: batching.rules[0].paths: is required",
        ),
        (
            MINIMAL + "batching: {rules: [{paths: /v1/embeddings}]}",
            "config.yaml: line 2: batching.rules[0].paths: a list is expected",
        ),
        (
            MINIMAL + "batching: {rules: [{paths: [/v1/embeddings], max_size: 0}]}",
            "config.yaml: line 2: batching.rules[0].max_size: must be at least 1, not 0",
        ),
        (
            MINIMAL + "batching: {rules: [{paths: [/v1/embeddings], max_size: 8, preferred_sizes: [4, 16]}]}",
            "config.yaml: line 2: batching.rules[0].preferred_sizes: 16 is above max_size, 8, and would never be met",
        ),
        (
            MINIMAL + "batching: {rules: [{paths: [/v1/embeddings], timeout_action: delay}]}",
            "config.yaml: line 2: batching.rules[0].timeout_action: delay needs default_timeout_s",
        ),
        (
            MINIMAL + "batching: {rules: [{paths: [/v1/embeddings], default_timeout_s: 0}]}",
            "config.yaml: line 2: batching.rules[0].default_timeout_s: must be above 0.0, not 0",
        ),
        (MINIMAL + "batching: {rules: 5}", "config.yaml: line 2: batching.rules: a list is expected"),
        (MINIMAL + "admin: 5", "config.yaml: line 2: admin: a section with keys is expected"),
        (MINIMAL + "admin: {port: '80'}", "config.yaml: line 2: admin.port: a whole number is expected"),
        (MINIMAL + "admin: {port: true}", "config.yaml: line 2: admin.port: a whole number is expected"),
        (MINIMAL + "admin: {port: 70000}", "config.yaml: line 2: admin.port: must be at most 65535, not 70000"),
        (MINIMAL + "budget: {max_sys: .nan}", "config.yaml: line 2: budget.max_sys: must be a finite number"),
        (MINIMAL + "budget: {max_sys: .inf}", "config.yaml: line 2: budget.max_sys: must be a finite number"),
        (MINIMAL + "budget: {reserve: 1}", "config.yaml: line 2: budget.reserve: must be below 1.0, not 1"),
        (MINIMAL + "budget: {reserve: 0.1, upper: 0.8}", "config.yaml: line 2: budget.upper: must not be below 1 − reserve (0.9): an idle pool would never be believed"),
        (MINIMAL + "budget: {overload_backoff: 1}", "config.yaml: line 2: budget.overload_backoff: must be below 1.0, not 1"),
        (MINIMAL + "pool: {name: Qwen_7}", "config.yaml: line 2: pool.name: must be a Kubernetes name: at most 63 of a-z, 0-9 and -, a letter or digit at both ends"),
        (MINIMAL + "pool: {name: 7}", "config.yaml: line 2: pool.name: a text is expected: put it in quotes"),
        (MINIMAL + "queue: {name: 'a{b'}", "config.yaml: line 2: queue.name: must hold one {tag} that is not empty, or no braces at all"),
        (MINIMAL + "queue: {lease_s: 0.5}", "config.yaml: line 2: queue.lease_s: must be at least 1.0, not 0.5"),
        (MINIMAL + "queue: {lease_s: 1m30s}", "config.yaml: line 2: queue.lease_s: a number is expected (of seconds: 90)"),
        (MINIMAL + "queue: {result_ttl_s: a week}", "config.yaml: line 2: queue.result_ttl_s: a number is expected (of seconds)"),
        (MINIMAL + "budget: {reserve: 5%}", "config.yaml: line 2: budget.reserve: a number is expected (a share: 5% is 0.05)"),
        (MINIMAL + "budget: {reserve: little}", "config.yaml: line 2: budget.reserve: a number is expected"),
        (MINIMAL + "queue: {owner_timeout_s: 0.5}", "config.yaml: line 2: queue.owner_timeout_s: must be at least 1.0, not 0.5"),
        (MINIMAL + "queue: {lease_s: 4, owner_timeout_s: 5}", "config.yaml: line 2: queue.owner_timeout_s: must not be above queue.lease_s (4)"),
        (MINIMAL + "queue: {owner_timeout_s: 31}", "config.yaml: line 2: queue.owner_timeout_s: must not be above queue.lease_s (30)"),
        (MINIMAL + "queue: {name: r, results: r}", "config.yaml: line 2: queue.results: must not be queue.name: results would be taken for requests"),
        ("gateway: {url: http://gw, max_buffered_bytes: 33554431}", "config.yaml: line 1: gateway.max_buffered_bytes: must not be below max_response_bytes: the largest answer could not be read"),
        (MINIMAL + "retry: {base_s: 90}", "config.yaml: line 2: retry.max_s: must not be below retry.base_s"),
        (MINIMAL + "signals: {interval_s: 6, max_age_s: 10}", "config.yaml: line 2: signals.max_age_s: must be at least two intervals (12 s), or every other reading is stale"),
        (MINIMAL + "signals: {source: prometheus}", "config.yaml: line 2: signals.prometheus: url is required when signals.source is prometheus"),
        (MINIMAL + "signals: {source: fixed}", "config.yaml: budget: max_in_flight is required when signals.source is fixed: it is the limit"),
        (MINIMAL + "signals: {source: fixed, use: requests}\nbudget: {max_in_flight: 1}", "config.yaml: line 2: signals.use: is requests, and signals.source is fixed, which measures nothing: it must be auto"),
        (MINIMAL + "signals: {source: fixed, vllm: {service: v}}\nbudget: {max_in_flight: 1}", "config.yaml: line 2: signals.vllm: says where model servers are, and signals.source is fixed: it must be vllm or auto"),
        (MINIMAL + "signals: {prometheus: {queries: {saturatio: up}}}", "config.yaml: line 2: signals.prometheus.queries.saturatio: unknown key (did you mean saturation?)"),
        ("gateway: {url: ftp://gw}", "config.yaml: line 1: gateway.url: must begin with http:// or https://"),
        ("gateway: {url: 'http://'}", "config.yaml: line 1: gateway.url: holds no valid host (percent-encode / ? # and @ in the password)"),
        ("gateway: {url: 'http://gw?x=1'}", "config.yaml: line 1: gateway.url: must not hold a query or a fragment"),
        ("gateway: {url: http://gw, allowed_paths: [/v1/*, v2]}", "config.yaml: line 1: gateway.allowed_paths[1]: must begin with one /"),
        ("gateway: {url: http://gw, path: /v1/../x}", "config.yaml: line 1: gateway.path: must be a plain path: no blanks, ?, #, \\ or .."),
        ('gateway: {url: http://gw, headers: {x-a: "b\\r\\nc: d"}}', "config.yaml: line 1: gateway.headers.x-a: must not hold control characters, nor blanks at its ends"),
        ("gateway: {url: http://gw, headers: {X-Request-Id: a}}", "config.yaml: line 1: gateway.headers: X-Request-Id cannot be set here: it is the request's id"),
        ("gateway: {url: http://gw, headers: {authorization: a}, token_file: /t}", "config.yaml: line 1: gateway.token_file: the Authorization header is set in gateway.headers already"),
        ("gateway: {url: http://gw, tls: {cert_file: /c}}", "config.yaml: line 1: gateway.tls.key_file: cert_file and key_file are needed together"),
    ],
)  # fmt: skip
def test_invalid_file_is_rejected_with_one_sentence(text: str, problem: str) -> None:
    assert problem in list_problems(text)
    if "line" in problem.split(": ")[1] or not text:
        assert len(list_problems(text)) == 1


@pytest.mark.parametrize("reserve", [0.0, 0.05, 0.1, 0.3, 0.7, 0.9])
def test_upper_may_equal_one_minus_reserve_despite_rounding_errors(reserve: float) -> None:
    assert parse_valid(
        MINIMAL + f"budget: {{reserve: {reserve}, upper: {round(1 - reserve, 10)}}}"
    ).budget.upper


def test_yaml_1_1_words_and_numbers_are_read_as_they_are_written() -> None:
    settings = parse_valid(
        "gateway: {url: http://gw, objective: no, timeout_s: 1e2}\nqueue: {dead_max: 010}\nlog:\n"
    )
    assert settings.gateway.objective == "no"
    assert settings.gateway.timeout_s == 100
    assert settings.queue.dead_max == 10


@pytest.mark.parametrize("name", ["requests", "batch:{qwen}:requests", "{a}", "x{a}"])
def test_queue_name_may_have_one_hash_tag_or_none(name: str) -> None:
    assert parse_valid(MINIMAL + f"queue: {{name: '{name}'}}").queue.name == name


@pytest.mark.parametrize("name", ["{", "}", "a}b{", "{}", "{a}{b}", "{{a}}", "a{b}c}"])
def test_other_braces_in_a_queue_name_are_rejected(name: str) -> None:
    assert "queue.name" in list_problems(MINIMAL + f"queue: {{name: '{name}'}}")[0]


def test_environment_overrides_the_file_and_reads_text_as_text() -> None:
    settings = parse_valid(
        "gateway: {url: http://gw}\npool: {name: file}\nbudget: {reserve: 0.5}\nsignals:\n",
        POOL__NAME="007",
        BUDGET__RESERVE="0.25",
        BUDGET__MAX_SYS="null",
        GATEWAY__TLS__CA_FILE="/ca.pem",
        GATEWAY__HEADERS='{"host": "inference.example"}',
        SIGNALS__EPP__URLS='["http://a:9090", "http://b:9090"]',
        LOG__LEVEL="debug",
        GATEWAY__OBJECTIVE="no",
        QUEUE__URL="rediss://:sesame@redis:6380/1",
    )
    assert settings.pool.name == "007"
    assert settings.queue.name == "batch:{007}:requests"
    assert (settings.budget.reserve, settings.budget.max_sys) == (0.25, None)
    assert settings.gateway.tls.ca_file == "/ca.pem"
    assert settings.gateway.headers == {"host": "inference.example"}
    assert [url.reveal() for url in settings.signals.epp.urls] == ["http://a:9090", "http://b:9090"]
    assert (settings.log.level, settings.gateway.objective) == ("debug", "no")
    assert settings.queue.url.reveal() == "rediss://:sesame@redis:6380/1"


@pytest.mark.parametrize(
    ("variable", "value", "what"),
    [
        ("BUDGET__RESERVE", "20", "must be below 1.0, not 20 (a share: 20% is 0.2)"),
        ("BUDGET__RESERVE", "[1", "cannot be read: give a number, true, false, null, or JSON for a list or a map"),
        ("BUDGET", "{}", "is a section; set its keys, such as BATCH_DISPATCHER__BUDGET__RESERVE"),
        ("GATEWAY__HEADERS__HOST", "x", 'is inside a map; set it whole, as JSON: BATCH_DISPATCHER__GATEWAY__HEADERS={"name": "value"}'),
        ("GATEWAY__HEADERS", '{"x": 1}', "a text is expected: put it in quotes"),
        ("QEUE__URL", "x", "unknown key (did you mean BATCH_DISPATCHER__QUEUE__URL?)"),
        ("HTTP_PROXY", "x", "unknown key"),
    ],
)  # fmt: skip
def test_invalid_variable_is_named_in_the_problem(variable: str, value: str, what: str) -> None:
    assert list_problems(MINIMAL, **{variable: value}) == [
        f"environment: BATCH_DISPATCHER__{variable}: {what}"
    ]


def test_other_variables_of_a_pod_are_ignored() -> None:
    """Kubernetes sets BATCH_DISPATCHER_SERVICE_HOST if a Service is named batch-dispatcher."""
    assert isinstance(
        parse_settings(MINIMAL, {"BATCH_DISPATCHER_SERVICE_HOST": "10.0.0.1", "PATH": "/bin"}), Settings
    )


@pytest.mark.parametrize("variable", ["POOL", "pool", "GATEWAY__OBJECTIVE", "budget__reserve"])
def test_variables_without_the_prefix_are_ignored(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, the settings library would read them, and also a `.env` in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text(f"{variable}=1\nBATCH_DISPATCHER__POOL__NAME=ignored\n")
    monkeypatch.setenv(variable, '{"name": "ignored"}')
    # Only the environment that is passed as an argument counts, not that of the process.
    monkeypatch.setenv("BATCH_DISPATCHER__POOL__NAME", "ignored")
    assert parse_valid() == Settings.model_validate({"gateway": {"url": "http://gw"}})
    assert parse_valid().pool.name == "default"


def test_settings_library_logs_no_secret_in_debug_mode() -> None:
    code = (
        "import logging; logging.basicConfig(level=logging.DEBUG)\n"
        "from dispatcher.settings.load import parse_settings\nfrom dispatcher.settings.model import Settings\n"
        f"assert isinstance(parse_settings({SECRETS!r}, {{}}), Settings)\n"
        "logging.debug('debug is on')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "PYDANTIC_SETTINGS_DEBUG": "1"},
    )
    assert "debug is on" in done.stderr
    assert "sesame" not in done.stderr + done.stdout


SECRETS = """
pool: {name: a}
gateway:
  url: https://user:sesame@gw/x
  headers: {authorization: Bearer sesame, x-api-key: sesame, X-Tenant-Pw: sesame, X-Sig: sesame, x-tenant: blue}
queue: {url: 'redis+sentinel://:sesame@h1:26379,h2:26379/primary/0?sentinel_password=sesame'}
signals: {prometheus: {url: 'http://prom:sesame@prom/?sig=sesame&x=1', headers: {Cookie: sesame}}, epp: {urls: ['http://t:sesame@epp']}}
"""


def test_secrets_are_masked_unless_they_are_revealed() -> None:
    settings = parse_valid(SECRETS)
    shown = [repr(settings), str(settings), str(settings.model_dump()), settings.model_dump_json()]
    shown += [repr(settings.gateway), f"{settings.queue.url}", json.dumps(settings_as_json(settings))]
    shown.append("\n".join(str(line) for line in render_lines(settings)))
    for text in shown:
        assert "sesame" not in text
    assert "https://user:***@gw/x" in shown[-1]
    assert "sig=***&x=1" in shown[-1]
    assert "blue" in shown[-1]
    assert settings.gateway.url.credentials == ("user", "sesame")
    assert settings.gateway.url.without_credentials == "https://gw/x"
    assert settings.gateway.headers["x-api-key"] == "sesame"


@pytest.mark.parametrize(
    "name", ["X-Tenant-Pw", "x-sig", "SIG", "db_pwd", "pass", "X-Amz-Signature", "ssl_passphrase", "sid"]
)
def test_names_of_credentials_are_recognized(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["X-Power", "x-design", "compass", "X-Scope-OrgID", "pwned-by", "outside"])
def test_names_that_only_contain_these_letters_are_not_credentials(name: str) -> None:
    assert not is_secret_name(name)


def test_problems_never_repeat_a_value_that_may_be_secret() -> None:
    broken = SECRETS.replace("https://", "httpss://").replace("sesame@h1", "ses@me/sesame@h1")
    problems = list_problems(
        broken.replace("Bearer sesame", '"Bearer sesame\\n"') + "log: {level: sesame}\nsesame: 1\n",
        QUEUE__POLL_S="sesame",
    )
    assert len(problems) == 6
    assert [line for line in problems if "sesame" in line] == ["config.yaml: line 9: sesame: unknown key"]


@given(
    user=st.text(st.characters(exclude_characters=":"), max_size=8),
    password=st.text(st.characters(exclude_categories=["Cs"]), min_size=6, max_size=12),
    rest=st.sampled_from(["host", "host:1/0", "h1,h2/x", "", "h?a=b"]),
)
def test_password_of_a_malformed_url_is_masked(user: str, password: str, rest: str) -> None:
    url = SecretUrl(f"redis://{user}:{password}@{rest}")
    assert password not in str(url).replace(rest, "").replace(f"redis://{user}", "", 1)
    assert repr(url) == f"SecretUrl({str(url)!r})"


@given(st.binary(max_size=200) | st.text("{}[]:,-&*!?|>'\"%@`#\n\t ab1.~", max_size=60).map(str.encode))
def test_loading_any_file_raises_nothing(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(raw)
    found = load_settings(path, {})
    assert isinstance(found, list)
    assert all(isinstance(problem, Problem) for problem in found)


@given(
    st.dictionaries(
        st.sampled_from(list(key_paths(Settings))), st.text("{}[]:,-&*!'\"#\n 1e9.~tru/", max_size=12)
    )
)
def test_parsing_any_environment_raises_nothing(values: dict[str, str]) -> None:
    environ = {f"BATCH_DISPATCHER__{path.replace('.', '__').upper()}": text for path, text in values.items()}
    found = parse_settings(MINIMAL, environ)
    assert isinstance(found, Settings) or all(isinstance(problem, Problem) for problem in found)


def test_unreadable_file_is_reported_as_a_problem(tmp_path: Path) -> None:
    [missing] = load_settings(tmp_path / "none.yaml", {})
    assert str(missing) == f"{tmp_path / 'none.yaml'}: cannot be read: No such file or directory"
    [directory] = load_settings(tmp_path, {})
    assert "cannot be read" in str(directory)
    latin_1_file = tmp_path / "latin.yaml"
    latin_1_file.write_bytes(b"gateway:\n  url: http://gw\n# caf\xe9\n")
    [undecodable] = load_settings(latin_1_file, {})
    assert str(undecodable) == "latin.yaml: line 3: is not valid UTF-8"


def test_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "bom.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + MINIMAL.encode())
    assert isinstance(load_settings(path, {}), Settings)


def test_effective_configuration_can_be_read_back_unchanged() -> None:
    settings = parse_valid(
        "gateway: {url: http://gw, objective: 'no', allowed_paths: ['/v1/*', '/b']}\n"
        "queue: {name: 'null', results: '1e3', lease_s: 5}\n"
        "log: {level: debug}\n"
        "signals: {max_age_s: 30, prometheus: {queries: {queued: 'sum(x{a=\"b\"}) # y'}}}\n"
    )
    text = "\n".join(str(line) for line in render_lines(settings))
    assert parse_valid(text) == settings


def test_effective_configuration_marks_defaults() -> None:
    settings = parse_valid("gateway: {url: http://gw}\nbudget: {reserve: 0.2}\n", LOG__LEVEL="debug")
    text = [str(line) for line in render_lines(settings)]
    assert "  reserve: 0.2" in text
    assert "  level: debug" in text
    assert "  upper: null  # default: 0.8, the room of an idle pool" in text
    assert "  owner_timeout_s: null  # default: 5" in text
    short = parse_valid("gateway: {url: http://gw}\nqueue: {lease_s: 3}\n")
    assert "  owner_timeout_s: null  # default: 3" in map(str, render_lines(short))
    assert "  result_lists: null  # default: batch-results:* batch:{default}:results:* *{default}*" in text
    assert '  name: "batch:{default}:requests"  # default' in text
    defaults = settings_as_json(settings)["defaults"]
    assert "budget.upper" in defaults
    assert not {"budget.reserve", "log.level", "gateway.url"} & set(defaults)


def test_limit_policy_is_made_of_the_settings() -> None:
    settings = parse_valid(
        MINIMAL + "budget: {reserve: 0.1, per_endpoint: 16, max_in_flight: 9}\nretry: {max_s: 30}\n"
    )
    assert settings.limit_policy() == Policy(
        reserve=0.1, per_endpoint=16, max_in_flight=9, max_age_s=10, retry_after_max_s=30
    )
    assert settings.limit_policy("prometheus").max_age_s == 60


@pytest.mark.parametrize(
    ("text", "learns"),
    [
        ("budget: {capacity: learn}\n", True),
        ("budget: {capacity: configured}\n", False),
        ("budget: {capacity: learn, max_in_flight: 9}\nsignals: {source: fixed}\n", False),
    ],
)
def test_capacity_is_learned_if_the_setting_says_so_and_anything_is_read(text: str, learns: bool) -> None:
    assert parse_valid(MINIMAL + text).limit_policy().learns_capacity is learns


@pytest.mark.parametrize(
    ("signals", "epp", "prometheus"),
    [
        ("{}", 10, 60),
        ("{max_age_s: 7}", 7, 7),
        ("{interval_s: 20}", 40, 60),
        ("{source: prometheus, prometheus: {url: http://p}}", 10, 60),
    ],
)
def test_maximum_age_depends_on_the_source_and_is_at_least_two_intervals(
    signals: str, epp: float, prometheus: float
) -> None:
    found = parse_valid(MINIMAL + f"signals: {signals}").signals
    assert (found.max_age_for("epp"), found.max_age_for("prometheus")) == (epp, prometheus)


def test_settings_cannot_be_changed_in_place() -> None:
    settings = parse_valid()
    with pytest.raises(ValueError, match="frozen"):
        settings.budget.reserve = 0.5  # type: ignore[misc]
