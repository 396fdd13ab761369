"""Fine representations from coarse labels:
Grafit's losses and network (arXiv:2011.12982; Touvron's thesis, Ch. 2).
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Grafit", "GrafitTask", "instance_loss", "neighbour_scores"]


def instance_loss(predictions: Tensor, targets: Tensor) -> Tensor:
    """Compute the instance loss: minus the cosine between predictions
    and targets of different views (Eq. 2.1).

    Args:
        predictions: Predictions q(g(t_i(x))), shape (B, T, D), T views of each image.
        targets: Embeddings of the same views by the target network, shape (B, T, D).

    Returns:
        Minus the cosine, averaged over images and pairs of different views, between -1 and 1.
    """
    cosines = F.normalize(predictions, dim=-1) @ F.normalize(targets, dim=-1).mT
    views = cosines.shape[-1]
    # The sum runs over pairs of different views, i != j.
    pairs = cosines.sum((1, 2)) - cosines.diagonal(dim1=1, dim2=2).sum(-1)
    return -(pairs / (views * (views - 1))).mean()


def neighbour_scores(
    embeddings: Tensor,
    memory: Tensor,
    labels: Tensor,
    classes: int,
    *,
    temperature: float = 0.05,
    itself: Tensor | None = None,
) -> Tensor:
    """Compute log-probabilities of classes from all neighbours,
    shape (B, K): the log of p_ij summed over a class's j.

    p_ij is a softmax of cosines over neighbours j (Eq. 2.2). The negative log-likelihood of the
    label is the kNN loss (Eq. 2.3). For a class without neighbours, the probability is the dtype's
    smallest normal number.

    Args:
        embeddings: Embeddings of images, shape (B, D).
        memory: Embeddings of their neighbours, shape (N, D).
        labels: Labels of the neighbours, shape (N,).
        classes: Number of classes.
        temperature: The thesis's sigma.
        itself: Mask, shape (B, N), True where a neighbour is the image itself, which is then left
            out.
    """
    scaled = F.normalize(embeddings, dim=-1) @ F.normalize(memory, dim=-1).T / temperature
    if itself is not None:
        scaled = scaled.masked_fill(itself, -torch.inf)
    shares = scaled.softmax(-1)
    masses = shares.new_zeros(len(embeddings), classes).index_add(1, labels, shares)
    # Without the clamp, a class without neighbours would have a logarithm of -inf and a gradient of
    # NaN.
    return masses.clamp_min(torch.finfo(masses.dtype).tiny).log()


class Grafit(nn.Module):
    """A trunk, a projector, a predictor, and a memory
    of embeddings for classification by nearest neighbours.

    The thesis does not give the widths of projector and predictor. Here they are MLPs with one
    hidden layer that is 16 times as wide as the output, as in BYOL (arXiv:2006.07733) for 256
    dimensions. The variant Grafit FC has a linear projector.

    Args:
        trunk: Model of timm; its classifier is removed.
        classes: Number of coarse classes, those of the labels.
        images: Size of the training set; each image has an entry in the memory.
        dim: Dimension of the embeddings.
        temperature: The thesis's sigma.
        projector: "mlp", or "linear" for Grafit FC.
    """

    memory: Tensor
    labels: Tensor

    def __init__(
        self,
        trunk: Any,
        classes: int,
        images: int,
        *,
        dim: int = 256,
        temperature: float = 0.05,
        projector: str = "mlp",
    ) -> None:
        super().__init__()
        trunk.reset_classifier(0)
        self.trunk = trunk
        self.num_classes = classes
        self.temperature = temperature
        self.pretrained_cfg = getattr(trunk, "pretrained_cfg", None)
        width = trunk.head_hidden_size
        self.projector = nn.Linear(width, dim) if projector == "linear" else _perceptron(width, dim)
        self.predictor = _perceptron(dim, dim)
        self.register_buffer("memory", torch.zeros(images, dim))
        self.register_buffer("labels", torch.full((images,), -1))  # -1: not seen yet

    def embed(self, images: Tensor) -> Tensor:
        """Compute embeddings g(x) of norm 1, shape (B, D),
        with which coarse and fine neighbours are searched.
        """
        return F.normalize(self.projector(self.trunk(images)), dim=-1)

    def forward(self, images: Tensor) -> Tensor:
        """Compute log-probabilities of the coarse classes
        from the images in the memory, shape (B, K).
        """
        # In bfloat16 cosines just below 1 are 0.004 apart, which the temperature turns into 0.08 in
        # a logit.
        return self.scores(self.embed(images).float())

    def scores(self, embeddings: Tensor, numbers: Tensor | None = None) -> Tensor:
        """Score embeddings (B, D); with numbers (B,) of training images,
        no image is its own neighbour.
        """
        known = (self.labels >= 0).nonzero()[:, 0]
        return neighbour_scores(
            embeddings,
            self.memory[known],
            self.labels[known],
            self.num_classes,
            temperature=self.temperature,
            itself=None if numbers is None else known == numbers[:, None],
        )

    @torch.no_grad()
    def remember(self, numbers: Tensor, labels: Tensor, embeddings: Tensor) -> None:
        """Replace the images' memory entries by their mean
        with these embeddings (thesis, "Memory of embeddings").
        """
        # The means have norms below 1, at first because the memory starts with zeros; cosines
        # ignore norms.
        self.memory[numbers] = (self.memory[numbers] + embeddings) / 2
        self.labels[numbers] = labels

    @torch.no_grad()
    def refresh(self, numbers: Tensor, labels: Tensor, images: Tensor) -> None:
        """Replace memory entries of training images by their current embeddings.

        The memory holds means over older weights, so the thesis recomputes it with the final
        weights for all training images ("Adapting the architecture at test-time"). Call this in
        eval mode, with the transforms of validation.

        Args:
            numbers: Numbers of the images, shape (B,).
            labels: Coarse labels of the images, shape (B,).
            images: Images, shape (B, C, H, W).
        """
        self.memory[numbers] = self.embed(images).to(self.memory)
        self.labels[numbers] = labels


class GrafitTask:
    """The sum of both losses (Eq. 2.4, Table 2.11),
    for batches in which the views of an image are consecutive.

    The kNN loss uses the first view only. A batch is added to the memory before its loss is
    computed, so that even the first batch has neighbours.

    Args:
        model: Network that is trained.
        target: Moving average of the model, the target network.
        views: Number of views of each image, T.
        instance_weight: Weight lambda of the instance loss; 0 leaves only the kNN loss, as in
            SNCA+.
    """

    def __init__(
        self,
        model: Grafit,
        target: Grafit,
        views: int,
        *,
        instance_weight: float = 1.0,
    ) -> None:
        self.model = model
        self.target = target
        self.views = views
        self.instance_weight = instance_weight

    def __call__(self, images: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        """Compute the loss, with scores (B / T, K) and labels (B / T,).

        Args:
            images: Views, shape (B, C, H, W).
            targets: Labels and numbers of the images, shape (B, 2).
        """
        labels, numbers = targets.unflatten(0, (-1, self.views)).unbind(-1)
        if (numbers != numbers[:, :1]).any():
            raise ValueError(
                f"expected {self.views} views of each image, one after the other: is an image "
                "unreadable?"
            )
        with torch.no_grad():
            goals = self.target.embed(images)
        embeddings = self.model.embed(images)
        predictions = self.model.predictor(embeddings)
        # The memory is in float32, so cosines with it are computed in float32.
        with torch.autocast(images.device.type, enabled=False):
            first = self._by_image(embeddings)[:, 0]
            self.model.remember(numbers[:, 0], labels[:, 0], first.detach())
            scores = self.model.scores(first, numbers[:, 0])
            knn_loss = F.nll_loss(scores, labels[:, 0])
            by_instance = instance_loss(self._by_image(predictions), self._by_image(goals))
            loss = knn_loss + self.instance_weight * by_instance
        return {"loss": loss, "output": scores, "targets": labels[:, 0]}

    def _by_image(self, embeddings: Tensor) -> Tensor:
        return embeddings.float().unflatten(0, (-1, self.views))


def _perceptron(width: int, dim: int) -> nn.Sequential:
    hidden = 16 * dim  # BYOL: 4,096 for 256
    return nn.Sequential(
        nn.Linear(width, hidden),
        nn.BatchNorm1d(hidden),
        nn.ReLU(),
        nn.Linear(hidden, dim),
    )
