"""Attacks by checkpoints: damaged copies of small ones, on each of which a server is started.

Such a server serves, or ends soon with exit code 2 and one sentence; it does not start its engine again and again, and
takes no memory worth mentioning.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import eagleray
from fuzzing.arena import Arena, register
from fuzzing.starts import start_and_judge
from fuzzing.values import HOSTILE, Raw, encode, nested

DEMO_MODEL = Path(eagleray.__file__).parent / "demo_model"
FAMILIES = ("llama", "qwen3_moe", "deepseek_v3", "gpt_oss")

Damage = Callable[[Path], None]


def config(**fields: Any) -> Damage:
    """Set fields of config.json."""

    def damage(directory: Path) -> None:
        path = directory / "config.json"
        path.write_bytes(encode(json.loads(path.read_text()) | fields))

    return damage


def content(name: str, make: Callable[[bytes], bytes]) -> Damage:
    """Replace the content of a file."""

    def damage(directory: Path) -> None:
        path = directory / name
        data = path.read_bytes()
        path.unlink()  # it may be a link to the original
        path.write_bytes(make(data))

    return damage


def header(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Change the header of model.safetensors."""

    def make(data: bytes) -> bytes:
        (size,) = struct.unpack("<Q", data[:8])
        fields = json.loads(data[8 : 8 + size])
        change(fields)
        text = encode(fields)
        return struct.pack("<Q", len(text)) + text + data[8 + size :]

    return content("model.safetensors", make)


def tree(name: str, change: Callable[[Any], object]) -> Damage:
    """Change the JSON value in a file."""

    def make(data: bytes) -> bytes:
        value = json.loads(data)
        change(value)
        return encode(value)

    return content(name, make)


def _first(fields: dict[str, Any]) -> dict[str, Any]:
    return next(fields[name] for name in fields if name != "__metadata__")


def _remove(name: str) -> Damage:
    return lambda directory: (directory / name).unlink()


def _directory(name: str) -> Damage:
    def damage(directory: Path) -> None:
        (directory / name).unlink()
        (directory / name).mkdir()

    return damage


def _loop(name: str) -> Damage:
    def damage(directory: Path) -> None:
        (directory / name).unlink()
        (directory / name).symlink_to(name)

    return damage


def _pipe(name: str) -> Damage:
    def damage(directory: Path) -> None:
        (directory / name).unlink()
        os.mkfifo(directory / name)

    return damage


def _index(value: Any) -> Damage:
    """Put an index file in the place of the weights."""

    def damage(directory: Path) -> None:
        (directory / "model.safetensors").unlink()
        (directory / "model.safetensors.index.json").write_bytes(encode(value))

    return damage


DEEP = 100_000
LOOPING = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}x"

