"""Shared fixtures of the tests of the manifests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deploy import schema_check


@pytest.fixture(scope="session")
def schemas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the schemas of every Kubernetes version for kubeconform."""
    directory = tmp_path_factory.mktemp("schemas")
    schema_check.write_schemas(directory)
    return directory
