"""The command line and commit that the status page shows, without secrets."""

import os
import shlex
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from shoal.session.run_origin import command_line, run_origin
from shoal_proto.health import MAX_COMMAND


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("train.py --lr 0.1 --name 'my run'", "train.py --lr 0.1 --name 'my run'"),
        ("train.py --api-key abc --lr 1", "train.py --api-key *** --lr 1"),
        ("train.py --api_key=abc=d", "train.py --api_key=***"),
        ("train.py --wandbApiKey abc", "train.py --wandbApiKey ***"),
        ("train.py --token -abc", "train.py --token ***"),
        ("train.py -password abc def", "train.py -password *** def"),
        ("train.py --hf-token --lr 1", "train.py --hf-token --lr 1"),
        ("train.py wandb.api_key=abc model.width=3", "train.py wandb.api_key=*** model.width=3"),
        ("train.py --aws-secret-access-key abc", "train.py --aws-secret-access-key ***"),
        ("train.py --secret 'two words'", "train.py --secret ***"),
        ("train.py --db mysql://me:pw@host/db", "train.py --db mysql://***@host/db"),
        ("train.py --url 'http://h/p?a=1&token=b'", "train.py --url 'http://h/p?a=1&token=***'"),
        ("train.py --url 'http://h/p?sort=1'", "train.py --url 'http://h/p?sort=1'"),
        ("train.py -H 'X-Api-Key: abc'", "train.py -H 'X-Api-Key: ***'"),
        ("train.py --db mysql://me:p@w@host/db", "train.py --db mysql://***@host/db"),
        ("train.py --db mysql://me@x.org:p/w@host/db", "train.py --db mysql://***@host/db"),
        ("train.py --from git+https://host/me/it@v1", "train.py --from git+https://host/me/it@v1"),
        ("train.py -H 'Authorization: Bearer abc'", "train.py -H 'Authorization: ***'"),
        ("train.py -H 'Authorization: Token abc'", "train.py -H 'Authorization: ***'"),
        ("train.py '--add=api_key: a b, c'", "train.py '--add=api_key: ***'"),
        ("train.py '{lr: 1, api_key: a b}'", "train.py '{lr: 1, api_key: ***'"),
        ("""train.py '{"token": "a b", "lr": 1}'""", """train.py '{"token": ***, "lr": 1}'"""),
        (r"""train.py '{"token": "a\"b c", "lr": 1}'""", """train.py '{"token": ***, "lr": 1}'"""),
        ("train.py hf_abcdefghijkl", "train.py ***"),
        ("train.py --id 0123456789abcdef0123456789abcdef", "train.py --id ***"),
        ("train.py --tokenizer bert --max-tokens 9", "train.py --tokenizer bert --max-tokens 9"),
        ("train.py --num-key-value-heads 8", "train.py --num-key-value-heads 8"),
        ("train.py --author me --passes 3", "train.py --author me --passes 3"),
        ("train.py --data /0123456789abcdef0123456789abcdef/x", None),
    ],
)
def test_values_that_look_like_secrets_are_masked(arguments: str, shown: str | None) -> None:
    """A secret is recognised by the name of its option or value, or by its form. Names that only
    resemble those, such as tokenizer, are shown."""
    assert command_line(shlex.split(arguments)) == (shown or arguments)


def test_a_long_command_line_is_cut() -> None:
    assert len(command_line(["train.py", *["--layer"] * 1000])) == MAX_COMMAND


def git(folder: Path, *arguments: str) -> str:
    names = ("user.name=a", "user.email=a@b")
    options = [part for each in names for part in ("-c", each)]
    done = subprocess.run(
        ["git", *options, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_the_commit_is_that_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit counts as modified if tracked files have changed or the script is not tracked.
    Other files that are not tracked do not matter."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert (run_origin().commit, run_origin().is_modified) == ("", None)
    git(tmp_path, "init", "--quiet")
    assert run_origin().commit == "", "nothing is committed yet"
    (tmp_path / "train.py").write_text("1\n")
    git(tmp_path, "add", "train.py")
    git(tmp_path, "commit", "--quiet", "-m", "a")
    (tmp_path / "notes").write_text("1\n")
    origin = run_origin()
    assert (origin.command, origin.is_modified) == ("train.py --lr 1", False)
    assert origin.commit == git(tmp_path, "rev-parse", "HEAD")
    monkeypatch.setattr(sys, "argv", ["other.py"])
    (tmp_path / "other.py").write_text("1\n")
    assert run_origin().is_modified is True
    monkeypatch.setattr(sys, "argv", ["train.py"])
    (tmp_path / "train.py").write_text("2\n")
    assert run_origin().is_modified is True


def test_a_module_is_shown_as_it_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/home/me/pkg/__main__.py", "a"])
    spec = ModuleSpec("pkg.__main__", None)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    assert run_origin().command == "-m pkg a"


def test_an_argument_with_bytes_that_are_not_utf8_can_be_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The coordinator would refuse the whole report."""
    monkeypatch.setattr(sys, "argv", ["train.py", os.fsdecode(b"/data/caf\xe9")])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert run_origin().command == r"train.py '/data/caf\udce9'"
