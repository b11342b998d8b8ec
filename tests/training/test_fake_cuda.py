"""What a step does on CUDA, with tensors that have no storage, on a machine without CUDA."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from accel_gpt.config.model import PRESETS
from tests.test_launch import PLAIN

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>);
}
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch has a guard for CUDA")
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
def test_a_step_on_cuda_mixes_no_devices_and_takes_the_chunks_of_an_h100(tmp_path: Path) -> None:
    source, library = tmp_path / "guard.cpp", tmp_path / "guard.so"
    source.write_text(GUARD)
    torchs = [f"-I{folder}" for folder in cpp_extension.include_paths()]
    torchs += [f"-L{folder}" for folder in cpp_extension.library_paths()]
    options = ["-shared", "-fPIC", "-std=c++20", "-O1", "-o", str(library)]
    subprocess.run(["g++", *options, str(source), *torchs, "-lc10"], check=True)
    worker = [sys.executable, "-m", "tests.helpers.fake_cuda", str(library)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(worker, cwd=root, env=PLAIN, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["chunks"] == {
        "bf16": 4096,
        "bf16, capped": 2048,
        "bf16, compiled": 16384,
        "bf16, compiled, capped": 16384,
        "fp16": 4096,
        "fp16, capped": 2048,
        "fp16, compiled": 16384,
        "fp16, compiled, capped": 16384,
        "fp32": 4096,
        "fp32, capped": 2048,
        "fp32, compiled": 8192,
        "fp32, compiled, capped": 8192,
    }
    for preset in PRESETS:
        made = found["presets"][preset]
        expected = {"loss": "torch.float32", "stream": ["torch.bfloat16"], "device": ["cuda"]}
        assert made == expected, preset
