"""The benchmark cases for GPUs. Their programs are in trainings.py."""

from __future__ import annotations

from typing import Any

from benchmarks.case import LESS_PRECISE, Case, Tolerance

# Each mode has its own stream of random numbers.
OTHER_DRAWS = Tolerance(5e-2, 0.1, 0.1)
WORDS = {"float32": "tf32", "float16": "fp16 with a scaler", "bfloat16": "bf16"}


def _case(
    name: str, title: str, *program: Any, tolerance: Tolerance = LESS_PRECISE, **options: Any
) -> Case:
    return Case(name, title, program=program, tolerance=tolerance, **options)


def _bfloat16(*arguments: Any, **options: Any) -> Case:
    return _case(*arguments, precision="bfloat16", **options)


def _resnet50(name: str, rows: int, precision: str = "float16", **options: Any) -> Case:
    title = f"ResNet-50, batch {rows}, 224^2, {WORDS[precision]}, SGD momentum 0.9"
    arguments = (name, title, "images", "resnet50", rows)
    return _case(*arguments, precision=precision, convolutional=True, **options)


def _swin(name: str, rows: int, precision: str = "float16", **options: Any) -> Case:
    title = f"Swin-T, batch {rows}, 224^2, {WORDS[precision]}, AdamW"
    return _case(name, title, "images", "swin_tiny", rows, precision=precision, **options)


def _vit(rows: int, **options: Any) -> Case:
    title = f"ViT-B/16, batch {rows}, 224^2, bf16, AdamW"
    musts = {"gpu_must": {"eager_tuned": 1.1}, "gpu_goal": 1.25}
    return _bfloat16(f"vit_{rows}", title, "images", "vit_base", rows, **musts, **options)


def _bert(size: str, rows: int, tokens: int, **options: Any) -> Case:
    title = f"BERT-{size}, {tokens} tokens, batch {rows}, masked words, bf16, AdamW"
    arguments = (f"bert_{size}_{rows}", title, "masked_text", f"bert_{size}", rows, tokens)
    return _bfloat16(*arguments, gpu_must={"eager_tuned": 1.15}, gpu_goal=1.4, **options)


def _gpt2(name: str, rows: int, **options: Any) -> Case:
    title = "12 layers, 12 heads, 768 wide, 50,304 words, 1,024 tokens, "
    title += f"batch {rows}, bf16, AdamW"
    arguments = (name, title, "text", "gpt2", rows, 1024)
    return _bfloat16(*arguments, gpu_must={"compile": 1.0}, gpu_goal=1.1, **options)


def _launch_bound(name: str, title: str, *program: Any, **options: Any) -> Case:
    musts = {"gpu_must": {"eager": 3.0, "compile": 1.0}, "gpu_goal": 10.0}
    return _case(name, title, *program, **musts, **options)


def _dlrm(tables: int, rows: int, precision: str, **options: Any) -> Case:
    name, words, tolerance = f"dlrm_{tables}_{rows}", "fp32", Tolerance()
    if precision == "bfloat16":
        name, words, tolerance = f"{name}_bf16", "bf16", LESS_PRECISE
    title = f"DLRM-like, {tables} EmbeddingBags of 50,000 x 64, 4 ids in each, batch {rows}, "
    title += f"{words}, SGD"
    options |= {"gpu_must": {"eager": 3.0}, "gpu_goal": 10.0 if tables == 100 else None}
    arguments = (name, title, "recommendations", tables, rows)
    return _case(*arguments, precision=precision, tolerance=tolerance, **options)


def _dynamic(what: str, title: str, *program: Any, **options: Any) -> Case:
    return _bfloat16(f"dynamic_{what}", f"GPT-2, bf16, AdamW, {title}", *program, **options)


GPU_CASES = (
    _case(
        "seed",
        "ResNet-50 of 100 classes, batch 64 of a DataLoader with 4 workers, AdamW",
        "seed",
        convolutional=True,
        gpu_must={"eager": 1.25},
        gpu_goal=1.5,
    ),
    _case(
        "seed_amp",
        "the same in fp16 with a scaler",
        "seed",
        precision="float16",
        convolutional=True,
        gpu_must={"eager": 2.0},
        gpu_goal=2.5,
    ),
    _resnet50("resnet50", 256, gpu_must={"compile": 1.0}, gpu_goal=1.3, large=True),
    _resnet50("resnet50_16", 16, gpu_must={"graph": 1.0, "compile": 1.0}, gpu_goal=1.2),
    _resnet50("resnet50_64", 64),
    _resnet50("resnet50_1024", 1024, large=True),
    _resnet50("resnet50_bf16", 256, "bfloat16", large=True),
    _resnet50("resnet50_tf32", 256, "float32", large=True),
    _swin("swin", 160, gpu_must={"eager": 1.83, "compile": 1.0}, gpu_goal=2.2, large=True),
    _swin("swin_16", 16),
    _swin("swin_512", 512, large=True),
    _swin("swin_bf16", 160, "bfloat16", large=True),
    _vit(32),
    _vit(256, large=True),
    _bert("base", 32, 128),
    _bert("base", 256, 128, large=True),
    _bert("large", 8, 384),
    _bert("large", 64, 384, large=True),
    _gpt2("gpt2", 16, large=True),
    _gpt2("gpt2_4", 4),
    _gpt2("gpt2_64", 64, large=True),
    _bfloat16(
        "gpt2_dropout",
        "GPT-2 of 124 M parameters, dropout 0.1, 1,024 tokens, batch 4, bf16, AdamW",
        *("text", "gpt2_dropout", 4, 1024),
        tolerance=OTHER_DRAWS,
    ),
    _bfloat16(
        "llama_160m",
        "Llama-like, 162 M parameters, 1,024 tokens, batch 8, bf16, AdamW",
        *("text", "llama_160m", 8, 1024),
        large=True,
    ),
    _bfloat16(
        "llama_1b",
        "Llama-like, 1.24 G parameters, 2,048 tokens, batch 4, bf16, AdamW",
        *("text", "llama_1b", 4, 2048),
        gpu_must={"compile": 1.0},
        gpu_goal=1.05,
        large=True,
    ),
    _launch_bound(
        "mlp_5",
        "5 layers of 256, batch 64, AdamW",
        *("layers", 5, 256, 64),
        tolerance=Tolerance(),
    ),
    _launch_bound(
        "resnet18_cifar_32",
        "ResNet-18 with a 3x3 stem, batch 32, 32^2, tf32, SGD momentum 0.9, weight decay 5e-4",
        *("little_images", 32),
        convolutional=True,
    ),
    *(
        _dlrm(tables, rows, precision, large=(tables, rows) == (100, 65536))
        for tables in (26, 100)
        for rows in (4096, 65536)
        for precision in ("float32", "bfloat16")
    ),
    *(
        _dynamic(
            str(count),
            f"batch 4, {count} lengths up to 512 in turn",
            *("varied_text", count),
            hand_captured=False,
            period=count,
        )
        for count in (2, 8, 32)
    ),
    _dynamic(
        "padded",
        "batch 4 of a DataLoader, 32 lengths up to 512 in turn, which acc pads to 8",
        *("padded_text", 32),
        hand_captured=False,
        period=32,
    ),
    _dynamic(
        "short",
        "batch 4, 512 tokens, the last batch of eight with one row",
        "short_batches",
        hand_captured=False,
        period=8,
    ),
    _dynamic("item", "batch 4, 512 tokens, each loss read", "text", "gpt2", 4, 512, reads=True),
    _dynamic("parts", "512 tokens, gradients of 4 batches of 4 add up", "text", "gpt2", 4, 512, 4),
)
