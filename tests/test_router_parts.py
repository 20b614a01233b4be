"""semmoe router without sockets: prompts, header fields, back-pressure, the choice of a rank, settings."""

import asyncio
import json
import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_site import HIGH, LOW, MEAN, make_plan, request_map, request_table

from semmoe.demo import MODEL
from semmoe.engines.transformers.tokenizer import load_tokenizer
from semmoe.router.gate import BusyError, Gate
from semmoe.router.headers import end_to_end, named_rank, to_backend, with_rank, without_rank
from semmoe.router.prompts import Prompt, Tokenizer, read_prompt
from semmoe.router.schedule import RankScheduler, UnavailableError, warm_up
from semmoe.router.server import listen
from semmoe.router.settings import RouterSettings

CHAT = (
    "{% if tools %}<tools>{{ tools | tojson }}{% endif %}{% for message in messages %}<{{ message.role }}>"
    "{{ message.content }}{% for call in message.tool_calls or [] %}{{ call.function.arguments.x }}{% endfor %};"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{{ style }}{% endif %}"
)
PARTS = "{% for message in messages %}{% for part in message['content'] %}{{ part.text }}|{% endfor %}{% endfor %}"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a list?"}]


@pytest.fixture(scope="module")
def plain():
    return load_tokenizer(str(MODEL))


@pytest.fixture(scope="module")
def tokenizer():
    """With a template, and with a token before every text, as many models have."""
    from tokenizers.processors import TemplateProcessing

    found = load_tokenizer(str(MODEL))
    found.chat_template = CHAT
    found.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", found.eos_token_id)]
    )
    return found


def read(path, body, tokenizer=None):
    return read_prompt(path, json.dumps(body).encode(), None if tokenizer is None else Tokenizer(tokenizer))


def ids(prompt):
    return None if prompt.ids is None else prompt.ids.tolist()


# Prompts


@pytest.mark.parametrize("text", ["def f(x):\n    return x", "Größe 中文 🙂", "<|endoftext|>", "", "a" * 5000])
def test_text_as_the_tokenizer_itself_has_it(tokenizer, text):
    with_first, without = tokenizer(text).input_ids, tokenizer(text, add_special_tokens=False).input_ids
    assert with_first == [tokenizer.eos_token_id, *without]
    for path, name in (("/v1/completions", "prompt"), ("/generate", "text")):
        assert ids(read(path, {name: text}, tokenizer)) == with_first
    assert ids(read("/v1/completions", {"prompt": text, "add_special_tokens": False}, tokenizer)) == without


def test_several_prompts_are_one_after_the_other(plain):
    one, two = plain("one text").input_ids, plain("and two").input_ids
    found = read("/v1/completions", {"prompt": ["one text", "and two"], "n": 3, "max_tokens": 7}, plain)
    assert (ids(found), found.answers, found.max_new_tokens) == (one + two, 6, 7)
    found = read("/v1/completions", {"prompt": [[1, 2], [3]]})
    assert (ids(found), found.answers, found.max_new_tokens) == ([1, 2, 3], 2, 16)


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/generate", {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 5, "n": 2}}, (5, 2, None)),
        ("/generate", {"input_ids": [1, 2], "data_parallel_rank": 1}, (128, 1, 1)),
        ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 9}}, (9, 1, None)),
        ("/v1/completions", {"prompt": [1, 2], "max_tokens": None, "routed_dp_rank": 3, "n": True}, (16, 1, 3)),
        ("/v1/completions", {"prompt": [1, 2], "n": 10**9, "max_tokens": -1}, (16, 1024, None)),
    ],
)
def test_ids_lengths_and_named_ranks(path, body, expected):
    found = read(path, body)
    assert ids(found) == [1, 2]
    assert (found.max_new_tokens, found.answers, found.rank) == expected


def test_a_conversation_by_the_models_template(tokenizer):
    body = {"messages": MESSAGES, "max_completion_tokens": 4, "max_tokens": 8}
    expected = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    found = read("/v1/chat/completions", body, tokenizer)
    assert (ids(found), found.max_new_tokens) == (expected, 4)
    assert expected[0] != tokenizer.eos_token_id  # a template brings its own first token
    text = {**body, "chat_template_kwargs": {"style": "calm"}, "tools": [{"type": "function"}]}
    assert tokenizer.decode(read("/v1/chat/completions", text, tokenizer).ids) == (
        '<tools>[{"type": "function"}]<system>Be brief.;<user>What is a list?;<assistant>calm'
    )
    no_more = read("/v1/chat/completions", {**body, "add_generation_prompt": False}, tokenizer)
    assert tokenizer.decode(no_more.ids).endswith("What is a list?;")
    answered = [*MESSAGES, {"role": "assistant", "content": "A list is"}]
    going_on = read("/v1/chat/completions", {"messages": answered, "continue_final_message": True}, tokenizer)
    assert tokenizer.decode(going_on.ids).endswith("<assistant>A list is")


