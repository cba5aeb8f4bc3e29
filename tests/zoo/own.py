"""Architectures of our own that need nothing but torch: what people write who do not take a model from a library."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from .entry import Batch, Entry, images, tensors


class Conformer(nn.Module):
    """Two blocks: feed-forward, attention, gated depthwise convolution, feed-forward."""

    class Block(nn.Module):
        def __init__(self, d: int) -> None:
            super().__init__()
            self.before, self.after = self._feed(d), self._feed(d)
            self.norm, self.attention = nn.LayerNorm(d), nn.MultiheadAttention(d, 4, batch_first=True)
            self.gate = nn.Conv1d(d, 2 * d, 1)
            self.depth, self.batch_norm = nn.Conv1d(d, d, 7, padding=3, groups=d), nn.BatchNorm1d(d)
            self.point, self.last = nn.Conv1d(d, d, 1), nn.LayerNorm(d)

        @staticmethod
        def _feed(d: int) -> nn.Module:
            return nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.SiLU(), nn.Linear(4 * d, d))

        def forward(self, x: Tensor) -> Tensor:
            x = x + 0.5 * self.before(x)
            y = self.norm(x)
            x = x + self.attention(y, y, y, need_weights=False)[0]
            y = F.glu(self.gate(x.transpose(1, 2)), dim=1)
            x = x + self.point(F.silu(self.batch_norm(self.depth(y)))).transpose(1, 2)
            return self.last(x + 0.5 * self.after(x))

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(40, 64, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(self.Block(64) for _ in range(2))
        self.head = nn.Linear(64, 30)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class UNet3d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv3d(1, 8, 3, padding=1), nn.Conv3d(8, 16, 3, padding=1)
        self.up, self.merge = nn.ConvTranspose3d(16, 8, 2, stride=2), nn.Conv3d(16, 8, 3, padding=1)
        self.out = nn.Conv3d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        shallow = F.relu(self.down(x))
        deep = F.relu(self.deep(F.max_pool3d(shallow, 2)))
        return self.out(F.relu(self.merge(torch.cat((self.up(deep), shallow), dim=1))))


class ConvLSTM(nn.Module):
    """One convolution makes all gates; the states are images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gates, self.head = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.Linear(8, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = cell = torch.zeros(x.shape[0], 8, *x.shape[3:])
        for t in range(x.shape[1]):
            i, f, g, o = self.gates(torch.cat((F.relu(self.stem(x[:, t])), hidden), dim=1)).chunk(4, dim=1)
            cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
            hidden = torch.sigmoid(o) * torch.tanh(cell)
        return self.head(hidden.mean(dim=(2, 3)))


class CRNN(nn.Module):
    """Text in an image: convolutions, a recurrent layer over the columns, scores for CTC."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(i, o, 3, padding=1) for i, o in ((1, 16), (16, 32), (32, 64)))
        self.norm = nn.BatchNorm2d(64)
        self.rnn = nn.LSTM(256, 64, num_layers=2, bidirectional=True)
        self.middle, self.head = nn.Linear(128, 64), nn.Linear(64, 37)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs[:2]:
            x = F.max_pool2d(F.relu(conv(x)), 2)
        x = F.max_pool2d(F.relu(self.norm(self.convs[2](x))), (2, 1))
        x = x.flatten(1, 2).permute(2, 0, 1)
        return F.log_softmax(self.head(F.relu(self.middle(self.rnn(x)[0]))), dim=2)


class DiffusionUNet(nn.Module):
    """Residual blocks that a time step's embedding shifts, and attention at the bottom."""

    class Block(nn.Module):
        def __init__(self, i: int, o: int) -> None:
            super().__init__()
            self.norm1, self.conv1 = nn.GroupNorm(4, i), nn.Conv2d(i, o, 3, padding=1)
            self.time = nn.Linear(64, o)
            self.norm2, self.conv2 = nn.GroupNorm(4, o), nn.Conv2d(o, o, 3, padding=1)
            self.skip = nn.Conv2d(i, o, 1) if i != o else nn.Identity()

        def forward(self, x: Tensor, time: Tensor) -> Tensor:
            y = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
            return self.skip(x) + self.conv2(F.silu(self.norm2(y)))

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 64))
        self.stem, self.one, self.down = nn.Conv2d(3, 16, 3, padding=1), self.Block(16, 16), nn.Conv2d(16, 32, 3, 2, 1)
        self.two, self.qkv, self.proj = self.Block(32, 32), nn.Conv2d(32, 96, 1), nn.Conv2d(32, 32, 1)
        self.three, self.out = self.Block(48, 16), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        angles = step.float()[:, None] * torch.exp(-torch.arange(16) * 0.5)
        time = self.embed(torch.cat((angles.sin(), angles.cos()), dim=1))
        one = self.one(self.stem(x), time)
        two = self.two(self.down(one), time)
        q, k, v = self.qkv(two).flatten(2).transpose(1, 2).chunk(3, dim=2)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(two.shape)
        two = F.interpolate(two + self.proj(attended), scale_factor=2.0, mode="nearest")
        return self.out(F.silu(self.three(torch.cat((two, one), dim=1), time)))


