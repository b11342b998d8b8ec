"""The learning rate as a pure function of the step: no state, the same at any world size."""

import math

from accel_gpt.config.plan import Plan

FIRST_MOMENTUM = 0.85  # modded-nanogpt, 2024


def lr_fraction(step: int, name: str, plan: Plan, floor: float) -> float:
    """Learning rate of the update after `step` completed ones, as a fraction of its peak.

    Linear warm-up reaches the peak in its last step: (step + 1) / warmup_steps, as in the GPT-2
    reproductions. cosine (Loshchilov & Hutter 2017, eq. 5) and linear decay right after the
    warm-up, wsd (Hu et al. 2024, section 4) at the end of the run. Each decays in
    `plan.decay_steps`, from the peak in the first of them. `floor` is the value after the last of
    them, as in nanoGPT and the GPT-2 reproductions, and stays.
    """
    if step < plan.warmup_steps:
        return (step + 1) / plan.warmup_steps
    if name == "constant":
        return 1.0
    start = plan.max_steps - plan.decay_steps if name == "wsd" else plan.warmup_steps
    done = min(max(step - start, 0) / plan.decay_steps, 1.0)
    decay = (1 + math.cos(math.pi * done)) / 2 if name == "cosine" else 1 - done
    return floor + (1 - floor) * decay


def momentum_at(step: int, momentum: float, warmup_steps: int) -> float:
    """Muon's momentum in the update after `step` completed ones.

    Rises linearly to `momentum` over `warmup_steps`, from 0.85 or from `momentum` if that is less
    (modded-nanogpt, 2024: 0.85 to 0.95 in 300 steps).
    """
    start = min(FIRST_MOMENTUM, momentum)
    done = min(step / warmup_steps, 1.0) if warmup_steps else 1.0
    return start + (momentum - start) * done
