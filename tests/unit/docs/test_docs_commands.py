"""Every code block of a document: commands, requests, programs and data would be accepted as they are written."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from command_checks import Checker, CommandWrong
from docs_site.http_page import open_service
from documented_commands import RUN, Block, Command, blocks, commands, shell_text
from named_things import INDENTED
from python_checks import wrong_names
from test_docs_name_things_that_exist import DOCUMENTS, ROOT

SHELLS = ("sh", "console")
OTHERS = ("text", "hex")
"""Languages of blocks that are not checked here."""
CONVENTION = 'a block needs a language: see "Code blocks of documents" in docs/testing.md'
READERS = {"json": json.loads, "yaml": lambda text: list(yaml.safe_load_all(text)), "toml": tomllib.loads}
FOUND = [block for document in DOCUMENTS for block in blocks(document, Path(ROOT, document).read_text("utf-8"))]


def of(*languages: str) -> list[Block]:
    return [block for block in FOUND if block.language in languages]


@pytest.fixture(scope="module")
def checker():
    with open_service(enable_sglang_api=True) as (service, config):
        yield Checker(service, config)


@pytest.mark.parametrize("block", of(*SHELLS), ids=str)
def test_commands_would_be_accepted(block, checker):
    for command in commands(shell_text(block)):
        checker.check(command)


@pytest.mark.parametrize("block", of("python"), ids=str)
def test_programs_name_things_that_exist(block):
    assert list(wrong_names(block.text)) == []


@pytest.mark.parametrize("block", of(*READERS), ids=str)
def test_data_can_be_read(block):
    READERS[block.language](block.text)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_document_blocks_have_a_language(document):
    found = [block for block in FOUND if block.document == document]
    known = {*SHELLS, *READERS, *OTHERS, "python"}
    wrong = [str(block) for block in found if block.language not in known or not set(block.marks) <= {RUN}]
    assert wrong == [], CONVENTION
    rest = re.sub(r"^ *(`{3,}).*?^ *\1 *$", "", Path(ROOT, document).read_text("utf-8"), flags=re.M | re.S)
    assert INDENTED.findall(rest) == [], CONVENTION


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("eagleray serv", "did you mean serve?"),
        ("eagleray serve --max-num-sequences 3", "there is no option"),
        ("eagleray serve --max-num-seqs none", "max_num_seqs"),
        ("eagleray serve --data-parallel-size 0", "data_parallel_size"),
        ("make nothing", "no make target nothing"),
        ('make serve ARGS="--nothing"', "there is no option --nothing"),
        ("python scripts/nothing.py", "no such script"),
        ("pip install 'eagleray[nothing]'", "no extra nothing"),
        ("curl localhost:8000/v1/nothing", "no route GET /v1/nothing"),
        ("curl localhost:8000/v1/completions", "no route GET /v1/completions"),
        ("""curl localhost:8000/v1/completions -d '{"prompt": "a", "max_tokens": "many"}'""", "max_tokens"),
        ("""curl localhost:8000/v1/completions -d '{"prompt": "a", "nothing": 1}'""", "without an effect"),
        ("curl -X POST 'localhost:8000/pause?nothing=keep'", "no parameters"),
        ("curl --nothing localhost:8000/live", "curl --nothing"),
        ("docker run -p 8000:8000 eagleray serve --nothing", "there is no option --nothing"),
        ("kubectl apply -f deploy/nothing.yaml", "no file deploy/nothing.yaml"),
        ("nothing", "no program that documents use"),
    ],
)
def test_check_refuses_commands_that_would_fail(text, reason, checker):
    (command,) = commands(text)
    with pytest.raises(CommandWrong, match=re.escape(reason)):
        checker.check(command)


@pytest.mark.parametrize(
    "text",
    [
        ".venv/bin/eagleray serve MODEL -tp 2 --enforce-eager",
        "EAGLERAY_PORT=9000 eagleray serve",
        """curl -sN http://127.0.0.1:8000/v1/completions -d '{"prompt": "a", "stream": true}'""",
        "curl -X POST 'localhost:8000/pause?mode=keep'",
        "curl https://example.org/nothing",
    ],
)
def test_check_accepts_commands_that_work(text, checker):
    (command,) = commands(text)
    checker.check(command)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("from eagleray import LLM, Nothing", ["eagleray.Nothing"]),
        ("llm = LLM('a', max_model_len=8, nothing=1)", ["LLM(nothing=)"]),
        ("SamplingParams(nothing=1)", ["SamplingParams(nothing=)"]),
        ("llm.generate(); llm.nothing()", ["llm.nothing"]),
        ("await llm.check_health()", []),
    ],
)
def test_wrong_names_are_those_that_do_not_exist(text, names):
    assert list(wrong_names(text)) == names


def test_blocks_have_languages_marks_and_lines():
    text = "a\n```sh run\nmake\n```\n- b\n  ````text\n  ```\n  ````\n"
    assert list(blocks("a.md", text)) == [
        Block("a.md", 2, "sh", ("run",), "make\n"),
        Block("a.md", 6, "text", (), "```\n"),
    ]


def test_shell_text_of_a_transcript_is_what_was_typed():
    block = Block("a.md", 1, "console", (), "$ make \\\n  lint\nmake: nothing to do\n$ make test\n")
    assert shell_text(block) == "make \\\n  lint\nmake test\n"


def test_commands_split_lines_and_leave_out_the_rest():
    text = (
        "A=1 make a && make b 2>/dev/null | cat  # comment\n"
        "curl -d '{\n\"a\": 1}' \\\n  b &\n"
        "cat > file <<'EOF'\nmake nothing\nEOF\nexport C=d\n"
    )
    assert list(commands(text)) == [
        Command(("make", "a")),
        Command(("make", "b")),
        Command(("cat",)),
        Command(("curl", "-d", '{\n"a": 1}', "b")),
        Command(("cat",)),
        Command(("export", "C=d")),
    ]
    with pytest.raises(ValueError, match="does not end"):
        list(commands("echo 'a"))
