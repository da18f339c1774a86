"""Forward passes that are launched as a whole. On a GPU, the 1,500 kernels of an 8B model's pass take longer to launch
than to run; on a CPU, a quarter of a decode step with 100M parameters is overhead of Python and torch.

`DecodeGraph` captures whole decode steps. A step of the same sequences as the last ones, of one token each, differs
from those only in the tokens, the positions and the lengths, and these are numbers on the device
(`ragkv.attention.batch.Step`, `fixed`). So the eighth such step in a row is captured, and replayed until a sequence
joins or leaves or its memory is full.

`PiecewiseGraphs` captures any other pass of few tokens, such as that of a question, in the pieces between the attention
of two layers, as vLLM does: what a layer computes for a token outside attention does not depend on its context. Only
attention is launched kernel by kernel. A graph is made for a number of tokens, to which a pass is padded.

On a GPU a piece is a CUDA graph (`Capture`); on a CPU it is the list of its operations (`Recording`).

Both compute what the model's modules computed when they were captured, from weights at fixed addresses. So every pass
checks that the modules are the same (`ModuleState`), and captures are dropped when they are not.
"""

from __future__ import annotations

import bisect
import functools
import logging
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ragkv.attention import varlen
from ragkv.attention.batch import Step
from ragkv.attention.partial import LayerCall
from ragkv.attention.sequence import TokenSequence
from ragkv.model.module_state import ModuleState
from ragkv.util.plugins import kernel_module

if TYPE_CHECKING:
    from ragkv.model.language_model import LanguageModel

logger = logging.getLogger(__name__)

ALIKE_STEPS, MAX_ALIKE_STEPS = 8, 32
"""A step is captured after this many consecutive steps of the same sequences; up to MAX_ALIKE_STEPS while captured
steps have too few replays to be worth their capture.
"""
WORTH = 12
"""Replays that make a capture worthwhile; it takes as long as some steps in pieces."""
SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Token counts to which a pass is padded; with more, the device is busy for longer than the launches take."""
PASSES = 2
"""A size is captured at its PASSES-th pass; a capture takes as long as two passes."""
RECORDED_SIZES, RECORDED_PASSES, MAX_RECORDED_TOKENS = range(1, 17), 8, 32
"""The same on a CPU, where padding takes time. MAX_RECORDED_TOKENS bounds the tokens of all recorded sizes together,
because each keeps memory for all its intermediate results: 0.3 MB for a token in a layer of an 8B model.
"""
MAX_PASSES = 1024
"""Passes of a size before its capture, at most; the number doubles when captures are dropped with too few replays."""


class Capture:
    """Captures what this thread launches between `begin` and `end`; `end` returns a function that launches it again.

    All graphs of a runtime share their memory pool. That is safe because they are launched one after another: a result
    that is needed later has an owner, and is read before another graph is launched.
    """

    shares = True
    """Whether what runs between two pieces may reuse the memory of an earlier piece."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._first = self.whole(lambda: torch.zeros(1, device=device))
        """Keeps torch's memory pool for graphs alive: it is freed with its last graph and cannot be used again."""

    def whole(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """A function that runs the kernels of `work` again and returns the refilled tensor; `work` only captures."""
        with self.aside():
            self.begin()
            result = work()
            launch = self.end()

        def replay() -> Tensor:
            launch()
            return result

        return replay

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Switch to the device and to the capturing stream: torch cannot capture the default stream."""
        before = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream):  # also selects its device
            try:
                yield
            finally:
                if self._graph is not None:  # a piece has failed
                    with suppress(RuntimeError):
                        self.end()
        before.wait_stream(self._stream)

    def begin(self) -> None:
        """Capture from here on; nothing runs. Other threads may copy KV at the same time."""
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Callable[[], None]:
        """End the piece."""
        assert self._graph is not None
        graph, self._graph = self._graph, None
        graph.capture_end()
        return graph.replay


_REFUSED = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
_UNSEEN = {Tensor.tolist, Tensor.numpy, Tensor.__array__}
"""Methods that give Python a tensor's numbers without an operation that could be seen."""
_COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.clone.default}
_UNFILLED = {"empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like"}


