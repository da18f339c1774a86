import csv
import io
import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reading import read, reason, rows

from ragkv.ingest.chunker import split_text
from ragkv.ingest.parser import Unreadable
from ragkv.ingest.text import read_csv, read_json, read_jsonl, sniff_delimiter


def test_rows_are_sections_of_named_values(tmp_path):
    source = read(tmp_path, "a.csv", "name,city,founded\nHalden Works,Varn,1907\nBolt Ltd,,1912\n")
    assert rows(source) == [
        ("row 2", "name: Halden Works\ncity: Varn\nfounded: 1907"),
        ("row 3", "name: Bolt Ltd\nfounded: 1912"),
    ]
    assert source.text == "name: Halden Works\ncity: Varn\nfounded: 1907\n\nname: Bolt Ltd\nfounded: 1912"


def test_the_number_is_the_spreadsheets_and_an_id_goes_with_it(tmp_path):
    text = 'ID,note\n7,"two\nlines"\n\n,none\n9,last\n'
    assert rows(read(tmp_path, "a.csv", text)) == [
        ("row 2 (id 7)", "ID: 7\nnote: two lines"),
        ("row 4", "note: none"),
        ("row 5 (id 9)", "ID: 9\nnote: last"),
    ]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_delimiter_and_encoding_are_found(tmp_path, delimiter, encoding):
    table = [["Straße", "Größe, ungefähr"], ["Königsallee", "3,5"], ["Münzgaße", "4,25"], ["Äußerer Ring", "12,0"]]
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter).writerows(table)
    for name in ("a.csv", "a.tsv"):
        assert rows(read(tmp_path, name, out.getvalue().encode(encoding))) == [
            (f"row {n}", f"Straße: {row[0]}\nGröße, ungefähr: {row[1]}") for n, row in enumerate(table[1:], start=2)
        ]


def test_excels_own_mark_of_the_delimiter(tmp_path):
    assert rows(read(tmp_path, "a.csv", "sep=|\r\na|b\r\n1,2|3\r\n")) == [("row 3", "a: 1,2\nb: 3")]


@pytest.mark.parametrize(
    ("first", "below", "header"),
    [
        ("name,city", "Halden,Varn", True),
        ("name,1990,1991", "Halden,5,6", True),  # one column per year
        ("name,2031-01-31,2031-02-28", "Halden,5,6", True),
        ("Halden,2031-01-31,2031-02-28", "Bolt,2031-03-31,2031-04-30", False),
        (",name,size", "0,Halden,5", True),  # the index column of a data frame
        ("Halden,1907", "Bolt,1912", False),
        ("Halden,Varn", "Bolt,Varn", False),  # a header name that also occurs as a value
        ("1990,1991", "5,6", False),
        ("2020-01-02,up", "2020-01-03,down", False),
        (",,x", "1,2,3", False),
    ],
)
def test_header_is_sniffed(tmp_path, first, below, header):
    found = rows(read(tmp_path, "a.csv", f"{first}\n{below}\n"))
    assert [place for place, _ in found] == (["row 2"] if header else ["row 1", "row 2"])
    if not header:
        assert found[1][1] == " | ".join(below.split(","))


def test_titles_stand_above_the_header_and_names_without_values_are_kept(tmp_path):
    text = "Report 2031,,,,\nby,Ola,,,\n\nmill,flour,year,town,note\nKesk,oats,1907,A,\nVarn,rye,1912,B,\n"
    assert rows(read(tmp_path, "a.csv", text)) == [
        ("row 1", "Report 2031"),
        ("row 2", "by | Ola"),
        ("row 4", "note"),
        ("row 5", "mill: Kesk\nflour: oats\nyear: 1907\ntown: A"),
        ("row 6", "mill: Varn\nflour: rye\nyear: 1912\ntown: B"),
    ]
    assert [place for place, _ in rows(read(tmp_path, "b.csv", "one,,\n1,2,3\n4,5,6\n"))] == ["row 1", "row 2", "row 3"]


