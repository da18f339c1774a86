"""A model that is loaded when it is first needed and keeps KV in memory between questions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ragkv.config import PromptConfig
from ragkv.evaluation.answerer import RAW
from ragkv.evaluation.reader import HOLD_BYTES, HeldKV, Reader, round_trip
from ragkv.model.checkpoint import HEADS, MINI, digest_files, resolve
from ragkv.model.prompt import Prompt, render
from ragkv.store import Codec, KVIdentity, codec_from_config

if TYPE_CHECKING:
    from ragkv.attention.kv import ChunkKV
    from ragkv.evaluation.subject import Subject
    from ragkv.model.language import LanguageModel

__all__ = ["LoadedModel"]


class LoadedModel:
    """One model. Reusing a kept answer needs only the `fingerprint`, for which no local checkpoint is loaded.

    `subject` is given for a model that reads an index. It is loaded already and has rendered the prompt `words`.
    """

    def __init__(
        self,
        name: str,
        dtype: str | None = None,
        *,
        device: str | None = None,
        subject: Subject | None = None,
        words: PromptConfig | None = None,
        hold_bytes: int = HOLD_BYTES,
    ) -> None:
        self.name = name
        self.subject = subject
        self._words = words
        self._device = device
        self._dtype = dtype
        self._hold = hold_bytes
        self._held = HeldKV(hold_bytes)
        self._readers: dict[tuple[PromptConfig, str], Reader] = {}
        self._ids: dict[tuple[Prompt, str], tuple[int, ...]] = {}

    @cached_property
    def model(self) -> LanguageModel:
        """Raises ModelLoadError or UnsupportedModelError."""
        from ragkv.model.language import LanguageModel

        if self.subject is not None:
            return self.subject.model
        return LanguageModel.load(self.name, dtype=self.dtype, device=self._device)

    @cached_property
    def dtype(self) -> str:
        """The dtype that the model computes in. On a CPU mini uses float32, which is several times faster on CPUs
        without bfloat16 units."""
        from ragkv.model.language import pick_device

        if self._dtype is not None:
            return self._dtype
        return "float32" if self.name == MINI and pick_device(self._device).type == "cpu" else "auto"

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of this model and dtype, like `RagKV.fingerprint`."""
        if self.subject is not None:
            return self.subject.fingerprint
        checkpoint = resolve(self.name)
        revision = None if checkpoint.local else self.model.revision
        return checkpoint.fingerprint(self.dtype, revision, device=self._device)

    def reader(self, words: PromptConfig, codec: str) -> Reader:
        """The reader for a prompt and codec. Readers of raw KV share what they keep in memory."""
        if (words, codec) not in self._readers:
            kept = self.subject is not None and words == self._words
            prompt = self.subject.prompt if self.subject and kept else render(words, self.model.tokens)
            plain = Reader(self.model, prompt, fingerprint=self.fingerprint, held=self._held)
            self._readers[words, codec] = (
                plain if codec == RAW else _CodedReader(plain, codec_from_config({"id": codec}), self._hold)
            )
        return self._readers[words, codec]

    @cached_property
    def heads(self) -> str:
        """A digest of the retaining heads beside the model, which are no part of its fingerprint; "" without any."""
        checkpoint = resolve(self.name)
        path = Path(checkpoint.location) / HEADS
        return digest_files(path.parent, [path]) if checkpoint.local and path.exists() else ""

    def chunk_ids(self, prompt: Prompt, text: str) -> tuple[int, ...]:
        """The token ids of a chunk in `prompt`; each text is tokenised once."""
        if (prompt, text) not in self._ids:
            self._ids[prompt, text] = prompt.chunk_ids(self.model.tokens, text)
        return self._ids[prompt, text]


class _CodedReader(Reader):
    """A reader whose KV is encoded and decoded with `codec`, as a store would do."""

    def __init__(self, plain: Reader, codec: Codec, hold_bytes: int) -> None:
        super().__init__(plain.model, plain.prompt, fingerprint=plain.fingerprint, held=HeldKV(hold_bytes))
        self._plain = plain
        self._codec = codec

    def kv(self, identities: Sequence[KVIdentity]) -> list[ChunkKV]:
        found = {identity: self._held.get(identity) for identity in identities}
        lost = [identity for identity, kv in found.items() if kv is None]
        for identity, made in zip(lost, self._plain.kv(lost), strict=True):
            found[identity] = coded = self._stored(identity, made)
            self._held.put(identity, coded)
        return [kv for identity in identities if (kv := found[identity]) is not None]

    def _stored(self, identity: KVIdentity, kv: ChunkKV) -> ChunkKV:
        return round_trip(kv, identity, self._codec)[0].to(self.model.place)
