"""A fault: a disk that takes SECONDS for each sequence, so that training waits for it."""

import time
from pathlib import Path

import numpy as np

SECONDS = 0.006


class SlowTokens(np.memmap):
    def __getitem__(self, index):
        time.sleep(SECONDS)
        return super().__getitem__(index)


def shards(folder, split):
    arrays = [np.load(file, mmap_mode="r") for file in sorted(Path(folder).glob(f"{split}_*.npy"))]
    return [array.view(SlowTokens) for array in arrays] if split == "train" else arrays
