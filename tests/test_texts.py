"""The held-out prompts: several domains, taking turns, the same every time."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semmoe.traces.texts import HELD_OUT, chunks, held_out_documents, held_out_prompts


def test_chunks_end_where_lines_end():
    assert chunks("ab\ncd\nef\ngh\nij", 5) == ["ab\ncd\n", "ef\ngh\n"]
    assert chunks("short", 10) == []
    assert chunks("x" * 50 + "\n" + "tail", 10) == ["x" * 20, "x" * 20, "x" * 10 + "\n"]


@given(st.lists(st.integers(0, 99), max_size=8), st.integers(1, 20))
def test_chunks_of_any_lines_lose_no_more_than_a_short_tail(lengths, chars):
    text = "\n".join("abcdefghij"[: 1 + i % 10] * length for i, length in enumerate(lengths))
    pieces = chunks(text, chars)
    assert text.startswith("".join(pieces))
    assert all(1 <= len(piece) <= 2 * chars for piece in pieces)
    assert len(text) - len("".join(pieces)) < chars


@given(st.lists(st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=9)), st.integers(10, 40))
def test_chunks_are_consecutive_and_of_about_the_size_asked_for(lines, chars):
    text = "\n".join(lines)
    pieces = chunks(text, chars)
    assert text.startswith("".join(pieces))
    assert all(chars <= len(piece) < chars + 10 for piece in pieces)
    assert len(text) - len("".join(pieces)) < chars


def test_prompts_come_from_every_domain_in_turn():
    prompts = held_out_prompts(per_domain=6)
    domains = [domain for domain, _, _ in prompts]
    assert Counter(domains) == dict.fromkeys(HELD_OUT, 6)
    assert domains[: len(HELD_OUT)] == list(HELD_OUT)
    assert len({prompt for _, _, prompt in prompts}) == len(prompts)


def test_long_modules_do_not_crowd_out_the_others():
    prompts = held_out_prompts(per_domain=6)
    for domain in HELD_OUT:
        assert len({document for own, document, _ in prompts if own == domain}) >= 4


def test_prompts_are_the_same_every_time_and_of_about_the_length_asked_for():
    prompts = held_out_prompts(per_domain=4, chars=300)
    assert prompts == held_out_prompts(per_domain=4, chars=300)
    assert prompts[:6] == held_out_prompts(per_domain=1, chars=300)
    assert all(300 <= len(prompt) <= 600 for _, _, prompt in prompts)


@pytest.mark.parametrize("domain", HELD_OUT)
def test_most_documents_of_a_domain_exist_here(domain):
    documents = held_out_documents()[domain]
    assert len(documents) >= len(HELD_OUT[domain]) / 2
    assert all(len(text) > 100 for text in documents.values())


def test_no_document_is_in_two_domains():
    names = [name for names in HELD_OUT.values() for name in names]
    assert len(set(names)) == len(names)
