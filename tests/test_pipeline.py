"""From files to answers with the Python API, on a random model that is loaded like a real one."""

import shutil
import time
from pathlib import Path

import pytest
from indexed import indexed, write_texts

from ragkv import RagKV
from ragkv.config import CONFIG_FILE
from ragkv.engines import make_engine
from ragkv.errors import ConfigError, KVMismatchError, UsageError
from ragkv.ingest import from_bytes

ENGINES = ["full", "ape", "blend", "block", "pced"]


STANDALONE = {"block": {"over": "standalone"}}


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "documents")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, model_folder: Path):
    """An index that tests only query."""
    with indexed(tmp_path_factory.mktemp("kept"), model=model_folder, chunk_tokens=128) as made:
        yield made


@pytest.mark.parametrize("engine", ENGINES)
def test_an_answer_and_all_that_belongs_to_it(kept, engine):
    answer = kept.query("Who founded Halden Works?", engine=engine, top_k=2, max_new_tokens=5)
    assert answer.engine == engine
    assert answer.finish_reason in ("stop", "length")
    assert [s.document for s in answer.sources] == ["halden.md", "bolt.txt"]
    assert answer.sources[0].score > answer.sources[1].score
    assert 0 <= answer.sources[1].score < 1
    assert answer.sources[0].retrieval_score > 0
    assert answer.timing.total >= answer.timing.first_token > 0
    expected = (0, 0) if engine == "full" else (2, 0)
    assert (answer.kv.hits, answer.kv.misses) == expected
    won = [s.tokens_won for s in answer.sources]
    if engine == "pced":
        assert 1 <= sum(won) <= 5
    else:
        assert won == [None, None]
    found = answer.to_json()
    parts = {"question", "answer", "engine", "finish_reason", "sources", "timing_ms", "kv", "decoding", "charge"}
    parts |= {"dtype", "fields", "reasoning", "queries", "intent"}
    assert set(found) == parts
    assert set(found["timing_ms"]) == {"retrieve", "rerank", "load", "first_token", "total"}
    assert (found["charge"] is not None and found["charge"] > 0) == (engine == "blend")
    assert set(found["kv"]) == {"hits", "misses", "bytes", "tokens", "memory_hits"}


def test_ape_block_and_pced_never_read_the_text_again(kept, steps_of):
    """They read stored KV: chunk tokens never go through the model."""
    steps = steps_of(kept.model)
    question = len(kept.index.prompt.suffix_ids(kept.model.tokens, "Who founded Halden Works?"))
    kept.query("Who founded Halden Works?", engine="ape", max_new_tokens=1)  # also stores the prefix's KV
    for engine in ("ape", "block", "pced"):
        steps.clear()
        kept.query("Who founded Halden Works?", engine=engine, max_new_tokens=3)
        first, *later = ([len(each) for each in ids] for _, ids in steps)
        assert set(first) == {question}
        assert {length for lengths in later for length in lengths} <= {1}
    steps.clear()
    kept.query("Who founded Halden Works?", engine="full", max_new_tokens=1)
    assert len(steps[0][1][0]) > question + 50


def test_an_ingest_encodes_only_what_has_changed_and_else_loads_no_model(tmp_path, documents, model_folder):
    index = tmp_path / "index"
    with RagKV.create(index, model=str(model_folder), chunk_tokens=128) as rag:
        first = rag.ingest(documents)
        assert (len(first.added), first.kv_encoded) == (2, 2)
    with RagKV.open(index) as rag:
        second = rag.ingest(documents)
        assert (len(second.unchanged), second.kv_encoded, second.tokens) == (2, 0, 0)
        assert rag.index._model is None
        (documents / "bolt.txt").write_text("Bolt Ltd makes springs. Bolt Ltd was founded by Ann Lee in Varn.")
        report = rag.ingest(documents)
        assert [Path(p).name for p in report.updated] == ["bolt.txt"]
        assert [Path(p).name for p in report.unchanged] == ["halden.md"]
        assert report.kv_encoded == 1
        assert (rag.store.stats().chunks, rag.store.stats().orphans) == (2, 0)
        assert "springs" in rag.retrieve("springs")[0].chunk.text
        assert rag.retrieve("valves") == []


