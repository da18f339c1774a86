"""A running answer: seeds, settings, cancellation, and which attributes can be read when."""

import asyncio
import json
import threading

import pytest
from heldmodel import HeldModel
from indexed import indexed

from ragkv import Decoding, RagKV
from ragkv.config import CONFIG_FILE, IndexConfig
from ragkv.errors import ConfigError, RetrievalError, UsageError
from ragkv.types import Answer

FACTS = {
    "halden.md": "Halden Works was founded by Mira Oskel in 1907.",
    "bolt.txt": "Bolt Ltd makes valves. Bolt Ltd was founded by Ann Lee in Varn.",
    "kesk.txt": "Kesk Mills was founded by Tova Lind. Kesk Mills makes flour.",
}
QUESTION = "Who founded Halden Works?"


@pytest.fixture(scope="module")
def rag(tmp_path_factory, model_folder):
    settings = {"chunk_tokens": 128}
    with indexed(tmp_path_factory.mktemp("answer"), FACTS, model=model_folder, **settings) as made:
        made.model.eos_ids = frozenset()  # random weights: prevent an early end of an answer
        yield made


@pytest.mark.parametrize("engine", ["full", "pced", "block"])
def test_a_seed_repeats_an_answer_and_is_told(rag, engine):
    hot = {"temperature": 1.5, "top_p": 0.95}
    first = rag.query(QUESTION, engine=engine, max_new_tokens=12, decoding=hot)
    again = rag.query(QUESTION, engine=engine, max_new_tokens=12, decoding=hot | {"seed": first.decoding["seed"]})
    other = rag.query(QUESTION, engine=engine, max_new_tokens=12, decoding=Decoding(**hot))
    assert again.text == first.text
    assert again.decoding == first.decoding
    assert (other.text, other.decoding["seed"]) != (first.text, first.decoding["seed"])
    assert first.to_json()["decoding"] == {
        "max_new_tokens": 12,
        "temperature": 1.5,
        "top_p": 0.95,
        "top_k_tokens": None,
        "min_p": None,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": first.decoding["seed"],
        "stop": (),
        "stop_ids": (),
        **dict.fromkeys(("schema", "regex", "grammar")),
        "thinking": "off",
    }


def test_sources_show_the_sentence_of_the_question_and_then_of_the_answer(rag, monkeypatch):
    question = "What does Bolt Ltd make?"
    [source, *_] = rag.sources(question, rag.retrieve(question, top_k=1))
    assert (source.snippet, source.highlights) == (FACTS["bolt.txt"], ((0, 22),))
    stream = rag.stream("Who is Ann Lee?", top_k=1, max_new_tokens=2)
    next(iter(stream))
    [source] = stream.sources
    assert source.highlights == ((23, 63),)
    stream.close()
    monkeypatch.setattr(type(rag._finder), "word_weights", lambda finder, words: dict.fromkeys(words, 0.0))
    [source] = rag.sources(question, rag.retrieve(question, top_k=1))
    assert source.highlights == ()
    answer = rag.query(question, top_k=2, max_new_tokens=2)
    assert Answer.from_json(json.loads(json.dumps(answer.to_json()))).sources == answer.sources


def test_the_index_settles_what_the_request_leaves_open(rag, tmp_path, model_folder):
    config = IndexConfig(decoding=Decoding(temperature=0.5, stop=("\n",), seed=7))
    text = config.to_toml()
    assert '[decoding]\ntemperature = 0.5\nseed = 7\nstop = [\n    "\\n",\n]\n' in text
    assert IndexConfig.from_toml(text) == config
    assert "[decoding]" not in IndexConfig().to_toml()
    output = tmp_path / "index"
    settings = Decoding(temperature=0.5, seed=7)
    with RagKV.create(output, model=str(model_folder), chunk_tokens=128, decoding=settings) as own:
        (tmp_path / "a.txt").write_text("Halden Works was founded by Mira Oskel in 1907.")
        own.ingest(tmp_path / "a.txt")
        kept = own.query(QUESTION, max_new_tokens=2).decoding
        assert (kept["temperature"], kept["seed"], kept["top_p"]) == (0.5, 7, None)
        changed = own.query(QUESTION, max_new_tokens=2, decoding={"top_p": 0.5}).decoding
        assert (changed["temperature"], changed["seed"], changed["top_p"]) == (0.5, 7, 0.5)
        replaced = own.query(QUESTION, max_new_tokens=2, decoding=Decoding()).decoding
        assert (replaced["temperature"], replaced["seed"]) == (0.0, None)
    text = (output / CONFIG_FILE).read_text()
    (output / CONFIG_FILE).write_text(text.replace("temperature = 0.5", "temperature = -2.0"))
    with pytest.raises(ConfigError, match=r"temperature must be 0 .greedy. or from"):
        RagKV.open(output)
    with pytest.raises(ConfigError, match="unknown key 'heat'"):
        rag.query(QUESTION, decoding={"heat": 1})