class DLRM(nn.Module):
    """Click prediction: numbers and categories, and the products of every pair of their vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU())
        self.tables = nn.ModuleList(nn.EmbeddingBag(100, 16, mode="sum") for _ in range(4))
        self.top = nn.Sequential(nn.Linear(26, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        rows = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        vectors = torch.stack((dense, *rows), dim=1)
        pairs = vectors @ vectors.transpose(1, 2)
        i, j = torch.tril_indices(5, 5, offset=-1)
        return torch.sigmoid(self.top(torch.cat((dense, pairs[:, i, j]), dim=1)))


class EarlyExit(nn.Module):
    """A confident first head ends the computation."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 16, 3, stride=2), nn.Conv2d(16, 32, 3, stride=2)
        self.head1, self.head2 = nn.Linear(16, 10), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.one(x))
        early = self.head1(x.mean(dim=(2, 3)))
        if early.softmax(dim=1).max(dim=1).values.min() > 0.9:
            return early
        return self.head2(F.relu(self.two(x)).mean(dim=(2, 3)))


class EDSR(nn.Module):
    """Super-resolution by residual blocks without norms, and a pixel shuffle."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, 32, 3, padding=1)
        self.body = nn.ModuleList(
            nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(32, 32, 3, padding=1))
            for _ in range(4)
        )
        self.up, self.tail = nn.Conv2d(32, 128, 3, padding=1), nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = x = self.head(x)
        for block in self.body:
            y = y + 0.1 * block(y)
        return self.tail(F.pixel_shuffle(self.up(x + y), 2))


class FlowWarp(nn.Module):
    """Optical flow that warps features by grid_sample."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, 16, 3, padding=1)
        self.flow = nn.Sequential(nn.Conv2d(32, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 2, 3, padding=1), nn.Tanh())
        self.refine, self.out = nn.Conv2d(32, 16, 3, padding=1), nn.Conv2d(16, 2, 3, padding=1)

    def forward(self, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
        a, b = F.relu(self.features(one)), F.relu(self.features(two))
        flow = self.flow(torch.cat((a, b), dim=1))
        size = one.shape[2]
        line = torch.linspace(-1, 1, size)
        grid = torch.stack(torch.meshgrid(line, line, indexing="xy"), dim=2) + 0.2 * flow.permute(0, 2, 3, 1)
        warped = F.grid_sample(b, grid, align_corners=True)
        return flow + self.out(F.relu(self.refine(torch.cat((a, warped), dim=1)))), flow


class Generator(nn.Sequential):
    """DCGAN's."""

    def __init__(self) -> None:
        super().__init__(
            nn.Unflatten(1, (32, 1, 1)),
            nn.ConvTranspose2d(32, 64, 4, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(True),
            nn.ConvTranspose2d(64, 32, 4, 2, 1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(True),
            nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(True),
            nn.ConvTranspose2d(16, 3, 4, 2, 1),
            nn.Tanh(),
        )


class MessagePassing(nn.Module):
    """A graph network: messages along edges, added up at their ends by index_add."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 32), nn.Linear(32, 4)
        self.message, self.update = nn.Linear(64, 32), nn.Linear(64, 32)
        self.edge = nn.Linear(3, 32)

    def forward(self, nodes: Tensor, edges: Tensor, features: Tensor) -> Tensor:
        x = F.relu(self.embed(nodes))
        source, target = edges
        for _ in range(2):
            message = F.relu(self.message(torch.cat((x[source], x[target]), dim=1)) + self.edge(features))
            received = torch.zeros_like(x).index_add(0, target, message)
            x = x + F.relu(self.update(torch.cat((x, received), dim=1)))
        return self.head(x)


class GCN(nn.Module):
    """A graph convolution as graph libraries write it: a propagate method, keyword arguments, a norm by degree."""

    class Conv(nn.Module):
        def __init__(self, i: int, o: int) -> None:
            super().__init__()
            self.lin, self.bias = nn.Linear(i, o, bias=False), nn.Parameter(torch.zeros(o))

        def message(self, x_j: Tensor, norm: Tensor) -> Tensor:
            return norm[:, None] * x_j

        def propagate(self, edges: Tensor, **values: Tensor) -> Tensor:
            received = self.message(values["x"].index_select(0, edges[0]), values["norm"])
            out = torch.zeros(values["x"].shape)
            return out.scatter_add_(0, edges[1][:, None].expand_as(received), received)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            degree = torch.zeros(x.shape[0]).scatter_add_(0, edges[1], torch.ones(edges.shape[1])).clamp(min=1)
            norm = (degree[edges[0]] * degree[edges[1]]).rsqrt()
            return self.propagate(edges, x=self.lin(x), norm=norm) + self.bias

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = self.Conv(16, 32), self.Conv(32, 7)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return F.log_softmax(self.two(F.relu(self.one(x, edges)), edges), dim=1)


class HifiGAN(nn.Module):
    """A vocoder: transposed convolutions, each followed by dilated residual ones; weight norms by parametrisation."""

    def __init__(self) -> None:
        super().__init__()
        self.pre = weight_norm(nn.Conv1d(40, 64, 7, padding=3))
        self.ups = nn.ModuleList(
            weight_norm(nn.ConvTranspose1d(i, i // 2, 2 * r, r, padding=r // 2)) for i, r in ((64, 4), (32, 2))
        )
        self.dilated = nn.ModuleList(
            nn.ModuleList(weight_norm(nn.Conv1d(c, c, 3, dilation=d, padding=d)) for d in (1, 3)) for c in (32, 16)
        )
        self.post = weight_norm(nn.Conv1d(16, 1, 7, padding=3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.pre(x)
        for up, convs in zip(self.ups, self.dilated, strict=True):
            x = up(F.leaky_relu(x, 0.1))
            for conv in convs:
                x = x + conv(F.leaky_relu(x, 0.1))
        return torch.tanh(self.post(F.leaky_relu(x)))


class KAN(nn.Module):
    """Edges with functions: a table of radial functions, combined by einsum with a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centres", torch.linspace(-2, 2, 8))
        self.table, self.base = nn.Parameter(torch.randn(16, 8, 32) / 11), nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        basis = torch.exp(-((x[:, :, None] - self.centres) ** 2))
        return torch.einsum("bik,iko->bo", basis, self.table) + self.base(F.silu(x))


class Experts(nn.Module):
    """Each token goes to the two experts that a router chooses: how many an expert gets, the data decides."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.router, self.head = nn.Linear(32, 32), nn.Linear(32, 4), nn.Linear(32, 8)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.inner(x))
        weights, chosen = self.router(x).softmax(dim=1).topk(2, dim=1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(chosen == i)
            out[token] += weights[token, place, None] * expert(x[token])
        return self.head(x + out)


class Transformer(nn.Module):
    """torch's own encoder and decoder, with masks."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(50, 32), nn.Embedding(50, 32)
        self.body = nn.Transformer(32, 4, 2, 2, 64, batch_first=True)
        self.head = nn.Linear(32, 50)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.head(self.body(self.source(source), self.target(target), tgt_mask=causal, tgt_is_causal=True))


class PointNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = ((3, 32), (32, 64), (64, 128))
        self.convs = nn.ModuleList(nn.Conv1d(i, o, 1) for i, o in widths)
        self.norms = nn.ModuleList(nn.BatchNorm1d(o) for _, o in widths)
        self.middle, self.head = nn.Linear(128, 64), nn.Linear(64, 10)

    def forward(self, points: Tensor) -> Tensor:
        x = points.transpose(1, 2)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)))
        return self.head(F.relu(self.middle(x.max(dim=2).values)))


