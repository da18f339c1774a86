"""KV packets (KV Packet, arXiv 2604.13226): trained vectors around every chunk, for a frozen model.

A chunk that is encoded alone begins without a sink and ends without a link to what follows. A packet gives it both: a
few input vectors before it (the header) and after it (the trailer), which `ragkv finetune packet` trains. All rows of
[header, chunk, trailer] are stored, take positions like tokens, and are read by the question.

A vector is a negative number in a sequence of token ids, so that the code that places blocks and builds training
rows need not know of packets. The file is safetensors; the digest of its bytes is part of the key of every KV that was
made with it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from ragkv.errors import ConfigError
from ragkv.util.files import read_plain, refusal, replace_plain

FORMAT = "ragkv-packet-1"
_FACTS = ("model", "sink", "over")
_MOST_BYTES = 64 << 20
_MOST_VECTORS = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Packet:
    """Trained vectors: `header` `(h, hidden)` and `trailer` `(t, hidden)`, in float32 on the CPU.

    `model` is `Checkpoint.digest` of the model that they were trained for. `sink`, the block before the first chunk,
    and `over`, what a chunk sees (`standalone`: nothing, `prefixed`: the prompt's prefix), are the training's settings.
    `digest` is 32 bytes that identify all of this, and `name` is the file, for messages.
    """

    header: Tensor
    trailer: Tensor
    model: str
    sink: str
    over: str
    digest: bytes
    name: str

    @property
    def tokens(self) -> int:
        """The number of tokens that it adds to every chunk."""
        return len(self.header) + len(self.trailer)

    @property
    def prefixed(self) -> bool:
        """Whether a chunk sees the prompt's prefix while it is encoded."""
        return self.over == "prefixed"

    def words(self, prefix_ids: Sequence[int]) -> tuple[int, ...]:
        """The part of a KV's key that precedes the chunk (`ragkv.store.KVIdentity`): a digest of the packet and of the
        prefix that the chunk sees, its position, and the sizes of header and trailer.
        """
        seen = np.array(prefix_ids if self.prefixed else (), "<u4")
        digest = hashlib.blake2b(self.digest + seen.tobytes(), digest_size=32, person=b"ragkv packet").digest()
        return (*np.frombuffer(digest, "<u4").tolist(), len(seen), len(self.header), len(self.trailer))

    @property
    def vectors(self) -> Tensor:
        """Header and trailer, `(h + t, hidden)`."""
        return torch.cat([self.header, self.trailer])

    def wrap(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The ids of [header, chunk, trailer]."""
        return wrap(ids, len(self.header), len(self.trailer))

    def save(self, path: Path) -> None:
        """Write its file; the same vectors for the same model give the same bytes."""
        replace_plain(path, _packed(self.header, self.trailer, self.model, self.sink, self.over))


def make_packet(
    header: Tensor,
    trailer: Tensor,
    model: str,
    *,
    sink: str = "prefix",
    over: str = "standalone",
    name: str = "in training",
) -> Packet:
    """A packet of these vectors, for the model with this digest."""
    before, after = (part.detach().float().cpu().clone().contiguous() for part in (header, trailer))
    digest = _known_by(_packed(before, after, model, sink, over))
    return Packet(before, after, model, sink, over, digest, name)


def wrap(ids: Sequence[int], header: int, trailer: int) -> tuple[int, ...]:
    """`ids` between the numbers of the packet's vectors: -1-i stands for vector i of header and trailer together."""
    return (*range(-1, -1 - header, -1), *ids, *range(-1 - header, -1 - header - trailer, -1))


def embed(table: nn.Module, ids: Tensor, vectors: Tensor) -> Tensor:
    """The input vectors `(..., n, hidden)` of `ids` `(..., n)` as the model's own embedding `table` gives them.

    `vectors` `(v, hidden)` replace the numbers that `wrap` has inserted; gradients reach them.
    """
    found: Tensor = table(ids.clamp(min=0))
    if not len(vectors):
        return found
    own = vectors.to(found.device, found.dtype)[(-1 - ids).clamp(min=0)]
    return torch.where((ids < 0)[..., None], own, found)


def load_packet(path: str) -> Packet:
    """The packet in an untrusted file; ConfigError, with the reason, if it is not one."""
    try:
        found = Path(path).expanduser().stat()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The packet at {path} cannot be read ({refusal(error)}); train one by ragkv finetune packet, or remove "
            "packet from [tuning.block]."
        ) from error
    return _loaded(path, found.st_mtime_ns, found.st_size, found.st_ino)


@lru_cache(maxsize=8)
def _loaded(path: str, *_stat: int) -> Packet:
    """The packet; the file's stat is part of the cache's key, because every question makes an engine."""
    try:
        content = read_plain(Path(path).expanduser(), limit=_MOST_BYTES)
        tensors = load(content)
        facts = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).get("__metadata__") or {}
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigError(
            f"The packet at {path} is damaged or not a packet ({error}); train it again by ragkv finetune packet."
        ) from error
    whole = facts.get("format") == FORMAT and tensors.keys() == {"header", "trailer"} and facts.keys() >= set(_FACTS)
    parts = [tensors[name] for name in ("header", "trailer")] if whole else []
    fits = len({part.shape[-1:] for part in parts}) == 1 and all(
        part.ndim == 2 and part.dtype == torch.float32 and len(part) <= _MOST_VECTORS and bool(part.isfinite().all())
        for part in parts
    )
    if not fits:
        raise ConfigError(f"{path} is not a packet of ragkv ({FORMAT}); name a file written by ragkv finetune packet.")
    model, sink, over = (facts[name] for name in _FACTS)
    return Packet(parts[0], parts[1], model, sink, over, _known_by(content), path)


def pack_tensors(tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> bytes:
    """A safetensors file with its header in a fixed order; safetensors writes metadata in a different order each time.

    Stored KV and cached answers refer to what was trained by its file's digest.
    """
    file = save(dict(tensors), dict(facts))
    end = 8 + int.from_bytes(file[:8], "little")
    header = json.dumps(json.loads(file[8:end]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # tensors are aligned
    return len(header).to_bytes(8, "little") + header + file[end:]


def _packed(header: Tensor, trailer: Tensor, *facts: str) -> bytes:
    named = {"format": FORMAT, **dict(zip(_FACTS, facts, strict=True))}
    return pack_tensors({"header": header, "trailer": trailer}, named)


def _known_by(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=32, person=b"ragkv packet").digest()
