"""A real Alertmanager with the inhibition rules of the chart.

    with Alertmanager(folder) as alertmanager:
        alertmanager.raise_alerts([{"alertname": "BatchDispatcherDown", "pool": "qwen"}])
        notify, silenced = alertmanager.read_by_inhibition()

All calls block.

"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.monitoring.chart_files import INHIBIT
from tests.support import free_port, make_http_client, require_tool, running_process, wait_until_sync

RECEIVER = {"route": {"receiver": "nobody"}, "receivers": [{"name": "nobody"}]}


def write_configuration(folder: Path) -> Path:
    """Write the smallest configuration that contains the inhibition rules, and return its path."""
    file = folder / "alertmanager.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(INHIBIT.read_text()), **RECEIVER}))
    return file


@dataclass
class Alertmanager:
    """Context manager that runs Alertmanager in a separate process on a free port."""

    folder: Path
    port: int = field(default_factory=free_port)
    _stack: ExitStack = field(default_factory=ExitStack, repr=False)

    def __enter__(self) -> Alertmanager:
        command = (
            require_tool("prometheus-alertmanager"),
            f"--config.file={write_configuration(self.folder)}",
            f"--storage.path={self.folder}/alertmanager",
            f"--web.listen-address=127.0.0.1:{self.port}",
            "--cluster.listen-address=",
        )
        self._stack.enter_context(running_process(*command))
        self._http = self._stack.enter_context(make_http_client(f"http://127.0.0.1:{self.port}"))
        wait_until_sync(self._is_ready, 30, what="Alertmanager is ready", every_s=0.1)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def raise_alerts(self, alerts: Sequence[Mapping[str, str]]) -> None:
        answer = self._http.post("/api/v2/alerts", json=[{"labels": labels} for labels in alerts])
        assert answer.status_code == 200, answer.text

    def read_by_inhibition(self) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
        """Return the labels of the alerts that notify, and of those that are silenced."""
        found: tuple[list[dict[str, str]], list[dict[str, str]]] = ([], [])
        alerts: list[dict[str, Any]] = self._http.get("/api/v2/alerts").json()
        for alert in alerts:
            found[bool(alert["status"]["inhibitedBy"])].append(alert["labels"])
        return found

    def _is_ready(self) -> bool:
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False
