"""What ragkv's kernels for processors have in common. Numba compiles them for the processor that they run on.

numba has no vectors of its own, so the innermost loops are written as LLVM's instructions (`numba.extending.intrinsic`)
with the functions of this module. A compiled kernel takes the address of an array of int64 and is run by `run`.
Importing this module raises ImportError for processors that the kernels are not for.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import operator
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numba
import torch
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from ragkv.util.files import user_folder

FLOAT, INT, LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
FAST = ("reassoc", "contract", "nsz")
"""What LLVM may do to float arithmetic. Not "nnan" and "ninf": a NaN stays one."""
POLYNOMIAL = (1.8775767e-3, 8.9893397e-3, 5.5826318e-2, 2.4015361e-1, 6.9315308e-1, 9.9999994e-1)
"""2^x for x from 0 to 1, the highest power first."""
SIZES = {"int8": 1, "uint8": 1, "bfloat16": 2, "float16": 2, "float32": 4}
_NEEDED = ("avx2", "f16c", "fma")


def features() -> frozenset[str]:
    """What the processor has, or the one that numba was asked to compile for, by LLVM's names; empty on ARM."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        return frozenset()
    chosen = numba.config.CPU_FEATURES
    flags = binding.get_host_cpu_features().flatten() if chosen is None else chosen
    return frozenset(name[1:] for name in flags.split(",") if name.startswith("+"))


def _missing() -> list[str]:
    """Without F16C LLVM would call a function for each float16, which numba does not have for vectors: the process
    would crash.
    """
    if platform.machine().lower() in ("aarch64", "arm64"):
        return []
    return [name for name in _NEEDED if name not in features()]


if missing := _missing():
    raise ImportError(f"the processor has no {', '.join(missing)}")


class BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not have."""

    null, intrinsic_name = "0.0", "bf16"

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


@functools.cache
def has_dot(kind: str) -> bool:
    """Whether the processor multiplies and adds "bfloat16" or "int8" numbers in one instruction."""
    needed = {"bfloat16": {"avx512bf16", "avx512vl"}, "int8": {"avx512vnni", "avx512bw"}}[kind]
    return needed <= features()


@functools.cache
def has_tiles() -> bool:
    """Whether it has matrix units for bfloat16 (AMX)."""
    return "amx-bf16" in features()


def floats(width: int) -> ir.VectorType:
    """The type of `width` float32 numbers."""
    return ir.VectorType(FLOAT, width)


def at(b: Any, address: Any, more: int) -> Any:
    """The address `more` bytes on."""
    return b.add(address, LONG(more)) if more else address


def load(b: Any, address: Any, kind: Any, align: int = 1) -> Any:
    """What lies at an address, of an LLVM type."""
    return b.load(b.inttoptr(address, kind.as_pointer()), align=align)


def store(b: Any, value: Any, address: Any, align: int = 1) -> None:
    """Write a value to an address."""
    b.store(value, b.inttoptr(address, value.type.as_pointer()), align=align)


def widened(b: Any, address: Any, kind: str, width: int) -> Any:
    """`width` numbers of `kind` from an address on, as float32."""
    if kind == "float32":
        return load(b, address, floats(width), 4)
    words = ir.VectorType(INT, width)
    if kind == "int8":
        return b.sitofp(b.sext(load(b, address, ir.VectorType(ir.IntType(8), width)), words), floats(width))
    bits = load(b, address, ir.VectorType(ir.IntType(16), width), 2)
    if kind == "float16":
        return b.fpext(b.bitcast(bits, ir.VectorType(ir.HalfType(), width)), floats(width))
    return b.bitcast(b.shl(b.zext(bits, words), ir.Constant(words, [16] * width)), floats(width))


def narrowed(b: Any, numbers: Any, kind: str) -> Any:
    """Float32 numbers as those of a kind, "float32" or "bfloat16"."""
    return b.fptrunc(numbers, ir.VectorType(BFloat(), numbers.type.count)) if kind == "bfloat16" else numbers


def repeated(b: Any, number: Any, width: int) -> Any:
    """A vector that has the number `width` times."""
    vector = ir.VectorType(number.type, width)
    undefined, zeros = ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(INT, width), [0] * width)
    return b.shuffle_vector(b.insert_element(undefined, number, INT(0)), undefined, zeros)


def summed(b: Any, vectors: list[Any]) -> Any:
    """The sums of the numbers of each of 2, 4, … vectors, as one vector."""
    add = b.fadd if vectors[0].type.element == FLOAT else b.add

    def part(one: Any, other: Any, places: range) -> Any:
        return b.shuffle_vector(one, other, ir.Constant(ir.VectorType(INT, len(places)), [*places]))

    width = vectors[0].type.count
    while width > len(vectors):
        width //= 2
        vectors = [add(part(v, v, range(width)), part(v, v, range(width, 2 * width))) for v in vectors]
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [add(*(part(*pair, range(first, 2 * width, 2)) for first in (0, 1))) for pair in pairs]
    return vectors[0]


def fetch(b: Any, place: Any) -> None:
    """Fetch a line into the second cache."""
    pointer = ir.IntType(8).as_pointer()
    prefetch = function(b, "llvm.prefetch.p0", ir.VoidType(), pointer, INT, INT, INT)
    b.call(prefetch, [b.inttoptr(place, pointer), INT(0), INT(2), INT(1)])


def function(b: Any, name: str, result: Any, *arguments: Any) -> Any:
    """One of LLVM's own functions."""
    return b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(result, arguments), name)


