"""What a terminal shows of names that other people chose."""

import pytest

from ragkv import RagKV


@pytest.fixture(scope="module")
def rag(tmp_path_factory, model_folder):
    documents = tmp_path_factory.mktemp("documents")
    (documents / "halden.md").write_text("# Halden Works\n\nHalden Works was founded by Mira Oskel in 1907.\n")
    (documents / "bolt\x1b[31m.txt").write_text("Bolt Ltd makes valves. Bolt Ltd was founded by Ann Lee in Varn.")
    folder = tmp_path_factory.mktemp("indexes") / "two"
    with RagKV.create(folder, model=str(model_folder), device="cpu", chunk_tokens=128) as made:
        made.documents = documents
        yield made


def test_a_bar_is_shown_on_request_and_its_names_are_inert(rag, capsys):
    result = []
    rag.ingest(rag.documents, on_progress=lambda progress: result.append(progress.done_bytes), show_progress=True)
    shown = capsys.readouterr()
    assert "ingest: 100%" in shown.err
    assert "\x1b[31m" not in shown.err
    assert shown.out == ""
    assert result
    rag.ingest(rag.documents)
    assert capsys.readouterr() == ("", "")
