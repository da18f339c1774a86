"""Questions in several steps: the queries that a model writes, when the steps end, and the context of the answer."""

import asyncio
from itertools import chain, zip_longest

import pytest
from indexed import indexed
from script import written

from ragkv.benchmarks.evaluation.answers import Candidate, IndexSource, baseline_of, run_candidates
from ragkv.benchmarks.evaluation.metrics import Task
from ragkv.config import IndexConfig, StepsConfig
from ragkv.doctor.questions import GoldenQuestion
from ragkv.errors import ConfigError, UsageError
from ragkv.index.conversation import WrittenQueries, interleaved

QUESTION = "On which river does the birthplace of the leader of Halden Works lie?"
LEADER, TOWN = "Where was Mira Oskel born?", "Varnby"
ENGINES = ("full", "block", "ape", "pced")
STEPS = StepsConfig(prompt="Look for: {question}", query="{written}", enough="none")


@pytest.fixture(scope="module")
def rag(tmp_path_factory, model_folder):
    texts = {
        "halden.txt": "Halden Works is led by Mira Oskel.",
        "mira.txt": "Mira Oskel was born in Varnby.",
        **{f"river{at}.txt": f"On which river does the birthplace of river {at} lie?" for at in range(3)},
        "varnby.txt": "Varnby stands on the Quinse.",
    }
    settings = {"chunk_tokens": 128, "top_k": 3, "steps": STEPS}
    with indexed(tmp_path_factory.mktemp("steps"), texts, model=model_folder, **settings) as made:
        made.model.eos_ids = frozenset()  # random weights: prevent an early end of an answer
        yield made


def names(answer) -> list[str]:
    return [source.document.removesuffix(".txt") for source in answer.sources]


def told(answer) -> tuple:
    return answer.question, answer.text, answer.queries, names(answer), answer.finish_reason


def test_rankings_are_interleaved_and_each_gives_what_none_has_given():
    def slowly(rankings, most):
        results = []
        for each in chain(*zip_longest(*rankings)):
            if each is not None and each not in results:
                results.append(each)
        return results[:most]

    assert interleaved(["ab", "cd"], 9, str) == slowly(["ab", "cd"], 9) == list("acbd")
    assert interleaved(["abc", "de", "f"], 4, str) == slowly(["abc", "de", "f"], 4) == list("adfb")
    assert interleaved(["abc", "axy"], 2, str) == ["a", "x"]  # the second list's turn is not spent on a duplicate
    assert (interleaved([], 3, str), interleaved(["", "a"], 3, str), interleaved(["aa"], 3, str)) == ([], ["a"], ["a"])


@pytest.mark.parametrize("engine", ENGINES)
def test_the_model_writes_queries_and_all_that_was_found_is_read(rag, monkeypatch, engine):
    usual = rag.query(QUESTION, engine=engine, max_new_tokens=4)
    assert (usual.queries, "mira" in names(usual)) == ((), False)
    asked = written(monkeypatch, [engine], {"Look for": [f'"{LEADER}" \nand more', TOWN]})
    answer = rag.query(QUESTION, engine=engine, steps=3, max_new_tokens=4)
    assert asked == [(f"Look for: {QUESTION}", 3)] * 2
    assert answer.queries == (LEADER, TOWN)
    assert len(answer.sources) == 3  # top_k
    rankings = [rag.retrieve(query) for query in (QUESTION, *answer.queries)]
    best = interleaved(rankings, 3, lambda scored: scored.chunk.chunk_id)
    assert names(answer)[0] == names(usual)[0]
    assert [source.chunk_id for source in answer.sources] == [scored.chunk.chunk_id for scored in best]
    assert answer.text == rag.query(QUESTION, engine=engine, chunks=best, max_new_tokens=4).text
    assert answer.kv.misses == 0