def test_calls_and_parts_as_templates_want_them(tokenizer):
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 41}'}}
    two_parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "user", "content": two_parts}]
    found = read("/v1/chat/completions", {"messages": messages}, tokenizer)
    assert tokenizer.decode(found.ids) == "<assistant>41;<user>a\nb;<assistant>"
    parts = load_tokenizer(str(MODEL))
    parts.chat_template = PARTS
    assert parts.decode(read("/v1/chat/completions", {"messages": messages[1:]}, parts).ids) == "a|b|"


def test_responses_are_conversations(tokenizer):
    chat = ids(read("/v1/chat/completions", {"messages": MESSAGES}, tokenizer))
    part = [{"type": "input_text", "text": "What is a list?"}]
    for given_input in ("What is a list?", [{"role": "user", "content": part}]):
        body = {"instructions": "Be brief.", "input": given_input, "max_output_tokens": 3}
        found = read("/v1/responses", body, tokenizer)
        assert (ids(found), found.max_new_tokens) == (chat, 3)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {}), ("/v1/completions", {"prompt": []}), ("/v1/completions", {"prompt": [1, "a"]}),
        ("/v1/completions", {"prompt": [[1], []]}), ("/v1/completions", {"prompt": [10**30]}),
        ("/v1/completions", {"prompt": {"a": 1}}), ("/v1/completions", [1]), ("/v1/completions", "text"),
        ("/v1/chat/completions", {"messages": "hello"}), ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": MESSAGES, "chat_template": "{{ 1 }}"}),
        ("/v1/chat/completions", {"messages": MESSAGES, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}),
        ("/v1/chat/completions", {"messages": MESSAGES, "chat_template_kwargs": [1]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("/v1/responses", {"input": "hi", "previous_response_id": "r1"}),
        ("/v1/responses", {"input": [{"type": "function_call_output", "output": "1"}]}),
        ("/generate", {"text": "a", "image_data": "b"}), ("/generate", {"input_ids": "ab"}),
        ("/inference/v1/generate", {"token_ids": [1], "features": {"image": 1}}),
    ],
)  # fmt: skip
def test_what_cannot_be_known_is_left_to_the_engine(tokenizer, path, body):
    found = read(path, body, None if path == "/generate" and "input_ids" in body else tokenizer)
    assert found.ids is None
    assert found.answers >= 1


def test_without_a_template_or_a_tokenizer_text_is_unknown(plain):
    assert plain.chat_template is None
    assert read("/v1/chat/completions", {"messages": MESSAGES}, plain).ids is None
    assert read("/v1/completions", {"prompt": "text"}).ids is None


def test_a_limit_of_the_tokenizers_file_does_not_cut_prompts():
    found = load_tokenizer(str(MODEL))
    found.backend_tokenizer.enable_truncation(4)
    assert len(read("/v1/completions", {"prompt": "one two three four five six"}, found).ids) > 4


def test_threads_agree(plain):
    wrapped, texts = Tokenizer(plain), [f"text {i} " * (i % 9 + 1) for i in range(200)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda text: wrapped.encode(text, True).tolist(), texts))
    assert found == [plain(text).input_ids for text in texts]


NAMES = st.sampled_from(["prompt", "messages", "input", "text", "input_ids", "n", "content", "sampling_params"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner), max_leaves=8,
)  # fmt: skip


