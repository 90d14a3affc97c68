from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import pytest

from lmres.errors import ConfigError
from lmres.rendezvous.edge import state_dir
from lmres.rendezvous.edge.state_dir import default_state_dir, prepare_state_dir, write_private_json


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_default_is_short_and_named_by_user_run_and_node(tmp_path: Path) -> None:
    env = {"XDG_RUNTIME_DIR": str(tmp_path)}
    path = default_state_dir(run_id="run/1", node_id="host-a", environ=env)
    assert path.parent == tmp_path
    assert path.name.startswith(f"lmres-{os.geteuid()}-run_1-host_a-")
    assert len(default_state_dir(run_id="r" * 256, node_id="n" * 128, environ=env).name) < 70
    others = {default_state_dir(run_id=run, node_id=node, environ=env) for run in ("a/b", "a b") for node in "xy"}
    assert len(others) == 4


@pytest.mark.parametrize("runtime", ["", "relative", "/nonexistent", "/proc/version"])
def test_without_a_runtime_folder_it_is_in_the_temporary_one(runtime: str, tmp_path: Path) -> None:
    env = {"XDG_RUNTIME_DIR": runtime, "TMPDIR": str(tmp_path)}
    assert default_state_dir(run_id="r", node_id="n", environ=env).parent == tmp_path


def test_it_is_created_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = prepare_state_dir(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert path.is_absolute() and mode(path) == 0o700
    assert prepare_state_dir(path) == path


def test_an_open_folder_of_ours_is_closed_and_a_shared_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(0o777)
    assert mode(prepare_state_dir(path)) == 0o700
    path.chmod(0o1777)
    with pytest.raises(ConfigError, match="the system shares; give a folder inside"):
        prepare_state_dir(path)
    assert mode(path) == 0o1777


def test_a_link_or_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="symbolic link"):
        prepare_state_dir(tmp_path / "link")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="symbolic link"):
        prepare_state_dir(tmp_path / "dangling")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="not a folder"):
        prepare_state_dir(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"state_dir .*file/below is refused"):
        prepare_state_dir(tmp_path / "file" / "below")


def test_a_folder_of_someone_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = prepare_state_dir(tmp_path / "theirs")
    monkeypatch.setattr(state_dir.os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="owns it and this process runs as"):
        prepare_state_dir(path)


def test_a_file_is_private_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text("old")
    path.chmod(0o666)
    with path.open() as reader:
        write_private_json(path, {"step": 7})
        assert reader.read() == "old"
    assert json.loads(path.read_text()) == {"step": 7}
    assert mode(path) == 0o600
    assert names(tmp_path) == ["c.json"]


def test_a_link_is_replaced_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("kept")
    (tmp_path / "c.json").symlink_to(tmp_path / "target")
    write_private_json(tmp_path / "c.json", {})
    assert (tmp_path / "target").read_text() == "kept"
    assert not (tmp_path / "c.json").is_symlink()


def test_a_place_that_can_hold_no_file_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "no" / "c.json", tmp_path / "file" / "c.json", tmp_path / "folder"):
        with pytest.raises(ConfigError, match=r"can not write .*folder that exists"):
            write_private_json(path, {"step": 1})
    assert names(tmp_path) == ["file", "folder"]


def test_a_full_disk_keeps_the_old_file_and_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.json"
    write_private_json(path, {"step": 1})

    def full(self: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(state_dir.Path, "replace", full)
    with pytest.raises(OSError, match=r"can not write .*c\.json: No space left") as caught:
        write_private_json(path, {"step": 2})
    assert caught.value.errno == errno.ENOSPC
    assert json.loads(path.read_text()) == {"step": 1}
    assert names(tmp_path) == ["c.json"]


def test_what_is_not_json_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        write_private_json(tmp_path / "c.json", {"x": float("nan")})
    assert names(tmp_path) == []
