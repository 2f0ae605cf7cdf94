"""`ds4jax download`: fetch a checkpoint or GGUF from a model hub, resume, check every digest."""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ds4jax.commands import common

_CHECKPOINT_FILES = ("*.safetensors", "*.json", "encoding/*.py")
_SHARD = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)")
_CHUNK = 8 << 20
_FOREIGN = ("huggingface_hub", "httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3",
            "hf_xet")  # fmt: skip


class _File(NamedTuple):
    """One file of a repository."""

    name: str
    size: int  # bytes
    sha256: str | None  # of files in large-file storage
    blob: str | None  # git's own digest, of all others


def add(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "download",
        help="fetch a checkpoint or GGUF, with resume and digests",
        description="Fetch the files of a model from a Hugging Face hub: the one GGUF of the"
        " repository, or the files of its checkpoint. A second run goes on where the first one"
        " stopped. Every file is checked against its digest. Prints the path of the model.",
    )
    parser.add_argument("repo", metavar="REPO", help="repository, as owner/name")
    parser.add_argument("--revision", default="main", metavar="REV", help="branch, tag or commit")
    parser.add_argument(
        "--include", action="append", metavar="PATTERN",
        help="only files that match, like '*Q4*.gguf'; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--dir", type=Path, metavar="DIR", help="where to; ./NAME of the repository"
    )
    parser.add_argument("--endpoint", metavar="URL", help="another hub than the library's default")
    common.add_output(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Fetch and check."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", args.repo):
        raise common.UsageError(f"REPO is {args.repo!r}, must be owner/name")
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars
    except ImportError:
        raise common.Failure(
            "download needs the package huggingface_hub: pip install 'ds4jax[download]'"
        ) from None
    if args.quiet:
        disable_progress_bars()
    target = args.dir or Path(args.repo.split("/")[1])
    api = HfApi(endpoint=args.endpoint)
    with _plain_errors(args, api.endpoint):
        info = api.model_info(args.repo, revision=args.revision, files_metadata=True)
    files = _choose([_file(s) for s in info.siblings or ()], args.include, args.repo)
    missing = [f for f in files if not _is_good(target / f.name, f)]
    _check_space(target, sum(f.size for f in missing))
    common.note(
        args,
        f"{len(files)} files, {common.size_text(sum(f.size for f in files))};"
        f" {len(files) - len(missing)} of them are here already",
    )
    for file in missing:
        common.note(args, f"{file.name} ({common.size_text(file.size)})")
        with _plain_errors(args, api.endpoint):
            api.hf_hub_download(
                args.repo, file.name, revision=info.sha, local_dir=target,
                force_download=(target / file.name).is_file(),
            )  # fmt: skip
        if not _is_good(target / file.name, file):
            raise common.Failure(
                f"{target / file.name}: its digest is not {file.sha256 or file.blob}, as the hub"
                " says: damaged on the way or on disk; run the same command again"
            )
    ggufs = sorted(f.name for f in files if f.name.endswith(".gguf"))
    path = target / ggufs[0] if ggufs else target
    if args.json:
        listed = [{"name": f.name, "bytes": f.size, "sha256": f.sha256} for f in files]
        common.print_json({"path": str(path), "revision": info.sha, "files": listed})
    else:
        print(path)
    return 0


def _file(sibling: Any) -> _File:
    lfs = sibling.lfs
    sha256 = lfs.sha256 if lfs is not None else None
    return _File(sibling.rfilename, int(sibling.size or 0), sha256, sibling.blob_id)


def _choose(files: Sequence[_File], patterns: Sequence[str] | None, repo: str) -> list[_File]:
    """The files to fetch.

    Raises:
        Failure: nothing matches, or several GGUF files and no pattern.
    """
    names = [f.name for f in files]
    if patterns:
        chosen = [f for f in files if any(fnmatch.fnmatchcase(f.name, p) for p in patterns)]
        if not chosen:
            raise common.Failure(
                f"--include {' '.join(patterns)}: matches none of the {len(files)} files of {repo}:"
                f" {_some(names)}"
            )
        return chosen
    ggufs = sorted({_SHARD.sub("", n) for n in names if n.endswith(".gguf")})
    if len(ggufs) > 1:
        raise common.Failure(
            f"{repo} holds {len(ggufs)} GGUF models: choose with --include: {_some(ggufs)}"
        )
    wanted = ("*.gguf",) if ggufs else _CHECKPOINT_FILES
    chosen = [f for f in files if any(fnmatch.fnmatchcase(f.name, p) for p in wanted)]
    if not any(f.name.endswith((".gguf", ".safetensors")) for f in chosen):
        raise common.Failure(
            f"{repo} holds neither GGUF nor safetensors files: {_some(names)}; choose with"
            " --include"
        )
    return chosen


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")


def _is_good(path: Path, file: _File) -> bool:
    """Whether the file is there, whole, with the digest that the hub gives."""
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    if file.sha256 is not None:
        return _digest(path, hashlib.sha256()) == file.sha256
    return file.blob is None or _digest(path, _git_blob(file.size)) == file.blob


def _git_blob(size: int) -> Any:
    return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)


def _digest(path: Path, digest: Any) -> str:
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return str(digest.hexdigest())


def _check_space(target: Path, needed: int) -> None:
    place = target.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise common.Failure(
            f"--dir {target}: needs {common.size_text(needed)}, {common.size_text(free)} are free:"
            " make room, or give a directory on another disk"
        )


@contextmanager
def _plain_errors(args: argparse.Namespace, endpoint: str) -> Iterator[None]:
    """What the hub's library raises, as one line that says what to do."""
    try:
        yield
    except (common.Failure, KeyboardInterrupt):
        raise
    except Exception as error:
        names = {c.__name__ for c in type(error).__mro__}
        repo = f"{args.repo} at {endpoint}"
        if "GatedRepoError" in names:
            text = f"{repo}: access must be granted first: ask on its page, then set HF_TOKEN"
        elif "RepositoryNotFoundError" in names:
            text = f"{repo}: no such repository (a private one needs HF_TOKEN)"
        elif "RevisionNotFoundError" in names:
            text = f"{repo}: no revision {args.revision!r}; check --revision"
        elif isinstance(error, OSError) and error.filename:
            text = f"{error.filename}: {error.strerror}"
        elif type(error).__module__.partition(".")[0] in _FOREIGN or isinstance(error, OSError):
            first = str(error).strip().partition("\n")[0] or type(error).__name__
            text = (
                f"{repo}: {first}; check the network, then run the same command again, it goes on"
                " where it stopped"
            )
        else:
            raise
        raise common.Failure(text) from None
