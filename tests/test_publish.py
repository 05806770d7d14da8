"""`traceap publish` through the real client, against a server that answers as the Hub does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import TOKEN, Answer, Hub, serving
from huggingface_hub import constants
from releases import release

from torchtraceap import __version__
from torchtraceap.cli import main
from torchtraceap.dataset.checksums import read_checksums, write_checksums

NAME = "lab/traces"
VERSION = f"v{__version__}"


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set that keeps every promise; not to be changed."""
    return release(tmp_path_factory.mktemp("kept"))


@pytest.fixture
def dataset(kept: Path, tmp_path: Path) -> Path:
    """A copy of it, beside a file that is no part of it."""
    copy = Path(shutil.copytree(kept, tmp_path / "dataset"))
    (copy / "schema.py").write_text("code beside the data")
    return copy


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that the client of this process talks to."""
    with serving() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        # Xet has storage of its own, that no small server stands for.
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


class Publish:
    """Runs the command in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *arguments: object) -> str:
        """Its output, if all went well."""
        self.capsys.readouterr()
        code = main(["publish", *map(str, arguments)])
        said = self.capsys.readouterr()
        assert code == 0, said.err
        return said.out

    def refused(self, *arguments: object) -> str:
        """The one line that says why not."""
        self.capsys.readouterr()
        assert main(["publish", *map(str, arguments)]) == 2
        said = self.capsys.readouterr()
        assert said.out == ""
        (line,) = said.err.splitlines()
        return line


@pytest.fixture
def publish(capsys: pytest.CaptureFixture[str]) -> Publish:
    return Publish(capsys)


