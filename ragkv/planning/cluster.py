"""The needs of an index on many machines: `ragkv plan PATH --chunks 1e7 --nodes 100`.

Rates and bytes are those measured by the plan of a sample; a tier's read rate and cost are assumed, and printed
(docs/tiers.md, "Planning"). `simulate` runs questions over the nodes as a discrete-event simulation: each goes to the
node that rendezvous hashing assigns to its best chunk, or if that is busy to a less busy one of two others, reads its
chunks from the node's memory, its disk or the shared tier, and generates. Some nodes are lost half-way.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ragkv.errors import UsageError
from ragkv.planning.plan import Plan

MOST_NODES = 10_000
BUSY = 0.7
"""The simulated load, as a share of the capacity of nodes that hold no KV."""
_MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierAssumption:
    """Assumptions about a kind of storage: bytes per second for one node, seconds to the first byte, and US dollars for
    a GB (1e9 bytes) in a month."""

    name: str
    bandwidth: float
    latency: float
    price: float


TIERS = (
    TierAssumption(name="memory", bandwidth=20e9, latency=0.0, price=2.5),
    TierAssumption(name="disk", bandwidth=3e9, latency=0.0001, price=0.1),
    TierAssumption(name="redis", bandwidth=2.5e9, latency=0.0005, price=5.0),
    TierAssumption(name="objects", bandwidth=1e9, latency=0.03, price=0.023),
)
"""Memory of a server, its NVMe disk (LMDB), Redis over 25 Gb/s, and an object store in the same region."""
NODE_PRICE = 2.0
"""US dollars for an hour of a node with one accelerator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPlan:
    """One kind of storage for all KV: its cost per month, the seconds in which a node loads a question's chunks from
    it, and the reads per chunk and month from which it costs less than encoding each time (None: loading takes longer
    than encoding)."""

    name: str
    dollars: float
    load_seconds: float
    reads_to_pay: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """The simulated questions: arrivals per second, seconds until an answer (median and 99th percentile), where chunks
    were found, the busiest node's load relative to the mean, and the questions that were restarted elsewhere because
    their node was lost."""

    questions: int
    per_second: float
    median_seconds: float
    p99_seconds: float
    memory_hits: float
    disk_hits: float
    busiest: float
    lost_nodes: int
    repeated: int
    answered: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """The sizes, hours and costs of `chunks` chunks on `nodes` nodes."""

    chunks: float
    nodes: int
    tokens: float
    kv_bytes: float
    kv_bytes_node: float
    other_bytes: float
    ingest_hours: float
    ingest_dollars: float
    top_k: int
    encode_seconds: float
    """Seconds to encode the `top_k` chunks of one question."""
    tiers: tuple[TierPlan, ...]
    simulated: Simulated
    assumed: tuple[TierAssumption, ...] = TIERS
    node_price: float = NODE_PRICE

    def to_json(self) -> dict[str, Any]:
        """The object under `cluster` that `ragkv plan --json` prints."""
        return asdict(self)


def check_size(chunks: float, nodes: int) -> None:
    """UsageError for less than one chunk or node, or an absurd number of them."""
    if not (1 <= chunks <= 1e15 and 1 <= nodes <= MOST_NODES):
        raise UsageError(f"--chunks must be between 1 and 1e15, and --nodes between 1 and {MOST_NODES:,}.")


def plan_cluster(
    plan: Plan, chunks: float, nodes: int, *, zipf: float = 1.0, questions: int = 20_000, seed: int = 0
) -> ClusterPlan:
    """Scale the plan of a sample to `chunks` chunks on `nodes` nodes like the one that measured it.

    An ingest is divided evenly. UsageError as `check_size`.
    """
    check_size(chunks, nodes)
    corpus, scale = plan.corpus, chunks / plan.corpus.chunks.value
    chunk_tokens = corpus.tokens.value / corpus.chunks.value
    codec = next(one for one in plan.codecs if one.codec == plan.codec)
    kv = codec.kv_bytes.value * scale
    one = codec.kv_bytes.value / corpus.chunks.value / len(plan.encodings)
    most = plan.engines[0].chunks
    read, encode = most * one, most * chunk_tokens * plan.recompute_seconds
    decode = most * chunk_tokens * codec.warm_seconds
    work = plan.seconds.total - plan.seconds.start
    hours = work * scale / nodes / 3600
    tiers = []
    for tier in TIERS:
        load = tier.latency + read / tier.bandwidth + decode
        saved = (encode - load) / most / 3600 * NODE_PRICE
        monthly = one / 1e9 * tier.price
        pays = monthly / saved if saved > 0 else None
        tiers.append(TierPlan(name=tier.name, dollars=kv / 1e9 * tier.price, load_seconds=load, reads_to_pay=pays))
    loads = {tier.name: tier.load_seconds / most for tier in tiers}
    simulated = simulate(
        nodes=nodes,
        chunks=int(chunks),
        top_k=most,
        load_seconds=(loads["memory"], loads["disk"], min(loads["objects"], encode / most)),
        answer_seconds=plan.engines[0].first_token.value,
        room=(int(16e9 / one), int(1e12 / one)),
        zipf=zipf,
        questions=questions,
        lost=nodes // 20,
        seed=seed,
    )
    return ClusterPlan(
        chunks=chunks,
        nodes=nodes,
        tokens=corpus.tokens.value * scale,
        kv_bytes=kv,
        kv_bytes_node=kv / nodes,
        other_bytes=max(0.0, plan.disk_bytes.value * scale - kv),
        ingest_hours=hours,
        ingest_dollars=hours * nodes * NODE_PRICE,
        top_k=most,
        encode_seconds=encode,
        tiers=tuple(tiers),
        simulated=simulated,
    )


