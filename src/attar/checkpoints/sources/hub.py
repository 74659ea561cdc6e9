"""Resolver of a user's model name to a folder or GGUF file on this machine: a path, a name on the Hub, or `demo`.

A folder that exists always wins over a Hub id of the same spelling; `demo` always means the embedded model (a folder of
that name is `./demo`), so that results do not depend on the current directory. Downloads use `huggingface_hub`: its
cache, progress bars, tokens, mirrors (HF_ENDPOINT) and offline mode (HF_HUB_OFFLINE). Only data is requested:
safetensors, JSON, templates and tokenizer files, or a GGUF file with its mmproj file; never pickles or code. Neither
torch nor huggingface_hub is imported before it is needed.
"""

from __future__ import annotations

import glob
import importlib.resources
import logging
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from attar.checkpoints.strict_io import CONVERT, CheckpointError, naming, near
from attar.model.vision.wrappers import VILA_PARTS, is_vila, vila_part
from attar.protocol.speculation import DRAFTERS, MATCH_FIRST
from attar.strict_json import shown

DEMO = "demo"
ALLOW = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.model.v*", "*.tiktoken", "LICENSE*", "NOTICE*"]
# Subfolders hold other formats and training states of the same model, except for chat templates; some repositories keep
# a second copy of all weights as consolidated*.safetensors.
IGNORE = ["*/*.safetensors", "*/*.json", "*/*.txt", "*/*.model", "*/*.model.v*", "*/*.tiktoken", "consolidated*"]
SHOWN = 3  # names of a listing that a message repeats

_NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*?)(?:/(?P<file>[\w./-]+\.gguf))?(?:@(?P<revision>[\w./-]+))?",
    re.IGNORECASE | re.ASCII,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HubName:
    """A model's name on the Hub: org/name[@revision], or org/name/FILE.gguf[@revision]."""

    repo: str
    file: str | None = None
    revision: str | None = None

    @staticmethod
    def parse(name: str) -> HubName | None:
        """Return the parts of a name; None for anything else, as a path is."""
        match = _NAME.fullmatch(name)
        if match is None or len(name) > 500 or ".." in name:
            return None
        if match["file"] is not None and not {"", "."}.isdisjoint(match["file"].split("/")):
            return None
        return HubName(match["repo"], match["file"], match["revision"])

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def resolve(
    model: str | os.PathLike[str],
    *,
    revision: str | None = None,
    offline: bool | None = None,
    vila: bool = False,
    alone: bool = False,
) -> Path:
    """Return the folder of a model given as a local folder, `org/name[@revision]` on the Hub, or `demo`; of a GGUF
    file, which is `org/name/FILE.gguf[@revision]` on the Hub, the file.

    `offline` True looks in the cache alone; None leaves it to HF_HUB_OFFLINE. The three folders of VILA's layout are
    downloaded with `vila` alone, for nothing but its conversion reads them. With `alone` a GGUF file is enough where
    its mmproj file is not cached, and nothing is downloaded for it. Raises CheckpointError with one sentence
    that names the remedy.
    """
    name = os.fspath(model)
    if (path := local(name)) is not None:
        return path
    remote = HubName.parse(name)
    assert remote is not None
    if remote.revision and revision:
        raise CheckpointError("option_conflict", f"{name!r} already names a revision: leave out {revision!r}")
    hint = neighbours(Path(name).expanduser())
    revision = remote.revision or revision
    remote, offline = replace(remote, revision=revision), _is_off(offline)
    if remote.file is not None:
        return _download_file(remote, remote.file, offline, hint, alone)
    folder = _download(remote, offline, hint, ALLOW, IGNORE)
    whole = any(folder.glob("*.safetensors"))
    parts = _vila_parts(folder) if vila or not whole else []
    if vila and parts:
        wanted = [f"{part}/{each}" for part in parts for each in ALLOW]
        ignored = [f"{part}/*/*" for part in parts]
        return _download(replace(remote, revision=folder.name), offline, hint, wanted, ignored)
    if not whole and not parts:
        if _listed(remote.repo, folder.name, offline) is None:
            raise _not_cached(remote, "", offline, hint)
        raise CheckpointError(
            "checkpoint_incomplete",
            f"{name} has no safetensors weights on the Hub; name a GGUF file as {remote.repo}/FILE.gguf; if it has "
            f"pickles (.bin): {CONVERT}",
        )
    return folder


