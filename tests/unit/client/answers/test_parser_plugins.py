"""Formats of tool calls and of reasoning from files of the user."""

from __future__ import annotations

from pathlib import Path

import pytest
from answer_checks import answer_of, split_whole

from eagleray.client.answers import reasoning_formats, tool_formats
from eagleray.client.answers.choose import choose_formats
from eagleray.client.answers.plugins import load_plugin
from eagleray.client.answers.tools import Tool, ToolChoice
from eagleray.config.sections import ModelConfig
from eagleray.errors import ConfigError

DOCUMENT = Path(__file__).parents[4] / "docs" / "tools.md"
PLUGIN = DOCUMENT.read_text().partition("}@end`:\n\n```python\n")[2].partition("```")[0]
"""The plugin of the documentation."""


@pytest.fixture(autouse=True)
def own_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats that a test registers are forgotten after it."""
    for module in (tool_formats, reasoning_formats):
        monkeypatch.setattr(module, "_FORMATS", dict(module._FORMATS))


def write(directory: Path, text: str, name: str = "plugin.py") -> str:
    path = directory / name
    path.write_text(text)
    return str(path)


def test_plugin_format_of_user_is_found_and_splits(tmp_path: Path) -> None:
    path = write(tmp_path, PLUGIN)
    found = choose_formats(ModelConfig(tool_parser_plugin=path, tool_call_parser="at"), "").tools
    assert found is not None
    template = "Call with @call NAME ARGUMENTS@end."
    assert choose_formats(ModelConfig(tool_parser_plugin=path), template).tools is found
    with_markers_of_hermes = template + "<tool_call></tool_call>"
    assert choose_formats(ModelConfig(tool_parser_plugin=path), with_markers_of_hermes).tools is found
    assert answer_of(split_whole(found, 'Hi @call f {"a": 1}@end @call g {}@end')) == (
        "Hi",
        [("f", '{"a": 1}'), ("g", "{}")],
    )
    assert answer_of(split_whole(found, "Write @call f")) == ("Write @call f", [])
    assert found.constraint([Tool(name="f")], ToolChoice("required")) is not None


def test_plugin_format_without_constraints_is_refused_with_a_strict_level(tmp_path: Path) -> None:
    free = PLUGIN.replace("def constraint(", "def unused(").replace('"at"', '"free"')
    for text, name in ((PLUGIN, "at"), (free, "free")):
        path = write(tmp_path, text, f"{name}.py")
        assert choose_formats(ModelConfig(tool_parser_plugin=path, tool_call_parser=name), "").tools is not None
    assert choose_formats(ModelConfig(tool_call_parser="at", tool_strict_level="function"), "").tools is not None
    with pytest.raises(ConfigError, match=r"`tool_strict_level`: function .* the format free .* has no constraints"):
        choose_formats(ModelConfig(tool_call_parser="free", tool_strict_level="function"), "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\nimport not_there", r"plugin.py, line 2 raised ModuleNotFoundError: No module named 'not_there'"),
        ("def f(:", r"raised SyntaxError"),
        ("x = 1", r"plugin.py registers no format: it has to call `register_tool_format`"),
        (
            PLUGIN.replace("At())", "At)"),
            r"line 36 raised .*instance of a subclass of ToolFormat",
        ),
        (PLUGIN.replace('name = "at"', "name = 5"), r"At needs a `name`"),
        (PLUGIN.replace('("@call ", "@end")', '"@call"'), r"At needs a `name`.* and `markers`"),
    ],
)
def test_plugin_broken_file_is_refused_with_reason(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_plugin("tool_parser_plugin", write(tmp_path, text))


def test_plugin_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a Python file \(.py\), but got .*plugin.txt"):
        load_plugin("tool_parser_plugin", write(tmp_path, PLUGIN, "plugin.txt"))


def test_plugin_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file .*nothing.py"):
        load_plugin("tool_parser_plugin", str(tmp_path / "nothing.py"))


REASONING_PLUGIN = """
from eagleray.client.answers.marked_reasoning import MarkedReasoning
from eagleray.client.answers.reasoning_formats import register_reasoning_format

FORMAT = MarkedReasoning(name="muse", start="<muse>", end="</muse>", template_markers=("<muse>",))
register_reasoning_format(FORMAT)
"""


def test_plugin_format_of_reasoning_is_found_before_others(tmp_path: Path) -> None:
    path = write(tmp_path, REASONING_PLUGIN)
    found = choose_formats(ModelConfig(reasoning_parser_plugin=path, reasoning_parser="muse"), "").reasoning
    assert found is not None
    assert found.begins_reasoning("<muse>")
    assert choose_formats(ModelConfig(reasoning_parser_plugin=path), "<muse><think></think>").reasoning is found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "registers no format: it has to call `register_reasoning_format`"),
        (REASONING_PLUGIN.replace("(FORMAT)", "([FORMAT])"), "expected a MarkedReasoning or another ReasoningFormat"),
    ],
)
def test_plugin_of_reasoning_without_a_format_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"option `reasoning_parser_plugin`: .*" + message):
        load_plugin("reasoning_parser_plugin", write(tmp_path, text))
