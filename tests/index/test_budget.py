"""The budget is what the index or the environment says, or a share of the memory there is."""

from __future__ import annotations

import pytest
import torch

from ragkv.config import IndexConfig, byte_count
from ragkv.errors import ConfigError
from ragkv.index import budget
from ragkv.index.budget import VARIABLE, memory_budget

CPU = torch.device("cpu")


def test_bytes_in_words():
    sizes = [byte_count("x", v) for v in (0, 4096, "4096", "512MiB", "1.5 GiB", "2GB", "1KiB", "1TiB")]
    assert sizes == [0, 4096, 4096, 512 << 20, 3 << 29, 2 * 10**9, 1024, 1 << 40]
    for bad in ("", "many", "-1", "1 XB", "1e9", "GiB", True, -4, "0x10", "1.5", "1.5B", "2.GB"):
        with pytest.raises(ConfigError, match="x must be a number of bytes"):
            byte_count("x", bad)
    for bad in ("9" * 400, "9" * 5000 + "GiB", "8388608TiB", str(1 << 63)):
        with pytest.raises(ConfigError, match="x is a number of bytes beyond 64 bits"):
            byte_count("x", bad)
    assert byte_count("x", str((1 << 63) - 1)) == byte_count("x", (1 << 63) - 1) == (1 << 63) - 1


def test_the_index_says_it_and_the_environment_overrides(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert memory_budget("1GiB", CPU) == 1 << 30
    assert memory_budget(0, CPU) == 0
    monkeypatch.setenv(VARIABLE, "3MiB")
    assert memory_budget("1GiB", CPU) == 3 << 20
    monkeypatch.setenv(VARIABLE, "lots")
    with pytest.raises(ConfigError, match=f"{VARIABLE} must be"):
        memory_budget("1GiB", CPU)


def test_auto_is_a_quarter_of_what_the_container_has_up_to_a_cap(monkeypatch, tmp_path):
    monkeypatch.delenv(VARIABLE, raising=False)
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(budget, "_CGROUPS", (str(limit), str(tmp_path / "none")))
    limit.write_text("40000000\n")
    assert memory_budget("auto", CPU) == 10_000_000
    limit.write_text("max\n")
    assert 0 < memory_budget("auto", CPU) <= 8 << 30


def test_a_config_with_a_budget_that_is_none_is_refused():
    assert IndexConfig.from_toml('memory_budget = "2GiB"').memory_budget == "2GiB"
    assert IndexConfig.from_toml("memory_budget = 0").memory_budget == 0
    for text, says in (('memory_budget = "much"', "number of bytes"), ("memory_budget = true", "wrong type")):
        with pytest.raises(ConfigError, match=says):
            IndexConfig.from_toml(text)
