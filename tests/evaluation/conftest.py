"""An index with the random model and a few documents; a lossy codec."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from indexed import write_texts
from safetensors.torch import load_file, save_file

from ragkv import RagKV
from ragkv.store import codecs

TEXTS = {
    "halden.md": "Halden Works was founded by Mira Oskel in 1907. It is based in Tarn and makes wall clocks.",
    "bolt.txt": "Bolt Ltd makes valves for ships. Bolt Ltd was founded by Ann Lee in the town of Varn.",
    "corvo.txt": "Corvo Mills was founded by Ida Brandt. Its flour is sold in Tarn and in Varn every week.",
}


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "documents", TEXTS)


@pytest.fixture
def rag(tmp_path: Path, documents: Path, model_folder: Path) -> Iterator[RagKV]:
    settings = {"device": "cpu", "chunk_tokens": 128, "top_k": 2}
    # raw: the index's KV is compared with the model's, bit for bit
    with RagKV.create(tmp_path / "index", model=str(model_folder), codec="raw", **settings) as made:
        made.ingest(documents)
        yield made


@dataclass(frozen=True, slots=True)
class Coarse(codecs.Codec):
    """A lossy codec: fp32 without the lower half of every number."""

    id: ClassVar[str] = "coarse"

    def encode(self, buf, slabs):
        return np.frombuffer(buf, "<u4").astype("<u4") // (1 << 16) * (1 << 16)

    def decode(self, buf, out=None):
        payload = np.frombuffer(buf, np.uint8)
        if out is None:
            return payload
        out[:] = payload
        return out


@pytest.fixture
def coarse(monkeypatch) -> str:
    monkeypatch.setattr(codecs.CODECS, "added", {"coarse": SimpleNamespace(load=lambda: Coarse)})
    return "coarse"


@pytest.fixture
def other_model(tmp_path: Path, model_folder: Path) -> Path:
    """Another checkpoint: the same shapes, weights half as large."""
    folder = tmp_path / "other-model"
    shutil.copytree(model_folder, folder)
    weights = load_file(folder / "model.safetensors")
    save_file({name: weight / 2 for name, weight in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder
