"""How often and how lately a KV record was used, as the bytes of a row in `uses`.

The row outlives the record: what has left, and is asked for again, is known to be wanted (`ragkv.store.worth`).
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from ragkv.store.seal import Buffer, DamagedError, seal, unseal

__all__ = ["UseRow"]

_ROW = struct.Struct("<dQdQQ32s")
_MOST = 1 << 48
_YEAR_9999 = 253_370_764_800


@dataclass(frozen=True, slots=True, kw_only=True)
class UseRow:
    """The uses of one record.

    `weight` is that of `ragkv.store.worth`, `count` how many there were, `last` when the last was recorded (seconds
    since 1970). `tokens` and `nbytes` are the chunk's and its KV's; `owner` is the digest of the id of the chunk that
    used it last.
    """

    weight: float
    count: int
    last: float
    tokens: int
    nbytes: int
    owner: bytes

    def pack(self) -> bytes:
        return seal(_ROW.pack(self.weight, self.count, self.last, self.tokens, self.nbytes, self.owner))

    @classmethod
    def parse(cls, value: Buffer) -> UseRow:
        """The row; `DamagedError` when it is not one."""
        body = unseal(value)
        if len(body) != _ROW.size:
            raise DamagedError(f"it has {len(body)} bytes")
        row = cls(**dict(zip(cls.__slots__, _ROW.unpack(body), strict=True)))
        if not math.isfinite(row.weight) or abs(row.weight) > _MOST or not 0 <= row.last < _YEAR_9999:
            raise DamagedError("its weight or its time is impossible")
        if max(row.count, row.tokens, row.nbytes) > _MOST:
            raise DamagedError("its numbers are out of range")
        return row
