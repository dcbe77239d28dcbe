"""`aenv layer …` as operators run it: what it prints, its exit codes, and that no file is lost or left behind."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from layer_bytes import (
    EMPTY_SHA256,
    LETTERS,
    MIB,
    NIL,
    ONES,
    SEALED,
    SEGMENT,
    SEGMENT_SHA256,
    UPPER_DATA,
    UPPER_INDEX,
    ZEROED,
    committed,
    endless,
    raw_image,
    tar,
    zfile,
)
from typer.testing import CliRunner

from agentenv.cli.main import app, main
from agentenv.errors import StorageError

AENV = Path(sys.executable).with_name("aenv")
FIELDS = {
    "variant",
    "wrapper",
    "flags",
    "uuid",
    "parent_uuid",
    "virtual_size",
    "records",
    "zero_records",
    "data_bytes",
    "digest",
    "size",
    "user_tag",
    "zfile",
}


def environment(home: Path) -> dict[str, str]:
    """Without a home, a server or a configuration: the tools need none."""
    return {"PATH": os.environ["PATH"], "AENV_HOME": str(home / "never-made"), "HOME": str(home)}


@dataclass(frozen=True)
class Outcome:
    stdout: bytes
    stderr: bytes


Aenv = Callable[..., Outcome]


@pytest.fixture
def aenv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Aenv:
    """The program's own entry in this process, for the many calls whose process does not matter."""
    for name in ("AENV_HOME", "HOME"):
        monkeypatch.setenv(name, environment(tmp_path)[name])
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object, code: int = 0) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["aenv", "layer", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        outcome = Outcome(*capfdbinary.readouterr())
        assert ended.value.code == code, outcome.stderr.decode()
        assert not (tmp_path / "never-made").exists()
        return outcome

    return run


def process(directory: Path, *arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [AENV, "layer", *map(str, arguments)],
        cwd=directory,
        env=environment(directory),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (SEGMENT, {"variant": "committed", "wrapper": [], "flags": 6, "uuid": None, "records": 1, "data_bytes": 4096}),
        (zfile(ZEROED), {"wrapper": ["zfile"], "records": 3, "zero_records": 1, "data_bytes": 8192}),
        (tar(zfile(SEALED)), {"variant": "sealed", "wrapper": ["tar", "zfile"], "uuid": ONES, "flags": 6}),
    ],
)
def test_inspect(aenv: Aenv, tmp_path: Path, content: bytes, expected: dict[str, object]) -> None:
    layer = tmp_path / "layer"
    layer.write_bytes(content)
    facts = json.loads(aenv("inspect", "layer", "--json").stdout)
    assert set(facts) == FIELDS
    assert expected.items() <= facts.items()
    assert facts["digest"] == f"sha256:{sha256(layer)}"
    assert (facts["size"], facts["virtual_size"], facts["parent_uuid"]) == (len(content), MIB, None)
    text = aenv("inspect", "layer").stdout.decode()
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()}
    assert rows["variant"] == [facts["variant"]]
    assert rows["digest"] == [facts["digest"]]
    assert rows["wrapper"] == ([", ".join(facts["wrapper"])] if len(facts["wrapper"]) == 1 else rows["wrapper"])


def test_inspect_an_upper(aenv: Aenv, tmp_path: Path) -> None:
    (tmp_path / "upper.data").write_bytes(UPPER_DATA)
    (tmp_path / "upper.index").write_bytes(UPPER_INDEX)
    facts = json.loads(aenv("inspect", "upper.data", "--json").stdout)
    assert (facts["variant"], facts["flags"], facts["records"], facts["uuid"]) == ("append", 3, 1, ONES)
    (tmp_path / "upper.index").rename(tmp_path / "elsewhere")
    facts = json.loads(aenv("inspect", "--index", "elsewhere", "upper.data", "--json").stdout)
    assert facts["records"] == 1
    assert b"upper.index" in aenv("inspect", "upper.data", code=1).stderr


