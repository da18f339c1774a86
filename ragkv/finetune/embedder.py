"""Train the mini embedder: dense, sparse and ColBERT outputs of one small XLM-R, as bge-m3 has them.

The three heads are the M3-Embedding paper's: the normalised first token, a ReLU weight per token, a normalised
vector per token. Each learns by InfoNCE over all passages of a step. The data of step s is a function of (seed, s),
so a killed run resumes from its last checkpoint onto the same stream.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ragkv.finetune.encoder import MAX_TOKENS, SPECIAL_IDS, EncoderShape, encoder_config
from ragkv.finetune.retrieval import Step, prose_step, world_step
from ragkv.finetune.tokenizer import english_texts

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedTokenizerFast, XLMRobertaModel

__all__ = ["M3", "EmbedderTrainConfig", "Vectors", "build_embedder", "pad", "train_embedder"]

Progress = Callable[[Mapping[str, float | int | str]], None]
PROSE_EVERY = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedderTrainConfig:
    """Shape and training; every field is written to checkpoints and to `ragkv.json`."""

    shape: EncoderShape = field(default_factory=EncoderShape)
    steps: int = 1500
    worlds: int = 2
    size: int = 16
    asks: int = 64
    lr: float = 1e-3
    weight_decay: float = 0.01
    warmup: float = 0.05
    temperature: float = 0.05
    clip: float = 1.0
    seed: int = 0
    checkpoint_every: int = 100
    device: str = "cpu"
    autocast: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1 or self.worlds < 1 or self.size < 8 or self.asks < 1 or self.checkpoint_every < 1:
            raise ValueError("steps, worlds, asks and checkpoint_every must be at least 1, size at least 8")


class Vectors(NamedTuple):
    """Of n texts: dense (n, d); sparse (n, vocabulary); colbert (n, tokens - 1, d), zero rows where padded."""

    dense: torch.Tensor
    sparse: torch.Tensor
    colbert: torch.Tensor
    counts: torch.Tensor


class M3:
    """An encoder with its two linear heads, trained together."""

    def __init__(self, encoder: XLMRobertaModel, sparse: nn.Linear, colbert: nn.Linear) -> None:
        self.encoder = encoder
        self.sparse = sparse
        self.colbert = colbert

    @property
    def modules(self) -> dict[str, nn.Module]:
        return {"encoder": self.encoder, "sparse": self.sparse, "colbert": self.colbert}

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for module in self.modules.values() for parameter in module.parameters()]

    def __call__(self, ids: torch.Tensor, mask: torch.Tensor) -> Vectors:
        """ids, mask: (n, tokens); every output in fp32."""
        import torch
        from torch.nn import functional as F

        hidden = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = torch.relu(self.sparse(hidden)).squeeze(-1).float() * mask  # (n, tokens)
        spread = torch.zeros(len(ids), self.encoder.config.vocab_size, device=ids.device)
        # `amax` as M3: a token that occurs twice counts with its larger weight
        spread = spread.scatter_reduce(1, ids, weights, reduce="amax")
        keep = torch.ones_like(spread[0])
        keep[:SPECIAL_IDS] = 0
        rows = F.normalize(self.colbert(hidden[:, 1:]).float(), dim=-1) * mask[:, 1:, None]
        return Vectors(F.normalize(hidden[:, 0].float(), dim=-1), spread * keep, rows, mask[:, 1:].sum(1))


def build_embedder(config: EmbedderTrainConfig, vocab: int) -> M3:
    """A freshly initialised, seeded embedder in fp32."""
    import torch
    from torch import nn
    from transformers import XLMRobertaModel

    torch.manual_seed(config.seed)
    encoder = XLMRobertaModel(encoder_config(config.shape, vocab), add_pooling_layer=False)
    pool_at_start(encoder)
    hidden = config.shape.hidden
    return M3(encoder, nn.Linear(hidden, 1), nn.Linear(hidden, hidden))


def pool_at_start(encoder: XLMRobertaModel) -> None:
    """Let the first token begin as the mean of all tokens' values, which a layer norm then makes large.

    With a vector of its own it begins as that vector, equal for all texts, and 100 steps teach the dense head nothing.
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
    """Train, keep `output/checkpoint.pt` fresh, return the embedder (fp32).

    A checkpoint in `output` of another shape is refused (ValueError). `on_progress` receives step, steps, loss,
    dense, sparse, colbert (share of questions whose best passage is right), lr and seconds after every step.
    """
    import torch

    model = build_embedder(config, len(tokenizer))
    for module in model.modules.values():
        module.to(config.device)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups,
        lr=config.lr,
        weight_decay=config.weight_decay,
        betas=(0.9, 0.98),
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=config.lr, total_steps=config.steps + 1, pct_start=config.warmup, final_div_factor=100
    )
    path, first, spent = output / "checkpoint.pt", 0, 0.0
    output.mkdir(parents=True, exist_ok=True)
    if resume and path.exists():
        saved = torch.load(path, map_location=config.device, weights_only=True)
        if saved["shape"] != asdict(config.shape) or saved["steps"] != config.steps:
            raise ValueError(f"{path} was written with another shape or number of steps; choose another folder")
        for name, module in model.modules.items():
            module.load_state_dict(saved[name])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        first, spent = saved["step"], saved["seconds"]
    prose = list(english_texts(1_200_000))
    started = time.perf_counter() - spent
    for step in range(first, config.steps):
        data = _step(config, tokenizer, prose, step)
        with torch.autocast(config.device.split(":")[0], dtype=torch.bfloat16, enabled=config.autocast):
            asked = model(*pad(tokenizer, [ask.question for ask in data.asks], config.device))
            read = model(*pad(tokenizer, data.passages, config.device))
        loss, shares = _loss(config, data, asked, read)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        lr = float(schedule.get_last_lr()[0])
        schedule.step()
        seconds = time.perf_counter() - started
        if on_progress is not None:
            told: dict[str, float | int | str] = {"step": step + 1, "steps": config.steps, "loss": loss.item()}
            on_progress({**told, **shares, "lr": lr, "seconds": seconds})
        if (step + 1) % config.checkpoint_every == 0 or step + 1 == config.steps:
            saved = {name: module.state_dict() for name, module in model.modules.items()} | {
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "shape": asdict(config.shape),
                "steps": config.steps,
                "step": step + 1,
                "seconds": seconds,
            }
            fresh = path.with_suffix(".new")
            torch.save(saved, fresh)
            fresh.replace(path)
    return model


