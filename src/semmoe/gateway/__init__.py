"""A plan's view of a request's prompt, for gateways and routers, and an endpoint picker for Envoy."""

from semmoe.gateway.scorer import Choice, Ranks, Scorer

__all__ = ["Choice", "Ranks", "Scorer"]
