"""The document and KV store: one LMDB environment per index."""

from ragkv.boundary.plainfile import sync_path
from ragkv.store.codec import Codec, Raw, Slab, Zstd, codec_from_config, codec_names
from ragkv.store.document import DocumentChange
from ragkv.store.environment import STORE_FILES, Store
from ragkv.store.format.identity import KVIdentity
from ragkv.store.format.record import Manifest
from ragkv.store.format.row import StoredDocument
from ragkv.store.format.vector import ChunkVectors
from ragkv.store.lock import Holder
from ragkv.store.memory import MemoryTier, MemoryUse
from ragkv.store.quantiser import Int4, Int8
from ragkv.store.reader import KVReader
from ragkv.store.upkeep.backup import Copy
from ragkv.store.upkeep.collection import Collection
from ragkv.store.upkeep.finding import Finding
from ragkv.store.upkeep.mending import Mender
from ragkv.store.upkeep.progress import Notify, Progress
from ragkv.store.upkeep.repair import Repair
from ragkv.store.upkeep.stats import DocumentStats, KVRecord, StoreStats
from ragkv.store.upkeep.usage import Ledger, Use
from ragkv.store.upkeep.verification import Verification

__all__ = [
    "STORE_FILES",
    "ChunkVectors",
    "Codec",
    "Collection",
    "Copy",
    "DocumentChange",
    "DocumentStats",
    "Finding",
    "Holder",
    "Int4",
    "Int8",
    "KVIdentity",
    "KVReader",
    "KVRecord",
    "Ledger",
    "Manifest",
    "MemoryTier",
    "MemoryUse",
    "Mender",
    "Notify",
    "Progress",
    "Raw",
    "Repair",
    "Slab",
    "Store",
    "StoreStats",
    "StoredDocument",
    "Use",
    "Verification",
    "Zstd",
    "codec_from_config",
    "codec_names",
    "sync_path",
]
