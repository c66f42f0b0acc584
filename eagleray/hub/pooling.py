"""Whether a checkpoint is a pooling model, and what it pools: an embedding model, or a classifier.

Read from the options and from config.json, modules.json and the configuration of its pooling module, as
sentence-transformers writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
from tokenizers import Tokenizer

from eagleray.config.json_files import read_bounded, read_json_object, shown
from eagleray.config.pooling_spec import BARE, CLASSIFYING, GENERATING, Activation, PoolingMethod, PoolingSpec
from eagleray.config.sections import ModelConfig
from eagleray.errors import CheckpointError, ConfigError
from eagleray.hub.locate import checkpoint_dir, tokenizer_dir
from eagleray.hub.model_json import read_config
from eagleray.hub.needs import TOKENIZER_FILE

MAX_LABELS = 2**16

MODES = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "lasttoken": "last",
    "last": "last",
    "mean": "mean",
    "cls": "cls",
}
"""Methods by the names in configurations of pooling modules."""

ACTIVATIONS = {
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Softmax": "softmax",
    "torch.nn.modules.linear.Identity": "none",
}
"""Activations by the names that sentence-transformers writes into config.json."""


def find_pooling(model: ModelConfig) -> PoolingSpec | None:
    """Return what the checkpoint pools; None if it generates.

    Raises `CheckpointError` for files that are wrong or ask for something else, `ConfigError` for options that the
    checkpoint cannot follow.
    """
    directory = checkpoint_dir(model)
    fields = read_config(model)
    architecture = _architecture(fields)
    modules = _read_modules(directory)
    if not _is_pooling(model, architecture, has_modules=modules is not None):
        return None
    kind = _kind(model, architecture)
    method, normalizes = (None, True) if modules is None else _read_pooling(directory, modules)
    options = _read_options(model.pooler_config)
    if (task := options.get("task", kind)) != kind:
        raise ConfigError(f"option `pooler_config`: its task is {shown(task)}, but the model's is {kind}")
    activation: Activation = "normalize" if normalizes else "none"
    labels: tuple[str, ...] = ()
    label_tokens: tuple[int, ...] = ()
    if kind == "classify":
        label_tokens, labels = _label_tokens(model, fields), _labels(directory, fields)
        if label_tokens:
            labels = _labels_of_tokens(fields, len(label_tokens))
        activation = _classifier_activation(fields, len(labels))
    if options.get("use_activation") is not None:
        default: Activation = "normalize" if kind == "embed" else activation
        activation = default if options["use_activation"] else "none"
    dimensions = fields.get("matryoshka_dimensions") or ()
    if not isinstance(dimensions, list | tuple) or not all(type(size) is int and size > 0 for size in dimensions):
        raise CheckpointError(
            f"{directory / 'config.json'}: `matryoshka_dimensions` must be a list of sizes, but it is "
            f"{shown(dimensions)}"
        )
    return PoolingSpec(
        kind=kind,
        method=options.get("method") or method or "last",
        activation=activation,
        labels=labels,
        label_tokens=label_tokens,
        is_matryoshka=bool(fields.get("is_matryoshka") or dimensions),
        matryoshka_dimensions=tuple(dimensions),
    )


def _architecture(fields: Mapping[str, Any]) -> str:
    """Return the first architecture that config.json names, or an empty text. What may be there is checked when the
    model is loaded."""
    names = fields.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def _is_pooling(model: ModelConfig, architecture: str, *, has_modules: bool) -> bool:
    has_token_head = not architecture.endswith((CLASSIFYING, BARE))
    if model.runner == "pooling":
        return True
    if model.runner == "auto":
        return has_modules or not has_token_head or model.convert in ("embed", "classify")
    if not has_token_head:
        raise ConfigError(
            f"option `runner`: {architecture} has no head that predicts tokens, so it cannot generate; take pooling or "
            "auto"
        )
    if model.convert in ("embed", "classify"):
        raise ConfigError(f"option `convert`: {model.convert} is for the runner pooling; drop one of the two options")
    return False


def _kind(model: ModelConfig, architecture: str) -> Literal["embed", "classify"]:
    has_label_head = architecture.endswith(CLASSIFYING)
    if model.convert == "classify" and not has_label_head:
        raise ConfigError(
            f"option `convert`: classify needs a checkpoint with a `score` head, an architecture that ends with "
            f"{CLASSIFYING}, but this is {architecture or 'none'}; take embed"
        )
    if model.convert == "none" and architecture.endswith(GENERATING):
        raise ConfigError(f"option `convert`: without a conversion {architecture} only generates; take embed or auto")
    return "classify" if has_label_head and model.convert != "embed" else "embed"


def _read_modules(directory: Path) -> list[dict[str, Any]] | None:
    """Return the entries of modules.json; None without the file."""
    path = directory / "modules.json"
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(read_bounded(path), type=list[dict[str, Any]])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: must hold a JSON list of modules: {error}") from None


def _read_pooling(directory: Path, modules: list[dict[str, Any]]) -> tuple[PoolingMethod | None, bool]:
    """Return the method of the pooling module, None without one, and whether embeddings are normalized."""
    path = directory / "modules.json"
    method: PoolingMethod | None = None
    normalizes = False
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            method = _read_method(_module_file(directory, str(module.get("path", ""))))
        elif kind == "Normalize":
            normalizes = True
        elif kind != "Transformer":
            raise CheckpointError(
                f"{path}: the module {shown(module.get('type'))} is not supported; supported are Transformer, Pooling "
                "and Normalize"
            )
    return method, normalizes


def _module_file(directory: Path, folder: str) -> Path:
    """Return the configuration of the module in this folder of the checkpoint."""
    if Path(folder).is_absolute() or ".." in Path(folder).parts:
        raise CheckpointError(f"{directory / 'modules.json'}: the folder {shown(folder)} is outside of the checkpoint")
    return directory / folder / "config.json"


def _read_method(path: Path) -> PoolingMethod:
    fields = read_json_object(path)
    wanted = [name for name, value in fields.items() if name.startswith("pooling_mode_") and value is True]
    if isinstance(mode := fields.get("pooling_mode"), str):
        wanted = [mode]
    methods = {MODES.get(name) for name in wanted}
    if len(methods) != 1 or None in methods:
        raise CheckpointError(
            f"{path}: it must name one of the modes lasttoken, mean_tokens and cls_token, but it names "
            f"{shown(wanted) if wanted else 'none'}"
        )
    if fields.get("include_prompt") is False:
        raise CheckpointError(f"{path}: `include_prompt` false is not supported; pool the whole prompt")
    return _method(str(methods.pop()))


def _method(name: str) -> PoolingMethod:
    return next(method for method in get_args(PoolingMethod) if method == name)


def _read_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the option `pooler_config`, with `method` for the pooling type."""
    options: dict[str, Any] = {}
    for name, value in given.items():
        if name in ("pooling_type", "seq_pooling_type") and isinstance(value, str) and value.lower() in MODES:
            options["method"] = _method(MODES[value.lower()])
        elif (name == "use_activation" and isinstance(value, bool)) or name == "task":
            options[name] = value
        elif value is not None:
            raise ConfigError(
                f"option `pooler_config`: {name} {shown(value)} is not supported; it may have `pooling_type` (LAST, "
                "MEAN or CLS), `use_activation` (true or false) and `task`"
            )
    return options


