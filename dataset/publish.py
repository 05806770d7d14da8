"""A data set to the Hugging Face Hub: all of it in one commit, then a tag with its version.

One commit and not several, so that a branch holds the old release or the new one and nothing in between. An
upload that was interrupted goes on when it is started again: the Hub keeps the contents of large files that
have arrived, commit or not, and they are not sent twice. A tag is what a paper cites, so one that exists is
never moved, and it is set only when the commit holds exactly the files that lie here.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from torchtraceap.dataset import checksums
from torchtraceap.dataset.configs import DATA_FILE
from torchtraceap.dataset.description import BESIDE, CARD, CARDS, PAGES, read_facts
from torchtraceap.errors import UserError

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

KIND = "dataset"
BRANCH = "main"
TIME_OUT = "the connection broke off; run the same command again, which sends only what is missing"

_REPO = re.compile(r"[\w.-]+/[\w.-]+")
_REF = re.compile(r"\w[\w.+-]*")
_HUBS_OWN = ".gitattributes"
"""A file that the Hub puts into every repository."""

Progress = Callable[[str, int, int], None]
"""As that of ``verify``."""


class File(msgspec.Struct, frozen=True):
    """A file of a data set: its path in the folder and in the repository, bytes, and SHA-256 in hex."""

    name: str
    size: int
    sha256: str


class Publication(msgspec.Struct, frozen=True):
    """What was published, or would be.

    Attributes:
        repo: As ORG/NAME.
        tag, branch: Where it is found.
        private: Whether only members of ORG see it.
        files: All files of the data set.
        sent: Names of those that the branch did not have.
        removed: Names of those of an older release that this one has not.
        commit: Its id; empty for a dry run.
    """

    repo: str
    tag: str
    branch: str
    private: bool
    files: list[File]
    sent: list[str]
    removed: list[str]
    commit: str


def publish(
    dataset: str | Path,
    repo: str,
    *,
    tag: str = "",
    branch: str = BRANCH,
    public: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Publication:
    """Verify a data set, upload it and tag it. The token is found as ``huggingface_hub`` finds it.

    Args:
        dataset: Folder that ``traceap build`` made.
        repo: As ORG/NAME; made if there is none of that name.
        tag: ``v`` and the version of the data set by default.
        branch: Made if there is none.
        public: Whether all may see a repository that is made. Of one that exists nothing is changed, so it
            must be as is asked for.
        dry_run: Only verify; the Hub is not asked.
        progress: Told how far the verification is.

    Raises:
        UserError: The data set does not hold what its card promises; or the Hub cannot be reached or refuses;
            or the repository holds something else, the tag other data. The tag is not set then.
    """
    folder = Path(dataset)
    _check_names(repo, tag, branch)
    tag = tag or f"v{read_facts(folder).version}"
    files = published_files(folder)
    if dry_run:
        _require_verified(folder, progress)
        return Publication(repo, tag, branch, not public, files, [one.name for one in files], [], "")
    with _explained(repo):
        from huggingface_hub import HfApi

        api = HfApi()
        api.whoami()  # a bad token is said before minutes are spent on the verification
        exists = _require_fitting(api, repo, public)
    _require_verified(folder, progress)
    with _explained(repo):
        if not exists:
            _create(api, repo, public)
        return _upload(api, folder, repo, tag, branch, files, private=not public)


def published_files(folder: Path) -> list[File]:
    """The files of a data set: those that SHA256SUMS names, and itself.

    Raises:
        UserError: A file is missing or not the one that SHA256SUMS names.
    """
    if problem := next(checksums.differing(folder), None):
        raise UserError(f"{folder}: {problem}, so it cannot be published")
    sums = checksums.read_checksums(folder)
    sums[checksums.NAME] = checksums.sha256(folder / checksums.NAME)
    return [File(name, (folder / name).stat().st_size, sums[name]) for name in sorted(sums)]


def _check_names(repo: str, tag: str, branch: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(f"{repo} is no name of a repository: {error}") from None
    if not _REPO.fullmatch(repo):
        raise UserError(f"{repo} does not say whose repository it is: give ORG/NAME")
    for what, name in (("tag", tag), ("branch", branch)):
        if name and (not _REF.fullmatch(name) or ".." in name or name.endswith((".", ".lock"))):
            raise UserError(f"{name} is no name of a {what}: letters, digits and . _ + - are possible")


def _require_verified(folder: Path, progress: Progress | None) -> None:
    from torchtraceap.dataset.verify import verify

    failures = verify(folder, progress=progress).failures
    if failures:
        first = failures[0]
        names = ", ".join(check.name for check in failures)
        raise UserError(
            f"{folder} is not published, as it breaks a promise of its card ({names}): "
            f"{first.violations[0]}. `traceap verify {folder}` shows all"
        )


def _require_fitting(api: HfApi, repo: str, public: bool) -> bool:
    """Whether there is such a repository already, which then must be as is asked for."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        info = api.repo_info(repo, repo_type=KIND)
    except RepositoryNotFoundError:
        return False
    if info.private is public:
        asked, hint = ("public", "") if public else ("private", "; give --public if that is meant")
        raise UserError(
            f"{repo} exists and is {'private' if public else 'public'}, not {asked}: its visibility is "
            f"changed on its page alone{hint}"
        )
    return True


def _create(api: HfApi, repo: str, public: bool) -> None:
    from huggingface_hub.errors import HfHubHTTPError

    try:
        api.create_repo(repo, repo_type=KIND, private=not public)
    except HfHubHTTPError as error:
        if error.response.status_code == 409:  # it was not to be seen before
            raise UserError(f"{repo} exists, but the token may not see it: choose another name") from None
        raise


