"""`semmoe picker` without a gateway: prompts, as it reads them from bodies, and the command itself."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from semmoe.cli import app
from semmoe.cli.app import _extra, install_hint
from semmoe.cli.demo import MODEL
from semmoe.engines.transformers.tokenizer import load_tokenizer
from semmoe.gateway.addresses import addresses_of
from semmoe.gateway.prompts import PATHS, Tokenizer, read_prompt

CHAT = (
    "{% if tools %}<tools>{{ tools | tojson }}{% endif %}{% for message in messages %}<{{ message.role }}>"
    "{{ message.content }}{% for call in message.tool_calls or [] %}{{ call.function.arguments.x }}{% endfor %};"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{{ style }}{% endif %}"
)
PARTS = "{% for message in messages %}{% for part in message['content'] %}{{ part.text }}|{% endfor %}{% endfor %}"
TOOL = {"type": "function", "function": {"name": "f", "description": None, "parameters": None}}
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


def read(path, body, tokenizer):
    """The ids of a prompt as a list, or None."""
    found = read_prompt(path, json.dumps(body).encode(), Tokenizer(tokenizer))
    assert found is None or found.dtype == np.int64
    return None if found is None else found.tolist()


@pytest.mark.parametrize("text", ["def f(x):\n    return x", "Größe 中文 🙂", "<|endoftext|>", "a" * 5000])
def test_text_as_the_tokenizer_itself_has_it(tokenizer, text):
    with_first, without = tokenizer(text).input_ids, tokenizer(text, add_special_tokens=False).input_ids
    assert with_first == [tokenizer.eos_token_id, *without]
    assert read("/v1/completions", {"prompt": text}, tokenizer) == with_first
    assert read("/v1/completions", {"prompt": text, "add_special_tokens": False}, tokenizer) == without


def test_several_prompts_are_one_after_the_other(plain):
    one, two = plain("one text").input_ids, plain("and two").input_ids
    assert read("/v1/completions", {"prompt": ["one text", "and two"], "n": 3, "max_tokens": 7}, plain) == one + two
    assert read("/v1/completions", {"prompt": [[1, 2], [3]]}, plain) == [1, 2, 3]
    assert read("/v1/completions", {"prompt": [1, 2], "max_tokens": None, "n": True}, plain) == [1, 2]


def test_a_conversation_by_the_models_template(tokenizer):
    body = {"messages": MESSAGES, "max_completion_tokens": 4, "max_tokens": 8}
    expected = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert read("/v1/chat/completions", body, tokenizer) == expected
    assert expected[0] != tokenizer.eos_token_id  # a template brings its own first token
    text = {
        **body,
        "chat_template_kwargs": {"style": "calm"},
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }
    assert tokenizer.decode(read("/v1/chat/completions", text, tokenizer)) == (
        f"<tools>{json.dumps([TOOL])}<system>Be brief.;<user>What is a list?;<assistant>calm"
    )
    no_more = read("/v1/chat/completions", {**body, "add_generation_prompt": False}, tokenizer)
    assert tokenizer.decode(no_more).endswith("What is a list?;")
    answered = [*MESSAGES, {"role": "assistant", "content": "A list is"}]
    going_on = read("/v1/chat/completions", {"messages": answered, "continue_final_message": True}, tokenizer)
    assert tokenizer.decode(going_on).endswith("<assistant>A list is")


def test_calls_and_parts_as_templates_want_them(tokenizer):
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 41}'}}
    two_parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "user", "content": two_parts}]
    found = read("/v1/chat/completions", {"messages": messages}, tokenizer)
    assert tokenizer.decode(found) == "<assistant>41;<user>a\nb;<assistant>"
    parts = load_tokenizer(str(MODEL))
    parts.chat_template = PARTS
    assert parts.decode(read("/v1/chat/completions", {"messages": messages[1:]}, parts)) == "a\nb|"


def test_responses_are_conversations(tokenizer):
    chat = read("/v1/chat/completions", {"messages": MESSAGES}, tokenizer)
    part = [{"type": "input_text", "text": "What is a list?"}]
    for given_input in ("What is a list?", [{"role": "user", "content": part}]):
        body = {"instructions": "Be brief.", "input": given_input, "max_output_tokens": 3}
        assert read("/v1/responses", body, tokenizer) == chat


def test_anthropics_messages_are_conversations(tokenizer):
    chat = read("/v1/chat/completions", {"messages": MESSAGES}, tokenizer)
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    content = [{"type": "text", "text": "What is a list?"}]
    for one, other in (("Be brief.", "What is a list?"), (system, content)):
        body = {"max_tokens": 8, "system": one, "messages": [{"role": "user", "content": other}]}
        assert read("/v1/messages", body, tokenizer) == chat


def test_anthropics_tools_their_calls_and_their_results_as_templates_want_them(tokenizer):
    tool = {"name": "read", "description": "Read.", "input_schema": {"type": "object"}}
    result = {"type": "tool_result", "tool_use_id": "t1"}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "def heapify(values): ..."}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hidden", "signature": "s"},
                {"type": "tool_use", "id": "t1", "name": "read", "input": {"x": 41}},
            ],
        },
        {
            "role": "user",
            "content": [
                {**result, "content": "import heapq"},
                {**result, "content": [{"type": "text", "text": "EOF"}]},
                {"type": "text", "text": "Go on."},
            ],
        },
        {"role": "user", "content": [{**result, "content": "last"}]},
    ]
    body = {"system": "You review Python.", "messages": turns, "tools": [tool]}
    function = {"name": "read", "description": "Read.", "parameters": {"type": "object"}}
    assert tokenizer.decode(read("/v1/messages", body, tokenizer)) == (
        f"<tools>{json.dumps([{'type': 'function', 'function': function}])}<system>You review Python.;"
        "<user>def heapify(values): ...;<assistant>41;<tool>import heapq;<tool>EOF;<user>Go on.;<tool>last;<assistant>"
    )


IMAGE = {"type": "image", "source": {"type": "base64", "data": "aa"}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ""}),
        ("/v1/completions", {}), ("/v1/completions", {"prompt": []}), ("/v1/completions", {"prompt": [1, "a"]}),
        ("/v1/completions", {"prompt": [[1], []]}), ("/v1/completions", {"prompt": [10**30]}),
        ("/v1/completions", {"prompt": [1, -1]}),
        ("/v1/completions", {"prompt": {"a": 1}}), ("/v1/completions", [1]), ("/v1/completions", "text"),
        ("/v1/completions", {"prompt": [True]}), ("/v1/completions", {"prompt": "\ud800"}),
        ("/v1/chat/completions", {"messages": "hello"}), ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": MESSAGES, "chat_template": "{{ 1 }}"}),
        ("/v1/chat/completions", {"messages": MESSAGES, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}),
        ("/v1/chat/completions", {"messages": MESSAGES, "chat_template_kwargs": [1]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("/v1/responses", {"input": "hi", "previous_response_id": "r1"}),
        ("/v1/responses", {"input": [{"type": "function_call_output", "output": "1"}]}),
        ("/v1/messages", {"messages": "hello"}), ("/v1/messages", {"messages": [], "system": "a"}),
        ("/v1/messages", {"messages": MESSAGES, "tools": 7}), ("/v1/messages", {"messages": MESSAGES, "tools": [7]}),
        ("/v1/messages", {"messages": MESSAGES, "system": [IMAGE]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [IMAGE]}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [IMAGE]}]}]}),
    ],
)  # fmt: skip
def test_what_cannot_be_known_is_none(tokenizer, path, body):
    assert read(path, body, tokenizer) is None


def test_an_error_of_a_template_is_told_without_the_prompt(caplog):
    found = load_tokenizer(str(MODEL))
    found.chat_template = "{{ raise_exception(messages[0].content) }}"
    assert read("/v1/chat/completions", {"messages": [{"role": "user", "content": "secret"}]}, found) is None
    assert "secret" not in caplog.text


def test_without_a_template_a_conversation_is_unknown(plain):
    assert plain.chat_template is None
    assert read("/v1/chat/completions", {"messages": MESSAGES}, plain) is None
    assert read("/v1/messages", {"messages": MESSAGES}, plain) is None


def test_a_limit_of_the_tokenizers_file_does_not_cut_prompts():
    found = load_tokenizer(str(MODEL))
    found.backend_tokenizer.enable_truncation(4)
    assert len(read("/v1/completions", {"prompt": "one two three four five six"}, found)) > 4


def test_threads_agree(plain):
    wrapped, texts = Tokenizer(plain), [f"text {i} " * (i % 9 + 1) for i in range(200)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda text: wrapped.encode(text, True).tolist(), texts))
    assert found == [plain(text).input_ids for text in texts]


NAMES = st.sampled_from(
    ["prompt", "messages", "input", "text", "content", "role", "system", "tools", "tool_calls", "type"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.sampled_from(["tool_use", "tool_result"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner), max_leaves=8,
)  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@given(body=st.binary(max_size=60) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_no_body_ends_the_reader(tokenizer, path, body):
    found = read_prompt(path, body, Tokenizer(tokenizer))
    assert found is None or found.dtype == np.int64


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", [b"[" * 200_000, b'{"prompt": [1%s]}' % (b"0" * 5000), b"\xff", b""])
def test_bodies_that_no_json_reader_takes_are_none(tokenizer, path, body):
    assert read_prompt(path, body, Tokenizer(tokenizer)) is None


# The command


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "grpc", None)
    words = ["picker", "127.0.0.1:1", "--plan", "plan", "--tokenizer", "tiny"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert result.stderr.strip() == f"error: this command needs grpc: {install_hint('gateway')}"
    assert {_extra(name, "picker") for name in ("envoy", "grpc_health", "jinja2", "transformers")} == {"gateway"}
    assert _extra("jinja2", "report") == "report"


def test_the_command_explains_itself_and_costs_other_commands_nothing():
    shown = CliRunner().invoke(app, ["picker", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).stdout
    assert shown.count("Example: semmoe picker 127.0.0.1:") == 2
    assert {"--plan", "--tokenizer", "--host", "--port"} <= set(shown.split())
    code = "import sys, semmoe.cli; print({'grpc', 'envoy', 'jinja2', 'prometheus_client', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_addresses_are_those_of_the_ranks():
    assert addresses_of(["127.0.0.1:8000"], 3) == 3 * ["127.0.0.1:8000"]
    assert addresses_of(["localhost:8001", "[::1]:8000"], 2) == ["127.0.0.1:8001", "[::1]:8000"]
    for count in (2, 4):
        with pytest.raises(ValueError, match=f"the plan has 3 data-parallel ranks, and {count} addresses came"):
            addresses_of([f"127.0.0.1:{8000 + i}" for i in range(count)], 3)
