"""How compiled kernels are cached, and on which processors and threads they run."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import re
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

from ragkv.util.plugins import kernel_module

kernels = pytest.importorskip("ragkv.util.kernels", exc_type=ImportError)
numba = kernels.numba
ir, errors = pytest.importorskip("numba.core.ir"), pytest.importorskip("numba.core.errors")
run_frontend = pytest.importorskip("numba.core.compiler").run_frontend
compute_cfg_from_blocks = pytest.importorskip("numba.core.analysis").compute_cfg_from_blocks


def _nothing(data):
    pass


@pytest.mark.parametrize("features", [None, "+avx2,+fma", "+f16c,+avx2,+fma,-avx512f"])
def test_without_numba_or_units_there_are_none(features, monkeypatch):
    if features is None:
        monkeypatch.setitem(sys.modules, "numba", None)
    else:
        monkeypatch.setattr(numba.config, "CPU_FEATURES", features)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.delitem(sys.modules, "ragkv.util.kernels")
    monkeypatch.delattr(sys.modules["ragkv.util"], "kernels")
    found = kernel_module.__wrapped__("ragkv.util.kernels")
    assert (found is not None) == (features is not None and "f16c" in features)
    if found is not None:
        assert found.features() == {"f16c", "avx2", "fma"}


def test_a_kernel_that_cannot_be_kept_is_compiled_each_time(monkeypatch):
    honest, asked = numba.cfunc, []

    def without_folder(*signature, **options):
        asked.append(options.pop("cache", False))
        if asked[-1]:
            raise RuntimeError("cannot cache function: no locator available")
        return honest(*signature, **options)

    monkeypatch.setattr(numba, "cfunc", without_folder)
    assert callable(kernels.compiled(_nothing).ctypes)
    assert asked == [True, False]


@pytest.mark.parametrize("damage", [b"", b"no pickle"])
def test_a_damaged_kernel_is_compiled_anew(damage, tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    kernels.compiled(_nothing)
    kept = [path for path in tmp_path.rglob("*.nb?") if path.is_file()]
    assert len(kept) == 2
    for path in kept:
        path.write_bytes(damage)
    assert callable(kernels.compiled(_nothing).ctypes)


def _writing(number):
    def kernel(data):
        while kernels.claimed(data) < kernels.argument(data, kernels.UNITS):
            kernels.integers(kernels.argument(data, kernels.ARGUMENTS))[0] = number

    return kernels.compiled(kernel)


def test_two_processes_keep_variants_of_a_kernel_at_once(tmp_path, monkeypatch):
    """Neither sees the other's files: the second one's index is written last, and the first one's code."""
    files, late = pytest.importorskip("numba.core.caching").IndexDataCacheFile, []
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    with monkeypatch.context() as patch:
        save = files._save_data
        patch.setattr(files, "_load_index", lambda _: {})
        patch.setattr(files, "_save_data", lambda *given: late.append(given))
        for number in (1, 2):
            _writing(number)
        for given in reversed(late):
            save(*given)
    for number in (1, 2):
        out = torch.zeros(1, dtype=torch.int64)
        kernels.run(_writing(number), 1, 1, out.data_ptr())
        assert out.tolist() == [number]


