#!/usr/bin/env bash
# Trains a run on one GPU of the Hugging Face Hub, with the commit of this clone:
#     RUN=s3://bucket/run configs/cloud/hf_jobs.sh [--log.price 0.80] [--section.key value ...]
#
# The folder RUN of the bucket holds config.yaml, which you wrote, and then everything that the run saves. A job that
# fails is launched again, and resumes the run. After TIMEOUT, start the command again.
# FLAVOR is the machine (`hf jobs hardware` lists them), TIMEOUT its time, ATTEMPTS the number of launches.
# Change for your bucket: the names of the secrets, which are taken from your environment.
#
# Tested: huggingface_hub 2.4.0 accepts the command (--dry-run), and uv 0.13.9 runs the job's file on a CPU.
# Not tested: a job on the Hub. We do not know which exit codes it launches again.
set -euo pipefail
here=$(dirname "$0")

if [ -z "${RUN:-}" ]; then
    echo "error: RUN is not set; expected the URL of a folder, such as s3://bucket/run" >&2
    exit 2
fi

# The job installs this commit from the address that you cloned
address=$(git -C "$here" remote get-url origin)
commit=$(git -C "$here" rev-parse HEAD)
if [[ "$address" != https://* || "$address" == *@* ]]; then
    echo "error: the remote origin is not an https:// address without a password" >&2
    exit 2
fi
if [ -z "$(git -C "$here" branch --remotes --contains "$commit")" ]; then
    echo "error: commit $commit is not on the remote; push it" >&2
    exit 2
fi
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
source="accel-gpt = { git = \"$address\", rev = \"$commit\" }"
sed "s|^# accel-gpt = .*|# $source|" "$here/hf_jobs.py" > "$folder/hf_jobs.py"

# RUN is a variable of the job: hf looks for an argument that ends in .yaml on this machine
hf jobs uv run \
    --flavor "${FLAVOR:-l4x1}" \
    --timeout "${TIMEOUT:-12h}" \
    --attempts "${ATTEMPTS:-10}" \
    --env RUN="$RUN" \
    --secrets AWS_ACCESS_KEY_ID \
    --secrets AWS_SECRET_ACCESS_KEY \
    --detach \
    "$folder/hf_jobs.py" --train.micro_batch_size auto "$@"
