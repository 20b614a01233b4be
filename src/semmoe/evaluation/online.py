"""Schedule requests by a plan's request policy. Offline replay and engines use the same schedulers."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from semmoe.core import DECODE, Plan, RequestPolicy, RoutingTrace
from semmoe.paper.policies import PaperScheduler, PaperTable
from semmoe.requests.capacity import CapacityScheduler, SchedulerSettings
from semmoe.requests.policy import PromptScores, RoundRobin
from semmoe.requests.scheduler import Assigned, Prompt, RequestScheduler, RoundRobinScheduler

LIVE_LEAD = 2.0  # mean requests by which a live group may lead
LIVE_PRICE = 0.25  # price of a lead by a mean request, in shares of a request's pairs, while a group runs one request
BATCH_LEAD = 0.05  # share of the mean work by which a group of a batch may exceed it, unless a single request is larger
SCHEDULERS: dict[str, Callable[[Any, SchedulerSettings], RequestScheduler]] = {
    RoundRobin.kind: lambda policy, settings: RoundRobinScheduler(policy),
    PromptScores.kind: CapacityScheduler,
    PaperTable.kind: lambda policy, settings: PaperScheduler(policy),
}


def start(policy: RequestPolicy, settings: SchedulerSettings | None = None) -> RequestScheduler:
    """A new scheduler for a policy. settings: of the ledger, used by policies that keep one."""
    return SCHEDULERS[policy.kind](policy, settings or SchedulerSettings())


def schedule_requests(
    prompts: Sequence[Prompt], plan: Plan, lengths: np.ndarray | None = None, unfinished: int = 0
) -> np.ndarray:
    """(R,) int64: the attention group of each request in arrival order.

    For policies that keep a ledger: lengths (R,) are decode tokens; the scheduler learns the length of a request once
    more than `unfinished` others have arrived after it (None: never).
    """
    return schedule_with(start(plan.requests), prompts, lengths, unfinished)


def schedule_batch(prompts: Sequence[Prompt], plan: Plan, new_tokens: int) -> np.ndarray:
    """(R,) int64: the groups of requests that are all available at once and decode `new_tokens` each.

    All requests are assigned in one window, balanced by prompt and decode tokens, since a batch takes as long as its
    fullest group.
    """
    settings = SchedulerSettings(lead_requests=0, lead_share=BATCH_LEAD, prompt_cost=1)
    assigned = start(plan.requests, settings).admit(prompts, [new_tokens] * len(prompts))
    return np.array([one.group for one in assigned], np.int64)


def schedule_with(
    scheduler: RequestScheduler,
    prompts: Sequence[Prompt],
    lengths: np.ndarray | None,
    unfinished: int,
    expected: Sequence[float] | None = None,
) -> np.ndarray:
    """(R,) int64: groups of requests in arrival order; lengths and unfinished same as in `schedule_requests`.

    expected (R,): decode tokens that are expected of each, by default the profile's mean.
    """
    assigned: list[Assigned] = []
    reported = 0
    for r, prompt in enumerate(prompts):
        assigned += scheduler.admit([prompt], None if expected is None else expected[r : r + 1])
        while lengths is not None and reported < len(assigned) and assigned[reported].request < r - unfinished:
            scheduler.finish(assigned[reported], float(lengths[assigned[reported].request]))
            reported += 1
    return np.array([one.group for one in assigned], np.int64)


def schedule_live(trace: RoutingTrace, plan: Plan, running: int) -> np.ndarray:
    """Return the group (R,) int64 of each request, in order, as assigned by a server that runs `running` requests.

    A server knows the most tokens that a request may decode; here these are the tokens that the request decoded.
    """
    scheduler = start(plan.requests, live_settings(plan.topology.dp_size))
    prompts = [trace.prompt(request) for request in range(trace.num_requests)]
    decoded = np.bincount(trace.request_of_token()[trace.phase == DECODE], minlength=trace.num_requests)
    expected = [expected_tokens(scheduler.mean_length, int(fed) + 1) for fed in decoded]
    return schedule_with(scheduler, prompts, decoded, running, expected)


def live_settings(groups: int, **changes: Any) -> SchedulerSettings:
    """Scheduler settings for a live engine, whose ledger holds running work only.

    Such a ledger stays short. Every pass takes as long as its fullest group, so that a lead has a price, and locality
    decides among groups that are about equally free (docs/method.md has the figures). The bound is for
    traffic that the plan does not know, all of which may prefer one group.
    """
    lead = {"lead_requests": LIVE_LEAD * groups, "lead_price": LIVE_PRICE, "feedback": 0.0}
    return SchedulerSettings(**({"keep_finished": False, "prompt_cost": 1.0} | lead | changes))


def expected_tokens(mean: float, max_new_tokens: int | None) -> float:
    """Decode tokens to expect of a request: the profile's mean, at most `max_new_tokens` (None: no limit)."""
    return mean if max_new_tokens is None else min(mean, float(max_new_tokens))
