"""The history table is a person's file: its faults have lines, and writing it keeps what was written by hand."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forksync.config import ConfigError
from forksync.divergence import Edit, Hunk
from forksync.history import Entry, History, load, parse, signature, write

HEAD = '[[entry]]\nid = "a"\nreason = "why"\nauthor = "Ann"\ndate = 2026-01-02\n'


def entry(identity: str, *hunks: Hunk) -> Entry:
    signed = tuple(map(signature, hunks))
    return Entry(id=identity, reason="why", author="Ann", date="2026-01-02", hunks=signed)  # type: ignore[arg-type]


def read(text: str) -> History:
    return parse(tomllib.loads(text), text, "history.toml")


LINE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n"), max_size=12)


@given(removed=st.lists(LINE, max_size=3), added=st.lists(LINE, max_size=3), reason=LINE.filter(str.strip))
def test_what_is_written_is_read_back(removed: list[str], added: list[str], reason: str) -> None:
    one = entry("a", Hunk("src/a.py", Edit("lines", tuple(removed), tuple(added), 0)))
    history = History(entry=(one.model_copy(update={"reason": reason}),))
    text = write(history, "")
    assert read(text) == history
    assert write(read(text), text) == text


def test_writing_keeps_comments_and_hand_written_text() -> None:
    hunk = Hunk("a.py", Edit("lines", ("x",), ("y",)))
    text = write(History(entry=(entry("a", hunk), entry("b", hunk))), "")
    text = text.replace('[[entry]]\nid = "b"', '# Ask Bob about this one.\n[[entry]]\nid = "b"')
    text = text.replace('reason = "why"', 'reason = """why,\nat length"""  # and why not', 1)
    history = read(text)
    moved = history.put(history.entry[1].model_copy(update={"hunks": (signature(Hunk("new.py", hunk.edit)),)}))
    after = write(moved, text)
    assert "# Ask Bob about this one.\n[[entry]]" in after
    assert '"""why,\nat length"""  # and why not' in after
    assert read(after).entry[1].hunks[0].path == "new.py"
    assert after.replace("new.py", "a.py") == text


@pytest.mark.parametrize(
    ("text", "line", "fault"),
    [
        (HEAD.replace('reason = "why"\n', ""), 1, "reason is missing"),
        (HEAD.replace('"why"', '"  "'), 3, "it must say something"),
        (HEAD.replace("author", "autor"), 4, "autor is not an option; did you mean author?"),
        (HEAD.replace("2026-01-02", '"soon"'), 5, "date"),
        (HEAD, 2, "signs nothing"),
        (HEAD + 'paths = ["x"]\n' + HEAD + 'paths = ["y"]\n', 8, "another entry's too"),
        (HEAD + '[[entry.hunk]]\npath = "a"\nfingerprint = "0"\ndiff = "+x"\n', 2, "edited by hand"),
        (HEAD + 'conflict = "theirs"\npaths = ["x"]\n', 6, "conflict"),
    ],
)
def test_each_fault_is_one_message_with_its_line(tmp_path: Path, text: str, line: int, fault: str) -> None:
    (tmp_path / "history.toml").write_text(text)
    with pytest.raises(ConfigError) as raised:
        load(tmp_path / "history.toml")
    assert f"history.toml:{line}: " in str(raised.value)
    assert fault in str(raised.value)


def test_no_file_is_an_empty_history(tmp_path: Path) -> None:
    assert load(tmp_path / "history.toml") == History()
