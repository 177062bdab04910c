"""Generation options, with the names and meanings of transformers' GenerationConfig; unknown names are errors."""

import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from flaxen.errors import InputError, did_you_mean

# Options that are runtime arguments of the compiled search, so that a new value does not cause recompilation.
NUMBERS = (
    "max_new_tokens",
    "min_new_tokens",
    "seed",
    "temperature",
    "top_p",
    "min_p",
    "nucleus",
    "repetition_penalty",
    "length_penalty",
)
INSTEAD = {
    "max_length": "use max_new_tokens (which does not count the start token)",
    "min_length": "use min_new_tokens (which does not count the start token)",
    "num_beam_groups": "group beam search is not supported",
    "penalty_alpha": "contrastive search is not supported",
    "generator": "use seed",
    "prng_key": "use seed",
}


@dataclass(frozen=True)
class Options:
    """Options of greedy search, beam search and sampling; they override the checkpoint's generation_config.json."""

    max_new_tokens: int = 64
    """Maximum number of generated tokens, including the end token."""
    min_new_tokens: int = 0
    """Minimum number of tokens to generate before an end token is allowed."""
    num_beams: int = 1
    """Number of beams for beam search; 1 means greedy search or sampling."""
    num_return_sequences: int = 1
    """Number of outputs per input: the best beams, or independent samples."""
    length_penalty: float | None = None
    """Length penalty for beam search: beam scores are divided by length to this power; values above 0 favour longer
    outputs. Default: 1."""
    early_stopping: bool | Literal["never"] | None = None
    """When beam search stops: once num_beams beams have finished (True), once a better one is unlikely (False), or once
    a better one is impossible ('never'). Default: False."""
    do_sample: bool = False
    """Sample each token instead of taking the most likely one."""
    seed: int = 0
    """Seed for sampling; the same seed and inputs give the same outputs, however they are batched."""
    temperature: float | None = None
    """Sampling temperature, above 0; the logits are divided by it. Default: 1."""
    top_k: int | None = None
    """Top-k sampling: sample from the k most likely tokens; 0 means all tokens. Default: 50."""
    top_p: float | None = None
    """Top-p (nucleus) sampling: sample from the smallest set of tokens whose probabilities sum to at least p, above 0
    and at most 1. Default: off."""
    min_p: float | None = None
    """Min-p sampling: sample from tokens whose probability is at least this fraction of the highest, above 0 and at
    most 1. Default: off."""
    nucleus: float | None = None
    """Top-p sampling as in the original Transformer-VQ, which subtracts 0.0001 from p, so that even p = 1 excludes the
    least likely tokens. Default: off."""
    repetition_penalty: float | None = None
    """Penalty for tokens that have already occurred; values above 1 make them less likely. Default: off."""
    no_repeat_ngram_size: int = 0
    """Never generate the same n-gram of this many tokens twice; 0 disables the check."""
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    """Token ids that must not be generated in this order. The command line takes one sequence, Python several."""
    forced_bos_token_id: int | None = None
    """Id of a token to force at the start of every output. Default: off."""
    forced_eos_token_id: int | None = None
    """Id of a token to force at the end of an output that reaches max_new_tokens. Default: off."""
    eos_token_id: tuple[int, ...] | None = None
    """Ids of the tokens that end an output; if there are none, generation stops only at max_new_tokens. Default: the
    checkpoint's end tokens."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "num_beams", "num_return_sequences"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        _require(self.min_new_tokens >= 0, f"min_new_tokens must be at least 0, got {self.min_new_tokens}")
        _require(
            self.min_new_tokens <= self.max_new_tokens,
            f"min_new_tokens must be at most max_new_tokens={self.max_new_tokens}, got {self.min_new_tokens}",
        )
        # The seed becomes an int32 array, JAX's default integer.
        _require(0 <= self.seed < 2**31, f"seed must be between 0 and 2^31 - 1, got {self.seed}")
        _require(
            self.no_repeat_ngram_size >= 0, f"no_repeat_ngram_size must be at least 0, got {self.no_repeat_ngram_size}"
        )
        _require(all(self.bad_words_ids), "bad_words_ids contains an empty sequence; remove it")
        for name, low, high in (
            ("temperature", 0.0, float("inf")),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("nucleus", 0.0, 1.0),
            ("repetition_penalty", 0.0, float("inf")),
        ):
            value, limit = getattr(self, name), f" and at most {high:g}" if high < float("inf") else ""
            _require(value is None or low < value <= high, f"{name} must be above {low:g}{limit}, got {value}")
        _require(self.top_k is None or self.top_k >= 0, f"top_k must be at least 0, got {self.top_k}")
        for name in ("temperature", "top_k", "top_p", "min_p", "nucleus"):
            unused = getattr(self, name) is not None and not self.do_sample
            _require(not unused, f"{name} has no effect without sampling; set do_sample=True or remove it")
        for name in ("length_penalty", "early_stopping"):
            unused = getattr(self, name) is not None and self.num_beams == 1
            _require(not unused, f"{name} has no effect without beam search; set num_beams above 1 or remove it")
        _require(
            not (self.do_sample and self.num_beams > 1),
            "do_sample cannot be combined with num_beams above 1",
        )
        n = self.num_return_sequences
        _require(
            self.do_sample or n <= self.num_beams,
            f"num_return_sequences={n} requires do_sample=True or at least {n} beams, got num_beams={self.num_beams}",
        )

    @property
    def beams(self) -> int:
        """Number of sequences decoded in parallel for each input."""
        return self.num_return_sequences if self.do_sample else self.num_beams

    def numbers(self) -> dict[str, float | int]:
        """Return the options that the compiled search takes as runtime arguments."""
        values = {name: value for name in NUMBERS if (value := getattr(self, name)) is not None}
        integers = ("max_new_tokens", "min_new_tokens", "seed")
        return {name: value if name in integers else float(value) for name, value in values.items()}

    def static(self) -> "Options":
        """Return the options that the search is compiled for: which ones are on, with numeric values blanked out."""
        neutral = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}
        # The blanked options must pass `__post_init__` too, which requires min_new_tokens <= max_new_tokens.
        blank: dict[str, Any] = {
            "max_new_tokens": 1,
            "min_new_tokens": int(self.min_new_tokens > 0),
            "seed": 0,
        }
        for name in ("temperature", "top_p", "min_p", "nucleus", "repetition_penalty", "length_penalty"):
            value = getattr(self, name)
            # An option at its neutral value is compiled like one that is off; any other value stands for "on".
            # 0.5 is in the valid range of each of them.
            blank[name] = None if value is None or value == neutral.get(name) else 0.5
        return dataclasses.replace(self, **blank)


def make_options(given: dict[str, Any], defaults: dict[str, Any] | None = None) -> Options:
    """Build Options from keyword arguments, which override a generation_config.json; lists become tuples."""
    hints = get_type_hints(Options)
    checked = {}
    for name, value in {**_defaults(defaults or {}, given), **given}.items():
        if name not in hints:
            hint = f"; {INSTEAD[name]}" if name in INSTEAD else did_you_mean(name, hints)
            origin = "" if name in given else " in the checkpoint's generation_config.json"
            raise InputError(f"generation option {name!r}{origin} is not supported{hint}")
        value = _tuples(value)
        if name == "eos_token_id" and isinstance(value, int):
            value = (value,)
        _require(_fits(value, hints[name]), f"{name} must be of type {_describe_type(hints[name])}, got {value!r}")
        checked[name] = value
    return Options(**checked)


# Fields of generation_config.json to ignore: ids that are in the model's Config, bookkeeping, and output switches.
NOT_OPTIONS = {
    "pad_token_id", "bos_token_id", "decoder_start_token_id", "eos_token_id", "transformers_version",
    "_from_model_config", "use_cache", "return_dict_in_generate", "output_attentions", "output_hidden_states",
    "output_scores", "output_logits",
}  # fmt: skip
BEAM_ONLY = {"num_beams", "length_penalty", "early_stopping"}
SAMPLING_ONLY = {"temperature", "top_k", "top_p", "min_p"}


def _defaults(file: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Convert generation_config.json to options, without those that do not apply to the search requested in `given`."""
    kept = {name: value for name, value in file.items() if value is not None and name not in NOT_OPTIONS}
    for theirs, ours in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
        if isinstance(length := kept.pop(theirs, None), int) and length > 0:
            kept.setdefault(ours, length - 1)  # transformers' lengths count the start token
    # `Options` rejects options that the chosen search does not use. That is right for options that the user gave;
    # those that come from a file are dropped.
    sampling = given.get("do_sample", kept.get("do_sample", False))
    drop = BEAM_ONLY if sampling else SAMPLING_ONLY
    if given.get("num_beams", kept.get("num_beams", 1)) == 1:
        drop = drop | BEAM_ONLY
    return {name: value for name, value in kept.items() if name not in drop}


def _tuples(value: Any) -> Any:
    """Convert nested lists to tuples, so that Options is hashable."""
    return tuple(_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value matches a type annotation."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, arg) for arg in args)
    if origin is Literal:
        return value in args
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, args[0]) for item in value)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    # Not isinstance, which accepts True as an int.
    return type(value) is hint or (hint is types.NoneType and value is None)


def _describe_type(hint: Any) -> str:
    """Format a type annotation for an error message."""
    return getattr(hint, "__name__", None) or str(hint).replace("typing.", "").replace("Literal", "")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InputError(message)
