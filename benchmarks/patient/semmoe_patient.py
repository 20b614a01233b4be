"""A vLLM plug-in: processes sleep while they wait for each other's messages, where they would spin for a second.

To spin is quicker where every process has a core of its own. Two ranks, their scheduler and the front end on two cores
take each other's, and the same server started twice then differs by more than a plan does.
"""

from inspect import signature

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition


def register() -> None:
    names = [p.name for p in signature(SpinCondition.__init__).parameters.values() if p.default is not p.empty]
    assert names == ["busy_loop_s"], names
    SpinCondition.__init__.__defaults__ = (0.0,)
