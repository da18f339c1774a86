"""The socket in an index's folder: other users neither get requests nor are accepted as clients."""

import fcntl
import os
import socket
import stat
from types import SimpleNamespace

import pytest
from live import PATIENCE

from ragkv.server import local
from ragkv.server.local import FOLDER, LocalSocket, connect, is_free

OTHER = os.geteuid() + 1


@pytest.fixture
def served(tmp_path):
    made = LocalSocket.make(tmp_path)
    yield tmp_path
    made.close()


def reached(index):
    connection = connect(index, seconds=PATIENCE)
    if connection is None:
        return False
    connection.close()
    return True


def owned_by_another(monkeypatch, name, kind):
    """Make `os.fstat` or `os.lstat` report another owner for files of that kind, within `local`."""

    def found(*place, **more):
        result = getattr(os, name)(*place, **more)
        return SimpleNamespace(st_mode=result.st_mode, st_uid=OTHER if kind(result.st_mode) else result.st_uid)

    monkeypatch.setattr(local, "os", SimpleNamespace(**{**vars(os), name: found}))


def test_a_folder_of_another_user_is_not_listened_in(tmp_path, monkeypatch):
    owned_by_another(monkeypatch, "fstat", stat.S_ISDIR)
    with pytest.raises(PermissionError, match="another user"):
        LocalSocket.make(tmp_path)
    assert list((tmp_path / FOLDER).iterdir()) == []


def test_a_folder_of_another_user_is_not_asked(served, monkeypatch):
    assert reached(served)
    owned_by_another(monkeypatch, "fstat", stat.S_ISDIR)
    assert not reached(served)
    assert is_free(served)


def test_a_socket_of_another_user_is_not_asked(served, monkeypatch):
    owned_by_another(monkeypatch, "lstat", stat.S_ISSOCK)
    assert not reached(served)


def test_a_server_of_another_user_is_not_asked(served, monkeypatch):
    monkeypatch.setattr(local, "peer_uid", lambda connection: (1, OTHER))
    assert not reached(served)


def test_what_is_no_socket_stays_and_is_not_asked(tmp_path):
    LocalSocket.make(tmp_path).close()
    (tmp_path / FOLDER / "socket").write_text("mine")
    assert not reached(tmp_path)
    assert (tmp_path / FOLDER / "socket").read_text() == "mine"


def test_a_folder_that_others_may_enter_is_closed_to_them(tmp_path):
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER).chmod(0o755)
    made = LocalSocket.make(tmp_path)
    try:
        assert stat.S_IMODE((tmp_path / FOLDER).stat().st_mode) == 0o700
        assert reached(tmp_path)
        (tmp_path / FOLDER).chmod(0o750)
        assert not reached(tmp_path)
    finally:
        made.close()


@pytest.mark.parametrize("name", [FOLDER, f"{FOLDER}/lock"])
def test_a_link_is_not_followed(tmp_path, name):
    index, aim = tmp_path / "index", tmp_path / "aim"
    index.mkdir()
    if name == FOLDER:
        aim.mkdir(0o700)
    else:
        (index / FOLDER).mkdir(0o700)
        aim.touch()
    (index / name).symlink_to(aim)
    with pytest.raises(OSError, match=r"."):
        LocalSocket.make(index)
    if name == FOLDER:
        assert list(aim.iterdir()) == []


def test_a_stale_socket_is_removed_but_for_one_that_a_server_is_about_to_replace(tmp_path):
    LocalSocket.make(tmp_path).close()
    path = tmp_path / FOLDER / "socket"
    left = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    left.bind(local._address(tmp_path, folder := os.open(tmp_path / FOLDER, os.O_RDONLY)))
    left.close()
    os.close(folder)
    lock = os.open(tmp_path / FOLDER / "lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert not reached(tmp_path)
    assert path.is_socket()
    os.close(lock)
    assert not reached(tmp_path)
    assert not path.exists()


def test_what_a_link_leads_to_is_not_asked(served):
    resident = served / FOLDER
    (resident / "socket").rename(served / "elsewhere")
    (resident / "socket").symlink_to(served / "elsewhere")
    assert not reached(served)
    (resident / "socket").unlink()
    (served / "elsewhere").rename(resident / "socket")
    resident.rename(served / "aside")
    resident.symlink_to(served / "aside")
    assert not reached(served)


def test_a_second_server_leaves_the_first_ones_socket_alone(served, monkeypatch):
    monkeypatch.setattr(local, "time", SimpleNamespace(sleep=lambda _: None))  # retries without waiting
    with pytest.raises(BlockingIOError):
        LocalSocket.make(served)
    assert not is_free(served)
    assert reached(served)


def test_the_socket_of_a_server_that_has_ended_is_free(tmp_path):
    LocalSocket.make(tmp_path).close()
    assert is_free(tmp_path)
    LocalSocket.make(tmp_path).close()


def test_a_deep_index_has_a_socket(tmp_path):
    deep = tmp_path.joinpath(*["a-folder-with-a-long-name"] * 8)
    deep.mkdir(parents=True)
    made = LocalSocket.make(deep)
    assert reached(deep)
    made.close()
