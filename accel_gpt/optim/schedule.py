"""Compute learning rate and momentum from the step: no state, the same on all ranks."""

import math

from accel_gpt.config.plan import Plan

FIRST_MOMENTUM = 0.85  # modded-nanogpt, 2024


def lr_fraction(step: int, name: str, plan: Plan, floor: float) -> float:
    """Compute the learning rate after `step` completed updates, as a share of its peak.

    The warm-up is linear and reaches the peak in its last step: (step + 1) / warmup_steps, as in
    the GPT-2 reproductions. cosine (Loshchilov & Hutter 2017, equation 5) and linear start to decay
    right after the warm-up. wsd decays at the end of the run (Hu et al. 2024, section 4).

    The decay takes `plan.decay_steps` and starts from the peak. After its last step the learning
    rate stays at `floor`, as in nanoGPT and the GPT-2 reproductions.
    """
    if step < plan.warmup_steps:
        return (step + 1) / plan.warmup_steps
    if name == "constant":
        return 1.0
    decay_start = plan.max_steps - plan.decay_steps if name == "wsd" else plan.warmup_steps
    progress = min(max(step - decay_start, 0) / plan.decay_steps, 1.0)
    decay = (1 + math.cos(math.pi * progress)) / 2 if name == "cosine" else 1 - progress
    return floor + (1 - floor) * decay


def momentum_at(step: int, momentum: float, warmup_steps: int) -> float:
    """Compute Muon's momentum for the update after `step` completed updates.

    It rises linearly to `momentum` over `warmup_steps`. It starts at 0.85, or at `momentum` if that
    is less (modded-nanogpt, 2024: 0.85 to 0.95 in 300 steps).
    """
    start = min(FIRST_MOMENTUM, momentum)
    progress = min(step / warmup_steps, 1.0) if warmup_steps > 0 else 1.0
    return start + (momentum - start) * progress
