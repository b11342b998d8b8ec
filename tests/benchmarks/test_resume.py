"""benchmarks/resume.py tells a trainer that resumes on the right data from one that does not."""

import importlib
import random
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

# a trainer that saves atomically, checks nothing, and reads its data in order
SCRIPT = """
import os, sys
from pathlib import Path
import numpy, torch
from torch.nn import functional as F

out = Path(sys.argv[1])
stream, forgets = sys.argv[2:4]
T, batch, steps, every = map(int, sys.argv[4:])
rows = torch.from_numpy(numpy.fromfile(stream, numpy.uint16).astype(int)).reshape(-1, T)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(1024, 8), torch.nn.Linear(8, 1024))
optimizer = torch.optim.AdamW(model.parameters())
start = 0
saved = sorted(out.glob("step_*"))
if saved:
    state = torch.load(saved[-1])
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    start = state["step"]
for step in range(start, steps):
    place = step - start if forgets == "True" else step
    tokens = rows[[(place * batch + i) % len(rows) for i in range(batch)]]
    F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
    if (step + 1) % every == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        torch.save(state, out / "new")
        os.replace(out / "new", out / f"step_{step + 1:03}")
"""


@pytest.fixture
def resume(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, with few and quick trials."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    module = importlib.import_module("resume")
    monkeypatch.setattr(module, "KILLS", 1)
    monkeypatch.setattr(module, "FLIPS", 1)
    monkeypatch.setattr(module, "PACE", 0.01)
    for one in (module, importlib.import_module("resume_drivers")):
        monkeypatch.setattr(one, "STEPS", 40)
    return module


@pytest.mark.parametrize("forgets", [False, True])
def test_wrong_data_and_damage_are_seen(resume: ModuleType, tmp_path: Path, forgets: bool) -> None:
    drivers = importlib.import_module("resume_drivers")

    class Scripted(drivers.Driver):
        name = "scripted"
        pattern = "step_*"
        area = "*"

        def prepare(self) -> None:
            (self.work / "train.py").write_text(SCRIPT)

        def command(self, out: Path, processes: int) -> list[str | Path]:
            numbers = (drivers.T, drivers.BATCH, drivers.STEPS, drivers.EVERY)
            stream = self.work / "train.bin"
            return [self.work / "train.py", out, stream, str(forgets), *map(str, numbers)]

    driver = Scripted(tmp_path, tmp_path / "work")
    whole = resume.Run(driver, "undisturbed")
    whole.launch()
    assert whole.code == 0
    assert len(whole.path) == drivers.STEPS
    killed = resume.kill_anywhere(driver, whole, random.Random(1))
    assert killed["resumes"] == {"intact": 1}
    assert killed["read"] > 0
    if forgets:
        assert killed["wrong"] == killed["read"]
        assert killed["more"] > 0
        assert killed["never"] != "0 of 640"
        assert killed["weights"] > 0
    else:
        assert (killed["wrong"], killed["more"], killed["never"]) == (0, 0, "0 of 640")
        assert (killed["loss"], killed["weights"]) == (0.0, 0.0)
        flipped = resume.flip_bits(driver, whole, random.Random(1))
        assert flipped["undamaged"] == "intact"
        assert flipped["resumes"].keys() <= {"wrong weights", "wrong optimizer", "by hand"}
