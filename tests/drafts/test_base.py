"""What every draft must have."""

import pytest

from magicdec.drafts.base import Draft

METHODS = ("build", "prefill", "propose")


@pytest.mark.parametrize("missing", METHODS)
def test_a_draft_that_lacks_a_method_says_which(missing):
    methods = {name: lambda *_: None for name in METHODS if name != missing}
    unfinished = type("Unfinished", (Draft,), methods)
    with pytest.raises(TypeError, match=rf"abstract method '?{missing}\b"):
        unfinished()
