"""What Nebula adds to Starlette."""

from __future__ import annotations

import asyncio
import pathlib
import typing

import pytest
from nebula.backend import call_back, offload, open_file
from nebula.background import BackgroundTasks
from nebula.config import Config
from nebula.converters import CONVERTER_TYPES
from nebula.datastructures import URL, UploadFile
from nebula.responses import JSONResponse


def test_a_thread_calls_back_into_the_event_loop() -> None:
    async def double(x: int) -> int:
        return 2 * x

    assert asyncio.run(offload(lambda: call_back(double, 21))) == 42


def test_a_file_is_read_in_threads(tmp_path: pathlib.Path) -> None:
    async def read() -> typing.Any:
        async with await open_file(tmp_path / "a", "rb") as file:
            await file.seek(1)
            return await file.read(2)

    (tmp_path / "a").write_bytes(b"abcd")
    assert asyncio.run(read()) == b"bc"


def test_own_additions(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = BackgroundTasks()
    assert tasks and len(tasks) == 0
    monkeypatch.setenv("NEBULA_FLAG", "yes")
    assert Config()("NEBULA_FLAG", cast=bool) is True
    assert CONVERTER_TYPES["slug"].convert("a-b") == "a-b"
    assert URL("https://a.org:8000/x?y").origin == "https://a.org:8000"
    assert UploadFile(typing.cast(typing.BinaryIO, None), filename="a.tar.gz").suffix == ".gz"
    assert JSONResponse({"at": pathlib.PurePosixPath("/a")}).body == b'{"at":"/a"}'