def test_an_ingest_that_is_ended_at_its_search_indexes_has_lost_nothing(tmp_path, documents, model_folder):
    result = []

    def stop(progress):
        result.append((progress.building, progress.built, progress.to_build, progress.indexed))
        if progress.building == "bm25" and progress.built:
            raise KeyboardInterrupt

    with RagKV.create(tmp_path / "index", model=str(model_folder), chunk_tokens=128) as rag:
        with pytest.raises(KeyboardInterrupt):
            rag.ingest(documents, on_progress=stop)
        assert result[-2:] == [("bm25", 0, 2, 2), ("bm25", 2, 2, 2)]
        assert rag.store.stats().documents == 2
        assert not (rag.folder / "derived").exists()
        result.clear()
        report = rag.ingest(
            documents, on_progress=lambda progress: result.append((progress.building, progress.current))
        )
        assert (len(report.unchanged), len(report.added)) == (2, 0)
        assert result[-4:] == [(name, f"search index {name}") for name in ("bm25", "bm25", "fields", "fields")]
        assert {path.name for path in (rag.folder / "derived").iterdir()} == {"bm25", "fields"}
        assert "Mira" in rag.retrieve("Who founded Halden Works?")[0].chunk.text
        assert rag.maintenance.verify().ok


def test_a_changed_model_is_refused_until_documents_are_ingested_again(tmp_path, documents, model_folder):
    own = tmp_path / "model"
    shutil.copytree(model_folder, own)
    index = tmp_path / "index"
    with RagKV.create(index, model=str(own), chunk_tokens=128) as rag:
        rag.ingest(documents)
    weights = own / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 0x40
    weights.write_bytes(data)
    with RagKV.open(index) as rag:
        with pytest.raises(KVMismatchError, match="ragkv ingest"):
            rag.query("Who founded Halden Works?")
        rag.ingest(documents / "bolt.txt")
        with pytest.raises(KVMismatchError, match="all of its documents"):  # the other has the old model's tokens
            rag.query("Who founded Halden Works?")
        report = rag.ingest(documents)
        assert (len(report.updated), len(report.unchanged), report.kv_encoded, report.kv_reused) == (1, 1, 1, 0)
        answer = rag.query("Who founded Halden Works?", engine="block", max_new_tokens=2)
        assert answer.kv.misses == 0


def test_paths_are_given_one_by_one_or_as_lists(tmp_path, documents, model_folder):
    first, second = sorted(documents.iterdir())[:2]
    with RagKV.create(tmp_path / "index", model=str(model_folder), chunk_tokens=128, kv="on-demand") as rag:
        data = from_bytes(b"Corby Mill was founded by Ada Pine.", name="corby.txt")
        report = rag.ingest([str(first), second], data)
        assert len(report.added) == 3
        for same in (
            (first, second, data),
            ([first, [str(second)]], [data]),
            ((path for path in (first, second, data)),),
        ):
            assert len(rag.ingest(*same).unchanged) == 3
        assert len(rag.ingest([first, second], dry_run=True).unchanged) == 2
        with pytest.raises(UsageError, match="No such file"):
            rag.ingest([first, tmp_path / "missing"])
        for wrong in (7, None, b"a.md", [3.5], {"a": 1, 2: 3}):
            with pytest.raises(UsageError, match="lists of paths"):
                rag.ingest(wrong)
        with pytest.raises(UsageError, match="An empty path"):
            rag.ingest([first, ""])


def test_a_new_index_stores_one_encoding_unless_its_model_was_tuned_for_another(tmp_path, model_folder):
    tuned = tmp_path / "model"
    shutil.copytree(model_folder, tuned)
    (tuned / "ragkv.json").write_text('{"block_tuned": true}')
    over = {}
    for name, model, tuning in (
        ("new", model_folder, {}),
        ("own", model_folder, STANDALONE),
        ("sink", model_folder, {"block": {"sink": "bos"}}),
        ("tuned", tuned, {}),
    ):
        with RagKV.create(tmp_path / name, model=str(model), tuning=tuning) as rag:
            over[name] = rag.config.tuning.get("block"), *rag.index.encodings
    assert over == {
        "new": ({"over": "prefixed"}, "prefixed"),
        "own": ({"over": "standalone"}, "prefixed", "standalone"),
        "sink": ({"over": "prefixed", "sink": "bos"}, "prefixed"),
        "tuned": (None, "prefixed", "standalone"),
    }


def test_an_index_of_before_goes_on_over_standalone_chunk_kv(tmp_path, documents, model_folder):
    index = tmp_path / "index"
    with RagKV.create(index, model=str(model_folder), chunk_tokens=128, tuning=STANDALONE) as rag:
        rag.ingest(documents)
        assert 'over = "prefixed"' in make_engine("block", rag.config.tuning).warning(rag.model)
        answer = rag.query("Who founded Halden Works?", engine="block", max_new_tokens=4).text
    text = (index / CONFIG_FILE).read_text()
    for written, hits in (("", "standalone"), ('[tuning.block]\nover = "prefixed"\n', "prefixed")):
        (index / CONFIG_FILE).write_text(text.replace('[tuning.block]\nover = "standalone"\n', written))
        with RagKV.open(index) as rag:
            found = rag.query("Who founded Halden Works?", engine="block", max_new_tokens=4)
            assert (found.kv.misses, make_engine("block", rag.config.tuning).encoding) == (0, hits)
            assert (found.text == answer) == (written == "")


