"""Tiny random models of every supported family, and indexes built on them. CPU, no network."""

import copy
import functools
import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ["OMP_NUM_THREADS"] = "1"  # also for processes that tests start: a second thread spins

import pytest
import torch
from clichild import begin_forkserver, one_thread
from hypothesis import HealthCheck, settings
from nightly import NIGHTLY

OTHERS_VARIABLES = (
    *("COLUMNS", "LINES", "TERMINAL_WIDTH", "NO_COLOR", "FORCE_COLOR", "PY_COLORS", "TTY_COMPATIBLE"),
    *("TTY_INTERACTIVE", "GITHUB_ACTIONS"),  # make rich and typer assume a terminal with colours
    *("PYTHONWARNINGS", "PYTHONDEVMODE", "PYTHONVERBOSE", "PYTHONIOENCODING", "PYTHONOPTIMIZE", "PYTHONSAFEPATH"),
    *("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY", "HF_ENDPOINT", "TORCH_LOGS", "GIT_DIR", "GIT_WORK_TREE"),
    *("GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY"),  # set when a git hook runs the tests
    "PYTHONDONTWRITEBYTECODE",  # each process that a test starts would compile all of ragkv
    *(name for name in os.environ if name.startswith("RAGKV_") and name != "RAGKV_NIGHTLY"),
)
"""Variables that the developer may have set, and that would change a command's output or behaviour."""
for name in OTHERS_VARIABLES:
    os.environ.pop(name, None)
sys.dont_write_bytecode = False
os.environ["RAGKV_DEFAULT_MODEL"] = "mini"  # even if smollm2 is installed
os.environ["RAGKV_DEFAULT_EMBEDDER"] = "none"  # even if minilm is installed

# Use a memory file system if it has enough space: on a disk, tests that write indexes wait for it.
SHARED_MEMORY, PLENTY = Path("/dev/shm"), 8 << 30
if "TMPDIR" not in os.environ and os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free > PLENTY:
    os.environ["TMPDIR"] = tempfile.tempdir = str(SHARED_MEMORY)
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(tempfile.gettempdir()) / "ragkv-kernels"))  # not the user's folder

# A process inherits ignored and blocked signals from its parent. In the background (`nohup make test &`) that is
# Ctrl-C, and tests that interrupt a command would wait forever.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGCHLD, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
os.umask(0o022)

# Examples have no deadline, and all runs except nightly ones use the same examples, so a failure is due to the change
# under test.
settings.register_profile(
    "ragkv",
    max_examples=100 if NIGHTLY else 40,
    deadline=None,
    derandomize=not NIGHTLY,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ragkv")

gc.set_threshold(200_000, 20, 100)  # almost nothing that is allocated during collection is garbage
one_thread()  # for tiny tensors, a second thread only waits, which slows other processes down

VOCABULARY = 320
LAYERS = 4  # for every layer type: SmolLM3 drops RoPE in every fourth layer, Gemma 3 is global in every sixth
FAR = 9  # a chunk this far back still changes the answer if each layer has a window of 8
FEW = 3  # layers of "llama", which most tests use


def _shape(**more: Any) -> dict[str, Any]:
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    return shape | more


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


LLAMA3 = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=64)
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}

LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}

# family -> (transformers class prefix, config changes)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_hidden_layers": FEW}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1}),
    "llama-mha-tied": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama3-scaling": ("Llama", LLAMA3),
    "llama-yarn": ("Llama", YARN),
    "llama-linear": ("Llama", _rope("linear", factor=4.0)),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-sliding": ("Mistral", {"sliding_window": 8, "num_hidden_layers": FAR}),
    "mistral-nemo": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied-sliding": (
        "Qwen2",
        {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-yarn": ("Qwen3", {"head_dim": 32, **YARN}),
    "gemma2": ("Gemma2", {"sliding_window": 8, "query_pre_attn_scalar": 24}),
    "gemma3": ("Gemma3Text", {"num_hidden_layers": 7, "sliding_window": 8, "query_pre_attn_scalar": 24}),
    "phi3": ("Phi3", {}),
    "phi3-sliding": ("Phi3", {"sliding_window": 8, "num_hidden_layers": FAR}),
    "phi4-partial": ("Phi3", _rope("default", partial_rotary_factor=0.75)),
    "olmo2": ("Olmo2", {}),
    "granite": ("Granite", {"attention_multiplier": 0.2, "residual_multiplier": 0.7}),
    "glm4": ("Glm4", _rope("default", partial_rotary_factor=0.5)),
    "smollm3": ("SmolLM3", {}),
    "cohere2": ("Cohere2", {"sliding_window": 8}),
    "deepseek3": ("DeepseekV3", {**LATENT, **YARN, "first_k_dense_replace": LAYERS}),
}


