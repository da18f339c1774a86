"""Records that vLLM encodes are those of ragkv's own encoder, and no fault of an index gives a wrong answer."""

import shutil
import socket
from types import SimpleNamespace

import pytest
import torch
from vllmserver import CORPUS, QUESTIONS, body_of, far, index_of, references, vllm_server

from ragkv import RagKV
from ragkv.errors import RagkvError
from ragkv.runtime.vllm import PARAMS, ChunkReads
from ragkv.store import KVIdentity
from ragkv.types import Encoding

FAMILIES = {"llama": "prefixed", "qwen3": "standalone", "stablelm": "prefixed", "smollm2": "prefixed"}


@pytest.mark.parametrize(("family", "over"), FAMILIES.items())
def test_chunks_that_vllm_encodes_are_answered_as_by_block(models, tmp_path, family, over):
    model, index = models(family), tmp_path / "index"
    settings = {"model": str(model), "device": "cpu", "dtype": "float32", "chunk_tokens": 96, "codec": "raw"}
    in_pieces = ("--max-num-batched-tokens", "64", "--enable-chunked-prefill")
    with (
        vllm_server(tmp_path, model, index, *in_pieces) as vllm,
        RagKV.create(index, vllm=vllm.url, tuning={"block": {"over": over}}, **settings) as rag,
        RagKV.open(index_of(tmp_path / "own", model, over=over), device="cpu") as own,
    ):
        report = rag.ingest(CORPUS)
        assert report.kv_encoded == report.chunks > 70
        assert rag.index.fingerprint != own.index.fingerprint
        served = SimpleNamespace(vllm=vllm, rag=rag, own=own)
        differences = []
        for number in range(6):
            full, block, whole = references(served, number)
            _, scores, cached = vllm.complete(body_of(served, number))
            assert (cached >= whole, far(scores, block) < 1e-4) == (True, True)
            differences.append(far(scores, full))
        assert max(differences) > 0.1

        scored = rag.retrieve(QUESTIONS[0], top_k=1)
        [mine], [theirs] = (each.kv_source.identities(Encoding(over), [scored[0].chunk]) for each in (own, rag))
        rag.store._write(lambda txn: txn.drop_record(theirs.key()))  # as if evicted
        assert not rag.store.has_kv(theirs)
        assert rag.query(QUESTIONS[0], top_k=1, max_new_tokens=2).kv.misses == 1
        stored, expected = rag.store.get_many([theirs])[theirs], own.store.get_many([mine])[mine]
        torch.testing.assert_close(list(stored.keys), list(expected.keys), atol=1e-4, rtol=1e-4)
        assert stored.encoded_at == expected.encoded_at
        assert rag.model._loaded is None  # no weights here


def flip(store, identity):
    """Change a bit of a record's payload, or change it back."""

    def write(txn):
        key, payload = map(bytes, next(txn.scan("segments", identity.key())))
        changed = bytearray(payload)
        changed[len(changed) // 2] ^= 1
        txn.put("segments", key, bytes(changed))

    store._write(write)


def last_record(body):
    """The identity of the last chunk that a request reads."""
    reads = ChunkReads.of(body["kv_transfer_params"][PARAMS])
    encoding, tokens, before = reads.chunks[-1]
    ids = tuple(body["prompt"][reads.tokens - tokens : reads.tokens])
    return KVIdentity(model=reads.model, encoding=encoding, prefix_ids=before, chunk_ids=ids)


def test_no_fault_of_an_index_gives_a_wrong_answer(models, tmp_path):
    model, index = models("llama"), index_of(tmp_path / "index", models("llama"))
    with vllm_server(tmp_path, model, index) as vllm:
        opening = RagKV.open(index, device="cpu", runtime=("vllm", vllm.url)), RagKV.open(index, device="cpu")
        with opening[0] as rag, opening[1] as own:
            served = SimpleNamespace(vllm=vllm, rag=rag, own=own)
            body, (full, block, whole) = body_of(served, 1), references(served, 1)

            def expect(reference):
                vllm.forget()
                for _ in range(2):  # loaded or computed, then from the prefix cache
                    _, scores, cached = vllm.complete(body)
                    assert far(scores, reference) < 1e-4
                    assert reference is full or cached == whole

            expect(block)
            flip(own.store, last_record(body))
            expect(full)
            flip(own.store, last_record(body))
            expect(block)
            own.delete(*(stored.document.document_id for stored in own.store.documents()))
            expect(full)
            own.ingest(CORPUS)
            expect(block)
        shutil.rmtree(index)
        expect(full)
        with RagKV.open(index_of(index, model, tiers=[{"url": "redis://127.0.0.1:9"}]), device="cpu") as own:
            expect(block)
            own.delete(*(stored.document.document_id for stored in own.store.documents()))
            expect(full)
        assert vllm.ask("/health") == ""


def test_ragkv_goes_on_after_a_restart_of_vllm(models, tmp_path):
    model, index = models("llama"), index_of(tmp_path / "index", models("llama"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    runtime = ("vllm", f"http://127.0.0.1:{port}")
    hits = "vllm:external_prefix_cache_hits_total"
    with RagKV.open(index, device="cpu", runtime=runtime) as rag:
        answers = []
        for _ in range(2):
            with vllm_server(tmp_path, model, index, port=port) as vllm:
                answers.append(rag.query(QUESTIONS[0], top_k=3, max_new_tokens=8).text)
                assert vllm.metric(hits) > 0
        assert answers[0] == answers[1]
        with pytest.raises(RagkvError, match="does not answer"):
            rag.query(QUESTIONS[0])
        with vllm_server(tmp_path, model, index, "--dtype", "bfloat16", port=port) as other:
            rag.query(QUESTIONS[0], top_k=3, max_new_tokens=8)  # computed by vLLM, and tells that it is another one
            assert other.metric(hits) == 0
            rag.query(QUESTIONS[0], top_k=3, max_new_tokens=8)
            assert other.metric(hits) > 0
