"""The choice of a pass's path from measured times."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ranks import on_ranks

from semmoe.demo import MODEL
from semmoe.engines.paths import MARGIN, PathChoice, PathTimes, dummy_step, measure, only, table, text_ids
from semmoe.engines.sglang.shuffle import BoundaryShuffle
from semmoe.engines.transformers.tokenizer import load_tokenizer
from semmoe.texts import held_out_prompts


def times(**seconds):
    return PathTimes(np.array([1, 100]), {path: np.array(values) for path, values in seconds.items()})


def test_the_cheapest_path_by_hand():
    """Lines from 2 to 4 and from 1 to 10 over 1 to 100 tokens cross at 15.14."""
    found = times(shuffled=[2.0, 4.0], whole=[1.0, 10.0])
    assert found.best(15) == "whole"
    assert found.best(16) == "shuffled"
    assert found.of("whole", 100) == 10
    assert found.of("whole", 300) == pytest.approx(30)  # in proportion beyond the largest size
    assert found.of("whole", 0) == 1
    assert "1: whole" in table(found)


def test_a_path_is_kept_while_it_costs_hardly_more():
    choice = PathChoice(times(shuffled=[2.0, 4.0], whole=[1.0, 10.0]))
    assert choice.choose(1) == "whole"
    assert choice.choose(16) == "whole"  # 2.364 in place of 2.303
    assert choice.times.of("whole", 16) <= (1 + MARGIN) * choice.times.of("shuffled", 16)
    assert choice.choose(40) == "shuffled"
    assert choice.choose(16) == "shuffled"
    assert choice.passes == {"whole": 2, "shuffled": 2}
    assert [value for _, _, value in choice.readings({"ep_rank": "0"})] == [2, 2]


def test_one_path_alone_is_always_taken():
    choice = only("shuffled")
    assert {choice.choose(n) for n in (1, 10, 10_000)} == {"shuffled"}


def timed(comm):
    """Rank 1 is slow on one path: both ranks must hold its times."""
    import time

    ran = []

    def run(path, num_tokens):
        ran.append((path, num_tokens))
        time.sleep(0.004 if (path, comm.rank) == ("whole", 1) else 0.001)

    found = measure(run, ("shuffled", "whole"), 20, comm.group, torch.device("cpu"))
    return found.sizes.tolist(), {path: values.tolist() for path, values in found.seconds.items()}, sorted(set(ran))


def test_all_ranks_hold_the_times_of_the_slowest(tmp_path):
    first, second = on_ranks(2, timed, tmp_path)
    assert first == second
    sizes, seconds, ran = first
    assert sizes == [1, 4, 16]  # not above what a pass may have
    assert min(seconds["whole"]) >= 0.004
    assert ran == [(path, size) for path in ("shuffled", "whole") for size in (1, 4, 16)]


def undecided(comm):
    """Two paths of which one takes a third of the time, but for three rounds of the first five, in which it waits."""
    import time

    ran = []

    def run(path, num_tokens):
        ran.append(path)
        waits = path == "shuffled" and 2 <= ran.count("shuffled") <= 4
        time.sleep((0.01 if path == "shuffled" else 0.03) + 0.06 * waits)

    return measure(run, ("shuffled", "whole"), 1, comm.group, torch.device("cpu")).best(1), len(ran) // 2


def test_rounds_that_disagree_are_followed_by_more(tmp_path):
    """One round warms up; three of the next five are wrong, none of the ten after them."""
    assert on_ranks(2, undecided, tmp_path) == [("shuffled", 1 + 15)] * 2


def test_passes_are_timed_with_text_where_there_is_a_tokenizer(tmp_path, caplog):
    found = text_ids(str(MODEL), 4096)
    assert load_tokenizer(str(MODEL)).decode(found[:200]) in held_out_prompts(per_domain=1)[0][2]
    assert len(found) == 1024
    assert not caplog.records
    at_random = text_ids(str(tmp_path), 4096)
    assert len(np.unique(at_random)) > 700 > len(np.unique(found))
    assert "random tokens in place of text" in caplog.text
    assert text_ids(str(MODEL), 100).max() < 100  # another tokenizer than the model's


@pytest.mark.parametrize(("path", "padded"), [("whole", None), ("shuffled", [3])])
def test_sglang_pads_no_row_where_every_rank_has_all(path, padded):
    """SGLang pads a pass to a multiple of the ranks where it knows the numbers of tokens in `global_num_tokens_cpu`."""
    shuffler = SimpleNamespace(start=lambda *tokens: None)
    shuffle, batch = BoundaryShuffle(shuffler, None, {}), SimpleNamespace(global_num_tokens_cpu=[3])
    shuffle.choice = only(path)
    shuffle.begin_pass(batch, lambda: dummy_step(np.arange(3), 1))
    assert batch.global_num_tokens_cpu == padded
    most = torch.tensor([2])
    assert shuffle.bound(most) is (None if path == "whole" else most)
