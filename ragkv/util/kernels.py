"""Shared code of ragkv's CPU kernels, which numba compiles for the processor that they run on.

numba has no explicit vectors, so the inner loops are written in LLVM IR (`numba.extending.intrinsic`) with the
functions of this module. A compiled kernel takes the address of an array of int64 and is launched by `run`. Importing
this module raises ImportError on processors that the kernels do not support.
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
import resource
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
"""Fast-math flags for LLVM. "nnan" and "ninf" are not among them: a NaN must stay NaN."""
POLYNOMIAL = (1.8775767e-3, 8.9893397e-3, 5.5826318e-2, 2.4015361e-1, 6.9315308e-1, 9.9999994e-1)
"""Polynomial for 2^x with x from 0 to 1, highest power first."""
SIZES = {"int8": 1, "uint8": 1, "bfloat16": 2, "float16": 2, "float32": 4}
_NEEDED = ("avx2", "f16c", "fma")


def features() -> frozenset[str]:
    """LLVM's names of the features of the processor, or of numba's target if one is set; empty on ARM."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        return frozenset()
    chosen = numba.config.CPU_FEATURES
    flags = binding.get_host_cpu_features().flatten() if chosen is None else chosen
    return frozenset(name[1:] for name in flags.split(",") if name.startswith("+"))


def _missing() -> list[str]:
    """The features that the kernels need and the processor lacks. Without F16C, LLVM would call a library function per
    float16, which numba does not provide for vectors: the process would crash.
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
    """Whether the processor has a dot-product instruction for "bfloat16" or "int8"."""
    needed = {"bfloat16": {"avx512bf16", "avx512vl"}, "int8": {"avx512vnni", "avx512bw"}}[kind]
    return needed <= features()


@functools.cache
def has_tiles() -> bool:
    """Whether the processor has matrix units for bfloat16 (AMX)."""
    return "amx-bf16" in features()


def floats(width: int) -> ir.VectorType:
    """A vector of `width` float32."""
    return ir.VectorType(FLOAT, width)


def pointer_to(b: Any, address: Any, more: int) -> Any:
    """The address plus `more` bytes."""
    return b.add(address, LONG(more)) if more else address


def load(b: Any, address: Any, kind: Any, align: int = 1) -> Any:
    """Load a value of an LLVM type from an address."""
    return b.load(b.inttoptr(address, kind.as_pointer()), align=align)


def store(b: Any, value: Any, address: Any, align: int = 1) -> None:
    """Store a value at an address."""
    b.store(value, b.inttoptr(address, value.type.as_pointer()), align=align)


def widened(b: Any, address: Any, kind: str, width: int) -> Any:
    """Load `width` numbers of `kind` from an address and convert them to float32."""
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
    """Convert float32 numbers to "float32" or "bfloat16"."""
    return b.fptrunc(numbers, ir.VectorType(BFloat(), numbers.type.count)) if kind == "bfloat16" else numbers


def repeated(b: Any, number: Any, width: int) -> Any:
    """Broadcast a number to a vector of `width`."""
    vector = ir.VectorType(number.type, width)
    undefined, zeros = ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(INT, width), [0] * width)
    return b.shuffle_vector(b.insert_element(undefined, number, INT(0)), undefined, zeros)


def summed(b: Any, vectors: list[Any]) -> Any:
    """The horizontal sums of 2, 4, … vectors, as one vector."""
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


def prefetch(b: Any, place: Any) -> None:
    """Prefetch a cache line into L2."""
    pointer = ir.IntType(8).as_pointer()
    called = function(b, "llvm.prefetch.p0", ir.VoidType(), pointer, INT, INT, INT)
    b.call(called, [b.inttoptr(place, pointer), INT(0), INT(2), INT(1)])


def function(b: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Call one of LLVM's intrinsics."""
    return b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(result, arguments), name)


@intrinsic
def address(context: Any, array: Any) -> Any:
    """The address of an array's data.

    numba frees an array after the last use of its name. So a kernel must ask for the address within the loop that uses
    the memory: asked for before the loop, it would point to freed memory.
    """

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        made = context.make_array(signature.args[0])(context, b, arguments[0])
        return b.ptrtoint(made.data, LONG)

    return types.int64(array), generate