class Atari(nn.Module):
    """A value and a policy head over the convolutions of DQN, for frames of 0 to 255."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(4, 32, 8, 4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, 2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.middle, self.policy, self.value = nn.Linear(3136, 128), nn.Linear(128, 6), nn.Linear(128, 1)

    def forward(self, frames: Tensor) -> dict[str, Tensor]:
        x = F.relu(self.middle(self.body(frames.float() / 255.0)))
        return {"logits": self.policy(x), "value": self.value(x).squeeze(1)}


@dataclass
class Action:
    """What the policy gives, in a class of its own."""

    mean: Tensor
    deviation: Tensor
    extra: dict[str, Any] = field(default_factory=dict)


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(17, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.mean, self.deviation = nn.Linear(64, 6), nn.Linear(64, 6)

    def forward(self, state: Tensor) -> Action:
        x = self.body(state)
        return Action(torch.tanh(self.mean(x)), self.deviation(x).clamp(-5, 2).exp(), {"features": x})


class Seq2Seq(nn.Module):
    """A recurrent encoder, and a cell that attends to it in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder = nn.Embedding(40, 32), nn.GRU(32, 32, batch_first=True)
        self.cell, self.mix, self.head = nn.GRUCell(64, 32), nn.Linear(64, 32), nn.Linear(32, 40)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, state = self.encoder(self.embed(source))
        state, words, outputs = state[0], self.embed(target), []
        for t in range(target.shape[1]):
            weights = torch.bmm(memory, state[:, :, None]).softmax(dim=1)
            context = (weights * memory).sum(dim=1)
            state = self.cell(torch.cat((words[:, t], context), dim=1), state)
            outputs.append(self.head(torch.tanh(self.mix(torch.cat((state, context), dim=1)))))
        return torch.stack(outputs, dim=1)


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.head = nn.Linear(32, 16)

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        return F.cosine_similarity(self.head(self.body(one)), self.head(self.body(two)))


