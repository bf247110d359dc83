"""Batch dispatcher: fills the idle capacity of LLM inference pools with batch requests."""

__version__ = "0.3.0"
USER_AGENT = f"batch-dispatcher/{__version__}"