def _labels(directory: Path, fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the classes. As in transformers, `id2label` says how many there are, then `num_labels`, and
    two are the default."""
    names = fields.get("id2label")
    if names is None:
        count = fields.get("num_labels", 2)
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_LABELS:
            raise CheckpointError(
                f"{directory / 'config.json'}: `num_labels` must be a number from 1 to {MAX_LABELS}, but it is "
                f"{shown(count)}"
            )
        return tuple(f"LABEL_{index}" for index in range(count))
    if not isinstance(names, dict) or not 1 <= len(names) <= MAX_LABELS:
        raise CheckpointError(f"{directory / 'config.json'}: `id2label` must name the labels, but it is {shown(names)}")
    try:
        return tuple(str(names[str(index)]) for index in range(len(names)))
    except KeyError as error:
        raise CheckpointError(
            f"{directory / 'config.json'}: `id2label` must number the labels from 0 on, but {error} is missing"
        ) from None


def _label_tokens(model: ModelConfig, fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids of the tokens that a reranker without a head of its own is made of, by vLLM's field
    `classifier_from_token`; empty without it."""
    given = fields.get("classifier_from_token")
    if given is None:
        return ()
    path = tokenizer_dir(model) / TOKENIZER_FILE
    if not isinstance(given, list) or not given or not all(isinstance(token, str) for token in given):
        raise ConfigError(f"`classifier_from_token` must be a list of tokens, but it is {shown(given)}")
    if not path.is_file():
        raise ConfigError(f"`classifier_from_token` needs the tokenizer, but there is no {path}")
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises exceptions of this kind alone
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    ids = []
    for token in given:
        if (token_id := backend.token_to_id(token)) is None:
            raise ConfigError(f"`classifier_from_token`: {token!r} is not a token of {path}")
        ids.append(token_id)
    return tuple(ids)


def _labels_of_tokens(fields: Mapping[str, Any], num_tokens: int) -> tuple[str, ...]:
    """Return the labels of a head that is made of tokens: one of two tokens, or one for each."""
    method = fields.get("method") or ("from_2_way_softmax" if fields.get("is_original_qwen3_reranker") else None)
    if method == "from_2_way_softmax" and num_tokens == 2:
        return ("LABEL_0",)
    if method == "no_post_processing":
        return tuple(f"LABEL_{index}" for index in range(num_tokens))
    raise ConfigError(
        f"`method` is {shown(method)} with {num_tokens} tokens in `classifier_from_token`; supported are "
        "from_2_way_softmax, with two tokens, and no_post_processing"
    )


def _classifier_activation(fields: Mapping[str, Any], num_labels: int) -> Activation:
    """Return the activation that the training implies: by the problem's type, by what sentence-transformers wrote, or
    by the number of labels, since a softmax of one number is always 1."""
    by_number: Activation = "softmax" if num_labels > 1 else "sigmoid"
    by_type: dict[str, Activation] = {
        "regression": "none",
        "multi_label_classification": "sigmoid",
        "single_label_classification": by_number,
    }
    if (problem := fields.get("problem_type")) in by_type:
        return by_type[str(problem)]
    extra = fields.get("sentence_transformers")
    name = extra.get("activation_fn") if isinstance(extra, dict) else None
    name = name or fields.get("sbert_ce_default_activation_function")
    return "none" if ACTIVATIONS.get(str(name)) == "none" else by_number