@given(st.binary(max_size=60) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_no_body_ends_the_reader(body):
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/generate", "/inference/v1/generate"):
        found = read_prompt(path, body, None)
        assert found.ids is None or found.ids.dtype == np.int64
        assert 1 <= found.answers <= 1024


# Header fields


def test_fields_for_one_connection_end_there():
    kept = [(b"x-kept", b"1"), (b"x-kept", b"2")]
    fields = [(b"Connection", b"close, X-Hop"), (b"x-hop", b"1"), (b"TE", b"trailers"), (b"Keep-Alive", b"timeout=5"),
              (b"Transfer-Encoding", b"chunked"), (b"upgrade", b"h2c"), (b"X-Kept", b"1"), kept[1]]  # fmt: skip
    assert end_to_end(fields) == kept


def test_fields_of_a_request_that_is_sent_on():
    fields = [(b"host", b"router"), (b"content-length", b"9"), (b"expect", b"100-continue"), (b"accept", b"*/*")]
    start, via = [(b"host", b"engine:1")], (b"via", b"1.1 semmoe")
    assert to_backend(fields, b"engine:1", 7) == [*start, (b"accept", b"*/*"), (b"content-length", b"7"), via]
    assert to_backend(fields, b"engine:1", None) == [*start, (b"content-length", b"9"), (b"accept", b"*/*"), via]
    assert to_backend([], b"engine:1", None) == [*start, (b"transfer-encoding", b"chunked"), via]
    assert to_backend([], b"engine:1", 0) == [*start, via]


def test_ranks_in_fields():
    assert named_rank(with_rank([], 3, "/v1/completions")) == 3
    assert [name for name, _ in with_rank([], 3, "/generate")] == [
        b"x-data-parallel-rank",
        b"x-override-routed-dp-rank",
    ]
    for value in (b"-1", b"a", b"", b"9" * 30, b"1.0"):
        assert named_rank([(b"x-data-parallel-rank", value)]) is None
    assert without_rank([(b"a", b"1"), *with_rank([], 0, "/generate")]) == [(b"a", b"1")]


# Back-pressure


class Guests:
    """Tasks in a gate, each there until it is told to go."""

    def __init__(self, gate):
        self._gate, self.started, self.refused, self._go, self._tasks = gate, [], [], {}, {}

    async def come(self, *names):
        for name in names:
            self._go[name] = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._visit(name))
            await asyncio.sleep(0)

    async def _visit(self, name):
        try:
            with self._gate.place() as place:
                await place.start()
                self.started.append(name)
                await self._go[name].wait()
        except BusyError:
            self.refused.append(name)

    async def go(self, name):
        self._go[name].set()
        await asyncio.gather(self._tasks[name])
        await asyncio.sleep(0)

    async def hang_up(self, name):
        self._tasks[name].cancel()
        await asyncio.gather(self._tasks[name], return_exceptions=True)
        await asyncio.sleep(0)


def test_so_many_run_so_many_wait_and_others_are_refused():
    async def scene():
        gate = Gate(limit=2, queue=2, seconds=60, max_bytes=10)
        guests = Guests(gate)
        await guests.come(*"abcde")
        assert (guests.started, guests.refused, gate.inside, gate.running) == (["a", "b"], ["e"], 4, 2)
        await guests.go("b")
        assert guests.started == ["a", "b", "c"]
        await guests.come("f")
        await guests.hang_up("d")  # in the queue
        await guests.hang_up("a")  # at the backends
        assert guests.started == ["a", "b", "c", "f"]
        for name in "cf":
            await guests.go(name)
        assert (gate.inside, gate.running) == (0, 0)

    asyncio.run(scene())


def test_a_turn_that_comes_as_the_guest_hangs_up_is_passed_on():
    async def scene():
        gate = Gate(limit=1, queue=4, seconds=60, max_bytes=10)
        guests = Guests(gate)
        await guests.come(*"abc")
        turn = gate._turns[0]
        guests._go["a"].set()
        while not turn.done():
            await asyncio.sleep(0)
        await guests.hang_up("b")  # told, and not yet running
        assert guests.started == ["a", "c"]
        await guests.go("c")
        assert (gate.inside, gate.running) == (0, 0)

    asyncio.run(scene())


def test_no_more_bytes_are_held_than_allowed():
    gate = Gate(limit=2, queue=2, seconds=60, max_bytes=10)
    with gate.place() as first:
        first.hold(4)
        with gate.place() as second:
            second.hold(6)
            with pytest.raises(BusyError):
                second.hold(1)
            assert gate.held == 10
        assert gate.held == 4
    assert gate.held == 0


def test_nobody_waits_for_too_long():
    async def scene():
        gate = Gate(limit=1, queue=4, seconds=0.01, max_bytes=10)
        guests = Guests(gate)
        await guests.come(*"ab")
        await asyncio.sleep(0.05)
        assert (guests.refused, gate.inside, gate.running) == (["b"], 1, 1)
        await guests.go("a")
        await guests.come("c")
        assert guests.started == ["a", "c"]
        await guests.go("c")
        assert (gate.inside, gate.running) == (0, 0)

    asyncio.run(scene())