def _step(config: EmbedderTrainConfig, tokenizer: PreTrainedTokenizerFast, prose: Sequence[str], step: int) -> Step:
    rng = random.Random(f"ragkv-embedder:{config.seed}:{step}")
    if step % PROSE_EVERY == PROSE_EVERY - 1:
        return prose_step(rng, prose, count=40)
    return world_step(rng, tokenizer, worlds=config.worlds, size=config.size, asks=config.asks)


def pad(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask), both (n, tokens), cut at `MAX_TOKENS`."""
    batch = tokenizer(list(texts), padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
    return batch["input_ids"].to(device), batch["attention_mask"].to(device)


def _loss(
    config: EmbedderTrainConfig, data: Step, asked: Vectors, read: Vectors
) -> tuple[torch.Tensor, dict[str, float]]:
    """Sum of the three heads' losses; the sparse head learns from questions that share words with their passage."""
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
    """-log of the softmax mass on the right passages, per question."""
    return scores.logsumexp(1) - scores.masked_fill(~right, float("-inf")).logsumexp(1)


def _late(asked: Vectors, read: Vectors) -> torch.Tensor:
    """(questions, passages): the mean over a question's tokens of the best match in the passage."""
    questions, tokens, width = asked.colbert.shape
    passages, longest, _ = read.colbert.shape
    flat = asked.colbert.reshape(-1, width) @ read.colbert.reshape(-1, width).T
    best = flat.view(questions, tokens, passages, longest).amax(-1)  # padded rows give 0, as in FlagEmbedding
    return best.sum(1) / asked.counts[:, None]
