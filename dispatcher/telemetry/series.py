"""Declaration of the series of /metrics, for the catalogue and for `features/<name>/metrics.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from dispatcher.telemetry.status import Status

PREFIX = "batch_dispatcher_"
OTHER_LABEL = "other"
"""Label value that stands for every undeclared value, so that no client or server can create a series."""


class SeriesKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


Sampler = Callable[[Status], float | Mapping[str, float] | None]
"""Function that reads the value of a series from the status. It may return one value per label value. No
sample of a gauge is written for `None` and for label values that are missing."""


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """One metric with its labels. The name of a counter on the page ends in `_total`."""

    name: str
    kind: SeriesKind
    description: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Labels besides `pool`, with all their values. Every declared value is on the page from the start."""
    buckets: tuple[float, ...] = ()
    sampler: Sampler | None = None
    """Function that reads the series from the status at each scrape. `None` for a series that is counted in
    `Metrics`."""
    has_open_labels: bool = False
    """True if the label values are not declared in advance. Only for info series, which have one sample at a
    time, and for gauges with few label values."""
    follows: str = ""
    """Name of the series of the kernel that a series of a feature follows on the page. Empty to stand with
    the other series of the feature."""

    @property
    def page_name(self) -> str:
        """Name of the series in queries; for a histogram the name without its suffix."""
        return PREFIX + self.name + ("_total" if self.kind is SeriesKind.COUNTER else "")


class SeriesList(list[Series]):
    """Series in their order on the page. Each `add_…` method declares and returns one."""

    def add_counter(
        self, name: str, description: str, sampler: Sampler | None = None, **labels: tuple[str, ...]
    ) -> Series:
        return self._add(Series(name, SeriesKind.COUNTER, description, labels, sampler=sampler))

    def add_histogram(self, name: str, description: str, buckets: tuple[float, ...]) -> Series:
        return self._add(Series(name, SeriesKind.HISTOGRAM, description, buckets=buckets))

    def add_gauge(
        self, name: str, sampler: Sampler, description: str, *, follows: str = "", **labels: tuple[str, ...]
    ) -> Series:
        return self._add(
            Series(name, SeriesKind.GAUGE, description, labels, sampler=sampler, follows=follows)
        )

    def add_state_gauge(
        self,
        name: str,
        current_state: Callable[[Status], str | None],
        description: str,
        **label: tuple[str, ...],
    ) -> Series:
        """Add a gauge with one sample per value of the label: 1 for the current state and 0 for all
        others."""
        ((_, values),) = label.items()

        def sample_state(status: Status) -> Mapping[str, float]:
            current = current_state(status)
            return {each: float(each == current) for each in values}

        return self._add(Series(name, SeriesKind.GAUGE, description, label, sampler=sample_state))

    def add_info_gauge(
        self, name: str, values: Callable[[Status], Mapping[str, str]], description: str, *labels: str
    ) -> Series:
        """Add a gauge that is always 1 and has its information in its labels."""

        def sample_info(status: Status) -> Mapping[str, float]:
            label_values = values(status)
            # A NUL byte joins the values, since none contains it; `Metrics` splits them again.
            return {"\0".join(label_values[label] for label in labels): 1.0}

        return self.add_table_gauge(name, sample_info, description, *labels)

    def add_table_gauge(
        self, name: str, sampler: Callable[[Status], Mapping[str, float]], description: str, *labels: str
    ) -> Series:
        """Add a gauge with one sample per row of a short table whose label values are not known in
        advance."""
        return self._add(
            Series(
                name,
                SeriesKind.GAUGE,
                description,
                dict.fromkeys(labels, ()),
                sampler=sampler,
                has_open_labels=True,
            )
        )

    def add_feature(self, series: SeriesList) -> None:
        """Add the series of a feature."""
        for each in series:
            followed = next(
                (at for at, other in enumerate(self) if other.name == each.follows), len(self) - 1
            )
            self.insert(followed + 1, each)

    def _add(self, series: Series) -> Series:
        self.append(series)
        return series