class Recording:
    """`Capture` for a CPU: the operations between `begin` and `end` are recorded, and replayed into the same memory.
    Views of that memory, and everything that Python decides on the way, are evaluated once.
    """

    shares = False

    def __init__(self) -> None:
        self._modes: list[Any] = []
        self._kernels = kernel_module("ragkv.util.kernels")

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Stop recording when the context is left."""
        try:
            yield
        finally:
            if self._modes:
                self.end()

    def begin(self) -> None:
        """Record from here on what this thread computes. RuntimeError if it depends on computed numbers."""
        self._modes = [_Operations(), _NoNumbers()]
        for mode in self._modes:
            mode.__enter__()
        if self._kernels is not None:
            self._kernels.record(self._modes[0].calls.append)

    def end(self) -> Callable[[], None]:
        """End the piece."""
        if self._kernels is not None:
            self._kernels.record(None)
        for mode in reversed(self._modes):
            mode.__exit__(None, None, None)
        calls, self._modes = self._modes[0].calls, []

        def replay() -> None:
            for call in calls:
                call()

        return replay


class _NoNumbers(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _UNSEEN:
            raise RuntimeError(f"it reads the numbers of a tensor ({function.__name__})")
        return function(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    """Records the operations that fill memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Callable[[], object]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would import its compiler (a second) at the first operation, only to leave this class out."""
        return False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _composite(op):  # under inference_mode an operation arrives undecomposed
            with self:
                return op.decompose(*args, **kwargs)
        if not _REFUSED.isdisjoint(op.tags) and not (op is torch.ops.aten.index.Tensor and _places(args[1])):
            raise RuntimeError(f"it depends on computed numbers ({op})")
        result = op(*args, **kwargs)
        if op._schema.is_mutable:
            self.calls.append(functools.partial(op._op, *args, **kwargs))
        elif op.overloadpacket.__name__ not in _UNFILLED:
            given = {_memory(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            if any(_memory(tensor) not in given for tensor in made):
                self.calls.append(_again(op, args, kwargs, made))
        return result


def _places(index: Sequence[Tensor | None]) -> bool:
    """Whether an index uses positions only; with a mask, the result's shape depends on the mask's numbers."""
    return all(each is None or each.dtype not in (torch.bool, torch.uint8) for each in index)


@functools.cache
def _composite(op: Any) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _again(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], filled_tensors: Sequence[Tensor]
) -> Callable[[], object]:
    """A function that repeats an operation into the memory that it allocated: torch's own function if that can write
    there, because calling it takes half as long as calling the operation.
    """
    if op in _COPIES:
        return functools.partial(filled_tensors[0].copy_, args[0])
    name = op.overloadpacket.__name__
    function = getattr(torch, name, None) or getattr(torch._C._nn, name, None)
    if len(filled_tensors) == 1 and function is not None:
        again, before = functools.partial(function, *args, **kwargs, out=filled_tensors[0]), filled_tensors[0].clone()
        try:
            again()
        except (TypeError, RuntimeError):
            logger.debug("%s does not fill memory that it is given", op)
        else:
            if torch.equal(before.nan_to_num(), filled_tensors[0].nan_to_num()):
                return again
        filled_tensors[0].copy_(before)

    def filled() -> None:
        for mine, fresh in zip(filled_tensors, tree_leaves(op._op(*args, **kwargs)), strict=True):
            mine.copy_(fresh)

    return filled


@dataclass(frozen=True, slots=True)
class _Piece:
    """The work up to a layer's attention: `replay` fills the tensors of `call`, and attention then fills `out`."""

    replay: Callable[[], None]
    call: LayerCall
    out: Tensor


class _Pieces:
    """A pass of some number of tokens that is being captured: each layer's attention ends a piece."""

    def __init__(self, capture: Capture | Recording) -> None:
        self._capture = capture
        self._given: dict[tuple[str, torch.Size], Tensor] = {}
        self._outs: dict[tuple[int, ...], Tensor] = {}
        """Attention outputs by shape, shared by all layers, as are queries, keys and values; zeroed, because padding is
        never filled."""
        self.pieces: list[_Piece] = []

    def attend(self, call: LayerCall) -> Tensor:
        """As `AttentionBackend.attend`; the result is filled at replay."""
        held = call
        if self._capture.shares:
            query, key, value = (self._held(name, getattr(call, name)) for name in ("query", "key", "value"))
            held = replace(call, query=query, key=key, value=value)
        replay = self._capture.end()
        shape = (*call.query.shape[:-1], call.value.shape[-1] or call.key.shape[-1])
        if shape not in self._outs:
            self._outs[shape] = call.query.new_zeros(shape)
        self.pieces.append(_Piece(replay, held, self._outs[shape]))
        self._capture.begin()
        return self._outs[shape]

    def _held(self, name: str, states: Tensor) -> Tensor:
        """A copy of the layer's states in memory that all layers share, to save memory in many graphs."""
        known = name, states.shape
        if known not in self._given:
            self._given[known] = torch.empty_like(states)
        return self._given[known].copy_(states)


