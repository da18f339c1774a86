"""The checks that a request passes before it is answered."""

import stat

import pytest
from guarded import guarded

from ragkv.errors import ConfigError, UsageError
from ragkv.server.settings import Keys, ServerSettings, add_key, named_places


def test_a_key_is_taken(call, tmp_path):
    path = tmp_path / "keys"
    key, other = add_key(path, "ann"), add_key(path, "bob")
    keys = Keys.read(path)

    for route, words, status in (
        ("/v1/models", f"Bearer {key}", 200), ("/v1/models", f"bearer  {other}", 200), ("/healthz", "", 200),
    ):  # fmt: skip
        headers = {"authorization": words}
        response = call("GET", route, around=lambda app: guarded(app, keys=keys), headers=headers)
        assert response.status_code == status
    assert (keys.owner(key), keys.owner(other), keys.owner("")) == ("ann", "bob", None)
    assert key not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("content", ["", "# none\n", "ann rk-plain\n", "ann sha256:12\n", "ann sha256:" + "g" * 64])
def test_a_file_without_sound_keys_is_refused(tmp_path, content):
    (tmp_path / "keys").write_text(content)
    with pytest.raises(ConfigError, match="--new-key"):
        Keys.read(tmp_path / "keys")
    with pytest.raises(ConfigError, match="cannot be read"):
        Keys.read(tmp_path / "missing")


def test_a_name_has_one_key(tmp_path):
    add_key(tmp_path / "keys", "ann")
    with pytest.raises(UsageError, match="already"):
        add_key(tmp_path / "keys", "ann")
    with pytest.raises(UsageError, match="name"):
        add_key(tmp_path / "keys", "a b")


@pytest.mark.parametrize("content", ["", "# who may ask", "bob sha256:" + "0" * 64, "bob sha256:" + "0" * 64 + "\r\n"])
def test_a_key_is_added_on_a_line_of_its_own(tmp_path, content):
    """Some editors leave no newline at the end."""
    path = tmp_path / "keys"
    path.write_bytes(content.encode())
    keys = {add_key(path, name): name for name in ("ann", "eve")}
    assert {key: Keys.read(path).owner(key) for key in keys} == keys
    assert path.read_bytes().startswith(content.encode())


def test_keys_that_others_may_write_are_refused(tmp_path):
    """Anyone who can add a line can ask; an empty file is made private instead."""
    path = tmp_path / "keys"
    path.touch()
    path.chmod(0o666)
    key = add_key(path, "ann")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.read_bytes()
    for mode in (0o666, 0o620, 0o602):
        path.chmod(mode)
        with pytest.raises(ConfigError, match="chmod 600"):
            Keys.read(path)
        with pytest.raises(ConfigError, match="chmod 600"):
            add_key(path, "bob")
    assert path.read_bytes() == before
    path.chmod(0o440)  # like a secret that is mounted into a container
    assert Keys.read(path).owner(key) == "ann"


@pytest.mark.parametrize("there", [True, False])
def test_keys_are_not_written_through_a_link(tmp_path, there):
    target, link = tmp_path / "other", tmp_path / "keys"
    if there:
        target.touch()
    link.symlink_to(target)
    with pytest.raises(ConfigError, match="link"):
        add_key(link, "ann")
    assert target.exists() == there
    assert not there or not target.read_bytes()


def test_others_are_served_only_with_keys():
    with pytest.raises(UsageError, match="--keys"):
        ServerSettings(host="0.0.0.0")
    assert ServerSettings(host="0.0.0.0", keys=Keys({})).keys
    assert ServerSettings(host="localhost").keys is None


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((host, 200) for host in ("localhost", "LocalHost:8080", "127.0.0.1:80", "[::1]:8080", "[::1]")),
        *((host, 403) for host in ("evil.example", "evil.example:80", "localhost.evil.example", "", "[::2]:80")),
        *((host, 403) for host in ("[::1].evil.com", "[::1]evil.com:80", "[::1", "localhost:80.evil.com", "::1")),
    ],
)
def test_a_page_under_another_name_reads_nothing(call, host, status):
    """DNS rebinding: a name that resolves to this machine makes a web page's requests same-origin."""
    own = {"localhost", "127.0.0.1", "[::1]"}
    response = call("GET", "/v1/models", around=lambda app: guarded(app, hosts=own), headers={"host": host})
    assert response.status_code == status


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/jsonx", ""]
)
def test_what_any_web_page_may_send_is_refused(call, kind):
    headers = {"content-type": kind, "origin": "http://evil.example"}
    response = call("POST", "/v1/chat/completions", content=b"{}", headers=headers)
    assert response.status_code == 415


@pytest.mark.parametrize(("pieces", "status"), [(3 * [50], 413), ([50, 51], 413), ([50, 50], 400)])
def test_a_large_body_is_refused(call, pieces, status):
    """A body within the limit is read, and refused as invalid JSON."""

    async def coming():
        for size in pieces:
            yield b" " * size

    kind = {"content-type": "application/json"}
    for content in (b" " * sum(pieces), coming()):
        response = call(
            "POST",
            "/v1/chat/completions",
            around=lambda app: guarded(app, body_bytes=100),
            content=content,
            headers=kind,
        )
        assert response.status_code == status, response.text


def test_headers_of_every_answer(call):
    headers = call("GET", "/v1/models").headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["content-security-policy"].startswith("default-src 'none'")
    assert len(headers["x-request-id"]) == 32


def test_indexes_have_names(tmp_path):
    (tmp_path / "my index").mkdir()
    assert named_places([str(tmp_path / "my index")]) == {"my-index": str(tmp_path / "my index")}
    assert list(named_places([f"a={tmp_path}", f"b={tmp_path}"])) == ["a", "b"]
    with pytest.raises(UsageError, match="--index NAME="):
        named_places([str(tmp_path), str(tmp_path)])
    with pytest.raises(UsageError, match="--index NAME="):
        named_places([f"{tmp_path}/{'long' * 16}{each}" for each in "ab"])  # a name has at most 64 characters
