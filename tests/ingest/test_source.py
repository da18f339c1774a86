import hashlib
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reading import docx_of, pdf_of

from ragkv.errors import UsageError
from ragkv.ingest import from_bytes
from ragkv.ingest.parser import media_type_of, type_names
from ragkv.ingest.sandbox import SourceReader, UnreadableSource, read_source
from ragkv.ingest.source import SourceFile, find_sources, sniff


def write(root: Path, *names: str, text: str = "words") -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def names(*paths: Path) -> list[str]:
    return [source.name for source in find_sources(paths)[0]]


def reasons(*paths: Path) -> dict[str, str]:
    return {skip.path.name: skip.reason for skip in find_sources(paths)[1]}


def test_folder_is_walked_in_sorted_order_without_hidden_files_and_indexes(tmp_path):
    write(tmp_path, "b.MD", "a/z.txt", "a/b.rst", "c.html", ".git/config.txt", ".hidden.md", "a/.x/y.txt")
    write(tmp_path, "a/index/store/data.mdb", "a/index/jobs/journal.json", "a/store/data.txt")
    assert names(tmp_path) == ["a/b.rst", "a/store/data.txt", "a/z.txt", "b.MD", "c.html"]
    assert find_sources([tmp_path])[1] == []


def test_media_types_and_sizes(tmp_path):
    write(tmp_path, "a.md", "b.xhtml", "c.pdf", text="12345")
    assert [(source.media_type, source.size) for source in find_sources([tmp_path])[0]] == [
        ("text/markdown", 5),
        ("text/html", 5),
        ("application/pdf", 5),
    ]


def test_what_is_left_out_has_a_reason(tmp_path):
    write(tmp_path, "a.xls", "README")
    write(tmp_path, "empty.txt", text="")
    (tmp_path / "gone.md").symlink_to(tmp_path / "nowhere.md")
    os.mkfifo(tmp_path / "pipe.txt")
    assert reasons(tmp_path) == {
        "README": "unsupported type (no suffix)",
        "a.xls": "unsupported type .xls",
        "empty.txt": "empty file",
        "gone.md": "broken link",
        "pipe.txt": "not a regular file",
    }


def test_file_name_that_is_not_utf8_is_reported(tmp_path):
    path = tmp_path / os.fsdecode(b"caf\xe9.txt")
    try:
        path.write_text("x")
    except OSError:
        pytest.skip("the file system takes UTF-8 names only")
    assert list(reasons(tmp_path).values()) == ["file name is not valid UTF-8"]


def test_a_folder_below_the_longest_path_is_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(20):
        Path("d" * 250).mkdir()
        os.chdir("d" * 250)
    assert list(reasons(tmp_path).values()) == ["file name too long"]


def test_folders_may_be_nested_more_deeply_than_calls(tmp_path):
    write(tmp_path, "d/" * 300 + "a.txt", "e.txt")
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(300)
    try:
        assert names(tmp_path) == ["d/" * 300 + "a.txt", "e.txt"]
    finally:
        sys.setrecursionlimit(limit)


def test_explicit_file_is_taken_whatever_its_name(tmp_path):
    write(tmp_path, "notes.log", ".hidden", "README")
    paths = [tmp_path / "notes.log", tmp_path / ".hidden", tmp_path / "README"]
    sources, skipped = find_sources(paths)
    assert [(source.name, source.media_type) for source in sources] == [
        ("notes.log", "text/plain"),
        (".hidden", "text/plain"),
        ("README", "text/plain"),
    ]
    assert skipped == []


def test_missing_path_is_wrong_usage_before_anything_is_walked(tmp_path):
    with pytest.raises(UsageError, match=r"^No such file or folder: .*nowhere\.$") as caught:
        find_sources([tmp_path, tmp_path / "nowhere"])
    assert caught.value.exit_code == 2


