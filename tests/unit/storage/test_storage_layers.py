"""The layer store: what comes in is verified, what is used stays, and killed processes and full disks leave nothing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv.errors import InsufficientStorageError, LayerError, StorageError
from agentenv.storage.layers import LayerStore
from unit.storage.storage_fakes import ToyTools, digest_of, files_below, make_layer

INDEX = {"index.db", "index.db-wal", "index.db-shm"}
TESTS = Path(__file__).parents[2]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LayerStore]:
    made = LayerStore(tmp_path / "layers", ToyTools())
    yield made
    made.close()


def stored_files(store: LayerStore) -> set[str]:
    assert len(files_below(store.directory / "incoming")) >= len(list((store.directory / "incoming").iterdir()))
    return files_below(store.directory) - INDEX


def test_an_imported_layer_is_found_and_cannot_be_written(tmp_path: Path, store: LayerStore) -> None:
    file = make_layer(tmp_path / "base", {0: "a"}, parent="11111111-2222-3333-4444-555555555555")
    inode, digest = file.stat().st_ino, digest_of(file)
    layer = store.import_file(file, owner="template:base", digest=digest)
    assert not file.exists()
    assert layer.digest == digest
    assert layer.path == tmp_path / "layers" / "sha256" / digest.removeprefix("sha256:")
    assert layer.path.stat().st_mode & 0o777 == 0o444
    assert layer.path.stat().st_ino == inode, "it was copied, not linked"
    assert layer.parent_uuid == "11111111-2222-3333-4444-555555555555"
    assert store.get(digest) == layer
    assert store.list() == (layer,)
    assert store.references("template:base") == (digest,)
    assert store.owners(digest) == ("template:base",)
    assert stored_files(store) == {f"sha256/{layer.path.name}"}


def test_a_file_that_is_not_given_away_stays_and_is_copied(tmp_path: Path, store: LayerStore) -> None:
    file = make_layer(tmp_path / "base", {0: "a"})
    layer = store.import_file(file, owner="x", move=False)
    assert file.stat().st_nlink == 1
    file.write_text("changed later")
    assert store.verify(layer.digest) == layer


def test_a_link_names_a_regular_file(tmp_path: Path, store: LayerStore) -> None:
    file = make_layer(tmp_path / "base", {0: "a"})
    (tmp_path / "name").symlink_to(file)
    layer = store.import_file(tmp_path / "name", owner="x")
    assert layer.path.is_file()
    assert not layer.path.is_symlink()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="no regular file"):
        store.import_file(tmp_path / "pipe", owner="x")
    with pytest.raises(LayerError, match="no such file"):
        store.import_file(tmp_path / "missing", owner="x")


@pytest.mark.parametrize("content", [b"", b"{}", b'{"sealed": false, "blocks": {}}', b"\x00" * 9000])
def test_what_is_no_sealed_layer_stays_out(tmp_path: Path, store: LayerStore, content: bytes) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    with pytest.raises(LayerError, match=str(file)):
        store.import_file(file, owner="x")
    assert file.read_bytes() == content
    assert store.references("x") == ()
    assert stored_files(store) == set()
    with pytest.raises(LayerError, match="not sha256:0000"):
        store.import_file(make_layer(file, {}), owner="x", digest="sha256:" + "0" * 64)
    assert stored_files(store) == set()


def test_the_same_bytes_are_stored_once(tmp_path: Path, store: LayerStore) -> None:
    first = make_layer(tmp_path / "one", {0: "a"})
    (tmp_path / "two").write_bytes(first.read_bytes())
    layer = store.import_file(first, owner="a")
    assert store.import_file(tmp_path / "two", owner="b") == layer
    assert store.import_file(layer.path, owner="c", move=False) == layer
    assert store.owners(layer.digest) == ("a", "b", "c")
    assert store.usage().layers == 1
    assert layer.path.stat().st_nlink == 1


def test_an_import_comes_after_the_owners_other_references(tmp_path: Path, store: LayerStore) -> None:
    layers = [store.import_file(make_layer(tmp_path / "x", {n: "a"}), owner="o") for n in range(4)]
    assert store.references("o") == tuple(layer.digest for layer in layers)


def test_references_are_replaced_together_or_not_at_all(tmp_path: Path, store: LayerStore) -> None:
    one, two = (store.import_file(make_layer(tmp_path / "x", {n: "a"}), owner="keep").digest for n in range(2))
    store.set_references("o", [two, one, two])
    assert store.references("o") == (two, one, two)
    with pytest.raises(LayerError, match="is not in the store"):
        store.set_references("o", [one, "sha256:" + "0" * 64])
    with pytest.raises(LayerError):
        store.set_references("o", ["../../etc/passwd"])
    assert store.references("o") == (two, one, two)
    store.move_references("o", "p", [one])
    assert (store.references("o"), store.references("p")) == ((), (one,))
    assert store.owners_with_prefix("") == ("keep", "p")
    assert store.owners_with_prefix("k") == ("keep",)
    store.drop("p")
    store.drop("p")
    assert store.owners(one) == ("keep",)


def test_garbage_is_what_nobody_references_or_leases(tmp_path: Path, store: LayerStore) -> None:
    kept, leased, free = (store.import_file(make_layer(tmp_path / "x", {n: "a"}), owner=f"o{n}") for n in range(3))
    store.drop("o1")
    store.drop("o2")
    usage = store.usage()
    assert (usage.layers, usage.unreferenced_layers, usage.unreferenced_bytes) == (3, 1 + 1, leased.size + free.size)
    with store.lease([leased.digest, leased.digest]) as (held, _):
        assert held == leased
        report = store.collect_garbage()
        assert (report.removed, report.freed_bytes) == ((free.digest,), free.size)
        assert store.list() == tuple(sorted((kept, leased), key=lambda layer: layer.digest))
    assert store.collect_garbage().removed == (leased.digest,)
    assert store.collect_garbage().removed == ()
    assert stored_files(store) == {f"sha256/{kept.path.name}"}
    with pytest.raises(LayerError, match="is not in the store"):
        store.get(free.digest)
    with pytest.raises(LayerError), store.lease([free.digest]):
        raise AssertionError


def test_damage_by_hand_is_reported_by_name_and_mended_by_an_import(tmp_path: Path, store: LayerStore) -> None:
    file = make_layer(tmp_path / "x", {0: "a"})
    content = file.read_bytes()
    layer = store.import_file(file, owner="template:base")

    def put_back(data: bytes) -> None:
        layer.path.unlink()
        layer.path.write_bytes(data)

    put_back(content.replace(b'"a"', b'"b"'))
    assert store.get(layer.digest) == layer, "reading all bytes is not the way of every start"
    with pytest.raises(LayerError, match=rf"{layer.path} is damaged: its bytes have .* used by template:base"):
        store.verify(layer.digest)
    put_back(b"x" * layer.size)
    with pytest.raises(LayerError, match=f"{layer.path} is damaged: .* is no layer"):
        store.verify(layer.digest)
    put_back(content[:-5])
    with pytest.raises(LayerError, match=rf"{layer.path} is damaged: .* bytes instead of {layer.size}"):
        store.get(layer.digest)
    layer.path.unlink()
    with pytest.raises(LayerError, match=f"{layer.path} is damaged: the file is missing"):
        store.set_references("disk:1", [layer.digest])
    file.write_bytes(content)
    assert store.import_file(file, owner="disk:1") == layer
    assert store.verify(layer.digest) == layer
    assert store.owners(layer.digest) == ("disk:1", "template:base")


def test_a_lost_index_does_not_turn_layers_into_garbage(tmp_path: Path, store: LayerStore) -> None:
    layer = store.import_file(make_layer(tmp_path / "x", {0: "a"}), owner="o")
    store.close()
    for name in INDEX:
        (store.directory / name).unlink(missing_ok=True)
    for _ in range(2):
        with pytest.raises(StorageError, match="is missing, but there are layers"):
            LayerStore(store.directory, ToyTools()).collect_garbage()
    assert layer.path.exists()


def test_a_damaged_or_newer_index_is_an_error_of_ours(tmp_path: Path, store: LayerStore) -> None:
    store.list()
    store.close()
    (store.directory / "index.db").write_bytes(b"no database at all" * 500)
    with pytest.raises(StorageError, match=r"index\.db"):
        store.list()


def test_another_store_is_linked(tmp_path: Path, store: LayerStore) -> None:
    other = LayerStore(tmp_path / "other", ToyTools())
    source = other.import_file(make_layer(tmp_path / "x", {0: "a"}), owner="o")
    layer = store.link_from(other, source.digest, owner="template:base")
    assert layer.path.stat().st_ino == source.path.stat().st_ino
    other.drop("o")
    other.collect_garbage()
    assert not source.path.exists()
    assert store.verify(layer.digest) == layer
    with pytest.raises(LayerError, match="is not in the store"):
        store.link_from(other, source.digest, owner="x")
    other.close()


def test_a_store_on_another_file_system_is_copied(tmp_path: Path, store: LayerStore) -> None:
    if Path("/dev/shm").stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs two file systems")
    elsewhere = Path(f"/dev/shm/aenv-test-{os.getpid()}-{random.getrandbits(32):x}")
    try:
        other = LayerStore(elsewhere, ToyTools())
        source = other.import_file(make_layer(tmp_path / "x", {0: "a"}), owner="o")
        layer = store.link_from(other, source.digest, owner="p")
        assert store.verify(layer.digest) == layer
        assert layer.path.stat().st_mode & 0o777 == 0o444
        source.path.unlink()
        source.path.write_bytes(b"y" * source.size)
        store.drop("p")
        store.collect_garbage()
        with pytest.raises(LayerError):
            store.link_from(other, source.digest, owner="p")
        assert stored_files(store) == set()
        other.close()
    finally:
        subprocess.run(["rm", "-r", str(elsewhere)], check=True)


def test_drafts_end_with_their_context(store: LayerStore) -> None:
    with store.draft() as path:
        make_layer(path, {0: "a"})
        assert LayerStore(store.directory, ToyTools()).collect_garbage().leftovers == 0
        layer = store.import_file(path, owner="o")
    with store.draft() as path:
        path.write_bytes(b"never finished")
        (path.parent / "beside").write_bytes(b"what a writer needed meanwhile")
    with pytest.raises(RuntimeError), store.draft() as path:
        path.write_bytes(b"never finished")
        raise RuntimeError
    assert stored_files(store) == {f"sha256/{layer.path.name}"}


WORKER = textwrap.dedent(
    """
    import random, sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[1])
    from unit.storage.storage_fakes import ToyTools, make_layer
    from agentenv.storage.layers import LayerStore

    class SlowTools(ToyTools):
        def verify(self, path):
            print("verifying", path.parent.name, flush=True)
            sys.stdin.readline()
            return super().verify(path)
    """
)


def start_worker(store: LayerStore, script: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            WORKER + textwrap.dedent(script),
            str(TESTS),
            str(store.directory),
            *map(str, arguments),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_an_import_of_another_process_is_left_alone_until_that_process_is_killed(
    tmp_path: Path, store: LayerStore
) -> None:
    file = make_layer(tmp_path / "x", {0: "a"})
    script = """
    store = LayerStore(Path(sys.argv[2]), SlowTools())
    with store.lease(sys.argv[4:]):
        store.import_file(Path(sys.argv[3]), owner="o", move=False)
    """
    leased = store.import_file(make_layer(tmp_path / "y", {1: "b"}), owner="p")
    with start_worker(store, script, file, leased.digest) as worker:
        assert worker.stdout is not None
        draft = worker.stdout.readline().split()[1]
        store.drop("p")
        assert store.collect_garbage() == store.recover()
        assert stored_files(store) == {f"incoming/{draft}/layer", f"sha256/{leased.path.name}"}
        worker.kill()
    assert store.recover().leftovers == 1
    assert stored_files(store) == {f"sha256/{leased.path.name}"}
    assert store.collect_garbage().removed == (leased.digest,)
    assert stored_files(store) == set()
    assert file.exists(), "what was not taken in stays with its owner"


def test_a_collection_that_is_killed_between_a_file_and_its_row(tmp_path: Path, store: LayerStore) -> None:
    free = store.import_file(make_layer(tmp_path / "x", {0: "a"}), owner="o")
    lost = store.import_file(make_layer(tmp_path / "y", {1: "b"}), owner="p")
    store.drop("o")
    for layer in (free, lost):
        layer.path.unlink()
    assert store.recover().leftovers == 1
    assert [layer.digest for layer in store.list()] == [lost.digest], (
        "what somebody needs is told to be lost, not forgotten"
    )


@pytest.mark.parametrize("seed", range(8))
def test_kill_9_anywhere_leaves_nothing_for_ever(tmp_path: Path, store: LayerStore, seed: int) -> None:
    script = """
    store = LayerStore(Path(sys.argv[2]), ToyTools())
    for number in range(1_000_000):
        file = make_layer(Path(sys.argv[3]) / str(number), {number: "a"}, padding=200_000)
        if number == 0:
            print("begun", flush=True)
        layer = store.import_file(file, owner=f"o{number}", move=number % 2 == 0)
        if number % 3 == 0:
            store.drop(f"o{number}")
            store.collect_garbage()
    """
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    with start_worker(store, script, inbox) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        time.sleep(random.Random(seed).uniform(0, 0.3))  # any moment
        worker.send_signal(signal.SIGKILL)
    store.recover()
    known = {f"sha256/{layer.path.name}" for layer in store.list()}
    assert stored_files(store) == known
    for layer in store.list():
        assert store.verify(layer.digest) == layer
    for owner in store.owners_with_prefix(""):
        store.drop(owner)
    store.collect_garbage()
    assert stored_files(store) == set()
    assert store.usage().size_bytes == 0


def test_collections_do_not_race_with_imports_of_other_processes(tmp_path: Path, store: LayerStore) -> None:
    script = """
    store = LayerStore(Path(sys.argv[2]), ToyTools())
    dice = random.Random(sys.argv[4])
    held = {}
    for number in range(40):
        # Few contents: processes import and collect the very same digests.
        content = dice.randrange(6)
        file = Path(sys.argv[3]) / f"in-{sys.argv[4]}"
        facts = '"uuid": "u", "parent_uuid": null, "virtual_size": 512, "sealed": true'
        file.write_text('{%s, "blocks": {"0": "%d"}}' % (facts, content))
        owner = f"{sys.argv[4]}-{dice.randrange(4)}"
        layer = store.import_file(file, owner=owner, move=dice.random() < 0.5)
        held.setdefault(owner, set()).add(layer.digest)
        if dice.random() < 0.6:
            gone = dice.choice(sorted(held))
            store.drop(gone)
            del held[gone]
        if dice.random() < 0.6:
            store.collect_garbage()
        for owner, digests in held.items():
            assert set(store.references(owner)) == digests, owner
            for digest in digests:
                store.verify(digest)
    for owner in held:
        store.drop(owner)
    print("survived")
    """
    workers = [start_worker(store, script, tmp_path, number) for number in range(3)]
    outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    assert [output.splitlines()[-1] for output in outputs] == ["survived"] * 3
    store.collect_garbage()
    assert store.list() == ()
    assert stored_files(store) == set()


def test_threads_share_a_store(tmp_path: Path, store: LayerStore) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(15):
                owner = f"o{number}"
                layer = store.import_file(make_layer(tmp_path / owner, {number: str(turn)}), owner=owner)
                store.collect_garbage()
                store.verify(layer.digest)
                store.drop(owner)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    store.collect_garbage()
    assert stored_files(store) == set()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)], check=False)
    if mounted.returncode != 0:
        pytest.skip("cannot mount a tmpfs here")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.mark.root
def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path, small_disk: Path) -> None:
    store = LayerStore(small_disk / "layers", ToyTools())
    kept = store.import_file(make_layer(tmp_path / "kept", {0: "a"}, padding=1_000_000), owner="o")
    before = stored_files(store), os.statvfs(small_disk).f_bfree
    large = make_layer(tmp_path / "large", {1: "a"}, padding=1_300_000)
    for _ in range(3):
        with pytest.raises(InsufficientStorageError, match="is full"):
            store.import_file(large, owner="p")
    assert large.exists()
    assert store.references("p") == ()
    assert stored_files(store) == before[0]
    assert os.statvfs(small_disk).f_bfree >= before[1] - 16  # the index has grown by some pages
    store.drop("o")
    store.collect_garbage()
    assert not kept.path.exists()
    store.import_file(large, owner="p")
    store.close()


@pytest.mark.root
def test_a_collection_frees_room_on_a_disk_without_any(tmp_path: Path, small_disk: Path) -> None:
    store = LayerStore(small_disk / "layers", ToyTools())
    layers = [
        store.import_file(make_layer(tmp_path / str(number), {number: "a"}, padding=300_000), owner="o")
        for number in range(4)
    ]
    store.set_references("o", [layers[0].digest])
    with pytest.raises(OSError, match="No space left"), (small_disk / "ballast").open("wb", buffering=0) as ballast:
        while True:
            ballast.write(b"x" * 4096)
    report = store.collect_garbage()
    assert set(report.removed) == {layer.digest for layer in layers[1:]}
    store.collect_garbage()
    assert store.list() == (layers[0],)
    assert stored_files(store) == {f"sha256/{layers[0].path.name}"}
    store.close()
