"""Train the bundled mini model: a small Llama that answers from retrieved passages.

The curriculum is a sequence of `Stage`s: copying random records, which forms induction heads; questions on few
passages; then every kind of question on many passages, with a share of rows in the block layout (Block-Attention §2).
A row depends only on (seed, stage, step, its place in the step), so a killed run continues from its last checkpoint
with the same rows, bit for bit on one machine.

Start: from random weights, induction heads take several hundred steps to form, and without them questions stay at
chance. So rough ones are written into the first two layers, after which 98 % of the copied tokens are right in 80 small
steps. In layer 0, the first head of every key/value group reads the previous token. A direction common to all
embeddings carries a RoPE score that peaks there: the sum of cos((distance - 1) * frequency) over the fastest pairs.
(The common direction shifts every logit of the tied output alike, so it has no other effect.) The head writes a random
sketch of that token. Layer 1 matches the sketch of the current token with the written ones in the slow pairs, which
RoPE hardly rotates within a prompt, and copies the token that it finds: the output matrix is the transpose of the value
matrix, a positive map from an embedding to its logit.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from ragkv.benchmarks.training.loop import Training
from ragkv.benchmarks.training.mini.data import (
    FIRST_WEIGHT,
    GOLD_WEIGHT,
    RELATION_WEIGHT,
    SPECIAL_TOKENS,
    TrainingBatch,
    TrainingSample,
    additive_mask,
    collate,
    copy_sample,
    mixed_sample,
    prose_sample,
    qa_sample,
    shot_sample,
)
from ragkv.errors import UsageError
from ragkv.finetune.block import visible
from ragkv.finetune.data import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of the curriculum. `passages` is the inclusive range of passages (or of records to copy) per row."""

    name: str
    kind: Literal["copy", "qa", "mixed"]
    steps: int
    batch: int
    passages: tuple[int, int] = (1, 1)
    questions: int = 16
    block_share: float = 0.0
    misses: float = 0.0
    """The least share of questions that the context does not answer (`qa_sample`)."""
    hard: float = 0.0
    """The share of rows whose passages are drawn from a large world, as a retriever would."""
    prose: float = 0.0
    """The share of "mixed" rows that ask for words left out of English prose (`prose_sample`)."""
    shots: float = 0.0
    """The share of "mixed" rows that ask for the labels of many-shot learning (`shot_sample`)."""
    spread: bool = False
    """Draw the number of passages log-uniformly. `batch` rows have the most passages; of shorter rows there are as
    many as cost the same."""
    lr: float = 1e-3
    final_lr: float | None = None
    """The learning rate at the stage's last step, reached linearly; None keeps `lr`."""

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """The passages per row of a step, and its number of rows. Two questions cost about as much as a passage."""
        least, most = self.passages
        if not self.spread:
            return rng.randint(least, most), self.batch
        passages = round(math.exp(rng.uniform(math.log(max(least, 0.4)), math.log(most + 0.49))))
        asked = self.questions / 2
        return passages, round(self.batch * (most + asked) / (passages + asked))


_MIXED = Stage(
    name="mixed",
    kind="mixed",
    steps=640,
    batch=8,
    passages=(0, 10),
    questions=14,
    block_share=0.45,
    hard=0.7,
    prose=0.18,
    lr=1.2e-3,
    final_lr=2e-5,
)
_WIDE = replace(
    _MIXED, name="wide", steps=800, batch=3, passages=(0, 34), spread=True, prose=0.15, lr=8e-4, final_lr=1e-5
)
DEFAULT_STAGES = (
    Stage(name="copy", kind="copy", steps=120, batch=16, passages=(3, 20), lr=2e-3),
    Stage(name="few", kind="qa", steps=60, batch=16, passages=(1, 3), questions=8, lr=1.5e-3),
    Stage(name="many", kind="qa", steps=600, batch=8, passages=(1, 9), block_share=0.4, lr=1.5e-3, final_lr=5e-4),
    _MIXED,
    replace(_MIXED, name="again", steps=190, passages=(1, 10), questions=16, lr=7e-4, final_lr=4e-4),
    replace(_MIXED, name="long", steps=62, batch=6, passages=(3, 24), prose=0.15, lr=4e-4, final_lr=1e-5),
    _WIDE,
    replace(_WIDE, name="near", steps=1000, batch=4, questions=18, block_share=0.5, hard=0.8, prose=0.13, shots=0.18),
)
FULL_STAGES = (
    *(replace(stage, block_share=0.0) for stage in DEFAULT_STAGES[:2]),
    replace(DEFAULT_STAGES[2], steps=450, block_share=0.0, final_lr=3e-4),
    Stage(
        name="hard",
        kind="qa",
        steps=130,
        batch=8,
        passages=(1, 11),
        misses=0.1,
        hard=0.7,
        lr=5e-4,
        final_lr=2e-5,
    ),
)
"""Full attention only, one and two hops: the model on which block fine-tuning is shown (Block-Attention Table 1)."""
_FULL_LAYERS = 4
"""Layers that are enough for `FULL_STAGES`."""


