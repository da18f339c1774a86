"""Engines that a model cannot run exactly are refused with the reason and the name of one that works."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ragkv.engines import able_engines, make_engine, refusal, require_able
from ragkv.engines.ability import able_or, require_reach
from ragkv.errors import PromptTooLongError, UnsupportedModelError
from ragkv.types import Need

FIXED = {Need.MOVE: "its positions are fixed"}
APART = FIXED | {Need.MERGE: "it has a state", Need.STACK: "it has a state"}


def facts(lacks, within=None):
    return SimpleNamespace(lacks=lacks, moves_within=within, checkpoint=SimpleNamespace(name="m"))


def test_a_model_that_lacks_nothing_runs_every_engine():
    assert {"ape", "block", "full", "ippd-stacked", "pced"} <= set(able_engines(facts({})))


def test_chunks_that_cannot_be_moved_leave_every_engine_that_reads_them_in_place():
    able = able_engines(facts(FIXED))
    assert "block" not in able
    assert {"ape", "full", "mapreduce", "pced", "single"} <= set(able)
    kept = make_engine("block", {"block": {"preset": "no-positions"}})
    assert refusal(kept, facts(FIXED)) is None


def test_a_state_leaves_the_engines_whose_rows_are_sequences_of_their_own():
    able = able_engines(facts(APART))
    assert not {"ape", "block", "ippd-stacked"} & set(able)
    assert {"full", "mapreduce", "pced", "single"} <= set(able)


@pytest.mark.parametrize(("lacks", "instead"), [(FIXED, "ape"), (APART, "pced")])
def test_the_refusal_names_an_engine_that_works(lacks, instead):
    with pytest.raises(UnsupportedModelError, match=f"'block' cannot run on model 'm': .*; use engine '{instead}'"):
        require_able(make_engine("block", {}), facts(lacks))
    assert able_or(["block"], facts(lacks)) == instead


def test_chunks_are_moved_only_as_far_as_the_model_bears():
    block = make_engine("block", {})
    require_reach(block, facts({}, within=64), 64)
    require_reach(make_engine("ape", {}), facts({}, within=64), 65)
    with pytest.raises(PromptTooLongError, match="up to 64 positions, not 65; lower --top-k, or use engine 'ape'"):
        require_reach(block, facts({}, within=64), 65)
