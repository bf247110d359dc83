"""A user who waits for a result sees each reason for the wait once."""

from __future__ import annotations

from dispatcher.cli.admin_client import parse_admin_address
from dispatcher.cli.result import REPEAT_AFTER_S, WaitingSentences
from dispatcher.settings.model import AdminSettings

REFUSED = "the gateway answered 401: it does not accept our credentials; look at gateway.token_file"


def test_one_hour_of_rejected_credentials_prints_three_lines() -> None:
    """The request pauses, is tried and is refused again for an hour."""
    sentences = WaitingSentences()
    printed = []
    for second in range(3600):
        match second % 20:
            case 0:
                sentence = f"gateway-unreachable, nothing is sent: {REFUSED}; asked {second} times"
            case 1:
                sentence = "a dispatcher has sent it, the answer is not there yet"
            case rest:
                sentence = f"its next attempt, due in {20 - rest}.5 s, the last attempt: {REFUSED}"
        if sentences.is_new(sentence, float(second)):
            printed.append(sentence)
    assert len(printed) == 3
    assert "gateway.token_file" in printed[0]


def test_new_reason_is_printed_at_once_and_a_known_one_after_a_while() -> None:
    sentences = WaitingSentences()
    assert sentences.is_new("gateway-unreachable: connection refused", 0.0)
    assert sentences.is_new(f"gateway-unreachable: {REFUSED}", 1.0)
    assert not sentences.is_new("gateway-unreachable: connection refused", 2.0)
    assert sentences.is_new("gateway-unreachable: connection refused", 3.0 + REPEAT_AFTER_S)


def test_remote_dispatcher_is_named_by_its_address() -> None:
    """The test pod of the chart asks the release's Service, which is not "this machine"."""
    for host, name in (
        ("night.llm.svc", "night.llm.svc:8080"),
        ("127.0.0.1", "admin.port 8080 of this machine"),
        ("0.0.0.0", "admin.port 8080 of this machine"),
    ):
        assert str(parse_admin_address(AdminSettings(host=host))) == name