def program(hub: Hub, *arguments: object) -> subprocess.Popen[str]:
    """The command as a program that knows the hub by the environment alone."""
    environment = os.environ | {
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": TOKEN,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
    }
    words = [sys.executable, "-m", "torchtraceap.cli", "publish", *map(str, arguments)]
    return subprocess.Popen(words, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def published(dataset: Path) -> dict[str, bytes]:
    """What a hub should hold."""
    return {
        str(path.relative_to(dataset)): path.read_bytes()
        for path in dataset.rglob("*")
        if path.is_file() and path.name != "schema.py"
    }


def test_all_of_a_data_set_is_there_under_its_tag_and_private(
    hub: Hub, dataset: Path, publish: Publish
) -> None:
    said = json.loads(publish(NAME, dataset, "--json"))
    repository = hub.repositories[NAME]
    assert repository.private
    assert repository.files(VERSION) == published(dataset)
    assert repository.tags[VERSION] == repository.branches["main"] == said["commit"]
    assert repository.messages == ["initial commit", f"Publish {VERSION}"]  # one commit for all
    assert {file["name"] for file in said["files"]} == published(dataset).keys() == set(said["sent"])

    assert "were there already" in publish(NAME, dataset)
    assert len(repository.messages) == 2


def test_a_tag_is_never_moved(hub: Hub, dataset: Path, publish: Publish) -> None:
    publish(NAME, dataset)
    repository = hub.repositories[NAME]
    before = dict(repository.branches), dict(repository.tags), published(dataset)
    assert main(["cards", str(dataset)]) == 0  # now with timelines
    assert f"{NAME} has the tag {VERSION} already, with another README.md" in publish.refused(NAME, dataset)
    assert (repository.branches, repository.tags) == before[:2]

    publish(NAME, dataset, "--tag", "v0.1.1")
    assert repository.files("v0.1.1") == published(dataset) != before[2]
    assert repository.files(VERSION) == before[2]


def test_public_is_said_and_a_branch_is_made(hub: Hub, dataset: Path, publish: Publish) -> None:
    publish(NAME, dataset, "--public", "--revision", "next", "--tag", "v1-rc.1")
    repository = hub.repositories[NAME]
    assert not repository.private
    assert repository.tags == {"v1-rc.1": repository.branches["next"]}
    assert repository.files("next") == published(dataset)
    assert repository.files("main") == {}
    assert "is public, not private" in publish.refused(NAME, dataset)
    repository.private = True
    assert "is private, not public" in publish.refused(NAME, dataset, "--public")


def test_files_of_an_older_release_go_with_the_commit(hub: Hub, dataset: Path, publish: Publish) -> None:
    old = {"data/traces-train-00003-of-00009.parquet": b"old", "README.md": b"old", "cards/costs.svg": b"old"}
    hub.create(NAME, True, old)
    assert "1 removed" in publish(NAME, dataset)
    assert hub.repositories[NAME].files("main") == published(dataset)


def test_a_repository_of_something_else_is_left_alone(hub: Hub, dataset: Path, publish: Publish) -> None:
    hub.create(NAME, True, {"README.md": b"# Cats", "cats.csv": b"tabby"})
    assert "holds what belongs to no data set: cats.csv" in publish.refused(NAME, dataset)
    assert hub.repositories[NAME].messages == ["initial commit"]
    assert not hub.repositories[NAME].tags


def test_a_repository_that_the_token_may_not_see_is_left_alone(
    hub: Hub, dataset: Path, publish: Publish
) -> None:
    hub.create(NAME, True)
    hub.hidden = (NAME,)
    assert f"{NAME} exists, but the token may not see it" in publish.refused(NAME, dataset)


@pytest.mark.slow
def test_a_killed_upload_goes_on_and_sends_nothing_twice(hub: Hub, dataset: Path) -> None:
    stuck = threading.Event()
    free = threading.Event()

    def stop(number: int) -> None:
        if number > 5:  # those before are kept
            stuck.set()
            free.wait(60)

    hub.before_put = stop
    with program(hub, NAME, dataset) as process:
        assert stuck.wait(90), "it never came to its sixth file"
        process.kill()
    repository = hub.repositories[NAME]
    assert repository.messages == ["initial commit"]
    assert not repository.tags
    arrived = set(hub.large)
    assert 1 <= len(arrived) <= 5

    hub.before_put = lambda number: None
    first = len(hub.requests)
    with program(hub, NAME, dataset) as process:
        _, stderr = process.communicate(timeout=90)
    free.set()
    assert process.returncode == 0, stderr
    sent = {path.removeprefix("PUT /large/") for path in hub.requests[first:] if path.startswith("PUT")}
    assert sent
    assert not sent & arrived
    assert repository.files(VERSION) == published(dataset)


def test_a_commit_without_its_tag_gets_it(hub: Hub, dataset: Path, publish: Publish) -> None:
    hub.create(NAME, True, published(dataset))
    publish(NAME, dataset)
    repository = hub.repositories[NAME]
    assert repository.messages == ["initial commit"]
    assert repository.tags == {VERSION: repository.branches["main"]}


def test_what_others_commit_meanwhile_is_not_overwritten(hub: Hub, dataset: Path, publish: Publish) -> None:
    repository = hub.create(NAME, True)

    def meanwhile(number: int) -> None:
        if number == 1:
            repository.commit("main", {"README.md": b"of somebody else"}, "Meanwhile")

    hub.before_put = meanwhile
    assert "the branch was changed meanwhile" in publish.refused(NAME, dataset)
    assert repository.messages[-1] == "Meanwhile"
    assert not repository.tags


def test_a_commit_that_holds_something_else_gets_no_tag(hub: Hub, dataset: Path, publish: Publish) -> None:
    hub.forget = "cards/datasheet.md"
    assert "cards/datasheet.md differs; no tag was set" in publish.refused(NAME, dataset)
    assert not hub.repositories[NAME].tags


def test_a_dry_run_asks_nothing_of_the_hub(
    hub: Hub, dataset: Path, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    said = publish(NAME, dataset, "--dry-run")
    assert hub.requests == []
    assert {line.split()[1] for line in said.splitlines()[:-1]} == published(dataset).keys()
    assert f"to {NAME} (private), branch main, tag {VERSION}" in said


def test_what_breaks_a_promise_is_not_published(hub: Hub, dataset: Path, publish: Publish) -> None:
    card = dataset / "README.md"
    card.write_text(card.read_text().replace("| train | ", "| train | 1", 1))
    assert "README.md is not the file that SHA256SUMS describes" in publish.refused(NAME, dataset)
    write_checksums(dataset, list(read_checksums(dataset)))
    for arguments in ([], ["--dry-run"]):
        line = publish.refused(NAME, dataset, *arguments)
        assert "is not published, as it breaks a promise of its card (card)" in line
        assert f"`traceap verify {dataset}` shows all" in line
    assert not hub.repositories


def test_refusals_of_the_hub_are_said(
    hub: Hub, dataset: Path, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = publish.refused("other/traces", dataset)
    assert "other/traces: the token may not write there" in line
    assert "You don't have the rights" in line
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    line = publish.refused(NAME, dataset)
    assert "the token is not valid" in line
    assert "hf_wrong" not in line
    monkeypatch.delenv("HF_TOKEN")
    asked = len(hub.requests)
    assert "there is no token" in publish.refused(NAME, dataset)
    assert len(hub.requests) == asked
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "HF_HUB_OFFLINE is set" in publish.refused(NAME, dataset)
    assert not hub.repositories


def test_a_large_file_that_is_refused_is_said(hub: Hub, dataset: Path, publish: Publish) -> None:
    def full(number: int) -> None:
        raise Answer(403, "storage limit reached")

    hub.before_put = full
    line = publish.refused(NAME, dataset)
    assert "may not write there" in line
    assert "storage limit reached" in line
    assert hub.repositories[NAME].messages == ["initial commit"]


def test_a_hub_that_does_not_answer_is_named(
    hub: Hub, dataset: Path, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    line = publish.refused(NAME, dataset)
    assert "http://127.0.0.1:9 cannot be reached" in line
    assert "run the same command again" in line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["traces"], "traces does not say whose repository it is: give ORG/NAME"),
        (["a/b/c"], "a/b/c is no name of a repository"),
        (["lab/tra ces"], "lab/tra ces is no name of a repository"),
        (["lab/-x"], "lab/-x is no name of a repository"),
        ([NAME, "--tag", "a b"], "a b is no name of a tag"),
        ([NAME, "--revision", "../x"], "../x is no name of a branch"),
    ],
)
def test_malformed_names_are_refused(kept: Path, publish: Publish, arguments: list[str], says: str) -> None:
    assert says in publish.refused(arguments[0], kept, *arguments[1:])


def test_a_folder_that_is_no_data_set_is_refused(tmp_path: Path, publish: Publish) -> None:
    assert "is no card of a data set" in publish.refused(NAME, tmp_path)
