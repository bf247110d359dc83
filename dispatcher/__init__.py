"""Batch dispatcher: fills the slack of LLM inference pools with batch requests."""

__version__ = "0.2.0"
USER_AGENT = f"batch-dispatcher/{__version__}"
