"""Prompts from files in the forms that users have."""

import gzip
import json
import tracemalloc
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.inputs import load_dataset
from semmoe.cli.demo import MODEL
from semmoe.engines.transformers.tokenizer import load_tokenizer
from semmoe.io.files import read_limited
from semmoe.traces.dataset import LeftOut, check_token_ids, digest, encode, encode_usable, read_prompts
from semmoe.traces.prompts import Prompt, UnusableError, prompts_of

CHAT = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]}
SHAREGPT = {
    "id": "x",
    "conversations": [
        {"from": "human", "value": "One?"}, {"from": "gpt", "value": "Two."},
        {"from": "human", "value": "Three?"}, {"from": "gpt", "value": "Four."},
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    """The shipped model's tokenizer, for which each test sets a chat template."""
    return load_tokenizer(str(MODEL))


def chat(*turns, **more):
    """A conversation of (role, content) pairs."""
    return Prompt(messages=tuple({"role": role, "content": content} for role, content in turns), **more)


def write(path, rows, **options):
    path.write_text("\n".join(json.dumps(row, **options) for row in rows) + "\n", encoding="utf-8")
    return path


def test_each_form_of_a_row(tmp_path):
    rows = [CHAT, SHAREGPT, {"prompt": "Tell me."}, {"prompt": [3, 1, 2]}, {"question": "How?"}, {"text": "Once"}]
    prompts = load_dataset(write(tmp_path / "d.jsonl", rows))
    assert prompts == [
        chat(("system", "Be brief."), ("user", "Why?")),
        chat(("user", "One?"), ("assistant", "Two."), ("user", "Three?")),
        Prompt(text="Tell me."),
        Prompt(token_ids=(3, 1, 2)),
        Prompt(text="How?"),
        Prompt(text="Once"),
    ]


PARTS = [{"type": "text", "text": "Look"}, {"type": "text", "text": "here."}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


def test_content_parts_of_text_are_joined_as_engines_do(tmp_path):
    rows = [{"messages": [{"role": "user", "content": PARTS}]}]
    assert load_dataset(write(tmp_path / "d.jsonl", rows)) == [chat(("user", "Look\nhere."))]


BRIEF = chat(("system", "Be brief."), ("user", "Why?"))
REQUESTS = [
    ("/v1/chat/completions", {"model": "m", **CHAT}, [BRIEF]),
    ("https://host/v1/completions?x=1", {"prompt": "Tell me."}, [Prompt(text="Tell me.")]),
    ("/v1/completions", {"prompt": ["Tell", "me."]}, [Prompt(text="Tell"), Prompt(text="me.")]),
    ("/v1/completions", {"prompt": [3, 1]}, [Prompt(token_ids=(3, 1))]),
    ("/v1/completions", {"prompt": [[3], [1, 2]]}, [Prompt(token_ids=(3,)), Prompt(token_ids=(1, 2))]),
    ("/v1/responses", {"input": "Why?", "instructions": "Be brief."}, [BRIEF]),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Why?"}]}]},
     [chat(("user", "Why?"))]),
    ("/v1/messages", {"system": "Be brief.", "messages": CHAT["messages"][1:]}, [BRIEF]),
    ("/v1/messages", {"system": [{"type": "text", "text": "Be brief."}], "messages": CHAT["messages"][1:]}, [BRIEF]),
    (None, {"input": "Embed."}, [Prompt(text="Embed.")]),
    ("/v1/chat/completions", {"messages": [{"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Hm?"}]},
     [chat(("assistant", "Hi"), ("user", "Hm?"))]),
]  # fmt: skip


@pytest.mark.parametrize(("url", "body", "expected"), REQUESTS)
def test_a_request_of_a_batch_file_is_read_as_its_endpoint_reads_it(url, body, expected):
    assert prompts_of({"custom_id": "1", "method": "POST", "url": url, "body": body}) == expected


def test_a_request_of_an_anthropic_batch():
    assert prompts_of({"custom_id": "1", "params": {"system": "Be brief.", **chat_body("Why?")}}) == [BRIEF]


def test_an_agents_request_to_anthropic_has_calls_and_results():
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "1"}
    turns = [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."},
                                          {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}}]},
        {"role": "user", "content": [{"type": "text", "text": "Go on."}, result]},
    ]  # fmt: skip
    (prompt,) = prompts_of({"custom_id": "1", "params": {"messages": turns}})
    assert [message["role"] for message in prompt.messages] == ["user", "assistant", "tool", "user"]
    assert prompt.messages[1]["tool_calls"] == [{"id": "t1", "function": {"name": "f", "arguments": {"x": 1}}}]
    assert [message["content"] for message in prompt.messages] == ["Why?", "", "1", "Go on."]


