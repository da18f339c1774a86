"""`python -m ragkv.benchmarks.mini`, as typed."""

from __future__ import annotations

import pytest
from outcome import typed

from ragkv.benchmarks.mini.__main__ import main


@pytest.fixture
def train(capsys, monkeypatch):
    return typed(main, capsys, monkeypatch)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "holds no config.json that can be read"),
        ("{", "holds no config.json that can be read"),
        ("[]", "is no mini model"),
        ('{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}', "is no mini model"),
    ],
)
def test_mini_goes_on_from_a_mini_model_only(train, tmp_path, content, said):
    start = tmp_path / "start"
    start.mkdir()
    if content is not None:
        (start / "config.json").write_text(content)
    done = train("--start", start, "--output", tmp_path / "made")
    assert done.code == 2
    assert said in done.sentence
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "ragkv: Missing option '--output'; see python -m ragkv.benchmarks.mini --help."),
        (["--output", "made", "--processes", 2, "--device", "cuda"], "leave it out with another --device"),
    ],
)
def test_wrong_usage_is_one_sentence(train, arguments, said):
    done = train(*arguments)
    assert (done.code, done.out) == (2, "")
    assert said in done.sentence