@intrinsic
def address(context: Any, array: Any) -> Any:
    """Where the numbers of an array begin.

    numba frees an array after the last use of its name. So a kernel asks for it within the loop that uses the memory:
    asked for before that, the loop would write to memory that is somebody else's.
    """

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        made = context.make_array(signature.args[0])(context, b, arguments[0])
        return b.ptrtoint(made.data, LONG)

    return types.int64(array), generate


@intrinsic
def reals(context: Any, place: Any) -> Any:
    """The float32 numbers at an address."""

    def generate(_context: Any, b: Any, _signature: Any, arguments: Any) -> Any:
        return b.inttoptr(arguments[0], FLOAT.as_pointer())

    return types.CPointer(types.float32)(types.int64), generate


@intrinsic
def integers(context: Any, place: Any) -> Any:
    """The int64 numbers at an address."""

    def generate(_context: Any, b: Any, _signature: Any, arguments: Any) -> Any:
        return b.inttoptr(arguments[0], LONG.as_pointer())

    return types.CPointer(types.int64)(types.int64), generate


@intrinsic
def octets(context: Any, place: Any) -> Any:
    """The uint8 numbers at an address."""

    def generate(_context: Any, b: Any, _signature: Any, arguments: Any) -> Any:
        return b.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.CPointer(types.uint8)(types.int64), generate


@intrinsic
def float_of(context: Any, bits: Any) -> Any:
    """The float32 that has these bits."""

    def generate(_context: Any, b: Any, _signature: Any, arguments: Any) -> Any:
        return b.bitcast(arguments[0], FLOAT)

    return types.float32(types.int32), generate


@intrinsic
def argument(context: Any, data: Any, index: Any) -> Any:
    """The int64 at a place of the array whose address a kernel was given."""

    def generate(_context: Any, b: Any, _signature: Any, arguments: Any) -> Any:
        return load(b, b.add(arguments[0], b.mul(arguments[1], LONG(8))), LONG, 8)

    return types.int64(types.int64, types.int64), generate


def _word(b: Any, place: Any, index: Any) -> Any:
    return b.inttoptr(b.add(place, b.mul(index, LONG(8))), LONG.as_pointer())


@intrinsic
def loaded(context: Any, place: Any, index: Any) -> Any:
    """The int64 at a place, as another thread has left it."""

    def generate(_context: Any, b: Any, _signature: Any, arguments: Any) -> Any:
        return b.load_atomic(_word(b, *arguments), "seq_cst", 8)

    return types.int64(types.int64, types.int64), generate


@intrinsic
def put(context: Any, place: Any, index: Any, value: Any) -> Any:
    """Write an int64 for other threads, after all that this one has written."""

    def generate(_context: Any, b: Any, _signature: Any, arguments: Any) -> Any:
        b.store_atomic(arguments[2], _word(b, *arguments[:2]), "seq_cst", 8)

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def swapped(context: Any, place: Any, index: Any, old: Any, new: Any) -> Any:
    """Replace an int64 if it is `old`; whether it was."""

    def generate(_context: Any, b: Any, _signature: Any, arguments: Any) -> Any:
        place, index, old, new = arguments
        return b.extract_value(b.cmpxchg(_word(b, place, index), old, new, "seq_cst", "seq_cst"), 1)

    return types.boolean(types.int64, types.int64, types.int64, types.int64), generate


