"""Answers by a vLLM server that reads stored chunks itself (`ragkv.integrations.vllm`, docs/vllm.md).

ragkv searches and builds the prompt's tokens; vLLM gets them by its OpenAI server's `/v1/completions`, with what it
needs to find the chunks' records. `VLLMRuntime` stands in for the runtime: an answer's tokens come from the server
instead of from steps of a model here, and everything after the choice of a token is the runtime's own.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import torch

from ragkv.engines.base import Operation, Sample, require_supported
from ragkv.errors import PromptTooLongError, RagkvError, UnsupportedModelError, UsageError
from ragkv.model.language_model import eos_ids
from ragkv.model.loading import describe_error, reach
from ragkv.model.prompt import Tokens
from ragkv.runtime.decoding import Decoder, Generation
from ragkv.runtime.runtime import Runtime
from ragkv.runtime.scheduler import Ticket
from ragkv.runtime.step import Job
from ragkv.types import Encoding
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

    `model` is the model's fingerprint, `index` a name of the index. `mode` "prove" compares the records with what vLLM
    computes instead of serving them.
    """

    model: str
    engine: str
    index: str
    chunks: tuple[tuple[Encoding, int, tuple[int, ...]], ...]
    mode: str = ""

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens, _ in self.chunks)

    @classmethod
    def of(cls, params: Any) -> Self:
        """From JSON. Raises TypeError, ValueError or KeyError for anything else."""
        texts = {name: params[name] for name in ("model", "engine", "index", "mode")}
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
    return (
        "ragkv-"
        + hashlib.blake2b(json.dumps([reads.model, reads.engine, reads.index]).encode(), digest_size=24).hexdigest()
    )


ENGINES = ("block", "full", "single")
_CONNECT_SECONDS, _READ_SECONDS = 10, 600
_NO_SCORES = Sample(scores=torch.empty(0))


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


class VLLMServer:
    """A vLLM server by its URL. Raises RagkvError for what it answers, or does not."""

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

    def _response(self, path: str, body: Mapping[str, Any] | None) -> urllib3.BaseHTTPResponse:
        from urllib3.exceptions import HTTPError

        try:
            response = self._pool.request(
                "GET" if body is None else "POST", self.url + path, json=body, preload_content=False
            )
            if response.status != 200:
                text = response.read(1 << 16, decode_content=True).decode(errors="replace")
                with suppress(ValueError, KeyError, TypeError):
                    text = json.loads(text)["error"]["message"]
                raise RagkvError(f"vLLM at {self.url} refused the request ({response.status}): {text[:500]}")
        except HTTPError as error:
            raise RagkvError(
                f"vLLM at {self.url} does not answer ({type(error).__name__}); start it as docs/vllm.md says."
            ) from error
        return response

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON that it answers."""
        try:
            return json.loads(self._response(path, body).data)
        except ValueError as error:
            raise RagkvError(f"{self.url} answers no JSON: it is no vLLM server.") from error

    def tokens(
        self, body: Mapping[str, Any], opened: Callable[[urllib3.BaseHTTPResponse], object]
    ) -> Iterator[tuple[list[int], str | None]]:
        """The ids of the next tokens, and the reason if they are the last. `opened` gets the open response."""
        from urllib3.exceptions import HTTPError

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
                    if "error" in event:
                        raise RagkvError(f"vLLM at {self.url} ended the answer: {event['error'].get('message')}")
                    for choice in event["choices"]:
                        yield choice.get("token_ids") or [], choice["finish_reason"]
        except (HTTPError, OSError, ValueError) as error:
            raise RagkvError(f"vLLM at {self.url} ended the answer ({type(error).__name__}); ask again.") from error
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
        served = self._server.ask("/v1/models")["data"][0]
        self._name, self._positions = served["id"], served.get("max_model_len")
        self._verdict_lock = threading.Lock()
        self._proved = False

    def lease(self, sizes: Mapping[Hashable, int], **options: Any) -> Lease | None:
        """KV is in vLLM's memory, not here."""
        return super().lease({}, **options)

    def try_lease(self, sizes: Mapping[Hashable, int], **options: Any) -> Lease | None:
        return super().try_lease({}, **options)

    def require(self, engine: Engine) -> None:
        if engine.name not in ENGINES:
            raise UsageError(
                f"Engine {engine.name!r} runs in ragkv's own runtime: serve without --runtime vllm, or use engine "
                "'block', 'full' or 'single'."
            )
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
            self._prove(reads, ids)
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
            error = RagkvError(f"vLLM at {self._server.url} ended the answer without a reason; ask again.")
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
        }
        named = {
            "seed": decoding.seed,
            "top_p": decoding.top_p,
            "top_k": decoding.top_k_tokens,
            "min_p": decoding.min_p,
        }
        body |= {name: value for name, value in named.items() if value is not None}
        if constrained:
            schema = decoding.schema and json.loads(decoding.schema)
            if schema:  # vLLM's backend "guidance" then writes JSON as ragkv does
                schema = {**schema, "x-guidance": {**JSON_LAYOUT, **schema.get("x-guidance", {})}}
            held = {"json": schema, "regex": decoding.regex, "grammar": decoding.grammar}
            body["structured_outputs"] = {name: value for name, value in held.items() if value is not None}
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

    def _prove(self, reads: ChunkReads, ids: list[int]) -> None:
        """UnsupportedModelError unless vLLM finds that the records of this prompt are what it computes itself."""
        with self._verdict_lock:
            if self._proved:
                return
            asked = replace(reads, mode="prove")
            body = {"model": self._name, "prompt": ids, "max_tokens": 2, "min_tokens": 2, "temperature": 0}
            salt = secrets.token_hex(16)
            answer = self._server.ask(
                "/v1/completions", {**body, "kv_transfer_params": asked.params, "cache_salt": salt}
            )
            report = (answer.get("kv_transfer_params") or {}).get(PARAMS)
            if report is None:
                raise UnsupportedModelError(
                    f"vLLM at {self._server.url} runs without RagKVConnector for this index and model; start it as "
                    "docs/vllm.md says, or use --engine full."
                )
            if report["verdict"] != "":
                raise UnsupportedModelError(
                    f"RagKVConnector of vLLM at {self._server.url} refuses the index: "
                    f"{report['verdict'] or 'its chunks were not compared'}; ingest again, or use --engine full."
                )
            self._proved = True
