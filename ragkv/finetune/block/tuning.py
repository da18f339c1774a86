"""Block fine-tuning of a user's own model (Block-Attention §2.4): ordinary supervised tuning under the block mask.

A model that was not trained for blocks loses much accuracy with the engine `block` (67.9 to 48.0 % in the paper), and
100 to 1000 steps restore it (Figure 4). Rows are drawn in the full or in the block layout, so that one model serves
both engines. `full_share = 0` is exactly the paper's §2.4; a half is like its later code, which trains every example in
both layouts.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ragkv.config import PromptConfig, one_of
from ragkv.errors import ConfigError, MissingExtraError, UsageError
from ragkv.finetune.block.output import RUNS, check_output, export_tuned, last_checkpoint
from ragkv.finetune.block.trainingexample import TrainingExample, file_digest, read_examples
from ragkv.finetune.trainingloop import Progress
from ragkv.model.checkpoint import resolve

if TYPE_CHECKING:
    import torch

    from ragkv.finetune.block.trainingrow import Parts
    from ragkv.model.language import LanguageModel

__all__ = ["BlockTuneConfig", "finetune_block"]

_SCOPE = ("output", "resume", "device", "checkpoint_every")
"""Settings that may change when a run is resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTuneConfig:
    """The settings of a training. They are written to the tuned model's `ragkv.json`.

    - `steps`, or else `epochs` over the data. A step has `batch` × `gradient_accumulation` rows.
    - `lora_rank` None tunes all weights.
    - `learning_rate` None means the paper's 2e-5 for all weights, and 2e-4 for LoRA. It rises over `warmup` steps (at
      most a tenth of all) and falls linearly to zero.
    - `dtype` is the dtype of the computation; "auto" is bfloat16 on a GPU that has it, else float32.
    - `sink` is the block before the first chunk; the engine uses the same one.
    - `reencode` False is the paper's ablation "w/o-pos".
    - `prompt` is the prompt around `{"prompt", "blocks"}` lines, usually an index's. Its `bos` applies to all lines;
      "auto" is what the model that is tuned declares.
    """

    model: str
    data: Path
    output: Path
    eval_data: Path | None = None
    epochs: float = 1.0
    steps: int | None = None
    learning_rate: float | None = None
    warmup: int = 20
    batch: int = 1
    gradient_accumulation: int = 16
    full_share: float = 0.5
    lora_rank: int | None = 16
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    gradient_checkpointing: bool = False
    sink: Literal["prefix", "bos", "none"] = "prefix"
    reencode: bool = True
    prompt: PromptConfig = field(default_factory=PromptConfig)
    seed: int = 0
    checkpoint_every: int = 100
    resume: bool = True
    device: str | None = None

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, ("auto", "float32", "bfloat16"))
        one_of("sink", self.sink, ("prefix", "bos", "none"))
        for name in ("steps", "lora_rank", "batch", "gradient_accumulation", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}.")
        if not 0 <= self.full_share <= 1:
            raise ConfigError(f"full_share must lie between 0 and 1, not {self.full_share}.")
        for name in ("epochs", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} must be above 0, not {value}.")
        if self.sink == "bos" and self.prompt.bos == "none":
            raise ConfigError('The sink "bos" needs a BOS, but the prompt has none; use the sink "prefix" or "none".')
        if self.warmup < 0:
            raise ConfigError(f"warmup must be at least 0, not {self.warmup}.")

    @property
    def rate(self) -> float:
        """The highest learning rate."""
        if self.learning_rate is not None:
            return self.learning_rate
        return 2e-5 if self.lora_rank is None else 2e-4


