"""How compiled kernels are kept, and on which processors and threads they run."""

from __future__ import annotations

import os
import platform
import sys
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


def test_a_kernel_is_kept_in_the_users_cache_folder(tmp_path, monkeypatch):
    """Not beside the module, where a file would be left behind by `pip uninstall`, and hide an editable install."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernels.compiled(_nothing)
    (folder,) = (tmp_path / "ragkv" / "numba").iterdir()
    assert {path.suffix for path in folder.rglob("*.nb?")} == {".nbi", ".nbc"}
    assert numba.config.CACHE_DIR == ""
    monkeypatch.setattr(kernels, "__file__", __file__)  # another version of what numba does not look at
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


def test_every_thread_of_the_pool_is_waited_for(counting, monkeypatch):
    class Lazy:
        """Works only when it is waited for."""

        waited = 0

        def submit(self, *work):
            def result():
                Lazy.waited += 1
                work[0](*work[1:])

            return SimpleNamespace(result=result)

    monkeypatch.setattr(kernels, "_pool", Lazy)
    counts = torch.zeros(3, dtype=torch.int64)
    kernels.run(counting, 3, 4, counts.data_ptr())
    assert (counts.tolist(), Lazy.waited) == ([1, 1, 1], 3)


def test_a_forked_process_has_threads_of_its_own(counting):
    kernels._pool.cache_clear()
    counts = torch.zeros(4, dtype=torch.int64)
    kernels.run(counting, 4, 3, counts.data_ptr())
    assert kernels._pool.cache_info().currsize == 1
    if (child := os.fork()) == 0:
        os._exit(kernels._pool.cache_info().currsize)
    assert os.waitpid(child, 0)[1] == 0
    kernels._pool().shutdown()
    kernels._pool.cache_clear()


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
    """numba frees an array after its last use by name, and does not know of uses by its address."""
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
