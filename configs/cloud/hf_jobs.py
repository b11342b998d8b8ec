# /// script
# requires-python = ">=3.11"
# dependencies = ["accel-gpt[s3]"]
#
# [tool.uv]
# constraint-dependencies = ["torch==2.13.0"]
#
# [tool.uv.sources]
# accel-gpt = { path = "../..", editable = true }
# ///
"""`accel-gpt train`, with an environment that uv installs from the lines above.

    uv run configs/cloud/hf_jobs.py quickstart          # on your machine, in the clone
    RUN=s3://bucket/run configs/cloud/hf_jobs.sh        # on a machine of the Hugging Face Hub

If the environment has RUN, the config is $RUN/config.yaml. The arguments are passed on.
"""

import os
import sys

from accel_gpt.cli import main

if __name__ == "__main__":
    run = os.environ.get("RUN")
    config = [f"{run}/config.yaml"] if run else []
    sys.argv[1:] = ["train", *config, *sys.argv[1:]]
    main()
