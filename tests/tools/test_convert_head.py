"""The tool that turns a head that is published as a pickle into safetensors."""

import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from magicdec.models.checkpoint import load
from magicdec.models.description import read_config
from tools.convert_head import convert

HEAD = Path(__file__).parents[1] / "models/heads/llama-eagle"


def test_a_converted_head_is_read(tmp_path):
    theirs, out = load_file(HEAD / "model.safetensors"), tmp_path / "out"
    shutil.copy(HEAD / "config.json", tmp_path)
    torch.save(theirs, tmp_path / "pytorch_model.bin")
    convert(tmp_path, out)
    ours, known = (
        load(folder, read_config(folder), torch.float32, "cpu") for folder in (out, HEAD)
    )
    assert ours.keys() == known.keys()
    assert all(torch.equal(ours[name], known[name]) for name in known)


def test_a_pickle_that_runs_code_is_refused(tmp_path):
    class Harmful:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    shutil.copy(HEAD / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": Harmful()}))
    with pytest.raises(SystemExit, match="could not be read as tensors alone"):
        convert(tmp_path, tmp_path / "out")
    assert not (tmp_path / "ran").exists()