class FourierOperator(nn.Module):
    """Weights in the frequency domain beside 1x1 convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.skip = nn.Conv2d(1, 16, 1), nn.Conv2d(16, 16, 1)
        self.spectrum = nn.Parameter(torch.randn(16, 16, 4, 4, dtype=torch.complex64) / 16)
        self.middle, self.out = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        low = torch.fft.rfft2(x)
        out = torch.zeros_like(low)
        out[:, :, :4, :4] = torch.einsum("bixy,ioxy->boxy", low[:, :, :4, :4], self.spectrum)
        x = F.gelu(torch.fft.irfft2(out, s=x.shape[2:]) + self.skip(x))
        return self.out(F.gelu(self.middle(x)))


class SpeechGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(i, 2 * o, 5, padding=2) for i, o in ((40, 32), (32, 32)))
        self.rnn, self.head = nn.LSTM(32, 48, batch_first=True), nn.Linear(48, 29)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        for conv in self.convs:
            x = F.glu(conv(x), dim=1)
        x, state = self.rnn(x.transpose(1, 2))
        return self.head(x).log_softmax(dim=2), state


class Spectrogram(nn.Module):
    """A sound's short-time Fourier transform, its logarithm, and convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(128))
        self.one, self.two, self.head = nn.Conv2d(1, 16, 3, 2), nn.Conv2d(16, 32, 3, 2), nn.Linear(32, 10)

    def forward(self, sound: Tensor) -> Tensor:
        spectrum = torch.stft(sound, 128, 64, window=self.window, return_complex=True).abs()
        x = torch.log(spectrum + 1e-3)[:, None]
        return self.head(F.relu(self.two(F.relu(self.one(x)))).mean(dim=(2, 3)))


