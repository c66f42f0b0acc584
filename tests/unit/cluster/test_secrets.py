"""Environment variables that count as secrets."""

from __future__ import annotations

import time

import pytest

from eagleray.cluster.secrets import may_be_secret

PLAIN = "x"


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "db_password", "MYSECRETS", "GITHUB_PAT", "DB_PASS",
     "MYSQL_PWD", "SSH_KEY_PASSPHRASE", "SLACK_WEBHOOK", "SLACK_WEBHOOK_URL", "SENTRY_DSN", "BASIC_AUTH", "COOKIE_JAR",
     "PRIVATE_KEY_FILE", "REDIS_CREDS", "URL_SIGNATURE", "TLS_CERT_KEY", "AZURE_STORAGE_CONNECTION_STRING", "API_KEYS",
     "EAGLERAY_API_KEY", "JWT", "GOOGLE_APPLICATION_CREDENTIALS"],
)  # fmt: skip
def test_may_be_secret_name_of_a_secret_is_true(name: str) -> None:
    assert may_be_secret(name, PLAIN)


@pytest.mark.parametrize(
    "value",
    ["postgres://u:pw@db/x", "redis://:pw@host:1/0", "http://u:p@proxy:8080", "https://u:p@ss@host/",
     "ghp_0123456789abcdefghij", "github_pat_0123456789abcdefgh", "glpat-0123456789abcdefghij", "xoxb-12345678-abc",
     "xoxa-12345678-abc", "sk-proj-0123456789abcdefghij", "hf_abcdefghijklmnopqrst", "AKIAIOSFODNN7EXAMPLE",
     "AIzaSyA-1234567890abcdefghijklm", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc",
     "-----BEGIN RSA PRIVATE KEY-----\nabc", "-----BEGIN PRIVATE KEY-----\nabc", "Server=x;Password=hunter22;",
     "https://storage/x?sv=1&sig=abcdef123", "authorization=Bearer 0123456789abcdef", "x-api-key=abcdefgh",
     "AccountName=a;AccountKey=abcdef==", '{"password": "hunter22"}', "https://hooks.slack.com/services/T0/B0/x",
     "git+https://ghp_0123456789abcdefghij@github.com/a/b"],
)  # fmt: skip
def test_may_be_secret_value_that_looks_like_a_secret_is_true(value: str) -> None:
    assert may_be_secret("PLAIN", value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("PATH", "/usr/bin:/bin"), ("LD_LIBRARY_PATH", "/a:/b"), ("NCCL_SOCKET_IFNAME", "eth0"),
     ("TOKENIZERS_PARALLELISM", "false"), ("LANG", "C.UTF-8"), ("http_proxy", "http://proxy:8080"), ("HF_HOME", "/a"),
     ("MIRROR", "http://host:8080/path@v1"), ("REPOSITORY", "ssh://git@host/x"), ("KEYBOARD", "us"),
     ("LS_COLORS", "rs=0:di=01;34:ln=01;36"), ("NAME", "task-configuration-of-many-words"),
     ("DIRECTORY", "/opt/disk-abcdefghijklmnopqrstu"), ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
     ("TORCH_LOGS", "+dynamo"), ("GOMP_SPINCOUNT", "1000"), ("CUDA_DEVICE_ORDER", "PCI_BUS_ID")],
)  # fmt: skip
def test_may_be_secret_plain_setting_is_false(name: str, value: str) -> None:
    assert not may_be_secret(name, value)


@pytest.mark.parametrize("piece", ["a", "x://", "x://u:", "key", "bearer ", "-----BEGIN ", "a-", "password"])
def test_may_be_secret_long_value_is_quick(piece: str) -> None:
    began = time.process_time()
    may_be_secret("PLAIN", piece * (128 * 1024 // len(piece)))
    assert time.process_time() - began < 2
