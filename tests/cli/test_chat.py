"""`ragkv chat` at a terminal and in a pipe, with the bundled model."""

import io
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from indexed import indexed
from outcome import Result, Terminal
from script import written

from ragkv.runtime import Runtime

COMPANIES = {
    "Halden Works": ("Mira Oskel", "Varnby"),
    "Corvo Mills": ("Periis Zelosman", "Tellmere"),
    "Bolt Pumps": ("Ann Lerner", "Osford"),
    "Dorn Glass": ("Karek Zarman", "Fenwick"),
}


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = {
        f"{name.split()[0].lower()}.txt": f"{name} was founded by {founder}. {name} is based in {town}."
        for name, (founder, town) in COMPANIES.items()
    }
    settings = {"embedder": "none", "reranker": "none", "engines": ("block", "ape")}
    with indexed(tmp_path_factory.mktemp("chat"), texts, **settings) as rag:
        return rag.folder


@pytest.fixture
def chat(ragkv, index: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    def run(*lines: str, options: tuple[object, ...] = (), terminal: bool = False) -> Result:
        monkeypatch.setattr(sys, "stdin", (Terminal if terminal else io.StringIO)("".join(f"{x}\n" for x in lines)))
        result: Result = ragkv("chat", "--index", index, "--max-new-tokens", 24, *options)
        return result

    return run


@pytest.mark.parametrize("engine", ["block", "ape", "full"])
def test_a_follow_up_finds_what_an_earlier_turn_named(chat, engine):
    asked = ("Who founded Corvo Mills?", "And where is it based?", "Who is the founder?")
    ran = chat(*asked, options=("--engine", engine, "--top-k", 1, "--json"))
    assert ran.code == 0, ran.err
    answers = [json.loads(line) for line in ran.out.splitlines()]
    assert [answer["question"] for answer in answers] == list(asked)
    for answer in answers:
        assert [source["document"] for source in answer["sources"]] == ["corvo.txt"]
        assert answer["engine"] == engine
        assert answer["kv"]["misses"] == 0  # the history comes after the documents
    assert "Periis Zelosman" in answers[0]["answer"]


def test_a_follow_up_is_written_anew_and_searched_for_in_steps(chat, ragkv, index, monkeypatch):
    asked, query = ("Who founded Corvo Mills?", "And where is it?"), "Where is Bolt Pumps based?"
    written(monkeypatch, ["full"], {"Write the last question": [query] * 2})
    options = ("--rewrite", "--engine", "block", "--top-k", 1)
    answers = [json.loads(line) for line in chat(*asked, options=(*options, "--json")).out.splitlines()]
    assert [answer["queries"] for answer in answers] == [[], [query]]
    assert [answer["sources"][0]["document"] for answer in answers] == ["corvo.txt", "bolt.txt"]
    ran = chat(*asked, options=options)
    assert (ran.code, ran.err.count("searched for: ")) == (0, 1)
    assert f"searched for: {query}\n" in ran.err
    for more in (("--steps", 9), ("--steps", 2, "--context", index / "ragkv.toml")):
        refused = ragkv("query", "Who?", "--index", index, *more)
        assert (refused.code, len(refused.err.splitlines())) == (2, 1), refused.err


def test_without_the_past_the_follow_up_names_nothing(chat):
    options = ("--top-k", 1, "--json")
    asked = ("Who founded Corvo Mills?", "/clear", "And where is it based?")
    first, second = [json.loads(line) for line in chat(*asked, options=options).out.splitlines()]
    assert first["sources"][0]["document"] == "corvo.txt"
    with_the_past = json.loads(chat(asked[0], asked[2], options=options).out.splitlines()[1])
    assert second["sources"][0]["score"] < with_the_past["sources"][0]["score"]


def test_a_pipe_gets_answers_and_nothing_else(chat):
    commands = ("/engine ape", "/clear")
    ran = chat("Who founded Halden Works?", "", *commands, "Who founded Corvo Mills?", "/quit", "Never asked?")
    assert ran.code == 0, ran.err
    first, second = ran.out.splitlines()
    assert ("Mira Oskel" in first, "Periis Zelosman" in second) == (True, True)
    assert "> " not in ran.out
    assert "[1] halden.txt (score" in ran.err
    assert "ape on" in ran.err
    assert "Never" not in ran.out + ran.err
    assert chat("Who founded Halden Works?", options=("--quiet",)).err == ""


def test_what_fails_is_said_and_the_conversation_goes_on(chat):
    ran = chat("/engine warp", "zyzzyva", "/sources", "/conjure", "Who founded Halden Works?", options=("--json",))
    assert ran.code == 2  # the last error's
    lines = [json.loads(line) for line in ran.out.splitlines()]
    assert ["error" in line for line in lines] == [True, True, True, True, False]
    for message in ("Unknown engine 'warp'", "No chunk of the index matches", "no answer yet", "/help lists them"):
        assert message in ran.err
    assert "Mira Oskel" in lines[-1]["answer"]
    assert "Traceback" not in ran.err


def test_commands_at_a_terminal(chat, index):
    ran = chat("/help", "Who founded Bolt Pumps?", "/sources", "/engine", "/engine full", terminal=True)
    assert ran.code == 0, ran.err
    assert f"block on {index}. Type a question" in ran.err
    assert "> " in ran.err
    assert "> " not in ran.out
    assert "/clear" in ran.err
    assert "Bolt Pumps is based in Osford." in ran.err
    assert "full answers from now on" in ran.err
    assert "single" in ran.err
    mistaken = chat("/engine warp", terminal=True)
    assert (mistaken.code, "Unknown engine 'warp'" in mistaken.err) == (0, True)  # a user at a terminal can correct it


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_ends_the_answer_and_not_the_program(chat, monkeypatch, presses):
    real, waits = Runtime.wait, []

    def interrupted(*arguments: Any) -> None:
        real(*arguments)
        waits.append(arguments)
        if len(waits) == 3:  # the first answer has two tokens
            for _ in range(presses):
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Runtime, "wait", interrupted)
    before = signal.getsignal(signal.SIGINT)
    ran = chat("Who founded Dorn Glass?", "Who founded Halden Works?", terminal=True)  # the first is forgotten
    assert ran.code == 0, ran.err
    assert "cancelled; the conversation continues" in ran.err
    first, second = ran.out.splitlines()
    assert "Karek Zarman" not in first
    assert "Mira Oskel" in second
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_ends_a_pipe(chat, monkeypatch):
    def interrupted(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Runtime, "wait", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background tests inherit SIG_IGN
    try:
        assert chat("Who founded Dorn Glass?", "Who founded Halden Works?").code == 130
    finally:
        signal.signal(signal.SIGINT, before)
