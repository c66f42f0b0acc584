"""Markdown files: every path, symbol, option, metric and make target that they name exists."""

from __future__ import annotations

from pathlib import Path

import pytest
from named_things import Code, Link, Mention, anchors, links, mentions, stale_names

ROOT = Path(__file__).parents[3]
FOLDERS = ("docs", "deploy", "examples")
FILES = [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))]
DOCUMENTS = sorted(str(path.relative_to(ROOT)) for path in FILES)

FOREIGN = {
    *("nohup", "numactl", "ps", "taskset"),  # the system's
    *("DATABASE_URL", "HTTP_PROXY", "SO_REUSEPORT", "Upgrade", "vdpbf16ps"),  # users', Linux's, HTTP's, the CPU's
    *("MainProcess", "WatchedFileHandler"),  # Python's
    *("FF", "RCVHWM", "SNDHWM", "nil"),  # bytes and options of zmq, MessagePack's null
    *("InvalidAuthToken", "RAY_preload_python_modules", "max_surge_percent", "py_modules", "working_dir"),  # Ray's
    *("UserCodeException", "raise_original_map_exception"),  # Ray Data's
    *("--app-dir", "histogram_quantile"),  # of `serve run`, of Prometheus
    *("desc_act", "k_scale", "kv_cache_scheme", "modules_to_not_convert", "v_scale"),  # of quantized checkpoints
    "ray_eagleray_generation_tokens_total",  # the name of a metric of eagleray in Ray's
    # files that the reader writes
    *("after.json", "attach.json", "before.json", "file.yaml", "gpu.json", "probe.py", "request.json"),
    *(
        "--dashboard-agent-grpc-port",
        "--dashboard-agent-listen-port",
        "--dashboard-host",
        "--metrics-export-port",
    ),  # Ray's
    *("--node-ip-address", "--node-manager-port", "--object-manager-port", "--runtime-env-agent-port"),  # Ray's
    "NCCL_SOCKET_IFNAME",  # NCCL's
    *("Forwarded", "Origin"),  # HTTP's
    *("ForSequenceClassification", "LlamaForSequenceClassification", "MistralModel", "Qwen3Model"),  # architectures
    *("1_Pooling/config.json", "modules.json"),  # files of sentence-transformers
    "--rollout-external-engine-addrs",  # slime's
    *("--no-index", "--target", "PIP_EXTRA_INDEX_URL"),  # pip's
    *("--build", "--build-arg", "--no-healthcheck", "--read-only", "--rm", "--shm-size", "--tmpfs"),  # Docker's
    *("--from-literal", "KUBERAY_CRDS"),  # of kubectl, of tests/deploy
    *("adapter_config.json", "modules_to_save"),  # PEFT's
    "llm_engine",  # vLLM's
    *("HTTPVLLMWeightSyncClient", "RayVLLMWeightSyncClient", "vllm.distributed.utils"),  # vLLM's
    *("RemoteInferenceClient", "chat_completion", "init_weight_update_communicator", "update_named_weights"),  # SkyRL's
    *("sleep_for_weight_sync", "wake_for_weight_sync"),  # SkyRL's
    *("VLLMClient", "WeightTransferClient"),  # TRL's
    *("utils/client.py", "maybe_check_has_model", "prefill_logprobs"),  # prime-rl's
    *("OTEL_BSP_MAX_QUEUE_SIZE", "OTEL_BSP_SCHEDULE_DELAY"),  # OpenTelemetry's
    *("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_SERVICE_NAME", "OTEL_TRACES_SAMPLER"),  # OpenTelemetry's
    *("gen_ai.request.id", "gen_ai.response.finish_reasons"),  # attributes of its spans
    *("gen_ai.latency.e2e", "gen_ai.latency.time_in_queue", "gen_ai.latency.time_to_first_token"),
    *(f"gen_ai.latency.time_in_model_{phase}" for phase in ("prefill", "decode", "inference")),
    *("additionalItems", "unevaluatedItems", "unevaluatedProperties"),  # JSON Schema's
    *("RolloutRayActor", "WorkerWrap", "update_weight"),  # OpenRLHF's
}


@pytest.fixture(scope="module")
def code():
    return Code(ROOT)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_document_names_only_things_that_exist(document, code):
    found = mentions(document, (ROOT / document).read_text("utf-8"))
    stale = [str(name) for mention in found for name in stale_names(mention, code, FOREIGN)]
    assert not stale, "\n".join(["", *stale])


