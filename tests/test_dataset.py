"""Prompts from files in the forms that users have."""

import gzip
import json
import tracemalloc
import zlib

import pytest

from semmoe.dataset import Prompt, check_token_ids, digest, encode, load_dataset
from semmoe.files import read_limited

CHAT = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]}
SHAREGPT = {
    "id": "x",
    "conversations": [
        {"from": "human", "value": "One?"}, {"from": "gpt", "value": "Two."},
        {"from": "human", "value": "Three?"}, {"from": "gpt", "value": "Four."},
    ],
}  # fmt: skip


def write(path, rows, **options):
    path.write_text("\n".join(json.dumps(row, **options) for row in rows) + "\n", encoding="utf-8")
    return path


def test_each_form_of_a_row(tmp_path):
    rows = [CHAT, SHAREGPT, {"prompt": "Tell me."}, {"prompt": [3, 1, 2]}, {"question": "How?"}, {"text": "Once"}]
    prompts = load_dataset(write(tmp_path / "d.jsonl", rows))
    assert prompts == [
        Prompt(messages=(("system", "Be brief."), ("user", "Why?"))),
        Prompt(messages=(("user", "One?"), ("assistant", "Two."), ("user", "Three?"))),
        Prompt(text="Tell me."),
        Prompt(token_ids=(3, 1, 2)),
        Prompt(text="How?"),
        Prompt(text="Once"),
    ]


PARTS = [{"type": "text", "text": "Look"}, {"type": "text", "text": "here."}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


def test_content_parts_of_text_are_joined_as_engines_do(tmp_path):
    rows = [{"messages": [{"role": "user", "content": PARTS}]}]
    assert load_dataset(write(tmp_path / "d.jsonl", rows)) == [Prompt(messages=(("user", "Look\nhere."),))]


def test_an_openai_batch_file(tmp_path):
    bodies = [{"model": "m", **CHAT}, {"prompt": "Tell me."}, {"input": "Embed."}, {"input": [3, 1]}]
    rows = [{"custom_id": str(i), "method": "POST", "url": "/v1", "body": body} for i, body in enumerate(bodies)]
    chat = Prompt(messages=(("system", "Be brief."), ("user", "Why?")))
    expected = [chat, Prompt(text="Tell me."), Prompt(text="Embed."), Prompt(token_ids=(3, 1))]
    assert load_dataset(write(tmp_path / "d.jsonl", rows)) == expected


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
    monkeypatch.setattr("semmoe.dataset.MAX_BYTES", 15)
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
    (tmp_path / "d.json").write_text(json.dumps(rows, indent=2))
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(lines.read_bytes()))
    expected = load_dataset(lines)
    assert load_dataset(tmp_path / "d.json") == load_dataset(tmp_path / "d.jsonl.gz") == expected


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
    assert load_dataset(path) == [Prompt(messages=(("assistant", "Hello"),))]


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
    with pytest.raises(ValueError, match="there is no dataset file"):
        load_dataset(tmp_path / "absent.jsonl")
    with pytest.raises(ValueError, match="there is no dataset file"):
        load_dataset(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "cut', "is not valid JSON"),
        ('"a string"', "is not a JSON object"),
        ('{"prompt": "  "}', "has no messages, conversations or prompt"),
        ('{"prompt": []}', "has no messages, conversations or prompt"),
        ('{"prompt": [1, "2"]}', "has no messages, conversations or prompt"),
        ('{"answer": "a"}', r"only \['answer'\]"),
        ('{"messages": []}', "holds an empty conversation"),
        ('{"messages": "hello"}', "holds an empty conversation"),
        ('{"messages": ["hello"]}', "a turn is not a JSON object"),
        ('{"messages": [{"role": "user", "content": null}]}', "a turn has no text content"),
        (json.dumps({"messages": [{"role": "user", "content": [*PARTS, IMAGE]}]}), "part of type 'image_url'"),
        ('{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "part of type 'text'"),
        ('{"input": "data of an instruction"}', r"only \['input'\]"),
        ("[" * 100_000, "is not valid JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    (tmp_path / "d.jsonl").write_text(f'{{"prompt": "good"}}\n\n{line}\n')
    with pytest.raises(ValueError, match=rf"d\.jsonl, line 3.*{message}"):
        load_dataset(tmp_path / "d.jsonl")


def test_a_bad_entry_of_an_array_is_named(tmp_path):
    (tmp_path / "d.json").write_text('[{"prompt": "good"}, 7]')
    with pytest.raises(ValueError, match=r"d\.json, entry 2 is not a JSON object"):
        load_dataset(tmp_path / "d.json")
    (tmp_path / "d.json").write_text('[{"prompt": "good"},')
    with pytest.raises(ValueError, match=r"d\.json is not valid JSON"):
        load_dataset(tmp_path / "d.json")


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


class Tokenizer:
    """A character is a token; a chat template, if any, puts roles before contents."""

    def __init__(self, chat_template=None) -> None:
        self.chat_template = chat_template

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [*([0] if add_special_tokens else []), *map(ord, text)]}

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        assert add_generation_prompt
        assert not tokenize
        return "".join(f"{message['role'][0]}:{message['content']}" for message in messages)


def test_prompts_become_token_ids():
    chat = Prompt(messages=(("user", "A"), ("assistant", "B")))
    prompts = [Prompt(text="AB"), Prompt(token_ids=(7, 8, 9)), chat]
    assert encode(prompts, Tokenizer(), 99) == [[0, 65, 66], [7, 8, 9], [0, 65, 10, 66]]
    assert encode([chat], Tokenizer("template"), 99) == [[ord(c) for c in "u:Aa:B"]]
    assert encode(prompts, Tokenizer(), 2) == [[0, 65], [7, 8], [0, 65]]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "there is no prompt"),
        ([[1], []], "prompt 1 holds no token"),
        ([[1], [2, 5, 3]], "token id 5 is out of range for a vocabulary of 5"),
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
