"""A plug-in that lets an engine fork its processes where it would spawn them, so that none imports the engine again."""

import os
from multiprocessing import context


def register() -> None:
    context._concrete_contexts["spawn"] = context._concrete_contexts["fork"]
    os.register_at_fork(after_in_child=_publish_anew)


def _publish_anew() -> None:
    """prometheus_client decides when it is imported whether a process publishes for others."""
    from prometheus_client import values

    values.ValueClass = values.get_value_class()
