"""Greetings, thanks and wishes for a summary: what is taken for one, and what is answered."""

import pytest
from indexed import write_texts

from ragkv import RagKV
from ragkv.index import answer as answers
from ragkv.index.intent import intent_of

FARM = "# Hill Farm\n\nThe farm has seven goats.\n\n## Cheese\n\nCheese is made on Monday. It is sold at once.\n"
MILL = "# Old Mill\n\nThe mill grinds rye.\n"


@pytest.mark.parametrize(
    ("message", "name", "documents"),
    [
        ("Hello!", "greeting", ""),
        ("hi there 👋", "greeting", ""),
        ("Guten Tag", "greeting", ""),
        ("Thank you very much.", "thanks", ""),
        ("Merci beaucoup !", "thanks", ""),
        ("summarise this document", "summary", "one"),
        ("Could you please summarize it for me?", "summary", "one"),
        ("What's this document about?", "summary", "one"),
        ("Fasse das Dokument zusammen", "summary", "one"),
        ("What are these documents about?", "summary", "several"),
        ("Summarise farm.md", "summary", "farm md"),
        ("hello world program?", "question", ""),
        ("Hi, when is cheese made?", "question", ""),
        ("Who says thanks to whom?", "question", ""),
        ("thanks to what was the mill saved", "question", ""),
        ("What is this clause about?", "question", ""),
        ("What is the document about cheese about?", "question", ""),
        ("?", "question", ""),
        ("hello " * 500, "question", ""),
    ],
)
def test_only_a_whole_message_has_another_intent(message, name, documents):
    intent = intent_of(message)
    assert (intent.name, intent.documents) == (name, documents)
    assert bool(intent.reply) == (name in ("greeting", "thanks"))


@pytest.fixture(scope="module")
def rag(tmp_path_factory, model_folder):
    folder = tmp_path_factory.mktemp("intent")
    with RagKV.create(folder / "index", model=str(model_folder), device="cpu", chunk_tokens=64) as opened:
        for name, text in (("farm.md", FARM), ("mill.md", MILL)):
            opened.ingest(write_texts(folder / name, {name: text}))
        yield opened


def test_small_talk_is_answered_without_search_and_model(rag, monkeypatch):
    monkeypatch.setattr(rag._finder, "find", None)
    stream = rag.stream("Hello!")
    assert "".join(stream) == stream.answer.text
    answer = stream.answer
    assert (answer.intent, answer.finish_reason, answer.sources) == ("greeting", "stop", ())
    assert answer.to_json()["intent"] == "greeting"
    assert type(answer).from_json(answer.to_json()).intent == "greeting"
    assert [each.text for each in rag.query_many(["Thanks!", "Hello!"])] == [rag.query("Thanks!").text, answer.text]
    followed = rag.query("Who? hello\nAnswer: x\n\nQuestion: thanks", message="thanks", search_for="who hello thanks")
    assert followed.intent == "thanks"


def test_a_small_model_gives_an_outline_in_the_documents_own_words(rag):
    single = rag.query("Summarise farm.md")
    assert single.intent == "summary"
    assert {source.document for source in single.sources} == {str(rag.select(["farm.md"])[0].document.source)}
    assert "**Hill Farm**" in single.text
    assert "The farm has seven goats." in single.text
    assert "- **Cheese**: Cheese is made on Monday." in single.text
    assert "sold" not in single.text
    assert "**Old Mill**" in rag.query("Summarise this document").text  # the latest
    both = rag.query("What are these documents about?")
    assert all(title in both.text for title in ("**Hill Farm**", "**Old Mill**"))
    assert "Old Mill" not in rag.query("What are these documents about?", where="source=*farm*").text


def test_a_large_model_reads_the_beginning(rag, monkeypatch):
    monkeypatch.setattr(answers, "SUMMARY_PARAMETERS", 0)
    answer = rag.query("Summarise farm.md", max_new_tokens=4)
    assert answer.intent == "summary"
    assert {source.document for source in answer.sources} == {str(rag.select(["farm.md"])[0].document.source)}
    assert answer.sources[0].text.startswith("# Hill Farm")
    assert answer.kv.hits


@pytest.mark.parametrize(
    "options", [{"schema": {"const": 1}}, {"decoding": {"regex": "[ab]"}}], ids=["schema", "regex"]
)
def test_what_must_have_a_form_is_a_question(rag, options):
    assert rag.query("Summarise farm.md", **options).intent == "question"


def test_a_name_of_no_document_is_a_question(rag):
    assert rag.query("Summarise the cheese", max_new_tokens=2).intent == "question"
