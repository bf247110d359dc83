"""Series of /metrics about sequences."""

from __future__ import annotations

from dispatcher.features.sequences.status import SequencesStatus
from dispatcher.telemetry.series import SeriesList

PLACE = 2
SERIES = SeriesList()

SERIES.add_gauge(
    "sequences_active",
    lambda s: s.get_section(SequencesStatus).get_count("active"),
    "Active sequences, including held ones",
)
SERIES.add_gauge(
    "sequences_parked",
    lambda s: s.get_section(SequencesStatus).get_count("parked"),
    "Sequences that wait to start because sequences.max_active are active, or max_active of their model",
)
SERIES.add_table_gauge(
    "sequences_active_by_model",
    lambda s: s.get_section(SequencesStatus).get_by_match("active"),
    "Active sequences to which an entry of sequences.models applies",
    "match",
)
SERIES.add_table_gauge(
    "sequences_parked_by_model",
    lambda s: s.get_section(SequencesStatus).get_by_match("parked"),
    "Sequences that wait to start, and to which an entry of sequences.models applies",
    "match",
)
SERIES.add_gauge(
    "sequences_held",
    lambda s: s.get_section(SequencesStatus).get_count("held"),
    "Sequences that wait for an operator because one of their requests failed",
)
SERIES.add_gauge(
    "sequences_aborted",
    lambda s: s.get_section(SequencesStatus).get_count("aborted"),
    "Sequences that were aborted recently",
)
SERIES.add_gauge(
    "sequences_waiting",
    lambda s: s.get_section(SequencesStatus).get_count("waiting"),
    "Requests that wait for their turn in a sequence",
)
SERIES.add_counter(
    "sequence_turns",
    "Decisions about claimed requests of sequences",
    lambda s: s.get_section(SequencesStatus).sequence_turns,
    decision=("granted", "waits", "rejected"),
)
SERIES.add_counter(
    "sequence_servers",
    "Answers to requests with a session token, by the server that answered",
    lambda s: s.get_section(SequencesStatus).sequence_servers,
    server=("same", "other", "none"),
)
