"""The durable tier: an image is in files whole or not at all, and what lies there is never believed blindly."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from lmres.errors import DurableError, VaultError
from lmres.gemini.edge import durable_read, durable_write
from lmres.gemini.edge.durable import open_part, prune, read_part, run_folder, scan
from lmres.gemini.edge.transfer import PartServer, pull
from lmres.gemini.inventory import Key
from lmres.gemini.layout import decode_header
from tests.contract.durable_kit import RUN, Made, check_whole, make
from tests.contract.transfer_kit import open_files

KILLS = 50


def keys(directory: Path) -> list[tuple[int, int, int]]:
    return [(found.key.step, found.key.origin, found.rank) for found in scan(directory, RUN).images]


def left(directory: Path) -> list[str]:
    return [path.name for path in directory.rglob("*") if path.name.startswith(".")]


# -- written and found


def test_an_image_is_found_again_with_all_that_was_said(tmp_path: Path) -> None:
    made = make()
    done = made.write(tmp_path)
    assert done is not None and done.bytes == len(made.own) + len(made.shared) + len(made.log)
    (found,) = scan(tmp_path, RUN).images
    assert found.image == made.image
    assert found.folder == run_folder(tmp_path, RUN) / "step-000000000010-g000001" == done.folder
    assert sorted(path.name for path in found.folder.iterdir()) == [
        "rank-000000.json",
        "rank-000000.log",
        "rank-000000.safetensors",
    ]
    for name in ("shared", "own", "log"):
        into = memoryview(bytearray(found.image.part(name).length + 3))
        read_part(found, name, into)
        assert into[:-3] == getattr(made, name)
        assert into[-3:] == b"\0\0\0"
    assert scan(tmp_path, RUN).problems == ()


def test_the_file_opens_with_the_safetensors_library(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    safetensors = pytest.importorskip("safetensors")
    made = make()
    done = made.write(tmp_path)
    assert done is not None
    path = done.folder / "rank-000000.safetensors"
    with safetensors.safe_open(path, "np") as file:
        assert set(file.keys()) == {"rng", "weight", "état"}
        assert file.metadata() == {"step": "10"}
        header = decode_header(made.own, total_length=len(made.own) + len(made.shared))
        data = made.own[header.header_length :] + made.shared
        for entry in header.entries:
            tensor = file.get_tensor(entry.name)
            assert tensor.shape == entry.shape
            assert tensor.tobytes() == data[entry.begin : entry.end]
        assert file.get_tensor("weight").dtype == numpy.int32


def test_parts_may_come_from_descriptors(tmp_path: Path) -> None:
    made = make(length=9 << 20)
    fd = os.memfd_create("all")
    with os.fdopen(fd, "wb", buffering=0) as file:
        file.write(b"x" * 100 + made.own + made.shared + made.log)
        at = (100, 100 + len(made.own), 100 + len(made.own) + len(made.shared))
        made.write(
            tmp_path,
            own=(fd, at[0], len(made.own)),
            shared=(fd, at[1], len(made.shared)),
            log=(fd, at[2], len(made.log)),
        )
    check_whole(scan(tmp_path, RUN))
    assert keys(tmp_path) == [(10, 1, 0)]


def test_empty_parts(tmp_path: Path) -> None:
    made = make(step=0)
    assert made.log == b""
    made.write(tmp_path)
    check_whole(scan(tmp_path, RUN))
    assert keys(tmp_path) == [(0, 1, 0)]


def test_newest_first_then_by_rank(tmp_path: Path) -> None:
    for step, origin, rank in ((10, 1, 1), (20, 1, 0), (10, 2, 0), (10, 1, 0)):
        make(step=step, origin=origin, rank=rank).write(tmp_path)
    assert keys(tmp_path) == [(20, 1, 0), (10, 2, 0), (10, 1, 0), (10, 1, 1)]


def test_a_part_can_be_served_to_a_peer(tmp_path: Path) -> None:
    made = make(length=5 << 20)
    made.write(tmp_path)
    (found,) = scan(tmp_path, RUN).images
    shared = made.image.shared
    server = PartServer(lambda digest: open_part(found, "shared"), run_id=RUN, address="127.0.0.1")
    before = open_files()
    into = memoryview(bytearray(shared.length))
    pull("127.0.0.1", server.port, shared.digest, shared.length, into, run_id=RUN)
    assert server.close()
    assert into == made.shared
    assert open_files() <= before


def test_nothing_was_ever_written(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "missing"):
        found = scan(directory, RUN)
        assert (found.images, found.problems) == ((), ())
        assert prune(directory, RUN, {(1, 1)}).removed == ()


# -- runs and their names


@pytest.mark.parametrize(
    "run_id",
    [
        "../../etc",
        "..",
        ".",
        "",
        "a/b",
        "/abs",
        "x" * 5000,
        "a\0b",
        "new\nline",
        "日本",
        "\ud800",
        "-rf",
        "CON",
        ".hidden",
    ],
)
def test_any_run_id_stays_in_the_directory(tmp_path: Path, run_id: str) -> None:
    inside = tmp_path / "inside"
    make().write(inside, run_id=run_id)
    assert [path.name for path in tmp_path.iterdir()] == ["inside"]
    (folder,) = inside.iterdir()
    assert folder == run_folder(inside, run_id) and len(folder.name.encode()) < 80
    assert len(scan(inside, run_id).images) == 1


def test_runs_whose_names_look_alike_do_not_meet(tmp_path: Path) -> None:
    ids = ["a/b", "a-b", "a_b", "A-B", "a--b", "a/b ", "a.b", "x" * 40, "x" * 41]
    assert len({str(run_folder(tmp_path, run_id)).lower() for run_id in ids}) == len(ids)
    for number, run_id in enumerate(ids):
        make(step=number).write(tmp_path, run_id=run_id)
    for number, run_id in enumerate(ids):
        assert [found.key.step for found in scan(tmp_path, run_id).images] == [number]


# -- killed, cancelled, overtaken


@pytest.mark.timeout(240)
def test_a_killed_writer_leaves_only_whole_images(tmp_path: Path) -> None:
    chance = random.Random(4)
    found_images = 0
    command = [sys.executable, "-m", "tests.contract.durable_kit", str(tmp_path), str(3 << 20)]
    for kill in range(KILLS):
        with subprocess.Popen([*command, str(kill)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            time.sleep(chance.uniform(0, 0.15))
            writer.kill()
        found = scan(tmp_path, RUN)
        check_whole(found)
        found_images += len(found.images)
    assert found_images > KILLS  # it was not killed before it wrote anything
    assert prune(tmp_path, RUN, {(10, 1), (20, 1)}).problems == ()
    assert left(tmp_path) == []  # nor is anything of the dead kept


def test_cancelled_between_chunks_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cancel = threading.Event()
    real = durable_write._write_all
    written = []

    def cancel_at_the_second(fd: int, data: memoryview) -> None:
        written.append(len(data))
        real(fd, data)
        if len(written) == 3:
            cancel.set()

    monkeypatch.setattr(durable_write, "_write_all", cancel_at_the_second)
    assert make(length=20 << 20).write(tmp_path, cancel=cancel) is None
    assert len(written) == 3
    assert keys(tmp_path) == [] and left(tmp_path) == []


def test_a_newer_image_overtakes_a_slow_one_and_both_are_consistent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, quick = make(step=10, length=12 << 20), make(step=20, length=12 << 20)
    real = durable_write._write_all
    go_on, is_slow = threading.Event(), threading.Event()

    def throttled(fd: int, data: memoryview) -> None:
        if threading.current_thread().name == "slow":
            is_slow.set()
            assert go_on.wait(30)
        real(fd, data)

    monkeypatch.setattr(durable_write, "_write_all", throttled)
    thread = threading.Thread(target=slow.write, args=(tmp_path,), name="slow")
    thread.start()
    assert is_slow.wait(30)
    quick.write(tmp_path)
    assert keys(tmp_path) == [(20, 1, 0)]
    go_on.set()
    thread.join(30)
    assert keys(tmp_path) == [(20, 1, 0), (10, 1, 0)]
    check_whole(scan(tmp_path, RUN))


def test_memory_that_changes_under_the_writer_is_noticed(tmp_path: Path) -> None:
    made = make()
    changed = bytearray(made.shared)
    changed[1000] ^= 1
    with pytest.raises(DurableError, match=made.image.shared.digest):
        made.write(tmp_path, shared=memoryview(changed))
    assert keys(tmp_path) == [] and left(tmp_path) == []


def test_a_part_of_another_length_is_refused(tmp_path: Path) -> None:
    made = make()
    with pytest.raises(DurableError, match="the log part should have 10 bytes and has 9"):
        made.write(tmp_path, log=memoryview(made.log[:9]))
    fd = os.memfd_create("short")
    with os.fdopen(fd, "wb", buffering=0) as file:
        file.write(made.shared[:-1])
        with pytest.raises(DurableError, match="ends 1 bytes early"):
            made.write(tmp_path, shared=(fd, 0, len(made.shared)))
    assert keys(tmp_path) == [] and left(tmp_path) == []


def _write_often(directory: Path, seed: int, ready: object) -> None:
    made = make(seed=seed, length=1 << 20)
    ready.wait()  # type: ignore[attr-defined]
    for _ in range(25):
        made.write(directory)


def test_two_writers_of_one_rank_never_mix(tmp_path: Path) -> None:
    """The same key with two contents: not meant to happen, and harmless."""
    make(length=1 << 20).write(tmp_path)
    context = multiprocessing.get_context("fork")
    ready = context.Barrier(3)
    writers = [context.Process(target=_write_often, args=(tmp_path, seed, ready)) for seed in (0, 1)]
    for writer in writers:
        writer.start()
    ready.wait(30)
    while any(writer.is_alive() for writer in writers):
        # Writers are held off between a scan and its reads, so that what it saw is what is read.
        with durable_write.locked_folder(run_folder(tmp_path, RUN) / "step-000000000010-g000001"):
            check_whole(scan(tmp_path, RUN))
    for writer in writers:
        writer.join(30)
        assert writer.exitcode == 0
    found = scan(tmp_path, RUN)
    check_whole(found)
    assert [image.image for image in found.images] in (
        [make(length=1 << 20).image],
        [make(length=1 << 20, seed=1).image],
    )
    assert found.problems == () and left(tmp_path) == []


def test_an_image_written_again_is_there_all_the_time(tmp_path: Path) -> None:
    made = make(length=1 << 20)
    made.write(tmp_path)
    over = threading.Event()

    def again() -> None:
        while not over.is_set():
            made.write(tmp_path)

    thread = threading.Thread(target=again)
    thread.start()
    try:
        for _ in range(200):
            found = scan(tmp_path, RUN)
            assert len(found.images) == 1, found.problems
    finally:
        over.set()
        thread.join(30)


# -- disks fail


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "small", str(place)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("mounting is not allowed here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_told_before_and_costs_nothing(small_disk: Path) -> None:
    make(step=10, length=1 << 20).write(small_disk)
    with pytest.raises(DurableError, match=r"needs 8388\d+ bytes in .*, \d+ are free"):
        make(step=20, length=8 << 20).write(small_disk)
    assert keys(small_disk) == [(10, 1, 0)] and left(small_disk) == []
    assert len(list(small_disk.rglob("step-*"))) == 1, "a failed write leaves no folder"
    check_whole(scan(small_disk, RUN))


def test_a_disk_that_fills_meanwhile(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(step=10, length=1 << 20).write(small_disk)
    monkeypatch.setattr(durable_write, "_free_bytes", lambda _: 1 << 40)
    with pytest.raises(DurableError, match=r"No space left on device, after \d+ of 8388\d+ bytes"):
        make(step=20, length=8 << 20).write(small_disk)
    assert keys(small_disk) == [(10, 1, 0)] and left(small_disk) == []
    assert len(list(small_disk.rglob("step-*"))) == 1, "a failed write leaves no folder"
    make(step=30, length=1 << 20).write(small_disk)
    assert keys(small_disk) == [(30, 1, 0), (10, 1, 0)]


def test_a_disk_that_is_read_only(small_disk: Path) -> None:
    make(step=10, length=1 << 20).write(small_disk)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(DurableError, match="Read-only file system"):
        make(step=20, length=1 << 20).write(small_disk)
    assert keys(small_disk) == [(10, 1, 0)]
    assert "Read-only" in prune(small_disk, RUN, {(20, 1)}).problems[0]
    check_whole(scan(small_disk, RUN))


def _write_limited(directory: Path, told: object) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))
    try:
        make(step=20, length=8 << 20).write(directory)
    except DurableError as error:
        told.send(str(error))  # type: ignore[attr-defined]


def test_a_file_that_may_not_become_so_large(tmp_path: Path) -> None:
    make(step=10).write(tmp_path)
    near, far = multiprocessing.Pipe()
    writer = multiprocessing.get_context("fork").Process(target=_write_limited, args=(tmp_path, far))
    writer.start()
    assert near.poll(30) and "File too large" in near.recv()
    writer.join(30)
    assert keys(tmp_path) == [(10, 1, 0)] and left(tmp_path) == []


@pytest.mark.parametrize("call", ["fsync", "write", "open", "rename", "mkdir", "fdatasync"])
@pytest.mark.parametrize("times", [1, 2, 3, 5])
def test_an_error_of_any_call_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, times: int
) -> None:
    make(step=10).write(tmp_path)
    count = [times]
    owner, name = (Path, call) if call in {"rename", "mkdir"} else (os, call)
    real = getattr(owner, name)

    def fail(*args: object, **options: object) -> object:
        count[0] -= 1
        if count[0] == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args, **options)

    made = make(step=20, length=12 << 20)
    monkeypatch.setattr(durable_write, "_SYNC_BYTES", 1 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        try:
            made.write(tmp_path)
            failed = False
        except DurableError as error:
            assert "Input/output error" in str(error)
            failed = True
    assert failed == (count[0] <= 0)
    found = scan(tmp_path, RUN)
    check_whole(found)
    assert (10, 1, 0) in keys(tmp_path)
    assert left(tmp_path) == []
    made.write(tmp_path)  # the next try puts everything right
    assert keys(tmp_path) == [(20, 1, 0), (10, 1, 0)]


def test_a_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DurableError) as raised:
        make().write(tmp_path / "file")
    assert isinstance(raised.value, VaultError)
    assert scan(tmp_path / "file", RUN).problems


# -- what lies there is not believed blindly


def corrupt(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["shared", "own", "log"])
def test_a_flipped_byte_is_found_by_the_digest(tmp_path: Path, name: str) -> None:
    made = make()
    done = made.write(tmp_path)
    assert done is not None
    kind = "log" if name == "log" else "safetensors"
    corrupt(done.folder / f"rank-000000.{kind}", len(made.own) + 5 if name == "shared" else 5)
    (found,) = scan(tmp_path, RUN).images
    for each in ("shared", "own", "log"):
        into = memoryview(bytearray(found.image.part(each).length))
        if each == name:
            with pytest.raises(DurableError, match="has the digest"):
                read_part(found, each, into)
        else:
            read_part(found, each, into)


def test_any_changed_byte_of_a_manifest_is_noticed(tmp_path: Path) -> None:
    made = make()
    done = made.write(tmp_path)
    assert done is not None
    path = done.folder / "rank-000000.json"
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        for found in scan(tmp_path, RUN).images:  # space for another space: the same text
            assert found.image == made.image
    path.write_bytes(data[: len(data) // 2])
    found = scan(tmp_path, RUN)
    assert found.images == () and "is not believed" in found.problems[0]


def _said(path: Path, **changed: object) -> None:
    """A manifest that is changed on purpose, check sum included."""
    said = {**json.loads(path.read_bytes()), **changed}
    said.pop("check")
    said["check"] = xxhash.xxh3_64_hexdigest(json.dumps(said, sort_keys=True).encode())
    path.write_text(json.dumps(said))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"version": 2}, "it has version 2"),
        ({"format": "other"}, "it is no lmres-image"),
        ({"run_id": "other"}, "it belongs to the run 'other'"),
        ({"step": 11}, "it says step 11"),
        ({"rank": 1}, "rank 1"),
        ({"rank": True}, "rank is True"),
        ({"step": -1}, "negative|says step -1"),
        ({"topology": None}, "topology is None"),
        ({"finite": 1}, "finite is 1"),
        ({"trust": []}, "not complete"),
        ({"parts": {}}, "not complete"),
        ({"parts": None}, "not complete"),
        ({"parts": {"shared": 1, "own": 2, "log": 3}}, "not complete"),
    ],
)
def test_manifests_of_others_are_skipped_and_told(tmp_path: Path, changed: dict[str, object], why: str) -> None:
    make(rank=1).write(tmp_path)
    done = make().write(tmp_path)
    assert done is not None
    _said(done.folder / "rank-000000.json", **changed)
    found = scan(tmp_path, RUN)
    assert [image.rank for image in found.images] == [1]
    (problem,) = found.problems
    assert re.search(why, problem)


def test_files_of_another_size_or_kind_are_skipped(tmp_path: Path) -> None:
    folder = None
    for rank in range(6):
        done = make(rank=rank).write(tmp_path)
        assert done is not None
        folder = done.folder
    assert folder is not None
    with open(folder / "rank-000000.safetensors", "ab") as file:
        file.write(b"x")
    (folder / "rank-000001.log").unlink()
    os.truncate(folder / "rank-000002.safetensors", 10)
    (folder / "rank-000003.json").unlink()
    (folder / "rank-000004.json").rename(folder / "aside")
    (folder / "rank-000004.json").symlink_to(folder / "aside")
    os.mkfifo(folder / "rank-000007.json")
    (folder / "rank-000008.json").mkdir()
    (folder / "rank-000009.json").write_bytes(b"x" * (65 << 10))
    (folder / "rank-10.json").write_text("{}")
    (folder.parent / "step-5").mkdir()
    (folder.parent / "step-000000000030-g000001").write_text("a file")
    (folder.parent / "notes.txt").write_text("mine")
    found = scan(tmp_path, RUN)
    assert [image.rank for image in found.images] == [5]
    assert len(found.problems) == 13, found.problems
    assert all(str(tmp_path) in problem for problem in found.problems)


def test_a_file_that_changes_after_the_scan(tmp_path: Path) -> None:
    done = make().write(tmp_path)
    assert done is not None
    (found,) = scan(tmp_path, RUN).images
    os.truncate(done.folder / "rank-000000.safetensors", 10)
    (done.folder / "rank-000000.log").unlink()
    for name, why in (("own", "has 10 bytes"), ("shared", "has 10 bytes"), ("log", "No such file")):
        with pytest.raises(DurableError, match=why):
            open_part(found, name)
    os.mkfifo(done.folder / "rank-000000.log")
    with pytest.raises(DurableError, match="not a plain file"):
        open_part(found, "log")


def test_memory_too_small_is_refused(tmp_path: Path) -> None:
    make().write(tmp_path)
    (found,) = scan(tmp_path, RUN).images
    with pytest.raises(DurableError, match="do not fit"):
        read_part(found, "log", memoryview(bytearray(9)))


# -- what is not needed any more


def test_prune_keeps_what_is_named_and_what_is_newer(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        make(step=step).write(tmp_path)
    make(step=10).write(tmp_path, run_id="other")
    assert prune(tmp_path, RUN, set()).removed == ()
    assert prune(tmp_path, RUN, {(20, 1), (40, 1)}).removed == (Key(10, 1), Key(30, 1))
    assert keys(tmp_path) == [(50, 1, 0), (40, 1, 0), (20, 1, 0)]
    assert len(scan(tmp_path, "other").images) == 1
    assert left(tmp_path) == []


def test_a_step_is_out_of_sight_before_it_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (10, 20):
        make(step=step).write(tmp_path)

    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "broken", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(durable_read.shutil, "rmtree", fail)
        assert "broken" in prune(tmp_path, RUN, {(20, 1)}).problems[0]
    assert keys(tmp_path) == [(20, 1, 0)] and len(left(tmp_path)) == 1
    assert prune(tmp_path, RUN, {(20, 1)}).problems == ()
    assert left(tmp_path) == []


def test_prune_ends_what_an_earlier_one_began_and_spares_the_living(tmp_path: Path) -> None:
    made = make()
    done = made.write(tmp_path)
    assert done is not None
    run = run_folder(tmp_path, RUN)
    shutil.copytree(done.folder, run / ".gone-step-000000000005-g000001-0011")
    (done.folder / ".part-rank-000000.log.dead").write_text("x")
    alive = done.folder / ".part-rank-000001.log.alive"
    with open(alive, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert prune(tmp_path, RUN, {(10, 1)}).problems == ()
        assert left(tmp_path) == [alive.name]
    assert prune(tmp_path, RUN, {(10, 1)}).problems == ()
    assert left(tmp_path) == [] and keys(tmp_path) == [(10, 1, 0)]


def test_pruning_under_a_writer_of_that_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(step=20).write(tmp_path)
    real = durable_write._write_all

    def prune_first(fd: int, data: memoryview) -> None:
        prune(tmp_path, RUN, {(20, 1)})
        real(fd, data)

    monkeypatch.setattr(durable_write, "_write_all", prune_first)
    with pytest.raises(DurableError, match="step 10 of generation 1, rank 0"):
        make(step=10).write(tmp_path)
    assert keys(tmp_path) == [(20, 1, 0)] and left(tmp_path) == []


def test_prunes_scans_and_writes_at_once(tmp_path: Path) -> None:
    """Two hosts on one directory: nobody sees a part of a step, nobody raises but a writer that was pruned."""
    failures: list[BaseException] = []
    over = threading.Event()

    def guard(run: object) -> None:
        try:
            run()  # type: ignore[operator]
        except BaseException as error:
            failures.append(error)

    def write(rank: int) -> None:
        for step in range(10, 300, 10):
            with contextlib.suppress(DurableError):
                make(step=step, rank=rank).write(tmp_path)

    def tidy() -> None:
        while not over.is_set():
            newest = sorted({image.key for image in scan(tmp_path, RUN).images})[-2:]
            prune(tmp_path, RUN, newest)

    threads = [threading.Thread(target=guard, args=(lambda rank=rank: write(rank),)) for rank in (0, 1)]
    tidiers = [threading.Thread(target=guard, args=(tidy,)) for _ in range(2)]
    for thread in (*threads, *tidiers):
        thread.start()
    for thread in threads:
        thread.join(60)
    over.set()
    for thread in tidiers:
        thread.join(60)
    assert not failures
    check_whole(scan(tmp_path, RUN))
    assert (290, 1, 0) in keys(tmp_path) and (290, 1, 1) in keys(tmp_path)


def test_made_images_differ() -> None:
    assert isinstance(make(), Made) and make().image != make(seed=1).image == make(seed=1).image