def test_a_request_keeps_the_answer_that_it_ends_with():
    """A server has seen it, other than the answers of a published conversation."""
    turns = [*CHAT["messages"], {"role": "assistant", "content": "So"}]
    for body, ends in (({}, "answer"), ({"continue_final_message": True}, "continued"),
                       ({"add_generation_prompt": False}, "closed")):  # fmt: skip
        (prompt,) = prompts_of({"url": "/v1/chat/completions", "body": {"messages": turns, **body}})
        assert (prompt.messages[-1]["content"], prompt.ends) == ("So", ends)
    assert prompts_of({"messages": turns})[0].messages[-1]["content"] == "Why?"


def chat_body(text):
    return {"messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize("indent", [None, 1])
def test_a_file_may_hold_one_request(tmp_path, indent):
    (tmp_path / "d.json").write_text("\n" + json.dumps({"model": "m", **CHAT}, indent=indent))
    assert load_dataset(tmp_path / "d.json") == [BRIEF]


@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.txt", "d.jsonl.gz"])
def test_a_byte_order_mark_is_no_text(tmp_path, name):
    raw = b"\xef\xbb\xbf" + (b"a" if name == "d.txt" else b'{"prompt": "a"}')
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    assert load_dataset(tmp_path / name) == [Prompt(text="a")]


@pytest.mark.parametrize("name", ["d.csv", "d.TSV", "d.csv.gz", "d.parquet", "d.xlsx", "d.arrow"])
def test_a_table_is_refused_before_it_is_read(tmp_path, name):
    (tmp_path / name).write_text("id,prompt\n1,Why?\n")
    with pytest.raises(ValueError, match=rf"{name} is a \.\w+ table.*convert it to jsonl first"):
        load_dataset(tmp_path / name)


@pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.gz"])
def test_more_bytes_than_the_limit_are_refused_by_name(tmp_path, name, monkeypatch):
    monkeypatch.setattr("semmoe.traces.dataset.MAX_BYTES", 15)
    raw = b'{"prompt": "a"}'
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    assert load_dataset(tmp_path / name) == [Prompt(text="a")]
    (tmp_path / name).write_bytes(gzip.compress(raw + b"\n") if name.endswith(".gz") else raw + b"\n")
    with pytest.raises(ValueError, match=rf"{name} holds more than 15 bytes"):
        load_dataset(tmp_path / name)


def test_a_decompression_bomb_is_not_unpacked_whole(tmp_path):
    packer = zlib.compressobj(wbits=31)
    zeros = bytes(1 << 20)
    (tmp_path / "d.gz").write_bytes(b"".join([*(packer.compress(zeros) for _ in range(64)), packer.flush()]))
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"d\.gz holds more than 1,000,000 bytes"):
        read_limited(tmp_path / "d.gz", 1_000_000)
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


def test_an_array_gzip_and_lines_read_alike(tmp_path):
    rows = [CHAT, SHAREGPT]
    lines = write(tmp_path / "d.jsonl", rows)
    (tmp_path / "d.json").write_text("\n" + json.dumps(rows, indent=2) + "\n")
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(lines.read_bytes()))
    expected = load_dataset(lines)
    assert load_dataset(tmp_path / "d.json") == load_dataset(tmp_path / "d.jsonl.gz") == expected


def test_an_empty_column_beside_the_prompt_is_no_matter(tmp_path):
    rows = [
        {"messages": None, "prompt": "", "text": "Once"},
        {"messages": None, "conversations": SHAREGPT["conversations"]},
    ]
    assert load_dataset(write(tmp_path / "d.jsonl", rows)) == [Prompt(text="Once"), *prompts_of(SHAREGPT)]


def test_blank_lines_and_a_limit(tmp_path):
    (tmp_path / "d.jsonl").write_text('\n{"prompt": "a"}\n\n  \n{"prompt": "b"}\n')
    assert load_dataset(tmp_path / "d.jsonl") == [Prompt(text="a"), Prompt(text="b")]
    assert load_dataset(tmp_path / "d.jsonl", limit=1) == [Prompt(text="a")]
    with pytest.raises(ValueError, match="limit must not be negative: -1"):
        load_dataset(tmp_path / "d.jsonl", limit=-1)


