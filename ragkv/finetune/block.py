"""Block fine-tuning of a user's own model (Block-Attention §2.4): ordinary supervised tuning under the block mask.

A model that was not trained for blocks loses much accuracy with the engine `block` (67.9 to 48.0 % in the paper), and
100 to 1000 steps restore it (Figure 4). Rows are drawn in the full or in the block layout, so that one model serves
both engines. `full_share = 0` is exactly the paper's §2.4; a half is like its later code, which trains every example in
both layouts.

transformers accepts a 4-D mask only without a sliding window, and with eager attention it misreads a bool mask (it
expects additive floats). So the mask is not an argument of the model. It reaches the attention function as a call
argument, as at inference, and is combined here with the layer's window and soft cap.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoTokenizer,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ragkv.engines import make_engine, require_supported
from ragkv.errors import MissingExtraError, ModelLoadError, UnsupportedModelError, UsageError, install_hint
from ragkv.finetune.config import BlockTuneConfig
from ragkv.finetune.data import (
    IGNORED,
    PAD_SEGMENT,
    ExampleTokens,
    Progress,
    SampledRows,
    TrainingExample,
    collate,
    file_digest,
    lay_out,
    read_examples,
    tokenise,
)
from ragkv.model.attention_hook import Visible, require_neutral, window_of
from ragkv.model.attention_hook import visible as visible_window
from ragkv.model.checkpoint import ADAPTER, Checkpoint, pick_device, resolve
from ragkv.model.language_model import LanguageModel
from ragkv.model.loading import describe_error, open_checkpoint, quiet_loading
from ragkv.model.self_check import load_model
from ragkv.util.files import is_folder, make_folder, parse_json, read_plain, remove_tree, replace_plain

logger = logging.getLogger(__name__)

METADATA = "ragkv.json"
"""The file in a tuned model's folder that records how it was made."""
RUNS = "checkpoints"
_SETTINGS = "run.json"
_CHECKPOINT = re.compile(r"checkpoint-[0-9]{1,18}")


@contextmanager
def replace_folder(destination: Path) -> Iterator[Path]:
    """A temporary folder whose files afterwards replace those of `destination` one by one, each atomically."""
    destination.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".export-") as name:
        folder = Path(name)
        yield folder
        for old in set(destination.iterdir()) - {destination / file.name for file in folder.iterdir()}:
            if old.is_file():
                old.unlink()
        for file in sorted(folder.iterdir()):
            file.chmod(0o644)  # safetensors creates files that only the owner can read
            file.replace(destination / file.name)


def check_output(output: Path) -> None:
    """Refuse a folder with other files than those of an earlier run, because the tuned model would replace them."""
    if output.exists() and not output.is_dir():
        raise UsageError(f"{output} is a file; name a folder for --output.")
    if output.is_dir() and any(output.iterdir()) and not (output / RUNS / _SETTINGS).exists():
        raise UsageError(f"{output} holds other files, which the tuned model would replace; name an empty folder.")


