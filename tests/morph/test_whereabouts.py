"""A manager's URL, or a file that has it now; a link asks at each attempt."""

from __future__ import annotations

from pathlib import Path

import pytest

from varuna.errors import ConfigError
from varuna.morph.whereabouts import check_place, manager_url, place_of


def test_a_url_is_itself() -> None:
    check_place("http://10.0.0.1:7000")
    assert manager_url("http://10.0.0.1:7000") == "http://10.0.0.1:7000"


def test_a_file_is_read_each_time(tmp_path: Path) -> None:
    path = tmp_path / "two words %20 é" / "url"
    place = place_of(path)
    check_place(place)
    with pytest.raises(OSError, match="No such file"):
        manager_url(place)
    path.parent.mkdir()
    for url in ("http://10.0.0.1:7000", "http://10.0.0.2:7001"):
        path.write_text(f"{url}\n")
        assert manager_url(place) == url


@pytest.mark.parametrize("text", ["", "ftp://x:1", "http://host", "é"])
def test_a_file_with_something_else(tmp_path: Path, text: str) -> None:
    path = tmp_path / "url"
    path.write_text(text)
    with pytest.raises(OSError, match="has no manager's URL in it"):
        manager_url(place_of(path))


@pytest.mark.parametrize(
    "place", ["", "state/url", "/state/url", "file:state/url", "file://state/url", "http://host"]
)
def test_no_place(place: str) -> None:
    with pytest.raises(ConfigError, match=r"file:///PATH|no URL of a manager"):
        check_place(place)
