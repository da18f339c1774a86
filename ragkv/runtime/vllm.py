"""Answers by a vLLM server that reads stored chunks itself (`ragkv.integrations.vllm`, docs/vllm.md).

ragkv searches and builds the prompt's tokens; vLLM gets them by its OpenAI server's `/v1/completions`, with what it
needs to find the chunks' records. `VLLMRuntime` stands in for the runtime: an answer's tokens come from the server
instead of from steps of a model here, and everything after the choice of a token is the runtime's own.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from secrets import token_hex
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import torch

from ragkv.attention.kv import ChunkKV, dtype_name
from ragkv.engines.base import Operation, Sample, require_supported
from ragkv.errors import ModelServerError, PromptTooLongError, UnsupportedModelError, UsageError
from ragkv.model.attention_hook import head_dim
from ragkv.model.language_model import eos_ids
from ragkv.model.loading import describe_error, reach
from ragkv.model.prompt import Tokens
from ragkv.runtime.decoding import Decoder, Generation
from ragkv.runtime.runtime import Runtime
from ragkv.runtime.scheduler import Ticket
from ragkv.runtime.step import Job
from ragkv.types import Encoding, KVShape, LayerShape
from ragkv.util.constraints import JSON_LAYOUT

if TYPE_CHECKING:
    import urllib3

    from ragkv.decoding import Decoding
    from ragkv.engines import Engine, Request
    from ragkv.model.checkpoint import Checkpoint
    from ragkv.model.language_model import LanguageModel
    from ragkv.runtime.kv_pool import Lease

PARAMS = "ragkv"
"""The key of `ChunkReads` in a request's `kv_transfer_params`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkReads:
    """What a prompt begins with: (encoding, tokens, ids that it saw before its own) of each stored chunk.

    `model` is the model's fingerprint, `index` a name of the index, `regime` the connector's, which was proved. `mode`
    "prove" compares the records with what vLLM computes instead of serving them. "encode" hands out the KV of the
    prompt, in the folder `index` within that of derived files.
    """

    model: str
    engine: str
    index: str
    chunks: tuple[tuple[Encoding, int, tuple[int, ...]], ...]
    mode: str = ""
    regime: str = ""

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens, _ in self.chunks)

    @classmethod
    def of(cls, params: Any) -> Self:
        """From JSON. Raises TypeError, ValueError or KeyError for anything else."""
        texts = {name: params[name] for name in ("model", "engine", "index", "mode", "regime")}
        chunks = tuple((Encoding(encoding), tokens, tuple(before)) for encoding, tokens, before in params["chunks"])
        numbers = [number for _, tokens, before in chunks for number in (tokens - 1, *before)]
        if not all(type(text) is str for text in texts.values()) or not all(
            type(number) is int and 0 <= number < 1 << 32 for number in numbers
        ):
            raise ValueError("texts and token ids are expected")
        return cls(**texts, chunks=chunks)

    @property
    def params(self) -> dict[str, Any]:
        """`kv_transfer_params`."""
        return {PARAMS: asdict(self)}


def salt_of(reads: ChunkReads) -> str:
    """The `cache_salt` without which the chunks are not served: vLLM's prefix cache keeps their KV under it."""
    names = json.dumps([reads.model, reads.engine, reads.index, reads.regime])
    return "ragkv-" + hashlib.blake2b(names.encode(), digest_size=24).hexdigest()


ENGINES = ("block", "full", "single")
_CONNECT_SECONDS, _READ_SECONDS = 10, 600
_NO_SCORES = Sample(scores=torch.empty(0))


def require_engine(name: str) -> None:
    """UsageError for an engine that vLLM cannot run."""
    if name not in ENGINES:
        raise UsageError(
            f"Engine {name!r} runs in ragkv's own runtime: leave --runtime vllm out, or use engine 'block', 'full' or "
            "'single'."
        )