def last_checkpoint(runs: Path, settings: Mapping[str, Any], *, resume: bool) -> Path | None:
    """The checkpoint to resume from, or None. Raises UsageError if the folder has a run of other settings."""
    note = runs / _SETTINGS
    if not resume and runs.exists():
        remove_tree(runs)
    if os.path.lexists(note):
        try:
            before = parse_json(read_plain(note))
            if not isinstance(before, dict):
                raise ValueError("it is no JSON object")
        except (OSError, ValueError) as error:
            raise UsageError(f"{note} is damaged ({error}); start again with --no-resume.") from error
        changed = sorted(name for name in before.keys() | settings if before.get(name) != settings.get(name))
        if changed:
            raise UsageError(
                f"{runs.parent} holds a run of other settings ({', '.join(changed)}); give those of then, "
                "another --output, or --no-resume to begin again."
            )
    # this file is written last, so a folder that has it is complete
    found = {path.parent for path in runs.glob("checkpoint-*/trainer_state.json")}
    whole = [path for path in found if _CHECKPOINT.fullmatch(path.name) and is_folder(path)]
    make_folder(runs)
    replace_plain(note, (json.dumps(settings, indent=1) + "\n").encode())
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def export_tuned(
    learner: Any, output: Path, checkpoint: Checkpoint, revision: str | None, *, metadata: Mapping[str, Any]
) -> None:
    """Write peft's adapter, then the merged weights in the dtype of `checkpoint`, its tokenizer, and `ragkv.json`."""
    options = {"local_files_only": checkpoint.local, "revision": revision, "trust_remote_code": False}
    try:
        if checkpoint.file is None:
            stored = AutoConfig.from_pretrained(checkpoint.location, **options)
            tokenizer, dtype = AutoTokenizer.from_pretrained(checkpoint.location, **options), stored.dtype
        else:
            opened, tokenizer = open_checkpoint(checkpoint, dtype="bfloat16", devices=(torch.device("cpu"),))
            stored, dtype = opened.config, opened.dtype
    except (OSError, ValueError) as error:
        raise ModelLoadError(
            f"Model {checkpoint.name!r} disappeared while it was tuned ({error}); restore it and run the command again."
        ) from error
    module = learner
    if hasattr(learner, "merge_and_unload"):
        with replace_folder(output / "adapter") as folder:
            learner.save_pretrained(folder, save_embedding_layers=False)
        module = learner.merge_and_unload()
    module.config.use_cache = getattr(stored, "use_cache", True)  # the Trainer turned it off
    with replace_folder(output) as folder:
        module.to(dtype or torch.float32).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / METADATA).write_text(json.dumps(metadata, indent=1) + "\n", encoding="utf-8")


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
    if config.adapter is not None and not (config.adapter / ADAPTER).is_file():
        raise UsageError(
            f"{config.adapter} holds no {ADAPTER}; name the folder of a LoRA adapter, such as OUTPUT/adapter."
        )
    config = replace(config, prompt=resolve(config.model).tuned_words(config.prompt))
    examples, heldout = (
        [replace(example, prompt=replace(example.prompt, bos=config.prompt.bos)) for example in part]
        for part in (examples, heldout)
    )

    device = pick_device(config.device)
    if device.index not in (None, 0):
        raise UsageError(f"Training runs on the first visible GPU, not on {device}; set CUDA_VISIBLE_DEVICES.")
    half = _half(config, device)
    dtype = "bfloat16" if half and config.lora_rank is not None else "float32"  # weights that are trained stay in fp32
    model = load_model(config.model, dtype=dtype, device=str(device), train=True)
    require_supported(make_engine("block", {}), model)
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
            raise MissingExtraError(f"Fine-tuning needs {package}; {install_hint('finetune')}.")


def _half(config: BlockTuneConfig, device: torch.device) -> bool:
    """Whether to compute in bfloat16."""
    able = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if config.dtype == "bfloat16" and device.type == "cuda" and not able:
        raise UsageError("This GPU has no bfloat16; use --dtype float32.")
    return able if config.dtype == "auto" else config.dtype == "bfloat16"


def _settings(config: BlockTuneConfig, model: LanguageModel, *, half: bool) -> dict[str, Any]:
    """The settings that must be equal to resume a run, as JSON stores them."""
    own = ("output", "resume", "device", "checkpoint_every")  # may differ when a run is resumed
    settings = {name: value for name, value in asdict(config).items() if name not in own} | {
        "prompt": config.prompt.facts(),
        "data_sha256": file_digest(config.data),
        "eval_data_sha256": None if config.eval_data is None else file_digest(config.eval_data),
        "adapter_sha256": None if config.adapter is None else file_digest(config.adapter / ADAPTER),
        "dtype": "bfloat16" if half else "float32",
        "learning_rate": config.rate,
        "base": model.checkpoint.fingerprint("auto", model.revision, device=str(model.device)),
    }
    found: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return found


def _recommended(config: BlockTuneConfig, model: LanguageModel) -> dict[str, Any]:
    """The settings that the tuned checkpoint declares: `ragkv.model.checkpoint` reads them, `block` obeys."""
    copied = {name: value for name, value in model.checkpoint.recommended.items() if name in ("chunk_tokens", "top_k")}
    return {
        "block_tuned": True,
        "sink": config.sink,
        "over": config.over,
        "positions": "reencoded" if config.reencode else "kept",
        "bos": config.prompt.bos,
        **copied,
    }


