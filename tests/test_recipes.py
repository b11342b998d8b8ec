"""The recipes for rented machines: `configs/cloud`, `Dockerfile`, `.dockerignore`."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_gpt.config.experiment import Config
from accel_gpt.config.options import all_options
from accel_gpt.config.parse import shipped_configs
from accel_gpt.errors import BusyError, DivergedError, PeerError, UserError
from accel_gpt.launcher import PREEMPTED

ROOT = Path(__file__).resolve().parents[1]
CLOUD = ROOT / "configs/cloud"
RECIPES = ("skypilot.yaml", "kubernetes.yaml", "hf_jobs.sh", "hf_jobs.py")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def read_yaml(name: str) -> dict[str, Any]:
    """Return the one document of a recipe."""
    document = yaml.safe_load((CLOUD / name).read_text())
    assert isinstance(document, dict)
    return document


def inline_metadata(script: str) -> dict[str, Any]:
    """Return the metadata of a script, as the regular expression of PEP 723 reads them."""
    pattern = r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$"
    (block,) = (match for match in re.finditer(pattern, script) if match["type"] == "script")
    lines = block["content"].splitlines(keepends=True)
    return tomllib.loads("".join(line[2:] if line.startswith("# ") else line[1:] for line in lines))


def instructions(name: str) -> list[str]:
    """Return the arguments of each such instruction of the Dockerfile."""
    return re.findall(rf"(?m)^{name} (.*)$", DOCKERFILE)


# --------------------------------------------------------------------------- all recipes


def test_every_key_in_a_recipe_is_one_of_a_config() -> None:
    assert {path.name for path in CLOUD.iterdir() if path.is_file()} == set(RECIPES)
    text = DOCKERFILE + "".join((CLOUD / name).read_text() for name in RECIPES)
    keys = set(re.findall(r"--([a-z_]+\.[a-z_.]+)", text)) - {"section.key"}
    assert "train.micro_batch_size" in keys
    assert keys <= all_options(Config).keys()


def test_a_recipe_says_what_is_not_tested_and_is_no_config() -> None:
    for text in (*((CLOUD / name).read_text() for name in RECIPES[:3]), DOCKERFILE):
        assert re.search(r"(?m)^# Tested: .*\n(# .*\n)*# Not tested: ", text)
    assert not {Path(name).stem for name in RECIPES} & shipped_configs().keys()


# --------------------------------------------------------------------------- SkyPilot


def test_skypilot_restarts_what_another_machine_can_continue() -> None:
    recipe = read_yaml("skypilot.yaml")
    recovery = recipe["resources"]["job_recovery"]
    # SkyPilot's client accepts other names here without a word
    assert recovery.keys() == {"recover_on_exit_codes", "max_restarts_on_errors"}
    assert recovery["recover_on_exit_codes"] == [PeerError.exit_code, PREEMPTED]
    text = (CLOUD / "skypilot.yaml").read_text()
    comments = " ".join(line.strip(" #") for line in text.splitlines() if "#" in line)
    assert f"{PREEMPTED}: stopped by a signal" in comments
    assert f"{PeerError.exit_code}: another process" in comments
    assert f"such as {BusyError.exit_code}: the machine before" in comments
    assert f"mistakes ({UserError.exit_code})" in comments
    assert recipe["envs"]["RUN"] is None  # a launch without it is rejected before it costs anything
    assert (ROOT / "configs/accelerate/ddp_8.yaml").exists()
    assert "--config_file configs/accelerate/ddp_8.yaml" in recipe["run"]


@pytest.mark.parametrize(("gpus", "command"), [("1", "accel-gpt"), ("4", "accelerate")])
def test_skypilot_starts_one_process_a_gpu(gpus: str, command: str, tmp_path: Path) -> None:
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").write_text(f"PATH={tmp_path}:$PATH\n")
    for name in ("accel-gpt", "accelerate"):
        (tmp_path / name).write_text(f'#!/usr/bin/env bash\necho {name} "$@"\nexit {PREEMPTED}\n')
        (tmp_path / name).chmod(0o755)
    recipe = read_yaml("skypilot.yaml")
    environment = {**recipe["envs"], "RUN": "s3://bucket/run", "SKYPILOT_NUM_GPUS_PER_NODE": gpus}
    done = subprocess.run(
        ["bash", "-c", recipe["run"]], env={**os.environ, **environment},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == PREEMPTED, done.stderr  # SkyPilot sees the code
    first, *words = done.stdout.split()
    assert first == command
    assert words[-3:] == ["s3://bucket/run/config.yaml", "--train.micro_batch_size", "auto"]
    assert (words[0] == "train") == (gpus == "1")
    assert ("--num_processes 4" in done.stdout) == (gpus == "4")
    done = subprocess.run(
        ["bash", "-c", recipe["run"]], env={**os.environ, **environment, "PRICE": "0.4"},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.split() == [command, *words, "--log.price", "0.4"]
    subprocess.run(["bash", "-n"], input=recipe["setup"].encode(), check=True)


# --------------------------------------------------------------------------- the Hub's jobs


def test_the_job_file_installs_this_project() -> None:
    metadata = inline_metadata((CLOUD / "hf_jobs.py").read_text())
    assert metadata["requires-python"] == PROJECT["requires-python"]
    assert metadata["dependencies"] == [f"{PROJECT['name']}[s3]"]
    assert "s3" in PROJECT["optional-dependencies"]
    source = metadata["tool"]["uv"]["sources"][PROJECT["name"]]
    assert (CLOUD / source["path"]).resolve() == ROOT
    (torch,) = metadata["tool"]["uv"]["constraint-dependencies"]
    assert torch in (ROOT / "constraints.txt").read_text().splitlines()


def test_the_job_file_trains_the_config_of_the_folder_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("out_dirs: runs/x\n")

    def said(*words: str, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, str(CLOUD / "hf_jobs.py"), *words],
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == UserError.exit_code
        return done.stderr

    assert "out_dirs" in said("--seed", "3", RUN=str(tmp_path))
    assert "no_such_config" in said("no_such_config")
    assert "no_such_key" in said("quickstart", "--no_such_key", "3")


STUBS = {
    "git": 'case "$3" in remote) echo "$ADDRESS" ;; rev-parse) echo 0123abc ;; '
    'branch) echo "$BRANCH" ;; esac',
    "hf": 'printf "%s\\n" "$@" > words; for word in "$@"; do '
    '[ "${word##*/}" = hf_jobs.py ] && cp "$word" job.py; done; true',
}


@pytest.mark.parametrize(
    ("code", "change"),
    [
        (0, {}),
        (2, {"RUN": ""}),
        (2, {"ADDRESS": "git@example.com:owner/accel_gpt"}),
        (2, {"ADDRESS": "https://user:secret@example.com/owner/accel_gpt"}),
        (2, {"BRANCH": ""}),
    ],
)
def test_a_job_on_the_hub_gets_the_commit_of_the_clone(
    code: int, change: dict[str, str], tmp_path: Path
) -> None:
    for name, body in STUBS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "ADDRESS": "https://example.com/owner/accel_gpt",
        "BRANCH": "  origin/main",
        "RUN": "s3://bucket/run",
    }
    done = subprocess.run(
        [str(CLOUD / "hf_jobs.sh"), "--train.max_steps", "9"], env={**environment, **change},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert "secret" not in done.stderr
    assert (tmp_path / "words").exists() == (code == 0)
    if code:
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
        return
    words = (tmp_path / "words").read_text().splitlines()
    assert words[:3] == ["jobs", "uv", "run"]
    assert "RUN=s3://bucket/run" in words
    assert words[-2:] == ["--train.max_steps", "9"]
    # hf takes an argument with this ending for a file of this machine
    assert not [word for word in words if word.endswith((".yaml", ".yml"))]
    job = (tmp_path / "job.py").read_text()
    source = {"git": environment["ADDRESS"], "rev": "0123abc"}
    assert inline_metadata(job)["tool"]["uv"]["sources"] == {PROJECT["name"]: source}
    ours = (CLOUD / "hf_jobs.py").read_text()
    assert len(set(job.splitlines()) - set(ours.splitlines())) == 1


# --------------------------------------------------------------------------- Docker, Kubernetes


def test_the_image_runs_accel_gpt_and_not_as_root() -> None:
    assert json.loads(instructions("ENTRYPOINT")[-1]) == ["accel-gpt"]
    assert "accel-gpt" in PROJECT["scripts"]
    assert int(instructions("USER")[-1]) > 0  # a name would not do for runAsNonRoot
    version = tuple(int(part) for part in instructions("ARG")[0].removeprefix("PYTHON=").split("."))
    assert version >= (3, int(PROJECT["requires-python"].removeprefix(">=3.")))


def test_the_image_is_built_from_what_docker_may_read() -> None:
    copied = [word for words in instructions("COPY") for word in words.split()[:-1]]
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*"
    readable = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert {Path(path).parts[0] for path in copied} == readable
    assert all((ROOT / path).exists() for path in copied)


def test_a_pod_that_was_preempted_does_not_count_and_a_bad_loss_ends_the_job() -> None:
    job = read_yaml("kubernetes.yaml")["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    final, preempted, disrupted = job["podFailurePolicy"]["rules"]
    assert final["action"] == "FailJob"
    assert final["onExitCodes"]["values"] == [DivergedError.exit_code]
    assert preempted["action"] == disrupted["action"] == "Ignore"
    assert preempted["onExitCodes"]["values"] == [PREEMPTED]
    for rule in (final, preempted):
        assert rule["onExitCodes"]["operator"] == "In"
        assert rule["onExitCodes"]["containerName"] == container["name"]
    assert disrupted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert pod["restartPolicy"] == "Never"  # else Kubernetes rejects a podFailurePolicy
    assert job["podReplacementPolicy"] == "Failed"  # one machine at a time
    assert pod["securityContext"]["runAsUser"] == int(instructions("USER")[-1])


def test_a_pod_has_room_where_the_image_starts() -> None:
    pod = read_yaml("kubernetes.yaml")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    (home,) = re.findall(r"(?m)^ENV HOME=(\S+)", DOCKERFILE)
    assert instructions("WORKDIR")[-1] == "${HOME}"
    assert mounts.keys() == {home, "/dev/shm"}
    assert sorted(mounts.values()) == sorted(volume["name"] for volume in pod["volumes"])
    assert all("emptyDir" in volume for volume in pod["volumes"])
    assert container["args"][:2] == ["train", "$(RUN)/config.yaml"]
    assert "RUN" in {variable["name"] for variable in container["env"]}
