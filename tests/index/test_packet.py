"""An index with packets: which KV is read, what is stored, and what works when the packet's file is gone."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from indexed import indexed

from ragkv import RagKV
from ragkv.config import IndexConfig, load_config, save_config
from ragkv.doctor.report import _alternatives
from ragkv.errors import ConfigError, ModelLoadError
from ragkv.index.contexts import Contexts
from ragkv.model.packet import make_packet
from ragkv.model.self_check import load_model
from ragkv.types import Encoding

TEXTS = {"halden.txt": "Halden Works was founded by Mira Oskel in 1907.", "bolt.txt": "Bolt Ltd makes valves."}
QUESTION = "Who founded Halden Works, and what does Bolt Ltd make?"


@pytest.fixture
def packet(tmp_path, model_folder):
    """A packet file for the test's model, with vectors drawn from this seed."""
    model = load_model(str(model_folder), device="cpu")

    def write(seed, *, name="packet.safetensors", model_digest=None):
        width = model.module.get_input_embeddings().weight.shape[1]
        drawn = torch.randn(5, width, generator=torch.Generator().manual_seed(seed))
        made = make_packet(drawn[:3], drawn[3:], model_digest or model.checkpoint.digest(None))
        made.save(tmp_path / name)
        return str(tmp_path / name)

    return write


@pytest.fixture
def index(tmp_path, model_folder, packet, monkeypatch):
    packet(1)
    monkeypatch.chdir(tmp_path)
    tuning = {"block": {"packet": "packet.safetensors"}}
    with indexed(tmp_path, TEXTS, model=model_folder, engines=("ape", "block"), tuning=tuning) as rag:
        return rag.folder


def answered(folder, **options):
    with RagKV.open(folder, device="cpu") as rag:
        answer = rag.query(QUESTION, **{"engine": "block", "max_new_tokens": 8} | options)
        return answer.text, (answer.kv.hits, answer.kv.misses)


def test_chunks_are_stored_in_their_packets(index, tmp_path, monkeypatch):
    assert load_config(index).tuning["block"]["packet"] == str(tmp_path / "packet.safetensors")
    monkeypatch.chdir("/")
    with RagKV.open(index, device="cpu") as rag:
        [scored, *_] = rag.retrieve(QUESTION)
        identity = rag.kv_loader.identity(Encoding.PACKET, scored.chunk.token_ids)
        stored, tokens = rag.store.get_kv(identity), len(scored.chunk.token_ids) + 5
        [fresh] = rag.model.encode([scored.chunk.token_ids], packet=rag.index.packet)
        assert stored.tokens == identity.tokens == tokens
        for one, other in zip((*stored.keys, *stored.values), (*fresh.keys, *fresh.values), strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=2**-10)
        sizes = rag.kv_loader.sizes(Encoding.PACKET, [scored])
        assert sizes[identity.key()] == stored.wide().nbytes == rag.index.shape.nbytes(tokens)
        stats = rag.stats()
        assert set(stats.kv_bytes_by_encoding) >= {"packet", "prefixed"}
        assert rag.verify().ok
        assert rag.verify(quick=True).ok
        found = rag.gc()
        assert found.records == 0
        assert rag.ingest(tmp_path / "halden.txt").unchanged
    assert answered(index)[1] == (2, 0)


def test_kv_of_another_packet_is_never_returned(index, packet, tmp_path):
    before = answered(index)
    packet(2)  # under the same name
    changed = answered(index)
    assert changed[1] == (0, 2)
    assert changed[0] != before[0]
    with RagKV.open(index, device="cpu") as rag:
        report = rag.ingest(*(tmp_path / name for name in TEXTS))
        assert (len(report.updated), report.unchanged) == (2, [])
        assert rag.ingest(tmp_path / "halden.txt").unchanged
        assert rag.gc().records == 0  # the ingest freed the first packet's KV
    assert answered(index) == (changed[0], (2, 0))
    packet(1)
    assert answered(index) == (before[0], (0, 2))


def test_other_engines_are_not_affected(index, tmp_path):
    ape, full = answered(index, engine="ape"), answered(index, engine="full")
    save_config(index, replace(load_config(index), tuning={}))
    assert answered(index, engine="ape") == ape == (ape[0], (2, 0))
    assert answered(index, engine="full") == full
    assert answered(index)[1] == (0, 2)  # only block reads other KV without a packet


def test_a_file_that_is_gone_stops_block_alone(index, tmp_path):
    (tmp_path / "packet.safetensors").unlink()
    assert answered(index, engine="ape")[1] == (2, 0)
    with pytest.raises(ConfigError, match="cannot be read"):
        answered(index)
    with RagKV.open(index, device="cpu") as rag:
        assert rag.verify().ok
        assert rag.stats().chunks == 2
        assert rag.gc().records == 0
        with pytest.raises(ConfigError, match="cannot be read"):
            rag.ingest(*(tmp_path / name for name in TEXTS))


def test_a_packet_of_another_model_makes_no_index(tmp_path, model_folder, packet):
    (tmp_path / "a.txt").write_text("Carr is a town.")
    tuning = {"block": {"packet": packet(1, model_digest="another")}}
    settings = {"model": str(model_folder), "device": "cpu", "engines": ("block",), "tuning": tuning}
    with pytest.raises(ModelLoadError, match="trained for another model"):
        RagKV.create(tmp_path / "index", **settings)
    assert not (tmp_path / "index").exists()


def test_texts_without_an_index_stand_in_packets_too(tmp_path, model_folder, packet):
    model = load_model(str(model_folder), device="cpu")
    config = IndexConfig(model=str(model_folder), tuning={"block": {"packet": packet(1)}})
    with Contexts(model, [("carr", "Carr is a town.")], config) as contexts:
        stream = contexts.stream("What is Carr?", engine="block", max_new_tokens=4)
        list(stream)
        [found] = [kv for (encoding, _), kv in contexts._held.items() if encoding is Encoding.PACKET]
        [fresh] = model.encode([contexts.chunk("Carr is a town.", chunk_id="c").token_ids], packet=contexts._packet)
    assert stream.answer.kv.misses == 1
    assert found.tokens == fresh.tokens
    assert all(torch.equal(one, other) for one, other in zip(found.keys, fresh.keys, strict=True))


def test_doctor_does_not_compare_what_a_packets_chunks_see(packet):
    subject = SimpleNamespace(model=SimpleNamespace(missing_capabilities={}))
    config = IndexConfig(engines=("block", "blend"))
    assert {one.name for one in _alternatives(config, subject)} == {"block"}
    assert _alternatives(replace(config, tuning={"block": {"packet": packet(1)}}), subject) == []


def test_warm_and_repair_make_packets_again(index):
    with RagKV.open(index, device="cpu") as rag:
        identities = [
            rag.kv_loader.identity(Encoding.PACKET, chunk.token_ids)
            for stored in rag.store.documents()
            for chunk in rag.store.chunks(stored.document.document_id)
        ]
        rag.store.set_budget(0)
        assert not rag.store.has_many(identities)
        rag.store.set_budget(None)
        report = rag.warm(rag.wanted(documents=["*"]))
        assert rag.store.has_many(identities) == set(identities)
        assert report.refused == 0
