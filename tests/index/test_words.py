"""What people type finds what files hold, however either writes its words and names."""

import json
import unicodedata

import pytest
from indexed import indexed

from ragkv import RagKV
from ragkv.server.schemas import document_page

# name: (text, questions)
WORDS = {
    "soft hyphens": (
        "Donau\u00addampf\u00adschiff\u00adfahrt",
        ["Donaudampfschifffahrt", "donau\u00addampfschifffahrt"],
    ),
    "joiners": ("او می\u200cخواهد", ["میخواهد", "می\u200cخواهد"]),
    "zero width joiner": ("क्\u200dष", ["क्ष"]),
    "word joiner": ("Zweit\u2060wohnsitz", ["zweitwohnsitz"]),
    "byte order mark": ("\ufeffanfangswort und Ende\ufeffstelle", ["Anfangswort", "endestelle"]),
    "direction": ("שלום\u200fעולם", ["שלוםעולם"]),
    "variation selector": ("葛\U000e0100城", ["葛城"]),
    "dotted capital": ("İSTANBUL", ["istanbul", "İstanbul", "i\u0307stanbul"]),
    "dotless small": ("ısparta", ["ISPARTA", "Isparta", "ısparta"]),
    "decomposed": (unicodedata.normalize("NFD", "Größenordnung Måløy"), ["größenordnung", "MÅLØY"]),
    "composed": ("Ångström việt", [unicodedata.normalize("NFD", "ångström"), unicodedata.normalize("NFD", "VIỆT")]),
    "full width": ("Ｆｕｌｌｗｉｄｔｈ ﾊﾝｶｸ", ["fullwidth", "ハンカク"]),
    "subscript": ("H₂SO₄", ["h2so4"]),
    "ligature and sharp s": ("eﬃcient Straße", ["efficient", "STRASSE"]),
}
NAMES = {"report[1].txt": "first", "report1.txt": "second", "what?.txt": "third", "whatX.txt": "fourth"}
GAS = "<main><p>CO<sub>2</sub> emissions fell. The <b>E</b>uropean plan names <mark>keyword</mark>s.</p></main>"
NFC, NFD = (unicodedata.normalize(form, "Größe.txt") for form in ("NFC", "NFD"))


@pytest.fixture(scope="module")
def rag(tmp_path_factory):
    texts = {f"{name}.txt": text for name, (text, _) in WORDS.items()} | NAMES | {NFD: "fifth", "gas.html": GAS}
    with indexed(tmp_path_factory.mktemp("words"), texts, embedder="none", reranker="none", kv="on-demand") as made:
        yield made


@pytest.mark.parametrize(("name", "question"), [(name, asked) for name, (_, all_) in WORDS.items() for asked in all_])
def test_a_word_is_found_however_it_is_written(rag, name, question):
    assert [hit.source for hit in rag.retrieve(question, retrieval="bm25")] == [f"{name}.txt"]


@pytest.mark.parametrize("question", ["CO2", "CO₂", "european", "keywords"])
def test_markup_inside_a_word_does_not_cut_it(rag, question):
    assert [hit.source for hit in rag.retrieve(question, retrieval="bm25")] == ["gas.html"]


@pytest.mark.parametrize(
    ("name", "sources"),
    [
        ("report[1].txt", ["report[1].txt"]),
        ("report[123].txt", ["report1.txt"]),
        ("report*.txt", ["report1.txt", "report[1].txt"]),
        ("what?.txt", ["what?.txt"]),
        ("wha*?.txt", ["what?.txt", "whatX.txt"]),
        (NFC, [NFD]),
        (NFD, [NFD]),
        (NFC.replace("ß", "?"), [NFD]),
    ],
)
def test_a_name_is_itself_before_it_is_a_pattern(rag, name, sources):
    assert sorted(d.document.source for d in rag.select(where=[f"source={name}"])) == sources
    everything = "first second third fourth fifth"
    found = rag.retrieve(everything, retrieval="bm25", where=[f"source={name}"])
    assert sorted(hit.source for hit in found) == sources
    assert sorted(d.document.source for d in rag.select([name])) == sources


@pytest.mark.parametrize(("name", "source"), [(NFC.upper(), NFD), ("gro?ße", None), ("rt[1]", "report[1].txt")])
def test_the_page_lists_a_name_however_it_is_written(rag, name, source):
    listed = document_page(rag, name, [], after="", limit=9)["documents"]
    assert [document["source"] for document in listed] == ([] if source is None else [source])


def test_an_index_of_older_words_is_built_again(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("ragkv.retrievers.segments._FORMAT", 2)
        patch.setattr("ragkv.retrievers.bm25.tokenise", str.split)
        with indexed(tmp_path, {"a.txt": "Donau\u00adufer"}, embedder="none", reranker="none", kv="on-demand") as old:
            assert not old.retrieve("donauufer")
    with RagKV.open(tmp_path / "index", device="cpu") as rag:
        assert rag.maintenance.verify().derived["bm25"].startswith("will be rebuilt")
        assert rag.retrieve("donauufer")
        manifest = json.loads((rag.index.derived / "bm25" / "manifest.json").read_text())
    assert manifest["format"] == 4
