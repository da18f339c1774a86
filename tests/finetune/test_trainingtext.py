"""Text to train on that is there on every machine."""

from __future__ import annotations

from ragkv.finetune.trainingtext import english_texts


def test_english_texts_stop_at_the_limit() -> None:
    texts = list(english_texts(5_000))
    assert 5_000 < sum(map(len, texts)) < 50_000
