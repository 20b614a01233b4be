"""The offline half as a library: a trace in, a plan out, and what it gains on requests that it has not seen.

python examples/library.py TRACE
"""

import sys

import semmoe

profile, evaluation = semmoe.split(semmoe.open_trace(sys.argv[1]))
topology = semmoe.Topology.for_attention("tp", ep_size=8)
print(semmoe.solve(profile, topology))
print(semmoe.compare(profile, evaluation, topology, ["eplb", "semmoe"]))
