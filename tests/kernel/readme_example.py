"""The example of a feature in the README of the kernel."""

from __future__ import annotations

import re
from typing import Any

from dispatcher.kernel.context import KernelContext
from dispatcher.kernel.hooks import Hooks
from tests.paths import PACKAGE

README = (PACKAGE / "kernel" / "README.md").read_text()
(CODE,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def build_hooks(context: KernelContext) -> Hooks:
    """Return the hooks of the feature in the example."""
    namespace: dict[str, Any] = {}
    exec(CODE, namespace)
    hooks: Hooks = namespace["TenantHeader"](context).hooks
    return hooks
