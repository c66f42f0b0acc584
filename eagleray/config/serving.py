"""The section of the configuration for the HTTP server."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
SocketSeconds = Annotated[float, Meta(gt=0, le=86_400)]

Permissions = Annotated[str, Meta(pattern="^[0-7]{3}$")]

JSON_LISTS = frozenset({"allowed_origins", "allowed_methods", "allowed_headers"})
"""Options that are lists of texts, and whose flags take one of them or a JSON list."""

REPEATED = frozenset({"middleware"})
"""Options that are lists, and whose flags are given once for each value."""


class ServingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP server."""

    host: Annotated[str, Meta(description="Address to listen on; 0.0.0.0 for every interface.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0 takes a free one.")] = 8000
    uds: Annotated[
        str | None,
        Meta(description="Path of a Unix socket to listen on in place of `host` and `port`. It is removed at the end."),
    ] = None
    uds_mode: Annotated[
        Permissions | None,
        Meta(
            description="Permissions of the Unix socket in octal digits, such as 660; who may write to it may connect. "
            "Default: the permissions that the umask leaves.",
        ),
    ] = None
    root_path: Annotated[
        str,
        Meta(description="Path under which a proxy shows this server, such as /llm; requests may come with it or not."),
    ] = ""
    api_server_count: Annotated[int, Meta(ge=1, description="Processes that answer HTTP, on the same port.")] = 1
    max_queued_requests: Annotated[
        int,
        Meta(
            ge=1,
            description="Most sequences (prompts x `n`) that wait for their first token in one API server; beyond them "
            "it answers 429.",
        ),
    ] = 4096
    max_seqs_per_request: Annotated[int, Meta(ge=1, description="Most sequences (prompts x `n`) of one request.")] = (
        1024
    )
    max_request_tokens: Annotated[
        int,
        Meta(
            ge=1,
            description="Most token ids of one request: those of its prompts and of lists in its parameters, once for "
            "each sequence. Also the most values in the JSON of its body.",
        ),
    ] = 2 * 2**20
    max_request_logprobs: Annotated[
        int,
        Meta(ge=1, description="Most log-probabilities that one request with several sequences may ask for."),
    ] = 2**20
    chat_template_timeout: Annotated[
        Seconds, Meta(description="Seconds that the chat template may take for one conversation.")
    ] = 10.0
    disable_uvicorn_access_log: Annotated[
        bool,
        Meta(
            description="Log no line for each HTTP request. Without this, requests are logged by method, path, status, "
            "time, number of tokens and id, but not probes and scrapes that succeed."
        ),
    ] = False
    disable_access_log_for_endpoints: Annotated[
        str | None,
        Meta(description="Routes, divided by commas, whose requests are not logged, such as /v1/models,/tokenize."),
    ] = None
    enable_prompt_tokens_details: Annotated[
        bool, Meta(description="Show in the usage how many tokens of the prompt were cached.")
    ] = False
    enable_force_include_usage: Annotated[
        bool, Meta(description="Show the usage in every event of every stream, whether it is asked for or not.")
    ] = False
    response_role: Annotated[str, Meta(min_length=1, description="Role of the answer's message in a conversation.")] = (
        "assistant"
    )
    default_chat_template_kwargs: Annotated[
        dict[str, Any],
        Meta(description="Variables for the chat template, as JSON; those of a request take precedence."),
    ] = {}
    trust_request_chat_template: Annotated[
        bool, Meta(description="Accept chat templates in requests, which are programs (they run in a sandbox).")
    ] = False
    exclude_tools_when_tool_choice_none: Annotated[
        bool, Meta(description="Leave `tools` out of the prompt if `tool_choice` is none.")
    ] = False
    request_timeout: Annotated[
        Seconds | None,
        Meta(description="Seconds after which a request that sets no `timeout` of its own is given up."),
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool,
        Meta(
            description="Name the tokens of log-probabilities `token_id:<id>` in place of their texts, in answers to "
            "requests that do not say."
        ),
    ] = False
    routed_experts_by_default: Annotated[
        bool,
        Meta(
            description="Report routed experts on /v1/completions and /v1/chat/completions too unless a request has "
            "`return_routed_experts` false. Needs `enable_return_routed_experts`."
        ),
    ] = False
    enable_tokenizer_info_endpoint: Annotated[
        bool, Meta(description="Serve /tokenizer_info: the tokenizer's configuration, with the chat template.")
    ] = False
    disable_dashboard: Annotated[
        bool, Meta(description="Serve no live page at /dashboard, and no data for it and for `eagleray top`.")
    ] = False
    stream_interval: Annotated[
        int,
        Meta(
            ge=1,
            description="Least number of tokens of a completion that a stream shows together. The first token and the "
            "end are shown at once.",
        ),
    ] = 1
    attach_file: Annotated[
        str | None,
        Meta(description="File to write for front-ends of your own: where to attach, see docs/wire.md. Mode 0600."),
    ] = None
    api_key: Annotated[
        list[str],
        Meta(
            description="Keys that clients must show one of, besides those of `api_key_file` and of the variable "
            "EAGLERAY_API_KEY (divided by commas or lines); none: no key needed. Better not on a command line, which "
            "others can read until it is overwritten."
        ),
    ] = []
    admin_api_key: Annotated[
        list[str],
        Meta(
            description="Keys with which a client may pause the instance, put it to sleep and change its weights, "
            "besides the keys of the variable EAGLERAY_ADMIN_API_KEY. Default: the keys of `api_key`. Without any key "
            "these routes serve clients of this host only."
        ),
    ] = []
    enable_rl: Annotated[
        bool,
        Meta(description="Without API keys, let clients of other hosts pause the instance and change its weights too."),
    ] = False
    enable_sleep_mode: Annotated[bool, Meta(description="Implies `enable_rl`; the routes are there in any case.")] = (
        False
    )
    enable_sglang_api: Annotated[
        bool,
        Meta(
            description="Also serve routes with SGLang's names, such as /generate, for trainers that steer SGLang over "
            "HTTP, see docs/rl.md."
        ),
    ] = False
    api_key_file: Annotated[
        str | None,
        Meta(description="File with more keys for `api_key`, one a line; lines that begin with # are comments."),
    ] = None
    max_request_bytes: Annotated[int, Meta(ge=1, description="Largest request body that is accepted, in bytes.")] = (
        32 * 2**20
    )
    max_connections: Annotated[
        Positive | None,
        Meta(
            description="Most connections that one API server keeps open; beyond them only routes that tell its state "
            "answer. Default: 8192, or what the limit of open files allows."
        ),
    ] = None
    max_header_bytes: Annotated[
        int, Meta(ge=1024, le=2**24, description="Largest request line and headers together, in bytes.")
    ] = 65536
    max_header_count: Annotated[int, Meta(ge=8, description="Most headers of a request.")] = 256
    header_timeout: Annotated[
        SocketSeconds, Meta(description="Seconds from the first byte of a request to the end of its headers.")
    ] = 30.0
    body_timeout: Annotated[
        SocketSeconds, Meta(description="Seconds that may pass without a further byte of a request's body.")
    ] = 30.0
    keep_alive_timeout: Annotated[
        SocketSeconds, Meta(description="Seconds after which a connection without a request is closed.")
    ] = 60.0
    send_timeout: Annotated[
        SocketSeconds,
        Meta(description="Seconds after which a connection is cut whose client takes nothing of its answer."),
    ] = 300.0
    ssl_certfile: Annotated[
        str | None,
        Meta(
            description="Serve HTTPS with the certificate in this file, in PEM format, followed by those of the "
            "authorities between."
        ),
    ] = None
    ssl_keyfile: Annotated[
        str | None,
        Meta(description="File with the private key of `ssl_certfile`, not encrypted. Default: the same file."),
    ] = None
    ssl_ca_certs: Annotated[
        str | None, Meta(description="File with the certificates of the authorities that certify clients.")
    ] = None
    ssl_cert_reqs: Annotated[
        int,
        Meta(
            ge=0,
            le=2,
            description="Certificates of clients: 0 asks for none, 1 checks one that is sent, 2 demands one.",
        ),
    ] = 0
    ssl_ciphers: Annotated[
        str | None, Meta(description="Cipher suites of TLS 1.2, in OpenSSL's form. Default: those of Python.")
    ] = None
    enable_ssl_refresh: Annotated[
        bool, Meta(description="Read the files of certificates again when they change, for new connections.")
    ] = False
    allowed_origins: Annotated[
        list[str],
        Meta(
            description="Origins whose pages in a browser may read answers, as '[\"https://example.org\"]', or * "
            "for all. Default: none."
        ),
    ] = []
    allowed_methods: Annotated[list[str], Meta(description="Methods that those pages may use. Default: all.")] = []
    allowed_headers: Annotated[list[str], Meta(description="Headers that those pages may send. Default: all.")] = []
    allow_credentials: Annotated[
        bool, Meta(description="Let those pages send cookies and other credentials of the browser.")
    ] = False
    middleware: Annotated[
        list[str],
        Meta(
            description="ASGI middleware to put around the server, as module.name: a class that is called with the "
            "application, or an async function of a request and the next handler. The last one is outermost."
        ),
    ] = []
    enable_collective_rpc: Annotated[
        bool,
        Meta(
            description="Let every client that may send requests call methods of the workers by /collective_rpc. "
            "Otherwise only clients that may change the weights can (`admin_api_key`)."
        ),
    ] = False
    shutdown_timeout: Annotated[
        float, Meta(ge=0, description="Seconds that running requests get to finish when the server is told to stop.")
    ] = 30.0

    @property
    def url_prefix(self) -> str:
        """The `root_path` without a slash at its end."""
        return self.root_path.rstrip("/")
