"""The online scheduler: scores, the bound on load, windows, finished requests."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semmoe.evaluation.online import expected_tokens, live_settings
from semmoe.requests.capacity import CapacityScheduler, SchedulerSettings
from semmoe.requests.policy import PromptScores, RoundRobin
from semmoe.requests.scheduler import Assigned, RoundRobinScheduler


def make_map(scores, weights=None, mean_length=10.0, prices=None, bias=None, spread=1.0) -> PromptScores:
    """The last row serves ids outside the vocabulary."""
    scores = np.array(scores, np.float32)
    rows, D = scores.shape
    return PromptScores(
        token_scores=scores, token_weights=np.array(np.ones(rows) if weights is None else weights, np.float32),
        bias=np.array(np.zeros(D) if bias is None else bias, np.float32),
        prices=np.array(np.zeros(D) if prices is None else prices, np.float32),
        score_spread=spread, mean_length=mean_length,
    )  # fmt: skip


def random_map(seed, groups, vocab=12) -> PromptScores:
    rng = np.random.default_rng(seed)
    scores, prices = rng.normal(size=(vocab + 1, groups)), rng.random(groups) / 5
    return make_map(scores, rng.random(vocab + 1) + 0.1, prices=prices, bias=rng.random(groups))


def plain(**changes) -> SchedulerSettings:
    return SchedulerSettings(**{"lead_requests": 2, "lead_share": 0, "feedback": 0, **changes})


def assign(scheduler, prompt, *expected) -> int:
    return scheduler.admit([prompt], expected or None)[0].group


def assign_window(scheduler, prompts) -> list[int]:
    return [assigned.group for assigned in scheduler.admit(prompts)]


def random_prompts(rng, count, vocab=12):
    return [rng.integers(vocab, size=rng.integers(1, 8)) for _ in range(count)]


def test_the_worked_example():
    scheduler = CapacityScheduler(make_map([[1, 0], [0, 0]]), plain())
    assert [assign(scheduler, [0]) for _ in range(5)] == [0, 0, 1, 0, 1]
    assert scheduler.work.tolist() == [30, 20]


def test_scores_count_each_distinct_id_once_by_hand():
    """Ids 0 and 1: (1 + 3, 2 + 4) over sqrt(1 + 3), plus the bias."""
    table = make_map([[1, 2], [3, 4], [0, 0]], [1, 3, 12], bias=[0.5, 0])
    scheduler = CapacityScheduler(table)
    assert scheduler.score([0, 1, 1, 0]).tolist() == [2.5, 3.0]
    assert scheduler.score([]).tolist() == [0.5, 0.0]
    assert scheduler.unknown_tokens == 0
    assert scheduler.score([0, 1, -5, 2, 10**9]).tolist() == [1.5, 1.5]
    assert scheduler.unknown_tokens == 3


@given(st.integers(0, 9999), st.integers(1, 5), st.sampled_from([np.int32, np.int64]))
def test_scores_agree_with_the_definition(seed, groups, dtype):
    table, rng = random_map(seed, groups), np.random.default_rng(seed)
    scheduler = CapacityScheduler(table)
    for _ in range(3):
        prompt = rng.integers(-3, 16, size=rng.integers(1, 20)).astype(dtype)
        rows = list({int(v) if 0 <= v < 12 else 12 for v in prompt})
        expected = table.bias + table.token_scores[rows].sum(axis=0) / np.sqrt(table.token_weights[rows].sum())
        np.testing.assert_allclose(scheduler.score(prompt), expected, rtol=1e-5, atol=1e-6)


@given(st.integers(0, 9999), st.integers(1, 6), st.floats(0, 20), st.floats(0, 0.3), st.sampled_from([1, 5]))
def test_the_bound_is_never_broken(seed, groups, lead_requests, lead_share, together):
    """Only the least loaded group may go beyond, by a request larger than the allowance."""
    settings = SchedulerSettings(lead_requests=lead_requests, lead_share=lead_share, prompt_cost=0.1)
    scheduler, rng = CapacityScheduler(random_map(seed, groups), settings), np.random.default_rng(seed)
    prompts = random_prompts(rng, 40)
    works, mean = [], 0.0  # of requests, and the largest that the mean has been
    for first in range(0, len(prompts), together):
        window = prompts[first : first + together]
        tokens = rng.integers(1, 25, len(window)).astype(float).tolist()
        scheduler.admit(window, tokens)
        works += [own + 0.1 * len(prompt) for own, prompt in zip(tokens, window, strict=True)]
        largest, mean = max(works), max(mean, *(np.mean(works[:n]) for n in range(first + 1, len(works) + 1)))
        allowance = max(lead_requests * mean / groups, lead_share * scheduler.work.mean())
        assert scheduler.work.max() <= scheduler.work.mean() + max(allowance, largest) + 1e-6


@given(st.integers(0, 9999), st.integers(2, 5))
def test_the_bound_is_exact_for_single_requests(seed, groups):
    scheduler = CapacityScheduler(random_map(seed, groups), plain(lead_requests=3 * groups, lead_share=0.3))
    for prompt in random_prompts(np.random.default_rng(seed), 60):
        assign(scheduler, prompt)
        allowance = max(0.3 * scheduler.work.mean(), 30)
        assert scheduler.work.max() <= scheduler.work.mean() + allowance + 1e-6


@given(st.integers(0, 9999), st.integers(2, 3), st.integers(1, 6))
def test_windows_come_close_to_enumeration(seed, groups, count):
    """Exhaustive optimum of score - price within the bound, requests of equal work."""
    table, rng = random_map(seed, groups), np.random.default_rng(seed)
    settings = plain(lead_requests=groups)
    prompts = random_prompts(rng, count)
    scores = np.array([CapacityScheduler(table).score(prompt) for prompt in prompts]) - table.prices
    found = assign_window(CapacityScheduler(table, settings), prompts)
    limit = count / groups + 1
    totals = [
        sum(scores[i, d] for i, d in enumerate(labels))
        for labels in product(range(groups), repeat=count)
        if np.bincount(labels).max() <= limit + 1e-9
    ]
    assert np.bincount(found).max() <= limit + 1e-9
    gap = max(totals) - sum(scores[i, d] for i, d in enumerate(found))
    assert gap <= 0.05 * (max(totals) - min(totals)) + 1e-6


def test_a_window_exchanges_what_single_requests_would_take_from_each_other():
    """One each: the first prefers group 0 a little, the second much; alone the first takes it."""
    table = make_map([[0.1, 0], [0.9, 0], [0, 0]])
    alone = CapacityScheduler(table, plain(lead_requests=1))
    assert [assign(alone, [0]), assign(alone, [1])] == [0, 1]
    assert assign_window(CapacityScheduler(table, plain(lead_requests=1)), [[0], [1]]) == [1, 0]


@given(st.integers(0, 9999), st.lists(st.integers(0, 6), max_size=8))
def test_requests_are_numbered_in_their_order_of_arrival_alone_or_together(seed, sizes):
    rng = np.random.default_rng(seed)
    scheduler = CapacityScheduler(random_map(seed, 3))
    served = [one.request for size in sizes for one in scheduler.admit(random_prompts(rng, size))]
    served += [scheduler.admit([prompt])[0].request for prompt in random_prompts(rng, 2)]
    assert served == list(range(sum(sizes) + 2))


def test_finished_requests_correct_or_leave_the_ledger():
    table = make_map([[1, 0], [0, 0]])
    total = CapacityScheduler(table, plain(prompt_cost=0.5))
    running = CapacityScheduler(table, plain(prompt_cost=0.5, keep_finished=False))
    for scheduler, left in ((total, [36.0, 0.0]), (running, [0.0, 0.0])):
        assigned = scheduler.admit([[0, 0]], [5])[0]
        assert scheduler.work.tolist() == [6, 0]
        scheduler.finish(assigned, actual_tokens=35)
        assert scheduler.work.tolist() == left
    assert [assign(total, [0]) for _ in range(3)] == [1, 1, 1]  # 36 against a mean of 18 is beyond the bound
    assert assign(running, [0]) == 0


def test_prices_follow_the_ledger():
    """Group 0 is better by 0.25; every mean request ahead of the mean costs it 0.2, and group 1 gains as much."""
    scheduler = CapacityScheduler(make_map([[0.25, 0], [0, 0]]), plain(lead_requests=1000, feedback=0.2))
    assert [assign(scheduler, [0]) for _ in range(6)] == [0, 0, 1, 0, 1, 0]


def test_a_lead_costs_less_the_more_requests_run():
    """Group 0 is better by 0.3 and a lead of one request costs 0.4 over the root of what a group has, at least of one:
    .4 at (1, 0), .33 at (2, 1), .25 at (3, 2), and twice .23 at (4, 2).
    """
    scheduler = CapacityScheduler(make_map([[0.3, 0], [0, 0]]), plain(lead_requests=1000, lead_price=0.4))
    assert [assign(scheduler, [0]) for _ in range(8)] == [0, 1, 0, 1, 0, 0, 1, 0]


def after_unequal_requests() -> tuple[CapacityScheduler, list[Assigned]]:
    """Group 0 has a request of 30, group 1 two of 10 and 20; each prefers its group by .3. With 1.5 of 3 requests
    that run at once in each group, excess costs .4.
    """
    settings = plain(lead_requests=1000, excess_price=0.8, keep_finished=False)
    scheduler = CapacityScheduler(make_map([[0.3, 0], [0, 0.3], [0, 0]]), settings)
    scheduler.most_at_once = 3
    handles = [scheduler.admit([[group]], [work])[0] for group, work in ((0, 30), (1, 10), (1, 20))]
    assert [one.group for one in handles] == [0, 1, 1]
    return scheduler, handles


def test_long_requests_go_where_requests_are_short():
    """With one of 40 the mean is 25: its excess is .6, the groups' .2 and -.8, so that group 0 loses .4 * .6 * 1 = .24.
    With one of 60 the mean is 30, the excesses are 1, 0 and -1, and group 0 loses .4.
    """
    assert assign(after_unequal_requests()[0], [0], 40) == 0
    assert assign(after_unequal_requests()[0], [0], 60) == 1


def test_requests_that_have_ended_are_not_counted_as_short():
    """With the request of 10 gone the mean is 36.7, and one of 60 loses .4 / 1.5 * .64 * .27 = .05 in group 0."""
    scheduler, handles = after_unequal_requests()
    scheduler.finish(handles[1], 0)
    assert assign(scheduler, [0], 60) == 0


def test_without_a_known_limit_there_are_no_waves():
    scheduler = after_unequal_requests()[0]
    scheduler.most_at_once = 0
    assert assign(scheduler, [0], 60) == 0


def test_requests_of_a_scheduler_without_a_ledger_are_not_counted():
    before, after = RoundRobinScheduler(RoundRobin(num_groups=2)), after_unequal_requests()[0]
    (handle,) = before.admit([[0]])
    after.follow(before)
    after.finish(handle, 0)
    assert after.running.tolist() == [0, 0]


@given(st.integers(0, 9999))
def test_the_first_requests_of_all_groups_have_about_even_work(seed):
    """Long requests prefer group 0 and short ones group 1. Of 32 each that run at once, work may differ by a tenth."""
    table, rng = make_map([[0.1, 0], [0, 0.1], [0, 0]]), np.random.default_rng(seed)
    lengths = np.where(long := rng.random(80) < 0.5, 140, 60) + rng.integers(40, size=80)
    prompts = [np.full(length, int(not one)) for length, one in zip(lengths, long, strict=True)]

    def lead(**changes) -> float:
        scheduler = CapacityScheduler(table, live_settings(2, **changes))
        scheduler.most_at_once = 32
        groups = np.array([scheduler.admit([prompt])[0].group for prompt in prompts])
        waves = [lengths[groups == group][:32].sum() for group in range(2)]
        return max(waves) / min(waves)

    assert lead() < 1.1
    assert lead(excess_price=0) > 1.2, "what the price prevents"


def test_requests_that_come_together_are_priced_as_those_that_come_one_by_one():
    """Five of a window that all prefer group 0 by 0.3; without a price all of them would go there."""
    table = make_map([[0.3, 0], [0, 0]])
    found = [
        assign_window(CapacityScheduler(table, plain(lead_requests=1000, lead_price=price)), [[0]] * 5)
        for price in (0.4, 0.0)
    ]
    assert found == [[0, 1, 0, 1, 0], [0] * 5]


def test_a_finished_request_no_longer_costs_its_group_value():
    """Group 0 is better by 0.25 and one request ahead of the mean would cost it 0.5, if it were still counted."""
    settings = plain(lead_requests=1000, feedback=0.5, keep_finished=False)
    scheduler = CapacityScheduler(make_map([[0.25, 0], [0, 0]]), settings)
    for _ in range(5):
        assigned = scheduler.admit([[0]])[0]
        assert assigned.group == 0
        scheduler.finish(assigned, actual_tokens=10)
    assert [assign(scheduler, [0]) for _ in range(3)] == [0, 1, 0]


def test_without_scores_the_least_loaded_group_is_next():
    """Requests of 10, 1 and 1 to three groups: the next two go to the second and the third, then both are at 2."""
    scheduler = CapacityScheduler(make_map([[0, 0, 0]] * 2, spread=0.0), plain(lead_requests=1000))
    assert [assign(scheduler, [0], tokens) for tokens in (10, 1, 1, 1, 1, 8, 2)] == [0, 1, 2, 1, 2, 1, 2]
    handle = scheduler.admit([[0]], [50])[0]
    assert handle.group == 2
    scheduler.finish(handle, 0)  # it ended at once
    assert assign(scheduler, [0], 1) == 2


def test_a_request_larger_than_any_room_goes_to_the_least_loaded_group():
    """Of 10, 1 and 5 tokens, though it would rather go to the others."""
    scheduler = CapacityScheduler(make_map([[0.9, 0, 0.5], [0, 0, 0]]), plain(lead_requests=0))
    scheduler._work[:] = 10, 1, 5
    assert assign(scheduler, [0], 50) == 1


@given(st.integers(0, 9999), st.integers(1, 6))
def test_least_loaded_by_what_is_known_at_every_step(seed, groups):
    rng = np.random.default_rng(seed)
    scheduler, running = CapacityScheduler(make_map([[0] * groups] * 2, spread=0.0)), []
    for _ in range(50):
        work = scheduler.work
        running.append(scheduler.admit([[0]], [float(rng.integers(1, 30))])[0])
        assert running[-1].group == work.argmin()
        if rng.random() < 0.5:
            scheduler.finish(running.pop(int(rng.integers(len(running)))), float(rng.integers(60)))


@given(st.integers(0, 9999))
def test_the_same_arrivals_give_the_same_groups(seed):
    table, prompts = random_map(seed, 4), random_prompts(np.random.default_rng(seed), 20)
    one, two = (CapacityScheduler(table) for _ in range(2))
    assert [assign(one, p) for p in prompts] == [assign(two, p) for p in prompts]
    assert assign_window(one, prompts) == assign_window(two, prompts)


def test_how_far_a_live_group_may_lead_does_not_hang_on_how_much_the_profile_decoded():
    """Prompts of unequal lengths that prefer one of two groups, on plans whose profiles had no decode and little."""
    rng = np.random.default_rng(0)
    preferred = rng.integers(2, size=400)
    prompts = [np.full(length, group) for length, group in zip(rng.integers(60, 97, size=400), preferred, strict=True)]
    shares = []
    for mean_length in (90.0, 15.0):
        table = make_map([[0.2, 0], [0, 0.2], [0, 0]], mean_length=mean_length)
        scheduler, running, groups, rng = CapacityScheduler(table, live_settings(2)), [], [], np.random.default_rng(1)
        for prompt in prompts:
            if len(running) == 6:
                scheduler.finish(running.pop(rng.integers(6)), 16)
            running.append(scheduler.admit([prompt], [expected_tokens(mean_length, 16)])[0])
            groups.append(running[-1].group)
            assert np.ptp(np.bincount([one.group for one in running], minlength=2)) <= 2
        shares.append(np.mean(groups == preferred))
    assert min(shares) > 0.6, "without a choice, half of them"
    assert abs(shares[0] - shares[1]) < 0.05


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="lead_requests must not be negative: -1"):
        SchedulerSettings(lead_requests=-1)
    with pytest.raises(ValueError, match="token_weights has shape"):
        CapacityScheduler(make_map([[1, 0], [0, 0]], [1, 1, 1]))
    with pytest.raises(ValueError, match="mean_length must lie between 1e-09 and"):
        CapacityScheduler(make_map([[1, 0]], mean_length=0))
    scheduler = CapacityScheduler(make_map([[1, 0], [0, 0]]))
    with pytest.raises(ValueError, match="expected_tokens must not be negative: -1"):
        assign(scheduler, [0], -1)
    assert assign_window(scheduler, []) == []
