"""Fixtures: fast compilation, and small random models of every family, in torch and on disk, to compare with."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Every worker of pytest-xdist has its own cache of compiled programs and its own core.
os.environ.setdefault("PYTEST_XDIST_WORKER", "alone")
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(Path(__file__).parents[1] / ".pytest_cache" / "xla" / os.environ["PYTEST_XDIST_WORKER"]),
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRANSFORMERS_VERBOSITY="error")

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    import transformers

torch.set_num_threads(2 if os.environ["PYTEST_XDIST_WORKER"] == "alone" else 1)
transformers.utils.logging.disable_progress_bar()

# Files that take longest, in the order in which they start.
LONGEST = (
    "cli/test_language.py", "models/test_longt5.py", "models/test_vq_lm.py", "train/test_resume.py",
    "cli/test_caption.py", "cli/test_seq2seq.py", "cli/test_train.py", "generate/test_search.py",
    "models/test_vq_golden.py", "tasks/test_seq2seq.py", "train/test_vq_training.py", "models/test_t5.py",
)  # fmt: skip
_hasty = False
# Memory mappings above which compiled programs are dropped. Linux allows a process 65,530, and every program has some.
MAX_MAPPINGS = 20_000


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first, so that all workers finish at about the same time, and in each file the tests marked
    `optimised` last, because all compiled programs are dropped whenever the compiler options change."""
    files = {name: number for number, name in enumerate(LONGEST)}
    for item in items:
        files.setdefault(name_of(item), len(files))
    items.sort(key=lambda item: (files[name_of(item)], optimised(item)))


def name_of(item: pytest.Item) -> str:
    return "/".join(item.path.parts[-2:])


def optimised(item: pytest.Item) -> bool:
    return item.get_closest_marker("optimised") is not None


@pytest.fixture(autouse=True)
def limit_mappings() -> Iterator[None]:
    """Drop compiled programs before the process runs out of memory mappings and crashes."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAX_MAPPINGS:
        import jax

        jax.clear_caches()


@pytest.fixture(autouse=True)
def compile_fast(
    request: pytest.FixtureRequest, fast_compile: Callable[[bool], AbstractContextManager[None]]
) -> Iterator[None]:
    """Compile with few optimisations, in a quarter of the time, because tests run a program only a few times.

    Tests marked `optimised` compile as users do. So do subprocesses, whose results therefore differ from this process's
    in the last bits, and fixtures with module scope unless they use `fast_compile`. FLAXEN_OPTIMISED=1 optimises
    all tests.
    """
    with fast_compile(not optimised(request.node)):
        yield


@pytest.fixture(scope="session")
def fast_compile() -> Callable[[bool], AbstractContextManager[None]]:
    """A context manager `fast_compile(True)` that compiles with few optimisations; with False, as users do."""
    import jax
    from jax._src import compiler

    @contextmanager
    def compiling(hasty: bool) -> Iterator[None]:
        global _hasty
        hasty = hasty and not os.environ.get("FLAXEN_OPTIMISED")
        if hasty != _hasty:
            jax.clear_caches()  # programs that earlier tests compiled with the other options
        _hasty = hasty
        with pytest.MonkeyPatch.context() as patch:
            if hasty:
                # JAX has no setting for this: compiler options apply to one jit, or to the whole process and so to
                # the tests marked `optimised` too.
                patch.setattr(compiler, "get_compile_options", hasty_options(compiler.get_compile_options))
            jax.config.update("jax_disable_most_optimizations", hasty)
            try:
                yield
            finally:
                jax.config.update("jax_disable_most_optimizations", False)

    return compiling


def hasty_options(options: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap JAX's function for compiler options to switch off XLA's fusion emitters, two thirds of the compile time."""

    def without_emitters(*arguments: Any, env_options_overrides: dict[str, Any] | None = None, **named: Any) -> Any:
        overrides = {**(env_options_overrides or {}), "xla_cpu_use_fusion_emitters": False}
        return options(*arguments, env_options_overrides=overrides, **named)

    return without_emitters


SMALL = {
    "vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "dropout_rate": 0.0,
    "decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
FAMILIES = {
    "t5-1.0": (transformers.T5Config, {}),
    "t5-1.1": (transformers.T5Config, GATED),
    "mt5": (transformers.MT5Config, {**GATED, "vocab_size": 301}),
    "umt5": (transformers.UMT5Config, {**GATED, "vocab_size": 301}),
    "byt5": (transformers.T5Config, {**GATED, "vocab_size": 384, "num_layers": 4, "num_decoder_layers": 1}),
}


@dataclass(frozen=True)
class Reference:
    """A torch model and the directory that transformers saved it to."""

    model: transformers.PreTrainedModel
    directory: Path

    @property
    def vocab(self) -> int:
        return self.model.config.vocab_size


def make_reference(family: str, directory: Path, seed: int = 0) -> Reference:
    """Save a random torch model with larger weights, so that outputs vary, and an untied head if the family has one."""
    config_class, changes = FAMILIES[family]
    config = config_class(**{**SMALL, **changes})
    torch.manual_seed(seed)
    kind = getattr(transformers, config_class.__name__.replace("Config", "ForConditionalGeneration"))
    model = kind(config).eval()
    if family != "t5-1.0":
        # transformers 5 ties the head of a new model; real checkpoints of these families have an untied head.
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight))
    randomise_weights(model).save_pretrained(directory)
    return Reference(model, directory)


def randomise_weights(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Randomise the norms of a model and enlarge its other weights, so that its outputs vary."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.1 * torch.randn_like(parameter))
            elif "lm_head" in name or "shared" in name:
                parameter.mul_(0.5)
            elif "relative" not in name:
                parameter.mul_(1.5)
    return model


def torch_generate(
    reference: Reference, ids: list[list[int]], **options: object
) -> tuple[list[list[int]], list[float]]:
    """Generate with torch from a padded batch: tokens without start and padding, and sequence scores."""
    width = max(map(len, ids))
    batch = torch.tensor([row + [0] * (width - len(row)) for row in ids])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids])
    out = reference.model.generate(
        input_ids=batch,
        attention_mask=mask,
        return_dict_in_generate=True,
        output_scores=True,
        **{"do_sample": False, **options},
    )
    eos = options.get("eos_token_id", 1)
    ends = set(eos if isinstance(eos, list) else [eos])
    rows = []
    for row in out.sequences[:, 1:].tolist():
        n = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        rows.append(row[:n])
    return rows, out.sequences_scores.tolist() if "sequences_scores" in out and out.sequences_scores is not None else []


@pytest.fixture(scope="session", params=list(FAMILIES))
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def t5_reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference("t5-1.0", tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="session")
def byt5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a ByT5 checkpoint with a tokenizer."""
    directory = tmp_path_factory.mktemp("byt5")
    make_reference("byt5", directory)
    transformers.ByT5Tokenizer().save_pretrained(directory)
    return directory


def random_batch(
    vocab: int, seed: int = 0, rows: int = 5, source: int = 23, target: int = 11
) -> tuple[np.ndarray, ...]:
    """Random input ids, a `valid` mask with rows of different lengths, and labels of which some are ignored (-100)."""
    draw = np.random.default_rng(seed)
    ids = draw.integers(2, vocab, (rows, source)).astype(np.int32)
    valid = np.arange(source) < draw.integers(1, source + 1, rows)[:, None]
    labels = draw.integers(2, vocab, (rows, target)).astype(np.int32)
    labels = np.where(np.arange(target) < draw.integers(1, target + 1, rows)[:, None], labels, -100)
    return np.where(valid, ids, 0), valid, labels