@intrinsic
def called(context: Any, kernel: Any, place: Any) -> Any:
    """Call a kernel by its address."""

    def generate(_context: Any, b: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), (LONG,))
        b.call(b.inttoptr(arguments[0], kind.as_pointer()), [arguments[1]])

    return types.void(types.int64, types.int64), generate


@intrinsic
def pause(context: Any) -> Any:
    """Tell the processor that this thread looks again and again."""

    def generate(_context: Any, b: Any, _signature: Any, _arguments: Any) -> Any:
        if features():
            b.call(function(b, "llvm.x86.sse2.pause", ir.VoidType()), [])
        else:  # on ARM, "yield"
            b.call(function(b, "llvm.aarch64.hint", ir.VoidType(), INT), [INT(1)])

    return types.void(), generate


@intrinsic
def claimed(context: Any, data: Any) -> Any:
    """The first unit of work that no thread has begun; this thread has it and those of its chunk (`run`)."""

    def generate(_context: Any, b: Any, _signature: Any, arguments: Any) -> Any:
        chunk = load(b, at(b, arguments[0], 8 * CHUNK), LONG, 8)
        return b.atomic_rmw("add", b.inttoptr(arguments[0], LONG.as_pointer()), chunk, "monotonic")

    return types.int64(types.int64), generate


UNITS, CHUNK, ARGUMENTS = 1, 2, 3
"""Where a kernel finds how many units of work there are and how many make a chunk, and its own arguments."""
_CHUNKS = 4  # for each thread, as some are slower