LITERAL = object()
"""The type of an argument of `emits` that is known when the kernel is compiled."""


def emits(result: Any, *expected: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a function that kernels can call, with these types of its result and its arguments, of one that gets LLVM's
    builder and the arguments' values, and returns the result's value. A LITERAL argument is Python's value, the others
    LLVM's.
    """

    def made(generate: Callable[..., Any]) -> Any:
        @functools.wraps(generate)  # numba drops the first parameter, which is its own context here
        def typed(_context: Any, *own: Any) -> Any:
            kinds = [own_kind if kind is LITERAL else kind for kind, own_kind in zip(expected, own, strict=True)]

            def emitted(_context: Any, b: Any, _signature: Any, values: Any) -> Any:
                of_each = zip(expected, own, values, strict=True)
                return generate(b, *(one.literal_value if kind is LITERAL else value for kind, one, value in of_each))

            return result(*kinds), emitted

        return intrinsic(prefer_literal=LITERAL in expected)(typed)

    return made


@emits(types.CPointer(types.float32), types.int64)
def reals(b: Any, place: Any) -> Any:
    """View the memory at an address as float32 numbers."""
    return b.inttoptr(place, FLOAT.as_pointer())


@emits(types.CPointer(types.int64), types.int64)
def integers(b: Any, place: Any) -> Any:
    """View the memory at an address as int64 numbers."""
    return b.inttoptr(place, LONG.as_pointer())


@emits(types.CPointer(types.uint8), types.int64)
def octets(b: Any, place: Any) -> Any:
    """View the memory at an address as uint8 numbers."""
    return b.inttoptr(place, ir.IntType(8).as_pointer())


@emits(types.float32, types.int32)
def float_of(b: Any, bits: Any) -> Any:
    """The float32 with these bits."""
    return b.bitcast(bits, FLOAT)


def _word(b: Any, place: Any, index: Any) -> Any:
    return b.inttoptr(b.add(place, b.mul(index, LONG(8))), LONG.as_pointer())


@emits(types.int64, types.int64, types.int64)
def argument(b: Any, data: Any, index: Any) -> Any:
    """Element `index` of a kernel's argument array."""
    return b.load(_word(b, data, index), align=8)


@emits(types.int64, types.int64, types.int64)
def atomic_load(b: Any, place: Any, index: Any) -> Any:
    """Atomic load of an int64 that other threads write (sequentially consistent)."""
    return b.load_atomic(_word(b, place, index), "seq_cst", 8)


@emits(types.void, types.int64, types.int64, types.int64)
def atomic_store(b: Any, place: Any, index: Any, value: Any) -> None:
    """Atomic store of an int64: threads that see it also see all earlier writes of this thread."""
    b.store_atomic(value, _word(b, place, index), "seq_cst", 8)


@emits(types.boolean, types.int64, types.int64, types.int64, types.int64)
def compare_and_swap(b: Any, place: Any, index: Any, old: Any, new: Any) -> Any:
    """Compare and swap an int64; whether it was `old`."""
    return b.extract_value(b.cmpxchg(_word(b, place, index), old, new, "seq_cst", "seq_cst"), 1)


@emits(types.void, types.int64, types.int64)
def call_kernel(b: Any, kernel: Any, place: Any) -> None:
    """Call a kernel by its address."""
    kind = ir.FunctionType(ir.VoidType(), (LONG,))
    b.call(b.inttoptr(kernel, kind.as_pointer()), [place])


@emits(types.void)
def pause(b: Any) -> None:
    """Tell the processor that this thread spin-waits."""
    if features():
        b.call(function(b, "llvm.x86.sse2.pause", ir.VoidType()), [])
    else:  # on ARM, "yield"
        b.call(function(b, "llvm.aarch64.hint", ir.VoidType(), INT), [INT(1)])


@emits(types.int64, types.int64)
def claimed(b: Any, data: Any) -> Any:
    """Claim the next chunk of work units (`run`); returns its first unit."""
    chunk = load(b, pointer_to(b, data, 8 * CHUNK), LONG, 8)
    return b.atomic_rmw("add", b.inttoptr(data, LONG.as_pointer()), chunk, "monotonic")


UNITS, CHUNK, ARGUMENTS = 1, 2, 3
"""Indices in a kernel's array: the number of units, the units per chunk, and its own first argument."""
_CHUNKS = 4  # per thread, because some threads are slower


def run(kernel: Any, units: int, threads: int, *arguments: int, held: Sequence[Tensor] = ()) -> None:
    """Run a kernel on this many threads, which claim chunks of `units` work units until none are left. `held` are the
    tensors that it reads and writes; a launch that is recorded (`record`) keeps their memory, even if a parameter among
    them gets other memory (`weight.data = …`).
    """
    chunk = units if threads < 2 else -(-units // (_CHUNKS * threads))
    data = _array(ARGUMENTS + len(arguments))(0, units, chunk, *arguments)
    _launch(kernel, kernel.ctypes, data, threads)
    if (seen := getattr(_RECORDS, "seen", None)) is not None:
        storages = [tensor.untyped_storage() for tensor in held]
        seen(functools.partial(_launch, kernel, kernel.ctypes, data, threads, storages))


def _launch(kernel: Any, call: Callable[[int], None], data: Any, threads: int, _held: Sequence[object] = ()) -> None:
    data[0], place = 0, ctypes.addressof(data)
    if threads < 2:
        call(place)
    else:
        _team().run(kernel.address, call, place, threads - 1)
    if data[0] < data[UNITS]:  # a thread without memory ends before its first unit, and numba only prints the error
        raise MemoryError("a kernel found no memory for its sums")


_IDLE, _REQUESTED, _BUSY = range(3)
_STATE, _AWAKE, _KERNEL, _DATA, _LINE = 0, 1, 2, 3, 8
"""Indices in a helper's mailbox, which is one cache line: its state, whether it is polling the mailbox, and the address
and data of the kernel that it is asked to run.
"""
_POLLS = 5_000
"""How often an idle helper polls its mailbox before it yields the processor: 0.2 to 3 ms."""
_LATE, _CALM = 1e-4, 2000
"""A helper is late if the launching thread waits for it `_LATE` seconds longer than its own share took; `_CALM` is a
number of kernels."""
_LONG = 2e-3
"""Seconds of this thread's own share from which a kernel is worth all helpers on a busy machine too: one that is
preempted takes only a part of it.
"""
_WINDOW, _USED, _OFTEN = 0.05, 0.8, 50
"""Every `_WINDOW` seconds: were helpers late, or did this thread get less than `_USED` of a processor and lose it more
than `_OFTEN` times a second? If so twice in a row, the machine counts as busy.
"""


def taken_away() -> int:
    """How often the system has preempted this thread; 0 where it does not count that (macOS)."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw if hasattr(resource, "RUSAGE_THREAD") else 0


class _Team:
    """Worker threads that help a thread to run a kernel.

    An idle helper spin-waits before it sleeps, as OpenMP's threads do: a decode step launches a kernel every 0.2 ms,
    and waking a thread takes a quarter of that. One thread uses the team at a time; a thread that launches a kernel
    while the team is taken runs it alone. On a busy machine a helper may be preempted in the middle of its work, or
    displace the thread that it should help. Then only half of the helpers are used, until `_CALM` kernels have run
    undisturbed, except for a kernel that took `_LONG` the last time.
    """

    def __init__(self, size: int) -> None:
        self._memory = (ctypes.c_int64 * (_LINE * (size + 1)))()
        self._first = -ctypes.addressof(self._memory) // 8 % _LINE
        self._mailboxes = ctypes.addressof(self._memory) + 8 * self._first
        self._size, self._most, self._calm = size, size, 0
        self._since, self._late, self._asked, self._busy, self._seen = 0.0, 0, 0, False, (0, 0.0, 0)
        self._took: dict[int, float] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(max(1, size), thread_name_prefix="ragkv-kernel")
        self._loop, self._request, self._join = (
            compiled(work).ctypes for work in (_helper_loop, _request_helpers, _join_helpers)
        )

    def run(self, kernel: int, call: Callable[[int], None], place: int, helpers: int) -> None:
        """Run a kernel with the data at `place`; returns when no thread runs it any more."""
        if not self._lock.acquire(blocking=False):
            call(place)
            return
        try:
            helpers = min(helpers, self._size if self._took.get(kernel, 0.0) > _LONG else self._most)
            data = _array(4)(self._mailboxes, helpers, kernel, place)
            for helper in range(helpers):
                awake = self._first + _LINE * helper + _AWAKE
                if not self._memory[awake]:
                    self._memory[awake] = 1
                    with suppress(RuntimeError):  # at interpreter exit there are no helpers
                        self._pool.submit(self._loop, self._mailboxes + 8 * _LINE * helper)
            request, started = ctypes.addressof(data), time.perf_counter()
            try:
                self._request(request)
                call(place)
                ended = time.perf_counter()
            finally:  # also after an interrupt: a helper may be in the middle of its work
                self._join(request)  # the first call here, because Python delivers an interrupt after a call
            self._took[kernel] = ended - started
            self._note(helpers, time.perf_counter() - ended > _LATE + ended - started, ended)
        finally:
            self._lock.release()

    def _note(self, helpers: int, late: bool, now: float) -> None:
        self._calm, self._late, self._asked = self._calm + 1, self._late + late, max(self._asked, helpers)
        if (passed := now - self._since) > _WINDOW:
            (owner, used, taken), self._seen = self._seen, (threading.get_ident(), time.thread_time(), taken_away())
            _, used_now, taken_now = self._seen
            lost = used_now - used < _USED * passed and taken_now - taken > _OFTEN * passed
            was_busy, self._busy = self._busy, self._late > 1 or (lost and owner == self._seen[0])
            if self._busy:
                self._calm = 0
                self._most = self._asked // 2 if was_busy else self._most
            self._since, self._late, self._asked = now, 0, 0
        if self._calm >= _CALM and self._most < self._size:
            self._calm, self._most = 0, min(self._size, 2 * self._most + 1)


def _helper_loop(mailbox):
    """A helper: run requested kernels, and return after a while without requests."""
    left = _POLLS
    while left > 0:
        if atomic_load(mailbox, _STATE) == _REQUESTED and compare_and_swap(mailbox, _STATE, _REQUESTED, _BUSY):
            call_kernel(atomic_load(mailbox, _KERNEL), atomic_load(mailbox, _DATA))
            atomic_store(mailbox, _STATE, _IDLE)
            left = _POLLS
        pause()
        left -= 1
    atomic_store(mailbox, _AWAKE, 0)


def _request_helpers(data):
    """Request a kernel of helpers; `data` is the mailboxes' address, the number of helpers, the kernel and its data."""
    for helper in range(atomic_load(data, 1)):
        mailbox = atomic_load(data, 0) + 8 * _LINE * helper
        atomic_store(mailbox, _KERNEL, atomic_load(data, 2))
        atomic_store(mailbox, _DATA, atomic_load(data, 3))
        atomic_store(mailbox, _STATE, _REQUESTED)


def _join_helpers(data):
    """Withdraw requests that were not started, and spin-wait for the helpers that have started."""
    for helper in range(atomic_load(data, 1)):
        mailbox = atomic_load(data, 0) + 8 * _LINE * helper
        if not compare_and_swap(mailbox, _STATE, _REQUESTED, _IDLE):
            while atomic_load(mailbox, _STATE) != _IDLE:
                pause()


_RECORDS = threading.local()


def record(seen: Callable[[Callable[[], None]], object] | None) -> None:
    """From now on pass `seen` a function for each launch of this thread that repeats it; None stops this."""
    _RECORDS.seen = seen


@functools.cache
def _array(length: int) -> Any:
    return ctypes.c_int64 * length


_THREADS = threading.local()


@functools.cache
def _set_threads() -> tuple[Callable[[int], object], Callable[[int], object]]:
    """The functions that set the number of torch's threads for this thread alone: OpenMP's own and MKL's, if torch has
    them. torch's own function would also affect every thread that uses torch for the first time later.
    """
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
            return library.omp_set_num_threads, getattr(library, "MKL_Set_Num_Threads_Local", operator.index)
    return torch.set_num_threads, operator.index


@contextmanager
def instead_of_torch() -> Iterator[None]:
    """Context in which torch's own operations use one thread, while kernels keep theirs: OpenMP's threads spin for
    milliseconds after each operation, and would take the processors from the kernels' threads.
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
    finally:  # each is the first call in its block, because Python delivers an interrupt after a call
        _THREADS.number = None
        try:
            of_openmp(number)
        finally:
            of_mkl(0)  # back to the process's setting


@contextmanager
def by_torch() -> Iterator[None]:
    """Within `instead_of_torch`, let an operation of torch use all threads after all."""
    if (number := getattr(_THREADS, "number", None)) is None:
        yield
        return
    of_openmp, of_mkl = _set_threads()
    try:
        of_openmp(number)
        of_mkl(number)
        yield
    finally:
        if getattr(_THREADS, "number", None) is not None:  # else an interrupt has ended the pass already
            of_openmp(1)
            of_mkl(1)


def threads() -> int:
    """The number of threads for kernels: torch's, or what it was before `instead_of_torch`."""
    found: int | None = getattr(_THREADS, "number", None)
    return torch.get_num_threads() if found is None else found


def threads_for(numbers: int, each: int) -> int:
    """The number of threads for work on this many numbers, of which `each` are worth a thread."""
    return max(1, min(threads(), numbers // each))


_COMPILING = threading.RLock()


def once(make: Callable[..., Any]) -> Callable[..., Any]:
    """`functools.cache`, but threads that call it at the same time share one result instead of making two."""
    cached = functools.cache(make)

    @functools.wraps(make)
    def found(*arguments: Any) -> Any:
        with _COMPILING:
            return cached(*arguments)

    found.cache_clear = cached.cache_clear  # type: ignore[attr-defined]
    return found


@once
def _team() -> _Team:
    return _Team((os.cpu_count() or 1) - 1)


def _begin_again() -> None:
    """In the child of a fork: replace threads and locks, because a thread that held a lock does not exist there."""
    global _COMPILING
    _COMPILING = threading.RLock()
    _team.cache_clear()  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_begin_again)


def compiled(function: Callable[..., None], *, fast: Sequence[str] = ()) -> Any:
    """A kernel for `run`, compiled and cached in the user's folder. `fast` are LLVM's fast-math flags (`FAST`)."""
    options: dict[str, Any] = {"fastmath": set(fast), "error_model": "numpy", "boundscheck": False}
    signature = types.void(types.int64)
    try:
        with _keeping(function):
            return numba.cfunc(signature, cache=True, **options)(function)
    except Exception:  # no folder for the cache, a full disk, a damaged file; any other error is raised again
        return numba.cfunc(signature, **options)(function)


@contextmanager
def _keeping(function: Callable[..., None]) -> Iterator[None]:
    """Cache compiled code in the user's cache folder, unless NUMBA_CACHE_DIR is set. Numba's own choice, beside this
    file, would be left behind when the package is uninstalled, and hide an editable install.

    Each variant of a kernel has a folder of its own. In a shared folder, numba's index would name the file of another
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
    """Identifies the code of this module: numba only notices that a kernel's own file has changed."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]


def _variant(function: Callable[..., None]) -> str:
    """Identifies a kernel among others of the same code: its parameters, and the processor."""
    made_for = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    processor = numba.config.CPU_NAME or binding.get_host_cpu_name(), sorted(features())
    return hashlib.sha256(repr((made_for, processor)).encode()).hexdigest()[:8]


def vector_width(width: int) -> int:
    """The vector width for a row of `width` numbers."""
    return math.gcd(width, 16)