def test_id_does_not_depend_on_how_the_folder_is_reached(tmp_path, monkeypatch):
    write(tmp_path, "docs/guide/a.md")
    (tmp_path / "link").symlink_to(tmp_path / "docs")
    monkeypatch.chdir(tmp_path)
    ids = {find_sources([Path(way)])[0][0].document_id for way in ("docs", "./docs/../docs", "link")}
    monkeypatch.chdir(tmp_path / "docs" / "guide")
    ids |= {find_sources([Path(way)])[0][0].document_id for way in ("..", "a.md", "../../docs/guide")}
    assert ids == {(tmp_path.resolve() / "docs/guide/a.md").as_posix()}


def test_link_inside_a_folder_keeps_its_own_id(tmp_path):
    write(tmp_path, "docs/..data_1/a.md", "docs/..data_2/a.md")
    (tmp_path / "docs/..data").symlink_to("..data_1")
    (tmp_path / "docs/a.md").symlink_to("..data/a.md")
    before = find_sources([tmp_path / "docs"])[0]
    (tmp_path / "docs/..data").unlink()
    (tmp_path / "docs/..data").symlink_to("..data_2")
    assert before == find_sources([tmp_path / "docs"])[0]
    assert [source.name for source in before] == ["a.md"]


def test_loops_end_and_nothing_is_listed_twice(tmp_path):
    write(tmp_path, "docs/a.md", "docs/sub/b.md")
    (tmp_path / "docs/sub/up").symlink_to(tmp_path / "docs")
    (tmp_path / "docs/again.md").symlink_to("a.md")
    (tmp_path / "docs/sub2").symlink_to("sub")
    assert names(tmp_path / "docs") == ["a.md", "sub/b.md"]
    assert names(tmp_path / "docs", tmp_path / "docs/a.md", tmp_path / "docs/sub") == ["a.md", "sub/b.md"]


def test_equal_names_are_told_apart_by_their_folders(tmp_path):
    write(tmp_path, "one/a.md", "one/b.md", "two/a.md", "x/one/a.md")
    assert names(tmp_path / "one", tmp_path / "two") == ["one/a.md", "b.md", "two/a.md"]
    ids = find_sources([tmp_path / "one", tmp_path / "x/one"])[0]
    assert [source.name for source in ids] == [f"{tmp_path.name}/one/a.md", "b.md", "x/one/a.md"]


def test_memory_is_taken_for_the_bytes_there_are_not_for_those_that_are_allowed(tmp_path):
    write(tmp_path, "a.md", text="12345")
    [source], _ = find_sources([tmp_path / "a.md"])
    assert source.read(1 << 62) == b"12345"
    assert [source.read(most) for most in (0, 3, 5, 6, -1)] == [b"", b"123", b"12345", b"12345", b"12345"]


def test_a_file_that_tells_no_size_is_read_up_to_the_most(tmp_path):
    path = Path("/proc/self/maps")
    if not path.exists():
        pytest.skip("no /proc")
    source = SourceFile(path=path, document_id="x", name="x.txt", media_type="text/plain", size=0)
    assert len(source.read(1 << 40)) > 1000
    assert len(source.read(1000)) == 1000


def test_what_a_file_has_become_since_the_walk_is_neither_waited_for_nor_read_without_end(tmp_path):
    write(tmp_path, "pipe.md", "device.md", "grown.md", text="12345")
    pipe, device, grown = (find_sources([tmp_path / f"{name}.md"])[0][0] for name in ("pipe", "device", "grown"))
    for source in (pipe, device):
        source.path.unlink()
    os.mkfifo(pipe.path)
    device.path.symlink_to("/dev/zero")
    for call in (pipe.digest, pipe.read, device.digest, device.read):
        with pytest.raises(OSError, match="not a regular file"):
            call()
    os.truncate(grown.path, 1 << 40)
    assert grown.digest() == hashlib.blake2b(b"12345\0").hexdigest()
    assert grown.read(7) == b"12345\0\0"


