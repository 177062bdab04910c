"""Read config.json field by field: map known fields, ignore irrelevant ones, reject values that we do not support."""

from collections.abc import Collection
from typing import Any

from flaxen.errors import InputError, did_you_mean

# Fields of any model that do not affect its computation, whatever their value. transformers 4 wrote all of them,
# including generation defaults, which are in generation_config.json today.
SILENT = {
    "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "name_or_path",
    "tokenizer_class", "task_specific_params", "use_cache", "id2label", "label2id", "num_labels", "problem_type",
    "output_attentions", "output_hidden_states", "return_dict", "bos_token_id", "sep_token_id", "cls_token_id",
    "unk_token_id", "finetuning_task", "gradient_checkpointing", "eos_token_id", "tie_word_embeddings",
    "generation_config", "is_encoder_decoder", "prefix", "_attn_implementation_autoset", "attn_implementation",
    "_attn_implementation", "return_dict_in_generate", "output_scores", "tf_legacy_loss", "_commit_hash",
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
    "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "forced_bos_token_id",
    "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
    "begin_suppress_tokens",
}  # fmt: skip
# Fields that would change the computation: only these values are supported.
FIXED: dict[str, tuple[Any, ...]] = {
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "chunk_size_feed_forward": (0,),
    "torchscript": (False,),
    "use_bfloat16": (False,),
    "quantization_config": (None,),
}


def read(
    json: dict[str, Any],
    names: dict[str, str],
    config: type,
    silent: Collection[str] = (),
    fixed: dict[str, tuple[Any, ...]] | None = None,
    what: str = "config.json",
) -> dict[str, Any]:
    """Convert config.json to fields of `config` (`names` maps their names to ours); report all problems at once."""
    rules, problems = FIXED | (fixed or {}), []
    for name, value in json.items():
        if name in rules:
            if value not in rules[name]:
                problems.append(f"{name}={value!r} is not supported; only {rules[name][0]!r} is")
        elif name not in names and name not in SILENT and name not in silent and value is not None:
            problems.append(f"unknown field {name}={value!r}{did_you_mean(name, [*names, *rules])}")
    fields = {ours: json[theirs] for theirs, ours in names.items() if json.get(theirs) is not None}
    for name, value in fields.items():
        kind = type(getattr(config, name))
        # bool is a subclass of int, and an int is a valid float.
        if isinstance(value, bool) != (kind is bool) or not isinstance(value, (int, float) if kind is float else kind):
            problems.append(f"{name} must be of type {kind.__name__}, got {value!r}")
    if problems:
        raise InputError(f"{what} has unsupported fields:\n  " + "\n  ".join(problems))
    return fields


def make_config(config: type, fields: dict[str, Any], what: str = "config.json") -> Any:
    """Construct a configuration; an invalid value raises an InputError that names the file."""
    try:
        return config(**fields)
    except (ValueError, TypeError) as error:
        raise InputError(f"{what}: {error}") from None


def ids(value: Any) -> tuple[int, ...]:
    """Convert eos_token_id of config.json, which may be an id, a list or null, to a tuple."""
    return tuple(value) if isinstance(value, list) else () if value is None else (value,)


def one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    """Convert a tuple of ids to the form of config.json: an id, a list or null; the inverse of `ids`."""
    return ids[0] if len(ids) == 1 else list(ids) or None