@given(st.lists(st.tuples(st.sampled_from(["come", "go", "hang_up"]), st.integers(0, 30)), max_size=60))
def test_a_gate_is_empty_in_the_end(steps):
    async def scene():
        gate, inside, count = Gate(limit=3, queue=4, seconds=60, max_bytes=10), [], 0
        guests = Guests(gate)
        for kind, which in steps:
            if kind == "come":
                await guests.come(count)
                inside += [] if count in guests.refused else [count]
                count += 1
            elif inside:
                name = inside.pop(which % len(inside))
                await (guests.go if kind == "go" and name in guests.started else guests.hang_up)(name)
            assert gate.running == min(len(inside), 3)
            assert gate.inside == len(inside) <= 7
        for name in inside:
            await guests.hang_up(name)
        assert (gate.inside, gate.running) == (0, 0)

    asyncio.run(scene())


# The choice of a rank


def scheduler(requests=None, backends=1, ranks=2, **changes):
    urls = tuple(f"http://host:{8000 + i}" for i in range(backends))
    return RankScheduler(make_plan(requests, ranks), RouterSettings(backends=urls, **changes))


def prompt(*tokens, **changes):
    return Prompt(np.array(tokens), **changes)


def test_the_least_loaded_replica_of_the_preferred_rank():
    """Both replicas' rank 1 are equal, so the second request goes to the other."""
    ranks = scheduler(backends=2, prefix_weight=0)
    choices = [ranks.choose(prompt(*HIGH), None, [0, 0]) for _ in range(2)]
    assert [(choice.backend, choice.rank, choice.by) for choice in choices] == [(0, 1, "plan"), (1, 1, "plan")]
    assert ranks.work.tolist() == [0, len(HIGH) + MEAN, 0, len(HIGH) + MEAN]
    for choice in choices:
        ranks.finish(choice)
    assert ranks.work.tolist() == [0, 0, 0, 0]


def test_no_rank_runs_far_ahead_of_the_others():
    """As in a live engine: a lead of one request costs .25 while few run, and LOW prefers rank 0 by .2."""
    ranks = scheduler()
    assert [ranks.choose(prompt(*LOW), None, [0]).rank for _ in range(5)] == [0, 1, 0, 1, 0]


def test_answers_weigh_by_number_and_length():
    ranks = scheduler()
    ranks.choose(prompt(*LOW, max_new_tokens=2, answers=3), None, [0])
    assert ranks.work.tolist() == [3 + 6, 0]
    ranks.choose(prompt(*HIGH, max_new_tokens=1000), None, [0])
    assert ranks.work.tolist() == [9, 3 + MEAN]


def test_backends_that_must_not_be_used_are_not():
    ranks = scheduler(backends=2)
    assert {ranks.choose(prompt(*LOW), None, [None, 0]).backend for _ in range(8)} == {1}
    assert ranks.choose(prompt(*LOW), 1, [None, 0]).backend == 1
    for named in (None, 0):
        with pytest.raises(UnavailableError):
            ranks.choose(prompt(*LOW), named, [None, None])
    with pytest.raises(UnavailableError):
        ranks.spare([None, None])


def test_a_named_rank_counts_in_the_ledger_and_an_unknown_prompt_does_not():
    ranks = scheduler(backends=2)
    named = ranks.choose(prompt(*LOW), 1, [0, 0])
    assert (named.rank, named.by, ranks.work[1::2].sum()) == (1, "named", 3 + MEAN)
    blind = ranks.choose(Prompt(None), 0, [0, 0])
    assert (blind.rank, blind.by, ranks.work[0::2].sum()) == (0, "named", MEAN)
    unknown = ranks.choose(Prompt(None), None, [5, 4])
    assert (unknown.backend, unknown.rank, unknown.by) == (1, None, "engine")
    for choice in (named, blind, unknown):
        ranks.finish(choice)
    assert ranks.work.tolist() == [0, 0, 0, 0]


