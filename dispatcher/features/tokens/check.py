"""Report whether tokens are counted, and what counting them needs."""

from __future__ import annotations

from collections.abc import Iterator

from dispatcher.check.feature_check import FeatureCheck
from dispatcher.check.finding import Finding
from dispatcher.features.tokens.settings import TokensSettings
from dispatcher.features.tokens.status import TokensStatus
from dispatcher.settings.model import Settings
from dispatcher.telemetry.status import Status

WHERE = "tokens"


class TokensCheck(FeatureCheck):
    def check_settings(self, settings: Settings) -> Iterator[Finding]:
        """Report a size of the memory that is not used."""
        tokens = settings.get_section(TokensSettings)
        if tokens.mode == "off" and tokens.per_endpoint is not None:
            yield Finding("warning", WHERE, "per_endpoint has no effect while tokens.mode is off")

    def report_status(self, status: Status) -> Iterator[Finding]:
        """Report whether a running dispatcher counts tokens."""
        section = status.get_section(TokensStatus)
        if section.kv_capacity_tokens is None:
            what = (
                "only requests are counted: tokens.per_endpoint, or pages of the model servers that show the "
                "size of the KV memory, would let the dispatcher count tokens, too"
            )
            yield Finding("ok", WHERE, what)
            return
        for line in section.format_lines():
            yield Finding("ok", WHERE, line.removesuffix("."))
        for sentence in section.explain():
            yield Finding("warning", WHERE, sentence.removesuffix("."))


CHECK = TokensCheck()
