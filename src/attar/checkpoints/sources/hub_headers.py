"""The headers of a model on the Hub, by ranges of its files: enough to plan with, and no weights are downloaded.

A folder gets config.json, the settings of images, and weight files whose headers are real and whose data are holes,
which take no disk. A GGUF file gets as many first bytes as its header has, and so does the mmproj file beside it.
Requests are made by `huggingface_hub`: its endpoint (HF_ENDPOINT), tokens, client and offline mode (HF_HUB_OFFLINE).
Redirects of files to other hosts carry no token, as its client does.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from attar.checkpoints.folder import CONFIG, INDEX, json_object, refuse_vila
from attar.checkpoints.gguf import mmproj
from attar.checkpoints.gguf.parts import part_name, part_paths
from attar.checkpoints.safetensors import parse_header
from attar.checkpoints.sources import hub
from attar.checkpoints.sources.hub import HubName
from attar.checkpoints.strict_io import CheckpointError
from attar.images.settings import PREPROCESSOR, PROCESSOR

MOST_SAFETENSORS, MOST_GGUF = 2_000_000, 32_000_000  # bytes that are fetched, config and listing included
FIRST_GGUF = 1_000_000  # bytes of a GGUF file that are fetched first, and doubled until its header is whole
FIRST_PART = 64_000  # of the second part and later ones, which have no vocabulary
MOST_FILES = 512  # weight files of a model
TIMEOUT = 20.0  # seconds without a byte

_RANGE = re.compile(r"bytes \d+-\d+/(\d+)")


class _Remote:
    """Files of one repository at one commit, and the bytes that were fetched of them."""

    def __init__(self, name: HubName, most: int) -> None:
        from huggingface_hub import HfApi

        self.api, self.name, self.most, self.fetched = HfApi(), name, most, 0
        listing = self.api.model_info(name.repo, revision=name.revision, timeout=TIMEOUT)
        self.commit = listing.sha or name.revision or "main"
        self.files = [each.rfilename for each in listing.siblings or ()]
        self._count(sum(map(len, self.files)))

    def _count(self, more: int) -> None:
        self.fetched += more
        if self.fetched > self.most:
            message = f"{self.name}: its headers have more than {self.most:,} bytes: download it, and name its folder"
            raise CheckpointError("file_too_large", message)

    def read(self, file: str, begin: int, end: int) -> tuple[bytes, int]:
        """Return bytes from `begin` to `end` of a file, fewer at its end, and its size. Raises CheckpointError where
        the bytes of all reads are more than the limit, and for a server that sends no ranges."""
        from huggingface_hub import get_session, hf_hub_url, hf_raise_for_status
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # public, by its documentation

        self._count(end - begin)
        url = hf_hub_url(self.name.repo, file, revision=self.commit, endpoint=self.api.endpoint)
        headers = {**build_hf_headers(), "range": f"bytes={begin}-{end - 1}", "accept-encoding": "identity"}
        with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT) as response:
            hf_raise_for_status(response)
            total = _RANGE.fullmatch(response.headers.get("content-range", ""))
            if response.status_code != 206 or total is None:
                raise CheckpointError("download_failed", f"{self.name}: the server sends no part of {file}")
            text = bytearray()
            for piece in response.iter_bytes():
                text += piece
                if len(text) >= end - begin:
                    break
        return bytes(text[: end - begin]), int(total[1])


def fetch(name: HubName, folder: Path) -> Path:
    """Write the headers of a model into a folder that exists, and return what `opening.stored` reads: the folder, or
    the first bytes of a GGUF file.

    Raises CheckpointError: `file_not_found` for a name that the Hub does not know, and for no file or several that it
    may mean; `file_too_large` for headers past the limit; `download_failed` where the Hub cannot be reached, also
    because downloads are off.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        message = f"{name} is not in the local cache, and downloads are off (HF_HUB_OFFLINE): give a folder"
        raise CheckpointError("download_failed", message)
    try:
        return _fetch(name, folder)
    except CheckpointError:
        raise
    except Exception as error:  # the HTTP client differs between versions
        raise _named(name, error) from error


def _named(name: HubName, error: Exception) -> CheckpointError:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return CheckpointError("file_not_permitted", f"{name} is gated: accept its terms, then run `hf auth login`")
    if isinstance(error, errors.RepositoryNotFoundError | errors.RevisionNotFoundError | errors.EntryNotFoundError):
        near = hub.neighbours(Path(name.repo))
        return CheckpointError("file_not_found", f"no model {name} on the Hub, nor as a folder here{near}")
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return CheckpointError("download_failed", f"the Hub cannot be asked about {name}: {reason[0][:200]}")