def test_without_a_budget_every_query_reads(tmp_path, documents, model_folder, monkeypatch):
    settings = {"device": "cpu", "chunk_tokens": 128, "memory_budget": "0"}
    with RagKV.create(tmp_path / "index", model=str(model_folder), **settings) as rag:
        rag.ingest(documents)
        for _ in range(2):
            answer = rag.query("Who founded Halden Works?", engine="block", max_new_tokens=1)
            assert (answer.kv.hits, answer.kv.memory_hits) == (2, 0)
        assert rag.kv_source.memory().use().entries == 0
    monkeypatch.setenv("RAGKV_MEMORY_BUDGET", "1MiB")
    with RagKV.open(tmp_path / "index", device="cpu") as rag:
        assert rag.kv_source.memory().use().budget == 1 << 20


@pytest.mark.parametrize("engine", ENGINES)
def test_no_read_transaction_is_open_while_an_answer_is_computed(kept, engine, monkeypatch):
    """A read transaction as long as a generation would keep LMDB from reusing pages (docs/design.md)."""
    readers = []
    honest = kept.model.step

    def watched(*args, **kwargs):
        end = time.monotonic() + 600
        # a write after an answer reads briefly; a reader of the answer itself would stay open
        while (now := kept.store._live()._map.env.readers()) != "(no active readers)\n" and time.monotonic() < end:
            time.sleep(0.001)
        readers.append(now)
        return honest(*args, **kwargs)

    monkeypatch.setattr(kept.model, "step", watched)
    for _ in range(2):  # from the store, then from memory
        kept.query("Who founded Halden Works?", engine=engine, max_new_tokens=4)
    with kept.store._live().read():
        assert kept.store._live()._map.env.readers() != "(no active readers)\n"  # a reader would be visible
    assert len(readers) >= 4
    assert set(readers) == {"(no active readers)\n"}


@pytest.mark.parametrize(
    "moment", ["folder made", "file begun", "tables not made", "no configuration", "configuration not in its place"]
)
def test_a_create_that_was_killed_at_any_step_is_taken_up(tmp_path, documents, model_folder, moment):
    import lmdb

    index = tmp_path / "index"
    (index / "store").mkdir(parents=True)
    if moment == "file begun":  # one of the two pages that LMDB writes first
        lmdb.open(str(tmp_path / "other"), subdir=False).close()
        (index / "store" / "data.mdb").write_bytes((tmp_path / "other").read_bytes()[:4096])
    elif moment == "tables not made":
        lmdb.open(str(index / "store")).close()
    elif moment == "no configuration":
        RagKV.create(index, model=str(model_folder)).close()
        (index / CONFIG_FILE).unlink()
    elif moment == "configuration not in its place":
        (index / "ragkv.toml.new").write_text("model = ")
    with RagKV.create(index, model=str(model_folder)) as rag:
        assert len(rag.ingest(documents).added) == 2
    assert not (index / "ragkv.toml.new").exists()
    (documents / "store").mkdir()
    with pytest.raises(ConfigError, match="not empty"):
        RagKV.create(documents, model=str(model_folder))


def test_a_folder_with_a_store_of_something_else_is_refused(tmp_path, model_folder):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "shop.js").write_text("x")
    with pytest.raises(ConfigError, match="not empty"):
        RagKV.create(tmp_path, model=str(model_folder))
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["shop.js"]


@pytest.mark.parametrize("engine", ["block", "full", "single"])
def test_generate_of_transformers_continues_from_what_an_index_holds(kept, engine):
    question = "Who founded Halden Works?"
    inputs = kept.generate_inputs(question, engine=engine, top_k=2)
    assert ("past_key_values" in inputs) == (engine == "block")
    with kept.model.plain() as model:
        ids = model.generate(**inputs, max_new_tokens=5, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert ids.tolist() == [
        token.token_id for token in kept.query(question, engine=engine, top_k=2, max_new_tokens=5).trace
    ]


def test_generate_takes_no_engine_of_several_runs_of_keys(kept):
    with pytest.raises(UsageError, match="is not one run of keys for generate; use block, full or single"):
        kept.generate_inputs("Who founded Halden Works?", engine="pced")
