"""/tokenizer_info: the configuration of the tokenizer, as programs of transformers read it. Only with an option."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from eagleray.client.text.chat_template import read_template
from eagleray.client.text.tokenizer_files import chat_template_source, read_tokenizer_config
from eagleray.config.sections import ModelConfig
from eagleray.hub.locate import tokenizer_dir
from eagleray.server.endpoint import Endpoint, Operation
from eagleray.server.http_responses import json_response
from eagleray.server.service import Service

DEFAULT_CLASS = "PreTrainedTokenizerFast"
"""Class of transformers that reads any tokenizer.json."""
FILE_FIELDS = ("vocab_file", "merges_file", "tokenizer_file")
"""Fields that tell paths of the computer on which the checkpoint was made."""


class TokenizerInfoRoute:
    def __init__(self, service: Service, model: ModelConfig) -> None:
        self._service = service
        self._model = model

    def endpoints(self) -> list[Endpoint]:
        show = Operation(
            self.show,
            "The tokenizer's configuration: tokenizer_config.json, with the chat template in use.",
            response=dict[str, Any],
            error_statuses=(400,),
        )
        return [Endpoint("/tokenizer_info", get=show)]

    async def show(self, request: Request) -> Response:
        self._service.check_tokenizer()
        return json_response(self._info)

    @functools.cached_property
    def _info(self) -> dict[str, Any]:
        directory = tokenizer_dir(self._model)
        config = read_tokenizer_config(directory)
        info = {name: _plain(value) for name, value in config.items() if name not in FILE_FIELDS}
        info["tokenizer_class"] = info.get("tokenizer_class") or DEFAULT_CLASS
        if self._model.chat_template is not None:
            info["chat_template"] = read_template(Path(self._model.chat_template).expanduser())
        elif templates := chat_template_source(directory, config):
            info["chat_template"] = templates.get("default", templates)
        return info


def _plain(value: Any) -> Any:
    """Return a value with the texts of special tokens in place of their descriptions."""
    if isinstance(value, dict):
        return value["content"] if "content" in value else {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
