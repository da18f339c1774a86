"""The greedy search: it takes the paper's path, and writes only its result."""

import random
from dataclasses import asdict, replace

import pytest

from ragkv import RagKV
from ragkv.config import CONFIG_FILE, load_config
from ragkv.doctor.questions import GoldenQuestion
from ragkv.doctor.tune import STEPS, APESetting, Tuner, split, write_setting
from ragkv.errors import RetrievalError, StoreError, UsageError

ASKED = [
    GoldenQuestion(text="Who founded Halden Works?", answers=("Mira",)),
    GoldenQuestion(text="Who is Ann?", answers=("x",)),
]


@pytest.fixture
def landscape(rag, monkeypatch):
    """A tuner with answers from a table: `judge(question number, setting)`."""

    def make(judge, count: int):
        tuner = Tuner(rag, max_new_tokens=2)
        questions = [GoldenQuestion(text=f"Halden {i}", answers=("y",)) for i in range(count)]
        calls = []

        def right(question, setting):
            calls.append((question, setting))
            return judge(questions.index(question), setting)

        monkeypatch.setattr(tuner, "_right", right)
        return tuner, questions, calls

    return make


def by_hand(judge, count, now):
    """The same search without pruning: every candidate answers every question."""

    def best(settings):
        def cost(s):
            return -sum(judge(i, s) for i in range(count)), abs(1 - s.temperature), abs(1 - s.scale)

        return min(settings, key=cost)

    second = best([APESetting(temperature=t, scale=1.0) for t in STEPS])
    third = best([replace(second, scale=s) for s in STEPS])
    return best([now, third])


def test_giving_up_never_changes_what_is_found(landscape):
    seed = 0

    def judge(number, setting):
        """A random landscape by seed: some settings are good, some hopeless."""
        if setting is None:
            return True
        level = random.Random(f"{seed} {setting}").choice([0.0, 0.3, 0.8, 0.9])
        return random.Random(f"{seed} {setting} {number}").random() < level

    tuner, questions, calls = landscape(judge, 8)
    winners = set()
    for seed in range(40):  # noqa: B007 - `judge` reads it
        calls.clear()
        search = tuner.search(questions)
        winners.add(search.winner)
        assert search.winner == by_hand(judge, 8, tuner.now)
        assert len(calls) == 8 + sum(trial.asked for trial in search.trials) < 8 + 8 * len(search.trials)
        for trial in search.trials:
            assert trial.right == sum(judge(i, trial.setting) for i in range(trial.asked))
            assert trial.given_up == (trial.asked < 8)
    assert len(winners) > 10


def test_the_path_is_temperature_then_scale(landscape):
    wanted = APESetting(temperature=0.6, scale=0.8)

    def judge(number, setting):
        if setting is None:
            return True
        hits = [getattr(setting, name) == value for name, value in asdict(wanted).items()]
        return sum(hits) > number

    tuner, questions, _ = landscape(judge, 2)
    tuner.now = APESetting(temperature=0.9, scale=0.9)
    search = tuner.search(questions, held_out=questions[:1])
    assert search.winner == wanted
    stages = [trial.stage for trial in search.trials]
    assert stages == ["now"] + ["temperature"] * 10 + ["scale"] * 9
    assert all(t.setting.temperature == 0.6 for t in search.trials[11:])
    assert (search.full, search.asked, search.held_out.winner, search.held_out.now) == (2, 2, 1, 0)
    assert [row["winner"] for row in search.to_json()["trials"]].count(True) == 1


def test_an_index_that_says_nothing_is_searched_from_the_default(landscape):
    tuner, questions, calls = landscape(lambda number, setting: True, 1)
    assert tuner.now == APESetting(temperature=1.0, scale=1.0)
    assert len(tuner.search(questions).trials) == 1 + 9 + 9  # the first setting is the index's
    assert len(calls) == len(set(calls))


def test_ties_change_as_little_as_can_be(landscape):
    tuner, questions, _ = landscape(lambda number, setting: True, 2)
    tuner.now = APESetting(temperature=0.9, scale=0.9)
    assert tuner.search(questions).winner == APESetting(temperature=1.0, scale=1.0)


def test_the_index_s_own_setting_wins_where_the_path_misses_it(landscape):
    tuner, questions, _ = landscape(lambda number, setting: setting is not None and setting.scale == 0.9 != 1, 2)
    tuner.now = APESetting(temperature=0.3, scale=0.9)

    def judge(question, setting):
        return setting == tuner.now

    tuner._right = judge
    assert tuner.search(questions).winner == tuner.now


def test_answers_are_those_of_the_engine_at_each_setting(rag):
    """One setting at a time, compared with an index that is configured with it."""
    question = ASKED[0].text
    tuner = Tuner(rag, max_new_tokens=6)
    for setting in (
        APESetting(temperature=0.3, scale=0.7),
        APESetting(temperature=1.0, scale=1.0),
        None,
    ):
        if setting is not None:
            write_setting(rag.folder, setting)
        with RagKV.open(rag.folder, device="cpu") as other:
            other.index._model = rag.model
            engine = "full" if setting is None else "ape"
            text = other.query(question, engine=engine, max_new_tokens=6).text
        assert text
        right, wrong = (
            GoldenQuestion(text=question, answers=(text,)),
            GoldenQuestion(text=question, answers=(text + "!",)),
        )
        tuner._answerable([right, wrong])
        assert tuner._right(right, setting) is True
        assert tuner._right(wrong, setting) is False


def test_a_setting_is_written_and_all_else_stays(rag):
    folder = rag.folder
    text = (folder / CONFIG_FILE).read_text() + '\n[tuning.pced]\ngamma = 1.5\n\n[tuning.ape]\nscale_mode = "log"\n'
    (folder / CONFIG_FILE).write_text(text)
    before = load_config(folder)
    write_setting(folder, APESetting(temperature=0.7, scale=0.6))
    after = load_config(folder)
    assert after.tuning == {
        **before.tuning,
        "pced": {"gamma": 1.5},
        "ape": {"scale_mode": "log", "temperature": 0.7, "scale": 0.6},
    }
    assert replace(after, tuning=before.tuning) == before
    assert sorted(p.name for p in folder.iterdir() if p.is_file()) == [CONFIG_FILE]


def test_a_config_that_cannot_be_written_is_one_sentence(rag, monkeypatch):
    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ragkv.util.files.os.fsync", fail)
    with pytest.raises(StoreError, match=r"ragkv\.toml cannot be written"):
        write_setting(rag.folder, APESetting(temperature=1.0, scale=1.0))


def test_what_cannot_be_searched_on_is_refused(rag):
    tuner = Tuner(rag, max_new_tokens=2)
    with pytest.raises(UsageError, match="needs gold answers"):
        tuner.search([GoldenQuestion(text="Halden?")])
    with pytest.raises(RetrievalError, match="No question finds a chunk"):
        tuner.search([GoldenQuestion(text="zyzzyva", answers=("x",))])
    with pytest.raises(UsageError, match="at least two"):
        split(ASKED[:1], 0)


def test_halves_are_drawn_by_their_seed():
    questions = [GoldenQuestion(text=str(i)) for i in range(31)]
    search, back = split(questions, 1)
    assert (len(search), len(back)) == (16, 15)
    assert {*search, *back} == {*questions}
    assert split(questions, 1) == (search, back)
    assert split(questions, 2) != (search, back)