class SubPixel(nn.Sequential):
    """ESPCN's."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 5, padding=2), nn.Tanh(), nn.Conv2d(32, 16, 3, padding=1), nn.Tanh(),
            nn.Conv2d(16, 9, 3, padding=1), nn.PixelShuffle(3), nn.Sigmoid(),
        )  # fmt: skip


class TabNet(nn.Module):
    """Steps that choose columns by a mask and add up what gated layers make of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(20)
        self.choose = nn.ModuleList(nn.Linear(16, 20) for _ in range(2))
        self.steps = nn.ModuleList(nn.Linear(20, 64) for _ in range(3))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        out, state = F.glu(self.steps[0](x), dim=1).chunk(2, dim=1)
        prior = torch.ones_like(x)
        for choose, step in zip(self.choose, self.steps[1:], strict=True):
            mask = (choose(state) * prior).softmax(dim=1)
            prior = prior * (1.3 - mask)
            one, state = F.glu(step(mask * x), dim=1).chunk(2, dim=1)
            out = out + F.relu(one)
        return self.head(out)


def old_weight_norm(layer: nn.Module) -> nn.Module:
    """By a hook that computes the weight before each call, as in models from before parametrisations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer)


class CausalConvs(nn.Module):
    """A TCN: causal by padding on the left, weight norms of the older kind."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList()
        for i, d in enumerate((1, 2, 4, 8)):
            self.convs.append(old_weight_norm(nn.Conv1d(16 if i else 8, 16, 3, dilation=d)))
        self.skip, self.head = nn.Conv1d(8, 16, 1), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.skip(x)
        for conv in self.convs:
            y = F.relu(conv(F.pad(x, (2 * conv.dilation[0], 0))))
            x = y + (skip if x.shape[1] == 8 else x)
        return self.head(x[:, :, -1])