class ServedModel:
    """What an index reads of a model that vLLM runs: configuration and tokenizer. Whatever else is asked of it, such as
    to encode a chunk that is not stored, loads the weights here, by `load`.
    """

    missing_capabilities: Mapping[Any, str] = {}
    moves_within = None
    precision = "vllm"

    def __init__(self, checkpoint: Checkpoint, load: Callable[[], LanguageModel]) -> None:
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig

        if checkpoint.file is not None or checkpoint.adapter is not None:
            raise UnsupportedModelError(
                f"vLLM does not run model {checkpoint.name!r} as ragkv does; ingest with --model and a folder in "
                "transformers' format, and start vLLM with the same folder."
            )
        options: dict[str, Any] = {"local_files_only": checkpoint.local, "trust_remote_code": False}
        with describe_error("Model", checkpoint.name):
            whole = AutoConfig.from_pretrained(checkpoint.location, **options)
            tokenizer = AutoTokenizer.from_pretrained(checkpoint.location, **options)
        generation = None
        with suppress(OSError):
            generation = GenerationConfig.from_pretrained(checkpoint.location, **options).eos_token_id
        self.checkpoint, self.config = checkpoint, whole.get_text_config(decoder=True)
        self.tokens = Tokens(tokenizer)
        self.eos_ids = eos_ids(generation, tokenizer.eos_token_id)
        self.max_positions = reach(self.config)[0]
        self.revision: str | None = getattr(whole, "_commit_hash", None)
        self._load = load
        self._lock = threading.Lock()
        self._loaded: LanguageModel | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        with self._lock:
            self._loaded = self._loaded or self._load()
        return getattr(self._loaded, name)


