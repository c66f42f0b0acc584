"""The layer of a checkpoint that predicts further tokens changes no token, and proposes what transformers' would."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from agreement import VOCAB_SIZE, answers, assert_equal
from checkpoints import make_checkpoint
from drafters import RecordingDrafter, record_drafters
from harness import LocalEngine, random_prompt
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer

from eagleray.errors import ConfigError, WeightsMismatch
from eagleray.models import registry
from eagleray.models.base import Model
from eagleray.worker.layer_update import LayerUpdates

BIASED = (7, 8)
"""Tokens that requests generate most often, so that some proposals are right."""
BIAS = 15.0
CONFIG = {"method": "deepseek_mtp", "num_speculative_tokens": 3}
NUM_LAYERS = 2
NAME = f"model.layers.{NUM_LAYERS}."


@pytest.fixture
def drafters(monkeypatch: pytest.MonkeyPatch) -> list[RecordingDrafter]:
    return record_drafters(monkeypatch)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of two layers, and a third one that predicts further tokens: that of another model."""
    directory = make_checkpoint(
        tmp_path_factory.mktemp("model"), "deepseek_v3", num_hidden_layers=NUM_LAYERS, num_nextn_predict_layers=1
    )
    other = make_checkpoint(tmp_path_factory.mktemp("other"), "deepseek_v3", num_hidden_layers=NUM_LAYERS + 1, seed=1)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    layer = {name: tensor for name, tensor in load_file(other / path.name).items() if name.startswith(NAME)}
    size = tensors["model.norm.weight"].shape[0]
    generator = torch.Generator().manual_seed(2)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        layer[f"{NAME}{name}.weight"] = 1 + 0.2 * torch.randn(size, generator=generator)
    layer[f"{NAME}eh_proj.weight"] = 0.2 * torch.randn((size, 2 * size), generator=generator)
    layer[f"{NAME}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    layer[f"{NAME}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file({**tensors, **layer}, path, metadata={"format": "pt"})
    return directory


def load(directory: Path, **options: Any) -> Model:
    return registry.load_model(
        directory,
        dtype="auto",
        load_format="auto",
        device=torch.device("cpu"),
        seed=None,
        on_progress=None,
        **options,
    )


class Oracle:
    """What transformers' layers predict."""

    def __init__(self, directory: Path) -> None:
        self._model = transformers.DeepseekV3ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self._tensors = load_file(directory / "model.safetensors")
        config = transformers.DeepseekV3Config(**json.loads((directory / "config.json").read_text()))
        config.num_hidden_layers = NUM_LAYERS + 1
        config._attn_implementation = "eager"
        self._eps = config.rms_norm_eps
        self._layer = DeepseekV3DecoderLayer(config, NUM_LAYERS).eval()
        self._layer.load_state_dict(
            {name: self._of_layer(name, tensor) for name, tensor in self._layer.state_dict().items()}
        )

    @torch.inference_mode()
    def propose(self, token_ids: list[int], count: int) -> list[int]:
        """Return the tokens that are predicted behind these, with the bias of the requests."""
        states = self._model.model(torch.tensor([token_ids])).last_hidden_state[0, : len(token_ids) - 1]
        following, proposed = list(token_ids[1:]), []
        while True:
            out = self._predict(states, torch.tensor(following))
            normed = self._norm(out[-1:], "shared_head.norm")
            logits = F.linear(normed, self._tensor("shared_head.head"))
            logits[:, BIASED] += BIAS
            proposed.append(int(logits.argmax()))
            if len(proposed) == count:
                return proposed
            states, following = torch.cat([states, out[-1:]]), [*following, proposed[-1]]

    def _predict(self, states: Tensor, following: Tensor) -> Tensor:
        embedded = F.embedding(following, self._tensor("embed_tokens"))
        embedded[0] = 0
        combined = torch.cat([self._norm(embedded, "enorm"), self._norm(states, "hnorm")], dim=1)
        hidden = F.linear(combined, self._tensor("eh_proj"))[None]
        count = hidden.shape[1]
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        rotary = self._model.model.rotary_emb(hidden, positions)
        out = self._layer(hidden, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        return (out[0] if isinstance(out, tuple) else out)[0]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[1],), self._tensor(name), self._eps)

    def _tensor(self, name: str) -> Tensor:
        return self._tensors[f"{NAME}{name}.weight"]

    def _of_layer(self, name: str, like: Tensor) -> Tensor:
        """Return a tensor of the layer, whose experts transformers keeps in one tensor."""
        if f"{NAME}{name}" in self._tensors:
            return self._tensors[f"{NAME}{name}"]
        part = name.rpartition(".")[2]
        kinds = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[part]
        experts = [
            torch.cat([self._tensors[f"{NAME}mlp.experts.{index}.{kind}.weight"] for kind in kinds])
            for index in range(like.shape[0])
        ]
        return torch.stack(experts)


