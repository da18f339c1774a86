"""`ragkv config`, that its values are those the other commands use, the user file, and each value's origin."""

import fcntl
import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ragkv import RagKV
from ragkv.cli.options import FLAGS, USED, VARIABLES, UserFile, user_file
from ragkv.config import IndexConfig, StepsConfig, load_config
from ragkv.doctor.tune import APESetting, write_setting
from ragkv.errors import ConfigError


@pytest.fixture(autouse=True)
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a user file that does not exist yet."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "xdg" / "ragkv").mkdir(parents=True)
    return tmp_path / "xdg" / "ragkv" / "config.toml"


@pytest.fixture
def empty(tmp_path: Path, model_folder: Path) -> Path:
    """An empty index."""
    RagKV.create(tmp_path / "empty", model=str(model_folder), codec="zstd").close()
    return tmp_path / "empty"


def result(ragkv: Callable[..., Any], *arguments: object) -> dict[str, tuple[Any, str]]:
    ran = ragkv("config", "show", "--json", *arguments)
    assert ran.code == 0, ran.err
    return {one["name"]: (one["value"], one["origin"]) for one in json.loads(ran.out)["settings"]}


def test_path(ragkv, own_file):
    found = ragkv("config", "path")
    assert (found.code, found.out) == (0, f"{own_file}\n")
    assert "does not exist yet" in found.err
    own_file.write_text("modle = 1")  # must be found even then
    assert json.loads(ragkv("config", "path", "--json").out) == {"path": str(own_file), "exists": True}


def test_what_it_says_of_a_new_index_is_what_ingest_makes(ragkv, own_file, monkeypatch, tmp_path, model_folder):
    own_file.write_text('codec = "zstd"\nchunk_tokens = 64\nengines = ["block"]\n[prompt]\nsystem = "Be brief."\n')
    monkeypatch.setenv("RAGKV_CHUNK_TOKENS", "96")
    monkeypatch.setenv("RAGKV_ENGINES", "ape,block")
    monkeypatch.setenv("RAGKV_INDEX", str(tmp_path / "new"))
    found = result(ragkv, "--model", model_folder, "--engines", "ape")
    assert found["model"] == (str(model_folder), "flag")
    assert found["engines"] == (["ape"], "flag")
    assert found["chunk_tokens"] == (96, "environment")
    assert found["index"] == (str(tmp_path / "new"), "environment")
    assert found["codec"] == ("zstd", "file")
    assert found["prompt.system"] == ("Be brief.", "file")
    assert found["prompt.separator"][1] == found["dtype"][1] == "default"
    assert found["device"] == (None, "default")
    (tmp_path / "a.txt").write_text("Halden Works was founded by Mira Oskel.")
    made = ragkv("ingest", tmp_path / "a.txt", "--model", model_folder, "--engines", "ape", "--quiet")
    assert made.code == 0, made.err
    config = load_config(tmp_path / "new")
    for name in ("model", "dtype", "chunk_tokens", "codec", "default_engine", "embedder", "reranker", "retrieval"):
        assert found[name][0] == getattr(config, name)
    assert (config.engines, config.prompt.system) == (("ape",), "Be brief.")


def test_an_index_says_what_it_was_built_with(ragkv, own_file, monkeypatch, empty):
    own_file.write_text(f'index = "{empty}"\ndevice = "cpu"\ncodec = "int8"\n[decoding]\ntemperature = 0.5\n')
    monkeypatch.setenv("RAGKV_MODEL", "other/model")
    monkeypatch.setenv("RAGKV_TOP_K", "3")
    found = result(ragkv)
    assert found["index"] == (str(empty), "file")
    assert found["device"] == ("cpu", "file")
    assert found["codec"] == ("zstd", "index")
    assert found["model"][1] == found["prompt.system"][1] == "index"
    assert found["decoding.temperature"] == (None, "default")  # the file's value only applies to new indexes
    assert found["top_k"] == (3, "environment")
    assert result(ragkv, "--top-k", 4)["top_k"] == (4, "flag")
    shown = ragkv("config", "show")
    assert "RAGKV_MODEL=other/model contradicts the index" in shown.err
    assert len(shown.out.splitlines()) == 1 + len(found)  # no line is wrapped in a pipe
    changed = ragkv("config", "show", "--changed").out
    assert "candidates" in changed  # it is saved in ragkv.toml
    assert "decoding.temperature" in shown.out
    assert "decoding.temperature" not in changed


