from __future__ import annotations

import re
from pathlib import Path

from varuna.morph import notices_aws, notices_azure, notices_detect, notices_gcp, notices_http
from varuna.morph.notices_signal import Grace

PAGE = (Path(__file__).parents[2] / "docs" / "concepts" / "notices.md").read_text(encoding="utf-8")


def test_the_example_on_the_page_runs():
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "notices.md", "exec"), {})


def test_numbers_on_the_page_are_those_of_the_code():
    assert f"not answered within {notices_detect.DETECT_S:g} s" in PAGE
    assert f"`spot/instance-action` every {notices_aws.POLL_S:g} s" in PAGE
    assert notices_azure.POLL_S == 1
    assert notices_gcp.LONG_POLL_S == 5 * 60
    assert notices_http.MOST_BYTES == 1 << 20
    assert (Grace().sigterm_s, Grace().usr1_s, notices_gcp.NOTICE_S) == (30, 60, 30)
