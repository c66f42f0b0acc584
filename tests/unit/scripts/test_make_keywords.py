"""The type of the keyword arguments of `LLM` has every option."""

from __future__ import annotations

from make_keywords import PATH, source

from eagleray.config.keywords import EngineKeywords, LLMKeywords
from eagleray.engine_args import SECTIONS, EngineArgs


def test_keywords_file_is_up_to_date():
    assert PATH.read_text() == source(), "run `make keywords`"


def test_keywords_are_options_that_engine_args_take():
    assert "max_num_seqs" in EngineKeywords.__annotations__ and "port" not in EngineKeywords.__annotations__
    assert "enforce_eager" in LLMKeywords.__annotations__ and "serving" not in SECTIONS
    EngineArgs(**dict.fromkeys(LLMKeywords.__annotations__))