def test_the_words_around_the_documents_are_set_when_an_index_is_made(ragkv, tmp_path, model_folder, documents):
    words, index = tmp_path / "words.toml", ("--index", tmp_path / "new", "--device", "cpu")
    words.write_text('[prompt]\nsystem = "Be brief."\nquestion = "Q: {question}"\n')
    made = ("ingest", documents, *index)
    assert ragkv(*made, "--model", model_folder, "--prompt", words, "--system", "Be kind.").code == 0
    prompt = load_config(tmp_path / "new").prompt
    assert (prompt.system, prompt.question, prompt.context) == ("Be kind.", "Q: {question}", "Documents:\n\n")
    refused = ragkv(*made, "--system", "Be rude.")
    assert refused.code == 1
    assert (
        "made with prompt.system = Be kind., not Be rude.; use another --index, or leave --system" in refused.sentence
    )
    words.write_text('sistem = "Be brief."\n')
    refused = ragkv(*made, "--prompt", words)
    assert (refused.code, "unknown key 'sistem'" in refused.sentence) == (2, True)
    asked = ("query", "Who founded Halden Works?", *index, "--json", "--max-new-tokens", 4)
    answers = [json.loads(ragkv(*asked, *more).out) for more in ((), ("--system", "Answer in French."))]
    assert [answer["kv"]["misses"] for answer in answers] == [0, 0]
    assert answers[0]["question"] == answers[1]["question"]


def test_what_stored_kv_does_not_depend_on_is_changed(ragkv, empty):
    changes = ("prompt.question=Q: {question}", "steps.count=2", "steps.rewrite=true", "steps.query={written}")
    assert ragkv("config", "set", *changes, "--index", empty).code == 0
    config = load_config(empty)
    assert (config.prompt.question, config.steps) == (
        "Q: {question}", StepsConfig(count=2, rewrite=True, query="{written}"),
    )  # fmt: skip


def test_changes_at_the_same_time_wait_for_each_other(ragkv, monkeypatch, empty):
    saved = []

    def save(folder: Path, config: IndexConfig) -> None:
        other = os.open(folder, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)
        saved.append(config)

    for module in ("index.create", "doctor.tune"):
        monkeypatch.setattr(f"ragkv.{module}.save_config", save)
    ragkv("config", "set", "steps.count=2", "--index", empty)
    write_setting(empty, APESetting(temperature=0.9, scale=0.9))
    assert len(saved) == 2


def test_ingest_refuses_what_contradicts_the_index_and_says_how_to_go_on(ragkv, monkeypatch, empty, tmp_path):
    (tmp_path / "a.txt").write_text("Halden Works was founded by Mira Oskel.")
    assert ragkv("ingest", tmp_path / "a.txt", "--index", empty).code == 0
    monkeypatch.setenv("RAGKV_CODEC", "int8")
    refused = ragkv("ingest", tmp_path / "a.txt", "--index", empty)
    assert refused.code == 1
    assert "was made with codec = zstd, not int8; use another --index, or leave --codec out and RAGKV_CODEC unset" in (
        refused.sentence
    )
    shown = ragkv("config", "show", "--index", empty, "--codec", "raw")
    assert (shown.code, "leave --codec out" in shown.sentence) == (1, True)
    assert ragkv("ingest", tmp_path / "a.txt", "--index", empty, "--codec", "zstd").code == 0  # a flag takes precedence


def test_the_variable_that_overrides_the_memory_budget_is_shown_and_checked(ragkv, monkeypatch, empty):
    monkeypatch.setenv("RAGKV_MEMORY_BUDGET", "64MiB")
    for more in (("--index", empty), ()):
        assert result(ragkv, *more)["memory_budget"] == ("64MiB", "environment")
    monkeypatch.setenv("RAGKV_MEMORY_BUDGET", "lots")
    refused = ragkv("config", "show", "--index", empty)
    assert refused.sentence.startswith("ragkv: RAGKV_MEMORY_BUDGET must be a number of bytes")


def test_an_index_without_documents_is_shown_as_ingest_would_make_it_anew(ragkv, empty):
    found = result(ragkv, "--index", empty, "--codec", "raw")
    assert found["codec"] == ("raw", "flag")
    assert found["model"] == ("mini", "default")
    assert result(ragkv, "--index", empty)["codec"] == ("zstd", "index")


def test_a_mistake_in_the_user_file_stops_who_reads_it_and_nobody_else(ragkv, own_file, empty):
    own_file.write_text('modle = "mini"')
    for command in (("stats",), ("config", "show"), ("ingest", ".")):
        found = ragkv(*command)
        assert found.code == 2
        assert found.sentence.startswith(f"ragkv: {own_file}: unknown key 'modle'; remove it")
    assert ragkv("stats", "--index", empty, "--json").code == 0
    assert ragkv("stats", "--help").code == 0


