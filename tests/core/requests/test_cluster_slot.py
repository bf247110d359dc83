"""Which names keep all keys of a queue in one slot: the same for the settings and for the keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from dispatcher.core.requests.cluster_slot import explain_brace_fault, extract_hash_tag
from dispatcher.queue.keys import QueueNameError, QueueNames
from dispatcher.settings import Settings

NAMES = st.text(st.sampled_from("ab:{}"), min_size=1, max_size=8)


@given(NAMES)
def test_what_is_no_fault_keeps_all_keys_in_one_slot(name: str) -> None:
    if explain_brace_fault(name) is None:
        names = QueueNames(name, "elsewhere")
        assert {key_slot(key.encode()) for key in names.script_keys} == {
            key_slot(extract_hash_tag(name).encode())
        }


@given(NAMES)
def test_settings_and_keys_refuse_the_same_names_in_the_same_words(name: str) -> None:
    why = explain_brace_fault(name)
    if why is None:
        QueueNames(name, "elsewhere")
        Settings.model_validate(
            {"gateway": {"url": "http://g"}, "queue": {"name": name, "results": "elsewhere"}}
        )
        return
    with pytest.raises(QueueNameError, match=f"queue.name: .* {why}"):
        QueueNames(name, "elsewhere")
    with pytest.raises(ValueError, match=why):
        Settings.model_validate(
            {"gateway": {"url": "http://g"}, "queue": {"name": name, "results": "elsewhere"}}
        )