def _fetch(name: HubName, folder: Path) -> Path:
    remote = _Remote(name, MOST_GGUF if name.file is not None else MOST_SAFETENSORS)
    if name.file is not None:
        return _gguf(remote, name.file, folder)
    weights = [each for each in remote.files if each.endswith(".safetensors") and "/" not in each]
    weights = [each for each in weights if not each.startswith("consolidated")]
    if not weights:
        if CONFIG in remote.files:
            refuse_vila(Path(str(name)), json_object(_whole(remote, CONFIG), Path(CONFIG), lenient=True))
        ggufs = [each for each in remote.files if each.lower().endswith(".gguf")]
        ggufs = [each for each in ggufs if not Path(each).name.startswith(mmproj.PREFIX)]
        ggufs = [each for each in ggufs if (part := part_name(Path(each))) is None or part.number == 1]
        if len(ggufs) != 1:
            offered = f": name one of its GGUF files, as {name.repo}/{sorted(ggufs)[0]}" if ggufs else ""
            raise CheckpointError("checkpoint_incomplete", f"{name} has no safetensors weights on the Hub{offered}")
        remote.most = MOST_GGUF
        return _gguf(remote, ggufs[0], folder)
    if len(weights) > MOST_FILES:
        raise CheckpointError("checkpoint_too_large", f"{name} has {len(weights)} weight files; {MOST_FILES} are read")
    if CONFIG not in remote.files:
        raise CheckpointError("checkpoint_incomplete", f"{name} has no {CONFIG} on the Hub")
    (folder / CONFIG).write_bytes(_whole(remote, CONFIG))
    for file in (PREPROCESSOR, PROCESSOR):
        if file in remote.files:
            (folder / file).write_bytes(_whole(remote, file))
    _safetensors(remote, weights, folder)
    return folder


def _whole(remote: _Remote, file: str) -> bytes:
    _, size = remote.read(file, 0, 1)
    return remote.read(file, 0, size)[0]


def _safetensors(remote: _Remote, files: list[str], folder: Path) -> None:
    """Write weight files of real headers and holes, and the index of several."""
    places: dict[str, str] = {}
    for file in sorted(files):
        first, size = remote.read(file, 0, 8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length > min(size, remote.most):
            raise CheckpointError("checkpoint_malformed", f"{remote.name}: {file} has no header of safetensors")
        header, _ = remote.read(file, 8, 8 + length)
        with (folder / file).open("wb") as out:
            out.write(first + header)
            out.truncate(size)
        tensors, _ = parse_header(header, size - 8 - len(header), f"{remote.name}: {file}")
        places |= dict.fromkeys(tensors, file)
    if len(files) > 1:
        (folder / INDEX).write_text(json.dumps({"weight_map": places}))


def _gguf(remote: _Remote, file: str, folder: Path) -> Path:
    """Write first bytes of a GGUF file and its other parts, as many as their headers have, and those of its mmproj
    file."""
    parts, tower = [each.as_posix() for each in part_paths(Path(file))], mmproj.path_of(Path(file)).as_posix()
    for each in parts:
        if each not in remote.files:
            raise CheckpointError("file_not_found", f"{remote.name} has no file {each} on the Hub")
    if tower in remote.files:
        _gguf_header(remote, tower, folder)
    found = _gguf_header(remote, file, folder)
    for each in parts[1:]:
        _gguf_header(remote, each, folder, FIRST_PART)
    return found


def _gguf_header(remote: _Remote, file: str, folder: Path, first: int | None = None) -> Path:
    from attar.checkpoints.gguf.file import GgufPart

    path, at, wanted = folder / Path(file).name, 0, first or FIRST_GGUF
    size = wanted
    while True:
        text, size = remote.read(file, at, min(wanted, size))
        with path.open("ab") as out:
            out.write(text)
        at += len(text)
        try:
            GgufPart(path, whole=False).close()
        except CheckpointError as error:
            if error.code != "checkpoint_incomplete" or at >= size or not text:
                raise
            wanted = min(2 * at, remote.most - remote.fetched + at)
            if wanted <= at:
                remote.read(file, at, at + remote.most)  # raises: past the limit
            continue
        return path