def test_backends_that_are_ranks():
    ranks = scheduler(backends=2, backend_ranks="urls")
    found = [ranks.choose(prompt(*tokens), named, [0, 0]) for tokens, named in ((HIGH, None), (HIGH, 0))]
    assert [(choice.backend, choice.rank, choice.by) for choice in found] == [(1, 1, "plan"), (0, 0, "named")]
    assert ranks.choose(Prompt(None), None, [1, 0]).rank == 1  # nobody else will choose
    with pytest.raises(ValueError, match="2 ranks, and there are 3 URLs"):
        scheduler(backends=3, backend_ranks="urls")


def test_what_a_lost_backend_had_cached_is_forgotten():
    ranks = scheduler(request_map(token_scores=np.zeros((4097, 2), np.float32)), backends=2)
    text = prompt(*[7] * 32)
    first = ranks.choose(text, None, [0, 0])
    ranks.finish(first)
    again = ranks.choose(text, None, [0, 0])
    assert (again.backend, again.rank, again.cached_tokens) == (first.backend, first.rank, 32)
    ranks.forget(first.backend)
    assert ranks.choose(text, None, [0, 0]).cached_tokens == 0


def test_prefixes_can_be_left_out():
    ranks = scheduler(prefix_weight=0)
    assert [ranks.choose(prompt(*[7] * 32), None, [0]).cached_tokens for _ in range(3)] == [0, 0, 0]


def test_algorithm_2_deals_over_all_replicas():
    ranks = scheduler(request_table(), backends=2)
    found = [ranks.choose(prompt(*LOW), None, [0, 0]) for _ in range(4)]
    assert sorted((choice.backend, choice.rank) for choice in found) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert (found[0].rank, ranks.work.tolist()) == (0, [0, 0, 0, 0])
    named = ranks.choose(prompt(*LOW), 1, [None, 0])
    assert (named.backend, named.rank, named.by) == (1, 1, "named")
    ranks.finish(named)
    assert ranks.unknown_tokens == 0


@pytest.mark.parametrize("requests", [None, request_table()])
def test_warming_up_leaves_nothing_to_compile(requests):
    from semmoe.requests import capacity as compiled
    from semmoe.requests import prefix

    settings = RouterSettings(backends=("http://a:1", "http://b:1"))
    warm_up(make_plan(requests), settings)
    functions = (compiled._add_scores, compiled._greedy, prefix.block_keys)
    before = [len(function.signatures) for function in functions]
    ranks = RankScheduler(make_plan(requests), settings)
    for named, running in ((None, [0, 0]), (1, [0, 0]), (None, [None, 3])):
        for value in (Prompt(np.arange(40)), Prompt(np.zeros(0, np.int64)), Prompt(np.array([1]), 3, 2)):
            ranks.finish(ranks.choose(value, named, running))
    assert [len(function.signatures) for function in functions] == before
    assert requests is not None or before[0] >= 1


# Sockets


def test_small_writes_leave_at_once():
    """Or every event of a stream would wait for an acknowledgement."""

    async def scene():
        listener, found = listen("127.0.0.1", 0), asyncio.get_running_loop().create_future()

        async def accept(reader, writer):
            found.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(accept, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            writer.close()
            return await found

    assert asyncio.run(scene()) == 1


# Settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backends": ()}, "at least one backend"), ({"backends": ("ftp://a",)}, "is no backend"),
        ({"backends": ("http://",)}, "is no backend"), ({"backends": ("http://a:x",)}, "no valid port"),
        ({"backends": ("http://a:0",)}, "no valid port"), ({"backends": ("http://u:p@a:1",)}, "more than a host"),
        ({"backends": ("http://a:1?x=1",)}, "more than a host"), ({"backend_ranks": "name"}, "not 'name'"),
        ({"queue": -1}, "queue must lie between 0"), ({"prefix_weight": float("nan")}, "prefix_weight must"),
        ({"queue_seconds": 0}, "queue_seconds must lie between"), ({"health_timeout": float("inf")}, "health_timeout"),
        ({"tokenizer_threads": 0}, "tokenizer_threads must lie between 1"),
        ({"max_body": 9, "max_held": 8}, "max_held must be at least max_body, 9, not 8"),
        ({"head_seconds": 0}, "head_seconds must lie"), ({"stall_seconds": -1}, "stall_seconds must"),
        ({"body_seconds": float("nan")}, "body_seconds must lie"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        RouterSettings(**{"backends": ("http://a:1",), **changes})


def test_an_unknown_setting_is_an_error():
    with pytest.raises(TypeError, match="retries"):
        RouterSettings(backends=("http://a:1",), retries=3)
