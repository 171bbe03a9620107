"""Settings of the tests of stores and reports."""

from functools import cache

import pytest
import vl_convert


@pytest.fixture(scope="session", autouse=True)
def one_bundle_of_vega():
    """Bundle what draws the charts once: that takes most of the time that a page takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vl_convert, "javascript_bundle", cache(vl_convert.javascript_bundle))
        yield
