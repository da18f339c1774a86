"""Lists of variables are programs: a line's value only depends on the lines before it."""

import random
from collections import Counter

import pytest

from ragkv.benchmarks.evaluation.worlds.text import (
    BEGIN,
    TERM,
    VariableLine,
    VariableList,
    asked,
    referred,
    variable_list,
)

SEEDS = range(12)


def run(drawn: VariableList) -> list[str]:
    """The value of each line, by evaluating the list from its text."""
    begin, *lines = drawn.texts()
    assert begin == " ".join(BEGIN)
    now: dict[str, str] = {}
    found = []
    for line in lines:
        name, content = line.split()
        assert content.isdigit() != content.startswith(referred(""))
        now[name] = content if content.isdigit() else now[content.removeprefix(referred(""))]
        found.append(now[name])
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_lines_stand_for_what_the_program_gives_them(seed):
    drawn = variable_list(random.Random(seed), 160)
    assert [line.value for line in drawn.lines] == run(drawn)
    assert len(drawn.lines) == 160
    assert drawn == variable_list(random.Random(seed), 160)
    assert drawn != variable_list(random.Random(seed + 100), 160)
    # questions ask only for variables with one value
    times = Counter(line.name for line in drawn.lines)
    assert max(times.values()) == 2
    once = {line.name for line in drawn.lines if times[line.name] == 1}
    assert {line.name for line in drawn.known} == once
    assert set(drawn.known) <= set(drawn.lines)
    # terms are at the start and change at the end
    head, rest = drawn.lines[:4], drawn.lines[4:]
    assert {line.family for line in head} == {TERM}
    again = [at for at, line in enumerate(rest, start=4) if line.family == TERM]
    assert sorted(line.name for line in head) == sorted(drawn.lines[at].name for at in again)
    uses = [at for at, line in enumerate(drawn.lines) if line.content.startswith(TERM)]
    assert min(again) >= 120
    assert max(uses) < max(again)


def test_who_follows_references_at_the_end_finds_another_value():
    stale = total = to_terms = 0
    for seed in SEEDS:
        drawn = variable_list(random.Random(seed), 160)
        last = {line.name: line.value for line in drawn.lines}
        references = [line for line in drawn.known if line.refers]
        total += len(references)
        stale += sum(last[line.content] != line.value for line in references)
        to_terms += sum(line.content.startswith(TERM) for line in references)
        assert all(line.content.startswith((line.family, TERM)) for line in references)
    assert stale > 0.8 * total
    assert 0.3 * total < to_terms < 0.7 * total


def test_lists_without_references_and_very_short_ones():
    assert not any(line.refers for line in variable_list(random.Random(0), 160, refer=0).lines)
    assert len(variable_list(random.Random(0), 2).lines) == 2
    assert variable_list(random.Random(0), 10_000).lines  # until all names are used
    assert (VariableLine("bell3", "term1", "104").family, asked("bell3")) == ("bell", "?bell3")