@pytest.mark.parametrize("document", DOCUMENTS)
def test_document_links_lead_to_files_and_headings(document):
    path = ROOT / document
    broken = []
    for link in links(path.read_text("utf-8")):
        target = path.parent / link.target if link.target else path
        if not target.exists() or (link.anchor and link.anchor not in anchors(target.read_text("utf-8"))):
            broken.append(f"{document}:{link.line}: {link.target}#{link.anchor or ''}")
    assert not broken, "\n".join(["", *broken])


def test_foreign_names_are_all_named_by_a_document(code):
    found = [mention for name in DOCUMENTS for mention in mentions(name, (ROOT / name).read_text("utf-8"))]
    assert {stale.name for mention in found for stale in stale_names(mention, code)} >= FOREIGN


@pytest.mark.parametrize(
    "text",
    [
        "scheduler/scheduler.py",
        "eagleray/scheduler/scheduler.py",
        "models/<family>.py",
        "eagleray/scheduler/",
        "tests/unit",
        "EngineCore.step",
        "scheduler.plan",
        "engine/loop.EngineLoop",
        "Chunk(request_id)",
        "messages.steps",
        "ray.kill",
        "--max-num-seqs 4 --no-deterministic",
        "eagleray:num_requests_running",
        "eagleray:generation_tokens_total",
        "make lint",
        "EAGLERAY_CACHE_DIR=/tmp",
        "EAGLERAY_MAX_NUM_SEQS=4",
        "uint8",
        "POST /v1/nothing",
    ],
)
def test_stale_names_accepts_what_exists(text, code):
    assert list(stale_names(Mention("a.md", 1, text), code)) == []


@pytest.mark.parametrize(
    ("text", "kind", "name"),
    [
        ("scheduler/nowhere.py", "file", "scheduler/nowhere.py"),
        ("python scripts/nowhere.py --help", "file", "scripts/nowhere.py"),
        ("eagleray/nowhere/", "folder", "eagleray/nowhere/"),
        ("EngineCore.nowhere", "name", "EngineCore.nowhere"),
        ("scheduler.nowhere", "name", "scheduler.nowhere"),
        ("engine/loop.Nowhere", "name", "engine/loop.Nowhere"),
        ("NoWhere", "name", "NoWhere"),
        ("eagleray serve --nowhere 3", "option", "--nowhere"),
        ("rate(eagleray:nowhere_total[5m])", "metric", "nowhere_total"),
        ("make nowhere", "make target", "nowhere"),
        ("EAGLERAY_NOWHERE=1", "variable", "EAGLERAY_NOWHERE"),
        ("no_where", "name", "no_where"),
    ],
)
def test_stale_names_finds_what_does_not(text, kind, name, code):
    found = [stale for stale in stale_names(Mention("a.md", 7, text), code) if stale.name != "--help"]
    assert [str(stale) for stale in found] == [f"a.md:7: there is no {kind} {name}"]


def test_stale_names_of_a_block_are_classes_options_and_targets(code):
    found = stale_names(Mention("a.md", 1, "engine ── NoWhere(no_where) ──► make lint --nowhere", is_block=True), code)
    assert [stale.name for stale in found] == ["--nowhere", "NoWhere"]


def test_mentions_have_the_lines_of_the_document():
    text = (
        "# Title\n\nA `span\n of two` lines.\n```sh\nmake test\n```\nAnd `another`.\n\n    make lint\n\nThe `last`.\n"
    )
    assert sorted((found.line, found.text, found.is_block) for found in mentions("a.md", text)) == [
        (3, "span of two", False),
        (5, "```sh", True),
        (6, "make test", True),
        (7, "```", True),
        (8, "another", False),
        (10, "    make lint", True),
        (12, "last", False),
    ]


def test_links_leave_out_other_sites():
    text = "[a](a.md#part)\n[b](https://b#c) [c](#c)\n[d](../d.py)"
    assert list(links(text)) == [Link(1, "a.md", "part"), Link(2, "", "c"), Link(3, "../d.py", None)]


def test_anchors_are_those_of_code_hosts():
    text = "# Who `calls`: a, b\n```sh\n# comment\n```\n## Part\n## [Part](a.md)\n### -9 é_x\n"
    assert anchors(text) == {"who-calls-a-b", "part", "part-1", "-9-é_x"}
