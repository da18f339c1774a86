"""What a terminal shows of names that other people chose."""

from functools import partial

import tqdm.auto
from indexed import PAIR, write_texts

from ragkv import RagKV


def test_a_bar_is_shown_on_request_and_its_names_are_inert(tmp_path, model_folder, capsys, monkeypatch):
    monkeypatch.setattr("tqdm.auto.tqdm", partial(tqdm.auto.tqdm, mininterval=0, miniters=0))  # show every step
    documents, result = write_texts(tmp_path / "documents", {f"\x1b[31m{name}": PAIR[name] for name in PAIR}), []
    with RagKV.create(tmp_path / "index", model=str(model_folder), device="cpu", chunk_tokens=128) as rag:
        rag.ingest(documents, on_progress=lambda progress: result.append(progress.done_bytes), show_progress=True)
        shown = capsys.readouterr()
        assert "ingest: 100%" in shown.err
        assert "[31mhalden.md" in shown.err
        assert "\x1b[31m" not in shown.err
        assert shown.out == ""
        assert result
        rag.ingest(documents)
    assert capsys.readouterr() == ("", "")
