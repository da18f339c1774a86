"""Files in a hostile folder: only regular files are read and written, and nothing blocks."""

import os
import stat
from pathlib import Path

import pytest

from ragkv.util import files
from ragkv.util.files import (
    NotPlainError,
    is_folder,
    make_folder,
    open_plain,
    parse_json,
    read_plain,
    remove_tree,
    replace_plain,
    require_plain,
    write_plain,
)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "precious").write_text("precious")
    return folder


@pytest.fixture
def inside(tmp_path: Path, outside: Path) -> Path:
    folder = tmp_path / "inside"
    folder.mkdir()
    (folder / "link").symlink_to(outside / "precious")
    (folder / "dangling").symlink_to(outside / "new")
    (folder / "folder link").symlink_to(outside)
    (folder / "folder").mkdir()
    (folder / "device").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe")
    return folder


ODD = ["link", "dangling", "folder link", "folder", "device", "pipe"]


@pytest.mark.parametrize("name", ODD)
def test_what_is_no_file_is_refused_at_once(inside, outside, name):
    for attempt in (require_plain, open_plain, read_plain, lambda path: open_plain(path, os.O_WRONLY | os.O_CREAT)):
        with pytest.raises(NotPlainError, match="must be a regular file"):
            attempt(inside / name)
    assert [path.name for path in outside.iterdir()] == ["precious"]


@pytest.mark.parametrize("write", [write_plain, replace_plain])
@pytest.mark.parametrize("name", [name for name in ODD if name != "folder"])
def test_writing_takes_the_link_away(inside, outside, name, write):
    write(inside / name, b"new")
    assert stat.S_ISREG((inside / name).lstat().st_mode)
    assert read_plain(inside / name) == b"new"
    assert [path.read_text() for path in outside.iterdir()] == ["precious"]
    assert {path.name for path in inside.iterdir()} == set(ODD)


@pytest.mark.parametrize("name", [*ODD, "nothing"])
def test_deleting_takes_the_link_and_not_what_it_leads_to(inside, outside, name):
    (inside / "folder" / "within").symlink_to(outside)
    remove_tree(inside / name)
    assert not os.path.lexists(inside / name)
    assert (outside / "precious").read_text() == "precious"


def test_folders_of_links(inside, outside):
    assert not is_folder(inside / "folder link")
    make_folder(inside / "folder link")
    make_folder(inside / "folder")
    assert is_folder(inside / "folder link")
    assert is_folder(inside / "folder")
    assert [path.name for path in outside.iterdir()] == ["precious"]
    with pytest.raises(OSError, match="folder"):
        replace_plain(inside / "folder", b"new")
    assert {path.name for path in inside.iterdir()} == set(ODD)


def test_sizes_are_bounded(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    assert read_plain(tmp_path / "a", limit=5) == b"12345"
    with pytest.raises(NotPlainError, match="where 4 is the most"):
        read_plain(tmp_path / "a", limit=4)
    with (tmp_path / "hollow").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(NotPlainError, match="are holes"):
        read_plain(tmp_path / "hollow")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "1" * 100_000, "nul", b"\xff\xfe\x00"])
def test_json_fails_as_a_value_error(text):
    with pytest.raises(ValueError, match=r"nested|digits|Expecting|codec"):
        parse_json(text)


def test_a_link_that_comes_after_the_look_is_not_followed(tmp_path, monkeypatch):
    """The link is created between the check and the opening."""
    target, link = tmp_path / "other", tmp_path / "keys"
    link.symlink_to(target)
    monkeypatch.setattr(files, "require_plain", lambda _: True)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        files.open_plain(link, os.O_RDWR | os.O_CREAT)
    assert not target.exists()
