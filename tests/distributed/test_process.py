"""Ranks as processes: the errors if one is killed, hangs or has another model, and its return."""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch.distributed as dist
from clichild import CliChild
from indexed import indexed

QUESTION = "Who founded Kesk Mills?"
WAIT = 600
START = """
import runpy, sys
from ragkv.distributed import group

group._GRACE = float(sys.argv.pop(1))
runpy.run_module("ragkv.distributed", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def index(tmp_path_factory, model_folder):
    names = ("Halden Works", "Bolt Ltd", "Kesk Mills")
    texts = {f"{name[0]}.txt": f"{name} was founded by Ann Lee in 1907. {name} makes lamps." for name in names}
    with indexed(tmp_path_factory.mktemp("process"), texts, model=model_folder, chunk_tokens=128) as made:
        made.settle()
        return made.folder, made.query(QUESTION, engine="block", max_new_tokens=4).text


class Ranks:
    """Processes that meet in a store of this process, as under torchrun, or in rank 0's, with `own_store`."""

    def __init__(self, size, *, own_store=False):
        store = dist.TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=WAIT), wait_for_workers=False)
        self.port, self.store = store.port, None if own_store else store
        self.size, self.running = size, []

    def start(self, rank, index, *, grace=WAIT, timeout=WAIT):
        result = {"RANK": rank, "WORLD_SIZE": self.size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port}
        result |= {"TORCHELASTIC_USE_AGENT_STORE": self.store is not None, "OMP_NUM_THREADS": 1}
        command = ["query", "-", "--index", index, "--engine", "block", "--max-new-tokens", "4", "--json"]
        command += ["--timeout", timeout, "--patience", WAIT]
        with pytest.MonkeyPatch.context() as patch:
            for name, value in result.items():
                patch.setenv(name, str(value))
            self.running.append(CliChild(grace, *command, program=START))
        return self.running[-1]

    def message(self, child):
        """A process's exit code and output."""
        self.running.remove(child)
        code, out, err = child.end()
        assert "Traceback" not in err
        return code, out, err


@contextmanager
def ranks_of(size, **more):
    ranks = Ranks(size, **more)
    try:
        yield ranks
    finally:
        for child in ranks.running:
            child.process.kill()
            child.end()


@pytest.mark.parametrize("sign", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.nightly)])
def test_a_rank_that_is_killed_or_hangs_is_named(index, sign):
    folder, wanted = index
    limit = 5 if sign == signal.SIGSTOP else WAIT  # a killed process is noticed at once
    with ranks_of(2) as ranks:
        first, second = ranks.start(0, folder, grace=0, timeout=limit), ranks.start(1, folder)
        if sign == signal.SIGKILL:
            first.say(QUESTION)
            assert json.loads(first.line())["answer"] == wanted
        else:
            second_has_met = ranks.store.get("ragkv/0/loaded/1")
            assert second_has_met == b""
        os.kill(second.process.pid, sign)
        first.say(QUESTION)
        code, out, err = ranks.message(first)
    assert (code, out) == (1, "")
    assert (
        f"Rank 1 ({os.uname().nodename}, process {second.process.pid}) has ended, cannot be reached or is not where"
        in err
    )


@pytest.mark.nightly
@pytest.mark.parametrize("own_store", [False, True])
def test_a_rank_with_another_model_is_named(index, tmp_path, make_folder, own_store):
    folder, _ = index
    with indexed(tmp_path, {"a.txt": "Bolt Ltd makes valves."}, model=make_folder("qwen3"), chunk_tokens=128) as made:
        other = made.folder
    with ranks_of(3, own_store=own_store) as ranks:
        for child in [ranks.start(rank, each) for rank, each in enumerate((folder, other, folder))]:
            code, out, err = ranks.message(child)
            assert (code, out) == (1, "")
            assert "Rank 1 (" in err
            assert "has another model than rank 0" in err


def by_torchrun(index):
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ragkv.distributed", "query"]
    options = ["--index", str(index), "--engine", "block", "--max-new-tokens", "4", "--json"]
    return subprocess.run(
        [sys.executable, "-m", *command, QUESTION, *options], capture_output=True, text=True, timeout=WAIT
    )


@pytest.mark.nightly
def test_torchrun(index):
    folder, wanted = index
    made = by_torchrun(folder)
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["answer"] == wanted  # the terminal output escapes control characters


@pytest.mark.nightly
def test_ranks_in_a_placement_group(index, tmp_path):
    pytest.importorskip("ray", reason="needs Ray: pip install -e '.[ray]'")
    folder, wanted = index
    command = [
        sys.executable,
        "-m",
        "ragkv.distributed",
        "query",
        QUESTION,
        "--index",
        str(folder),
        "--engine",
        "block",
    ]
    more = ["--max-new-tokens", "4", "--json", "--ray", "local", "--ranks", "2"]
    made = subprocess.run([*command, *more], capture_output=True, text=True, timeout=WAIT, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["answer"] == wanted


@pytest.mark.nightly
def test_every_rank_of_torchrun_names_what_differs(index, tmp_path):
    folder, _ = index
    for rank, top_k in enumerate((8, 3)):
        settings = shutil.copytree(folder, tmp_path / f"index-{rank}") / "ragkv.toml"
        settings.write_text(settings.read_text().replace("top_k = 8", f"top_k = {top_k}"))
    made = by_torchrun(tmp_path / "index-{rank}")
    assert (made.returncode, made.stdout) == (1, "")
    assert made.stderr.count("has another setting top_k than rank 0: 3, not 8") == 2
    assert "told to end" not in made.stderr
