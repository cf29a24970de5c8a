"""The networks of the benchmark cases, written as a user of PyTorch writes them, of torch alone."""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def perceptron(*widths: int) -> nn.Module:
    """Linear layers from each width to the next with ReLU between them."""
    modules: list[nn.Module] = []
    for index, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        if index:
            modules.append(nn.ReLU())
        modules.append(nn.Linear(inputs, outputs))
    return nn.Sequential(*modules)


def mlp(layers: int, width: int) -> nn.Module:
    """`layers` linear layers of `width` with ReLU between them; (N, width) -> (N, width)."""
    return perceptron(*[width] * (layers + 1))


def small_network(classes: int) -> nn.Module:
    """Two convolutions, in place of a network that a host takes minutes for."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, classes),
    )


def _normalised(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    """A convolution and its batch norm."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return [convolution, nn.BatchNorm2d(outputs)]


class Residual(nn.Module):
    """Two convolutions of 3x3, or one between two of 1x1 that widen its result four times, beside
    the input; (B, channels, H, W) -> (B, width or 4 width, H / stride, W / stride)."""

    def __init__(self, channels: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        made = 4 * width if bottleneck else width
        if bottleneck:
            parts = [(channels, width, 1, 1), (width, width, 3, stride), (width, made, 1, 1)]
        else:
            parts = [(channels, width, 3, stride), (width, width, 3, 1)]
        modules: list[nn.Module] = []
        for part in parts:
            modules += [*_normalised(*part), nn.ReLU(inplace=True)]
        self.main = nn.Sequential(*modules[:-1])
        same = stride == 1 and made == channels
        self.beside = nn.Sequential(*([] if same else _normalised(channels, made, 1, stride)))
        self.relu = modules[-1]

    def forward(self, x: Tensor) -> Tensor:
        out = self.main(x)
        out += self.beside(x)
        return self.relu(out)


def _resnet(depths: tuple[int, ...], bottleneck: bool, classes: int, width: int = 64) -> nn.Module:
    """A ResNet as torchvision's: the modules, their order and first values."""
    stem = nn.MaxPool2d(3, stride=2, padding=1)
    modules = [*_normalised(3, width, 7, 2), nn.ReLU(inplace=True), stem]
    channels = width
    for stage, depth in enumerate(depths):
        for index in range(depth):
            stride = 2 if stage and not index else 1
            modules.append(Residual(channels, width << stage, stride, bottleneck))
            channels = (width << stage) * (4 if bottleneck else 1)
    modules += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    model = nn.Sequential(*modules)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def resnet18(small_images: bool) -> nn.Module:
    """ResNet-18, 10 classes; for 32x32 images with a 3x3 stem and no max-pool."""
    model = _resnet((2, 2, 2, 2), bottleneck=False, classes=10)
    if small_images:
        model[0] = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
        model[3] = nn.Identity()
    return model


def resnet50(classes: int) -> nn.Module:
    """ResNet-50, for any size of images."""
    return _resnet((3, 4, 6, 3), bottleneck=True, classes=classes)


def small_resnet(classes: int) -> nn.Module:
    """A ResNet of four bottlenecks."""
    return _resnet((1, 1, 1, 1), bottleneck=True, classes=classes, width=8)


def _windows(x: Tensor, side: int) -> Tensor:
    """The squares of `side` of a map, row by row; (B, H, W, C) -> (B * windows, side^2, C)."""
    batch, height, width, channels = x.shape
    x = x.view(batch, height // side, side, width // side, side, channels)
    return x.transpose(2, 3).reshape(-1, side * side, channels)


class WindowAttention(nn.Module):
    """Attention within each window of a square map, moved by `shift`; (B, S, S, C) -> the same.

    A position's distance to another in its window has a learnt bias. What a shift brings together
    from opposite sides of the map does not attend to each other.
    """

    def __init__(self, width: int, heads: int, size: int, window: int, shift: int) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        span = 2 * window - 1
        self.bias = nn.Parameter(nn.init.trunc_normal_(torch.empty(span * span, heads), std=0.02))
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        places = torch.arange(window)
        row, column = (each.flatten() for each in torch.meshgrid(places, places, indexing="ij"))
        away = [each[:, None] - each + window - 1 for each in (row, column)]
        self.register_buffer("distances", (away[0] * span + away[1]).flatten(), persistent=False)
        side = torch.arange(size)
        part = (side >= size - window).int() + (side >= size - shift)
        parts = _windows((3 * part[:, None] + part).view(1, size, size, 1), window).squeeze(2)
        apart = (parts[:, None] != parts[:, :, None])[:, None] * -100.0
        self.register_buffer("apart", apart if shift else None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        if self.shift:
            x = x.roll((-self.shift, -self.shift), (1, 2))
        x = _windows(x, self.window)
        split = self.qkv(x).view(*x.shape[:2], 3, self.heads, channels // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind()
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(2, 3)
        tokens = x.shape[1]
        scores = scores + self.bias[self.distances].view(tokens, tokens, -1).permute(2, 0, 1)
        if self.apart is not None:
            scores = scores.view(batch, -1, *scores.shape[1:]) + self.apart
            scores = scores.flatten(0, 1)
        x = self.proj((scores.softmax(3) @ v).transpose(1, 2).reshape(x.shape))
        rows, columns = height // self.window, width // self.window
        x = x.view(batch, rows, columns, self.window, self.window, channels).transpose(2, 3)
        x = x.reshape(batch, height, width, channels)
        return x.roll((self.shift, self.shift), (1, 2)) if self.shift else x


class SwinBlock(nn.Module):
    """Attention in windows and a feed-forward network, each behind a norm and beside its input."""

    def __init__(self, width: int, heads: int, size: int, window: int, shift: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = WindowAttention(width, heads, size, window, shift)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Merging(nn.Module):
    """Each square of four positions becomes one; (B, S, S, C) -> (B, S / 2, S / 2, 2 C)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)
        self.norm = nn.LayerNorm(4 * width)

    def forward(self, x: Tensor) -> Tensor:
        corners = [x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
        return self.reduction(self.norm(torch.cat(corners, 3)))


class Swin(nn.Module):
    """A Swin transformer, no stochastic depth; (B, 3, image, image) -> (B, classes)."""

    def __init__(
        self,
        classes: int,
        image: int = 224,
        width: int = 96,
        depths: tuple[int, ...] = (2, 2, 6, 2),
        heads: tuple[int, ...] = (3, 6, 12, 24),
        window: int = 7,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.patch_norm = nn.LayerNorm(width)
        size = image // 4
        modules: list[nn.Module] = []
        for stage, depth in enumerate(depths):
            if stage:
                modules.append(Merging(width))
                width, size = 2 * width, size // 2
            for index in range(depth):
                # A map that is one window has nowhere to move it.
                shift = window // 2 if index % 2 and size > window else 0
                modules.append(SwinBlock(width, heads[stage], size, window, shift))
        self.stages = nn.Sequential(*modules)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_norm(self.patches(images).permute(0, 2, 3, 1))
        return self.head(self.norm(self.stages(x)).mean((1, 2)))


def swin_tiny(classes: int) -> Swin:
    """Swin-T for images of 224x224."""
    return Swin(classes)


def small_swin(classes: int) -> Swin:
    """The same in little, for images of 32x32."""
    return Swin(classes, 32, 16, (2, 2), (2, 4), 4)


def _heads(x: Tensor, heads: int) -> Tensor:
    """(B, T, width) -> (B, heads, T, width / heads)."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def _merged(x: Tensor) -> Tensor:
    """(B, heads, T, width / heads) -> (B, T, width)."""
    return x.transpose(1, 2).flatten(2)


def _dropout(p: float) -> nn.Module:
    """One of 0 draws numbers, too."""
    return nn.Dropout(p) if p else nn.Identity()


class Block(nn.Module):
    """A pre-norm transformer block; (B, T, width) -> (B, T, width)."""

    def __init__(
        self, width: int, heads: int, causal: bool, eps: float = 1e-5, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.norm_1 = nn.LayerNorm(width, eps)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width, eps)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = _dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (_heads(part, self.heads) for part in self.qkv(self.norm_1(x)).chunk(3, 2))
        p = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=self.causal)
        x = x + self.drop(self.proj(_merged(mixed)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm_2(x)))))


class Gpt(nn.Module):
    """A GPT-2-like decoder; int64 (B, T) -> float (B, T, vocabulary)."""

    def __init__(
        self,
        layers: int = 6,
        heads: int = 6,
        width: int = 384,
        tokens: int = 256,
        vocabulary: int = 256,  # bytes
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(tokens, width)
        self.drop = _dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(width, heads, True, dropout=dropout) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.token(tokens) + self.position(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt2(dropout: float = 0.0) -> Gpt:
    """GPT-2 of 124 million parameters, its vocabulary rounded up to a multiple of 64."""
    model = Gpt(12, 12, 768, 1024, vocabulary=50304, dropout=dropout)
    model.head.weight = model.token.weight
    return model


class Vit(nn.Module):
    """A vision transformer, no dropout; (B, 3, image, image) -> (B, classes)."""

    def __init__(
        self,
        classes: int,
        image: int = 224,
        patch: int = 16,
        width: int = 768,
        layers: int = 12,
        heads: int = 12,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.first = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, (image // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(Block(width, heads, False, 1e-6) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, 1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(len(x), -1, -1), x), 1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


def vit_base(classes: int) -> Vit:
    """ViT-B/16 for images of 224x224."""
    return Vit(classes)


def small_vit(classes: int) -> Vit:
    """The same in little, for images of 32x32."""
    return Vit(classes, 32, 8, 32, 2, 2)


class BertLayer(nn.Module):
    """A post-norm transformer layer; (B, T, width) -> (B, T, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)
        self.norm_1 = nn.LayerNorm(width, 1e-12)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.norm_2 = nn.LayerNorm(width, 1e-12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (_heads(part(x), self.heads) for part in (self.query, self.key, self.value))
        x = self.norm_1(x + self.proj(_merged(F.scaled_dot_product_attention(q, k, v))))
        return self.norm_2(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    """BERT that guesses masked words, no dropout, whole sequences.

    int64 tokens (B, T) and places of the masked ones (B, M) -> float (B, M, vocabulary).
    """

    def __init__(
        self, layers: int, heads: int, width: int, tokens: int = 512, vocabulary: int = 30522
    ) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.token = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.token.weight, std=0.02)  # it is the head's, too
        self.position = nn.Embedding(tokens, width)
        self.segment = nn.Embedding(2, width)
        self.norm_1 = nn.LayerNorm(width, 1e-12)
        self.layers = nn.Sequential(*(BertLayer(width, heads) for _ in range(layers)))
        self.transform = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width, 1e-12)
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor, masked: Tensor) -> Tensor:
        x = self.token(tokens) + self.segment(torch.zeros_like(tokens))
        x = x + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.layers(self.norm_1(x))
        x = x.gather(1, masked[:, :, None].expand(-1, -1, x.shape[2]))
        return self.head(self.norm_2(F.gelu(self.transform(x))))


def bert_base() -> Bert:
    """BERT-base."""
    return Bert(12, 12, 768)


def bert_large() -> Bert:
    """BERT-large."""
    return Bert(24, 16, 1024)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair of x, half a head apart, turned by the angle of its position."""
    left, right = x.chunk(2, 3)
    return x * cos + torch.cat((-right, left), 3) * sin


class LlamaLayer(nn.Module):
    """Attention of few keys for many queries, and a gated feed-forward; (B, T, width) -> same."""

    def __init__(self, width: int, heads: int, keys: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.keys = heads, keys
        narrow = width // heads * keys
        self.norm_1 = nn.RMSNorm(width, 1e-5)
        self.query = nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, narrow, bias=False) for _ in range(2))
        self.proj = nn.Linear(width, width, bias=False)
        self.norm_2 = nn.RMSNorm(width, 1e-5)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm_1(x)
        q = _turned(_heads(self.query(y), self.heads), cos, sin)
        k = _turned(_heads(self.key(y), self.keys), cos, sin)
        v = _heads(self.value(y), self.keys)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.keys != self.heads
        )
        x = x + self.proj(_merged(y))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A Llama-like decoder; int64 (B, T) -> float (B, T, vocabulary)."""

    def __init__(
        self,
        layers: int,
        heads: int,
        keys: int,
        width: int,
        hidden: int,
        tokens: int,
        vocabulary: int,
        theta: float = 10_000.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.token = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.token.weight, std=0.02)
        self.layers = nn.ModuleList(LlamaLayer(width, heads, keys, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width, 1e-5)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.token.weight
        size = width // heads
        turns = theta ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(tokens), turns).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        cos, sin = (each[: tokens.shape[1]].to(x.dtype) for each in (self.cos, self.sin))
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def llama_160m() -> Llama:
    """A Llama of 162 million parameters, for 1,024 tokens."""
    return Llama(12, 12, 12, 768, 3072, 1024, 32_000)


def llama_1b() -> Llama:
    """A Llama of 1.24 billion parameters, of the sizes of Llama 3.2 1B, for 2,048 tokens."""
    return Llama(16, 32, 8, 2048, 8192, 2048, 128_256, theta=500_000.0, tied=True)


class Dlrm(nn.Module):
    """A network of recommendations: tables of features, whose bags of ids are summed, and products
    of all pairs of what they and a few numbers give.

    float (B, 13) and int64 (tables, B, ids) -> float (B,).
    """

    def __init__(self, tables: int, rows: int = 50_000, width: int = 64) -> None:
        super().__init__()
        self.tables, self.rows = tables, rows
        self.numbers = perceptron(13, 512, 256, width)
        self.features = nn.ModuleList(
            nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables)
        )
        for table in self.features:
            nn.init.normal_(table.weight, std=0.01)
        pairs = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("pairs", pairs[0] * (tables + 1) + pairs[1], persistent=False)
        self.head = perceptron(width + pairs.shape[1], 512, 256, 1)

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        dense = F.relu(self.numbers(numbers))
        found = [table(each) for table, each in zip(self.features, ids, strict=True)]
        vectors = torch.stack([dense, *found], 1)
        products = (vectors @ vectors.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        return self.head(torch.cat((dense, products), 1)).squeeze(1)


class Lstm(nn.Module):
    """nn.LSTM of two layers and a head on the last step; (T, B, width) -> (B, 10)."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, num_layers=2)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.lstm(x)
        return self.head(output[-1])


class UnrolledLstm(nn.Module):
    """The same network with the recurrence written by hand, step by step."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.width = width
        self.inputs = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(2))
        self.recurrent = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(2))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        sequence = list(x.unbind(0))
        for from_input, from_hidden in zip(self.inputs, self.recurrent, strict=True):
            hidden = x.new_zeros(x.shape[1], self.width)
            cell = x.new_zeros(x.shape[1], self.width)
            for index, value in enumerate(sequence):
                gates = from_input(value) + from_hidden(hidden)
                enter, forget, candidate, leave = gates.chunk(4, dim=1)
                cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(candidate)
                hidden = torch.sigmoid(leave) * torch.tanh(cell)
                sequence[index] = hidden
        return self.head(sequence[-1])


def feed_forward_blocks() -> nn.Module:
    """Two times (LayerNorm, 384 -> 1536 -> 384 with GELU); (N, 384) -> (N, 384)."""
    modules: list[nn.Module] = []
    for _ in range(2):
        modules += [nn.LayerNorm(384), nn.Linear(384, 1536), nn.GELU(), nn.Linear(1536, 384)]
    return nn.Sequential(*modules)


def pointwise_chain(a: Tensor, b: Tensor) -> Tensor:
    """Twenty elementwise operators, seven of them transcendental, on two equal shapes."""
    x = a * b
    y = a + b
    x = torch.tanh(x)
    y = torch.exp(-torch.abs(y))
    z = x * y
    w = torch.sin(z)
    z = torch.erf(w)
    z = z + x
    u = torch.sigmoid(z)
    u = u * b
    v = torch.log1p(torch.abs(u))
    v = v - y
    w = torch.cos(v)
    w = torch.clamp(w, -0.9, 0.9)
    return torch.sqrt(w * w + 1.0)
