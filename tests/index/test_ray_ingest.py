"""An ingest by workers stores the same as a local ingest."""

import pickle

import pytest

from ragkv import RagKV
from ragkv.errors import MissingExtraError, UsageError
from ragkv.index.ingestion import DocumentMaker, ray_maker

TEXTS = {
    "halden.txt": "Halden Works was founded by Mira Oskel in 1907.",
    "bolt.txt": "Bolt Ltd makes valves. Bolt Ltd was founded by Ann Lee in Varn, far from any sea.",
}


@pytest.fixture
def files(tmp_path):
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "broken.pdf").write_bytes(b"broken")
    return [*(tmp_path / name for name in TEXTS), tmp_path / "broken.pdf"]


@pytest.fixture
def make(tmp_path, model_folder):
    def made(name, **settings):
        tiers = [{"url": f"file://{tmp_path}/objects", "timeout": 60.0}]
        settings = {"engines": ("block",), "tiers": tiers, "embedder": "mini", "chunk_tokens": 128, **settings}
        return RagKV.create(tmp_path / name, model=str(model_folder), device="cpu", **settings)

    return made


@pytest.fixture
def workers():
    made = []
    yield lambda rag, **more: made.append(Workers(rag, **more)) or made[-1]
    for each in made:
        each.maker.close()


class Workers:
    """A `Make` in this process that behaves like Ray: pickled sources, another order, some of them twice."""

    def __init__(self, rag, lost=False):
        self.maker, self.lost, self.made = DocumentMaker(rag.config.to_toml(), "cpu"), lost, 0

    def __call__(self, sources):
        for source in [*sources[::-1], *sources[:1]]:
            if self.lost and self.made:
                raise ConnectionError("the cluster is gone")
            self.made += 1
            [made] = self.maker({"source": [pickle.dumps(source)]})["made"]
            yield pickle.loads(made)


def contents(rag):
    documents = [one.document.document_id for one in rag.select()]
    texts = {name: (rag.store.text(name), list(rag.store.chunks(name))) for name in documents}
    vectors = {name: vector.tobytes() for name, vector in rag.store.vectors("dense")}
    return texts, vectors.keys(), set(rag.store.identities())


@pytest.mark.parametrize("kv", ["all", "on-demand"])
def test_workers_store_what_a_local_ingest_stores(make, files, workers, kv):
    with make("ray", kv=kv) as ray, make("local", kv=kv, tiers=[]) as local:
        cluster = workers(ray)
        report, expected = ray.ingest(files, make=cluster), local.ingest(files)
        assert contents(ray) == contents(local)
        assert sorted(report.added) == sorted(expected.added)
        assert [(skip.path, skip.reason) for skip in report.skipped] == [(s.path, s.reason) for s in expected.skipped]
        assert report.kv_encoded == 2
        assert ray.query("Who founded Bolt Ltd?", engine="block").kv.misses == 0  # in the index or in the tier
        again = ray.ingest(files, make=cluster)
        assert (len(again.unchanged), again.added, again.kv_encoded) == (2, [], 0)


def test_a_lost_cluster_loses_nothing_that_was_made(make, files, workers):
    with make("ray") as ray:
        cluster = workers(ray, lost=True)
        with pytest.raises(ConnectionError):
            ray.ingest(files[:2], make=cluster)
        cluster.lost = False
        report = ray.ingest(files[:2], make=cluster)
        assert len(report.added) + len(report.unchanged) == 2
        assert report.kv_encoded == 1  # the other document's KV is in the tier
        assert ray.maintenance.verify().ok


def test_what_is_missing_is_named(make, monkeypatch):
    with make("index", tiers=[]) as rag, pytest.raises(UsageError, match="tiers"), ray_maker(rag.config, "local"):
        raise AssertionError("it has no tiers")
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with make("other") as rag, pytest.raises(MissingExtraError, match="Ray"), ray_maker(rag.config, "local"):
        raise AssertionError("there is no Ray")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from Ray Data 2.60
def test_on_ray_itself(make, files):
    pytest.importorskip("ray", reason="needs Ray: pip install -e '.[ray]'")
    with make("ray") as rag, ray_maker(rag.config, "local", device="cpu") as made:
        assert len(rag.ingest(files, make=made).added) == 2
