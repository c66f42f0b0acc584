"""Options that a restart may change."""

from __future__ import annotations

import msgspec
import pytest

from eagleray.config.build import build_config, field_owners
from eagleray.config.restart_options import (
    CHANGEABLE,
    REASONS,
    changed_options,
    requested_changes,
    with_changes,
)
from eagleray.config.sections import Config
from eagleray.errors import InvalidRequest


def test_restart_options_each_option_may_change_or_has_a_reason():
    assert set(CHANGEABLE) < set(field_owners())
    assert set(REASONS) == {section.name for section in msgspec.structs.fields(Config)}
    for name in field_owners().keys() - set(CHANGEABLE):
        with pytest.raises(InvalidRequest, match=f"option `{name}` cannot be changed") as error:
            requested_changes({name: None})
        assert error.value.param == name


def test_restart_options_values_have_the_types_of_the_options():
    given = {"max-num-seqs": "8k", "num_gpu_blocks_override": 10, "log_level": "debug", "kv_cache_memory": None}
    expected = {"max_num_seqs": 8000, "num_kv_blocks": 10, "log_level": "debug", "kv_cache_memory": None}
    assert requested_changes(given) == expected
    assert requested_changes(expected) == expected, "the supervisor checks them again"


def test_restart_options_revision_is_that_of_a_model():
    with pytest.raises(InvalidRequest, match="give `model` too"):
        requested_changes({"revision": "main"})


def test_restart_options_another_checkpoint_keeps_what_clients_know():
    start = build_config(model="first", revision="abc", max_num_seqs=3)
    config = with_changes(start, {"model": "second", "max_num_seqs": 4}, max_model_len=99)
    model = config.model
    assert (model.model, model.revision, model.max_model_len) == ("second", None, 99)
    assert (model.tokenizer, model.tokenizer_revision, model.served_model_name) == ("first", "abc", ["first"])
    assert changed_options(start, config) == {"model": "second", "revision": None, "max_num_seqs": 4}
    again = with_changes(config, {"model": "third", "revision": "def"}, max_model_len=99).model
    assert (again.model, again.revision, again.tokenizer) == ("third", "def", "first")
    back = with_changes(config, {"model": "first", "revision": "abc", "max_num_seqs": 3}, max_model_len=99)
    assert changed_options(start, back) == {}
