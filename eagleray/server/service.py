"""The objects that the handlers of all routes share: client, model names, defaults, limits and metrics.

Made once by `app.create_app`; holds no state of any request.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

from starlette.requests import Request

from eagleray.client.answers.plan import AnswerPlan
from eagleray.client.answers.requested_tools import OfferedTools, RequestedTools
from eagleray.client.client import Client
from eagleray.client.preprocess import Prompt, RequestOptions
from eagleray.client.text.generation_config import default_sampling
from eagleray.client.text.tokenizer import Tokenizer
from eagleray.client.tracing import TRACE_HEADERS, RequestOrigin
from eagleray.config.resolve import served_names
from eagleray.config.sections import Config
from eagleray.errors import InvalidRequest, Unavailable, UnknownModel
from eagleray.hub.locate import checkpoint_dir, model_root
from eagleray.messages.adapters import Adapter
from eagleray.messages.membership import EngineInfo
from eagleray.metrics.exposition import Metrics
from eagleray.metrics.ledger import Ledger
from eagleray.server.admission import Admission
from eagleray.server.body import IGNORED_FIELDS, BodyDecoder
from eagleray.server.field_fates import Fate
from eagleray.server.fields import OptionFields, TruncationFields, requested_rank, session_name
from eagleray.server.fingerprint import system_fingerprint
from eagleray.server.lenient_body import IgnoredFieldLog
from eagleray.server.memory_return import MemoryReturn
from eagleray.server.text_processor import TextProcessor

T = TypeVar("T")

chosen_adapter: ContextVar[str | None] = ContextVar("chosen_adapter", default=None)
"""Name of the loaded adapter that something outside of the body, such as a header, has chosen for the request."""


class Service:
    """The shared objects, and the checks of a request against them. The caller closes `client` and `ledger`."""

    def __init__(self, client: Client, config: Config, ledger: Ledger) -> None:
        self.client = client
        self.ledger = ledger
        """Counts of all API servers."""
        self.model_names = served_names(config.model)
        self.model_dir = str(checkpoint_dir(config.model))
        self.model_root = model_root(config.model)
        """Model that was asked for: its id, or its directory."""
        self.model_config = config.model
        """Options of the model at the start."""
        self._config = config
        self.memory_return = MemoryReturn()
        self._options = config.serving
        self._trace_headers = TRACE_HEADERS if config.observability.otlp_traces_endpoint else ()
        self._config_max_logprobs = config.model.max_logprobs
        self.names_tokens_by_id = config.serving.return_tokens_as_token_ids
        self.keeps_routed_experts = config.model.enable_return_routed_experts
        self.reports_routed_experts = config.serving.routed_experts_by_default
        """Whether OpenAI's routes report routed experts too unless a request declines."""
        self.has_priorities = config.scheduling.scheduling_policy == "priority"
        self.default_sampling: dict[str, Any] = default_sampling(config.model)
        self.shows_prompt_details = config.serving.enable_prompt_tokens_details
        self.forces_usage = config.serving.enable_force_include_usage
        self.response_role = config.serving.response_role
        self.default_template_variables = config.serving.default_chat_template_kwargs
        self.trusts_templates = config.serving.trust_request_chat_template
        self._excludes_unused_tools = config.serving.exclude_tools_when_tool_choice_none
        self._ignored_log = IgnoredFieldLog()
        self.metrics = Metrics(
            self.model_name,
            ledger,
            stats=lambda: client.stats.values(),
            expert_load=lambda: client.expert_load.values(),
            engine_info=lambda: client.engine_info,
            state=lambda: client.state,
            max_loras=config.lora.max_loras if config.lora.enable_lora else None,
            has_vllm_names=config.observability.enable_vllm_metrics,
        )
        self.admission = Admission(client, config.serving, self.metrics.requests.rejected)
        client.observe_recovery(self.metrics.recovery)
        self.created = int(time.time())
        self._serial = itertools.count()

    @property
    def model_name(self) -> str:
        """Name that answers show."""
        return self.model_names[0]

    @property
    def ranks(self) -> list[int]:
        """Ranks that requests may ask for."""
        return self.client.ranks

    @functools.cached_property
    def version(self) -> str:
        """Version of eagleray. Looked up at the first use, because reading a distribution's metadata is slow."""
        return importlib.metadata.version("eagleray")

    @functools.cached_property
    def system_fingerprint(self) -> str:
        """Fingerprint that answers show."""
        return system_fingerprint(self._config, self.version)

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model. Raises `InvalidRequest` if this server has none."""
        self.check_tokenizer()
        assert self.client.tokenizer is not None
        return self.client.tokenizer

    def check_tokenizer(self) -> None:
        """Raise `InvalidRequest` if this server has no tokenizer."""
        if self.client.tokenizer is None:
            raise InvalidRequest(
                "this server runs without a tokenizer (its option `skip_tokenizer_init`): use token ids on "
                "/v1/completions, without `echo` and `logprobs`, or on /inference/v1/generate"
            )

    def plan_answers(self, requested: RequestedTools) -> AnswerPlan:
        """Return the form of the answers to a request with these tools. Raises `UnsupportedParameter`."""
        if requested.choice.mode == "none" and self._excludes_unused_tools:
            requested = requested._replace(offered=OfferedTools())
        return self.client.answer_formats.plan(requested)

    def body_decoder(self, kind: type[T], fates: Mapping[str, Fate] | None = None) -> BodyDecoder[T]:
        """Return a decoder of bodies in the form of the struct `kind`. `fates`: see `BodyDecoder`."""
        schedule = self.memory_return.schedule
        return BodyDecoder(kind, self._options, schedule, fates=fates, ignored_log=self._ignored_log)

    @functools.cached_property
    def text(self) -> TextProcessor:
        """Processor for texts and token ids. Raises `InvalidRequest` if this server has no tokenizer."""
        return TextProcessor(
            self.tokenizer,
            max_model_len=lambda: self.client.engine_info.max_model_len if self.client.engine_info else None,
            pools=lambda: self.client.engine_info is not None and self.client.engine_info.pooling is not None,
            template_seconds=self._options.chat_template_timeout,
        )

    @property
    def max_logprobs(self) -> int:
        """Largest number of likeliest tokens that a request may ask for. May raise as `max_model_len`."""
        return self.vocab_size if self._config_max_logprobs == -1 else self._config_max_logprobs

    @property
    def max_model_len(self) -> int:
        """The model's length in tokens. Raises `Unavailable` before the first engine has joined."""
        return self.engine_info.max_model_len

    @property
    def vocab_size(self) -> int:
        """Number of the model's tokens. Raises as `max_model_len`."""
        return self.engine_info.vocab_size

    @property
    def engine_info(self) -> EngineInfo:
        """The served model. Raises `Unavailable` before the first engine has joined."""
        if self.client.engine_info is None:
            self.check_engine()
            raise Unavailable("no engine is ready, try again in a moment")
        return self.client.engine_info

    def report_ignored(self, state: dict[str, Any], name: str) -> None:
        """Report a field of the request of this state that turned out to have no effect, as unknown ones are."""
        self._ignored_log.note([name])
        state[IGNORED_FIELDS] = ", ".join(filter(None, (state.get(IGNORED_FIELDS), name)))

    def find_model(self, name: str | None) -> Adapter | None:
        """Return the adapter of this name, None for a name of the model itself. Raises `UnknownModel` for any other,
        and `InvalidRequest` if another adapter was chosen."""
        if (chosen := chosen_adapter.get()) is not None:
            if name not in (None, chosen, *self.model_names):
                raise InvalidRequest(
                    f"the request's header asks for {chosen!r}, but `model` is {name!r}: name the same, or drop one",
                    param="model",
                )
            name = chosen
        if name is None or name in self.model_names:
            return None
        if (adapter := self.client.find_adapter(name)) is not None:
            return adapter
        adapters = [adapter.name for adapter in self.client.state.adapters]
        raise UnknownModel(f"model {name!r} is not served here; served: {', '.join([*self.model_names, *adapters])}")

    def request_options(
        self, body: OptionFields, request: Request, request_id: str, adapter: Adapter | None
    ) -> RequestOptions:
        """Return the options of the client's requests, without their ids. `request_id`: the id that the user knows.
        Raises `InvalidRequest`."""
        headers, scope = request.headers, request.scope
        parent = {name: headers[name] for name in self._trace_headers if name in headers}
        return {
            "priority": self.check_priority(body.priority),
            "cache_salt": body.cache_salt or "",
            "adapter": adapter,
            "timeout": body.timeout,
            "rank": requested_rank(headers, self.ranks),
            "session": session_name(getattr(body, "session_id", None), headers),
            "origin": RequestOrigin(request_id, scope["state"]["arrival"], parent, scope["path"]),
        }

    async def encode_prompt(self, text: str, fields: TruncationFields, *, add_special_tokens: bool) -> Prompt:
        """Return the tokens of a text, with the text unless a part is missing. Raises as `TextProcessor.encode`."""
        num_kept = self._num_kept(fields)
        if num_kept is None:
            return Prompt(text, await self.text.encode(text, add_special_tokens=add_special_tokens))
        return Prompt(
            token_ids=await self.text.encode_part(
                text, num_kept, side=fields.truncation_side, add_special_tokens=add_special_tokens
            )
        )

    def limit_token_ids(self, token_ids: list[int], fields: TruncationFields) -> list[int]:
        """Return the token ids of a prompt, or the part of them that the request keeps. Raises `InvalidRequest`."""
        num_kept = self._num_kept(fields)
        if num_kept is None or len(token_ids) <= num_kept:
            return token_ids
        return token_ids[:num_kept] if fields.truncation_side == "right" else token_ids[len(token_ids) - num_kept :]

    def check_priority(self, priority: int | None) -> int:
        """Return the priority with its default. Raises `InvalidRequest` if it could have no effect."""
        if priority and not self.has_priorities:
            raise InvalidRequest(
                "`priority` has no effect on this server: it needs the option `--scheduling-policy priority`",
                param="priority",
            )
        return priority or 0

    def check_engine(self) -> None:
        """Raise `Unavailable` with the cause if no engine is present."""
        client = self.client
        if client.engines:
            return
        if client.expects_engines and client.cause:
            raise Unavailable(f"no engine is there until one has been started again: {client.cause}")
        raise Unavailable(f"no engine is ready{f': {client.cause}' if client.cause else ', try again in a moment'}")

    def check_running(self) -> None:
        """Raise `Unavailable` if this server is stopping, because it takes no new requests then."""
        if self.client.takes_no_requests:
            raise Unavailable("this server is stopping and takes no new requests; try again elsewhere or later")

    def check_ready(self) -> None:
        """Raise `Unavailable` unless a request could be sent to an engine now."""
        self.check_running()
        self.check_engine()

    def check_open(self) -> None:
        """Raise `Unavailable` unless a request could be sent now, or wait here for an engine that restarts."""
        self.check_running()
        if not self.client.expects_engines:
            self.check_engine()

    def unique(self, request_id: str) -> str:
        """Return a unique id for a request to the engines, because users may give several requests one X-Request-Id."""
        return f"{request_id}-{next(self._serial)}"

    def _num_kept(self, fields: TruncationFields) -> int | None:
        """Return the most tokens of a prompt, or None if the request sets no limit of its own."""
        limit = fields.truncate_prompt_tokens
        if limit is None:
            return None
        if limit == 0:
            raise InvalidRequest(
                "`truncate_prompt_tokens` of 0 leaves no prompt: give at least 1, or -1 for as many tokens as fit",
                param="truncate_prompt_tokens",
            )
        max_model_len = self.max_model_len
        if limit > max_model_len:
            raise InvalidRequest(
                f"`truncate_prompt_tokens` must be at most {max_model_len}, the model's length (option "
                f"`max_model_len`), but it is {limit}",
                param="truncate_prompt_tokens",
            )
        if limit == -1:
            return max_model_len if self.engine_info.pooling is not None else max_model_len - 1
        return limit
