"""The offline half as a library: a trace in, a plan out, and what it gains on requests that it has not seen.

python examples/library.py TRACE
"""

import sys

from semmoe import Topology, open_trace
from semmoe.placement.linear import vanilla_plan
from semmoe.replay import replay
from semmoe.settings import ReplaySettings, SolveSettings
from semmoe.solve import solve
from semmoe.split import split

profile, evaluation = split(open_trace(sys.argv[1]), share=0.2, seed=0)
topology = Topology.for_attention("tp", ep_size=8)
for plan in (vanilla_plan(profile.fingerprint, topology), solve(profile, topology, SolveSettings())):
    result = replay(evaluation, plan, ReplaySettings(batch_tokens=1024))
    print(f"{plan.method}: local activation rate {result.total.lar:.3f}, "
          f"remote ranks per token {result.total.remote_ranks_per_token:.2f}")  # fmt: skip
