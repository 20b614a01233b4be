"""A vLLM plug-in: processes sleep between two looks at each other's messages, where they would spin.

To spin is quicker where every process has a core of its own. Two ranks, their scheduler and the front end on two cores
take each other's, and the same server started twice then differs by more than a plan does. To wait for a notice, as
vLLM does after a second without messages, is no way out: some are lost, and their messages then found after 5 s.
"""

import time

from vllm.distributed.device_communicators import shm_broadcast

BETWEEN = 1e-4  # seconds


def register() -> None:
    assert callable(shm_broadcast.sched_yield)
    shm_broadcast.sched_yield = _sleep


def _sleep() -> None:
    time.sleep(BETWEEN)