def chosen_stages(*, goes_on: bool, full_only: bool, scale: float = 1.0) -> tuple[Stage, ...]:
    """The stages of a training. `scale` multiplies the steps.

    With `goes_on`, training starts from a model that can already copy and read, so only the stages with all kinds of
    question remain. With `full_only`, no row is in the block layout.
    """
    stages = FULL_STAGES if full_only and not goes_on else DEFAULT_STAGES
    return tuple(
        replace(
            stage,
            steps=max(1, round(stage.steps * scale)),
            block_share=0.0 if full_only else stage.block_share,
        )
        for stage in stages
        if stage.kind == "mixed" or not goes_on
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniTrainConfig:
    """The shape of the model and the settings of its training. Every field is written to `ragkv.json`."""

    hidden: int = 192
    layers: int = 6
    q_heads: int = 6
    kv_heads: int = 3
    intermediate: int = 512
    rope_theta: float = 1_000_000.0
    max_positions: int = 8192
    stages: tuple[Stage, ...] = DEFAULT_STAGES
    weight_decay: float = 0.01
    warmup: int = 20
    clip: float = 1.0
    seed: int = 0
    checkpoint_every: int = 50
    device: str = "cpu"
    autocast: bool = True
    start: str | None = None
    """Folder of a model to start from instead of random weights. Layers that it lacks start as identities."""

    def shape(self) -> dict[str, Any]:
        """The fields of config.json of a Llama of this shape, without the number of layers."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.q_heads,
            "num_key_value_heads": self.kv_heads,
        }


def chosen_config(
    config: MiniTrainConfig, *, start: Path | None, full_only: bool, scale: float = 1.0
) -> MiniTrainConfig:
    """`config` with the stages and layers for a training that starts from the weights in `start`, or from random ones.

    A model grows at least to the layers of `config`; with `full_only` it keeps its own. Raises UsageError if the folder
    `start` holds no model of this shape.
    """
    stages = chosen_stages(goes_on=start is not None, full_only=full_only, scale=scale)
    if start is None:
        return replace(config, stages=stages, layers=_FULL_LAYERS if full_only else config.layers)
    try:
        stored = json.loads((start / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{start} holds no config.json that can be read; give the folder of a mini model.") from error
    wanted = {"model_type": "llama", **config.shape()}
    own = stored.get("num_hidden_layers") if isinstance(stored, dict) else None
    if not isinstance(own, int) or any(stored.get(name) != value for name, value in wanted.items()):
        raise UsageError(f"{start} is no mini model: its config.json must have {wanted} and num_hidden_layers.")
    return replace(config, stages=stages, start=str(start), layers=own if full_only else max(own, config.layers))


EMBEDDING_STD = 0.03
COMMON = 0.6
"""Length of the direction common to all embeddings, relative to an embedding's random part."""
WRITTEN = 0.6
"""Length of the sketch that layer 0 writes, in the same unit."""
LOOK_BACK = 6.0
"""Score of the previous token in layer 0, per fast pair."""
MATCH = 12.0
"""Score of two equal tokens in layer 1."""
VALUE_STD = 0.06
FINAL_NORM = 3.0
"""Weight of the last norm. The embeddings are short, so without it sharp logits would take long to grow."""


def start_induction(model: LlamaForCausalLM) -> None:
    """Overwrite the embeddings, the attention of layers 0 and 1 and the last norm, using torch's global generator.

    Needs at least two layers, tied embeddings and an even head_dim; at least a quarter of the rotary pairs should turn
    slowly (rope_theta 1e6 for a head_dim of 32).
    """
    config = model.config
    hidden, kv_heads = config.hidden_size, config.num_key_value_heads
    group = config.num_attention_heads // kv_heads
    low, high = (layer.self_attn for layer in model.model.layers[:2])
    width = low.head_dim
    half, root = width // 2, math.sqrt(hidden)
    fast, slow = min(5, half // 2), half // 2
    content = torch.tensor([*range(half - slow, half), *range(width - slow, width)])  # (2 * slow,) in head_dim
    spread = math.sqrt(1 + COMMON**2)  # an embedding's size after layer 0's norm is `root`, of parts 1 and COMMON
    total = math.sqrt(spread**2 + WRITTEN**2)  # likewise after layer 1's norm, with the sketch
    sketch = WRITTEN * EMBEDDING_STD * root / math.sqrt(width) * spread
    match = math.sqrt(MATCH * math.sqrt(width) * total**2 / (2 * slow * WRITTEN * math.sqrt(hidden / width)))
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight  # (vocab, hidden)
        embedding.normal_(std=EMBEDDING_STD)
        common = torch.randn(hidden)
        common /= common.norm()
        embedding += COMMON * EMBEDDING_STD * root * common
        model.model.norm.weight.fill_(FINAL_NORM)
        query, key = _look_back(model.model.rotary_emb.inv_freq[:fast].cpu(), width)
        gain = math.sqrt(LOOK_BACK * math.sqrt(width)) / (root * COMMON / spread)
        for head in range(kv_heads):
            kv = slice(head * width, (head + 1) * width)
            first = slice(head * group * width, (head * group + 1) * width)
            low.k_proj.weight[kv] += gain * torch.outer(key, common)
            low.q_proj.weight[first] += gain * torch.outer(query, common)
            reads = torch.linalg.qr(torch.randn(hidden, width))[0].T  # (head_dim, hidden), orthonormal rows
            writes = torch.linalg.qr(torch.randn(hidden, width))[0].T
            low.v_proj.weight[kv] = reads * sketch
            low.o_proj.weight[:, first] = writes.T
            values = torch.randn(width, hidden) * VALUE_STD
            high.v_proj.weight[kv] = values
            high.k_proj.weight[head * width + content] = match * writes[: 2 * slow]
            for start in range(head * group * width, (head + 1) * group * width, width):
                high.q_proj.weight[start + content] = match * reads[: 2 * slow]
                high.o_proj.weight[:, start : start + width] = values.T


def _look_back(frequencies: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """A query and a key (head_dim,) whose RoPE score over `frequencies` peaks at the previous token.

    transformers rotates the pair (i, i + head_dim / 2) as one complex number; the query is rotated back by one step.
    """
    pairs, half = len(frequencies), width // 2
    query, key = torch.zeros(width), torch.zeros(width)
    query[:pairs], query[half : half + pairs] = torch.cos(frequencies), -torch.sin(frequencies)
    key[:pairs] = 1.0
    return query, key


_WATCHED = {
    "first_accuracy": FIRST_WEIGHT,
    "relation_accuracy": RELATION_WEIGHT,
    "gold_accuracy": GOLD_WEIGHT,
}


def build_model(config: MiniTrainConfig, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A new Llama with tied embeddings in fp32, initialised from the seed."""
    torch.manual_seed(config.seed)
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        num_hidden_layers=config.layers,
        **config.shape(),
        max_position_embeddings=config.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(shape)
    if config.start is None:
        start_induction(model)
    else:
        grow(model, LlamaForCausalLM.from_pretrained(config.start, dtype=torch.float32))
    return model


def grow(model: LlamaForCausalLM, source: LlamaForCausalLM) -> None:
    """Copy the weights of `source` into `model`, which may have more layers and must not differ otherwise.

    The new layers are spread among those of `source`. Their output projections are zero, so they add nothing to the
    residual stream until they are trained, and the grown model first computes exactly what `source` computes.
    """
    have, want = len(source.model.layers), len(model.model.layers)
    if have > want:
        raise ValueError(f"the model to start from has {have} layers, more than {want}")
    state = {name: value for name, value in source.state_dict().items() if ".layers." not in name}
    model.load_state_dict(state, strict=False)
    places = [round((index + 1) * want / have) - 1 for index in range(have)]  # the last layer stays the last
    for index, layer in enumerate(model.model.layers):
        if index in places:
            layer.load_state_dict(source.model.layers[places.index(index)].state_dict())
        else:
            with torch.no_grad():
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()


def weighted_loss(model: LlamaForCausalLM, batch: TrainingBatch, *, autocast: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The weighted mean cross-entropy over the target tokens of a packed batch, with `correct` and `weights`.

    `correct` (targets,) bool says where the argmax equals the target; `weights` (targets,) tell the kinds of token
    apart. Only hidden states that predict a weighted token go through the output matrix.
    """
    device = batch.tokens.device
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
        columns = (batch.segments, batch.asks, batch.block)
        mask = additive_mask(visible(*columns), torch.bfloat16 if autocast else torch.float32)
        hidden = model.model(
            input_ids=batch.tokens, position_ids=batch.positions, use_cache=False, attention_mask=mask
        ).last_hidden_state  # (rows, tokens, hidden)
        wanted = batch.weights[:, 1:] > 0
        logits = model.lm_head(hidden[:, :-1][wanted])  # (targets, vocab)
    targets, weights = batch.tokens[:, 1:][wanted], batch.weights[:, 1:][wanted]
    losses = F.cross_entropy(logits.float(), targets, reduction="none")
    return (losses * weights).sum() / weights.sum(), logits.argmax(-1) == targets, weights


def train_mini(
    config: MiniTrainConfig,
    tokenizer: PreTrainedTokenizerFast,
    output: Path,
    *,
    on_progress: Progress | None = None,
) -> LlamaForCausalLM:
    """Run every stage and return the trained model in fp32; `output/checkpoint.pt` is written on the way.

    Training continues from a checkpoint in `output`; one of another model shape is refused. `on_progress` is as in
    `Training.run`, with the figures stage, loss, accuracy, first_accuracy, relation_accuracy, gold_accuracy
    (teacher-forced, NaN while copying) and tokens.
    """
    output.mkdir(parents=True, exist_ok=True)
    model = build_model(config, tokenizer).to(config.device).train()
    optimizer = _optimizer(config, model)
    schedule = [(stage, step) for stage in config.stages for step in range(stage.steps)]

    def rate(number: int) -> float:
        return _learning_rate(config, *schedule[min(number, len(schedule) - 1)])

    training = Training(
        modules={"model": model},
        optimizer=optimizer,
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, rate),
        path=output / "checkpoint.pt",
        settings=_shape(config),
        steps=len(schedule),
        every=config.checkpoint_every,
        clip=config.clip,
    )
    training.resume(again="another --output")

    def advance(number: int) -> dict[str, Any]:
        stage, step = schedule[number]
        rows = _rows(config, stage, step, tokenizer)
        batch = collate(rows, pad=int(tokenizer.pad_token_id))
        batch = TrainingBatch(*(column.to(config.device) for column in batch))
        loss, correct, weights = weighted_loss(model, batch, autocast=config.autocast)
        loss.backward()  # type: ignore[no-untyped-call]
        return {
            "stage": stage.name,
            "loss": loss.item(),
            "accuracy": float(correct.float().mean()),
            **{name: float(correct[weights == weight].float().mean()) for name, weight in _WATCHED.items()},
            "tokens": int(batch.tokens.numel()),
        }

    training.run(advance, on_progress=on_progress)
    return model.eval()


def _learning_rate(config: MiniTrainConfig, stage: Stage, step: int) -> float:
    """Warm up at the start of every stage, then move linearly to the stage's final rate."""
    final = stage.lr if stage.final_lr is None else stage.final_lr
    rate = stage.lr + (final - stage.lr) * step / max(1, stage.steps - 1)
    return rate * min(1.0, (step + 1) / config.warmup)


def _rows(config: MiniTrainConfig, stage: Stage, step: int, tokenizer: PreTrainedTokenizerFast) -> list[TrainingSample]:
    """Draw the rows of one step. All rows have equally many passages, so that there is little padding."""
    key = f"{config.seed}:{stage.name}:{step}"
    count, batch = stage.draw(random.Random(key))
    return [_row(random.Random(f"{key}:{row}"), stage, count, tokenizer) for row in range(batch)]


def _row(rng: random.Random, stage: Stage, count: int, tokenizer: PreTrainedTokenizerFast) -> TrainingSample:
    """Draw one row of `count` passages, or of `count` records to copy."""
    if stage.kind == "copy":
        return copy_sample(rng, vocab=(len(SPECIAL_TOKENS), len(tokenizer)), records=count)
    if stage.kind == "mixed":
        return _mixed_row(rng, stage, count, tokenizer)
    return qa_sample(
        rng,
        tokenizer,
        passage_range=(count, count),
        questions=stage.questions,
        block=rng.random() < stage.block_share,
        misses=stage.misses,
        hard=stage.hard > 0 and rng.random() < stage.hard,
    )


def _mixed_row(rng: random.Random, stage: Stage, count: int, tokenizer: PreTrainedTokenizerFast) -> TrainingSample:
    block = rng.random() < stage.block_share
    drawn = rng.random()
    if drawn < stage.prose:
        return prose_sample(rng, tokenizer, passage_range=(count, count), block=block)
    if drawn < stage.prose + stage.shots:
        # a chunk of a few shots is shorter than a passage
        return shot_sample(rng, tokenizer, chunks=count * 3 // 2, questions=stage.questions, block=block)
    return mixed_sample(
        rng,
        tokenizer,
        passage_range=(count, count),
        questions=stage.questions,
        block=block,
        hard=rng.random() < stage.hard,
    )


def _optimizer(config: MiniTrainConfig, model: LlamaForCausalLM) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices and none on norms."""
    matrices = [value for value in model.parameters() if value.ndim >= 2]
    vectors = [value for value in model.parameters() if value.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0, "lr": 5.0},
    ]
    return torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.98), eps=1e-9)  # `_learning_rate` multiplies these rates


def _shape(config: MiniTrainConfig) -> dict[str, Any]:
    """The fields in which a checkpoint must agree with the configuration."""
    fields = asdict(config)
    return {name: fields[name] for name in ("hidden", "layers", "q_heads", "kv_heads", "intermediate", "seed")}
