"""Control groups as both versions of them show themselves."""

from __future__ import annotations

from pathlib import Path

from lmres import cgroups
from lmres.cgroups import MemoryGroup


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_limits_of_version_2_and_those_of_ancestors(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "cgroup": "0::/a/b\n",
            "fs/a/memory.max": "4096\n",
            "fs/a/memory.current": "3000\n",
            "fs/a/memory.stat": "anon 100\ninactive_file 500\nactive_file 300\n",
            "fs/a/b/memory.max": "max\n",
        },
    )
    found = list(cgroups.memory_groups(tmp_path / "cgroup", tmp_path / "fs"))
    assert found == [MemoryGroup(limit=4096, used=3000, cached=800)]
    assert found[0].free == 1896


def test_limits_of_version_1(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "cgroup": "2:cpu,cpuacct:/x\n4:memory:/c\n",
            "fs/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
            "fs/memory/c/memory.limit_in_bytes": "512\n",
        },
    )
    assert list(cgroups.memory_groups(tmp_path / "cgroup", tmp_path / "fs")) == [
        MemoryGroup(limit=512, used=0, cached=0)
    ]


def test_in_a_container_the_path_may_not_exist(tmp_path: Path) -> None:
    write(tmp_path, {"cgroup": "0::/kubepods/pod1/abc\n", "fs/memory.max": "4096\n", "fs/memory.current": "1\n"})
    assert [g.limit for g in cgroups.memory_groups(tmp_path / "cgroup", tmp_path / "fs")] == [4096]


def test_counters_of_both_versions(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    write(
        new,
        {
            "cgroup": "0::/a/b\n",
            "fs/a/cpu.stat": "usage_usec 9\nnr_throttled 3\nthrottled_usec 700\n",
            "fs/a/b/cpu.stat": "usage_usec 9\nthrottled_usec 200\n",
            "fs/a/memory.events": "low 0\nmax 9\noom 3\noom_kill 2\n",
            "fs/a/b/memory.events": "oom 4\noom_kill 1\n",
            "fs/a/memory.events.local": "oom 2\noom_kill 0\n",
        },
    )
    write(
        old,
        {
            "cgroup": "3:cpu,cpuacct:/x\n4:memory:/x\n",
            "fs/cpu,cpuacct/x/cpu.stat": "nr_periods 9\nthrottled_time 5000000\n",
            "fs/memory/x/memory.failcnt": "7\n",
            "fs/memory/x/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n",
        },
    )
    assert cgroups.quota_wait_us(new / "cgroup", new / "fs") == 700
    assert cgroups.oom_kills(new / "cgroup", new / "fs") == 1
    assert cgroups.limit_hits(new / "cgroup", new / "fs") == 6
    assert cgroups.limit_hits(old / "cgroup", old / "fs") == 7
    assert cgroups.quota_wait_us(old / "cgroup", old / "fs") == 5000
    assert cgroups.oom_kills(old / "cgroup", old / "fs") == 5


def test_nothing_there_is_nothing_told(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert list(cgroups.memory_groups(missing, tmp_path)) == []
    assert cgroups.quota_wait_us(missing, tmp_path) is None
    assert cgroups.oom_kills(missing, tmp_path) is None
    assert cgroups.limit_hits(missing, tmp_path) is None
    write(tmp_path, {"cgroup": "garbage\n::\n0::/../..\n", "bad": "max\n"})
    assert cgroups.oom_kills(tmp_path / "cgroup", tmp_path / "fs") is None
    assert cgroups.number(tmp_path / "bad") is None