# used by name, not in the matrix
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    # windows only in the mask: the attention call has none
    "qwen2-moe-sliding": (
        "Qwen2Moe",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2} | EXPERTS,
    ),
    "phimoe-sliding": ("Phimoe", {"sliding_window": 8, "num_hidden_layers": FAR, **EXPERTS}),
    # an additional score beside those of the keys, in every row and layer, with and without windows
    "gpt-oss": (
        "GptOss",
        {
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            **_rope("default"),
        },
    ),
    # soft caps without windows: only then are rows of a batch laid out side by side
    "gemma2-unwindowed": (
        "Gemma2",
        {
            "sliding_window": 8,
            "layer_types": ["full_attention"] * LAYERS,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,  # the scores are small: Gemma's own cap of 50 would have little effect
        },
    ),
    # in half types, rounding routes single tokens to other experts
    "deepseek3-experts": ("DeepseekV3", {**LATENT, **YARN, "first_k_dense_replace": 1}),
    # the last four layers share the keys and values of the two before them
    "gemma3n": (
        "Gemma3nText",
        {
            "num_hidden_layers": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 4,
            "num_kv_shared_layers": 4,
            "sliding_window": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 16,
            "laurel_rank": 8,
        },
    ),
    "llama-deep": ("Llama", {"num_hidden_layers": FAR}),
    "llama-long": ("Llama", {"num_hidden_layers": 2, "max_position_embeddings": 8192}),
    "gemma2-short": ("Gemma2", {"num_hidden_layers": 2, "sliding_window": 8, "query_pre_attn_scalar": 24}),
}


@functools.cache
def random_model(family: str, dtype: str = "float32") -> Any:
    """A transformers model of `family` with seeded random weights, large enough for logits to differ."""
    import transformers

    prefix, changes = (FAMILIES | OTHERS)[family]
    torch.manual_seed(7)
    config_class = getattr(transformers, f"{prefix}Config")
    model_class = getattr(transformers, f"{prefix.removesuffix('Text')}ForCausalLM")
    config = config_class(**_shape(**changes))
    model = model_class(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                sharp = family == "llama" and "self_attn.q_proj" in name  # so that the few layers have enough effect
                weight.normal_(0, 0.6 if sharp else 0.15)
            elif name.endswith("bias"):
                weight.normal_(0, 0.1)
    if dtype == "rounded":  # the bf16 model's weights, computed in fp32
        return model.to(torch.bfloat16).to(torch.float32)
    return model.to(getattr(torch, dtype))


@functools.cache
def byte_tokenizer() -> Any:
    """A byte-level tokenizer with three control tokens and a chat template; needs no files or training."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    control = ["<bos>", "<eos>", "<pad>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*control, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")
    fast.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] }}<eos>\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]\n{% endif %}"
    )
    return fast


@functools.cache
def language_model(family: str, dtype: str = "float32", device: str = "cpu") -> Any:
    """`LanguageModel` over `random_model`, after the load-time self-check."""
    from ragkv.model.checkpoint import Checkpoint
    from ragkv.model.language_model import LanguageModel
    from ragkv.model.self_check import check_model

    checkpoint = Checkpoint(name=family, location=family, local=True)
    made = random_model(family, dtype)
    model = LanguageModel(made if device == "cpu" else copy.deepcopy(made).to(device), byte_tokenizer(), checkpoint)
    check_model(model)
    return model


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Start the fork server after collection: modules are imported, and pytest has restored warnings and logs."""
    result = yield
    if session.items:  # not in xdist's controller
        begin_forkserver()
    return result


def pytest_collection_finish() -> None:
    """Objects from before this point stay, so exclude them from garbage collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the exhaustive tests, which `make test-all` runs, instead of skipping them: there are a thousand."""
    exhaustive = [item for item in items if not NIGHTLY and item.get_closest_marker("nightly")]
    if exhaustive:
        config.hook.pytest_deselected(items=exhaustive)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


UNLIKE = ("cohere2", "deepseek3", "gemma2", "gemma3", "llama", "mistral-sliding", "qwen3-yarn", "smollm3")
"""Families that together have every mechanism: windows, soft caps, RoPE of all kinds, no RoPE, latent attention."""


@pytest.fixture(params=[pytest.param(f, marks=[pytest.mark.nightly] * (f not in UNLIKE)) for f in sorted(FAMILIES)])
def unlike_family(request: pytest.FixtureRequest) -> str:
    """For tests that need only these families; `make test-all` runs the others."""
    name: str = request.param
    return name


@pytest.fixture(scope="session", autouse=True)
def nobodys_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Neither use nor create the developer's key, settings or cache, but for compiled kernels."""
    from ragkv.util.files import user_folder

    kernels, cache = (
        base / "ragkv" for base in (user_folder("XDG_CACHE_HOME", ".cache"), tmp_path_factory.mktemp("x"))
    )
    cache.mkdir()
    (kernels / "numba").mkdir(parents=True, exist_ok=True)
    (cache / "numba").symlink_to(kernels / "numba")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("settings")))
        patch.setenv("XDG_CACHE_HOME", str(cache.parent))
        yield