def written(tmp_path: Path, text: str) -> UserFile:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return UserFile.read(path)


def test_where_the_user_file_is(monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", "/etc/mine")
    assert user_file() == Path("/etc/mine/ragkv/config.toml")
    monkeypatch.setenv("HOME", "/home/ann")
    for value in ("", "not/absolute"):
        monkeypatch.setenv("XDG_CONFIG_HOME", value)
        assert user_file() == Path("/home/ann/.config/ragkv/config.toml")


def test_what_it_may_say(tmp_path):
    assert UserFile.read(tmp_path / "none.toml").settings == {}
    read = written(
        tmp_path, 'device = "cpu"\nmodel = "Qwen/Qwen3-4B"\nengines = ["ape"]\n[prompt]\nsystem = "Be brief."\n'
    )
    assert read.table["device"] == "cpu"
    assert "index" not in read.table
    assert read.settings.keys() == {"model", "engines", "prompt"}
    assert (read.settings["engines"], read.settings["prompt"].system) == (("ape",), "Be brief.")
    watch = written(tmp_path, '[[watch]]\nindex = "notes-index"\nfolder = "notes"\nprune = true\n').watch
    assert [(each.index, each.folder, each.prune) for each in watch] == [("notes-index", "notes", True)]
    # an embedder may come from a flag, so a mode that needs one is not an error yet
    assert written(tmp_path, 'retrieval = "dense"').settings == {"retrieval": "dense"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("modle = 'x'", "unknown key 'modle'; remove it, or use one of"),
        ("[prompt]\nsytem = 'x'", "unknown key 'sytem'"),
        ("model = [", "not valid TOML"),
        ("model = 3", "model must be a string, not 3."),
        ("top_k = 'abc'", "top_k must be a whole number, not 'abc'."),
        ("kv_budget = []", "kv_budget must be a whole number or a string, not []."),
        ("engines = 'ape'", "engines must be a list of strings, not 'ape'."),
        ("codec = true\nretrieval = 1", "codec must be a string, not True."),
        ("retrieval = 1", "retrieval must be one of dense, sparse, colbert, hybrid, bm25, not 1."),
        ("[decoding]\ntop_p = 'x'", "top_p must be a number, not 'x'."),
        ("tuning = 3", "tuning must be a table, not 3."),
        ("device = 0", "device = 0 must be a string"),
        ("resident = 1", "resident = 1 must be true or false"),
        ("index = ''", "index = '' must be a string that is not empty"),
        ("chunk_tokens = 2", "chunk_tokens must be from 8 to 65536, not 2"),
        ("codec = 'zip'", "unknown codec 'zip': choose one of half,"),
        ("engines = ['ape', 'warp']", "Unknown engine 'warp'; choose one of apb,"),
        ("default_engine = 'warp'", "Unknown engine 'warp'; choose one of apb,"),
        ("index_factory = 'Nope'", "index_factory = 'Nope' cannot be the dense index"),
        ("[tuning.nope]", "[tuning.nope] is for none of the engines apb,"),
        ("[ingest]\nmax_file = '0'", "ingest.max_file must be at least 1."),
        ("[decoding]\nstop_ids = ['x']", "stop_ids must be a list of whole numbers"),
        ("retrieval = 'psychic'", "retrieval must be one of"),
        ("prompt = 'x'", "prompt must be a table"),
        ("[prompt]\nquestion = 'no place'", "exactly once"),
        ("top_k = true", "top_k must be a whole number, not True"),
        ("watch = 'a'", "watched folders are tables"),
        ("watch = [1]", "watched folders are tables"),
        ("[[watch]]\nfile = 1", "[[watch]]: unknown key 'file'"),
        ("[[watch]]\nprune = 1", "[[watch]]"),
    ],
)
def test_a_mistake_in_it_is_one_sentence_that_names_the_file(tmp_path, text, says):
    with pytest.raises(ConfigError, match=r"config\.toml") as error:
        written(tmp_path, text)
    assert says in str(error.value)