@dataclass(frozen=True, slots=True)
class _Captured:
    """A captured pass: its input tensors, its pieces, the work after the last of them, and the logits."""

    tokens: Tensor
    positions: Tensor
    keep: Tensor
    pieces: Sequence[_Piece]
    last: Callable[[], None]
    logits: Tensor

    def run(self, step: Step, *numbers: Tensor) -> Tensor:
        """The logits of the step's kept tokens; `numbers` are its tokens, positions and kept ones."""
        for held, given in zip((self.tokens, self.positions, self.keep), numbers, strict=True):
            held[: len(given)] = given
        here, whole = slice(len(numbers[0])), len(numbers[0]) == len(self.tokens)
        for piece in self.pieces:
            piece.replay()
            if whole:
                piece.out.copy_(step.attend(piece.call))
            else:
                query, key, value = (t[:, :, here] for t in (piece.call.query, piece.call.key, piece.call.value))
                piece.out[:, :, here] = step.attend(replace(piece.call, query=query, key=key, value=value))
        self.last()
        return self.logits[: len(numbers[2])].clone()


class PiecewiseGraphs:
    """Runs forward passes of one model, and captures those whose size recurs. Used by one thread at a time.

    Without `capture` they are recorded, for a CPU.
    """

    def __init__(self, capture: Callable[[torch.device], Capture] | None) -> None:
        self._passes: Counter[tuple[int, int]] = Counter()
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._capture = capture
        self._sizes: Sequence[int] = RECORDED_SIZES if capture is None else SIZES
        self._needed = RECORDED_PASSES if capture is None else PASSES
        self._off = False
        self._threads = 0
        self._replays = 0
        self._state: ModuleState | None = None
        """What all captures were made with; None if there are none."""

    def logits(self, model: LanguageModel, step: Step, tokens: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
        """`model.logits(step, tokens, positions, keep)`."""
        if self._capture is None and (threads := _threads()) != self._threads:
            self._threads = threads  # a recording is for a fixed number of threads
            self.forget()
        if self._state is not None and not self._state.same():
            if self._replays < WORTH:
                self._needed = min(2 * self._needed, MAX_PASSES)
            self.forget()
        if not self._off and len(tokens) <= self._sizes[-1]:
            size = self._padded(tokens), self._padded(keep)
            self._passes[size] += 1
            if size not in self._captured and self._passes[size] >= self._needed:
                try:
                    self._state = self._state or ModuleState(model.network)
                    captured = self._capture_pass(model, *size)
                    if self._capture is None:
                        _compare(captured, model, step, tokens, positions, keep)
                        self._make_room(len(tokens))
                    self._captured[size] = captured
                except Exception as error:  # the model synchronises with the device, or leaves torch
                    self._off = True
                    logger.info("passes of this model run kernel by kernel: they cannot be captured: %s", error)
            if size in self._captured:
                self._replays += 1
                return self._captured[size].run(step, tokens, positions, keep)
        return model.logits(step, {"input_ids": tokens[None]}, positions, keep)

    def forget(self) -> None:
        """Drop all captures."""
        self._captured.clear()
        self._passes.clear()
        self._state, self._replays = None, 0

    def _padded(self, numbers: Tensor) -> int:
        return self._sizes[bisect.bisect_left(self._sizes, len(numbers))]

    def _capture_pass(self, model: LanguageModel, tokens: int, logits_kept: int) -> _Captured:
        if {parameter.device for parameter in model.network.parameters()} != {model.device}:
            raise ValueError("its layers are on several devices")
        capture = Recording() if self._capture is None else self._capture(model.device)
        ids, positions, keep = (
            torch.zeros(n, dtype=torch.long, device=model.device) for n in (tokens, tokens, logits_kept)
        )
        pieces = _Pieces(capture)
        with capture.aside():
            capture.begin()
            logits = model.logits(pieces, {"input_ids": ids[None]}, positions, keep)
            return _Captured(ids, positions, keep, pieces.pieces, capture.end(), logits)

    def _make_room(self, tokens: int) -> None:
        """Drop the oldest recordings until there is room for one of `tokens` tokens."""
        while self._captured and tokens + sum(count for count, _ in self._captured) > MAX_RECORDED_TOKENS:
            oldest = next(iter(self._captured))
            del self._captured[oldest], self._passes[oldest]


def _threads() -> int:
    """How many threads a pass may use on a CPU."""
    kernels = kernel_module("ragkv.util.kernels")
    return torch.get_num_threads() if kernels is None else int(kernels.threads())


def _compare(recorded: _Captured, model: LanguageModel, step: Step, *numbers: Tensor) -> None:
    """ValueError if a recording gives other logits than the model: it does not capture everything that models do."""
    tokens, positions, keep = numbers
    logits = model.logits(step, {"input_ids": tokens[None]}, positions, keep)
    if not torch.equal(recorded.run(step, *numbers).nan_to_num(), logits.nan_to_num()):
        raise ValueError("a recording of it computes something else")


class DecodeGraph:
    """Runs a model's steps, and captures those that repeat. Used by one thread at a time."""

    def __init__(self) -> None:
        self._seen: list[object] = []
        """What the last steps depended on: their sequences, the chunks of these, and the memory of their own KV."""
        self._at: list[tuple[int, int]] = []
        """Length and position of each sequence after the last step; the graph has counted up to there."""
        self._alike, self._wanted, self._replays = 0, ALIKE_STEPS, 0
        self._captured: tuple[Tensor, Callable[[], Tensor], Callable[[], Tensor]] | None = None
        """The token ids' input tensor, the function that computes their logits, and the capture, which keeps all memory
        that the graph's kernels read.
        """
        self._state: ModuleState | None = None
        """What the captured step was made with."""
        self._off = False
        self._capture = functools.cache(Capture)
        self._pieces = PiecewiseGraphs(self._capture)
        self._recorded = PiecewiseGraphs(None)

    def forget(self) -> None:
        """Drop the sequences, because one of them has ended. For any thread."""
        if self._captured is not None:
            self._wanted = ALIKE_STEPS if self._replays >= WORTH else min(2 * self._wanted, MAX_ALIKE_STEPS)
        self._seen, self._alike, self._replays, self._captured = [], 0, 0, None

    def step(self, model: LanguageModel, sequences: Sequence[TokenSequence], ids: Sequence[Sequence[int]]) -> Tensor:
        """`model.step(sequences, ids)`."""
        able = model.joins and model.device.type in varlen.DEVICES
        if not able:
            self.forget()
            return model.step(sequences, ids, run=self._recorded.logits if model.device.type == "cpu" else None)
        if self._captured is not None and not (self._state and self._state.same()):
            self.forget()
        seen = _seen(sequences, ids)
        if seen is None:
            self.forget()
            return self._step(model, sequences, ids)
        same = len(seen) == len(self._seen) and all(map(operator.is_, seen, self._seen))
        if not same or [(sequence.cache.length, sequence.position) for sequence in sequences] != self._at:
            self.forget()
            self._seen = seen
        self._alike += 1
        logits = self._next(model, sequences, ids)
        self._at = [(sequence.cache.length, sequence.position) for sequence in sequences]
        return logits

    def _next(self, model: LanguageModel, sequences: Sequence[TokenSequence], ids: Sequence[Sequence[int]]) -> Tensor:
        captured = self._captured
        if captured is not None:
            tokens, replay, _ = captured
            tokens.copy_(torch.tensor([i for each in ids for i in each]), non_blocking=True)
            logits = replay().clone()
            self._replays += 1
            for sequence in sequences:
                sequence.cache.commit(1)
                sequence.position += 1
            return logits
        if self._off or self._alike < self._wanted:
            return self._step(model, sequences, ids)
        logits, tokens, again = model.repeatable(sequences, ids, self._pieces.logits)
        self._off = again is None
        if again is not None:
            try:
                self._state = ModuleState(model.network)
                self._captured = tokens, self._capture(model.device).whole(again), again
            except Exception as error:  # the model synchronises with the device, or leaves torch
                self._off = True
                logger.info("decode steps of this model run kernel by kernel: they cannot be captured: %s", error)
        return logits

    def _step(self, model: LanguageModel, sequences: Sequence[TokenSequence], ids: Sequence[Sequence[int]]) -> Tensor:
        return model.step(sequences, ids, run=self._pieces.logits)


def _seen(sequences: Sequence[TokenSequence], ids: Sequence[Sequence[int]]) -> list[object] | None:
    """What a step depends on; None unless all are ordinary sequences that take one token and have room for it."""
    seen: list[object] = []
    for sequence, each in zip(sequences, ids, strict=True):
        if type(sequence) is not TokenSequence or sequence.silent or len(each) != 1:
            return None
        place = sequence.cache.lies_in()
        if place is None or not 0 < sequence.cache.length < place[0].capacity:
            return None
        seen += (sequence, sequence.groups, next(iter(place[0].keys.values()), None))
    return seen