@pytest.fixture(scope="session", autouse=True)
def models_are_loaded_once() -> Iterator[None]:
    from loaded import share_models

    with pytest.MonkeyPatch.context() as patch:
        share_models(patch)
        yield


@pytest.fixture(autouse=True)
def runtime_warnings() -> Iterator[list[str]]:
    """What the runtime has warned of since the test began; who provokes a warning clears it.

    Nothing else shows that a pass failed: it is repeated for each request, with the same answers.
    """
    found: list[str] = []
    handler, runtime = logging.Handler(logging.WARNING), logging.getLogger("ragkv.runtime")
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    runtime.addHandler(handler)
    yield found
    runtime.removeHandler(handler)
    assert found == []


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Any]:
    return language_model


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint folder of a family in Hugging Face layout."""

    @functools.cache
    def made(family: str) -> Path:
        folder = tmp_path_factory.mktemp("models") / f"random-{family}"
        random_model(family).save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        return folder

    return made


@pytest.fixture(scope="session")
def model_folder(make_folder: Callable[[str], Path]) -> Path:
    """A random Llama's checkpoint folder."""
    return make_folder("llama")


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    """A copy of that folder for tests that change it."""
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


@pytest.fixture
def steps_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[tuple[Any, Any]]]:
    """For a model, a list to which every later step appends its rows and their token ids."""

    def watched(model: Any) -> list[tuple[Any, Any]]:
        steps, step = [], model.step

        def noted(sequences: Any, ids: Any, **more: Any) -> Any:
            steps.append((list(sequences), [list(each) for each in ids]))
            return step(sequences, ids, **more)

        monkeypatch.setattr(model, "step", noted)
        return steps

    return watched


@pytest.fixture
def without_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the attention path without numba."""
    monkeypatch.setattr("ragkv.attention.in_place._kernels", lambda: None)
    monkeypatch.setattr("ragkv.attention.batch.flash_takes", lambda *_: False)


@pytest.fixture(params=["kernels", "no kernels"])
def kernels(request: pytest.FixtureRequest) -> None:
    """With ragkv's CPU kernels for attention, and without."""
    if request.param == "no kernels":
        request.getfixturevalue("without_kernel")


@pytest.fixture(scope="module")
def pretend_device() -> Iterator[str]:
    """`pretend:0`, a simulated device (`support/pretend.py`); count transfers with `pretend.counting`."""
    import pretend

    with pretend.device() as name:
        yield name