def test_lines_may_end_as_on_windows(tmp_path):
    (tmp_path / "d.jsonl").write_bytes(b'{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r\n')
    assert load_dataset(tmp_path / "d.jsonl") == [Prompt(text="a"), Prompt(text="b")]


def test_a_conversation_of_the_assistant_alone_is_kept(tmp_path):
    path = write(tmp_path / "d.jsonl", [{"messages": [{"role": "assistant", "content": "Hello"}]}])
    assert load_dataset(path) == [chat(("assistant", "Hello"))]


def test_plain_text_is_cut_at_line_ends(tmp_path):
    line = "x" * 999 + "\n"
    (tmp_path / "book.txt").write_text(line * 5)
    assert load_dataset(tmp_path / "book.txt") == [Prompt(text=line * 2), Prompt(text=line * 2)]


def test_a_short_text_is_one_prompt(tmp_path):
    (tmp_path / "note.txt").write_text("Hello there")
    (tmp_path / "note.txt.gz").write_bytes(gzip.compress(b"Hello there"))
    assert load_dataset(tmp_path / "note.txt") == load_dataset(tmp_path / "note.txt.gz") == [Prompt(text="Hello there")]


@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.txt"])
@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_holds_no_prompt(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"{name} holds no prompt"):
        load_dataset(tmp_path / name)


def test_an_empty_array_and_no_file_at_all(tmp_path):
    (tmp_path / "d.json").write_text("[]")
    with pytest.raises(ValueError, match="holds no prompt"):
        load_dataset(tmp_path / "d.json")
    with pytest.raises(ValueError, match="no dataset file"):
        load_dataset(tmp_path / "absent.jsonl")
    with pytest.raises(ValueError, match="no dataset file"):
        load_dataset(tmp_path)