def test_a_stop_string_cuts_the_answer(rag):
    whole = rag.query(QUESTION, engine="full", max_new_tokens=40).text
    stop = whole[9:12]
    stream = rag.stream(QUESTION, engine="full", max_new_tokens=40, decoding={"stop": [stop]})
    assert "".join(stream).strip() == stream.answer.text == whole[: whole.index(stop)].strip()
    assert stream.answer.finish_reason == "stop"


def test_cancelled_before_it_began_or_left_early(rag, monkeypatch):
    stream = rag.stream(QUESTION, max_new_tokens=60)
    stream.cancel()
    monkeypatch.setattr(rag, "retrieve", None)  # no further retrieval
    assert (stream.answer.text, stream.answer.sources, stream.answer.finish_reason) == ("", (), "cancelled")
    assert list(stream) == []
    assert stream.answer.finish_reason == "cancelled"
    monkeypatch.undo()
    with rag.stream(QUESTION, engine="pced", max_new_tokens=60) as stream:
        pieces = [piece for piece, _ in zip(stream, range(3), strict=False)]
        with pytest.raises(ValueError, match="not finished"):
            _ = stream.answer
    answer = stream.answer
    assert answer.finish_reason == "cancelled"
    assert answer.text.startswith("".join(pieces).strip())
    assert sum(s.tokens_won for s in answer.sources) >= len(pieces)
    assert list(stream) == []
    closed = rag.stream(QUESTION, max_new_tokens=60)
    text = next(iter(closed))
    iter(closed).close()  # the generator itself
    assert closed.answer.text == text.strip()
    assert closed.answer.finish_reason == "cancelled"


def test_the_papers_baselines_answer(rag):
    single = rag.query(QUESTION, engine="single", max_new_tokens=6)
    assert [s.document for s in single.sources] == ["halden.md"]
    assert single.engine == "single"
    assert single.text == rag.query(QUESTION, engine="full", top_k=1, max_new_tokens=6).text


def test_processors_and_criteria_of_transformers(rag):
    from transformers import MaxLengthCriteria, SuppressTokensLogitsProcessor

    letters = list(rag.model.tokens.encode("abcdefghijklmnopqrstuvwxyz"))
    answer = rag.query(
        QUESTION,
        max_new_tokens=20,
        logits_processors=[SuppressTokensLogitsProcessor([i for i in range(320) if i not in letters], device="cpu")],
        stopping_criteria=[MaxLengthCriteria(5)],
    )
    assert len(answer.text) == 5
    assert answer.text.isalpha()
    assert answer.finish_reason == "stop"


# ---- background


def test_pieces_come_while_the_loop_goes_on(rag, monkeypatch):
    """The third token waits for the event loop, so a blocked loop would hang."""
    wanted = list(rag.stream(QUESTION, engine="full", max_new_tokens=6))
    honest, steps, go_on = rag.model.step, [], threading.Event()

    def held(*args, **kwargs):
        steps.append(threading.current_thread())
        if len(steps) == 3:
            assert go_on.wait(600)
        return honest(*args, **kwargs)

    monkeypatch.setattr(rag.model, "step", held)

    async def run():
        stream = rag.astream(QUESTION, engine="full", max_new_tokens=6)
        with pytest.raises(ValueError, match="not begun"):
            _ = stream.answer
        asyncio.get_running_loop().call_later(0.01, go_on.set)
        return [piece async for piece in stream], stream.answer

    pieces, answer = asyncio.run(run())
    assert pieces == wanted
    assert (answer.text, answer.finish_reason) == ("".join(wanted).strip(), "length")
    assert threading.current_thread() not in steps


def test_a_cancelled_task_ends_its_answer_before_it_ends_itself(rag, monkeypatch):
    model = HeldModel(rag, monkeypatch, last=4)

    async def run():
        task = asyncio.create_task(rag.aquery(QUESTION, engine="full", max_new_tokens=400))
        assert await asyncio.to_thread(model.begun.wait, 600)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return [thread.name for thread in threading.enumerate()]

    assert "ragkv-answer" not in asyncio.run(run())  # the thread that could compute another token
    assert model.steps == 4


def test_leaving_early(rag, monkeypatch):
    HeldModel(rag, monkeypatch, last=40)

    async def run():
        async with rag.astream(QUESTION, engine="ape", max_new_tokens=400) as stream:
            return await anext(aiter(stream)), stream

    piece, stream = asyncio.run(run())
    assert stream.answer.finish_reason == "cancelled"
    assert stream.answer.text.startswith(piece.strip())

    async def never():
        stream = rag.astream(QUESTION)
        stream.cancel()
        return [piece async for piece in stream], stream.answer.finish_reason

    assert asyncio.run(never()) == ([], "cancelled")