def run(kernel: Any, units: int, threads: int, *arguments: int, held: Sequence[Tensor] = ()) -> None:
    """Run a kernel, which claims `units` of work until there are none, on so many threads. `held` is what it reads and
    fills, if the launch may be recorded (`record`).
    """
    chunk = units if threads < 2 else -(-units // (_CHUNKS * threads))
    data = _array(ARGUMENTS + len(arguments))(0, units, chunk, *arguments)
    _launch(kernel, kernel.ctypes, data, threads)
    if (seen := getattr(_RECORDS, "seen", None)) is not None:
        seen(functools.partial(_launch, kernel, kernel.ctypes, data, threads, held))


def _launch(kernel: Any, call: Callable[[int], None], data: Any, threads: int, _held: Sequence[Tensor] = ()) -> None:
    data[0], place = 0, ctypes.addressof(data)
    if threads < 2:
        call(place)
    else:
        _team().run(kernel.address, call, place, threads - 1)
    if data[0] < data[UNITS]:  # a thread that finds no memory ends before its first unit, and numba only prints that
        raise MemoryError("a kernel found no memory for its sums")


_IDLE, _ASKED, _BUSY = range(3)
_STATE, _AWAKE, _KERNEL, _DATA, _LINE = 0, 1, 2, 3, 8
"""What lies on a helper's board, which is a line of the cache: what it does, whether it looks at the board at all, and
the kernel and data that it is asked to run.
"""
_LOOKS = 5_000
"""How often a helper without work looks at its board before it lets go of the processor: 0.2 to 3 ms."""
_LATE, _CALM = 1e-4, 2000
"""A helper is late that needs so many seconds more for what it has begun than all the rest has taken."""
_WINDOW, _USED, _OFTEN = 0.05, 0.8, 50
"""Each so many seconds it is looked up whether helpers were late, or this thread had less than so much of a processor
because the system took it away more often than so many times a second. Twice in a row, and the machine is busy.
"""


def taken_away() -> int:
    """How often the system has taken the processor from this thread; 0 where it does not count that."""
    try:
        import resource

        return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
    except (ImportError, AttributeError):  # not on Linux
        return 0


class _Team:
    """Threads that help the one that launches a kernel.

    A helper looks at its board for a while before it sleeps, as OpenMP's threads do: a decode step launches a kernel
    each 0.2 ms, and to wake a thread takes a quarter of that. One thread has the team at a time; another one that
    launches a kernel meanwhile runs it alone. On a machine that is busy otherwise, a helper may lose its processor
    amid its work, or take that of the thread which it should help. Then half of them are asked, until `_CALM` kernels
    have met nothing of the kind.
    """

    def __init__(self, size: int) -> None:
        self._memory = (ctypes.c_int64 * (_LINE * (size + 1)))()
        self._first = -ctypes.addressof(self._memory) // 8 % _LINE
        self._boards = ctypes.addressof(self._memory) + 8 * self._first
        self._size, self._most, self._calm = size, size, 0
        self._since, self._late, self._busy, self._seen = 0.0, 0, False, (0, 0.0, 0)
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(max(1, size), thread_name_prefix="ragkv-kernel")
        self._help, self._ask, self._wait = (compiled(work).ctypes for work in (_help, _ask, _wait))

    def run(self, kernel: int, call: Callable[[int], None], place: int, helpers: int) -> None:
        """Run a kernel, with the data at a place, and return when nobody runs it any more."""
        if not self._lock.acquire(blocking=False):
            call(place)
            return
        try:
            helpers = min(helpers, self._most)
            data = _array(4)(self._boards, helpers, kernel, place)
            for at in range(helpers):
                awake = self._first + _LINE * at + _AWAKE
                if not self._memory[awake]:
                    self._memory[awake] = 1
                    with suppress(RuntimeError):  # while the interpreter ends nobody helps any more
                        self._pool.submit(self._help, self._boards + 8 * _LINE * at)
            asked, started = ctypes.addressof(data), time.perf_counter()
            try:
                self._ask(asked)
                call(place)
                ended = time.perf_counter()
            finally:  # also when it is interrupted: a helper may be amid its work
                self._wait(asked)  # the first call here: an interrupt comes after one
            self._note(helpers, time.perf_counter() - ended > _LATE + ended - started, ended)
        finally:
            self._lock.release()

    def _note(self, helpers: int, late: bool, now: float) -> None:
        self._calm, self._late = self._calm + 1, self._late + late
        if (passed := now - self._since) > _WINDOW:
            (owner, used, taken), self._seen = self._seen, (threading.get_ident(), time.thread_time(), taken_away())
            _, used_now, taken_now = self._seen
            lost = used_now - used < _USED * passed and taken_now - taken > _OFTEN * passed
            was_busy, self._busy = self._busy, self._late > 1 or (lost and owner == self._seen[0])
            self._since, self._late = now, 0
            if self._busy:
                self._calm = 0
                self._most = helpers // 2 if was_busy else self._most
        if self._calm >= _CALM and self._most < self._size:
            self._calm, self._most = 0, min(self._size, 2 * self._most + 1)


def _help(board):
    """Run what is asked for, until nothing has been for a while."""
    left = _LOOKS
    while left > 0:
        if loaded(board, _STATE) == _ASKED and swapped(board, _STATE, _ASKED, _BUSY):
            called(loaded(board, _KERNEL), loaded(board, _DATA))
            put(board, _STATE, _IDLE)
            left = _LOOKS
        pause()
        left -= 1
    put(board, _AWAKE, 0)


def _ask(data):
    """Ask helpers for a kernel: the boards, how many, its address and that of its data."""
    for at in range(loaded(data, 1)):
        board = loaded(data, 0) + 8 * _LINE * at
        put(board, _KERNEL, loaded(data, 2))
        put(board, _DATA, loaded(data, 3))
        put(board, _STATE, _ASKED)


def _wait(data):
    """Wait for those who have begun; nobody begins afterwards."""
    for at in range(loaded(data, 1)):
        board = loaded(data, 0) + 8 * _LINE * at
        if not swapped(board, _STATE, _ASKED, _IDLE):
            while loaded(board, _STATE) != _IDLE:
                pause()


_RECORDS = threading.local()


def record(seen: Callable[[Callable[[], None]], object] | None) -> None:
    """From here on give `seen` what repeats each launch of this thread; None: no longer."""
    _RECORDS.seen = seen


@functools.cache
def _array(length: int) -> Any:
    return ctypes.c_int64 * length


_THREADS = threading.local()


@functools.cache
def _set_threads() -> tuple[Callable[[int], object], Callable[[int], object]]:
    """What sets the number of torch's threads for this thread alone: OpenMP's own function and MKL's, where torch has
    them. torch's sets it as well for each thread that is yet to use torch, which would keep it.
    """
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
            return library.omp_set_num_threads, getattr(library, "MKL_Set_Num_Threads_Local", operator.index)
    return torch.set_num_threads, operator.index


@contextmanager
def instead_of_torch() -> Iterator[None]:
    """Within, torch's own operations are on one thread, and as many kernels as before on several: OpenMP's threads look
    for work for milliseconds after each operation, and take the processors from the kernels' threads.
    """
    if (number := torch.get_num_threads()) == 1:
        yield
        return
    of_openmp, of_mkl = _set_threads()
    try:
        _THREADS.number = number
        of_openmp(1)
        of_mkl(1)
        yield
    finally:  # each is the first call where it stands: an interrupt comes after one
        _THREADS.number = None
        try:
            of_openmp(number)
        finally:
            of_mkl(0)  # as many as the process has


@contextmanager
def by_torch() -> Iterator[None]:
    """Within `instead_of_torch`, an operation of torch on all threads after all."""
    if (number := getattr(_THREADS, "number", None)) is None:
        yield
        return
    of_openmp, of_mkl = _set_threads()
    try:
        of_openmp(number)
        of_mkl(number)
        yield
    finally:
        if getattr(_THREADS, "number", None) is not None:  # else an interrupt has ended the pass before this
            of_openmp(1)
            of_mkl(1)


def threads() -> int:
    """How many threads kernels have: as many as torch has, or had before it left them to kernels."""
    found: int | None = getattr(_THREADS, "number", None)
    return torch.get_num_threads() if found is None else found


def threads_for(numbers: int, each: int) -> int:
    """On how many of these threads to run work on so many numbers, of which `each` are worth one."""
    return max(1, min(threads(), numbers // each))


_COMPILING = threading.RLock()


def once(make: Callable[..., Any]) -> Callable[..., Any]:
    """`functools.cache`, but threads that ask at the same time wait for one result instead of making two."""
    made = functools.cache(make)

    @functools.wraps(make)
    def found(*arguments: Any) -> Any:
        with _COMPILING:
            return made(*arguments)

    found.cache_clear = made.cache_clear  # type: ignore[attr-defined]
    return found


@once
def _team() -> _Team:
    return _Team((os.cpu_count() or 1) - 1)


def _begin_again() -> None:
    """In the child of a fork, which has none of these threads: one that holds the lock would never let go of it."""
    global _COMPILING
    _COMPILING = threading.RLock()
    _team.cache_clear()  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_begin_again)


def compiled(function: Callable[..., None], *, fast: Sequence[str] = ()) -> Any:
    """A kernel for `run`, compiled, and kept in the user's cache folder. `fast` is what LLVM may do to all float
    arithmetic (`FAST`).
    """
    options: dict[str, Any] = {"fastmath": set(fast), "error_model": "numpy", "boundscheck": False}
    signature = types.void(types.int64)
    try:
        with _keeping(function):
            return numba.cfunc(signature, cache=True, **options)(function)
    except Exception:  # no folder that it may be kept in, a full disk, a damaged file; else it is raised again
        return numba.cfunc(signature, **options)(function)


@contextmanager
def _keeping(function: Callable[..., None]) -> Iterator[None]:
    """Keep what is compiled in the user's cache folder, unless NUMBA_CACHE_DIR names one. Numba's own choice, beside
    this file, would be left behind there when the package is uninstalled, and hide an editable install.

    Each variant of a kernel has a folder of its own. In one folder, numba's index would name the file of another
    variant if two processes compiled both at once.
    """
    before = numba.config.CACHE_DIR
    try:
        kept = Path(before) if before else user_folder("XDG_CACHE_HOME", ".cache") / "ragkv" / "numba"
        folder = kept / _version() / _variant(function)
        folder.mkdir(parents=True, exist_ok=True)
        numba.config.CACHE_DIR = str(folder)
        yield
    finally:
        numba.config.CACHE_DIR = before


@functools.cache
def _version() -> str:
    """What distinguishes this module from earlier ones: numba sees only whether a kernel's own file has changed."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]


def _variant(function: Callable[..., None]) -> str:
    """What distinguishes a kernel from others of the same code: what it was made for, and the processor."""
    made_for = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    processor = numba.config.CPU_NAME or binding.get_host_cpu_name(), sorted(features())
    return hashlib.sha256(repr((made_for, processor)).encode()).hexdigest()[:8]


def piece(width: int) -> int:
    """How many of `width` numbers make a vector."""
    return math.gcd(width, 16)
