"""Train the bundled embedder and reranker, small models in the file layouts of bge-m3 and bge-reranker-v2-m3.

Both are XLM-RoBERTa encoders. The data are questions about generated worlds with the passages that answer them, and
sentences of prose with the passage that each was cut from. A step's data depend only on its number, so a killed run
continues from its last checkpoint with the same data. `measure_retrieval` compares the models with BM25 on worlds that
neither has seen.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, cast

import torch
from tokenizers import Regex, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerFast,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

from ragkv.benchmarks.evaluation.metrics import hit_at, ndcg_at
from ragkv.benchmarks.evaluation.retrieval import corpus_searches
from ragkv.benchmarks.evaluation.worlds.passages import passages
from ragkv.benchmarks.evaluation.worlds.text import module_docstrings
from ragkv.benchmarks.evaluation.worlds.world import Split, World, paraphrases, shared_words
from ragkv.benchmarks.training.loop import Training
from ragkv.benchmarks.training.mini.data import train_bpe
from ragkv.doctor.retrieval import RetrievalTask
from ragkv.finetune.block import replace_folder
from ragkv.finetune.data import Progress
from ragkv.retrievers import load_embedder, load_reranker

logger = logging.getLogger(__name__)

MAX_TOKENS = 512
"""The longest text, with special tokens. Positions start after the padding id, as in XLM-R."""
SPECIAL_IDS = 5
_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
_SPLIT = r"[\p{L}\p{M}]+|\p{N}{1,2}|[^\s\p{L}\p{M}\p{N}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderShape:
    """The sizes of the encoder, which are written to `ragkv.json`."""

    hidden: int = 192
    layers: int = 3
    heads: int = 6
    intermediate: int = 512
    vocab: int = 4096


def encoder_config(shape: EncoderShape, vocab: int, **more: Any) -> XLMRobertaConfig:
    """XLM-R's configuration for `vocab` tokens. `more` are further fields, such as `num_labels=1`."""
    return XLMRobertaConfig(
        vocab_size=vocab,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.intermediate,
        max_position_embeddings=MAX_TOKENS + 2,
        type_vocab_size=1,
        initializer_range=0.05,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        layer_norm_eps=1e-5,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
        **more,
    )


