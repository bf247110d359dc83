"""What the tests of the manifests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deploy import conformity


@pytest.fixture(scope="session")
def schemas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The schemas of every Kubernetes, laid out for kubeconform."""
    directory = tmp_path_factory.mktemp("schemas")
    conformity.lay_out(directory)
    return directory