def test_ragged_rows_lose_nothing(tmp_path):
    text = "a,b,c\nx,y,z\np\nq,r,s,more\nx,y,w\n"
    assert [body for _, body in rows(read(tmp_path, "a.csv", text))] == [
        "a: x\nb: y\nc: z",
        "a: p",
        "a: q\nb: r\nc: s\nmore",
        "a: x\nb: y\nc: w",
    ]


def test_sloppy_quotes_cost_nothing(tmp_path):
    text = 'pipe\tuse\n"5 inch\twater\n6" wide\tgas\n'
    assert [body for _, body in rows(read(tmp_path, "a.tsv", text))] == [
        'pipe: "5 inch\nuse: water',
        'pipe: 6" wide\nuse: gas',
    ]
    text = 'name,note\n"Halden, Works",x\n"Bolt" Ltd,"a, b"\n"Corvo, Mills",y\n'
    assert [body for _, body in rows(read(tmp_path, "a.csv", text))] == [
        "name: Halden, Works\nnote: x",
        "name: Bolt Ltd\nnote: a, b",
        "name: Corvo, Mills\nnote: y",
    ]


def test_huge_fields_and_what_the_limit_was(tmp_path):
    before = csv.field_size_limit()
    huge = "word " * 60_000
    assert rows(read(tmp_path, "a.csv", f"a,b\nx,{huge}\n")) == [("row 2", f"a: x\nb: {huge.strip()}")]
    assert csv.field_size_limit() == before == 131072


def test_a_chunk_is_a_row_or_a_part_of_one(tmp_path):
    """Also with short rows: the other rows' chunks stay the same when one is inserted."""
    lines = ["name,note"] + [f"n{i},{'long words ' * (80 if i == 3 else 1)}" for i in range(6)]

    def chunks(lines: list[str]) -> list[tuple[str | None, str]]:
        source = read(tmp_path, "a.csv", "\n".join(lines))
        found = split_text(source, count_tokens=lambda text: len(text.split()), max_tokens=50)
        return [(chunk.heading, chunk.text) for chunk in found]

    before = chunks(lines)
    headings = [heading for heading, _ in before]
    assert list(dict.fromkeys(headings)) == ["row 2", "row 3", "row 4", "row 5", "row 6", "row 7"]
    assert headings.count("row 5") == len(headings) - 5 > 2
    after = chunks([*lines[:2], "new,one", *lines[2:]])
    assert [text for _, text in after] == [before[0][1], "name: new\nnote: one", *(text for _, text in before[1:])]


def test_no_rows(tmp_path):
    assert reason(tmp_path, "a.csv", ",,\n,,\n") == "no text found"
    assert reason(tmp_path, "b.csv", b"a,b\x00\nc,d\n") == "binary file"
    assert rows(read(tmp_path, "c.csv", "only,names\n")) == [("row 1", "only | names")]
    assert sniff_delimiter("One line\nand another\n") is None


cell = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zs", "Zl", "Zp", "Cf")), min_size=1)


@given(st.lists(st.lists(cell, min_size=3, max_size=3), min_size=2, max_size=6))
def test_every_value_of_a_written_table_is_read(table):
    out = io.StringIO()
    csv.writer(out).writerows([["first name", "second name", "third name"], *table])
    parsed = read_csv(out.getvalue().encode())
    texts = [parsed.text[section.start : section.end].strip() for section in parsed.sections]
    names = ("first name", "second name", "third name")
    assert texts == ["\n".join(f"{n}: {v}" for n, v in zip(names, row, strict=True)) for row in table]


def lines(*records: object) -> str:
    return "\n".join(json.dumps(record) for record in records)


def test_the_text_stands_under_its_title_and_what_else_is_said(tmp_path):
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
def test_every_name_of_a_text(tmp_path, key):
    assert rows(read(tmp_path, "a.jsonl", lines({key: "Words."}))) == [("row 1", "Words.")]