@pytest.mark.parametrize(
    ("texts", "queries"),
    [
        ([""], 0),
        (["  \n \n"], 0),
        (["None."], 0),  # `enough`
        (["  \"'Halden?' ", ""], 1),
        (["Halden", "HALDEN!"], 1),  # asked before
        ([LEADER, TOWN, "Halden"], 3),  # the maximum
        (["river"], 1),  # finds nothing new
        (["Xyzzy"], 1),  # finds nothing
    ],
)
def test_when_there_is_nothing_more_to_search_for(rag, monkeypatch, texts, queries):
    asked = written(monkeypatch, ["full"], {"Look for": texts})
    answer = rag.query(QUESTION, engine="full", steps=4, max_new_tokens=2)
    assert (len(answer.queries), len(asked), answer.finish_reason) == (queries, len(texts), "length")
    assert queries > 1 or names(answer)[0] == names(rag.query(QUESTION, max_new_tokens=1))[0]


def test_the_next_search_is_for_the_question_with_what_was_written():
    queries = WrittenQueries(StepsConfig(), "Earlier turns. Who?", "Who {written}?", 3)
    assert (queries.prompt, queries.next(" A {question} b.\nc")) == (
        "Earlier turns. Who?",
        "Who {written}? A {question} b.",
    )
    assert queries.next("A {question} b!") is None
    assert WrittenQueries(STEPS, "Who?", "Who is it?", 3).next("who is it") is None


def test_conditions_hold_in_every_step_and_restrictions_for_the_answer_alone(rag, monkeypatch):
    written(monkeypatch, ["block"], {"Look for": [LEADER] * 2})
    answer = rag.query(QUESTION, engine="block", steps=2, where=["source=[hr]*"], max_new_tokens=2)
    assert (len(answer.queries), "mira" in names(answer)) == (1, False)
    hot = {"regex": "[0-9]{4}", "temperature": 2.0}
    answer = rag.query(QUESTION, engine="block", steps=2, decoding=hot, max_new_tokens=9)
    assert (answer.queries, "mira" in names(answer)) == ((LEADER,), True)
    assert (answer.text.isdigit(), len(answer.text)) == (True, 4)


def test_together_as_one_by_one(rag, monkeypatch):
    texts = {f"question {at}": entry for at, entry in enumerate([[LEADER, TOWN], [""], [TOWN, ""], [LEADER, LEADER]])}
    asked = [{"question": f"{QUESTION} question {at}", "engine": ENGINES[at], "steps": 3} for at in range(4)]
    asked.insert(1, QUESTION)

    def script():
        monkeypatch.undo()
        written(monkeypatch, ENGINES, {f"Look for: {QUESTION} {name}": list(entry) for name, entry in texts.items()})

    script()
    alone = [rag.query_many([entry], max_new_tokens=4)[0] for entry in asked]
    script()
    assert [told(entry) for entry in rag.query_many(asked, max_new_tokens=4)] == [told(entry) for entry in alone]
    assert [len(entry.queries) for entry in alone] == [2, 0, 0, 1, 1]
    script()
    one_by_one = [
        asyncio.run(rag.aquery(max_new_tokens=4, **({"question": entry} if isinstance(entry, str) else entry)))
        for entry in asked
    ]
    assert [told(entry) for entry in one_by_one] == [told(entry) for entry in alone]
    # no memory for a second question's KV: it waits, also between its steps
    script()
    monkeypatch.setattr(rag.index.runtime.pool, "budget", 1)
    assert [told(entry) for entry in rag.query_many(asked, max_new_tokens=4)] == [told(entry) for entry in alone]
    assert rag.index.runtime.idle


def test_cancelled_while_a_query_is_written_or_searched_for(rag, monkeypatch):
    written(monkeypatch, ["full"], {"Look for": [LEADER] * 3})
    stream = rag.stream(QUESTION, engine="full", steps=3, max_new_tokens=4)
    seen = []
    stream.when_found = lambda: (seen.append((list(stream.queries), stream.sources)), stream.cancel())
    assert list(stream) == []
    assert seen == [([LEADER], ())]
    assert (stream.answer.finish_reason, stream.answer.sources, stream.answer.text) == ("cancelled", (), "")
    stream = rag.stream(QUESTION, engine="full", steps=3, max_new_tokens=4)
    monkeypatch.setattr(stream, "_store", stream.cancel)  # called for each token
    assert (list(stream), stream.answer.finish_reason, stream.queries) == ([], "cancelled", [])
    assert rag.index.runtime.idle