def finetune_block(
    config: BlockTuneConfig,
    *,
    on_progress: Progress | None = None,
    on_step: Callable[[int, LanguageModel], None] | None = None,
) -> dict[str, Any]:
    """Tune the model, write it to `config.output` as a Hugging Face folder with `ragkv.json`, and return a summary.

    `on_progress` receives step, steps, loss, learning_rate, grad_norm and seconds after every step, and eval_full_loss
    and eval_block_loss after an evaluation. `on_step(step, model)` is called before the first step (0) and after each
    step. It may answer questions with the model through any engine (the paper's Figure 4), but must not keep it.
    Checkpoints are written to `output/checkpoints`, and a LoRA adapter to `output/adapter` beside the merged model.

    Raises UsageError for bad data, before the model is loaded; MissingExtraError without peft or accelerate; and
    KeyboardInterrupt if it is interrupted, after writing a checkpoint.
    """
    _require("accelerate", *([] if config.lora_rank is None else ["peft"]))
    examples = read_examples(config.data, config.prompt)
    heldout = [] if config.eval_data is None else read_examples(config.eval_data, config.prompt)
    check_output(config.output.expanduser())
    config = replace(config, prompt=resolve(config.model).tuned_words(config.prompt))
    examples, heldout = (
        [replace(example, prompt=replace(example.prompt, bos=config.prompt.bos)) for example in part]
        for part in (examples, heldout)
    )

    from transformers import set_seed

    from ragkv.engines import make_engine, require_able
    from ragkv.finetune.block.rowattention import NAME
    from ragkv.finetune.block.trainingrow import tokenise
    from ragkv.model.language import LanguageModel, pick_device, quiet_loading

    device = pick_device(config.device)
    if device.index not in (None, 0):
        raise UsageError(f"Training runs on the first visible GPU, not on {device}; set CUDA_VISIBLE_DEVICES.")
    half = _half(config, device)
    dtype = "bfloat16" if half and config.lora_rank is not None else "float32"  # weights that are trained stay in fp32
    model = LanguageModel.load(config.model, dtype=dtype, device=str(device))
    require_able(make_engine("block", {}), model)
    settings = _settings(config, model, half=half)
    parts, heldout_parts = tokenise(model, examples), tokenise(model, heldout)
    recommended = _recommended(config, model)
    model.checkpoint = replace(model.checkpoint, recommended=recommended)
    set_seed(config.seed)
    model.module.set_attn_implementation(NAME)
    learner = _with_adapter(model.module, config)
    with quiet_loading():  # no bars while checkpoints are written
        trainer, finished = _train(
            config,
            model,
            learner,
            parts,
            heldout_parts,
            settings=settings,
            half=half,
            on_progress=on_progress,
            on_step=on_step,
        )
        if not finished:
            raise KeyboardInterrupt
        summary = _summary(config, trainer, examples)
        if trainer.is_world_process_zero():
            export_tuned(
                learner,
                config.output.expanduser(),
                model.checkpoint,
                model.revision,
                metadata={**recommended, "recipe": {**settings, **summary}},
            )
        trainer.accelerator.wait_for_everyone()
    return summary


def _require(*packages: str) -> None:
    for package in packages:
        if find_spec(package) is None:
            raise MissingExtraError(f'Fine-tuning needs {package}; install it with: pip install "ragkv[finetune]"')


def _half(config: BlockTuneConfig, device: torch.device) -> bool:
    """Whether to compute in bfloat16."""
    import torch

    able = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if config.dtype == "bfloat16" and device.type == "cuda" and not able:
        raise UsageError("This GPU has no bfloat16; use --dtype float32.")
    return able if config.dtype == "auto" else config.dtype == "bfloat16"


def _settings(config: BlockTuneConfig, model: LanguageModel, *, half: bool) -> dict[str, Any]:
    """The settings that must be equal to resume a run, as JSON stores them."""
    told = {name: value for name, value in asdict(config).items() if name not in _SCOPE}
    told |= {
        "prompt": config.prompt.facts(),
        "data_sha256": file_digest(config.data),
        "eval_data_sha256": None if config.eval_data is None else file_digest(config.eval_data),
        "dtype": "bfloat16" if half else "float32",
        "learning_rate": config.rate,
        "base": model.checkpoint.fingerprint("auto", model.revision, device=str(model.device)),
    }
    found: dict[str, Any] = json.loads(json.dumps(told, default=str))
    return found


def _recommended(config: BlockTuneConfig, model: LanguageModel) -> dict[str, Any]:
    """What the tuned checkpoint declares; `ragkv.model.checkpoint` reads it and the engine `block` follows it."""
    kept = {name: value for name, value in model.checkpoint.recommended.items() if name == "chunk_tokens"}
    return {
        "block_tuned": True,
        "sink": config.sink,
        "positions": "reencoded" if config.reencode else "kept",
        "bos": config.prompt.bos,
        **kept,
    }


