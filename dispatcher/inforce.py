"""What the loop takes from the settings."""

from __future__ import annotations

from dispatcher.core.outcome import RetryPolicy
from dispatcher.core.served import ModelTerms, WhenAbsent
from dispatcher.dispatch import Options, SequenceOptions
from dispatcher.settings import Settings


def options_of(settings: Settings, *, observe: bool) -> Options:
    """`observe`: decide and show everything, touch nothing."""
    retry, sequences = settings.retry, settings.sequences
    return Options(
        retry=RetryPolicy(retry.base_s, retry.max_s, retry.max_attempts, retry.max_deliveries),
        lease_s=settings.queue.lease_s,
        owner_timeout_s=settings.queue.timeout_s(),
        max_payload_bytes=settings.queue.max_payload_bytes,
        gateway=f"{settings.gateway.url.bare}{settings.gateway.path}",
        tenant_from=settings.gateway.fairness_from,
        path=settings.gateway.path,
        batching=settings.batching.in_force(),
        sequences=SequenceOptions(
            terms=sequences.terms(),
            header=sequences.header,
            id_header=sequences.session_id_header,
            carry=sequences.carries(),
            max_carry_bytes=sequences.max_carry_bytes,
        ),
        models=_model_terms(settings),
        observe=observe,
    )


def _model_terms(settings: Settings) -> ModelTerms | None:
    """None: nobody watches which models are served."""
    if not settings.observes_models:
        return None
    named = {model.name: WhenAbsent(model.absent) for model in settings.models}
    return ModelTerms(named, WhenAbsent(settings.serving.absent))
