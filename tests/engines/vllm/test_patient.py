"""The benchmarks' plug-in that lets vLLM's processes sleep where they would spin: it is loaded, and messages arrive."""

import os
import subprocess
import sys
from pathlib import Path

PATIENT = Path(__file__).parents[3] / "benchmarks" / "patient"
MESSAGES = """
import time
from threading import Thread
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.distributed.device_communicators import shm_broadcast
wait, waits = shm_broadcast.sched_yield, []

def timed():
    begun = time.monotonic()
    wait()
    waits.append(time.monotonic() - begun)

shm_broadcast.sched_yield = timed
queue = shm_broadcast.MessageQueue(n_reader=1, n_local_reader=1)
reader = shm_broadcast.MessageQueue.create_from_handle(queue.export_handle(), 0)
Thread(target=queue.wait_until_ready).start()
reader.wait_until_ready()
Thread(target=lambda: [(time.sleep(0.1), queue.enqueue(number)) for number in range(5)]).start()
assert [reader.dequeue(timeout=60) for _ in range(5)] == list(range(5))
print(len(waits), min(waits))
"""


def test_what_waits_for_a_message_sleeps_and_gets_it():
    environment = os.environ | {"PYTHONPATH": str(PATIENT), "VLLM_PLUGINS": "semmoe_patient"}
    done = subprocess.run([sys.executable, "-c", MESSAGES], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    number, shortest = done.stdout.split()[-2:]
    assert int(number) >= 5
    assert float(shortest) >= 1e-4