def _with_adapter(module: Any, config: BlockTuneConfig) -> Any:
    """The module itself, or peft's model around it, in which only the adapter is trained."""
    if config.lora_rank is None:
        return module
    from peft import LoraConfig, get_peft_model

    adapter = LoraConfig(
        r=config.lora_rank, lora_alpha=2 * config.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    with warnings.catch_warnings():  # peft uses a deprecated name of transformers
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        return get_peft_model(module, adapter)


def _train(
    config: BlockTuneConfig,
    model: LanguageModel,
    learner: Any,
    parts: list[Parts],
    heldout: list[Parts],
    *,
    settings: Mapping[str, Any],
    half: bool,
    on_progress: Progress | None,
    on_step: Callable[[int, LanguageModel], None] | None,
) -> tuple[Any, bool]:
    """Run the Trainer. Returns it, and whether all steps were done."""
    from transformers import PrinterCallback, TrainingArguments

    from ragkv.finetune.block.trainer import Follower, RowTrainer, stop_on_interrupt
    from ragkv.finetune.block.trainingrow import Drawn, collate, lay_out

    runs = config.output.expanduser() / RUNS
    checkpoint = last_checkpoint(runs, settings, resume=config.resume)
    arguments = TrainingArguments(
        output_dir=str(runs),
        per_device_train_batch_size=config.batch,
        per_device_eval_batch_size=config.batch,
        gradient_accumulation_steps=config.gradient_accumulation,
        max_steps=1,  # set below, once the number of processes is known
        learning_rate=config.rate,
        lr_scheduler_type="linear",
        optim="adamw_torch",
        weight_decay=0.0,
        bf16=half,
        **_recomputing(TrainingArguments, config.gradient_checkpointing),
        logging_steps=1,
        save_strategy="steps",
        save_steps=config.checkpoint_every,
        save_total_limit=1,
        eval_strategy="steps" if heldout else "no",
        eval_steps=config.checkpoint_every,
        eval_on_start=bool(heldout) and checkpoint is None,
        prediction_loss_only=True,
        remove_unused_columns=False,
        dataloader_pin_memory=model.device.type == "cuda",
        report_to="none",
        disable_tqdm=True,
        seed=config.seed,
        use_cpu=model.device.type == "cpu",
    )
    arguments._n_gpu = min(
        1, arguments.n_gpu
    )  # several GPUs mean several processes (torchrun), never threads of this one
    rows = config.batch * config.gradient_accumulation * arguments.world_size
    steps = config.steps or math.ceil(len(parts) * config.epochs / rows)
    arguments.max_steps = steps
    arguments.warmup_steps = min(config.warmup, steps // 10)
    layout: dict[str, Any] = {"sink": config.sink, "reencode": config.reencode}
    evaluated = {name: [lay_out(one, block=name == "block", **layout) for one in heldout] for name in ("full", "block")}
    with stop_on_interrupt() as stop:
        trainer = RowTrainer(
            model=learner,
            args=arguments,
            data_collator=collate,
            train_dataset=Drawn(parts, steps * rows, seed=config.seed, full_share=config.full_share, **layout),
            eval_dataset=evaluated if heldout else None,
            callbacks=[Follower(model, stop, on_progress=on_progress, on_step=on_step)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return trainer, trainer.state.global_step >= steps


def _recomputing(arguments: Any, wanted: bool) -> dict[str, Any]:
    """The arguments for gradient checkpointing, whose name depends on the version of transformers."""
    known = {field.name for field in fields(arguments)}
    name = "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"
    return {name: True, f"{name}_kwargs": {"use_reentrant": False}} if wanted else {}


def _summary(config: BlockTuneConfig, trainer: Any, examples: list[TrainingExample]) -> dict[str, Any]:
    """The summary for `--json` and `ragkv.json`, with the first and last logged losses."""
    history = trainer.state.log_history
    losses = [entry["loss"] for entry in history if "loss" in entry]
    told: dict[str, Any] = {
        "output": str(config.output),
        "steps_done": trainer.state.global_step,
        "lessons": len(examples),
        "rows": trainer.state.global_step * config.batch * config.gradient_accumulation * trainer.args.world_size,
        "trained_parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "loss_first": losses[0],
        "loss_last": losses[-1],
    }
    for name in ("full", "block"):
        found = [entry[f"eval_{name}_loss"] for entry in history if f"eval_{name}_loss" in entry]
        if found:
            told |= {f"eval_{name}_loss_first": found[0], f"eval_{name}_loss_last": found[-1]}
    return told
