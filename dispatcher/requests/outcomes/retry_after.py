"""Parser of the Retry-After header: seconds, or a date in any of HTTP's formats."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime

MAX_RETRY_AFTER_S = 86400.0
"""Maximum Retry-After in seconds. A longer one counts as this. The retry policy may shorten it further."""


def parse_retry_after_header(headers: Mapping[str, str], now_unix: float) -> float | None:
    """Return the seconds that an answer asks to wait. `None` if it asks for no wait, or in no valid
    format."""
    value = headers.get("retry-after")
    if value is None:
        return None
    # The date is by the clock of the server that wrote it, which the Date header shows.
    server_now_unix = _parse_http_date(headers.get("date", ""), now_unix)
    return parse_retry_after(value, now_unix if server_now_unix is None else server_now_unix)


def parse_retry_after(value: str, now_unix: float) -> float | None:
    """Return the seconds to wait, given as seconds or in one of HTTP's three date formats. `None` for other
    formats.

    A date in the past gives 0. The result is at most one day.
    """
    value = value.strip(" \t")
    if value.isascii() and value.isdigit():
        return MAX_RETRY_AFTER_S if len(value.lstrip("0")) > 5 else min(float(value), MAX_RETRY_AFTER_S)
    at = _parse_http_date(value, now_unix)
    return None if at is None else min(max(at - now_unix, 0.0), MAX_RETRY_AFTER_S)


_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_DATE = re.compile(
    r"""[A-Z][a-z]{2,8}
    (?: ,\ (?P<day>\d\d)([ -])(?P<month>[A-Z][a-z]{2})\2(?P<year>\d{4}|\d\d)\ (?P<time>\d\d:\d\d:\d\d)\ GMT
      | \ (?P<month_>[A-Z][a-z]{2})\ (?P<day_>[ \d]\d)\ (?P<time_>\d\d:\d\d:\d\d)\ (?P<year_>\d{4}) )""",
    re.VERBOSE | re.ASCII,
)
"""Date formats of RFC 9110 5.6.7: `Sun, 06 Nov 1994 08:49:37 GMT`, `Sunday, 06-Nov-94 08:49:37 GMT` and
`Sun Nov  6 08:49:37 1994`."""


def _parse_http_date(value: str, now_unix: float) -> float | None:
    match = _DATE.fullmatch(value)
    if match is None:
        return None
    day, month, year, time = (match[name] or match[name + "_"] for name in ("day", "month", "year", "time"))
    hour, minute, second = map(int, time.split(":"))
    try:
        if len(year) == 2:
            this = datetime.fromtimestamp(now_unix, UTC).year
            # RFC 9110 5.6.7: a two-digit year more than 50 years in the future is in the past century.
            year = this - 49 + (int(year) - (this - 49)) % 100  # between 49 years ago and 50 years ahead
        # `datetime` has no leap seconds, so second 60 counts as the second before.
        return datetime(
            int(year), _MONTHS.index(month) + 1, int(day), hour, minute, min(second, 59), tzinfo=UTC
        ).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