class VAE(nn.Module):
    """The noise is an input, so that a run can be repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten()
        )
        self.mean, self.spread, self.back = nn.Linear(512, 8), nn.Linear(512, 8), nn.Linear(8, 512)
        self.decoder = nn.Sequential(
            nn.Unflatten(1, (32, 4, 4)),
            nn.ConvTranspose2d(32, 16, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(16, 1, 4, 2, 1),
        )

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(x)
        mean, spread = self.mean(hidden), self.spread(hidden)
        return torch.sigmoid(self.decoder(F.relu(self.back(mean + noise * torch.exp(0.5 * spread))))), mean, spread


class WaveNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, 16, 1)
        self.gates = nn.ModuleList(nn.Conv1d(16, 32, 2, dilation=2**i) for i in range(4))
        self.residual = nn.ModuleList(nn.Conv1d(16, 16, 1) for _ in range(4))
        self.skips = nn.ModuleList(nn.Conv1d(16, 16, 1) for _ in range(4))
        self.one, self.two = nn.Conv1d(16, 16, 1), nn.Conv1d(16, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, out = self.stem(x), torch.zeros(())
        for i, (gate, residual, skip) in enumerate(zip(self.gates, self.residual, self.skips, strict=True)):
            a, b = gate(F.pad(x, (2**i, 0))).chunk(2, dim=1)
            y = torch.tanh(a) * torch.sigmoid(b)
            x, out = x + residual(y), out + skip(y)
        return self.two(F.relu(self.one(F.relu(out))))


class YOLO(nn.Module):
    """A C2f backbone, a pyramid, and heads whose boxes are decoded in the model."""

    class Conv(nn.Module):
        def __init__(self, i: int, o: int, k: int = 3, s: int = 1) -> None:
            super().__init__()
            self.conv, self.bn, self.act = (
                nn.Conv2d(i, o, k, s, k // 2, bias=False),
                nn.BatchNorm2d(o),
                nn.SiLU(inplace=True),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.bn(self.conv(x)))

    class C2f(nn.Module):
        def __init__(self, c: int) -> None:
            super().__init__()
            self.one, self.two = YOLO.Conv(c, c, 1), YOLO.Conv(3 * c // 2, c, 1)
            self.inner = nn.ModuleList([nn.Sequential(YOLO.Conv(c // 2, c // 2), YOLO.Conv(c // 2, c // 2))])

        def forward(self, x: Tensor) -> Tensor:
            y = list(self.one(x).chunk(2, 1))
            y.extend(block(y[-1]) for block in self.inner)
            return self.two(torch.cat(y, 1))

    def __init__(self) -> None:
        super().__init__()
        conv = self.Conv
        self.stem, self.down1, self.down2, self.down3 = (
            conv(3, 16, 3, 2),
            conv(16, 32, 3, 2),
            conv(32, 64, 3, 2),
            conv(64, 64, 3, 2),
        )
        self.c1, self.c2, self.c3, self.merge = self.C2f(32), self.C2f(64), self.C2f(64), conv(128, 64, 1)
        self.spp = conv(256, 64, 1)
        self.boxes = nn.ModuleList(nn.Conv2d(64, 4, 1) for _ in range(2))
        self.classes = nn.ModuleList(nn.Conv2d(64, 5, 1) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        middle = self.c2(self.down2(self.c1(self.down1(self.stem(x)))))
        deep = self.c3(self.down3(middle))
        pooled = [deep]
        for _ in range(3):
            pooled.append(F.max_pool2d(pooled[-1], 5, 1, 2))
        deep = self.spp(torch.cat(pooled, 1))
        middle = self.merge(torch.cat((middle, F.interpolate(deep, scale_factor=2.0)), 1))
        raw = [torch.cat((b(f), c(f)), 1) for b, c, f in zip(self.boxes, self.classes, (middle, deep), strict=True)]
        decoded = []
        for level, stride in zip(raw, (8, 16), strict=True):
            height, width = level.shape[2:]
            y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
            boxes, scores = level.split((4, 5), 1)
            centre = (boxes[:, :2].sigmoid() + torch.stack((x, y))) * stride
            decoded.append(torch.cat((centre, boxes[:, 2:].sigmoid() * stride * 4, scores.sigmoid()), 1).flatten(2))
        return torch.cat(decoded, 2), raw


class Rotary(nn.Module):
    """A Llama-like decoder with a cache of its own: norms by root mean square, rotary positions, shared key heads."""

    class Layer(nn.Module):
        def __init__(self, d: int, heads: int, shared: int) -> None:
            super().__init__()
            self.heads, self.shared = heads, shared
            self.q, self.k, self.v = (nn.Linear(d, n * d // heads, bias=False) for n in (heads, shared, shared))
            self.o = nn.Linear(d, d, bias=False)
            self.gate, self.up, self.down = (
                nn.Linear(i, o, bias=False) for i, o in ((d, 2 * d), (d, 2 * d), (2 * d, d))
            )
            self.norm1, self.norm2 = nn.RMSNorm(d), nn.RMSNorm(d)

        def forward(
            self, x: Tensor, angles: Tensor, cache: tuple[Tensor, Tensor] | None
        ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            y = self.norm1(x)
            q, k, v = (
                layer(y).unflatten(2, (n, -1)).transpose(1, 2)
                for layer, n in ((self.q, self.heads), (self.k, self.shared), (self.v, self.shared))
            )
            q, k = rotate(q, angles), rotate(k, angles)
            if cache is not None:
                k, v = torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None, enable_gqa=True)
            x = x + self.o(attended.transpose(1, 2).flatten(2))
            y = self.norm2(x)
            return x + self.down(F.silu(self.gate(y)) * self.up(y)), (k, v)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(60, 48), nn.RMSNorm(48), nn.Linear(48, 60, bias=False)
        self.layers = nn.ModuleList(self.Layer(48, 4, 2) for _ in range(2))
        self.register_buffer("frequencies", 100.0 ** (-torch.arange(6) / 6), persistent=False)

    def forward(self, ids: Tensor, cache: list[tuple[Tensor, Tensor]] | None = None) -> dict[str, Any]:
        x, past = self.embed(ids), cache[0][0].shape[2] if cache else 0
        angles = (past + torch.arange(ids.shape[1]))[:, None] * self.frequencies
        kept = []
        for i, layer in enumerate(self.layers):
            x, pair = layer(x, angles, cache[i] if cache else None)
            kept.append(pair)
        return {"logits": self.head(self.norm(x)), "cache": kept}


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn each pair of values, halves apart, by the angles of its position."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), dim=-1)


def prefill_and_step(model: nn.Module, batch: Batch) -> Any:
    """A prompt, then two tokens one by one on the cache."""
    prompt, following = batch
    outputs = [model(prompt)]
    for t in range(following.shape[1]):
        outputs.append(model(following[:, t : t + 1], outputs[-1]["cache"]))
    return outputs


class UNet(nn.Module):
    """In channels_last, for any size: what is one pixel short is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = self._two(3, 12), self._two(12, 24)
        self.up, self.merge, self.out = nn.ConvTranspose2d(24, 12, 2, 2), self._two(24, 12), nn.Conv2d(12, 2, 1)

    @staticmethod
    def _two(i: int, o: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(i, o, 3, padding=1, bias=False),
            nn.BatchNorm2d(o),
            nn.ReLU(inplace=True),
            nn.Conv2d(o, o, 3, padding=1),
            nn.ELU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        one = self.down1(x)
        two = self.up(self.down2(F.avg_pool2d(one, 2)))
        two = F.pad(two, (0, one.shape[3] - two.shape[3], 0, one.shape[2] - two.shape[2]))
        return self.out(self.merge(torch.cat((one, two), 1)))


def ids(vocabulary: int, *shape: int) -> Callable[[int], Tensor]:
    return lambda size: torch.randint(vocabulary, (size, *shape))


def together(*parts: Callable[[int], Any]) -> Callable[[int], tuple[Any, ...]]:
    """Several arguments of a batch."""
    return lambda size: tuple(part(size) for part in parts)


def graph_edges(size: int) -> Tensor:
    """Forty random edges for each twenty nodes."""
    return torch.randint(20 * size, (2, 40 * size))


def graph(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes, edges, and features of the edges."""
    return torch.randn(20 * size, 8), graph_edges(size), torch.randn(40 * size, 3)


OWN = (
    Entry("own_conformer", Conformer, tensors(40, 64)),
    Entry("own_conv3d_unet", UNet3d, tensors(1, 8, 16, 16), size=2),
    Entry("own_convlstm", ConvLSTM, tensors(4, 3, 16, 16)),
    Entry("own_crnn_ctc", CRNN, tensors(1, 32, 64)),
    Entry("own_diffusion_unet", DiffusionUNet, together(images(16), ids(1000))),
    Entry("own_dlrm", DLRM, together(tensors(13), ids(100, 4, 3)), size=64, other_size=33),
    Entry("own_early_exit", EarlyExit, images(24)),
    Entry("own_edsr", EDSR, images(24)),
    Entry("own_flow_gridsample", FlowWarp, together(images(24), images(24))),
    Entry("own_gan_generator", Generator, tensors(32)),
    Entry("own_gnn_scatter", MessagePassing, graph),
    Entry("own_hifigan", HifiGAN, tensors(40, 20)),
    Entry("own_kan_custom", KAN, tensors(16), size=32),
    Entry("own_llama_cache", Rotary, together(ids(60, 10), ids(60, 2)), prefill_and_step, example=lambda b: (b[0],)),
    Entry("own_moe", Experts, tensors(32), size=32, other_size=17),
    Entry("own_nn_transformer", Transformer, together(ids(50, 12), ids(50, 9))),
    Entry("own_pointnet", PointNet, tensors(128, 3)),
    Entry("own_pyg_gcn", GCN, lambda n: (torch.randn(20 * n, 16), graph_edges(n))),
    Entry("own_rl_atari", Atari, lambda n: torch.randint(256, (n, 4, 84, 84), dtype=torch.uint8)),
    Entry("own_rl_policy", Policy, tensors(17), size=32),
    Entry("own_seq2seq_attn", Seq2Seq, together(ids(40, 10), ids(40, 6))),
    Entry("own_siamese", Siamese, together(images(28, 1), images(28, 1))),
    Entry("own_spectral_fno", FourierOperator, images(16, 1)),
    Entry("own_speech_glu_lstm", SpeechGLU, tensors(40, 50)),
    Entry("own_stft_front", Spectrogram, tensors(2048)),
    Entry("own_superres", SubPixel, images(20, 1)),
    Entry("own_tabnet_like", TabNet, tensors(20), size=64, other_size=33),
    Entry("own_tcn_weightnorm", CausalConvs, tensors(8, 40)),
    Entry("own_unet_odd", UNet, lambda n: torch.randn(n, 3, 23, 25).to(memory_format=torch.channels_last)),
    Entry("own_vae", VAE, together(images(16, 1), tensors(8))),
    Entry("own_wavenet", WaveNet, tensors(1, 200)),
    Entry("own_yolo_like", YOLO, images(64)),
)  # fmt: skip
