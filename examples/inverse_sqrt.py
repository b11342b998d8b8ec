"""A learning rate that decays with the inverse square root of the step.

    accel-gpt train quickstart --code examples/inverse_sqrt.py --schedule.warmup_steps 100

The schedule of the Transformer (Vaswani et al. 2017, equation 3), scaled so that the peak is
optim.lr: linear up to `schedule.warmup_steps`, then sqrt(warmup_steps / step). It does not depend
on the last step, so a run can go on for longer.
"""

import math


def lr(step, config, plan):
    update = step + 1  # `step` updates are done; this is the number of the next one
    warmup = max(plan.warmup_steps, 1)
    return min(update / warmup, math.sqrt(warmup / update))