def test_a_follow_up_is_written_anew_for_the_search_alone(rag, monkeypatch):
    talk = rag.conversation(history="search", rewrite=True)
    assert talk.rewrite_text("And where?") is None  # the first question
    talk.add("Who leads Halden Works?", "Mira Oskel.")
    prompt = talk.rewrite_text("And where was {history} she born?")
    assert prompt.startswith("Who leads Halden Works?\nAnswer: Mira Oskel.\n\nWrite the last question")
    assert prompt.endswith(" Last question: And where was {history} she born?")
    assert rag.conversation().rewrite_text("?") is None
    assert rag.conversation(history="none", rewrite=True).rewrite_text("?") is None
    question, asked = "And where?", written(monkeypatch, ["full"], {"Write the last question": [LEADER, "", "Xyzzy"]})
    answers = [rag.query(talk.ask(question, engine="block", max_new_tokens=2, top_k=1)) for _ in range(3)]
    assert [read for _, read in asked] == [0, 0, 0]
    assert [each.queries for each in answers] == [(LEADER,), (), ("Xyzzy",)]
    assert [names(each) for each in answers] == [["mira"], ["halden"], ["halden"]]
    assert answers[0].question == question
    unused = rag.query(talk.ask(question, chunks=rag.retrieve(LEADER), max_new_tokens=2, top_k=1))
    assert (unused.queries, names(unused)[0]) == ((), "mira")


def test_the_evaluation_searches_as_a_question_does(rag, monkeypatch):
    written(monkeypatch, ["full"], {"Look for": [LEADER, TOWN] * 2})
    expected = rag.query(QUESTION, engine="full", steps=3, max_new_tokens=4)
    source = IndexSource(rag)
    task = Task.of([GoldenQuestion(text=QUESTION, answers=("x",))], name="hops")
    candidates = [source.candidate("full", steps=3), source.candidate("full")]
    several, once = run_candidates([task], candidates, source=source, max_new_tokens=4)
    assert (several.text, several.chunks) == (expected.text, 3)
    assert once.text == rag.query(QUESTION, engine="full", max_new_tokens=4).text
    assert baseline_of(candidates[0], candidates, "full") is candidates[1]
    with pytest.raises(UsageError, match="--steps needs --retrieval and --top-k"):
        Candidate(engine="full", steps=2)


def test_what_cannot_be_is_one_sentence_and_the_file_keeps_the_rest(rag):
    for steps in (0, 9):
        with pytest.raises(UsageError, match=f"--steps must be from 1 to 8, not {steps}"):
            rag.query(QUESTION, steps=steps)
    wrong = {
        "count = 9": "[steps]: count must be from 1 to 8, not 9",
        'prompt = "x"': "prompt must be a text with {question}, not 'x'",
        'query = "{question}"': "query must be a text with {written}",
        'rewrite_prompt = "{question}"': "rewrite_prompt must be a text with {history} and {question}",
        "max_new_tokens = 0": "[steps]: max_new_tokens must be from 1 to 1024, not 0",
        'rewrite = "yes"': "rewrite must be true or false, not 'yes'",
        "more = 1": "unknown key 'more'",
    }
    for line, message in wrong.items():
        with pytest.raises(ConfigError) as refused:
            IndexConfig.from_toml(f"[steps]\n{line}\n")
        assert message in str(refused.value), line
    config = IndexConfig(steps=StepsConfig(count=2, rewrite=True))
    assert "[steps]\ncount = 2\nrewrite = true\n" in config.to_toml()
    assert IndexConfig.from_toml(config.to_toml()) == config
