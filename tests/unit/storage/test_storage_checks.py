"""What `aenv doctor` says of block devices and of the layer store."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest

from agentenv.storage.checks import check_exports, check_layers
from agentenv.storage.images import create_layer_from_raw
from agentenv.storage.layers import LayerStore


@pytest.mark.parametrize(
    ("nodes", "dependencies", "built_in", "words", "mend"),
    [
        ((), "", "", ("ublk: not in this kernel", "kernel NBD: not in this kernel"), ""),
        (
            (),
            "kernel/drivers/block/ublk_drv.ko.xz:\nkernel/drivers/block/nbd.ko: kernel/x.ko\n",
            "",
            ("ublk: not loaded", "kernel NBD: not loaded"),
            "modprobe ublk_drv (optional); modprobe nbd (optional)",
        ),
        (
            ("ublk-control",),
            "",
            "kernel/drivers/block/nbd.ko\n",
            ("ublk: yes", "not loaded"),
            "modprobe nbd (optional)",
        ),
        (("ublk-control", "nbd0"), "", "", ("ublk: yes", "kernel NBD: yes"), ""),
    ],
)
def test_what_the_kernel_offers(
    tmp_path: Path, nodes: tuple[str, ...], dependencies: str, built_in: str, words: tuple[str, ...], mend: str
) -> None:
    for node in nodes:
        (tmp_path / node).touch()
    (tmp_path / "modules.dep").write_text(dependencies)
    (tmp_path / "modules.builtin").write_text(built_in)
    check = check_exports(devices=tmp_path, modules=tmp_path)
    assert check.level == "ok", "QEMU needs none of them"
    assert all(word in check.detail for word in (*words, "NBD over unix sockets: always"))
    assert check.mend == mend


def test_a_kernel_whose_modules_are_not_there(tmp_path: Path) -> None:
    assert "not in this kernel" in check_exports(devices=tmp_path, modules=tmp_path / "none").detail


def test_a_layer_that_is_lost_or_cut_off_is_named_with_its_owner(tmp_path: Path) -> None:
    raw, draft = tmp_path / "raw", tmp_path / "draft"
    raw.write_bytes(b"content" * 4096)
    os.truncate(raw, 1 << 20)
    create_layer_from_raw(raw, draft)
    directory = tmp_path / "layers"
    with closing(LayerStore(directory)) as store:
        stored = store.import_file(draft, owner="template:base")
    whole = check_layers(directory)
    assert (whole.level, whole.mend) == ("ok", "")
    assert whole.detail.startswith("1 layers")
    stored.path.chmod(0o600)
    os.truncate(stored.path, 512)
    for _ in ("cut off", "lost"):
        check = check_layers(directory)
        assert check.level == "fail"
        assert str(stored.path) in check.detail
        assert "template:base" in check.detail
        stored.path.unlink(missing_ok=True)


def test_a_home_without_layers(tmp_path: Path) -> None:
    assert check_layers(tmp_path / "layers").level == "ok"
    assert not (tmp_path / "layers").exists(), "looking changes nothing"