def local(model: str) -> Path | None:
    """Return the folder or GGUF file that a name means on this machine; None for a Hub id, which `resolve` downloads.
    Raises CheckpointError where it is neither."""
    if model == DEMO:
        return embedded()
    if not model:  # an unset variable of a shell, which Path would take for the current folder
        raise CheckpointError(
            "option_missing", "the model's name is empty: give a folder, a Hub id (org/name) or `demo`"
        )
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_file() and path.suffix.lower() == ".gguf":
        return _linked(path)
    if path.exists():
        raise CheckpointError(
            "file_wrong_kind", f"{model} is a file; give the folder that holds the model, or a .gguf file"
        )
    remote = HubName.parse(model)
    if path.suffix.lower() == ".gguf" and (remote is None or path.parent.is_dir()):
        raise CheckpointError("file_not_found", f"{model}: no such file{neighbours(path, files=True)}")
    if remote is None:
        kind = "and it is not a Hub id (org/name)" if "/" not in model else "at that path"
        raise CheckpointError("file_not_found", f"no model folder {model!r} {kind}{neighbours(path)}")
    return None


def _linked(path: Path) -> Path:
    """Return the file of the same name that a link to a GGUF file names, for receipt and mmproj file lie beside it;
    else the path itself. Files of the Hub's cache are links to files of other names."""
    target = path.resolve()
    return target if path.is_symlink() and target.name == path.name else path


def resolve_draft(draft: str | None) -> str | None:
    """Return a source of drafts: a drafter's name itself, or the path of a draft model named like those of `resolve`,
    behind `suffix,` where that is given; None where there is none. Raises CheckpointError that names the drafters."""
    if draft is None or draft in DRAFTERS:
        return draft
    name = draft.removeprefix(MATCH_FIRST)
    try:
        return draft.removesuffix(name) + str(resolve(name))
    except CheckpointError as error:
        also = ", ".join((*DRAFTERS, f"{MATCH_FIRST}MODEL"))
        raise CheckpointError(error.code, f"{error}; --draft also takes {also}") from error


def embedded() -> Path:
    """Return the folder of the model inside the package. Raises CheckpointError where this build has none."""
    folder = Path(str(importlib.resources.files("attar").joinpath("data", DEMO)))
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            "package_missing",
            "this build of attar carries no demo model; install a released wheel, or name a folder or a Hub id",
        )
    return folder


def neighbours(path: Path, files: bool = False) -> str:
    """Return folders (or GGUF files) next to `path` with names like its own, as the end of a sentence."""
    try:
        names = [
            entry.name
            for entry in path.parent.iterdir()
            if (entry.suffix.lower() == ".gguf" and entry.is_file() if files else entry.is_dir())
        ]
    except OSError:
        return ""
    return near(path.name, names)