def test_fields_of_a_record(tmp_path):
    assert rows(read(tmp_path, "a.jsonl", lines({"body": "B", "text": "T"}))) == [("row 1", "body: B\n\nT")]
    record = {"id": 3, "name": "Halden", "open": True, "size": {"m": 1.5, "of": [{"n": 1}, {"n": 2}]}, "tags": []}
    assert rows(read(tmp_path, "a.jsonl", lines(record))) == [
        (
            "row 3".replace("3", "1") + " (id 3)",
            "id: 3\nname: Halden\nopen: true\nsize.m: 1.5\nsize.of.1.n: 1\nsize.of.2.n: 2",
        )
    ]
    assert rows(read(tmp_path, "a.jsonl", '{"text": "a\\u0000b \\ud800 c"}')) == [("row 1", "ab ? c")]


def test_bad_lines_are_left_out_by_their_number(tmp_path):
    text = '{"text": "one"}\n\n{"text": "two"\n{"text": "three\u2028still three"}\r\nnonsense\n{"text": "six"}\n'
    source = read(tmp_path, "a.jsonl", text)
    assert rows(source) == [("row 1", "one"), ("row 4", "three\u2028still three"), ("row 6", "six")]
    assert source.left_out == (
        "line 3: no JSON (expecting ',' delimiter at column 15)",
        "line 5: no JSON (expecting value at column 1)",
    )


def test_a_file_of_bad_lines_is_refused(tmp_path):
    assert reason(tmp_path, "a.jsonl", '{"a": 1}\nx\ny\n') == (
        "JSON cannot be read: line 2: no JSON (expecting value at column 1), and so 2 of 3 lines"
    )
    broken = '{\n "rows": [\n  {"a": 1},\n  {"a": 2\n'
    assert reason(tmp_path, "b.json", broken).startswith("JSON cannot be read: expecting ',' delimiter at line 5")
    assert "nested too deeply" in reason(tmp_path, "c.json", "[" * 100_000)
    assert "a number too long" in reason(tmp_path, "d.json", "9" * 5000)
    assert reason(tmp_path, "e.jsonl", b'{"a": "\x00"}') == "binary file"


def test_json_documents_of_rows(tmp_path):
    records = [{"text": "one"}, "two", {"a": "three"}]
    expected = [("row 1", "one"), ("row 2", "two"), ("row 3", "a: three")]
    assert rows(read(tmp_path, "a.json", json.dumps(records, indent=1))) == expected
    assert rows(read(tmp_path, "b.jsonl", json.dumps(records))) == expected  # its name says lines
    assert rows(read(tmp_path, "c.json", lines(*records))) == expected  # its name says one document
    held = {"version": 1, "data": [{"text": "one"}, {"a": "three"}]}
    assert rows(read(tmp_path, "d.json", json.dumps(held))) == [("row 1", "one"), ("row 2", "a: three")]
    assert rows(read(tmp_path, "e.json", json.dumps({"text": "one", "by": "x"}))) == [("row 1", "by: x\n\none")]
    assert rows(read(tmp_path, "f.json", json.dumps(records).encode("utf-16"))) == expected


@pytest.mark.parametrize("whole", [{"name": "x", "scripts": {"a": "b"}}, {"a": [{}], "b": [{}]}, 5, "text", None])
def test_other_json_is_not_meant_to_be_read(tmp_path, whole):
    assert reason(tmp_path, "a.json", json.dumps(whole)).startswith("no rows found")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda below: st.lists(below, max_size=4) | st.dictionaries(st.text(max_size=5), below, max_size=4),
    max_leaves=12,
)


@given(st.lists(values | st.dictionaries(st.sampled_from(["id", "text", "title", "a"]), values), max_size=5))
def test_any_records_are_tiled_or_refused(records):
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
def test_any_bytes_are_read_or_refused(data):
    for read_any in (read_json, read_jsonl):
        with suppress(Unreadable):
            assert isinstance(read_any(data).text, str)