DAMAGES: dict[str, Damage] = {
    "hidden-size-2e40": config(hidden_size=2**40),
    "vocab-size-2e40": config(vocab_size=2**40),
    "experts-1e9": config(num_experts=10**9),
    "layers-1e9": config(num_hidden_layers=10**9),
    "heads-1e9": config(num_attention_heads=10**9),
    "head-dim-2e62": config(head_dim=2**62),
    "experts-per-token-1e9": config(num_experts_per_tok=10**9),
    "intermediate-size-2e63": config(moe_intermediate_size=2**63),
    "positions-2e62": config(max_position_embeddings=2**62),
    "number-of-400-digits": config(hidden_size=Raw("1" + "0" * 400)),
    "number-of-5000-digits": config(num_hidden_layers=Raw("1" + "0" * 5000)),
    "sliding-window-2e63": config(use_sliding_window=True, sliding_window=2**63, max_window_layers=1),
    "rope-theta-0": config(rope_theta=0),
    "rope-theta-1e400": config(rope_theta=Raw("1e400")),
    "rope-factor-5e-324": config(rope_scaling={"rope_type": "linear", "factor": 5e-324}),
    "rope-yarn-nonsense": config(
        rope_scaling={"rope_type": "yarn", "factor": 1e308, "original_max_position_embeddings": 2**62}
    ),
    "eps-nan": config(rms_norm_eps=Raw("NaN")),
    "eos-of-400-digits": config(eos_token_id=Raw("1" + "0" * 400)),
    "eos-a-million": config(eos_token_id=list(range(1_000_000))),
    "architectures-nested": config(architectures=nested(500)),
    "dtype-unknown": config(torch_dtype="float3"),
    "model-type-a-list": config(model_type=["qwen3_moe"] * 1000, architectures="x"),
    "layer-types-1e6": config(layer_types=["full_attention"] * 1_000_000),
    "mlp-only-layers-1e6": config(mlp_only_layers=list(range(1_000_000))),
    "config-nested": content("config.json", lambda data: b'{"a":' * DEEP + b"1" + b"}" * DEEP),
    "config-nested-lists": content("config.json", lambda data: b"[" * DEEP + b"]" * DEEP),
    "config-field-nested": config(quantization_config=nested(DEEP, '{"a":', "}")),
    "quantization-bits-2e40": config(quantization_config={"quant_method": "gptq", "bits": 2**40, "group_size": 128}),
    "quantization-group-a-list": config(quantization_config={"quant_method": "awq", "group_size": [128] * 1000}),
    "quantization-schemes-1e5": config(
        quantization_config={
            "quant_method": "compressed-tensors",
            "config_groups": {str(number): {"weights": number} for number in range(100_000)},
        }
    ),
    "config-empty": content("config.json", lambda data: b""),
    "config-null": content("config.json", lambda data: b"null"),
    "config-half": content("config.json", lambda data: data[: len(data) // 2]),
    "config-latin-1": content("config.json", lambda data: b'{"model_type":"\xe9"}'),
    "config-100-mb": content("config.json", lambda data: data.rstrip()[:-1] + b" " * 100_000_000 + b"}"),
    "config-a-directory": _directory("config.json"),
    "config-a-loop": _loop("config.json"),
    "config-a-pipe": _pipe("config.json"),
    "generation-config-absurd": content(
        "generation_config.json", lambda data: b'{"temperature":1e400,"top_k":1' + b"0" * 400 + b',"eos_token_id":[-5]}'
    ),
    "generation-config-nested": content("generation_config.json", lambda data: b"[" * DEEP + b"]" * DEEP),
    "generation-config-penalty": content("generation_config.json", lambda data: b'{"repetition_penalty":5e-324}'),
    "tokenizer-half": content("tokenizer.json", lambda data: data[: len(data) // 2]),
    "tokenizer-nested": content("tokenizer.json", lambda data: b'{"a":' * DEEP + b"1" + b"}" * DEEP),
    "tokenizer-swapped-types": tree("tokenizer.json", lambda t: t.update(model=[t["model"]], added_tokens={})),
    "tokenizer-ids-2e63": tree("tokenizer.json", lambda t: t["model"]["vocab"].update({"x": 2**63})),
    "tokenizer-ids-beyond": tree("tokenizer.json", lambda t: t["model"]["vocab"].update({"zzz": 2**31})),
    "tokenizer-empty-vocab": tree("tokenizer.json", lambda t: t["model"].update(vocab={}, merges=[])),
    "tokenizer-regex": tree(
        "tokenizer.json",
        lambda t: t.update(
            pre_tokenizer={
                "type": "Split",
                "pattern": {"Regex": "(" * 5000 + "a*" + ")*" * 5000},
                "behavior": "Isolated",
                "invert": False,
            }
        ),
    ),
    "tokenizer-config-nested": content("tokenizer_config.json", lambda data: b"[" * DEEP + b"]" * DEEP),
    "template-broken": tree("tokenizer_config.json", lambda t: t.update(chat_template="{% for x in %}{{")),
    "template-nested": tree("tokenizer_config.json", lambda t: t.update(chat_template="{{" + "(" * 5000 + "1")),
    "template-looping": tree("tokenizer_config.json", lambda t: t.update(chat_template=LOOPING)),
    "template-endless-text": tree("tokenizer_config.json", lambda t: t.update(chat_template="{{ 'x' * 10**10 }}")),
    "template-power": tree("tokenizer_config.json", lambda t: t.update(chat_template="{{ 9**9**9 }}")),
    "weights-missing": _remove("model.safetensors"),
    "weights-half": content("model.safetensors", lambda data: data[: len(data) // 2]),
    "weights-empty": content("model.safetensors", lambda data: b""),
    "weights-header-2e63": content("model.safetensors", lambda data: struct.pack("<Q", 2**63) + data[8:]),
    "weights-header-nested": content(
        "model.safetensors", lambda data: struct.pack("<Q", 2 * DEEP) + b"[" * DEEP + b"]" * DEEP + data
    ),
    "weights-shape-2e40": header(lambda fields: _first(fields).update(shape=[2**40, 2**40])),
    "weights-offsets-beyond": header(lambda fields: _first(fields).update(data_offsets=[0, 2**50])),
    "weights-offsets-negative": header(lambda fields: _first(fields).update(data_offsets=[-5, 5])),
    "weights-dtype-unknown": header(lambda fields: _first(fields).update(dtype="F3")),
    "weights-a-pipe": _pipe("model.safetensors"),
    "index-outside": _index({"weight_map": {"model.norm.weight": "../../../../etc/passwd"}}),
    "index-of-lists": _index({"weight_map": [["a"]] * 1000}),
    "index-nested": _index(nested(DEEP)),
}
"""Named damages of the demo model."""


def _named(name: str, damage: Damage) -> None:
    async def run(arena: Arena) -> None:
        with _copy(DEMO_MODEL) as directory:
            damage(directory)
            await start_and_judge(arena, name, str(directory))

    register(f"checkpoint-{name}", "checkpoints", "a copy of the demo model, damaged as the name says", run)


for _name, _damage in DAMAGES.items():
    _named(_name, _damage)


@contextlib.contextmanager
def _copy(source: Path) -> Iterator[Path]:
    """Make a directory with a copy of a checkpoint, whose weights are linked rather than copied."""
    with tempfile.TemporaryDirectory(prefix="fuzz-checkpoint-") as root:
        directory = Path(root) / "model"
        directory.mkdir()
        for path in source.iterdir():
            if path.suffix == ".safetensors":
                (directory / path.name).symlink_to(path)
            else:
                shutil.copy(path, directory)
        yield directory


async def random_checkpoints(arena: Arena) -> None:
    """Checkpoints of several families with random damage, one after another."""
    deadline = time.monotonic() + arena.seconds
    with tempfile.TemporaryDirectory(prefix="fuzz-families-") as root:
        made: dict[str, Path] = {}
        number = arena.case or 0
        while True:
            rng = arena.rng(f"checkpoints/{number}")
            family = rng.choice(FAMILIES)
            if family not in made:
                made[family] = _made(Path(root) / family, family)
            with _copy(made[family]) as directory:
                what = f"case {number}: {family} with {_damage_at_random(directory, rng)}"
                await start_and_judge(arena, what, str(directory))
            number += 1
            if arena.case is not None or time.monotonic() > deadline:
                return


register(
    "random-checkpoints",
    "checkpoints",
    "checkpoints of several families, damaged at random",
    random_checkpoints,
    is_random=True,
)


def _made(directory: Path, family: str) -> Path:
    sys.path.append(str(Path(__file__).parents[2] / "tests"))
    from checkpoints import make_checkpoint

    directory.mkdir()
    return make_checkpoint(directory, family)


def _damage_at_random(directory: Path, rng: random.Random) -> str:
    """Damage one file and describe the damage."""
    files = sorted(path.name for path in directory.iterdir())
    name = rng.choice([each for each in files if each.endswith((".json", ".safetensors"))] + ["config.json"] * 6)
    path = directory / name
    data = path.read_bytes()
    path.unlink()
    if name.endswith(".json") and rng.random() < 0.85:
        value = json.loads(data)
        said = []
        for _ in range(rng.randrange(1, 3)):
            kind = rng.choice(sorted(HOSTILE))
            said.append(f"{_replace(value, rng, HOSTILE[kind](rng))}: {kind}")
        path.write_bytes(encode(value))
        return f"{name}, {', '.join(said)}"
    start, length = rng.randrange(min(len(data), 4000)), rng.randrange(1, 40)
    how = rng.choice(("cut", "noise", "hole"))
    match how:
        case "cut":
            data = data[: rng.randrange(len(data))]
        case "noise":
            data = data[:start] + rng.randbytes(length) + data[start + length :]
        case _:
            data = data[:start] + data[start + length :]
    path.write_bytes(data)
    return f"{name}, {how} at {start}, {length} bytes"


def _replace(value: Any, rng: random.Random, new: Any) -> str:
    """Replace a random part of a JSON object and return its path."""
    parts: list[str] = []
    while True:
        keys: list[Any] = sorted(value) if isinstance(value, dict) else list(range(len(value)))
        key = rng.choice(keys)
        parts.append(str(key))
        inner = value[key]
        if not isinstance(inner, (dict, list)) or not inner or rng.random() < 0.4:
            value[key] = new
            return ".".join(parts)
        value = inner
