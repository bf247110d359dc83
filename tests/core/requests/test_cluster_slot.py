"""Which names keep all keys of a queue in one slot: the same for the settings and for the keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from dispatcher.core.requests.cluster_slot import fault_of_braces, tag_of
from dispatcher.queue.keys import Names, QueueNameError
from dispatcher.settings import Settings

NAMES = st.text(st.sampled_from("ab:{}"), min_size=1, max_size=8)


@given(NAMES)
def test_what_is_no_fault_keeps_all_keys_in_one_slot(name: str) -> None:
    if fault_of_braces(name) is None:
        names = Names(name, "elsewhere")
        assert {key_slot(key.encode()) for key in names.keys} == {key_slot(tag_of(name).encode())}


@given(NAMES)
def test_settings_and_keys_refuse_the_same_names_in_the_same_words(name: str) -> None:
    why = fault_of_braces(name)
    if why is None:
        Names(name, "elsewhere")
        Settings.model_validate(
            {"gateway": {"url": "http://g"}, "queue": {"name": name, "results": "elsewhere"}}
        )
        return
    with pytest.raises(QueueNameError, match=f"queue.name: .* {why}"):
        Names(name, "elsewhere")
    with pytest.raises(ValueError, match=why):
        Settings.model_validate(
            {"gateway": {"url": "http://g"}, "queue": {"name": name, "results": "elsewhere"}}
        )
