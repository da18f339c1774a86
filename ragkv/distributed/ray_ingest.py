"""An ingest over the machines of a Ray cluster: `ragkv ingest PATH --ray ADDRESS` (docs/tiers.md).

Workers read, cut, embed and encode documents and put the KV into the index's shared tiers, whose names are hashes of
the content, so that doing it twice changes nothing. The index stays on the machine of the command, which commits each
document as a local ingest does, with the KV that it finds in the tier. So nothing depends on a worker: when one dies,
Ray runs its documents again; when the command dies, the next one skips what is committed and finds the KV of the rest.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ragkv.config import IndexConfig, save_config
from ragkv.errors import RagkvError, UsageError, extra
from ragkv.index.create import open_index
from ragkv.index.ingestion import make_ingester
from ragkv.ingest import IngestReport, MadeDocument, Make, ParseLimits, Skipped, SourceFile
from ragkv.ingest.sandbox import SourceReader
from ragkv.store import Store, codec_from_config
from ragkv.util.plugins import join_ray


class DocumentMaker:
    """What a worker runs: an ingester over an index of its own in a temporary folder, whose KV goes to the tiers."""

    def __init__(self, settings: str, device: str | None) -> None:
        self._open = ExitStack()
        folder = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="ragkv-ray-")))
        config = IndexConfig.from_toml(settings)
        Store.create(folder, codec=codec_from_config({"id": config.codec})).close()
        save_config(folder, config)
        self._index = open_index(folder, device=device)
        self._open.callback(self._index.close)
        self._ingester = make_ingester(self._index)
        self.close = self._open.close
        self._reader = self._open.enter_context(SourceReader(ParseLimits.of(config.ingest)))

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[bytes]]:
        """Make the pickled sources of a batch. What cannot be made is in the report, so that it stops no other."""
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
def ray_maker(
    config: IndexConfig, address: str, *, device: str | None = None, workers: int | None = None
) -> Iterator[Make]:
    """Connect to Ray at `address` ("local" starts it on this machine, "auto" finds it) for `RagKV.ingest(make=…)`.

    There is a worker for every accelerator of the cluster, or for every two processors if it has none, at most
    `workers`. They see the files under the same paths, and the tiers under the same URLs. UsageError for an index
    without tiers.
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
    most = max(1, min(workers or 1 << 16, gpus or int(have.get("CPU", 1)) // 2))

    def make(sources: Sequence[SourceFile]) -> Iterator[MadeDocument]:
        import ray.data

        if not sources:
            return
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        rows = ray.data.from_items(
            [{"source": pickle.dumps(each)} for each in sources], override_num_blocks=len(sources)
        )
        made = rows.map_batches(
            DocumentMaker,
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=most),  # a fixed pool hangs after a lost node
            num_gpus=1 if gpus else 0,
            num_cpus=1,
            fn_constructor_args=(settings, device),
            max_restarts=-1,
            max_task_retries=-1,
        )
        for row in made.iter_rows():
            yield pickle.loads(row["made"])

    try:
        yield make
    finally:
        if mine:
            ray.shutdown()