def _upload(
    api: HfApi, folder: Path, repo: str, tag: str, branch: str, files: list[File], *, private: bool
) -> Publication:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    refs = api.list_repo_refs(repo, repo_type=KIND)
    tagged = {ref.name: ref.target_commit for ref in refs.tags}
    heads = {ref.name: ref.target_commit for ref in refs.branches}
    if tag in tagged:
        if differing := _differing(folder, files, _tree(api, repo, tagged[tag])):
            raise UserError(
                f"{repo} has the tag {tag} already, with another {differing[0]}: what was released is not "
                "changed; give the data set a new version, or another --tag"
            )
        return Publication(repo, tag, branch, private, files, [], [], tagged[tag])
    if branch not in heads:
        api.create_branch(repo, branch=branch, repo_type=KIND, exist_ok=True)
        heads[branch] = str(api.repo_info(repo, repo_type=KIND, revision=branch).sha)
    there = _tree(api, repo, heads[branch])
    if strangers := sorted(name for name in there if not _is_ours(name)):
        raise UserError(
            f"{repo} exists and holds what belongs to no data set: {strangers[0]}; choose another name"
        )
    names = {one.name for one in files}
    sent = [name for name in _differing(folder, files, there) if name in names]
    removed = sorted(there.keys() - names)
    commit = heads[branch]
    if sent or removed:
        commit = api.create_commit(
            repo,
            [
                *(CommitOperationAdd(name, folder / name) for name in sent),
                *(CommitOperationDelete(name) for name in removed),
            ],
            commit_message=f"Publish {tag}",
            repo_type=KIND,
            revision=branch,
            parent_commit=commit,  # what somebody else commits meanwhile is not overwritten
        ).oid
        if differing := _differing(folder, files, _tree(api, repo, commit)):
            raise UserError(
                f"{repo} does not hold what was sent to it: {differing[0]} differs; no tag was set. "
                "Run the command again"
            )
    api.create_tag(repo, tag=tag, revision=commit, repo_type=KIND)
    return Publication(repo, tag, branch, private, files, sent, removed, commit)


def _is_ours(name: str) -> bool:
    folder, _, file = name.rpartition("/")
    patterns = {"data": DATA_FILE, CARDS: PAGES}
    if folder in patterns:
        return patterns[folder].fullmatch(file) is not None
    return name in (CARD, *BESIDE)


def _tree(api: HfApi, repo: str, revision: str) -> dict[str, RepoFile]:
    """The files of a commit by path, but for the Hub's own."""
    from huggingface_hub.hf_api import RepoFile

    entries = api.list_repo_tree(repo, recursive=True, revision=revision, repo_type=KIND)
    return {one.path: one for one in entries if isinstance(one, RepoFile) and one.path != _HUBS_OWN}


def _differing(folder: Path, files: list[File], tree: dict[str, RepoFile]) -> list[str]:
    """Names of files that are not the same in ``tree``, and of those that only it has."""
    here = {one.name for one in files}
    changed = [one.name for one in files if not _is_same(folder, one, tree.get(one.name))]
    return [*changed, *sorted(tree.keys() - here)]


def _is_same(folder: Path, file: File, there: RepoFile | None) -> bool:
    if there is None or there.size != file.size:
        return False
    if there.lfs is not None:
        return there.lfs.sha256 == file.sha256
    blob = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
    blob.update((folder / file.name).read_bytes())
    return there.blob_id == blob.hexdigest()


@contextmanager
def _explained(repo: str) -> Iterator[None]:
    """Say in a line what the Hub refused, or that it cannot be reached."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HTTPError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
    )
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        yield
    except UserError:
        raise
    except LocalTokenNotFoundError:
        raise UserError("there is no token for the Hub: run `hf auth login`, or set HF_TOKEN") from None
    except OfflineModeIsEnabled:
        raise UserError("HF_HUB_OFFLINE is set, so nothing can be uploaded: unset it") from None
    except HfHubHTTPError as error:
        raise UserError(_refusal(repo, error)) from error
    except HTTPError as error:  # of the client underneath: no name, no route, no answer
        what = str(error) or type(error).__name__
        raise UserError(f"{constants.ENDPOINT} cannot be reached ({what}): {TIME_OUT}") from error
    except (RuntimeError, ValueError) as error:  # what it makes of errors in its threads and of answers
        cause = error.__cause__
        if isinstance(cause, HfHubHTTPError):
            raise UserError(_refusal(repo, cause)) from error
        if isinstance(cause, HTTPError):
            what = str(cause) or type(cause).__name__
            raise UserError(f"{constants.ENDPOINT} cannot be reached ({what}): {TIME_OUT}") from error
        raise UserError(f"{repo}: the upload failed: {' '.join(str(error).split())}") from error


_REFUSALS = {
    401: "the token is not valid: run `hf auth login`, or set HF_TOKEN to another",
    403: "the token may not write there: it needs the role write, and its user a right in that organisation",
    404: "there is no such repository, or the token may not see it",
    409: "somebody else changes the repository: run the command again when that is done",
    412: "the branch was changed meanwhile: run the command again",
    429: "too many requests: wait some minutes and run the command again",
}


def _refusal(repo: str, error: Any) -> str:
    status = error.response.status_code
    said = " ".join(str(error.server_message or "").split())
    what = _REFUSALS.get(status, f"the Hub answered with status {status}; run the command again")
    return f"{repo}: {what}{f' (it says: {said})' if said else ''}"
