"""Runs the command line: `python -m dispatcher` is `batch-dispatcher`."""

from dispatcher.cli import main

main()
