"""A peer that cannot be reached, as an operator would say it. Imports nothing that takes time."""

from __future__ import annotations

import os
import re


def reason(error: OSError) -> str:
    """Why there is no connection: one reason, however many addresses of a name were tried."""
    numbers = re.findall(r"Errno (\d+)", str(error))  # of a name's failed look-up it is below 0
    return os.strerror(int(numbers[0])).lower() if numbers else str(error.strerror or error)