def _with_adapter(module: Any, config: BlockTuneConfig) -> Any:
    """The module itself, or peft's model around it, in which only the adapter is trained."""
    if config.lora_rank is None:
        return module
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    adapter = LoraConfig(
        r=config.lora_rank, lora_alpha=2 * config.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    with warnings.catch_warnings():
        # peft uses a deprecated name of transformers, and names experts also where a model's layers have none
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        warnings.filterwarnings("ignore", "target_parameters=.* no parameter was matched", RuntimeWarning)
        warnings.filterwarnings("ignore", "The following \\w+_pattern keys did not match", RuntimeWarning)
        learner = get_peft_model(module, adapter)
    if config.adapter is not None:
        with describe_error("Adapter", str(config.adapter)):
            settings = parse_json(read_plain(config.adapter / "adapter_config.json"))
            if (settings["r"], settings["lora_alpha"]) != (adapter.r, adapter.lora_alpha):
                raise ModelLoadError(
                    f"{config.adapter} has the rank {settings['r']} and the alpha {settings['lora_alpha']}; "
                    f"{adapter.r} and {adapter.lora_alpha} would be trained: give its rank."
                )
            own = {name for name, parameter in learner.named_parameters() if parameter.requires_grad}
            weights = load_file(config.adapter / ADAPTER)
            if {name.replace(".weight", ".default.weight") for name in weights} != own:
                raise ModelLoadError(f"{config.adapter} is an adapter of another model, or of some of its layers.")
            set_peft_model_state_dict(learner, weights)
    return learner


def _train(
    config: BlockTuneConfig,
    model: LanguageModel,
    learner: Any,
    parts: list[ExampleTokens],
    heldout: list[ExampleTokens],
    *,
    settings: Mapping[str, Any],
    half: bool,
    on_progress: Progress | None,
    on_step: Callable[[int, LanguageModel], None] | None,
) -> tuple[Any, bool]:
    """Run the Trainer. Returns it, and whether all steps were done."""
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
    # several GPUs mean several processes (torchrun), never threads of this one
    arguments._n_gpu = min(1, arguments.n_gpu)
    rows = config.batch * config.gradient_accumulation * arguments.world_size
    steps = config.steps or math.ceil(len(parts) * config.epochs / rows)
    arguments.max_steps = steps
    arguments.warmup_steps = min(config.warmup, steps // 10)
    layout: dict[str, Any] = {"sink": config.sink, "reencode": config.reencode, "over": config.over}
    evaluated = {name: [lay_out(one, block=name == "block", **layout) for one in heldout] for name in ("full", "block")}
    with stop_on_interrupt() as stop:
        trainer = RowTrainer(
            model=learner,
            args=arguments,
            data_collator=collate,
            train_dataset=SampledRows(
                parts, steps * rows, seed=config.seed, full_share=config.full_share, batch=config.batch, **layout
            ),
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
    summary: dict[str, Any] = {
        "output": str(config.output),
        "steps_done": trainer.state.global_step,
        "lessons": sum(1 + len(example.others) for example in examples),
        "rows": trainer.state.global_step * config.batch * config.gradient_accumulation * trainer.args.world_size,
        "trained_parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "loss_first": losses[0],
        "loss_last": losses[-1],
    }
    for name in ("full", "block"):
        found = [entry[f"eval_{name}_loss"] for entry in history if f"eval_{name}_loss" in entry]
        if found:
            summary |= {f"eval_{name}_loss_first": found[0], f"eval_{name}_loss_last": found[-1]}
    return summary


NAME = "ragkv_rows"


def visible(segments: Tensor, asks: Tensor, block: Tensor, copies: Tensor | None = None) -> Tensor:
    """The bool mask (rows, 1, tokens, tokens), True where the query (dim 2) may see the key (dim 3).

    A row may pack several questions, each of which is answered as if asked alone: prefix | chunk 1 … chunk n | question
    1 … question m. A question sees the prefix, every chunk and itself, never another question. A chunk sees the prefix
    and the chunks before it ("full"), or only itself ("block", Block-Attention §2, where the prefix is a block too).
    Tokens that are `copies` are seen by their own segment alone.

    `segments` (rows, tokens) int with PAD_SEGMENT for padding, `asks`, `copies` (rows, tokens) bool, `block` (rows,)
    bool.
    Padding sees padding, so that no row of the softmax is empty.
    """
    tokens = segments.shape[1]
    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=segments.device).tril()
    same = segments[:, :, None] == segments[:, None, :]  # (rows, tokens, tokens)
    shared = ~asks & (segments != PAD_SEGMENT)  # keys of the context
    if copies is not None:
        shared = shared & ~copies
    reads = asks | ~block[:, None]  # queries that see the context before them
    reads = reads & (segments != PAD_SEGMENT)
    return (causal & (same | (shared[:, None, :] & reads[:, :, None])))[:, None]


class RowMask:
    """The visible keys in a batch of rows (`columns` of `ragkv.finetune.data.collate`), with a layer's sliding window.

    Masks are made once per batch and window, not once per layer.
    """

    OWN = ("segments", "asks", "copies", "block", "causal")
    """The columns that only the mask uses."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self._columns: dict[str, Tensor] = {name: columns[name] for name in self.OWN if name != "causal"}
        self._positions: Tensor = columns["position_ids"]
        self._causal: bool = columns["causal"]
        self._made: dict[int | None, Tensor | None] = {}

    def of(self, window: int | None) -> Tensor | None:
        """The bool mask (rows, 1, tokens, tokens), True where visible, for a window; None if it is plainly causal."""
        if window is not None and window >= self._positions.shape[1]:
            window = None  # no two tokens are this far apart
        if window not in self._made:
            self._made[window] = self._make(window)
        return self._made[window]

    def _make(self, window: int | None) -> Tensor | None:
        if window is None:
            return None if self._causal else visible(**self._columns)
        behind = self._positions[:, None, :, None] - self._positions[:, None, None, :]  # (rows, 1, queries, keys)
        near: Tensor = behind < window
        return visible(**self._columns) & near


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Visible | None,
    *,
    scaling: float,
    ragkv_rows: RowMask | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The registered function, from `(rows, heads, tokens, head_dim)` to `(rows, tokens, heads, head_dim)`."""
    if ragkv_rows is None:
        raise UnsupportedModelError(
            "This model does not pass call arguments on to its attention function, so it cannot be tuned for blocks."
        )
    require_neutral(others)
    mask = ragkv_rows.of(window_of(attention_mask, sliding_window))
    if softcap is None:
        out, _ = sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=mask is None
        )
        return out, None
    if mask is None:
        tokens = query.shape[2]
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = softcap * torch.tanh(query @ key.transpose(-1, -2) * scaling / softcap)  # (rows, q_heads, queries, keys)
    weights = scores.float().masked_fill(~mask, torch.finfo(torch.float32).min).softmax(-1).to(value.dtype)
    return (nn.functional.dropout(weights, dropout) @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, visible_window)


def learnt(columns: Mapping[str, Any]) -> dict[str, Tensor]:
    """`logits_to_keep` and `labels` for the tokens that are followed by an answer's in any row, and the last one.

    Between two answers of a row stands a question, whose logits over the whole vocabulary would be for nothing.
    """
    following = nn.functional.pad(columns["labels"], (-1, 1), value=IGNORED)  # (rows, kept): each token's next label
    needed = (following != IGNORED).any(0)
    needed[-1] = True  # the model's loss shifts labels by one
    places = needed.nonzero()[:, 0] + columns["input_ids"].shape[1] - len(needed)
    return {"logits_to_keep": places, "labels": nn.functional.pad(following[:, needed], (1, -1), value=IGNORED)}


class RowTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose model attends with a `RowMask`, and which takes rows in the order in which they are drawn."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], *arguments: Any, **more: Any) -> Any:
        """The model's own loss over the answers' tokens, for the columns of `ragkv.finetune.data.collate`."""
        columns = {name: column for name, column in inputs.items() if name not in RowMask.OWN}
        columns |= {"ragkv_rows": RowMask(inputs), "use_cache": False, **learnt(columns)}
        return super().compute_loss(model, columns, *arguments, **more)

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)


