from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reading import read, reason, rows

from ragkv.ingest.parser import Unreadable
from ragkv.ingest.record import read_json, read_jsonl


def lines(*records: object) -> str:
    return "\n".join(json.dumps(record) for record in records)


def test_the_text_stands_under_its_title_and_what_else_is_said(tmp_path: Path) -> None:
    record = {
        "_id": "doc 7",
        "title": "Pumps",
        "text": "The pump was made by Ida.",
        "year": 1920,
        "by": {"name": "Ida", "of": ["Corvo", "Varn"]},
        "vector": [0.25] * 64,
        "seen": None,
    }
    assert rows(read(tmp_path, "a.jsonl", lines(record, {"id": 0, "body": "Short."}))) == [
        ("row 1 (id doc 7)", "Pumps\n\nyear: 1920\nby.name: Ida\nby.of: Corvo, Varn\n\nThe pump was made by Ida."),
        ("row 2 (id 0)", "Short."),
    ]


@pytest.mark.parametrize("key", ["text", "content", "body", "passage", "Text"])
def test_every_name_of_a_text(tmp_path: Path, key: str) -> None:
    assert rows(read(tmp_path, "a.jsonl", lines({key: "Words."}))) == [("row 1", "Words.")]


def test_two_texts_are_both_kept(tmp_path: Path) -> None:
    assert rows(read(tmp_path, "a.jsonl", lines({"body": "B", "text": "T"}))) == [("row 1", "body: B\n\nT")]


def test_without_a_text_all_fields_are_said(tmp_path: Path) -> None:
    record = {"id": 3, "name": "Halden", "open": True, "size": {"m": 1.5, "of": [{"n": 1}, {"n": 2}]}, "tags": []}
    assert rows(read(tmp_path, "a.jsonl", lines(record))) == [
        (
            "row 3".replace("3", "1") + " (id 3)",
            "id: 3\nname: Halden\nopen: true\nsize.m: 1.5\nsize.of.1.n: 1\nsize.of.2.n: 2",
        )
    ]


def test_bad_lines_are_left_out_by_their_number(tmp_path: Path) -> None:
    text = '{"text": "one"}\n\n{"text": "two"\n{"text": "three\u2028still three"}\r\nnonsense\n{"text": "six"}\n'
    source = read(tmp_path, "a.jsonl", text)
    assert rows(source) == [("row 1", "one"), ("row 4", "three\u2028still three"), ("row 6", "six")]
    assert source.left_out == (
        "line 3: no JSON (expecting ',' delimiter at column 15)",
        "line 5: no JSON (expecting value at column 1)",
    )


def test_a_file_of_bad_lines_is_refused(tmp_path: Path) -> None:
    assert reason(tmp_path, "a.jsonl", '{"a": 1}\nx\ny\n') == (
        "JSON cannot be read: line 2: no JSON (expecting value at column 1), and so 2 of 3 lines"
    )
    broken = '{\n "rows": [\n  {"a": 1},\n  {"a": 2\n'
    assert reason(tmp_path, "b.json", broken).startswith("JSON cannot be read: expecting ',' delimiter at line 5")
    assert "nested too deeply" in reason(tmp_path, "c.json", "[" * 100_000)
    assert "a number too long" in reason(tmp_path, "d.json", "9" * 5000)
    assert reason(tmp_path, "e.jsonl", b'{"a": "\x00"}') == "binary file"


def test_json_documents_of_rows(tmp_path: Path) -> None:
    records = [{"text": "one"}, "two", {"a": "three"}]
    expected = [("row 1", "one"), ("row 2", "two"), ("row 3", "a: three")]
    assert rows(read(tmp_path, "a.json", json.dumps(records, indent=1))) == expected
    assert rows(read(tmp_path, "b.jsonl", json.dumps(records))) == expected  # by its name, lines
    assert rows(read(tmp_path, "c.json", lines(*records))) == expected  # by its name, a document
    held = {"version": 1, "data": [{"text": "one"}, {"a": "three"}]}
    assert rows(read(tmp_path, "d.json", json.dumps(held))) == [("row 1", "one"), ("row 2", "a: three")]
    assert rows(read(tmp_path, "e.json", json.dumps({"text": "one", "by": "x"}))) == [("row 1", "by: x\n\none")]
    assert rows(read(tmp_path, "f.json", json.dumps(records).encode("utf-16"))) == expected


@pytest.mark.parametrize("whole", [{"name": "x", "scripts": {"a": "b"}}, {"a": [{}], "b": [{}]}, 5, "text", None])
def test_other_json_is_not_meant_to_be_read(tmp_path: Path, whole: object) -> None:
    assert reason(tmp_path, "a.json", json.dumps(whole)).startswith("no rows found")


def test_what_json_can_say_and_utf8_cannot(tmp_path: Path) -> None:
    assert rows(read(tmp_path, "a.jsonl", '{"text": "a\\u0000b \\ud800 c"}')) == [("row 1", "ab ? c")]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda below: st.lists(below, max_size=4) | st.dictionaries(st.text(max_size=5), below, max_size=4),
    max_leaves=12,
)


@given(st.lists(values | st.dictionaries(st.sampled_from(["id", "text", "title", "a"]), values), max_size=5))
def test_any_records_are_tiled_or_refused(records: list[object]) -> None:
    for read_any in (read_json, read_jsonl):
        for data in (json.dumps(records), lines(*records)):
            try:
                parsed = read_any(data.encode())
            except Unreadable:
                continue
            ends = [section.end for section in parsed.sections]
            assert [0, *ends][:-1] == [section.start for section in parsed.sections]
            assert ([0, *ends][-1]) == len(parsed.text)


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for read_any in (read_json, read_jsonl):
        with suppress(Unreadable):
            assert isinstance(read_any(data).text, str)
