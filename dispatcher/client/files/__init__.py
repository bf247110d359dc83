"""Batch files, as OpenAI's batch API has them: read, checked, submitted in their best order, and answered.

What makes a run safe to break off at any byte is the order in which things become durable:

1. The whole input is checked, and what is to be sent, in which order, stands in the journal.
2. A chunk of lines stands in the journal before it is submitted, under a name that the queue remembers: a
   chunk that is submitted again is not submitted twice.
3. Results are taken into a keep beside their list, in Redis. Their lines are written and flushed to the disk;
   then the journal says how long the files are and which lines are done; then the keep forgets the results.

So after a crash the files are cut to the lengths that the journal knows, and the keep gives out again what is
missing in them.
"""

from __future__ import annotations

from dispatcher.client.files.database import JournalError
from dispatcher.client.files.intake import BadInputError, InputError
from dispatcher.client.files.options import FileOptions, FilePaths, FileStart
from dispatcher.client.files.progress import FileProgress, facts_of, summary, told
from dispatcher.client.files.run import run_file
from dispatcher.client.files.sinks import SinkError
from dispatcher.client.files.template import TemplateError

__all__ = [
    "BadInputError",
    "FileOptions",
    "FilePaths",
    "FileProgress",
    "FileStart",
    "InputError",
    "JournalError",
    "SinkError",
    "TemplateError",
    "facts_of",
    "run_file",
    "summary",
    "told",
]
