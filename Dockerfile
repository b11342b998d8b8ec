# An image whose command is accel-gpt, for an NVIDIA GPU:
#     docker build --tag accel-gpt .
#     docker run --init --gpus all --shm-size 8g --stop-timeout 300 --env AWS_ACCESS_KEY_ID --env AWS_SECRET_ACCESS_KEY \
#         accel-gpt train s3://bucket/run/config.yaml
#
# PyPI's torch brings CUDA. For a CPU, which saves gigabytes:
#     docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu --tag accel-gpt .
# The process is not root. --user gives it another id; it can write to its home folder, where it starts.
#
# Tested: the build for a CPU on Debian 12 with Python 3.11 in place of the base image, a run in it as another user.
# Not tested: this base image, a GPU.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim

# torch.compile calls a compiler, of any version
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

# The packages that accel_gpt needs: a layer that a change of its code leaves as it is
ARG TORCH_INDEX=
WORKDIR /src
COPY pyproject.toml constraints.txt ./
COPY accel_gpt/__init__.py accel_gpt/
RUN touch README.md LICENSE \
    && PIP_EXTRA_INDEX_URL="${TORCH_INDEX}" pip install --no-cache-dir --constraint constraints.txt '.[s3]'

COPY README.md LICENSE ./
COPY configs configs
COPY accel_gpt accel_gpt
RUN pip install --no-cache-dir --no-deps . && rm -rf build ./*.egg-info

# A home folder for any user id; torch asks for a user's name
ENV HOME=/home/trainer USER=trainer
RUN useradd --uid 1000 --home-dir "${HOME}" trainer && install --directory --mode 1777 "${HOME}"
WORKDIR ${HOME}
USER 1000

ENTRYPOINT ["accel-gpt"]
CMD ["--help"]
