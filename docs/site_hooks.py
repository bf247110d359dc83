"""Hooks of the documentation site.

Links to files of the repository outside of docs/ work where the page is read in the repository. The site has
no address for them, so the hook replaces such a link by its text.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    folder = posixpath.dirname(page.file.src_uri)

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        outside = target.startswith(("..", "examples"))
        return match[1] if outside and "://" not in match[2] else match[0]

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(?:#[^)]*)?\)", link, markdown)
