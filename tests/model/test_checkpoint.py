"""What a model's name means, and what is said when it means nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest

from ragkv.errors import ModelLoadError
from ragkv.model.checkpoint import require_on_hub, resolve


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "qwen").mkdir(parents=True)
    (tmp_path / "models" / "qwen" / "config.json").write_text("{}")
    (tmp_path / "model.ggml").write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("./models/typo", "No model folder at"),
        ("../typo", "No model folder at"),
        ("/models/typo", "No model folder at"),
        ("~/models/typo", "No model folder at"),
        ("~nobody-here/model", "No model folder at"),
        ("models/qwen/typo", "No model folder at"),
        ("typo/", "No model folder at"),
        (r"C:\models\typo", "No model folder at"),
        ("C:/typo", "No model folder at"),
        ("typo.gguf", "No model folder at"),
        ("models/typo.safetensors", "No model folder at"),
        ("two words", "No model folder at"),
        ("some/typo\n", "No model folder at"),
        ("a\0b", "No model folder at"),
        ("\udcff", "No model folder at"),
        ("", "name is empty"),
        ("model.ggml", "is a file; give the model's folder"),
        ("models/qwen/config.json", "is a file; give the model's folder"),
        ("models", "holds no model: config.json is missing"),
        ("a" * 5000, "cannot be looked at"),
    ],
)
def test_a_path_that_leads_nowhere_is_no_matter_of_the_network(name: str, says: str):
    with pytest.raises(ModelLoadError) as error:
        resolve(name)
    assert says in str(error.value)


def test_what_may_be_on_the_hub():
    assert resolve("models/qwen").local
    for name in ("gpt2", "Qwen/Qwen3-0.6B", "BAAI/bge-m3", "models/typo", "a_b/c-d.e"):
        assert not resolve(name).local


def point_to(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As HF_ENDPOINT does, which is read when the client is imported."""
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """A hub of its own that has nothing; yields what it is asked."""
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_response(500 if "broken" in self.path else 404)
            if "broken" not in self.path:
                self.send_header("X-Error-Code", "EntryNotFound" if "layout" in self.path else "RepoNotFound")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """To nobody."""

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("ragkv.model.checkpoint._PATIENCE", 600)  # this machine may be busy
    for name in ("NO_PROXY", "no_proxy"):  # the proxy of whoever runs the tests knows nothing of this hub
        monkeypatch.setenv(name, "127.0.0.1")
    huggingface_hub.close_session()  # a client reads them when it is made
    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        point_to(f"http://127.0.0.1:{server.server_port}", monkeypatch)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield asked
        server.shutdown()
        thread.join()
    huggingface_hub.close_session()


def test_the_hub_is_asked_once(hub: list[str]):
    with pytest.raises(ModelLoadError, match="no model folder 'some/typo' here, and the hub has no such model"):
        require_on_hub("some/typo")
    assert hub == ["/some/typo/resolve/main/config.json"]
    with pytest.raises(ModelLoadError, match="and the hub was not reachable"):
        require_on_hub("some/broken")
    with pytest.raises(ModelLoadError, match=r"here \(there is a folder models, without it\), and the hub has"):
        require_on_hub("models/typo")
    assert len(hub) == 3
    require_on_hub("some/layout-of-its-own")


def test_a_hub_that_is_not_there_is_told_with_the_folder(hub: list[str], monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as nobody:  # a port of our own, where nobody listens
        nobody.bind(("127.0.0.1", 0))
        point_to(f"http://127.0.0.1:{nobody.getsockname()[1]}", monkeypatch)
        with pytest.raises(ModelLoadError, match="no model folder 'some/typo' here, and the hub was not reachable"):
            require_on_hub("some/typo")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match="and HF_HUB_OFFLINE forbids to ask the hub for it"):
        require_on_hub("some/typo")
    assert hub == []
