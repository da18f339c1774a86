"""Real vLLM servers on a processor (`make vllm`, a few minutes); `make test` and CI leave these tests out."""

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllmserver import index_of, require_vllm, vllm_server, write_model

from ragkv import RagKV


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.nightly)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """The folder of a model, by its family."""
    require_vllm()
    written = {}

    def folder(family):
        if family not in written:
            written[family] = write_model(tmp_path_factory.mktemp(family) / "model", family)
        return written[family]

    return folder


@pytest.fixture(scope="session")
def serving(models, tmp_path_factory):
    """`serving(family, *options, **settings)`: a context of an index, a server of its own that reads it
    (`vllm`), `rag` that answers there, and `own` that answers here.
    """

    @contextmanager
    def serve(family, *options, **settings):
        folder, model = tmp_path_factory.mktemp("vllm"), models(family)
        index = index_of(folder / "index", model, **settings)
        with (
            vllm_server(folder, model, index, *options) as vllm,
            RagKV.open(index, device="cpu", runtime=("vllm", vllm.url)) as rag,
            RagKV.open(index, device="cpu") as own,
        ):
            yield SimpleNamespace(vllm=vllm, rag=rag, own=own, model=model, index=index)

    return serve