def test_a_kernel_is_kept_in_the_users_cache_folder(tmp_path, monkeypatch):
    """Not next to the module, where `pip uninstall` would leave a file behind that hides an editable install."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernels.compiled(_nothing)
    (folder,) = (tmp_path / "ragkv" / "numba").iterdir()
    assert {path.suffix for path in folder.rglob("*.nb?")} == {".nbi", ".nbc"}
    assert numba.config.CACHE_DIR == ""
    monkeypatch.setattr(kernels, "__file__", __file__)  # a changed file that numba does not check
    kernels._version.cache_clear()
    kernels.compiled(_nothing)
    kernels._version.cache_clear()
    assert len(list(folder.parent.iterdir())) == 2


def _counting(data):
    units, chunk = kernels.argument(data, kernels.UNITS), kernels.argument(data, kernels.CHUNK)
    counts = kernels.integers(kernels.argument(data, kernels.ARGUMENTS))
    while True:
        first = kernels.claimed(data)
        if first >= units:
            return
        for unit in range(first, min(first + chunk, units)):
            counts[unit] += 1


@pytest.fixture(scope="module")
def counting():
    return kernels.compiled(_counting)


@pytest.mark.parametrize("units", [1, 7, 1000])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_each_unit_of_work_is_done_once(counting, units, threads):
    counts = torch.zeros(units, dtype=torch.int64)
    for _ in range(20):
        kernels.run(counting, units, threads, counts.data_ptr())
    assert counts.tolist() == [20] * units


def until(done):
    """Wait for a condition, with a generous limit."""
    end = time.monotonic() + 600
    while not done():
        assert time.monotonic() < end
        time.sleep(0.0002)


class Waiting(ThreadPoolExecutor):
    """A pool whose helpers only start when they are released."""

    def __init__(self):
        super().__init__(1)
        self.asked = []

    def submit(self, *work):
        self.asked.append(work)

    def let(self):
        for work in self.asked:
            super().submit(*work)
        self.asked = []


@pytest.fixture
def team():
    made = kernels._Team(2)
    yield made
    made._pool.shutdown()


def counts_of(team, counting, units, helpers=2, during=None):
    """How often each unit was computed."""
    counts = torch.zeros(units, dtype=torch.int64)
    data = kernels._array(4)(0, units, 1, counts.data_ptr())

    def call(place):
        if during is not None:
            during()
        counting.ctypes(place)

    team.run(counting.address, call, ctypes.addressof(data), helpers)
    return counts.tolist()


def test_a_helper_that_has_begun_is_waited_for(team, counting):
    """The launcher starts after the helper has taken all units, or while it is computing them."""
    state, awake, begun = team._first + kernels._STATE, team._first + kernels._AWAKE, []

    def wait():
        """It may have fallen asleep just when it was asked."""
        until(lambda: team._memory[state] != kernels._REQUESTED or not team._memory[awake])
        begun.append(team._memory[state] != kernels._REQUESTED)

    while sum(begun) < 20:
        assert counts_of(team, counting, 100_000, 1, wait) == [1] * 100_000
        assert team._memory[state] == kernels._IDLE


def test_a_launch_that_is_interrupted_waits_for_its_helpers(team, counting):
    state = team._first + kernels._STATE

    def interrupted():
        until(lambda: team._memory[state] == kernels._BUSY or not team._memory[team._first + kernels._AWAKE])
        raise KeyboardInterrupt

    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            counts_of(team, counting, 3_000_000, 1, interrupted)
        assert team._memory[state] == kernels._IDLE
        assert counts_of(team, counting, 9) == [1] * 9
    team._pool.shutdown()  # as at interpreter exit
    assert counts_of(team, counting, 9) == [1] * 9


def test_an_interrupt_before_the_wait_does_not_spare_it(team, counting, monkeypatch):
    """The launcher has finished its own units, and a helper is still computing."""
    state, awake = team._first + kernels._STATE, team._first + kernels._AWAKE
    counts, clock = torch.zeros(3_000_000, dtype=torch.int64), iter([0.0])
    data = kernels._array(4)(0, len(counts), 1, counts.data_ptr())

    def interrupted():
        for first in clock:
            return first
        raise KeyboardInterrupt

    def work(_place):
        until(lambda: team._memory[state] == kernels._BUSY or not team._memory[awake])

    monkeypatch.setattr(kernels, "time", SimpleNamespace(perf_counter=interrupted))
    with pytest.raises(KeyboardInterrupt):
        team.run(counting.address, work, ctypes.addressof(data), 1)
    assert team._memory[state] == kernels._IDLE


def test_nobody_begins_when_the_launcher_has_ended(counting, monkeypatch):
    monkeypatch.setattr(kernels, "ThreadPoolExecutor", lambda *_, **__: waiting)
    waiting = Waiting()
    team = kernels._Team(2)
    assert counts_of(team, counting, 5) == [1] * 5
    assert len(waiting.asked) == 2
    assert [team._memory[team._first + kernels._LINE * at] for at in (0, 1)] == [kernels._IDLE] * 2
    assert counts_of(team, counting, 5) == [1] * 5
    assert len(waiting.asked) == 2  # they count as awake
    waiting.let()  # their launch has ended
    waiting.shutdown()
    assert [team._memory[team._first + kernels._LINE * at + kernels._AWAKE] for at in (0, 1)] == [0, 0]


def test_a_helper_sleeps_after_a_while_and_is_woken(team, counting):
    awake = team._first + kernels._AWAKE
    for _ in range(3):
        assert counts_of(team, counting, 1000) == [1] * 1000
        until(lambda: not team._memory[awake])


def test_who_does_not_have_the_team_works_alone(team, counting):
    def other():
        assert counts_of(team, counting, 50) == [1] * 50
        asked.append(team._memory[team._first + kernels._DATA])

    asked = []
    assert counts_of(team, counting, 7, 2, other) == [1] * 7
    assert asked == [team._memory[team._first + kernels._DATA]]  # the other launch has not written to a mailbox


def test_many_threads_launch_kernels_at_once(counting):
    failures = []

    def work(n):
        for _ in range(300):
            if counts_of(kernels._team(), counting, n) != [1] * n:
                failures.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in (3, 50, 400)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_no_more_are_asked_than_the_machine_has_room_for_unless_the_kernel_is_long(team, counting, monkeypatch):
    for long, most, asked in ((math.inf, 0, [False, False]), (math.inf, 1, [True, False]), (0.0, 0, [True, True])):
        monkeypatch.setattr(kernels, "_LONG", long)
        team._most = most
        assert counts_of(team, counting, 5) == [1] * 5
        assert [team._memory[team._first + kernels._LINE * at + kernels._KERNEL] > 0 for at in (0, 1)] == asked


def test_fewer_helpers_on_a_busy_machine(team, monkeypatch):
    """After two windows in a row with two late helpers, or in which the thread often lost its processor."""
    monkeypatch.setattr(kernels, "_CALM", 3)
    clock, taken = iter(range(1, 1000)), [0]
    monkeypatch.setattr(kernels, "taken_away", lambda: taken[0])

    def window(helpers, late=0, lost=0, last=None):
        """Simulate one more window with this many late launches; returns the number of helpers asked from then on."""
        taken[0] += lost
        for _ in range(late):
            team._note(helpers, True, team._since)
        team._note(helpers if last is None else last, False, float(next(clock)))
        return team._most

    often = kernels._OFTEN + 1
    assert [window(2), window(2, late=1), window(2, late=1), window(2, lost=often - 1)] == [2] * 4
    assert [window(2, late=2), window(2), window(2, late=2)] == [2] * 3
    assert [window(2, late=2), window(1, lost=often)] == [1, 0]
    assert [window(0) for _ in range(7)] == [0, 0, 1, 1, 1, 2, 2]
    assert [window(2, lost=often), window(2, late=3, last=0), window(1)] == [2, 1, 1]
    with ThreadPoolExecutor(1) as other:  # another thread's losses are counted separately
        assert other.submit(window, 1, 0, often).result() == 1
        assert other.submit(window, 1, 0, often).result() == 1
        assert other.submit(window, 1, 0, often).result() == 0
    monkeypatch.undo()
    assert kernels.taken_away() >= 0
    monkeypatch.delattr("resource.RUSAGE_THREAD", raising=False)
    assert kernels.taken_away() == 0


def test_a_forked_process_has_threads_of_its_own(counting):
    assert counts_of(kernels._team(), counting, 4) == [1] * 4
    mine = kernels._team()
    if (child := os.fork()) == 0:
        os._exit(kernels._team() is mine or counts_of(kernels._team(), counting, 4) != [1] * 4)
    assert os.waitpid(child, 0)[1] == 0
    assert kernels._team() is mine


def test_a_process_may_be_forked_while_a_kernel_is_made(counting):
    """By another thread, which does not exist in the child."""
    begun, end = threading.Event(), threading.Event()

    @kernels.once
    def make():
        begun.set()
        end.wait(600)

    with ThreadPoolExecutor(1) as other:
        other.submit(make)
        assert begun.wait(600)
        if (child := os.fork()) == 0:
            signal.alarm(600)
            os._exit(counts_of(kernels._team(), counting, 4) != [1] * 4)
        status = os.waitpid(child, 0)[1]
        end.set()
    assert status == 0


@pytest.mark.parametrize("threads", [1, 3])
def test_work_that_no_thread_has_begun_is_an_error(threads):
    """A thread that cannot allocate its sums returns at once."""
    with pytest.raises(MemoryError):
        kernels.run(kernels.compiled(_nothing), 5, threads)


def test_as_many_threads_as_the_work_is_worth(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert [kernels.threads_for(numbers, 100) for numbers in (0, 199, 200, 399, 10**6)] == [1, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("module", "name", "given"),
    [
        ("ragkv.model.layer_kernels", "product", ("float32", "float32")),
        ("ragkv.attention.flash_kernel", "attention", ("float32", 64)),
        ("ragkv.attention.decode_kernel", "compiled", ("float32,float16,int8", 64, 64, 1)),
    ],
    ids=str,
)
def test_a_kernels_memory_is_its_own_until_its_work_is_done(module, name, given, monkeypatch):
    """numba frees an array after its last use by name, and does not see uses by address."""
    made = pytest.importorskip(module, exc_type=ImportError)
    monkeypatch.setattr(kernels, "compiled", lambda kernel, *_, **__: kernel)
    found = run_frontend(getattr(made, name).__wrapped__(*given), emit_dels=True)
    graph = compute_cfg_from_blocks(found.blocks)
    calls = [
        (label, found.infer_constant(each.value.func), each.value.args)
        for label, block in found.blocks.items()
        for each in block.find_insts(ir.Assign)
        if getattr(each.value, "op", None) == "call" and _is_constant(found, each.value.func)
    ]
    before = {label for label, called, _ in calls if called is kernels.claimed}
    arrays = {given[0].name for _, called, given in calls if called is kernels.address}
    assert before
    assert arrays
    while earlier := {label for at in before for label, _ in graph.predecessors(at)} - before:
        before |= earlier
    freed = {each.value for label in before for each in found.blocks[label].find_insts(ir.Del)}
    assert not freed & arrays


def _is_constant(found, variable):
    try:
        return bool(found.infer_constant(variable) or True)
    except errors.ConstantInferenceError:
        return False


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_kernels_have_the_threads_instead_of_torch(three_threads):
    def now():
        return torch.get_num_threads(), kernels.threads_for(10, 1)

    with kernels.by_torch():
        assert now() == (3, 3)
    with suppress(ValueError), kernels.instead_of_torch():
        assert now() == (1, 3)
        with kernels.by_torch():
            assert now() == (3, 3)
        assert now() == (1, 3)
        raise ValueError
    assert now() == (3, 3)
    torch.set_num_threads(1)
    with kernels.instead_of_torch(), kernels.by_torch():
        assert now() == (1, 1)


def test_threads_that_begin_meanwhile_have_all_of_torchs(three_threads):
    with kernels.instead_of_torch(), ThreadPoolExecutor(1) as other:
        assert other.submit(torch.get_num_threads).result() == 3
        with kernels.by_torch(), ThreadPoolExecutor(1) as another:
            assert another.submit(torch.get_num_threads).result() == 3
        assert torch.get_num_threads() == 1


@pytest.mark.parametrize("number", [1, 3])
def test_an_interrupt_while_threads_are_set_loses_none(number, three_threads, monkeypatch):
    honest, of_mkl = kernels._set_threads()

    def interrupted(threads):
        honest(threads)
        if threads == number:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "_set_threads", lambda: (interrupted, of_mkl))
        with pytest.raises(KeyboardInterrupt), kernels.instead_of_torch():
            pass
    with kernels.by_torch():
        assert (torch.get_num_threads(), kernels.threads_for(10, 1)) == (3, 3)
    assert torch.get_num_threads() == 3


def test_torchs_own_way_where_it_has_no_openmp(three_threads, monkeypatch, tmp_path):
    monkeypatch.setattr(kernels.torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    assert kernels._set_threads.__wrapped__()[0] is torch.set_num_threads


def test_mkl_has_as_many_threads_as_openmp(three_threads):
    def found():
        return re.findall(r"mkl_get_max_threads\(\) : (\d+)", torch.__config__.parallel_info())

    if not found():
        pytest.skip("torch has no MKL")
    with kernels.instead_of_torch():
        assert found() == ["1"]
        with kernels.by_torch():
            assert found() == ["3"]
        assert found() == ["1"]
    assert found() == ["3"]