def train_encoder_tokenizer(texts: Iterable[str], vocab: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer on `texts`. It encodes a text as `<s> A </s>` and a pair as `<s> A </s></s> B </s>`."""
    core = train_bpe(
        texts,
        vocab,
        _SPECIAL,
        splits=[
            pre_tokenizers.Split(Regex(r"\s+"), behavior="removed"),
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
        ],
        normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),
        unk_token="<unk>",
    )
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<s>",
        sep_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        mask_token="<mask>",
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_TOKENS,
        model_input_names=["input_ids", "attention_mask"],
    )


NAMED_SHARE, BRIDGE_SHARE = 0.35, 0.1
"""Shares of questions of one hop and of two hops that name their entity; all others describe it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalQuery:
    """A question, the indices of the passages that answer it, and whether it shares their words."""

    question: str
    answers: tuple[int, ...]
    named: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """The passages and questions of a step. Each question is scored against all passages."""

    passages: tuple[str, ...]
    asks: tuple[RetrievalQuery, ...]


def world_step(
    rng: random.Random,
    tokenizer: PreTrainedTokenizerFast,
    *,
    split: Split = "train",
    worlds: int = 2,
    size: int = 20,
    asks: int = 96,
    limit: int = 96,
) -> TrainingStep:
    """Questions about `worlds` worlds of `size` entities, and their passages of up to `limit` tokens."""
    texts: list[str] = []
    named: list[RetrievalQuery] = []
    bridged: list[RetrievalQuery] = []
    described: list[RetrievalQuery] = []
    for _ in range(worlds):
        world = World.generate(rng.getrandbits(40), split=split, size=size)
        own = passages(rng, tokenizer, world, limit=limit)
        by_place = {place: " ".join(text.split()) for place, text in enumerate(own, start=len(texts))}
        texts += own
        for question in world.questions:
            if answers := _holding(by_place, question.support):
                ask = RetrievalQuery(question=question.question, answers=answers, named=True)
                (named if question.hops == 1 else bridged).append(ask)
        for other in paraphrases(world, seed=rng.getrandbits(30), wordings=1):
            identified = _holding(by_place, other.traits)
            if answers := tuple(place for place in _holding(by_place, [other.fact]) if place in identified):
                described.append(RetrievalQuery(question=other.question, answers=answers, named=False))
    counts = [round(asks * NAMED_SHARE), round(asks * BRIDGE_SHARE)]
    counts.append(asks - sum(counts))
    drawn = [
        ask
        for group, count in zip((named, bridged, described), counts, strict=True)
        for ask in rng.sample(group, min(count, len(group)))
    ]
    return TrainingStep(passages=tuple(texts), asks=tuple(drawn))


def _holding(texts: Mapping[int, str], sentences: Sequence[str]) -> tuple[int, ...]:
    """The places of the texts that contain one of the sentences."""
    return tuple(place for place, text in texts.items() if any(sentence in text for sentence in sentences))


def prose_step(rng: random.Random, texts: Sequence[str], *, count: int = 64) -> TrainingStep:
    """`count` passages of three to six sentences. One sentence of each is the question, and usually removed from it."""
    chosen: list[str] = []
    asks: list[RetrievalQuery] = []
    for text in rng.sample(list(texts), len(texts)):
        sentences = [s for s in re.split(r"(?<=[.!?:])\s+|\n\n+", text) if len(s.split()) > 4]
        if len(sentences) < 3:
            continue
        length = rng.randint(3, 6)
        start = rng.randrange(max(1, len(sentences) - length + 1))
        window = sentences[start : start + length]
        asked = window.pop(rng.randrange(len(window)))
        words = asked.split()
        if rng.random() < 0.3:  # so that equal words stay useful
            window.insert(0, asked)
        width = rng.randint(4, 16)
        at = rng.randrange(max(1, len(words) - width + 1))
        asks.append(RetrievalQuery(question=" ".join(words[at : at + width]), answers=(len(chosen),), named=True))
        chosen.append(" ".join(window)[:600])
        if len(chosen) == count:
            break
    return TrainingStep(passages=tuple(chosen), asks=tuple(asks))


FEW_WORDS = 1
"""The most words, without stop words, that a question of the slice "few" shares with the passage that answers it."""
RERANKED = 32


SYSTEMS = ("bm25", "dense", "sparse", "colbert", "dense+rerank")


def measure_retrieval(
    embedder: Path, reranker: Path | None, *, seeds: Sequence[int] = range(4), size: int = 60, asks: int = 160
) -> list[dict[str, Any]]:
    """Ask up to `asks` questions per seed about the passages of one held-out world of `size` entities.

    A row has recall@5 and nDCG@10 of one search over the `n` questions of a slice (few, named, described).
    """
    model = load_embedder(str(embedder), device="cpu")
    judge = None if reranker is None else load_reranker(str(reranker), device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(embedder, trust_remote_code=False)
    figures_of: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for seed in seeds:
        rng = random.Random(f"ragkv-retrieval-measure:{seed}")
        step = world_step(rng, tokenizer, split="heldout", worlds=1, size=size, asks=asks)
        corpus = {str(place): text for place, text in enumerate(step.passages)}
        task = RetrievalTask(name="worlds", judgements=(), passages=corpus)
        searches = corpus_searches(task, model, judge, candidates=RERANKED)
        for ask in step.asks:
            relevant = {str(place): 1.0 for place in ask.answers}
            for system in [system for system in SYSTEMS if system in searches]:
                ranked = searches[system](ask.question, 10)
                figures = hit_at(5, ranked, relevant), ndcg_at(10, ranked, relevant)
                figures_of.setdefault((_slice(ask, step.passages), system), []).append(figures)
    return [
        {"slice": name, "system": system, "recall_5": fmean(hits), "ndcg_10": fmean(gains), "n": len(hits)}
        for (name, system), figures in sorted(figures_of.items())
        for hits, gains in [zip(*figures, strict=True)]
    ]


def _slice(ask: RetrievalQuery, passages: Sequence[str]) -> str:
    if all(shared_words(ask.question, passages[place]) <= FEW_WORDS for place in ask.answers):
        return "few"
    return "named" if ask.named else "described"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The shape of the model and the settings of its training. Every field is written to `ragkv.json`."""

    shape: EncoderShape = field(default_factory=EncoderShape)
    steps: int = 1000
    lr: float = 1e-3
    weight_decay: float = 0.01
    warmup: float = 0.05
    clip: float = 1.0
    seed: int = 0
    checkpoint_every: int = 100
    device: str = "cpu"


def run_training(
    config: TrainConfig,
    modules: Mapping[str, nn.Module],
    step: Callable[[int], tuple[Tensor, Mapping[str, float]]],
    output: Path,
    *,
    on_progress: Progress | None,
) -> None:
    """Train `modules` in place. `step(number)` returns the loss and further figures.

    Writes `output/checkpoint.pt` on the way. An existing checkpoint is continued, or refused with UsageError if it has
    another shape or number of steps. `on_progress` is as in `Training.run`.
    """
    for module in modules.values():
        module.to(config.device)
    parameters = [parameter for module in modules.values() for parameter in module.parameters()]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim > 1]},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, weight_decay=config.weight_decay, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=config.lr, total_steps=config.steps + 1, pct_start=config.warmup, final_div_factor=100
    )
    output.mkdir(parents=True, exist_ok=True)
    training = Training(
        modules=modules,
        optimizer=optimizer,
        schedule=schedule,
        path=output / "checkpoint.pt",
        settings={**asdict(config.shape), "steps": config.steps},
        steps=config.steps,
        every=config.checkpoint_every,
        clip=config.clip,
    )
    training.resume(again="another --output")

    def advance(number: int) -> Mapping[str, float]:
        loss, figures = step(number)
        loss.backward()  # type: ignore[no-untyped-call]
        return {"loss": loss.item(), **figures}

    training.run(advance, on_progress=on_progress)


def world_texts(count: int) -> Iterator[str]:
    """The documents and questions of `count` worlds of the training split."""
    for index in range(count):
        world = World.generate(index, split="train", size=24)
        for document in world.documents:
            yield f"# {document.title}\n\n{document.text}\n\n"
        for question in world.questions[::9]:
            yield f"Question: {question.question}\n"


def english_texts(limit: int = 2_000_000) -> Iterator[str]:
    """Docstrings of Python's standard library, up to `limit` characters: English text on any machine."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for text in module_docstrings(path):
            limit -= len(text)
            yield text + "\n\n"
            if limit < 0:
                return


EMBEDDER_PROSE_EVERY = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedderTrainConfig(TrainConfig):
    """`asks` questions per step about `worlds` worlds of `size` entities; `temperature` divides the scores."""

    steps: int = 1500
    worlds: int = 2
    size: int = 16
    asks: int = 64
    temperature: float = 0.05


class TrainingVectors(NamedTuple):
    """The vectors of n texts: dense (n, d); sparse (n, vocabulary); colbert (n, tokens - 1, d), zero for padding.

    `counts` (n,) is the number of ColBERT rows of each text.
    """

    dense: Tensor
    sparse: Tensor
    colbert: Tensor
    counts: Tensor


class M3:
    """An encoder with two linear heads, which are trained together."""

    def __init__(self, encoder: XLMRobertaModel, sparse: nn.Linear, colbert: nn.Linear) -> None:
        self.encoder = encoder
        self.sparse = sparse
        self.colbert = colbert

    @property
    def modules(self) -> dict[str, nn.Module]:
        return {"encoder": self.encoder, "sparse": self.sparse, "colbert": self.colbert}

    @property
    def heads(self) -> dict[str, nn.Module]:
        """By the names of their files."""
        return {"sparse_linear": self.sparse, "colbert_linear": self.colbert}

    def __call__(self, ids: Tensor, mask: Tensor) -> TrainingVectors:
        """The vectors of ids and mask (n, tokens), in fp32."""
        hidden = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = torch.relu(self.sparse(hidden)).squeeze(-1) * mask  # (n, tokens)
        spread = torch.zeros(len(ids), self.encoder.config.vocab_size, device=ids.device)
        # `amax` as in M3: a token that occurs twice has the larger of its weights
        spread = spread.scatter_reduce(1, ids, weights, reduce="amax")
        keep = torch.ones_like(spread[0])
        keep[:SPECIAL_IDS] = 0
        rows = F.normalize(self.colbert(hidden[:, 1:]), dim=-1) * mask[:, 1:, None]
        return TrainingVectors(F.normalize(hidden[:, 0], dim=-1), spread * keep, rows, mask[:, 1:].sum(1))


def build_embedder(config: EmbedderTrainConfig, vocab: int) -> M3:
    """A new embedder in fp32, initialised from the seed."""
    torch.manual_seed(config.seed)
    encoder = XLMRobertaModel(encoder_config(config.shape, vocab), add_pooling_layer=False)
    pool_at_start(encoder)
    hidden = config.shape.hidden
    return M3(encoder, nn.Linear(hidden, 1), nn.Linear(hidden, hidden))


def pool_at_start(encoder: XLMRobertaModel) -> None:
    """Zero the first token's embedding, so that it starts as the mean of all tokens' values, scaled up by a layer norm.

    With an embedding of its own it would start equal for all texts, and the dense head learns nothing in 100 steps.
    """
    with torch.no_grad():
        embeddings = encoder.embeddings
        embeddings.word_embeddings.weight[encoder.config.bos_token_id] = 0
        embeddings.position_embeddings.weight[encoder.config.pad_token_id + 1] = 0
        embeddings.token_type_embeddings.weight.zero_()


def train_embedder(
    config: EmbedderTrainConfig,
    tokenizer: PreTrainedTokenizerFast,
    output: Path,
    *,
    on_progress: Progress | None = None,
) -> M3:
    """Train and return the embedder in fp32; see `run_training` for checkpoints and progress.

    The figures dense, sparse and colbert are the shares of questions whose best passage is right.
    """
    model = build_embedder(config, len(tokenizer))
    prose = list(english_texts(1_200_000))

    def step(number: int) -> tuple[Tensor, Mapping[str, float]]:
        data = _embedder_step(config, tokenizer, prose, number)
        asked = model(*pad(tokenizer, [ask.question for ask in data.asks], config.device))
        read = model(*pad(tokenizer, data.passages, config.device))
        return _loss(config, data, asked, read)

    run_training(config, model.modules, step, output, on_progress=on_progress)
    return model


def _embedder_step(
    config: EmbedderTrainConfig, tokenizer: PreTrainedTokenizerFast, prose: Sequence[str], step: int
) -> TrainingStep:
    rng = random.Random(f"ragkv-embedder:{config.seed}:{step}")
    if step % EMBEDDER_PROSE_EVERY == EMBEDDER_PROSE_EVERY - 1:
        return prose_step(rng, prose, count=40)
    return world_step(rng, tokenizer, worlds=config.worlds, size=config.size, asks=config.asks)


def pad(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], device: str) -> tuple[Tensor, Tensor]:
    """Tokenise texts to (ids, mask), both (n, tokens), truncated to `MAX_TOKENS`."""
    batch = tokenizer(list(texts), padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
    return batch["input_ids"].to(device), batch["attention_mask"].to(device)


def _loss(
    config: EmbedderTrainConfig, data: TrainingStep, asked: TrainingVectors, read: TrainingVectors
) -> tuple[Tensor, dict[str, float]]:
    """The sum of the heads' losses. The sparse head is trained on questions that share words with their passage."""
    right = torch.zeros(len(data.asks), len(data.passages), dtype=torch.bool)
    for row, ask in enumerate(data.asks):
        right[row, list(ask.answers)] = True
    right = right.to(asked.dense.device)
    named = torch.tensor([ask.named for ask in data.asks], device=right.device)
    scores = {
        "dense": asked.dense @ read.dense.T / config.temperature,
        "colbert": _late(asked, read) / config.temperature,
    }
    losses = [_nce(score, right).mean() for score in scores.values()]
    if named.any():
        scores["sparse"] = asked.sparse @ read.sparse.T
        losses.append(0.3 * _nce(scores["sparse"][named], right[named]).mean())
    best = {
        name: right.gather(1, score.argmax(1, keepdim=True)).float().mean().item() for name, score in scores.items()
    }
    return cast("Tensor", sum(losses)), best


def _nce(scores: Tensor, right: Tensor) -> Tensor:
    """The negative log of the softmax mass on the right passages, per question."""
    return scores.logsumexp(1) - scores.masked_fill(~right, float("-inf")).logsumexp(1)


def _late(asked: TrainingVectors, read: TrainingVectors) -> Tensor:
    """Late interaction (questions, passages): the mean over a question's tokens of their best match in the passage."""
    questions, tokens, width = asked.colbert.shape
    passages, longest, _ = read.colbert.shape
    flat = asked.colbert.reshape(-1, width) @ read.colbert.reshape(-1, width).T
    best = flat.view(questions, tokens, passages, longest).amax(-1)  # padded rows give 0, as in FlagEmbedding
    return best.sum(1) / asked.counts[:, None]


RERANKER_PROSE_EVERY = 6
MATCH_WEIGHT = 20.0
SHORT, LONG = 32, 96
MATCHING = 17.0
"""Initial length of a query or key: equal tokens then have logits of about 9 per head, others of about 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankerTrainConfig(TrainConfig):
    """A step has `asks` questions, each with a right passage, `hard` ones that the embedder ranks high, `easy` ones.

    `shape` is the embedder's; `added` layers come after its own. The first `short` steps read passages of about `SHORT`
    tokens, because matching is learned faster among few tokens.
    """

    steps: int = 1100
    added: int = 2
    short: int = 500
    asks: int = 12
    hard: int = 3
    easy: int = 1
    size: int = 20


def build_reranker(config: RerankerTrainConfig, embedder: M3) -> XLMRobertaForSequenceClassification:
    """A cross-encoder in fp32: the embedder's layers, new ones that start as its late interaction, and a new head."""
    torch.manual_seed(config.seed)
    vocab = embedder.encoder.config.vocab_size
    shape = replace(config.shape, layers=config.shape.layers + config.added)
    model = XLMRobertaForSequenceClassification(encoder_config(shape, vocab, num_labels=1))
    model.roberta.load_state_dict(embedder.encoder.state_dict(), strict=False)
    if config.added:
        _start_matching(model.roberta.encoder.layer[config.shape.layers].attention.self, embedder)
    return model


def _start_matching(attention: nn.Module, embedder: M3) -> None:
    """Let every token attend to the tokens that the ColBERT head finds similar, in the question and in the passage.

    A cross-encoder first has to see that a word of the question is also in the passage, but no layer of the embedder
    compares tokens. Without this start, 80 steps had no effect.
    """
    with torch.no_grad():
        # the length of its outputs, because hidden states are normalised to length sqrt(d)
        typical = embedder.colbert.weight.norm()
        for name in ("query", "key"):
            linear = cast("nn.Linear", getattr(attention, name))
            linear.weight.copy_(embedder.colbert.weight * (MATCHING / typical))
            linear.bias.copy_(embedder.colbert.bias * (MATCHING / typical))


def train_reranker(
    config: RerankerTrainConfig,
    embedder: M3,
    tokenizer: PreTrainedTokenizerFast,
    output: Path,
    *,
    on_progress: Progress | None = None,
) -> XLMRobertaForSequenceClassification:
    """Train and return the reranker in fp32; see `run_training` for checkpoints and progress.

    The figure first is the share of questions whose right passage is ranked first in its group; off is the mean squared
    error of the tokens' predictions.
    """
    model = build_reranker(config, embedder)
    for module in embedder.modules.values():
        module.to(config.device)
    token_head = torch.nn.Linear(config.shape.hidden, 1)
    prose = list(english_texts(1_200_000))

    def step(number: int) -> tuple[Tensor, Mapping[str, float]]:
        rng = random.Random(f"ragkv-reranker:{config.seed}:{number}")
        data = _reranker_step(config, rng, tokenizer, prose, number)
        with torch.inference_mode():
            asked = embedder(*pad(tokenizer, [ask.question for ask in data.asks], config.device))
            read = embedder(*pad(tokenizer, data.passages, config.device))
        pairs, right = _groups(config, rng, data, asked.dense @ read.dense.T)
        batch = tokenizer(
            [data.asks[ask].question for ask, _ in pairs],
            [data.passages[place] for _, place in pairs],
            padding=True,
            truncation="only_second",
            max_length=MAX_TOKENS,
            return_tensors="pt",
        ).to(config.device)
        matched = _matches(asked, read, pairs, batch["input_ids"].shape[1])
        hidden = model.roberta(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])[0]
        scores = model.classifier(hidden).view(right.shape)  # (questions, group)
        guessed = token_head(hidden).squeeze(-1)  # (pairs, tokens)
        ordered = F.cross_entropy(scores, right.float().argmax(1))
        judged = F.binary_cross_entropy_with_logits(scores, right.float())
        known = matched >= 0
        off = F.mse_loss(guessed[known], matched[known])
        first = right.gather(1, scores.argmax(1, keepdim=True)).float().mean().item()
        return ordered + judged + MATCH_WEIGHT * off, {"first": first, "off": off.item()}

    run_training(config, {"model": model, "teller": token_head}, step, output, on_progress=on_progress)
    return model


def _reranker_step(
    config: RerankerTrainConfig,
    rng: random.Random,
    tokenizer: PreTrainedTokenizerFast,
    prose: Sequence[str],
    number: int,
) -> TrainingStep:
    if number % RERANKER_PROSE_EVERY == RERANKER_PROSE_EVERY - 1:
        return prose_step(rng, prose, count=config.asks)
    short = number < config.short
    asks, limit = (2 * config.asks, SHORT) if short else (config.asks, LONG)
    return world_step(rng, tokenizer, worlds=1, size=config.size, asks=asks, limit=limit)


def _groups(
    config: RerankerTrainConfig, rng: random.Random, data: TrainingStep, likes: Tensor
) -> tuple[list[tuple[int, int]], Tensor]:
    """Pairs of (question, passage) indices, and a mask (questions, group) of the right ones, which come first."""
    pairs: list[tuple[int, int]] = []
    groups = 0
    for number, (ask, order) in enumerate(zip(data.asks, likes.argsort(1, descending=True).tolist(), strict=True)):
        wrong = [place for place in order if place not in ask.answers]
        if len(wrong) < config.hard + config.easy:
            continue
        chosen = [rng.choice(ask.answers), *wrong[: config.hard], *rng.sample(wrong[config.hard :], config.easy)]
        pairs += [(number, place) for place in chosen]
        groups += 1
    right = torch.zeros(groups, 1 + config.hard + config.easy, dtype=torch.bool, device=likes.device)
    right[:, 0] = True
    return pairs, right


def _matches(asked: TrainingVectors, read: TrainingVectors, pairs: Sequence[tuple[int, int]], width: int) -> Tensor:
    """The cosine of each token's best match in the other text, (pairs, width); -1 for special tokens and padding.

    In a pair, the question's tokens begin at 1 and the passage's tokens two after the question's `</s>`. In `Vectors`,
    row i belongs to token i + 1, and the last counted row to `</s>`.
    """
    cosines_of = torch.full((len(pairs), width), -1.0, device=asked.dense.device)
    for row, (ask, place) in enumerate(pairs):
        question = asked.colbert[ask, : int(asked.counts[ask]) - 1]
        passage = read.colbert[place, : int(read.counts[place]) - 1]
        cosines = question @ passage.T
        start = 1 + len(question) + 2
        passage_best = cosines.amax(0)[: max(0, width - start - 1)]  # without tokens that were truncated
        cosines_of[row, 1 : 1 + len(question)] = cosines.amax(1).clamp(min=0)
        cosines_of[row, start : start + len(passage_best)] = passage_best.clamp(min=0)
    return cosines_of


def export(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    destination: Path,
    *,
    notes: Mapping[str, Any],
    heads: Mapping[str, nn.Module] | None = None,
) -> None:
    """Write bge-m3's or bge-reranker-v2-m3's layout: the encoder, `heads` as NAME.pt, the tokenizer and `ragkv.json`.

    Weights are written in fp16, which halves their size. `model` itself is not changed.
    """
    with replace_folder(destination) as folder:
        state = {key: value.detach().cpu().half().contiguous() for key, value in model.state_dict().items()}
        model.save_pretrained(folder, state_dict=state)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["dtype"] = str(torch.float32).removeprefix("torch.")  # the dtype to load them in, as in bge-m3's config
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        for name, head in (heads or {}).items():
            torch.save({key: value.half() for key, value in head.state_dict().items()}, folder / f"{name}.pt")
        tokenizer.save_pretrained(folder)
        (folder / "ragkv.json").write_text(json.dumps({"recipe": dict(notes)}, indent=1) + "\n", encoding="utf-8")


def build_mini_embedder(
    config: EmbedderTrainConfig, output: Path, *, on_progress: Progress | None = None
) -> list[dict[str, Any]]:
    """Train in the folder `output` and write `output/model`. Returns its figures on held-out worlds.

    The tokenizer and a checkpoint are kept in `output`, so that a killed run continues.
    """
    folder = output / "tokenizer"
    if not (folder / "tokenizer.json").exists():
        logger.info("training the tokenizer")
        texts = itertools.chain(world_texts(300), _questions(100), english_texts(1_200_000))
        train_encoder_tokenizer(texts, config.shape.vocab).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = train_embedder(config, tokenizer, output, on_progress=on_progress)
    write = partial(export, model.encoder, tokenizer, output / "model", heads=model.heads)
    write(notes=asdict(config))
    rows = measure_retrieval(output / "model", None)
    write(notes={**asdict(config), "heldout": rows})
    return rows


def build_mini_reranker(
    config: RerankerTrainConfig, embedder: Path, output: Path, *, on_progress: Progress | None = None
) -> list[dict[str, Any]]:
    """Train in the folder `output` from the embedder in the training folder `embedder`, and write `output/model`."""
    tokenizer = AutoTokenizer.from_pretrained(embedder / "tokenizer", trust_remote_code=False)
    start = build_embedder(EmbedderTrainConfig(shape=config.shape), len(tokenizer))
    saved = torch.load(embedder / "checkpoint.pt", map_location="cpu", weights_only=True)
    for name, module in start.modules.items():
        module.load_state_dict(saved[name])
    model = train_reranker(config, start, tokenizer, output, on_progress=on_progress)
    write = partial(export, model, tokenizer, output / "model")
    write(notes=asdict(config))
    rows = measure_retrieval(embedder / "model", output / "model")
    write(notes={**asdict(config), "heldout": rows})
    return rows


def _questions(worlds: int) -> Iterator[str]:
    for seed in range(worlds):
        for each in paraphrases(World.generate(seed, split="train", size=24), seed=seed):
            yield each.question + "\n"
