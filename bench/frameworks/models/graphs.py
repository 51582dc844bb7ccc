"""Graph networks of PyG's layers."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bench.frameworks.models.workload import N_CLASSES, Batch, Scale, WithLoss, Workload, generator

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

HEADS: Final = 4
"""Of attention between nodes."""

NEIGHBOURS: Final = 16
"""Of a point."""


class _Layers(nn.Module):
    """Three graph convolutions with ReLU and dropout."""

    def __init__(self, width: int, make: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make(a, b) for a, b in pairwise((width,) * 3 + (N_CLASSES,)))
        self.checkpointed = False

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Scores of each node's classes."""
        for layer in self.layers[:-1]:
            if self.checkpointed:
                x = checkpoint(self._hidden, layer, x, edges, use_reentrant=False)
            else:
                x = self._hidden(layer, x, edges)
        found: Tensor = self.layers[-1](x, edges)
        return found

    def _hidden(self, layer: nn.Module, x: Tensor, edges: Tensor) -> Tensor:
        return functional.dropout(layer(x, edges).relu(), 0.5, self.training)

    def recompute(self) -> None:
        self.checkpointed = True


def _on_nodes(net: _Layers, width: int, n_nodes: int, *, same: bool = False) -> Workload:
    # Classes of the nodes of a random graph with eight edges a node. same: in every step.
    def batch(step: int) -> Batch:
        of_step = generator(step)
        labels = torch.randint(N_CLASSES, (n_nodes,), generator=of_step)
        x = torch.randn(n_nodes, width, generator=of_step)
        of_graph = generator(0) if same else of_step
        edges = torch.randint(n_nodes, (2, 8 * n_nodes), generator=of_graph)
        return {"target": labels, "x": x, "edges": edges}

    return Workload(WithLoss(net), batch, net.recompute)


def gcn(scale: Scale) -> Workload:
    """A GCN."""
    from torch_geometric.nn import GCNConv

    return _on_nodes(_Layers(scale.width, GCNConv), scale.width, scale.nodes)


def _attentive(convolution: Callable[..., nn.Module], width: int, n_nodes: int) -> Workload:
    # Each edge has values of its own.
    def make(before: int, after: int) -> nn.Module:
        if after == N_CLASSES:
            return convolution(before, after, heads=HEADS, concat=False)
        return convolution(before, after // HEADS, heads=HEADS)

    return _on_nodes(_Layers(width, make), width, n_nodes, same=True)


def gat(scale: Scale) -> Workload:
    """A graph attention network, of half of the nodes."""
    from torch_geometric.nn import GATConv

    return _attentive(GATConv, scale.width // 2, scale.nodes // 2)


def transformer_conv(scale: Scale) -> Workload:
    """A graph transformer, of a quarter of the nodes."""
    from torch_geometric.nn import TransformerConv

    return _attentive(TransformerConv, scale.width // 2, scale.nodes // 4)


class _Dgcnn(nn.Module):
    """Edge convolutions of clouds of points, each point's neighbours found anew in each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        from torch_geometric.nn import EdgeConv

        sizes = (3, width // 4, width // 4, width // 2)
        self.convolutions = nn.ModuleList(EdgeConv(_edge_mlp(a, b)) for a, b in pairwise(sizes))
        self.head = nn.Linear(sum(sizes[1:]), N_CLASSES)
        self.checkpointed = False

    def forward(self, points: Tensor) -> Tensor:
        """Scores of each cloud's classes. Args: points: [clouds, points, 3]."""
        n_clouds, n_points, _ = points.shape
        x, found = points.flatten(0, 1), []
        for convolution in self.convolutions:
            edges = _nearest(x.detach().view(n_clouds, n_points, -1))
            if self.checkpointed:
                x = checkpoint(convolution, x, edges, use_reentrant=False)
            else:
                x = convolution(x, edges)
            found.append(x)
        together = torch.cat(found, dim=1).view(n_clouds, n_points, -1)
        scores: Tensor = self.head(together.amax(dim=1))
        return scores

    def recompute(self) -> None:
        self.checkpointed = True


def _edge_mlp(before: int, after: int) -> nn.Sequential:
    layer = nn.Linear(2 * before, after, bias=False)
    return nn.Sequential(layer, nn.BatchNorm1d(after), nn.LeakyReLU(0.2))


def _nearest(x: Tensor) -> Tensor:
    # Edges [2, clouds * points * NEIGHBOURS] from each point's nearest ones.
    # x: [clouds, points, _].
    n_clouds, n_points, _ = x.shape
    first = torch.arange(n_clouds).view(-1, 1, 1) * n_points
    near = torch.cdist(x, x).topk(NEIGHBOURS, largest=False).indices + first
    points = torch.arange(n_clouds * n_points).repeat_interleave(NEIGHBOURS)
    return torch.stack([near.flatten(), points])


def dgcnn(scale: Scale) -> Workload:
    """DGCNN, a classifier of clouds of points."""
    net = _Dgcnn(scale.width)

    def batch(step: int) -> Batch:
        of_step = generator(step)
        labels = torch.randint(N_CLASSES, (scale.batch,), generator=of_step)
        points = torch.randn(scale.batch, scale.tokens, 3, generator=of_step)
        return {"target": labels, "points": points}

    return Workload(WithLoss(net), batch, net.recompute)