BAD = [
    ('{"prompt": "cut', "not valid JSON: Invalid control character"),
    ('{"prompt": "a"} {"prompt": "b"}', "not valid JSON: Extra data at column 17"),
    ('"a string"', "not a JSON object"),
    ("[1, 2]", "not a JSON object"),
    ('{"prompt": "  "}', "an empty prompt"),
    ('{"prompt": []}', "an empty prompt"),
    ('{"prompt": [1, "2"]}', "neither text nor token ids"),
    ('{"prompt": [true]}', "neither text nor token ids"),
    ('{"prompt": [1, true]}', "neither text nor token ids"),
    ('{"prompt": ["a", ""]}', "an empty prompt"),
    ('{"prompt": 7}', "neither text nor token ids"),
    ('{"answer": "a"}', r"no messages, conversations or prompt: only \['answer'\]"),
    ('{"messages": []}', "an empty conversation"),
    ('{"messages": "hello"}', "an empty conversation"),
    ('{"messages": ["hello"]}', "a turn is not a JSON object"),
    ('{"messages": [{"content": "hello"}]}', "a turn has no role"),
    ('{"messages": [{"role": "user", "content": null}]}', "a turn has no text content"),
    ('{"messages": [{"role": "user", "content": " "}, {"role": "assistant", "content": "Hi"}]}', "an empty prompt"),
    (json.dumps({"messages": [{"role": "user", "content": [*PARTS, IMAGE]}]}), "part of type 'image_url'"),
    ('{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "part of type 'text'"),
    ('{"conversations": [{"from": "gpt", "value": "a"}, {"from": "human", "value": "b"}]}', "first turn is not a user"),
    ('{"input": "data of an instruction"}', r"only \['input'\]"),
    ('{"url": "/v1/embeddings", "body": {"input": "a"}}', "a request to /v1/embeddings, which is not read"),
    ('{"url": "/v1/responses", "body": {"input": [{"type": "function_call"}]}}', "its type is 'function_call'"),
    ('{"url": "/v1/responses", "body": {"input": "a", "previous_response_id": "r"}}', "a stored conversation"),
    ('{"body": {"messages": [{"role": "user", "content": "a"}], "documents": [1]}}', "a request with documents"),
    (json.dumps({**CHAT, "tools": "no list"}), "tools are not a list of JSON objects"),
    (json.dumps({**CHAT, "tools": [{"type": "web_search"}]}), "a tool is not a function: its type is 'web_search'"),
    (json.dumps({**CHAT, "functions": [{"name": "f"}]}), "`functions`"),
    (json.dumps({**CHAT, "chat_template_kwargs": {"chat_template": "x"}}), "a request with another chat template"),
    ("[" * 100_000, "not valid JSON"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_a_bad_line_is_named(tmp_path, line, message):
    (tmp_path / "d.jsonl").write_text(f'{{"prompt": "good"}}\n\n{line}\n')
    with pytest.raises(ValueError, match=rf"d\.jsonl, line 3: .*{message}"):
        load_dataset(tmp_path / "d.jsonl")


def test_a_bad_entry_of_an_array_is_named(tmp_path):
    (tmp_path / "d.json").write_text('[{"prompt": "good"}, 7]')
    with pytest.raises(ValueError, match=r"d\.json, entry 2: not a JSON object"):
        load_dataset(tmp_path / "d.json")
    (tmp_path / "d.json").write_text('[{"prompt": "good"},')
    with pytest.raises(ValueError, match=r"d\.json is not valid JSON"):
        load_dataset(tmp_path / "d.json")


def test_bad_records_are_left_out_and_counted_by_reason(tmp_path):
    good = '{"prompt": "good"}\n'
    path = tmp_path / "d.jsonl"
    path.write_text("".join(good + line + "\n" for line, _ in BAD))
    left_out = LeftOut(path)
    assert list(read_prompts(path, left_out)) == [Prompt(text="good")] * len(BAD)
    assert left_out.records == 2 * len(BAD)
    assert left_out.reasons.total() == len(BAD)
    assert left_out.reasons["an empty prompt"] == 4
    assert left_out.first.startswith("line 2: not valid JSON")
    with pytest.raises(ValueError, match=rf"{len(BAD)} of {2 * len(BAD)} records left out: .*more than a tenth"):
        left_out.check()


@pytest.mark.parametrize(("good", "bad", "fails"), [(1, 3, False), (4, 5, False), (9, 1, False), (8, 2, True)])
def test_a_tenth_of_the_records_may_be_bad_and_more_only_of_fewer_than_ten(tmp_path, good, bad, fails):
    path = tmp_path / "d.json"
    path.write_text(json.dumps([*[CHAT] * good, *[{"messages": []}] * bad]))
    left_out = LeftOut(path)
    assert len(list(read_prompts(path, left_out))) == good
    text = f"{bad} of {good + bad} conversations left out: an empty conversation ({bad}); first: entry {good + 1}: "
    assert str(left_out) == text + "an empty conversation"
    if fails:
        with pytest.raises(ValueError, match="more than a tenth"):
            left_out.check()
    else:
        left_out.check()


def test_a_file_without_a_usable_record_says_why(tmp_path):
    path = write(tmp_path / "d.jsonl", [{"url": "/v1/embeddings", "body": {"input": "a"}}] * 2)
    left_out = LeftOut(path)
    assert not list(read_prompts(path, left_out))
    with pytest.raises(ValueError, match=r"d\.jsonl holds no usable prompt: 2 of 2 .*a request to /v1/embeddings"):
        left_out.check()


KEYS = [
    *(
        "messages",
        "conversations",
        "prompt",
        "text",
        "role",
        "from",
        "value",
        "content",
        "type",
        "tools",
        "name",
        "url",
    ),
    *("tool_calls", "function", "functions", "arguments", "body", "input", "system", "custom_id", "params"),
]
WORDS = ["user", "assistant", "text", "/v1/responses", "a", "", "{", "\ud800"]
LEAVES = st.none() | st.booleans() | st.integers(-1, 9) | st.sampled_from(WORDS)
SHAPES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
)
TURNS = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]) | SHAPES},
    optional={"content": st.sampled_from(WORDS) | SHAPES, "tool_calls": SHAPES, "name": SHAPES},
)
ROWS = SHAPES | st.fixed_dictionaries({"messages": st.lists(TURNS | SHAPES, max_size=3)}, optional={"tools": SHAPES})


