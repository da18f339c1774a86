"""How many threads compute, and how they wait."""

import os
import subprocess
import sys

import pytest
import torch

from ragkv.util import processors

OURS = ("PASSIVE", "10000", None)


@pytest.mark.parametrize(
    ("chosen", "policy"),
    [
        ({}, OURS),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, ("ACTIVE", None, None)),
        ({"GOMP_SPINCOUNT": "7"}, (None, "7", None)),
        ({"KMP_BLOCKTIME": "0"}, (None, None, "0")),
    ],
)
def test_threads_sleep_soon_unless_the_user_chose_how_they_wait(chosen, policy):
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    program = f"import ragkv, os, sys; print([os.environ.get(name) for name in {names}], 'torch' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name not in names} | chosen
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert ran.stdout.strip() == f"{[*policy]} False"


@pytest.mark.parametrize(
    ("words", "variables", "in_file", "threads"),
    [
        ([], {}, "", None),  # as many as are idle
        ([], {}, "threads = 3", "3"),
        ([], {"OMP_NUM_THREADS": "4"}, "threads = 3", "4"),
        ([], {"OMP_NUM_THREADS": "4", "RAGKV_THREADS": "5"}, "threads = 3", "5"),
        (["--threads", "6"], {"OMP_NUM_THREADS": "4", "RAGKV_THREADS": "5"}, "threads = 3", "6"),
    ],
)
def test_where_the_number_of_threads_comes_from(tmp_path, words, variables, in_file, threads):
    (tmp_path / "ragkv").mkdir()
    (tmp_path / "ragkv" / "config.toml").write_text(in_file)
    program = """
import os, sys
from ragkv.cli.main import main
from ragkv.util import processors
sys.argv = ["ragkv", "config", "show", "--quiet", *sys.argv[1:]]
try:
    main()
finally:
    print([os.environ.get("OMP_NUM_THREADS"), processors._watch is not None])
"""
    environment = {name: value for name, value in os.environ.items() if name not in processors.COUNTS}
    environment |= {"XDG_CONFIG_HOME": str(tmp_path), **variables}
    command = [sys.executable, "-c", program, *words]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, cwd=tmp_path)
    assert ran.stdout.splitlines()[-1] == str([threads, threads is None])


@pytest.mark.parametrize(
    ("used", "granted", "server", "threads"),
    [
        (0.1, 99, False, 8),
        (2.6, 99, False, 5),
        (9, 99, False, 1),
        (9, 99, True, 8),
        (0, 2.5, True, 3),
        (3, 2, False, 2),
    ],
)
def test_threads_are_as_many_as_processors_are_idle_and_granted(monkeypatch, used, granted, server, threads):
    """`used` processors of 8 are used by other programs; a server outlives that."""
    usage = iter([(0.0, 50.0), (100.0, 99.0), (101.0, 99.0 + used)])  # the first is too long ago
    chosen = []
    for name in processors.COUNTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(processors, "_idle", None)  # restored at the end
    monkeypatch.setattr(processors, "_usage", usage.__next__)
    monkeypatch.setattr(processors, "cores", lambda: 8)
    monkeypatch.setattr(processors, "granted", lambda: granted)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    processors.watch_processors(idle=not server)
    processors.fit_threads()
    processors.fit_threads()  # decided once
    assert chosen == [threads] * (threads < 8)


@pytest.mark.parametrize(
    ("files", "granted"),
    [
        ({}, float("inf")),
        ({"cpu.max": "max 100000"}, float("inf")),
        ({"cpu.max": "250000 100000", "a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, float("inf")),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2.0),
    ],
)
def test_the_quota_of_control_groups(monkeypatch, tmp_path, files, granted):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    (tmp_path / "own").write_text("3:cpu:/elsewhere\n0::/a/b\n")
    monkeypatch.setattr(processors, "_GROUPS", (tmp_path, tmp_path / "own"))
    assert processors.granted() == granted