def test_a_mistake_in_an_index_names_its_file(ragkv, empty):
    with (empty / "ragkv.toml").open("a") as toml:
        toml.write("[decoding]\ntop_p = 2\n")
    found = ragkv("query", "Who?", "--index", empty)
    says = f"ragkv: {empty / 'ragkv.toml'}: decoding: top_p must be above 0 and at most 1, not 2."
    assert (found.code, found.sentence) == (2, says)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('index_factory = "IDMap2,Flat"', 'index_factory = "Nope"', "index_factory = 'Nope' cannot be the dense index"),
        ("\\Z", "[tuning.nope]\n", "[tuning.nope] is for none of the engines"),
        ("default_engine = .*", 'default_engine = "warp"', "Unknown engine 'warp'"),
    ],
)
def test_a_name_in_an_index_that_nothing_has_is_refused_by_what_changes_or_shows_it(
    ragkv, empty, documents, old, new, says
):
    toml = empty / "ragkv.toml"
    toml.write_text(re.sub(old, new, toml.read_text(), count=1))
    for command in (("config", "show"), ("config", "set", "top_k=3"), ("ingest", documents)):
        refused = ragkv(*command, "--index", empty)
        assert (refused.code, says in refused.sentence) == (2, True), refused.err
    assert "top_k = 3" not in toml.read_text()


@pytest.mark.parametrize(
    ("line", "says"), [('default_engine = "warp"', "Unknown engine 'warp'"), ("[tuning.ape]\nscale = 9", "(0, 2]")]
)
def test_a_server_does_not_start_on_an_index_whose_questions_it_would_refuse(ragkv, empty, line, says):
    toml = empty / "ragkv.toml"
    kept = re.sub("default_engine = .*", 'default_engine = "ape"', toml.read_text())
    toml.write_text(kept + line if line[0] == "[" else re.sub("default_engine = .*", line, kept))
    refused = ragkv("serve", "--index", empty, "--port", 0)
    assert (refused.code, refused.sentence.startswith(f"ragkv: {toml}: "), says in refused.sentence) == (2, True, True)
    assert logging.getLogger("ragkv.server.middleware.requests").handlers == []


def test_a_tuning_that_does_not_fit_its_engine_makes_no_index(ragkv, own_file, tmp_path, model_folder, documents):
    own_file.write_text("[tuning.blend]\nshare = 3\n")
    for more in ((), ("--dry-run",)):
        made = ragkv("ingest", documents, "--index", tmp_path / "new", "--model", model_folder, *more)
        assert (made.code, "[tuning.blend]" in made.sentence) == (2, True)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("RAGKV_CODEC", "zip", "unknown codec 'zip'"),
        ("RAGKV_ENGINES", "ape,warp", "Unknown engine 'warp'"),
        ("RAGKV_ENGINE", "warp", "Unknown engine 'warp'"),
        ("RAGKV_CHUNK_TOKENS", "2", "chunk_tokens must be from 8 to 65536, not 2"),
        ("RAGKV_EMBEDDER", "/nowhere", "No model folder at '/nowhere'"),
        ("RAGKV_RERANKER", "/nowhere", "No model folder at '/nowhere'"),
    ],
)
def test_what_a_variable_may_not_be_is_refused_before_an_ingest_and_named(
    ragkv, monkeypatch, tmp_path, documents, variable, value, says
):
    monkeypatch.setenv(variable, value)
    dry = [("ingest", documents, "--dry-run")] if variable != "RAGKV_ENGINE" else []  # an ingest does not read it
    for command in (("config", "show"), *dry):
        refused = ragkv(*command, "--index", tmp_path / "new")
        assert refused.code in (1, 2), command
        assert refused.sentence.startswith(f"ragkv: {says}"), command
        assert refused.sentence.endswith(f" ({variable} is {value!r})."), command
    flag = next(FLAGS[name] for name in VARIABLES if VARIABLES[name] == variable)
    assert variable not in ragkv("config", "show", "--index", tmp_path / "new", flag, "3").sentence


def test_a_dry_run_refuses_a_device_that_there_is_not(ragkv, monkeypatch, tmp_path, documents, empty):
    monkeypatch.setenv("RAGKV_DEVICE", "nope")
    for index in (tmp_path / "new", empty):
        refused = ragkv("ingest", documents, "--index", index, "--dry-run")
        assert (refused.code, refused.sentence.endswith("(RAGKV_DEVICE is 'nope').")) == (1, True), refused.err


def test_a_dry_run_refuses_a_folder_in_which_no_index_can_be_made(ragkv, documents):
    refused = ragkv("ingest", documents, "--index", documents, "--dry-run")
    assert (refused.code, "is not empty and is not an index" in refused.sentence) == (2, True)


def test_every_variable_is_a_setting_with_an_option():
    names = {*IndexConfig.__slots__, *USED}
    assert VARIABLES.keys() <= FLAGS.keys() <= names
    assert FLAGS["chunk_tokens"] == "--chunk-tokens"
    assert FLAGS["default_engine"] == "--engine"
