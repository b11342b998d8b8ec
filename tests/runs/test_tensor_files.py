"""Files with the rows of each rank: any rank and torch read them; missing files are errors."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader

from accel_gpt.errors import CheckpointError
from accel_gpt.runs.tensor_files import (
    OFFSETS,
    rank_content,
    read_tensors,
    saved_tensors,
)

FULL = torch.arange(15.0).view(5, 3)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Files of two ranks; the first has 3 of the 5 rows and the unsharded tensors."""
    for rank, (start, rows) in enumerate([(0, FULL[:3]), (3, FULL[3:])]):
        content = rank_content({"w": rows, "step": torch.tensor(7.0)} if rank == 0 else {}, True)
        if rank:
            offsets = json.dumps({"w": {"saved_offsets": [start, 0]}})
            content = {"tensors": {"w": rows}, "metadata": {"format": "pt", OFFSETS: offsets}}
        save_file(filename=tmp_path / f"weights_{rank}.safetensors", **content)
    return sorted(tmp_path.iterdir())


def zeros() -> dict[str, Tensor]:
    return {"w": torch.zeros(5, 3), "step": torch.zeros(())}


def test_rows_of_all_ranks_are_read_in_any_order(files: list[Path]) -> None:
    for order in (files, files[::-1]):
        read = zeros()
        read_tensors(saved_tensors(order), read)
        assert torch.equal(read["w"], FULL)
        assert read["step"] == 7
        assert torch.equal(saved_tensors(order)["w"].whole(), FULL)


def test_torch_reads_them_too(files: list[Path]) -> None:
    read = zeros()
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(read, storage_reader=HuggingFaceStorageReader(str(files[0].parent)), no_dist=True)
    assert torch.equal(read["w"], FULL)
    assert read["step"] == 7


def test_missing_rows_and_other_shapes_are_refused(files: list[Path]) -> None:
    with pytest.raises(CheckpointError, match=r"it has w with shape \(3, 3\)"):
        read_tensors(saved_tensors(files[:1]), zeros())
    with pytest.raises(CheckpointError, match="it lacks 3 rows of w"):
        saved_tensors(files[1:])["w"].read_into(torch.zeros(5, 3))
    with pytest.raises(CheckpointError, match="it lacks v"):
        read_tensors(saved_tensors(files), {**zeros(), "v": torch.zeros(5, 3)})
    with pytest.raises(CheckpointError, match="it has step, unknown"):
        read_tensors(saved_tensors(files), {"w": torch.zeros(5, 3)})
