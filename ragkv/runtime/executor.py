"""`Executor`: what the runtime asks of whatever runs a model.

The runtime schedules requests, samples tokens and hands out answers; an executor runs sequences of tokens over placed
chunks and returns logits. `ragkv.runtime.batch_executor` is the first one and the reference: transformers' modules with
ragkv's attention. llama.cpp can be another: chunk KV is an opaque state (`llama_state_seq_set_data`), placed by moving
it (`seq_add`) and joined by copying it into a sequence (`seq_cp`), and several sequences share a batch.

An executor may rely on this:

- Chunk KV is what it made itself, or was loaded for it. The runtime reads only `tokens`, `nbytes` and `encoded_at`.
- One thread at a time calls it. A `TokenSequence` is the same object from its first pass to its last; `groups` do not
  change between passes except by `lay_out`, and what belongs to it may be kept in a `weakref.WeakKeyDictionary`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ragkv.attention.kv import PlacedChunk
from ragkv.attention.sequence import TokenSequence
from ragkv.errors import UnsupportedModelError
from ragkv.types import Capability

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ragkv.engines import Engine, ModelFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorTraits:
    """What an executor can do.

    `serves`: the engines' needs that it meets for every model that it accepts (MERGE: it joins independent chunks;
    MOVE: it moves them; TENSORS: it copies them to own KV that the engine overwrites, `Join`). `weighs`: chunk groups
    with a temperature or a scale. At most `max_sequences` run at a time; None: any number. `device` is where its logits
    are.
    """

    name: str
    device: torch.device | str
    serves: frozenset[Capability] = frozenset(Capability)
    weighs: bool = True
    max_sequences: int | None = None


class Executor(Protocol):
    """Runs one model. Errors of a call end the requests that it was for, and leave their sequences as they were."""

    @property
    def traits(self) -> ExecutorTraits: ...

    @property
    def model(self) -> ModelFacts:
        """What engines and decoders read of the model; ReferenceError once it has been freed."""

    def generation(self) -> int:
        """Another number once the model computes something else than before: KV of an earlier one is not used again."""

    def reserve(
        self, sequences: Sequence[TokenSequence], ids: Sequence[Sequence[int]], *, answer: int, running: int
    ) -> None:
        """Called before the first pass that reads `ids`, and `answer` more tokens later; `running` sequences are
        active. PromptTooLongError if the model has not as many positions.
        """

    def lay_out(
        self, sequences: Sequence[TokenSequence], ids: Sequence[Sequence[int]], active: Sequence[TokenSequence]
    ) -> None:
        """Called before each pass with all `active` sequences: it may copy chunks together to read them faster."""

    def forward(self, sequences: Sequence[TokenSequence], ids: Sequence[Sequence[int]]) -> Tensor:
        """Append `ids[i]` to `sequences[i]`, which may differ in length, position and context.

        Returns fp32 logits `(wanted, vocab)` of the tokens that the sequences want (`TokenSequence.kept`): a tensor,
        or an array of numpy where torch is not loaded (`ragkv.util.lazy.torch_if_loaded`). Then each
        sequence's `position` and own length count the new tokens; if it raises, no sequence counts any.
        """

    def copied(self, chunks: Sequence[PlacedChunk], *, reserve: int) -> Any:
        """Adjacent chunks as a sequence's own KV (`TokenSequence.cache`), with room for `reserve` more tokens."""

    def chunk_kv(self, sequence: TokenSequence, *, encoded_at: int) -> Any:
        """The own KV of a sequence as chunk KV, for other sequences."""

    def release(self, sequences: Sequence[TokenSequence]) -> None:
        """Free the own KV of these sequences, which are not run again."""

    def request_ended(self) -> None:
        """Sequences of a request were dropped. For any thread; must not wait."""


def require_served(engine: Engine, executor: Executor) -> None:
    """UnsupportedModelError if the executor does not meet the engine's needs."""
    if missing := sorted(engine.all_needs - executor.traits.serves):
        raise UnsupportedModelError(
            f"Engine {engine.name!r} needs chunks that can {' and '.join(missing)}, which {executor.traits.name} does "
            f"not have; use engine {'full' if Capability.MERGE in missing else 'block'!r}."
        )


def require_plain(executor: Executor, sequences: Sequence[TokenSequence]) -> None:
    """UnsupportedModelError if sequences have weighted groups that the executor cannot compute."""
    if not executor.traits.weighs and any(not group.plain for sequence in sequences for group in sequence.groups):
        raise UnsupportedModelError(
            f"{executor.traits.name} cannot weigh chunks against the question; set temperature = 1 and scale = 1 under "
            "[tuning.ape], or use engine 'block'."
        )