def rendezvous(keys: NDArray[np.uint64], nodes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The score of every node `(nodes,)` for every key `(keys,)`, as `(keys, nodes)`: a key belongs to its highest.

    When a node is lost, only its keys move (Thaler and Ravishankar, 1998). The mix is that of SplitMix64.
    """
    with np.errstate(over="ignore"):
        mixed: NDArray[np.uint64] = keys[:, None] * _MIX[0] + (nodes[None, :] + np.uint64(1)) * _MIX[1]
        mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX[1]
        mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX[2]
        mixed ^= mixed >> np.uint64(31)
    return mixed


def simulate(
    *,
    nodes: int,
    chunks: int,
    top_k: int,
    load_seconds: tuple[float, float, float],
    answer_seconds: float,
    room: tuple[int, int],
    zipf: float,
    questions: int,
    lost: int,
    busy: float = BUSY,
    seed: int = 0,
) -> Simulated:
    """Questions that arrive at random, at `busy` of the rate that the nodes could answer without stored KV.

    `load_seconds` are those of a chunk from memory, disk and the shared tier (or to encode it, if that is faster),
    `room` the chunks that a node holds in memory and on its disk; both begin empty and drop the least recently used.
    The first chunk of a question is drawn by Zipf's law and the others are its neighbours, like passages of one
    document. `lost` nodes fail half-way; their running questions start again elsewhere.
    """
    generator = np.random.default_rng(seed)
    # the inverse of Zipf's distribution function, continuous: exact enough for shares of hits
    uniform = generator.random(questions)
    power = 1.0 - zipf
    ranks = (
        np.exp(uniform * np.log(chunks)) if abs(power) < 1e-9 else (1 + uniform * (chunks**power - 1)) ** (1 / power)
    )
    best = np.minimum(ranks.astype(np.int64), chunks) - 1
    mean = top_k * max(load_seconds) + answer_seconds
    arrivals = np.cumsum(generator.exponential(mean / (busy * nodes), questions))
    every = np.arange(nodes, dtype=np.uint64)
    free, worked, losing = np.zeros(nodes), np.zeros(nodes), np.zeros(nodes, bool)
    losing[generator.choice(nodes, lost, replace=False)] = True
    gone_at = arrivals[questions // 2] if lost else math.inf
    held: list[_Held] = [(OrderedDict(), OrderedDict()) for _ in range(nodes)]
    found, repeated, waits = [0, 0, 0], 0, np.zeros(questions)

    def serve(number: int, at: float) -> float:
        """The time at which question `number`, which arrives at `at`, is answered."""
        nonlocal repeated
        up = np.flatnonzero(~losing) if at >= gone_at else np.arange(nodes)
        node = up[rendezvous(best[number : number + 1].astype(np.uint64), every[up])[0].argmax()]
        if free[node] - at > mean:
            node = min(node, *generator.choice(up, 2), key=lambda one: free[one])
        start = max(at, free[node])
        chosen = [(int(best[number]) + step) % chunks for step in range(top_k)]
        spent = sum(load_seconds[_find(held[node], chunk, room, found)] for chunk in chosen) + answer_seconds
        if losing[node] and start + spent > gone_at:
            repeated += 1
            return serve(number, gone_at)
        free[node], worked[node] = start + spent, worked[node] + spent
        return float(start + spent)

    for number, at in enumerate(arrivals.tolist()):
        waits[number] = serve(number, at) - at
    read = sum(found)
    return Simulated(
        questions=questions,
        per_second=questions / float(arrivals[-1]),
        median_seconds=float(np.median(waits)),
        p99_seconds=float(np.percentile(waits, 99)),
        memory_hits=found[0] / read,
        disk_hits=found[1] / read,
        busiest=float(worked.max() / worked.mean()),
        lost_nodes=lost,
        repeated=repeated,
        answered=int(np.count_nonzero(waits)),
    )


_Held: TypeAlias = tuple[OrderedDict[int, None], OrderedDict[int, None]]
"""The chunks that a node has in memory and on its disk, least recently used first."""


def _find(held: _Held, chunk: int, room: tuple[int, int], found: list[int]) -> int:
    """Where a node finds a chunk: 0 memory, 1 disk, 2 the shared tier; it is in the first two from then on."""
    where = 0 if chunk in held[0] else 1 if chunk in held[1] else 2
    found[where] += 1
    for kept, most in zip(held, room, strict=True):
        kept[chunk] = None
        kept.move_to_end(chunk)
        if len(kept) > most:
            kept.popitem(last=False)
    return where