def test_chunks_of_ones_own(rag):
    scored = rag.retrieve(QUESTION)
    assert rag.query(QUESTION, chunks=scored, max_new_tokens=8).text == rag.query(QUESTION, max_new_tokens=8).text
    other = rag.retrieve("Who founded Kesk Mills?", top_k=1)
    answer = rag.query(QUESTION, chunks=other, engine="block", max_new_tokens=2)
    assert [s.chunk_id for s in answer.sources] == [other[0].chunk.chunk_id]
    again = rag.chunk(FACTS["halden.md"], chunk_id="mine")
    assert again.token_ids == next(c.token_ids for c in rag.store.chunks() if c.text == FACTS["halden.md"])
    with pytest.raises(RetrievalError, match="No chunk"):
        rag.query(QUESTION, chunks=[])


def test_the_prefix_is_part_of_the_stored_kvs_identity_and_the_suffix_is_not(tmp_path, model_folder):
    """A changed [prompt] never reads KV that was encoded after another prefix; text after the documents may change."""

    def ask(**more):
        with RagKV.open(tmp_path / "index", device="cpu") as rag:
            asked = [rag.query(QUESTION, engine=engine, max_new_tokens=6, **more) for engine in ("ape", "block")]
            full = rag.query(QUESTION, engine="full", max_new_tokens=6, **more).text
            return [(each.kv.hits, each.kv.misses) for each in asked], [each.text for each in asked], full

    def change(old, new):
        config = tmp_path / "index" / CONFIG_FILE
        config.write_text(config.read_text().replace(old, new))

    document = tmp_path / "halden.md"
    document.write_text("Halden Works was founded by Mira Oskel in 1907.")
    settings = {"model": str(model_folder), "device": "cpu", "chunk_tokens": 128, "engines": ("ape", "block")}
    words = {"system": "Be brief.", "question": "Q: {question}"}
    with RagKV.create(tmp_path / "index", prompt=words, **settings) as rag:
        rag.ingest(document)
        assert rag.index.prompt.prefix.count("Be brief.") == 1
    stored = [(1, 0), (1, 0)]
    first = ask()
    assert first[0] == stored
    instructed = ask(system="Answer in French.")
    assert instructed[0] == stored
    change("Q: {question}", "Tell me: {question} Now!")
    suffix = ask()
    assert suffix[0] == stored
    with RagKV.open(tmp_path / "index", device="cpu") as rag:
        assert rag.ingest(document).unchanged
    change("Be brief.", "Be long.")
    prefix = ask()
    # encoded again; ape and block share an encoding, so block reads what ape stored
    assert prefix[0] == [(0, 1), (1, 0)]
    assert len({found[2] for found in (first, instructed, suffix, prefix)}) == 4
    with RagKV.create(tmp_path / "new", prompt={**words, "system": "Be long."}, **settings) as rag:
        rag.ingest(document)
        change_free = [rag.query(QUESTION, engine=each, max_new_tokens=6).text for each in ("ape", "block")]
    change("Tell me: {question} Now!", "Q: {question}")
    assert ask()[1] == change_free  # the answers of an index that never had the other prompt
    with RagKV.open(tmp_path / "index", device="cpu") as rag:
        report = rag.ingest(document)
        assert (len(report.updated), report.kv_encoded) == (1, 0)  # a question has encoded it by now


def test_a_new_index_takes_its_tables_as_dicts(model_folder, tmp_path):
    settings = {"prompt": {"system": "Be brief."}, "decoding": {"temperature": 0.5, "stop": ["\n"]}}
    settings |= {"encoding": {"context": 8}, "steps": {"count": 2}, "runtime": {"max_sequences": 4}}
    with RagKV.create(tmp_path / "index", model=str(model_folder), device="cpu", **settings) as rag:
        config = rag.config
    assert config.prompt.system == "Be brief."
    assert config.decoding == Decoding(temperature=0.5, stop=("\n",))
    assert (config.encoding.context, config.steps.count, config.runtime.max_sequences) == (8, 2, 4)
    with pytest.raises(ConfigError, match="encoding: unknown key 'contexts'; known are context"):
        RagKV.create(tmp_path / "other", model=str(model_folder), device="cpu", encoding={"contexts": 8})


def test_an_option_that_questions_do_not_have_is_refused(rag):
    for ask in (rag.query, rag.stream, lambda question, **options: list(rag.query_each([question], **options))):
        with pytest.raises(UsageError, match=r"A question has no option 'max_tokens'; there are .*max_new_tokens"):
            ask(QUESTION, max_tokens=5)


def test_instructions_of_a_question_stand_before_it(rag):
    with pytest.raises(UsageError, match="The system is not valid Unicode"):
        rag.query(QUESTION, system="\ud800")
    told = rag.query(QUESTION, system=" Be brief. ", engine="full", max_new_tokens=6)
    same = rag.query(f"Be brief.\n\n{QUESTION}", search_for=QUESTION, engine="full", max_new_tokens=6)
    assert (told.question, told.text, told.sources) == (QUESTION, same.text, same.sources)
