"""Knowledge distillation: the float model's outputs as soft labels for the one that learns to be int8."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def distill_loss(
    student: Tensor, teacher: Tensor, labels: Tensor | None = None, *, temperature: float = 4.0, alpha: float = 0.9
) -> Tensor:
    """alpha T^2 KL(softmax(teacher / T) || softmax(student / T)) + (1 - alpha) cross_entropy(student, labels).

    Hinton et al. 2015 (arXiv 1503.02531), section 2: the factor T^2 keeps the soft part's gradients at the size of the
    hard part's when T changes.

    Args:
        student, teacher: logits, (..., classes), of one shape; the teacher gets no gradient.
        labels: int64 class indices, (...,); None leaves the soft part alone, in full.
        temperature: T, positive.
        alpha: share of the soft part, in [0, 1].

    Returns:
        The mean over all but the last dimension, ().

    Raises:
        ValueError: shapes differ, or T or alpha is out of its range.
    """
    if student.shape != teacher.shape:
        raise ValueError(
            f"distill_loss: student has shape {tuple(student.shape)} and teacher {tuple(teacher.shape)}, expected "
            "logits of one shape"
        )
    if not temperature > 0.0 or not 0.0 <= alpha <= 1.0:
        raise ValueError(
            f"distill_loss: temperature is {temperature} and alpha {alpha}, expected a positive number and one in "
            "[0, 1]"
        )
    classes = student.shape[-1]
    soft = F.kl_div(
        F.log_softmax(student.reshape(-1, classes) / temperature, dim=-1),
        F.log_softmax(teacher.detach().reshape(-1, classes) / temperature, dim=-1),
        reduction="batchmean",
        log_target=True,
    )
    soft = soft * temperature**2
    if labels is None:
        return soft
    return alpha * soft + (1.0 - alpha) * F.cross_entropy(student.reshape(-1, classes), labels.reshape(-1))