@contextmanager
def stop_on_interrupt() -> Iterator[threading.Event]:
    """Let the first Ctrl-C set an event, to stop after the current step with a checkpoint; a second one interrupts.

    Outside the main thread, the only one that receives signals, nothing changes.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.getsignal(signal.SIGINT)

    def ask(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        logger.warning("stopping after this step and writing a checkpoint; interrupt again to stop at once.")

    signal.signal(signal.SIGINT, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


_REPORTED = ("loss", "learning_rate", "grad_norm", "eval_full_loss", "eval_block_loss")


class Follower(TrainerCallback):  # type: ignore[misc]
    """Reports every step, passes the model to `on_step`, and ends the training when a stop was requested."""

    def __init__(
        self,
        model: LanguageModel,
        stop: threading.Event,
        *,
        on_progress: Progress | None,
        on_step: Callable[[int, LanguageModel], None] | None,
    ) -> None:
        self._model, self._stop = model, stop
        self._on_progress, self._on_step = on_progress, on_step
        self._began = time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            self._lend(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        self._lend(state.global_step)
        if self._stop.is_set():
            control.should_save = control.should_training_stop = True
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Report steps and evaluations as they are logged. An evaluation names its layout and has no learning rate."""
        if self._on_progress is None or not state.is_world_process_zero:
            return
        figures = {name: value for name, value in (logs or {}).items() if name in _REPORTED}
        if figures:
            seconds = time.monotonic() - self._began
            self._on_progress({"step": state.global_step, "steps": state.max_steps, **figures, "seconds": seconds})

    def _lend(self, step: int) -> None:
        if self._on_step is None:
            return
        module = self._model.module
        training = module.training
        module.set_attn_implementation("ragkv")
        module.eval()
        try:
            self._on_step(step, self._model)
        finally:
            module.train(training)
            module.set_attn_implementation(NAME)