@given(ROWS)
def test_any_json_is_prompts_or_is_left_out(tokenizer, row):
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | tojson }}"
    left_out = LeftOut(Path("d.jsonl"))
    try:
        prompts = prompts_of(row)
    except UnusableError as error:
        prompts = []
        left_out.add("line 1", error)
    encoded = list(encode_usable(prompts, tokenizer, {"vocab_size": 4096}, left_out))
    assert len(encoded) + left_out.reasons.total() == max(1, len(prompts))
    assert "\n" not in left_out.first


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("cut.jsonl.gz", gzip.compress(b'{"prompt": "a"}', mtime=0)[:-4], "truncated or damaged"),
        ("plain.jsonl.gz", b'{"prompt": "a"}', "truncated or damaged"),
        ("latin.jsonl", '{"prompt": "é"}'.encode("latin-1"), "not UTF-8"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name} is {words}"):
        load_dataset(tmp_path / name)


def test_a_gzip_file_damaged_inside_is_refused_by_name(tmp_path):
    raw = bytearray(gzip.compress(b'{"prompt": "a"}'))
    raw[10] = 0b111  # a deflate block of the reserved type
    (tmp_path / "d.jsonl.gz").write_bytes(raw)
    with pytest.raises(ValueError, match=r"d\.jsonl\.gz is truncated or damaged"):
        load_dataset(tmp_path / "d.jsonl.gz")


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_a_line_separator_inside_a_string_is_text(tmp_path, separator):
    path = write(tmp_path / "d.jsonl", [{"prompt": f"a{separator}b"}], ensure_ascii=False)
    assert load_dataset(path) == [Prompt(text=f"a{separator}b")]


def rendered(tokenizer, row, template):
    """What a template makes of one record."""
    tokenizer.chat_template = template
    return tokenizer.decode(encode(prompts_of(row), tokenizer, 9999)[0])


def test_prompts_become_token_ids(tokenizer):
    talk = chat(("user", "A"), ("assistant", "B"))
    tokenizer.chat_template = None
    assert encode([Prompt(token_ids=(7, 8, 9)), talk], tokenizer, 2) == [[7, 8], tokenizer("A\nB")["input_ids"][:2]]
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}{% if add_generation_prompt %}go{% endif %}"
    )
    assert tokenizer.decode(encode([talk], tokenizer, 99)[0]) == "user=A;assistant=B;go"


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": [1]}'}}
AGENT = [
    {"role": "user", "content": "Add."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "name": "add", "content": [{"type": "text", "text": "2"}]},
]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_tool_calls_are_rendered_as_engines_do(tokenizer):
    """Arguments are an object, a missing content is empty, and a result names its call."""
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_call_id }}{{ m.name }}"
        "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments.x[0] + 1 }}{% endfor %};{% endfor %}"
    )
    assert rendered(tokenizer, {"messages": AGENT}, template) == "user:Add.;assistant:add2;tool:2c1add;"
    broken = {**CALL, "function": {"name": "add", "arguments": "{"}}
    row = {"messages": [AGENT[0], {"role": "assistant", "content": "", "tool_calls": [broken]}, AGENT[2]]}
    assert prompts_of(row)[0].messages[1]["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    "tools",
    [
        [ADD],
        json.dumps([ADD]),
        [ADD["function"]],
        [{"type": "function", **ADD["function"]}],
        [{"name": "add", "input_schema": {"type": "object"}}],
    ],
)
def test_tools_in_each_form_are_rendered_as_engines_do(tokenizer, tools):
    template = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ flag }}{{ reasoning_effort }}"
    row = {"messages": AGENT, "tools": tools, "chat_template_kwargs": {"flag": "on"}, "reasoning_effort": "low"}
    given = '{"type": "function", "function": {"name": "add", "description": null, "parameters": {"type": "object"}}}'
    assert rendered(tokenizer, row, template) == given + "onlow"


def test_a_request_s_own_variables_go_before_its_reasoning_effort():
    row = {"messages": AGENT, "chat_template_kwargs": {"reasoning_effort": "high"}, "reasoning_effort": "low"}
    assert prompts_of(row)[0].variables == {"reasoning_effort": "high"}


