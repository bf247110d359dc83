"""Replacement of the model in the body of a request."""

from __future__ import annotations

import pytest

from dispatcher.features.models.body_rewrite import prepare_for_version, replace_model
from dispatcher.requests.json_fields import NotUnderstoodError, find_value
from dispatcher.requests.request import Request


@pytest.mark.parametrize(
    ("body", "replaced"),
    [
        (b'{"model":"qwen"}', b'{"model":"qwen-v3"}'),
        (
            b' {"n": 1.50,\n\t"model" :\r "qwen" , "x":[]} ',
            b' {"n": 1.50,\n\t"model" :\r "qwen-v3" , "x":[]} ',
        ),
        (b'{"x":{"model":"a"},"model":"qwen"}', b'{"x":{"model":"a"},"model":"qwen-v3"}'),
        (b'{"x":"model","model":"qwen"}', b'{"x":"model","model":"qwen-v3"}'),
        (b'{"model":"model"}', b'{"model":"qwen-v3"}'),
        (b'{"model":"qw\\u0065n\\n"}', b'{"model":"qwen-v3"}'),
        (b'{"model":"\\ud800","x":"\\ud800"}', b'{"model":"qwen-v3","x":"\\ud800"}'),
        (b'{"x":"\\"model\\":\\"a\\"","model":"qwen"}', b'{"x":"\\"model\\":\\"a\\"","model":"qwen-v3"}'),
        (b'{"say \\"model":"a","y":1}', None),
        (b'{"x":"say \\"model","y":{"model":"a"}}', None),
        ('{"x":"ü","model":"ü"}'.encode(), '{"x":"ü","model":"qwen-v3"}'.encode()),
        (b'{"model":"qwen","m\\u006fdel":"qwen"}', None),
        (b'{"x":{"model":"a"},"m\\u006fdel":"qwen-v3"}', None),
        (b'{"model":"qwen","model":"qwen"}', None),
        (b'{"model":1}', None),
        (b'{"model":null,"x":{"model":"a"}}', None),
        (b'{"model":{"model":"a"}}', None),
        (b'{"x":{"model":"a"}}', None),
        (b'["model"]', None),
        (b'[{"model":"qwen"}]', None),
        (b"{}", None),
        (b"", None),
        (b'"model"', None),
        (b'{"model":"qwen"', None),
        (b'{"model":"qwen"}{}', None),
        (b'{"model":"qw\nen"}', None),
        (b'{"x":"\xff","model":"qwen"}', None),
        (b'\xef\xbb\xbf{"model":"qwen"}', None),
        (b'{"model":"qwen","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
    ],
)
def test_model_is_replaced_only_in_an_unambiguous_body(body: bytes, replaced: bytes | None) -> None:
    assert replace_model(body, "qwen-v3") == replaced


@pytest.mark.parametrize(
    ("name", "encoded"), [('a"b\\', b'"a\\"b\\\\"'), ("é", '"é"'.encode()), ("\ud800", None)]
)
def test_name_of_the_model_is_encoded_as_json(name: str, encoded: bytes | None) -> None:
    assert replace_model(b'{"model":"qwen"}', name) == (encoded and b'{"model":%b}' % encoded)


def test_request_prepared_for_a_version_changes_only_in_model_and_endpoints() -> None:
    request = Request("r", 9, b'{"model":"qwen","n":1}', headers={"a": "b"}, token="t")
    sent = prepare_for_version(request, "qwen", "qwen-v3", "192.0.2.1:8000")
    assert sent == Request(
        "r", 9, b'{"model":"qwen-v3","n":1}', headers={"a": "b"}, token="t", chosen_model="qwen-v3",
        endpoints="192.0.2.1:8000",
    )  # fmt: skip
    assert prepare_for_version(request, "qwen", "qwen", "") == request
    ambiguous = Request("r", 9, b'{"model":"qwen","model":"qwen"}')
    assert prepare_for_version(ambiguous, "qwen", "qwen-v3", "") is None
    assert prepare_for_version(ambiguous, "qwen", "qwen", "") == ambiguous


def test_position_of_a_field_is_found_by_its_key_only() -> None:
    body = b'{"a:1":1,":1,":2,"x":"\\"y\\":","y":3}'
    assert {name: body[find_value(body, name) :][:1] for name in ("a:1", ":1,", "y")} == {
        "a:1": b"1",
        ":1,": b"2",
        "y": b"3",
    }
    with pytest.raises(NotUnderstoodError, match="no z"):
        find_value(body, "z")
