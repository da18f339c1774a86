"""Train the mini embedder: a small XLM-R with dense, sparse and ColBERT outputs, like bge-m3.

The heads are those of the M3-Embedding paper: the normalised first token, a ReLU weight per token, and a normalised
vector per token. Each is trained with InfoNCE over all passages of a step.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from ragkv.finetune.encoder import MAX_TOKENS, SPECIAL_IDS, encoder_config
from ragkv.finetune.retrieval_data import Step, prose_step, world_step
from ragkv.finetune.trainingloop import Progress, TrainConfig, run_training
from ragkv.finetune.trainingtext import english_texts

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedTokenizerFast, XLMRobertaModel

__all__ = ["M3", "EmbedderTrainConfig", "Vectors", "build_embedder", "pad", "train_embedder"]

PROSE_EVERY = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedderTrainConfig(TrainConfig):
    """`asks` questions per step about `worlds` worlds of `size` entities; `temperature` divides the scores."""

    steps: int = 1500
    worlds: int = 2
    size: int = 16
    asks: int = 64
    temperature: float = 0.05

    def __post_init__(self) -> None:
        TrainConfig.__post_init__(self)
        if self.worlds < 1 or self.size < 8 or self.asks < 1:
            raise ValueError("worlds and asks must be at least 1, size at least 8")


class Vectors(NamedTuple):
    """The vectors of n texts: dense (n, d); sparse (n, vocabulary); colbert (n, tokens - 1, d), zero for padding.

    `counts` (n,) is the number of ColBERT rows of each text.
    """

    dense: torch.Tensor
    sparse: torch.Tensor
    colbert: torch.Tensor
    counts: torch.Tensor


class M3:
    """An encoder with two linear heads, which are trained together."""

    def __init__(self, encoder: XLMRobertaModel, sparse: nn.Linear, colbert: nn.Linear) -> None:
        self.encoder = encoder
        self.sparse = sparse
        self.colbert = colbert

    @property
    def modules(self) -> dict[str, nn.Module]:
        return {"encoder": self.encoder, "sparse": self.sparse, "colbert": self.colbert}

    def __call__(self, ids: torch.Tensor, mask: torch.Tensor) -> Vectors:
        """The vectors of ids and mask (n, tokens), in fp32."""
        import torch
        from torch.nn import functional as F

        hidden = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = torch.relu(self.sparse(hidden)).squeeze(-1).float() * mask  # (n, tokens)
        spread = torch.zeros(len(ids), self.encoder.config.vocab_size, device=ids.device)
        # `amax` as in M3: a token that occurs twice has the larger of its weights
        spread = spread.scatter_reduce(1, ids, weights, reduce="amax")
        keep = torch.ones_like(spread[0])
        keep[:SPECIAL_IDS] = 0
        rows = F.normalize(self.colbert(hidden[:, 1:]).float(), dim=-1) * mask[:, 1:, None]
        return Vectors(F.normalize(hidden[:, 0].float(), dim=-1), spread * keep, rows, mask[:, 1:].sum(1))


def build_embedder(config: EmbedderTrainConfig, vocab: int) -> M3:
    """A new embedder in fp32, initialised from the seed."""
    import torch
    from torch import nn
    from transformers import XLMRobertaModel

    torch.manual_seed(config.seed)
    encoder = XLMRobertaModel(encoder_config(config.shape, vocab), add_pooling_layer=False)
    pool_at_start(encoder)
    hidden = config.shape.hidden
    return M3(encoder, nn.Linear(hidden, 1), nn.Linear(hidden, hidden))


def pool_at_start(encoder: XLMRobertaModel) -> None:
    """Zero the first token's embedding, so that it starts as the mean of all tokens' values, scaled up by a layer norm.

    With an embedding of its own it would start equal for all texts, and the dense head learns nothing in 100 steps.
    """
    import torch

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
    resume: bool = True,
    on_progress: Progress | None = None,
) -> M3:
    """Train and return the embedder in fp32; see `run_training` for checkpoints and progress.

    The figures dense, sparse and colbert are the shares of questions whose best passage is right.
    """
    import torch

    model = build_embedder(config, len(tokenizer))
    prose = list(english_texts(1_200_000))

    def step(number: int) -> tuple[torch.Tensor, Mapping[str, float]]:
        data = _step(config, tokenizer, prose, number)
        with torch.autocast(config.device.split(":")[0], dtype=torch.bfloat16, enabled=config.autocast):
            asked = model(*pad(tokenizer, [ask.question for ask in data.asks], config.device))
            read = model(*pad(tokenizer, data.passages, config.device))
        return _loss(config, data, asked, read)

    run_training(config, model.modules, step, output, resume=resume, on_progress=on_progress)
    return model


def _step(config: EmbedderTrainConfig, tokenizer: PreTrainedTokenizerFast, prose: Sequence[str], step: int) -> Step:
    rng = random.Random(f"ragkv-embedder:{config.seed}:{step}")
    if step % PROSE_EVERY == PROSE_EVERY - 1:
        return prose_step(rng, prose, count=40)
    return world_step(rng, tokenizer, worlds=config.worlds, size=config.size, asks=config.asks)


def pad(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokenise texts to (ids, mask), both (n, tokens), truncated to `MAX_TOKENS`."""
    batch = tokenizer(list(texts), padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
    return batch["input_ids"].to(device), batch["attention_mask"].to(device)


def _loss(
    config: EmbedderTrainConfig, data: Step, asked: Vectors, read: Vectors
) -> tuple[torch.Tensor, dict[str, float]]:
    """The sum of the heads' losses. The sparse head is trained on questions that share words with their passage."""
    import torch

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
    return cast("torch.Tensor", sum(losses)), best


def _nce(scores: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The negative log of the softmax mass on the right passages, per question."""
    return scores.logsumexp(1) - scores.masked_fill(~right, float("-inf")).logsumexp(1)


def _late(asked: Vectors, read: Vectors) -> torch.Tensor:
    """Late interaction (questions, passages): the mean over a question's tokens of their best match in the passage."""
    questions, tokens, width = asked.colbert.shape
    passages, longest, _ = read.colbert.shape
    flat = asked.colbert.reshape(-1, width) @ read.colbert.reshape(-1, width).T
    best = flat.view(questions, tokens, passages, longest).amax(-1)  # padded rows give 0, as in FlagEmbedding
    return best.sum(1) / asked.counts[:, None]
