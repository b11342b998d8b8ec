"""Train on token ids that you wrote yourself: raw uint32, without a header.

    accel-gpt train quickstart --code examples/own_shards.py \
        --data.train data/mine --data.tokenizer gpt2 --out_dir runs/mine

Write the folder with NumPy; any number of files for each split will do:

    ids = np.array(tokenizer.encode(text))
    ids[:-10_000].astype("uint32").tofile("data/mine/train_000.bin")
    ids[-10_000:].astype("uint32").tofile("data/mine/val_000.bin")

data.tokenizer names the tokenizer of the ids; without it, the folder must hold a tokenizer.json.
The arrays are memory maps: only the tokens that are trained on are read.
"""

from pathlib import Path

import numpy as np


def shards(folder, split):
    files = sorted(Path(folder).glob(f"{split}_*.bin"))
    return [np.memmap(file, dtype=np.uint32, mode="r") for file in files]