def test_each_prompt_of_a_request_counts_as_a_record(tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt": ["a", "b", "c"]}\n{"prompt": ""}\n{"prompt": [[1, 2], [3]]}\n')
    left_out = LeftOut(path)
    assert len(list(read_prompts(path, left_out))) == 5
    assert (left_out.records, left_out.reasons.total()) == (6, 1)


def test_a_developer_is_the_system_for_a_template_that_does_not_know_the_role(tokenizer):
    row = {"messages": [{"role": "developer", "content": "x"}, {"role": "user", "content": "y"}]}
    template = "{% for m in messages %}{{ m.role }} {% endfor %}"
    assert rendered(tokenizer, row, template) == "system user "
    assert rendered(tokenizer, row, template + "{# 'developer' #}") == "developer user "


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", "refuses it: roles must alternate"),
        ("{{ messages[0].content.nothing.more }}", "refuses it: .*no attribute 'nothing'"),
        ("{{ ''.__class__.__mro__ }}", "refuses it: access to attribute"),
        ("{{ 1 + messages[0].content }}", "refuses it: unsupported operand"),
        ("{% if %}", "refuses it: Expected an expression"),
        ("{% set x = 1 %}", "an empty prompt"),
        ("{{ messages[0].content * 99 }}", "longer than the model takes: .* tokens of at most 9"),
        ("{{ messages[0].content }}\udfff", "a lone surrogate"),
    ],
)
def test_a_conversation_that_cannot_be_rendered_is_left_out_with_its_line(tokenizer, tmp_path, template, words):
    path = write(tmp_path / "d.jsonl", [{"prompt": "Hm"}, CHAT])
    tokenizer.chat_template = template
    left_out = LeftOut(path)
    config = {"vocab_size": 4096, "max_position_embeddings": 9}
    assert list(encode_usable(read_prompts(path, left_out), tokenizer, config, left_out)) == [
        tokenizer("Hm")["input_ids"]
    ]
    strict = LeftOut(path, strict=True)
    with pytest.raises(ValueError, match=rf"d\.jsonl, line 2: .*{words}"):
        list(encode_usable(read_prompts(path, strict), tokenizer, config, strict))
    assert left_out.reasons.total() == 1


def test_a_prompt_may_have_as_many_tokens_as_the_model_takes(tokenizer):
    prompts = [Prompt(token_ids=(1,) * length) for length in (8, 9, 10)]
    left_out = LeftOut(Path("d.jsonl"))
    assert [len(ids) for ids in encode_usable(prompts, tokenizer, {"max_position_embeddings": 9}, left_out)] == [8, 9]
    assert left_out.reasons == {"longer than the model takes": 1}


@given(st.lists(st.sampled_from(["value", "blank", "wrong"]), max_size=8))
def test_every_record_has_its_line(tmp_path_factory, kinds):
    """Values, empty lines between them, and lines that are no JSON."""
    text = {"value": '{"prompt": "a"}\n', "blank": "\n\n", "wrong": "{?\n"}
    content, lines, reasons = "", [], []
    for kind in kinds:
        line = f"line {content.count(chr(10)) + 1}"
        lines += [line] if kind == "value" else []
        reasons += [line] if kind == "wrong" else []
        content += text[kind]
    path = tmp_path_factory.mktemp("lines") / "d.jsonl"
    path.write_text(content)
    left_out = LeftOut(path)
    assert [prompt.where for prompt in read_prompts(path, left_out)] == lines
    assert left_out.reasons.total() == len(reasons)
    assert left_out.first.startswith(reasons[0] if reasons else "")


def test_token_ids_outside_the_vocabulary_and_lone_surrogates_are_left_out(tokenizer):
    prompts = [Prompt(token_ids=(0, 9)), Prompt(token_ids=(4, 10)), Prompt(token_ids=(-1,)), Prompt(text="a\ud800")]
    left_out = LeftOut(Path("d.jsonl"))
    assert list(encode_usable(prompts, tokenizer, {"vocab_size": 10}, left_out)) == [[0, 9]]
    assert left_out.reasons == {"token ids out of range": 2, "a lone surrogate, which is not a character": 1}


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "there are no prompts"),
        ([[1], []], "prompt 1 holds no token"),
        ([[1], [2, 5, 3]], "token id 5 is out of range for 5 vocabulary entries"),
        ([[4, -1, 0]], "token id -1 is out of range"),
    ],
)
def test_token_ids_that_a_model_cannot_take_are_refused(prompts, message):
    check_token_ids([[0, 4], [2]], 5)
    with pytest.raises(ValueError, match=message):
        check_token_ids(prompts, 5)


def test_digest_tells_datasets_apart():
    different = [[[1, 2], [3]], [[1], [2, 3]], [[1, 2, 3]], [[12], [3]], [[3], [1, 2]], [[1, 2], [3], []]]
    assert len({digest(prompts) for prompts in different}) == len(different)
    assert digest([[1, 2], (3,)]) == digest(different[0])
