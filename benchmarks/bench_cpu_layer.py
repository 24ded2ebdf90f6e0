"""Time the CPU layer beside PyTorch's own expert loops in bf16 and fp32, alternating in one run.

    python benchmarks/bench_cpu_layer.py --out benchmarks/records/cpu_layer.json

Correctness is checked first, against the reference. Weights are cold: successive calls use other layers, together
larger than the last-level cache. A call is hidden states and routing in, combined output out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from int8moe.backends.cpu.support import CPUExpertsInt8
from int8moe.backends.reference.support import ReferenceExperts
from int8moe.config import FusedMoEConfig
from int8moe.device import Platform
from int8moe.quant_config import int8_w8a8_moe_quant_config

SHAPES = {"olmoe": (64, 8, 2048, 1024), "qwen3-30b": (128, 8, 2048, 768), "tiny": (8, 2, 512, 1024)}
COLD_BYTES = 256 << 20


class Layer:
    """One layer's weights in the three forms that are timed."""

    def __init__(self, shape: tuple[int, int, int, int], seed: int, forms: set[str]) -> None:
        E, topk, H, I = shape
        g = torch.Generator().manual_seed(seed)
        config = FusedMoEConfig(E, topk, H, I, platform=Platform.cpu())
        q13 = torch.randint(-127, 128, (E, 2 * I, H), dtype=torch.int8, generator=g)
        q2 = torch.randint(-127, 128, (E, H, I), dtype=torch.int8, generator=g)
        s13, s2 = torch.rand(E, 2 * I, generator=g) * 1e-3, torch.rand(E, H, generator=g) * 1e-3
        self.float = {}
        for name, dtype in (("torch_bf16", torch.bfloat16), ("torch_fp32", torch.float32)):
            if name in forms:
                self.float[name] = (
                    torch.stack([(q.float() * s[:, None]).to(dtype) for q, s in zip(q13, s13, strict=True)]),
                    torch.stack([(q.float() * s[:, None]).to(dtype) for q, s in zip(q2, s2, strict=True)]),
                )
        quant = int8_w8a8_moe_quant_config(s13, s2)
        if "reference" in forms:
            self.reference = ReferenceExperts(config, quant)
            self.reference.process_weights_after_loading(SimpleNamespace(w13_weight=q13, w2_weight=q2))
        self.ours = CPUExpertsInt8(config, quant)
        self.ours.process_weights_after_loading(SimpleNamespace(w13_weight=q13, w2_weight=q2))

    def call(self, form: str, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if form == "int8moe":
            return self.ours.apply(x, weights, ids)
        return torch_loop(*self.float[form], x, weights, ids)


def torch_loop(
    w13: torch.Tensor, w2: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """PyTorch's usual expert loop: rows sorted by expert, two linears each, index_add."""
    flat = ids.flatten()
    order = flat.argsort()
    token = order // ids.shape[1]
    counts = torch.bincount(flat, minlength=w13.shape[0]).tolist()
    x, out = x.to(w13.dtype), torch.zeros_like(x, dtype=w13.dtype)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            rows = token[start : start + count]
            gate, up = F.linear(x[rows], w13[expert]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, w2[expert])
            out.index_add_(0, rows, y * weights.flatten()[order[start : start + count], None].to(y.dtype))
            start += count
    return out


def timed(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="1,4,16,64,256")
    parser.add_argument("--forms", default="int8moe,torch_bf16,torch_fp32")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for one cell, all forms together")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--out")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    forms, rows = args.forms.split(","), []
    for name in args.shapes.split(","):
        E, topk, H, I = shape = SHAPES[name]
        layer_bytes = 3 * E * H * I
        count = max(2, min(24, COLD_BYTES // layer_bytes + 1))
        if layer_bytes * 7 * count > 12 << 30:  # int8, bf16 and fp32 of every layer
            count = max(1, (12 << 30) // (layer_bytes * 7))
        layers = [Layer(shape, seed, {*forms, "reference"} if seed == 0 else set(forms)) for seed in range(count)]
        isa = layers[0].ours._run.isa
        for M in map(int, args.tokens.split(",")):
            g = torch.Generator().manual_seed(M)
            calls = []
            for _ in range(16):
                x = torch.randn(M, H, generator=g).bfloat16()
                weights, ids = torch.rand(M, E, generator=g).softmax(-1).topk(topk, dim=-1)
                calls.append((x, weights.float().contiguous(), ids))
            if M <= 16:
                want = layers[0].reference.apply(*calls[0])
                assert torch.equal(layers[0].call("int8moe", *calls[0]), want), "the kernel differs from the reference"
            times: dict[str, list[float]] = {form: [] for form in forms}
            for form in forms:
                layers[-1].call(form, *calls[0])
            begin, turn = time.perf_counter(), 0
            while time.perf_counter() - begin < args.seconds or turn < 3:
                for form in forms:
                    layer, call = layers[turn % count], calls[turn % 16]
                    times[form].append(timed(lambda: layer.call(form, *call)))  # noqa: B023
                turn += 1
            touched = statistics.mean(len(ids.unique()) for _, _, ids in calls) * 3 * H * I
            row = {
                "shape": name, "E": E, "topk": topk, "H": H, "I": I, "M": M, "isa": isa,
                "median_ms": {f: round(statistics.median(t), 4) for f, t in times.items()},
                "quartiles_ms": {f: [round(v, 4) for v in statistics.quantiles(t, n=4)[::2]] for f, t in times.items()},
                "calls": turn,
            }  # fmt: skip
            ours = row["median_ms"]["int8moe"]
            row["int8_bytes_gbps"] = round(touched / ours / 1e6, 2)
            row["int8_gops"] = round(2 * M * topk * 3 * H * I / ours / 1e6, 1)
            row["faster_than"] = {f: round(row["median_ms"][f] / ours, 2) for f in forms if f != "int8moe"}
            rows.append(row)
            print(
                json.dumps(
                    {k: row[k] for k in ("shape", "M", "median_ms", "int8_bytes_gbps", "int8_gops", "faster_than")}
                ),
                flush=True,
            )
    record = {
        "date": datetime.date.today().isoformat(), "machine": Platform.cpu().name, "cores": os.cpu_count(),
        "threads": torch.get_num_threads(), "isa": isa, "torch": torch.__version__, "python": platform.python_version(),
        "rows": rows,
    }  # fmt: skip
    if args.out:
        with open(args.out, "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
