"""The benchmarks' plug-in that lets vLLM's processes sleep where they would spin: it is loaded, and messages arrive."""

import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
MESSAGES = """
import time
from threading import Thread
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.distributed.device_communicators import shm_broadcast
assert shm_broadcast.sched_yield.__module__ == "semmoe_patient", shm_broadcast.sched_yield.__module__
queue = shm_broadcast.MessageQueue(n_reader=1, n_local_reader=1)
reader = shm_broadcast.MessageQueue.create_from_handle(queue.export_handle(), 0)
Thread(target=queue.wait_until_ready).start()
reader.wait_until_ready()
busy = time.process_time()
Thread(target=lambda: [(time.sleep(0.1), queue.enqueue(number)) for number in range(5)]).start()
assert [reader.dequeue(timeout=4) for _ in range(5)] == list(range(5))
print(time.process_time() - busy)
"""


def test_what_waits_for_a_message_sleeps_and_gets_it():
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS / "patient"), "VLLM_PLUGINS": "semmoe_patient"}
    done = subprocess.run([sys.executable, "-c", MESSAGES], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 0.25  # seconds of a core, of half a second
