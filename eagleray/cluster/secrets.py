"""Detection of environment variables that may be secrets, by their names or by the form of their values. Pure.

A variable that is taken for a secret by mistake costs its user a line of configuration (`ray_env_include`); one that is
missed may be read by every user of every node. So the patterns are broad.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

NAMES = (
    "*APIKEY*",
    "*AUTH*",
    "*BEARER*",
    "*CONNECTION_STR*",
    "*COOKIE*",
    "*CREDENTIAL*",
    "*CREDS",
    "*DSN",
    "*JWT*",
    "*KEY",
    "*KEYS",
    "*PASS",
    "*PASSCODE*",
    "*PASSPHRASE*",
    "*PASSWD*",
    "*PASSWORD*",
    "*PRIVATE*",
    "*PWD",
    "*SECRET*",
    "*SIGNATURE*",
    "*TOKEN",  # not *TOKEN*: TOKENIZERS_PARALLELISM
    "*TOKENS",
    "*WEBHOOK*",
    "*_PASS_*",
    "*_PAT",
    "*_SAS",
    "PAT",
)
"""Patterns of names in upper case."""

FORMS = re.compile(
    r"""
    # scheme://user:password@host, where the user may be empty; in ://host:8080/path@v1 the digits are a port
    ://[^/\s:@]{0,256}:(?!\d+/)[^\s@]{1,1024}@
    # password=... as in connection strings, and as parameters of signed URLs
    | (?<![a-z0-9])(?:password|passwd|pwd|secret|token|sig|signature|credential|(?:[a-z0-9]+[-_]?)?key)
      ["']?\s*[=:]\s*["']?[^\s"';&,]{6,}
    | (?<![a-z0-9])(?:bearer|basic)\s+[a-z0-9+/_.=-]{16,}
    | -----BEGIN\ [A-Z\ ]*PRIVATE\ KEY
    | hooks\.slack\.com/(?:services|workflows|triggers)/ | discord(?:app)?\.com/api/webhooks/
    # tokens whose prefix names a service: GitHub, GitLab, Slack, OpenAI and others, Stripe, Hugging Face, AWS,
    # Google, npm, PyPI, Vault, SendGrid, NVIDIA, Groq, DigitalOcean, JSON Web Token
    | (?<![A-Za-z0-9])(?-i:
        gh[oprsu]_[A-Za-z0-9]{16,} | github_pat_[A-Za-z0-9_]{16,} | gl[a-z]{2,5}-[A-Za-z0-9_-]{16,}
        | xox[a-z]-[A-Za-z0-9-]{8,} | xapp-[A-Za-z0-9-]{8,} | sk-[A-Za-z0-9_-]{16,}
        | [rs]k_(?:live|test)_[A-Za-z0-9]{8,} | hf_[A-Za-z0-9]{16,} | A[KS]IA[A-Z0-9]{12,}
        | AIza[A-Za-z0-9_-]{20,} | ya29\.[A-Za-z0-9_-]{16,} | npm_[A-Za-z0-9]{20,} | pypi-[A-Za-z0-9_-]{16,}
        | hv[sb]\.[A-Za-z0-9_-]{16,} | SG\.[A-Za-z0-9_-]{16,} | nvapi-[A-Za-z0-9_-]{16,} | gsk_[A-Za-z0-9]{16,}
        | dop_v1_[a-f0-9]{16,} | eyJ[A-Za-z0-9_-]{16,}
      )
    """,
    re.VERBOSE | re.IGNORECASE,
)


def may_be_secret(name: str, value: str) -> bool:
    """Whether the variable is named like a secret, or its value looks like one or contains one."""
    return any(fnmatchcase(name.upper(), pattern) for pattern in NAMES) or FORMS.search(value) is not None
