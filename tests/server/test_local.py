"""The socket in an index's folder: other users neither get requests nor are accepted as clients."""

import os
import socket
import stat
from types import SimpleNamespace

import pytest
from live import PATIENCE

from ragkv.server import local
from ragkv.server.local import FOLDER, LocalSocket, connect, server_process

OTHER = os.geteuid() + 1


def listening(index):
    made = LocalSocket.make(index)
    made.listening.listen()
    return made


@pytest.fixture
def served(tmp_path):
    made = listening(tmp_path)
    yield tmp_path
    made.close()


def reached(index):
    connection = connect(index, seconds=PATIENCE)
    if connection is None:
        return False
    connection.close()
    return True


def owned_by_another(monkeypatch):
    """Make `os.fstat` report another owner for folders, within `local`."""

    def fstat(place):
        result = os.fstat(place)
        owner = OTHER if stat.S_ISDIR(result.st_mode) else result.st_uid
        return SimpleNamespace(st_mode=result.st_mode, st_uid=owner)

    monkeypatch.setattr(local, "os", SimpleNamespace(**{**vars(os), "fstat": fstat}))


def test_a_folder_of_another_user_is_not_listened_in(tmp_path, monkeypatch):
    owned_by_another(monkeypatch)
    with pytest.raises(PermissionError, match="another user"):
        LocalSocket.make(tmp_path)
    assert list((tmp_path / FOLDER).iterdir()) == []


def test_a_folder_of_another_user_is_not_asked(served, monkeypatch):
    assert reached(served)
    owned_by_another(monkeypatch)
    assert not reached(served)
    assert server_process(served) is None


def test_a_folder_that_others_may_enter_is_closed_to_them(tmp_path):
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER).chmod(0o755)
    local_socket = listening(tmp_path)
    try:
        assert stat.S_IMODE((tmp_path / FOLDER).stat().st_mode) == 0o700
        assert reached(tmp_path)
        (tmp_path / FOLDER).chmod(0o750)
        assert not reached(tmp_path)
    finally:
        local_socket.close()


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


def test_what_a_link_leads_to_is_not_asked(served):
    resident = served / FOLDER
    resident.rename(served / "aside")
    resident.symlink_to(served / "aside")
    assert not reached(served)


def test_a_killed_servers_socket_is_replaced(tmp_path):
    LocalSocket.make(tmp_path).close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left, local._private(tmp_path) as folder:
        left.bind(local._address(tmp_path, folder))
    assert not reached(tmp_path)
    assert server_process(tmp_path) is None
    made = LocalSocket.make(tmp_path)
    assert server_process(tmp_path) == os.getpid()
    assert not reached(tmp_path)  # it may still load its model
    made.listening.listen()
    assert reached(tmp_path)
    made.close()
    assert server_process(tmp_path) is None


def test_a_second_server_leaves_the_first_ones_socket_alone(served, monkeypatch):
    monkeypatch.setattr(local, "time", SimpleNamespace(sleep=lambda _: None))  # retries without waiting
    with pytest.raises(BlockingIOError):
        LocalSocket.make(served)
    assert server_process(served) is not None
    assert reached(served)


def test_a_deep_index_has_a_socket(tmp_path):
    deep = tmp_path.joinpath(*["a-folder-with-a-long-name"] * 8)
    deep.mkdir(parents=True)
    made = listening(deep)
    assert reached(deep)
    made.close()
