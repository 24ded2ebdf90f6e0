"""Time the Triton layer inside a CUDA graph, beside PyTorch's grouped bf16 path and the card's own floor.

    python benchmarks/bench_gpu_layer.py --out benchmarks/records/gpu_layer.json

Correctness first: the whole batch equals `ReferenceExperts` bit for bit on a sample of its tokens, each sampled token alone
gives the same bits, and the output buffer is poisoned before. The floor is the larger of int8 bytes of the experts touched
over the measured copy rate and operations over the measured dense int8 rate.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.testing

from int8moe.backends.reference.support import ReferenceExperts
from int8moe.backends.triton.support import TritonExperts
from int8moe.config import FusedMoEConfig
from int8moe.device import Platform
from int8moe.quant_config import int8_w8a8_moe_quant_config, int8_w8a16_moe_quant_config

SHAPES = {
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "olmoe": (64, 8, 2048, 1024),
}


def graph_us(run: Any) -> float:
    """Median microseconds of a replayed CUDA graph of `run`."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return triton.testing.do_bench(graph.replay, warmup=10, rep=40, return_mode="median") * 1e3


def grouped_bf16(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """PyTorch's grouped_mm path in bf16: sort, two grouped products, weighted sum."""
    flat = ids.flatten()
    order = flat.argsort()
    counts = torch.zeros(w13.shape[0], dtype=torch.int32, device=x.device).scatter_add_(
        0, flat, torch.ones_like(flat, dtype=torch.int32)
    )
    offsets = counts.cumsum(0, dtype=torch.int32)
    token = order // ids.shape[1]
    gate, up = torch._grouped_mm(x[token], w13.transpose(1, 2), offs=offsets).chunk(2, -1)
    y = torch._grouped_mm(torch.nn.functional.silu(gate) * up, w2.transpose(1, 2), offs=offsets)
    y = y * weights.flatten()[order, None].to(y.dtype)
    return torch.zeros_like(x).index_add_(0, token, y)


def ceilings() -> dict[str, float]:
    """The card's own copy rate (read plus write) and dense int8 rate, measured."""
    a = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    b = torch.empty_like(a)
    copy_ms = triton.testing.do_bench(lambda: b.copy_(a), return_mode="median")
    x = torch.randint(-127, 128, (8192, 8192), dtype=torch.int8, device="cuda")
    mm_ms = triton.testing.do_bench(lambda: torch._int_mm(x, x.t()), return_mode="median")
    return {"copy_tbps": 2 * (1 << 30) / copy_ms / 1e9, "int_mm_tops": 2 * 8192**3 / mm_ms / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="1,8,32,128,512,2048,8192")
    parser.add_argument("--minutes", type=float, default=4)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    begin, rows = time.monotonic(), []
    machine = Platform.current()
    limits = ceilings()
    record = {
        "date": datetime.date.today().isoformat(), "device": machine.name, "torch": torch.__version__,
        "triton": triton.__version__, "ceilings": limits, "rows": rows,
    }  # fmt: skip
    print(limits, flush=True)
    for name in args.shapes.split(","):
        E, topk, H, I = SHAPES[name]
        g = torch.Generator(device="cuda").manual_seed(0)
        config = FusedMoEConfig(E, topk, H, I, platform=machine)
        q13 = torch.randint(-128, 128, (E, 2 * I, H), dtype=torch.int8, device="cuda", generator=g)
        q2 = torch.randint(-128, 128, (E, H, I), dtype=torch.int8, device="cuda", generator=g)
        s13 = torch.rand(E, 2 * I, device="cuda", generator=g) * 1e-3
        s2 = torch.rand(E, H, device="cuda", generator=g) * 1e-3
        b13 = torch.stack([(q.float() * s[:, None]).bfloat16() for q, s in zip(q13, s13, strict=True)])
        b2 = torch.stack([(q.float() * s[:, None]).bfloat16() for q, s in zip(q2, s2, strict=True)])
        layers = {}
        for label, cls, quant in (
            ("w8a8", TritonExperts, int8_w8a8_moe_quant_config(s13, s2)),
            ("w8a16", TritonExperts, int8_w8a16_moe_quant_config(s13, s2)),
            ("reference", ReferenceExperts, int8_w8a8_moe_quant_config(s13, s2)),
        ):
            layers[label] = cls(config, quant)
            layers[label].process_weights_after_loading(SimpleNamespace(w13_weight=q13, w2_weight=q2))
        for M in map(int, args.tokens.split(",")):
            if time.monotonic() - begin > args.minutes * 60:
                print("time is up", flush=True)
                break
            g = torch.Generator(device="cuda").manual_seed(M)
            x = torch.randn(M, H, device="cuda", generator=g).bfloat16()
            weights, ids = torch.rand(M, E, device="cuda", generator=g).softmax(-1).topk(topk, dim=-1)
            weights = weights.float().contiguous()
            row: dict[str, Any] = {"shape": name, "E": E, "topk": topk, "H": H, "I": I, "M": M}
            try:
                y = layers["w8a8"].apply(x, weights, ids)
                sample = torch.arange(0, M, max(1, M // 6), device="cuda")[:6]
                want = layers["reference"].apply(x[sample], weights[sample], ids[sample])
                row["bits_equal_reference"] = torch.equal(y[sample], want)
                row["alone_equals_batch"] = all(
                    torch.equal(layers["w8a8"].apply(x[t : t + 1], weights[t : t + 1], ids[t : t + 1]), y[t : t + 1])
                    for t in sample.tolist()
                )
                for label in ("w8a8", "w8a16"):
                    row[f"{label}_us"] = round(graph_us(lambda: layers[label].apply(x, weights, ids)), 1)  # noqa: B023
            except Exception as error:
                row["error"] = repr(error)[:400]
            try:
                row["bf16_us"] = round(graph_us(lambda: grouped_bf16(x, b13, b2, weights, ids)), 1)  # noqa: B023
            except Exception as error:
                row["bf16_error"] = repr(error)[:200]
            bytes_us = len(ids.unique()) * 3 * H * I / limits["copy_tbps"] / 1e6
            ops_us = 2 * M * topk * 3 * H * I / limits["int_mm_tops"] / 1e6
            row["floor_us"] = round(max(bytes_us, ops_us), 1)
            rows.append(row)
            print(json.dumps({k: v for k, v in row.items() if k not in ("E", "topk", "H", "I")}), flush=True)
            if args.out:
                args.out.write_text(json.dumps(record, indent=1))
        del layers, q13, q2, b13, b2
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
