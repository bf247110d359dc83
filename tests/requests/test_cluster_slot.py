"""Settings and keys accept the same queue names: those that keep all keys of a queue in one slot."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from dispatcher.queue.keys import QueueNameError, QueueNames
from dispatcher.requests.cluster_slot import explain_brace_fault, extract_hash_tag
from dispatcher.settings.model import Settings

queue_names = st.text(st.sampled_from("ab:{}"), min_size=1, max_size=8)


@given(queue_names)
def test_accepted_queue_name_keeps_all_keys_in_one_slot(name: str) -> None:
    if explain_brace_fault(name) is None:
        names = QueueNames(name, "elsewhere")
        assert {key_slot(key.encode()) for key in names.script_keys} == {
            key_slot(extract_hash_tag(name).encode())
        }


@given(queue_names)
def test_settings_and_keys_reject_the_same_names_with_the_same_message(name: str) -> None:
    fault = explain_brace_fault(name)
    if fault is None:
        QueueNames(name, "elsewhere")
        Settings.model_validate(
            {"gateway": {"url": "http://g"}, "queue": {"name": name, "results": "elsewhere"}}
        )
        return
    with pytest.raises(QueueNameError, match=f"queue.name: .* {fault}"):
        QueueNames(name, "elsewhere")
    with pytest.raises(ValueError, match=fault):
        Settings.model_validate(
            {"gateway": {"url": "http://g"}, "queue": {"name": name, "results": "elsewhere"}}
        )
