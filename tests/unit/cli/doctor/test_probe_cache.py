"""The folder of packed experts, as `doctor` shows it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path

from dflash_moe.cli.doctor.probe_cache import cache_line, probe_cache
from dflash_moe.config import resolve_settings
from dflash_moe.store.folder import PANELS, CacheFolder


def line_of(path: Path | str, **more: object) -> str:
    return cache_line(probe_cache(resolve_settings(None, cache_path=path, cache_panels="on", **more)))


def test_it_tells_what_is_kept_how_much_fits_and_how_fast_that_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    assert line_of(folder).startswith(f"cache      {folder}: 0 bytes of packed experts, room for ")
    assert not folder.exists()  # looking makes nothing
    CacheFolder.open(folder, allow_network=True).close()
    made = folder / PANELS / ("0" * 64 + ".panels")
    made.write_bytes(bytes(1 << 20))
    made.chmod(0o400)
    found = probe_cache(resolve_settings(None, cache_path=folder, cache_panels="on", cache_max_bytes=3 << 20))
    assert (found["kept_bytes"], found["room_bytes"], found["problem"]) == (1 << 20, 3 << 20, "")
    assert "1.0 MiB of packed experts, room for 3.0 MiB (panels: on)" in cache_line(found)
    if found["bytes_per_s"] is not None:  # not every file system reads past the page cache
        assert "a thread reads" in cache_line(found)


def test_it_tells_that_nothing_is_kept_and_why_a_folder_cannot_be_used(tmp_path: Path) -> None:
    assert line_of("none") == "cache      nothing is kept on disk (cache.path: none)"
    folder = tmp_path / "open"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    assert f"{folder} cannot be used: " in line_of(folder)