def test_cat(aenv: Aenv, tmp_path: Path) -> None:
    (tmp_path / "base").write_bytes(zfile(SEGMENT))
    (tmp_path / "top").write_bytes(committed({130: 2, 132: b"\xb6" * 512}))
    expected = bytearray(MIB)
    expected[65536 : 65536 + 4096] = b"\xa5" * 1024 + bytes(1024) + b"\xb6" * 512 + b"\xa5" * 1536
    assert aenv("cat", "base", "top").stdout == expected
    assert aenv("cat", "base", "top", "--offset", "64K", "--length", "4k").stdout == expected[65536:69632]
    assert aenv("cat", "--offset", 66559, "base", "top", "--length=3").stdout == b"\xa5\0\0"
    assert aenv("cat", "top", "--offset", "1M").stdout == b""
    assert len(aenv("cat", "top", "--offset", "1023K", "--length", "1G").stdout) == 1024
    for wrong in ("-1", "4X", "", "1.5K", "99999999999T"):
        assert b"size" in aenv("cat", "top", f"--offset={wrong}", code=2).stderr
    aenv("cat", code=2)


def test_a_closed_pipe_is_quiet(tmp_path: Path) -> None:
    (tmp_path / "layer").write_bytes(committed({0: b"\xa5" * 4096}, virtual_size=1 << 40))
    with process(tmp_path, "cat", "layer") as cat:
        assert cat.stdout is not None
        assert cat.stderr is not None
        assert cat.stdout.read(4096) == b"\xa5" * 4096
        cat.stdout.close()
        assert cat.stderr.read() == b""
        assert cat.wait() == 141


def test_an_interrupt_ends_cat(tmp_path: Path) -> None:
    (tmp_path / "layer").write_bytes(committed({}, virtual_size=1 << 40))
    with process(tmp_path, "cat", "layer") as cat:
        assert cat.stdout is not None
        assert cat.stderr is not None
        assert cat.stdout.read(1) == b"\0"
        cat.send_signal(signal.SIGINT)
        assert cat.stderr.read() == b""
        assert cat.wait() == 130


