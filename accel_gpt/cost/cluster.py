"""Past one machine: the host memory of a node. docs/cost.md derives the formulas.

Without torch. All sizes are bytes.
"""

from accel_gpt.config.experiment import Config
from accel_gpt.cost.flops import hidden_matrices, padded_vocab_size, parameter_counts
from accel_gpt.cost.memory import FLOAT, LIBRARIES_CPU, Machine, checkpoint_bytes


def host_bytes(config: Config, vocab_size: int, machine: Machine) -> dict[str, int]:
    """What all processes of a node hold in its memory; the model only until it is on the devices.

    Under FSDP a process builds its share, one whole parameter at a time, and copies its share in a
    save; else each builds the whole model, and rank 0 alone copies it.
    """
    model, processes = config.model, machine.devices // machine.nodes
    weights = FLOAT * parameter_counts(model, vocab_size)["total"] // machine.shards
    saved = checkpoint_bytes(config, vocab_size) // machine.shards
    if machine.shards > 1:
        embedding = padded_vocab_size(vocab_size) * model.n_embd
        weights += FLOAT * max(embedding, *hidden_matrices(model))
        saved *= processes
    parts = {"libraries": processes * LIBRARIES_CPU, "model at the start": processes * weights}
    return parts | ({"snapshot of async_save": saved} if config.checkpoint.async_save else {})
