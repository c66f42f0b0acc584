"""The name `vllm` for `eagleray.compat.vllm`, in a directory that a program is given in PYTHONPATH."""

import sys

from eagleray.compat import vllm
from eagleray.compat.alias import install

install()
sys.modules[__name__] = vllm