class EncodingServer(ServedModel):
    """A model that vLLM runs for an index whose KV vLLM encodes, too. Nothing loads its weights here.

    KV is handed out in files of a folder that is made in `derived`, where vLLM's connector has the index.
    """

    device = place = torch.device("cpu")

    def __init__(self, checkpoint: Checkpoint, server: VLLMServer, derived: Path) -> None:
        super().__init__(checkpoint, self._refuse)
        self._server, self._derived = server, derived
        self.fingerprint = checkpoint.fingerprint_of(server.connector["regime"], self.revision)
        """The identity of its KV: the checkpoint, and vLLM's version, attention backend, quantisation and dtypes."""
        heads, dim = self.config.num_key_value_heads, head_dim(self.config)
        layers = (LayerShape(heads, dim, dim),) * self.config.num_hidden_layers
        self.kv_shape = KVShape(server.connector["dtype"], layers)

    def _refuse(self) -> LanguageModel:
        raise UnsupportedModelError(
            f"The index is encoded by vLLM, and this needs the weights of {self.checkpoint.name!r} here; use an index "
            "that was ingested without --runtime vllm."
        )

    def encode(self, chunks: Sequence[Sequence[int]], *, prefix: None = None) -> list[ChunkKV]:
        """Chunk KV of token ids, each alone."""
        return self._encode([(0, ids) for ids in chunks])

    def encode_identities(self, identities: Sequence[Any]) -> dict[Any, ChunkKV]:
        """The KV of these chunks, each after the tokens that it sees."""
        prompts = [(each.position, (*each.prefix_ids, *each.chunk_ids)) for each in identities]
        return dict(zip(identities, self._encode(prompts), strict=True))

    def _encode(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> list[ChunkKV]:
        """Their KV from a position on; vLLM batches them."""
        self._derived.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="vllm-", dir=self._derived) as results, ThreadPoolExecutor(64) as pool:
            return list(pool.map(partial(self._handed_out, Path(results)), prompts))

    def _handed_out(self, results: Path, prompt: tuple[int, Sequence[int]]) -> ChunkKV:
        from safetensors.torch import load_file

        start, ids = prompt
        whole = ((Encoding.STANDALONE, len(ids), ()),)
        reads, name = ChunkReads(model="", engine="", index=results.name, chunks=whole, mode="encode"), token_hex(16)
        report = self._server.prefill(ids, name, reads)
        if report["report"] != "" or report["regime"] != self._server.connector["regime"]:
            why = report["report"] or "it has been restarted with other settings, or has not this index's folder"
            raise ModelServerError(f"vLLM at {self._server.url} did not hand out the KV of a chunk: {why}.")
        layers, ranks = self.kv_shape.layers, report["ranks"]
        step = max(ranks // layers[0].kv_heads, 1)  # with fewer heads than ranks, several hold the same
        kv = torch.cat([load_file(results / f"{name}-{rank}")["kv"] for rank in range(0, ranks, step)], 2)
        shape = (len(layers), 2, layers[0].kv_heads, len(ids), layers[0].key_dim)
        if kv.shape != shape or dtype_name(kv.dtype) != self.kv_shape.dtype:
            raise ModelServerError(f"vLLM at {self._server.url} handed out KV of shape {tuple(kv.shape)}, not {shape}.")
        kv = kv[..., start:, :].clone()  # which does not keep the rest, or the file
        return ChunkKV(keys=tuple(kv[:, 0]), values=tuple(kv[:, 1]), encoded_at=start)


class VLLMServer:
    """A vLLM server by its URL. Raises ModelServerError if it does not answer."""

    def __init__(self, url: str) -> None:
        import urllib3

        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise UsageError(
                f"--runtime vllm needs the URL of a vLLM server, as in http://127.0.0.1:8000, not {url!r}."
            )
        self._pool = urllib3.PoolManager(
            maxsize=64, timeout=urllib3.Timeout(connect=_CONNECT_SECONDS, read=_READ_SECONDS), retries=False
        )
        self.state: str | None = None
        """The server's version and settings by its last answer, which change if it is restarted with others."""

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """ModelServerError for what goes wrong on the way to the server and back."""
        from urllib3.exceptions import HTTPError

        try:
            yield
        except (HTTPError, OSError, ValueError, LookupError, TypeError) as error:
            raise ModelServerError(
                f"vLLM at {self.url} does not answer, or ended its answer ({type(error).__name__}); start it as "
                "docs/vllm.md says, and ask again."
            ) from error

    def _response(self, path: str, body: Mapping[str, Any] | None) -> urllib3.BaseHTTPResponse:
        method = "GET" if body is None else "POST"
        response = self._pool.request(method, self.url + path, json=body, preload_content=False)
        if response.status != 200:
            text = response.read(1 << 16, decode_content=True).decode(errors="replace")
            with suppress(ValueError, KeyError, TypeError):
                text = json.loads(text)["error"]["message"]
            kind = UsageError if response.status == 400 else ModelServerError
            raise kind(f"vLLM at {self.url} refused the request ({response.status}): {text[:500]}")
        return response

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON that it answers."""
        with self._faults():
            return json.loads(self._response(path, body).data)

    @cached_property
    def served(self) -> Mapping[str, Any]:
        """Its model. UsageError for another kind of server with OpenAI's protocol, such as ragkv's."""
        with self._faults():
            served: Mapping[str, Any] = self.ask("/v1/models")["data"][0]
            if served["owned_by"] != "vllm":
                raise UsageError(f"{self.url} is no vLLM server; give --runtime vllm the URL of one (docs/vllm.md).")
        return served

    @cached_property
    def connector(self) -> Mapping[str, Any]:
        """What RagKVConnector tells of itself: its `regime`, the KV's `dtype`, vLLM's `ranks`."""
        return self.prefill([0], token_hex(16))

    def prefill(self, ids: Sequence[int], salt: str, reads: ChunkReads | None = None) -> Mapping[str, Any]:
        """What RagKVConnector reports of a prompt. ModelServerError if vLLM runs without it."""
        params = {PARAMS: None} if reads is None else reads.params
        # the second token's step comes after the workers' reports
        body = {"prompt": [*ids], "max_tokens": 2, "min_tokens": 2, "temperature": 0, "cache_salt": salt}
        answer = self.ask("/v1/completions", {"model": self.served["id"], **body, "kv_transfer_params": params})
        self.state = answer.get("system_fingerprint")
        report: Mapping[str, Any] | None = (answer.get("kv_transfer_params") or {}).get(PARAMS)
        if report is None:
            raise ModelServerError(
                f"vLLM at {self.url} runs without RagKVConnector; start it as docs/vllm.md says, or use --engine full."
            )
        return report

    def tokens(
        self, body: Mapping[str, Any], opened: Callable[[urllib3.BaseHTTPResponse], object]
    ) -> Iterator[tuple[list[int], str | None]]:
        """The ids of the next tokens, and the reason if they are the last. `opened` gets the open response."""
        with self._faults():
            response = self._response("/v1/completions", {**body, "stream": True, "return_token_ids": True})
            opened(response)
            try:
                left = b""
                for part in response.stream(1 << 16, decode_content=True):
                    *lines, left = (left + part).split(b"\n")
                    for line in lines:
                        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                            continue
                        event = json.loads(line[6:])
                        self.state = event.get("system_fingerprint") or self.state
                        if "error" in event:
                            raise ModelServerError(f"vLLM at {self.url} ended the answer: {event['error']['message']}")
                        for choice in event["choices"]:
                            yield choice.get("token_ids") or [], choice["finish_reason"]
            finally:
                response.close()


class ServerJob(Job):
    """A request that a server answers. Its end hangs up, so that the server stops."""

    def __init__(self, body: Mapping[str, Any], decoder: Decoder, model: object) -> None:
        nothing: Iterator[Operation] = iter(())
        super().__init__((step for step in nothing), Ticket(sequences=1, tokens=0), decoder, model=model)
        self.body = body
        self.opened: list[urllib3.BaseHTTPResponse] = []

    def end(self, error: BaseException | None = None) -> None:
        super().end(error)
        for response in self.opened:
            with suppress(Exception):  # it has ended already
                response.shutdown()


class VLLMRuntime(Runtime):
    """Answers by a vLLM server. `fingerprint` is the model's in the index, `index` a name of the index.

    The first question that reads stored chunks is first sent as a proof: vLLM prefills it and compares.
    """

    def __init__(self, model: Any, url: str, *, fingerprint: str, index: str) -> None:
        traits = SimpleNamespace(max_sequences=None)
        super().__init__(model, executor=lambda model: SimpleNamespace(traits=traits, model=model))
        self._fingerprint, self._index = fingerprint, index
        self._server = VLLMServer(url)
        self._name, self._positions = self._server.served["id"], self._server.served.get("max_model_len")
        self._verdict_lock = threading.Lock()
        self._regime = ""
        """The connector's, once it was proved."""
        self._proved: str | None = None
        """The server's state then."""

    def lease(self, sizes: Mapping[Hashable, int], **options: Any) -> Lease | None:
        """KV is in vLLM's memory, not here."""
        return super().lease({}, **options)

    def try_lease(self, sizes: Mapping[Hashable, int], **options: Any) -> Lease | None:
        return super().try_lease({}, **options)

    def require(self, engine: Engine) -> None:
        require_engine(engine.name)
        require_supported(engine, self.model)
        config = engine.config
        if engine.name == "block" and (config.preset == "no-positions" or self._sink(config.sink) != "prefix"):
            raise UnsupportedModelError(
                "With --runtime vllm, engine 'block' reads the whole prefix and moves every chunk to its place; set "
                'sink = "prefix" and another preset under [tuning.block] in ragkv.toml.'
            )

    def _prepare(self, engine: Engine, request: Request, generation: Generation | None) -> Job:
        if generation is None or generation.processors or generation.criteria:
            raise UsageError(
                "vLLM chooses the tokens itself: logits processors and stopping criteria need ragkv's runtime."
            )
        chunks = request.chunks if engine.most_chunks is None else request.chunks[-engine.most_chunks :]
        ids = [*request.prefix_ids, *(i for chunk in chunks for i in chunk.token_ids), *request.suffix_ids]
        body = {"model": self._name, "prompt": ids, **self._choice(generation, len(ids))}
        if engine.reads is not None and ids:
            reads = self._reads(engine, request)
            reads = replace(reads, regime=self._prove(reads, ids))
            body |= {"kv_transfer_params": reads.params, "cache_salt": salt_of(reads)}
        plain = replace(generation.decoding, schema=None, regex=None, grammar=None)  # vLLM holds the answer to them
        decoder = Decoder(self.model, replace(generation, decoding=plain))
        return ServerJob(body, decoder, self.model)

    def _start_job(self, job: Job) -> None:
        self._jobs[job.ticket] = job
        assert isinstance(job, ServerJob)
        threading.Thread(target=self._read, args=(job,), name="ragkv-vllm", daemon=True).start()

    def _read(self, job: ServerJob) -> None:
        """In a thread for each request: its tokens, as they come."""
        error: BaseException | None = None
        try:
            for ids, reason in self._server.tokens(job.body, job.opened.append):
                for number, token_id in enumerate(ids, 1):
                    last = reason is not None and number == len(ids)
                    assert job.decoder is not None
                    token = job.decoder.take(_NO_SCORES, token_id, None, finite=True, full=last)
                    if last and reason == "stop":
                        token = replace(token, finish_reason="stop")
                    job.tokens.append(token)
                    with self._changed:
                        self._changed.notify_all()
                    if token.finish_reason is not None or job.cancelled:
                        return
            error = ModelServerError(f"vLLM at {self._server.url} ended the answer without a reason; ask again.")
        except Exception as failure:  # raised in the thread that reads the answer
            error = failure
        finally:
            self._end(job, None if job.cancelled else error)
            with self._changed:
                self._changed.notify_all()

    def _choice(self, generation: Generation, prompt: int) -> dict[str, Any]:
        """How tokens are chosen, in vLLM's words."""
        decoding: Decoding = generation.decoding
        left = generation.max_new_tokens if self._positions is None else self._positions - prompt
        if left < 1:
            raise PromptTooLongError(
                f"The prompt has {prompt} tokens but vLLM at {self._server.url} takes {self._positions}; lower "
                "--top-k, or start it with a larger --max-model-len."
            )
        if decoding.repetition_penalty != 1:
            raise UsageError(
                "vLLM's repetition_penalty counts the documents' words too, which answers repeat; leave it out."
            )
        constrained = decoding.schema or decoding.regex or decoding.grammar
        if isinstance(decoding.thinking, int) or (decoding.thinking != "off" and constrained):
            raise UsageError(
                "With --runtime vllm, thinking is on or off, and off for an answer by a schema, regex or grammar."
            )
        body: dict[str, Any] = {
            "max_tokens": min(left, generation.max_new_tokens),
            "temperature": decoding.effective_temperature,
            "stop_token_ids": sorted(self.model.eos_ids.union(decoding.stop_ids)),
            "presence_penalty": decoding.presence_penalty,
            "frequency_penalty": decoding.frequency_penalty,
            "skip_special_tokens": False,
            "seed": decoding.seed,
            "top_p": decoding.top_p,
            "top_k": decoding.top_k_tokens,
            "min_p": decoding.min_p,
        }
        if constrained:
            schema = decoding.schema and json.loads(decoding.schema)
            if schema:  # vLLM's backend "guidance" then writes JSON as ragkv does
                schema = {**schema, "x-guidance": {**JSON_LAYOUT, **schema.get("x-guidance", {})}}
            body["structured_outputs"] = {"json": schema, "regex": decoding.regex, "grammar": decoding.grammar}
        return body

    def _reads(self, engine: Engine, request: Request) -> ChunkReads:
        prefix, encoding = request.prefix_ids, engine.reads
        chunks: list[tuple[Encoding, int, tuple[int, ...]]] = []
        if prefix:
            chunks.append((Encoding.STANDALONE, len(prefix), ()))
        for chunk in request.chunks:
            if chunk.token_ids and encoding is not None:
                mine = Encoding.PREFIXED if encoding is Encoding.CONTEXT and not chunk.seen else encoding
                before = () if mine is Encoding.STANDALONE else (*prefix, *chunk.seen)
                chunks.append((mine, len(chunk.token_ids), before))
        return ChunkReads(model=self._fingerprint, engine=engine.name, index=self._index, chunks=tuple(chunks))

    def _sink(self, sink: str) -> Any:
        return self.model.checkpoint.recommended.get("sink", "prefix") if sink == "auto" else sink

    def prove(self, engine: Engine, request: Request) -> None:
        """ModelServerError unless vLLM finds that the records of a request are what it computes itself."""
        ids = [*request.prefix_ids, *(i for chunk in request.chunks for i in chunk.token_ids), *request.suffix_ids]
        self._prove(self._reads(engine, request), ids)

    def _prove(self, reads: ChunkReads, ids: Sequence[int]) -> str:
        """The connector's regime, proved now if it is not yet."""
        with self._verdict_lock:
            if not self._regime or self._proved != self._server.state:
                report = self._server.prefill(ids, token_hex(16), replace(reads, mode="prove"))
                if report["report"] != "":
                    raise ModelServerError(
                        f"RagKVConnector of vLLM at {self._server.url} refuses the index: "
                        f"{report['report'] or 'it serves another model or index'}; ingest again, or use --engine full."
                    )
                self._regime, self._proved = report["regime"], self._server.state
            return self._regime
