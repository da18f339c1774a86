"""Lists of variables are programs: what a line stands for follows from the lines before it and the heading alone."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from ragkv.worlds.variable import HEADINGS, NAMES, VALUES, VariableList, family_of, variable_list


def run(drawn: VariableList) -> list[str]:
    """What each line stands for, by running the list from its text."""
    heading, *lines = drawn.texts()
    steps = int(heading.split()[1].removeprefix("plus"))
    now: dict[str, str] = {}
    found = []
    for line in lines:
        name, content, _ = line.split()
        if content in NAMES:
            at = VALUES.index(now[content])
            now[name] = VALUES[at // 8 * 8 + (at + steps) % 8]
        else:
            now[name] = content
        found.append(now[name])
    return found


@pytest.mark.parametrize("seed", range(12))
def test_lines_stand_for_what_the_program_gives_them(seed):
    drawn = variable_list(random.Random(seed), 300)
    assert [line.value for line in drawn.lines] == run(drawn)
    assert len(drawn.lines) <= 300
    assert drawn == variable_list(random.Random(seed), 300)
    assert drawn != variable_list(random.Random(seed + 100), 300)


@pytest.mark.parametrize("seed", range(12))
def test_only_variables_with_one_value_are_asked_for(seed):
    drawn = variable_list(random.Random(seed), 300)
    times = Counter(line.name for line in drawn.lines)
    assert max(times.values()) == 2
    assert {line.name for line in drawn.known} == {name for name, count in times.items() if count == 1}
    assert set(drawn.known) <= set(drawn.lines)


def test_who_follows_references_at_the_end_finds_another_value():
    """Most references are to a variable that has another value by then."""
    stale = total = 0
    for seed in range(12):
        drawn = variable_list(random.Random(seed), 300)
        last = {line.name: line.value for line in drawn.lines}
        first = {line.name: line.value for line in reversed(drawn.lines)}
        references = [line for line in drawn.known if line.refers]
        total += len(references)
        stale += sum(last[line.content] != first[line.content] for line in references)
        assert all(family_of(line.name) == family_of(line.content) for line in references)
    assert stale > total / 2


def test_headings_and_references_can_be_left_out():
    plain = [variable_list(random.Random(seed), 60, headings=1) for seed in range(20)]
    assert {drawn.heading for drawn in plain} == {HEADINGS[0]}
    assert {variable_list(random.Random(seed), 60).heading for seed in range(40)} == set(HEADINGS)
    assert not any(line.refers for line in variable_list(random.Random(0), 200, refer=0).lines)
