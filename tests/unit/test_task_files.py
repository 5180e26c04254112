"""Task files: every bad line is named with its number, field and mend; good ones are read as they are."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from agentrl_runtime.commands.tasks import app
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.rollout import task_files
from agentrl_runtime.rollout.task_files import validate_task_file
from agentrl_runtime.rollout.task_lines import LineProblem, ParsedLine, parse_line

# Fifteen lines with a byte-order mark and CRLF: five good, one blank, nine bad.
MIXED = (
    b"\xef\xbb\xbf"
    + b"\r\n".join(
        [
            b'{"id":"ok-1","query":"What is 2+2?","answer":"4"}',
            b"{this is not valid json}",
            b'{"id":"ok-2","query":"Capital of France?","answer":"Paris"}',
            b'{"messages":[{"role":"assistant","content":"only an answer"}]}',
            b"",
            b'{"id":"ok-1","query":"same id as line 1","answer":"5"}',
            b'{"id":"no-answer","query":"Is there an answer?"}',
            b'{"id":"no-query","answer":"42"}',
            b'{"id":"nan","query":"a number","answer":NaN}',
            b'{"id":"surrogate","query":"bad \\ud800 text","answer":"x"}',
            b'{"id":"latin1","query":"caf\xe9","answer":"x"}',
            '{"id":"ok-3","query":"你好世界","answer":"助手"}'.encode(),
            b'["a","list"]',
            b'{"id":"ok-4","query":"images","scorer":"exact","images":["https://example.invalid/a.png","data:image/png;base64,iVBORw0KGgo="]}',
            b'{"id":"type","query":{"nested":true},"answer":"x"}',
        ]
    )
    + b"\r\n"
)


def anything_known(_: str) -> str | None:
    return None


def parse(line: str | bytes) -> ParsedLine | LineProblem | None:
    return parse_line(line.encode() if isinstance(line, str) else line, 7, anything_known)


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(MIXED)
    return path


def test_mixed_file_has_five_good_lines_and_nine_named_problems(mixed: Path) -> None:
    report = validate_task_file(mixed)
    assert (report.lines, report.blank, report.tasks) == (15, 1, 5)
    assert [(problem.line, problem.field) for problem in report.problems] == [
        (2, ""),
        (4, "query"),
        (6, "id"),
        (8, "query"),
        (9, "answer"),
        (10, "query"),
        (11, ""),
        (13, ""),
        (15, "query"),
    ]
    assert all(problem.what and problem.mend for problem in report.problems)


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ('{"query": "   "}', "query"),
        ('{"query": 3}', "query"),
        ('{"query": "a", "answer": 4}', "answer"),
        ('{"query": "a", "answer": 1e999}', "answer"),
        ('{"query": "a", "deep": {"x": [1, Infinity]}}', "deep.x"),
        ('{"query": "a", "n": 9223372036854775808}', "n"),
        ('{"query": "a", "query": "b"}', "query"),
        ('{"query": "a", "scorer": 1}', "scorer"),
        ('{"query": "a", "demonstration": ["x"]}', "demonstration"),
        ('{"query": "a", "images": "https://a/b.png"}', "images"),
        ('{"query": "a", "images": ["ftp://a/b.png"]}', "images[0]"),
        ('{"query": "a", "images": ["https:///b.png"]}', "images[0]"),
        ('{"query": "a", "images": ["https://[::1/b.png"]}', "images[0]"),
        ('{"query": "a", "images": ["https://a/b.png", "data:image/png;base64,%%%"]}', "images[1]"),
        ('{"query": "a", "images": ["data:text/html;base64,aGk="]}', "images[0]"),
        ('{"query": "a", "images": [null]}', "images[0]"),
        ('{"messages": {"role": "user"}}', "messages"),
        ('{"messages": ["hi"]}', "messages[0]"),
        ('{"messages": [{"role": "wizard", "content": "x"}]}', "messages[0].role"),
        ('{"messages": [{"role": "user", "content": 1}]}', "messages[0].content"),
        ('{"query": "a", "id": ""}', "id"),
        ('{"query": "a", "id": true}', "id"),
        ('{"query": "a", "extra": []}', "extra"),
        ('{"query": "a", "level": 1, "extra": {"level": 2}}', "level"),
        ('{"query": "a", "x": {"": 1}}', "x"),
        ('{"query": "a\\u0000b", "a\\u0000b": 1}', "'a\\x00b'"),
        ("null", ""),
        ('{"query": "a"} {"query": "b"}', ""),
        ("9" * 5000, ""),
        ('{"query": "a", "x": ' + "[" * 90 + "]" * 90 + "}", "x"),
        ("[" * 100_000, ""),
    ],
)
def test_a_bad_line_names_its_field(line: str, field: str) -> None:
    problem = parse(line)
    assert isinstance(problem, LineProblem), problem
    assert (problem.line, problem.field) == (7, field)
    assert problem.what and problem.mend


def test_unknown_fields_are_kept() -> None:
    parsed = parse('{"query": "a", "level": 3, "extra": {"tags": ["x"]}, "id": 17}')
    assert isinstance(parsed, ParsedLine)
    assert parsed.extra == {"level": 3, "tags": ["x"]} and parsed.key == "17"


def test_messages_alone_are_a_task() -> None:
    parsed = parse(
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text"}]}]}'
    )
    assert isinstance(parsed, ParsedLine) and parsed.messages is not None and len(parsed.messages) == 2


def test_unknown_scorer_names_the_known_ones() -> None:
    problem = parse_line(b'{"query": "a", "scorer": "guess"}', 1, lambda name: "exact, regex")
    assert isinstance(problem, LineProblem) and problem.field == "scorer" and "exact, regex" in problem.mend


def test_tasks_without_id_are_told_apart_by_content(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text('{"query": "a"}\n{"query": "b"}\n{"query": "a"}\n')
    report = validate_task_file(path)
    assert report.tasks == 2 and [problem.line for problem in report.problems] == [3]
    assert "line 1" in report.problems[0].what


def test_a_line_too_long_is_named_and_the_next_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_files, "MAX_LINE_BYTES", 100)
    path = tmp_path / "f.jsonl"
    path.write_text('{"query": "%s"}\n{"query": "b"}' % ("a" * 950))
    report = validate_task_file(path)
    assert (report.lines, report.tasks, [problem.line for problem in report.problems]) == (2, 1, [1])


def test_missing_file_and_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(AgentRLError, match=path.name):
            validate_task_file(path)


@given(st.binary(max_size=200))
def test_no_bytes_break_the_parser(raw: bytes) -> None:
    assert parse(raw) is None or isinstance(parse(raw), ParsedLine | LineProblem)


@given(
    st.dictionaries(st.text(max_size=8), st.recursive(st.none() | st.text() | st.integers() | st.floats(), st.lists))
)
def test_what_is_accepted_can_be_stored(extra: dict[str, object]) -> None:
    import bson

    parsed = parse(json.dumps({**extra, "query": "a", "extra": None}))
    if isinstance(parsed, ParsedLine):
        assert bson.decode(bson.encode(parsed.model_dump()))["query"] == "a"


def test_validate_command_exits_1_and_prints_json(mixed: Path) -> None:
    result = CliRunner().invoke(app, ["validate", str(mixed), "--json"])
    assert result.exit_code == 1
    values = json.loads(result.stdout)
    assert values["tasks"] == 5 and len(values["problems"]) == 9


def test_validate_command_exits_0_on_a_good_file(tmp_path: Path) -> None:
    path = tmp_path / "good.jsonl"
    path.write_text('{"query": "a"}\n')
    result = CliRunner().invoke(app, ["validate", str(path)])
    assert result.exit_code == 0 and "1 good, 0 bad" in result.stdout
