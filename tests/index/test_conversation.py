"""What a follow-up searches by, and how much of the past the prompt carries."""

from __future__ import annotations

from ragkv.config import PromptConfig
from ragkv.index.conversation import Conversation


def words(text: str) -> int:
    return len(text.split())


def talk(**more: int) -> Conversation:
    conversation = Conversation(PromptConfig(), words, **more)
    conversation.add("Who founded Halden?", "Mira Oskel.")
    conversation.add("When?", "In 1907.")
    conversation.add("Who leads it?", "Ann Lee.")
    return conversation


def test_the_first_question_stands_alone():
    conversation = Conversation(PromptConfig(), words)
    assert conversation.search_text("Who?") == "Who?"
    assert conversation.prompt_text("Who?") == "Who?"


def test_a_follow_up_is_searched_for_with_the_last_questions_and_no_answer():
    assert talk().search_text("Where?") == "When? Who leads it? Where?"
    assert talk(searched_turns=0).search_text("Where?") == "Where?"
    assert talk(searched_turns=9).search_text("Where?") == "Who founded Halden? When? Who leads it? Where?"


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


def test_what_is_cleared_is_forgotten():
    conversation = talk()
    conversation.clear()
    assert conversation.search_text("Where?") == conversation.prompt_text("Where?") == "Where?"