def _vila_parts(folder: Path) -> list[str]:
    """Return patterns of VILA's folders that a downloaded config.json speaks of; [] for another model. Raises
    CheckpointError for a name that leads out of the folder."""
    from attar.checkpoints.folder import CONFIG, read_config

    config = read_config(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    if not is_vila(config):
        return []
    with naming(folder / CONFIG):
        return [glob.escape(vila_part(config, key)) for key in VILA_PARTS]


def lacks_tower(remote: HubName, found: Path) -> bool | None:
    """Return whether the Hub has an mmproj file of a GGUF model that the local cache has without it, at `found`; None
    where the Hub cannot be asked. False for a folder."""
    from attar.checkpoints.gguf.mmproj import path_of

    if remote.file is None or path_of(found).is_file():
        return False
    commit = found.parents[remote.file.count("/")].name
    listed = _listed(remote.repo, commit, _is_off(None))
    return None if listed is None else path_of(Path(remote.file)).as_posix() in listed


def _is_off(offline: bool | None) -> bool:
    """Return whether downloads are off, by the argument of `resolve` or by HF_HUB_OFFLINE."""
    from huggingface_hub import constants  # a module that the package itself does not import

    return bool(offline or constants.HF_HUB_OFFLINE)


def _download_file(remote: HubName, file: str, offline: bool, hint: str, alone: bool) -> Path:
    """Return the path of a GGUF file, with its other parts, mmproj file and receipt beside it, where it has these."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    from attar.checkpoints.gguf.mmproj import PREFIX, path_of
    from attar.checkpoints.gguf.parts import part_paths
    from attar.checkpoints.receipts.place import of_file as receipt_of_file

    parts, tower = [each.as_posix() for each in part_paths(Path(file))], path_of(Path(file)).as_posix()
    beside = receipt_of_file(Path(file)).as_posix()
    wanted, repo = parts if alone else [*parts, tower, beside], remote.repo
    try:
        folder = _download(remote, offline, hint, wanted, [])
    except CheckpointError as error:
        if alone or not isinstance(error.__cause__, LocalEntryNotFoundError):
            raise
        with_tower = _cached(remote, [*parts, tower])  # the receipt is for `attar verify` alone
        if with_tower is None and _cached(remote, parts) is not None:
            raise _not_cached(remote, tower, offline, hint) from error
        if with_tower is None:
            raise
        folder = with_tower
    for each in parts:
        if not (folder / each).is_file():
            listed = _listed(repo, folder.name, offline)
            if listed is None or each in listed:
                raise _not_cached(remote, each, offline, hint)
            raise CheckpointError("file_not_found", f"{repo} has no file {each} on the Hub")
    if not alone and not (folder / tower).is_file():
        listed = _listed(repo, folder.name, offline) or []
        others = [shown(each, 100) for each in sorted(listed) if Path(each).name.startswith(PREFIX)]
        if others:
            more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
            logger.warning(
                "%s is used without images: of %s it has %s, and none is %s. To choose one, download it and %s to one "
                "folder, and name it %s", file, repo, ", ".join(others[:SHOWN]) + more, tower, file, Path(tower).name,
            )  # fmt: skip
    return folder / file


def _cached(remote: HubName, wanted: list[str]) -> Path | None:
    """Return the folder of those files of a repository that are wanted, None where the local cache lacks one."""
    try:
        return _download(remote, True, "", wanted, [])
    except CheckpointError:
        return None


def _listed(repo: str, revision: str, offline: bool) -> list[str] | None:
    """Return the names of a repository's files; None where the Hub cannot be asked, also because downloads are off."""
    import huggingface_hub

    if offline:
        return None
    try:
        return huggingface_hub.HfApi().list_repo_files(repo, revision=revision)
    except Exception:  # any error of a client that differs between versions: what is in the cache needs no listing
        return None


def _not_cached(remote: HubName, file: str, offline: bool, hint: str) -> CheckpointError:
    """Return the error for a model of the Hub, or a `file` of one, that neither the cache nor a download gives."""
    what = f"{file} of {remote} is not" if file else f"{remote} is not whole"
    if not offline:
        said = f"the Hub cannot be reached and {what} in the local cache; check the network, or give a folder{hint}"
        return CheckpointError("download_failed", said)
    options = f" {file}" * bool(file) + f" --revision {remote.revision}" * bool(remote.revision)
    return CheckpointError(
        "file_not_found",
        f"{what} in the local cache, and downloads are off; download it once while online, with "
        f"`hf download {remote.repo}{options}`, or give a folder{hint}",
    )


def _download(remote: HubName, offline: bool, hint: str, allowed: list[str], ignored: list[str]) -> Path:
    """Return the folder of a repository's files that match a pattern of `allowed` and none of `ignored`."""
    import huggingface_hub
    from huggingface_hub import errors

    repo, revision = remote.repo, remote.revision
    try:
        folder = huggingface_hub.snapshot_download(
            repo, revision=revision, local_files_only=offline, allow_patterns=allowed, ignore_patterns=ignored
        )
    except errors.GatedRepoError as error:
        raise CheckpointError(
            "file_not_permitted",
            f"{repo} is gated: accept its terms at https://huggingface.co/{repo}, then run `hf auth login`",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            "file_not_found",
            f"no model {repo!r} on the Hub (a private one needs `hf auth login`) nor on this machine{hint}",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError("file_not_found", f"{repo} has no revision {revision!r} on the Hub") from error
    except errors.LocalEntryNotFoundError as error:
        raise _not_cached(remote, remote.file or "", offline, hint) from error
    except Exception as error:  # the HTTP client differs between versions: it has changed twice
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError("download_failed", f"downloading {remote} failed: {reason[0]}") from error
    assert isinstance(folder, str)
    return Path(folder)
