import huggingface_hub
import pytest
from huggingface_hub import errors

from magicdec.errors import UserError
from magicdec.models.description import locate


def test_a_folder_is_taken_as_it_is_and_may_be_relative_to_the_package(tmp_path, monkeypatch):
    assert locate(str(tmp_path)) == tmp_path
    monkeypatch.chdir(tmp_path)
    assert (locate("magicdec/models") / "checkpoint.py").exists()


NOTHING = [
    "",
    "./nope",
    "../nope",
    "no/such/folder",
    "/no/such/folder",
    "name",
    "org/name/",
    "a b/c",
    "~no-such-user/model",
]


# The last two no system takes.
@pytest.mark.parametrize("path", [*NOTHING, "a" * 5000, "a/" * 3000])
def test_a_path_that_is_nothing(path):
    with pytest.raises(UserError, match="is not a folder; valid: a folder with a"):
        locate(path)


@pytest.mark.parametrize(
    ("weights", "patterns"),
    [(True, ["*.json", "*.safetensors"]), (False, ["*.json"])],
    ids=["weights", "json"],
)
def test_only_json_and_safetensors_are_downloaded(tmp_path, monkeypatch, weights, patterns):
    asked = {}

    def snapshot_download(name, **options):
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert locate("org/some.name-1@refs/pr/7", weights=weights) == tmp_path
    assert (asked["name"], asked["revision"]) == ("org/some.name-1", "refs/pr/7")
    assert asked["allow_patterns"] == patterns


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.GatedRepoError, "is gated: accept its licence on https://huggingface.co/org/name"),
        (errors.RepositoryNotFoundError, "was found neither as a folder nor on the hub"),
        (errors.RevisionNotFoundError, "was found neither as a folder nor on the hub"),
        (errors.LocalEntryNotFoundError, "pass draft.model.path=FOLDER"),
        (errors.OfflineModeIsEnabled, "pass draft.model.path=FOLDER"),
        (OSError, "could not be downloaded (OSError)"),
    ],
)
def test_what_the_hub_says_is_one_line(monkeypatch, error, message):
    def snapshot_download(*_, **__):
        raise error.__new__(error)  # the hub's own constructors want a response

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(UserError) as caught:
        locate("org/name", key="draft.model.path")
    assert str(caught.value).startswith("draft.model.path=org/name ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
