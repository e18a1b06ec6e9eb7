"""How much memory a training needs, and how much there is: a sentence comes before the killer."""

from __future__ import annotations

import os

from remasker.errors import InvalidConfigError
from remasker.model import ModelConfig

#: Training begins where so much of the free memory suffices.
USABLE = 0.9
#: What a first step loads, whatever its size.
LOADED = 1e8


def training_bytes(config: ModelConfig, batch_size: int, n_rows: int, n_columns: int) -> float:
    """Peak memory of a training: what a step keeps, the weights in all their copies, the table.

    Measured, peak resident memory of a first step over that before it, against this estimate, which
    the plain blocks (dropout) need too (columns × rows of a batch, width, depths):

    ===================== ======== ========
    step                  measured estimate
    ===================== ======== ========
    50 × 64, 32, 3 + 1    21 MB    135 MB
    200 × 64, 32, 3 + 1   81 MB    234 MB
    500 × 64, 32, 3 + 1   209 MB   440 MB
    50 × 256, 64, 8 + 4   385 MB   722 MB
    200 × 64, 64, 8 + 4   371 MB   720 MB
    500 × 32, 64, 8 + 4   493 MB   887 MB
    ===================== ======== ========

    >>> small, large = (training_bytes(ModelConfig(), n, 1000, 10) for n in (32, 256))
    >>> large > small
    True
    """
    width, depth = config.width, config.encoder_depth + config.decoder_depth
    n_step, length = min(batch_size, n_rows), n_columns + 1
    # Of a block: its input, both normalised inputs, queries, keys and values, the mix, twice, and
    # the hidden layer before and behind its activation.
    kept = width * (9 + 2 * config.mlp_ratio) * depth
    # Of embedding, bridge and heads, with what a backward pass has at a time.
    outside = width * 24 + 3 * config.n_bins
    weights = 12 * width**2 * depth + n_columns * width * (config.n_bins + 5) + 2 * n_columns**2
    floats = n_step * length * (kept + outside) + 7 * weights
    return LOADED + 4.0 * floats + 24.0 * n_rows * n_columns


def check_memory(config: ModelConfig, batch_size: int, n_rows: int, n_columns: int) -> None:
    """Refuse a training that this machine has no memory for.

    >>> check_memory(ModelConfig(width=2**16), 2**20, 2**20, 500)
    Traceback (most recent call last):
    remasker.errors.InvalidConfigError: training on 500 columns needs about ... GB of memory...
    """
    needed, free = training_bytes(config, batch_size, n_rows, n_columns), free_memory()
    if needed > USABLE * free:
        raise InvalidConfigError(
            f"training on {n_columns} columns needs about {needed / 1e9:.1f} GB of memory, and "
            f"{free / 1e9:.1f} GB are free; lower batch_size ({batch_size}), width "
            f"({config.width}) or the depths ({config.encoder_depth} and {config.decoder_depth})"
        )


def free_memory() -> float:
    """Bytes that this machine could still give.

    >>> free_memory() > 1e6
    True
    """
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return 1024.0 * int(line.split()[1])
    except OSError:
        pass
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / 2
