"""Indexes that share KV through a tier: KV encoded by one is loaded by another, with the same answers."""

import json
import shutil

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from typer.testing import CliRunner

from ragkv import RagKV
from ragkv.cli.main import app
from ragkv.server.metrics import IndexMetrics

TEXTS = {
    "halden.txt": "Halden Works was founded by Mira Oskel in 1907.",
    "bolt.txt": "Bolt Ltd makes valves. Bolt Ltd was founded by Ann Lee in Varn, far from any sea.",
}
QUESTION = "Who founded Halden Works?"


@pytest.fixture
def make(tmp_path, model_folder):
    """Creates indexes over a tier in a folder."""
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text)

    def made(name, **settings):
        settings = {
            "engines": ("block",),
            "tiers": [{"url": f"file://{tmp_path}/objects", "timeout": 60.0}],
            **settings,
        }
        return RagKV.create(tmp_path / name, model=str(model_folder), device="cpu", chunk_tokens=128, **settings)

    return made


def objects(tmp_path):
    return sorted(path for path in (tmp_path / "objects").rglob("*") if path.is_file())


def test_what_one_index_has_encoded_another_one_loads(make, tmp_path):
    files = [tmp_path / name for name in TEXTS]
    with make("first") as first, make("second", kv="on-demand") as second, make("third") as third:
        report = first.ingest(files)
        first.maintenance.settle()
        assert (report.kv_encoded, len(objects(tmp_path))) == (2, 2)
        second.ingest(files)
        assert second.store.stats().kv_records == 0
        answers = [rag.query(QUESTION, engine="block") for rag in (first, second)]
        assert answers[0].text == answers[1].text
        assert (answers[1].kv.hits, answers[1].kv.misses) == (2, 0)
        second.maintenance.settle()
        assert second.store.stats().kv_records == 3  # including the prompt's prefix
        report = third.ingest(files)
        assert (report.kv_encoded, report.kv_reused) == (0, 2)
        registry = CollectorRegistry()
        registry.register(IndexMetrics({"third": third}.items()))
        assert b'ragkv:tier_hits_total{model_name="third"' in generate_latest(registry)


def test_an_on_demand_index_writes_what_a_question_encodes(make, tmp_path):
    with make("one", kv="on-demand") as item:
        item.ingest([tmp_path / name for name in TEXTS])
        assert objects(tmp_path) == []
        item.query(QUESTION, engine="block")
        item.maintenance.settle()
        assert len(objects(tmp_path)) == 2
        shutil.rmtree(tmp_path / "objects")
        report = item.maintenance.warm(
            item.maintenance.wanted(documents=["*"])
        )  # stored KV is written to the tier again
        item.maintenance.settle()
        assert (report.present, len(objects(tmp_path))) == (2, 2)


@pytest.mark.parametrize("how", ["deleted", "changed", "evicted", "unreachable"])
def test_unbounded_disk_lmcache_4664_1454_900_4817(make, tmp_path, how):
    """A deleted document's KV leaves the tier, also if it was evicted before, or if the tier was unavailable."""
    with make("index") as rag:
        rag.ingest([tmp_path / name for name in TEXTS])
        rag.query(QUESTION, engine="block")
        rag.maintenance.settle()
        [halden] = [one.document.document_id for one in rag.select(["*halden*"])]
        if how == "evicted":
            rag.store.set_budget(0)
        if how == "changed":
            (tmp_path / "halden.txt").write_text("Halden Works is closed.")
            rag.ingest(tmp_path / "halden.txt")
            rag.maintenance.settle()
            assert len(objects(tmp_path)) == 3
        elif how == "unreachable":
            delete, rag.index.tiers.delete = rag.index.tiers.delete, lambda keys: False
            rag.delete(halden)
            assert rag.maintenance.gc().tiers == 0
            rag.index.tiers.delete = delete
        else:
            rag.delete(halden)
        before = rag.maintenance.gc(dry_run=True).tiers
        assert rag.maintenance.gc().tiers == before == (how != "deleted")
        assert len(objects(tmp_path)) == (2 if how == "changed" else 1)
        assert rag.maintenance.verify().ok


def test_the_commands_know_tiers(make, tmp_path):
    with make("index") as rag:
        rag.ingest([tmp_path / name for name in TEXTS])
    run = CliRunner().invoke
    index = ["--index", str(tmp_path / "index")]
    shown = json.loads(run(app, ["stats", *index, "--json"]).stdout)["tiers"]
    assert shown == [{"url": f"file://{tmp_path}/objects"}]
    verified = run(app, ["verify", "--tiers", *index, "--json"])
    assert (verified.exit_code, json.loads(verified.stdout)["tiers"][0]["present"]) == (0, 2)
    objects(tmp_path)[0].write_bytes(b"garbage")
    verified = run(app, ["verify", "--tiers", *index])
    assert verified.exit_code == 1
    assert "damaged: ragkv/2/shared/" in verified.stdout
