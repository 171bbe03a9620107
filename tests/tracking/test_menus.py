"""The menus of the page's filters, whose values the page compares with those of its runs."""

from magicdec.report.page_menus import menus_of, picks_of


def test_values_are_named_as_they_are_typed():
    keys = ("hardware.cuda_graphs", "sampling.temperature", "cache.policy")
    settings = ((True, 0.8, "window"), (False, 0.0, "streaming"))
    rows = [{"id": "a", **dict(zip(keys, values, strict=True))} for values in settings]
    menus = menus_of(rows, keys, (), picks_of(rows, keys))
    assert {key: menus[f"pick:{key}"] for key in keys} == {
        "hardware.cuda_graphs": ["", "false", "true"],
        "sampling.temperature": ["", "0.0", "0.8"],
        "cache.policy": ["", "streaming", "window"],
    }