@pytest.mark.parametrize(
    "command",
    [["inspect", "layer"], ["inspect", "layer", "--json"], ["verify", "layer"], ["cat", "layer"]],
)
def test_an_output_that_takes_nothing_is_one_line(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "layer").write_bytes(SEGMENT)
    program: list[str | Path] = [AENV, "layer", *command]
    with Path("/dev/full").open("wb") as full:
        refused = subprocess.run(
            program, cwd=tmp_path, env=environment(tmp_path), stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert refused.returncode == 1
    assert refused.stderr.startswith(b"aenv: ")
    assert b"No space left on device" in refused.stderr
    assert refused.stderr.count(b"\n") == 1


@pytest.mark.parametrize("command", [["inspect", "layer"], ["verify", "layer"], ["cat", "layer"]])
def test_a_closed_output_is_one_line(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "layer").write_bytes(SEGMENT)
    program: list[str | Path] = ["sh", "-c", 'exec "$@" >&-', "sh", AENV, "layer", *command]
    refused = subprocess.run(program, cwd=tmp_path, env=environment(tmp_path), stderr=subprocess.PIPE, check=False)
    assert (refused.returncode, refused.stderr) == (1, b"aenv: standard output is closed\n")


@pytest.mark.parametrize(
    ("tag", "shown"),
    [
        (b"\\[/x] [bold]", rb"\[/x] [bold]"),
        (b"\x1b]0;title\x07", rb"\x1b]0;title\x07"),
        (b"one\ntwo", rb"one\ntwo"),
        ("größe".encode(), "größe".encode()),
    ],
)
def test_tags_are_shown_not_obeyed(aenv: Aenv, tmp_path: Path, tag: bytes, shown: bytes) -> None:
    layer = bytearray(SEGMENT)
    at = len(layer) - 4096 + 134
    layer[at : at + len(tag)] = tag
    (tmp_path / "layer").write_bytes(layer)
    assert b"user_tag      " + shown + b"\n" in aenv("inspect", "layer").stdout
    assert json.loads(aenv("inspect", "layer", "--json").stdout)["user_tag"] == tag.decode()


def test_names_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(b"\xa5" * 4096)
    strict = environment(tmp_path) | {"PYTHONIOENCODING": "utf-8:strict"}

    def run(*arguments: str | bytes) -> bytes:
        return subprocess.run(
            [AENV, "layer", *arguments], cwd=tmp_path, env=strict, stdout=subprocess.PIPE, check=True
        ).stdout

    made = json.loads(run("create", "--from-raw", "raw", b"odd\xff\n", "--json"))
    assert os.fsencode(made["path"]) == b"odd\xff\n"
    assert run("verify", b"odd\xff\n").startswith(rb"odd\udcff\n: good, ")
    assert run("create", "--force", "--from-raw", "raw", b"odd\xff\n").startswith(rb"odd\udcff\n: ")


def test_the_real_program(tmp_path: Path) -> None:
    (tmp_path / "layer").write_bytes(SEGMENT)
    out, errors = process(tmp_path, "cat", "layer", "--offset", "65535", "--length", "2").communicate()
    assert (out, errors) == (b"\0\xa5", b"")
    with process(tmp_path, "inspect", "nowhere") as failing:
        out, errors = failing.communicate()
    assert (out, failing.returncode) == (b"", 1)
    assert errors.startswith(b"aenv: nowhere: ")
    assert errors.count(b"\n") == 1


def test_create_writes_the_bytes_of_the_format(aenv: Aenv, tmp_path: Path) -> None:
    raw_image(tmp_path / "segment.raw", {65536: b"\xa5" * 4096})
    raw_image(tmp_path / "empty.raw", {})
    outcome = aenv("create", "--from-raw", "segment.raw", "segment", "--uuid", NIL)
    assert outcome.stdout.decode() == f"segment: 16384 bytes, sha256:{SEGMENT_SHA256}\n"
    assert sha256(tmp_path / "segment") == SEGMENT_SHA256
    made = json.loads(aenv("create", "--from-raw", "empty.raw", "empty", "--uuid", NIL, "--json").stdout)
    assert made["digest"] == f"sha256:{EMPTY_SHA256}"
    assert sha256(tmp_path / "empty") == EMPTY_SHA256


@pytest.mark.parametrize("compression", [[], ["--zfile", "lz4"], ["--zfile", "zstd"]])
@pytest.mark.parametrize("archive", [[], ["--tar"]])
def test_create_in_every_form(aenv: Aenv, tmp_path: Path, compression: list[str], archive: list[str]) -> None:
    image = raw_image(tmp_path / "raw", {4096: os.urandom(50_000), 700_000: b"text" * 5000}, MIB + 512)
    form = [*compression, *archive]
    aenv("create", "--from-raw", "raw", "layer", *form, "--uuid", ONES, "--parent-uuid", LETTERS.upper())
    facts = json.loads(aenv("inspect", "layer", "--json").stdout)
    assert facts["wrapper"] == ["tar"] * bool(archive) + ["zfile"] * bool(compression)
    assert (facts["uuid"], facts["parent_uuid"], facts["virtual_size"]) == (ONES, LETTERS, MIB + 512)
    assert aenv("cat", "layer").stdout == image.read_bytes()
    outcome = aenv("verify", "layer")
    assert outcome.stdout.decode().startswith("layer: good, ")


def test_uuids_are_random_unless_given(aenv: Aenv, tmp_path: Path) -> None:
    raw_image(tmp_path / "raw", {})
    seen = {json.loads(aenv("create", "--from-raw", "raw", name, "--json").stdout)["uuid"] for name in ("a", "b")}
    assert len(seen) == 2
    assert NIL not in seen
    assert b"not a UUID" in aenv("create", "--from-raw", "raw", "c", "--uuid", "c", code=1).stderr
    assert not (tmp_path / "c").exists()


def test_merge(aenv: Aenv, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(tar(committed({0: b"\x11" * 8192, 64: b"\x22" * 4096}, uuid=ONES, parent=LETTERS)))
    (tmp_path / "b").write_bytes(zfile(committed({8: 8, 64: b"\x33" * 512})))
    expected = aenv("cat", "a", "b").stdout
    for form in ([], ["--zfile", "zstd", "--tar"]):
        aenv("merge", "a", "b", "out", *form, "--force")
        assert aenv("cat", "out").stdout == expected
        facts = json.loads(aenv("inspect", "out", "--json").stdout)
        assert facts["parent_uuid"] == LETTERS
        assert facts["uuid"] not in (None, ONES)
        assert facts["zero_records"] == 1
    assert b"at least one layer" in aenv("merge", "out", code=2).stderr


def test_verify_tells_all_that_is_damaged(aenv: Aenv, tmp_path: Path) -> None:
    content = zfile(SEGMENT)
    (tmp_path / "good").write_bytes(content)
    for number in range(512, len(content) - 512, 997):
        flipped = bytearray(content)
        flipped[number] ^= 1 << number % 8
        (tmp_path / f"bad{number}").write_bytes(flipped)
    names = sorted(path.name for path in tmp_path.iterdir())
    outcome = aenv("verify", *names, code=1)
    assert [line.split(":")[0] for line in outcome.stdout.decode().splitlines()] == ["good"]
    told = outcome.stderr.decode().splitlines()
    assert [line.split(": ")[1] for line in told] == [name for name in names if name != "good"]
    aenv("verify", "good")
    assert b"nowhere" in aenv("verify", "nowhere", code=1).stderr


def test_an_output_that_exists_is_not_lost(aenv: Aenv, tmp_path: Path) -> None:
    raw_image(tmp_path / "raw", {0: b"x" * 4096})
    (tmp_path / "layer").write_bytes(SEGMENT)
    (tmp_path / "out").write_text("precious")
    assert b"out exists" in aenv("create", "--from-raw", "raw", "out", code=1).stderr
    assert b"out exists" in aenv("merge", "layer", "out", code=1).stderr
    assert b"damaged: " in aenv("merge", "damaged", "out", "--force", code=1).stderr
    assert (tmp_path / "out").read_text() == "precious"
    aenv("create", "--from-raw", "raw", "out", "--force")
    assert aenv("cat", "out", "--length", 4).stdout == b"xxxx"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["layer", "out", "raw"]


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "layer").write_bytes(endless())
    with process(tmp_path, "merge", "layer", "layer", "out") as merging:
        assert merging.stderr is not None
        # The draft has no name yet: that it is open is how the work shows.
        while merging.poll() is None and not has_draft(merging.pid, tmp_path):
            os.sched_yield()
        merging.send_signal(signal.SIGINT)
        assert merging.stderr.read() == b""
        assert merging.wait() == 130
    assert [path.name for path in tmp_path.iterdir()] == ["layer"]


def has_draft(pid: int, directory: Path) -> bool:
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            target = str(descriptor.readlink())
            if target.startswith(f"{directory}/") and not target.endswith("/layer"):
                return True
    return False


@pytest.mark.root
@pytest.mark.parametrize("form", [[], ["--tar"], ["--zfile", "lz4", "--tar"]])
def test_a_full_disk_leaves_nothing(tmp_path: Path, form: list[str]) -> None:
    (tmp_path / "raw").write_bytes(os.urandom(2 * MIB))
    (tmp_path / "small").mkdir()
    script = 'mount -t tmpfs -o size=1m none small; "$@"; code=$?; ls -A small; df --output=used small; exit $code'
    outcome = subprocess.run(
        [
            "unshare",
            "--mount",
            "sh",
            "-c",
            script,
            "-",
            AENV,
            "layer",
            "create",
            "--from-raw",
            "raw",
            "small/out",
            *form,
        ],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
    )
    assert outcome.returncode == 1
    assert b"No space left" in outcome.stderr
    assert b"free some space" in outcome.stderr
    assert outcome.stdout.split() == [b"Used", b"0"]


def test_the_runner_sees_our_errors(tmp_path: Path) -> None:
    runner = CliRunner()
    layer = tmp_path / "layer"
    layer.write_bytes(SEGMENT)
    outcome = runner.invoke(app, ["layer", "inspect", str(layer), "--json"])
    assert json.loads(outcome.stdout)["digest"] == f"sha256:{SEGMENT_SHA256}"
    outcome = runner.invoke(app, ["layer", "create", "--from-raw", str(layer), str(layer)])
    assert isinstance(outcome.exception, StorageError)
    outcome = runner.invoke(app, ["layer", "create", str(layer)])
    assert outcome.exit_code == 2
    outcome = runner.invoke(app, ["layer", "verify", str(layer), str(tmp_path)])
    assert outcome.exit_code == 1
    assert "not a plain file" in outcome.stderr
    assert outcome.stdout.count("good") == 1