def test_draft_layer_proposals_equal_transformers(checkpoint: Path, drafters: list[RecordingDrafter]):
    """Prompts in parts, preempted requests, rejected proposals."""
    limits: dict[str, Any] = {"max_num_batched_tokens": 24, "max_num_seqs": 5, "max_model_len": 120, "block_size": 16}
    options = {"num_kv_blocks": 14, "enable_prefix_caching": False, "speculative_config": CONFIG}
    with LocalEngine(checkpoint, **limits, **options) as engine:
        for index in range(7):
            prompt = random_prompt(index, 5 + 9 * index, VOCAB_SIZE)
            engine.add(str(index), prompt, max_tokens=25, logit_bias=dict.fromkeys(BIASED, BIAS))
        engine.run()
        stats = engine.core.scheduler.stats()
        assert stats.num_preemptions > 0 and 20 < stats.num_accepted_tokens < stats.num_draft_tokens
    oracle, proposals = Oracle(checkpoint), drafters[-1].proposals
    assert len(proposals) > 60
    for tokens, proposed in proposals[::3]:
        assert proposed == oracle.propose(tokens, len(proposed))


@pytest.mark.parametrize(
    "options",
    [
        {"executor": "in-process"},
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.grid),
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.grid),
    ],
    ids=str,
)
def test_draft_layer_answers_are_the_same_bits(
    checkpoint: Path, drafters: list[RecordingDrafter], options: dict[str, Any]
):
    expected = answers(checkpoint, **options)
    assert_equal(answers(checkpoint, speculative_config=CONFIG, **options), expected)
    assert drafters[-1].proposals


@pytest.mark.parametrize("in_place", [False, True])
def test_draft_layer_update_has_the_weights_of_a_layer_loaded_from_them(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, in_place: bool
):
    """The layer has tensors of its own, and copies of the embedding and of the head."""
    generator = torch.Generator().manual_seed(3)
    tensors = load_file(checkpoint / "model.safetensors")
    pushed = {name: 0.1 * torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()}
    shutil.copytree(checkpoint, tmp_path / "pushed")
    save_file(pushed, tmp_path / "pushed" / "model.safetensors", metadata={"format": "pt"})
    updates = LayerUpdates(model := load(checkpoint), layer := load(checkpoint, drafts=True))

    def push(tensors: dict[str, Tensor]) -> None:
        update = updates.start(in_place=in_place)
        assert update.add(tensors.items()) >= tensors.keys() - {"lm_head.weight"}
        assert not update.missing() and not update.untouched()
        update.apply()
        update.drop()

    push(pushed)
    for found, drafts in ((model, False), (layer, True)):
        expected = load(tmp_path / "pushed", drafts=drafts).storage()
        assert all(torch.equal(one, other) for one, other in zip(found.storage(), expected, strict=True))
    assert not caplog.records
    caplog.clear()
    for _ in range(2):
        push({name: tensor for name, tensor in tensors.items() if not name.startswith(NAME)})
    [line] = caplog.messages
    assert f"no tensor {NAME}*: the layer for drafts stays" in line

    update = updates.start(in_place=in_place)
    with pytest.raises(WeightsMismatch, match=r"enorm\.weight' has the shape"):
        update.check([(f"{NAME}enorm.weight", torch.zeros(3))])
    update.add([(name := f"{NAME}mlp.shared_experts.gate_proj.weight", tensors[name])])
    assert update.missing() == [f"{NAME}mlp.shared_experts.up_proj.weight"]
    update.drop()


def test_draft_layer_that_is_missing_is_refused(tmp_path):
    make_checkpoint(tmp_path / "deepseek", "deepseek_v3", num_nextn_predict_layers=1)
    with pytest.raises(ConfigError, match=r"needs the tensors model.layers.3.\*, which predict further tokens"):
        LocalEngine(tmp_path / "deepseek", speculative_config=CONFIG)
    make_checkpoint(tmp_path / "qwen", "qwen3")
    with pytest.raises(ConfigError, match=r"qwen/config.json describes \(Qwen3ForCausalLM\) has none"):
        LocalEngine(tmp_path / "qwen", speculative_config=CONFIG)