KINDS = [
    ("pdf", pdf_of("Guide")),
    ("docx", docx_of("Guide")),
    ("html", b"\n<!DOCTYPE html><p>Guide</p>"),
    ("html", '<?xml version="1.0"?><!-- x --><html><p>Guide</p></html>'.encode("utf-16")),
    ("jsonl", b'{"text": "Guide"}\n{"text": "b"}\n'),
    ("json", b'[\n{"text": "Guide"}]'),
    ("md", b"intro\n\n## Guide\n\ntext\n"),
    ("csv", b"name,city,year\nGuide,b,1\nd,e,2\n"),
    ("csv", "name\tcity\nGuide\tb\nd\te\n".encode("utf-16")),
    ("txt", b"The Guide, which is prose, has commas.\nSo has this, and it is long, too.\nAnd so on, and on.\n"),
    ("txt", b"#hashtag Guide"),
    ("txt", "{ein Café} Guide".encode("cp1252").replace(b"{", b"(")),
]


@pytest.mark.parametrize(("kind", "data"), KINDS)
def test_bytes_say_what_they_are(kind, data):
    source = from_bytes(data)
    assert source.media_type == media_type_of(kind)
    assert "Guide" in read_source(source).text


def test_types_and_identity_of_bytes():
    assert from_bytes(b"# a", name="a.md", media_type="txt").media_type == "text/plain"
    assert from_bytes(b"a", name="a.md").media_type == "text/markdown"
    assert from_bytes(b"# a", name="a.unknown").media_type == "text/markdown"
    assert from_bytes(b"a", media_type="text/html").media_type == "text/html"
    first, two = from_bytes(b"one", name="notes"), from_bytes(b"two", name="notes")
    assert first.document_id == two.document_id == "stdin:notes"
    assert (first.name, first.size) == ("notes", 3)
    assert first.digest() != two.digest()
    assert read_source(first).content_hash == first.digest()


def test_bytes_may_wait_in_a_file_of_another_name(tmp_path):
    with SourceReader() as reader:
        for _, data in KINDS:
            (tmp_path / "0").write_bytes(data)
            here, there = from_bytes(data, name="notes/guide"), from_bytes(tmp_path / "0", name="notes/guide")
            assert (there.document_id, there.name, there.path) == (here.document_id, here.name, here.path)
            assert (there.media_type, there.size, there.digest()) == (here.media_type, here.size, here.digest())
            assert reader.read(there) == reader.read(here)


def test_beside_files(tmp_path):
    (tmp_path / "notes").write_text("in a file")
    sources, skipped = find_sources([tmp_path / "notes", from_bytes(b"in a pipe", name="notes")])
    assert [(source.name, read_source(source).text) for source in sources] == [
        (f"{tmp_path.name}/notes", "in a file"),
        ("notes", "in a pipe"),
    ]
    assert skipped == []


@pytest.mark.parametrize("name", ["", " ", "a\nb", "a\x00", "a\u202eb", "x" * 501, "caf\udce9"])
def test_names_that_nobody_could_type_again(name):
    with pytest.raises(UsageError, match="printable"):
        from_bytes(b"x", name=name)


def test_unknown_type_names_the_known():
    with pytest.raises(UsageError, match=r"type 'xls'; choose one of csv, docm, docx, dotm, dotx, eml, epub, htm"):
        from_bytes(b"x", media_type="xls")
    assert {"md", "html", "txt", "pdf", "csv", "jsonl", "docx"} <= set(type_names())


@pytest.mark.parametrize(
    ("data", "says"),
    [(b"", "nothing came in"), (bytes(range(256)), "binary file; say of what kind with --type"), (b" ", "no text")],
)
def test_reasons(data, says):
    with pytest.raises(UnreadableSource, match=says):
        read_source(from_bytes(data))


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_anything_gets_a_type(data):
    assert media_type_of(sniff(data)) == sniff(data)
