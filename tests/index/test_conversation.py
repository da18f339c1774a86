"""What a follow-up question searches for, and how much of the conversation its prompt contains."""

from types import SimpleNamespace
from typing import Any

import pytest
from indexed import indexed

from ragkv import RagKV
from ragkv.config import PromptConfig
from ragkv.errors import ConfigError
from ragkv.index.conversation import Conversation, measured_history, usual_history
from ragkv.index.create import change_settings
from ragkv.question import Question
from ragkv.server import streaming as server_words


def words(text: str) -> int:
    return len(text.split())


def talk(**more: Any) -> Conversation:
    conversation = Conversation(PromptConfig(), words, **more)
    conversation.add("Who founded Halden?", "Mira Oskel.")
    conversation.add("When?", "In 1907.")
    conversation.add("Who leads it?", "Ann Lee.")
    return conversation


def test_a_conversation_is_searched_for_and_prompted_as_its_settings_say():
    after = ("Where?", "Ann Lee. Where?")
    assert talk().search_texts("Where?") == ("When? Who leads it? Where?", *after)
    assert talk(searched_turns=0).search_texts("Where?") == ("Where?",)
    assert talk(searched_turns=9).search_texts("Where?") == ("Who founded Halden? When? Who leads it? Where?", *after)
    assert talk(history="prompt").prompt_text("Where?").startswith("Who founded Halden?")
    searched = talk(history="search")
    assert searched.prompt_text("Where?") == "Where?"
    assert searched.ask("Where?", top_k=2) == Question(
        question="Where?", search_for=talk().search_texts("Where?"), message="Where?", top_k=2
    )
    unused = talk(history="none")
    assert (unused.prompt_text("Where?"), unused.search_texts("Where?")) == ("Where?", ("Where?",))


def test_the_prompt_reads_like_questions_and_answers_in_its_own_words():
    config = PromptConfig(question="Q: {question}!")
    conversation = Conversation(config, words)
    conversation.add("Who founded Halden?", "Mira Oskel.")
    lead, trail = "Q: ", "!"
    assert (
        lead + conversation.prompt_text("When?") + trail == "Q: Who founded Halden?!\nAnswer: Mira Oskel.\n\nQ: When?!"
    )


def test_the_oldest_turns_are_left_out_whole_when_the_budget_is_spent():
    # a turn costs its words, "Answer:" and "Question:"
    costs = [3 + 2 + 2, 1 + 2 + 2, 3 + 2 + 2]
    whole = talk(history_tokens=sum(costs)).prompt_text("Where?")
    assert whole.startswith("Who founded Halden?\nAnswer: Mira Oskel.\n\nQuestion: When?")
    assert whole.endswith("Ann Lee.\n\nQuestion: Where?")
    assert talk(history_tokens=sum(costs) - 1).prompt_text("Where?").startswith("When?\nAnswer: In 1907.")
    assert talk(history_tokens=costs[2] - 1).prompt_text("Where?") == "Where?"
    assert talk(history_tokens=0).prompt_text("Where?") == "Where?"


def model(*, chat_template: bool = True, **recommended: object) -> Any:
    tokens = SimpleNamespace(has_chat_template=chat_template)
    return SimpleNamespace(checkpoint=SimpleNamespace(recommended=recommended), tokens=tokens)


def test_a_model_that_was_not_measured():
    assert usual_history(model()) == "prompt"
    assert usual_history(model(chat_template=False)) == "search"
    assert usual_history(model(history="search")) == "search"
    assert usual_history(model(chat_template=False, history="prompt")) == "prompt"
    assert usual_history(model(history="auto")) == usual_history(model(history=["search"])) == "prompt"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    texts = {"one.md": "Halden Works was founded by Mira Oskel. Halden Works is based in Varnby."}
    settings = {"embedder": "none", "reranker": "none", "engines": ("block",)}
    with indexed(tmp_path_factory.mktemp("talk"), texts, **settings) as rag:
        return rag.folder


def worded(*given: Any) -> tuple[str, str]:
    """The server's first search query, and the content of its prompt."""
    found = server_words.in_conversation(*given)
    return found.search[0], found.prompt


TURNS = [("Who founded Halden Works?", "Mira Oskel.")]
ASKED = "Where is it?"
BOTH = "Who founded Halden Works? Where is it?"
VERDICTS = {"prompt": "good", "search": "poor"}


def report(rag: RagKV, history: str | None, fingerprint: str | None = None, by: str = "accuracy") -> dict[str, object]:
    return {
        "fingerprint": fingerprint or rag.index.fingerprint,
        "conversation": {"history": history, "verdict": VERDICTS.get(history), "by": by},
    }


def test_mini_gets_earlier_turns_in_the_search_alone_until_something_else_is_measured_or_said(folder):
    with RagKV.open(folder, device="cpu") as rag:
        assert worded(rag, ASKED, TURNS) == (BOTH, ASKED)
        assert worded(rag, ASKED, TURNS, ["Be brief."]) == (BOTH, f"Be brief.\n\n{ASKED}")
        assert worded(rag, ASKED, []) == (ASKED, ASKED)
        former = report(rag, "prompt", by="agreement")
        for rest in (
            *([report(rag, "search")], [report(rag, "prompt", "another")], [report(rag, None)], [former]),
            *("damage", [3]),
        ):
            rag.store.put_meta("quality", rest)
            assert worded(rag, ASKED, TURNS) == (BOTH, ASKED)
        rag.store.put_meta("quality", [{"fingerprint": rag.index.fingerprint, "conversation": {"verdict": ["good"]}}])
        assert measured_history(rag.store, rag.index.fingerprint) is None
        rag.store.put_meta("quality", [report(rag, "search", "another"), report(rag, "prompt")])
        search, prompt = worded(rag, ASKED, TURNS)
        assert (search, prompt) == (BOTH, "Who founded Halden Works?\nAnswer: Mira Oskel.\n\nQuestion: Where is it?")
        with pytest.raises(ConfigError, match="history must be one of auto, prompt, search, none, not 'off'"):
            rag.conversation(history="off")
        talk = rag.conversation(history="none")
        talk.add(*TURNS[0])
        assert (talk.search_texts(ASKED), talk.prompt_text(ASKED)) == ((ASKED,), ASKED)
        rag.store.put_meta("quality", None)


def test_the_setting_of_the_index_goes_before_what_is_known_of_the_model(folder):
    for message, expected in (("none", (ASKED, ASKED)), ("prompt", BOTH), ("auto", (BOTH, ASKED))):
        change_settings(folder, {"history": message})
        with RagKV.open(folder, device="cpu") as rag:
            found = worded(rag, ASKED, TURNS)
            assert found == expected if message != "prompt" else found[1].startswith("Who founded Halden Works?\n")
    with pytest.raises(ConfigError, match="history must be one of auto, prompt, search, none"):
        RagKV.create(folder.parent / "other", history="all")
