"""The benchmark of codecs measures what it claims: every row has a baseline; raw is its own."""

from pathlib import Path

import pytest

from ragkv.benchmarks.evaluation import codec as bench
from ragkv.benchmarks.evaluation.codec import measure_codec
from ragkv.errors import UsageError


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WORLD_SIZE", 8), ("SIZED_CHUNKS", 4), ("TOP_K", 1), ("ANSWER_TOKENS", 3)):
        monkeypatch.setattr(bench, name, value)


@pytest.mark.slow
def test_every_codec_has_its_rows(small: None, model_folder: Path) -> None:
    message: list[str] = []
    report = measure_codec(
        questions=2, model=str(model_folder), engines="block,pced", device="cpu", on_step=message.append
    ).to_json()
    rows = {row["name"]: row for row in report["rows"]}
    assert report["bench"] == "codec"
    for codec in ("raw", "zstd", "half", "q8", "int8", "int4"):
        assert rows[f"{codec}: size"]["baseline"] == "bf16"
        assert {rows[f"{codec}: {way}"]["baseline"] for way in ("encode", "decode")} == {"memcpy"}
    assert rows["raw: size"]["ratio"] == 0.5  # the random model is float32
    assert rows["half: size"]["ratio"] > 1 / 1.02
    assert rows["q8: size"]["ratio"] > 1 / 0.57  # heads of 16 numbers
    assert rows["int8: size"]["ratio"] > 1 / 0.53
    assert rows["int4: size"]["ratio"] > 1 / 0.30
    for engine in ("block", "pced"):
        half, *eight, int4 = (rows[f"{codec}, {engine}: mean KL"]["value"] for codec in ("half", "q8", "int8", "int4"))
        assert 0 <= half < min(eight) <= max(eight) < int4
        assert int4 <= rows[f"int4, {engine}: max KL"]["value"]
        assert rows[f"int8, {engine}: same answers"]["baseline_value"] == 99
    assert message[-1].startswith("pced: 2 of 2 questions")


def test_an_engine_without_stored_kv_is_refused(model_folder: Path) -> None:
    with pytest.raises(UsageError, match="reads no stored KV"):
        measure_codec(questions=1, model=str(model_folder), engines="full", device="cpu")
