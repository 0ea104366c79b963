"""scikit-learn's handwritten digits: 1,797 images of 8 x 8 pixels, with a fixed split.

`python -m shoal.demo.data FILE` writes them to a file, so that workers need not import
scikit-learn.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

TEST_SHARE = 0.2
SPLIT_SEED = 0


@dataclass(frozen=True, kw_only=True)
class Digits:
    """Images N x 1 x 8 x 8 of pixels in [0, 1], and their digits."""

    train: TensorDataset
    test_images: Tensor
    test_digits: Tensor


def load(path: Path | None = None) -> Digits:
    """Load the digits from a file of `save`, or from scikit-learn."""
    if path is None:
        images, digits = _from_sklearn()
    else:
        with np.load(path) as saved:
            images, digits = saved["images"], saved["digits"]
    order = np.random.default_rng(SPLIT_SEED).permutation(len(images))
    num_test = round(TEST_SHARE * len(images))
    inputs = torch.from_numpy(images[order]).unsqueeze(1)
    targets = torch.from_numpy(digits[order])
    return Digits(
        train=TensorDataset(inputs[num_test:], targets[num_test:]),
        test_images=inputs[:num_test],
        test_digits=targets[:num_test],
    )


def save(path: Path) -> None:
    """Write scikit-learn's digits to a file for `load`."""
    images, digits = _from_sklearn()
    np.savez(path, images=images, digits=digits)


def _from_sklearn() -> tuple[np.ndarray, np.ndarray]:
    # A worker that is given a file does not need scikit-learn.
    from sklearn.datasets import load_digits  # noqa: PLC0415

    bunch = load_digits()
    return (bunch.images / 16).astype(np.float32), bunch.target.astype(np.int64)


if __name__ == "__main__":
    save(Path(sys.argv[1]))
